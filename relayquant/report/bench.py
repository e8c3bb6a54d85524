"""After the data flow: measured times as tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from relayquant.analysis.latency import Latency
from relayquant.analysis.profile import OperatorTime, Profile
from relayquant.errors import format_count
from relayquant.report.text import new_table, stack


def latency_table(latencies: Mapping[str, Latency], reference: str, title: str = "") -> Group:
    """One line for each contender: best and median, and its time as a multiple of `reference`'s.

    A ratio above 1 says that the reference is faster.
    """
    table = new_table()
    table.add_column("")
    for head in (
        "best ms",
        "median ms",
        "cpu ms",
        "runs",
        "best ratio",
        "median ratio",
        "cpu ratio",
    ):
        table.add_column(head, justify="right")
    base = latencies[reference]
    for name, row in latencies.items():
        table.add_row(
            Text(name),
            f"{row.best * 1e3:.3f}",
            f"{row.median * 1e3:.3f}",
            f"{row.cpu * 1e3:.3f}",
            str(row.runs),
            f"{row.best / base.best:.2f}",
            f"{row.median / base.median:.2f}",
            f"{row.cpu / base.cpu:.2f}",
        )
    return stack(title, table)


def operator_table(
    profile: Profile, peak: float | None = None, rows: int | None = None, title: str = ""
) -> Group:
    """One line for each call of a kernel, the slowest first, and a line for what is left out.

    Args:
        profile: The measured times.
        peak: 10^9 integer operations per second of all used cores; None leaves that column out.
        rows: Show so many; None for all.
        title: A line above the table.
    """
    slowest = sorted(profile.operators, key=lambda operator: -operator.seconds)
    shown = slowest if rows is None else slowest[:rows]
    spent = sum(operator.seconds for operator in profile.operators)
    table = new_table()
    table.add_column("computes")
    table.add_column("kernel")
    for head in ("us", "share", "GOP/s", *(["of peak"] if peak else [])):
        table.add_column(head, justify="right")
    for operator in shown:
        add_operator(table, operator, spent, peak)
    lines = [Text(f"{format_count(len(profile.operators), 'call')}, {spent * 1e6:.0f} us")]
    if len(shown) < len(slowest):
        rest = sum(operator.seconds for operator in slowest[len(shown) :])
        lines.append(
            Text(f"{format_count(len(slowest) - len(shown), 'more call')}: {rest * 1e6:.0f} us")
        )
    return stack(title, table, *lines)


def kernel_table(profile: Profile, peak: float | None = None, title: str = "") -> Group:
    """One line for each kind of kernel, its name without the number: calls, time, share, rate."""
    groups: dict[str, list[OperatorTime]] = {}
    for operator in profile.operators:
        groups.setdefault(operator.kernel.rstrip("0123456789"), []).append(operator)
    spent = sum(operator.seconds for operator in profile.operators)
    table = new_table()
    table.add_column("kind of kernel")
    table.add_column("calls", justify="right")
    for head in ("us", "share", "GOP/s", *(["of peak"] if peak else [])):
        table.add_column(head, justify="right")
    for kind, members in sorted(groups.items(), key=lambda item: -sum_seconds(item[1])):
        total = OperatorTime("", kind, sum_seconds(members), sum(member.macs for member in members))
        table.add_row(Text(kind), str(len(members)), *measured_cells(total, spent, peak))
    return stack(title, table)


def sum_seconds(operators: Sequence[OperatorTime]) -> float:
    return sum(operator.seconds for operator in operators)


def add_operator(table: Table, operator: OperatorTime, spent: float, peak: float | None) -> None:
    table.add_row(
        Text(operator.value), Text(operator.kernel), *measured_cells(operator, spent, peak)
    )


def measured_cells(operator: OperatorTime, spent: float, peak: float | None) -> list[str]:
    """Time, share, rate and share of the peak as text; the last two only where work is known."""
    cells = [f"{operator.seconds * 1e6:.1f}", f"{operator.seconds / spent:.1%}"]
    cells.append(f"{operator.gops:.1f}" if operator.macs else "")
    if peak:
        integer = operator.macs and operator.kernel.startswith("qnn_")
        cells.append(f"{operator.gops / peak:.0%}" if integer else "")
    return cells
