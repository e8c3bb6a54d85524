"""Relay writer: rounding modes, and arithmetic between affine spaces.

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

import numpy as np

from relayquant.base.axes import shape_along
from relayquant.base.qtypes import Arithmetic, Rounding
from relayquant.errors import ModelError
from relayquant.relay import syntax
from relayquant.relay.export.base import ExportSite
from relayquant.relay.export.releases import has_attribute

#: 1.5 * 2^23: adding it in float32 rounds |t| < 2^22 to an integer, half to even.
ROUNDING_MAGIC = 12582912
#: Widest clip bounds for this rounding.
MAX_MAGIC = 2**22


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


def is_relay_mode(site: ExportSite) -> bool:
    """Return whether the operator has Relay's mode: UPWARD in int64.

    Raises:
        ModelError: it has neither Relay's mode nor this package's default.
    """
    if has_mode(site, Rounding.UPWARD, Arithmetic.INT64):
        return True
    check_default(site)
    return False
