"""Diagnosis of a value that is not finite in calibration: prepared model + data -> the operator
that computed it from finite numbers, and the largest constant it reads; or another order of
calibration, where rounding alone is to blame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import relax

from relayquant.config import Order
from relayquant.config.observers.base import NotFiniteError
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import DataError, format_count
from relayquant.ir.plan import Plan
from relayquant.ir.reference import run_values
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.constants import LARGEST, count_huge
from relayquant.ir.rewrite.function import read_sources
from relayquant.ir.rewrite.graph import constant_value, free_vars
from relayquant.stages.prepared import PreparedModel


def avoid_rounding(
    error: NotFiniteError, prepared: PreparedModel, dataset: Any, order: Order, is_free: bool
) -> Order:
    """The order to calibrate in instead, where only the rounding of earlier values makes a value
    not finite: ranges of the float model. `is_free`: whether nobody asked for this order.

    Raises:
        DataError: what is wrong.
    """
    cause = find_cause(error, prepared, dataset)
    if cause is None and order is Order.TOPOLOGICAL:
        if is_free:
            return Order.PARALLEL
        cause = DataError(
            f"Value {error.value!r} holds NaN or infinity once the values before it are rounded, "
            "as order=Order.TOPOLOGICAL does: a logarithm, a root or a quotient may read 0 or less "
            "then. It is finite in the float model. Pass order=Order.PARALLEL, or keep what "
            "computes it in float.",
            code="RQ302",
        )
    raise (cause or error) from error


def find_cause(error: NotFiniteError, prepared: PreparedModel, dataset: Any) -> DataError | None:
    """Return the error to raise. It names the operator whose result is the first that is not
    usable.

    Return `error` itself if an input of the model is not usable, or the calibration graph alone has
    the value. Return None if the float model's value is usable, so that rounding before it is to
    blame.

    Args:
        error: Names the value.
        prepared: The model that was calibrated.
        dataset: The data that it read.
    """
    graph = Graph(prepared.mod)
    if error.value not in graph.vars:
        return error
    for number, batch in enumerate(open_dataset(dataset, describe_inputs(prepared.mod))):
        values = {**batch, **run_values(prepared.mod, dict(batch))}
        if not is_usable(values, error.value):
            cause = walk_back(graph, values, error.value)
            if cause in graph.values:
                return describe_cause(graph, prepared.plan, values, cause, error.value, number)
            return error
    return None


def is_usable(values: Mapping[str, np.ndarray], name: str) -> bool:
    """Whether a value, or every element of a tuple, is within `LARGEST`. Values that are not
    float are.
    """
    arrays = [values[name]] if name in values else []
    while f"{name}.{len(arrays)}" in values and name not in values:
        arrays.append(values[f"{name}.{len(arrays)}"])
    return all(
        array.dtype.kind != "f" or bool((np.abs(array) <= LARGEST).all()) for array in arrays
    )


def walk_back(graph: Graph, values: Mapping[str, np.ndarray], name: str) -> relax.Var:
    """Return the first value that is not usable although everything it is computed from is."""
    var = graph.vars[name]
    while var in graph.values:
        read = free_vars(graph.values[var])
        before = next((other for other in read if not is_usable(values, other.name)), None)
        if before is None:
            break
        var = before
    return var


def describe_cause(
    graph: Graph,
    plan: Plan,
    values: Mapping[str, np.ndarray],
    cause: relax.Var,
    value: str,
    number: int,
) -> DataError:
    """Describe what went wrong at `cause` in batch `number`, so that `value` cannot be
    calibrated.
    """
    row = read_sources(graph.func).get(cause.name, {})
    op = graph.op_name(cause).rpartition(".")[2]
    read = [values[var.name] for var in free_vars(graph.values[cause]) if var.name in values]
    largest = max((float(np.abs(array).max(initial=0)) for array in read), default=0.0)
    call = graph.call_of(cause)
    constants = [constant_value(arg) for arg in (call.args if call is not None else ())]
    floats = [array for array in constants if array is not None and array.dtype.kind == "f"]
    blame = "It reads no constant: check the preprocessing of the data set."
    if floats:
        top = max(floats, key=lambda array: float(np.abs(array).max(initial=0)))
        most = float(np.abs(top).max(initial=0))
        names = ", ".join(map(repr, row.get("constants", ())))
        made = f" (made of {names} and what is folded into it)" if names else ""
        blame = (
            f"Its largest constant{made}: up to {most:.3g}, with {count_huge(top)} of "
            f"{format_count(top.size, 'element')} beyond {LARGEST:.2g}: check the file of the "
            "model, and how it was trained or converted."
        )
    node = f", node {row['node']!r}" if row.get("node") else ""
    owner = next((each.name for each in plan.operators if cause.name in each.values), cause.name)
    part = f" of operator {owner!r}" if owner != cause.name else ""
    return DataError(
        f"Value {value!r} cannot be calibrated: {cause.name!r}{part} ({op}{node}) gives infinity, "
        f"NaN or numbers beyond {LARGEST:.2g} in batch {number}, where what it reads is finite and "
        f"within {largest:.3g}. {blame}",
        code="RQ302",
    )
