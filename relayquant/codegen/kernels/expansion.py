"""Stored weights -> expanded weights that a kernel reads: the weights of Winograd's transforms.

    expanded[p, n] = sum over t of matrix[p, t] * taps[t, n]

A library holds the taps, and expands them when a kernel first asks for the weights. For modules in
memory numpy does the same here, with equal bits: all products are exact and sums have one order. So
it does not matter whether a target fuses a product and a sum to an FMA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.ir import PrimType
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import constant, load_vector, store_vector, vector
from relayquant.codegen.kernels.isa.base import Expr

#: Bytes of a vector of sums.
VECTOR_BYTES = 64
#: Columns that numpy expands at once. Their taps stay in the second-level cache.
COLUMNS = 8192
#: Low bits of a float64 that must be 0 in a coefficient: 29 bits times the 24 of a float32 fit 53.
LOW_BITS = 2**24 - 1


@dataclass(frozen=True, eq=False)
class Expansion:
    """How one kind of weights is expanded.

    Attributes:
        matrix: float64 [points, taps]; integers if sums are integers.
        taps: Dtype of the stored taps.
        sums: Dtype in which products are added up: float64, or integers that hold all results.
        dtype: Dtype of the expanded weights.
    """

    matrix: NDArray[np.float64]
    taps: str
    sums: str
    dtype: str

    @property
    def name(self) -> str:
        """Name of the function that expands these weights in a library."""
        return f"relayquant_expand_{self.dtype}"

    def list_terms(self) -> list[list[tuple[int, float]]]:
        """List for each point the (tap, coefficient) pairs of its sum, in order."""
        parts = split_coefficients if self.sums == "float64" else lambda value: iter([value])
        return [
            [(tap, part) for tap, value in enumerate(row) for part in parts(float(value)) if part]
            for row in self.matrix
        ]


@dataclass(frozen=True, eq=False)
class Expanded:
    """Weights as a library stores them: taps [taps, columns], the columns in a kernel's order."""

    rule: Expansion
    taps: NDArray

    @property
    def columns(self) -> int:
        """Columns of the matrix of taps."""
        return self.taps.shape[1]

    @property
    def size(self) -> int:
        """Elements of the expanded weights."""
        return len(self.rule.matrix) * self.columns

    @property
    def byte_count(self) -> int:
        """Bytes of the expanded weights."""
        return self.size * np.dtype(self.rule.dtype).itemsize

    def expand(self) -> NDArray:
        """Compute the weights [points * columns] that the kernel reads."""
        rule, terms = self.rule, self.rule.list_terms()
        points = np.empty((len(terms), self.columns), rule.dtype)
        for start in range(0, self.columns, COLUMNS):
            taps = self.taps[:, start : start + COLUMNS].astype(rule.sums)
            sums, product = np.empty_like(taps[0]), np.empty_like(taps[0])
            for point, row in zip(points, terms, strict=True):
                sums[:] = 0
                for tap, coefficient in row:
                    np.multiply(taps[tap], sums.dtype.type(coefficient), out=product)
                    np.add(sums, product, out=sums)
                point[start : start + COLUMNS] = sums
        return points.reshape(-1)


def split_coefficients(value: float) -> Iterator[float]:
    """Split `value` into two numbers whose products with a float32 are exact in float64."""
    high = (np.array(value).view("int64") & ~LOW_BITS).view("float64")
    yield float(high)
    yield value - float(high)


def build_expansion(rule: Expansion) -> PrimFunc:
    """Build a C function int32 f(taps, expanded, columns) for at least 64 columns. It returns 0."""
    lanes, terms = VECTOR_BYTES // np.dtype(rule.sums).itemsize, rule.list_terms()
    with IRBuilder() as builder, T.prim_func():
        T.func_name(rule.name)
        # 1: for TVM the arguments are packed already.
        T.func_attr({"global_symbol": rule.name, "calling_conv": 1, "tirx.noalias": True})
        source = T.arg("source", T.handle(rule.taps))
        target = T.arg("target", T.handle(rule.dtype))
        columns = T.arg("columns", T.int64())
        T.func_ret(PrimType("int32"))
        taps = T.decl_buffer((rule.matrix.shape[1] * columns,), rule.taps, data=source)
        expanded = T.decl_buffer((len(terms) * columns,), rule.dtype, data=target)
        wide = vector(rule.sums, lanes)
        with T.serial(T.floordiv(columns + (lanes - 1), T.int64(lanes))) as index:
            first = T.bind(T.min(index * lanes, columns - lanes))  # the last vector overlaps
            loaded = [
                T.bind(T.Cast(wide, load_vector(taps, tap * columns + first, lanes)))
                for tap in range(rule.matrix.shape[1])
            ]
            for point, row in enumerate(terms):
                total: Expr = constant(rule.sums, 0, lanes)
                for tap, coefficient in row:
                    total = total + loaded[tap] * constant(rule.sums, coefficient, lanes)
                value = T.Cast(vector(rule.dtype, lanes), total)
                store_vector(expanded, value, point * columns + first, lanes)
        T.add_to_parent(T.Return(T.int32(0)))
    func: Any = builder.get()
    return func
