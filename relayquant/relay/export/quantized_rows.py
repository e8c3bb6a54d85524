"""Relay writer, rows: the operators of `relayquant.ir.dialect`; `affine` has how they round."""

from __future__ import annotations

import numpy as np

from relayquant.base.qtypes import Rounding
from relayquant.errors import ModelError
from relayquant.ir.dialect import OPERATORS
from relayquant.ir.reference.interpreter import evaluate_qnn
from relayquant.relay import syntax
from relayquant.relay.export.affine import (
    check_default,
    check_register,
    divide_scales,
    is_relay_mode,
    output,
    requantize,
    round_off,
    scale_by,
    spread,
    subtract_zero_point,
    without_zero_point,
)
from relayquant.relay.export.averages import export_avg_pool2d, export_mean
from relayquant.relay.export.base import Exports, ExportSite, ints
from relayquant.relay.export.float_rows import conv_kernel, multiply_batches, transposed_kernel
from relayquant.relay.export.sums import add_exactly, binary, multiply_exactly, sum_nearly

#: dtypes of data that QNN's matrix products support in all releases
BYTES = ("int8", "uint8")


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
    name, operands = "qnn.batch_matmul", site.args
    if not {site.dtype(0), site.dtype(1)} <= set(BYTES):
        name, operands = "nn.batch_matmul", subtract_zero_points(site)
    kind = sum_dtype(site)
    return multiply_batches(site, name, operands, out_dtype=kind, transpose_b=True)


# -- elementwise -----------------------------------------------------------------------------------


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


# -- tables ----------------------------------------------------------------------------------------


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
