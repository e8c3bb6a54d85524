"""Relay writer, rows: the operators of `relayquant.ir.dialect`.

Relay has UPWARD and TONEAREST (half away from zero), but not this package's half-to-even rounding.
With `exact`, an operator with half-to-even rounding becomes float32 arithmetic with the same bits:

    t = float32(x - z_in) * m; t = clip(t, qmin - z_out, qmax - z_out)
    q = int8(int32(t + 1.5 * 2^23) + (z_out - 1.5 * 2^23))

The sum with 1.5 * 2^23 rounds to an integer, half to even, because float32 has 24 bits. The
constant is subtracted from the integer, because TVM's simplifier turns the float32 expression `(t +
c) - c` into `t`.

Otherwise it becomes Relay's own operator, which differs by one step for values halfway between two
integers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relayquant.base.axes import shape_along
from relayquant.base.qtypes import Arithmetic, Rounding
from relayquant.errors import ModelError
from relayquant.ir.dialect import OPERATORS
from relayquant.ir.dialect.accumulator_range import choose_product_dtype, choose_total_dtype
from relayquant.ir.reference.interpreter import evaluate_qnn
from relayquant.relay import syntax
from relayquant.relay.export.base import Export, Exports, ExportSite, ints
from relayquant.relay.export.float_rows import (
    conv_kernel,
    known_size,
    pool_attrs,
    transposed_kernel,
)
from relayquant.relay.export.releases import has_attribute

#: 1.5 * 2^23: adding it in float32 rounds |t| < 2^22 to an integer, half to even.
ROUNDING_MAGIC = 12582912
#: Widest clip bounds for this rounding.
MAX_MAGIC = 2**22

#: Bits of the range of a result when accumulators need not be added exactly: a byte in steps of
#: 1/4096, which a float32 holds, with the same headroom on both sides in an int32.
SUM_BITS = 20

#: dtypes of data that QNN's matrix products support in all releases
BYTES = ("int8", "uint8")

#: bits of a float64 and a float32
DOUBLE_BITS, FLOAT_BITS = 53, 24


def has_mode(site: ExportSite, rounding: Rounding, arithmetic: Arithmetic) -> bool:
    attrs = site.attrs
    return (str(attrs.rounding), str(attrs.compute_dtype)) == (rounding.value, arithmetic.value)


def is_default(site: ExportSite) -> bool:
    """Return whether the mode is half to even in float32."""
    return has_mode(site, Rounding.TONEAREST_EVEN, Arithmetic.FLOAT32)


def check_default(site: ExportSite) -> None:
    """Raise unless the operator has this package's default mode.

    Raises:
        ModelError: it has another mode, which Relay lacks for this operator.
    """
    if not is_default(site):
        attrs = site.attrs
        raise ModelError(
            f"Relay has no mode {attrs.rounding} in {attrs.compute_dtype} for it", code="RQ203"
        )


# -- exact arithmetic ------------------------------------------------------------------------------


def spread(array: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    """Reshape per-channel values so that they broadcast along `axis`."""
    if array.size == 1:
        return array.reshape(())
    return array.reshape(shape_along(axis, ndim))


def subtract_zero_point(site: ExportSite, index: int, zero_point: np.ndarray) -> syntax.Expr:
    """Emit int32(operand `index`) - zero_point."""
    return without_zero_point(site, site.args[index], site.dtype(index), zero_point)


def without_zero_point(
    site: ExportSite, value: syntax.Expr, dtype: str, zero_point: np.ndarray
) -> syntax.Expr:
    wide = value if dtype == "int32" else site.op("cast", value, dtype="int32")
    if not zero_point.any():
        return wide
    return site.op("subtract", wide, site.constant(zero_point.astype("int32"), "zero_point"))


def scale_by(site: ExportSite, value: syntax.Expr, multiplier: np.ndarray) -> syntax.Expr:
    """Emit float32(value) * multiplier."""
    real = site.op("cast", value, dtype="float32")
    return site.op("multiply", real, site.constant(multiplier.astype("float32"), "multiplier"))


def round_off(site: ExportSite, real: syntax.Expr, zero_point: int, dtype: str) -> syntax.Expr:
    """Round a float32 value to the nearest integer, half to even, in the affine space of the
    output.
    """
    info = np.iinfo(dtype)
    low, high = info.min - zero_point, info.max - zero_point
    if max(-low, high) > MAX_MAGIC:
        raise ModelError(
            f"a result of dtype {dtype} cannot be rounded half to even in Relay", code="RQ203"
        )
    clipped = site.op("clip", real, a_min=float(low), a_max=float(high))
    shifted = site.op("add", clipped, site.number(ROUNDING_MAGIC, "float32"))
    whole = site.op("cast", shifted, dtype="int32")
    number = site.op("add", whole, site.number(zero_point - ROUNDING_MAGIC, "int32"))
    return site.op("cast", number, dtype=dtype)


def requantize(
    site: ExportSite, value: syntax.Expr, given: tuple[syntax.Expr, ...], axis: int, dtype: str
) -> syntax.Expr:
    """Emit Relay's own requantize with the rounding closest to half to even.

    `given` are the scale and zero point of `value` and of the result.
    """
    arithmetic = {"compute_dtype": Arithmetic.FLOAT32.value}
    if not has_attribute(site.release, "qnn.requantize", "compute_dtype"):
        arithmetic = {}
    return site.op(
        "qnn.requantize",
        value,
        *given,
        axis=axis,
        rounding=Rounding.TONEAREST.value,
        **arithmetic,
        out_dtype=dtype,
    )


def divide_scales(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return the float32 multiplier of two scales, as requantize computes it."""
    return (numerator.astype("float64") / denominator.astype("float64")).astype("float32")


