"""Scheduled TIR -> the same TIR where LLVM cannot see that positions repeat.

    y[i, j] = x[i % 3, j % 8]    ->    y[i, j] = x[i % 3, annotation(j % 8)]

LLVM makes vectors of such a loop over j as if j % 8 were j: of a Tile, up to seven of eight values
came from other positions. It does so for remainders of powers of two beside a division by another
number. Its intrinsic "annotation" returns its argument, and nothing is known about the result.
Loops that the schedule made vectors of are left as they are.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.target import Target

#: Largest divisor whose remainders an int32 holds.
LARGEST = 1 << 31

DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


def hide_periods(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Hide remainders of powers of two in the scalar blocks of a function with other divisions."""
    if not has_other_division(func):
        return func
    vectors: list[s_tir.SBlockRealize] = []

    def note(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.VECTORIZED:
            tvm_ffi.structural_walk(loop.body, (s_tir.SBlockRealize, vectors.append))

    def hide_in(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        # The root holds the other blocks.
        if not realize.iter_values or any(
            realize.block.body.same_as(v.block.body) for v in vectors
        ):
            return realize
        return tvm_ffi.structural_map(realize, (tirx.FloorMod, hide))

    tvm_ffi.structural_walk(func.body, (tirx.For, note))
    return func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlockRealize, hide_in)))


def has_other_division(func: tirx.PrimFunc) -> bool:
    """Whether a function divides by a number that is no power of two, or by one not known yet."""
    found: list[Any] = []

    def note(division: Any) -> None:
        if not is_power_of_two(division.b):
            found.append(division)

    tvm_ffi.structural_walk(func.body, (DIVISIONS, note))
    return bool(found)


def is_power_of_two(number: Any) -> bool:
    value = int(number) if isinstance(number, tirx.IntImm) else 0
    return value > 0 and value & (value - 1) == 0


def hide(remainder: tirx.FloorMod) -> Any:
    """Hide a remainder of a power of two."""
    dtype = str(remainder.ty)
    if not is_power_of_two(remainder.b) or int(remainder.b) > LARGEST or "int" not in dtype:
        return remainder
    nothing = tirx.reinterpret("handle", tirx.const(0, "uint64"))
    narrow, line = tirx.Cast("int32", remainder), tirx.const(0, "int32")
    hidden = tirx.call_llvm_intrin("int32", "llvm.annotation", narrow, nothing, nothing, line)
    return tirx.Cast(dtype, hidden)


def create_hiding_pass(target: Target) -> Any:
    """Make a pass that applies `hide_periods` to every TIR function. Only LLVM targets are
    changed.
    """

    def run(func: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        return hide_periods(func) if target.kind.name == "llvm" else func

    return tirx.transform.prim_func_pass(run, opt_level=0, name="relayquant.HidePeriods")
