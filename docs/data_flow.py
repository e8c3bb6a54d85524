"""The drawing of the data flow, from the page of code that it shows.

python docs/data_flow.py writes docs/pictures/data_flow.svg: a box for each stage in the first line
of relayquant/flow/pipeline.py, and an arrow for each way back, which its loops are.
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "relayquant" / "flow" / "pipeline.py"
#: of a box and of the space between two, in pixels
WIDTH, HEIGHT, GAP, STEP = 150, 58, 38, 140
TOP, COLUMNS = 92, 5
#: stage -> what it gives
GIVES = {
    "load": "file → float module",
    "prepare": "canonical form",
    "equalize": "channels scaled",
    "annotate": "plan",
    "simulate": "calibration graph",
    "calibrate": "parameters",
    "convert": "reference form",
    "expand": "larger regions",
    "fold": "integer module",
    "compile": "executable",
}
#: stages of integer operators
INTEGER = ("convert", "expand", "fold", "compile")
#: Functions of the page that go back -> what is written at the arrow that they draw.
LOOPS = {"keep_faster": "keep faster", "guard_module": "guard", "search_module": "search"}
#: stage -> what comes in from the side
INPUTS = {"annotate": "backend, QConfigMapping", "calibrate": "data set", "compile": "target"}

HEAD = """<title id="title">The data flow, from a model file to an executable</title>
<style>
  svg { background: #fff; }
  rect { fill: #eef3f8; stroke: #35608a; stroke-width: 1.5; }
  rect.integer { fill: #e6f3ea; stroke: #2b7a46; }
  text { font: 13px sans-serif; fill: #222; text-anchor: middle; }
  text.stage { font-weight: bold; font-size: 15px; }
  text.note, text.return { font-style: italic; fill: #555; }
  path { fill: none; stroke: #555; stroke-width: 1.5; marker-end: url(#tip); }
  path.aside { stroke-dasharray: 4 3; }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto">
  <path d="M0,0 L8,4 L0,8 z" style="fill: #555; stroke: none; marker-end: none"/></marker></defs>"""


def read_stages() -> list[str]:
    """Stages in the order of the page; what `lower` means on a target is done by `compile`."""
    text = ast.get_docstring(ast.parse(PAGE.read_bytes())) or ""
    return [*re.findall(r"(\w+) ->", text), "compile"]


def read_runs() -> list[str]:
    """Names of the steps that the page runs, in its order."""
    calls = [node for node in ast.walk(ast.parse(PAGE.read_bytes())) if isinstance(node, ast.Call)]
    named = [(each.lineno, each.args[0]) for each in calls if each.args]
    runs = ("run(", "events.run_stage(", "settings.events.run_stage(")
    lines = {each.lineno for each in calls if f"{ast.unparse(each.func)}(" in runs}
    return [
        str(first.value)
        for line, first in sorted(named, key=lambda row: row[0])
        if line in lines and isinstance(first, ast.Constant)
    ]


def read_loops() -> list[str]:
    """Functions of the page that hold a loop or rebuild the module in one, in its order."""
    functions = [each for each in ast.parse(PAGE.read_bytes()).body if hasattr(each, "args")]
    return [
        each.name
        for each in functions
        if any(
            isinstance(node, ast.For | ast.While)
            or (isinstance(node, ast.Call) and ast.unparse(node.func) == "rebuild")
            for node in ast.walk(each)
        )
    ]


def list_returns() -> list[tuple[str, str, str]]:
    """(from, to, why): what is done again. The second part of `equalize` needs the plan, which
    stays: only constants change.
    """
    loops = ", ".join(LOOPS[name] for name in read_loops())
    return [
        ("annotate", "equalize", "equalize layers"),
        ("calibrate", "calibrate", "fit accumulators"),
        ("fold", "annotate", loops),
    ]


def draw_flow() -> str:
    """The drawing."""
    stages = read_stages()
    places = {
        name: (14 + i % COLUMNS * (WIDTH + GAP), TOP + i // COLUMNS * STEP)
        for i, name in enumerate(stages)
    }
    width, height = 2 * 14 + COLUMNS * WIDTH + (COLUMNS - 1) * GAP, TOP + STEP + HEIGHT + 58
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="title">',
        HEAD,
    ]
    for name, (x, y) in places.items():
        kind = ' class="integer"' if name in INTEGER else ""
        lines.append(f'<rect{kind} x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        lines.append(f'<text class="stage" x="{x + WIDTH // 2}" y="{y + 24}">{name}</text>')
        lines.append(f'<text x="{x + WIDTH // 2}" y="{y + 44}">{GIVES[name]}</text>')
        if name in INPUTS:
            lines.append(draw_input(x, y, INPUTS[name], is_below=name == "calibrate"))
    for one, other in itertools.pairwise(stages):
        (x, y), (to_x, to_y) = places[one], places[other]
        way = f"M{x + WIDTH + 2},{y + HEIGHT // 2} H{to_x - 2}"
        if to_y > y:
            middle = (y + HEIGHT + to_y) // 2 - 20
            way = f"M{x + WIDTH // 2},{y + HEIGHT + 2} V{middle} H{to_x + WIDTH // 2} V{to_y - 3}"
        lines.append(f'<path d="{way}"/>')
    lines += [draw_return(places[one], places[other], why) for one, other, why in list_returns()]
    return "\n".join([*lines, "</svg>", ""])


def draw_input(x: int, y: int, what: str, *, is_below: bool) -> str:
    """A dashed arrow into a box from above, or from below on its left."""
    at = x + (30 if is_below else WIDTH // 2)
    end, start, text = y - 3, y - 24, y - 30
    if is_below:
        end, start, text = y + HEIGHT + 3, y + HEIGHT + 24, y + HEIGHT + 40
    return (
        f'<text class="note" x="{at}" y="{text}">{what}</text>'
        f'<path class="aside" d="M{at},{start} V{end}"/>'
    )


def draw_return(start: tuple[int, int], end: tuple[int, int], why: str) -> str:
    """An arrow back, and why: over the boxes, or between the rows."""
    (x, y), (to_x, to_y) = start, end
    if start == end:
        way, at = f"M{x + 110},{y + HEIGHT + 2} v16 h26 v-13", (x + 125, y + HEIGHT + 40)
    elif y == to_y:
        way = f"M{x + 30},{y - 2} V{y - 18} H{to_x + WIDTH - 30} V{to_y - 3}"
        at = to_x + WIDTH - 30, y - 24
    else:
        middle = (to_y + HEIGHT + y) // 2 + 8
        way = f"M{x + WIDTH // 2},{y - 2} V{middle} H{to_x + WIDTH - 30} V{to_y + HEIGHT + 3}"
        at = x - 20, middle + 14
    text = f'<text class="return" x="{at[0]}" y="{at[1]}">{why}</text>'
    return f'<path d="{way}"/>{text}'


if __name__ == "__main__":
    (ROOT / "docs" / "pictures" / "data_flow.svg").write_text(draw_flow(), "utf-8", newline="\n")
