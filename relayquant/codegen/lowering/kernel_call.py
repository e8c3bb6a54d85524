"""Context of the rules for integer kernels, and functions to read operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.ir import Call
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import repeat_over_batch
from relayquant.codegen.kernels.integer.lookup import ByteShuffle
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.lowering.engine import BlockView, Kernel, KernelRule, Lowered, Operand
from relayquant.codegen.tuning.tuner import ChooseSchedule, keep_estimate
from relayquant.ir.reference.fixed_point import hold_multiplier
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape


@dataclass(frozen=True, eq=False)
class KernelContext:
    """The graph that is lowered, and the instructions its kernels use."""

    graph: Graph
    block: BlockView  #: the block that is lowered
    isa: Isa
    shuffle: ByteShuffle | None = None  #: byte lookup instruction, if there is one
    choose_schedule: ChooseSchedule = keep_estimate  #: chooses how a convolution is computed

    def next(self, var: relax.Var, *ops: str) -> relax.Var | None:
        """Return the only reader of `var` if it is one of these operators."""
        user = self.graph.only_user(var)
        return user if user is not None and self.graph.op_name(user) in ops else None

    def call(self, var: relax.Var) -> Call:
        """Return the call that computes `var`."""
        call = self.graph.call_of(var)
        if call is None:
            raise ValueError(f"{var.name!r} is not computed by an operator")
        return call


#: `rewrite(context, var)` returns the kernel that starts at the value `var`.
IntegerRule = KernelRule[KernelContext]


def call_built(
    vars_: tuple[relax.Var, ...],
    build: Callable[[], PrimFunc],
    operands: Sequence[Operand],
    symbolic: bool = False,
    batched: Sequence[int] | None = None,
) -> Lowered:
    """Build a kernel and call it; see `build_for_batch`.

    `batched`: positions of the arguments that have a batch. None: all operands, and the result.
    """
    positions = range(len(operands) + 1) if batched is None else batched
    func = build_for_batch(build, symbolic, positions)
    return Lowered(vars_, Kernel.of(func), tuple(operands))


def vector(expr: relax.Expr, size: int) -> np.ndarray | None:
    """Return a constant with one or `size` elements as `size` elements."""
    value = constant_value(expr)
    if value is None or value.size not in (1, size):
        return None
    return np.broadcast_to(value.reshape(-1), (size,))


def multiplier(numerator: np.ndarray | float, denominator: float) -> np.ndarray:
    """Compute float32(double(numerator) / double(denominator)), as the operators define it."""
    return hold_multiplier(np.float64(numerator) / np.float64(denominator), "float32")


def split_batch(expr: relax.Expr) -> tuple[bool, tuple[int, ...]] | None:
    """Split the batch from a shape: (whether the first dimension is symbolic, shape with it as 1).

    None if another dimension is symbolic.
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
    """Split rows from a shape: (whether a leading dimension is symbolic, shape with these as 1).

    None if the last dimension is symbolic.
    """
    shape = tensor_shape(expr)
    if shape is None or not shape or isinstance(shape[-1], str):
        return None
    static = tuple(1 if isinstance(dim, str) else int(dim) for dim in shape)
    return any(isinstance(dim, str) for dim in shape), static


def find_known(shape: Sequence[int | str]) -> tuple[int | None, ...]:
    """Return a shape with None for what is known only at run time."""
    return tuple(None if isinstance(size, str) else size for size in shape)


def build_for_batch(
    build: Callable[[], PrimFunc], symbolic: bool, positions: Sequence[int]
) -> PrimFunc:
    """Build a kernel. If the batch is symbolic, it loops over the images."""
    if not symbolic:
        return build()
    with repeat_over_batch(positions):
        return build()


def is_default_arithmetic(call: Call) -> bool:
    """Whether an operator computes in float32 and rounds half to even, as kernels do."""
    attrs = call.attrs
    compute = getattr(attrs, "compute_dtype", "float32")
    return str(attrs.rounding) == "TONEAREST_EVEN" and str(compute) == "float32"


def is_byte(expr: relax.Expr) -> bool:
    """Whether the dtype is uint8 or int8."""
    return tensor_dtype(expr) in ("uint8", "int8")


def is_activation(expr: relax.Expr) -> bool:
    """Whether the dtype is uint8, int8 or int16, which convolutions and dense layers take."""
    return tensor_dtype(expr) in ("uint8", "int8", "int16")
