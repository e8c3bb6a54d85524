"""The pictures of results: accuracy from the table in README.md, speed from docs/speed.json, SQNR
against the time to quantize from docs/accuracy.json.

python docs/results.py writes accuracy.svg, speed.svg and quantizing.svg in docs/pictures.
"""

from __future__ import annotations

import json
import math
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

#: in pixels: a panel of quantizing.svg and its margins (left, top, right, bottom)
PANEL, MARGINS = (215, 180), (46, 32, 14, 40)
#: of the axes of a panel: CPU seconds from 0.1 to 100, decibels from 10 to 40
SECONDS, DECIBELS = (0.1, 100.0), (10.0, 40.0)
#: level of effort in docs/accuracy.json -> its letter in the picture
EFFORTS = {"fast": "f", "balanced": "b", "best": "B"}

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


def read_quantizing() -> dict[str, dict[str, tuple[float, float]]]:
    """Network -> method -> (CPU seconds to quantize, SQNR of the worst output in dB)."""
    rows = json.loads((ROOT / "docs" / "accuracy.json").read_text("utf-8"))["rows"]
    return {
        network: {
            method: (max(entry["seconds"], SECONDS[0]), min(entry["decibels"]))
            for method, entry in methods.items()
            if "decibels" in entry
        }
        for network, methods in rows.items()
    }


def draw_panel(network: str, points: Mapping[str, tuple[float, float]], x: int, y: int) -> str:
    """One network: seconds to the right, logarithmic; decibels upwards."""
    (width, height), (left, top, right, bottom) = PANEL, MARGINS
    width, height = width - left - right, height - top - bottom

    def place(seconds: float, decibels: float) -> tuple[float, float]:
        across = math.log(seconds / SECONDS[0]) / math.log(SECONDS[1] / SECONDS[0])
        up = (decibels - DECIBELS[0]) / (DECIBELS[1] - DECIBELS[0])
        return x + left + width * across, y + top + height * (1 - up)

    lines = [
        f'<text class="name" x="{x + 14}" y="{y + 20}">{escape(network.split(" (")[0])}</text>',
        f'<path class="axis" d="M{x + left} {y + top}v{height}h{width}"/>',
    ]
    for decibels in (10, 20, 30, 40):
        _, at = place(1, decibels)
        lines.append(f'<text class="y" x="{x + left - 5}" y="{at + 4:.1f}">{decibels}</text>')
    for seconds in (0.1, 1, 10, 100):
        at, base = place(seconds, DECIBELS[0])
        lines.append(f'<text class="x" x="{at:.1f}" y="{base + 16:.1f}">{seconds:g}</text>')
    for method, (seconds, decibels) in points.items():
        at, up = place(seconds, decibels)
        tool = "relayquant" if method in EFFORTS else method
        lines.append(
            f'<circle cx="{at:.1f}" cy="{up:.1f}" r="8" fill="{COLOURS[tool]}" stroke="#24292f">'
            f"<title>{method}: {decibels:.1f} dB, {seconds:g} s</title></circle>"
        )
        if method in EFFORTS:
            lines.append(f'<text class="in" x="{at:.1f}" y="{up + 4:.1f}">{EFFORTS[method]}</text>')
    return "\n".join(lines)


def draw_quantizing(rows: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    """All networks, two beside each other, and what the colours mean."""
    columns, (width, height) = 2, PANEL
    lines = [
        draw_panel(network, points, width * (place % columns), 56 + height * (place // columns))
        for place, (network, points) in enumerate(rows.items())
    ]
    y = 64 + height * -(-len(rows) // columns)
    legend = {
        "relayquant": "relayquant: f fast, b balanced, B best",
        "ONNX Runtime": "ONNX Runtime",
        "NNCF": "NNCF",
    }
    for tool, label in legend.items():
        lines.append(f'<circle cx="22" cy="{y}" r="7" fill="{COLOURS[tool]}"/>')
        lines.append(f'<text x="36" y="{y + 5}">{label}</text>')
        y += 20
    title, note = "Accuracy against time to quantize", "SQNR of the worst output (dB), CPU seconds"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
            f'height="{y}" role="img" aria-labelledby="title">',
            f'<title id="title">{title}: {note}</title>',
            "<style>text { font: 13px sans-serif; fill: #24292f } .title { font: bold 15px "
            "sans-serif } .name { font: bold 13px sans-serif } .x, .in { text-anchor: middle } "
            ".y { text-anchor: end } .x, .y, .note { fill: #57606a } .in { fill: #fff; font: bold "
            "11px sans-serif } .axis { fill: none; stroke: #8a96a3 } "
            ".paper { fill: #fff; stroke: #d0d7de }</style>",
            f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{y - 1}" rx="8"/>',
            f'<text class="title" x="14" y="25">{title}</text>',
            f'<text class="note" x="14" y="45">{note}</text>',
            *lines,
            "</svg>",
            "",
        ]
    )


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
        PICTURES / "quantizing.svg": draw_quantizing(read_quantizing()),
    }


if __name__ == "__main__":
    for path, picture in draw_results().items():
        path.write_text(picture, "utf-8", newline="\n")
