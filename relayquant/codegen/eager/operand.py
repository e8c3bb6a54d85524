"""Relax expression -> an operand that a step reads without asking TVM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from relayquant.ir.reference.frame import Frame


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
    """A value that is the same in every call."""

    array: np.ndarray

    def read(self, frame: Frame) -> np.ndarray:
        """Return the value, the same array each time."""
        return self.array


Operand: TypeAlias = Variable | ConstantOperand


def is_operand(expr: relax.Expr) -> bool:
    """Whether an expression is a variable or a constant."""
    return isinstance(expr, relax.Var | GenericConst)


def make_operand(expr: relax.Expr) -> Operand:
    """Make the operand of an expression for which `is_operand` is true."""
    return ConstantOperand(expr.value.numpy()) if isinstance(expr, GenericConst) else Variable(expr)
