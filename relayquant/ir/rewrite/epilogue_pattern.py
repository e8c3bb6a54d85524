"""Epilogue chains: a product and the operators behind it that its kernel computes too.

Integer kernels, float kernels and eager execution use the same walk. Each has a table of the
operators that its kernels take.
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
    read_number,
    same_extents,
    same_type,
    shape_of,
)
from relayquant.ir.rewrite.graph import tensor_shape
from relayquant.ir.rewrite.rule import Skip, log_skip


@dataclass(frozen=True, eq=False)
class EpilogueChain:
    """A product and the operators behind it that run inside its kernel.

    Attributes:
        vars: Values inside. The first is the product, the last is the result of the kernel.
        axis: Channel axis of the product.
        channels: Number of channels.
        bias: Added to the channels: one number per channel, or one for all.
        residual: Added to the result, with the same shape.
        low, high: Bounds of the result, or None.
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
        """Return the operand of a binary call that is not the last value of the chain."""
        return call.args[1] if call.args[0].same_as(self.last) else call.args[0]

    def is_per_channel(self, expr: relax.Expr) -> bool:
        """Whether `expr` has one number per channel of the product, or one for all."""
        shape, rank = tensor_shape(expr), self.vars[0].ty.ndim
        if shape is None or len(shape) > rank:
            return False
        sizes = (1,) * (rank - len(shape)) + shape
        return all(
            size == 1 or (axis == self.axis and size == self.channels)
            for axis, size in enumerate(sizes)
        )


ChainT = TypeVar("ChainT", bound=EpilogueChain)
#: Extends the chain by a call that reads only the chain's result, or returns Skip with the reason.
Take = Callable[[ChainT, Call], ChainT | Skip]


class CallGraph(Protocol):
    """Interface of a graph that the walk needs: a `Graph` or a `FunctionGraph`."""

    def call_of(self, expr: relax.Var, /) -> Call | None:
        """Return the operator call that computes a value."""
        ...

    def only_user(self, var: relax.Var, /) -> relax.Var | None:
        """Return the only value that reads `var`, if the function does not return `var`."""
        ...


def follow_epilogue(
    graph: CallGraph,
    chain: ChainT,
    takes: Mapping[str, Take[ChainT]],
    *,
    is_free: Callable[[relax.Var], bool] = lambda _: True,
) -> ChainT:
    """Extend the chain as far as possible by the only reader of its last value.

    The reader must satisfy `is_free`, and its operator must be in `takes` and accept it.

    A reader with another shape ends the chain, for example if it broadcasts the product. The
    reason that ended the chain is logged.
    """

    def take(user: relax.Var) -> ChainT | Skip:
        call = graph.call_of(user)
        name = op_name(call) if call is not None else ""
        if call is None or name not in takes:
            return Skip(f"a kernel cannot include {name or 'a value without operator'}")
        if not same_extents(shape_of(user), shape_of(chain.last)):
            return Skip("the result has another shape")
        if not is_free(user):
            return Skip("another kernel computes it")
        return takes[name](chain, call)

    while (user := graph.only_user(chain.last)) is not None:
        longer = take(user)
        if isinstance(longer, Skip):
            log_skip(follow_epilogue.__name__, user.name, longer)
            break
        chain = replace(longer, vars=(*chain.vars, user))
    return chain


# ---- operators of float kernels ------------------------------------------------------------------


def take_sum(
    chain: EpilogueChain, call: Call, bias: tuple[type[relax.Expr], ...] = (GenericConst,)
) -> EpilogueChain | Skip:
    """Take product + bias or product + residual.

    A bias is an expression of one of the types `bias`. A residual has the same type as the product.
    """
    other = chain.other_operand(call)
    if chain.is_bounded:
        return Skip("the result is bounded already")
    if chain.residual is not None:
        return Skip("there is a residual already")
    if chain.bias is None and isinstance(other, bias) and chain.is_per_channel(other):
        return replace(chain, bias=other)
    if other.same_as(chain.last) or not same_type(other, chain.vars[0]):
        return Skip("the other operand is neither one number per channel nor of the same shape")
    return replace(chain, residual=other)


def take_relu(chain: ChainT, call: Call) -> ChainT | Skip:
    """Take relu(product)."""
    return Skip("the result is bounded already") if chain.is_bounded else replace(chain, low=0.0)


def take_clip(chain: ChainT, call: Call) -> ChainT | Skip:
    """Take clip(product, low, high)."""
    low, high = (read_number(arg) for arg in call.args[1:3])
    if chain.is_bounded:
        return Skip("the result is bounded already")
    if low is None or high is None:
        return Skip("a bound is not a number")
    return replace(chain, low=low, high=high)


def take_maximum(chain: EpilogueChain, call: Call) -> EpilogueChain | Skip:
    """Take maximum(product, low)."""
    low = read_number(call.args[1])
    if chain.is_bounded:
        return Skip("the result is bounded already")
    return Skip("the bound is not a number") if low is None else replace(chain, low=low)


def take_minimum(chain: EpilogueChain, call: Call) -> EpilogueChain | Skip:
    """Take minimum(product, high), also behind a maximum."""
    high = read_number(call.args[1])
    if chain.high is not None:
        return Skip("the result is bounded already")
    return Skip("the bound is not a number") if high is None else replace(chain, high=high)


def float_takes(*bias: type[relax.Expr]) -> Mapping[str, Take[EpilogueChain]]:
    """Return the table of operators for float kernels. The bias is an expression of one of these
    types.
    """
    return {
        "relax.add": partial(take_sum, bias=bias),
        "relax.nn.relu": take_relu,
        "relax.clip": take_clip,
        "relax.maximum": take_maximum,
        "relax.minimum": take_minimum,
    }
