"""Operators that only move elements, as lists: what rules of every stage look through; and where
an axis of one value is in another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence

from tvm import relax
from tvm.ir import Call

from relayquant.ir.rewrite.expressions import op_name, same_extents, shape_of
from relayquant.ir.rewrite.graph import Graph, call_name, static_size, tensor_shape

#: same elements in the same order, other shape
RESHAPES = (
    "relax.reshape",
    "relax.flatten",
    "relax.nn.batch_flatten",
    "relax.squeeze",
    "relax.expand_dims",
)
#: other order along the attribute `axis`
REORDERS = ("relax.flip", "relax.take", "relax.gather_elements", "relax.sort")
#: same elements, each once
MOVES = (*RESHAPES, "relax.permute_dims")


def same_axis(before: Sequence[int | str], after: Sequence[int | str], axis: int) -> int | None:
    """Return the axis of the shape `after` that holds the elements of `axis` of `before` in the
    same order; None if a reshape between them splits or merges the axis.
    """
    for i, size in enumerate(after):
        if size == before[axis] and measure_volume(after[:i]) == measure_volume(before[:axis]):
            return i
    return None


def keeps_order(
    before: Sequence[int | str],
    first: Sequence[int],
    reshaped: Sequence[int | str],
    second: Sequence[int],
) -> bool:
    """Whether a tensor of shape `before` has its elements in the same order after a permutation
    `first`, a reshape to `reshaped` and a permutation `second`.

    True only where the reshape splits and merges axes of which the second permutation keeps those
    of one part together: (2, 6, 3) -> (2, 3, 6) -> (2, 3, 2, 3) -> (2, 2, 3, 3).
    """
    source = [axis for axis in first if before[axis] != 1]
    target = [axis for axis in range(len(reshaped)) if reshaped[axis] != 1]
    volumes = [
        [measure_volume(sizes[:count]) for count in range(len(sizes) + 1)]
        for sizes in ([before[axis] for axis in source], [reshaped[axis] for axis in target])
    ]
    # a part ends where as many elements lie in front in both shapes
    ends = [(i, volumes[1].index(each)) for i, each in enumerate(volumes[0]) if each in volumes[1]]
    parts = {  # first axis after the reshape -> all axes before and after it
        target[k]: (source[i:j], target[k:m]) for (i, k), (j, m) in itertools.pairwise(ends)
    }
    found: list[int] = []
    order = [axis for axis in second if reshaped[axis] != 1]
    while order:
        axes_before, axes_after = parts.get(order[0], ([], []))
        if not axes_after or order[: len(axes_after)] != axes_after:
            return False
        found += axes_before
        order = order[len(axes_after) :]
    return found == sorted(found)


def measure_volume(sizes: Sequence[int | str]) -> tuple[int, list[str]]:
    """Return the number of elements in some dimensions: the product of the known sizes, and the
    names of the others.
    """
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known), sorted(size for size in sizes if isinstance(size, str))


def find_moved(graph: Graph, expr: relax.Expr) -> Call | None:
    """Return the call whose result `expr` is, with its elements perhaps moved; None if `expr` is no
    result of a call.
    """
    call = graph.call_of(expr)
    while call is not None and call_name(call) in MOVES:
        call = graph.call_of(call.args[0])
    return call


def find_repeated_matrix(
    expr: relax.Expr, call_of: Callable[[relax.Expr], Call | None]
) -> relax.Expr | None:
    """Return the one matrix (1, ..., K, N) or (K, N) that a value (..., K, N) repeats.

    PyTorch writes a linear layer so, if its data is not in the order of memory: it repeats the
    weight for each sample, often as many as only the run knows. `call_of` returns the call that
    computes a value. None if `expr` repeats nothing, or holds other matrices.
    """
    sizes, value = shape_of(expr), expr
    while len(shape_of(value)) > 2:
        call = call_of(value)
        if call is None or op_name(call) not in ("relax.broadcast_to", *RESHAPES):
            break
        if not same_extents(shape_of(call.args[0])[-2:], sizes[-2:]):
            break
        value = call.args[0]
    is_one = all(static_size(size) == 1 for size in shape_of(value)[:-2])
    return value if value is not expr and is_one and len(shape_of(value)) >= 2 else None


def list_permutation(call: Call) -> list[int]:
    """Return the operand's axes in the order of the result of permute_dims. Without axes the
    permutation reverses them.
    """
    axes = call.attrs.axes
    if axes is None:
        return [*range(call.args[0].ty.ndim)][::-1]
    return [int(axis) % len(axes) for axis in axes]


def axis_in_sources(graph: Graph, sources: Collection[str], name: str, axis: int) -> int | None:
    """Return the axis of the values `sources` that becomes `axis` of value `name`, which is
    computed from them by moves and by operators that keep the axes.

    None if a reshape splits or merges the axis, an operator reorders it, or the sources have
    different ranks.
    """
    var = graph.vars[name]
    axis %= var.ty.ndim
    ranks = {graph.vars[source].ty.ndim for source in sources}
    while var.name not in sources:
        call = graph.values.get(var)
        if not isinstance(call, Call) or not call.args:
            return None
        operand = call.args[0]
        if isinstance(operand, relax.Tuple):  # the parts of a concatenation have the same axes
            operand = operand.fields[0]
        if not isinstance(operand, relax.Var):
            return None
        if graph.op_name(var) in RESHAPES:
            after, before = tensor_shape(var), tensor_shape(operand)
            known = after is not None and before is not None
            found = same_axis(after, before, axis) if known else None
        elif graph.op_name(var) == "relax.permute_dims":
            found = list_permutation(call)[axis]
        else:
            is_kept = operand.ty.ndim == var.ty.ndim and not is_reordered(graph, var, axis)
            found = axis if is_kept else None
        if found is None:
            return None
        var, axis = operand, found
    return axis if ranks == {var.ty.ndim} else None


def is_reordered(graph: Graph, var: relax.Var, axis: int) -> bool:
    """Whether a value has as many elements along an axis as its operand, in another order."""
    call = graph.values[var]
    if graph.op_name(var) == "relax.strided_slice":
        steps = call.args[4].fields if len(call.args) > 4 else ()
        pairs = zip(call.args[1].fields, steps, strict=False)
        return any(
            int(at) % var.ty.ndim == axis and (static_size(step) or 1) < 0 for at, step in pairs
        )
    if graph.op_name(var) not in REORDERS:
        return False
    along, after, before = call.attrs.axis, tensor_shape(var), tensor_shape(call.args[0])
    if along is not None and int(along) % var.ty.ndim != axis:
        return False
    return after is None or before is None or after[axis] == before[axis]
