"""Dialect: the gated delta rule, a recurrent form of attention with a matrix as its state.

B sequences with R new rows each, G heads of queries and keys of width K, and H heads of values of
width V. H is a multiple of G: value head h reads key head h // (H / G), or h % G if `is_tiled`.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder, TupleType
from tvm.script.ir_builder import tirx as T

from relayquant.errors import format_count
from relayquant.ir.dialect.construct import Operand, make_call
from relayquant.ir.dialect.loops import emit_loops, name_hint
from relayquant.ir.dialect.operands import (
    Argument,
    CheckedOperand,
    get_operands,
    is_known_different,
    show_dimension,
    show_shape,
)
from relayquant.ir.dialect.operator import Operator, define_attrs
from relayquant.ir.rewrite.graph import static_size

__all__ = ["gated_delta"]

DELTA_OPERANDS = (
    Argument("query"),
    Argument("key"),
    Argument("value"),
    Argument("decay"),
    Argument("strength"),
    Argument("state"),
    Argument("positions", "int32"),
    Argument("counts", "int64"),
)
#: What the dimensions of each operand are.
DIMENSIONS = {
    "query": "BRGK",
    "key": "BRGK",
    "value": "BRHV",
    "decay": "BRH",
    "strength": "BRH",
    "state": "BHKV",
    "positions": "B",
    "counts": "B",
}
WORDS = {
    "B": "sequences",
    "R": "rows",
    "G": "key heads",
    "H": "value heads",
    "K": "key width",
    "V": "value width",
}


@define_attrs("relayquant.attrs.QDeltaAttrs")
class QDeltaAttrs(Attrs):
    """Attributes of qnn.gated_delta."""

    is_tiled: bool


def gated_delta(
    query: Operand,
    key: Operand,
    value: Operand,
    decay: Operand,
    strength: Operand,
    state: Operand,
    positions: Operand,
    counts: Operand,
    is_tiled: bool = False,
) -> Call:
    """Apply the gated delta rule (Yang et al. 2024, arXiv 2412.06464), row by row, in float32.

    The state S of a sequence that begins at position 0 is zero before. For each head and row:

    S' = decay * S + key * (strength * (value - decay * (key^T S)))^T

    result = query^T S'

    Args:
        query, key: float32 (B, R, G, K).
        value: float32 (B, R, H, V).
        decay, strength: float32 (B, R, H).
        state: float32 (B, H, K, V).
        positions: int32 (B,), the position of each sequence's first row.
        counts: int64 (B,), how many of the R rows each sequence has. Results of others are 0.
        is_tiled: Which key head a value head reads.

    Returns:
        A pair: the results, float32 (B, R, H, V), and the new state, as `state`.
    """
    operands = (query, key, value, decay, strength, state, positions, counts)
    return make_call("gated_delta", DELTA_OPERANDS, operands, QDeltaAttrs(bool(is_tiled)))


def infer_gated_delta(call: Call, _builder: Any) -> Any:
    """Infer (B, R, H, V) and (B, H, K, V), both float32."""
    operands = get_operands(call, DELTA_OPERANDS)
    sizes: dict[str, tuple[Any, CheckedOperand]] = {}
    for operand in operands:
        axes = DIMENSIONS[operand.name]
        dtype = {"positions": "int32", "counts": "int64"}.get(operand.name, "float32")
        operand.check_dtype((dtype,), "Cast it first.")
        operand.check_rank(len(axes), ", ".join(WORDS[axis] for axis in axes))
        for i, axis in enumerate(axes):
            size = operand.dimension(i)
            if size is None:
                continue
            known, source = sizes.setdefault(axis, (size, operand))
            if is_known_different(known, size):
                raise operand.fail(
                    f"has shape {show_shape(operand.shape or [])}",
                    f"allowed: {show_dimension(known)} {WORDS[axis]} in dimension {i}, as "
                    f"'{source.name}'",
                )
    groups, heads = (static_size(sizes[axis][0]) if axis in sizes else None for axis in "GH")
    if groups is not None and heads is not None and (groups == 0 or heads % groups):
        value = operands[2]
        found = f"has {format_count(heads, 'head')} in dimension 2"
        raise value.fail(found, f"allowed: a multiple of {groups}, as 'key' has")
    return TupleType([result_of(operands[2]), result_of(operands[5])])


def result_of(operand: CheckedOperand) -> Any:
    """Return the type of a result like an operand."""
    shape = operand.shape
    rank = {} if shape is not None else {"ndim": 4}
    return relax.TensorType(shape, "float32", operand.ty.vdevice, **rank)


def legalize_gated_delta(builder: BlockBuilder, call: Call) -> Any:
    """Emit plain loops over sequences, heads, rows and the state."""
    func = emit_loops("gated_delta", PlainDelta(call).emit)
    fields = list(call.ty.fields)
    return relax.call_tir(builder.add_func(func, name_hint(call)), list(call.args), fields)


class PlainDelta:
    """Plain loops of one call."""

    def __init__(self, call: Call) -> None:
        self.call, self.is_tiled = call, bool(call.attrs.is_tiled)

    def emit(self) -> None:
        self.sizes: dict[str, Any] = {}
        for argument, expr in zip(DELTA_OPERANDS, self.call.args, strict=True):
            for axis, size in zip(DIMENSIONS[argument.name], expr.ty.shape.values, strict=True):
                known = int(size) if isinstance(size, tirx.IntImm) else None
                if axis not in self.sizes or known is not None:
                    self.sizes[axis] = T.int64() if known is None else known
        self.tensors = {
            argument.name: self.declare(
                argument.name, DIMENSIONS[argument.name], str(expr.ty.dtype)
            )
            for argument, expr in zip(DELTA_OPERANDS, self.call.args, strict=True)
        }
        self.out = self.declare("out", "BRHV", "float32")
        self.next = self.declare("next", "BHKV", "float32")
        self.change = T.alloc_buffer((self.sizes["V"],), "float32")
        batch, heads, keys, values = (self.sizes[axis] for axis in "BHKV")
        with T.serial(batch) as b, T.serial(heads) as h:
            goes_on = self.tensors["positions"][b] > T.int32(0)
            with T.serial(keys) as k, T.serial(values) as v:
                before = T.Select(goes_on, self.tensors["state"][b, h, k, v], T.float32(0))
                T.buffer_store(self.next, before, [b, h, k, v])
            with T.serial(self.sizes["R"]) as row:
                with T.serial(values) as v:
                    T.buffer_store(self.out, T.float32(0), [b, row, h, v])
                is_given = T.Cast("int64", row) < self.tensors["counts"][b]
                with T.If(is_given), T.Then():
                    self.emit_row(b, h, row)

    def declare(self, name: str, axes: str, dtype: str) -> Any:
        return T.arg(name, T.Buffer(tuple(self.sizes[axis] for axis in axes), dtype))

    def emit_row(self, b: Any, h: Any, row: Any) -> None:
        """Change the state of a head by a row, and read it."""
        groups, heads, keys, values = (self.sizes[axis] for axis in "GHKV")
        group = T.floormod(h, groups) if self.is_tiled else T.floordiv(h, T.floordiv(heads, groups))
        key, query = (self.tensors[name] for name in ("key", "query"))
        decay, strength = (self.tensors[name][b, row, h] for name in ("decay", "strength"))
        with T.serial(values) as v:
            T.buffer_store(self.change, T.float32(0), [v])
            with T.serial(keys) as k:
                product = key[b, row, group, k] * self.next[b, h, k, v]
                T.buffer_store(self.change, self.change[v] + product, [v])
            error = self.tensors["value"][b, row, h, v] - decay * self.change[v]
            T.buffer_store(self.change, strength * error, [v])
            with T.serial(keys) as k:
                state = decay * self.next[b, h, k, v] + key[b, row, group, k] * self.change[v]
                T.buffer_store(self.next, state, [b, h, k, v])
                read = query[b, row, group, k] * self.next[b, h, k, v]
                T.buffer_store(self.out, self.out[b, row, h, v] + read, [b, row, h, v])


OPERATORS: tuple[Operator, ...] = (
    Operator("gated_delta", QDeltaAttrs, DELTA_OPERANDS, infer_gated_delta, legalize_gated_delta),
)

#: Operators on real data. They are no sign that a model is quantized.
DELTA_OPERATORS = frozenset(operator.full_name for operator in OPERATORS)
