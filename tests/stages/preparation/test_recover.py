"""Operators recovered from the loops of TVM's own ONNX frontend."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from float_models import as_main
from onnx import TensorProto, helper
from onnx_models import make_onnx
from operator_names import list_operators
from tvm import relax, te, tirx, topi
from tvm.relax.frontend.onnx import from_onnx
from tvm.script import relax as R

from relayquant.ir.rewrite.function import make_main
from relayquant.stages.preparation import prepare_module


def make_model(nodes, shape, constants=(), opset=13):
    model = make_onnx(nodes, {"x": shape}, {"y": None}, constants, opset)
    return onnx.shape_inference.infer_shapes(model)


def import_with_tvm(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return from_onnx(model)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [7, 13])
@pytest.mark.parametrize("batch", [2, "N"])
def test_clip_and_pad_of_tvm__recovered(opset, batch, check_same_numbers):
    if opset < 11:
        nodes = [
            helper.make_node("Clip", ["x"], ["c"], min=0.0, max=6.0),
            helper.make_node("Pad", ["c"], ["y"], pads=[0, 0, 1, 2, 0, 0, 3, 4], value=2.0),
        ]
        constants = []
    else:
        nodes = [
            helper.make_node("Clip", ["x", "low", "high"], ["c"]),
            helper.make_node("Pad", ["c", "pads", "value"], ["y"]),
        ]
        constants = [
            helper.make_tensor("low", TensorProto.FLOAT, [], [0.0]),
            helper.make_tensor("high", TensorProto.FLOAT, [], [6.0]),
            helper.make_tensor("pads", TensorProto.INT64, [8], [0, 0, 1, 2, 0, 0, 3, 4]),
            helper.make_tensor("value", TensorProto.FLOAT, [], [2.0]),
        ]
    mod = import_with_tvm(make_model(nodes, [batch, 3, 5, 5], constants, opset))
    assert "call_tir" in mod.script()
    prepared = check_same_numbers(
        mod, np.random.default_rng(0).normal(0, 9, (2, 3, 5, 5)).astype("float32")
    )
    first, second = prepared["main"].body.blocks[0].bindings
    assert first.value.op.name == "relax.clip"
    assert [float(arg.value) for arg in first.value.args[1:]] == [0.0, 6.0]
    assert second.value.op.name == "relax.nn.pad"
    assert list(second.value.attrs.pad_width) == [0, 0, 0, 0, 1, 3, 2, 4]
    assert second.value.attrs.pad_value == 2.0
    assert len(prepared.get_global_vars()) == 1


def test_auto_pad_of_tvm__folded_into_conv(check_same_numbers):
    weight = np.random.default_rng(0).standard_normal((2, 3, 3, 3)).astype("float32")
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[2, 2])]
    mod = import_with_tvm(
        make_model(nodes, [1, 3, 8, 8], [onnx.numpy_helper.from_array(weight, "w")])
    )
    assert "call_tir" in mod.script()
    prepared = check_same_numbers(mod, np.ones((1, 3, 8, 8), "float32"))
    (conv,) = prepared["main"].body.blocks[0].bindings
    assert list(conv.value.attrs.padding) == [0, 0, 1, 1]


def test_other_loops__stay():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            a = builder.emit_te(topi.nn.mirror_pad, x, [1, 1], [1, 1], "REFLECT")
            b = builder.emit_te(lambda t: topi.maximum(t, t + 1.0), a)
            out = builder.emit_output(builder.emit_te(topi.tanh, b))
        builder.emit_func_output(out)
    prepared = prepare_module(builder.finalize())
    assert list_operators(prepared) == ["call_tir"] * 3
    assert len(prepared.get_global_vars()) == 4


def test_look_alikes__stay():
    """A maximum that transposes, and a pad whose condition leaves out a row of the data."""

    def transposed(t):
        return te.compute((4, 4), lambda i, j: te.max(t[j, i], tirx.const(0.0, "float32")))

    def cut(t):
        zero = tirx.const(0.0, "float32")
        return te.compute(
            (6, 4), lambda i, j: tirx.if_then_else(tirx.all(i >= 2, i < 5), t[i - 1, j], zero)
        )

    x = relax.Var("x", relax.TensorType((4, 4), "float32"))

    def emit(builder):
        a = builder.emit_te(transposed, x)
        return builder.emit_te(cut, a)

    mod = make_main([x], emit)
    prepared = prepare_module(mod)
    assert list_operators(prepared) == ["call_tir"] * 2


def test_maximum_of_two_tensors__recovered(check_prepared):
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    z = relax.Var("z", relax.TensorType((4,), "float32"))
    mod = make_main([x, z], lambda builder: builder.emit_te(topi.maximum, x, z))

    @as_main
    def expected(x: R.Tensor((4, 4), "float32"), z: R.Tensor((4,), "float32")):
        return R.maximum(x, z)

    check_prepared(mod, expected)
