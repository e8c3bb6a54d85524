"""Measurements on modules: two modules and data -> numbers."""

from typing import TYPE_CHECKING, Any

from relayquant.base import lazy

if TYPE_CHECKING:
    from relayquant.analysis.accumulators import AccumulatorReport
    from relayquant.analysis.finding import Finding, Severity
    from relayquant.analysis.latency import Latency, measure_latency
    from relayquant.analysis.lint import measure_growth

    accumulator_report: Any

__all__ = [
    "AccumulatorReport",
    "Finding",
    "Latency",
    "Severity",
    "accumulator_report",
    "measure_growth",
    "measure_latency",
]

__getattr__, __dir__ = lazy.gather(
    __name__,
    {
        "relayquant.analysis.accumulators": "AccumulatorReport",
        "relayquant.analysis.finding": "Finding Severity",
        "relayquant.analysis.latency": "Latency measure_latency",
        "relayquant.analysis.lint": "measure_growth",
        "relayquant.flow.evaluation": "accumulator_report",
    },
)
