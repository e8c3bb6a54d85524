"""After the data flow: results for people. Tables as text, pictures, pages, and progress of what
takes long.
"""

from relayquant.plots.build import Report, make_report
from relayquant.plots.pictures import (
    plot_error_by_depth,
    plot_latency,
    plot_ranges,
    plot_sensitivity,
)
from relayquant.plots.progress import ProgressReport
from relayquant.plots.text import (
    compare_table,
    findings_table,
    ledger_table,
    list_findings,
    make_console,
    sensitivity_table,
    summary_table,
)

__all__ = [
    "ProgressReport",
    "Report",
    "compare_table",
    "findings_table",
    "ledger_table",
    "list_findings",
    "make_console",
    "make_report",
    "plot_error_by_depth",
    "plot_latency",
    "plot_ranges",
    "plot_sensitivity",
    "sensitivity_table",
    "summary_table",
]
