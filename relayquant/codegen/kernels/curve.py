"""A function of single numbers behind a product, such as GELU -> operations on vectors of float32.

Kernels on tiles compute it while the tiles of the next block are multiplied.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
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

    The value at 0 is the argument of the curve, the value at i is the result of step i - 1. ERF
    takes up to two numbers after its operand x: erf(x * second) + first.
    """

    operation: Operation
    operands: tuple[int | float, ...]


@dataclass(frozen=True)
class Curve:
    """A function of a number: the result of the last step."""

    steps: tuple[CurveStep, ...]

    @cached_property
    def emitted(self) -> tuple[CurveStep, ...]:
        """The steps as they are computed, in fewer operations. Some are read no more."""
        steps: list[CurveStep] = []
        for step in self.steps:
            steps.append(join_steps(avoid_division(step), steps))
        return tuple(steps)

    def find_bounds(self, most: float) -> list[float]:
        """Return bounds of the magnitudes of all values; `most` is the one of the argument."""
        bounds = [most]
        for step in self.emitted:
            operands = [bounds[each] if isinstance(each, int) else each for each in step.operands]
            bounds.append(BOUNDS[step.operation](*map(abs, operands)))
        return bounds

    def split_factor(self) -> tuple[Curve, float]:
        """Split the number by which the last steps multiply: (curve, number)."""
        *others, last = self.steps
        value, number = split_number(last)
        is_behind_others = bool(others) and value == len(others)  # a curve has a step
        if number is None or last.operation is not Operation.MULTIPLY or not is_behind_others:
            return self, 1.0
        curve, factor = Curve(tuple(others)).split_factor()
        return curve, factor * number

    def apply(self, value: Expr, lanes: int) -> Expr:
        """Emit the function of a vector. NaN gives NaN."""
        steps, values = self.emitted, [keep(value, lanes)]
        read = {each for step in steps for each in step.operands if isinstance(each, int)}
        for number, step in enumerate(steps, 1):
            if number not in read and number < len(steps):
                values.append(value)  # of which nothing depends
                continue
            if step.operation is Operation.ERF:
                operand, *numbers = step.operands
                result = emit_erf(values[int(operand)], lanes, *numbers)
            else:
                operands = (
                    values[each] if isinstance(each, int) else constant("float32", each, lanes)
                    for each in step.operands
                )
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


def join_steps(step: CurveStep, before: Sequence[CurveStep]) -> CurveStep:
    """Join erf with the product with a number before it, or the sum with a number behind it.

    erf(x * a)  ->  ERF(x, 0, a);    ERF(x, 0, a) + b  ->  ERF(x, b, a)
    """
    if step.operation is Operation.ERF:
        earlier = find_step(step.operands[0], before, Operation.MULTIPLY)
        value, factor = split_number(earlier) if earlier else (None, None)
        if value is not None and factor is not None and 2.0**-10 <= abs(factor) <= 2.0**10:
            return CurveStep(Operation.ERF, (value, 0.0, factor))
    if step.operation is Operation.ADD:
        value, offset = split_number(step)
        earlier = find_step(value, before, Operation.ERF)
        if earlier is not None and offset is not None and earlier.operands[1:2] in ((), (0.0,)):
            return CurveStep(Operation.ERF, (earlier.operands[0], offset, *earlier.operands[2:]))
    return step


def find_step(
    value: int | float | None, steps: Sequence[CurveStep], operation: Operation
) -> CurveStep | None:
    """Return the step that computes a value, if it is this operation."""
    if not isinstance(value, int) or value == 0:
        return None
    step = steps[value - 1]
    return step if step.operation is operation else None


def split_number(step: CurveStep) -> tuple[int | None, float | None]:
    """Return the operand that is a value, and the one that is a number. None if there are two."""
    values = [each for each in step.operands if isinstance(each, int)]
    numbers = [each for each in step.operands if isinstance(each, float)]
    return (values[0], numbers[0]) if len(values) == 1 == len(numbers) else (None, None)


def invert(divisor: float) -> float | None:
    """Return 1 / divisor. None if it is no normal float32 number, or the divisor is none."""
    return 1 / divisor if 2.0**-126 <= abs(divisor) <= 2.0**126 else None


ARITHMETIC: dict[Operation, Callable[[Expr, Expr], Expr]] = {
    Operation.ADD: add,
    Operation.SUBTRACT: sub,
    Operation.MULTIPLY: mul,
    Operation.DIVIDE: truediv,
}

#: Bounds of the operands' magnitudes -> a bound of the result's.
BOUNDS: dict[Operation, Callable[..., float]] = {
    Operation.ADD: add,
    Operation.SUBTRACT: add,
    Operation.MULTIPLY: mul,
    Operation.DIVIDE: lambda *_: inf,
    Operation.ERF: lambda _, offset=0.0, factor=1.0: 1.0 + offset,
}


def keep(value: Expr, lanes: int) -> Expr:
    """Compute a value now. TVM would repeat its expression wherever a name of it is read."""
    (memory,) = alloc_vectors(1, lanes, "float32")
    store_vector(memory, value, 0, lanes)
    return load_vector(memory, 0, lanes)


def emit_erf(value: Expr, lanes: int, offset: float = 0.0, factor: float = 1.0) -> Expr:
    """Emit erf(value * factor) + offset. The error is at most 3e-7, and a rounding of the sum."""
    most = constant("float32", (ERF_LIMIT / factor) ** 2, lanes)
    square = keep(value * value, lanes)
    bounded = T.Select(square > most, most, square)  # NaN stays
    scale, one = constant("float32", ERF_FACTOR * factor**2, lanes), constant("float32", 1, lanes)
    place = keep(bounded * scale - one, lanes)
    coefficients = [each * factor for each in ERF_COEFFICIENTS]
    ratio = keep(split_horner(place, keep(place * place, lanes), coefficients, lanes), lanes)
    result = keep(value * ratio + constant("float32", offset, lanes), lanes)
    return clamp(result, offset - 1, offset + 1, lanes)


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


def split_horner(x: Expr, square: Expr, coefficients: Sequence[float], lanes: int = 1) -> Expr:
    """Build the same polynomial from its even and odd powers, for the square of x.

    It takes one operation more, and the two halves do not wait for each other. In one chain each
    operation waits for the one before it, and a CPU can look only some 100 operations ahead.
    """
    even, odd = coefficients[-1::-2][::-1], coefficients[-2::-2][::-1]
    return horner(square, even, lanes) + x * horner(square, odd, lanes)
