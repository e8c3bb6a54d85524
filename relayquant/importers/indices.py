"""First stage: indices as every frontend has them become those of Relax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from relayquant.importers.refusal import Refusal
from relayquant.rewrite.graph import static_size, tensor_dtype


def count_from_start(bb: relax.BlockBuilder, index: relax.Expr, size: Any) -> relax.Expr:
    """An index, plus the size of its axis (a number, or a value of the run time) where it is
    negative.

    Raises:
        Refusal: the size is symbolic.
    """
    dtype, count = tensor_dtype(index), static_size(size)
    if count is not None:
        size = relax.const(count, dtype)
    elif not isinstance(getattr(size, "ty", None), relax.TensorType):
        raise Refusal(f"it has indices for an axis of size {size}; supported: fixed sizes")
    shifted = bb.emit(relax.op.add(index, size))
    is_negative = bb.emit(relax.op.less(index, relax.const(0, dtype)))
    return bb.emit(relax.op.where(is_negative, shifted, index))


def scatter_elements(
    bb: relax.BlockBuilder,
    data: relax.Expr,
    index: relax.Expr,
    sizes: Sequence[int],
    updates: relax.Expr,
    axis: int,
    reduction: str,
) -> relax.Expr:
    """data[i, index[i, j]] = updates[i, j], of `index` with the given sizes -> R.scatter_nd.

    R.scatter_elements puts them in wrong places where `index` is smaller than the data along
    another axis.
    """
    dtype = tensor_dtype(index)
    places = [relax.const(at.astype(dtype), dtype) for at in np.indices(sizes)]
    places[axis] = index
    return bb.emit(
        relax.op.scatter_nd(data, bb.emit(relax.op.stack(places, -1)), updates, reduction)
    )
