"""Times of well-known architectures in all engines, as the tables of docs/speed.md and README.md.

    python tests/benchmarks/speed_table.py [--models ResNet-50 ...] [--threads 1 2] [--folder DIR]
        [--without-amx]

Needs onnxruntime, openvino and, for OpenVINO's own int8 models, nncf. Models are prepared in FOLDER
(default: a temporary one), and found there the next time. docs/speed.json holds the times of each
CPU. A measurement replaces the measured rows of this CPU, or all rows of this CPU if the versions
have changed. The tables are written from this file. Weights and inputs are random: results mean
nothing, times do.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from models import MODELS
from tvm.target import Target

from relayquant.analysis.speed.engines import Candidate, Engine, measure_engines
from relayquant.analysis.speed.latency import Latency
from relayquant.analysis.speed.other_engines import OTHER_ENGINES, list_versions, prepare_candidates
from relayquant.base.storage.files import open_temporary_folder, write_text
from relayquant.cli.commands.bench import export_own, quantize_quickly
from relayquant.codegen.kernels.isa.bf16 import VECTORS_BF16
from relayquant.codegen.kernels.isa.select import has_isa
from relayquant.codegen.kernels.isa.target import (
    host_config,
    list_instructions,
    name_cpu,
    resolve_target,
)
from relayquant.config import Precision
from relayquant.formats.load import load
from relayquant.ir.rewrite.bind import bind_params
from relayquant.ir.rewrite.editor import Editor
from relayquant.stages.compilation import compile as compile_module

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/speed.json"


@dataclass(frozen=True)
class Row:
    """A row of the table: what runs, and the seconds from one run to the next (0: at once).

    A bf16 row compares float models in bfloat16, as OpenVINO runs them by default.
    """

    model: str
    batch: int = 1
    interval: float = 0.0
    precision: Precision = Precision.FLOAT32  #: of the float models; bf16 rows have no int8 models

    @property
    def folder(self) -> str:
        """Name of the folder with the prepared models, which rows share."""
        suffix = "" if self.precision is Precision.FLOAT32 else f"-{self.precision.value}"
        return f"{self.model}-{self.batch}{suffix}"


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
    "ResNet-50, bf16": Row("resnet50", precision=Precision.BF16),
    "MobileNetV2, bf16": Row("mobilenet_v2", precision=Precision.BF16),
    "BERT, 3 layers, bf16": Row("bert", precision=Precision.BF16),
}
#: rows of README.md
SHOWN = ("ResNet-50", "ResNet-18", "MobileNetV2", "SqueezeNet 1.1", "BERT, 3 layers", "ViT-tiny")
BATCHES = 2
#: name in oneDNN of the instructions up to those of AVX512-VNNI
VNNI = "AVX512_CORE_VNNI"

Times = Mapping[str, Latency]
#: CPU -> {"versions": [...], "times": row -> threads -> candidate -> fields of Latency}
Results = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """This machine, with all of its instructions or without some of them.

    Attributes:
        cpu: Name of the CPU in the results.
        folder: Subfolder of a row's folder for our libraries.
        target: Target of our libraries. None: all instructions of this machine.
        environment: Variables for the engines' processes.
    """

    cpu: str
    folder: str = "."
    target: Target | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def machine_without_amx(limit: str = VNNI) -> Machine:
    """This machine, as if its CPU ended with VNNI. `limit` is what OpenVINO may use.

    ONNX Runtime has no limit of its own, so it keeps AMX.
    """
    return Machine(
        f"{re.sub(' [+]amx-[^ )]+', '', name_cpu())}, without AMX",
        "without-amx",
        target_without_amx(host_config()),
        {"ONEDNN_MAX_CPU_ISA": limit},
    )


def add_machine_option(parser: argparse.ArgumentParser) -> None:
    """Let the command line choose the machine."""
    parser.add_argument(
        "--without-amx",
        action="store_true",
        help="compile ours without AMX, and keep it from OpenVINO; a CPU of its own in the results",
    )


def choose_machine(
    parser: argparse.ArgumentParser, options: argparse.Namespace, limit: str = VNNI
) -> Machine:
    """The machine that the options ask for; without AMX, OpenVINO may use `limit`."""
    if not options.without_amx:
        return Machine(name_cpu())
    if "amx-tile" not in list_instructions(resolve_target()):
        parser.error(f"--without-amx: {name_cpu()} has no AMX. Leave the option out.")
    return machine_without_amx(limit)


def target_without_amx(config: Mapping[str, Any]) -> Target:
    """The target of a dict for Target, less AMX. LLVM drops all that needs tiles with the tiles."""
    return resolve_target({**config, "mattr": [*config.get("mattr", ()), "-amx-tile"]})


def prepare_row(
    row: str, folder: Path, machine: Machine
) -> tuple[dict[str, Candidate], dict[str, np.ndarray]]:
    """(candidates, one input each) of a row; from the folder if they are there.

    The machines share the models of the rivals. Each has libraries of ours.
    """
    rivals, own = folder / "contenders.json", folder / machine.folder / "own.json"
    if not (rivals.exists() and own.exists()):
        own.parent.mkdir(parents=True, exist_ok=True)
        source = folder / "float.onnx"
        if not rivals.exists():
            onnx.save(MODELS[ROWS[row].model](batch=ROWS[row].batch), source)
        editor = Editor((loaded := load(source))[0])
        bind_params(editor, loaded[1])
        mod = editor.build()
        rng, shape = np.random.default_rng(0), read_shape(source)
        batches = [{"input": rng.normal(size=shape).astype("float32")} for _ in range(BATCHES)]
        if (precision := ROWS[row].precision) is not Precision.FLOAT32:
            np.savez(folder / "inputs.npz", **batches[0])
            write_index(rivals, {"openvino float": Candidate(Engine.OPENVINO, source)})
            narrow = compile_module(mod, machine.target, precision=precision)
            write_index(own, export_own({"relayquant float": narrow}, own.parent))
            return read_row(row, folder, machine)
        qmod = quantize_quickly(mod, batches, None)
        if not rivals.exists():
            np.savez(folder / "inputs.npz", **batches[0])
            models = prepare_candidates([*OTHER_ENGINES.values()], source, qmod, batches, folder)
            for candidate, reason in models.failures.items():
                print(f"{row}: {candidate} is left out: {reason}", flush=True)
            write_index(rivals, models.candidates)
        executables = {
            "relayquant int8": compile_module(qmod, machine.target),
            "relayquant float": compile_module(mod, machine.target),
        }
        write_index(own, export_own(executables, own.parent))
    return read_row(row, folder, machine)


def read_row(
    row: str, folder: Path, machine: Machine
) -> tuple[dict[str, Candidate], dict[str, np.ndarray]]:
    """The same from the folder."""
    rivals, own = folder / "contenders.json", folder / machine.folder / "own.json"
    with np.load(folder / "inputs.npz") as arrays:
        inputs = {name: arrays[name] for name in arrays.files}
    precision = ROWS[row].precision
    return {**read_index(rivals, precision), **read_index(own, precision)}, inputs


def has_precision(row: str, machine: Machine) -> bool:
    """Whether a machine has the instructions of a row, with all that it has.

    OpenVINO has no limit that keeps bfloat16 on vectors.
    """
    if ROWS[row].precision is Precision.FLOAT32:
        return True
    return machine.target is None and has_isa(VECTORS_BF16, resolve_target())


def write_index(index: Path, candidates: Mapping[str, Candidate]) -> None:
    """Name candidates, whose files lie beside the index."""
    entries = {name: (each.engine.value, each.path.name) for name, each in candidates.items()}
    write_text(index, json.dumps(entries))


def read_index(index: Path, precision: Precision) -> dict[str, Candidate]:
    return {
        name: Candidate(
            Engine(engine), index.parent / at, precision if name.endswith("float") else None
        )
        for name, (engine, at) in json.loads(index.read_text()).items()
    }


def read_shape(source: Path) -> tuple[int, ...]:
    value = onnx.load(source, load_external_data=False).graph.input[0]
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def best_rival(times: Times, engine: str, kind: str) -> Latency | None:
    """The fastest of an engine's models of a kind, "int8" or "float"."""
    rows = [row for name, row in times.items() if name.startswith(f"{engine} {kind}")]
    return min(rows, key=lambda row: row.best, default=None)


