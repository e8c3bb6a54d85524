"""TensorFlow Lite reader: operators on single values, reductions, and operators along an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.fourier import emit_transform
from relayquant.formats.readers.indices import take_largest
from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.tflite.operators.reading import (
    operands,
    read_constant,
    read_real,
    store_real,
)
from relayquant.formats.readers.tflite.options import read_options
from relayquant.ir.rewrite.graph import constant_value, static_size, tensor_dtype


def convert_softmax(converter: Any, op: Any) -> relax.Expr:
    """Convert SOFTMAX to softmax(beta * x). TVM ignores beta."""
    beta = read_options(op, "SoftmaxOptions").Beta()
    if beta == 1:
        return converter.convert_softmax(op)
    value = read_real(converter, *converter.get_input_tensors(op))
    value = relax.op.multiply(value, relax.const(beta, "float32"))
    return store_real(converter, op, relax.op.nn.softmax(value, axis=-1))


def convert_gelu(converter: Any, op: Any) -> relax.Expr:
    """Convert GELU with tanh if the option says so, else with erf. TVM always uses erf."""
    (data,) = operands(converter, op)
    is_approximate = (
        op.BuiltinOptions() is not None and read_options(op, "GeluOptions").Approximate()
    )
    return relax.op.nn.gelu_tanh(data) if is_approximate else relax.op.nn.gelu(data)


def convert_bucketize(converter: Any, op: Any) -> relax.Expr:
    """Convert BUCKETIZE: count the boundaries that are not larger. TVM counts the smaller ones."""
    (data,) = operands(converter, op)
    boundaries = np.atleast_1d(read_options(op, "BucketizeOptions").BoundariesAsNumpy())
    return relax.op.bucketize(data, relax.const(boundaries, "float32"), out_int32=True, right=True)


def convert_arg(find: Callable[..., relax.Expr], converter: Any, op: Any) -> relax.Expr:
    """Convert ARG_MAX and ARG_MIN, with the integer type of the result."""
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    axis = int(read_constant(converter, op, 1).item())
    (result,) = converter.get_output_tensors(op)
    dtype = converter.get_tensor_type_str(result.tensor.Type())
    return relax.op.astype(converter.bb.emit(find(data, axis)), dtype)


def convert_cumsum(converter: Any, op: Any) -> relax.Expr:
    """Convert CUMSUM, from the end if the option says so."""
    options = read_options(op, "CumsumOptions")
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    axis = int(read_constant(converter, op, 1).item())
    if options.Reverse():
        data = converter.bb.emit(relax.op.flip(data, axis))
    made = relax.op.cumsum(data, axis, tensor_dtype(data), bool(options.Exclusive()))
    return relax.op.flip(converter.bb.emit(made), axis) if options.Reverse() else made


def convert_reduce(reduce: Callable[..., relax.Expr], converter: Any, op: Any) -> relax.Expr:
    """Convert MEAN, SUM, REDUCE_ALL and others along axes, each taken once however often it is
    named.
    """
    data, axes = converter.get_input_tensors(op)
    rank = converter.get_tensor_expr(data).ty.ndim
    given = converter.get_tensor_value(axes).ravel().tolist()
    if not all(-rank <= axis < rank for axis in given):
        raise Refusal(f"its axes are {given}; supported: {-rank} to {rank - 1}")
    once = np.array([*dict.fromkeys(axis % rank for axis in given)], "int32")
    is_boolean = converter.kind in ("REDUCE_ALL", "REDUCE_ANY")
    convert = converter._convert_reduce_bool if is_boolean else converter._convert_reduce
    with converter.replaced(axes, relax.const(once, "int32")):
        return convert(reduce, op)


def convert_shift(converter: Any, op: Any) -> relax.Expr:
    """Convert RIGHT_SHIFT by 0 bits at least, and by one less than the type has at most."""
    data, bits = operands(converter, op)
    dtype, emit = tensor_dtype(bits), converter.bb.emit
    most = 8 * np.dtype(dtype).itemsize - 1
    bits = emit(relax.op.maximum(bits, relax.const(0, dtype)))
    bits = emit(relax.op.minimum(bits, relax.const(most, dtype)))
    return relax.op.right_shift(data, bits)


# -- shapes and indices ----------------------------------------------------------------------------


def convert_cast(converter: Any, op: Any) -> relax.Expr:
    """Convert CAST. As TFLite's kernel does, it takes the real part of complex numbers, and the
    nearest integer that the type has for floats out of its range, the largest one for NaN.
    """
    (source,), (result,) = converter.get_input_tensors(op), converter.get_output_tensors(op)
    if converter.is_complex(result):
        raise Refusal("its result is complex; supported: real numbers")
    data = (
        converter.convert_real(op) if converter.is_complex(source) else operands(converter, op)[0]
    )
    dtype, source_dtype = converter.get_tensor_type_str(result.tensor.Type()), tensor_dtype(data)
    if not source_dtype.startswith("float") or np.dtype(dtype).kind not in "iu":
        return relax.op.astype(data, dtype)
    return saturate(converter.bb, data, dtype)


def saturate(bb: relax.BlockBuilder, data: relax.Expr, dtype: str) -> relax.Expr:
    """Truncate floats to integers; out of the integers' range R.astype gives any number."""
    limits, wide = np.iinfo(dtype), tensor_dtype(data)
    if wide == "float16":  # has no number behind the range of int32
        data, wide = bb.emit(relax.op.astype(data, "float32")), "float32"
    # One behind the largest integer is a power of 2, hence a float; the largest may be none.
    is_less = bb.emit(relax.op.less(data, relax.const(float(limits.max + 1), wide)))
    held = bb.emit(relax.op.where(is_less, data, relax.const(0.0, wide)))
    held = bb.emit(relax.op.maximum(held, relax.const(float(limits.min), wide)))
    largest = relax.const(np.array(limits.max, dtype), dtype)
    return relax.op.where(is_less, bb.emit(relax.op.astype(held, dtype)), largest)


