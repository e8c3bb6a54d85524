"""Dialect: attention over a cache of keys and values, and the rotary positions of its rows.

B sequences with R new rows each, H query heads, G heads of keys and values, head width D, and a
cache of L rows. H is a multiple of G: query head h reads head h // (H / G) of the cache. Row t of
sequence b stands at position positions[b] + t.

The cache is float16, float32, or int8 with one scale for each row, as from `quantize_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder
from tvm_ffi import Array
from tvm_ffi.dataclasses import field

from relayquant.errors import QnnError, format_count
from relayquant.ir.dialect.construct import Operand, Parameter, make_call
from relayquant.ir.dialect.loops import OPAQUE, make_loops, name_hint
from relayquant.ir.dialect.operands import (
    Argument,
    CheckedOperand,
    get_operands,
    is_known_different,
    scale_argument,
    show_count,
    show_dimension,
    show_shape,
)
from relayquant.ir.dialect.operator import Operator, define_attrs
from relayquant.ir.dialect.parameters import PrimExpr, compute_tensor
from relayquant.ir.rewrite.graph import static_size

__all__ = ["cached_attention", "rotate", "update_cache"]

#: dtypes of a cache
CACHES = ("float16", "float32", "int8")

POSITIONS = Argument("positions", "int32")
ROTATE_OPERANDS = (Argument("x"), Argument("cos"), Argument("sin"), POSITIONS)
UPDATE_OPERANDS = (Argument("cache"), Argument("rows"), POSITIONS)
ATTENTION_OPERANDS = (
    Argument("query"),
    Argument("keys"),
    scale_argument("key_scale"),
    Argument("values"),
    scale_argument("value_scale"),
    POSITIONS,
)


@define_attrs("relayquant.attrs.QAttentionAttrs")
class QAttentionAttrs(Attrs):
    """Attributes of qnn.cached_attention."""

    scale: float
    window: int
    soft_cap: float
    sinks: Array = field(default_factory=lambda: Array([]))


# ---------------------------------------------------------------- constructors


def rotate(x: Operand, cos: Operand, sin: Operand, positions: Operand) -> Call:
    """Rotate pairs of elements by the angles of their position: float32 (B, R, H, D), same result.

    Element i < r / 2 and element i + r / 2 are a pair. Elements from r on stay unchanged.

    y[i] = x[i] * cos[p, i] - x[i + r/2] * sin[p, i]

    y[i + r/2] = x[i + r/2] * cos[p, i] + x[i] * sin[p, i]

    Args:
        x: float32 (B, R, H, D).
        cos, sin: float32 (L, r / 2). A position p outside of 0..L-1 is moved to the nearest one.
        positions: int32 (B,), the position of each sequence's first row.
    """
    return make_call("rotate", ROTATE_OPERANDS, (x, cos, sin, positions), None)


def update_cache(cache: Operand, rows: Operand, positions: Operand) -> Call:
    """Write rows (B, R, G, D) into a cache (B, G, L, D) at positions[b]..positions[b] + R - 1.

    The result has the type of the cache. float32 rows are rounded to a float16 cache. Rows at
    positions outside of 0..L-1 are not written.

    Compiled code of `relayquant.compile` writes into the memory of the cache, without a copy, if
    the cache is a parameter of the function, or the result of another `update_cache`, and nothing
    else reads it.

    Args:
        cache: float16, float32 or int8 (B, G, L, D).
        rows: float32 (B, R, G, D), or int8 for an int8 cache.
        positions: int32 (B,), the position of each sequence's first row.
    """
    return make_call("update_cache", UPDATE_OPERANDS, (cache, rows, positions), None)


def cached_attention(
    query: Operand,
    keys: Operand,
    key_scale: Parameter,
    values: Operand,
    value_scale: Parameter,
    positions: Operand,
    scale: float = 1.0,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Sequence[float] = (),
) -> Call:
    """Attend to the cache: float32 query (B, R, H, D) -> float32 (B, R, H, D).

    Row t of sequence b sees the keys 0..p with p = positions[b] + t, of these only the last
    `window` if it is not 0, and none outside of the cache. A row that sees no key gives 0.

    score = scale * sum(query * key); with soft_cap c > 0: c * tanh(score / c)

    result = sum(softmax(score) * value), in float32

    With sinks, the softmax of head h has one more score, sinks[h], whose value is 0 (Xiao et al.
    2024, arXiv 2309.17453; learned numbers in GPT-OSS).

    Args:
        query: float32 (B, R, H, D).
        keys, values: float16, float32 or int8 (B, G, L, D).
        key_scale, value_scale: 1 for a float cache, float32 (B, G, L, 1) for int8.
        positions: int32 (B,), the position of each sequence's first row.
        scale: Factor of the scores, usually 1 / sqrt(D).
        window: Number of keys that a row sees, 0 for all.
        soft_cap: Bound of the scores, 0 for none.
        sinks: A number for each query head, or none.
    """
    operands = (query, keys, key_scale, values, value_scale, positions)
    numbers = Array([float(sink) for sink in sinks])
    attrs = QAttentionAttrs(float(scale), int(window), float(soft_cap), numbers)
    return make_call("cached_attention", ATTENTION_OPERANDS, operands, attrs)


# ---------------------------------------------------------------- types


def check_size(operand: CheckedOperand, axis: int, size: Any, reason: str) -> None:
    """Raise if a dimension provably differs from `size`."""
    found = operand.dimension(axis)
    if is_known_different(found, size):
        raise operand.fail(
            f"has shape {show_shape(operand.shape or [])}",
            f"allowed: {show_dimension(size)} in dimension {axis}, {reason}",
        )


def check_rows(operand: CheckedOperand, positions: CheckedOperand) -> None:
    """Check the rank of new rows, and one position for each sequence."""
    operand.check_rank(4, "sequences, rows, heads, width")
    positions.check_dtype(("int32",), "Cast it first.")
    positions.check_rank(1, "sequences")
    batch = operand.dimension(0)
    if batch is not None:
        check_size(positions, 0, batch, f"one position for each of {show_count(batch, 'sequence')}")


def result_like(operand: CheckedOperand) -> Any:
    """Return the type of a result with the shape and dtype of an operand of rank 4."""
    if operand.shape is None:
        return relax.TensorType(None, operand.ty.dtype, operand.ty.vdevice, 4)
    return relax.TensorType(operand.shape, operand.ty.dtype, operand.ty.vdevice)


def infer_rotate(call: Call, _builder: Any) -> Any:
    """Infer float32 (B, R, H, D) -> float32 (B, R, H, D)."""
    x, cos, sin, positions = get_operands(call, ROTATE_OPERANDS)
    x.check_dtype(("float32",), "Cast it first.")
    check_rows(x, positions)
    for table in (cos, sin):
        table.check_dtype(("float32",), "Cast it first.")
        table.check_rank(2, "positions, half of the rotated width")
    for axis, size in enumerate(cos.shape or ()):
        check_size(sin, axis, size, "as 'cos'")
    half, width = (static_size(size) for size in (cos.dimension(1), x.dimension(3)))
    if half is not None and width is not None and 2 * half > width:
        raise cos.fail(
            f"has shape {show_shape(cos.shape or [])}",
            f"allowed: at most {width // 2} in dimension 1, half of the width {width} of 'x'",
        )
    return result_like(x)


def infer_update_cache(call: Call, _builder: Any) -> Any:
    """Infer cache (B, G, L, D), rows (B, R, G, D) -> the type of the cache."""
    cache, rows, positions = get_operands(call, UPDATE_OPERANDS)
    cache.check_dtype(CACHES)
    rows.check_dtype(
        ("int8",) if cache.dtype == "int8" else ("float32",),
        "Quantize them by qnn.quantize_rows, and update a second cache with their scales."
        if cache.dtype == "int8"
        else "Cast them first.",
    )
    cache.check_rank(4, "sequences, heads, length, width")
    check_rows(rows, positions)
    for axis, other in ((0, 0), (1, 2), (3, 3)):
        size = cache.dimension(axis)
        if size is not None:
            check_size(rows, other, size, f"as dimension {axis} of 'cache'")
    return result_like(cache)


def infer_cached_attention(call: Call, _builder: Any) -> Any:
    """Infer float32 (B, R, H, D), cache (B, G, L, D) -> float32 (B, R, H, D)."""
    query, keys, key_scale, values, value_scale, positions = get_operands(call, ATTENTION_OPERANDS)
    attrs = call.attrs
    if int(attrs.window) < 0 or not float(attrs.soft_cap) >= 0:
        raise QnnError(
            f"{query.operator}: window={attrs.window}, soft_cap={attrs.soft_cap}; allowed: numbers "
            "from 0 on. 0 is no window, and no bound.",
            code="RQ601",
        )
    query.check_dtype(("float32",), "Cast it first.")
    check_rows(query, positions)
    for cache, scale in ((keys, key_scale), (values, value_scale)):
        cache.check_dtype(CACHES)
        cache.check_rank(4, "sequences, heads, length, width")
        for axis in (0, 3):
            size = query.dimension(axis)
            if size is not None:
                check_size(cache, axis, size, "as 'query'")
        for axis, size in enumerate(keys.shape or ()):
            check_size(cache, axis, size, "as 'keys'")
        check_cache_scale(cache, scale)
    heads, groups = (static_size(size) for size in (query.dimension(2), keys.dimension(1)))
    if heads is not None and groups is not None and (groups == 0 or heads % groups):
        found = f"has {format_count(heads, 'head')} in dimension 2"
        raise query.fail(found, f"allowed: a multiple of {groups}, as 'keys' has")
    sinks = [float(sink) for sink in attrs.sinks]
    if sinks and (heads not in (None, len(sinks)) or not all(map(math.isfinite, sinks))):
        raise QnnError(
            f"{query.operator}: has {format_count(len(sinks), 'sink')}; allowed: none, or a finite "
            f"number for each of {show_count(query.dimension(2), 'head')}.",
            code="RQ601",
        )
    return result_like(query)


def check_cache_scale(cache: CheckedOperand, scale: CheckedOperand) -> None:
    """Check the scale of a cache: () for floats, (B, G, L, 1) for int8."""
    scale.check_dtype(("float32",), "Cast it first.")
    if cache.dtype in ("float16", "float32") and scale.ndim > 0:
        raise scale.fail(
            f"has rank {scale.ndim}", f"allowed: rank 0, the number 1, for a {cache.dtype} cache"
        )
    if cache.dtype == "int8":
        scale.check_rank(4, "sequences, heads, length, 1")
        sizes = [*(cache.shape or ())[:3], tirx.IntImm("int64", 1)]
        for axis, size in enumerate(sizes if len(sizes) == 4 else ()):
            check_size(scale, axis, size, f"one scale for each row of '{cache.name}'")


# ---------------------------------------------------------------- loop nests


def read_position(positions: te.Tensor, sequence: PrimExpr, row: PrimExpr) -> PrimExpr:
    """Return the position of a row as int64."""
    return positions(sequence).astype("int64") + row


def legalize_rotate(builder: BlockBuilder, call: Call) -> Any:
    """Compute each element from itself and its partner."""

    def te_rotate(x: te.Tensor, cos: te.Tensor, sin: te.Tensor, positions: te.Tensor) -> te.Tensor:
        length, half = cos.shape

        def element(*index: PrimExpr) -> PrimExpr:
            b, t, h, i = index
            place = tirx.max(tirx.min(read_position(positions, b, t), length - 1), 0)
            is_low = i < half
            partner = tirx.Select(is_low, i + half, tirx.max(i - half, 0))
            angle = tirx.Select(is_low, i, tirx.min(tirx.max(i - half, 0), half - 1))
            sine = tirx.Select(is_low, -sin(place, angle), sin(place, angle))
            turned = x(b, t, h, i) * cos(place, angle) + x(b, t, h, partner) * sine
            return tirx.if_then_else(i < 2 * half, turned, x(b, t, h, i))

        return compute_tensor(x.shape, element, name=name_hint(call))

    return make_loops(builder, call, te_rotate, call.args, pattern=OPAQUE)


def legalize_update_cache(builder: BlockBuilder, call: Call) -> Any:
    """Copy the cache, with the new rows in their places."""

    def te_update(cache: te.Tensor, rows: te.Tensor, positions: te.Tensor) -> te.Tensor:
        def element(*index: PrimExpr) -> PrimExpr:
            b, g, place, i = index
            t = place - positions(b).astype("int64")
            is_new = tirx.all(t >= 0, t < rows.shape[1])
            return tirx.if_then_else(
                is_new, rows(b, t, g, i).astype(cache.dtype), cache(b, g, place, i)
            )

        return compute_tensor(cache.shape, element, name=name_hint(call))

    return make_loops(builder, call, te_update, call.args, pattern=OPAQUE)


def legalize_cached_attention(builder: BlockBuilder, call: Call) -> Any:
    """Compute the scores of all keys, the softmax of those that are seen, and the sum of values."""
    attrs = call.attrs
    factor, cap = (tirx.const(float(number), "float32") for number in (attrs.scale, attrs.soft_cap))
    window, zero = int(attrs.window), tirx.const(0.0, "float32")
    sinks = [tirx.const(float(sink), "float32") for sink in attrs.sinks]

    def te_attention(
        query: te.Tensor,
        keys: te.Tensor,
        key_scale: te.Tensor,
        values: te.Tensor,
        value_scale: te.Tensor,
        positions: te.Tensor,
    ) -> te.Tensor:
        batch, rows, heads, width = query.shape
        groups, length = keys.shape[1:3]
        shared = tirx.floordiv(heads, groups)
        grid = [batch, heads, rows, length]

        def read(cache: te.Tensor, scale: te.Tensor, *index: PrimExpr) -> PrimExpr:
            number = cache(*index).astype("float32")
            return number * scale(*index[:3], 0) if len(scale.shape) else number

        def sees(b: PrimExpr, t: PrimExpr, place: PrimExpr) -> PrimExpr:
            last = read_position(positions, b, t)
            is_seen = place <= last
            return tirx.all(is_seen, place > last - window) if window else is_seen

        def product(b: PrimExpr, h: PrimExpr, t: PrimExpr, place: PrimExpr) -> PrimExpr:
            key = read(keys, key_scale, b, tirx.floordiv(h, shared), place, i)
            return te.sum(query(b, t, h, i) * key, axis=i)

        def score(*index: PrimExpr) -> PrimExpr:
            b, _, t, place = index
            value = products(*index) * factor
            if float(attrs.soft_cap):
                value = cap * tirx.tanh(value / cap)
            return tirx.if_then_else(sees(b, t, place), value, tirx.min_value("float32"))

        def power(*index: PrimExpr) -> PrimExpr:
            b, _, t, place = index
            value = tirx.exp(scores(*index) - largest(*index[:3]))
            return tirx.if_then_else(sees(b, t, place), value, zero)

        def weigh(b: PrimExpr, t: PrimExpr, h: PrimExpr, n: PrimExpr) -> PrimExpr:
            value = read(values, value_scale, b, tirx.floordiv(h, shared), k, n)
            return te.sum(powers(b, h, t, k) * value, axis=k)

        def divide(b: PrimExpr, t: PrimExpr, h: PrimExpr, n: PrimExpr) -> PrimExpr:
            total = totals(b, h, t)
            return sums(b, t, h, n) / tirx.Select(total > 0, total, tirx.const(1.0, "float32"))

        def find_sink(head: PrimExpr) -> PrimExpr:
            found = sinks[0]
            for number, sink in enumerate(sinks[1:], 1):
                found = tirx.Select(head == number, sink, found)
            return found

        def limit(*at: PrimExpr) -> PrimExpr:
            return tirx.max(most(*at), find_sink(at[1])) if sinks else most(*at)

        def count(*at: PrimExpr) -> PrimExpr:
            own = tirx.exp(find_sink(at[1]) - largest(*at)) if sinks else zero
            return seen(*at) + own

        i = te.reduce_axis((0, width), name="i")
        products = compute_tensor(grid, product, name="products")
        scores = compute_tensor(grid, score, name="scores")
        k = te.reduce_axis((0, length), name="k")
        most = compute_tensor(grid[:3], lambda *at: te.max(scores(*at, k), axis=k), name="most")
        largest = compute_tensor(grid[:3], limit, name="largest")
        powers = compute_tensor(grid, power, name="powers")
        seen = compute_tensor(grid[:3], lambda *at: te.sum(powers(*at, k), axis=k), name="seen")
        totals = compute_tensor(grid[:3], count, name="totals")
        sums = compute_tensor(query.shape, weigh, name="sums")
        return compute_tensor(query.shape, divide, name=name_hint(call))

    return make_loops(builder, call, te_attention, call.args, pattern=OPAQUE)


OPERATORS: tuple[Operator, ...] = (
    Operator("rotate", None, ROTATE_OPERANDS, infer_rotate, legalize_rotate),
    Operator("update_cache", None, UPDATE_OPERANDS, infer_update_cache, legalize_update_cache),
    Operator(
        "cached_attention",
        QAttentionAttrs,
        ATTENTION_OPERANDS,
        infer_cached_attention,
        legalize_cached_attention,
    ),
)

#: Operators on real data. They are no sign that a model is quantized.
ATTENTION_OPERATORS = frozenset(operator.full_name for operator in OPERATORS)
