"""What rules of integer kernels get, and how they read operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from math import prod

import numpy as np
from tvm import relax
from tvm.ir import Call
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import repeat_over_batch
from relayquant.codegen.kernels.integer.lookup import ByteShuffle
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.lowering import Kernel, KernelRule, Lowered, Operand
from relayquant.codegen.tuning import ChooseForm, keep_estimate
from relayquant.ir.reference.fixed_point import hold_multiplier
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.rule import OnSkip, log_skip


@dataclass(frozen=True, eq=False)
class KernelContext:
    """The graph that is lowered, and the instructions its kernels use."""

    graph: Graph
    isa: Isa
    shuffle: ByteShuffle | None = None  #: how bytes are looked up, where there is a way
    choose_form: ChooseForm = keep_estimate  #: how a convolution is computed
    on_skip: OnSkip = log_skip  #: hears why a rule declines, or where a kernel ends
    taken: Set[relax.Var] = frozenset()  #: values that a kernel computes already

    def next(self, var: relax.Var, *ops: str) -> relax.Var | None:
        """The only reader of `var` if it is one of these operators."""
        user = self.graph.only_user(var)
        return user if user is not None and self.graph.op_name(user) in ops else None

    def call(self, var: relax.Var) -> Call:
        """The call that computes `var`."""
        call = self.graph.call_of(var)
        if call is None:
            raise ValueError(f"{var.name!r} is not computed by an operator")
        return call


#: `rewrite(context, var)` returns the kernel that starts at the value `var`.
IntegerRule = KernelRule[KernelContext]


def call_built(
    vars_: tuple[relax.Var, ...], func: PrimFunc, operands: Sequence[Operand]
) -> Lowered:
    """The call of a kernel that is built already."""
    return Lowered(vars_, Kernel.of(func), tuple(operands))


def scalar(expr: relax.Expr) -> float | None:
    """Value of a constant with one element."""
    value = constant_value(expr)
    return value.reshape(-1)[0].item() if value is not None and value.size == 1 else None


def vector(expr: relax.Expr, size: int) -> np.ndarray | None:
    """A constant with one or `size` elements, as `size` elements."""
    value = constant_value(expr)
    if value is None or value.size not in (1, size):
        return None
    return np.broadcast_to(value.reshape(-1), (size,))


def multiplier(numerator: np.ndarray | float, denominator: float) -> np.ndarray:
    """float32(double(numerator) / double(denominator)), as the operators define it."""
    return hold_multiplier(np.float64(numerator) / np.float64(denominator), "float32")


def split_batch(expr: relax.Expr) -> tuple[bool, tuple[int, ...]] | None:
    """(whether the first dimension is symbolic, shape with it as 1); None if anything else is
    symbolic.
    """
    shape = tensor_shape(expr)
    if shape is None:
        return None
    is_symbolic = bool(shape) and isinstance(shape[0], str)
    static = (1, *shape[1:]) if is_symbolic else shape
    if any(isinstance(dim, str) for dim in static):
        return None
    return is_symbolic, tuple(int(dim) for dim in static)


def split_rows(expr: relax.Expr) -> tuple[bool, tuple[int, ...]] | None:
    """(whether any leading dimension is symbolic, shape with those as 1); None if the last one is
    symbolic.
    """
    shape = tensor_shape(expr)
    if shape is None or not shape or isinstance(shape[-1], str):
        return None
    static = tuple(1 if isinstance(dim, str) else int(dim) for dim in shape)
    return any(isinstance(dim, str) for dim in shape), static


def build_for_batch(
    build: Callable[[], PrimFunc], symbolic: bool, positions: Sequence[int]
) -> PrimFunc:
    """A kernel, in a loop over the images when the batch is symbolic."""
    if not symbolic:
        return build()
    with repeat_over_batch(positions):
        return build()


def is_default_arithmetic(call: Call) -> bool:
    """Whether an operator rounds half to even after float32 arithmetic, as kernels do."""
    attrs = call.attrs
    compute = getattr(attrs, "compute_dtype", "float32")
    return str(attrs.rounding) == "TONEAREST_EVEN" and str(compute) == "float32"


def is_byte(expr: relax.Expr) -> bool:
    """uint8 or int8."""
    return tensor_dtype(expr) in ("uint8", "int8")


def is_activation(expr: relax.Expr) -> bool:
    """uint8, int8 or int16: what convolutions and dense layers take."""
    return tensor_dtype(expr) in ("uint8", "int8", "int16")


def element_count(shape: Sequence[int]) -> int:
    """Product of the dimensions."""
    return prod(shape)
