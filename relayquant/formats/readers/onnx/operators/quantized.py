"""ONNX reader: QuantizeLinear and related operators -> operators of the dialect.

A quantized model is imported in the reference form: quantize, dequantize, float operator.
`relayquant.lower` converts it to integer operators. Each function is a `Convert`, as `conversion`
says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.errors import format_count
from relayquant.formats.readers.onnx.operators.broadcast import (
    is_same,
    list_sizes,
    merge_shapes,
    spread_axes,
)
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.convolutions import read_kernel_shape
from relayquant.formats.readers.onnx.operators.grouped import dequantize_blocks, widen_blocks
from relayquant.formats.readers.onnx.operators.sizes import known_shape
from relayquant.formats.readers.pooling import Windows
from relayquant.formats.readers.refusal import NotConstant, Refusal
from relayquant.ir.dialect import qnn
from relayquant.ir.ops.dynamic import (
    IntegerWeight,
    convolve_at_run_time,
    multiply_at_run_time,
    quantize_at_run_time,
)
from relayquant.ir.reference import qnn as numpy_qnn
from relayquant.ir.rewrite import Skip
from relayquant.ir.rewrite.element_types import is_too_narrow
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype

#: dtypes of fewer than 8 bits, stored in 8 bits: (storage dtype, smallest, largest)
NARROW = {
    "int4": ("int8", -8, 7),
    "uint4": ("uint8", 0, 15),
    "int2": ("int8", -2, 1),
    "uint2": ("uint8", 0, 3),
}


def convert_quantize_linear(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert QuantizeLinear to R.qnn.quantize. A constant becomes its integers.

    4-bit results are stored in 8 bits and clipped to their range.

    Raises:
        Refusal: blocks, 8-bit floats, or data that is not float32.
    """
    data, scale, zero_point = (*inputs, None)[:3]
    dtype = _output_dtype(attrs, zero_point)
    _check_form(attrs, dtype, data)
    held, low, high = NARROW.get(dtype, (dtype, *INTEGER_LIMITS.get(dtype, (0, 0))))
    axis = find_axis(data, scale, attrs)
    scale, zero = read_scale(scale), read_zero_point(zero_point)
    arrays = [constant_value(expr) for expr in (data, scale, zero)]
    if all(array is not None for array in arrays):
        values = numpy_qnn.quantize(*arrays, axis=axis, out_dtype=held)
        return relax.const(np.clip(values, low, high).astype(held), held)
    value = qnn.quantize(data, scale, zero, axis=axis, out_dtype=held)
    if held == dtype:
        return value
    return relax.op.clip(bb.emit(value), low, high)


