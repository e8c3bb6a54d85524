"""Indices of all source formats -> indices of Relax, for all readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax

from relayquant.ir.rewrite.graph import static_size, tensor_dtype


def count_from_start(bb: relax.BlockBuilder, index: relax.Expr, size: Any) -> relax.Expr:
    """Count a negative index from the start: add the size of its axis, a number, a symbolic one
    or a run-time value.
    """
    dtype, count = tensor_dtype(index), static_size(size)
    if count is not None:
        size = relax.const(count, dtype)
    elif not isinstance(getattr(size, "ty", None), relax.TensorType):
        held = bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr([size])))
        size = bb.emit(relax.op.astype(bb.emit(relax.op.reshape(held, [])), dtype))
    shifted = bb.emit(relax.op.add(index, size))
    is_negative = bb.emit(relax.op.less(index, relax.const(0, dtype)))
    return bb.emit(relax.op.where(is_negative, shifted, index))


def gather_elements(
    bb: relax.BlockBuilder, data: relax.Expr, index: relax.Expr, axis: int
) -> relax.Expr:
    """Emit data[i, index[i, j]] as R.gather_elements of the part of the data that the index covers.

    R.gather_elements needs equal sizes of data and index on the other axes. The index of ONNX and
    PyTorch may be smaller there.
    """
    axis %= data.ty.ndim
    sizes = list(zip(data.ty.shape.values, index.ty.shape.values, strict=True))
    wider = [
        at
        for at, (have, want) in enumerate(sizes)
        if at != axis and not tvm_ffi.structural_equal(have, want)
    ]
    if wider:
        zeros, ends = [0] * len(wider), [sizes[at][1] for at in wider]
        ones = [1] * len(wider)
        data = bb.emit(relax.op.strided_slice(data, wider, zeros, ends, ones, assume_inbound=True))
    return relax.op.gather_elements(data, index, axis)


def scatter_elements(
    bb: relax.BlockBuilder,
    data: relax.Expr,
    index: relax.Expr,
    sizes: Sequence[Any],
    updates: relax.Expr,
    axis: int,
    reduction: str,
) -> relax.Expr:
    """Emit data[i, index[i, j]] = updates[i, j] as R.scatter_nd, for an `index` with the given
    sizes.

    R.scatter_elements writes to wrong places if `index` is smaller than the data along another
    axis.
    """
    dtype = tensor_dtype(index)
    known = [static_size(size) for size in sizes]
    if None in known:
        places = [_count_along(bb, sizes, at, dtype) for at in range(len(sizes))]
    else:
        places = [relax.const(at.astype(dtype), dtype) for at in np.indices(known)]
    places[axis] = index
    return bb.emit(
        relax.op.scatter_nd(data, bb.emit(relax.op.stack(places, -1)), updates, reduction)
    )


def _count_along(bb: relax.BlockBuilder, sizes: Sequence[Any], axis: int, dtype: str) -> relax.Expr:
    """Return the position along an axis of each element of a tensor with these sizes."""
    ramp = bb.emit(relax.op.arange(0, sizes[axis], 1, dtype))
    others = [at for at in range(len(sizes)) if at != axis]
    column = bb.emit(relax.op.expand_dims(ramp, others)) if others else ramp
    return bb.emit(relax.op.broadcast_to(column, relax.ShapeExpr(list(sizes))))


def take_largest(
    bb: relax.BlockBuilder,
    data: relax.Expr,
    count: int,
    axis: int,
    *,
    largest: bool = True,
    dtype: str = "int64",
) -> relax.Expr:
    """Emit the `count` largest or smallest values along an axis, sorted, and where they are.

    R.topk takes all for a count of 0.
    """
    if count:
        return relax.op.topk(data, count, axis, "both", largest, dtype)
    nothing = bb.emit(relax.op.strided_slice(data, [axis], [0], [0], [1], assume_inbound=True))
    return relax.Tuple([nothing, bb.emit(relax.op.astype(nothing, dtype))])
