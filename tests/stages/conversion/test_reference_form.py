"""The reference form and the integers of constants."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import MAP, build_model, draw_batches, residual_model
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.config import BiasCorrection, FitSettings, WeightRounding
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.legality import Stage, check_stage
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value

NEAREST = FitSettings(rounding=WeightRounding.NEAREST, bias=BiasCorrection.NONE)
WEIGHT = np.array([[127, -64], [10, 3]], "float32").reshape(2, 2, 1, 1) / 127
BIAS = np.array([0.5, -3], "float32").reshape(1, 2, 1, 1)
#: what Fixed(0.5, 3) makes of values between -2 and 2 at zero point 3
SCALE, ZERO_POINT = 0.5, 3


def dequantize(q, scale, zero_point, axis=-1):
    return qnn.dequantize(q, relax.const(scale), relax.const(zero_point), axis=axis)


def round_trip_quantize(x):
    return qnn.quantize(
        x, relax.const(np.float32(SCALE)), relax.const(np.int32(ZERO_POINT)), out_dtype="uint8"
    )


def round_trip_dequantize(q):
    return dequantize(q, np.float32(SCALE), np.int32(ZERO_POINT))


def dequantize_weight():
    scale = (np.abs(WEIGHT).reshape(2, 2).max(axis=1) / np.float32(127)).astype("float32")
    values = np.rint(WEIGHT / scale.reshape(2, 1, 1, 1)).astype("int8")
    return dequantize(relax.const(values), scale, np.zeros(2, "int32"), 0)


def dequantize_bias():
    scale = (np.abs(WEIGHT).reshape(2, 2).max(axis=1) / np.float32(127)).astype("float32")
    scale = (np.float32(SCALE) * scale).astype("float32")
    values = np.rint(BIAS.reshape(-1) / scale).astype("int32").reshape(BIAS.shape)
    return dequantize(relax.const(values), scale, np.zeros(2, "int32"), 1)


@I.ir_module
class Float:
    @R.function
    def main(x: R.Tensor((1, 2, 3, 3), "float32")):
        with R.dataflow():
            c = R.nn.conv2d(x, R.const(WEIGHT))
            b = R.add(c, R.const(BIAS))
            r = R.nn.relu(b)
            out = R.nn.max_pool2d(r, pool_size=[2, 2])
            pair = (out, r)
            R.output(pair)
        return pair


@I.ir_module
class Reference:
    @R.function
    def main(x: R.Tensor((1, 2, 3, 3), "float32")):
        with R.dataflow():
            x_q = round_trip_quantize(x)
            x_dq = round_trip_dequantize(x_q)
            w = dequantize_weight()
            bias = dequantize_bias()
            c = R.nn.conv2d(x_dq, w)
            b = R.add(c, bias)
            r = R.nn.relu(b)
            out = R.nn.max_pool2d(r, pool_size=[2, 2])
            pair = (out, r)
            R.output(pair)
        return pair


def test_reference__dequantize_float_operator_quantize():
    prepared = rq.prepare(Float)
    prepared = rq.calibrate(
        prepared,
        draw_batches(Float, 1),
        observer=rq.observers.Fixed(SCALE, ZERO_POINT),
        fit=NEAREST,
    )
    text = prepared.mod.script(show_meta=True)
    reference = rq.convert_to_reference(prepared)
    assert prepared.mod.script(show_meta=True) == text
    tvm.ir.assert_structural_equal(
        reference["main"].without_attr("relayquant.ledger"),
        Reference["main"].with_attr(
            {k: v for k, v in (reference["main"].attrs or {}).items() if k == "num_input"}
        ),
        map_free_vars=True,
    )
    check_stage(reference, Stage.REFERENCE)
    for operator in ("conv2d", "add", "requantize", "dense"):
        assert f"R.qnn.{operator}(" not in reference.script()


def integers_of(mod: tvm.IRModule, name: str) -> np.ndarray:
    """The integers of a dequantized constant of a reference form."""
    graph = Graph(mod)
    value = constant_value(graph.values[graph.vars[name]].args[0])
    assert value is not None
    return value


def test_constants__biases_are_int32_and_weights_int8():
    mod = residual_model()
    prepared = rq.calibrate(rq.prepare(mod), draw_batches(mod, 2))
    reference = rq.convert_to_reference(prepared)
    weights = integers_of(reference, "two.weight")
    assert weights.dtype == np.int8
    assert np.abs(weights.astype(int)).max() <= 127
    assert integers_of(reference, "two.bias").dtype == np.int32
    graph = Graph(rq.lower(reference))
    for binding in graph.bindings:
        if graph.op_name(binding.var) in ("relax.qnn.conv2d", "relax.qnn.dense"):
            assert constant_value(binding.value.args[1]).dtype == np.int8
        if graph.op_name(binding.var) == "relax.add":
            assert constant_value(binding.value.args[1]).dtype == np.int32


def test_constants__weight_scale_is_raised_where_a_bias_would_overflow():
    """A channel without weights gets scale 1e-30 or 1 from its observer, whatever its bias."""
    weight = np.zeros((4, 4, 1, 1), "float32")
    weight[0], weight[1], weight[2] = 0.5, 1e-12, 1e-30
    bias = np.array([1, 2, -3, 1e6], "float32").reshape(1, 4, 1, 1)

    def body(emit, x):
        c = emit("c", op.nn.conv2d(x, relax.const(weight)))
        return emit("out", op.add(c, relax.const(bias)))

    mod = build_model(body, MAP)
    data = draw_batches(mod, 2)
    for fit in (NEAREST, FitSettings()):
        prepared = rq.calibrate(rq.prepare(mod), data, fit=fit)
        reference = rq.convert_to_reference(prepared)
        integers = integers_of(reference, "out.bias").astype("int64").reshape(-1)
        assert np.abs(integers).max() <= 2**30 + 100
        qmod = rq.lower(reference)
        (have,), (want,) = rq.reference.run(qmod, data[0]), rq.reference.run(mod, data[0])
        np.testing.assert_allclose(have[:, 1:], want[:, 1:], rtol=1e-6)
        assert np.abs(have[:, 0] - want[:, 0]).max() < 0.02


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1), (4, 1, 1), (1, 4, 1, 1)])
def test_constants__biases_of_every_shape(shape):
    def body(emit, x):
        c = emit("c", op.nn.conv2d(x, emit.constant(4, 4, 1, 1)))
        return emit.conv("out", emit("r", op.nn.relu(emit("b", op.add(c, emit.constant(*shape))))))

    mod = build_model(body, MAP)
    data = draw_batches(mod, 2)
    prepared = rq.calibrate(rq.prepare(mod), data)
    assert prepared.plan.operator("r").pattern == "conv2d_bias_relu"
    qmod = rq.lower(rq.convert_to_reference(prepared))
    (have,), (want,) = rq.reference.run(qmod, data[0]), rq.reference.run(mod, data[0])
    assert np.abs(have - want).max() < 0.03 * np.abs(want).max()


def test_constants__tiny_weights_and_activations_do_not_underflow():
    """Data scale x weight scale must stay a positive float32."""

    def body(emit, x):
        return emit("out", op.nn.conv2d(x, relax.const(np.full((2, 4, 1, 1), 1e-29, "float32"))))

    mod = build_model(body, MAP)
    data = [{"x": np.float32(1e-29) * batch["x"]} for batch in draw_batches(mod, 2)]
    qmod = rq.quantize(mod, None, data)
    assert np.isfinite(rq.reference.run(qmod, data[0])[0]).all()


@pytest.mark.parametrize("kind", ["conv2d", "conv2d_transpose", "matmul"])
def test_reference__operand_is_a_field_of_a_tuple(kind):
    """An operator with several results right before one with a bias: the second of it is data."""

    def body(emit, x):
        ones = relax.const(np.ones(4, "float32"))
        pair = emit("pair", op.nn.batch_norm(x, ones, ones, ones, ones, axis=1))
        field = emit("field", relax.TupleGetItem(pair, 0))
        if kind == "conv2d":
            return emit.conv_bias("out", field)
        if kind == "matmul":
            return emit("out", op.add(emit.dense("dot", field, 5), emit.constant(5)))
        weight = emit.constant(4, 3, 2, 2)
        product = emit("product", op.nn.conv2d_transpose(field, weight))
        return emit("out", op.add(product, emit.constant(1, 3, 1, 1)))

    mod = build_model(body, MAP)
    data = draw_batches(mod, 2)
    prepared = rq.calibrate(rq.prepare(mod, None), data)
    (operator,) = (row for row in prepared.plan.operators if row.quantized)
    assert dict(operator.operands)["data"] == "field"
    reference = rq.convert_to_reference(prepared)
    (expected,) = rq.reference.run(mod, data[0])
    (found,) = rq.reference.run(reference, data[0])
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
