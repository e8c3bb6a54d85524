"""One call of an operator: its module, and what it gives compiled and in the reference."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx

import relayquant as rq


def build_reduction(name, shape, dtype, **options):
    """A module of one operator on its last axis. Sizes that are texts are symbolic."""
    extents = [tirx.Var(each, "int64") if isinstance(each, str) else each for each in shape]
    x, builder = relax.Var("x", relax.TensorType(extents, dtype)), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(getattr(relax.op, name)(x, -1, **options))
        builder.emit_func_output(y)
    return builder.finalize()


def build_call(compute, *arrays):
    """The module of `compute`, of an operand for each array."""
    operands = [
        relax.Var(f"x{k}", relax.TensorType(array.shape, str(array.dtype)))
        for k, array in enumerate(arrays)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", operands):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(compute(*operands)))
        builder.emit_func_output(result)
    return builder.finalize()


def run_compiled(compute, *arrays):
    """What `compute` gives compiled, and in the reference."""
    mod = build_call(compute, *arrays)
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    compiled = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    (found,) = rq.reference.run(mod, list(arrays))
    return compiled, found


def check_exactly(compute, expected, *arrays):
    for found in run_compiled(compute, *arrays):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(*map(show_nan, (found, expected)))


def show_nan(numbers):
    """numpy knows no NaN among numbers of bfloat16."""
    return numbers.astype("float32") if numbers.dtype.name == "bfloat16" else numbers
