"""A reversed axis of a reshaped value: compiled code gives numpy's values."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx

import relayquant as rq
from relayquant.ir.rewrite.function import make_main

op = relax.op
N = tirx.Var("n", "int64")


def compile_body(body, *types: relax.TensorType) -> rq.Executor:
    params = [relax.Var(name, ty) for name, ty in zip("xy", types, strict=False)]
    mod = make_main(params, lambda builder: body(builder.emit, *params))
    return rq.Executor(rq.compile(mod))


#: Operators on x (n, 5, 4), and numpy's form of them.
REVERSED = {
    "all": (
        lambda emit, x, n: op.flip(emit(op.reshape(x, (n * 20,))), 0),
        lambda x: x.reshape(-1)[::-1],
    ),
    "each_third": (
        lambda emit, x, n: op.strided_slice(
            emit(op.reshape(x, (n * 20,))), [0], [17], [1], [-3], assume_inbound=True
        ),
        lambda x: x.reshape(-1)[17:1:-3],
    ),
    "between_reshapes": (
        lambda emit, x, n: op.reshape(emit(op.flip(emit(op.reshape(x, (n * 20,))), 0)), (5, n * 4)),
        lambda x: x.reshape(-1)[::-1].reshape(5, -1),
    ),
    "rows": (
        lambda emit, x, n: op.flip(emit(op.reshape(x, (n * 10, 2))), 0),
        lambda x: x.reshape(-1, 2)[::-1],
    ),
    "twice": (
        lambda emit, x, n: op.flip(
            emit(op.reshape(emit(op.flip(emit(op.reshape(x, (n * 20,))), 0)), (4, n * 5))), 1
        ),
        lambda x: x.reshape(-1)[::-1].reshape(4, -1)[:, ::-1],
    ),
}


@pytest.mark.parametrize("size", [2, N], ids=["known", "symbolic"])
@pytest.mark.parametrize("name", REVERSED)
def test_reversed_axes__of_reshaped_values(name, size):
    build, compute = REVERSED[name]
    executor = compile_body(
        lambda emit, x: build(emit, x, size), relax.TensorType((size, 5, 4), "float32")
    )
    for n in (2,) if size == 2 else (1, 2, 7):
        x = np.random.default_rng(n).normal(size=(n, 5, 4)).astype("float32")
        np.testing.assert_array_equal(executor.run("main", [x])[0], compute(x))


def test_quotients__of_differences_of_data():
    """Divisors that are no sizes may be negative."""
    ty = relax.TensorType((4, 5), "int32")
    executor = compile_body(
        lambda emit, x, y: op.floor_divide(emit(op.subtract(relax.const(np.int32(5)), x)), y),
        ty,
        ty,
    )
    rng = np.random.default_rng(0)
    x, y = rng.integers(-20, 20, (2, 4, 5), dtype="int32")
    y[y == 0] = -3
    np.testing.assert_array_equal(executor.run("main", [x, y])[0], (5 - x) // y)