def output(site: ExportSite, scale: int) -> tuple[np.ndarray, int]:
    """Return (scale, zero point) of the output. Both must be scalars."""
    return site.array(scale).reshape(()), int(site.array(scale + 1).item())


# -- between real and affine space -----------------------------------------------------------------


def export_quantize(site: ExportSite) -> syntax.Expr:
    """Write quantize, always with half-to-even rounding.

    All pixels of an image may be halfway between two integers, and no back end looks for a
    qnn.quantize without an operator before it.
    """
    attrs = site.attrs
    rounding, dtype = str(attrs.rounding), str(attrs.out_dtype)
    is_input = site.out.call_of(site.args[0]) is None
    is_near = not site.exact and not is_input and dtype != "uint16"
    if rounding == Rounding.TONEAREST.value or is_near:
        return site.op("qnn.quantize", *site.args, out_dtype=dtype, axis=int(attrs.axis))
    if rounding != Rounding.TONEAREST_EVEN.value:
        raise ModelError(f"Relay cannot quantize {rounding}", code="RQ203")
    scale, zero_point = site.array(1), site.array(2)
    if zero_point.size > 1 and np.ptp(zero_point):
        raise ModelError("its zero point differs between channels", code="RQ203")
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
    """Write dequantize. Relay does not accept uint16, and before 0.14 it returns float32 only."""
    attrs = site.attrs
    value = widen(site) if site.dtype(0) == "uint16" else site.args[0]
    real = site.op(
        "qnn.dequantize", value, *site.args[1:], out_dtype="float32", axis=int(attrs.axis)
    )
    kind = str(attrs.out_dtype)
    if kind == "float32":
        return real
    largest = float(np.finfo(kind).max)
    return site.op("cast", site.op("clip", real, a_min=-largest, a_max=largest), dtype=kind)


def widen(site: ExportSite) -> syntax.Expr:
    """Return operand 1, which has a narrower dtype, as int32."""
    return site.op("cast", site.args[0], dtype="int32")


