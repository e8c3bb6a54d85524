"""Groups: which values carry which parameters, and where they are observed and rounded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from float_models import MAP, build_model, draw_batches
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.qtypes import QSpec, Role, Scheme
from relayquant.config import QConfigMapping, TensorConfig
from relayquant.ir.plan import Plan
from relayquant.ir.rewrite import Graph
from relayquant.stages.annotation import annotate, plan_without
from relayquant.stages.backends import GENERIC, X86
from relayquant.stages.preparation import prepare_module

DEFAULT = QConfigMapping().set_global(X86.default_qconfig)


def plan_of(body, *shapes, mapping=DEFAULT, backend=X86) -> Plan:
    return annotate(prepare_module(build_model(body, *(shapes or (MAP,)))), backend, mapping)


def with_activation(dtype: str, scheme: Scheme = Scheme.AFFINE) -> rq.QConfig:
    config = X86.default_qconfig
    return replace(config, activation=TensorConfig(QSpec(dtype, scheme), rq.observers.MinMax()))


def activation_keys(plan: Plan) -> list[str]:
    return [group.key for group in plan.activations]


def test_group__one_for_each_value_however_many_consumers():
    def body(emit, x):
        # a and b would become one convolution with as many groups.
        a, b, c = emit.conv("a", x), emit.conv("b", x, groups=2), emit.conv("c", x)
        return emit("out", op.concat([emit("s", op.add(a, b)), c, x], axis=1))

    plan = plan_of(body)
    assert plan.value_groups["x"] == ("x",)
    assert sum("x" in group.members for group in plan.groups) == 1
    assert set(plan.group("x").info.consumers) >= {"a", "b", "c"}


def test_group__same_value_twice():
    def body(emit, x):
        a = emit.conv("a", x)
        b = emit("b", op.concat([a, a], axis=1))
        return emit.conv("out", emit("c", op.add(b, b)))

    plan = plan_of(body)
    assert dict(plan.operator("b").operands) == {"data.0": "a", "data.1": "a"}
    assert dict(plan.operator("c").operands) == {"lhs": "a", "rhs": "a"}
    assert activation_keys(plan) == ["x", "a", "c"]
    assert plan.group("a").members == ("a", "b")
    assert plan.group("a").points == ("a",)


def test_group__concat_shares_with_inputs_that_nothing_else_reads():
    def body(emit, x):
        a, b, c = emit.conv("a", x), emit.conv("b", x), emit.conv("c", x)
        joined = emit("joined", op.concat([a, b, c], axis=1))
        return relax.Tuple([emit.conv("out", joined), emit.conv("other", c)])

    plan = plan_of(body)
    group = plan.group(plan.value_groups["joined"][0])
    assert set(group.members) == {"a", "b", "joined"}
    assert "joined" not in plan.value_groups["c"]
    assert plan.group("c").members == ("c",)


def test_group__sharing_operators_keep_the_parameters_of_their_input():
    def body(emit, x):
        a = emit.conv("a", x)
        p = emit("p", op.nn.max_pool2d(a, (2, 2)))
        t = emit("t", op.permute_dims(p, [0, 1, 3, 2]))
        return relax.Tuple([emit.conv("out", t), emit.conv("side", a)])

    plan = plan_of(body)
    assert plan.group("a").members == ("a", "p", "t")
    assert plan.group("a").points == ("a",)
    assert plan.group("a").clamped == ()


def test_group__observed_behind_a_clamp_that_alone_reads_it():
    def body(emit, x):
        a = emit.conv("a", x)
        p = emit("p", op.nn.max_pool2d(a, (2, 2)))
        return emit.conv("out", emit("r", op.nn.relu(p)))

    plan = plan_of(body)
    assert plan.group("a").members == ("a", "p", "r")
    assert plan.group("a").points == ("r",)


def test_group__clip_of_a_rounded_value_is_rounded_again_but_not_observed():
    def body(emit, x):
        a = emit.conv("a", x)
        k = emit("k", op.clip(a, -0.3, 0.3))
        return relax.Tuple([emit.conv("out", k), emit.conv("side", a)])

    plan = plan_of(body)
    assert plan.group("a").points == ("a",)
    assert plan.group("a").clamped == ("k",)
    assert activation_keys(plan).index("a") == 1  # before what reads a


@pytest.mark.parametrize(("pad_value", "points"), [(0.0, ("a",)), (3.0, ("a", "p"))])
def test_group__padding_with_another_value_is_observed(pad_value, points):
    def body(emit, x):
        a = emit.conv("a", x)
        p = emit("p", op.nn.pad(a, [0, 0, 0, 2, 0, 0, 0, 0], "constant", pad_value))
        return relax.Tuple([emit.conv("out", p), emit.conv("side", a)])

    assert plan_of(body).group("a").points == points


def test_group__residual_and_diamond():
    def body(emit, x):
        a = emit("a", op.nn.relu(emit.conv("a.c", x)))
        b = emit.conv_bias("b", emit("first", op.nn.relu(emit.conv("first.c", a))))
        r = emit("r", op.nn.relu(emit("s", op.add(b, a))))
        left, right = emit.conv("left", r), emit.conv("right", r, groups=2)
        return emit("out", op.add(left, right))

    plan = plan_of(body)
    assert all(row.quantized for row in plan.operators)
    # One convolution takes the last add, the other is its residual.
    assert dict(plan.operator("out").operands)["residual"] in ("left", "right")
    row = plan.operator("r")
    assert dict(row.operands)["residual"] == "a"
    assert row.output == "r"
    assert "b" not in plan.value_groups  # stays an accumulator


def test_group__values_that_are_also_outputs():
    def body(emit, x):
        a = emit.conv("a", x)
        b = emit.conv("b", a)
        return relax.Tuple([b, a, x, a])

    plan = plan_of(body)
    assert activation_keys(plan) == ["x", "a"]
    assert plan.operator("b").output is None


def test_group__unused_inputs_have_none():
    plan = plan_of(lambda emit, x, y: emit.conv("out", x), MAP, MAP)
    assert activation_keys(plan) == ["x"]


def test_group__in_topological_order():
    def body(emit, x):
        a = emit.conv("a", x)
        b = emit.conv("b", a)
        c = emit("c", op.add(a, b))
        return emit.conv("out", emit("k", op.multiply(emit("sg", op.sigmoid(c)), c)))

    plan = plan_of(body)
    keys = activation_keys(plan)
    for row in plan.operators:
        for _, key in row.operands:
            if row.output is not None and plan.group(key).constant is None and key != row.output:
                assert keys.index(key) < keys.index(row.output), (row.name, key)
    assert {group.info.role for group in plan.activations} == {Role.ACTIVATION}
    assert all(group.constant is not None for group in plan.weights)


@pytest.mark.slow
def test_group__two_specifications_of_one_value():
    """int8 for one consumer, uint8 for the other: two groups, the second converts the first."""

    def body(emit, x):
        a = emit("a", op.nn.relu(emit.conv("a.c", x)))
        t = emit("t", op.nn.max_pool2d(a, (1, 1)))
        return relax.Tuple([emit.conv("u", t), emit.conv("s", t)])

    mapping = (
        QConfigMapping()
        .set_global(with_activation("uint8"))
        .set_module_name("s", with_activation("int8"))
    )
    mod = build_model(body, MAP)
    plan = annotate(prepare_module(mod), GENERIC, mapping)
    first, second = plan.value_groups["t"]
    assert plan.group(first).info.spec.dtype == "uint8"
    assert plan.group(second).info.spec.dtype == "int8"
    assert plan.group(second).base == first
    assert plan.group(first).base is None
    assert dict(plan.operator("u").operands)["data"] == first
    assert dict(plan.operator("s").operands)["data"] == second
    assert dict(plan.operator("t").operands)["data"] == plan.value_groups["a"][0]

    data = draw_batches(mod, 3)
    qmod = rq.quantize(mod, None, data, backend="generic", qconfig_mapping=mapping)
    text = qmod.script()
    assert text.count("R.qnn.requantize") >= 1
    assert 'dtype="int8"' in text
    assert rq.verify(qmod, data[0]).is_equal
    for have, want in zip(
        rq.reference.run(qmod, data[0]), rq.reference.run(mod, data[0]), strict=True
    ):
        assert np.abs(have - want).max() < 0.05 * np.abs(want).max()


def test_group__two_specifications_of_one_dtype_have_keys_of_their_own():
    def body(emit, x):
        a = emit.conv("a", x)
        return relax.Tuple([emit.conv("u", a), emit.conv("s", a), emit.conv("t", a)])

    mapping = (
        QConfigMapping()
        .set_global(with_activation("uint8"))
        .set_module_name("s", with_activation("int8"))
        .set_module_name("t", with_activation("int8", Scheme.SYMMETRIC))
    )
    plan = plan_of(body, mapping=mapping, backend=GENERIC)
    keys = plan.value_groups["a"]
    assert len(set(keys)) == 3
    assert {plan.group(key).info.spec for key in keys} == {
        with_activation("uint8").activation.spec,
        with_activation("int8").activation.spec,
        with_activation("int8", Scheme.SYMMETRIC).activation.spec,
    }


def test_group__sharing_operator_sees_its_input_as_its_result_is_seen():
    """The default specification of a reshape does not matter when its consumer has another."""

    def body(emit, x):
        t = emit("t", op.permute_dims(emit("f", op.nn.softmax(x)), [0, 1, 3, 2]))
        return emit.conv("out", t)

    mapping = (
        QConfigMapping()
        .set_global(with_activation("uint8"))
        .set_module_name("out", with_activation("int8"))
    )
    plan = plan_of(body, mapping=mapping, backend=GENERIC)
    assert plan.operator("t").quantized
    assert dict(plan.operator("t").operands) == {"data": "f"}
    assert plan.group("f").info.spec.dtype == "int8"
    assert plan.group("f").members == ("f", "t")


def test_group__concat_does_not_share_with_what_an_operator_reads_too():
    """Nor with an input of the model, even if nothing else reads that."""

    def body(emit, x, y):
        a, b = emit.conv("a", x), emit.conv("b", x)
        joined = emit("joined", op.concat([a, emit("r", op.reshape(b, MAP)), y], axis=1))
        return relax.Tuple([emit.conv("out", joined), emit.conv("other", b)])

    plan = plan_of(body, MAP, MAP)
    members = {group.key: set(group.members) for group in plan.activations}
    assert members == {"x": {"x"}, "y": {"y"}, "b": {"b"}, "a": {"a", "joined"}}


@pytest.mark.parametrize("source", ["read once", "read twice", "an output", "input"])
def test_group__concat_asks_all_values_that_carry_the_parameters(source):
    """Of a transpose that the concat alone reads, what is transposed decides too."""

    def body(emit, x, y):
        value = y if source == "input" else emit.conv("value", x)
        pooled = emit("pooled", op.nn.max_pool2d(value, (3, 3), padding=(1, 1)))
        moved = emit("moved", op.permute_dims(pooled, [0, 1, 3, 2]))
        out = emit.conv("out", emit("joined", op.concat([emit.conv("a", x), moved], axis=1)))
        other = {"read twice": lambda: emit.conv("other", value), "an output": lambda: value}
        return relax.Tuple([out, other[source]()]) if source in other else out

    plan = plan_of(body, MAP, MAP)
    sharing = set(plan.group(plan.value_groups["joined"][0]).members)
    expected = {"a", "joined"}
    if source == "read once":
        expected |= {"value", "pooled", "moved"}
    assert sharing == expected


@pytest.mark.parametrize("other", ["", "value", "whole", "tap1"])
def test_group__concat_of_parts_of_one_value_keeps_its_parameters(other):
    """Neighbouring slices that are joined are rounded once, unless another operator reads one of
    the values.
    """

    def body(emit, x):
        value = emit.conv("value", x)
        whole = emit("whole", op.nn.pad(value, [0, 0, 0, 0, 1, 1, 0, 0]))
        height = int(value.ty.shape[2])
        taps = [emit(f"tap{i}", op.strided_slice(whole, [2], [i], [i + height])) for i in range(3)]
        out = emit.conv("out", emit("joined", op.concat(taps, axis=1)))
        known = {"value": value, "whole": whole, "tap1": taps[1]}
        return relax.Tuple([out, emit.conv("other", known[other])]) if other else out

    plan = plan_of(body)
    moved = {"value", "whole", "tap0", "tap1", "tap2"}
    group = plan.group("value")
    assert set(group.members) == (moved if other else {*moved, "joined"})
    assert group.points == ("value",)
    assert plan.value_groups["joined"] == (("joined",) if other else ("value",))


def test_group__concat_of_a_value_and_its_maxima_has_its_own_parameters():
    def body(emit, x):
        value = emit.conv("value", x)
        pooled = emit("pooled", op.nn.max_pool2d(value, (3, 3), padding=(1, 1)))
        return emit.conv("out", emit("joined", op.concat([value, pooled], axis=1)))

    plan = plan_of(body)
    assert plan.group("value").members == ("value", "pooled")
    assert plan.group("joined").members == ("joined",)


@pytest.mark.parametrize("first_reads", ["a", "r"])
def test_group__first_consumer_picks_the_observer(first_reads):
    """In the order of the model, whatever the order of the values that share the parameters."""

    def body(emit, x):
        a = emit.conv("a", x)
        r = emit("r", op.permute_dims(a, [0, 1, 3, 2]))
        one, two = (a, r) if first_reads == "a" else (r, a)
        return relax.Tuple([emit.conv("one", one), emit.conv("two", two)])

    config = X86.default_qconfig
    first = replace(
        config, activation=TensorConfig(config.activation.spec, rq.observers.Percentile(99.0))
    )
    mapping = DEFAULT.set_module_name("one", first)
    plan = plan_of(body, mapping=mapping)
    assert plan.group(plan.value_groups["a"][0]).observer == rq.observers.Percentile(99.0)


@pytest.mark.parametrize("wanted", [(), ("out",)])
def test_plan_without__rows_of_the_whole_plan(wanted):
    """What remains on integers has the keys that a plan with the same operators in float gives."""

    def body(emit, x):
        # a and b would become one convolution with as many groups.
        a, b, c = emit.conv("a", x), emit.conv("b", x, groups=2), emit.conv("c", x)
        joined = emit("s", op.add(emit("ra", op.nn.relu(a)), b))
        both = emit("cat", op.concat([joined, c, x], axis=1))
        return emit("out", op.nn.max_pool2d(both, (2, 2)))

    mod = prepare_module(build_model(body, MAP))
    names = [row.name for row in annotate(mod, X86, DEFAULT).operators]
    find = plan_without(Graph(mod), X86, DEFAULT, wanted)
    for count in range(3):
        for floats in itertools.combinations([n for n in names if n not in wanted], count):
            mapping = keep_float(floats)
            plan = annotate(mod, X86, mapping, wanted)
            expected = [row for row in plan.operators if row.quantized]
            found = find(floats)
            assert [(row.name, row.operands, row.output) for row in found] == [
                (row.name, row.operands, row.output) for row in expected
            ]
            known = {group.key for group in plan.groups}
            assert known >= {key for row in found for _, key in row.operands}


def keep_float(names) -> QConfigMapping:
    mapping = DEFAULT
    for name in names:
        mapping = mapping.set_module_name(name, None)
    return mapping
