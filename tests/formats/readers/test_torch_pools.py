"""Pools of drawn sizes and arguments, with and without a batch: what PyTorch computes."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest

import relayquant as rq
from relayquant.errors import ModelError

torch = pytest.importorskip("torch")
nn = torch.nn

SEEDS = [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 150))]
SIZES = (7, 9, 5)


def check(module, x):
    with torch.no_grad():
        wanted = module.eval()(x).numpy()
    mod, _ = rq.load(torch.export.export(module, (x,)))
    inputs = [x.numpy()]
    compiled = rq.Executor(rq.compile(mod)).run("main", inputs)[0]
    for got in (rq.reference.run(mod, inputs)[0], compiled):
        assert got.shape == wanted.shape, str(module)
        np.testing.assert_allclose(got, wanted, 1e-4, 1e-5, err_msg=str(module))


def draw_pool(seed):
    """A pool and its data, each argument of PyTorch's drawn; each axis has a result."""
    rng = random.Random(seed)
    while True:
        pool, data = draw_arguments(rng)
        with contextlib.suppress(RuntimeError):  # "Output size is too small"
            pool(data)
            return pool, data


def draw_arguments(rng):
    rank = rng.choice([1, 2, 2, 3])
    axes = range(rank)
    kernel = [rng.randint(1, 4) for _ in axes]
    given = {
        "kernel_size": kernel,
        "stride": rng.choice([None, [rng.randint(1, 4) for _ in axes]]),
        "padding": [rng.randint(0, k // 2) for k in kernel],
        "ceil_mode": rng.random() < 0.6,
    }
    kind = rng.choice(["Avg", "Avg", "Max"])
    if kind == "Max":
        given["dilation"] = [rng.randint(1, 2) for _ in axes]
    else:
        given["count_include_pad"] = rng.random() < 0.5
    if kind == "Avg" and rank > 1:
        given["divisor_override"] = rng.choice([None, rng.randint(1, 9)])
    shape = [*rng.choice([[], [2], [2]]), 3, *(rng.randint(4, 9) for _ in axes)]
    return getattr(nn, f"{kind}Pool{rank}d")(**given), torch.randn(shape)


@pytest.mark.parametrize("seed", SEEDS)
def test_pool__equals_torch(seed):
    check(*draw_pool(seed))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4, 12, (None, 3, 2)])
@pytest.mark.parametrize("kind", ["Avg", "Max"])
def test_adaptive_pool__equals_torch(kind, size, rank):
    size = size[-rank:] if isinstance(size, tuple) else size
    pool = getattr(nn, f"Adaptive{kind}Pool{rank}d")(size)
    check(pool, torch.randn(2, 3, *SIZES[:rank]))
    check(pool, torch.randn(3, *SIZES[:rank]))


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_lp_pool__equals_torch(rank, order):
    pool = getattr(nn, f"LPPool{rank}d")(order, 3, 2, ceil_mode=True)
    check(pool, torch.randn(2, 3, *SIZES[:rank]))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_max_pool__of_indices_is_refused(rank):
    pool = getattr(nn, f"MaxPool{rank}d")(2, return_indices=True)
    program = torch.export.export(pool, (torch.randn(2, 3, *SIZES[:rank]),))
    with pytest.raises(ModelError, match="is asked for its results \\[1\\]; supported"):
        rq.load(program)
