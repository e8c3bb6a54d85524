"""Simulated quantization with one scale -> a step that runs one kernel for all sizes.

    y[i] = (clip(rint(x[i] / scale) + zero_point, low, high) - zero_point) * scale

This is simulated_quantize and then simulated_dequantize, in float32, rounding half to even.
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
from relayquant.codegen.eager.operand import Operand, Variable
from relayquant.codegen.kernels.emit import broadcast, build_kernel, load_vector, store_vector
from relayquant.codegen.kernels.floating.tile import Expr, FloatIsa, declare_arguments
from relayquant.ir.reference.affine import SIMULATED_RANGES
from relayquant.ir.reference.frame import Frame

#: entries of the kernel's `parameters`
SCALE, ZERO_POINT, LOW, HIGH = range(4)


@dataclass(frozen=True)
class FloatRound:
    """The rounding of n float32 values. n is an argument of the compiled kernel."""


def make_round(spec: FloatRound, isa: FloatIsa, name: str = "float_round") -> PrimFunc:
    """Make PrimFunc(x (n,), parameters (4,), y (n,)), float32.

    `parameters` holds scale, zero point, low and high.
    """
    lanes = isa.lanes
    size = tirx.Var("n", "int64")

    def body() -> None:
        x, parameters, y = declare_arguments(("x", (size,)), ("parameters", (4,)), ("y", (size,)))

        def emit(offset: Expr, width: int) -> None:
            def read(entry: int) -> Expr:
                return broadcast(parameters[entry], width)

            level = T.nearbyint(load_vector(x, offset, width) / read(SCALE))
            # NaN becomes the zero point.
            level = T.Select(T.isnan(level), broadcast(T.float32(0), width), level)
            level = level + read(ZERO_POINT)
            level = T.max(T.min(level, read(HIGH)), read(LOW))
            store_vector(y, (level - read(ZERO_POINT)) * read(SCALE), offset, width)

        with T.serial(T.floordiv(size, lanes)) as index:
            emit(index * lanes, lanes)
        with T.serial(T.floormod(size, lanes)) as index:
            emit(size - 1 - index, 1)

    return build_kernel(name, body)


ROUND = KernelKey(make_round, FloatRound())


class RoundingStep:
    """Simulated quantization of a tensor with one scale. For code 0 the tensor passes through.

    `operands` are code, scale and zero point. `bounds` is empty, or a lower and an upper bound.
    """

    def __init__(
        self,
        data: Variable,
        operands: Sequence[Operand],
        bounds: Sequence[Operand],
        result: relax.Var,
        kernels: KernelCache,
    ) -> None:
        self.data, self.result, self.kernels = data, result, kernels
        self.operands = (*operands, *bounds)
        #: (operands, the kernel's parameters) of the last call
        self.known: tuple[list[Any], Any] | None = None

    @cached_property
    def kernel(self) -> Callable[..., None]:
        """The compiled kernel."""
        return self.kernels.get(ROUND)

    def run(self, frame: Frame) -> None:
        """Compute the rounded value."""
        data, parameters = self.data.read(frame), self.find_parameters(frame)
        if parameters is None:
            frame.values[self.result] = data
            return
        axes = find_memory_axes(data)
        flat = align_array(data.transpose(axes))
        rounded = empty_aligned(flat.shape, "float32")
        if flat.size:
            x, y = view_aligned(flat.reshape(-1)), view_aligned(rounded.reshape(-1))
            self.kernel(x, parameters, y)
        frame.values[self.result] = rounded.transpose(invert_axes(axes))

    def find_parameters(self, frame: Frame) -> Any:
        """Return the kernel's parameters as a tensor. None if values pass through.

        Operands that are the same arrays as in the call before are not read again.
        """
        operands, known = [operand.read(frame) for operand in self.operands], self.known
        if known is not None and all(a is b for a, b in zip(known[0], operands, strict=True)):
            return known[1]
        parameters = make_parameters(*operands)
        self.known = operands, parameters  # both at once: other threads read it
        return parameters


def make_parameters(code: Any, scale: Any, zero_point: Any, *bounds: Any) -> Any:
    """Make the tensor of `RoundingStep.find_parameters`."""
    limits = SIMULATED_RANGES.get(int(code.reshape(())))
    if limits is None:
        return None
    low, high = np.float32(limits[0]), np.float32(limits[1])
    if bounds:
        low, high = np.maximum(low, bounds[0]), np.minimum(high, bounds[1])
    parameters = empty_aligned((4,), "float32")
    parameters[:] = scale.reshape(()), zero_point.reshape(()), low, high
    return view_aligned(parameters)
