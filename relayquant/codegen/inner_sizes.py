"""Relax products whose inner size is symbolic on one side -> the same with the other side's number.

TVM cannot compile them. This is the first step of `passes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call

from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.graph import call_name
from relayquant.ir.rewrite.inline import list_dimensions


def settle_inner_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """Give symbolic sizes of inputs the numbers of the products that need them."""
    settled = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for var, func in mod.functions_items():
        if not isinstance(func, relax.Function):
            continue
        given = {size for param in func.params for size in list_dimensions(param.ty)}
        sizes = {size: number for size, number in list_inner_sizes(func) if size in given}
        if sizes:
            settled[var] = func.bind_symbolic_vars(sizes)
    return settled


def list_inner_sizes(func: relax.Function) -> Iterator[tuple[tirx.Var, tirx.IntImm]]:
    """List the symbolic inner sizes of products with the number of the other side."""
    for binding in list_bindings(func):
        call = binding.value
        if not isinstance(call, Call) or call_name(call) != "relax.matmul":
            continue
        shapes: list[list[Any]] = [list_dimensions(operand.ty) for operand in call.args]
        if not all(shapes):
            continue
        pair = shapes[0][-1], shapes[1][-2 if len(shapes[1]) > 1 else -1]
        for size, number in (pair, pair[::-1]):
            if isinstance(size, tirx.Var) and isinstance(number, tirx.IntImm):
                yield size, number