def convert_dequantize_linear(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert DequantizeLinear to R.qnn.dequantize, also for a constant: a quantized weight stays
    quantized. Constants of less than 8 bits were widened before (`graph.rewrite`).

    Blocks of a constant matrix become rows of a grouped weight (`grouped`). A constant of floats of
    8 or 4 bits becomes float32.

    Raises:
        Refusal: other blocks, values of 8-bit floats, or a result that is not float32.
    """
    data, scale, zero_point = (*inputs, None)[:3]
    array = constant_value(data)
    dtype = "" if array is None else str(array.dtype)
    if is_too_narrow(dtype) and dtype.startswith("float") and tensor_dtype(scale) == "float32":
        return dequantize_floats(inputs, attrs)
    if attrs.get("block_size", 0) and tensor_dtype(scale) == "float32":
        return dequantize_blocks(bb, inputs, int(attrs.get("axis", 1)), int(attrs["block_size"]))
    _check_form(attrs, tensor_dtype(data))
    if tensor_dtype(scale) not in ("float32", ""):
        raise Refusal(f"its scale is {tensor_dtype(scale)}; supported: float32 and float16")
    wanted = attrs.get("output_dtype", 0)
    if wanted not in (0, onnx.TensorProto.FLOAT):
        raise Refusal(f"its result is {name_type(wanted)}; supported: float32 and float16")
    axis = find_axis(data, scale, attrs)
    return qnn.dequantize(data, read_scale(scale), read_zero_point(zero_point), axis=axis)


def dequantize_floats(inputs: Operands, attrs: Attrs) -> relax.Expr:
    """Multiply a constant of narrow floats by its scales, in float32: one, one for each index along
    an axis, or one for each block. A zero point is 0.

    Raises:
        Refusal: the scales are not constant, or do not fit.
    """
    array, scales = constant_value(inputs[0]), constant_value(inputs[1])
    if scales is None:
        raise NotConstant("scale")
    axis, size = int(attrs.get("axis", 1)), int(attrs.get("block_size", 0))
    if not size and scales.size == 1:
        return relax.const(array.astype("float32") * scales.reshape(()), "float32")
    if not -array.ndim <= axis < array.ndim:
        raise Refusal(f"its axis is {axis}, and its data has shape {array.shape}")
    axis %= array.ndim
    if not size:
        if scales.shape != (array.shape[axis],):
            raise Refusal(
                f"its scales have shape {scales.shape}, and its data {array.shape}; allowed along "
                f"axis {axis}: ({array.shape[axis]},)"
            )
        scales = scales.reshape([-1 if at == axis else 1 for at in range(array.ndim)])
        return relax.const(array.astype("float32") * scales, "float32")
    return relax.const(widen_blocks(array, scales, None, axis, size), "float32")


def _check_form(attrs: dict[str, Any], dtype: str, data: relax.Expr | None = None) -> None:
    if attrs.get("block_size", 0):
        raise Refusal("its quantization is blocked (block_size); supported: one axis")
    if dtype not in INTEGER_LIMITS and dtype not in NARROW:
        known = ", ".join(dict.fromkeys((*INTEGER_LIMITS, *NARROW)))
        raise Refusal(f"quantization to {dtype} is not supported; supported: {known}")
    if data is not None and tensor_dtype(data) not in ("float32", *INTEGER_LIMITS, *NARROW):
        raise Refusal(f"its data is {tensor_dtype(data)}; supported: float32")


def _output_dtype(attrs: dict[str, Any], zero_point: relax.Expr | None) -> str:
    """Return attribute output_dtype, else the zero point's dtype, else uint8 (ONNX)."""
    wanted = attrs.get("output_dtype", 0)
    if not wanted:
        return "uint8" if zero_point is None else tensor_dtype(zero_point)
    return name_type(wanted)


def name_type(number: int) -> str:
    """Return the name of the type in attribute output_dtype.

    Raises:
        Refusal: there is no such type.
    """
    try:
        return onnx.TensorProto.DataType.Name(number).lower()
    except ValueError:
        raise Refusal(f"output_dtype={number} is not a type of ONNX") from None


def find_axis(data: relax.Expr, scale: relax.Expr, attrs: dict[str, Any]) -> int:
    """Return the channel axis. -1 if there is one scale for the whole tensor.

    Raises:
        Refusal: the scale is neither a number nor a vector, or the data has no such axis.
    """
    rank, scale_rank = data.ty.ndim, scale.ty.ndim
    shape = getattr(scale.ty.shape, "values", None)
    if scale_rank == 0 or (scale_rank == 1 and shape is not None and shape[0] == 1):
        return -1
    axis = int(attrs.get("axis", 1))
    if scale_rank != 1 or not -rank <= axis < rank:
        raise Refusal(
            f"scale of {format_count(scale_rank, 'dimension')} along axis {axis} of data with "
            f"{rank}; allowed: one number, or a vector along an axis of the data"
        )
    return axis % rank


def read_scale(scale: relax.Expr) -> relax.Expr:
    """Read the scale for the dialect. A vector of one element becomes a number.

    Raises:
        Refusal: a scale is not finite and positive.
    """
    array = constant_value(scale)
    if array is None:
        return scale
    array = array.astype("float32")
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise Refusal(f"its scale is {array.ravel()[:4]}; allowed: finite numbers above 0")
    return relax.const(array.reshape(()) if array.size == 1 else array, "float32")


def read_zero_point(zero_point: relax.Expr | None) -> relax.Expr:
    """Read the zero point as int32. 0 if there is none."""
    if zero_point is None:
        return relax.const(0, "int32")
    array = constant_value(zero_point)
    if array is None:
        return relax.op.astype(zero_point, "int32")
    array = array.astype("int32")
    return relax.const(array.reshape(()) if array.size == 1 else array, "int32")


def find_real(bb: Builder, value: relax.Expr) -> np.ndarray | None:
    """Return the array of a constant, also of a dequantized one. None for any other value."""
    found = bb.lookup_binding(value) if isinstance(value, relax.Var) else None
    if not isinstance(found, Call) or call_name(found) != "relax.qnn.dequantize":
        return constant_value(value) if isinstance(value, GenericConst) else None
    arrays = [constant_value(argument) for argument in found.args]
    if any(array is None for array in arrays):
        return None
    return numpy_qnn.dequantize(*arrays, axis=int(found.attrs.axis))  # pyright: ignore[reportArgumentType]


# -- parameters that are computed at run time ------------------------------------------------------


def convert_dynamic_quantize_linear(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert DynamicQuantizeLinear -> (R.qnn.quantize(x, scale, zero point), scale, zero point
    uint8).

    scale = (max(x, 0) - min(x, 0)) / 255, or 1 for a tensor of zeros. zero point = round(-min(x, 0)
    / scale) (ONNX, operator DynamicQuantizeLinear).
    """
    found = quantize_at_run_time(lambda expr, _: bb.emit(expr), inputs[0])
    zero_point = bb.emit(relax.op.astype(found.zero_point, "uint8"))
    return relax.Tuple([found.value, found.scale, zero_point])


def convert_matmul_integer(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert MatMulInteger(x, w, x_zero, w_zero) -> int32 sum of (x - x_zero) * (w - w_zero).

    For a constant w of rank 2, it is qnn.dense(x, w) - x_zero * (sums of the columns of w), so the
    kernel has no run-time zero point. Otherwise it is R.qnn.batch_matmul. A zero point per row of
    x, (M,) or (..., M, 1), and one per column of a computed w, are also corrected outside the
    product.
    """
    data, weight, data_zero, weight_zero = (*inputs, None, None)[:4]
    data_zero, weight_zero = (bb.normalize(read_zero_point(z)) for z in (data_zero, weight_zero))
    weight_zero = spread_columns(bb, weight_zero, weight)
    array, zero = constant_value(weight), constant_value(weight_zero)
    rows = None
    if data_zero.ty.ndim:
        is_column = data_zero.ty.ndim > 1
        rows = data_zero if is_column else bb.emit(relax.op.expand_dims(data_zero, -1))
        data_zero = relax.const(0, "int32")
    if array is None or zero is None or array.ndim != 2:
        value = multiply_values(bb, data, weight, data_zero, weight_zero)
        if rows is None:
            return value
        wide = bb.emit(relax.op.subtract(relax.op.astype(weight, "int32"), weight_zero))
        sums = bb.emit(relax.op.sum(wide, -2, keepdims=True))
    else:
        shared = read_weight(array, zero)
        value = multiply_at_run_time(lambda expr, _: bb.emit(expr), data, data_zero, shared)
        sums = relax.const(shared.sums.astype("int32"), "int32")
    if rows is None:
        return value
    return relax.op.subtract(bb.emit(value), bb.emit(relax.op.multiply(rows, sums)))


def read_weight(array: np.ndarray, zero: np.ndarray) -> IntegerWeight:
    """Return a weight (K, N) in int8, with its int32 zero point () or (N,)."""
    if array.dtype == np.uint8:
        array, zero = (array.astype("int16") - 128).astype("int8"), zero - 128
    return IntegerWeight.of(array, zero)


def spread_columns(bb: Builder, vector: relax.Expr, weight: relax.Expr) -> relax.Expr:
    """Return a value per column of a weight, also if the size of the vector is symbolic: then it is
    the number of columns, or 1.
    """
    columns = weight.ty.shape.values[-1]
    if vector.ty.ndim != 1 or is_same(list_sizes(vector)[0], list_sizes(weight)[-1]):
        return vector
    if list_sizes(vector) == [1]:
        return vector
    spread = spread_axes(bb, vector, merge_shapes([list_sizes(vector), list_sizes(weight)[-1:]]))
    return bb.emit(relax.op.reshape(spread, relax.ShapeExpr([columns])))


def multiply_values(
    bb: Builder,
    data: relax.Expr,
    weight: relax.Expr,
    data_zero: relax.Expr,
    weight_zero: relax.Expr,
) -> relax.Expr:
    """Emit int32 sums of (data - data_zero) * (weight - weight_zero) for computed values.

    data_zero is (). weight_zero is () or per column: weight_zero times the row sums of the data is
    subtracted.
    """
    axes = [*range(weight.ty.ndim - 2), weight.ty.ndim - 1, weight.ty.ndim - 2]
    transposed = bb.emit(relax.op.permute_dims(weight, axes))
    if not weight_zero.ty.ndim:
        return qnn.batch_matmul(data, transposed, data_zero, weight_zero, 1.0, 1.0)
    product = bb.emit(qnn.batch_matmul(data, transposed, data_zero, 0, 1.0, 1.0))
    wide = bb.emit(relax.op.subtract(relax.op.astype(data, "int32"), data_zero))
    sums = bb.emit(relax.op.sum(wide, -1, keepdims=True))
    return relax.op.subtract(product, bb.emit(relax.op.multiply(sums, weight_zero)))


def convert_conv_integer(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert ConvInteger(x, w, x_zero, w_zero) to R.qnn.conv2d with int32 results. The padding is
    x_zero.

    If x_zero is computed at run time and w is constant, x_zero is corrected outside the product.

    Raises:
        Refusal: it is not a 2-D convolution, has auto_pad, or its kernel is wider than the padded
            data.
    """
    data, weight, data_zero, weight_zero = (*inputs, None, None)[:4]
    if data.ty.ndim != 4:
        raise Refusal(f"its data has {format_count(data.ty.ndim, 'dimension')}; supported: 4")
    if attrs.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise Refusal("auto_pad is not supported; give pads")
    form: dict[str, Any] = {
        "strides": list(attrs.get("strides", [1, 1])),
        "padding": list(attrs.get("pads", [0, 0, 0, 0])),
        "dilation": list(attrs.get("dilations", [1, 1])),
        "groups": int(attrs.get("group", 1)),
    }
    windows = Windows(
        read_kernel_shape(weight), form["strides"], form["dilation"], form["padding"], False
    )
    windows.check(known_shape(data, "input")[2:])
    data_zero, weight_zero = (bb.normalize(read_zero_point(z)) for z in (data_zero, weight_zero))
    array, zero = constant_value(weight), constant_value(weight_zero)
    if constant_value(data_zero) is None and array is not None and zero is not None:
        found = convolve_at_run_time(
            lambda expr, _: bb.emit(expr),
            data,
            data_zero,
            array,
            zero,
            name="conv2d",
            is_exact=False,
            **form,
        )
        if not isinstance(found, Skip):
            return found
    return qnn.conv2d(data, weight, data_zero, weight_zero, 1.0, 1.0, **form)
