"""Results for people: tables as text, plots, pages, and progress of long stages."""

from typing import TYPE_CHECKING

from relayquant.base import lazy

if TYPE_CHECKING:
    from relayquant.plots.build import Report
    from relayquant.plots.pictures import (
        plot_error_by_depth,
        plot_latency,
        plot_ranges,
        plot_sensitivity,
    )
    from relayquant.plots.text import compare_table, make_console

__all__ = [
    "Report",
    "compare_table",
    "make_console",
    "plot_error_by_depth",
    "plot_latency",
    "plot_ranges",
    "plot_sensitivity",
]

__getattr__, __dir__ = lazy.gather(
    __name__,
    {
        "relayquant.plots.build": "Report",
        "relayquant.plots.pictures": (
            "plot_error_by_depth plot_latency plot_ranges plot_sensitivity"
        ),
        "relayquant.plots.text": "compare_table make_console",
    },
)
