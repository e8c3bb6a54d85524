"""Concatenations that kernels write into: which result goes where.

concat(f(x), g(x))    ->    f writes the first channels of the result, g the others
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from tvm import relax
from tvm.ir import Call

from relayquant.codegen.lowering.engine import BlockView
from relayquant.ir.rewrite.expressions import op_name, same_extents, shape_of, static_sizes
from relayquant.ir.rewrite.graph import constant_value
from relayquant.ir.rewrite.rule import Skip, decline


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


def find_columns(
    block: BlockView, var: relax.Var, op: str
) -> tuple[relax.Var, tuple[int, int]] | None:
    """Find the concatenation `op` along the last axis that is the only reader of a kernel's result.

    Returns:
        The concatenation, and the first column of the result in it with the number of all columns.
    """
    concat = block.only_user(var)
    call = None if concat is None else block.call_of(concat)
    if concat is None or call is None or op_name(call) != op or not is_plain_concat(call):
        return None
    parts, sizes = call.args[0].fields, list_columns(call)
    if sizes is None:
        return None
    at = next(i for i, part in enumerate(parts) if part.same_as(var))
    return concat, (sum(sizes[:at]), sum(sizes))


def list_columns(concat: Call) -> list[int] | None:
    """List the sizes that a concatenation puts side by side along the last axis.

    None for another axis, and if the other sizes may differ.
    """
    first, *others = shapes = [shape_of(part) for part in concat.args[0].fields]
    if not first or int(concat.attrs.axis) % len(first) != len(first) - 1:
        return None
    if not all(same_extents(first[:-1], other[:-1]) for other in others):
        return None
    return static_sizes([shape[-1] for shape in shapes])


def list_missing(
    block: BlockView, concat: relax.Var
) -> list[tuple[relax.Expr, tuple[int, int]]] | Skip:
    """List the inputs of a concatenation that no kernel writes in place, if kernels write others.

    Returns:
        Each input with its first column and its number of columns.
    """
    call, placed = block.values[concat], block.placed.get(concat)
    sizes = None if placed is None else list_columns(call)
    if placed is None or sizes is None:
        return decline("no kernel writes a part of it")
    ends = accumulate(sizes)
    parts = zip(call.args[0].fields, ends, sizes, strict=True)
    missing = [(part, (end - size, size)) for part, end, size in parts if part not in placed]
    return missing or decline("kernels write all of it")