def export_requantize(site: ExportSite) -> syntax.Expr:
    """Write requantize. Relay accepts bytes and accumulators."""
    attrs = site.attrs
    rounding, arithmetic, dtype = (
        str(each) for each in (attrs.rounding, attrs.compute_dtype, attrs.out_dtype)
    )
    axis, is_even = int(attrs.axis), rounding == Rounding.TONEAREST_EVEN.value
    value = widen(site) if site.dtype(0) in ("int16", "uint16") else site.args[0]
    if not is_even:
        return site.op(
            "qnn.requantize",
            value,
            *site.args[1:],
            axis=axis,
            rounding=rounding,
            compute_dtype=arithmetic,
            out_dtype=dtype,
        )
    if not site.exact and dtype != "uint16":
        return requantize(site, value, site.args[1:], axis, dtype)
    check_default(site)
    out_scale, out_zero = output(site, 3)
    ndim = len(site.in_dims(0))
    multiplier = divide_scales(spread(site.array(1), axis, ndim), out_scale)
    moved = subtract_zero_point(site, 0, spread(site.array(2), axis, ndim))
    return round_off(site, scale_by(site, moved, multiplier), out_zero, dtype)


# -- convolutions and products ---------------------------------------------------------------------


def check_register(dtype: str) -> str:
    """Check the dtype of sums or products.

    Raises:
        ModelError: it is int64, which cannot be written in Relay.
    """
    if dtype != "int32":
        raise ModelError(
            f"its sums or products do not fit int32, and Relay has no form for {dtype}; keep it in "
            "float, or take activations of 8 bits",
            code="RQ203",
        )
    return dtype


def sum_dtype(site: ExportSite) -> str:
    """Return the dtype of the sums of a convolution or matrix product."""
    return check_register(str(site.attrs.out_dtype))


def export_conv2d(site: ExportSite) -> syntax.Expr:
    kernel, attrs = conv_kernel(site)
    attrs["out_dtype"] = sum_dtype(site)
    return site.op("qnn.conv2d", site.args[0], kernel, *site.args[2:], **attrs)


def export_conv1d(site: ExportSite) -> syntax.Expr:
    """Write a 1-D convolution as one of height 1: NCW, OIW -> NCHW, OIHW."""
    attrs = site.attrs
    if (str(attrs.data_layout), str(attrs.kernel_layout)) != ("NCW", "OIW"):
        raise ModelError(
            f"its layouts are {attrs.data_layout} and {attrs.kernel_layout}", code="RQ203"
        )
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
        kernel_layout="OIHW",
        out_dtype=sum_dtype(site),
    )
    return site.reshape(found, shape)


def export_conv2d_transpose(site: ExportSite) -> syntax.Expr:
    kernel, attrs = transposed_kernel(site)
    attrs["out_dtype"] = sum_dtype(site)
    return site.op("qnn.conv2d_transpose", site.args[0], kernel, *site.args[2:], **attrs)


def export_dense(site: ExportSite) -> syntax.Expr:
    shape = site.in_dims(0)
    units, kind = site.in_shape(1)[0], sum_dtype(site)
    name, operands = "qnn.dense", site.args
    if site.dtype(0) not in BYTES:
        name, operands = "nn.dense", subtract_zero_points(site)
    if len(shape) != 2:
        operands = (site.reshape(operands[0], (-1, shape[-1])), *operands[1:])
    found = site.op(name, *operands, units=units, out_dtype=kind)
    return found if len(shape) == 2 else site.reshape(found, site.out_dims())


def subtract_zero_points(site: ExportSite) -> tuple[syntax.Expr, ...]:
    """Emit (data - its zero point, weight - its zero points) in int32, for data that QNN's operator
    does not accept.
    """
    ndim = len(site.in_dims(1))
    return subtract_zero_point(site, 0, site.array(2)), subtract_zero_point(
        site, 1, spread(site.array(3), 0, ndim)
    )