def format_ratios(times: Times, kind: str) -> str:
    """Our best time in ms, and in brackets how many times as long the rivals take: best, median."""
    own = times.get(f"relayquant {kind}")
    if own is None:
        return ""
    cells = [f"{own.best * 1e3:.2f}"]
    for engine in ("openvino", "onnxruntime"):
        rival = best_rival(times, engine, kind)
        ratios = rival and f"{rival.best / own.best:.2f}, {rival.median / own.median:.2f}"
        cells.append(f"({ratios})" if ratios else "(-)")
    return " ".join(cells)


def list_threads(results: Results) -> list[int]:
    """All numbers of threads that any row was measured with."""
    rows = (row for entry in results.values() for row in entry["times"].values())
    return sorted({int(count) for row in rows for count in row})


def format_threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def head_table(heads: Sequence[str]) -> list[str]:
    """The first two lines of a table in Markdown."""
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]


def format_tables(results: Results, rows: Sequence[str], kinds: Sequence[str]) -> str:
    """A table for each CPU in Markdown, with best and median times, below what the cells mean."""
    lines = [
        "A cell has our best time in ms. The parentheses say how many times as long OpenVINO, then",
        "ONNX Runtime takes: first by the best times, then by the median times. Batches have one",
        "sample, and runs follow each other at once, unless the row says otherwise. Each engine",
        "has a process of its own. A rival runs the faster of two int8 models: its own, and ours",
        "as `export_onnx` writes it. Float models run in float32, in rows with bf16 in bfloat16.",
    ]
    for cpu, entry in results.items():
        threads = list_threads({cpu: entry})
        heads = [f"{kind}, {format_threads(count)}" for kind in kinds for count in threads]
        lines += ["", f"**{cpu}** ({', '.join(entry['versions'])}):", ""]
        lines += head_table(["model", *heads])
        for row in rows:
            if (measured := entry["times"].get(row)) is None:
                continue
            cells = []
            for kind in kinds:
                for count in threads:
                    times = measured.get(str(count))
                    cells.append(format_ratios(read_times(times), kind) if times else "")
            lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shorten_cpu(cpu: str) -> str:
    """ "x (rocketlake +amx-int8 +sgx)" -> "x (rocketlake), with AMX"."""
    short = re.sub(" [+-][^ )]+", "", cpu)
    return f"{short}, with AMX" if "+amx-int8" in cpu else short


