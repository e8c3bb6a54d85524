"""Max pools of floats that hold minus infinity, as numpy computes them."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_call import build_call
from tvm import relax, tirx

import relayquant as rq


@pytest.mark.optimized
@pytest.mark.parametrize("is_ceil", [False, True])
@pytest.mark.parametrize("layout", ["NCW", "NCHW", "NHWC", "NCDHW", "NDHWC"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_max_pool__of_minus_infinity_alone(dtype, layout, is_ceil):
    """TVM pads with the lowest finite number."""
    rng, rank, size, stride = np.random.default_rng(0), len(layout) - 2, 6, 2
    data = np.where(rng.random((2, 3) + (size,) * rank) < 0.2, 1.5, -np.inf).astype(dtype)
    data[0] = -np.inf
    pads = [(0, 0), (0, 0)] + [(1, 1 + is_ceil)] * rank
    padded = np.pad(data, pads, constant_values=-np.inf)
    axes = tuple(range(2, 2 + rank))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3,) * rank, axes)
    steps = (slice(None), slice(None), *[slice(None, None, stride)] * rank)
    want = windows[steps].max(axis=tuple(range(2 + rank, 2 + 2 * rank)))
    if layout[1] != "C":
        data, want = np.moveaxis(data, 1, -1), np.moveaxis(want, 1, -1)
    data = np.ascontiguousarray(data)
    pool = getattr(relax.op.nn, f"max_pool{rank}d")
    mod = build_call(
        lambda x: pool(
            x, (3,) * rank, (stride,) * rank, (1,) * rank, (1,) * rank, is_ceil, layout=layout
        ),
        data,
    )
    for found in (rq.Executor(rq.compile(mod)).run("main", [data]), rq.reference.run(mod, [data])):
        np.testing.assert_array_equal(found[0], want, strict=True)


@pytest.mark.parametrize("size", [4, "w"])
def test_max_pool__leaves_out_a_window_that_begins_in_the_padding(size):
    """As in PyTorch: with ceil_mode, 4 elements have one window of 2 with stride 4, 5 have two."""
    builder = relax.BlockBuilder()
    width = tirx.Var("w", "int64") if size == "w" else size
    x = relax.Var("x", relax.TensorType((1, 1, width), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit_output(relax.op.nn.max_pool1d(x, 2, 4, ceil_mode=True))
        builder.emit_func_output(made)
    machine = rq.Executor(rq.compile(builder.get()))
    for count, want in {4: [1.0], 5: [1.0, 4.0]}.items():
        if size in ("w", count):
            data = np.arange(count, dtype="float32").reshape(1, 1, count)
            (found,) = machine.run("main", [data])
            np.testing.assert_array_equal(np.asarray(found)[0, 0], want)
