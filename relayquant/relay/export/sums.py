"""Relay writer, rows: sums and products of two tensors of integers."""

from __future__ import annotations

import math

import numpy as np

from relayquant.errors import ModelError
from relayquant.ir.dialect.accumulator_range import choose_product_dtype
from relayquant.relay import syntax
from relayquant.relay.export.affine import (
    check_register,
    divide_scales,
    is_relay_mode,
    output,
    requantize,
    round_off,
    scale_by,
    spread,
    subtract_zero_point,
)
from relayquant.relay.export.base import Export, ExportSite

#: Bits of the range of a result when accumulators need not be added exactly: a byte in steps of
#: 1/4096, which a float32 holds, with the same headroom on both sides in an int32.
SUM_BITS = 20
#: bits of a float64 and a float32
DOUBLE_BITS, FLOAT_BITS = 53, 24


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
        if not sum_rounds_once(first, second, list_summands(site), limit):
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


def list_summands(site: ExportSite) -> np.ndarray | None:
    """Return all values (q - zero point) of a sum's second operand. None if they are too many."""
    info, zero_point = np.iinfo(site.dtype(1)), site.array(5)
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
