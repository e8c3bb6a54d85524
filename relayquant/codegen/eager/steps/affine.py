"""Requantize, add, subtract, leaky_relu and prelu of affine integers -> steps that run one kernel
for any number of rows, with the bits of `reference.qnn`.

numpy takes ten passes over memory for each, and an add with one rounding thirty. Scales and zero
points are arguments of the kernels, which depend on the dtypes only. A bias that is added to the
sums of a product before is part of their zero point, and takes no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call, GenericConst
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.base.qtypes import INTEGER_LIMITS, Arithmetic, Rounding
from relayquant.base.runtime import (
    align_array,
    empty_aligned,
    find_memory_axes,
    invert_axes,
    view_aligned,
    view_constant,
)
from relayquant.codegen.eager.kernel_cache import KernelCache, KernelKey
from relayquant.codegen.eager.operand import Operand
from relayquant.codegen.kernels.emit import (
    broadcast,
    build_kernel,
    load_vector,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.floating.tile import Buffer, Expr, FloatIsa, declare_arguments
from relayquant.codegen.kernels.integer.epilogue import (
    ROUNDING_MAGIC,
    ROUNDING_MAGIC_BITS,
    emit_fma,
)
from relayquant.codegen.kernels.isa.base import Wrapping, emit_wrapping
from relayquant.ir.reference.fixed_point import hold_multiplier, wrap_int32
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.interpreter import read_keywords
from relayquant.ir.rewrite.expressions import FunctionGraph, op_name, shape_of, static_sizes
from relayquant.ir.rewrite.rule import Skip, decline

AFFINE = tuple(
    f"relax.qnn.{name}" for name in ("requantize", "add", "subtract", "leaky_relu", "prelu")
)
#: dtypes of operands and of results
READ, WRITTEN = ("uint8", "int8", "int32"), ("uint8", "int8")
#: Multipliers up to this magnitude give finite sums. Infinity minus infinity would be NaN.
MOST_FACTOR = 2.0**64

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class AffineRows:
    """y[n, c] = z + round(fma(x1[n, c] - z1[c], m1[c], (x0[n, c] - z0[c]) * m0[c])) in float32,
    within the limits of the dtype; without x1 just the product.

    Attributes:
        dtypes: Of the operands. float32 holds integers.
        out_dtype: Of the result.
        has_slope: Whether there is another m0 where x0 is less than z0.
        is_shared: Whether all columns have the same numbers.
    """

    dtypes: tuple[str, ...]
    out_dtype: str
    has_slope: bool = False
    is_shared: bool = False


def make_affine(spec: AffineRows, isa: FloatIsa, name: str) -> PrimFunc:
    """Make PrimFunc(x0 (n, k)[, x1], zeros (x, k), factors (f, k), limits (2,), origin (1,),
    y (n, k)).

    `zeros` and `factors` have a row for each operand. If there are slopes, they are the last row of
    `factors`. If all columns have the same numbers, n counts the values and k is 1. `limits` are
    the result's dtype limits minus its zero point. `origin` is the zero point minus the bits of the
    number that is added to round.
    """
    size, width, count = tirx.Var("n", "int64"), tirx.Var("k", "int64"), len(spec.dtypes)
    columns = 1 if spec.is_shared else width
    shape = (size, columns)

    def body() -> None:
        *data, zeros, factors, limits, origin, y = declare_arguments(
            *((f"x{i}", shape, dtype) for i, dtype in enumerate(spec.dtypes)),
            ("zeros", (count, columns), "int32"),
            ("factors", (count + spec.has_slope, columns)),
            ("limits", (2,)),
            ("origin", (1,), "int32"),
            ("y", shape, spec.out_dtype),
        )

        def emit(offset: Expr, column: Expr, lanes: int) -> None:
            def number(rows: Buffer, row: int) -> Expr:
                if spec.is_shared:
                    return broadcast(rows[row], lanes)
                return load_vector(rows, row * width + column, lanes)

            def center(i: int) -> Expr:
                value = T.Cast(vector("int32", lanes), load_vector(data[i], offset, lanes))
                return T.bind(subtract_wrapping(value, number(zeros, i), lanes))

            first, factor = center(0), number(factors, 0)
            if spec.has_slope:
                negative = first < broadcast(T.int32(0), lanes)
                factor = T.Select(negative, number(factors, count), factor)
            total = T.Cast(vector("float32", lanes), first) * factor
            if count > 1:
                other = T.Cast(vector("float32", lanes), center(1))
                total = emit_fma(other, number(factors, 1), total, lanes)
            total = T.max(total, broadcast(limits[0], lanes))
            total = T.min(total, broadcast(limits[1], lanes))
            total = total + broadcast(T.float32(ROUNDING_MAGIC), lanes)
            level = T.reinterpret(vector("int32", lanes), total) + broadcast(origin[0], lanes)
            store_vector(y, T.Cast(vector(spec.out_dtype, lanes), level), offset, lanes)

        if spec.is_shared:
            with T.serial(T.floordiv(size, isa.lanes)) as index:
                emit(index * isa.lanes, T.int64(0), isa.lanes)
            with T.serial(T.floormod(size, isa.lanes)) as index:
                emit(size - 1 - index, T.int64(0), 1)
            return
        with T.serial(size) as row:
            with T.serial(T.floordiv(width, isa.lanes)) as index:
                emit(row * width + index * isa.lanes, index * isa.lanes, isa.lanes)
            with T.serial(T.floormod(width, isa.lanes)) as index:
                column = T.bind(width - 1 - index)
                emit(row * width + column, column, 1)

    return build_kernel(name, body)


def subtract_wrapping(a: Expr, b: Expr, lanes: int) -> Expr:
    """Compute a - b of int32 modulo 2**32. One number is computed in int64, as `emit_wrapping`
    takes vectors only.
    """
    if lanes == 1:
        return T.Cast("int32", T.Cast("int64", a) - T.Cast("int64", b))
    return emit_wrapping(Wrapping.SUBTRACT, a, b, lanes)


@dataclass(frozen=True, eq=False)
class Scaled:
    """An operand, or what stands in its place: (value - zero) * factor.

    Attributes:
        data: The value.
        zero: () or (C,) int32.
        factor: () or (C,) float32.
        axis: Axis of the C columns. Any, where there is one number.
    """

    data: relax.Var
    zero: Numbers
    factor: Numbers
    axis: int

    @property
    def is_shared(self) -> bool:
        """Whether all columns have the same numbers."""
        return self.zero.size == self.factor.size == 1

    def add_bias(self, data: relax.Var, bias: Numbers) -> Scaled | None:
        """Return the operand that stands for `data` plus a bias of its rank. None if that has other
        columns.
        """
        columns = [axis for axis, size in enumerate(bias.shape) if size != 1]
        if len(columns) > 1 or (columns and not self.is_shared and columns != [self.axis]):
            return None
        # int32 wraps, so the order of the sums does not matter.
        zero = wrap_int32(np.asarray(self.zero.astype("int64") - bias.reshape(-1).astype("int64")))
        return replace(self, data=data, zero=zero, axis=columns[0] if columns else self.axis)


@dataclass(frozen=True, eq=False)
class AffineCall:
    """An operator on affine integers, as the kernel computes it.

    Attributes:
        operands: What is added.
        slope: The factor of values below their zero point, () or (C,). None: the same as above.
        slope_axis: Axis of its columns.
        zero_point, dtype: Of the result.
    """

    operands: tuple[Scaled, ...]
    slope: Numbers | None
    slope_axis: int
    zero_point: int
    dtype: str

    @staticmethod
    def of(call: Call) -> AffineCall | Skip:
        """Read a call, or return the reason why numpy runs it."""
        name = op_name(call).removeprefix("relax.qnn.")
        is_sum = name in ("add", "subtract")
        data, constants = call.args[: 1 + is_sum], call.args[1 + is_sum :]
        if not all(isinstance(expr, relax.Var) for expr in data):
            return decline("the data is a constant")
        if not all(isinstance(expr, GenericConst) for expr in constants):
            return decline("a scale or zero point is computed")
        given = read_keywords(call)
        even = given.get("rounding", Rounding.TONEAREST_EVEN) is Rounding.TONEAREST_EVEN
        if not even or given.get("compute_dtype", Arithmetic.FLOAT32) is not Arithmetic.FLOAT32:
            return decline("another arithmetic")
        dtypes = [str(expr.ty.dtype) for expr in data]
        dtype = given.get("out_dtype") or dtypes[0]
        if dtype not in WRITTEN or not set(dtypes) <= set(READ):
            return decline("integers of other widths")
        shapes = [static_sizes(shape_of(expr)) for expr in data]
        if not all(shapes) or any(shape != shapes[0] for shape in shapes):
            return decline("scalars, symbolic sizes, or an operand that is broadcast")
        rank = len(shape_of(data[0]))
        numbers = [view_constant(expr.value) for expr in constants]
        axes = [given.get(f"{side}_axis", given.get("axis", -1)) % rank for side in ("lhs", "rhs")]
        first, out = numbers[0].astype("float64"), numbers[2 + 2 * is_sum].astype("float64")
        signs = 1, -1 if name == "subtract" else 1
        operands = tuple(
            Scaled(
                each,
                numbers[1 + 2 * i].astype("int32").reshape(-1),
                hold(signs[i] * (numbers[2 * i].astype("float64") / out)),
                axes[i],
            )
            for i, each in enumerate(data)
        )
        slope = None
        if name == "leaky_relu":
            slope = hold(first * float(given["alpha"]) / out)
        if name == "prelu":
            slope = hold(first * numbers[4].astype("float64") / out)
        zero_point = int(numbers[3 + 2 * is_sum].item())
        return AffineCall(operands, slope, axes[0], zero_point, dtype).check()

    def check(self) -> AffineCall | Skip:
        """Return the call itself, or the reason why there is no kernel for its numbers."""
        if any(np.abs(each).max(initial=0) > MOST_FACTOR for each in self.factors):
            return decline("a scale is many times as large as that of the result")
        if len(self.axes) > 1:
            return decline("numbers lie along different axes")
        return self

    @property
    def factors(self) -> list[Numbers]:
        """The rows of the kernel's factors."""
        slopes = [] if self.slope is None else [self.slope]
        return [*(each.factor for each in self.operands), *slopes]

    @property
    def axes(self) -> set[int]:
        """Axes along which there are several numbers."""
        found = {each.axis for each in self.operands if not each.is_shared}
        return found | (
            {self.slope_axis} if self.slope is not None and self.slope.size > 1 else set()
        )

    def replace_operand(self, index: int, operand: Scaled) -> AffineCall | Skip:
        """Return the call with another operand."""
        operands = [*self.operands]
        operands[index] = operand
        return replace(self, operands=tuple(operands)).check()

    def plan_rows(self, dtypes: Sequence[str]) -> AffineRows:
        """Return the kernel for operands that are given in these dtypes."""
        return AffineRows(tuple(dtypes), self.dtype, self.slope is not None, not self.axes)


