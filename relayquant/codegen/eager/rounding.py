"""Eager, simulated quantization: one kernel for all tensors that have one scale."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from relayquant.base.runtime import align_array, empty_aligned, find_memory_axes, view_tensor
from relayquant.codegen.eager.kernel_cache import KernelCache, KernelKey
from relayquant.codegen.eager.operand import Operand, Variable
from relayquant.codegen.kernels.floating.round import FloatRound, make_round
from relayquant.ir.reference.affine import SIMULATED_RANGES
from relayquant.ir.reference.frame import Frame

ROUND = KernelKey(make_round, FloatRound())


class RoundingStep:
    """Simulated quantization of a tensor with one scale; passes it through for code 0.

    `operands` are code, scale and zero point, `bounds` none or a lower and an upper one.
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
            x, y = view_tensor(flat.reshape(-1)), view_tensor(rounded.reshape(-1))
            self.kernels.get(ROUND)(x, parameters, y)
        frame.values[self.result] = rounded.transpose(invert_axes(axes))

    def find_parameters(self, frame: Frame) -> Any:
        """The kernel's parameters as a tensor; None where values pass through.

        Operands that are the same arrays as in the call before are not looked at again.
        """
        operands, known = [operand.read(frame) for operand in self.operands], self.known
        if known is not None and all(a is b for a, b in zip(known[0], operands, strict=True)):
            return known[1]
        parameters = make_parameters(*operands)
        self.known = operands, parameters  # both at once: other threads read it
        return parameters


def make_parameters(code: Any, scale: Any, zero_point: Any, *bounds: Any) -> Any:
    """See `RoundingStep.find_parameters`."""
    limits = SIMULATED_RANGES.get(int(code.reshape(())))
    if limits is None:
        return None
    low, high = np.float32(limits[0]), np.float32(limits[1])
    if bounds:
        low, high = np.maximum(low, bounds[0]), np.minimum(high, bounds[1])
    parameters = empty_aligned((4,), "float32")
    parameters[:] = scale.reshape(()), zero_point.reshape(()), low, high
    return view_tensor(parameters)


@functools.lru_cache(maxsize=64)
def invert_axes(axes: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that takes `axes` back."""
    return tuple(int(axis) for axis in np.argsort(axes))
