"""Integer inputs and outputs: the same results as the float interface, with parameters in the
ledger.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import MAP, build_model, draw_batches, residual_model
from operator_names import list_operators
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.base.runtime import Executor
from relayquant.ir.reference import qnn as numpy_qnn
from relayquant.stages.conversion.io_dtypes import has_scale


def quantize(mod, data, **options) -> tvm.IRModule:
    return rq.quantize(mod, None, data, **options)


def to_integer(value, array):
    qparams = value.qparams
    return numpy_qnn.quantize(array, qparams.scale, qparams.zero_point, out_dtype=qparams.dtype,
                              rounding=rq.config.Rounding.TONEAREST_EVEN)  # fmt: skip


def to_real(value, array):
    return numpy_qnn.dequantize(array, value.qparams.scale, value.qparams.zero_point)


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("feed", ["uint8", "int8"])
@pytest.mark.parametrize("back", ["uint8", "int8", None])
def test_interface__same_results_as_float(feed, back):
    mod = residual_model()
    data = draw_batches(mod, 4)
    options = {"output_dtypes": {"out": back}} if back else {}
    plain = quantize(mod, data)
    qmod = quantize(mod, data, input_dtypes={"x": feed}, **options)
    ledger = rq.ledger(qmod)
    (source,), (result,) = ledger.inputs, ledger.outputs
    assert (source.name, source.dtype) == ("x", feed)
    assert (result.name, result.dtype) == ("out", back or "float32")
    assert str(qmod["main"].params[0].ty.dtype) == feed
    integers = to_integer(source, data[0]["x"])
    (got,) = rq.reference.run(qmod, [integers])
    assert got.dtype == (back or "float32")
    (want,) = rq.reference.run(plain, data[0])
    if back is None:
        np.testing.assert_array_equal(got, want)
    else:
        # Calibration may clip the largest values, by less than a step here.
        ends = (to_real(result, np.array(end, back)) for end in INTEGER_LIMITS[back])
        assert np.abs(to_real(result, got) - np.clip(want, *ends)).max() <= 0.51 * result.scale[0]
        assert np.abs(to_real(result, got) - want).max() < result.scale[0]
    np.testing.assert_array_equal(Executor(rq.compile(qmod)).run("main", [integers])[0], got)


@pytest.mark.slow
def test_interface__survives_json():
    mod = residual_model()
    data = draw_batches(mod, 2)
    qmod = quantize(mod, data, input_dtypes={"x": "int8"}, output_dtypes={"out": "int8"})
    again = tvm.ir.load_json(tvm.ir.save_json(qmod))
    assert rq.ledger(again) == rq.ledger(qmod)
    assert rq.ledger(again).outputs[0].scale


def test_interface__no_quantize_is_left_at_the_input():
    mod = residual_model()
    qmod = quantize(mod, draw_batches(mod, 2), input_dtypes={"x": "uint8"})
    assert "qnn.quantize" not in list_operators(qmod)


@pytest.mark.parametrize(
    "interface", [("uint8", 10), ("int8", -118), ("int8", 0), ("int16", 10)], ids=str
)
@pytest.mark.parametrize("scale", [0.5, 0.25, [0.5, 0.25]], ids=str)
@pytest.mark.parametrize("zero", [10, 11])
def test_has_scale__the_integers_mean_the_same_numbers(scale, zero, interface):
    """All integers of one dtype and of the other, in order, stand for equal reals."""
    axis = 1 if isinstance(scale, list) else None
    inner = rq.QParams(
        np.float32(scale), np.int32(zero) + np.zeros_like(scale, "int32"), "uint8", axis
    )
    dtype, offset = interface
    outer = rq.QParams(np.float32(0.5), np.int32(offset), dtype)
    low, high = INTEGER_LIMITS[dtype]
    fed = [0.5 * (q - offset) for q in range(low, high + 1)]
    means_the_same = axis is None and fed == [scale * (q - zero) for q in range(256)]
    assert has_scale(inner, outer) == means_the_same


@pytest.mark.slow
def test_interface__several_outputs_and_float_readers():
    """An input that a float operator reads too, and an output that stays float."""

    def body(emit, x):
        conv = emit.conv("conv", x)
        other = emit("other", op.flip(x, axis=1))

        return relax.Tuple([conv, other])

    mod = build_model(body, MAP)
    data = draw_batches(mod, 2)
    qmod = quantize(mod, data, input_dtypes={"x": "int8"}, output_dtypes={"conv": "uint8"})
    source = rq.ledger(qmod).inputs[0]
    integers = to_integer(source, data[0]["x"])
    conv, other = rq.reference.run(qmod, [integers])
    assert conv.dtype == np.uint8
    np.testing.assert_allclose(other, to_real(source, integers)[:, ::-1], rtol=1e-5, atol=1e-5)
    assert rq.verify(qmod, [integers]).is_equal


@pytest.mark.slow
def test_interface__output_behind_a_reshape():
    def body(emit, x):
        dense = emit.dense("dense", emit("flat", op.reshape(x, (1, 144))), 6)
        return emit("out", op.reshape(dense, (2, 3)))

    mod = build_model(body, MAP)
    data = draw_batches(mod, 2)
    qmod = quantize(mod, data, output_dtypes={"out": "int8"})
    (got,) = rq.reference.run(qmod, data[0])
    assert (got.dtype, got.shape) == (np.int8, (2, 3))
    assert rq.verify(qmod, data[0]).is_equal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_dtypes": {"y": "uint8"}}, "input_dtypes has no 'y'"),
        ({"input_dtypes": {"x": "uint9"}}, r"input_dtypes\['x'\].*'uint8'"),
        (
            {"input_dtypes": {"x": "int16"}},
            "input 'x' is uint8 .* cannot be int16; allowed: int8, uint8",
        ),
        ({"output_dtypes": {"soft": "int8"}}, "output 'soft' .cumsum. is computed in float"),
    ],
)
def test_interface__what_is_not_possible(options, message):
    def body(emit, x):
        return emit("soft", op.cumsum(emit.conv("conv", x), axis=1))

    mod = build_model(body, MAP)
    with pytest.raises(rq.ConfigError, match=message):
        quantize(mod, draw_batches(mod, 2), **options)


def test_ledger__rows_tell_scheme_rule_and_support():
    mod = residual_model()
    mapping = (
        rq.QConfigMapping()
        .set_global(rq.get_backend_config("x86").default_qconfig)
        .set_module_name("mean", None)
    )
    rows = {
        r.name: r
        for r in rq.ledger(quantize(mod, draw_batches(mod, 2), qconfig_mapping=mapping)).rows
    }
    assert (rows["stem"].scheme, rows["stem"].rule, rows["stem"].support) == (
        "affine",
        "global",
        "served",
    )
    assert rows["mean"].rule == "module_name 'mean'"
    assert rows["mean"].support == "not asked"
    assert (rows["mean"].scale, rows["mean"].scheme) == ((), "")


@pytest.mark.slow
def test_interface__a_refusal_says_why_the_reader_is_in_float():
    """Asked for an integer input whose only reader stays in float: the ledger is lost, its row is
    said.
    """
    mod = residual_model()
    data = draw_batches(mod, 2)
    first = rq.ledger(quantize(mod, data, effort="fast")).rows[0].name
    default = rq.get_backend_config("x86").default_qconfig
    keep = rq.QConfigMapping().set_global(default).set_module_name(first, None)
    row = next(
        row
        for row in rq.ledger(quantize(mod, data, effort="fast", qconfig_mapping=keep)).rows
        if row.name == first
    )
    with pytest.raises(rq.errors.ConfigError) as caught:
        quantize(mod, data, effort="fast", qconfig_mapping=keep, input_dtypes={"x": "uint8"})
    assert f"{row.name!r} ({row.op}): {row.reason}" in str(caught.value)
