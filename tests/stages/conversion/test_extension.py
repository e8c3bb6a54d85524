"""What a user adds: patterns with callbacks of their own, and rules of the allow-list."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from float_models import MAP, build_model, draw_batches
from tvm import relax
from tvm.relax import op
from tvm.relax.dpl import (
    CallPattern,
    ExprPattern,
    is_const,
    is_op,
    is_tuple_get_item,
    wildcard,
)

import relayquant as rq
from relayquant.base.qtypes import Role
from relayquant.errors import ConfigError
from relayquant.ir.dialect import qnn
from relayquant.ir.ops import Kind, Operand, Output, Quantized, QuantOp
from relayquant.ir.rewrite import Graph, Pattern, Skip


def square_op(*, declines: bool = False, calls: list | None = None) -> QuantOp:
    """multiply(x, x) as one operator, simulated and realized by callbacks of its own."""
    data = wildcard()
    pattern = Pattern(is_op("relax.multiply")(data, data), {"data": data})

    def simulate(context):
        if calls is not None:
            calls.append(("simulate", context.match.name))
        value = context.operands["data"]
        return relax.op.square(value)

    def realize(context):
        if calls is not None:
            calls.append(("realize", context.match.name))
        if declines:
            return Skip("not today", "try tomorrow")
        data, out = context.operands["data"], context.output
        result = Quantized(data.value, out)
        value = qnn.mul(
            data.value, data.value, data.scale, data.zero_point, data.scale, data.zero_point,
            result.scale, result.zero_point,
        )  # fmt: skip
        return Quantized(context.emit(value, "squared"), out).dequantize()

    return QuantOp(
        "square", "relax.multiply", pattern, (Operand("data"),), Kind.CONNECTOR, Output.OWN,
        realize, simulate=simulate,
    )  # fmt: skip


def square_model():
    def body(emit, x):
        a = emit.conv("a", x)
        s = emit("s", op.multiply(a, a))
        return relax.Tuple([emit.conv("out", s), emit.conv("b", a)])

    return build_model(body, MAP)


@pytest.mark.slow
def test_pattern_of_the_user__is_tried_first_and_used():
    calls: list = []
    backend = rq.get_backend_config("x86").with_pattern(square_op(calls=calls))
    mod = square_model()
    data = draw_batches(mod, 2)
    qmod = rq.quantize(mod, None, data, backend=backend)
    row = rq.ledger(qmod).row("s")
    assert row is not None
    assert (row.pattern, row.quantized, row.dtype) == ("square", True, "uint8")
    assert calls == [("simulate", "s"), ("realize", "s")]
    graph = Graph(qmod)
    assert graph.op_name(graph.vars["s"]) == "relax.qnn.mul"
    assert rq.verify(qmod, data[0]).is_equal
    want = rq.reference.run(mod, data[0])
    for have, expected in zip(rq.reference.run(qmod, data[0]), want, strict=True):
        assert np.abs(have - expected).max() < 0.05 * np.abs(expected).max()
    # Without it the general multiplication takes the operator.
    row = rq.ledger(rq.quantize(mod, None, data)).row("s")
    assert row is not None
    assert row.pattern != "square"


@pytest.mark.slow
def test_pattern_of_the_user__a_callback_that_declines_is_in_the_ledger():
    mod = square_model()
    data = draw_batches(mod, 2)
    qmod = rq.quantize(
        mod, None, data, backend=rq.get_backend_config("x86").with_pattern(square_op(declines=True))
    )
    row = rq.ledger(qmod).row("s")
    assert row is not None
    assert not row.quantized
    assert (row.reason, row.advice) == ("not today", "try tomorrow")
    assert rq.verify(qmod, data[0]).is_equal


def test_pattern_of_the_user__needs_dtypes():
    empty = rq.BackendConfig("empty")
    with pytest.raises(rq.ConfigError, match="no pattern to take dtypes from"):
        empty.with_pattern(square_op())
    dtypes = [rq.config.DTypeConfig(input="uint8", output="uint8")]
    backend = empty.with_pattern(square_op(), dtypes)
    assert backend.find_pattern("square").dtypes == tuple(dtypes)
    assert empty.patterns == ()


def dense_row(weight, product=None, *, is_bound: bool = True) -> QuantOp:
    """matmul(x, weight) + bias as one operator; `product` changes what is accumulated."""
    data, bias = wildcard(), wildcard()
    root = is_op("relax.add")(is_op("relax.matmul")(data, weight), bias)

    def realize(context):
        data, weight, bias = context.operands.values()
        turned = relax.op.permute_dims(weight.value)
        turned = context.emit(turned, "turned") if is_bound else turned

        def multiply(dtype):
            value = qnn.dense(
                data.value, turned, data.zero_point, weight.zero_point, data.scale, weight.scale,
                out_dtype=dtype,
            )  # fmt: skip
            return value if product is None else product(value, bias.value)

        return Quantized(context.accumulate(multiply), bias.qparams).dequantize()

    return QuantOp(
        "mine", "relax.matmul", Pattern(root, {"data": data, "weight": weight, "bias": bias}),
        (Operand("data"), Operand("weight", Role.WEIGHT), Operand("bias", Role.BIAS)),
        Kind.ANCHOR, realize=realize, accumulator_axis=lambda match: 1,
    )  # fmt: skip


def build_dense(b):
    product = b.emit(relax.op.matmul(b.activation(2, 8), b.constant(8, 4)))
    return relax.op.add(product, b.constant(4))


def test_pattern_of_the_user__with_weight_and_bias_is_realized():
    report = rq.extend.check_pattern(dense_row(wildcard()), build_dense, examples=1)
    assert report.differing == 0


def test_pattern_of_the_user__a_bias_in_the_product_is_refused():
    row = dense_row(wildcard(), relax.op.add)
    with pytest.raises(ConfigError, match=r"product returned relax\.add.*accumulate adds the bias"):
        rq.extend.check_pattern(row, build_dense, examples=1)


def test_pattern_of_the_user__an_expression_in_the_product_is_refused():
    row = dense_row(wildcard(), is_bound=False)
    with pytest.raises(ConfigError, match=r"operand of relax\.qnn\.dense is an.*context\.emit"):
        rq.extend.check_pattern(row, build_dense, examples=1)


def test_pattern_of_the_user__a_constant_as_operand_is_refused():
    """A quantized operand is the result of a dequantize, so such a row never ran."""
    with pytest.raises(ConfigError, match=r"operand 'weight' is_const\(\).*Write wildcard\(\)"):
        dense_row(is_const())


def test_pattern_of_the_user__that_matches_float_operators_alone_is_refused():
    row = dense_row(is_const() & wildcard())
    with pytest.raises(ConfigError, match=r"Operator 'result\d*', pattern 'mine'.*stay in float"):
        rq.extend.check_pattern(row, build_dense, examples=1)


@pytest.mark.slow
def test_rule_of_the_user__carries_integers_through_an_operator():
    """flip moves values: with a rule for it and a pattern, no float operator remains."""
    data = wildcard()
    flip = QuantOp(
        "flip", "relax.flip", Pattern(is_op("relax.flip")(data), {"data": data}),
        (Operand("data"),), Kind.SHARING, Output.SHARED, None,
        attributes=("axis",),
    )  # fmt: skip

    def rewrite(call, operand):
        if operand.qparams.is_per_channel:
            return Skip("channels may move")
        return Quantized(relax.op.flip(operand.value, axis=int(call.attrs.axis)), operand.qparams)

    def body(emit, x):
        return emit.conv("out", emit("f", op.flip(emit.conv("a", x), 2)))

    mod = build_model(body, MAP)
    inputs = draw_batches(mod, 2)
    rule = rq.extend.AffineRule("relax.flip", rewrite, attributes=("axis",))
    backend = rq.get_backend_config("x86").with_pattern(flip).with_affine_rule(rule)
    qmod = rq.quantize(mod, None, inputs, backend=backend)
    graph = Graph(qmod)
    assert str(graph.vars["f"].ty.dtype) == "uint8"
    assert rq.verify(qmod, inputs[0]).is_equal
    # The pattern without the rule: planned, but the ledger says what is missing.
    qmod = rq.quantize(mod, None, inputs, backend=rq.get_backend_config("x86").with_pattern(flip))
    row = rq.ledger(qmod).row("f")
    assert row is not None
    assert not row.quantized
    assert "no rule" in row.reason
    # A rule, or a pattern, that does not name the axis cannot know what it does to the values.
    unnamed = rq.extend.AffineRule("relax.flip", rewrite)
    for extended in (
        rq.get_backend_config("x86").with_pattern(flip).with_affine_rule(unnamed),
        rq.get_backend_config("x86")
        .with_pattern(replace(flip, attributes=()))
        .with_affine_rule(rule),
    ):
        row = rq.ledger(rq.quantize(mod, None, inputs, backend=extended)).row("f")
        assert row is not None
        assert not row.quantized
        assert row.reason.startswith("flip has axis=2, which ")
    assert rq.verify(qmod, inputs[0]).is_equal


def flip_model():
    def body(emit, x):
        return emit.conv("out", emit("f", op.flip(emit.conv("a", x), 2)))

    return build_model(body, MAP)


@pytest.mark.slow
def test_rule_of_the_user__alone_extends_the_plan():
    """No pattern is needed: the rule is called, and integers go through the operator."""
    calls = []

    def rewrite(call, operand):
        calls.append(operand.qparams)
        return Quantized(relax.op.flip(operand.value, axis=int(call.attrs.axis)), operand.qparams)

    mod = flip_model()
    inputs = draw_batches(mod, 2)
    backend = rq.get_backend_config("x86").with_affine_rule(
        rq.extend.AffineRule("relax.flip", rewrite, attributes=("axis",))
    )
    qmod = rq.quantize(mod, None, inputs, backend=backend, effort="fast")
    assert len(calls) == 1
    graph = Graph(qmod)
    assert str(graph.vars["f"].ty.dtype) == "uint8"
    row = rq.ledger(qmod).row("f")
    assert row is not None
    assert (row.quantized, row.pattern) == (True, "flip (affine rule)")
    assert rq.verify(qmod, inputs[0]).is_equal
    # It lives in plain data, where the rule is named.
    again = rq.BackendConfig.from_dict(
        backend.to_dict(), rq.extend.BUILTIN_OPS, backend.affine_rules
    )
    assert again == backend


def test_rule_of_the_user__a_skip_is_in_the_ledger():
    def rewrite(call, operand):
        return Skip("this flip is too large", "flip it before")

    mod = flip_model()
    backend = rq.get_backend_config("x86").with_affine_rule(
        rq.extend.AffineRule("relax.flip", rewrite, attributes=("axis",))
    )
    qmod = rq.quantize(mod, None, draw_batches(mod, 2), backend=backend, effort="fast")
    row = rq.ledger(qmod).row("f")
    assert row is not None
    assert (row.quantized, row.reason) == (False, "this flip is too large")
    assert row.advice == "flip it before"


def test_rule_of_the_user__its_skip_wins_over_that_of_a_built_in_rule():
    """Both decline to resize: the user's rule is asked first, and its reason is the one
    given."""

    def body(emit, x):
        return emit.conv("out", emit("m", op.image.resize2d(
            emit.conv("a", x), (12, 12), layout="NCHW", method="linear")))  # fmt: skip

    rule = rq.extend.AffineRule(
        "relax.image.resize2d",
        lambda call, operand: Skip("mine"),
        attributes=("layout", "method"),
    )
    backend = rq.get_backend_config("x86").without_pattern("resize_nearest").with_affine_rule(rule)
    mod = build_model(body, MAP)
    qmod = rq.quantize(mod, None, draw_batches(mod, 2), backend=backend, effort="fast")
    row = rq.ledger(qmod).row("m")
    assert row is not None
    assert (row.quantized, row.reason) == (False, "mine")


def test_affine_rule__of_an_unknown_operator():
    with pytest.raises(rq.ConfigError, match=r"op is 'relax.flipp', which TVM does not have"):
        rq.extend.AffineRule("relax.flipp", lambda call, operand: operand)


def test_quant_op__names_an_operator_of_its_pattern():
    """A mapping that selects the other name would decide nothing, and no match be counted."""
    data = wildcard()
    pattern = rq.extend.Pattern(is_op("relax.exp")(is_op("relax.abs")(data)), {"data": data})
    operands = (rq.extend.Operand("data"),)

    def make(name):
        return rq.extend.QuantOp("mine", name, pattern, operands, rq.extend.Kind.SHARING)

    assert make("relax.abs").pattern.op_names == {"relax.exp", "relax.abs"}
    with pytest.raises(rq.ConfigError, match=r"op is 'relax.expp'.* not have.*'relax.exp'"):
        make("relax.expp")


DATA, SCALE = wildcard(), relax.Var("scale", relax.TensorType((), "float32"))
ABS = is_op("relax.abs")(DATA)


@pytest.mark.parametrize(
    "root",
    [
        CallPattern(wildcard(), [ABS]),
        is_op("relax.abs")(CallPattern(wildcard(), [DATA])),
        wildcard() | ABS,
        (ABS | wildcard()).has_dtype("float32"),
        is_tuple_get_item(wildcard() | ABS, 0),
        ~ABS,
    ],
)
def test_quant_op__pattern_that_leaves_the_operator_open(root):
    pattern = rq.extend.Pattern(root, {"data": DATA})
    kind = rq.extend.Kind.SHARING
    row = rq.extend.QuantOp("mine", "relax.exp", pattern, (rq.extend.Operand("data"),), kind)
    assert row.op == "relax.exp"


@pytest.mark.parametrize(
    ("root", "names"),
    [
        (wildcard() & ABS, {"relax.abs"}),
        (ABS & ~is_op("relax.exp")(wildcard()), {"relax.abs"}),
        (
            (is_op("relax.add") | is_op("relax.subtract"))(ABS, is_const()),
            {"relax.add", "relax.subtract", "relax.abs"},
        ),
        (is_op("relax.add")(ABS | wildcard(), ExprPattern(SCALE)), {"relax.add", "relax.abs"}),
        (is_op("relax.add")(ABS, ExprPattern(relax.const(1.0))), {"relax.add", "relax.abs"}),
    ],
)
def test_quant_op__operators_that_a_pattern_has(root, names):
    assert rq.extend.Pattern(root, {"data": DATA}).op_names == names
