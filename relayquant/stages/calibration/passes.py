"""Calibrate, order: prepared model -> phases, which say what runs on which batches before what is
chosen.

Topological: one phase. A step runs on all batches and something is chosen; the next step sees it.
Parallel: all batches pass the float model once, which says the range of every value; then the
weights are fitted one after the other, with all values rounded, on some of the batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from relayquant.config import Order
from relayquant.data import InputInfo
from relayquant.ir.plan import Plan
from relayquant.ir.reference.frame import Frame
from relayquant.ir.rewrite import Graph
from relayquant.stages.calibration.subgraphs import Segment, SegmentedGraph, split_graph
from relayquant.stages.prepared import CalibrationGraph, FitPoint

#: Samples that weights are fitted with, however large they are; fewer only if there are fewer.
FEWEST_SAMPLES = 32


@dataclass(frozen=True, eq=False)
class Phase:
    """Steps that run one after the other on the same batches.

    Attributes:
        split: The segments.
        steps: Each batch passes all segments of a step; once all batches have, what these segments
            stop at is chosen.
        is_float: Whether values pass through as they are in the float model, whatever was chosen.
        is_part: Whether some of the batches are enough.
    """

    split: SegmentedGraph
    steps: tuple[tuple[Segment, ...], ...]
    is_float: bool = False
    is_part: bool = False


def plan_phases(
    graph: CalibrationGraph, plan: Plan, order: Order, fits: Sequence[FitPoint]
) -> tuple[Phase, ...]:
    """The phases of a calibration that picks the parameters of all activations of the plan, and
    fits the operators `fits`.
    """
    groups = plan.activations
    if order is Order.TOPOLOGICAL:
        split = split_graph(graph, groups, fits)
        return (Phase(split, tuple((segment,) for segment in split.segments)),)
    observe = split_graph(graph, groups, prefix="observe")
    phases = [Phase(observe, (observe.segments,), is_float=True)]
    if fits:
        split = split_graph(graph, (), fits, prefix="fit")
        steps = tuple((segment,) for segment in split.segments)
        phases.append(Phase(split, steps, is_part=True))
    return tuple(phases)


def join_segments(phases: Sequence[Phase]) -> tvm.IRModule:
    """One module of the segments of all phases."""
    functions = [item for phase in phases for item in phase.split.mod.functions_items()]
    return tvm.IRModule(dict(functions))


def count_part(
    graph: CalibrationGraph,
    fits: Sequence[FitPoint],
    inputs: Sequence[InputInfo],
    symbols: Mapping[str, int],
    values: int,
) -> int:
    """How many batches hold so many values of the inputs of `fits`, all operators together, and at
    least `FEWEST_SAMPLES`.

    Args:
        graph: The calibration graph.
        fits: The operators.
        inputs: Of the model; what its first one has along its first axis are samples.
        symbols: Symbolic dimensions, of one batch that stands for all.
        values: See above.
    """
    view = Graph(graph.mod)
    sizes = [symbols[d] if isinstance(d, str) else d for info in inputs[:1] for d in info.shape]
    samples = max(sizes[0] if sizes else 1, 1)
    dims = relax.analysis.defined_symbolic_vars(view.func)
    frame = Frame(graph.mod, symbols={dim: symbols.get(dim.name, 1) for dim in dims})
    each = sum(count_elements(view.vars[name], frame) for name in {fit.source for fit in fits})
    return max(math.ceil(values / max(each, 1)), math.ceil(FEWEST_SAMPLES / samples))


def count_elements(var: relax.Var, frame: Frame) -> int:
    """Elements of a tensor in a frame that knows symbolic dimensions; those that it does not know
    count as 1.
    """
    dims = getattr(getattr(var.ty, "shape", None), "values", ())
    return math.prod(frame.evaluate_number(dim) or 1 for dim in dims)


def choose_batches(batches: int, wanted: int) -> tuple[int, ...]:
    """Numbers of `wanted` of so many batches, evenly spread; of all if there are no more."""
    wanted = min(wanted, batches)
    return tuple(i * batches // wanted for i in range(wanted))
