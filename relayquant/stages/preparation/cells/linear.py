"""Reads values as sums of products: part of a value -> rows times matrices, plus a bias.

`cells` compares the gates of a recurrent cell by them. Reshapes that keep the last axis, slices of
it, and slices of one index of another axis are looked through: rows stay rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.expressions import static_sizes
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import RESHAPES

#: Terms of the longest sum that is read: no gate has so many, and x + x doubles them.
MOST_TERMS = 64


@dataclass(frozen=True)
class PeeledRows:
    """Columns of a value, seen as rows: all its axes but the last are one.

    Attributes:
        value: A variable or a constant.
        start, width: Its columns.
        axis, at: Only index `at` of this axis. axis None: all of it.
    """

    value: relax.Expr
    start: int
    width: int
    axis: int | None = None
    at: int = 0

    def cut(self, start: int, width: int) -> PeeledRows:
        return replace(self, start=self.start + start, width=width)


@dataclass(frozen=True, eq=False)
class LinearTerm:
    """rows @ matrix. The matrix is (columns of the rows, n); None: the rows themselves."""

    rows: PeeledRows
    matrix: np.ndarray | None


@dataclass(frozen=True, eq=False)
class LinearSum:
    """A sum of terms and a bias (n,) float64."""

    bias: np.ndarray
    terms: tuple[LinearTerm, ...] = ()

    def cut(self, start: int, width: int) -> LinearSum:
        """Return some columns."""
        columns = slice(start, start + width)
        terms = (
            LinearTerm(term.rows.cut(start, width), None)
            if term.matrix is None
            else LinearTerm(term.rows, term.matrix[:, columns])
            for term in self.terms
        )
        return LinearSum(self.bias[columns], tuple(terms))


def known_shape(expr: relax.Expr) -> tuple[int, ...] | None:
    """Return the shape of a float32 value with at least one axis. None if a size is not known."""
    shape = tensor_shape(expr) if tensor_dtype(expr) == "float32" else None
    if not shape or not all(isinstance(size, int) for size in shape):
        return None
    return tuple(int(size) for size in shape)


def whole(expr: relax.Expr) -> PeeledRows | None:
    """Return all columns of a value. None if its shape is not known."""
    shape = known_shape(expr)
    return None if shape is None else PeeledRows(expr, 0, shape[-1])


def read_bias(array: np.ndarray | None, width: int) -> np.ndarray | None:
    """Return the row (width,) float64 that a constant adds to each row. None if rows differ."""
    if array is None or not array.size or (array.ndim and array.shape[-1] not in (1, width)):
        return None
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    if (rows != rows[0]).any():
        return None
    return np.broadcast_to(rows[0].astype("float64"), (width,))


class LinearReader:
    """Reads values of an editor. Results are kept, so the editor must not change meanwhile."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self.known: dict[relax.Expr, LinearSum] = {}

    def slice_of(self, expr: relax.Expr) -> tuple[relax.Expr, int, int, int] | None:
        """Return (data, axis, begin, size) of a slice of at most one axis, without steps."""
        call, name = self.editor.call_of(expr), self.editor.op_name(expr)
        if call is not None and name == "relax.take":
            return self.read_take(call)
        if call is None or name != "relax.strided_slice":
            return None
        data, *bounds = call.args
        before, after = known_shape(data), known_shape(expr)
        axes, begins, _, *strides = (
            static_sizes(list(arg.fields)) if isinstance(arg, relax.Tuple) else None
            for arg in bounds
        )
        if before is None or after is None or axes is None or begins is None:
            return None
        if any(row is None or any(step != 1 for step in row) for row in strides):
            return None
        cuts = [(len(before) - 1, 0)]  # of no axis: all columns
        for axis, begin in zip(axes, begins, strict=True):
            axis %= len(before)
            if before[axis] != after[axis]:
                cuts.append((axis, max(0, begin + (before[axis] if begin < 0 else 0))))
        axis, begin = cuts[-1]
        return (data, axis, begin, after[axis]) if len(cuts) < 3 else None

    def read_take(self, call: Call) -> tuple[relax.Expr, int, int, int] | None:
        """Return what `slice_of` does for take with one constant index."""
        data, indices = call.args
        array, shape = constant_value(indices), known_shape(data)
        if array is None or array.size != 1 or shape is None or call.attrs.axis is None:
            return None
        axis, at = int(call.attrs.axis) % len(shape), int(array.item())
        at += shape[axis] if at < 0 else 0
        return (data, axis, at, 1) if 0 <= at < shape[axis] else None

    def peel(self, rows: PeeledRows | None) -> PeeledRows | None:
        """Look through reshapes and slices, up to one slice of an axis of rows."""
        while rows is not None and rows.axis is None:
            inner = self.peel_once(rows)
            if inner is None:
                return rows
            rows = inner
        return rows

    def peel_once(self, rows: PeeledRows) -> PeeledRows | None:
        """Look through one operator. None if it is none of those."""
        value, shape = rows.value, known_shape(rows.value)
        if shape is None:
            return None
        if self.editor.op_name(value) in RESHAPES:
            data = self.editor.call_of(value).args[0]
            inner = known_shape(data)
            same = inner is not None and inner[-1] == shape[-1]
            return replace(rows, value=data) if same and math.prod(inner) else None
        found = self.slice_of(value)
        if found is None:
            return None
        data, axis, begin, size = found
        if axis == data.ty.ndim - 1:  # take with one number removes the axis
            is_kept = shape[-1] == size
            return replace(rows, value=data, start=rows.start + begin) if is_kept else None
        return replace(rows, value=data, axis=axis, at=begin) if size == 1 else None

    def read(self, rows: PeeledRows) -> LinearSum:
        """Read rows as a sum of products."""
        found = self.peel(rows)
        assert found is not None
        if found.axis is not None:
            return self.read_step(found).cut(found.start, found.width)
        if found.value not in self.known:
            self.known[found.value] = self.read_value(found.value)
        return self.known[found.value].cut(found.start, found.width)

    def read_value(self, value: relax.Expr) -> LinearSum:
        """Read a value with all its columns."""
        rows = whole(value)
        assert rows is not None
        width, bias = rows.width, read_bias(constant_value(value), rows.width)
        if bias is not None:
            return LinearSum(bias)
        other = LinearSum(np.zeros(width), (LinearTerm(rows, None),))
        call, name = self.editor.call_of(value), self.editor.op_name(value)
        if call is None:
            return other
        if name == "relax.add":
            parts = [self.read_operand(arg, value) for arg in call.args]
            left, right = parts
            if left is None or right is None or len(left.terms) + len(right.terms) > MOST_TERMS:
                return other
            return LinearSum(left.bias + right.bias, (*left.terms, *right.terms))
        if name == "relax.matmul":
            matrix = constant_value(call.args[1])
            if matrix is None or matrix.ndim != 2 or str(matrix.dtype) != "float32":
                return other
            return self.multiply(call.args[0], matrix) or other
        return other

    def read_operand(self, arg: relax.Expr, result: relax.Expr) -> LinearSum | None:
        """Read an operand of add. None if it is broadcast other than as a bias."""
        shape, wanted = known_shape(arg), known_shape(result)
        if wanted is None:
            return None
        bias = read_bias(constant_value(arg), wanted[-1])
        if bias is not None:
            return LinearSum(bias)
        if shape is None or shape[-1] != wanted[-1] or math.prod(shape) != math.prod(wanted):
            return None
        return self.read(PeeledRows(arg, 0, wanted[-1]))

    def multiply(self, data: relax.Expr, matrix: np.ndarray) -> LinearSum | None:
        """Read a product with a constant matrix."""
        rows = self.peel(whole(data))
        if rows is None:
            return None
        zero = np.zeros(matrix.shape[1])
        if constant_value(rows.value) is not None:
            return None
        call = self.editor.call_of(rows.value)
        shape = known_shape(rows.value)
        is_joined = self.editor.op_name(rows.value) == "relax.concat" and rows.axis is None
        if not is_joined or call is None or shape is None or rows.width != shape[-1]:
            return LinearSum(zero, (LinearTerm(rows, matrix),))
        if int(call.attrs.axis) % len(shape) != len(shape) - 1:
            return LinearSum(zero, (LinearTerm(rows, matrix),))
        terms, first = [], 0
        for operand in call.args[0].fields:
            part = self.peel(whole(operand))
            if part is None:
                return None
            block = matrix[first : first + part.width]
            first += part.width
            array = constant_value(part.value)
            if array is None:
                terms.append(LinearTerm(part, block))
            elif array.any():
                return None
        return LinearSum(zero, tuple(terms))

    def read_step(self, rows: PeeledRows) -> LinearSum:
        """Read one index of a sequence. If a product with a constant made the sequence, the rows
        are those of its operand.
        """
        shape = known_shape(rows.value)
        assert shape is not None
        width, value, bias = shape[-1], rows.value, np.zeros(shape[-1])
        while self.editor.op_name(value) == "relax.add":
            data, added = self.editor.call_of(value).args
            row = read_bias(constant_value(added), width)
            if row is None or known_shape(data) != shape:
                break
            value, bias = data, bias + row
        if self.editor.op_name(value) == "relax.matmul":
            data, weight = self.editor.call_of(value).args
            matrix, inner = constant_value(weight), whole(data)
            is_matrix = matrix is not None and matrix.ndim == 2
            if is_matrix and inner is not None and data.ty.ndim == len(shape):
                source = replace(inner, axis=rows.axis, at=rows.at)
                return LinearSum(bias, (LinearTerm(source, matrix),))
        source = PeeledRows(rows.value, 0, width, rows.axis, rows.at)
        return LinearSum(np.zeros(width), (LinearTerm(source, None),))
