"""accumulators: integer module + data -> which sums of products do not fit the hardware's register.

The sums are exact: those of the compiled integer module, before they are brought into range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.analysis.verify import expose_values
from relayquant.config import Accumulator, OverflowBound
from relayquant.errors import ModelError
from relayquant.ledger import LedgerRow, read_ledger
from relayquant.ops.base import TOTALS
from relayquant.prepared import PreparedModel
from relayquant.qtypes import INTEGER_LIMITS
from relayquant.rewrite import Graph
from relayquant.rewrite.graph import constant_value, tensor_dtype
from relayquant.runtime import LoadModule

#: raised scales leave this much room for the rounding of weights, which changes with them
MARGIN = 1.01


@dataclass(frozen=True)
class AccumulatorRow:
    """The sums of one operator, by output channel (one entry where all share a scale).

    Attributes:
        name: Of the operator, as in the ledger.
        accumulator: What the sums are held in; its `bound` is not known here.
        elements: Sums computed, all channels together.
        overflows: How many did not fit.
        lowest, highest: Smallest and largest exact sum seen.
        bound_low, bound_high: What no sum of any input exceeds, nor any partial sum in any order.
    """

    name: str
    accumulator: Accumulator
    elements: int
    overflows: tuple[int, ...]
    lowest: tuple[int, ...]
    highest: tuple[int, ...]
    bound_low: tuple[int, ...]
    bound_high: tuple[int, ...]

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of which a sum did not fit."""
        return tuple(i for i, count in enumerate(self.overflows) if count)

    @property
    def worst(self) -> int:
        """The sum of largest magnitude that was seen."""
        return max((*self.lowest, *self.highest), key=abs, default=0)

    def excess(self, bound: OverflowBound) -> np.ndarray:
        """How often the largest sum of each channel is too large: 1 or less where all fit,
        float64.
        """
        if bound is OverflowBound.NONE:
            return np.zeros(len(self.overflows))
        low, high = self.accumulator.limits
        is_observed = bound is OverflowBound.OBSERVED
        lows, highs = (
            (self.lowest, self.highest) if is_observed else (self.bound_low, self.bound_high)
        )
        return np.maximum(np.asarray(lows, "float64") / low, np.asarray(highs, "float64") / high)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "accumulator": self.accumulator.description,
            "elements": self.elements,
            "channels": list(self.channels),
            "overflows": list(self.overflows),
            "worst": self.worst,
            "lowest": list(self.lowest),
            "highest": list(self.highest),
            "bound_low": list(self.bound_low),
            "bound_high": list(self.bound_high),
        }


