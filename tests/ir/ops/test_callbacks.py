"""Callbacks of users that fail, or return something wrong: an error that names operator, row and
callback.
"""

from __future__ import annotations

import collections.abc
import typing
from dataclasses import replace

import numpy as np
import pytest
from float_models import MAP, build_model
from tvm import relax
from tvm.relax import op
from tvm.relax.dpl import is_op, wildcard

import relayquant as rq
from relayquant import extend
from relayquant.base.qtypes import QParams, Role
from relayquant.ir.dialect import qnn
from relayquant.ir.ops import Kind, Operand, Output, Quantized, QuantOp, base
from relayquant.ir.ops.find import find_pattern
from relayquant.ir.rewrite import Pattern


def between(name: str, expr):
    """conv - `expr` - conv."""

    def body(emit, x):
        return emit.conv("out", emit(name, expr(emit.conv("a", x))))

    return build_model(body, MAP)


MOD = between("s", op.square)


def make_row(**callbacks) -> QuantOp:
    data = wildcard()
    pattern = Pattern(is_op("relax.square")(data), {"data": data})
    row = QuantOp(
        "mine", "relax.square", pattern, (Operand("data"),), Kind.CONNECTOR, Output.OWN, realize,
    )  # fmt: skip
    return replace(row, **callbacks)


def realize(context):
    data, out = context.operands["data"], context.output
    value = qnn.mul(
        data.value, data.value, data.scale, data.zero_point, data.scale, data.zero_point,
        Quantized(data.value, out).scale, Quantized(data.value, out).zero_point,
    )  # fmt: skip
    return Quantized(context.emit(value, "squared"), out).dequantize()


def run(backend, mod=MOD):
    """All stages without compiling: parameters are made up."""
    prepared = rq.prepare(mod, None, backend=backend)
    parameters = {}
    for group in prepared.plan.groups:
        info = group.info
        size = () if info.axis is None else (info.shape[info.axis],)
        parameters[group.key] = QParams(
            np.full(size, 0.1, "float32"),
            np.full(size, group.info.spec.symmetric_zero_point, "int32"),
            info.spec.dtype,
            info.axis,
        )
    return rq.lower(rq.convert_to_reference(replace(prepared, parameters=parameters)), backend)


def fail(*args):
    return 1 // 0


def test_callbacks__right_ones_are_used():
    row = rq.ledger(run(rq.get_backend_config("x86").with_pattern(make_row()))).row("s")
    assert row is not None
    assert (row.pattern, row.quantized) == ("mine", True)


WRONG = {
    "None": lambda context: None,
    "a str": lambda context: "relax",
    "uint8 (1, 4, 6, 6)": lambda context: relax.const(np.zeros(MAP, "uint8")),
    "float32 (4, 64)": lambda context: relax.const(np.zeros((4, 64), "float32")),
    "float32 ()": lambda context: relax.const(1.0, "float32"),
    "float16 (1, 4, 6, 6)": lambda context: op.astype(
        context.match.graph.func.params[0], "float16"
    ),
    "raised ZeroDivisionError: ": fail,
    # Found when the type of what was returned is inferred.
    "raised ": lambda context: op.add(
        relax.const(np.zeros(3, "float32")), relax.const(np.zeros(4, "float32"))
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("callback", ["simulate", "realize"])
@pytest.mark.parametrize("wrong", WRONG)
def test_value__is_checked(callback, wrong):
    backend = rq.get_backend_config("x86").with_pattern(make_row(**{callback: WRONG[wrong]}))
    with pytest.raises(rq.ConfigError) as error:
        run(backend)
    assert str(error.value).startswith(f"Operator 's', pattern 'mine': callback {callback} ")
    assert wrong in str(error.value)
    assert f" ({__file__}:" in str(error.value) or WRONG[wrong] is not fail
    if "raised" not in wrong:
        assert "of float32 (1, 4, 6, 6), which is what the float op" in str(error.value)
    # Nothing is left behind by what failed on the way.
    assert rq.ledger(run(rq.get_backend_config("x86").with_pattern(make_row()))).row("s").quantized


def test_value__an_operator_of_the_dialect_that_refuses_is_no_silence():
    def wrong(context):
        data = context.operands["data"]
        return context.emit(qnn.dequantize(data.value, data.value, data.zero_point), "bad")

    with pytest.raises(rq.ConfigError, match=r"Operator 's', pattern 'mine': callback realize rai"):
        run(rq.get_backend_config("x86").with_pattern(make_row(realize=wrong)))


class Matcher:
    def __init__(self, function) -> None:
        self.function = function

    def match(self, graph, var):
        return self.function()


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ({"check": lambda match: False}, "callback check returned a bool; allowed: a Skip"),
        ({"check": fail}, "callback check raised ZeroDivisionError"),
        ({"pattern": Matcher(lambda: True)}, r"callback pattern.match returned a bool; allowed: a"),
        ({"pattern": Matcher(fail)}, r"callback pattern.match raised ZeroDivisionError"),
    ],
)
def test_check_and_match__are_checked(callbacks, message):
    with pytest.raises(rq.ConfigError, match=f"^Operator '.*', pattern 'mine': {message}"):
        rq.prepare(
            MOD, None, backend=rq.get_backend_config("x86").with_pattern(make_row(**callbacks))
        )


