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

#: erf(x) is x * P(2 (x / limit)^2 - 1) up to the limit, beyond which it rounds to 1. Least largest
#: error, by Lawson's weights. A quotient of shorter polynomials would take longer: a division takes
#: as long as 32 other operations.
ERF_LIMIT = 3.8
ERF_COEFFICIENTS = (
    1.0776696726679802e-3,
    -2.742362441495061e-3,
    2.204068936407566e-3,
    -3.167010610923171e-3,
    1.0133862495422363e-2,
    -1.8476292490959167e-2,
    2.6592446491122246e-2,
    -3.886658325791359e-2,
    5.508380010724068e-2,
    -7.253333926200867e-2,
    9.082935005426407e-2,
    -1.1118374764919281e-1,
    1.377396583557129e-1,
    -1.8564125895500183e-1,
    3.721076250076294e-1,
)
#: Of x^2, in the argument of the polynomial.
ERF_FACTOR = 2 / ERF_LIMIT**2


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
        for step in map(avoid_division, self.steps):
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


def avoid_division(step: CurveStep) -> CurveStep:
    """x / number -> x * (1 / number), which may be off by one unit in the last place."""
    divisor = step.operands[-1]
    if step.operation is not Operation.DIVIDE or isinstance(divisor, int):
        return step
    factor = invert(divisor)
    return step if factor is None else CurveStep(Operation.MULTIPLY, (*step.operands[:-1], factor))


def invert(divisor: float) -> float | None:
    """Return 1 / divisor. None if it is no normal float32 number, or the divisor is none."""
    return 1 / divisor if 2.0**-126 <= abs(divisor) <= 2.0**126 else None


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
    """Emit erf. The error is at most 3e-7."""
    x = keep(clamp(value, -ERF_LIMIT, ERF_LIMIT, lanes), lanes)
    factor, one = constant("float32", ERF_FACTOR, lanes), constant("float32", 1, lanes)
    place = keep(x * x * factor - one, lanes)
    numbers = [constant("float32", each, lanes) for each in ERF_COEFFICIENTS]
    factor = estrin(place, numbers, lambda power, make: make(keep(power, lanes)))
    return clamp(keep(x * factor, lanes), -1, 1, lanes)


def clamp(x: Expr, low: float, high: float, lanes: int = 1) -> Expr:
    """Clamp x to the bounds, in two instructions.

    NaN stays, since its comparisons are false (`isnan` is not vectorized).
    """
    least, most = constant("float32", low, lanes), constant("float32", high, lanes)
    bounded = T.Select(x > most, most, x)
    return T.Select(bounded < least, least, bounded)


def horner(x: Expr, coefficients: Sequence[float], lanes: int = 1) -> Expr:
    """Build the polynomial with these coefficients, highest power first."""
    result = constant("float32", coefficients[0], lanes)
    for coefficient in coefficients[1:]:
        result = result * x + constant("float32", coefficient, lanes)
    return result


def estrin(
    x: Expr, coefficients: Sequence[Expr], bind: Callable[[Expr, Callable[[Expr], Expr]], Expr]
) -> Expr:
    """Build the polynomial with these coefficients, highest power first, from pairs of pairs.

    It takes a few operations more than `horner`, and few of them wait for each other: a CPU begins
    some 100 operations ahead, which are the operations of three long polynomials.

    Args:
        x: A variable.
        coefficients: At least one.
        bind: (value, make) -> `make(variable)`, where the variable is the value, computed once.
    """

    def join_pairs(power: Expr, parts: Sequence[Expr]) -> Expr:
        """Join the parts of powers 0, 1, 2 .. of `power`."""
        pairs = [low + high * power for low, high in zip(parts[::2], parts[1::2], strict=False)]
        pairs += parts[2 * len(pairs) :]
        if len(pairs) == 1:
            return pairs[0]
        return bind(power * power, lambda square: join_pairs(square, pairs))

    return join_pairs(x, coefficients[::-1])
