"""The reference's max pools equal the largest values of numpy's windows."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model
from numpy.lib.stride_tricks import sliding_window_view
from tvm.relax import op

from relayquant.ir.reference import run


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(
    ("size", "strides", "padding", "dilation"),
    [
        ((2, 2), (2, 2), (0, 0), (1, 1)),
        ((3, 1), (1, 2), (1, 0), (1, 1)),
        ((2, 4), (3, 1), (1, 2), (2, 1)),
        ((1, 1), (1, 1), (0, 0), (1, 1)),
    ],
)
def test_max_pool__is_the_largest_of_each_window(size, strides, padding, dilation, dtype):
    rng = np.random.default_rng(8)
    x = rng.integers(-100, 100, (2, 3, 9, 8)).astype(dtype)
    lowest = -128
    if dtype == "float32":
        x[0, 0, 4, 4], x[1, 2, 0], lowest = np.nan, -np.inf, -np.inf
    mod = build_model(
        lambda e, x: e("y", op.nn.max_pool2d(x, size, strides, (*padding, *padding), dilation)),
        x.shape,
        dtype=dtype,
    )
    before, after = x.copy(), np.asfortranarray(x)
    filled = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)], constant_values=lowest)
    reach = [(n - 1) * d + 1 for n, d in zip(size, dilation, strict=True)]
    windows = sliding_window_view(filled, reach, (2, 3))  # pyright: ignore[reportArgumentType]
    windows = windows[:, :, :: strides[0], :: strides[1], :: dilation[0], :: dilation[1]]
    for data in (x, after):
        np.testing.assert_array_equal(run(mod, [data])[0], windows.max(axis=(4, 5)))
    np.testing.assert_array_equal(x, before)
