"""After calibration: calibrated model + a few samples -> the model with operators in float whose
values 8 bits cannot hold.

Squares, magnitudes, logarithms and exponentials have a wide range: most of their values are smaller
than one step. Such operators compute no products, so float costs little. They are found before
anything is quantized, by the error that each one adds by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from relayquant.analysis.own_error import OwnError, measure_own_errors
from relayquant.config import QConfigMapping
from relayquant.flow.refine.prepared_edit import change_operators
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.dialect.cost import count_macs, static_dims
from relayquant.ir.ledger import WIDE_ORIGIN
from relayquant.ir.plan import OperatorPlan
from relayquant.stages.annotation import plan_without
from relayquant.stages.prepared import PreparedModel

#: SQNR in dB below which an operator's own result is poor. Operators of networks that quantize well
#: have 25 to 45 dB.
POOR = 20.0
#: dB that its result gains in float at least
LEAST_GAIN = 6.0
#: multiply-adds of an integer product that take as long as one element of an operator in float
ELEMENT_WORK = 50
#: share of the model's multiply-adds that operators in float may take together
MOST_WORK = 0.25


def keep_wide(
    prepared: PreparedModel,
    batches: Iterable[Mapping[str, np.ndarray]],
    settings: QuantizeSettings,
    calibrate: Callable[[PreparedModel], PreparedModel],
) -> PreparedModel:
    """Return the calibrated model with these operators in float; all others keep their parameters.

    Args:
        prepared: A calibrated model with its mapping.
        batches: A few samples, inputs of the float model by name.
        settings: With `strict`, or integer inputs or outputs, nothing changes.
        calibrate: See `change_operators`.
    """
    if settings.promises_integers:
        return prepared
    found = find_wide(prepared, batches)
    return change_operators(prepared, dict.fromkeys(found), calibrate, found) if found else prepared


def find_wide(
    prepared: PreparedModel, batches: Iterable[Mapping[str, np.ndarray]]
) -> dict[str, str]:
    """Return the operators that go to float because of their values, each with the reason.

    Operators that the user's mapping selects by type or name stay as they are.
    """
    poor = [
        error
        for error in measure_own_errors(prepared, batches)
        if error.rounded < POOR and error.gain >= LEAST_GAIN
    ]
    if not poor:
        return {}
    mapping = prepared.mapping or QConfigMapping()
    find_remaining = plan_without(
        prepared.source, prepared.backend, mapping, prepared.integer_outputs
    )
    found: dict[str, str] = {}
    for error in sorted(poor, key=lambda error: error.rounded):
        if may_move(prepared, find_remaining({*found, error.name})):
            found[error.name] = describe(error)
    return found


def describe(error: OwnError) -> str:
    """Say why an operator runs in float, as part of a sentence."""
    exact = "" if math.isinf(error.floating) else f", {error.floating:.1f} dB in float"
    return f"{WIDE_ORIGIN}: its result has {error.rounded:.1f} dB on integers{exact}"


def may_move(prepared: PreparedModel, remaining: Sequence[OperatorPlan]) -> bool:
    """Whether the operators that do not remain on integers take little time in float, and the user
    asked for none of them by type or name.
    """
    graph = prepared.source
    names = {operator.name for operator in remaining}
    moved = [op for op in prepared.plan.operators if op.quantized and op.name not in names]
    if any(operator.is_explicit for operator in moved):
        return False
    elements = sum(math.prod(static_dims(graph.vars[op.name].ty)) for op in moved)
    macs = sum(count_macs(binding.value) for binding in graph.bindings)
    return elements * ELEMENT_WORK <= MOST_WORK * macs
