"""Order of a calibration: prepared model -> passes over the data. Each pass says which subgraphs
run on which batches before which choice.

Topological: one pass. A step runs on all batches, then something is chosen, and the next step uses
it. Parallel: all batches run through the float model once, which gives the range of every value.
Then the weights are fitted one after the other, with all values rounded, on some of the batches.
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
from relayquant.stages.calibration.subgraphs import SplitGraph, Subgraph, split_graph
from relayquant.stages.prepared import CalibrationGraph, FitPoint

#: minimum number of samples that weights are fitted with, whatever their size; fewer only if the
#: data set has fewer. The last maps of a network have few positions for their columns: on 4 samples
#: MobileNet loses 0.2 to 0.3 dB.
FEWEST_SAMPLES = 16


@dataclass(frozen=True, eq=False)
class DataPass:
    """Steps that run one after the other on the same batches.

    Attributes:
        split: The subgraphs.
        steps: Each batch runs through all subgraphs of a step. After all batches, the choices at
            the breakpoints of these subgraphs are made.
        is_float: Whether values pass through in float, whatever was chosen.
        is_part: Whether some of the batches are enough.
        results: The model's results, which the last subgraph computes, for what ranges are judged
            by. No choice needs them.
    """

    split: SplitGraph
    steps: tuple[tuple[Subgraph, ...], ...]
    is_float: bool = False
    is_part: bool = False
    results: tuple[str, ...] = ()


def plan_passes(
    graph: CalibrationGraph,
    plan: Plan,
    order: Order,
    fits: Sequence[FitPoint],
    *,
    results: bool = False,
) -> tuple[DataPass, ...]:
    """Return the passes of a calibration that chooses the parameters of the plan's activations
    and fits the operators `fits`. With `results`, a float pass computes the model's, too.
    """
    groups = plan.activations
    if order is Order.TOPOLOGICAL:
        split = split_graph(graph, groups, fits, is_stored=True)
        return (DataPass(split, tuple((subgraph,) for subgraph in split.subgraphs)),)
    observe = split_graph(graph, groups, results=results, prefix="observe")
    names = observe.subgraphs[-1].observed if results else ()
    passes = [DataPass(observe, (observe.subgraphs,), is_float=True, results=names)]
    if fits:
        split = split_graph(graph, (), fits, is_stored=True, prefix="fit")
        steps = tuple((subgraph,) for subgraph in split.subgraphs)
        passes.append(DataPass(split, steps, is_part=True))
    return tuple(passes)


def join_subgraphs(passes: Sequence[DataPass]) -> tvm.IRModule:
    """Return one module with the subgraphs of all passes."""
    functions = [item for data_pass in passes for item in data_pass.split.mod.functions_items()]
    return tvm.IRModule(dict(functions))


def count_part(
    graph: CalibrationGraph,
    fits: Sequence[FitPoint],
    inputs: Sequence[InputInfo],
    symbols: Mapping[str, int],
    values: int,
    fewest: int = FEWEST_SAMPLES,
) -> int:
    """Return how many batches are needed for a number of input values of `fits`, over all
    operators, and for at least `fewest` samples.

    Args:
        graph: The calibration graph.
        fits: The operators.
        inputs: Inputs of the model. The first axis of the first input counts samples.
        symbols: Symbolic dimensions of one batch that represents all.
        values: The number of values.
        fewest: The number of samples.
    """
    view = Graph(graph.mod)
    sizes = [symbols[d] if isinstance(d, str) else d for info in inputs[:1] for d in info.shape]
    samples = max(sizes[0] if sizes else 1, 1)
    dims = relax.analysis.defined_symbolic_vars(view.func)
    frame = Frame(graph.mod, symbols={dim: symbols.get(dim.name, 1) for dim in dims})
    each = sum(count_elements(view.vars[name], frame) for name in {fit.source for fit in fits})
    return max(math.ceil(values / max(each, 1)), math.ceil(fewest / samples))


def count_elements(var: relax.Var, frame: Frame) -> int:
    """Return the number of elements of a tensor, given its symbolic dimensions. Unknown ones
    count as 1.
    """
    dims = getattr(getattr(var.ty, "shape", None), "values", ())
    return math.prod(frame.evaluate_number(dim) or 1 for dim in dims)


def choose_batches(batches: int, wanted: int) -> tuple[int, ...]:
    """Return the indices of `wanted` batches, evenly spread; all indices if there are not more."""
    wanted = min(wanted, batches)
    return tuple(i * batches // wanted for i in range(wanted))
