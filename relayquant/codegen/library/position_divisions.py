"""Lowered TIR -> the same TIR where positions are divided as the CPU divides; part of
`host_functions`.

    q = floordiv(i, n)   ->   q = i / n     with a loop i and a size n of a tensor

TVM does not know that sizes are 0 or more. So it adds a correction for negative numbers to each
division, which repeats both operands. A position that is divided by several symbolic sizes, as in
a reshape, became thousands of divisions, and LLVM took minutes. Numbers that are no sizes may be
negative, so what is made of them alone stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

#: Fields of a tensor that `tirx.tvm_struct_get` reads: its shape, and an entry of that.
SHAPE, ENTRY = 2, 17


@dataclass(frozen=True)
class Numbers:
    """What is known of the integers of a function.

    Attributes:
        values: Variable -> its value; of a loop, its least value.
        sizes: Symbolic sizes of its tensors, each 0 or more.
    """

    values: Mapping[tirx.Var, Any]
    sizes: Sequence[Any]


def divide_positions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Round quotients to 0 instead of down where dividend and divisor are 0 or more.

    Divisions by powers of 2 stay: TVM makes shifts of them.
    """
    numbers = collect_numbers(func)

    def divide(division: Any) -> Any:
        a, b = division.a, division.b
        if is_power_of_two(b) or not (is_natural(a, numbers) and is_natural(b, numbers)):
            return division
        return tirx.Div(a, b) if isinstance(division, tirx.FloorDiv) else tirx.Mod(a, b)

    kinds = (tirx.FloorDiv, tirx.FloorMod)
    return func.with_body(tvm_ffi.structural_map(func.body, (kinds, divide)))


def collect_numbers(func: tirx.PrimFunc) -> Numbers:
    """Collect what is known of the integers of a function."""
    values: dict[tirx.Var, Any] = {}
    sizes: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For):
            values[node.loop_var] = node.min
        elif isinstance(node, tirx.Bind):
            values[node.var] = node.value
        else:
            sizes.extend(find_size(each) for each in node.buffer.shape)

    tvm_ffi.structural_walk(func.body, ((tirx.For, tirx.Bind, tirx.DeclBuffer), visit))
    return Numbers(values, [each for each in sizes if not isinstance(each, tirx.IntImm)])


def find_size(size: Any) -> Any:
    """Return what has to be 0 or more if a size is: n for the sizes 2 * n and n // 2."""
    while isinstance(size, (tirx.Mul, tirx.FloorDiv)) and isinstance(size.b, tirx.IntImm):
        if int(size.b) <= 0:
            break
        size = size.a
    return size


def is_power_of_two(divisor: Any) -> bool:
    """Whether a divisor is a constant power of 2."""
    value = divisor.value if isinstance(divisor, tirx.Broadcast) else divisor
    return isinstance(value, tirx.IntImm) and int(value).bit_count() == 1


def is_natural(value: Any, numbers: Numbers) -> bool:
    """Whether an integer is known to be 0 or more, if no sum and no product overflows."""
    if isinstance(value, tirx.IntImm):
        return int(value) >= 0
    if any(tvm_ffi.structural_equal(value, size) for size in numbers.sizes):
        return True
    if isinstance(value, tirx.Var):
        return value in numbers.values and is_natural(numbers.values[value], numbers)
    if isinstance(value, Call):
        return is_size(value, numbers)
    return all(is_natural(part, numbers) for part in list_parts(value))


def list_parts(value: Any) -> Iterator[Any]:
    """List the parts of an expression that have to be 0 or more for it to be.

    One that is not known is its own part, -1.
    """
    if isinstance(value, (tirx.Add, tirx.Mul, tirx.FloorDiv, tirx.Div, tirx.Min)):
        yield from (value.a, value.b)
    elif isinstance(value, tirx.FloorMod):  # it has the sign of the divisor
        yield value.b
    elif isinstance(value, tirx.Mod):  # it has the sign of the dividend
        yield value.a
    elif isinstance(value, tirx.Ramp):
        yield from (value.base, value.stride)
    elif isinstance(value, (tirx.Cast, tirx.Broadcast)) and "int" in str(value.value.ty):
        yield value.value
    else:
        yield tirx.IntImm("int64", -1)


def is_size(call: Call, numbers: Numbers) -> bool:
    """Whether a call reads a size of a tensor."""

    def reads(value: Any, field: int) -> bool:
        is_get = isinstance(value, Call) and value.op.name == "tirx.tvm_struct_get"
        return is_get and int(value.args[2]) == field

    return reads(call, ENTRY) and reads(numbers.values.get(call.args[0]), SHAPE)
