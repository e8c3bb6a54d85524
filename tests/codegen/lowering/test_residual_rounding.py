"""Sums with the scale of the result: what is added is no product, and the other one is rounded.

LLVM makes a sum of fma(r, 1, acc * m), and contracts that to fma(acc, m, r): one rounding less.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from machines import runnable_target
from tvm import relax

import relayquant as rq
from relayquant.codegen.eager import EagerModule
from relayquant.codegen.kernels.isa.x86 import AVX2, AVX512BW, SSE2
from relayquant.ir.dialect import qnn

#: At level 0 LLVM contracts nothing.
pytestmark = pytest.mark.optimized

RNG = np.random.default_rng(0)
ONE, ZERO = relax.const(np.float32(1)), relax.const(np.int32(0))


def list_ties() -> list[tuple[int, np.float32]]:
    """Factors (n, m) whose product is k + 1/2 once it is rounded to float32, and is off from it by
    more than half a unit in the last place of a difference below 64.
    """
    found = []
    for number in range(3, 128, 2):
        for half in np.arange(128.5, 160):
            factor = np.float32(half / number)
            exact = float(factor) * number
            if np.float32(exact) == half and abs(exact - half) > 2e-6:
                found.append((number, factor))
    return found


TIES = list_ties()
#: The factors of a sum without a product before it, which has one multiplier.
ADDED = TIES[len(TIES) // 2]


def make_acc(emit, kind: str, x: relax.Var, weights: np.ndarray) -> relax.Var:
    """x * weights, in int32; or x."""
    channels = weights.size
    if kind == "add":
        return x
    if kind == "1x1":
        kernel, layout = np.diag(weights)[None, None], {"kernel_layout": "HWIO"}
    else:
        kernel = weights.reshape(1, 1, channels, 1)
        layout = {"kernel_layout": "HWOI", "groups": channels}
    const = relax.const(np.ascontiguousarray(kernel))
    return emit(qnn.conv2d(x, const, ZERO, ZERO, ONE, ONE, data_layout="NHWC", **layout))


def make_module(kind: str, channels: int, has_residual: bool) -> tvm.IRModule:
    """r - acc * multiplier, where acc * multiplier is k + 1/2 only once it is rounded.

    The difference is small, so that it could hold what the product had beyond that.
    """
    numbers, factors = zip(*(TIES[i] for i in RNG.integers(0, len(TIES), channels)), strict=True)
    weights, multipliers = -np.array(numbers, "int8"), np.array(factors)
    if kind == "add":
        multipliers = np.float32(ADDED[1])
    shape = (1, 9, 5, channels)
    x, r = (relax.Var(name, relax.TensorType(shape, "uint8")) for name in ("x", "r"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, r]):
        with builder.dataflow():
            acc = make_acc(builder.emit, kind, x, weights)
            scales = relax.const(multipliers)
            least = 2 * ADDED[0] if kind == "add" else 0  # n - 2 * n = -n
            zeros = relax.const(np.full(multipliers.shape, least, "int32"))
            axis = {"lhs_axis": 3} if multipliers.ndim else {}
            if has_residual:
                total = qnn.add(
                    acc, r, scales, zeros, ONE, ZERO, ONE, ZERO, out_dtype="uint8", **axis
                )
            else:
                axis = {"axis": 3} if multipliers.ndim else {}
                zero = relax.const(np.int32(200))  # the product is below 0
                total = qnn.requantize(acc, scales, zeros, ONE, zero, out_dtype="uint8", **axis)
            y = builder.emit_output(total)
        builder.emit_func_output(y)
    return builder.finalize()


def draw_inputs(kind: str, channels: int) -> list[np.ndarray]:
    shape = (1, 9, 5, channels)
    first = np.full(shape, ADDED[0] if kind == "add" else 1, "uint8")
    return [first, RNG.integers(160, 190, shape).astype("uint8")]


@pytest.mark.parametrize(
    "isa", [SSE2, AVX2, AVX512BW, None], ids=lambda isa: getattr(isa, "name", "own")
)
@pytest.mark.parametrize("channels", [8, 24, 64])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("kind", ["1x1", "depthwise", "add"])
def test_rounding__a_sum_with_the_scale_of_the_result(kind, has_residual, channels, isa):
    mod, inputs = make_module(kind, channels, has_residual), draw_inputs(kind, channels)
    (expected,) = rq.reference.run(mod, inputs)
    target = None if isa is None else runnable_target(isa)
    vm = relax.VirtualMachine(rq.compile(mod, target), tvm.cpu())
    got = vm["main"](*map(tvm.runtime.tensor, inputs)).numpy()
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", ["1x1", "depthwise", "add"])
def test_rounding__eager_kernels_round_as_often(kind):
    mod, inputs = make_module(kind, 24, True), draw_inputs(kind, 24)
    (expected,) = rq.reference.run(mod, inputs)
    (got,) = EagerModule(mod).run("main", inputs)
    np.testing.assert_array_equal(got, expected)
