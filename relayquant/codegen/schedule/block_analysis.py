"""Block of a TIR function -> its axes, accesses and arithmetic cost for the generic schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad
from tvm.sym import Analyzer

from relayquant.codegen.schedule.vector_math import EXPANSIONS

#: Calls that cost no more than an arithmetic instruction.
CHEAP_CALLS = frozenset(
    {
        "if_then_else",
        "likely",
        "fabs",
        "floor",
        "ceil",
        "nearbyint",
        "round",
        "trunc",
        "reinterpret",
        "call_llvm_pure_intrin",
        "call_llvm_intrin",
        "shift_left",
        "shift_right",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
    }
)

#: Calls whose expansion repeats their argument many times: expansions made here, and TVM's own
#: rules for LLVM (tan, atanh; tanh of dtypes other than float32). Variables for the argument do not
#: help: when TVM's LLVM code generation simplifies, it replaces them by their values
#: (`Analyzer::Bind`).
REPEATING_CALLS = frozenset({*EXPANSIONS, "tirx.tan", "tirx.atanh"})


class Unschedulable(Exception):
    """The rules cannot handle this function. It stays as it is."""


def is_float(dtype: object) -> bool:
    """Whether a TVM dtype is a floating point type of any width."""
    return "float" in str(dtype)


def constant(value: object) -> int | None:
    """Return the integer value of a TVM expression, None if it is symbolic."""
    return int(value) if isinstance(value, int | tirx.IntImm) else None


def coefficient(expr: tirx.Expr, var: tirx.Var) -> int | None:
    """Return the factor of `var` in an index: 0 if absent, None if the index is not linear."""
    if isinstance(expr, tirx.IntImm):
        return 0
    if isinstance(expr, tirx.Var):
        return int(expr.same_as(var))
    if isinstance(expr, tirx.Add | tirx.Sub):
        a, b = coefficient(expr.a, var), coefficient(expr.b, var)
        if a is None or b is None:
            return None
        return a + b if isinstance(expr, tirx.Add) else a - b
    if isinstance(expr, tirx.Mul):
        for factor, other in ((expr.a, expr.b), (expr.b, expr.a)):
            if isinstance(factor, tirx.IntImm):
                inner = coefficient(other, var)
                return None if inner is None else inner * int(factor)
    return None if mentions(expr, var) else 0


def mentions(expr: tirx.Expr, var: tirx.Var) -> bool:
    """Whether `var` occurs anywhere in `expr`."""
    return any(isinstance(node, tirx.Var) and node.same_as(var) for node in list_nodes(expr))


@dataclass(frozen=True)
class Access:
    """One element access of a block: a buffer and indices in the block's axes."""

    buffer: tirx.Buffer
    indices: tuple[tirx.Expr, ...]
    #: position in the flat buffer, if the indices divide others as after a reshape
    offset: tirx.Expr | None = None

    def stride(self, var: tirx.Var) -> int | None:
        """Return the distance in elements between accesses for `var` and `var + 1`.

        None if it is not constant.
        """
        if self.offset is not None:
            return coefficient(self.offset, var)
        total = 0
        step: int | None = 1
        for index, extent in zip(reversed(self.indices), reversed(self.buffer.shape), strict=True):
            factor = coefficient(index, var)
            if factor is None:
                return None
            if factor:
                if step is None:
                    return None
                total += factor * step
            size = constant(extent)
            step = None if step is None or size is None else step * size
        return total


@dataclass(frozen=True)
class BlockInfo:
    """Axes, accesses and value of one block."""

    spatial: tuple[tirx.IterVar, ...]
    reduced: tuple[tirx.IterVar, ...]
    write: Access
    reads: tuple[Access, ...]
    value: tirx.Expr
    #: Whether the body is one store. Anything else (a scan, an if, an extern call) is left serial.
    simple: bool

    @property
    def dtype_bits(self) -> int:
        return max(tirx_bits(access.buffer.dtype) for access in (self.write, *self.reads))

    def volume(self) -> int:
        """Count the iterations of the block. Symbolic extents count as 1."""
        return math.prod(constant(v.dom.extent) or 1 for v in (*self.spatial, *self.reduced))


def tirx_bits(dtype: object) -> int:
    """Return the bits of one element, at least 8."""
    return max(8, int(tvm_ffi.dtype(str(dtype)).bits))


def read_block(block: s_tir.SBlock) -> BlockInfo:
    """Analyze a block. Raises Unschedulable if it has no store that the rules understand."""
    stores: list[tirx.BufferStore] = []
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(
        block.body, [(tirx.BufferStore, stores.append), (TensorLoad, loads.append)]
    )
    if not stores:
        raise Unschedulable(f"block {block.name_hint} stores nothing")
    kinds = [int(v.iter_type) for v in block.iter_vars]
    if any(kind not in (SPATIAL, REDUCED) for kind in kinds):
        raise Unschedulable(f"block {block.name_hint} has an opaque or scan axis")
    store = stores[0]
    write = Access(store.buffer, tuple(store.indices))
    reads = tuple(
        Access(load.source, tuple(load.indices), find_offset(load, block.iter_vars))
        for load in loads
        if not load.source.same_as(store.buffer)
    )
    simple = len(stores) == 1 and isinstance(block.body, tirx.BufferStore)
    spatial = tuple(v for v, k in zip(block.iter_vars, kinds, strict=True) if k == SPATIAL)
    reduced = tuple(v for v, k in zip(block.iter_vars, kinds, strict=True) if k == REDUCED)
    return BlockInfo(spatial, reduced, write, reads, store.value, simple)


