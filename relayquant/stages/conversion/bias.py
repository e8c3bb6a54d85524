"""Biases of integer operators: float bias -> int32 in units of the accumulator (data scale x
weight scale), or other units if these do not suit the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from relayquant.base.qtypes import QParams, Role
from relayquant.ir.ops import Quantized, QuantOp
from relayquant.ir.rewrite import Skip

#: largest |bias| in units of its scale; the other half of int32 is left to the accumulator
BIAS_LIMIT = 2**30
#: allowed rounding error of a bias, relative to it, if the result is not quantized
LEAST_SHARE = 2.0**-8
#: relative difference up to which two scales, rounded by different tools, count as equal
UNIT_TOLERANCE = 2.0**-20
#: smallest scale of an accumulator: `accumulator_qparams`
TINY = float(np.finfo("float32").tiny)


def is_lost(
    bias: np.ndarray, units: np.ndarray, step: float, still: np.ndarray | bool = True
) -> bool:
    """Whether rounding a bias (float64) to its units moves it by more than half a step of the
    result.

    This is checked only for sums that no data changes (`still`). Otherwise one step of the data,
    times a weight, moves the sum by more than the rounding does.
    """
    moved = np.abs(np.rint(bias / units) * units - bias)
    return bool(((moved > step / 2) & still).any())


def refine_units(
    units: QParams, bias: np.ndarray, step: float | None, still: np.ndarray | bool
) -> QParams:
    """Return the parameters of a bias: the units of the accumulator, or finer or coarser units.

    Other units are used if int32 cannot hold the bias in units of the accumulator, or if rounding
    would lose the bias in a result with this step. An operator whose bias has other units stays in
    float: see `find_bias_conflict`.

    Args:
        units: Scale of the accumulator.
        bias: float32, one number or one per channel.
        step: The finest step of the result; None if there is none.
        still: Whether no data changes the sums, for all channels or for each.
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
    """Decline a bias whose units differ from the units of its accumulator."""
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
    """Whether the integers of a bias are in the accumulator's units, float64."""
    sizes = {have.scale.size, units.size} - {1}
    return (
        len(sizes) <= 1
        and not have.zero_point.any()
        and np.allclose(have.scale, units, rtol=UNIT_TOLERANCE, atol=TINY)
    )
