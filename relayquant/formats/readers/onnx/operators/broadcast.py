"""ONNX reader: broadcasting of sizes that are known at run time only.

A symbolic size N broadcasts with another size, symbolic or for instance 4, if N is 1 or equals the
other size. Relax loses the shape of such a result, and kernels of R.broadcast_to read beyond the
data if N is 1. So an axis of this kind is taken with the indices min(0 ... size - 1, N - 1)
instead, and a reshape rejects every other N at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import relax, tirx

from relayquant.formats.readers.onnx.graph.symbolic import is_never_one, larger
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.sizes import count_sizes, emit_shape, read_sizes
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.rewrite.graph import static_size

#: Operators that broadcast all their operands to one shape. MatMul does so except for the last two
#: axes.
ELEMENTWISE = frozenset(
    (
        "Add",
        "And",
        "BitShift",
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "Div",
        "Equal",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "LessOrEqual",
        "Max",
        "Mean",
        "Min",
        "Mod",
        "Mul",
        "Or",
        "PRelu",
        "Pow",
        "Sub",
        "Sum",
        "Where",
        "Xor",
    )
)

Size = Any  #: a number or a symbolic size


def list_sizes(data: relax.Expr) -> list[Size]:
    """Return the sizes of a tensor of known shape."""
    values = data.ty.shape.values
    return [size if (known := static_size(size)) is None else known for size in values]


def merge_sizes(one: Size, other: Size) -> Size:
    """Return the size that two sizes of an axis are broadcast to. A size that is never 1 wins.

    Raises:
        Refusal: both are known and different, and none is 1.
    """
    known = [isinstance(size, int) for size in (one, other)]
    if (known[0] and one == 1) or is_same(one, other):
        return other
    if known[1] and other == 1:
        return one
    if all(known):
        raise Refusal(f"its sizes {one} and {other} do not fit; allowed: equal sizes, and 1")
    if any(known):
        return one if known[0] else other
    sure = [size for size in (one, other) if is_never_one(size)]
    return sure[0] if sure else larger(one, other)


def is_same(one: Size, other: Size) -> bool:
    """Return whether two sizes are the same in every run, if their expressions show it."""
    if isinstance(one, int) or isinstance(other, int):
        return isinstance(one, int) and isinstance(other, int) and one == other
    return bool(tvm_ffi.structural_equal(one, other))


def merge_shapes(shapes: Sequence[Sequence[Size]]) -> list[Size]:
    """Return the shape that all shapes are broadcast to."""
    rank = max(map(len, shapes))
    merged: list[Size] = [1] * rank
    for shape in shapes:
        padded = [1] * (rank - len(shape)) + list(shape)
        merged = [merge_sizes(*pair) for pair in zip(merged, padded, strict=True)]
    return merged


def spread_operands(
    bb: Builder, op: str, operands: Sequence[relax.Expr | None]
) -> Sequence[relax.Expr | None]:
    """Return the operands with equal sizes on the axes where Relax cannot broadcast."""
    tensors = [each for each in operands if isinstance(getattr(each, "ty", None), relax.TensorType)]
    kept = 2 if op == "MatMul" else 0
    if (op not in ELEMENTWISE and not kept) or len(tensors) != len(operands):
        return list(operands)
    shapes = [list_sizes(each)[: each.ty.ndim - kept] for each in tensors]
    if min(each.ty.ndim for each in tensors) < kept or all(
        isinstance(size, int) for shape in shapes for size in shape
    ):
        return list(operands)
    wanted = merge_shapes(shapes)
    if not kept:  # TVM does not compile batched products with a batch size from a match_cast.
        wanted = [settle_size(bb, size) for size in wanted]
    return [
        spread_axes(bb, each, wanted[len(wanted) - len(shape) :])
        for each, shape in zip(tensors, shapes, strict=True)
    ]


def settle_size(bb: Builder, size: Size) -> Size:
    """Return max(N, M) as one symbolic size that a match_cast reads at run time. TVM's passes fail
    on a size that compares two others.
    """
    if not isinstance(size, tirx.Max):
        return size
    parts = [relax.ShapeExpr([settle_size(bb, part)]) for part in (size.a, size.b)]
    tensors = [bb.emit(relax.op.shape_to_tensor(part)) for part in parts]
    (settled,) = emit_shape(bb, bb.emit(relax.op.maximum(*tensors)), 1).values
    return settled


def spread_axes(bb: Builder, data: relax.Expr, wanted: Sequence[Size]) -> relax.Expr:
    """Spread the first axes of the data to the wanted sizes where their size is symbolic."""
    for axis, (size, want) in enumerate(zip(list_sizes(data), wanted, strict=False)):
        if isinstance(size, int) or is_same(size, want):
            continue
        have, all_of_it = (
            bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr([each]))) for each in (size, want)
        )
        one = relax.const(1, "int64")
        is_one = bb.emit(relax.op.equal(have, one))
        (count,) = emit_shape(bb, bb.emit(relax.op.where(is_one, all_of_it, have)), 1).values
        ramp = bb.emit(relax.op.arange(0, count, 1, "int64"))
        # Run time compares the sizes here: of a few numbers, and not of the data.
        ramp = bb.match_cast(ramp, relax.TensorType([want], "int64"))
        last = bb.emit(relax.op.subtract(have, one))
        data = bb.emit(relax.op.take(data, bb.emit(relax.op.minimum(ramp, last)), axis))
    return data


def broadcast(bb: Builder, data: relax.Expr, wanted: Sequence[Size]) -> relax.Expr:
    """Broadcast the data to a compatible shape of at least its rank."""
    wanted = [settle_size(bb, size) for size in wanted]
    spread = spread_axes(bb, data, wanted[len(wanted) - data.ty.ndim :])
    return relax.op.broadcast_to(spread, relax.ShapeExpr(list(wanted)))


def convert_expand(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Expand to R.broadcast_to. The sizes may be constants, sizes of the model, or run-time
    values.
    """
    data, wanted = inputs
    sizes = read_sizes(wanted)
    if sizes is None:
        sizes = list(emit_shape(bb, wanted, count_sizes(wanted)).values)
    return broadcast(bb, data, merge_shapes([list_sizes(data), sizes]))


def convert_concat(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Convert Concat of sizes that Relax cannot compare: a match_cast compares them at run time.
    All others are left to TVM.

    Behind such a concatenation the shape would be unknown, and few operators compile.
    """
    operands = list(inputs)
    types = [getattr(each, "ty", None) for each in operands]
    if not all(isinstance(getattr(ty, "shape", None), relax.ShapeExpr) for ty in types):
        return None
    if len({ty.ndim for ty in types}) > 1:
        return None
    shapes = [list_sizes(each) for each in operands]
    axis = int(attrs["axis"]) % len(shapes[0])
    columns = zip(*shapes, strict=True)
    wanted = [next((n for n in sizes if isinstance(n, int)), sizes[0]) for sizes in columns]
    for at, (operand, shape) in enumerate(zip(operands, shapes, strict=True)):
        sizes = [*wanted[:axis], shape[axis], *wanted[axis + 1 :]]
        pairs = list(zip(shape, sizes, strict=True))
        if any(isinstance(a, int) and a != b for a, b in pairs):
            return None  # known sizes that differ
        if not all(is_same(a, b) for a, b in pairs):
            operands[at] = bb.match_cast(operand, relax.TensorType(sizes, operand.ty.dtype))
    if all(a is b for a, b in zip(operands, inputs, strict=True)):
        return None
    return relax.op.concat(operands, axis)
