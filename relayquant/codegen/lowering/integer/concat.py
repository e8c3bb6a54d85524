"""Concatenations of integers that kernels write into: which result goes where.

concat(f(x), g(x))    ->    f writes the first channels of the result, g the others
"""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.ir import Call

from relayquant.codegen.lowering.kernel_call import is_default_arithmetic, split_batch
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.expressions import op_name
from relayquant.ir.rewrite.graph import constant_value


def is_plain_concat(call: Call) -> bool:
    """Whether a call joins values without changing their numbers."""
    if not call.args or not isinstance(call.args[0], relax.Tuple):
        return False
    if op_name(call) == "relax.concat":
        return call.attrs.axis is not None
    if op_name(call) != "relax.qnn.concatenate":
        return False
    fields, scales, zeros, scale, zero = call.args
    if not (isinstance(scales, relax.Tuple) and isinstance(zeros, relax.Tuple)):
        return False
    alike = [constant_value(each) for each in (*scales.fields, scale)]
    moved = [constant_value(each) for each in (*zeros.fields, zero)]
    dtypes = {str(field.ty.dtype) for field in fields.fields}
    return all_equal(alike) and all_equal(moved) and dtypes == {str(call.ty.dtype)}


def all_equal(values: list[Any]) -> bool:
    """Whether all are constants with the same single number."""
    numbers = {None if v is None or v.size != 1 else v.item() for v in values}
    return len(numbers) == 1 and None not in numbers


def find_columns(graph: Graph, var: relax.Var) -> tuple[relax.Var, tuple[int, int]] | None:
    """Find the concatenation along the last axis that is the only reader of a kernel's result.

    Returns:
        The concatenation, and the first column of the result in it with the number of columns.
    """
    concat = graph.only_user(var)
    call = graph.call_of(concat) if concat is not None else None
    if concat is None or call is None or op_name(call) != "relax.qnn.concatenate":
        return None
    if not is_plain_concat(call) or not is_default_arithmetic(call):
        return None
    shapes = [split_batch(part) for part in call.args[0].fields]
    found = [shape for shape in shapes if shape is not None]
    is_last = int(call.attrs.axis) % concat.ty.ndim == concat.ty.ndim - 1
    if len(found) < len(shapes) or len({symbolic for symbolic, _ in found}) > 1 or not is_last:
        return None
    sizes = [shape[-1] for _, shape in found]
    places = [i for i, part in enumerate(call.args[0].fields) if part.same_as(var)]
    return (concat, (sum(sizes[: places[0]]), sum(sizes))) if len(places) == 1 else None
