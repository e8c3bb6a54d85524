"""Eager, simulated quantization: one kernel for all tensors that have one scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from relayquant.lower.eager.kernel_cache import KernelCache, KernelKey
from relayquant.lower.kernels.float_round import FloatRound, make_round
from relayquant.reference.interpreter import Frame, evaluate
from relayquant.reference.qnn import SIMULATED_RANGES
from relayquant.runtime import align_array, empty_aligned, find_memory_axes, view_tensor

ROUND = KernelKey(make_round, FloatRound())


@dataclass(frozen=True, eq=False)
class Rounding:
    """Simulated quantization of a tensor with one scale; passes it through for code 0."""

    data: relax.Var
    operands: tuple[relax.Var, ...]
    bounds: tuple[relax.Expr, ...]
    result: relax.Var
    kernels: KernelCache

    def run(self, frame: Frame) -> None:
        """Compute the rounded value."""
        data = frame.values[self.data]
        code, scale, zero_point = (frame.values[var].reshape(()) for var in self.operands)
        limits = SIMULATED_RANGES.get(int(code))
        frame.values[self.result] = (
            data if limits is None else self.round(frame, data, scale, zero_point, limits)
        )

    def round(
        self, frame: Frame, data: np.ndarray, scale: Any, zero_point: Any, limits: tuple[int, int]
    ) -> np.ndarray:
        low, high = np.float32(limits[0]), np.float32(limits[1])
        for bound, pick in zip(self.bounds, (np.maximum, np.minimum), strict=False):
            value = evaluate(frame, bound, "bound")
            low, high = pick(low, value), pick(high, value)
        axes = find_memory_axes(data)
        flat = align_array(data.transpose(axes))
        rounded = empty_aligned(flat.shape, "float32")
        if flat.size:
            parameters = empty_aligned((4,), "float32")
            parameters[:] = scale, zero_point, low, high
            arrays = flat.reshape(-1), parameters, rounded.reshape(-1)
            self.kernels.get(ROUND)(*(view_tensor(array) for array in arrays))
        return rounded.transpose(np.argsort(axes))
