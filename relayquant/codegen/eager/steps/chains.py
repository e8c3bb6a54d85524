"""Chains of operators on single float32 values -> steps that run one kernel for all sizes.

Hard swish is add, clip, multiply, divide: four passes over memory in numpy, one here. Numbers of
the model are arguments of the kernel, so that it depends on the operators only. Each operation
rounds as numpy's does, and a sigmoid as its own kernel. Only the sign of a zero may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.eager.steps.rows import emit_sigmoid, make_each
from relayquant.codegen.kernels.emit import broadcast
from relayquant.codegen.kernels.floating.tile import Buffer, Expr, FloatIsa
from relayquant.codegen.kernels.isa.base import fence
from relayquant.ir.rewrite.expressions import (
    FunctionGraph,
    is_float32,
    op_name,
    read_number,
    same_type,
)

#: Operators in a chain, at least. A kernel saves the passes between them.
FEWEST_LINKS = 3
#: The same for a chain with a sigmoid, which has a kernel anyway.
FEWEST_WITH_SIGMOID = 2


def emit_clip(value: Expr, low: Expr, high: Expr) -> Expr:
    """Emit numpy's clip, which keeps NaN."""
    value = T.bind(T.Select(value < low, low, value))
    return T.Select(value > high, high, value)


#: operator -> what it computes of its operands
LINKS: Mapping[str, Callable[..., Expr]] = {
    "relax.add": lambda left, right: left + right,
    "relax.subtract": lambda left, right: left - right,
    "relax.multiply": lambda left, right: left * right,
    "relax.divide": lambda left, right: left / right,
    "relax.clip": emit_clip,
    "relax.sigmoid": emit_sigmoid,
}
#: With a sum behind it, LLVM would round once instead of twice.
PRODUCT = "relax.multiply"
SIGMOID = "relax.sigmoid"

#: operands of a link, beside the indices of numbers: what the chain reads, and the link before
DATA, LAST = "data", "last"


@dataclass(frozen=True)
class Chain:
    """Operators with their operands, in order: `DATA`, `LAST`, or the index of a number."""

    links: tuple[tuple[str, tuple[str | int, ...]], ...]


def make_chain(spec: Chain, isa: FloatIsa, name: str) -> PrimFunc:
    """Make PrimFunc(x (n, 1), numbers (m,), y (n, 1)), as `make_each` does.

    A chain that reads no number has no argument `numbers`.
    """
    count = sum(is_index(each) for _, operands in spec.links for each in operands)

    def compute(data: Expr, width: int, numbers: Buffer = None) -> Expr:
        last = data
        for operator, operands in spec.links:
            known = {DATA: data, LAST: last}
            values = [
                broadcast(numbers[each], width) if is_index(each) else known[each]
                for each in operands
            ]
            if operator == SIGMOID:
                values.append(width)
            last = LINKS[operator](*values)
            last = T.bind(fence(last, width) if operator == PRODUCT else last)
        return last

    return make_each(compute, isa, name, *([("numbers", (count,))] if count else []))


def is_index(operand: str | int) -> bool:
    """Whether an operand of a link is the index of a number."""
    return isinstance(operand, int)


@dataclass(frozen=True, eq=False)
class FoundChain:
    """A chain in a function.

    Attributes:
        chain: The operators.
        data: The value that it reads.
        numbers: The numbers of the model.
        vars: Its values; the last is its result, which alone is read elsewhere.
    """

    chain: Chain
    data: relax.Var
    numbers: tuple[float, ...]
    vars: tuple[relax.Var, ...]


def find_chain(
    graph: FunctionGraph, first: relax.Var, is_free: Callable[[relax.Var], bool]
) -> FoundChain | None:
    """Return the longest chain that begins with the value `first`. None if it is too short."""
    call = graph.call_of(first)
    read = [] if call is None else [arg for arg in call.args[:] if isinstance(arg, relax.Var)]
    if not read or not is_float32(first):
        return None
    data, numbers, links, vars_ = read[0], [], [], []
    for var, link in follow_links(graph, first, data, numbers):
        if not is_free(var):
            break
        vars_.append(var)
        links.append(link)
    has_sigmoid = any(name == SIGMOID for name, _ in links)
    if len(links) < (FEWEST_WITH_SIGMOID if has_sigmoid else FEWEST_LINKS):
        return None
    return FoundChain(Chain(tuple(links)), data, tuple(numbers), tuple(vars_))


def follow_links(
    graph: FunctionGraph, first: relax.Var, data: relax.Var, numbers: list[float]
) -> Iterator[tuple[relax.Var, tuple[str, tuple[str | int, ...]]]]:
    """Yield values and links from `first` on, and append what they read to `numbers`."""
    var, last = first, None
    while True:
        call = graph.call_of(var)
        name = op_name(call) if call is not None else ""
        if call is None or name not in LINKS or not same_type(var, data):
            return
        read: list[float] = []
        operands = [*name_operands(call.args[:], data, last, len(numbers), read)]
        if None in operands:
            return
        numbers.extend(read)
        yield var, (name, tuple(each for each in operands if each is not None))
        users = graph.users_of(var)
        if graph.count_uses(var) != 1 or len(users) != 1:
            return
        var, last = users[0], var


def name_operands(
    args: Sequence[Any],
    data: relax.Var,
    last: relax.Var | None,
    known: int,
    read: list[float],
) -> Iterator[str | int | None]:
    """Yield the operands of a link. None for a value that the chain does not know; numbers are
    appended to `read`.
    """
    for arg in args:
        if isinstance(arg, relax.Var):
            is_last = last is not None and arg.same_as(last)
            yield LAST if is_last else DATA if arg.same_as(data) else None
        elif (number := read_number(arg)) is not None:
            yield known + len(read)
            read.append(number)
        else:
            yield None
