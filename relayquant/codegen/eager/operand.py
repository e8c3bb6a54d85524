"""Relax expression -> an operand that a step reads without asking TVM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

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
    """What was made of the arrays of the last call. It is kept while they are the same objects."""

    def __init__(self) -> None:
        self.kept: tuple[Sequence[Any], Any] | None = None

    def get(self, arrays: Sequence[Any], make: Callable[..., Any]) -> Any:
        """Return make(*arrays)."""
        before = self.kept
        if before is not None and all(a is b for a, b in zip(before[0], arrays, strict=True)):
            return before[1]
        made = make(*arrays)
        self.kept = arrays, made  # both at once: other threads read it
        return made


Operand: TypeAlias = Variable | ConstantOperand | TupleOperand


def is_operand(expr: relax.Expr) -> bool:
    """Whether an expression is a variable or a constant."""
    return isinstance(expr, relax.Var | GenericConst)


def make_operand(expr: relax.Expr) -> Operand:
    """Make the operand of an expression for which `is_operand` is true."""
    return ConstantOperand(expr.value.numpy()) if isinstance(expr, GenericConst) else Variable(expr)


def find_static_type(var: relax.Var) -> tuple[tuple[int, ...], np.dtype] | None:
    """Return (shape, dtype) of a tensor.

    None if its shape is symbolic, or if it is not a tensor.
    """
    if not isinstance(var.ty, relax.TensorType) or not isinstance(var.ty.shape, relax.ShapeExpr):
        return None
    sizes = static_sizes(shape_of(var))
    return None if sizes is None else (tuple(sizes), np.dtype(str(var.ty.dtype)))
