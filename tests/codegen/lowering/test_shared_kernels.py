"""Kernels that differ in numbers only: one function, and the same bits as before."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tvm
from exact import finish

from relayquant.codegen.kernels.integer.convolution.direct import build_dense, pack_dense
from relayquant.codegen.kernels.integer.elementwise import Requantize, Space, build_requantize
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Store
from relayquant.codegen.kernels.integer.matmul import BatchMatmul, build_batch_matmul
from relayquant.codegen.kernels.integer.specs import Constants, Dense
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.lowering.engine import Lowered
from relayquant.codegen.lowering.kernel_call import call_built
from relayquant.codegen.lowering.shared_kernels import read_skeleton, share_kernels

SUMS = Epilogue(output=Store.ACCUMULATOR, dtype="int32")
DATA = np.arange(64).astype("uint8")


def call_of(zero_point: int, factor: float, out_zero: int, size: int = 64) -> Lowered:
    data = Space("uint8", zero_point, factor)
    spec = Requantize((size,), data, Epilogue(zero_point=out_zero))
    return call_built((), partial(build_requantize, spec), (DATA[:size],))


def run(call: Lowered) -> np.ndarray:
    kernel = tvm.compile(tvm.IRModule({"main": call.kernel.func}), target=resolve_target(None))[
        "qnn_requantize"
    ]
    y = tvm.runtime.tensor(np.zeros(len(call.operands[0]), "uint8"))
    kernel(*map(tvm.runtime.tensor, call.operands), y)
    return y.numpy()


def test_share_kernels__numbers_become_operands():
    calls = [call_of(3, 0.5, 7), call_of(4, 0.25, 7), call_of(3, 0.25, 7)]
    shared = share_kernels(calls)
    assert len({call.kernel.func for call in shared}) == 1
    # The output's zero point and bounds are the same in all.
    assert [[list(array) for array in call.operands[1:]] for call in shared] == [
        [[3], [0.5]],
        [[4], [0.25]],
        [[3], [0.25]],
    ]
    for before, after in zip(calls, shared, strict=True):
        np.testing.assert_array_equal(run(after), run(before))


@pytest.mark.parametrize(
    "others",
    [[call_of(0, 0.5, 7)], [call_of(3, 0.5, 7, 32)], [call_of(3, 0.5, 7)], []],
    ids=["no subtraction", "another size", "equal", "alone"],
)
def test_share_kernels__keeps_what_nothing_shares(others):
    calls = [call_of(3, 0.5, 7), *others]
    for before, after in zip(calls, share_kernels(calls), strict=True):
        assert after is before


def test_share_kernels__products_of_activations_with_other_zero_points():
    """Attention's products of all layers are one kernel, whatever the zero points of both sides."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (1, 4, 16)).astype("uint8")
    w = rng.integers(0, 256, (1, 32, 16)).astype("uint8")
    isa, zeros = select_isa(resolve_target(None)), [(3, 5), (100, 200)]
    products = [
        BatchMatmul(1, 4, 32, 16, "uint8", x_zero, "uint8", w_zero, epilogue=SUMS)
        for x_zero, w_zero in zeros
    ]
    calls = [call_built((), partial(build_batch_matmul, each, isa), (x, w)) for each in products]
    shared = share_kernels(calls)
    assert len({call.kernel.func for call in shared}) == 1
    for (x_zero, w_zero), call in zip(zeros, shared, strict=True):
        wide = (x.astype("int64") - x_zero) @ (w.astype("int64") - w_zero).transpose(0, 2, 1)
        y = tvm.runtime.tensor(np.zeros(wide.shape, "int32"))
        library = tvm.compile(tvm.IRModule({"main": call.kernel.func}), target=resolve_target(None))
        library["batch_matmul"](*map(tvm.runtime.tensor, call.operands), y)
        np.testing.assert_array_equal(y.numpy(), wide)


def test_share_kernels__numbers_of_all_pixels_are_read_once():
    """A tile has the numbers of its epilogue for each pixel. Copies would exceed the registers."""
    rng = np.random.default_rng(0)
    x, r = (rng.integers(0, 256, (24, 16)).astype("uint8") for _ in "xr")
    weight, bias = rng.integers(-127, 128, (16, 16)).astype("int8"), np.arange(16, dtype="int32")
    isa, calls, wanted = select_isa(resolve_target(None)), [], []
    for zero, added, factor in [(3, 5, 0.5), (100, 70, 0.25)]:
        residual = Residual("uint8", added, factor)
        spec = Dense(24, 16, 16, epilogue=Epilogue(zero_point=zero, residual=residual))
        constants = Constants(weight, bias, np.float32(0.01))
        operands = (x, *pack_dense(spec, isa, constants).arguments(), r)
        calls.append(call_built((), partial(build_dense, spec, isa), operands))
        sums = x.astype("int64") @ weight.T.astype("int64") + bias
        wanted.append(finish(sums, spec.epilogue, np.float32(0.01), r))
    shared = share_kernels(calls)
    for call, expected in zip(shared, wanted, strict=True):
        numbers = call.operands[len(calls[0].operands) :]
        assert numbers
        assert all(len(set(each)) == len(each) for each in numbers)
        library = tvm.compile(tvm.IRModule({"main": call.kernel.func}), target=resolve_target(None))
        y = tvm.runtime.tensor(np.zeros(r.shape, "uint8"))
        library["dense"](*map(tvm.runtime.tensor, call.operands), y)
        np.testing.assert_array_equal(y.numpy(), expected)


def test_read_skeleton__tells_zeros_apart():
    """0.0 and -0.0 are equal as numbers, but not in every result."""
    positive, negative = (read_skeleton(call_of(3, zero, 7).kernel.func) for zero in (0.0, -0.0))
    tvm.ir.assert_structural_equal(positive.func, negative.func)
    assert positive.numbers != negative.numbers
