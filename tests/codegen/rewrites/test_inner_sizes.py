"""Products whose inner size is symbolic on one side: numpy's result, for the size that fits."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx

import relayquant as rq
from relayquant.errors import DataError, ModelError
from relayquant.ir.rewrite.function import make_main

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((8, 3)).astype("float32")


def make_product(is_left: bool):
    """A product of x and a constant; its other size stays symbolic."""
    rows, inner = tirx.Var("n", "int64"), tirx.Var("k", "int64")
    sizes = [rows, inner] if is_left else [inner, rows]
    x = relax.Var("x", relax.TensorType(sizes, "float32"))
    weight = relax.const(WEIGHT if is_left else WEIGHT.T)
    return make_main([x], lambda _: relax.op.matmul(*((x, weight) if is_left else (weight, x))))


@pytest.mark.parametrize("is_left", [True, False])
def test_product__inner_size_of_the_other_side(is_left):
    exe = rq.Executor(rq.compile(make_product(is_left)))
    for rows in (1, 5):
        x = RNG.standard_normal((rows, 8) if is_left else (8, rows)).astype("float32")
        (got,) = exe.run("main", [x])
        np.testing.assert_allclose(got, x @ WEIGHT if is_left else WEIGHT.T @ x, 1e-5, 1e-5)
    with pytest.raises(DataError, match="8"):
        exe.run("main", [np.ones((7, 7), "float32")])


def test_products__that_need_two_sizes_are_named():
    size = tirx.Var("k", "int64")
    x = relax.Var("x", relax.TensorType((2, size), "float32"))
    mod = make_main(
        [x],
        lambda builder: relax.op.add(
            *[
                builder.emit(relax.op.matmul(x, relax.const(np.ones((rows, 4), "float32"))), name)
                for rows, name in ((3, "first"), (5, "second"))
            ]
        ),
    )
    with pytest.raises(
        ModelError, match=r"'x': its size 'k' must be 3 for .*'first' and 5 for 'second'.*RQ206"
    ):
        rq.compile(mod)
