"""Dialect: how a legalization reads scales and zero points, both constants and variables.

A `Reader` collects the operands of one loop nest. Scalar constants become immediates, everything
else becomes a tensor operand. Multipliers from constant scales are computed here, in numpy.
Multipliers from variable scales become expressions with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from tvm import relax, te, tirx

from relayquant.base.qtypes import Arithmetic
from relayquant.ir.dialect import fixed_point
from relayquant.ir.dialect.operands import is_single
from relayquant.ir.rewrite.graph import constant_value

PrimExpr = Any

#: Reads one value inside a loop nest: channel index -> value.
ReadFunc = Callable[[PrimExpr], PrimExpr]


def compute_tensor(shape: Sequence[Any], element: Callable[..., PrimExpr], name: str) -> te.Tensor:
    """Make a `te.compute` of one tensor with element(*index) -> value."""
    return cast(te.Tensor, te.compute(list(shape), element, name=name))


@dataclass
class Reader:
    """Collector of the operands of one loop nest. `operands` follow the data operands in order.

    Inside the loop nest, `tensors` are these operands; see `loops.make_loops`.
    """

    operands: list[relax.Expr] = field(default_factory=list)
    tensors: Sequence[te.Tensor] = ()

    def add_tensor(self, expr: relax.Expr) -> ReadFunc:
        """Read `expr`, shape () or (C,), from memory, even if it is constant."""
        slot = len(self.operands)
        self.operands.append(expr)
        rank, is_scalar = int(expr.ty.ndim), is_single(expr.ty)

        def read(channel: PrimExpr) -> PrimExpr:
            if rank == 0:
                return self.tensors[slot]()
            return self.tensors[slot](0 if is_scalar else channel)

        return read

    def add_array(self, array: np.ndarray) -> ReadFunc:
        """Read a constant, shape () or (C,). A scalar becomes an immediate."""
        if array.size == 1:
            immediate = tirx.const(array.item(), array.dtype.name)
            return lambda _channel: immediate
        return self.add_tensor(relax.const(array, array.dtype.name))

    def add(self, expr: relax.Expr) -> ReadFunc:
        """Read a parameter. A scalar constant becomes an immediate."""
        value = constant_value(expr)
        return self.add_tensor(expr) if value is None else self.add_array(value)

    def add_multiplier(
        self,
        scales: Sequence[relax.Expr],
        real: Callable[..., Any],
        arithmetic: Arithmetic,
        divisor: int | None = None,
    ) -> Callable[[Sequence[PrimExpr]], tuple[PrimExpr, ...]]:
        """Read the multiplier real(*scales) of float64 values.

        `real` works on numpy arrays and on TIR expressions. The returned reader takes the channel
        index of each scale. A float multiplier is divided by `divisor` after rounding, a
        fixed-point multiplier before.
        """
        values = [constant_value(scale) for scale in scales]
        # A per-tensor value may have shape (1,).
        values = [v.reshape(()) if v is not None and v.size == 1 else v for v in values]
        # Operands with channels on different axes cannot share one array.
        if all(value is not None for value in values) and (
            sum(value.ndim for value in values if value is not None) <= 1
        ):
            known = [np.asarray(value, "float64") for value in values]
            with np.errstate(over="ignore", under="ignore"):
                ratio = real(*known)
            arrays = divide_multiplier(ratio, arithmetic, divisor)
            reads = [self.add_array(array) for array in arrays]
            position = next((i for i, value in enumerate(known) if value.ndim), 0)
            return lambda channels: tuple(read(channels[position]) for read in reads)
        reads = [self.add(scale) for scale in scales]

        def read_multiplier(channels: Sequence[PrimExpr]) -> tuple[PrimExpr, ...]:
            pairs = zip(reads, channels, strict=True)
            doubles = [read(channel).astype("float64") for read, channel in pairs]
            return divide_multiplier_tir(real(*doubles), arithmetic, divisor)

        return read_multiplier

    def add_divided_multiplier(
        self, scales: Sequence[relax.Expr], real: Callable[..., Any], arithmetic: Arithmetic
    ) -> Callable[[PrimExpr], tuple[PrimExpr, ...]]:
        """Read a multiplier of scalar scales, divided by an expression (int32 or int64).

        The returned reader takes the divisor.
        """
        if arithmetic is not Arithmetic.INT64:
            read = self.add_multiplier(scales, real, arithmetic)
            no_channel = (0,) * len(scales)

            def read_float(divisor: PrimExpr) -> tuple[PrimExpr, ...]:
                (multiplier,) = read(no_channel)
                return (multiplier / divisor.astype(arithmetic.value),)

            return read_float
        reads = [self.add(scale) for scale in scales]

        def read_integer(divisor: PrimExpr) -> tuple[PrimExpr, ...]:
            doubles = [read(0).astype("float64") for read in reads]
            divided = real(*doubles) / divisor.astype("float64")
            return fixed_point.encode_multiplier_tir(divided, arithmetic)

        return read_integer


def divide_multiplier(
    real: Any, arithmetic: Arithmetic, divisor: int | None
) -> tuple[np.ndarray, ...]:
    """Encode multiplier / divisor. The divisor is a count of summed elements, or None for no
    division.

    A float multiplier is divided after rounding, a fixed-point multiplier before.
    """
    if divisor is None:
        return fixed_point.encode_multiplier(real, arithmetic)
    if arithmetic is Arithmetic.INT64:
        return fixed_point.encode_multiplier(np.asarray(real) / float(divisor), arithmetic)
    (multiplier,) = fixed_point.encode_multiplier(real, arithmetic)
    return (np.asarray(multiplier / multiplier.dtype.type(divisor)),)


def divide_multiplier_tir(
    real: PrimExpr, arithmetic: Arithmetic, divisor: int | None
) -> tuple[PrimExpr, ...]:
    """Encode and divide a float64 expression as `divide_multiplier` does."""
    if divisor is None:
        return fixed_point.encode_multiplier_tir(real, arithmetic)
    if arithmetic is Arithmetic.INT64:
        divided = real / tirx.const(float(divisor), "float64")
        return fixed_point.encode_multiplier_tir(divided, arithmetic)
    (multiplier,) = fixed_point.encode_multiplier_tir(real, arithmetic)
    # The simplifier would replace the division by a float immediate with a multiplication by its
    # reciprocal. It leaves an integer that is cast to float alone.
    return (multiplier / tirx.const(float(divisor), arithmetic.value),)
