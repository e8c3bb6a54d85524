"""The table of networks of timm: its cells, and that the page has all of its networks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from speed_table import ROOT, find_marks, read_results
from timm_table import NETWORKS, RESULTS, choose_times, format_table

FOUND = {
    "relayquant int8": 2.0,
    "relayquant float": 5.0,
    "openvino float": 6.0,
    "openvino int8, NNCF": 4.0,
    "openvino int8, our QDQ": 3.0,
}


def test_choose_times__the_faster_model_of_the_rival_counts():
    assert choose_times(FOUND) == {"int8": [2.0, 3.0], "float": [5.0, 6.0]}


def test_format_table__a_cell_for_each_cpu_and_kind():
    """A CPU that did not measure a network has no times of it."""
    times = {"dla34": choose_times(FOUND)}
    results = {
        "one (x +amx-int8)": {"versions": ["a 1"], "times": times},
        "two": {"versions": ["a 1", "b 2"], "times": {}},
    }
    lines = format_table(results).splitlines()
    assert lines[:2] == [
        "**one (x +amx-int8)** (a 1), 1 thread  ",
        "**two** (a 1, b 2), 1 thread  ",
    ]
    heads = "one (x), with AMX, int8 | one (x), with AMX, float | two, int8 | two, float"
    assert lines[3] == f"| network | {heads} |"
    assert "| dla34 | 2.00 (1.50) | 5.00 (1.20) |  |  |" in lines


def test_page__has_what_was_measured():
    results = read_results(RESULTS)
    begin, end = find_marks("timm")
    text = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    assert text.split(begin)[1].split(end)[0].strip() == format_table(results)
    names = [name for group in NETWORKS.values() for name in group]
    assert all([*entry["times"]] == names for entry in results.values())