def convert_rfft2d(converter: Any, op: Any) -> relax.Expr:
    """Convert RFFT2D along the last two axes, of which the last is onesided. TVM writes out every
    step of a transform, and needs as many numbers as the file says.
    """
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    height, width = read_constant(converter, op, 1).tolist()
    rank = len(data.ty.shape)
    shape = [*data.ty.shape.values, 1]
    value = converter.bb.emit(relax.op.reshape(data, shape))
    value = emit_transform(converter.bb, value, rank - 1, width, onesided=True)
    if height == 1 == static_size(shape[-3]):
        return value
    return emit_transform(converter.bb, converter.bb.emit(value), rank - 2, height)


def convert_topk(converter: Any, op: Any) -> relax.Expr:
    """Convert TOPK_V2(x, k) to values and indices along the last axis."""
    data = converter.get_tensor_expr(converter.get_input_tensors(op)[0])
    count = int(read_constant(converter, op, 1).item())
    return take_largest(converter.bb, data, count, -1, dtype="int32")


def convert_dequantize(converter: Any, op: Any) -> relax.Expr:
    """Convert DEQUANTIZE: float16 -> float32, and integers -> dequantize.

    float16 constants become constants, also those made by DENSIFY. Dequantize of an integer
    constant stays an operator. TVM expects float16 to be a plain constant, and integers to be a
    run-time value.
    """
    (data,) = converter.get_input_tensors(op)
    value = converter.get_tensor_expr(data)
    if converter.get_tensor_type_str(data.tensor.Type()) != "float16":
        return converter.dequantize(value, data)
    array = constant_value(value)
    if array is None:
        return relax.op.astype(value, "float32")
    return relax.const(array.astype("float32"), "float32")


def convert_prelu(converter: Any, op: Any) -> relax.Expr:
    """Convert PRELU.

    One slope per channel becomes R.nn.prelu(x, slopes) along its axis, where TVM flattens all
    values. One slope becomes R.nn.leakyrelu. Other slopes become max(x, 0) + a * min(x, 0).
    """
    data, slopes = operands(converter, op)
    array = constant_value(slopes)
    wide = [] if array is None else [at for at, n in enumerate(array.shape[::-1]) if n > 1]
    if array is not None and not wide:
        return relax.op.nn.leakyrelu(data, float(array.item()))
    if array is not None and len(wide) == 1:
        row = relax.const(array.ravel(), str(array.dtype))
        return relax.op.nn.prelu(data, row, data.ty.ndim - 1 - wide[0])
    bb, zero = converter.bb, relax.const(0.0, str(data.ty.dtype))
    below = bb.emit(relax.op.multiply(bb.emit(relax.op.minimum(data, zero)), slopes))
    return relax.op.add(bb.emit(relax.op.nn.relu(data)), below)
