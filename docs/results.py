"""The pictures of results: accuracy from the table in README.md, speed from docs/speed.json.

python docs/results.py writes docs/pictures/accuracy.svg and docs/pictures/speed.svg.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
#: Networks whose speed is shown, and the engine whose float model they are compared with.
NETWORKS = ("ResNet-50", "ResNet-18", "MobileNetV2", "BERT, 3 layers", "ViT-tiny", "KWT-1")
BASE = "onnxruntime float"
#: Names of rivals in docs/speed.json.
RIVALS = {"OpenVINO": "openvino", "ONNX Runtime": "onnxruntime"}
#: Colours of the tools. NNCF makes models for OpenVINO.
COLOURS = {
    "relayquant": "#1f6feb",
    "OpenVINO": "#8a96a3",
    "NNCF": "#8a96a3",
    "ONNX Runtime": "#c5ced6",
}
#: in pixels: of the picture, left of the bars, of the longest bar, of a bar
WIDTH, LEFT, LONGEST, BAR = 430, 112, 254, 14

Rows = Mapping[str, Mapping[str, float | None]]


def read_accuracy() -> dict[str, dict[str, float | None]]:
    """Network -> tool -> how often its answers equal the float model's, in %. None: it fails."""
    text = (ROOT / "README.md").read_text("utf-8")
    table = text.split("<!-- accuracy: begin -->")[1].split("<!-- accuracy: end -->")[0]
    head, _, *lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()
    ]
    return {
        cells[0].split(" (")[0]: {
            tool: float(found[1]) if (found := re.search(r"\(([\d.]+)\)$", cell)) else None
            for tool, cell in zip(head[3:], cells[3:], strict=True)
        }
        for cells in lines
    }


def read_speed() -> tuple[str, dict[str, dict[str, float | None]]]:
    """(CPU, network -> engine -> times as fast as the float model in ONNX Runtime): one thread, of
    the CPU that was measured last. A rival runs the faster of its int8 models.
    """
    results = json.loads((ROOT / "docs" / "speed.json").read_text("utf-8"))
    cpu, entry = [*results.items()][-1]
    rows = {}
    for network in NETWORKS:
        times = {name: each["best"] for name, each in entry["times"][network]["1"].items()}
        int8 = {"relayquant": times["relayquant int8"]} | {
            name: min(time for key, time in times.items() if key.startswith(f"{engine} int8"))
            for name, engine in RIVALS.items()
        }
        rows[network] = {name: times[BASE] / time for name, time in int8.items()}
    return re.sub(r"\(R\)|Processor ", "", cpu), rows


def draw_bars(title: str, note: str, rows: Rows, unit: str) -> str:
    """A picture with a bar for each tool in each row."""
    most = max(value or 0 for row in rows.values() for value in row.values())
    lines, y = [], 60
    for network, row in rows.items():
        middle = y + len(row) * BAR / 2 + 4
        lines.append(f'<text class="row" x="{LEFT - 8}" y="{middle:g}">{escape(network)}</text>')
        for tool, value in row.items():
            width = LONGEST * (value or 0) / most
            label = "fails" if value is None else f"{value:.1f}{unit}"
            lines.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" '
                f'fill="{COLOURS[tool]}"/><text x="{LEFT + width + 5:.1f}" y="{y + 11}">{label}'
                "</text>"
            )
            y += BAR
        y += 8
    x = LEFT - 30
    for tool in next(iter(rows.values())):
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[tool]}"/>')
        lines.append(f'<text x="{x + 17}" y="{y + 11}">{tool}</text>')
        x += 36 + 7 * len(tool)
    height = y + 24
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}, {escape(note)}</title>',
        "<style>text { font: 13px sans-serif; fill: #24292f } .title { font: bold 15px sans-serif }"
        " .row { text-anchor: end } .note { fill: #57606a } .paper { fill: #fff; stroke: #d0d7de }"
        "</style>",
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="14" y="25">{escape(title)}</text>',
        f'<text class="note" x="14" y="45">{escape(note)}</text>',
    ]
    return "\n".join([*head, *lines, "</svg>", ""])


def draw_results() -> dict[Path, str]:
    """File -> picture."""
    cpu, speed = read_speed()
    return {
        PICTURES / "accuracy.svg": draw_bars(
            "Accuracy of int8 models",
            "answers that equal the float model's",
            read_accuracy(),
            "%",
        ),
        PICTURES / "speed.svg": draw_bars(
            "Speed-up of int8 over float ONNX Runtime", f"{cpu}, 1 thread", speed, "x"
        ),
    }


if __name__ == "__main__":
    for path, picture in draw_results().items():
        path.write_text(picture, "utf-8", newline="\n")
