"""The table of networks of timm: its cells, and that the page has all of its networks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from speed_table import ROOT, find_marks
from timm_table import NETWORKS, format_row


def test_format_row__the_faster_model_of_the_rival_counts():
    times = {
        "relayquant int8": 2.0,
        "relayquant float": 5.0,
        "openvino float": 6.0,
        "openvino int8, NNCF": 4.0,
        "openvino int8, our QDQ": 3.0,
    }
    assert format_row("a network", times) == "| a network | 2.00 (1.50) | 5.00 (1.20) |"


def test_page__has_a_row_for_each_network():
    text = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    begin, end = find_marks("timm")
    rows = text.split(begin)[1].split(end)[0].splitlines()
    names = [
        row.split(" | ")[0].removeprefix("| ")
        for row in rows
        if row.startswith("| ") and "(" in row
    ]
    assert names == [name for group in NETWORKS.values() for name in group]
