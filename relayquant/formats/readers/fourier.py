"""Discrete Fourier transforms along any axis, for all readers: calls of `qnn.dft`.

Complex numbers are pairs, real part first, along a last axis.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.refusal import FIX_SIZES, Refusal
from relayquant.ir.dialect.fourier import MOST_ELEMENTS, Transform
from relayquant.ir.dialect.qnn import dft
from relayquant.ir.rewrite.graph import static_size


def emit_transform(
    bb: relax.BlockBuilder,
    data: relax.Expr,
    axis: int,
    length: int,
    *,
    inverse: bool = False,
    onesided: bool = False,
) -> relax.Expr:
    """Emit the transform of the numbers along an axis.

    Args:
        data: float32 or float64 (..., n, ..., p): numbers of p parts, n along `axis`. The
            transform reads the first numbers, as many as it has. Missing numbers are 0.
        axis: Not negative.
        length, inverse, onesided: As of `qnn.dft`.

    Returns:
        (..., results, ..., q), in the dtype of the data.

    Raises:
        Refusal: n is symbolic or 0, or the matrix would be too large.
    """
    size, parts = count_values(data, axis), int(data.ty.shape.values[-1])
    transform = Transform(length, inverse, onesided, size, parts)
    used = min(size, transform.most)
    if used < 1:
        raise Refusal(f"its data has no values along axis {axis}; supported: 1 or more")
    if (transform := replace(transform, numbers=used)).elements > MOST_ELEMENTS:
        raise Refusal(
            f"it transforms {format_count(used, 'number')} to {transform.results}; supported: "
            f"products of both up to {MOST_ELEMENTS // 2}, or lengths with small factors"
        )
    if size > used:
        data = bb.emit(relax.op.strided_slice(data, [axis], [0], [used], [1]))
    *others, last = (at for at in range(data.ty.ndim) if at != axis)
    order = [*others, axis, last]
    if order == sorted(order):
        return dft(data, length, inverse, onesided)
    data = bb.emit(relax.op.permute_dims(data, order))
    value = bb.emit(dft(data, length, inverse, onesided))
    return relax.op.permute_dims(value, np.argsort(order).tolist())


def count_values(data: relax.Expr, axis: int) -> int:
    """Return the size of an axis. Refusal if it is symbolic."""
    size = data.ty.shape.values[axis]
    if (count := static_size(size)) is None:
        raise Refusal(f"it transforms a symbolic number {size} of values", FIX_SIZES)
    return count
