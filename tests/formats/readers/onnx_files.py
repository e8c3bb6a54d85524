"""ONNX files of others: each one is computed as ONNX Runtime has it, or refused.

`python tests/formats/readers/onnx_files.py FOLDER` prints what becomes of every quantized
model below it.
"""

from __future__ import annotations

import collections
import contextlib
import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from onnx_node_cases import TARGET, Outcome, Result

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.errors import RelayQuantError

#: Operators with this in their names make a model a quantized one.
QUANTIZED = ("Quantize", "QLinear", "MatMulInteger", "ConvInteger", "NBits", "Bnb4", "QGemm")

#: Symbolic sizes and input ranges that are tried in turn until ONNX Runtime takes one.
SIZES, LARGEST_INDEX = (3, 1, 2, 4, 5), 2

#: Largest deviation of float results, relative to their root mean square; of integers, the largest
#: and the share of those that deviate: next to a tie, a value is a step off.
MAX_ERROR, MAX_STEPS, MAX_SHARE = 0.02, 1, 0.05


def list_nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of bodies too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from list_nodes(inner)


def find_models(folder: Path) -> Iterator[Path]:
    """The quantized models below a folder."""
    for path in sorted(folder.rglob("*.onnx")):
        model = onnx.load(str(path), load_external_data=False)
        nodes = [node for part in (model.graph, *model.functions) for node in list_nodes(part)]
        if any(name in node.op_type for node in nodes for name in QUANTIZED):
            yield path


def run_onnxruntime(path: Path) -> tuple[dict[str, np.ndarray], list[np.ndarray]] | None:
    """(inputs, outputs) of a model, by its own definition or, where it can only be run optimized,
    so; None if ONNX Runtime does not run it.
    """
    import onnxruntime as runtime

    runtime.set_default_logger_severity(4)
    model = onnx.load(str(path), load_external_data=False)
    constants = {tensor.name for tensor in model.graph.initializer}
    infos = [info for info in model.graph.input if info.name not in constants]
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = runtime.SessionOptions()
        options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, level)
        try:
            session = runtime.InferenceSession(str(path), options)
        except Exception:  # whatever it says: it does not run the model
            continue
        for size in SIZES:
            with contextlib.suppress(Exception):
                inputs = draw_inputs(infos, size)
                return inputs, session.run(None, inputs)
    return None


def draw_inputs(infos: Iterable[onnx.ValueInfoProto], size: int) -> dict[str, np.ndarray]:
    """Normal floats, integers of few values but for those of 8 and 16 bits, which are data."""
    rng = np.random.default_rng(0)
    drawn = {}
    for info in infos:
        tensor = info.type.tensor_type
        shape = [max(dim.dim_value, 0) or size for dim in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if dtype.kind in "iu" and dtype.itemsize <= 2:
            limits = np.iinfo(dtype)
            values = rng.integers(limits.min, limits.max + 1, shape)
        elif dtype.kind in "iub":
            values = rng.integers(0, LARGEST_INDEX, shape)
        else:
            values = rng.normal(size=shape)
        drawn[info.name] = np.asarray(values).astype(dtype)
    return drawn


def run_file(path: Path) -> Result | None:
    """What becomes of a model, run in numpy and compiled, as loaded and lowered; None if ONNX
    Runtime does not run it.
    """
    found = run_onnxruntime(path)
    if found is None:
        return None
    inputs, wanted = found
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            mod, _ = rq.load(path)
            # Codes that no scale stands for (MatMulBnb4) leave nothing to lower.
            has_integers = "R.qnn." in mod.script(show_meta=False)
            qmod = rq.lower(mod) if has_integers else mod
            arrays = [inputs[param.name] for param in qmod["main"].params]
            results = {
                "loaded": rq.reference.run(mod, arrays),
                "lowered": rq.reference.run(qmod, arrays),
                "compiled": Executor(rq.compile(qmod, TARGET)).run("main", arrays),
            }
    except RelayQuantError as error:
        return Result(Outcome.REFUSED, str(error))
    except Exception as error:  # a bare one: what is looked for
        return Result(Outcome.BARE, f"{type(error).__name__}: {error}"[:2000])
    for stage, have in results.items():
        fault = find_deviation(have, wanted)
        if fault:
            return Result(Outcome.WRONG, f"{stage}: {fault}")
    return Result(Outcome.RIGHT)


def find_deviation(have: Iterable[np.ndarray], want: Iterable[np.ndarray]) -> str:
    """What differs between outputs by more than rounding; "" if nothing."""
    have, want = list(have), list(want)
    if len(have) != len(want):
        return f"{len(have)} outputs for {len(want)}"
    for at, (one, other) in enumerate(zip(have, want, strict=True)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"output {at} is {one.dtype}{one.shape} for {other.dtype}{other.shape}"
        difference = one.astype("float64") - other.astype("float64")
        if not difference.size:
            continue
        if other.dtype.kind in "iub":
            is_off = np.abs(difference) > 0
            is_near = np.abs(difference).max() <= MAX_STEPS and is_off.mean() <= MAX_SHARE
        else:
            size = np.sqrt(np.mean(np.square(other.astype("float64"))))
            is_near = np.sqrt(np.mean(np.square(difference))) <= MAX_ERROR * size + 1e-6
        if not is_near:
            return f"output {at} is {one.ravel()[:6]} for {other.ravel()[:6]}"
    return ""


def print_outcomes(folder: Path) -> None:
    """One line for each model that is not right, then the totals."""
    totals = collections.Counter()
    for path in find_models(folder):
        result = run_file(path)
        outcome = "not run" if result is None else result.outcome.value
        totals[outcome] += 1
        if outcome != "right":
            reason = "" if result is None else " ".join(result.reason.split())
            print(f"{outcome}: {path.relative_to(folder)}: {reason}", flush=True)
    print(dict(totals))


if __name__ == "__main__":
    print_outcomes(Path(sys.argv[1]))
