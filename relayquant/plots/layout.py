"""Operators of a network and their edges -> positions of boxes and lines.

grandalf computes the layout (Sugiyama's layers): `pip install relayquant[report]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: size of a box and gap between boxes, in pixels at full size
WIDTH, HEIGHT, GAP_X, GAP_Y = 168.0, 44.0, 22.0, 30.0
Point = tuple[float, float]


@dataclass(frozen=True)
class NetworkLayout:
    """Centre of each box, corner points of each edge in the order of the edges, and the total size.

    (0, 0) is the top left corner.
    """

    boxes: tuple[Point, ...]
    lines: tuple[tuple[Point, ...], ...]
    width: float
    height: float


class Box:
    """A vertex for grandalf: its size, and `xy`, the centre that grandalf sets."""

    def __init__(self) -> None:
        self.w, self.h, self.xy = WIDTH, HEIGHT, (0.0, 0.0)


def lay_out(count: int, edges: Sequence[tuple[int, int]]) -> NetworkLayout:
    """Place boxes in layers from top to bottom. Components without a connection stand side by side.

    Args:
        count: Number of boxes.
        edges: (from, to) by position, each once, without cycles.
    """
    from grandalf.graphs import Edge, Graph, Vertex
    from grandalf.layouts import SugiyamaLayout
    from grandalf.routing import EdgeViewer, route_with_lines

    if not count:
        return NetworkLayout((), (), 0.0, 0.0)
    vertices = [Vertex(i) for i in range(count)]
    links = [Edge(vertices[start], vertices[end]) for start, end in edges]
    boxes = [Box() for _ in vertices]
    for vertex, box in zip(vertices, boxes, strict=True):
        vertex.view = box
    for link in links:
        link.view = EdgeViewer()
    left = 0.0
    for component in Graph(vertices, links).C:
        members = [vertex.data for vertex in component.sV]
        inner = [i for i, (start, _) in enumerate(edges) if start in set(members)]
        if len(members) > 1:
            layout = SugiyamaLayout(component)
            layout.xspace, layout.yspace, layout.route_edge = GAP_X, GAP_Y, route_with_lines
            # No edge closes a cycle. grandalf would search for one recursively, one call for each
            # layer.
            layout.init_all(inverted_edges=[], optimize=False)
            layout.draw(3)
        points = [boxes[i].xy for i in members] + [p for i in inner for p in corners(links[i])]
        shift_x = left + WIDTH / 2 - min(x for x, _ in points)
        shift_y = HEIGHT / 2 - min(y for _, y in points)
        for i in members:
            boxes[i].xy = boxes[i].xy[0] + shift_x, boxes[i].xy[1] + shift_y
        for i in inner:
            links[i].view.setpath([(x + shift_x, y + shift_y) for x, y in corners(links[i])])
        left = max(x for x, _ in points) + shift_x + WIDTH / 2 + 2 * GAP_X
    lines = tuple(
        draw_line(boxes[start].xy, corners(link)[1:-1], boxes[end].xy)
        for (start, end), link in zip(edges, links, strict=True)
    )
    height = max(box.xy[1] for box in boxes) + HEIGHT / 2
    return NetworkLayout(tuple(box.xy for box in boxes), lines, left - 2 * GAP_X, height)


def corners(link: object) -> list[Point]:
    """Return the points that grandalf leads an edge through."""
    return list(getattr(link.view, "_pts", ()) or ())  # pyright: ignore[reportAttributeAccessIssue]


def draw_line(start: Point, between: Iterable[Point], end: Point) -> tuple[Point, ...]:
    """Return a line from the bottom of one box to the top of another."""
    (x0, y0), (x1, y1) = start, end
    return ((x0, y0 + HEIGHT / 2), *between, (x1, y1 - HEIGHT / 2))
