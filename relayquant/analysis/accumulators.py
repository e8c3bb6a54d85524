"""accumulators: integer module + data -> size of each accumulator, and channels that overflow it.

The sums are exact. They come from the compiled integer module before requantization: int32 where
int32 holds the sums of any input, otherwise int64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.analysis.loader import bind_loader
from relayquant.base.plain_data import PlainFields
from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.base.runtime import LoadModule
from relayquant.config import Accumulator, OverflowBound
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import ModelError, format_count, warn_user
from relayquant.ir.dialect.accumulator_range import PRODUCTS, bound_sums
from relayquant.ir.ledger import LedgerRow, read_ledger
from relayquant.ir.ops.find import find_sum
from relayquant.ir.rewrite import Graph, expose_values
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.compilation import compile_draft
from relayquant.stages.prepared import PreparedModel
from relayquant.stages.streams import follow_state

#: raised scales leave this margin, because the rounding of weights changes with the scales
MARGIN = 1.01
#: times that calibration is repeated to make sums fit; each round of scales changes the rounding
ROUNDS = 4


@dataclass(frozen=True)
class AccumulatorRow(PlainFields):
    """The sums of one operator, by output channel. One entry if all channels share a scale.

    Attributes:
        name: Operator name, as in the ledger.
        accumulator: Dtype that holds the sums. int32 or int64 if the backend names no
            accumulator. The accumulator's `bound` is not known here.
        elements: Number of sums computed, over all channels.
        overflows: Number of sums that overflowed.
        lowest, highest: Smallest and largest exact sum seen.
        bound_low, bound_high: Bounds of every sum and every partial sum, for any input and any
            order.
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
        """Channels with at least one overflow."""
        return tuple(i for i, count in enumerate(self.overflows) if count)

    @property
    def worst(self) -> int:
        """The sum of largest magnitude that was seen."""
        return max((*self.lowest, *self.highest), key=abs, default=0)

    def excess(self, bound: OverflowBound) -> np.ndarray:
        """Return the largest sum of each channel as a multiple of the allowed one, float64. At most
        1: it fits.
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
        derived = {"channels": list(self.channels), "worst": self.worst}
        return super().to_dict() | {"accumulator": self.accumulator.description} | derived


@dataclass(frozen=True)
class AccumulatorReport(PlainFields):
    """One row for each quantized operator that sums products, in topological order."""

    rows: tuple[AccumulatorRow, ...] = field(metadata={"key": "operators"})

    @property
    def overflowing(self) -> tuple[AccumulatorRow, ...]:
        """Operators with at least one overflow."""
        return tuple(row for row in self.rows if row.channels)

    def row(self, name: str) -> AccumulatorRow | None:
        """Return the row of an operator, or None if it has none."""
        return next((row for row in self.rows if row.name == name), None)

    def __str__(self) -> str:
        """One line for each operator."""
        lines = []
        for row in self.rows:
            low, high = row.accumulator.limits
            lines.append(
                f"{row.name}: {row.accumulator.description} ({low}..{high}), overflow in "
                f"{len(row.channels)} of {format_count(len(row.overflows), 'channel')}, "
                f"{sum(row.overflows)} of {format_count(row.elements, 'sum')}, worst {row.worst}; "
                f"any input {min(row.bound_low, default=0)}..{max(row.bound_high, default=0)}"
            )
        return "\n".join(lines) or "no quantized operator sums products"


def measure_sums(integer: tvm.IRModule, dataset: Any) -> AccumulatorReport:
    """As `measure_accumulators`, on a data set, with the module run as is done earliest."""
    data = open_dataset(follow_state(integer, dataset), describe_inputs(integer))
    return measure_accumulators(integer, data, bind_loader(data, compile_draft))


def measure_accumulators(
    integer: tvm.IRModule,
    batches: Iterable[Mapping[str, np.ndarray]],
    load_module: LoadModule,
) -> AccumulatorReport:
    """Measure the exact sums of products on data. Memory does not grow with the data.

    `load_module` makes the integer module runnable.

    Raises:
        ModelError: the module has no ledger, or was changed after `lower`.
    """
    graph = Graph(integer)
    rows = {row.name: row for row in read_ledger(integer).quantized}
    found = {name: find_row_sum(graph, row) for name, row in rows.items()}
    sums = {name: pair[0] for name, pair in found.items() if pair is not None}
    calls = {name: pair[1] for name, pair in found.items() if pair is not None}
    if not sums:
        return AccumulatorReport(())
    axes = {name: find_channel_axis(call) for name, call in calls.items()}
    bounds = {
        name: find_bounds(graph, sums[name], call, rows[name].is_dynamic)
        for name, call in calls.items()
    }
    registers = {name: Accumulator.parse(rows[name].accumulator or "int32") for name in sums}
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
    """Return the scales that would make the sums of calibration fit, by group key.

    Only groups whose present scales are too small are listed: float64, () or (C,).

    A sum shrinks when the scale of a factor grows. For a constant weight, that is the weight scale
    of the channel. For a product of two activations, it is the scale of the second.
    """
    found = {}
    for row in report.rows:
        operator = prepared.plan.operator(row.name)
        if operator.accumulator is None:
            continue
        key = operator.operands[1][1]
        bound = operator.accumulator.bound
        if bound is OverflowBound.WORST_CASE and prepared.plan.group(key).constant is None:
            # The integers of two activations are equally large in any scale.
            bound = OverflowBound.OBSERVED
        excess = row.excess(bound)
        if not (excess > 1).any():
            continue
        scale = prepared.parameters[key].scale.astype("float64")
        factor = np.where(excess > 1, excess * MARGIN, 1.0)
        found[key] = scale * (factor if scale.shape == factor.shape else factor.max())
    return found


def fit_scales(
    calibrated: PreparedModel,
    measure: Callable[[PreparedModel], AccumulatorReport],
    pick: Callable[[Mapping[str, np.ndarray]], PreparedModel],
) -> PreparedModel:
    """Raise scales and calibrate again until the sums fit. Warn about sums that still overflow.

    Args:
        calibrated: The calibrated model.
        measure: Calibrated model -> its sums on the data.
        pick: Lower bounds of scales, by group key -> the model calibrated with them.
    """
    min_scales: dict[str, np.ndarray] = {}
    for _ in range(ROUNDS):
        wanted = find_min_scales(calibrated, measure(calibrated))
        if not wanted:
            return calibrated
        min_scales |= wanted
        calibrated = pick(min_scales)
    left = find_min_scales(calibrated, measure(calibrated))
    if left:
        names = ", ".join(repr(key) for key in left)
        warn_user(
            f"Sums of products still overflow after calibration, where these are a factor: "
            f"{names}. accumulator_report(prepared, dataset) tells by how much; allow larger "
            "scales or use activations of fewer bits.",
            code="RQ402",
        )
    return calibrated


def count_overflows(
    array: np.ndarray, axis: int | None, accumulator: Accumulator
) -> list[np.ndarray]:
    """Count [elements, overflows, lowest, highest] by channel, int64."""
    sums = array.astype("int64")
    sums = sums.reshape(1, -1) if axis is None else np.moveaxis(sums, axis, 0)
    sums = sums.reshape(len(sums), -1)
    low, high = accumulator.limits
    overflows = ((sums < low) | (sums > high)).sum(1)
    return [np.full(len(sums), sums.shape[1]), overflows, sums.min(1), sums.max(1)]


def merge_counts(first: list[np.ndarray], other: list[np.ndarray]) -> list[np.ndarray]:
    """Merge the counts of two batches."""
    return [
        first[0] + other[0],
        first[1] + other[1],
        np.minimum(first[2], other[2]),
        np.maximum(first[3], other[3]),
    ]


def find_row_sum(graph: Graph, row: LedgerRow) -> tuple[relax.Var, Call] | None:
    """Return the exact sum of an operator and its product. None if it sums no products.

    Raises:
        ModelError: the operator has an accumulator, but the module does not hold the sum.
    """
    var = find_sum(graph, row.name)
    call = find_product(graph, var) if var is not None else None
    if var is not None and call is not None:
        return var, call
    if row.accumulator:
        raise ModelError(
            f"The module does not hold the accumulator of {row.name!r}, which its ledger calls "
            f"{row.accumulator}. Pass what relayquant.quantize or lower returned.",
            code="RQ205",
        )
    return None


def find_product(graph: Graph, var: relax.Var) -> Call | None:
    """Return the convolution or matrix product that a sum comes from.

    The sum may include a bias or the correction for a zero point known only at run time. None for
    any other sum, which a user's row may have.
    """
    call = graph.call_of(var)
    if call is not None and graph.op_name(call) in ("relax.add", "relax.subtract"):
        inner = (graph.call_of(arg) for arg in call.args)
        call = next((c for c in inner if c is not None), None)
    return call if call is not None and graph.op_name(call) in PRODUCTS else None


def find_channel_axis(call: Call) -> int | None:
    """Return the axis of output channels in the result. None for batch_matmul."""
    if call.op.name == "relax.qnn.batch_matmul":
        return None
    if call.op.name == "relax.qnn.dense":
        return call.args[0].ty.ndim - 1
    return str(call.attrs.data_layout).index("C")


def find_bounds(
    graph: Graph, var: relax.Var, call: Call, is_dynamic: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return (lowest, highest) by channel of every sum and partial sum for any input, int64.

    The bias is included. The limits of int64 if the length of the sums is not known.
    """
    bounds = bound_sums(call, is_dynamic=is_dynamic)
    if bounds is None:
        return tuple(np.array([limit]) for limit in INTEGER_LIMITS["int64"])  # pyright: ignore[reportReturnType]
    lowest, highest = bounds
    total = graph.call_of(var)
    for arg in total.args if total is not None and graph.op_name(total) == "relax.add" else ():
        bias = constant_value(arg)
        if bias is not None:
            values = np.broadcast_to(bias.astype("int64").reshape(-1), lowest.shape)
            lowest, highest = lowest + np.minimum(values, 0), highest + np.maximum(values, 0)
    return lowest, highest