def export_batch_matmul(site: ExportSite) -> syntax.Expr:
    left, right = site.in_dims(0), site.in_dims(1)
    if len(left) < 3 or left[:-2] != right[:-2]:
        raise ModelError(
            f"a product of shapes {left} and {right} has no form in Relay", code="RQ203"
        )
    name, given = "qnn.batch_matmul", site.args
    if not {site.dtype(0), site.dtype(1)} <= set(BYTES):
        name, given = "nn.batch_matmul", subtract_zero_points(site)
    operands = [
        arg if len(shape) == 3 else site.reshape(arg, (-1, *shape[-2:]))
        for arg, shape in zip(given[:2], (left, right), strict=True)
    ]
    found = site.op(name, *operands, *given[2:], out_dtype=sum_dtype(site), transpose_b=True)
    return found if len(left) == 3 else site.reshape(found, site.out_dims())


# -- elementwise -----------------------------------------------------------------------------------


def is_relay_mode(site: ExportSite) -> bool:
    """Return whether the operator has Relay's mode: UPWARD in int64.

    Raises:
        ModelError: it has neither Relay's mode nor this package's default.
    """
    if has_mode(site, Rounding.UPWARD, Arithmetic.INT64):
        return True
    check_default(site)
    return False


def binary_dtype(site: ExportSite) -> str:
    return str(site.attrs.out_dtype) or site.dtype(0)


def is_narrow(site: ExportSite) -> bool:
    """Return whether operands and result have one dtype and per-tensor scales, which Relay's
    operator supports in all releases.
    """
    dtypes = {site.dtype(0), site.dtype(1), binary_dtype(site)}
    return len(dtypes) == 1 and all(site.array(index).size == 1 for index in (2, 3, 4, 5))


def binary(name: str, exactly: Export, nearly: Export | None = None) -> Export:
    """Write Relay's operator if it computes the same, or nearly the same.

    `nearly` writes it for dtypes or scales that Relay's operator lacks.
    """

    def export(site: ExportSite) -> syntax.Expr:
        attrs = site.attrs
        if is_relay_mode(site):
            if len({site.dtype(0), site.dtype(1), binary_dtype(site)}) > 1:
                raise ModelError("its operands and result differ in dtype", code="RQ203")
            axes = {"lhs_axis": int(attrs.lhs_axis), "rhs_axis": int(attrs.rhs_axis)}
            return site.op(name, *site.args, **axes)
        if not site.exact and is_narrow(site):
            return site.op(name, *site.args)
        if site.exact or nearly is None or binary_dtype(site) == "uint16":
            return exactly(site)
        return nearly(site)

    return export


def sum_nearly(name: str) -> Export:
    """Write the sum of an accumulator and a byte as Relay's operator in int32, in fractions of the
    result's step.

    So nothing saturates before the sum, and only one rounding matters.

        qnn.add(acc, byte)  ->  qnn.requantize(qnn.add(qnn.requantize(acc), cast(byte)))
    """

    def export(site: ExportSite) -> syntax.Expr:
        operands: list[syntax.Expr] = []
        given: list[syntax.Expr] = []
        scale, _ = output(site, 6)
        steps = 2 ** (SUM_BITS - np.iinfo(binary_dtype(site)).bits)
        fine = (site.number(scale / np.float32(steps), "float32"), site.number(0, "int32"))
        for index, axis in enumerate((int(site.attrs.lhs_axis), int(site.attrs.rhs_axis))):
            value, own = site.args[index], site.args[2 + 2 * index : 4 + 2 * index]
            if site.dtype(index) != "int32":
                value = site.op("cast", value, dtype="int32")
            if site.dtype(index) == "int32" or site.array(2 + 2 * index).size > 1:
                value = requantize(site, value, (*own, *fine), axis, "int32")
                own = fine
            operands.append(value)
            given += own
        total = site.op(name, *operands, *given, *fine)
        return requantize(site, total, (*fine, *site.args[6:8]), -1, binary_dtype(site))

    return export


