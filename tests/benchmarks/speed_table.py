"""Times of well-known architectures in all engines, as the tables of docs/speed.md and README.md.

    python tests/benchmarks/speed_table.py [--models resnet50 ...] [--threads 1 2] [--folder DIR]

Needs onnxruntime, openvino and, for OpenVINO's own int8 models, nncf. Models are prepared in FOLDER
(default: a temporary one), and found there the next time. The measured times go to docs/speed.json,
where those of other models stay as they were if they are of the same CPU and versions; the tables
are written from it. Weights and inputs are random: results mean nothing, times do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from models import MODELS

from relayquant.analysis.engines import Candidate, Engine, measure_engines
from relayquant.analysis.latency import Latency
from relayquant.analysis.other_engines import OTHER_ENGINES, list_versions, prepare_candidates
from relayquant.base.storage.files import open_temporary_folder, write_whole
from relayquant.cli.commands.bench import export_own, quantize_quickly
from relayquant.codegen.kernels.isa.target import name_cpu
from relayquant.formats.load import load
from relayquant.ir.rewrite.bind import bind_params
from relayquant.ir.rewrite.editor import Editor
from relayquant.stages.compilation import compile as compile_module

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/speed.json"


@dataclass(frozen=True)
class Row:
    """A row of the table: what runs, and the seconds from one run to the next (0: at once)."""

    model: str
    batch: int = 1
    interval: float = 0.0

    @property
    def folder(self) -> str:
        """Name of the folder with the prepared models, which rows share."""
        return f"{self.model}-{self.batch}"


ROWS = {
    "ResNet-50": Row("resnet50"),
    "ResNet-50, batch 8": Row("resnet50", batch=8),
    "ResNet-18": Row("resnet18"),
    "MobileNetV2": Row("mobilenet_v2"),
    "MobileNetV2, every 20 ms": Row("mobilenet_v2", interval=0.02),
    "MobileNet v1": Row("mobilenet_v1"),
    "SqueezeNet 1.1": Row("squeezenet"),
    "SqueezeNet 1.1, every 20 ms": Row("squeezenet", interval=0.02),
    "EfficientNet-B0": Row("efficientnet_b0"),
    "U-Net, 128 x 128": Row("unet"),
    "BERT, 3 layers": Row("bert"),
    "ViT-tiny": Row("vit_tiny"),
    "KWT-1": Row("kwt1"),
    "KWT-1, every 20 ms": Row("kwt1", interval=0.02),
}
#: rows of README.md
SHOWN = ("ResNet-50", "MobileNetV2", "BERT, 3 layers", "ViT-tiny")
BATCHES = 2

Times = Mapping[str, Latency]


def prepare_row(row: str, folder: Path) -> tuple[dict[str, Candidate], dict[str, np.ndarray]]:
    """(candidates, one input each) of a row; from the folder if they are there."""
    index = folder / "contenders.json"
    if not index.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / "float.onnx"
        onnx.save(MODELS[ROWS[row].model](batch=ROWS[row].batch), source)
        editor = Editor((loaded := load(source))[0])
        bind_params(editor, loaded[1])
        mod = editor.build()
        rng, shape = np.random.default_rng(0), read_shape(source)
        batches = [{"input": rng.normal(size=shape).astype("float32")} for _ in range(BATCHES)]
        np.savez(folder / "inputs.npz", **batches[0])
        qmod = quantize_quickly(mod, batches, None)
        executables = {
            "relayquant int8": compile_module(qmod),
            "relayquant float": compile_module(mod),
        }
        models = prepare_candidates([*OTHER_ENGINES.values()], source, qmod, batches, folder)
        for candidate, reason in models.failures.items():
            print(f"{row}: {candidate} is left out: {reason}", flush=True)
        candidates = {**export_own(executables, folder), **models.candidates}
        entries = {name: (each.engine.value, each.path.name) for name, each in candidates.items()}
        write_whole(index, lambda path: path.write_text(json.dumps(entries)))
    with np.load(folder / "inputs.npz") as arrays:
        inputs = {name: arrays[name] for name in arrays.files}
    entries = json.loads(index.read_text())
    found = {
        name: Candidate(Engine(engine), folder / at, name.endswith("float"))
        for name, (engine, at) in entries.items()
    }
    return found, inputs


def read_shape(source: Path) -> tuple[int, ...]:
    value = onnx.load(source, load_external_data=False).graph.input[0]
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def best_rival(times: Times, engine: str, kind: str) -> Latency | None:
    """The fastest of an engine's models of a kind, "int8" or "float"."""
    rows = [row for name, row in times.items() if name.startswith(f"{engine} {kind}")]
    return min(rows, key=lambda row: row.best, default=None)


