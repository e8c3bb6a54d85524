"""The tables of times are written from measured times, and the pages have a place for them."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import speed_table

from relayquant.analysis.latency import Latency

TIMES = {
    "relayquant int8": Latency(2e-3, 4e-3, 4e-3, 9),
    "relayquant float": Latency(8e-3, 8e-3, 8e-3, 9),
    "openvino int8, NNCF": Latency(5e-3, 6e-3, 6e-3, 9),
    "openvino int8, our QDQ": Latency(3e-3, 7e-3, 6e-3, 9),
    "openvino float": Latency(6e-3, 8e-3, 8e-3, 9),
}
RESULTS = {
    "cpu": "a CPU",
    "versions": ["openvino 1", "onnxruntime 2"],
    "times": {"ResNet-18": {"1": {name: asdict(row) for name, row in TIMES.items()}}},
}


def test_format_ratios__against_the_faster_of_a_peers_models():
    assert speed_table.format_ratios(TIMES, "int8") == "2.00 (1.50, 1.75) (-)"
    assert speed_table.format_ratios(TIMES, "float") == "8.00 (0.75, 1.00) (-)"


def test_format_table__rows_that_were_measured():
    table = speed_table.format_table(RESULTS, ["ResNet-50", "ResNet-18"], ("int8", "float"))
    assert "a CPU\n(openvino 1, onnxruntime 2), " in table
    assert table.splitlines()[-3:] == [
        "| model | int8, 1 thread | float, 1 thread |",
        "|---|---|---|",
        "| ResNet-18 | 2.00 (1.50, 1.75) (-) | 8.00 (0.75, 1.00) (-) |",
    ]


@pytest.mark.parametrize("page", ["docs/speed.md", "README.md"])
def test_replace_table__leaves_the_rest_of_a_page(page):
    text = (speed_table.ROOT / page).read_text(encoding="utf-8")
    changed = speed_table.replace_table(text, "| a table |")
    assert "| a table |" in changed
    assert speed_table.replace_table(changed, "| another |").replace("| another |", "") == (
        speed_table.replace_table(text, "")
    )
    begin, end = speed_table.find_marks("speed")
    before, after = text.split(begin)[0], text.split(end)[1]
    assert changed.startswith(before)
    assert changed.endswith(after)


def test_rows__name_models_that_exist():
    assert {row.model for row in speed_table.ROWS.values()} <= set(speed_table.MODELS)
    assert set(speed_table.SHOWN) <= set(speed_table.ROWS)
