"""After the data flow: results for people. Tables as text, and progress of what takes long."""

from relayquant.report.analysis import findings_table, sensitivity_table
from relayquant.report.compare import compare_table, plot_compare, plot_ranges
from relayquant.report.progress import ProgressReport
from relayquant.report.text import ledger_table, list_findings, make_console, summary_table

__all__ = [
    "ProgressReport",
    "compare_table",
    "findings_table",
    "ledger_table",
    "list_findings",
    "make_console",
    "plot_compare",
    "plot_ranges",
    "sensitivity_table",
    "summary_table",
]