@dataclass(frozen=True)
class AccumulatorReport:
    """One row for each operator whose sums are held in a narrow accumulator, in topological
    order.
    """

    rows: tuple[AccumulatorRow, ...]

    @property
    def overflowing(self) -> tuple[AccumulatorRow, ...]:
        """Operators of which a sum did not fit."""
        return tuple(row for row in self.rows if row.channels)

    def row(self, name: str) -> AccumulatorRow | None:
        """The row of an operator, None if it has none."""
        return next((row for row in self.rows if row.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"operators": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        """One line for each operator."""
        lines = []
        for row in self.rows:
            low, high = row.accumulator.limits
            lines.append(
                f"{row.name}: {row.accumulator.description} ({low}..{high}), "
                f"{len(row.channels)} of {len(row.overflows)} channels overflow, "
                f"{sum(row.overflows)} of {row.elements} sums, worst {row.worst}; any input "
                f"{min(row.bound_low, default=0)}..{max(row.bound_high, default=0)}"
            )
        return "\n".join(lines) or "no operator has a narrow accumulator"


def measure_accumulators(
    integer: tvm.IRModule,
    batches: Iterable[Mapping[str, np.ndarray]],
    load_module: LoadModule,
) -> AccumulatorReport:
    """The exact sums of every narrow accumulator on data; memory does not grow with the data.

    `load_module` makes the integer module runnable.

    Raises:
        ModelError: the module has no ledger, or was changed after `lower`.
    """
    graph = Graph(integer)
    rows = [row for row in read_ledger(integer).quantized if row.accumulator]
    if not rows:
        return AccumulatorReport(())
    sums = {row.name: find_sum(graph, row) for row in rows}
    calls = {name: find_product(graph, var) for name, var in sums.items()}
    axes = {name: find_channel_axis(call) for name, call in calls.items()}
    bounds = {name: find_bounds(graph, sums[name], call) for name, call in calls.items()}
    registers = {row.name: Accumulator.parse(row.accumulator) for row in rows}
    run = load_module(expose_values(integer, [var.name for var in sums.values()]))
    params = [param.name for param in graph.func.params]
    seen: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        results = run.run("main", [batch[name] for name in params])
        for name, array in zip(sums, results, strict=False):
            counted = count_overflows(array, axes[name], registers[name])
            seen[name] = merge_counts(seen[name], counted) if name in seen else counted
    report = []
    for name, register in registers.items():
        elements, overflows, lowest, highest = seen.get(name, [np.zeros(0, "int64")] * 4)
        low, high = bounds[name]
        report.append(
            AccumulatorRow(
                name,
                register,
                int(elements.sum()),
                *(tuple(a.tolist()) for a in (overflows, lowest, highest, low, high)),
            )
        )
    return AccumulatorReport(tuple(report))


def find_min_scales(prepared: PreparedModel, report: AccumulatorReport) -> dict[str, np.ndarray]:
    """Scales by group key with which the sums of calibration would fit, for groups whose present
    scales are too small: float64, () or (C,).

    A sum shrinks as the scale of a factor grows: the weight's, of which each channel has its own;
    that of the second factor where both are activations.
    """
    found = {}
    for row in report.rows:
        operator = prepared.plan.operator(row.name)
        if operator.accumulator is None:
            continue
        key = operator.operands[1][1]
        bound = operator.accumulator.bound
        if bound is OverflowBound.WORST_CASE and prepared.plan.group(key).constant is None:
            bound = OverflowBound.OBSERVED  # integers of two activations are as large in any scale
        excess = row.excess(bound)
        if not (excess > 1).any():
            continue
        scale = prepared.parameters[key].scale.astype("float64")
        factor = np.where(excess > 1, excess * MARGIN, 1.0)
        found[key] = scale * (factor if scale.shape == factor.shape else factor.max())
    return found


def count_overflows(
    array: np.ndarray, axis: int | None, accumulator: Accumulator
) -> list[np.ndarray]:
    """[elements, overflows, lowest, highest] by channel, int64."""
    sums = array.astype("int64")
    sums = sums.reshape(1, -1) if axis is None else np.moveaxis(sums, axis, 0)
    sums = sums.reshape(len(sums), -1)
    low, high = accumulator.limits
    overflows = ((sums < low) | (sums > high)).sum(1)
    return [np.full(len(sums), sums.shape[1]), overflows, sums.min(1), sums.max(1)]


def merge_counts(first: list[np.ndarray], other: list[np.ndarray]) -> list[np.ndarray]:
    """The counts of two batches together."""
    return [
        first[0] + other[0],
        first[1] + other[1],
        np.minimum(first[2], other[2]),
        np.maximum(first[3], other[3]),
    ]


def find_sum(graph: Graph, row: LedgerRow) -> relax.Var:
    """The exact sum of an operator, with its bias if it has one, before it is brought into
    range.
    """
    for suffix in TOTALS:
        var = graph.vars.get(f"{row.name}.{suffix}")
        if var is not None:
            return var
    raise ModelError(
        f"The module does not hold the accumulator of {row.name!r}, which its ledger calls "
        f"{row.accumulator}. Pass what relayquant.quantize or lower returned."
    )


def find_product(graph: Graph, var: relax.Var) -> Call:
    """The convolution or matrix product that a sum, with or without its bias, comes from."""
    call = graph.call_of(var)
    if call is not None and graph.op_name(call) == "relax.add":
        inner = (graph.call_of(arg) for arg in call.args)
        call = next((c for c in inner if c is not None), None)
    if call is None or not graph.op_name(call).startswith("relax.qnn."):
        raise ModelError(f"Value {var.name!r} is no sum of products.")
    return call


def find_channel_axis(call: Call) -> int | None:
    """Axis of the output channels in the result; None for batch_matmul, which has none."""
    if call.op.name == "relax.qnn.batch_matmul":
        return None
    if call.op.name == "relax.qnn.dense":
        return call.args[0].ty.ndim - 1
    return str(call.attrs.data_layout).index("C")


def find_bounds(graph: Graph, var: relax.Var, call: Call) -> tuple[np.ndarray, np.ndarray]:
    """(lowest, highest) by channel of every sum and partial sum that any input can make, int64.

    high = sum over k of max(w_k a, w_k b) + max(bias, 0) for data - zero point within a..b, which
    hold 0; low likewise.
    """
    data_zero, weight_zero = (
        np.asarray(constant_value(arg), "int64").reshape(-1) for arg in call.args[2:4]
    )
    low, high = (
        limit - int(data_zero.max()) for limit in INTEGER_LIMITS[tensor_dtype(call.args[0])]
    )
    weight = constant_value(call.args[1])
    if weight is None:
        ends = INTEGER_LIMITS[tensor_dtype(call.args[1])]
        factors = [(end - int(weight_zero.max())) * other for end in ends for other in (low, high)]
        length = int(call.args[0].ty.shape.values[-1])
        return np.array([length * min(factors)]), np.array([length * max(factors)])
    rows = split_channels(call, weight.astype("int64"))
    rows = rows - (weight_zero[:, None] if weight_zero.size == len(rows) else weight_zero[0])
    ends = (rows * low, rows * high)
    lowest, highest = np.minimum(*ends).sum(1), np.maximum(*ends).sum(1)
    total = graph.call_of(var)
    for arg in total.args if total is not None and graph.op_name(total) == "relax.add" else ():
        bias = constant_value(arg)
        if bias is not None:
            values = np.broadcast_to(bias.astype("int64").reshape(-1), lowest.shape)
            lowest, highest = lowest + np.minimum(values, 0), highest + np.maximum(values, 0)
    return lowest, highest


def split_channels(call: Call, weight: np.ndarray) -> np.ndarray:
    """A weight as (output channels, products of one sum)."""
    if call.op.name == "relax.qnn.dense":
        return weight
    axis = str(call.attrs.kernel_layout).index("O")
    if call.op.name == "relax.qnn.conv2d_transpose":
        inputs = str(call.attrs.kernel_layout).index("I")
        weight, groups = np.moveaxis(weight, (inputs, axis), (0, 1)), int(call.attrs.groups)
        grouped = weight.reshape(groups, -1, *weight.shape[1:])
        return np.moveaxis(grouped, 2, 1).reshape(groups * weight.shape[1], -1)
    return np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
