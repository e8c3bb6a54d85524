"""Which row takes which operators: rows of the user first, anchors before others, true reasons."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from drawing import count_examples
from float_models import MAP, build_model, residual_model
from hypothesis import HealthCheck, given, settings
from random_graphs import draw_models
from tvm import relax
from tvm.relax import op
from tvm.relax.dpl import is_op, wildcard

import relayquant as rq
from relayquant.ir.dialect import qnn
from relayquant.ir.ops import Kind, Operand, Output, QuantOp
from relayquant.ir.ops.find import find_pattern, order_rows
from relayquant.ir.rewrite import Graph, Pattern
from relayquant.stages.annotation import annotate
from relayquant.stages.annotation.match import match_operators
from relayquant.stages.preparation import prepare_module

DEFAULT = rq.QConfigMapping().set_global(rq.get_backend_config("x86").default_qconfig)


def weighted_row(name: str, of: str, *, add: bool = False, **changes) -> QuantOp:
    """An anchor row of a user: op(data, weight), perhaps with an add."""
    data, weight, bias = wildcard(), wildcard(), wildcard()
    root, parts = is_op(of)(data, weight), {"data": data, "weight": weight}
    operands = (Operand("data"), Operand("weight", rq.config.Role.WEIGHT, lambda match: 0))
    if add:
        root, parts = is_op("relax.add")(root, bias), {**parts, "bias": bias}
        operands += (Operand("bias", rq.config.Role.BIAS),)
    row = QuantOp(
        name, of, Pattern(root, parts), operands, Kind.ANCHOR, Output.WHEN_WANTED,
        lambda context: rq.extend.Skip("no integers here"), attributes=("padding",),
        accumulator_axis=(lambda match: 1) if add else None,
    )  # fmt: skip
    return replace(row, **changes)


def volumes():
    def body(emit, x):
        conv = emit("c", op.nn.conv3d(x, emit.constant(4, 4, 3, 3, 3), padding=1))
        return emit("r", op.nn.relu(emit("a", op.add(conv, emit.constant(1, 4, 1, 1, 1)))))

    return build_model(body, (1, 4, 4, 4, 4))


CONV3D = weighted_row("conv3d_add", "relax.nn.conv3d", add=True)


def plan_of(mod, backend) -> rq.Plan:
    return rq.prepare(mod, None, qconfig_mapping=DEFAULT, backend=backend).plan


def test_claims__a_row_of_the_user_is_not_cut_by_one_that_ends_further_down():
    plan = plan_of(volumes(), rq.get_backend_config("x86").with_pattern(CONV3D))
    row = plan.operator("a")
    assert (row.pattern, row.quantized, row.values) == ("conv3d_add", True, ("c", "a"))
    assert plan.operator("r").pattern == "relu"


def test_claims__a_row_of_the_user_is_not_cut_by_a_longer_anchor_row():
    def body(emit, x):
        return emit("r", op.nn.relu(emit.conv_bias("a", x)))

    user = weighted_row("mine", "relax.nn.conv2d")
    plan = plan_of(build_model(body, MAP), rq.get_backend_config("x86").with_pattern(user))
    assert [row.pattern for row in plan.operators] == ["mine", "add_relu_constant_rhs"]
    # The same pattern with dtypes of its own is the table's: it is no user's, and cuts nothing.
    backend = rq.get_backend_config("x86").with_pattern(
        find_pattern(rq.get_backend_config("x86"), "conv2d")
    )
    plan = plan_of(build_model(body, MAP), backend)
    assert [row.pattern for row in plan.operators] == ["conv2d_bias_relu"]


def test_claims__survive_plain_data():
    backend = rq.get_backend_config("x86").with_pattern(CONV3D)
    data = backend.to_dict()
    again = rq.BackendConfig.from_dict(data, (*rq.extend.BUILTIN_OPS, CONV3D))
    assert again == backend
    assert [row.match_first for row in again.patterns[:2]] == [True, False]


@pytest.mark.parametrize("first", [True, False])
def test_claims__of_two_rows_of_the_user_the_anchor_claims_first(first):
    lhs, rhs = wildcard(), wildcard()
    follower = QuantOp(
        "sum", "relax.add", Pattern(is_op("relax.add")(lhs, rhs), {"lhs": lhs, "rhs": rhs}),
        (Operand("lhs"), Operand("rhs")), Kind.FOLLOWER, Output.OWN,
        lambda context: rq.extend.Skip("no"),
    )  # fmt: skip
    rows = [follower, CONV3D] if first else [CONV3D, follower]
    backend = rq.get_backend_config("x86").with_pattern(rows[0]).with_pattern(rows[1])
    assert plan_of(volumes(), backend).operator("a").pattern == "conv3d_add"


def refuse(match):
    return rq.extend.Skip("only every second Tuesday", "come again")


def relu_row() -> QuantOp:
    """A row that takes the add and the relu behind the convolution."""
    value = wildcard()
    root = is_op("relax.nn.relu")(is_op("relax.add")(value, wildcard()))
    return QuantOp(
        "three", "relax.nn.relu", Pattern(root, {"data": value}), (Operand("data"),), Kind.ANCHOR,
        Output.OWN, lambda context: rq.extend.Skip("no integers here"),
    )  # fmt: skip


def strange_row() -> QuantOp:
    """A row for the operator that looks otherwise: its operand is a sum."""
    lhs, rhs, weight = wildcard(), wildcard(), wildcard()
    root = is_op("relax.nn.conv3d")(is_op("relax.add")(lhs, rhs), weight)
    pattern = Pattern(root, {"data": lhs, "weight": weight})
    return weighted_row("bare", "relax.nn.conv3d", pattern=pattern)


@pytest.mark.filterwarnings("ignore:Nothing is quantized")
@pytest.mark.parametrize(
    ("rows", "reason", "advice"),
    [
        ([replace(CONV3D, check=refuse)], "only every second Tuesday", "come again"),
        (
            [CONV3D, relu_row()],
            "'conv3d_add' takes it with 'a', which pattern 'three' took for 'r' before",
            "without_pattern('three')",
        ),
        (
            [strange_row()],
            "no pattern of backend 'x86' for relax.nn.conv3d looks as here: bare",
            "with_pattern",
        ),
    ],
)
def test_reason__is_the_true_one(rows, reason, advice):
    backend = rq.get_backend_config("x86")
    for row in rows:
        backend = backend.with_pattern(row)
    row = plan_of(volumes(), backend).operator("c")
    assert not row.quantized
    assert reason in row.reason
    assert advice in row.advice


def check_anchors_have_what_they_want(mod, backend):
    """Every match that an anchor row accepts has an operator that an anchor row took: none was
    lost to a row without an anchor."""
    graph = Graph(mod)
    matches = match_operators(graph, backend, DEFAULT)
    owners = {var: matched for matched in matches for var in matched.vars}
    assert len(owners) == sum(len(matched.vars) for matched in matches)
    calls = [b.var for b in graph.bindings if graph.call_of(b.var) is not None]
    assert set(owners) == set(calls)
    found = 0
    for row in backend.patterns:
        if row.pattern.kind is not Kind.ANCHOR:
            continue
        matches = (row.pattern.pattern.match(graph, var) for var in calls)
        for match in matches:
            if match is not None and row.pattern.check(match) is None:
                found += 1
                assert any(owners[var].pattern.kind is Kind.ANCHOR for var in match.vars)
    return found


@settings(max_examples=count_examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(draw_models())
def test_claims__no_row_without_an_anchor_takes_what_an_anchor_wants(mod):
    check_anchors_have_what_they_want(prepare_module(mod), rq.get_backend_config("x86"))


def test_claims__no_row_without_an_anchor_takes_what_an_anchor_wants__residual():
    mod = prepare_module(residual_model())
    assert check_anchors_have_what_they_want(mod, rq.get_backend_config("x86")) > 5
    # Whatever the order of the table.
    backwards = replace(
        rq.get_backend_config("x86"), patterns=rq.get_backend_config("x86").patterns[::-1]
    )
    assert check_anchors_have_what_they_want(mod, backwards) > 5
    kinds = [{row.pattern.kind is Kind.ANCHOR for row in part} for part in order_rows(backwards)]
    assert kinds == [{True}, {False}]


WHOLE = (1, 4, 8, 8)
#: operators on a value of the run time and a constant
BESIDE_CONSTANT = {
    "add": lambda x, c: op.add(x, c),
    "add, constant first": lambda x, c: op.add(c, x),
    "subtract": lambda x, c: op.subtract(c, x),
    "multiply": lambda x, c: op.multiply(x, c),
    "concat": lambda x, c: op.concat([x, c], 1),
}


@pytest.mark.parametrize("operator", BESIDE_CONSTANT.values(), ids=BESIDE_CONSTANT)
@pytest.mark.parametrize("has_reader", [True, False])
def test_dequantized_constant__decides_as_the_same_constant_in_float(operator, has_reader):
    """Integers of a constant are none that reach an operator: nothing of the run time is."""
    integers = np.resize(np.arange(-9, 50, 7), WHOLE).astype("int8")

    def build(is_dequantized):
        def body(emit, x):
            if is_dequantized:
                constant = emit("c", qnn.dequantize(relax.const(integers), 0.5, 0))
            else:
                constant = relax.const(integers.astype("float32") / 2)
            value = emit("v", operator(x, constant))
            if not has_reader:
                return emit("s", op.nn.softmax(value))
            return emit("k", op.nn.conv2d(value, emit.constant(4, int(value.ty.shape[1]), 3, 3)))

        return build_model(body, WHOLE)

    def decide(mod):
        operators = annotate(prepare_module(mod), rq.get_backend_config("x86"), DEFAULT).operators
        return {row.name: row.quantized for row in operators if row.name != "c"}

    decided = decide(build(True))
    assert decided == decide(build(False))
    assert not decided["v"]


def test_dequantized_constant__is_not_quantized_again():
    def body(emit, x):
        constant = emit("c", qnn.dequantize(relax.const(np.ones(WHOLE, "int8")), 0.5, 0))
        mean = emit("m", op.mean(constant, [2, 3], keepdims=True))
        return emit("s", op.nn.softmax(emit("a", op.add(x, mean))))

    plan = annotate(prepare_module(build_model(body, WHOLE)), rq.get_backend_config("x86"), DEFAULT)
    assert not plan.operator("m").quantized


CONV2D = weighted_row("mine", "relax.nn.conv2d")


def residual_row() -> QuantOp:
    """A row of the user's that adds a computed value to the sums of a convolution."""
    data, weight, residual = wildcard(), wildcard(), wildcard()
    root = is_op("relax.add")(is_op("relax.nn.conv2d")(data, weight), residual)
    row = weighted_row("mine", "relax.nn.conv2d")
    parts = {"data": data, "weight": weight, "residual": residual}
    operands = (*row.operands, Operand("residual"))
    return replace(row, pattern=Pattern(root, parts), operands=operands)


