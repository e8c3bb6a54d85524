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
from relayquant.report.text import new_table, stack


def findings_table(findings: Sequence[Finding], title: str = "") -> Group:
    """One line for each finding, and one that counts them."""
    table = new_table()
    for head in ("severity", "check", "input", "what", "what to do"):
        table.add_column(head, overflow="fold")
    for finding in findings:
        style = "" if finding.severity is Severity.INFO else "yellow"
        cells = (finding.check, finding.where, finding.what, finding.advice)
        table.add_row(Text(finding.severity.value, style), *(Text(cell, style) for cell in cells))
    counts = [(kind, sum(f.severity is kind for f in findings)) for kind in Severity]
    text = ", ".join(f"{count} {kind.value}" for kind, count in counts if count)
    return stack(title, *([table] if findings else []), Text(text or "nothing looks wrong"))


def sensitivity_table(report: SensitivityReport, title: str = "") -> Group:
    """One line for each operator, the one that does the most damage first."""
    table = new_table()
    table.add_column("operator", overflow="fold")
    table.add_column("op", no_wrap=True)
    # As Text: in a string, [dB] would be markup.
    table.add_column(Text(report.metric), justify="right", no_wrap=True)
    for row in report.rows:
        cells = (row.name, row.op.removeprefix("nn."), f"{row.score:.4g}")
        table.add_row(*map(Text, cells))
    samples = format_count(report.samples, "sample")
    last = f"all {len(report.rows)} quantized: {report.score:.4g}, {samples}"
    return stack(title, *([table] if report.rows else []), Text(last))
