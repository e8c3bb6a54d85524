"""Measurements on modules: two modules and data -> numbers.

The modules here measure accuracy. `linting` looks at calibration data, `speed` measures times.
"""

from typing import TYPE_CHECKING, Any

from relayquant.base import lazy

if TYPE_CHECKING:
    from relayquant.analysis.accumulators import AccumulatorReport
    from relayquant.analysis.linting.finding import Finding, Severity
    from relayquant.analysis.linting.lint import measure_growth
    from relayquant.analysis.speed.latency import Latency, measure_latency

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
        "relayquant.analysis.linting.finding": "Finding Severity",
        "relayquant.analysis.speed.latency": "Latency measure_latency",
        "relayquant.analysis.linting.lint": "measure_growth",
        "relayquant.flow.evaluation": "accumulator_report",
    },
)
