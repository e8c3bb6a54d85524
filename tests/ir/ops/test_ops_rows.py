"""The operator tables as data, and finding planned operators again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from float_models import MAP, ask_for, build_model
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.qtypes import Role
from relayquant.errors import ConfigError
from relayquant.ir.ops import BUILTIN_OPS, Kind, Output
from relayquant.ir.ops.base import accumulator_qparams
from relayquant.ir.ops.find import find_pattern, match_operator, operand_constant
from relayquant.ir.rewrite import Graph, Pattern
from relayquant.stages.backends import ARM, GENERIC, X86


def test_rows__names_are_unique_and_parts_are_named():
    names = [row.name for row in BUILTIN_OPS]
    assert len(set(names)) == len(names)
    for row in BUILTIN_OPS:
        if isinstance(row.pattern, Pattern):
            assert {operand.name for operand in row.operands} == set(row.pattern.parts), row.name
            assert row.pattern.op_name, row.name


def test_rows__sharing_operators_leave_the_work_to_the_allow_list():
    for row in BUILTIN_OPS:
        assert (row.realize is None) == (row.kind is Kind.SHARING), row.name
        assert (row.output is Output.SHARED) == (row.kind is Kind.SHARING), row.name


def test_rows__every_row_is_in_every_backend_in_the_same_order():
    for backend in (X86, ARM, GENERIC):
        assert [row.pattern.name for row in backend.patterns] == [row.name for row in BUILTIN_OPS]


def test_rows__longer_patterns_come_first():
    """A pattern that holds another one must be tried before it."""
    place = {row.name: i for i, row in enumerate(BUILTIN_OPS)}
    for longer, shorter in [
        ("conv2d_bias_add_relu", "conv2d_bias_add"),
        ("conv2d_bias_add_relu", "conv2d_add_relu"),
        ("conv2d_bias_add", "conv2d_bias"),
        ("conv2d_bias_relu", "conv2d_relu"),
        ("conv2d_bias", "add"),
        ("conv2d_relu", "relu"),
        ("dense_bias_relu", "dense_bias"),
        ("dense_bias", "dense"),
        ("add_relu", "add"),
        ("dense", "batch_matmul"),
    ]:
        assert place[longer] < place[shorter], (longer, shorter)


def test_operand__by_name():
    conv = next(row for row in BUILTIN_OPS if row.name == "conv2d_bias")
    assert conv.operand("bias").role is Role.BIAS
    with pytest.raises(KeyError, match="'conv2d_bias' has no operand 'residual'"):
        conv.operand("residual")


@pytest.fixture
def prepared():
    def body(emit, x):
        return emit.conv("out", emit("r", op.nn.relu(emit.conv_bias("a", x))))

    return rq.prepare(build_model(body, MAP))


def test_match_operator__finds_what_was_planned(prepared):
    operator = prepared.plan.operator("r")
    match = match_operator(Graph(prepared.mod), X86, operator)
    assert match.name == "r"
    assert operand_constant(match, "weight").shape == (4, 4, 3, 3)
    with pytest.raises(rq.ModelError, match="Operand 'data' of operator 'r' is not a constant"):
        operand_constant(match, "data")


def test_match_operator__another_module(prepared):
    other = rq.prepare(build_model(lambda e, x: e.conv("out", x), MAP))
    with pytest.raises(rq.ModelError, match=r"quantizes operator 'r' as 'conv2d_bias_relu'"):
        match_operator(Graph(other.mod), X86, prepared.plan.operator("r"))


def test_find_pattern__unknown():
    with pytest.raises(rq.ConfigError, match=r"Backend 'x86' has no pattern 'conv2'.*conv2d"):
        find_pattern(X86, "conv2")


def test_find_pattern__row_of_the_user():
    count = len(X86.patterns)
    told = (
        rf"pass the backend that has it as backend=\. Known: 'abs', .*, \.\.\. \({count} in all\)"
    )
    with pytest.raises(rq.ConfigError, match=told) as caught:
        find_pattern(X86, "zzz")
    assert len(str(caught.value)) < 1_000


def test_accumulator__scale_is_the_product():
    data = rq.QParams(np.float32(0.1), np.int32(3), "uint8")
    weight = rq.QParams(np.array([0.5, 0.25], "float32"), np.zeros(2, "int32"), "int8", 0)
    qparams = accumulator_qparams(data, weight, 1)
    np.testing.assert_array_equal(qparams.scale, np.float32(0.1) * weight.scale)
    assert (qparams.dtype, qparams.axis) == ("int32", 1)
    assert not qparams.zero_point.any()


def test_channel_axes__follow_the_layouts():
    """NHWC data and HWIO weights: channels are last."""

    def body(emit, x):
        weight = emit.constant(3, 3, 6, 5)
        y = emit("c", op.nn.conv2d(x, weight, padding=1, data_layout="NHWC", kernel_layout="HWIO"))
        return emit("out", op.add(y, emit.constant(5)))

    mod = build_model(body, (1, 4, 4, 6))
    prepared = rq.prepare(mod)
    operator = prepared.plan.operator("out")
    assert operator.pattern == "conv2d_bias"
    assert prepared.plan.group("out:weight").info.axis == 3
    rng = np.random.default_rng(0)
    data = [rng.standard_normal((1, 4, 4, 6)).astype("float32") for _ in range(2)]
    qmod = rq.quantize(mod, None, data)
    (have,), (want,) = rq.reference.run(qmod, data[0]), rq.reference.run(mod, data[0])
    assert np.abs(have - want).max() < 0.03 * np.abs(want).max()
    assert rq.verify(qmod, data[0]).is_equal


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv1d", "conv2d_transpose"])
def test_other_convolutions(name):
    def body(emit, x):
        if name == "conv1d":
            y = emit("c", op.nn.conv1d(x, emit.constant(5, 4, 3), padding=1))
            return emit("out", op.nn.relu(emit("b", op.add(y, emit.constant(1, 5, 1)))))
        y = emit("c", op.nn.conv2d_transpose(x, emit.constant(4, 5, 2, 2), strides=(2, 2)))
        return emit("out", op.nn.relu(emit("b", op.add(y, emit.constant(1, 5, 1, 1)))))

    shape = (1, 4, 9) if name == "conv1d" else MAP
    mod = build_model(body, shape)
    rng = np.random.default_rng(0)
    data = [rng.standard_normal(shape).astype("float32") for _ in range(2)]
    qmod = rq.quantize(mod, None, data)
    assert rq.ledger(qmod).rows[0].pattern == f"{name}_bias_relu"
    (have,), (want,) = rq.reference.run(qmod, data[0]), rq.reference.run(mod, data[0])
    assert np.abs(have - want).max() < 0.03 * np.abs(want).max()
    assert rq.verify(qmod, data[0]).is_equal
    assert isinstance(Graph(qmod).bindings[-1].var, relax.Var)


@pytest.mark.slow
def test_products__whichever_factor_is_constant_or_a_vector():
    """All of numpy's matmul but stacks of constants."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype("float32")

    weight, vector, column = draw(5, 4), draw(4), draw(5, 1)
    products = {
        "left": lambda x, v: (weight, x),
        "left_stack": lambda x, v: (weight[None], x),
        "right": lambda x, v: (v, weight.T),
        "vector_left": lambda x, v: (vector, x),
        "vector_right": lambda x, v: (weight, v),
        "vector_first": lambda x, v: (v, x),
        "vectors": lambda x, v: (v, vector),
        "biased": lambda x, v: (weight, x),
    }

    def body(emit, x, y):
        def factor(value):
            return relax.const(value) if isinstance(value, np.ndarray) else value

        values = [
            emit(name, op.matmul(*map(factor, factors(x, y)))) for name, factors in products.items()
        ]
        return relax.Tuple([*values[:-1], emit("sum", op.add(values[-1], relax.const(column)))])

    data = [{"x": draw(2, 4, 6), "y": draw(4)} for _ in range(2)]
    mod = build_model(body, (2, 4, 6), (4,))
    asked = ask_for("permute_dims", "squeeze", "expand_dims")
    qmod = rq.quantize(
        mod, None, data, effort="fast", guard=rq.config.Guard.OFF, qconfig_mapping=asked
    )
    assert [row.name for row in rq.ledger(qmod).rows if not row.quantized] == []
    expected = [np.matmul(*factors(*data[0].values())) for factors in products.values()]
    expected[-1] = expected[-1] + column
    for name, have, want in zip(products, rq.reference.run(qmod, data[0]), expected, strict=True):
        assert have.shape == want.shape, name
        assert np.abs(have - want).max() < 0.03 * np.abs(want).max(), name
    assert rq.verify(qmod, data[0]).is_equal


def test_row__needs_realize_unless_it_shares():
    row = next(row for row in BUILTIN_OPS if row.kind is Kind.CONNECTOR)
    with pytest.raises(
        ConfigError, match=r"realize=None is allowed only for Kind.SHARING.*RealizeContext"
    ):
        dataclasses.replace(row, realize=None)
