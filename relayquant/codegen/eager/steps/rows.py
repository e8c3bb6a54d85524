"""Softmax, layer norm, prelu, leaky_relu, gelu and sigmoid of float32 -> steps that run one kernel
for any number of rows.

Compiled models have the same kernels of softmax and layer norm, which give the reference's bits.
gelu differs by at most 3e-7 of its operand, sigmoid by as much of its result. Both are many times
as fast as scipy's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.base.runtime import (
    align_array,
    empty_aligned,
    find_memory_axes,
    invert_axes,
    view_aligned,
)
from relayquant.codegen.eager.kernel_cache import KernelCache, KernelKey
from relayquant.codegen.eager.operand import Operand
from relayquant.codegen.kernels.curve import emit_erf
from relayquant.codegen.kernels.emit import (
    broadcast,
    build_kernel,
    constant,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.floating import row_norm, softmax
from relayquant.codegen.kernels.floating.row_norm import RowNorm
from relayquant.codegen.kernels.floating.softmax import Softmax, emit_exp
from relayquant.codegen.kernels.floating.tile import Buffer, Expr, FloatIsa, declare_arguments
from relayquant.ir.reference.frame import Frame


def make_softmax(spec: Softmax, isa: FloatIsa, name: str) -> PrimFunc:
    """Make PrimFunc(x (n, K), y (n, K)), which is the same for all targets."""
    return softmax.make_softmax(spec, name)


def make_norm(spec: RowNorm, isa: FloatIsa, name: str) -> PrimFunc:
    """Make PrimFunc(x (n, K), weight (K,), bias (K,), y (n, K)), the same for all targets."""
    return row_norm.make_row_norm(spec, name)


@dataclass(frozen=True)
class Prelu:
    """PReLU of rows of `width` float32 values. Each column has its own slope."""

    width: int


def make_prelu(spec: Prelu, isa: FloatIsa, name: str) -> PrimFunc:
    """Make PrimFunc(x (n, K), slope (K,), y (n, K)): y = x, times the slope where x is no positive
    number.
    """
    size = tirx.Var("n", "int64")
    whole, rest = divmod(spec.width, isa.lanes)

    def body() -> None:
        shape = (size, spec.width)
        x, slope, y = declare_arguments(("x", shape), ("slope", (spec.width,)), ("y", shape))

        def emit(row: Expr, start: Expr, width: int) -> None:
            offset = row * spec.width + start
            value = T.bind(load_vector(x, offset, width))
            scaled = value * load_vector(slope, start, width)
            positive = value > constant("float32", 0, width)
            store_vector(y, T.Select(positive, value, scaled), offset, width)

        with T.serial(size) as row:
            with T.serial(whole) as index:
                emit(row, index * isa.lanes, isa.lanes)
            with T.serial(rest) as index:
                emit(row, spec.width - 1 - index, 1)

    return build_kernel(name, body)


@dataclass(frozen=True)
class EachValue:
    """A function of each of n float32 values. n is an argument of the compiled kernel."""


def make_gelu(spec: EachValue, isa: FloatIsa, name: str) -> PrimFunc:
    """Make PrimFunc(x (n, 1), y (n, 1)): y = x (0.5 + 0.5 erf(x / sqrt(2)))."""

    def emit(value: Expr, width: int) -> Expr:
        half = constant("float32", 0.5, width)
        return value * (half + half * emit_erf(value * constant("float32", 0.5**0.5, width), width))

    return make_each(emit, isa, name)


def make_sigmoid(spec: EachValue, isa: FloatIsa, name: str) -> PrimFunc:
    """Make PrimFunc(x (n, 1), y (n, 1)): y = 1 / (1 + e^-x)."""
    return make_each(emit_sigmoid, isa, name)


def make_silu(spec: EachValue, isa: FloatIsa, name: str) -> PrimFunc:
    """Make PrimFunc(x (n, 1), y (n, 1)): y = x / (1 + e^-x)."""
    return make_each(lambda value, width: value * emit_sigmoid(value, width), isa, name)


def make_leaky_relu(spec: EachValue, isa: FloatIsa, name: str) -> PrimFunc:
    """Make PrimFunc(x (n, 1), slope (1,), y (n, 1)): y = x, times the slope where x is no positive
    number.
    """

    def compute(value: Expr, width: int, slope: Buffer) -> Expr:
        scaled = value * broadcast(slope[0], width)
        return T.Select(value > constant("float32", 0, width), value, scaled)

    return make_each(compute, isa, name, ("slope", (1,)))


LEAKY_RELU = KernelKey(make_leaky_relu, EachValue())


def emit_sigmoid(value: Expr, width: int) -> Expr:
    """Emit 1 / (1 + e^-x), without powers above 1."""
    zero, one = constant("float32", 0, width), constant("float32", 1, width)
    power = T.bind(emit_exp(-T.abs(value), width))
    return T.Select(value < zero, power, one) / (one + power)


def make_each(
    function: Callable[..., Expr], isa: FloatIsa, name: str, *factors: tuple[str, tuple[int, ...]]
) -> PrimFunc:
    """Make PrimFunc(x (n, 1), *factors, y (n, 1)), float32, that computes a function of each value.

    n is an argument of the compiled kernel. `function` takes a vector, its lanes and the factors,
    which are given by name and shape.
    """
    size = tirx.Var("n", "int64")

    def body() -> None:
        x, *given, y = declare_arguments(("x", (size, 1)), *factors, ("y", (size, 1)))

        def emit(offset: Expr, width: int) -> None:
            value = T.bind(load_vector(x, offset, width))
            store_vector(y, function(value, width, *given), offset, width)

        with T.serial(T.floordiv(size, isa.lanes)) as index:
            emit(index * isa.lanes, isa.lanes)
        with T.serial(T.floormod(size, isa.lanes)) as index:
            emit(size - 1 - index, 1)

    return build_kernel(name, body)


#: operator -> kernel
EACH = {
    f"relax.{name}": KernelKey(make, EachValue())
    for name, make in {"nn.gelu": make_gelu, "sigmoid": make_sigmoid, "nn.silu": make_silu}.items()
}


@dataclass(frozen=True, eq=False)
class RowStep:
    """An operator on rows: float32 (..., K) -> float32 (..., K). `factors` are vectors (K,).

    `width` is K of the kernel, and `axis` is where the data and the result have it. `width` is 1
    for an operator on single values, which keeps the memory order of its data, and whose factors
    have any length.
    """

    key: KernelKey
    width: int
    data: Operand
    factors: Sequence[np.ndarray]
    result: relax.Var
    kernels: KernelCache
    axis: int = -1

    @cached_property
    def kernel(self) -> Callable[..., None]:
        """The compiled kernel."""
        return self.kernels.get(self.key)

    @cached_property
    def tensors(self) -> list[Any]:
        """The factors as tensors."""
        return [view_aligned(align_array(factor)) for factor in self.factors]

    def run(self, frame: Frame) -> None:
        """Compute the result."""
        data = self.data.read(frame)
        is_last = self.axis == -1  # numpy would take longer to see it than to run a small kernel
        x = data if is_last else np.moveaxis(data, self.axis, -1)
        y = run_rows(self.kernel, self.width, x, self.tensors)
        frame.values[self.result] = y if is_last else np.moveaxis(y, -1, self.axis)


def run_rows(
    kernel: Callable[..., None], width: int, data: np.ndarray, factors: Sequence[Any]
) -> np.ndarray:
    """Run the kernel of a `RowStep` on float32 data. `factors` are tensors."""
    axes = find_memory_axes(data) if width == 1 else tuple(range(data.ndim))
    data = align_array(data.transpose(axes))
    result = empty_aligned(data.shape, "float32")
    if result.size:
        x, y = (view_aligned(array.reshape(-1, width)) for array in (data, result))
        kernel(x, *factors, y)
    return result.transpose(invert_axes(axes))
