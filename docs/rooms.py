"""The picture and the table of rooms in design.md, from imports and docstrings.

python docs/rooms.py writes docs/pictures/rooms.svg and the table between the marks in
docs/concepts/design.md.
"""

from __future__ import annotations

import ast
import functools
import math
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "relayquant"
PAGE = ROOT / "docs" / "concepts" / "design.md"
MARKS = ("<!-- rooms: written by docs/rooms.py -->", "<!-- end of rooms -->")
#: of a box and of the space between two, in pixels
WIDTH, HEIGHT, GAP, STEP = 118, 34, 26, 40


def find_room(parts: tuple[str, ...]) -> str:
    """ "relayquant/stages/effort.py" -> "stages"; "" for the package's own `__init__`."""
    room = parts[1].removesuffix(".py") if len(parts) > 1 else "__init__"
    return "" if room == "__init__" else room


@functools.cache
def read_imports() -> dict[str, set[str]]:
    """Room -> rooms that its modules import; the package's own names are "relayquant"."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        room = find_room(path.relative_to(ROOT).parts) or "relayquant"
        uses = found.setdefault(room, set())
        for node in ast.walk(ast.parse(path.read_bytes())):
            parts = tuple((getattr(node, "module", None) or "").split("."))
            if isinstance(node, ast.ImportFrom) and parts[0] == PACKAGE.name:
                for name in [find_room((*parts, alias.name)) for alias in node.names]:
                    is_room = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()
                    uses.add(name if name and is_room else "relayquant")
    return {room: uses - {room} for room, uses in found.items() if room != "__main__"}


def find_direct(imports: dict[str, set[str]]) -> dict[str, list[str]]:
    """The arrows that say all: without those that a longer way says too."""

    @functools.cache
    def reach(room: str) -> frozenset[str]:
        return frozenset().union(*({each} | reach(each) for each in imports[room]))

    return {
        room: sorted(each for each in uses if not any(each in reach(o) for o in uses - {each}))
        for room, uses in imports.items()
    }


def find_levels(direct: dict[str, list[str]]) -> list[list[str]]:
    """Rooms by the length of their way from the top."""
    users = {room: [user for user, uses in direct.items() if room in uses] for room in direct}

    @functools.cache
    def level(room: str) -> int:
        return 1 + max(map(level, users[room]), default=-1)

    rows: dict[int, list[str]] = {}
    for room in sorted(direct):
        rows.setdefault(level(room), []).append(room)
    return [rows[number] for number in sorted(rows)]


def draw_rooms() -> str:
    """The picture: an arrow leads from a room to what it imports."""
    direct = find_direct(read_imports())
    rows = find_levels(direct)
    width = max(map(len, rows)) * (WIDTH + GAP) + GAP
    height = len(rows) * (HEIGHT + STEP) + GAP
    centre = {
        room: (
            width / 2 + (at - (len(row) - 1) / 2) * (WIDTH + GAP),
            GAP + number * (HEIGHT + STEP) + HEIGHT / 2,
        )
        for number, row in enumerate(rows)
        for at, room in enumerate(row)
    }
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="title">',
        '<title id="title">The rooms of relayquant; an arrow leads to what a room imports</title>',
        "<style>svg { background: #fff } rect { fill: #eef3f8; stroke: #35608a } text { font: bold "
        "14px sans-serif; text-anchor: middle } path { fill: none; stroke: #555; "
        "marker-end: url(#tip) }</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" style="fill: #555; stroke: none;'
        ' marker-end: none"/></marker></defs>',
    ]
    for room, uses in direct.items():
        x, y = centre[room]
        for other in uses:
            to_x, to_y = centre[other]
            way = f"L{to_x:g},{to_y - HEIGHT / 2 - 2:g}"
            if to_y - y > HEIGHT + STEP:  # past other rows: down, then to the side
                way = f"V{to_y:g} H{to_x + math.copysign(WIDTH / 2 + 2, x - to_x):g}"
            lines.append(f'<path d="M{x:g},{y + HEIGHT / 2:g} {way}"/>')
    for room, (x, y) in centre.items():
        corner = f'x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}"'
        lines.append(f'<rect {corner} width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        lines.append(f'<text x="{x:g}" y="{y + 5:g}">{room}</text>')
    return "\n".join([*lines, "</svg>", ""])


def list_rooms() -> str:
    """A table: room -> first sentence of its docstring, the top ones first."""
    lines = ["| room | what it is |", "|---|---|"]
    for room in (room for row in find_levels(find_direct(read_imports())) for room in row):
        path = PACKAGE if room == "relayquant" else PACKAGE / room
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
        first = " ".join(text.split("\n\n")[0].split())
        lines.append(
            f"| `{path.relative_to(ROOT).as_posix()}` | {first} |".replace("/__init__.py", "/")
        )
    return "\n".join(lines)


def write_page(text: str) -> str:
    """The page with the table as it is now between the marks."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n\n{list_rooms()}\n\n{MARKS[1]}{after}"


if __name__ == "__main__":
    (ROOT / "docs" / "pictures" / "rooms.svg").write_text(draw_rooms(), "utf-8")
    PAGE.write_text(write_page(PAGE.read_text("utf-8")), "utf-8")