def format_ratios(times: Times, kind: str) -> str:
    """Our best time in ms, and in brackets how many times as long the rivals take: best, median."""
    own = times[f"relayquant {kind}"]
    cells = [f"{own.best * 1e3:.2f}"]
    for engine in ("openvino", "onnxruntime"):
        rival = best_rival(times, engine, kind)
        ratios = rival and f"{rival.best / own.best:.2f}, {rival.median / own.median:.2f}"
        cells.append(f"({ratios})" if ratios else "(-)")
    return " ".join(cells)


def format_table(results: Mapping[str, Any], rows: Sequence[str], kinds: Sequence[str]) -> str:
    """A table in Markdown, under a sentence that says where it was measured."""
    threads = sorted({int(count) for times in results["times"].values() for count in times})
    heads = [
        f"{kind}, {count} {'thread' if count == 1 else 'threads'}"
        for kind in kinds
        for count in threads
    ]
    lines = [
        "Best time of one run in ms, batch 1 and runs that follow each other at once unless said,",
        f"on {results['cpu']}",
        f"({', '.join(results['versions'])}), each engine in a process of its own;",
        "in brackets how many times as long OpenVINO and then ONNX Runtime take, by the best and",
        "by the median time. Of their own int8 model and of what `export_onnx` writes of ours they",
        "run the faster one.",
        "",
        f"| model | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for row in rows:
        measured = results["times"].get(row)
        if measured is None:
            continue
        cells = []
        for kind in kinds:
            for count in threads:
                times = measured.get(str(count))
                cells.append(format_ratios(read_times(times), kind) if times else "")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_times(times: Mapping[str, Mapping[str, Any]]) -> dict[str, Latency]:
    return {name: Latency(**fields) for name, fields in times.items()}


def find_marks(name: str) -> tuple[str, str]:
    """What stands around a table of a page; what is between is written anew."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def replace_table(text: str, table: str, name: str = "speed") -> str:
    """The text of a page with another table between the marks of this name."""
    begin, end = find_marks(name)
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{rest[rest.index(end) :]}"


def write_tables(results: Mapping[str, Any]) -> None:
    """Both pages."""
    tables = {
        ROOT / "docs/speed.md": format_table(results, [*ROWS], ("int8", "float")),
        ROOT / "README.md": format_table(results, SHOWN, ("int8",)),
    }
    for page, table in tables.items():
        text = replace_table(page.read_text(encoding="utf-8"), table)
        write_whole(page, lambda path, text=text: path.write_text(text, encoding="utf-8"))


def read_results(file: Path = RESULTS) -> dict[str, Any]:
    """What was measured before on this CPU with these versions."""
    fresh = {"cpu": name_cpu(), "versions": list_versions([*OTHER_ENGINES.values()]), "times": {}}
    if not file.exists():
        return fresh
    found = json.loads(file.read_text(encoding="utf-8"))
    is_same = all(found[key] == fresh[key] for key in ("cpu", "versions"))
    return found if is_same else fresh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--prepare", action="store_true", help="measure nothing")
    options = parser.parse_args()
    for rival in OTHER_ENGINES.values():
        rival.check()
    with ExitStack() as stack:
        folder = options.folder or stack.enter_context(open_temporary_folder())
        results = read_results()
        for row in options.models:
            candidates, inputs = prepare_row(row, folder / ROWS[row].folder)
            for threads in [] if options.prepare else options.threads:
                found = measure_engines(
                    candidates,
                    inputs,
                    threads=threads,
                    rounds=options.rounds,
                    interval=ROWS[row].interval,
                )
                times = {name: asdict(latency) for name, latency in found.latencies.items()}
                results["times"].setdefault(row, {})[str(threads)] = times
                print(
                    row,
                    threads,
                    *(format_ratios(found.latencies, k) for k in ("int8", "float")),
                    *found.failures.values(),
                    flush=True,
                )
                text = json.dumps(results, indent=1)
                write_whole(RESULTS, lambda path, text=text: path.write_text(text))
    if not options.prepare:
        write_tables(results)


if __name__ == "__main__":
    main()
