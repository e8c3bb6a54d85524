"""Medians, with NaN and of nothing, and running sums of nothing: PyTorch's results, or an error."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from compiled_call import build_reduction, check_exactly, run_compiled
from tvm import relax

import relayquant as rq

op = relax.op
DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "uint8"]


def draw(dtype):
    """Numbers of which no two are equal, 3 x 4 x 5; floats: with a NaN or two in some rows."""
    data = np.random.default_rng(0).permutation(60).reshape(3, 4, 5).astype("float64")
    if "float" in dtype:
        data[0, 1, 3] = data[2, 0, 0] = data[2, 0, 4] = np.nan
    return data.astype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)


@pytest.mark.sample(8)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [-1, 0, 1, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_median__is_the_one_of_pytorch(dtype, axis, keepdims):
    """The lower of two; NaN if there is one, and where the first one is."""
    torch = pytest.importorskip("torch")
    data = draw(dtype)
    tensor = torch.tensor(data.astype("float64")).to(getattr(torch, dtype))
    if axis is None:
        value = np.float64(torch.median(tensor)).astype(data.dtype)
        expected = value.reshape((1, 1, 1) if keepdims else ())
        check_exactly(lambda x: op.median(x, None, keepdims), expected, data)
        return
    values, indices = torch.median(tensor, axis, keepdim=keepdims)
    expected = values.double().numpy().astype(data.dtype), indices.numpy()
    for at in range(2):
        check_exactly(lambda x, at=at: op.median(x, [axis], keepdims)[at], expected[at], data)


def test_median__over_two_axes():
    data = draw("int32")
    rows = np.sort(data.transpose(1, 0, 2).reshape(4, 15), -1)
    check_exactly(lambda x: op.median(x, [0, 2]), rows[:, 7], data)


@pytest.mark.parametrize("size", [0, "n"])
def test_median__of_nothing_is_refused(size):
    """PyTorch: "Expected reduction dim 1 to have non-zero size"."""
    mod, data = build_reduction("median", (2, size), "float32"), np.ones((2, 0), "float32")
    with pytest.raises(rq.errors.ModelError, match="empty"):
        rq.reference.run(mod, [data])
    with pytest.raises((ValueError, RuntimeError), match=r"an axis of size 0|do not fit"):
        rq.Executor(rq.compile(mod)).run("main", [data])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("axis", [0, -1, None])
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_scan__of_nothing_is_empty(name, axis, dtype):
    data = np.ones((2, 0), getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    for found in run_compiled(lambda x: getattr(op, name)(x, axis), data):
        assert found.shape == ((0,) if axis is None else (2, 0))


@pytest.mark.parametrize("name", ["sort", "argsort"])
def test_sort__of_bfloat16_with_nan(name):
    """numpy compares bfloat16 without knowing its NaN; PyTorch puts them last."""
    torch = pytest.importorskip("torch")
    data = draw("bfloat16")
    tensor = torch.tensor(data.astype("float32")).bfloat16()
    values, order = torch.sort(tensor, stable=True)
    want = values.float().numpy().astype(data.dtype) if name == "sort" else order.numpy()
    options = {} if name == "sort" else {"dtype": "int64"}
    check_exactly(lambda x: getattr(op, name)(x, -1, **options), want, data)


@pytest.mark.parametrize("name", ["equal", "not_equal", "less_equal"])
def test_comparison_with_itself__of_bfloat16(name):
    data = draw("bfloat16")
    numbers = data.astype("float32")
    check_exactly(lambda x: getattr(op, name)(x, x), getattr(np, name)(numbers, numbers), data)


@pytest.mark.parametrize("name", ["isnan", "isinf", "isfinite"])
def test_kind_of_number__of_bfloat16(name):
    data = draw("bfloat16")
    data[0, 0, :2] = [np.inf, -np.inf]
    check_exactly(getattr(op, name), getattr(np, name)(data.astype("float32")), data)
