"""Constants with one element and any number of axes: the kernels that a scalar has, and the result
that onnx's evaluator has.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx

import relayquant as rq

WIDTH = 24
RNG = np.random.default_rng(2)
WEIGHT = RNG.normal(0, 0.3, (WIDTH, WIDTH)).astype("float32")
FACTOR = RNG.normal(1, 0.2, WIDTH).astype("float32")


class Drawer:
    """Nodes of a graph whose numbers have `ndim` axes, as PaddlePaddle writes 1."""

    def __init__(self, ndim: int) -> None:
        self.ndim, self.nodes, self.tensors = ndim, [], []

    def add(self, op: str, *operands: str | float | np.ndarray, **attributes) -> str:
        name = f"v{len(self.nodes)}"
        names = [each if isinstance(each, str) else self.keep(each) for each in operands]
        self.nodes.append(helper.make_node(op, names, [name], **attributes))
        return name

    def keep(self, value: float | np.ndarray) -> str:
        name = f"c{len(self.tensors)}"
        if not isinstance(value, np.ndarray):
            value = np.full((1,) * self.ndim, value, "float32")
        self.tensors.append(numpy_helper.from_array(value, name))
        return name


def norm_of_powers(g, x):
    mean = g.add("ReduceMean", g.add("Pow", x, 2.0), axes=[-1])
    root = g.add("Sqrt", g.add("Add", mean, 1e-5))
    return g.add("Mul", g.add("Div", x, root), FACTOR)


def layer_norm(g, x):
    centred = g.add("Sub", x, g.add("ReduceMean", x, axes=[-1]))
    return g.add("Add", norm_of_powers(g, centred), FACTOR)


def bounded_product(g, x):
    return g.add("Min", g.add("Max", g.add("MatMul", x, WEIGHT), -0.5), 0.75)


def product_above(g, x):
    return g.add("Max", -0.5, g.add("MatMul", x, WEIGHT))


def product_below(g, x):
    return g.add("Min", g.add("MatMul", x, WEIGHT), 0.25)


def product_by_zero(g, x):
    return g.add("Mul", g.add("MatMul", x, WEIGHT), 0.0)


def larger_value(g, x):
    return g.add("Max", g.add("Sin", x), 0.1)


BODIES = [norm_of_powers, layer_norm, bounded_product, product_above, product_below]
BODIES += [product_by_zero, larger_value]


def make_model(body: Callable[[Drawer, str], str], ndim: int):
    g = Drawer(ndim)
    result = body(g, "x")
    return make_onnx(g.nodes, {"x": [2, 5, WIDTH]}, {result: None}, g.tensors, 14)


def list_kernels(mod) -> list[str]:
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
    with target:
        lowered = rq.get_pipeline(target)(mod)
    functions = lowered.functions.items()
    return sorted(n.name_hint for n, f in functions if isinstance(f, tvm.tirx.PrimFunc))


@pytest.mark.parametrize("body", BODIES)
def test_kernels__are_those_of_a_scalar(body):
    mods = [rq.load(make_model(body, ndim))[0] for ndim in (0, 1, 3)]
    scalar, *others = map(list_kernels, mods)
    assert all(names == scalar for names in others), (scalar, others)


@pytest.mark.parametrize("ndim", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("body", BODIES)
def test_result__is_that_of_the_evaluator_of_onnx(body, ndim):
    """With more axes than the data, the number gives the result more axes."""
    model = make_model(body, ndim)
    x = np.random.default_rng(3).normal(size=(2, 5, WIDTH)).astype("float32")
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    mod, _ = rq.load(model)
    for got in (rq.Executor(rq.compile(mod)).run("main", [x])[0], rq.reference.run(mod, [x])[0]):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(got, expected, 1e-4, 1e-5)
