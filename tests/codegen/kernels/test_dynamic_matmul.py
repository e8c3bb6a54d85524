"""Products of activations whose sizes are known at run time, compiled, against exact integers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from emulated_unit import EMULATED, REFUSED, find_target
from exact import call_kernel, finish, random_values
from machines import ISAS, best_isa, compile_kernel, runnable_target

from relayquant.codegen.kernels.integer.dynamic_matmul import DynamicMatmul, build_dynamic_matmul
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Store
from relayquant.codegen.kernels.isa.x86 import AMX

FLOAT = Epilogue(Store.DEQUANTIZE, "float32")
SUMS = Epilogue(Store.ACCUMULATOR, "int32")
#: specification -> (B, M, N, K) of the calls
CASES = {
    "scores of any length": (
        DynamicMatmul(None, 64, "uint8", 130, "uint8", 128, 1e-3, FLOAT),
        [(2, 99, 99, 64), (1, 1, 1, 64), (1, 300, 65, 64), (0, 5, 5, 64)],
    ),
    "values of any length": (
        DynamicMatmul(64, None, "uint8", 0, "int8", -7, 1e-3, w_heads=3),
        [(6, 99, 64, 99), (3, 1, 64, 1), (3, 2, 64, 300), (3, 2, 64, 0)],
    ),
    "everything of the run time": (
        DynamicMatmul(None, None, "int8", -9, "uint8", 100, 1, SUMS),
        [(2, 5, 33, 17), (1, 257, 130, 129), (1, 4, 3, 128), (1, 5, 3, 0)],
    ),
    "transposed, odd sizes": (
        DynamicMatmul(None, None, "int8", 5, "int8", 0, 1e-3, Epilogue(dtype="int8"), w_heads=1),
        [(2, 6, 37, 8), (1, 70, 66, 131)],
    ),
    "only rows": (
        DynamicMatmul(20, 33, "uint8", 3, "int8", 2, 1e-3),
        [(2, 7, 20, 33), (1, 4, 20, 33)],
    ),
    "many columns, a long sum": (
        DynamicMatmul(200, 600, "uint8", 3, "uint8", 2, 1e-4),
        [(1, 9, 200, 600)],
    ),
}  # fmt: skip


def check(case, isa):
    """All calls of a case."""
    spec, calls = CASES[case]
    rng = np.random.default_rng(0)
    x_shape = (None, None, spec.inner)
    y_shape = (None, None, spec.cols)
    w_shape = (None, spec.cols, spec.inner)
    if spec.w_heads is not None:
        w_shape = (None, spec.inner, spec.w_heads, spec.cols)
    func = build_dynamic_matmul(spec, isa, "matmul", x_shape, w_shape, y_shape)
    kernel = compile_kernel(func, find_target(isa))
    for batch, rows, cols, inner in calls:
        x = random_values(rng, (batch, rows, inner), spec.x_dtype)
        w = random_values(rng, (batch, cols, inner), spec.w_dtype)
        left, right = x.astype("int64") - spec.x_zero_point, w.astype("int64") - spec.w_zero_point
        acc = left @ right.transpose(0, 2, 1)
        if spec.w_heads is not None:
            w = w.reshape(batch // spec.w_heads, spec.w_heads, cols, inner).transpose(0, 3, 1, 2)
        got = tvm.runtime.tensor(np.full(acc.shape, 77, spec.epilogue.dtype))
        kernel(*[tvm.runtime.tensor(np.ascontiguousarray(a)) for a in (x, w)], got)
        expected = finish(acc, spec.epilogue, np.float32(spec.multiplier))
        np.testing.assert_array_equal(got.numpy(), expected)


def test_build_dynamic_matmul__sums_beyond_int32():
    spec = DynamicMatmul(None, None, "uint8", 0, "uint8", 0, 1e-7, w_heads=1, sum_dtype="int64")
    shape = (None, None, None)
    func = build_dynamic_matmul(spec, best_isa(), "matmul", shape, (None, None, 1, None), shape)
    x, w = np.full((1, 3, 40_000), 255, "uint8"), np.full((1, 40_000, 1, 5), 255, "uint8")
    x[0, 1], w[..., 2] = 1, 9
    acc = x.astype("int64") @ w[:, :, 0].astype("int64")
    assert acc.max() > 2**31
    got = call_kernel(func, runnable_target(best_isa()), [x, w], acc.shape, "uint8")
    value = np.rint(acc.astype("float32") * np.float32(1e-7))
    np.testing.assert_array_equal(got, np.clip(value, 0, 255).astype("uint8"))
    assert len(np.unique(got)) > 3


@pytest.mark.sample(15)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "isa",
    [AMX, EMULATED, REFUSED, *ISAS],
    ids=["unit", "emulated", "refused", *(isa.name for isa in ISAS)],
)
def test_build_dynamic_matmul__equals_numpy(isa, case):
    check(case, isa)


def test_dynamic_matmul__refuses_a_residual():
    with pytest.raises(ValueError, match="has a residual; allowed: none"):
        DynamicMatmul(None, 8, epilogue=Epilogue(residual=Residual("uint8", 0, 1.0)))


def test_dynamic_matmul__refuses_other_sums():
    with pytest.raises(ValueError, match="sum_dtype is 'int16'; allowed: int32, int64"):
        DynamicMatmul(None, 8, sum_dtype="int16")
