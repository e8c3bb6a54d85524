"""Where a network's boxes are drawn: none over another, none above what it reads."""

from __future__ import annotations

import pytest
from drawing import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from relayquant.plots.layout import HEIGHT, WIDTH, lay_out

pytest.importorskip("grandalf")


@st.composite
def networks(draw):
    """(count, edges) of a network without circles, in which every edge goes forward."""
    count = draw(st.integers(1, 24))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    edges = draw(st.lists(pairs.filter(lambda pair: pair[0] < pair[1]), unique=True, max_size=40))
    return count, edges


def check(count: int, edges: list[tuple[int, int]]) -> None:
    layout = lay_out(count, edges)
    assert len(layout.boxes) == count
    for x, y in layout.boxes:
        assert WIDTH / 2 - 1e-6 <= x <= layout.width - WIDTH / 2 + 1e-6
        assert HEIGHT / 2 - 1e-6 <= y <= layout.height - HEIGHT / 2 + 1e-6
    for i, (x, y) in enumerate(layout.boxes):
        for u, v in layout.boxes[:i]:
            assert abs(x - u) >= WIDTH - 1e-6 or abs(y - v) >= HEIGHT - 1e-6, "one over another"
    for (start, end), line in zip(edges, layout.lines, strict=True):
        assert layout.boxes[start][1] + HEIGHT <= layout.boxes[end][1], "edges go down"
        assert line[0] == (layout.boxes[start][0], layout.boxes[start][1] + HEIGHT / 2)
        assert line[-1] == (layout.boxes[end][0], layout.boxes[end][1] - HEIGHT / 2)
        heights = [y for _, y in line]
        assert heights == sorted(heights)


@settings(max_examples=count_examples(50))
@given(networks())
def test_lay_out__boxes_are_apart_and_edges_go_down(network):
    check(*network)


def test_lay_out__parts_and_nothing():
    check(5, [(0, 2), (1, 3)])
    assert lay_out(0, []).boxes == ()


@pytest.mark.slow
def test_lay_out__a_deep_network():
    """Deeper than Python calls itself."""
    count = 1100
    layout = lay_out(count, [(i, i + 1) for i in range(count - 1)] + [(3, 90)])
    assert len({y for _, y in layout.boxes}) == count