def sides(site: ExportSite) -> list[tuple[syntax.Expr, np.ndarray]]:
    """Return (value - zero point, scale) of both operands, with scales in shapes that broadcast."""
    found = []
    for index, axis in enumerate((int(site.attrs.lhs_axis), int(site.attrs.rhs_axis))):
        ndim = len(site.in_dims(index))
        scale, zero = (spread(site.array(2 + 2 * index + i), axis, ndim) for i in (0, 1))
        found.append((subtract_zero_point(site, index, zero), scale))
    return found


def add_exactly(sign: int) -> Export:
    """Write t = fma(r, m_r, l * m_l). The fma is a sum in float64."""

    def export(site: ExportSite) -> syntax.Expr:
        (left, left_scale), (right, right_scale) = sides(site)
        out_scale, zero_point = output(site, 6)
        first = divide_scales(left_scale, out_scale)
        second = divide_scales(right_scale, out_scale) * np.float32(sign)
        info = np.iinfo(binary_dtype(site))
        limit = max(zero_point - info.min, info.max - zero_point) + 1
        if not sum_rounds_once(first, second, list_summands(site, 1), limit):
            raise ModelError(
                "the scales of its operands are too far apart to add exactly; exact=False adds "
                "them",
                code="RQ203",
            )
        t = site.op("cast", scale_by(site, left, first), dtype="float64")
        factor = site.constant(second.astype("float64"), "multiplier")
        product = site.op("multiply", site.op("cast", right, dtype="float64"), factor)
        total = site.op("cast", site.op("add", t, product), dtype="float32")
        return round_off(site, total, zero_point, binary_dtype(site))

    return export


def list_summands(site: ExportSite, index: int) -> np.ndarray | None:
    """Return all values (q - zero point) of an operand of a sum. None if they are too many."""
    info, zero_point = np.iinfo(site.dtype(index)), site.array(3 + 2 * index)
    if info.bits > 16:
        return None
    low, high = info.min - int(zero_point.max()), info.max - int(zero_point.min())
    return np.arange(low, high + 1)


def sum_rounds_once(
    first: np.ndarray, second: np.ndarray, values: np.ndarray | None, limit: int
) -> bool:
    """Return whether double rounding gives the same integer, within +-limit, for all integers l and
    r.

    The sum is `float32(l * first) + r * second`. It is rounded to float64 and then to float32,
    instead of directly to float32. A summand of at least `least` has no bit below the last bit of a
    float64 of the size of the sum. A smaller float32 may be cut off. This matters only if the other
    summand is equally close to a threshold at which float32 values round to another integer. A
    threshold is half a unit of float32 next to a half.

    Args:
        values: All values of r. None if they are too many to try.
    """
    bits = math.ceil(math.log2(limit))
    least = 2.0 ** (bits - (DOUBLE_BITS - FLOAT_BITS) - 1)
    if np.any((np.abs(second) < least) & (second != 0)):
        return False
    cut = (np.abs(first) < least) & (first != 0)
    if not cut.any():
        return True
    if values is None:
        return False
    products = values * np.unique(second.astype("float64"))[:, None]
    distance = np.abs(products - np.floor(products) - 0.5)
    return bool((distance > least + 2.0 ** (bits - FLOAT_BITS)).all())


def multiply_exactly(site: ExportSite) -> syntax.Expr:
    """Emit (l - z_l) * (r - z_r) in int32, requantized."""
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
    dtype = str(site.call.ty.dtype)
    dtypes = {str(field.dtype) for field in site.call.args[0].ty.fields}
    if is_relay_mode(site) or (not site.exact and dtypes == {dtype}):
        packed = [site.tuple_of(each) for each in (parts, scales, zeros)]
        return site.op("qnn.concatenate", *packed, *site.args[3:], axis=axis)
    out_scale, out_zero = output(site, 3)
    moved = []
    for part, scale, zero in zip(parts, site.fields(1), site.fields(2), strict=True):
        if (float(scale), int(zero)) == (float(out_scale), out_zero):
            moved.append(part)
            continue
        multiplier = divide_scales(scale.reshape(()), out_scale)
        real = scale_by(site, without_zero_point(site, part, dtype, zero.reshape(())), multiplier)
        moved.append(round_off(site, real, out_zero, dtype))
    return site.op("concatenate", site.tuple_of(moved), axis=axis)


