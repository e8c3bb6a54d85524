"""Relax expression -> an operand that a step reads without asking TVM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from relayquant.base.runtime import freeze_array, view_constant
from relayquant.ir.reference.frame import Frame
from relayquant.ir.rewrite.expressions import shape_of, static_sizes


@dataclass(frozen=True, eq=False)
class Variable:
    """A variable of the function."""

    var: relax.Var

    @property
    def name(self) -> str:
        return self.var.name

    def read(self, frame: Frame) -> Any:
        """Return the value in this call."""
        return frame.values[self.var]


@dataclass(frozen=True, eq=False)
class ConstantOperand:
    """An array, a shape or a number that is the same in every call."""

    value: Any

    def read(self, frame: Frame) -> Any:
        """Return the value, the same object each time."""
        return self.value


@dataclass(frozen=True, eq=False)
class TupleOperand:
    """Several values as a tuple."""

    fields: tuple[Operand, ...]

    def read(self, frame: Frame) -> tuple[Any, ...]:
        """Return the values in this call."""
        return tuple(field.read(frame) for field in self.fields)


class LastMade:
    """What was made of operands in the last call.

    It is kept while their arrays are the same objects with the same bits. What is made reads copies
    of the arrays, so that a caller may change them at any time.
    """

    def __init__(self) -> None:
        self.kept: tuple[Sequence[Any], Sequence[Any], Any] | None = None

    def get(self, frame: Frame, operands: Sequence[Operand], make: Callable[..., Any]) -> Any:
        """Return make(*arrays) of the operands' arrays."""
        before = self.kept
        arrays = [operand.read(frame) for operand in operands]
        if before is not None and all(map(is_unchanged, arrays, *before[:2])):
            return before[2]
        copies = [*map(freeze_array, arrays)]
        made = make(*copies)
        self.kept = arrays, copies, made  # all at once: other threads read it
        return made


Operand: TypeAlias = Variable | ConstantOperand | TupleOperand


#: Up to this many elements, an array is compared as bytes: a fifth of the time.
FEW_ELEMENTS = 256


def is_unchanged(array: np.ndarray, before: np.ndarray, copy: np.ndarray) -> bool:
    """Whether an array is the same object as before, with the bits of its copy. NaN equals NaN,
    and 0 is not -0.
    """
    if array is not before:
        return False
    if array is copy:  # frozen
        return True
    if array.size <= FEW_ELEMENTS:
        return array.tobytes() == copy.tobytes()
    bits = f"uint{8 * array.itemsize}"
    return np.array_equal(array.view(bits), copy.view(bits))


def is_operand(expr: relax.Expr) -> bool:
    """Whether an expression is a variable or a constant."""
    return isinstance(expr, relax.Var | GenericConst)


def make_operand(expr: relax.Expr) -> Operand:
    """Make the operand of an expression for which `is_operand` is true."""
    if not isinstance(expr, GenericConst):
        return Variable(expr)
    return ConstantOperand(freeze_array(view_constant(expr.value)))


def find_static_type(var: relax.Var) -> tuple[tuple[int, ...], np.dtype] | None:
    """Return (shape, dtype) of a tensor.

    None if its shape is symbolic, or if it is not a tensor.
    """
    if not isinstance(var.ty, relax.TensorType) or not isinstance(var.ty.shape, relax.ShapeExpr):
        return None
    sizes = static_sizes(shape_of(var))
    return None if sizes is None else (tuple(sizes), np.dtype(str(var.ty.dtype)))
