"""Which operators are quantized, by which pattern: one row for each form that the patterns take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relayquant.config import QConfigMapping
from relayquant.ir.plan import Plan
from relayquant.stages.annotation import annotate
from relayquant.stages.backends import GENERIC, X86
from relayquant.stages.preparation import prepare_module

RNG = np.random.default_rng(1)
DEFAULT = QConfigMapping().set_global(X86.default_qconfig)


def constant(*shape: int) -> relax.Expr:
    return relax.const(RNG.standard_normal(shape).astype("float32"))


class Chain:
    """Emits operators under exact names."""

    def __init__(self) -> None:
        self.builder = relax.BlockBuilder()

    def __call__(self, name: str, expr: relax.Expr) -> relax.Var:
        value = self.builder.normalize(expr)
        var = relax.DataflowVar(name, value.ty)
        self.builder.emit_normalized(relax.VarBinding(var, value))
        return var


def build(
    body: Callable[..., relax.Expr], *shapes: tuple[int, ...], dtype: str = "float32"
) -> tvm.IRModule:
    """main(x, y, ...) with the values that `body(emit, x, y, ...)` emits, in canonical form."""
    emit = Chain()
    params = [
        relax.Var(name, relax.TensorType(shape, dtype))
        for name, shape in zip("xyz", shapes, strict=False)
    ]
    with emit.builder.function("main", params):
        with emit.builder.dataflow():
            out = emit.builder.emit_output(body(emit, *params))
        emit.builder.emit_func_output(out)
    return prepare_module(emit.builder.finalize())


def plan_of(
    mod: tvm.IRModule, mapping: QConfigMapping = DEFAULT, backend=X86, wanted: Sequence[str] = ()
) -> Plan:
    return annotate(mod, backend, mapping, wanted)


def conv(x: relax.Expr, channels: int = 4, **attrs) -> relax.Expr:
    weight = constant(channels, int(x.ty.shape.values[1]) // attrs.get("groups", 1), 3, 3)
    return op.nn.conv2d(x, weight, padding=1, **attrs)


MAP = (1, 4, 6, 6)

#: what is emitted as "v", the inputs' shapes -> pattern of the operator that computes v
ROWS = {
    "conv2d": (lambda e, x: e("v", conv(x)), "conv2d"),
    "conv2d_bias": (
        lambda e, x: e("v", op.add(e("c", conv(x)), constant(1, 4, 1, 1))),
        "conv2d_bias",
    ),
    "conv2d_bias_of_rank_3": (
        lambda e, x: e("v", op.add(e("c", conv(x)), constant(4, 1, 1))),
        "conv2d_bias",
    ),
    "bias_first": (
        lambda e, x: e("v", op.add(constant(1, 4, 1, 1), e("c", conv(x)))),
        "conv2d_bias",
    ),
    "scalar_bias": (
        lambda e, x: e("v", op.add(e("c", conv(x)), relax.const(np.float32(0.5)))),
        "conv2d_bias",
    ),
    "conv2d_relu": (lambda e, x: e("v", op.nn.relu(e("c", conv(x)))), "conv2d_relu"),
    "conv2d_clip": (lambda e, x: e("v", op.clip(e("c", conv(x)), 0, 6)), "conv2d_clip"),
    "conv2d_bias_relu": (
        lambda e, x: e("v", op.nn.relu(e("b", op.add(e("c", conv(x)), constant(1, 4, 1, 1))))),
        "conv2d_bias_relu",
    ),
    "conv2d_bias_clip": (
        lambda e, x: e("v", op.clip(e("b", op.add(e("c", conv(x)), constant(1, 4, 1, 1))), 0, 6)),
        "conv2d_bias_clip",
    ),
    "grouped": (lambda e, x: e("v", conv(x, groups=2)), "conv2d"),
    "depthwise": (lambda e, x: e("v", conv(x, groups=4)), "conv2d"),
    "residual": (
        lambda e, x: e("v", op.add(e("c", conv(x)), e("s", conv(x, groups=2)))),
        "conv2d_add",
    ),
    "residual_bias": (
        lambda e, x: e(
            "v", op.add(e("b", op.add(e("c", conv(x)), constant(1, 4, 1, 1))), e("r", op.tanh(x)))
        ),
        "conv2d_bias_add",
    ),
    "residual_bias_relu_on_the_right": (
        lambda e, x: e(
            "v",
            op.nn.relu(
                e(
                    "s",
                    op.add(
                        e("r", op.tanh(x)),
                        e("b", op.add(e("c", conv(x)), constant(1, 4, 1, 1))),
                    ),
                )
            ),
        ),
        "conv2d_bias_add_relu",
    ),
}

AFTER_CONV = {
    "add": (lambda e, a, b: e("v", op.add(a, b)), "add"),
    "add_relu": (lambda e, a, b: e("v", op.nn.relu(e("s", op.add(a, b)))), "add_relu"),
    "add_same": (lambda e, a, b: e("v", op.add(a, a)), "add"),
    "add_constant": (lambda e, a, b: e("v", op.add(a, constant(*MAP))), "add_constant_rhs"),
    "add_constant_first": (
        lambda e, a, b: e("v", op.add(constant(*MAP), a)),
        "add_constant_rhs",
    ),
    "subtract": (lambda e, a, b: e("v", op.subtract(a, b)), "subtract"),
    "subtract_constant": (
        lambda e, a, b: e("v", op.subtract(a, constant(*MAP))),
        ("subtract_constant_rhs", "add_constant_rhs"),
    ),
    "subtract_from_constant": (
        lambda e, a, b: e("v", op.subtract(constant(*MAP), a)),
        "subtract_constant_lhs",
    ),
    "multiply": (lambda e, a, b: e("v", op.multiply(a, b)), "mul"),
    "multiply_constant": (
        lambda e, a, b: e("v", op.multiply(a, constant(*MAP))),
        "mul_constant_rhs",
    ),
    "multiply_constant_first": (
        lambda e, a, b: e("v", op.multiply(constant(*MAP), a)),
        "mul_constant_rhs",
    ),
    "max_pool2d": (lambda e, a, b: e("v", op.nn.max_pool2d(a, (2, 2))), "max_pool2d"),
    "avg_pool2d": (lambda e, a, b: e("v", op.nn.avg_pool2d(a, (2, 2))), "avg_pool2d"),
    "mean": (lambda e, a, b: e("v", op.mean(a, [2, 3], keepdims=True)), "mean"),
    "transpose": (lambda e, a, b: e("v", op.permute_dims(a, [0, 1, 3, 2])), "permute_dims"),
    "pad": (lambda e, a, b: e("v", op.nn.pad(a, [0, 0, 0, 2, 0, 0, 0, 0])), "pad"),
    "slice": (
        lambda e, a, b: e("v", op.strided_slice(a, [2], [0], [6], [2])),
        "strided_slice",
    ),
    "concat": (lambda e, a, b: e("v", op.concat([a, b], axis=1)), "concat"),
    "concat_same": (lambda e, a, b: e("v", op.concat([a, a], axis=1)), "concat"),
    "relu": (lambda e, a, b: e("v", op.nn.relu(a)), "relu"),
    "clip": (lambda e, a, b: e("v", op.clip(a, -1, 1)), "clip"),
    "expand_and_squeeze": (
        lambda e, a, b: e("v", op.squeeze(e("u", op.permute_dims(
            e("w", op.expand_dims(a, 0)), [0, 1, 2, 4, 3])), [0])),
        "squeeze",
    ),
    "sigmoid": (lambda e, a, b: e("v", op.sigmoid(a)), "sigmoid"),
    "tanh": (lambda e, a, b: e("v", op.tanh(a)), "tanh"),
    "exp": (lambda e, a, b: e("v", op.exp(a)), "exp"),
    "erf": (lambda e, a, b: e("v", op.erf(a)), "erf"),
    "abs": (lambda e, a, b: e("v", op.abs(a)), "abs"),
    "gelu": (lambda e, a, b: e("v", op.nn.gelu(a)), "gelu"),
    "gelu_tanh": (lambda e, a, b: e("v", op.nn.gelu_tanh(a)), "gelu_tanh"),
    "silu": (lambda e, a, b: e("v", op.nn.silu(a)), "silu"),
    "leaky_relu": (lambda e, a, b: e("v", op.nn.leakyrelu(a, 0.1)), "leaky_relu"),
    "prelu": (lambda e, a, b: e("v", op.nn.prelu(a, constant(4), 1)), "prelu"),
}  # fmt: skip

DENSE = {
    "dense": (lambda e, x: e("v", op.matmul(x, constant(8, 5))), "dense"),
    "dense_bias": (
        lambda e, x: e("v", op.add(e("m", op.matmul(x, constant(8, 5))), constant(5))),
        "dense_bias",
    ),
    "dense_bias_first": (
        lambda e, x: e("v", op.add(constant(5), e("m", op.matmul(x, constant(8, 5))))),
        "dense_bias",
    ),
    "dense_relu": (
        lambda e, x: e("v", op.nn.relu(e("m", op.matmul(x, constant(8, 5))))),
        "dense_relu",
    ),
    "dense_bias_relu": (
        lambda e, x: e(
            "v", op.nn.relu(e("b", op.add(e("m", op.matmul(x, constant(8, 5))), constant(5))))
        ),
        "dense_bias_relu",
    ),
    "batch_matmul": (
        lambda e, x: e("v", op.matmul(x, e("t", op.permute_dims(x, [0, 2, 1])))),
        "batch_matmul",
    ),
}


def check_pattern(plan: Plan, name: str, pattern: str | tuple[str, ...]) -> None:
    row = plan.operator(name)
    assert row.quantized, row.reason
    assert row.reason == ""
    if isinstance(pattern, tuple):
        assert row.pattern in pattern
    else:
        assert row.pattern.removesuffix("_swapped") == pattern


@pytest.mark.parametrize("name", ROWS)
def test_annotate__convolutions(name):
    body, pattern = ROWS[name]
    plan = plan_of(build(body, MAP))
    check_pattern(plan, "v", pattern)
    row = plan.operator("v")
    keys = dict(row.operands)
    assert keys["data"] == "x"
    assert keys["weight"] == "v:weight"
    weight = plan.group("v:weight").info
    assert weight.spec.is_per_channel
    assert weight.axis == 0


@pytest.mark.parametrize("name", AFTER_CONV)
def test_annotate__between_convolutions(name):
    body, pattern = AFTER_CONV[name]

    def between(emit, x):
        # a and b have two readers each, so that no add is taken as the residual of a convolution
        a, b = emit("a", conv(x)), emit("b", conv(x))
        v = body(emit, a, b)
        return relax.Tuple([emit("out", conv(v)), a, b])

    plan = plan_of(build(between, MAP))
    check_pattern(plan, "v", pattern)
    assert plan.operator("out").quantized
    for key in dict(plan.operator("v").operands).values():
        plan.group(key)
    assert plan.operator("v").output == dict(plan.operator("out").operands)["data"]


@pytest.mark.parametrize("name", DENSE)
def test_annotate__products(name):
    body, pattern = DENSE[name]
    shape = (2, 3, 8) if name == "batch_matmul" else (2, 8)
    plan = plan_of(build(body, shape))
    check_pattern(plan, "v", pattern)
    if name != "batch_matmul":
        weight = plan.group("v:weight").info
        assert weight.axis == 1
        assert weight.spec.is_per_channel


@pytest.mark.parametrize(
    "expr",
    [
        lambda a: op.reshape(a, (1, 144)),
        lambda a: op.reshape(op.flatten(a), (1, 144)),
    ],
)
def test_annotate__reshape_before_a_product(expr):
    def body(emit, x):
        v = emit("v", expr(emit("a", conv(x))))
        return emit("out", op.matmul(v, constant(int(v.ty.shape.values[1]), 3)))

    mod = build(body, MAP)
    plan = plan_of(mod)
    row = next(row for row in plan.operators if row.op in ("relax.reshape", "relax.flatten"))
    assert row.quantized
    assert plan.operator("out").quantized
    assert row.output == plan.operator("a").output


def test_annotate__every_operator_has_exactly_one_row():
    def body(emit, x):
        a = emit("a", op.nn.relu(emit("c", conv(x))))
        s = emit("s", op.nn.softmax(a))
        return emit("out", op.nn.relu(emit("sum", op.add(emit("d", conv(s)), a))))

    plan = plan_of(build(body, MAP))
    assert sorted(value for row in plan.operators for value in row.values) == [
        "a", "c", "d", "out", "s", "sum",
    ]  # fmt: skip
    assert [row.name for row in plan.operators] == ["a", "s", "out"]
    assert "sum" in plan.operator("out").values


@pytest.mark.parametrize(
    ("body", "shapes", "operator", "reason"),
    [
        (lambda e, x: e("v", op.nn.softmax(x)), [MAP], "v", "no pattern for relax.nn.softmax"),
        (lambda e, x: e("v", op.nn.relu(x)), [MAP], "v", "neither its input nor its result"),
        (lambda e, x: e("v", op.add(x, x)), [MAP], "v", "neither its input nor its result"),
        (
            lambda e, x, y: e("v", op.nn.conv2d(x, y)),
            [MAP, (2, 4, 3, 3)],
            "v",
            "operand weight is computed from the inputs",
        ),
        (
            lambda e, x: e("v", op.take(constant(9, 4), e("i", op.astype(x, "int32")), axis=0)),
            [(3,)],
            "v",
            "operand data is a constant",
        ),
        (
            lambda e, x: e("v", op.image.resize2d(e("c", conv(x)), (9, 9), method="linear")),
            [MAP],
            "v",
            "resizing by 'linear' computes new values",
        ),
    ],
)
def test_annotate__reason_for_a_float_operator(body, shapes, operator, reason):
    row = plan_of(build(body, *shapes)).operator(operator)
    assert not row.quantized
    assert reason in row.reason
    assert not row.is_unsupported


def heads(emit, x):
    """Two convolutions, one after the other, each with a head that is moved and joined."""
    first = emit("first", conv(x))
    second = emit("second", conv(first))
    parts = [
        emit(f"{name}_flat", op.reshape(emit(name, conv(source)), (1, -1)))
        for name, source in (("a", first), ("b", second))
    ]
    return emit("out", op.concat(parts, axis=1))


def test_annotate__sums_that_are_only_moved_stay_exact():
    plan = plan_of(build(heads, MAP))
    assert {row.name for row in plan.operators if row.quantized} == {"first", "second", "a", "b"}
    assert plan.operator("a").output is None
    assert "stay exact" in plan.operator("out").reason


def test_annotate__sums_are_rounded_if_the_user_asks_or_an_operator_reads_them():
    asked = DEFAULT.set_object_type("reshape", X86.default_qconfig)
    plan = plan_of(build(heads, MAP), asked)
    assert plan.operator("a_flat").quantized
    assert all(row.quantized for row in plan_of(build(heads, MAP), wanted=["out"]).operators)

    def body(emit, x):
        flat = emit("flat", op.reshape(emit("a", conv(x)), (1, -1)))
        last = emit("b", conv(emit("back", op.reshape(flat, MAP))))
        return emit("out", op.concat([flat, emit("b_flat", op.reshape(last, (1, -1)))], axis=1))

    rows = plan_of(build(body, MAP)).operators
    assert [row.name for row in rows if not row.quantized] == ["b_flat", "out"]


def test_annotate__integers_and_halves_stay_what_they_are():
    row = plan_of(build(lambda e, x: e("v", op.add(x, x)), MAP, dtype="int32")).operator("v")
    assert not row.quantized
    assert row.reason == "operand lhs is int32, not float"
    assert row.advice == ""
    halves = build(
        lambda e, x: e("v", op.nn.conv2d(x, relax.const(np.ones((4, 4, 1, 1), "float16")))),
        MAP,
        dtype="float16",
    )
    row = plan_of(halves).operator("v")
    assert "operand data is float16, only float32" in row.reason
    assert "cast" in row.advice


def test_annotate__nothing_to_quantize():
    plan = plan_of(build(lambda e, x: e("v", op.nn.softmax(x)), MAP))
    assert plan.groups == ()
    assert [row.quantized for row in plan.operators] == [False]


def test_annotate__no_operators_at_all():
    plan = plan_of(build(lambda e, x: x, MAP))
    assert plan.operators == ()
    assert plan.groups == ()


def test_annotate__input_module_is_not_changed():
    mod = build(ROWS["residual_bias"][0], MAP)
    text = mod.script(show_meta=True)
    plan_of(mod)
    plan_of(mod, QConfigMapping().set_global(GENERIC.default_qconfig), GENERIC)
    assert mod.script(show_meta=True) == text
