"""Tables on terminals of any width: no line is longer, no number is cut, and nothing is lost that
could be shown.
"""

from __future__ import annotations

import io
import re

import pytest
from drawing import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from relayquant.analysis.compare import CompareReport, CompareRow
from relayquant.analysis.linting.finding import Finding, Severity
from relayquant.analysis.sensitivity import SensitivityReport, SensitivityRow
from relayquant.analysis.speed.latency import Latency
from relayquant.analysis.speed.profile import OperatorTime, Profile
from relayquant.plots.bench import kernel_table, latency_table, operator_table
from relayquant.plots.terminal_table import Column, Fit, FittedTable
from relayquant.plots.text import (
    compare_table,
    findings_table,
    ledger_table,
    sensitivity_table,
    summary_table,
)

NAMES = ["conv", "encoder/layers/11/attention/query/projection/matmul", "a[0]/b", "x" * 150]
REASON = "no pattern of the backend matches it: its weights are no constant"
LEDGER = [
    {"name": name, "op": "relax.nn.conv2d_transpose", "quantized": i % 2, "pattern": "conv2d_bias",
     "dtype": "uint8", "scheme": "affine", "scale": [0.01234] * 3, "zero_point": [128] * 3,
     "rule": "global", "reason": REASON, "advice": "Fold it before, or leave it in float."}
    for i, name in enumerate(NAMES)
]  # fmt: skip
PROFILE = Profile(tuple(OperatorTime(n, f"qnn_{n}", 1e-3, 1000) for n in NAMES), 5e-3, 3)
ROWS = tuple(SensitivityRow(name, "nn.conv2d", 31.5) for name in NAMES)
#: every table that a command prints
TABLES = {
    "ledger": ledger_table(LEDGER, "all of them"),
    "ledger, in float": ledger_table(LEDGER, show_all=False),
    "summary": summary_table(dict.fromkeys(NAMES, 1.5)),
    "findings": findings_table([Finding(Severity.WARNING, "scale", n, REASON, "x") for n in NAMES]),
    "sensitivity": sensitivity_table(SensitivityReport(ROWS, 3.0, "SQNR [dB]", 8, None), rows=3),
    "compare": compare_table(
        CompareReport(
            tuple(CompareRow(n, "nn.conv2d", True, 4.0, 40.0, 0.9, 0.1, 0.01, 0.0) for n in NAMES)
        )
    ),
    "latency": latency_table({name: Latency(1e-3, 2e-3, 3e-3, 10) for name in NAMES}, "conv"),
    "kernels": kernel_table(PROFILE, 100.0),
    "calls": operator_table(PROFILE, 100.0),
}


def print_at(table: object, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, markup=False, highlight=False).print(table)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [50, 60, 80, 100, 132, 10_000])
@pytest.mark.parametrize("what", TABLES)
def test_tables__fit_the_terminal(what: str, width: int) -> None:
    lines = print_at(TABLES[what], width)
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    before = {"findings": r"(warning +)?scale +", "kernels": "qnn_"}.get(what, "")
    names = "|".join(re.escape(name[:4]) for name in [*NAMES, "no pat"])
    shown = sum(bool(re.match(f"{before}({names})", line)) for line in lines)
    expected = {"ledger, in float": 2, "sensitivity": 3}.get(what, len(NAMES))
    assert shown == expected, "one line for each, and names begin as they do"
    if width == 10_000:
        assert "…" not in text
        assert NAMES[0] in text
        assert NAMES[1] in text or what == "ledger, in float"


@settings(max_examples=count_examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(Fit), st.booleans(), st.text("ab /", max_size=40)),
        min_size=1,
        max_size=8,
    ),
    st.integers(40, 200),
)
def test_fitted_table__numbers_are_whole_or_not_there(drawn, width: int) -> None:
    """Whatever the columns: those of numbers that cannot be left out are shown with all digits."""
    columns = [
        Column(f"h{i}", [f"1234{i}" if fit is Fit.NUMBER else text], fit, is_minor)
        for i, (fit, is_minor, text) in enumerate(drawn)
    ]
    lines = print_at(FittedTable(columns), width)
    text = " ".join(lines).split()
    least = sum(column.least + 3 for column in columns if not column.is_minor)
    for i, (fit, is_minor, _) in enumerate(drawn):
        if fit is Fit.NUMBER and least <= width and not is_minor:
            assert f"1234{i}" in text
        assert not {f"1234{i}"[:n] for n in range(2, 5)} & set(text)
    if least <= width:
        assert max(map(cell_len, lines), default=0) <= width
