"""After calibration: calibrated model + a few samples -> the model whose recurrent layers read sums
of int16 data, if the outputs follow the float model much better so.

A recurrent layer carries the error of its inputs from step to step. The product that makes its
inputs runs once for all steps, and takes less time than the product of the hidden state, which runs
in each step. So int16 data costs both networks 15 % of their time, where these products in float
would cost 45 %. SQNR on other samples (dB), two draws:

    network        int8 data     int16 data    int16 data, weights not fitted anew
    BeatNet        31.4, 34.5    38.3, 38.8    38.3, 39.3
    Resemblyzer    29.3, 30.0    32.6, 32.3    29.3, 31.8
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from tvm import relax

from relayquant.analysis.sensitivity import Simulation
from relayquant.base.qtypes import QSpec, Scheme
from relayquant.config import Effort, QConfig, TensorConfig
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import format_count
from relayquant.flow.refine.prepared_edit import change_operators
from relayquant.flow.refine.run_time_ranges import find_weight
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.dialect.qnn.recurrent import RECURRENT_OPERATORS
from relayquant.ir.plan import OperatorPlan, Plan
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import free_vars
from relayquant.ir.rewrite.moves import MOVES
from relayquant.stages.prepared import PreparedModel

INT16 = QSpec("int16", Scheme.SYMMETRIC)
#: SQNR in dB of the worst output from which on nothing is tried
GOOD = 35.0
#: dB that the worst output gains at least
LEAST_GAIN = 3.0


def widen_recurrent_data(
    prepared: PreparedModel,
    batches: Iterable[Mapping[str, np.ndarray]],
    settings: QuantizeSettings,
    calibrate: Callable[[PreparedModel], PreparedModel],
) -> PreparedModel:
    """Return the calibrated model with int16 data of the products that recurrent layers read, if
    the worst output gains `LEAST_GAIN`. Then all is calibrated anew.

    Args:
        prepared: A calibrated model with its mapping.
        batches: A few samples, inputs of the float model by name.
        settings: With a mapping of the user's, dtypes for inputs or outputs, or effort "fast",
            nothing changes.
        calibrate: See `change_operators`.
    """
    is_asked = settings.qconfig_mapping is not None
    if is_asked or settings.input_dtypes or settings.output_dtypes or settings.level is Effort.FAST:
        return prepared
    changes = find_wider_data(prepared)
    if not changes:
        return prepared
    data = open_dataset([*batches], describe_inputs(prepared.mod))
    simulation = Simulation(prepared, data)
    quantized = [operator for operator in prepared.plan.operators if operator.quantized]
    before = simulation.sqnr(quantized)
    if before >= GOOD:
        return prepared
    after = max(
        simulation.sqnr([*pass_through(prepared.plan, changes, is_fitted=is_fitted)])
        for is_fitted in (True, False)
    )
    if after - before < LEAST_GAIN:
        return prepared
    # Weights that were fitted to data of 8 bits need not suit more.
    wider = calibrate(change_operators(prepared, changes, calibrate))
    count = format_count(len(changes), "product")
    text = f"int16 data of {count}: {before:.1f} dB before, {after:.1f} dB with exact data"
    return replace(wider, choices={**wider.choices, "recurrent": text})


def pass_through(plan: Plan, names: Collection[str], *, is_fitted: bool) -> Iterator[OperatorPlan]:
    """Yield the quantized operators. The ones in `names` read data that is not rounded. Unless
    `is_fitted`, their weights are rounded to nearest.
    """
    keys = {dict(plan.operator(name).operands)["data"] for name in names}
    for operator in plan.operators:
        if not operator.quantized:
            continue
        operands = tuple((part, key) for part, key in operator.operands if key not in keys)
        output = None if operator.output in keys else operator.output
        passed = replace(operator, operands=operands, output=output)
        # `Simulation` finds fitted constants by the operator's name.
        is_known = is_fitted or operator.name not in names
        yield passed if is_known else replace(passed, name="")


def find_wider_data(prepared: PreparedModel) -> dict[str, QConfig]:
    """Return a QConfig with int16 data for each product that recurrent layers read, where the
    backend has one.
    """
    plan, graph, found = prepared.plan, Graph(prepared.mod), {}
    names = {name for layer in list_recurrent(graph) for name in list_sources(graph, layer)}
    for operator in plan.operators:
        keys, weight = dict(operator.operands), find_weight(prepared, operator)
        if operator.name not in names or not operator.quantized or operator.is_explicit:
            continue
        if operator.has_float_data or weight is None or "data" not in keys:
            continue
        group = plan.group(keys["data"])
        qconfig = QConfig(TensorConfig(INT16, group.observer), weight)
        row = prepared.backend.find_pattern(operator.pattern)
        if not group.is_fixed and row.find_dtypes(qconfig) is not None:
            found[operator.name] = qconfig
    return found


def list_recurrent(graph: Graph) -> Iterator[relax.Var]:
    """List the recurrent layers of a module."""
    for binding in graph.bindings:
        if graph.op_name(binding.var) in RECURRENT_OPERATORS:
            yield binding.var


def list_sources(graph: Graph, layer: relax.Var) -> Iterator[str]:
    """List the values that the inputs of a recurrent layer are moved from."""
    waiting = free_vars(graph.values[layer].args[0])
    while waiting:
        value, *waiting = waiting
        if value in graph.values:
            yield value.name
        if graph.op_name(value) in MOVES:
            waiting += free_vars(graph.values[value])
