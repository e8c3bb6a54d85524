"""Tails: what follows a product and is computed by its kernel. One walk for integer kernels, float
kernels and those of eager execution; which operators a kernel takes, and how, is a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.ir.rewrite.expressions import (
    op_name,
    read_scalar,
    same_extents,
    same_type,
    shape_of,
)
from relayquant.ir.rewrite.graph import tensor_shape
from relayquant.ir.rewrite.rule import OnSkip, Skip, log_skip


@dataclass(frozen=True, eq=False)
class Tail:
    """A product and what follows it inside its kernel.

    Attributes:
        vars: Values inside, the product first; the last is the result of the kernel.
        axis: The axis of the channels in the product.
        channels: How many there are.
        bias: Added to each channel; one number per channel, or one for all.
        residual: Added to the result, of its shape.
        low, high: Bounds of the result, None without one.
    """

    vars: tuple[relax.Var, ...]
    axis: int
    channels: int
    bias: relax.Expr | None = None
    residual: relax.Expr | None = None
    low: float | None = None
    high: float | None = None

    @property
    def last(self) -> relax.Var:
        """The result of the kernel."""
        return self.vars[-1]

    @property
    def is_bounded(self) -> bool:
        return self.low is not None or self.high is not None

    def other_operand(self, call: Call) -> relax.Expr:
        """What a call of two operands combines with the result so far."""
        return call.args[1] if call.args[0].same_as(self.last) else call.args[0]

    def is_per_channel(self, expr: relax.Expr) -> bool:
        """Whether `expr` has one number for each channel of the product, or one for all."""
        shape, rank = tensor_shape(expr), self.vars[0].ty.ndim
        if shape is None or len(shape) > rank:
            return False
        sizes = (1,) * (rank - len(shape)) + shape
        return all(
            size == 1 or (axis == self.axis and size == self.channels)
            for axis, size in enumerate(sizes)
        )


TailT = TypeVar("TailT", bound=Tail)
#: The tail with what a call, that reads nothing else of it than its result, computes; or why not.
Take = Callable[[TailT, Call], TailT | Skip]


class CallGraph(Protocol):
    """What the walk asks of a graph: a `Graph`, or a `FunctionGraph`."""

    def call_of(self, expr: relax.Var, /) -> Call | None:
        """The operator call that computes a value."""
        ...

    def only_user(self, var: relax.Var, /) -> relax.Var | None:
        """The only value that reads `var`, which the function does not return."""
        ...


def follow_tail(
    graph: CallGraph,
    tail: TailT,
    takes: Mapping[str, Take[TailT]],
    *,
    is_free: Callable[[relax.Var], bool] = lambda _: True,
    on_skip: OnSkip = log_skip,
) -> TailT:
    """The longest tail: the only reader of the last value, as long as there is one, it `is_free`,
    its operator is in `takes`, and takes it.

    A reader of another shape (of which the product is broadcast, say) is none. `on_skip` hears what
    ended the tail.
    """

    def take(user: relax.Var) -> TailT | Skip:
        call = graph.call_of(user)
        name = op_name(call) if call is not None else ""
        if call is None or name not in takes:
            return Skip(f"no part of a kernel is {name or 'what is no operator'}")
        if not same_extents(shape_of(user), shape_of(tail.last)):
            return Skip("the result has another shape")
        if not is_free(user):
            return Skip("another kernel computes it")
        return takes[name](tail, call)

    while (user := graph.only_user(tail.last)) is not None:
        longer = take(user)
        if isinstance(longer, Skip):
            on_skip(follow_tail.__name__, user.name, longer)
            break
        tail = replace(longer, vars=(*tail.vars, user))
    return tail


# ---- what float kernels take ---------------------------------------------------------------------


def take_sum(
    tail: Tail, call: Call, bias: tuple[type[relax.Expr], ...] = (GenericConst,)
) -> Tail | Skip:
    """product + bias, an expression of one of the types `bias`; or + residual, of the same type as
    the product.
    """
    other = tail.other_operand(call)
    if tail.is_bounded:
        return Skip("the result is bounded already")
    if tail.residual is not None:
        return Skip("there is a residual already")
    if tail.bias is None and isinstance(other, bias) and tail.is_per_channel(other):
        return replace(tail, bias=other)
    if other.same_as(tail.last) or not same_type(other, tail.vars[0]):
        return Skip("the other operand is neither one number per channel nor of the same shape")
    return replace(tail, residual=other)


def take_relu(tail: TailT, call: Call) -> TailT | Skip:
    """relu(product)."""
    return Skip("the result is bounded already") if tail.is_bounded else replace(tail, low=0.0)


def take_clip(tail: TailT, call: Call) -> TailT | Skip:
    """clip(product, low, high)."""
    low, high = (read_scalar(arg) for arg in call.args[1:3])
    if tail.is_bounded:
        return Skip("the result is bounded already")
    if low is None or high is None:
        return Skip("a bound is no number")
    return replace(tail, low=low, high=high)


def take_maximum(tail: Tail, call: Call) -> Tail | Skip:
    """maximum(product, low)."""
    low = read_scalar(call.args[1])
    if tail.is_bounded:
        return Skip("the result is bounded already")
    return Skip("the bound is no number") if low is None else replace(tail, low=low)


def take_minimum(tail: Tail, call: Call) -> Tail | Skip:
    """minimum(product, high), perhaps behind a maximum."""
    high = read_scalar(call.args[1])
    if tail.high is not None:
        return Skip("the result is bounded already")
    return Skip("the bound is no number") if high is None else replace(tail, high=high)


def float_takes(*bias: type[relax.Expr]) -> Mapping[str, Take[Tail]]:
    """What the epilogue of a float kernel computes, whose bias is an expression of these types."""
    return {
        "relax.add": partial(take_sum, bias=bias),
        "relax.nn.relu": take_relu,
        "relax.clip": take_clip,
        "relax.maximum": take_maximum,
        "relax.minimum": take_minimum,
    }
