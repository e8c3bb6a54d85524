"""The node cases of the onnx package: one operator each, with inputs and expected outputs.

`python tests/formats/readers/onnx_node_cases.py` writes the list of those that are refused anew.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import multiprocessing
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import tvm
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from tvm import relax

import relayquant as rq
from relayquant.errors import ModelError

#: Cases that are refused, each with the reason; the first line names the version of onnx.
REFUSED = Path(__file__).with_name("onnx_node_cases_refused.txt")

#: Types of what goes in and out: no strings, no 8-bit and 4-bit floats, no 4-bit integers.
TYPES = (
    *(TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BOOL),
    *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
    *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
)

#: The code that is shipped, of which LLVM optimizes nothing: half the time.
TARGET = {"kind": "llvm", "opt-level": 0}

#: Longest part of a reason that the list holds.
REASON = 90


class Outcome(enum.Enum):
    """What became of a case."""

    RIGHT = "right"
    REFUSED = "refused"
    BARE = "bare"  #: an exception that is no ModelError
    WRONG = "wrong"


@dataclass(frozen=True)
class Result:
    outcome: Outcome
    reason: str = ""


@functools.cache
def list_cases():
    """All cases with tensors of `TYPES`, without those of training and of other domains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(case for case in collect_testcases(None) if is_usable(case))


def is_usable(case) -> bool:
    model = case.model
    if model is None or any(one.domain not in ("", "ai.onnx") for one in model.opset_import):
        return False
    return all(
        info.type.HasField("tensor_type") and info.type.tensor_type.elem_type in TYPES
        for info in (*model.graph.input, *model.graph.output)
    )


def run_case(case) -> Result:
    """Load, compile and run a case; compare with its own outputs at its own tolerance."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            mod, _ = rq.load(case.model)
    except ModelError as error:
        return Result(Outcome.REFUSED, str(error))
    except Exception as error:
        return Result(Outcome.BARE, f"load: {error!r}")
    try:
        machine = relax.VirtualMachine(rq.compile(mod, TARGET), tvm.cpu())
        found = [run(machine, mod, case, inputs) for inputs, _ in case.data_sets]
    except Exception as error:
        return Result(Outcome.BARE, f"compile or run: {error!r}"[:2000])
    for have, (_, want) in zip(found, case.data_sets, strict=True):
        fault = find_difference(have, [as_array(value) for value in want], case.rtol, case.atol)
        if fault:
            return Result(Outcome.WRONG, fault)
    return Result(Outcome.RIGHT)


def run(machine, mod, case, inputs) -> list[np.ndarray]:
    given = dict(zip((info.name for info in case.model.graph.input), inputs, strict=False))
    arrays = [np.array(as_array(given[param.name]), order="C") for param in mod["main"].params]
    result = machine["main"](*map(tvm.runtime.tensor, arrays))
    return [out.numpy() for out in ([result] if hasattr(result, "numpy") else result)]


def as_array(value) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def find_difference(have, want, rtol: float, atol: float) -> str:
    """What differs between outputs; "" if nothing."""
    if len(have) != len(want):
        return f"{len(have)} outputs for {len(want)}"
    for at, (one, other) in enumerate(zip(have, want, strict=True)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"output {at} is {one.dtype}{one.shape} for {other.dtype}{other.shape}"
        if other.dtype.kind == "f":
            equal = np.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True)
        else:
            equal = np.array_equal(one, other)
        if not equal:
            return f"output {at} is {one.ravel()[:6]} for {other.ravel()[:6]}"
    return ""


def shorten(reason: str) -> str:
    """What the list holds of a reason: without the names of nodes, and without what to do."""
    _, found, rest = reason.partition(" cannot be converted: ")
    text = " ".join((rest if found else reason).split())
    return text.partition(". ")[0][:REASON].strip()


def read_refused() -> tuple[str, dict[str, str]]:
    """(version of onnx, case -> reason) as the list has them."""
    header, *lines = REFUSED.read_text().splitlines()
    return header.split()[-1], dict(line.split(": ", 1) for line in lines)


def run_numbered(at: int) -> Result:
    return run_case(list_cases()[at])


def write_refused() -> None:
    list_cases()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map(run_numbered, range(len(list_cases())), chunksize=20)
    results = dict(zip((case.name for case in list_cases()), found, strict=True))
    refused = {
        name: shorten(result.reason)
        for name, result in results.items()
        if result.outcome is Outcome.REFUSED
    }
    lines = [f"{name}: {reason}" for name, reason in sorted(refused.items())]
    REFUSED.write_text("\n".join([f"# of onnx {onnx.__version__}", *lines]) + "\n")
    for outcome in Outcome:
        names = [name for name, result in results.items() if result.outcome is outcome]
        print(outcome.value, len(names))
        if outcome in (Outcome.BARE, Outcome.WRONG):
            for name in names:
                print(" ", name, results[name].reason[-300:])


if __name__ == "__main__":
    write_refused()
