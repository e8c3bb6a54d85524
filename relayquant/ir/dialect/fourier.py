"""Dialect: `qnn.dft` -> products with constant matrices of sines and cosines.

A transform of A * B numbers is two steps (Cooley and Tukey 1965). With t = B a + b and k = k1 +
A k2, and w_n = exp(-2 pi i / n),

    X[k] = sum over b of w_B^(b k2) * w_(A B)^(b k1) * (sum over a of w_A^(a k1) * x[t])

Both sums are products with small matrices. 2048 real numbers take a tenth of the multiply-adds of
the whole matrix. A length without useful factors takes the whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tvm import relax
from tvm.ir import Call

#: Most elements of a matrix. 4,096 real numbers need as many: 64 MB in float32.
MOST_ELEMENTS = 2**24 + 2**13

#: What the two steps move, for each number, takes as long as so many multiply-adds.
MOVES = 64

#: Emits an expression under a name, and returns its variable.
Emit = Callable[[relax.Expr, str], relax.Expr]


def make_transform(length: int, *, results: int, inverse: bool = False) -> np.ndarray:
    """Return the matrix of a transform of complex numbers, (length, 2, results, 2), float64.

    The first two axes are the operand's, the last two the result's. Result k is the sum over t of
    x[t] exp(-2 pi i k t / length). The inverse has exp(2 pi i k t / length) / length.
    """
    # Whole turns are removed in integers, since sines of large angles are less exact.
    angles = np.outer(np.arange(length), np.arange(results)) % length * (2 * math.pi / length)
    cos, sin = np.cos(angles), np.sin(angles) * (-1 if inverse else 1)
    # (a + b i) (cos - i sin) = a cos + b sin + (b cos - a sin) i
    matrix = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], 1)
    return matrix / length if inverse else matrix


def weigh_bins(length: int, bins: int) -> np.ndarray:
    """Return how many of `length` results each of the first `bins` stands for: all but the first,
    and the one at length / 2, stand for two, which are conjugates.
    """
    weights = np.ones(bins)
    weights[1 : (length + 1) // 2] = 2
    return weights


def count_results(length: int, *, inverse: bool, onesided: bool) -> int:
    """Return how many numbers a transform gives."""
    return length // 2 + 1 if onesided and not inverse else length


def fill_vectors(columns: int) -> int:
    """Return the columns of a product that kernels compute: whole vectors, mostly of 16."""
    return -(-columns // 16) * 16


def find_factors(length: int, numbers: int, parts: int, results: int, made: int) -> tuple[int, int]:
    """Return the factors (A, B) of a length with which a transform takes least time; (1, length)
    stands for the whole matrix.

    Args:
        length: Length of the transform.
        numbers: How many numbers the data has, of `parts` parts each.
        results: How many numbers the result has, of `made` parts each.
    """

    def cost(first: int) -> int:
        second = length // first
        if first == 1:
            return numbers * parts * fill_vectors(results * made)
        inner = -(-numbers // second) * second * parts * fill_vectors(2 * first)
        last = 2 * length * fill_vectors(-(-results // first) * made)
        return inner + last + MOVES * length

    small = [first for first in range(1, math.isqrt(length) + 1) if length % first == 0]
    best = min({*small, *(length // first for first in small[1:])}, key=cost)
    return best, length // best


def count_elements(length: int, numbers: int, parts: int, results: int, made: int) -> int:
    """Return the elements of the largest matrix that a transform needs."""
    first, second = find_factors(length, numbers, parts, results, made)
    if first == 1:
        return numbers * parts * results * made
    return max(2 * parts * first * first, 2 * second * -(-results // first) * made)


def emit_products(emit: Emit, call: Call, name: str = "dft") -> relax.Expr:
    """Emit what `qnn.dft` computes.

    dft(x)  ->  matmul(permute_dims(twiddles * matmul(permute_dims(x), first)), second)
    """
    (data,), attrs = call.args, call.attrs
    length, inverse, onesided = int(attrs.length), bool(attrs.inverse), bool(attrs.onesided)
    *outer, numbers, parts = data.ty.shape.values
    numbers, parts, dtype = int(numbers), int(parts), str(data.ty.dtype)
    results = count_results(length, inverse=inverse, onesided=onesided)
    is_real = inverse and onesided
    made = 1 if is_real else 2
    first, second = find_factors(length, numbers, parts, results, made)

    def constant(value: np.ndarray) -> relax.Expr:
        return relax.const(value.astype(dtype), dtype)

    def reshape(value: relax.Expr, *sizes: int) -> relax.Expr:
        return emit(relax.op.reshape(value, [*outer, *sizes]), f"{name}.shaped")

    def multiply(value: relax.Expr, matrix: np.ndarray) -> relax.Expr:
        return emit(relax.op.matmul(value, constant(matrix)), f"{name}.product")

    def permute(value: relax.Expr, *axes: int) -> relax.Expr:
        order = [*range(len(outer)), *(len(outer) + axis for axis in axes)]
        return emit(relax.op.permute_dims(value, order), f"{name}.ordered")

    if first == 1:
        matrix = make_transform(length, results=results, inverse=inverse)[:numbers, :parts]
        if is_real:
            matrix = matrix * weigh_bins(length, numbers).reshape(-1, 1, 1, 1)
        matrix = matrix[..., :made].reshape(numbers * parts, results * made)
        return reshape(multiply(reshape(data, numbers * parts), matrix), results, made)
    if is_real:
        weights = weigh_bins(length, numbers).reshape(-1, 1)
        data = emit(relax.op.multiply(data, constant(weights)), f"{name}.bins")
    rows = -(-numbers // second)
    if missing := rows * second - numbers:
        widths = [*([0, 0] * len(outer)), 0, missing, 0, 0]
        data = emit(relax.op.nn.pad(data, widths), f"{name}.padded")
    inner = make_transform(first, results=first, inverse=inverse)[:rows, :parts]
    inner = inner.transpose(0, 1, 3, 2)  # real parts side by side, then imaginary ones
    value = permute(reshape(data, rows, second, parts), 1, 0, 2)
    value = multiply(reshape(value, second, rows * parts), inner.reshape(rows * parts, 2 * first))
    value = reshape(value, second, 2, first)
    value = turn(emit, value, second, first, inverse=inverse, name=name)
    groups = -(-results // first)
    last = make_transform(second, results=groups, inverse=inverse)[..., :made]
    value = permute(reshape(value, 2 * second, first), 1, 0)
    value = multiply(value, last.reshape(2 * second, groups * made))
    value = permute(reshape(value, first, groups, made), 1, 0, 2)
    value = reshape(value, first * groups, made)
    if results == first * groups:
        return value
    kept = relax.op.strided_slice(value, [len(outer)], [0], [results], [1], assume_inbound=True)
    return emit(kept, f"{name}.results")


def turn(
    emit: Emit, value: relax.Expr, second: int, first: int, *, inverse: bool, name: str
) -> relax.Expr:
    """Emit (..., B, 2, A) times exp(-2 pi i b k1 / (A B)), with the other sign for the inverse."""
    dtype = str(value.ty.dtype)
    angles = np.outer(np.arange(second), np.arange(first)) * (2 * math.pi / (first * second))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None] * (-1 if inverse else 1)
    # (a + b i) (cos - i sin): a cos + b sin, then b cos - a sin
    swapped = emit(relax.op.flip(value, value.ty.ndim - 2), f"{name}.swapped")
    scaled = [
        emit(relax.op.multiply(part, relax.const(factors.astype(dtype), dtype)), f"{name}.scaled")
        for part, factors in ((value, cos), (swapped, np.concatenate([sin, -sin], axis=1)))
    ]
    return emit(relax.op.add(*scaled), f"{name}.turned")
