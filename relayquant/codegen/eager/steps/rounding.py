"""Simulated quantization with one scale -> a step that runs one kernel for all sizes.

    y[i] = (clip(rint(x[i] / scale) + zero_point, low, high) - zero_point) * scale

This is simulated_quantize and then simulated_dequantize, in float32, rounding half to even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from tvm import relax
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.base.runtime import empty_aligned, view_aligned
from relayquant.codegen.eager.kernel_cache import KernelCache, KernelKey
from relayquant.codegen.eager.operand import LastMade, Operand, Variable
from relayquant.codegen.eager.steps.rows import EachValue, make_each, run_rows
from relayquant.codegen.kernels.emit import broadcast
from relayquant.codegen.kernels.floating.tile import Buffer, Expr, FloatIsa
from relayquant.ir.reference.affine import SIMULATED_RANGES
from relayquant.ir.reference.frame import Frame


def make_round(spec: EachValue, isa: FloatIsa, name: str) -> PrimFunc:
    """Make PrimFunc(x (n, 1), parameters (4,), y (n, 1)), as `make_each` does.

    `parameters` holds scale, zero point, low and high.
    """

    def compute(value: Expr, width: int, parameters: Buffer) -> Expr:
        scale, zero_point, low, high = (broadcast(parameters[i], width) for i in range(4))
        level = T.nearbyint(value / scale)
        # NaN becomes the zero point.
        level = T.Select(T.isnan(level), broadcast(T.float32(0), width), level)
        level = T.max(T.min(level + zero_point, high), low)
        return (level - zero_point) * scale

    return make_each(compute, isa, name, ("parameters", (4,)))


ROUND = KernelKey(make_round, EachValue())


@dataclass(frozen=True, eq=False)
class RoundingStep:
    """Simulated quantization of a tensor with one scale. For code 0 the tensor passes through.

    `operands` are code, scale and zero point, and perhaps a lower and an upper bound.
    """

    data: Variable
    operands: Sequence[Operand]
    result: relax.Var
    kernels: KernelCache
    parameters: LastMade = field(default_factory=LastMade)

    @cached_property
    def kernel(self) -> Callable[..., None]:
        """The compiled kernel."""
        return self.kernels.get(ROUND)

    def run(self, frame: Frame) -> None:
        """Compute the rounded value."""
        data = self.data.read(frame)
        parameters = self.parameters.get(frame, self.operands, make_parameters)
        if parameters is None:
            frame.values[self.result] = data
            return
        frame.values[self.result] = run_rows(self.kernel, 1, data, [parameters])


def make_parameters(code: Any, scale: Any, zero_point: Any, *bounds: Any) -> Any:
    """Make the kernel's parameters as a tensor. None if values pass through."""
    limits = SIMULATED_RANGES.get(int(code.reshape(())))
    if limits is None:
        return None
    low, high = np.float32(limits[0]), np.float32(limits[1])
    if bounds:
        low, high = np.maximum(low, bounds[0]), np.minimum(high, bounds[1])
    parameters = empty_aligned((4,), "float32")
    parameters[:] = scale.reshape(()), zero_point.reshape(()), low, high
    return view_aligned(parameters)
