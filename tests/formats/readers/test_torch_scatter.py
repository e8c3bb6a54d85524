"""scatter_reduce and index_reduce of PyTorch: each reduction, with and without what was there."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import relayquant as rq

torch = pytest.importorskip("torch", reason="pip install torch")

KINDS = ("sum", "prod", "mean", "amax", "amin")
DTYPES = ("float32", "float16", "int64", "int32", "int8")


def assert_same(function, *arrays):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    tensors = tuple(map(torch.from_numpy, arrays))
    expected = function(*tensors).numpy()
    mod, _ = rq.load(torch.export.export(Module(), tensors))
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    compiled = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    for got in (rq.reference.run(mod, list(arrays))[0], compiled):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=1e-3)


def draw(rng, dtype, shape):
    """Small numbers, and a few infinities."""
    values = rng.integers(-3, 4, shape).astype(dtype)
    if dtype == "float32":
        values[rng.random(shape) < 0.05] = np.inf
    return values


@pytest.mark.parametrize("is_included", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_reduce__is_what_torch_computes(dim, kind, is_included):
    rng = np.random.default_rng([dim + 1, KINDS.index(kind)])
    shape = (3, 4, 5)
    places = rng.integers(0, shape[dim] - 1, (2, 3, 4))  # some twice, the last never
    data, source = (draw(rng, "float32", each) for each in (shape, (3, 4, 4)))
    assert_same(
        lambda x, i, s: x.scatter_reduce(dim, i, s, kind, include_self=is_included),
        data, places, source,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_scatter_reduce__of_other_types(dtype, kind):
    if kind == "mean" and dtype != "float16":
        return  # refused: test_torch_operators.py
    rng = np.random.default_rng(1)
    data, source = (draw(rng, dtype, (3, 4)) for _ in range(2))
    places = rng.integers(0, 2, (3, 4))
    assert_same(
        lambda x, i, s: x.scatter_reduce(0, i, s, kind, include_self=False), data, places, source
    )


@pytest.mark.parametrize("is_included", [True, False])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_index_reduce__is_what_torch_computes(kind, is_included):
    rng = np.random.default_rng(2)
    data, source = draw(rng, "float32", (3, 4, 5)), draw(rng, "float32", (3, 6, 5))
    assert_same(
        lambda x, i, s: x.index_reduce(1, i, s, kind, include_self=is_included),
        data, rng.integers(0, 3, 6), source,
    )  # fmt: skip
