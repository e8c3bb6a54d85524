"""Biases of integer operators: int32 in the units of the sums that they are added to, data scale x
weight scale; and what becomes of one that those units do not suit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from relayquant.base.qtypes import QParams, Role
from relayquant.ir.ops import Quantized, QuantOp
from relayquant.ir.rewrite import Skip

#: largest |bias| in units of its scale; leaves the other half of int32 to the accumulator
BIAS_LIMIT = 2**30
#: of a result that is not quantized: how much of a bias its rounding may be
LEAST_SHARE = 2.0**-8
#: how far scales may differ that are the same number, rounded by different tools
UNIT_TOLERANCE = 2.0**-20
#: smallest scale of an accumulator: `accumulator_qparams`
TINY = float(np.finfo("float32").tiny)


def is_lost(
    bias: np.ndarray, units: np.ndarray, step: float, still: np.ndarray | bool = True
) -> bool:
    """Whether rounding a bias, float64, to its units moves it by more than half a step of the
    result, where the sums are `still`: no data changes them.

    Elsewhere a step of the data, times a weight, moves the sum by more than that.
    """
    moved = np.abs(np.rint(bias / units) * units - bias)
    return bool(((moved > step / 2) & still).any())


def refine_units(
    units: QParams, bias: np.ndarray, step: float | None, still: np.ndarray | bool
) -> QParams:
    """Parameters of a bias: the units of the accumulator, or finer or larger ones where int32 does
    not hold the bias in them, or where it is lost in a result of this step.

    An operator whose bias has other units stays in float: `find_bias_conflict`.

    Args:
        units: Of the accumulator.
        bias: float32, one number or one of each channel.
        step: The finest of the result; None if there is none.
        still: Whether no data changes the sums, of all channels or of each.
    """
    real = bias.reshape(-1).astype("float64")
    unit = units.scale.astype("float64")
    is_held = np.abs(real / unit).max(initial=0) < 2**31
    if is_held and (step is None or not is_lost(real, unit, step, still)):
        return units
    largest = np.abs(real).max() if unit.ndim == 0 else np.abs(real)
    scale = np.where(largest > 0, np.maximum(largest / BIAS_LIMIT, TINY), unit)
    return replace(units, scale=scale.astype("float32"))


def find_bias_conflict(pattern: QuantOp, operands: Mapping[str, Quantized]) -> Skip | None:
    """Declines a bias that has other units than the sums it is added to."""
    biases = [part.name for part in pattern.operands if part.role is Role.BIAS]
    if not biases or not {"data", "weight", *biases} <= operands.keys():
        return None
    units = operands["data"].qparams.scale.astype("float64") * operands["weight"].qparams.scale
    if all(has_units(operands[name].qparams, units) for name in biases):
        return None
    return Skip(
        "its bias is too large for int32 in steps of data scale x weight scale, or smaller than "
        "one step",
        "give samples in which the data of this operator is not always zero",
    )


def has_units(have: QParams, units: np.ndarray) -> bool:
    """Whether the integers of a bias count in units, float64, of the accumulator."""
    sizes = {have.scale.size, units.size} - {1}
    return (
        len(sizes) <= 1
        and not have.zero_point.any()
        and np.allclose(have.scale, units, rtol=UNIT_TOLERANCE, atol=TINY)
    )
