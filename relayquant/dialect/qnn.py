"""Dialect: constructors of the `relax.qnn` operators, also `R.qnn.*` in TVMScript.

Words: an operator works in *affine space*, on integers q with real = scale * (q - zero_point). A
*parameter* (scale: float32, zero point: int32) is a relax expression, constant or variable, or a
Python or numpy number or array, which becomes a constant; its shape is () or, where an operator
allows it, (C,) with one entry per channel along `axis`. Data operands are relax expressions or
numpy arrays. All constructors raise QnnError, at once for their own arguments, else when the type
of the call is inferred (`BlockBuilder.normalize`).

Rounding TONEAREST_EVEN with arithmetic FLOAT32 is the default and gives the same bits on every
target:

- the multiplier m is float32(double(s_in) / double(s_out)), per channel where s_in is;
- requantize: t = float32(x - z_in) * m; q = int(clamp(rint(t), qmin - z_out, qmax - z_out)) +
z_out;
- quantize: the same with t = x / s, a true division; NaN becomes z;
- dequantize: float32(q - z) * s.

UPWARD and TONEAREST mean what they meant in TVM 0.19. TONEAREST_EVEN with INT64 is the 64-bit fixed
point product with ties to even, with FLOAT64 the default formula in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax
from tvm.ir import Attrs, Call, Op

from relayquant.dialect import attrs as _attrs
from relayquant.errors import QnnError
from relayquant.qtypes import Arithmetic, Rounding

#: Tensor operand: an expression, or an array that becomes a constant.
Operand = Any
#: Scale or zero point: an expression, a number or an array.
Parameter = Any

__all__ = [
    "add",
    "avg_pool2d",
    "batch_matmul",
    "concatenate",
    "conv1d",
    "conv2d",
    "conv2d_transpose",
    "dense",
    "dequantize",
    "leaky_relu",
    "lookup",
    "mean",
    "mul",
    "prelu",
    "quantize",
    "requantize",
    "simulated_dequantize",
    "simulated_quantize",
    "subtract",
]


# ---------------------------------------------------------------- arguments


def _is_expr(value: Any) -> bool:
    return isinstance(value, relax.Expr)


def _make_operand(value: Operand, operator: str, name: str) -> relax.Expr:
    if _is_expr(value):
        return value
    if isinstance(value, np.ndarray):
        return relax.const(value, value.dtype.name)
    raise QnnError(
        f"qnn.{operator}: operand '{name}' is a {type(value).__name__}; "
        "allowed: a relax expression or a numpy array."
    )


def _make_parameter(value: Parameter, dtype: str, operator: str, name: str) -> relax.Expr:
    """A constant of `dtype` from a number or an array; expressions pass."""
    if _is_expr(value):
        return value
    try:
        array = np.asarray(value)
        converted = array.astype(dtype)
    except (TypeError, ValueError) as error:
        raise QnnError(
            f"qnn.{operator}: operand '{name}' is a {type(value).__name__}; "
            "allowed: a relax expression, a number or an array."
        ) from error
    if dtype == "int32" and not np.array_equal(converted, array):
        raise QnnError(
            f"qnn.{operator}: operand '{name}' is {value}; allowed: integers that fit into int32."
        )
    return relax.const(converted, dtype)


def _make_scale(value: Parameter, operator: str, name: str = "scale") -> relax.Expr:
    return _make_parameter(value, "float32", operator, name)


def _make_zero_point(value: Parameter, operator: str, name: str = "zero_point") -> relax.Expr:
    return _make_parameter(value, "int32", operator, name)


def _make_unary_parameters(operator: str, values: Sequence[Parameter]) -> list[relax.Expr]:
    """(input scale, input zero point, output scale, output zero point)."""
    return [
        _make_scale(values[0], operator, "input_scale"),
        _make_zero_point(values[1], operator, "input_zero_point"),
        _make_scale(values[2], operator, "output_scale"),
        _make_zero_point(values[3], operator, "output_zero_point"),
    ]


def _make_tuple(value: Any, make: Any, operator: str, name: str) -> relax.Expr:
    """A tuple expression from a sequence of operands; expressions pass."""
    if _is_expr(value):
        return value
    if not isinstance(value, list | tuple | tvm_ffi.Array | np.ndarray):
        raise QnnError(
            f"qnn.{operator}: operand '{name}' is a {type(value).__name__}; "
            "allowed: a list or tuple, or a relax expression of tuple type."
        )
    return relax.Tuple([make(v, operator, f"{name}[{i}]") for i, v in enumerate(value)])


def _rounding_value(rounding: Rounding | str, operator: str) -> str:
    """`.value` of the mode; a printed module holds it as a string already."""
    allowed = [mode.value for mode in Rounding]
    value = rounding.value if isinstance(rounding, Rounding) else rounding
    if value not in allowed:
        raise QnnError(
            f"qnn.{operator}: rounding={rounding!r} is not allowed; allowed: qtypes.Rounding, "
            f"one of {', '.join(allowed)}."
        )
    return value


def _arithmetic_value(arithmetic: Arithmetic | str, operator: str) -> str:
    allowed = [mode.value for mode in Arithmetic]
    value = arithmetic.value if isinstance(arithmetic, Arithmetic) else arithmetic
    if value not in allowed:
        raise QnnError(
            f"qnn.{operator}: compute_dtype={arithmetic!r} is not allowed; allowed: "
            f"qtypes.Arithmetic, one of {', '.join(allowed)}."
        )
    return value


def _integers(value: int | Sequence[int], length: int, operator: str, name: str) -> tvm_ffi.Array:
    """`length` integers; a single number serves for all."""
    numbers = [value] * length if isinstance(value, int | np.integer) else list(value)
    if len(numbers) != length:
        raise QnnError(
            f"qnn.{operator}: {name}={numbers} is not allowed; allowed: one integer or {length}."
        )
    return tvm_ffi.Array([int(v) for v in numbers])


def _padding(value: int | Sequence[int], rank: int, operator: str) -> tvm_ffi.Array:
    """All widths before, then all after; one number, or one per axis, is used on both sides."""
    numbers = [value] * (2 * rank) if isinstance(value, int | np.integer) else list(value)
    if len(numbers) == 1:
        numbers = numbers * (2 * rank)
    elif len(numbers) == rank:
        numbers = numbers * 2
    if len(numbers) != 2 * rank:
        raise QnnError(
            f"qnn.{operator}: padding={numbers} is not allowed; allowed: 1, {rank} or {2 * rank} "
            "integers."
        )
    return tvm_ffi.Array([int(v) for v in numbers])


def _make_call(operator: str, operands: Sequence[relax.Expr], attrs: Attrs | None) -> Call:
    return Call(Op.get(f"relax.qnn.{operator}"), list(operands), attrs)


# ---------------------------------------------------------------- between real and affine space


def quantize(
    data: Operand,
    scale: Parameter,
    zero_point: Parameter,
    axis: int = -1,
    out_dtype: str = "int8",
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
) -> Call:
    """float32 or float16 -> int8, uint8, int16, uint16 or int32, same shape; saturates.

    Scale and zero point: () or (C,) along `axis`.
    """
    name = "quantize"
    return _make_call(
        name,
        [
            _make_operand(data, name, "data"),
            _make_scale(scale, name),
            _make_zero_point(zero_point, name),
        ],
        _attrs.QuantizeAttrs(int(axis), out_dtype, _rounding_value(rounding, name)),
    )


def dequantize(
    data: Operand,
    scale: Parameter,
    zero_point: Parameter,
    axis: int = -1,
    out_dtype: str = "float32",
) -> Call:
    """int8, uint8, int16, uint16, int32 or int64 -> float32 or float16, same shape.

    Scale and zero point: () or (C,) along `axis`. A float16 result is clipped to +-65504.
    """
    name = "dequantize"
    return _make_call(
        name,
        [
            _make_operand(data, name, "data"),
            _make_scale(scale, name),
            _make_zero_point(zero_point, name),
        ],
        _attrs.DequantizeAttrs(int(axis), out_dtype),
    )


def requantize(
    data: Operand,
    input_scale: Parameter,
    input_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    axis: int = -1,
    out_dtype: str = "int8",
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """Integers of one affine space in another, same shape; saturates.

    Input parameters: () or (C,) along `axis`. Output parameters: (). int64 data are
    taken as int32 but by the default, and TONEAREST_EVEN with FLOAT64.
    """
    name = "requantize"
    parameters = (input_scale, input_zero_point, output_scale, output_zero_point)
    return _make_call(
        name,
        [_make_operand(data, name, "data"), *_make_unary_parameters(name, parameters)],
        _attrs.RequantizeAttrs(
            int(axis),
            out_dtype,
            _rounding_value(rounding, name),
            _arithmetic_value(compute_dtype, name),
        ),
    )


def simulated_quantize(
    data: Operand,
    dtype: Parameter,
    scale: Parameter,
    zero_point: Parameter,
    axis: int = -1,
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
) -> Call:
    """max(min(round(x / s) + z, high), low), kept in the float dtype of data.

    `dtype` is an int32 code: 0 pass through, 1 int8, 2 uint8, 3 int32, 4 int4, 5 int16, 6 int8 in
    -127..127, 7 uint16. Code, scale and zero point have shape () or (L,) of any length L, and
    channel c along `axis` reads entry c mod L, so that all three may be variables of a calibration
    graph.
    """
    name = "simulated_quantize"
    return _make_call(
        name,
        [
            _make_operand(data, name, "data"),
            _make_parameter(dtype, "int32", name, "dtype"),
            _make_scale(scale, name),
            _make_zero_point(zero_point, name),
        ],
        _attrs.SimulatedQuantizeAttrs(int(axis), _rounding_value(rounding, name)),
    )


def simulated_dequantize(
    data: Operand, dtype: Parameter, scale: Parameter, zero_point: Parameter, axis: int = -1
) -> Call:
    """(x - z) * s in float; operands as for simulated_quantize."""
    name = "simulated_dequantize"
    return _make_call(
        name,
        [
            _make_operand(data, name, "data"),
            _make_parameter(dtype, "int32", name, "dtype"),
            _make_scale(scale, name),
            _make_zero_point(zero_point, name),
        ],
        _attrs.SimulatedDequantizeAttrs(int(axis)),
    )


# ---------------------------------------------------------------- convolutions and products


def _make_linear_operands(
    operator: str, names: Sequence[str], values: Sequence[Any]
) -> list[relax.Expr]:
    """(data, weight, zero point, zero point, scale, scale)."""
    return [
        _make_operand(values[0], operator, names[0]),
        _make_operand(values[1], operator, names[1]),
        _make_zero_point(values[2], operator, names[2]),
        _make_zero_point(values[3], operator, names[3]),
        _make_scale(values[4], operator, names[4]),
        _make_scale(values[5], operator, names[5]),
    ]


_CONV_NAMES = (
    "data",
    "weight",
    "input_zero_point",
    "kernel_zero_point",
    "input_scale",
    "kernel_scale",
)


def conv1d(
    data: Operand,
    weight: Operand,
    input_zero_point: Parameter,
    kernel_zero_point: Parameter,
    input_scale: Parameter,
    kernel_scale: Parameter,
    strides: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    data_layout: str = "NCW",
    kernel_layout: str = "OIW",
    out_dtype: str = "int32",
) -> Call:
    """As conv2d, along one axis; padding is (left, right)."""
    name = "conv1d"
    values = (data, weight, input_zero_point, kernel_zero_point, input_scale, kernel_scale)
    return _make_call(
        name,
        _make_linear_operands(name, _CONV_NAMES, values),
        _attrs.QConv1DAttrs(
            _integers(strides, 1, name, "strides"),
            _padding(padding, 1, name),
            _integers(dilation, 1, name, "dilation"),
            int(groups),
            data_layout,
            kernel_layout,
            out_dtype,
        ),
    )


def conv2d(
    data: Operand,
    weight: Operand,
    input_zero_point: Parameter,
    kernel_zero_point: Parameter,
    input_scale: Parameter,
    kernel_scale: Parameter,
    strides: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    data_layout: str = "NCHW",
    kernel_layout: str = "OIHW",
    out_dtype: str = "int32",
) -> Call:
    """conv(data - input_zero_point, weight - kernel_zero_point), int32 or int64 (`out_dtype`).

    data int8, uint8 or int16 in `data_layout`; weight the same in `kernel_layout` (I counts the
    channels of one group). Kernel parameters: () or (O,). Padding is (top, left, bottom, right) and
    stands for real 0. The result has scale input_scale * kernel_scale and zero point 0; the
    scales do not enter the computation.
    """
    name = "conv2d"
    values = (data, weight, input_zero_point, kernel_zero_point, input_scale, kernel_scale)
    return _make_call(
        name,
        _make_linear_operands(name, _CONV_NAMES, values),
        _attrs.QConv2DAttrs(
            _integers(strides, 2, name, "strides"),
            _padding(padding, 2, name),
            _integers(dilation, 2, name, "dilation"),
            int(groups),
            data_layout,
            kernel_layout,
            out_dtype,
        ),
    )


def conv2d_transpose(
    data: Operand,
    weight: Operand,
    input_zero_point: Parameter,
    kernel_zero_point: Parameter,
    input_scale: Parameter,
    kernel_scale: Parameter,
    strides: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    data_layout: str = "NCHW",
    kernel_layout: str = "IOHW",
    out_dtype: str = "int32",
) -> Call:
    """Transposed convolution of centred integers, int32 or int64; operands as for conv2d.

    In `kernel_layout` I counts all input channels and O the output channels of one group. Kernel
    parameters: () or one per output channel of all groups.
    """
    name = "conv2d_transpose"
    values = (data, weight, input_zero_point, kernel_zero_point, input_scale, kernel_scale)
    return _make_call(
        name,
        _make_linear_operands(name, _CONV_NAMES, values),
        _attrs.QConv2DTransposeAttrs(
            _integers(strides, 2, name, "strides"),
            _padding(padding, 2, name),
            _integers(output_padding, 2, name, "output_padding"),
            _integers(dilation, 2, name, "dilation"),
            int(groups),
            data_layout,
            kernel_layout,
            out_dtype,
        ),
    )


def dense(
    data: Operand,
    weight: Operand,
    input_zero_point: Parameter,
    kernel_zero_point: Parameter,
    input_scale: Parameter,
    kernel_scale: Parameter,
    out_dtype: str = "int32",
) -> Call:
    """data (..., K) and weight (N, K), each int8, uint8 or int16 -> int32 or int64 (..., N).

    Kernel parameters: () or (N,).
    """
    name = "dense"
    values = (data, weight, input_zero_point, kernel_zero_point, input_scale, kernel_scale)
    return _make_call(
        name, _make_linear_operands(name, _CONV_NAMES, values), _attrs.QMatmulAttrs(out_dtype)
    )


def batch_matmul(
    x: Operand,
    y: Operand,
    x_zero_point: Parameter,
    y_zero_point: Parameter,
    x_scale: Parameter,
    y_scale: Parameter,
    out_dtype: str = "int32",
) -> Call:
    """x (..., M, K) and y (..., N, K), each int8, uint8 or int16 -> int32 or int64 (..., M, N).

    The leading dimensions broadcast. Parameters: ().
    """
    name = "batch_matmul"
    names = ("x", "y", "x_zero_point", "y_zero_point", "x_scale", "y_scale")
    values = (x, y, x_zero_point, y_zero_point, x_scale, y_scale)
    return _make_call(
        name, _make_linear_operands(name, names, values), _attrs.QMatmulAttrs(out_dtype)
    )


# ---------------------------------------------------------------- elementwise in affine space


def _make_binary(
    name: str,
    operands: tuple[Operand, Operand],
    parameters: Sequence[Parameter],
    axes: tuple[int, int],
    out_dtype: str,
    modes: tuple[Rounding | str, Arithmetic | str],
) -> Call:
    lhs_scale, lhs_zero_point, rhs_scale, rhs_zero_point, output_scale, output_zero_point = (
        parameters
    )
    return _make_call(
        name,
        [
            _make_operand(operands[0], name, "lhs"),
            _make_operand(operands[1], name, "rhs"),
            _make_scale(lhs_scale, name, "lhs_scale"),
            _make_zero_point(lhs_zero_point, name, "lhs_zero_point"),
            _make_scale(rhs_scale, name, "rhs_scale"),
            _make_zero_point(rhs_zero_point, name, "rhs_zero_point"),
            _make_scale(output_scale, name, "output_scale"),
            _make_zero_point(output_zero_point, name, "output_zero_point"),
        ],
        _attrs.QBinaryAttrs(
            int(axes[0]),
            int(axes[1]),
            out_dtype,
            _rounding_value(modes[0], name),
            _arithmetic_value(modes[1], name),
        ),
    )


def add(
    lhs: Operand,
    rhs: Operand,
    lhs_scale: Parameter,
    lhs_zero_point: Parameter,
    rhs_scale: Parameter,
    rhs_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    lhs_axis: int = -1,
    rhs_axis: int = -1,
    out_dtype: str = "",
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """lhs + rhs, broadcast; out_dtype "" is the dtype of lhs.

    Operands int8, uint8, int16, uint16, int32 or int64; their parameters () or (C,) along lhs_axis
    and rhs_axis; output parameters (). The default rounds the sum once:
    t = fma(float32(r - z_r), m_r, float32(l - z_l) * m_l), then as for requantize. All other modes
    requantize each side to int32 first, as Relay does.
    """
    parameters = (lhs_scale, lhs_zero_point, rhs_scale, rhs_zero_point)
    return _make_binary(
        "add",
        (lhs, rhs),
        (*parameters, output_scale, output_zero_point),
        (lhs_axis, rhs_axis),
        out_dtype,
        (rounding, compute_dtype),
    )


def subtract(
    lhs: Operand,
    rhs: Operand,
    lhs_scale: Parameter,
    lhs_zero_point: Parameter,
    rhs_scale: Parameter,
    rhs_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    lhs_axis: int = -1,
    rhs_axis: int = -1,
    out_dtype: str = "",
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """lhs - rhs; the rest as for add, with -m_r."""
    parameters = (lhs_scale, lhs_zero_point, rhs_scale, rhs_zero_point)
    return _make_binary(
        "subtract",
        (lhs, rhs),
        (*parameters, output_scale, output_zero_point),
        (lhs_axis, rhs_axis),
        out_dtype,
        (rounding, compute_dtype),
    )


def mul(
    lhs: Operand,
    rhs: Operand,
    lhs_scale: Parameter,
    lhs_zero_point: Parameter,
    rhs_scale: Parameter,
    rhs_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    lhs_axis: int = -1,
    rhs_axis: int = -1,
    out_dtype: str = "",
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """lhs * rhs: (l - z_l) * (r - z_r), requantized with m = s_l * s_r / s_o (in float64).

    Operands as for add. The product is int32, and int64 where the dtypes and zero points of the
    operands do not rule out that it passes int32; in UPWARD, TONEAREST and INT64 it wraps.
    """
    parameters = (lhs_scale, lhs_zero_point, rhs_scale, rhs_zero_point)
    return _make_binary(
        "mul",
        (lhs, rhs),
        (*parameters, output_scale, output_zero_point),
        (lhs_axis, rhs_axis),
        out_dtype,
        (rounding, compute_dtype),
    )


def concatenate(
    data: Operand | Sequence[Operand],
    input_scales: Parameter | Sequence[Parameter],
    input_zero_points: Parameter | Sequence[Parameter],
    output_scale: Parameter,
    output_zero_point: Parameter,
    axis: int = 0,
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """Tensors of one integer dtype, each requantized to the output parameters, joined along `axis`.

    One scale () and one zero point () per tensor; output parameters ().
    """
    name = "concatenate"
    return _make_call(
        name,
        [
            _make_tuple(data, _make_operand, name, "data"),
            _make_tuple(input_scales, _make_scale, name, "input_scales"),
            _make_tuple(input_zero_points, _make_zero_point, name, "input_zero_points"),
            _make_scale(output_scale, name, "output_scale"),
            _make_zero_point(output_zero_point, name, "output_zero_point"),
        ],
        _attrs.QConcatenateAttrs(
            int(axis), _rounding_value(rounding, name), _arithmetic_value(compute_dtype, name)
        ),
    )


def avg_pool2d(
    data: Operand,
    input_scale: Parameter,
    input_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    pool_size: int | Sequence[int] = 1,
    strides: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = False,
    layout: str = "NCHW",
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """Average of integer data in `layout`, same dtype; parameters ().

    The default sums x - z_in over the window (pads are real 0) and requantizes the exact sum with
    m' = m / float32(count); windows and counts are those of relax.nn.avg_pool2d, also in ceil mode.
    In UPWARD and TONEAREST pads hold 0 in the output's affine space, the division truncates, and
    ceil mode keeps a last window that starts beyond the padding, as in TVM 0.19: use them only to
    reproduce it.
    """
    name = "avg_pool2d"
    parameters = (input_scale, input_zero_point, output_scale, output_zero_point)
    return _make_call(
        name,
        [_make_operand(data, name, "data"), *_make_unary_parameters(name, parameters)],
        _attrs.QAvgPool2DAttrs(
            _integers(pool_size, 2, name, "pool_size"),
            _integers(strides, 2, name, "strides"),
            _integers(dilation, 2, name, "dilation"),
            _padding(padding, 2, name),
            bool(ceil_mode),
            bool(count_include_pad),
            layout,
            _rounding_value(rounding, name),
            _arithmetic_value(compute_dtype, name),
        ),
    )


def mean(
    data: Operand,
    input_scale: Parameter,
    input_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    axes: int | Sequence[int] | None = None,
    keepdims: bool = False,
    out_dtype: str = "",
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """Mean over `axes` (None or empty: all); out_dtype "" is the dtype of data; parameters ().

    The sum of x - z_in is requantized with m' = m / float32(count); in INT64 arithmetic the
    division is part of the real multiplier. Sums that pass int32 are int64; in UPWARD, TONEAREST
    and INT64 they wrap.
    """
    name = "mean"
    parameters = (input_scale, input_zero_point, output_scale, output_zero_point)
    listed = [axes] if isinstance(axes, int) else list(axes or ())
    return _make_call(
        name,
        [_make_operand(data, name, "data"), *_make_unary_parameters(name, parameters)],
        _attrs.QMeanAttrs(
            tvm_ffi.Array([int(axis) for axis in listed]),
            bool(keepdims),
            out_dtype,
            _rounding_value(rounding, name),
            _arithmetic_value(compute_dtype, name),
        ),
    )


def leaky_relu(
    data: Operand,
    input_scale: Parameter,
    input_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    alpha: float = 0.01,
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """x where x >= z_in, else alpha * x, in int8, uint8 or int16, same dtype; parameters ().

    The default requantizes once, with m = s_in / s_out or, below z_in, m = s_in * alpha / s_out,
    both computed in float64. UPWARD and TONEAREST multiply by alpha after requantizing, as Relay
    does.
    """
    name = "leaky_relu"
    parameters = (input_scale, input_zero_point, output_scale, output_zero_point)
    return _make_call(
        name,
        [_make_operand(data, name, "data"), *_make_unary_parameters(name, parameters)],
        _attrs.QLeakyReluAttrs(
            float(alpha), _rounding_value(rounding, name), _arithmetic_value(compute_dtype, name)
        ),
    )


def prelu(
    data: Operand,
    input_scale: Parameter,
    input_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    slopes: Operand,
    axis: int = 1,
) -> Call:
    """x where x >= z_in, else slopes * x, in int8, uint8 or int16, same dtype; parameters ().

    Slopes are float32, () or (C,), one for each index of `axis`. The result is rounded once, half
    to even, as by `leaky_relu`: the multiplier is m = s_in / s_out or, below z_in,
    m = s_in * slope / s_out, both computed in float64. Relay has no such operator, hence there is
    one arithmetic.
    """
    name = "prelu"
    parameters = (input_scale, input_zero_point, output_scale, output_zero_point)
    operands = [_make_operand(data, name, "data"), *_make_unary_parameters(name, parameters)]
    operands.append(_make_parameter(slopes, "float32", name, "slopes"))
    return _make_call(name, operands, _attrs.QPreluAttrs(int(axis)))


def lookup(data: Operand, table: Operand) -> Call:
    """table[data]: data int8 or uint8, table (256,) of any dtype, same shape as data.

    Entry i of the table is for the bit pattern i: int8 -1 reads entry 255.
    """
    name = "lookup"
    return _make_call(
        name,
        [_make_operand(data, name, "data"), _make_operand(table, name, "table")],
        None,
    )
