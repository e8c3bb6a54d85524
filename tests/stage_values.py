"""Runs a model through all stages; gives the integers of every quantized value at each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

import relayquant as rq
from relayquant.reference import run_values


@dataclass(frozen=True, eq=False)
class Stages:
    """A calibrated model, its reference form and its integer form."""

    prepared: rq.PreparedModel
    reference: tvm.IRModule
    integer: tvm.IRModule


def run_stages(
    mod: tvm.IRModule,
    dataset: Any,
    params: Any = None,
    *,
    order: rq.Order | None = None,
    **options: Any,
) -> Stages:
    """prepare, calibrate in `order`, convert and lower; `options` as for prepare.

    The simulation does not round biases: at a tie it is a step apart from the integers, and what
    follows carries that on. Whether there is one depends on the ranges, and so on the order.
    """
    prepared = rq.prepare(mod, params, **options)
    rq.calibrate(prepared, dataset, order=order)
    reference = rq.convert_to_reference(prepared)
    return Stages(prepared, reference, rq.lower(reference, prepared.backend))


def run_simulated(
    prepared: rq.PreparedModel, inputs: Mapping[str, np.ndarray], *, pass_through: bool = False
) -> dict[str, np.ndarray]:
    """All values of the calibration graph, with the picked parameters or in float."""
    arguments = (
        prepared.graph.arguments()
        if pass_through
        else prepared.graph.arguments(prepared.parameters, prepared.constants)
    )
    return run_values(prepared.graph.mod, {**inputs, **arguments})


def compare_stages(
    stages: Stages, inputs: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """(value, simulated, reference, integer) of every rounded value, in units of its scale."""
    simulated = run_simulated(stages.prepared, inputs)
    reference = run_values(stages.reference, inputs)
    integer = run_values(stages.integer, inputs)
    for group in stages.prepared.plan.activations:
        if group.base is not None:
            continue
        for name in (*group.points, *group.clamped):
            key = f"{name}.q"
            found = integer.get(key, integer.get(name))
            if key in simulated and found is not None and found.dtype.kind in "iu":
                yield (
                    name,
                    simulated[key].astype("int64"),
                    reference[key].astype("int64"),
                    found.astype("int64"),
                )
