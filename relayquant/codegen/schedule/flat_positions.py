"""Scheduled TIR with fused loops -> the same TIR where each fused loop is one position of a tensor.

    y[i // 20 % 3, i % 20] = x[i // 20 % 3, i % 20]    ->    y'[i] = x'[i], views of y and x

Loops over axes along which data are contiguous are fused to fill vectors. TVM computes the position
i from the indices again, but does not always see that it is i: for a fifth of the shapes with three
such axes it divides the position of each element, and loads each by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from relayquant.codegen.schedule.block_analysis import constant, list_loads

#: Annotation of a block: the number of its last axes that are one fused loop.
FUSED_AXES = "relayquant.fused_axes"

#: (tensor, number of its last axes that are one) -> the view
Views = dict[tuple[tirx.Buffer, int], tirx.Buffer]


def flatten_positions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let blocks with fused axes access views of the parameters in which these axes are one.

    A block that reads or writes other memory stays: TVM finds the place of an allocation by the
    accesses to it, and knows no views.
    """
    views: Views = {}

    def flatten(realize: s_tir.SBlockRealize) -> tirx.Stmt:
        count = constant(realize.block.annotations.get(FUSED_AXES))
        if count is None:
            return realize
        store = realize.block.body
        accessed = [store.buffer, *(load.source for load in list_loads(store.value))]
        if not all(any(buffer.same_as(param) for param in func.params) for buffer in accessed):
            return realize
        return flatten_store(realize, count, views)

    body: Any = tvm_ffi.structural_map(func.body, (s_tir.SBlockRealize, flatten))
    if not views:
        return func
    declared = [tirx.DeclBuffer(view, data=of.data) for (of, _), view in views.items()]
    root = body.block
    inside = tirx.SeqStmt([*declared, root.body])
    whole = s_tir.SBlock(
        [], root.reads, root.writes, root.name_hint, inside, None, root.alloc_buffers
    )
    return func.with_body(s_tir.SBlockRealize([], True, whole))


def flatten_store(realize: s_tir.SBlockRealize, count: int, views: Views) -> tirx.Stmt:
    """Write the store of a block with the position along its last `count` axes, which are fused."""
    block, values = realize.block, list(realize.iter_values)
    fused = block.iter_vars[-count:]
    position = find_position(values[-count:], [int(axis.dom.extent) for axis in fused])
    if position is None:
        return realize
    value_of = {axis.var: value for axis, value in zip(block.iter_vars, values, strict=True)}

    def place(buffer: tirx.Buffer, indices: Sequence[Any]) -> tuple[tirx.Buffer, list[Any]]:
        if not (indices and indices[-1].same_as(fused[-1].var)):
            return buffer, list(indices)
        if (buffer, count) not in views:
            size = tirx.IntImm(str(position.ty), math.prod(map(int, buffer.shape[-count:])))
            shape = [*buffer.shape[:-count], size]
            views[buffer, count] = tirx.decl_buffer(
                shape, buffer.dtype, f"{buffer.name}_flat", data_alignment=buffer.data_alignment
            )
        return views[buffer, count], [*indices[:-count], position]

    def load(node: TensorLoad) -> Any:
        buffer, indices = place(node.source, node.indices)
        return buffer[tuple(indices)]

    store = block.body
    buffer, indices = place(store.buffer, store.indices)
    moved = tirx.BufferStore(
        buffer, tvm_ffi.structural_map(store.value, (TensorLoad, load)), indices
    )
    take = (tirx.Var, lambda var: value_of.get(var, var))
    return tvm_ffi.structural_map(moved, take)


def find_position(values: Sequence[Any], extents: Sequence[int]) -> Any | None:
    """Return i of the indices (i // (b * c), i % (b * c) // c, i % c) along axes (a, b, c).

    None for any other indices.
    """
    if not isinstance(values[-1], tirx.FloorMod):
        return None
    position = values[-1].a
    dtype, size = str(position.ty), 1
    expected: list[Any] = []
    for extent in reversed(extents):
        whole = tirx.IntImm(dtype, size * extent)
        rest = position if len(expected) == len(extents) - 1 else tirx.floormod(position, whole)
        expected.append(tirx.floordiv(rest, tirx.IntImm(dtype, size)))
        size *= extent
    pairs = zip(reversed(values), expected, strict=True)
    return position if all(tvm_ffi.structural_equal(a, b) for a, b in pairs) else None


def create_flattening_pass() -> Any:
    """Make a pass that applies `flatten_positions` to every TIR function.

    It has to run behind RewriteDataflowReshape, which knows a reshape by its blocks.
    """

    def flatten(func: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        return flatten_positions(func)

    return tirx.transform.prim_func_pass(flatten, opt_level=0, name="relayquant.FlattenPositions")