def images(*, is_shared: bool = False, **attributes):
    """conv "c" + bias "a", relu "r"; with `is_shared`, the sum is read twice."""

    def body(emit, x):
        conv = emit("c", op.nn.conv2d(x, emit.constant(4, 4, 3, 3), padding=1, **attributes))
        total = emit("a", op.add(conv, emit.constant(1, 4, 1, 1)))
        value = emit("r", op.nn.relu(total))
        return emit("s", op.add(value, total)) if is_shared else value

    return build_model(body, (1, 4, 8, 8))


def add_last(row: QuantOp) -> rq.BackendConfig:
    """The backend with a row of the user's behind all others."""
    last = rq.config.PatternConfig(row, rq.get_backend_config("x86").patterns[0].dtypes)
    return replace(
        rq.get_backend_config("x86"), patterns=(*rq.get_backend_config("x86").patterns, last)
    )


def dynamic() -> rq.QConfigMapping:
    data = rq.TensorConfig(rq.QSpec("uint8", is_dynamic=True))
    return rq.QConfigMapping().set_global(
        replace(rq.get_backend_config("x86").default_qconfig, activation=data)
    )


@pytest.mark.parametrize(
    ("mod", "backend", "mapping", "reason"),
    [
        (
            images(),
            rq.get_backend_config("x86").with_pattern(replace(CONV2D, check=refuse)),
            DEFAULT,
            "second Tuesday",
        ),
        (
            images(dilation=2),
            rq.get_backend_config("x86").with_pattern(CONV2D),
            DEFAULT,
            "dilation",
        ),
        (
            images(is_shared=True),
            rq.get_backend_config("x86").with_pattern(replace(relu_row(), name="mine")),
            DEFAULT,
            "it would take 'a', which is an output of the model or is read by another operator",
        ),
        (images(), add_last(CONV2D), DEFAULT, "took for 'r' before"),
        (
            residual_model(),
            rq.get_backend_config("x86").with_pattern(residual_row()),
            dynamic(),
            "makes the result of the",
        ),
    ],
    ids=["check", "attribute", "shared value", "matched before", "run time"],
)
def test_passed_over__names_the_row_of_the_user(mod, backend, mapping, reason):
    plan = rq.prepare(mod, None, qconfig_mapping=mapping, backend=backend).plan
    named = [row for row in plan.operators if row.passed_over]
    assert named
    for row in named:
        assert row.pattern != "mine"
        (passed,) = row.passed_over
        assert passed.pattern == "mine"
        assert reason in passed.reason
    assert any(row.op == "relax.nn.conv2d" and row.quantized for row in named)


