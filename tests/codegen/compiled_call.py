"""One call of an operator: its module, and what it gives compiled and in the reference."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx

import relayquant as rq
from relayquant.ir.rewrite.function import make_main


def build_reduction(name, shape, dtype, **options):
    """A module of one operator on its last axis. Sizes that are texts are symbolic."""
    extents = [tirx.Var(each, "int64") if isinstance(each, str) else each for each in shape]
    x = relax.Var("x", relax.TensorType(extents, dtype))
    return make_main([x], lambda _: getattr(relax.op, name)(x, -1, **options))


def build_call(compute, *arrays):
    """The module of `compute`, of an operand for each array."""
    operands = [
        relax.Var(f"x{k}", relax.TensorType(array.shape, str(array.dtype)))
        for k, array in enumerate(arrays)
    ]
    return make_main(operands, lambda _: compute(*operands))


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
