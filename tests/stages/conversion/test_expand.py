"""Each rule of the allow-list, before and after: dequantize moves down, quantize moves up."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tvm
from float_models import MAP, as_main, build_model, draw_batches
from operator_names import list_operators
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relayquant as rq
from relayquant.ir.dialect import qnn
from relayquant.ir.ops import Quantized
from relayquant.ir.reference import run
from relayquant.ir.rewrite import Skip
from relayquant.ir.rewrite.function import make_main
from relayquant.stages.backends import GENERIC, X86
from relayquant.stages.conversion import AffineRule, expand_affine
from relayquant.stages.conversion.propagate import axis_after_reshape

SHAPES = [shape for rank in (1, 2, 3) for shape in itertools.product((1, 2, 3, 6), repeat=rank)]
PER_CHANNEL = np.array([0.5, 0.25, 2.0], "float32")


def dequantize(q, scale=0.5, zero_point=10, axis=-1):
    """Called in scripts as if it were an operator."""
    return qnn.dequantize(
        q, relax.const(np.float32(scale)), relax.const(np.int32(zero_point)), axis=axis
    )


def dequantize_channels(q, axis=1):
    return qnn.dequantize(q, relax.const(PER_CHANNEL), relax.const(np.zeros(3, "int32")), axis=axis)


def quantize(x, scale=0.5, zero_point=10, dtype="uint8"):
    return qnn.quantize(
        x, relax.const(np.float32(scale)), relax.const(np.int32(zero_point)), out_dtype=dtype
    )


def check(before: tvm.IRModule, expected: tvm.IRModule, seed: int = 0) -> None:
    """expand gives `expected`, leaves `before` alone, and changes no result."""
    text = before.script(show_meta=True)
    new = expand_affine(before, X86)
    assert before.script(show_meta=True) == text
    tvm.ir.assert_structural_equal(new["main"], expected["main"], map_free_vars=True)
    rng = np.random.default_rng(seed)
    inputs = {}
    for param in before["main"].params:
        shape = [int(dim) for dim in param.ty.shape.values]
        dtype = str(param.ty.dtype)
        if dtype.startswith("float"):
            inputs[param.name] = rng.normal(0, 40, shape).astype(dtype)
        else:
            low, high = (0, 256) if dtype == "uint8" else (-100, 100)
            inputs[param.name] = rng.integers(low, high, shape).astype(dtype)
    for have, want in zip(run(new, inputs), run(before, inputs), strict=True):
        np.testing.assert_array_equal(have, want)


def test_dequantize_through_relu__becomes_clip():
    @as_main
    def before(q: R.Tensor((1, 3, 4, 4), "uint8")):
        d = dequantize(q)
        return R.nn.relu(d)

    @as_main
    def expected(q: R.Tensor((1, 3, 4, 4), "uint8")):
        a = R.clip(q, T.uint8(10), T.uint8(255))
        return dequantize(a)

    check(before, expected)


def test_dequantize_through_relu__nothing_to_clip():
    @as_main
    def before(q: R.Tensor((1, 3, 4, 4), "uint8")):
        d = dequantize(q, 0.5, 0)
        return R.nn.relu(d)

    @as_main
    def expected(q: R.Tensor((1, 3, 4, 4), "uint8")):
        return dequantize(q, 0.5, 0)

    check(before, expected)


def test_dequantize_through_relu__accumulator_per_channel():
    @as_main
    def before(q: R.Tensor((1, 3, 4, 4), "int32")):
        d = dequantize_channels(q)
        return R.nn.relu(d)

    @as_main
    def expected(q: R.Tensor((1, 3, 4, 4), "int32")):
        a = R.clip(q, T.int32(0), T.int32(2147483647))
        return dequantize_channels(a)

    check(before, expected)


def test_dequantize_through_clip__bounds_on_the_grid():
    @as_main
    def before(q: R.Tensor((1, 3, 4, 4), "uint8")):
        d = dequantize(q)
        return R.clip(d, -2.0, 6.5)

    @as_main
    def expected(q: R.Tensor((1, 3, 4, 4), "uint8")):
        a = R.clip(q, T.uint8(6), T.uint8(23))
        return dequantize(a)

    check(before, expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.3, 6.1, (9, 22)),
        (-1e9, 1e9, None),
        (float("-inf"), 3.0, (0, 16)),
        (0.24, 0.26, (10, 11)),
    ],
)
def test_dequantize_through_clip__bounds_are_rounded_and_saturated(low, high, expected):
    q = relax.Var("q", relax.TensorType((4,), "uint8"))
    mod = make_main([q], lambda builder: relax.op.clip(builder.emit(dequantize(q)), low, high))
    new = expand_affine(mod, X86)
    (block,) = new["main"].body.blocks
    calls = [binding.value for binding in block.bindings]
    clips = [call for call in calls if call.op.name == "relax.clip"]
    bounds = [tuple(int(arg.value) for arg in call.args[1:3]) for call in clips]
    assert bounds == ([] if expected is None else [expected])


def test_dequantize_through_pad__value_in_affine_space():
    @as_main
    def before(q: R.Tensor((1, 3, 4, 4), "uint8")):
        d = dequantize(q)
        return R.nn.pad(d, pad_width=[0, 0, 0, 0, 1, 0, 0, 2], pad_value=1.5)

    @as_main
    def expected(q: R.Tensor((1, 3, 4, 4), "uint8")):
        a = R.nn.pad(q, pad_width=[0, 0, 0, 0, 1, 0, 0, 2], pad_value=13.0)
        return dequantize(a)

    check(before, expected)


def test_dequantize_through_moves__per_tensor():
    @as_main
    def before(q: R.Tensor((1, 4, 6, 6), "uint8"), i: R.Tensor((2,), "int32")):
        d = dequantize(q)
        a = R.nn.max_pool2d(d, pool_size=[2, 2], strides=[2, 2], padding=[1, 1, 1, 1])
        b = R.permute_dims(a, axes=[0, 2, 3, 1])
        c = R.strided_slice(b, [1], [0], [3], [2])
        e = R.reshape(c, R.shape([2, 4, 4]))
        f = R.expand_dims(e, [0])
        g = R.squeeze(f, [0])
        h = R.broadcast_to(g, R.shape([2, 4, 4]))
        k = R.max(h, axis=[1])
        return R.min(k, axis=[0], keepdims=True)

    @as_main
    def expected(q: R.Tensor((1, 4, 6, 6), "uint8"), i: R.Tensor((2,), "int32")):
        a = R.nn.max_pool2d(q, pool_size=[2, 2], strides=[2, 2], padding=[1, 1, 1, 1])
        b = R.permute_dims(a, axes=[0, 2, 3, 1])
        c = R.strided_slice(b, [1], [0], [3], [2])
        e = R.reshape(c, R.shape([2, 4, 4]))
        f = R.expand_dims(e, [0])
        g = R.squeeze(f, [0])
        h = R.broadcast_to(g, R.shape([2, 4, 4]))
        k = R.max(h, axis=[1])
        out_int = R.min(k, axis=[0], keepdims=True)
        return dequantize(out_int)

    check(before, expected)


def test_dequantize_through_take():
    @as_main
    def before(q: R.Tensor((120, 3), "uint8"), i: R.Tensor((5,), "uint8")):
        d = dequantize(q)
        j = R.astype(R.zeros_like(i), "int32")
        return R.take(d, j, axis=0)

    @as_main
    def expected(q: R.Tensor((120, 3), "uint8"), i: R.Tensor((5,), "uint8")):
        z = R.zeros_like(i)
        j = R.astype(z, "int32")
        a = R.take(q, j, axis=0)
        return dequantize(a)

    check(before, expected)


def test_dequantize_per_channel__axis_moves_with_the_channels():
    @as_main
    def before(q: R.Tensor((2, 3, 4, 4), "int32")):
        d = dequantize_channels(q, 1)
        a = R.nn.max_pool2d(d, pool_size=[2, 2], strides=[2, 2])
        b = R.reshape(a, R.shape([2, 3, 4]))
        c = R.permute_dims(b, axes=[1, 2, 0])
        return R.permute_dims(c)

    @as_main
    def expected(q: R.Tensor((2, 3, 4, 4), "int32")):
        a = R.nn.max_pool2d(q, pool_size=[2, 2], strides=[2, 2])
        b = R.reshape(a, R.shape([2, 3, 4]))
        c = R.permute_dims(b, axes=[1, 2, 0])
        out_int = R.permute_dims(c)
        return dequantize_channels(out_int, 2)

    check(before, expected)


@pytest.mark.parametrize(
    "op",
    [
        lambda d: relax.op.reshape(d, (2, 48)),
        lambda d: relax.op.strided_slice(d, [2], [0], [2]),
        lambda d: relax.op.nn.pad(d, [0, 0, 0, 0, 1, 1, 1, 1]),
        lambda d: relax.op.clip(d, -1, 1),
        lambda d: relax.op.max(d, [1]),
        lambda d: relax.op.nn.softmax(d),
        lambda d: relax.op.sigmoid(d),
    ],
)
def test_dequantize__stops_where_no_rule_holds(op):
    q = relax.Var("q", relax.TensorType((2, 3, 4, 4), "int32"))
    mod = make_main([q], lambda builder: op(builder.emit(dequantize_channels(q))))
    assert expand_affine(mod, X86).same_as(mod)


def test_dequantize__reshape_that_keeps_the_channels_apart():
    """Axes around the channels may be merged, split, or of length 1."""
    for shape, axis in (((2, 1, 3, 16), 2), ((2, 3, 16), 1), ((2, 3, 1, 4, 2, 2), 1)):
        q = relax.Var("q", relax.TensorType((2, 3, 4, 4), "int32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [q]):
            with builder.dataflow():
                d = builder.emit(dequantize_channels(q))
                out = builder.emit_output(relax.op.reshape(d, shape))
            builder.emit_func_output(out)
        mod = builder.finalize()
        new = expand_affine(mod, X86)
        (block,) = new["main"].body.blocks
        assert block.bindings[-1].value.op.name == "relax.qnn.dequantize"
        assert int(block.bindings[-1].value.attrs.axis) == axis
        values = np.arange(96, dtype="int32").reshape(2, 3, 4, 4)
        np.testing.assert_array_equal(run(new, values)[0], run(mod, values)[0])


def test_dequantize__parameters_of_one_channel_outlive_its_axis():
    """They are those of the tensor: a depth of 1 that is squeezed away keeps nothing in float."""
    q = relax.Var("q", relax.TensorType((4, 1, 6), "int32"))
    one = relax.const(np.array([0.25], "float32")), relax.const(np.array([3], "int32"))

    def emit(builder):
        d = builder.emit(qnn.dequantize(q, *one, axis=1))
        return relax.op.reshape(d, (24,))

    mod = make_main([q], emit)
    new = expand_affine(mod, X86)
    (block,) = new["main"].body.blocks
    last = block.bindings[-1].value
    assert last.op.name == "relax.qnn.dequantize"
    assert last.args[1].value.numpy().shape == ()
    values = np.arange(24, dtype="int32").reshape(4, 1, 6)
    np.testing.assert_array_equal(run(new, values)[0], run(mod, values)[0])


def test_quantize_over_relu__becomes_clip():
    @as_main
    def before(x: R.Tensor((1, 3, 4, 4), "float32")):
        r = R.nn.relu(x)
        return quantize(r)

    @as_main
    def expected(x: R.Tensor((1, 3, 4, 4), "float32")):
        q = quantize(x)
        return R.clip(q, T.uint8(10), T.uint8(255))

    check(before, expected)


def test_quantize_over_clip__becomes_clip():
    @as_main
    def before(x: R.Tensor((1, 3, 4, 4), "float32")):
        r = R.clip(x, -1.3, 6.1)
        return quantize(r, 0.5, -20, "int8")

    @as_main
    def expected(x: R.Tensor((1, 3, 4, 4), "float32")):
        q = quantize(x, 0.5, -20, "int8")
        return R.clip(q, T.int8(-23), T.int8(-8))

    check(before, expected)


def test_quantize_over_relu__not_where_the_float_value_is_needed():
    @as_main
    def module(x: R.Tensor((1, 3, 4, 4), "float32")):
        r = R.nn.relu(x)
        q = quantize(r)
        return (q, r)

    assert expand_affine(module, X86).same_as(module)


def test_rule_of_the_user__comes_first():
    """negative(q) in int8 with a symmetric grid, and a rule that declines."""

    def negate(call, operand):
        if operand.qparams.zero_point != 0:
            return Skip("the grid is not symmetric")
        return Quantized(relax.op.negative(operand.value), operand.qparams)

    backend = GENERIC.with_affine_rule(AffineRule("relax.negative", negate))

    @as_main
    def before(q: R.Tensor((3,), "int8"), r: R.Tensor((3,), "uint8")):
        d = dequantize(q, 0.5, 0)
        e = dequantize(r, 0.5, 3)
        a = R.negative(d)
        b = R.negative(e)
        return relax.Tuple([a, b])

    @as_main
    def expected(q: R.Tensor((3,), "int8"), r: R.Tensor((3,), "uint8")):
        e = dequantize(r, 0.5, 3)
        n = R.negative(q)
        a = dequantize(n, 0.5, 0)
        b = R.negative(e)
        return relax.Tuple([a, b])

    tvm.ir.assert_structural_equal(
        expand_affine(before, backend)["main"], expected["main"], map_free_vars=True
    )
    assert expand_affine(before, GENERIC).same_as(before)


@pytest.mark.parametrize("before", SHAPES, ids=str)
def test_axis_after_reshape__where_numpy_finds_the_channels(before):
    """The axis along which every element keeps its channel, found with labels; else none."""
    x = relax.Var("x", relax.TensorType(before, "float32"))
    for after in (shape for shape in SHAPES if math.prod(shape) == math.prod(before)):
        call = relax.BlockBuilder().normalize(relax.op.reshape(x, after))
        for axis, channels in enumerate(before):
            labels = np.moveaxis(np.zeros(before, int), axis, -1) + np.arange(channels)
            moved = np.moveaxis(labels, -1, axis).reshape(after)
            found = axis_after_reshape(call, axis)
            if found is not None:
                assert after[found] == channels
                assert (np.moveaxis(moved, found, -1) == np.arange(channels)).all()
            elif channels > 1:
                for at in (at for at, size in enumerate(after) if size == channels):
                    assert (np.moveaxis(moved, at, -1) != np.arange(channels)).any()


def test_quantize_over_relu__not_where_the_plan_keeps_it_in_float():
    """Computed by the plan's operator in float, whose result is quantized."""
    mod = build_model(
        lambda e, x: e.conv("c", e("r", relax.op.nn.relu(e("s", relax.op.nn.softmax(x))))), MAP
    )
    data = draw_batches(mod, 2)
    for kept in (False, True):
        mapping = rq.QConfigMapping().set_global(X86.default_qconfig)
        mapping = mapping.set_module_name("r", None) if kept else mapping
        qmod = rq.quantize(
            mod, None, data, qconfig_mapping=mapping, effort="fast", guard=rq.config.Guard.OFF
        )
        assert ("nn.relu" in list_operators(qmod)) == kept