@pytest.mark.parametrize(
    ("axis", "message"),
    [(lambda match: 7, "returned 7; allowed: an axis of the operand"), (fail, "raised ZeroDiv")],
)
def test_axis__is_checked(axis, message):
    row = find_pattern(rq.get_backend_config("x86"), "conv2d")
    operands = tuple(
        replace(part, axis=axis) if part.name == "weight" else part for part in row.operands
    )
    backend = rq.get_backend_config("x86").with_pattern(replace(row, operands=operands))
    with pytest.raises(
        rq.ConfigError, match="pattern 'conv2d': callback axis of 'weight' " + message
    ):
        rq.prepare(MOD, None, backend=backend)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (lambda match: 7, "returned 7; allowed: an axis of the result, 0 to 3"),
        (lambda match: -3, "returned -3; allowed: an axis of the result, 0 to 3"),
        (lambda match: None, "returned None; allowed: the axis .* the 4 channels of the weight"),
        (lambda match: 3, "returned 3, an axis of 6; allowed: the axis .* the 4 channels"),
        (fail, "raised ZeroDiv"),
    ],
)
def test_accumulator_axis__is_checked(axis, message):
    backend = rq.get_backend_config("x86")
    row = find_pattern(backend, "conv2d_bias")
    mod = build_model(
        lambda emit, x: emit(
            "s", op.add(emit.conv("a", x), relax.const(np.ones((1, 4, 1, 1), "float32")))
        ),
        MAP,
    )
    with pytest.raises(
        rq.ConfigError, match=f"pattern 'conv2d_bias': callback accumulator_axis {message}"
    ):
        run(backend.with_pattern(replace(row, accumulator_axis=axis)), mod)


# --- rules of the allow-list --------------------------------------------------------------------


def run_rule(rewrite, **more):
    """flip, which the backend has no row for, by a rule alone."""
    mod = between("f", lambda a: op.flip(a, 2))
    return run(
        rq.get_backend_config("x86").with_affine_rule(
            rq.extend.AffineRule("relax.flip", rewrite, ("axis",), **more)
        ),
        mod,
    )


def flip(call, operand):
    return Quantized(op.flip(operand.value, axis=int(call.attrs.axis)), operand.qparams)


def double(call, operand):
    """The right integers, for a scale that is twice the operand's."""
    qparams = QParams(operand.qparams.scale * 2, operand.qparams.zero_point, "uint8")
    return Quantized(flip(call, operand).value, qparams)


def test_rule__a_right_one_is_used():
    row = rq.ledger(run_rule(flip)).row("f")
    assert row is not None
    assert (row.quantized, row.dtype) == (True, "uint8")


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (fail, "raised ZeroDivisionError"),
        (lambda call, operand: None, r"returned None; allowed: a Skip\(reason\), or a Quantized"),
        (
            lambda call, operand: operand.value,
            r"returned a DataflowVar; allowed: a Skip\(reason\), or a Quantized",
        ),
        (
            lambda call, operand: Quantized(op.mean(operand.value, 2), operand.qparams),
            r"returned uint8 \(1, 4, 6\) with parameters of uint8; allowed: integers",
        ),
        (
            lambda call, operand: Quantized(op.astype(operand.value, "int32"), operand.qparams),
            r"returned int32 \(1, 4, 6, 6\) with parameters of uint8; allowed: integers",
        ),
        (double, r"returned other parameters than those of the operand.*shares_parameters=False"),
    ],
)
def test_rule__what_it_returns_is_checked(rewrite, message):
    with pytest.raises(
        rq.ConfigError, match="^Operator 'f': affine rule for 'relax.flip' " + message
    ):
        run_rule(rewrite)


def test_rule__may_return_other_parameters_where_it_says_so():
    """Every value of the result is twice the operand's, which the model's float operator is not:
    what counts here is that the plan calibrates it on its own."""
    mod = between("f", lambda a: op.flip(a, 2))
    rule = rq.extend.AffineRule("relax.flip", double, ("axis",), shares_parameters=False)
    plan = rq.prepare(mod, None, backend=rq.get_backend_config("x86").with_affine_rule(rule)).plan
    assert plan.value_groups["f"] == ("f",)
    assert plan.value_groups["a"] == ("a",)
    row = rq.ledger(run_rule(double, shares_parameters=False)).row("f")
    assert row is not None
    assert row.quantized


def test_extend__has_what_the_callbacks_of_a_row_take():
    hints = typing.get_type_hints(QuantOp, vars(base))
    taken = [
        argument
        for hint in hints.values()
        for form in (hint, *typing.get_args(hint))
        if typing.get_origin(form) is collections.abc.Callable
        for argument in typing.get_args(form)[0]
    ]
    assert {each.__name__ for each in taken} >= {"RealizeContext", "DynamicContext"}
    assert {each for each in taken if getattr(extend, each.__name__, None) is not each} == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulator_axis": None}, "the row lacks accumulator_axis"),
        ({"names": ("x", "w", "bias")}, "the row lacks 'data' of .*ACTIVATION and 'weight' of"),
        ({"axes": (None, None, lambda match: 1)}, "operand 'bias' is a bias, which has no axis"),
    ],
)
def test_row_with_a_bias__its_scale_is_that_of_the_sums(changes, message):
    """The bias has the scale of the sums, so these must be known."""
    options = {"names": ("data", "weight", "bias"), "accumulator_axis": lambda match: 1, **changes}
    parts = {name: wildcard() for name in options.pop("names")}
    axes = options.pop("axes", (None, None, None))
    data, weight, bias = parts.values()
    root = is_op("relax.add")(is_op("relax.nn.conv2d")(data, weight), bias)
    roles = (Role.ACTIVATION, Role.WEIGHT, Role.BIAS)
    operands = tuple(map(Operand, parts, roles, axes))
    with pytest.raises(rq.ConfigError, match=f"QuantOp 'mine': .*{message}"):
        QuantOp(
            "mine", "relax.nn.conv2d", Pattern(root, parts), operands, Kind.ANCHOR, Output.OWN,
            realize, **options,
        )  # fmt: skip
