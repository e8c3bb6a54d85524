"""Epilogue chains: the operators that a float kernel takes behind a product, and the reason for the
end.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from declined_rules import hear_declined
from float_models import build_model
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.epilogue_pattern import EpilogueChain, float_takes, follow_epilogue
from relayquant.ir.rewrite.expressions import FunctionGraph

TAKES = float_takes(tvm.ir.GenericConst)
ROWS, UNITS = 3, 4


def follow(
    mod: tvm.IRModule, takes=TAKES, view=FunctionGraph, **options
) -> tuple[EpilogueChain, str]:
    """The chain of the value "product" of main, and why it ends ("" if nothing reads its end)."""
    graph = Graph(mod) if view is Graph else FunctionGraph(mod["main"])
    (root,) = [binding.var for binding in graph.bindings if binding.var.name == "product"]
    chain = EpilogueChain((root,), root.ty.ndim - 1, int(root.ty.shape.values[-1]))
    with hear_declined() as heard:
        chain = follow_epilogue(graph, chain, takes, **options)
    return chain, ": ".join(heard[-1][1:]) if heard else ""


def names(chain: EpilogueChain) -> list[str]:
    return [var.name for var in chain.vars]


def test_follow_epilogue__bias_residual_and_bounds_are_one_kernel():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((3, 4), "float32"), w: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                product = R.matmul(x, w)
                biased = R.add(R.const([1.0, 2.0, 3.0, 4.0], "float32"), product)
                total = R.add(biased, x)
                low = R.maximum(total, R.const(-1.0, "float32"))
                high = R.minimum(low, R.const(2.0, "float32"))
                after = R.nn.relu(high)
                R.output(after)
            return after

    chain, reason = follow(Before)
    assert names(chain) == ["product", "biased", "total", "low", "high"]
    np.testing.assert_array_equal(chain.bias.value.numpy(), [1, 2, 3, 4])
    assert chain.residual.same_as(Before["main"].params[0])
    assert (chain.low, chain.high) == (-1.0, 2.0)
    assert reason == "after: the result is bounded already"


def constant(*shape: int) -> relax.Expr:
    return relax.const(np.ones(shape, "float32"))


def number(value: float) -> relax.Expr:
    return relax.const(value, "float32")


#: What reads the product -> why the chain ends; "" where it is taken.
READERS = {
    "one number": (lambda p, x: op.add(p, number(1.0)), ""),
    "one row": (lambda p, x: op.add(p, constant(1, UNITS)), ""),
    "one number per row": (lambda p, x: op.add(p, constant(ROWS, 1)), "neither one number per"),
    "more dimensions": (lambda p, x: op.add(p, constant(1, 1, UNITS)), "another shape"),
    "all constants": (lambda p, x: op.add(p, constant(ROWS, UNITS)), ""),
    "itself": (lambda p, x: op.add(p, p), None),
    "another value": (lambda p, x: op.add(p, x), ""),
    "a product": (lambda p, x: op.multiply(p, x), "a kernel cannot include relax.multiply"),
    "relu": (lambda p, x: op.nn.relu(p), ""),
    "clip": (lambda p, x: op.clip(p, -1, 1), ""),
    "clip of another dtype": (lambda p, x: op.astype(p, "float16"), "relax.astype"),
    "maximum": (lambda p, x: op.maximum(p, number(1.0)), ""),
    "maximum the other way": (lambda p, x: op.maximum(number(1.0), p), "the bound is not a number"),
    "maximum of channels": (lambda p, x: op.maximum(p, constant(UNITS)), "not a number"),
    "minimum": (lambda p, x: op.minimum(p, number(1.0)), ""),
    "minimum of values": (lambda p, x: op.minimum(p, x), "the bound is not a number"),
}


@pytest.mark.parametrize("view", [Graph, FunctionGraph])
@pytest.mark.parametrize("case", READERS)
def test_follow_epilogue__each_reader(case, view):
    make, why = READERS[case]

    def body(emit, x, y):
        return emit("reader", make(emit("product", op.matmul(x, y)), emit("other", op.abs(x))))

    chain, reason = follow(build_model(body, (ROWS, UNITS), (UNITS, UNITS)), view=view)
    if why is None:  # read twice: no only reader, or no other operand
        assert names(chain) == ["product"]
    else:
        assert names(chain) == (["product"] if why else ["product", "reader"])
        assert why in reason


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (lambda p, x: op.nn.relu(p), lambda p, x: op.add(p, number(1.0)), "bounded already"),
        (lambda p, x: op.nn.relu(p), lambda p, x: op.clip(p, 0, 6), "bounded already"),
        (lambda p, x: op.add(p, x), lambda p, x: op.add(p, number(1.0)), "a residual already"),
        (lambda p, x: op.minimum(p, number(1.0)), lambda p, x: op.maximum(p, number(0.0)),
         "bounded already"),
        (lambda p, x: op.maximum(p, number(1.0)), lambda p, x: op.minimum(p, number(2.0)), ""),
    ],
)  # fmt: skip
def test_follow_epilogue__the_order_of_an_epilogue(first, second, why):
    def body(emit, x, y):
        product = emit("first", first(emit("product", op.matmul(x, y)), x))
        return emit("second", second(product, x))

    chain, reason = follow(build_model(body, (ROWS, UNITS), (UNITS, UNITS)))
    assert names(chain) == ["product", "first"] + ([] if why else ["second"])
    assert why in reason


def test_follow_epilogue__stops_at_values_that_others_read_return_or_compute():
    def body(emit, x, y):
        total = emit("total", op.add(emit("product", op.matmul(x, y)), x))
        return relax.Tuple([emit("relu", op.nn.relu(total)), total])

    mod = build_model(body, (ROWS, UNITS), (UNITS, UNITS))
    assert names(follow(mod)[0]) == ["product", "total"]
    chain, reason = follow(mod, is_free=lambda var: var.name != "total")
    assert (names(chain), reason) == (["product"], "total: another kernel computes it")


def test_float_takes__a_bias_may_be_a_value_where_kernels_read_it_at_run_time():
    def body(emit, x, y, z):
        return emit("sum", op.add(emit("product", op.matmul(x, y)), z))

    mod = build_model(body, (ROWS, UNITS), (UNITS, UNITS), (UNITS,))
    assert names(follow(mod)[0]) == ["product"]
    chain, _ = follow(mod, float_takes(tvm.ir.GenericConst, relax.Var))
    assert chain.bias.name == "z"