def export_leaky_relu(site: ExportSite) -> syntax.Expr:
    alpha = float(site.attrs.alpha)
    if is_relay_mode(site):
        return site.op("qnn.leaky_relu", *site.args, alpha=alpha)
    return bend_negatives(site, np.array(alpha))


def export_prelu(site: ExportSite) -> syntax.Expr:
    """Write prelu. Relay's own prelu computes in float only."""
    slopes, rank = site.array(5).astype("float64"), site.call.ty.ndim
    behind = rank - 1 - int(site.attrs.axis) % rank
    return bend_negatives(site, slopes.reshape(-1, *[1] * behind) if slopes.ndim else slopes)


def bend_negatives(site: ExportSite, slopes: np.ndarray) -> syntax.Expr:
    """Emit x, or x * slopes where x is below 0, in the affine space of the output. Slopes are
    float64 and broadcast.
    """
    scale, zero_point = site.array(1).reshape(()), site.array(2).reshape(())
    out_scale, out_zero = output(site, 3)
    moved = subtract_zero_point(site, 0, zero_point)
    steep = divide_scales(scale, out_scale)
    ratio = scale.astype("float64") * slopes / out_scale.astype("float64")
    chosen = site.op(
        "where",
        site.op("less", moved, site.number(0, "int32")),
        scale_by(site, moved, ratio.astype("float32")),
        scale_by(site, moved, steep),
    )
    return round_off(site, chosen, out_zero, site.dtype(0))


# -- averages --------------------------------------------------------------------------------------


def average(site: ExportSite, total: syntax.Expr, count: int, dtype: str) -> syntax.Expr:
    """Divide a sum of integers without zero points by its count, in the output's affine space: m' =
    m / float32(count).
    """
    scale, (out_scale, out_zero) = site.array(1).reshape(()), output(site, 3)
    if not site.exact and dtype != "uint16":
        mean_scale = site.constant(scale / np.float32(count), "scale")
        given = (mean_scale, site.number(0, "int32"), *site.args[3:5])
        return requantize(site, total, given, -1, dtype)
    multiplier = divide_scales(scale, out_scale) / np.float32(count)
    return round_off(site, scale_by(site, total, multiplier), out_zero, dtype)


def keeps_space(site: ExportSite, dtype: str) -> bool:
    """Return whether the result has the dtype, scale and zero point of operand 1."""
    return dtype == site.dtype(0) and all(
        site.array(index).item() == site.array(index + 2).item() for index in (1, 2)
    )


def pool_integers(site: ExportSite, dtype: str, **attrs: Any) -> syntax.Expr:
    """Emit cast, nn.avg_pool2d, cast, as TVM's TFLite frontend does. It truncates."""
    wide = site.op("cast", site.args[0], dtype="int32")
    return site.op("cast", site.op("nn.avg_pool2d", wide, **attrs), dtype=dtype)


#: axes over which a mean is an average pool -> data layout
POOLED_AXES = {(1, 2): "NHWC", (2, 3): "NCHW"}


def export_mean(site: ExportSite) -> syntax.Expr:
    check_default(site)
    shape = site.in_dims(0)
    axes = tuple(axis % len(shape) for axis in ints(site.attrs.axes)) or tuple(range(len(shape)))
    dtype = str(site.attrs.out_dtype) or site.dtype(0)
    layout = POOLED_AXES.get(tuple(sorted(axes))) if len(shape) == 4 else None
    if layout is not None and not site.exact and keeps_space(site, dtype):
        window = tuple(known_size(shape[layout.index(axis)]) for axis in "HW")
        found = pool_integers(site, dtype, pool_size=window, layout=layout)
        return found if site.attrs.keepdims else site.reshape(found, site.out_dims())
    moved = subtract_zero_point(site, 0, site.array(2).reshape(()))
    total = site.op("sum", moved, axis=axes, keepdims=bool(site.attrs.keepdims))
    count = int(np.prod([known_size(shape[axis]) for axis in axes]))
    check_register(choose_total_dtype(site.dtype(0), site.call.args[2], count))
    return average(site, total, count, dtype)


