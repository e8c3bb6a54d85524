"""Patterns with named parts: what is inside a match, and which matches are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from float_models import Chain, build_model
from tvm import relax
from tvm.relax import op
from tvm.relax.dpl import is_op, wildcard
from tvm.script import ir as I
from tvm.script import relax as R

from relayquant.errors import ConfigError
from relayquant.ir.ops import Operand, QuantOp
from relayquant.ir.rewrite import Graph, Pattern, Rule, Skip

W = relax.const(np.ones((4, 3, 1, 1), "float32"))
B = relax.const(np.ones((1, 4, 1, 1), "float32"))


def conv_bias_relu() -> Pattern:
    data, weight, bias = wildcard(), wildcard(), wildcard()
    root = is_op("relax.nn.relu")(is_op("relax.add")(is_op("relax.nn.conv2d")(data, weight), bias))
    return Pattern(root, {"data": data, "weight": weight, "bias": bias})


def build(finish: Callable[..., relax.Expr], is_swapped: bool = False) -> tvm.IRModule:
    """relu(conv2d(sigmoid(x)) + bias) by steps; `finish` of the last three gives the result."""

    def body(emit: Chain, x: relax.Var) -> relax.Expr:
        conv = emit("conv", op.nn.conv2d(emit("before", op.sigmoid(x)), W))
        biased = emit("biased", op.add(B, conv) if is_swapped else op.add(conv, B))
        return finish(emit, conv, biased, emit("out", op.nn.relu(biased)))

    return build_model(body, (1, 3, 2, 2))


def add_to_itself(emit: Chain, x: relax.Var) -> relax.Var:
    a = emit("a", op.nn.relu(x))
    return emit("out", op.add(a, a))


PLAIN = build(lambda emit, conv, biased, out: out)
SWAPPED = build(lambda emit, conv, biased, out: out, is_swapped=True)
USED_ELSEWHERE = build(
    lambda emit, conv, biased, out: relax.Tuple([out, emit("other", op.tanh(conv))])
)
INNER_RETURNED = build(lambda emit, conv, biased, out: relax.Tuple([out, biased]))
TWICE = build_model(add_to_itself, (2, 3))


@pytest.mark.parametrize("module", [PLAIN, SWAPPED])
def test_match__parts_and_inner_values(module):
    graph = Graph(module)
    match = conv_bias_relu().match(graph, graph.vars["out"])
    assert match is not None
    assert match.name == "out"
    assert [var.name for var in match.inner] == ["conv", "biased"]
    assert [var.name for var in match.vars] == ["conv", "biased", "out"]
    assert match.parts["data"].same_as(graph.vars["before"])
    assert match.parts["bias"].ty.ndim == 4
    assert match.call("relax.nn.conv2d").op.name == "relax.nn.conv2d"
    assert match.find_call("relax.sigmoid") is None
    with pytest.raises(KeyError, match=r"relax\.sigmoid.*'out'"):
        match.call("relax.sigmoid")


@pytest.mark.parametrize("module", [USED_ELSEWHERE, INNER_RETURNED])
def test_match__refused_when_an_inner_value_is_needed_elsewhere(module):
    graph = Graph(module)
    assert conv_bias_relu().match(graph, graph.vars["out"]) is None


def test_match__other_roots_are_refused():
    graph = Graph(PLAIN)
    assert all(
        conv_bias_relu().match(graph, graph.vars[name]) is None
        for name in ("before", "conv", "biased")
    )


def test_match__operands_that_the_pattern_does_not_spell_out_are_outside():
    """Neither fields of a tuple nor further operands belong to the match."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), i: R.Tensor((2,), "int32")):
            with R.dataflow():
                a = R.nn.relu(x)
                b = R.sigmoid(a)
                joined = R.concat((a, b), axis=1)
                j = R.add(i, i)
                taken = R.take(joined, j, axis=1)
                pair = (taken, b)
                R.output(pair)
            return pair

    graph = Graph(Module)
    data = wildcard()
    concat = Pattern(is_op("relax.concat")(data), {"data": data})
    match = concat.match(graph, graph.vars["joined"])
    assert match is not None
    assert match.inner == ()
    assert [field.name for field in match.parts["data"].fields] == ["a", "b"]
    data = wildcard()
    take = Pattern(is_op("relax.take")(data, varg_default_wildcard=True), {"data": data})
    match = take.match(graph, graph.vars["taken"])
    assert match is not None
    assert match.inner == ()


def test_match__a_named_operator_ends_the_match():
    conv = is_op("relax.nn.conv2d")(wildcard(), wildcard())
    pattern = Pattern(is_op("relax.add")(conv, wildcard()), {"conv": conv})
    graph = Graph(PLAIN)
    match = pattern.match(graph, graph.vars["biased"])
    assert match is not None
    assert match.parts["conv"].same_as(graph.vars["conv"])
    assert match.inner == ()


def test_match__same_value_twice():
    lhs, rhs = wildcard(), wildcard()
    pattern = Pattern(is_op("relax.add")(lhs, rhs), {"lhs": lhs, "rhs": rhs})
    graph = Graph(TWICE)
    match = pattern.match(graph, graph.vars["out"])
    assert match is not None
    assert match.parts["lhs"].same_as(match.parts["rhs"])


def test_pattern__names_the_operator_of_its_root():
    assert conv_bias_relu().op_name == "relax.nn.relu"
    anything = wildcard()
    assert Pattern(anything, {"x": anything}).op_name == ""


def test_match__refused_when_a_value_is_inside_and_outside():
    """f(x) + f(x) is not f(x) with another value added."""
    data, other = wildcard(), wildcard()
    pattern = Pattern(
        is_op("relax.add")(is_op("relax.nn.relu")(data), other), {"data": data, "other": other}
    )
    graph = Graph(TWICE)
    assert pattern.match(graph, graph.vars["out"]) is None


@pytest.mark.parametrize("alternatives", [False, True])
def test_match__a_part_that_is_no_node_of_the_pattern_is_named(alternatives):
    """The same wildcard has to be in the pattern and in the parts."""
    x, y = wildcard(), wildcard()
    root = is_op("relax.nn.relu")(x)
    if alternatives:  # y is a node, but not of the alternative that matches
        root = root | is_op("relax.sigmoid")(y)
    graph = Graph(PLAIN)
    out = next(var for var in graph.values if var.name == "out")
    with pytest.raises(ConfigError, match=r"part 'y' is no node of what matched.*wildcard"):
        Pattern(root, {"x": x, "y": y}).match(graph, out)


def test_refuse_dpl__a_bare_pattern_of_tvm_is_named():
    """It has a method `match`, so it would pass for a Matcher and fail in TVM."""
    bare = is_op("relax.add")(wildcard(), wildcard())
    message = r"'mine': pattern is a pattern of tvm.relax.dpl; allowed: Pattern\(root, parts\)"
    with pytest.raises(ConfigError, match=message):
        Rule("mine", bare, lambda context, match: Skip("no"))
    with pytest.raises(ConfigError, match=message):
        QuantOp("mine", "relax.add", bare, (Operand("x"),), realize=lambda context: Skip("no"))
