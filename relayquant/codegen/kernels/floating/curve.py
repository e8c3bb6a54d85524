"""A function of single numbers behind a product, such as GELU -> operations on vectors of float32.

Kernels on tiles compute it while the tiles of the next block are multiplied.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add, mul, sub, truediv

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import alloc_vectors, constant, load_vector, store_vector
from relayquant.codegen.kernels.isa.base import Expr

#: erf(x) is x * P(x^2) / Q(x^2) up to the limit: Eigen, perf.
ERF_LIMIT = 4.0
ERF_NUMERATOR = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
ERF_DENOMINATOR = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


class Operation(enum.Enum):
    """Operations on one or two numbers."""

    ADD = "add"
    SUBTRACT = "subtract"
    MULTIPLY = "multiply"
    DIVIDE = "divide"
    ERF = "erf"


@dataclass(frozen=True)
class CurveStep:
    """An operation. Operands are numbers (float), or values by their position (int).

    The value at 0 is the argument of the curve, the value at i is the result of step i - 1.
    """

    operation: Operation
    operands: tuple[int | float, ...]


@dataclass(frozen=True)
class Curve:
    """A function of a number: the result of the last step."""

    steps: tuple[CurveStep, ...]

    def apply(self, value: Expr, lanes: int) -> Expr:
        """Emit the function of a vector. NaN gives NaN."""
        values = [keep(value, lanes)]
        for step in self.steps:
            operands = [
                values[each] if isinstance(each, int) else constant("float32", each, lanes)
                for each in step.operands
            ]
            if step.operation is Operation.ERF:
                result = emit_erf(*operands, lanes)
            else:
                result = ARITHMETIC[step.operation](*operands)
            values.append(keep(result, lanes))
        return values[-1]


ARITHMETIC: dict[Operation, Callable[[Expr, Expr], Expr]] = {
    Operation.ADD: add,
    Operation.SUBTRACT: sub,
    Operation.MULTIPLY: mul,
    Operation.DIVIDE: truediv,
}


def keep(value: Expr, lanes: int) -> Expr:
    """Compute a value now. TVM would repeat its expression wherever a name of it is read."""
    (memory,) = alloc_vectors(1, lanes, "float32")
    store_vector(memory, value, 0, lanes)
    return load_vector(memory, 0, lanes)


def emit_erf(value: Expr, lanes: int) -> Expr:
    """Emit erf. The error is at most 5e-7."""
    x = keep(clamp(value, -ERF_LIMIT, ERF_LIMIT, lanes), lanes)
    square = keep(x * x, lanes)
    ratio = x * horner(square, ERF_NUMERATOR, lanes) / horner(square, ERF_DENOMINATOR, lanes)
    return clamp(keep(ratio, lanes), -1, 1, lanes)


def clamp(x: Expr, low: float, high: float, lanes: int = 1) -> Expr:
    """Clamp x to the bounds.

    NaN stays, since its comparisons are false (`isnan` is not vectorized).
    """
    least, most = constant("float32", low, lanes), constant("float32", high, lanes)
    return T.Select(x < least, least, T.Select(x > most, most, x))


def horner(x: Expr, coefficients: Sequence[float], lanes: int = 1) -> Expr:
    """Build the polynomial with these coefficients, highest power first."""
    result = constant("float32", coefficients[0], lanes)
    for coefficient in coefficients[1:]:
        result = result * x + constant("float32", coefficient, lanes)
    return result
