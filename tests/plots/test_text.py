"""Tables of text: every row is there, whole in a pipe, and no name is read as markup."""

from __future__ import annotations

import io
from typing import Any

from relayquant.plots.text import ledger_table, make_console, summary_table


def make_row(name: str, **values: Any) -> dict[str, Any]:
    row = {"name": name, "op": "relax.nn.conv2d", "quantized": True, "pattern": "conv2d"}
    return {**row, "dtype": "int8", "reason": "", "advice": "", **values}


def print_plain(table: Any) -> str:
    file = io.StringIO()
    make_console(file).print(table)
    return file.getvalue()


def test_ledger_table__one_line_for_each_operator() -> None:
    rows = [
        make_row("block1/conv[0]"),
        make_row(
            "softmax",
            op="relax.nn.softmax",
            quantized=False,
            pattern=None,
            dtype="float32",
            reason="no pattern matches nn.softmax " + "x" * 300,
            advice="keep it",
        ),
    ]
    lines = [line.split() for line in print_plain(ledger_table(rows)).splitlines()]
    assert ["block1/conv[0]", "nn.conv2d", "yes", "conv2d", "int8"] in lines
    (softmax,) = [line for line in lines if line[:1] == ["softmax"]]
    assert softmax[1:4] == ["nn.softmax", "no", "float32"]
    assert softmax[-3:] == ["x" * 300, "keep", "it"]
    assert lines[0] == ["1", "of", "2", "operators", "quantized"]


def test_ledger_table__silent_columns_are_left_out() -> None:
    head = print_plain(ledger_table([make_row("conv1")])).splitlines()[1]
    assert head.split() == ["operator", "op", "quantized", "pattern", "dtype"]


def test_ledger_table__no_rows() -> None:
    assert "0 of 0 operators quantized" in print_plain(ledger_table([]))


def test_ledger_table__what_is_in_float_alone() -> None:
    rows = [make_row("conv"), make_row("softmax", quantized=False, reason="no pattern")]
    count, head, _, *lines = print_plain(ledger_table(rows, show_all=False)).splitlines()
    assert count == "1 of 2 operators quantized; in float are:"
    assert "quantized" not in head
    assert [line.split()[0] for line in lines] == ["softmax"]
    (count,) = print_plain(ledger_table(rows[:1], show_all=False)).splitlines()
    assert count == "1 of 1 operator quantized"


def test_summary_table__names_and_values() -> None:
    lines = print_plain(
        summary_table({"accuracy": 0.98654, "digits": 500, "[red]": "[/]"}, title="float")
    ).splitlines()
    assert lines[0].strip() == "float"
    assert [line.split() for line in lines[1:] if line.strip()] == [
        ["accuracy", "0.9865"],
        ["digits", "500"],
        ["[red]", "[/]"],
    ]


def test_make_console__no_escape_codes_outside_a_terminal() -> None:
    text = print_plain(ledger_table([make_row("softmax", quantized=False)], title="ledger"))
    assert "\x1b" not in text
