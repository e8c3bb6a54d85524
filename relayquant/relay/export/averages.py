"""Relay writer, rows: means and average pools of integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from relayquant.base.qtypes import Arithmetic, Rounding
from relayquant.errors import ModelError
from relayquant.ir.dialect.accumulator_range import choose_total_dtype
from relayquant.relay import syntax
from relayquant.relay.export.affine import (
    check_default,
    check_register,
    divide_scales,
    has_mode,
    output,
    requantize,
    round_off,
    scale_by,
    subtract_zero_point,
)
from relayquant.relay.export.base import ExportSite, ints
from relayquant.relay.export.float_rows import known_size, pool_attrs


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
