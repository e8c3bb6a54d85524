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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.ir.rewrite.graph import static_size

#: Most elements of a matrix. 4,096 real numbers need as many: 64 MB in float32.
MOST_ELEMENTS = 2**24 + 2**13

#: What the two steps move, for each number, takes as long as so many multiply-adds.
MOVES = 64

#: Emits an expression under a name, and returns its variable.
Emit = Callable[[relax.Expr, str], relax.Expr]


@dataclass(frozen=True)
class Transform:
    """A transform of the `numbers` numbers, of `parts` parts each, that `qnn.dft` reads."""

    length: int
    inverse: bool
    onesided: bool
    numbers: int
    parts: int

    @property
    def is_real(self) -> bool:
        """Whether the results are real numbers."""
        return self.inverse and self.onesided

    @property
    def made(self) -> int:
        """How many parts a result has."""
        return 1 if self.is_real else 2

    @property
    def results(self) -> int:
        """How many numbers the result has."""
        return count_bins(self.length) if self.onesided and not self.inverse else self.length

    @property
    def most(self) -> int:
        """How many numbers the data may have."""
        return count_bins(self.length) if self.is_real else self.length

    @cached_property
    def factors(self) -> tuple[int, int]:
        """The factors (A, B) of the length with which it takes least time; (1, length) stands for
        the whole matrix.
        """

        def cost(first: int) -> int:
            moves = 0 if first == 1 else MOVES * self.length
            return self.count_with(first, fill_vectors) + moves

        candidates = range(1, math.isqrt(self.length) + 1)
        small = [first for first in candidates if self.length % first == 0]
        best = min([*small, *(self.length // first for first in reversed(small[1:]))], key=cost)
        return best, self.length // best

    @property
    def macs(self) -> int:
        """Multiply-adds of its products."""
        return self.count_with(self.factors[0], int)

    def count_with(self, first: int, fill: Callable[[int], int]) -> int:
        """Count the multiply-adds with the factor `first`, in products of `fill(n)` columns for
        n.
        """
        second = self.length // first
        if first == 1:
            return self.numbers * self.parts * fill(self.results * self.made)
        inner = -(-self.numbers // second) * second * self.parts * fill(2 * first)
        return inner + 2 * self.length * fill(-(-self.results // first) * self.made)

    @property
    def elements(self) -> int:
        """Elements of its largest matrix."""
        first, second = self.factors
        if first == 1:
            return self.numbers * self.parts * self.results * self.made
        return 2 * max(self.parts * first**2, second * -(-self.results // first) * self.made)


def count_bins(length: int) -> int:
    """Return how many results of real numbers are no conjugates of others."""
    return length // 2 + 1


def weigh_bins(length: int, bins: int) -> np.ndarray:
    """Return how many of `length` results each of the first `bins` stands for: all but the first,
    and the one at length / 2, stand for two, which are conjugates.
    """
    weights = np.ones(bins)
    weights[1 : (length + 1) // 2] = 2
    return weights


def fill_vectors(columns: int) -> int:
    """Return the columns of a product that kernels compute: whole vectors, mostly of 16."""
    return -(-columns // 16) * 16


def make_matrix(length: int, results: int, *, inverse: bool) -> np.ndarray:
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


def read_transform(call: Call) -> Transform:
    """Read a call of `qnn.dft`. A symbolic number of numbers is read as 0."""
    attrs, (*_, numbers, parts) = call.attrs, call.args[0].ty.shape.values
    length, inverse, onesided = int(attrs.length), bool(attrs.inverse), bool(attrs.onesided)
    return Transform(length, inverse, onesided, static_size(numbers) or 0, int(parts))


@dataclass(frozen=True)
class ProductEmitter:
    """Emits values in the dtype of the data. All have the outer axes of the data."""

    emit: Emit
    name: str
    outer: tuple[Any, ...]
    dtype: str

    def constant(self, value: np.ndarray) -> relax.Expr:
        return relax.const(value.astype(self.dtype), self.dtype)

    def scale(self, value: relax.Expr, factors: np.ndarray) -> relax.Expr:
        return self.emit(relax.op.multiply(value, self.constant(factors)), f"{self.name}.scaled")

    def multiply(self, value: relax.Expr, matrix: np.ndarray) -> relax.Expr:
        return self.emit(relax.op.matmul(value, self.constant(matrix)), f"{self.name}.product")

    def reshape(self, value: relax.Expr, *sizes: int) -> relax.Expr:
        shaped = relax.op.reshape(value, [*self.outer, *sizes])
        return self.emit(shaped, f"{self.name}.shaped")

    def permute(self, value: relax.Expr, *axes: int) -> relax.Expr:
        count = len(self.outer)
        order = [*range(count), *(count + axis for axis in axes)]
        return self.emit(relax.op.permute_dims(value, order), f"{self.name}.ordered")

    def pad(self, value: relax.Expr, missing: int) -> relax.Expr:
        """Append zeros along the second last axis."""
        widths = [*([0, 0] * len(self.outer)), 0, missing, 0, 0]
        return self.emit(relax.op.nn.pad(value, widths), f"{self.name}.padded")

    def keep(self, value: relax.Expr, count: int) -> relax.Expr:
        """Take the first numbers along the second last axis."""
        axis = [len(self.outer)]
        kept = relax.op.strided_slice(value, axis, [0], [count], [1], assume_inbound=True)
        return self.emit(kept, f"{self.name}.results")


def emit_products(emit: Emit, call: Call, name: str = "dft") -> relax.Expr:
    """Emit what `qnn.dft` computes."""
    (data,), transform = call.args, read_transform(call)
    outer = tuple(data.ty.shape.values[:-2])
    emitter = ProductEmitter(emit, name, outer, str(data.ty.dtype))
    if transform.is_real:
        data = emitter.scale(data, weigh_bins(transform.length, transform.numbers)[:, None])
    return (emit_whole if transform.factors[0] == 1 else emit_steps)(emitter, data, transform)


def emit_whole(emitter: ProductEmitter, data: relax.Expr, transform: Transform) -> relax.Expr:
    """dft(x)  ->  matmul(x, matrix)"""
    numbers, parts = transform.numbers, transform.parts
    matrix = make_matrix(transform.length, transform.results, inverse=transform.inverse)
    matrix = matrix[:numbers, :parts, :, : transform.made].reshape(numbers * parts, -1)
    value = emitter.multiply(emitter.reshape(data, numbers * parts), matrix)
    return emitter.reshape(value, transform.results, transform.made)


def emit_steps(emitter: ProductEmitter, data: relax.Expr, transform: Transform) -> relax.Expr:
    """dft(x)  ->  matmul(permute_dims(turn(matmul(permute_dims(x), first))), second)"""
    (first, second), parts, made = transform.factors, transform.parts, transform.made
    inverse, results = transform.inverse, transform.results
    rows = -(-transform.numbers // second)
    if missing := rows * second - transform.numbers:
        data = emitter.pad(data, missing)
    matrix = make_matrix(first, first, inverse=inverse)[:rows, :parts]
    matrix = matrix.transpose(0, 1, 3, 2)  # real parts side by side, then imaginary ones
    value = emitter.permute(emitter.reshape(data, rows, second, parts), 1, 0, 2)
    value = emitter.reshape(value, second, rows * parts)
    value = emitter.multiply(value, matrix.reshape(rows * parts, 2 * first))
    value = turn(emitter, emitter.reshape(value, second, 2, first), second, first, inverse=inverse)
    groups = -(-results // first)
    matrix = make_matrix(second, groups, inverse=inverse)[..., :made]
    value = emitter.permute(emitter.reshape(value, 2 * second, first), 1, 0)
    value = emitter.multiply(value, matrix.reshape(2 * second, groups * made))
    value = emitter.permute(emitter.reshape(value, first, groups, made), 1, 0, 2)
    value = emitter.reshape(value, first * groups, made)
    return value if results == first * groups else emitter.keep(value, results)


def turn(
    emitter: ProductEmitter, value: relax.Expr, second: int, first: int, *, inverse: bool
) -> relax.Expr:
    """Emit (..., B, 2, A) times exp(-2 pi i b k1 / (A B)), with the other sign for the inverse."""
    angles = np.outer(np.arange(second), np.arange(first)) * (2 * math.pi / (first * second))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None] * (-1 if inverse else 1)
    # (a + b i) (cos - i sin): a cos + b sin, then b cos - a sin
    flipped = relax.op.flip(value, value.ty.ndim - 2)
    swapped = emitter.emit(flipped, f"{emitter.name}.swapped")
    sines = np.concatenate([sin, -sin], axis=1)
    turned = relax.op.add(emitter.scale(value, cos), emitter.scale(swapped, sines))
    return emitter.emit(turned, f"{emitter.name}.turned")