def find_offset(load: TensorLoad, axes: Sequence[tirx.IterVar]) -> tirx.Expr | None:
    """Return the simplified position of a load in its flat buffer, if its indices divide.

    x[i // 64, i % 64] of 64 columns  ->  i

    None if no index divides, or if an extent is symbolic.
    """
    divisions = (tirx.FloorDiv, tirx.FloorMod)
    if not any(isinstance(node, divisions) for index in load.indices for node in list_nodes(index)):
        return None
    analyzer = Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, axis.dom)
    offset: tirx.Expr = tirx.IntImm("int64", 0)
    for index, extent in zip(load.indices, load.source.shape, strict=True):
        if constant(extent) is None:
            return None
        offset = offset * extent + index
    return analyzer.simplify(offset)


SPATIAL, REDUCED = int(tirx.IterVar.DataPar), int(tirx.IterVar.CommReduce)


def list_nodes(expr: tirx.Expr) -> list[tirx.Expr]:
    """List all subexpressions of `expr`, including itself."""
    nodes: list[tirx.Expr] = []

    def collect(node: object) -> None:
        if isinstance(node, tirx.Expr):
            nodes.append(node)

    tvm_ffi.structural_walk(expr, (Any, collect))
    return nodes


def list_loads(expr: tirx.Expr) -> list[TensorLoad]:
    """List all loads of `expr`, including loads in indices of other loads."""
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(expr, (TensorLoad, loads.append))
    return loads


def list_position_loads(expr: tirx.Expr) -> list[TensorLoad]:
    """List loads of `expr` in indices of other loads, as in a table lookup."""
    indices = [index for load in list_loads(expr) for index in load.indices]
    return [load for index in indices for load in list_loads(index)]


def call_name(call: Call) -> str:
    """Return the operator name without the dialect prefix, which differs between TVM releases."""
    return str(getattr(call.op, "name", call.op)).rsplit(".", 1)[-1]


def is_expensive(expr: tirx.Expr) -> bool:
    """Whether `expr` has a division or math function, so that it should not be repeated."""
    return any(
        isinstance(node, tirx.Div)
        or (isinstance(node, Call) and call_name(node) not in CHEAP_CALLS)
        for node in list_nodes(expr)
    )


def list_repeating(expr: tirx.Expr) -> list[Call]:
    """List calls of `expr` whose expansion repeats their argument many times."""
    return [
        node
        for node in list_nodes(expr)
        if isinstance(node, Call) and str(getattr(node.op, "name", "")) in REPEATING_CALLS
    ]


def list_conditions(expr: tirx.Expr) -> list[tirx.Expr]:
    """List the conditions that guard a part of `expr`, as in padding."""
    return [choice[0] for node in list_nodes(expr) if (choice := read_choice(node))]


def read_choice(expr: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr] | None:
    """Return (condition, value if true, value if false) of a choice, else None."""
    if isinstance(expr, tirx.Select):
        return expr.condition, expr.true_value, expr.false_value
    if isinstance(expr, Call) and call_name(expr) == "if_then_else":
        condition, yes, no = expr.args
        return condition, yes, no
    return None


def pick_width(extent: int, lanes: int, least: int = 2) -> int:
    """Choose the elements of one vector: a divisor of at least half a register, else 0."""
    width = largest_divisor(extent, lanes)
    return width if width == extent or width >= max(lanes // 2, least) else 0


def largest_divisor(extent: int, limit: int) -> int:
    """Return the largest divisor of `extent` that is at most `limit`; 1 for an extent of 0."""
    return next(d for d in range(max(min(extent, limit), 1), 0, -1) if extent % d == 0)


def is_identity(info: BlockInfo) -> bool:
    """Whether the block writes each element at the position of its spatial axes."""
    return len(info.write.indices) == len(info.spatial) and all(
        index.same_as(axis.var)
        for index, axis in zip(info.write.indices, info.spatial, strict=True)
    )


def is_copy(info: BlockInfo) -> bool:
    """Whether the block copies a buffer unchanged, like padding by nothing."""
    value = info.value
    return (
        isinstance(value, TensorLoad)
        and all(
            index.same_as(axis.var)
            for index, axis in zip(value.indices, info.spatial, strict=False)
        )
        and len(value.indices) == len(info.spatial)
    )


def is_contiguous(access: Access, axes: Sequence[tirx.IterVar]) -> bool:
    """Whether `axes` together walk `access` element by element, or do not move it at all."""
    if not any(mentions(index, axis.var) for index in access.indices for axis in axes):
        return True
    if len(access.indices) < len(axes):
        return False
    tail = access.indices[-len(axes) :]
    shape = access.buffer.shape[-len(axes) :]
    heads = access.indices[: -len(axes)]
    return not any(mentions(index, axis.var) for index in heads for axis in axes) and all(
        index.same_as(axis.var) and constant(size) == constant(axis.dom.extent)
        for index, size, axis in zip(tail, shape, axes, strict=True)
    )
