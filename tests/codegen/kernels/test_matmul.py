"""Products of two activation matrices, compiled for every instruction set, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from exact import call_kernel, finish, random_values
from machines import every_isa_in_samples, runnable_target

from relayquant.codegen.kernels.integer.epilogue import Epilogue, Store
from relayquant.codegen.kernels.integer.matmul import BatchMatmul, build_batch_matmul

CASES = {
    "uint8 x symmetric int8": BatchMatmul(3, 7, 20, 32, "uint8", 3, "int8", 0, 1e-3),
    "int8 x uint8, odd sizes": BatchMatmul(2, 5, 33, 17, "int8", -9, "uint8", 100, 1e-3),
    "inner 3, float output": BatchMatmul(
        1, 1, 5, 3, "uint8", 9, "int8", -100, 1e-3, Epilogue(Store.DEQUANTIZE, "float32")
    ),
    "accumulators": BatchMatmul(
        2, 30, 100, 64, "int8", 9, "int8", -100, 1, Epilogue(Store.ACCUMULATOR, "int32")
    ),
    "uint8 x uint8": BatchMatmul(2, 16, 16, 64, "uint8", 128, "uint8", 128, 1e-3),
    "with threads": BatchMatmul(4, 128, 128, 64, "uint8", 130, "uint8", 128, 1e-3),
    "99 tokens": BatchMatmul(2, 99, 99, 64, "uint8", 130, "uint8", 128, 1e-3),
    "values of 99 tokens": BatchMatmul(2, 99, 64, 99, "uint8", 0, "uint8", 91, 1e-3, w_heads=1),
    "inner 99": BatchMatmul(2, 16, 64, 99, "int8", 3, "int8", 91, 1e-3),
    "values of 3 heads": BatchMatmul(6, 9, 64, 18, "uint8", 3, "uint8", 140, 1e-3, w_heads=3),
    "values of 2 heads, a panel and more": BatchMatmul(
        2, 30, 100, 33, "uint8", 3, "int8", -5, 1e-3, w_heads=2
    ),
    "transposed, less than a vector": BatchMatmul(
        2, 5, 3, 7, "int8", -9, "uint8", 100, 1e-3, w_heads=1
    ),
    "transposed, float output": BatchMatmul(
        1, 6, 37, 8, "uint8", 9, "int8", -100, 1e-3, Epilogue(Store.DEQUANTIZE, "float32"), 1
    ),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES)
@every_isa_in_samples
def test_build_batch_matmul__equals_numpy(isa, case):
    spec, rng = CASES[case], np.random.default_rng(0)
    x = random_values(rng, (spec.batch, spec.rows, spec.inner), spec.x_dtype)
    w = random_values(rng, (spec.batch, spec.cols, spec.inner), spec.w_dtype)
    left, right = x.astype("int64") - spec.x_zero_point, w.astype("int64") - spec.w_zero_point
    acc = left @ right.transpose(0, 2, 1)
    stored = w
    if spec.w_heads is not None:
        heads = w.reshape(-1, spec.w_heads, spec.cols, spec.inner)
        stored = np.ascontiguousarray(heads.transpose(0, 3, 1, 2))
    assert stored.shape == spec.w_shape
    func = build_batch_matmul(spec, isa)
    got = call_kernel(func, runnable_target(isa), [x, stored], acc.shape, spec.epilogue.dtype)
    expected = finish(acc, spec.epilogue, np.float32(spec.multiplier))
    np.testing.assert_array_equal(got, expected)


def test_batch_matmul__rejects_other_dtypes():
    with pytest.raises(ValueError, match="allowed: uint8, int8"):
        BatchMatmul(1, 2, 2, 2, x_dtype="int16")


@pytest.mark.parametrize("heads", [0, 4])
def test_batch_matmul__rejects_heads_that_do_not_divide_the_batch(heads):
    with pytest.raises(ValueError, match="allowed: divisors of the batch 6, or None"):
        BatchMatmul(6, 2, 2, 2, w_heads=heads)
