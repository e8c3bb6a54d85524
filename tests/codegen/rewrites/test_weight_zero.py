"""Zero points of weights: taken out of products, the same integers, on kernels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.codegen.rewrites.zero_point_correction import subtract_zero_points
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.function import make_main
from relayquant.ir.rewrite.graph import constant_value

RNG = np.random.default_rng(3)


def build_product(op, weight: np.ndarray, zero, shape: tuple, **attrs) -> tvm.IRModule:
    """main(x uint8) = op(x, weight, 7, zero)."""
    x = relax.Var("x", relax.TensorType(shape, "uint8"))
    constant = relax.const(weight, str(weight.dtype))
    zero = relax.const(np.asarray(zero, "int32"), "int32")
    return make_main([x], lambda _: op(x, constant, 7, zero, 1.0, 1.0, **attrs))


def test_scales_and_zero_points_per_channel__compile():
    """The window, a product of one channel, has no scale per channel."""
    shape = (2, 4, 6, 6)
    weight = relax.const(draw(0, 255, 5, 4, 3, 3, dtype="uint8"), "uint8")
    zero = relax.const(np.arange(90, 95, dtype="int32"))
    scale = relax.const(np.linspace(0.01, 0.05, 5, dtype="float32"))
    x = relax.Var("x", relax.TensorType(shape, "uint8"))
    mod = make_main([x], lambda _: qnn.conv2d(x, weight, 7, zero, 0.5, scale, **PADDED))
    data = draw(0, 255, *shape, dtype="uint8")
    expected = rq.reference.run(mod, [data])[0]
    np.testing.assert_array_equal(Executor(rq.compile(mod)).run("main", [data])[0], expected)


def draw(low: int, high: int, *shape: int, dtype: str = "int8") -> np.ndarray:
    """With the highest integer in the first channel and the lowest in the last."""
    values = RNG.integers(low, high + 1, shape).astype(dtype)
    values.flat[0], values.flat[-1] = high, low
    return values


PADDED = {"padding": [1, 1, 1, 1]}
NHWC = {"data_layout": "NHWC", "kernel_layout": "OHWI"}

#: name -> (operator, weight, zero point, shape of the data, attributes, products in the result)
CASES = {
    "fits": (qnn.conv2d, draw(-50, 100, 5, 4, 3, 3), 20, (2, 4, 6, 6), PADDED, 1),
    "uint8_128": (qnn.conv2d, draw(0, 255, 5, 4, 1, 1, dtype="uint8"), 128, (2, 4, 6, 6), {}, 1),
    "conv2d": (qnn.conv2d, draw(-128, 127, 5, 4, 3, 3), 20, (2, 4, 6, 6), PADDED, 2),
    "uint8": (qnn.conv2d, draw(0, 255, 5, 4, 3, 3, dtype="uint8"), 90, (2, 4, 6, 6), PADDED, 2),
    "channels": (qnn.conv2d, draw(-128, 127, 5, 4, 3, 3), range(5), (2, 4, 6, 6), PADDED, 2),
    "nhwc": (qnn.conv2d, draw(-128, 127, 5, 3, 3, 4), range(5), (2, 6, 6, 4), NHWC, 2),
    "groups": (
        qnn.conv2d, draw(-128, 127, 6, 2, 3, 3), range(6), (2, 4, 6, 6), {"groups": 2}, 2,
    ),
    "conv1d": (qnn.conv1d, draw(-128, 127, 5, 4, 3), range(5), (2, 4, 9), {}, 2),
    "dense": (qnn.dense, draw(-128, 127, 5, 8), range(5), (2, 3, 8), {}, 2),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_product__equal_integers_without_zero_points(name):
    op, weight, zero, shape, attrs, count = CASES[name]
    mod = build_product(op, weight, list(zero) if isinstance(zero, range) else zero, shape, **attrs)
    data = draw(0, 255, *shape, dtype="uint8")
    expected = rq.reference.run(mod, [data])[0]
    centred = subtract_zero_points(mod)
    np.testing.assert_array_equal(rq.reference.run(centred, [data])[0], expected)
    graph = Graph(centred)
    products = [graph.call_of(b.var) for b in graph.bindings if "qnn" in graph.op_name(b.var)]
    assert len(products) == count
    assert all(str(constant_value(call.args[1]).dtype) == "int8" for call in products)
    assert not any(constant_value(call.args[3]).any() for call in products)
    np.testing.assert_array_equal(Executor(rq.compile(mod)).run("main", [data])[0], expected)


def test_zero_point_of_0__is_left():
    mod = build_product(qnn.dense, draw(-128, 127, 5, 8), 0, (2, 8))
    tvm.ir.assert_structural_equal(subtract_zero_points(mod), mod)