def hold(factor: Numbers) -> Numbers:
    """Return a factor as float32 (1,) or (C,)."""
    return hold_multiplier(factor, "float32").reshape(-1)


def read_affine(graph: FunctionGraph, var: relax.Var) -> tuple[AffineCall, list[relax.Var]] | Skip:
    """Read the operator that computes `var`, and the biases that nothing else reads. Return what
    the kernel computes, and the values in between.
    """
    call = graph.call_of(var)
    found = decline("no call") if call is None else AffineCall.of(call)
    if isinstance(found, Skip):
        return found
    between: list[relax.Var] = []
    for i, operand in enumerate(found.operands):
        inner, bias = find_bias(graph, operand.data, var)
        biased = None if inner is None else operand.add_bias(inner, bias)
        trial = found if biased is None else found.replace_operand(i, biased)
        if biased is not None and not isinstance(trial, Skip):
            found = trial
            between.append(operand.data)
    return found, between


def find_bias(
    graph: FunctionGraph, data: relax.Var, reader: relax.Var
) -> tuple[relax.Var | None, Numbers]:
    """Return (x, bias) where `data` is x plus a bias in int32, and only `reader` reads it; else
    None in place of x.
    """
    call, user, none = graph.call_of(data), graph.only_user(data), np.zeros(())
    if call is None or op_name(call) != "relax.add" or user is None or not user.same_as(reader):
        return None, none
    inner, bias = call.args
    if not isinstance(inner, relax.Var) or not isinstance(bias, GenericConst):
        return None, none
    sizes = [static_sizes(shape_of(each)) for each in (inner, bias, data)]
    if (
        str(data.ty.dtype) != "int32"
        or sizes[0] != sizes[2]
        or len(sizes[1] or ()) != len(sizes[0])
    ):
        return None, none
    return inner, view_constant(bias.value)


