"""Relay, writing, rows: the operators of `relayquant.dialect`.

Relay has UPWARD and TONEAREST (half away from zero), not the half-to-even of this package. Exactly
written, an operator that rounds so becomes float32 arithmetic that gives the same bits:

    t = float32(x - z_in) * m; t = clip(t, qmin - z_out, qmax - z_out)
    q = int8(int32((t + 1.5 * 2^23) - 1.5 * 2^23) + z_out)

The sum with 1.5 * 2^23 rounds to an integer, half to even, since float32 has 24 bits. Otherwise it
becomes Relay's own operator, which differs by one step where a value lies halfway.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relayquant.dialect.sums import choose_product_dtype, choose_total_dtype
from relayquant.errors import ModelError
from relayquant.qtypes import Arithmetic, Rounding
from relayquant.relay import syntax
from relayquant.relay.export.base import Export, Exports, ExportSite, ints
from relayquant.relay.export.float_rows import conv_attrs, conv_kernel, known_size, pool_attrs

#: float32 (1.5 * 2^23): adding and subtracting it rounds |t| < 2^22 to an integer, half to even.
ROUNDING_MAGIC = 12582912.0
#: Widest bounds of a clip for which that holds.
MAX_MAGIC = 2**22

#: Exponents of the two multipliers of a sum may differ by this much; the float64 sum is exact then.
MAX_EXPONENT_GAP = 16


def has_mode(site: ExportSite, rounding: Rounding, arithmetic: Arithmetic) -> bool:
    attrs = site.attrs
    return (str(attrs.rounding), str(attrs.compute_dtype)) == (rounding.value, arithmetic.value)


def is_default(site: ExportSite) -> bool:
    """Half to even in float32."""
    return has_mode(site, Rounding.TONEAREST_EVEN, Arithmetic.FLOAT32)


def check_default(site: ExportSite) -> None:
    """Raise unless the operator computes as this package does by default.

    Raises:
        ModelError: it has another mode, which Relay has not for this operator.
    """
    if not is_default(site):
        attrs = site.attrs
        raise ModelError(f"Relay has no mode {attrs.rounding} in {attrs.compute_dtype} for it")


# -- exact arithmetic ------------------------------------------------------------------------------


def spread(array: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    """Per-channel values in a shape that broadcasts along `axis`."""
    if array.size == 1:
        return array.reshape(())
    shape = [1] * ndim
    shape[axis % ndim] = array.size
    return array.reshape(shape)


def centre(site: ExportSite, index: int, zero_point: np.ndarray) -> syntax.Expr:
    """int32(operand `index`) - zero_point."""
    return centre_value(site, site.args[index], site.dtype(index), zero_point)


def centre_value(
    site: ExportSite, value: syntax.Expr, dtype: str, zero_point: np.ndarray
) -> syntax.Expr:
    wide = value if dtype == "int32" else site.op("cast", value, dtype="int32")
    if not zero_point.any():
        return wide
    return site.op("subtract", wide, site.constant(zero_point.astype("int32"), "zero_point"))


def scale_by(site: ExportSite, value: syntax.Expr, multiplier: np.ndarray) -> syntax.Expr:
    """float32(value) * multiplier."""
    real = site.op("cast", value, dtype="float32")
    return site.op("multiply", real, site.constant(multiplier.astype("float32"), "multiplier"))


def round_off(site: ExportSite, real: syntax.Expr, zero_point: int, dtype: str) -> syntax.Expr:
    """The integer nearest to a float32 value, half to even, in the affine space of the output."""
    info = np.iinfo(dtype)
    low, high = info.min - zero_point, info.max - zero_point
    if max(-low, high) > MAX_MAGIC:
        raise ModelError(f"a result of dtype {dtype} cannot be rounded half to even in Relay")
    clipped = site.op("clip", real, a_min=float(low), a_max=float(high))
    magic = site.number(ROUNDING_MAGIC, "float32")
    whole = site.op("subtract", site.op("add", clipped, magic), magic)
    number = site.op("cast", whole, dtype="int32")
    if zero_point:
        number = site.op("add", number, site.number(zero_point, "int32"))
    return site.op("cast", number, dtype=dtype)


def divide_scales(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """The float32 multiplier of two scales, as requantize computes it."""
    return (numerator.astype("float64") / denominator.astype("float64")).astype("float32")


def output(site: ExportSite, scale: int) -> tuple[np.ndarray, int]:
    """(scale, zero point) of the output; both must be scalars."""
    return site.array(scale).reshape(()), int(site.array(scale + 1).item())


# -- between real and affine space -----------------------------------------------------------------


def export_quantize(site: ExportSite) -> syntax.Expr:
    attrs = site.attrs
    rounding, dtype = str(attrs.rounding), str(attrs.out_dtype)
    if rounding == Rounding.TONEAREST.value or not site.exact:
        return site.op("qnn.quantize", *site.args, out_dtype=dtype, axis=int(attrs.axis))
    if rounding != Rounding.TONEAREST_EVEN.value:
        raise ModelError(f"Relay cannot quantize {rounding}")
    scale, zero_point = site.array(1), site.array(2)
    if zero_point.size > 1 and np.ptp(zero_point):
        raise ModelError("its zero point differs between channels")
    ndim = len(site.in_dims(0))
    real = site.op(
        "divide",
        site.args[0]
        if site.dtype(0) == "float32"
        else site.op("cast", site.args[0], dtype="float32"),
        site.constant(spread(scale, int(attrs.axis), ndim), "scale"),
    )
    return round_off(site, real, int(zero_point.flat[0]), dtype)


def export_dequantize(site: ExportSite) -> syntax.Expr:
    attrs = site.attrs
    return site.op(
        "qnn.dequantize", *site.args, out_dtype=str(attrs.out_dtype), axis=int(attrs.axis)
    )


def export_requantize(site: ExportSite) -> syntax.Expr:
    attrs = site.attrs
    rounding, arithmetic = str(attrs.rounding), str(attrs.compute_dtype)
    if rounding != Rounding.TONEAREST_EVEN.value or not site.exact:
        even = rounding == Rounding.TONEAREST_EVEN.value
        return site.op(
            "qnn.requantize",
            *site.args,
            axis=int(attrs.axis),
            rounding=Rounding.TONEAREST.value if even else rounding,
            compute_dtype=arithmetic,
            out_dtype=str(attrs.out_dtype),
        )
    check_default(site)
    out_scale, out_zero = output(site, 3)
    ndim, axis = len(site.in_dims(0)), int(attrs.axis)
    multiplier = divide_scales(spread(site.array(1), axis, ndim), out_scale)
    moved = centre(site, 0, spread(site.array(2), axis, ndim))
    return round_off(site, scale_by(site, moved, multiplier), out_zero, str(attrs.out_dtype))


# -- convolutions and products ---------------------------------------------------------------------


def check_register(dtype: str) -> str:
    """`dtype`, that of sums or products.

    Raises:
        ModelError: int64, for which there is no form in Relay.
    """
    if dtype != "int32":
        raise ModelError(
            f"its sums or products do not fit int32, and Relay has no form for {dtype}; keep it in "
            "float, or take activations of 8 bits"
        )
    return dtype


def sum_dtype(site: ExportSite) -> str:
    """The dtype of the sums of a convolution or matrix product."""
    return check_register(str(site.attrs.out_dtype))


def export_conv2d(site: ExportSite) -> syntax.Expr:
    kernel, attrs = conv_kernel(site)
    attrs["out_dtype"] = sum_dtype(site)
    return site.op("qnn.conv2d", site.args[0], kernel, *site.args[2:], **attrs)


def export_conv1d(site: ExportSite) -> syntax.Expr:
    """As a convolution of height 1: NCW, OIW -> NCHW, OIHW."""
    attrs = site.attrs
    if (str(attrs.data_layout), str(attrs.kernel_layout)) != ("NCW", "OIW"):
        raise ModelError(f"its layouts are {attrs.data_layout} and {attrs.kernel_layout}")
    (n, c, width), (o, i, kernel) = site.in_dims(0), site.in_shape(1)
    (before, after), shape = ints(attrs.padding), site.out_dims()
    weight = site.constant(site.array(1).reshape(o, i, 1, kernel), "weight")
    found = site.op(
        "qnn.conv2d",
        site.reshape(site.args[0], (n, c, 1, width)),
        weight,
        *site.args[2:],
        strides=(1, *ints(attrs.strides)),
        padding=(0, before, 0, after),
        dilation=(1, *ints(attrs.dilation)),
        groups=int(attrs.groups),
        channels=o,
        kernel_size=(1, kernel),
        out_dtype=sum_dtype(site),
    )
    return site.reshape(found, shape)


def export_conv2d_transpose(site: ExportSite) -> syntax.Expr:
    attrs = conv_attrs(site, str(site.attrs.kernel_layout), site.in_shape(1))
    attrs["out_dtype"] = sum_dtype(site)
    return site.op("qnn.conv2d_transpose", *site.args, **attrs)


def export_dense(site: ExportSite) -> syntax.Expr:
    shape = site.in_dims(0)
    rows = site.args[0] if len(shape) == 2 else site.reshape(site.args[0], (-1, shape[-1]))
    units, kind = site.in_shape(1)[0], sum_dtype(site)
    found = site.op("qnn.dense", rows, *site.args[1:], units=units, out_dtype=kind)
    return found if len(shape) == 2 else site.reshape(found, site.out_dims())


def export_batch_matmul(site: ExportSite) -> syntax.Expr:
    left, right = site.in_dims(0), site.in_dims(1)
    if len(left) < 3 or left[:-2] != right[:-2]:
        raise ModelError(f"a product of shapes {left} and {right} has no form in Relay")
    operands = [
        arg if len(shape) == 3 else site.reshape(arg, (-1, *shape[-2:]))
        for arg, shape in zip(site.args[:2], (left, right), strict=True)
    ]
    found = site.op(
        "qnn.batch_matmul",
        *operands,
        *site.args[2:],
        out_dtype=sum_dtype(site),
        transpose_b=True,
    )
    return found if len(left) == 3 else site.reshape(found, site.out_dims())


# -- elementwise -----------------------------------------------------------------------------------


def uses_relay_operator(site: ExportSite) -> bool:
    """Whether Relay's own operator is written: it computes UPWARD in int64, which is what was
    asked for, or is near enough.

    Raises:
        ModelError: another mode was asked for, which Relay has not.
    """
    if has_mode(site, Rounding.UPWARD, Arithmetic.INT64):
        return True
    check_default(site)
    return not site.exact


def binary_dtype(site: ExportSite) -> str:
    return str(site.attrs.out_dtype) or site.dtype(0)


def binary(name: str, exactly: Any) -> Export:
    def export(site: ExportSite) -> syntax.Expr:
        attrs = site.attrs
        same_dtype = site.dtype(0) == site.dtype(1) == binary_dtype(site)
        if uses_relay_operator(site) and same_dtype:
            axes = {"lhs_axis": int(attrs.lhs_axis), "rhs_axis": int(attrs.rhs_axis)}
            return site.op(name, *site.args, **axes)
        check_default(site)
        return exactly(site)

    return export


def sides(site: ExportSite) -> list[tuple[syntax.Expr, np.ndarray]]:
    """(value - zero point, scale) of both operands, scales in shapes that broadcast."""
    found = []
    for index, axis in enumerate((int(site.attrs.lhs_axis), int(site.attrs.rhs_axis))):
        ndim = len(site.in_dims(index))
        scale, zero = (spread(site.array(2 + 2 * index + i), axis, ndim) for i in (0, 1))
        found.append((centre(site, index, zero), scale))
    return found


def add_exactly(sign: int) -> Any:
    """t = fma(r, m_r, l * m_l), the fma as a sum in float64, which is exact before the last
    rounding.
    """

    def export(site: ExportSite) -> syntax.Expr:
        (left, left_scale), (right, right_scale) = sides(site)
        out_scale, zero_point = output(site, 6)
        first = divide_scales(left_scale, out_scale)
        second = divide_scales(right_scale, out_scale) * np.float32(sign)
        exponents = [np.frexp(each)[1] for each in (first, second)]
        if max(e.max() for e in exponents) - min(e.min() for e in exponents) > MAX_EXPONENT_GAP:
            raise ModelError("the scales of its operands are too far apart to add exactly")
        t = site.op("cast", scale_by(site, left, first), dtype="float64")
        factor = site.constant(second.astype("float64"), "multiplier")
        product = site.op("multiply", site.op("cast", right, dtype="float64"), factor)
        total = site.op("cast", site.op("add", t, product), dtype="float32")
        return round_off(site, total, zero_point, binary_dtype(site))

    return export


def multiply_exactly(site: ExportSite) -> syntax.Expr:
    """(l - z_l) * (r - z_r) in int32, requantized."""
    (left, left_scale), (right, right_scale) = sides(site)
    out_scale, zero_point = output(site, 6)
    real = left_scale.astype("float64") * right_scale.astype("float64")
    multiplier = (real / out_scale.astype("float64")).astype("float32")
    check_register(choose_product_dtype(site.call))
    product = site.op("multiply", left, right)
    return round_off(site, scale_by(site, product, multiplier), zero_point, binary_dtype(site))


def export_concatenate(site: ExportSite) -> syntax.Expr:
    attrs = site.attrs
    parts, scales, zeros = site.args[:3]
    axis = int(attrs.axis)
    if uses_relay_operator(site):
        packed = [site.tuple_of(each) for each in (parts, scales, zeros)]
        return site.op("qnn.concatenate", *packed, *site.args[3:], axis=axis)
    out_scale, out_zero = output(site, 3)
    dtype = str(site.call.ty.dtype)
    moved = []
    for part, scale, zero in zip(parts, site.fields(1), site.fields(2), strict=True):
        if (float(scale), int(zero)) == (float(out_scale), out_zero):
            moved.append(part)
            continue
        multiplier = divide_scales(scale.reshape(()), out_scale)
        real = scale_by(site, centre_value(site, part, dtype, zero.reshape(())), multiplier)
        moved.append(round_off(site, real, out_zero, dtype))
    return site.op("concatenate", site.tuple_of(moved), axis=axis)


def export_leaky_relu(site: ExportSite) -> syntax.Expr:
    alpha = float(site.attrs.alpha)
    if uses_relay_operator(site):
        return site.op("qnn.leaky_relu", *site.args, alpha=alpha)
    scale, zero_point = site.array(1).reshape(()), site.array(2).reshape(())
    out_scale, out_zero = output(site, 3)
    moved = centre(site, 0, zero_point)
    steep = divide_scales(scale, out_scale)
    ratio = scale.astype("float64") * alpha / out_scale.astype("float64")
    chosen = site.op(
        "where",
        site.op("less", moved, site.number(0, "int32")),
        scale_by(site, moved, ratio.astype("float32")),
        scale_by(site, moved, steep),
    )
    return round_off(site, chosen, out_zero, site.dtype(0))


# -- averages --------------------------------------------------------------------------------------


def average(site: ExportSite, total: syntax.Expr, count: int, dtype: str) -> syntax.Expr:
    """A sum of centred integers in the output's space: m' = m / float32(count)."""
    out_scale, out_zero = output(site, 3)
    multiplier = divide_scales(site.array(1).reshape(()), out_scale) / np.float32(count)
    return round_off(site, scale_by(site, total, multiplier), out_zero, dtype)


def export_mean(site: ExportSite) -> syntax.Expr:
    check_default(site)
    shape = site.in_dims(0)
    axes = tuple(axis % len(shape) for axis in ints(site.attrs.axes)) or tuple(range(len(shape)))
    moved = centre(site, 0, site.array(2).reshape(()))
    total = site.op("sum", moved, axis=axes, keepdims=bool(site.attrs.keepdims))
    count = int(np.prod([known_size(shape[axis]) for axis in axes]))
    check_register(choose_total_dtype(site.dtype(0), site.call.args[2], count))
    return average(site, total, count, str(site.attrs.out_dtype) or site.dtype(0))


def export_avg_pool2d(site: ExportSite) -> syntax.Expr:
    """The sum of each window is a convolution with ones."""
    attrs = site.attrs
    included = bool(attrs.count_include_pad)
    if has_mode(site, Rounding.UPWARD, Arithmetic.INT64):
        common = pool_attrs(site)
        return site.op("qnn.avg_pool2d", *site.args, **common, count_include_pad=included)
    check_default(site)
    if attrs.ceil_mode or (any(ints(attrs.padding)) and not included):
        raise ModelError("it averages over windows of different sizes")
    layout, window = str(attrs.layout), ints(attrs.pool_size)
    check_register(choose_total_dtype(site.dtype(0), site.call.args[2], int(np.prod(window))))
    channels = known_size(site.in_dims(0)[layout.index("C")])
    is_last = layout.endswith("C")
    kernel = (*window, channels, 1) if is_last else (channels, 1, *window)
    moved = centre(site, 0, site.array(2).reshape(()))
    total = site.op(
        "nn.conv2d",
        moved,
        site.constant(np.ones(kernel, "int32"), "ones"),
        strides=ints(attrs.strides),
        padding=ints(attrs.padding),
        dilation=ints(attrs.dilation),
        groups=channels,
        channels=channels,
        kernel_size=window,
        data_layout=layout,
        kernel_layout="HWOI" if is_last else "OIHW",
        out_dtype="int32",
    )
    return average(site, total, window[0] * window[1], site.dtype(0))


def export_lookup(site: ExportSite) -> syntax.Expr:
    """take(table, x & 255): the entry of a bit pattern."""
    index = site.op("cast", site.args[0], dtype="int32")
    if site.dtype(0) == "int8":
        index = site.op("bitwise_and", index, site.number(255, "int32"))
    return site.op("take", site.args[1], index, axis=0, mode="fast")


QUANTIZED_EXPORTS: Exports = {
    "relax.qnn.quantize": export_quantize,
    "relax.qnn.dequantize": export_dequantize,
    "relax.qnn.requantize": export_requantize,
    "relax.qnn.conv1d": export_conv1d,
    "relax.qnn.conv2d": export_conv2d,
    "relax.qnn.conv2d_transpose": export_conv2d_transpose,
    "relax.qnn.dense": export_dense,
    "relax.qnn.batch_matmul": export_batch_matmul,
    "relax.qnn.add": binary("qnn.add", add_exactly(1)),
    "relax.qnn.subtract": binary("qnn.subtract", add_exactly(-1)),
    "relax.qnn.mul": binary("qnn.mul", multiply_exactly),
    "relax.qnn.concatenate": export_concatenate,
    "relax.qnn.leaky_relu": export_leaky_relu,
    "relax.qnn.mean": export_mean,
    "relax.qnn.avg_pool2d": export_avg_pool2d,
    "relax.qnn.lookup": export_lookup,
}
