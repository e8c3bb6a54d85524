"""Operators on single numbers behind a product -> the curve that its kernel computes.

y = product(x);  z = y * (erf(y / a) + 1) * b    ->    z = curve(product(x))
"""

from __future__ import annotations

from tvm import relax

from relayquant.codegen.kernels.curve import Curve, CurveStep, Operation
from relayquant.codegen.lowering.engine import BlockView
from relayquant.ir.rewrite.expressions import (
    is_float32,
    op_name,
    read_number,
    same_extents,
    shape_of,
)

#: Operator -> operation of a curve.
CURVE_OPERATIONS = {
    "relax.add": Operation.ADD,
    "relax.subtract": Operation.SUBTRACT,
    "relax.multiply": Operation.MULTIPLY,
    "relax.divide": Operation.DIVIDE,
    "relax.erf": Operation.ERF,
}
#: Longer curves are left to their own kernels.
MOST_STEPS = 12


def follow_curve(block: BlockView, start: relax.Var) -> tuple[tuple[relax.Var, ...], Curve | None]:
    """Find the operators behind `start` that a kernel can compute with it.

    Other values read only the last one.

    Returns:
        The values behind `start` in order, and their curve; () and None without such a value.
    """
    numbers, steps = {start: 0}, list[CurveStep]()
    found: tuple[tuple[relax.Var, ...], Curve | None] = (), None
    while len(steps) < MOST_STEPS and (following := find_step(block, numbers)) is not None:
        var, step = following
        numbers[var] = len(numbers)
        steps.append(step)
        if all(is_inside(block, each, numbers) for each in numbers if each is not var):
            found = tuple(numbers)[1:], Curve(tuple(steps))
    return found


def find_step(
    block: BlockView, numbers: dict[relax.Var, int]
) -> tuple[relax.Var, CurveStep] | None:
    """Find an operator that reads only the values in `numbers`, and numbers."""
    for value in numbers:
        for user in block.users_of(value):
            step = None if user in numbers else read_step(block, user, numbers)
            if step is not None:
                return user, step
    return None


def read_step(block: BlockView, var: relax.Var, numbers: dict[relax.Var, int]) -> CurveStep | None:
    """Read the operator that computes `var`. None if it is none of a curve."""
    call, start = block.call_of(var), next(iter(numbers))
    operation = CURVE_OPERATIONS.get(op_name(call))
    if call is None or operation is None or not block.is_free(var) or not is_float32(var):
        return None
    if not same_extents(shape_of(var), shape_of(start)):
        return None
    operands = [numbers.get(a) if isinstance(a, relax.Var) else read_number(a) for a in call.args]
    known = [each for each in operands if each is not None]
    return CurveStep(operation, tuple(known)) if len(known) == len(operands) else None


def is_inside(block: BlockView, var: relax.Var, numbers: dict[relax.Var, int]) -> bool:
    """Whether only the values in `numbers` read `var`."""
    inside = sum(user in numbers for user in block.users_of(var))
    return inside == block.graph.count_uses(var)
