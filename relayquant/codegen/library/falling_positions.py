"""TIR -> the same TIR without quotients and remainders of positions that fall; part of
`host_functions`.

    floordiv(39 - i, 20)   ->   -floordiv(i - 20, 20)
    floormod(39 - i, 20)   ->   19 - floormod(i - 20, 20)

A reversed axis that is reshaped has such positions. TVM's `FlattenBuffer` simplifies their sum to
another place, which may lie outside the buffer (`iter_map_simplify` of 0.27).
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import s_tir, tirx


def turn_positions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Divide n - 1 - a instead of a, where a is a sum in which each loop is subtracted. Divisors
    are sizes, so positive. Quotients of data stay.
    """
    loops: set[tirx.Var] = set()

    def visit(node: Any) -> None:
        found = [node.loop_var] if isinstance(node, tirx.For) else [v.var for v in node.iter_vars]
        loops.update(found)

    tvm_ffi.structural_walk(func.body, ((tirx.For, s_tir.SBlock), visit))

    def divide(division: Any) -> Any:
        a, n = division.a, division.b
        if list_signs(a, 1, loops) != {-1} or list_signs(n, 1, loops):
            return division
        turned = type(division)(n - 1 - a, n)
        return -turned if isinstance(division, tirx.FloorDiv) else n - 1 - turned

    kinds = (tirx.FloorDiv, tirx.FloorMod)
    return func.with_body(tvm_ffi.structural_map(func.body, (kinds, divide)))


def list_signs(value: Any, sign: int, loops: set[tirx.Var]) -> set[int]:
    """List the signs, 1 or -1, of the terms of a sum that hold a loop. Data has both."""
    if isinstance(value, tirx.IntImm):
        return set()
    if isinstance(value, tirx.Var):
        return {sign} if value in loops else set()
    if isinstance(value, tirx.Mul) and isinstance(value.b, tirx.IntImm):
        return list_signs(value.a, sign if int(value.b) > 0 else -sign, loops)
    if isinstance(value, (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod)):
        after = -sign if isinstance(value, tirx.Sub) else sign
        return list_signs(value.a, sign, loops) | list_signs(value.b, after, loops)
    return {1, -1}
