"""Runs a model through all stages; gives the integers of every quantized value at each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

import relayquant as rq
from relayquant.ir.reference import run_values
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.inputs import bind_inputs
from relayquant.ir.reference.interpreter import execute_binding, record_value
from relayquant.ir.rewrite.expressions import list_bindings


@dataclass(frozen=True, eq=False)
class Stages:
    """A calibrated model, its reference form and its integer form."""

    prepared: rq.PreparedModel
    reference: tvm.IRModule
    integer: tvm.IRModule


def run_stages(mod: tvm.IRModule, dataset: Any, params: Any = None, **options: Any) -> Stages:
    """prepare, calibrate, convert and lower; `options` as for prepare."""
    prepared = rq.prepare(mod, params, **options)
    prepared = rq.calibrate(prepared, dataset)
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


def run_from(
    mod: tvm.IRModule, inputs: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """All values of a module whose operators see the values `given` in place of those computed."""
    frame = Frame(mod)
    bind_inputs(frame, mod["main"].params, inputs)
    values: dict[str, np.ndarray] = {}
    for binding in list_bindings(mod["main"]):
        value = execute_binding(frame, binding)
        record_value(values, binding.var.name, value)
        if binding.var.name in given:
            frame.values[binding.var] = given[binding.var.name].astype(value.dtype)
    return values


def compare_stages(
    stages: Stages, inputs: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """(value, simulated, reference, integer) of every rounded value, in units of its scale.

    Simulation and reference form compute every value from the integers of the integer module, so
    that each differs by its own rounding alone, one step at a tie. Carried on, such a step is as
    many steps as the next operator makes of it; and which values are near enough to a tie is up to
    the order in which this machine's BLAS adds floats.
    """
    integer = run_values(stages.integer, inputs)
    found: dict[str, np.ndarray] = {}
    for group in stages.prepared.plan.activations:
        for name in (*group.points, *group.clamped) if group.base is None else ():
            value = integer.get(f"{name}.q", integer.get(name))
            if value is not None and value.dtype.kind in "iu":
                found[name] = value
    given = {f"{name}.q": value for name, value in found.items()}
    prepared = stages.prepared
    arguments = prepared.graph.arguments(prepared.parameters, prepared.constants)
    simulated = run_from(prepared.graph.mod, {**inputs, **arguments}, given)
    reference = run_from(stages.reference, inputs, given)
    for name, value in found.items():
        if (key := f"{name}.q") in simulated:
            yield name, *(v.astype("int64") for v in (simulated[key], reference[key], value))