def test_passed_over__a_row_that_takes_the_operator_is_its_pattern():
    """Also where the operator stays in float: for its dtypes, its QConfig."""
    narrow = (rq.config.DTypeConfig(input="int16", output="int16", weight="int8"),)
    for backend, mapping, reason in (
        (rq.get_backend_config("x86").with_pattern(CONV2D, narrow), DEFAULT, "cannot run mine so"),
        (
            rq.get_backend_config("x86").with_pattern(CONV2D),
            DEFAULT.set_object_type("nn.conv2d", None),
            "kept in float",
        ),
        (
            rq.get_backend_config("x86").with_pattern(CONV2D),
            dynamic(),
            "cannot run mine so: parameters of the run",
        ),
    ):
        row = rq.prepare(images(), None, qconfig_mapping=mapping, backend=backend).plan.operator(
            "c"
        )
        assert (row.pattern, row.quantized, row.passed_over) == ("mine", False, ())
        assert reason in row.reason


def test_passed_over__no_row_of_the_table_nor_behind_another_of_the_user():
    longer = weighted_row("longer", "relax.nn.conv2d", add=True)
    shorter = replace(CONV2D, name="shorter")
    for backend in (
        rq.get_backend_config("x86"),
        rq.get_backend_config("x86").with_pattern(shorter).with_pattern(longer),
    ):
        plan = rq.prepare(images(), None, qconfig_mapping=DEFAULT, backend=backend).plan
        assert not any(row.passed_over for row in plan.operators)


def test_annotate__a_graph_is_matched_once(monkeypatch):
    """A second plan of a graph matches no row again, and equals a new plan of the module."""
    mod, backend, asked = residual_model(), rq.get_backend_config("x86"), []
    find = Pattern.find
    monkeypatch.setattr(Pattern, "find", lambda *args: asked.append(args) or find(*args))
    graph = Graph(prepare_module(mod, None))
    name = next(op.name for op in annotate(graph, backend, DEFAULT).operators if op.quantized)
    count, changed = len(asked), DEFAULT.set_module_name(name, None)
    plan = annotate(graph, backend, changed)
    assert len(asked) == count > 0
    assert not plan.operator(name).quantized
    assert plan == annotate(graph.mod, backend, changed)
