"""Measured times -> tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from relayquant.analysis.speed.latency import Latency
from relayquant.analysis.speed.profile import OperatorTime, Profile
from relayquant.errors import format_count
from relayquant.plots.terminal_table import Column, Fit, FittedTable
from relayquant.plots.text import stack


def latency_table(latencies: Mapping[str, Latency], reference: str, title: str = "") -> Group:
    """Return one line for each candidate: best time, median time, and the ratio to `reference`.

    A ratio above 1 means that the reference is faster.
    """
    rows, base = latencies.values(), latencies[reference]
    columns = [
        Column("", [*latencies], Fit.NAME),
        Column("best ms", [f"{row.best * 1e3:.3f}" for row in rows], Fit.NUMBER),
        Column("median ms", [f"{row.median * 1e3:.3f}" for row in rows], Fit.NUMBER),
        Column("cpu ms", [f"{row.cpu * 1e3:.3f}" for row in rows], Fit.NUMBER, is_minor=True),
        Column("runs", [str(row.runs) for row in rows], Fit.NUMBER, is_minor=True),
        Column("best ratio", [f"{row.best / base.best:.2f}" for row in rows], Fit.NUMBER),
        Column(
            "median ratio",
            [f"{row.median / base.median:.2f}" for row in rows],
            Fit.NUMBER,
            is_minor=True,
        ),
        Column("cpu ratio", [f"{row.cpu / base.cpu:.2f}" for row in rows], Fit.NUMBER, True),
    ]
    return stack(title, FittedTable(columns))


def operator_table(
    profile: Profile, peak: float | None = None, rows: int | None = None, title: str = ""
) -> Group:
    """Return one line for each kernel call, the slowest first, and a line for the calls left out.

    Args:
        profile: The measured times.
        peak: 10^9 integer operations per second of all used cores. None leaves that column out.
        rows: Maximum number of calls. None for all.
        title: A line above the table.
    """
    slowest = sorted(profile.operators, key=lambda operator: -operator.seconds)
    shown = slowest if rows is None else slowest[:rows]
    spent = sum(operator.seconds for operator in profile.operators)
    columns = [
        Column("computes", [operator.value for operator in shown], Fit.NAME),
        Column("kernel", [operator.kernel for operator in shown], Fit.NAME, is_minor=True),
        *measure_columns(shown, spent, peak),
    ]
    lines = [Text(f"{format_count(len(profile.operators), 'call')}, {spent * 1e6:.0f} us")]
    if len(shown) < len(slowest):
        rest = sum(operator.seconds for operator in slowest[len(shown) :])
        lines.append(
            Text(f"{format_count(len(slowest) - len(shown), 'more call')}: {rest * 1e6:.0f} us")
        )
    return stack(title, FittedTable(columns), *lines)


def kernel_table(profile: Profile, peak: float | None, title: str = "") -> Group:
    """Return one line for each kind of kernel, named without the number: calls, time, share,
    rate.
    """
    groups: dict[str, list[OperatorTime]] = {}
    for operator in profile.operators:
        groups.setdefault(operator.kernel.rstrip("0123456789"), []).append(operator)
    spent = sum(operator.seconds for operator in profile.operators)
    kinds = sorted(groups, key=lambda kind: -sum_seconds(groups[kind]))
    totals = [
        OperatorTime("", kind, sum_seconds(groups[kind]), sum(time.macs for time in groups[kind]))
        for kind in kinds
    ]
    columns = [
        Column("kind of kernel", kinds, Fit.NAME),
        Column("calls", [str(len(groups[kind])) for kind in kinds], Fit.NUMBER),
        *measure_columns(totals, spent, peak),
    ]
    return stack(title, FittedTable(columns))


def sum_seconds(operators: Sequence[OperatorTime]) -> float:
    return sum(operator.seconds for operator in operators)


def measure_columns(
    operators: Sequence[OperatorTime], spent: float, peak: float | None
) -> list[Column]:
    """Return time, share, rate and share of the peak. The last two only if the number of
    operations is known.
    """
    rates = [f"{operator.gops:.1f}" if operator.macs else "" for operator in operators]
    shares = [
        f"{operator.gops / peak:.0%}"
        if peak and operator.macs and operator.kernel.startswith("qnn_")
        else ""
        for operator in operators
    ]
    return [
        Column("us", [f"{operator.seconds * 1e6:.1f}" for operator in operators], Fit.NUMBER),
        Column("share", [f"{operator.seconds / spent:.1%}" for operator in operators], Fit.NUMBER),
        Column("GOP/s", rates, Fit.NUMBER, is_minor=True),
        Column("of peak", shares, Fit.NUMBER, is_minor=True),
    ]