@dataclass(frozen=True, eq=False)
class AffineStep:
    """An operator on affine integers, run on a kernel. The result has the memory order of the data,
    but for the axis of columns, which is the last.

    Attributes:
        call: What is computed.
        rows: The kernel.
        data: The operands; sums of a product may be float32.
    """

    call: AffineCall
    rows: AffineRows
    data: Sequence[Operand]
    result: relax.Var
    kernels: KernelCache

    @property
    def key(self) -> KernelKey:
        """The kernel for the cache."""
        return KernelKey(make_affine, self.rows)

    @cached_property
    def kernel(self) -> Callable[..., None]:
        """The compiled kernel."""
        return self.kernels.get(self.key)

    @cached_property
    def numbers(self) -> list[Any]:
        """The arguments after the data."""
        call, (low, high) = self.call, INTEGER_LIMITS[self.call.dtype]
        zeros, factors = [each.zero for each in call.operands], call.factors
        columns = max(each.size for each in (*zeros, *factors))
        arrays = [
            np.stack([np.broadcast_to(each, (columns,)) for each in rows])
            for rows in (zeros, factors)
        ]
        limits = np.array([low - call.zero_point, high - call.zero_point], "float32")
        origin = np.array([call.zero_point - ROUNDING_MAGIC_BITS], "int32")
        return [view_aligned(align_array(array)) for array in (*arrays, limits, origin)]

    def run(self, frame: Frame) -> None:
        """Compute the result."""
        data = [operand.read(frame) for operand in self.data]
        axes = find_memory_axes(data[0])
        for axis in self.call.axes:
            axes = (*(each for each in axes if each != axis), axis)
        data = [align_array(array.transpose(axes)) for array in data]
        result = empty_aligned(data[0].shape, self.call.dtype)
        if result.size:
            width = result.shape[-1] if self.call.axes else 1
            x, y = (
                [view_aligned(each.reshape(-1, width)) for each in group]
                for group in (data, [result])
            )
            self.kernel(*x, *self.numbers, *y)
        frame.values[self.result] = result.transpose(invert_axes(axes))
