"""After the data flow: findings about calibration data, and operators by the damage they do, as
tables of text.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from relayquant.analysis.lint import Finding, Severity
from relayquant.analysis.sensitivity import SensitivityReport
from relayquant.errors import format_count
from relayquant.plots.terminal_table import Column, Fit, FittedTable
from relayquant.plots.text import stack


def findings_table(findings: Sequence[Finding], title: str = "") -> Group:
    """A line that counts the findings, and one for each."""
    columns = [
        Column("severity", [f.severity.value for f in findings], is_minor=True),
        Column("check", [finding.check for finding in findings]),
        Column("input", [f.where for f in findings], Fit.NAME, is_minor=True),
        Column("what", [finding.what for finding in findings]),
        Column("what to do", [finding.advice for finding in findings]),
    ]
    styles = ["" if f.severity is Severity.INFO else "yellow" for f in findings]
    counts = [(kind, sum(f.severity is kind for f in findings)) for kind in Severity]
    text = ", ".join(f"{count} {kind.value}" for kind, count in counts if count)
    table = [FittedTable(columns, styles)] if findings else []
    return stack(title, Text(text or "nothing looks wrong"), *table)


def sensitivity_table(report: SensitivityReport, title: str = "", rows: int | None = None) -> Group:
    """One line for each operator, the one that does the most damage first; at most `rows`."""
    shown = report.rows[:rows]
    columns = [
        Column("operator", [row.name for row in shown], Fit.NAME),
        Column("op", [row.op.removeprefix("nn.") for row in shown], is_minor=True),
        Column(report.metric, [f"{row.score:.4g}" for row in shown], Fit.NUMBER),
    ]
    samples = format_count(report.samples, "sample")
    first = Text(f"all {len(report.rows)} quantized: {report.score:.4g}, {samples}")
    left = len(report.rows) - len(shown)
    more = [Text(f"not shown: {format_count(left, 'operator')} that cost less")] if left else []
    return stack(title, first, *([FittedTable(columns)] if shown else []), *more)