def format_summary(results: Results, rows: Sequence[str]) -> str:
    """One table in Markdown: best times of int8, with a column for each CPU."""
    threads = list_threads(results)
    lines = [
        f"Latency of int8 models in ms, batch 1, {' / '.join(map(format_threads, threads))}. In "
        "parentheses: how many times as long the faster of OpenVINO and ONNX Runtime takes.",
        "",
        *head_table(["model", *map(shorten_cpu, results)]),
    ]
    for row in rows:
        cells = []
        for entry in results.values():
            measured = entry["times"].get(row, {})
            found = [read_times(measured.get(str(count), {})) for count in threads]
            parts = [format_best(times) if times else ("-", "-") for times in found]
            own, ratios = (" / ".join(column) for column in zip(*parts, strict=True))
            cells.append(f"{own} ({ratios})" if any(found) else "-")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    lines += [
        "",
        "Times are the best of all runs, and each engine runs in its own process. Of a rival's two "
        "int8 models, its own and ours as",
        "`export_onnx` writes it, the faster one counts. [Speed](docs/speed.md) has all models, "
        "each rival, versions and medians.",
    ]
    return "\n".join(lines)


def format_best(times: Times) -> tuple[str, str]:
    """Our best int8 time in ms, and how many times as long the fastest rival takes."""
    own = times["relayquant int8"].best
    rivals = [best_rival(times, engine, "int8") for engine in ("openvino", "onnxruntime")]
    best = min((rival.best for rival in rivals if rival), default=None)
    return f"{own * 1e3:.2f}", f"{best / own:.2f}" if best else "-"


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


def write_table(page: Path, table: str, name: str = "speed") -> None:
    write_text(page, replace_table(page.read_text(encoding="utf-8"), table, name))


def format_pages(results: Results) -> dict[Path, str]:
    """Page -> what stands between its marks."""
    return {
        ROOT / "docs/speed.md": format_tables(results, [*ROWS], ("int8", "float")),
        ROOT / "README.md": format_summary(results, SHOWN),
    }


def write_pages(results: Results) -> None:
    for page, table in format_pages(results).items():
        write_table(page, table)


def read_results(file: Path) -> Results:
    """What was measured before, on any CPU."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def open_entry(results: Results, cpu: str) -> dict[str, Any]:
    """The entry of a CPU, to add to. It starts afresh if it has other versions than these."""
    versions = list_versions([*OTHER_ENGINES.values()])
    if results.get(cpu, {}).get("versions") != versions:
        results[cpu] = {"versions": versions, "times": {}}
    return results[cpu]


def write_results(results: Results, file: Path) -> None:
    write_text(file, json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--prepare", action="store_true", help="measure nothing")
    add_machine_option(parser)
    options = parser.parse_args()
    machine = choose_machine(parser, options)
    for rival in OTHER_ENGINES.values():
        rival.check()
    with ExitStack() as stack:
        folder = options.folder or stack.enter_context(open_temporary_folder())
        results = read_results(RESULTS)
        measured = open_entry(results, machine.cpu)["times"]
        for row in options.models:
            if not has_precision(row, machine):
                print(f"{row} is left out: {machine.cpu} has no products of bfloat16", flush=True)
                continue
            candidates, inputs = prepare_row(row, folder / ROWS[row].folder, machine)
            for threads in [] if options.prepare else options.threads:
                found = measure_engines(
                    candidates,
                    inputs,
                    threads=threads,
                    rounds=options.rounds,
                    interval=ROWS[row].interval,
                    environment=machine.environment,
                )
                times = {name: asdict(latency) for name, latency in found.latencies.items()}
                measured.setdefault(row, {})[str(threads)] = times
                print(
                    row,
                    threads,
                    *(format_ratios(found.latencies, k) for k in ("int8", "float")),
                    *found.failures.values(),
                    flush=True,
                )
                write_results(results, RESULTS)
    if not options.prepare:
        write_pages(results)


if __name__ == "__main__":
    main()