def export_avg_pool2d(site: ExportSite) -> syntax.Expr:
    """Write an average pool: the sum of each window is a convolution with ones."""
    attrs = site.attrs
    included = bool(attrs.count_include_pad)
    if has_mode(site, Rounding.UPWARD, Arithmetic.INT64):
        common = pool_attrs(site)
        return site.op("qnn.avg_pool2d", *site.args, **common, count_include_pad=included)
    check_default(site)
    pads = any(ints(attrs.padding))
    if not site.exact and keeps_space(site, site.dtype(0)) and not (pads and included):
        return pool_integers(site, site.dtype(0), **pool_attrs(site))
    if attrs.ceil_mode or (pads and not included):
        raise ModelError("it averages over windows of different sizes", code="RQ203")
    layout, window = str(attrs.layout), ints(attrs.pool_size)
    check_register(choose_total_dtype(site.dtype(0), site.call.args[2], int(np.prod(window))))
    channels = known_size(site.in_dims(0)[layout.index("C")])
    is_last = layout.endswith("C")
    kernel = (*window, channels, 1) if is_last else (channels, 1, *window)
    moved = subtract_zero_point(site, 0, site.array(2).reshape(()))
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
    return look_up(site, site.args[1])


def export_as_table(site: ExportSite) -> syntax.Expr:
    """Write an elementwise operator on a tensor of bytes, which has no row, as a table of all its
    results.
    """
    dtype, name = site.dtype(0), site.call.op.name.removeprefix("relax.qnn.")
    if dtype not in BYTES:
        raise ModelError(f"a table needs 8-bit data, the input is {dtype}", code="RQ203")
    parameters = [site.array(index) for index in range(1, len(site.call.args))]
    if any(parameter.size != 1 for parameter in parameters):
        raise ModelError(
            "its parameters differ between channels; a table has one for all", code="RQ203"
        )
    patterns = np.arange(256, dtype="uint8").view(dtype)
    results = evaluate_qnn(name, [patterns, *parameters], site.call, site.name)
    return look_up(site, site.constant(results, "table"))


def look_up(site: ExportSite, table: syntax.Expr) -> syntax.Expr:
    """Emit take(table, x & 255): the entry of a bit pattern."""
    index = site.op("cast", site.args[0], dtype="int32")
    if site.dtype(0) == "int8":
        index = site.op("bitwise_and", index, site.number(255, "int32"))
    return site.op("take", table, index, axis=0, mode="fast")


QUANTIZED_EXPORTS: Exports = {
    **{
        operator.full_name: export_as_table
        for operator in OPERATORS
        if operator.is_elementwise and operator.float_form is not None
    },
    "relax.qnn.quantize": export_quantize,
    "relax.qnn.dequantize": export_dequantize,
    "relax.qnn.requantize": export_requantize,
    "relax.qnn.conv1d": export_conv1d,
    "relax.qnn.conv2d": export_conv2d,
    "relax.qnn.conv2d_transpose": export_conv2d_transpose,
    "relax.qnn.dense": export_dense,
    "relax.qnn.batch_matmul": export_batch_matmul,
    "relax.qnn.add": binary("qnn.add", add_exactly(1), sum_nearly("qnn.add")),
    "relax.qnn.subtract": binary("qnn.subtract", add_exactly(-1), sum_nearly("qnn.subtract")),
    "relax.qnn.mul": binary("qnn.mul", multiply_exactly),
    "relax.qnn.concatenate": export_concatenate,
    "relax.qnn.leaky_relu": export_leaky_relu,
    "relax.qnn.prelu": export_prelu,
    "relax.qnn.mean": export_mean,
    "relax.qnn.avg_pool2d": export_avg_pool2d,
    "relax.qnn.lookup": export_lookup,
}
