"""Relax products whose inner size is symbolic on one side -> the same with the other side's number.

TVM cannot compile them. This is the first step of `passes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call

from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.function import list_functions, map_functions
from relayquant.ir.rewrite.graph import call_name
from relayquant.ir.rewrite.inline import list_dimensions


@dataclass(frozen=True, eq=False)
class InnerSize:
    """A symbolic inner size of an input, and the number that a product needs there."""

    param: relax.Var
    size: tirx.Var
    number: int
    product: str  #: the name of its value


def settle_inner_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """Give symbolic sizes of inputs the numbers of the products that need them."""

    def settle(func: relax.Function) -> relax.Function:
        numbers = {each.size: tirx.const(each.number, "int64") for each in list_inner_sizes(func)}
        return func.bind_symbolic_vars(numbers) if numbers else func

    return map_functions(mod, settle)


def describe_conflict(mod: tvm.IRModule) -> str:
    """Describe two products that need different numbers for one size. Return "" without any."""
    for func in list_functions(mod).values():
        found: dict[tirx.Var, InnerSize] = {}
        for each in list_inner_sizes(func):
            first = found.setdefault(each.size, each)
            if first.number != each.number:
                return (
                    f"Input {each.param.name!r}: its size {each.size.name!r} must be "
                    f"{first.number} for the product {first.product!r} and {each.number} for "
                    f"{each.product!r}. No input fits both: check the shapes of their weights."
                )
    return ""


def list_inner_sizes(func: relax.Function) -> Iterator[InnerSize]:
    """List the symbolic inner sizes of products whose other side has a number there."""
    given = {size: param for param in func.params for size in list_dimensions(param.ty)}
    for binding in list_bindings(func):
        call = binding.value
        if not isinstance(call, Call) or call_name(call) != "relax.matmul":
            continue
        shapes: list[list[Any]] = [list_dimensions(operand.ty) for operand in call.args]
        if not all(shapes):
            continue
        pair = pair_inner_sizes(*shapes)
        for size, number in (pair, pair[::-1]):
            if isinstance(number, tirx.IntImm) and isinstance(size, tirx.Var) and size in given:
                yield InnerSize(given[size], size, int(number), binding.var.name)


def pair_inner_sizes(left: Sequence[Any], right: Sequence[Any]) -> tuple[Any, Any]:
    """Return the sizes of the axis that a product of two shapes sums over."""
    return left[-1], right[-2 if len(right) > 1 else -1]
