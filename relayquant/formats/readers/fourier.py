"""Discrete Fourier transforms, for all readers: products with constant matrices of sines and
cosines, which compile and quantize as others do.

Complex numbers are pairs, real part first, along a last axis.
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.refusal import FIX_SIZES, Refusal
from relayquant.ir.rewrite.graph import static_size

#: Most elements of a matrix. 4,096 real numbers need as many: 64 MB in float32.
MOST_ELEMENTS = 2**24 + 2**13


def make_transform(length: int, *, results: int, inverse: bool = False) -> np.ndarray:
    """Return the matrix of a transform of complex numbers, (length, 2, results, 2), float64.

    The first two axes are the operand's, the last two the result's. Result k is the sum over t of
    x[t] exp(-2 pi i k t / length). The inverse has exp(2 pi i k t / length) / length.

    Raises:
        Refusal: the matrix would be too large.
    """
    if 2 * length * results > MOST_ELEMENTS:
        raise Refusal(
            f"it transforms {format_count(length, 'number')} to {results}; supported: products "
            f"of both up to {MOST_ELEMENTS // 2}"
        )
    # Whole turns are removed in integers, since sines of large angles are less exact.
    angles = np.outer(np.arange(length), np.arange(results)) % length * (2 * math.pi / length)
    cos, sin = np.cos(angles), np.sin(angles) * (-1 if inverse else 1)
    # (a + b i) (cos - i sin) = a cos + b sin + (b cos - a sin) i
    matrix = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], 1)
    return matrix / length if inverse else matrix


def make_real_inverse(length: int) -> np.ndarray:
    """Return the matrix that makes `length` real numbers of the first length // 2 + 1 results of
    their transform, (length // 2 + 1, 2, length, 1), float64.

    All results but the first, and the one at length / 2, stand for two, which are conjugates.
    """
    bins = length // 2 + 1
    matrix = make_transform(length, results=bins, inverse=True).transpose(2, 1, 0, 3)[..., :1]
    matrix[1 : (length + 1) // 2] *= 2
    return matrix


def emit_product(
    bb: relax.BlockBuilder, data: relax.Expr, axis: int, matrix: np.ndarray
) -> relax.Expr:
    """Emit a linear map of the numbers along an axis.

    Args:
        data: (..., n, ..., p): numbers of p parts, n along `axis`.
        axis: Not negative.
        matrix: (m, p, results, q). Numbers after the first m are not read, those that are missing
            are 0.

    Returns:
        (..., results, ..., q), in the dtype of the data.

    Raises:
        Refusal: n is symbolic.
    """
    count, parts, results, made = matrix.shape
    shape, dtype = list(data.ty.shape.values), str(data.ty.dtype)
    size = count_values(data, axis)
    if size > count:
        data = bb.emit(relax.op.strided_slice(data, [axis], [0], [count], [1]))
    used = min(size, count)
    *others, last = (at for at in range(len(shape)) if at != axis)
    order = [*others, axis, last]
    if order != sorted(order):
        data = bb.emit(relax.op.permute_dims(data, order))
    sizes = [shape[at] for at in others]
    rows = bb.emit(relax.op.reshape(data, [*sizes, used * parts]))
    weight = matrix[:used].reshape(used * parts, results * made).astype(dtype)
    value = bb.emit(relax.op.matmul(rows, relax.const(weight, dtype)))
    value = bb.emit(relax.op.reshape(value, [*sizes, results, made]))
    if order != sorted(order):
        value = bb.emit(relax.op.permute_dims(value, np.argsort(order).tolist()))
    return value


def count_values(data: relax.Expr, axis: int) -> int:
    """Return the size of an axis. Refusal if it is symbolic."""
    size = data.ty.shape.values[axis]
    if (count := static_size(size)) is None:
        raise Refusal(f"it transforms a symbolic number {size} of values", FIX_SIZES)
    return count
