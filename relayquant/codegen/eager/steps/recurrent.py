"""lstm, gru and rnn -> steps that run the kernel of compiled models, for any number of steps and
samples.

With an int8 weight, the bits are numpy's. With a float32 weight, the order of sums is another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tvm import relax
from tvm.tirx import PrimFunc

from relayquant.base.runtime import align_array, empty_aligned, view_aligned
from relayquant.codegen.eager.kernel_cache import KernelCache, KernelKey
from relayquant.codegen.eager.operand import Operand
from relayquant.codegen.kernels.floating.tile import FloatIsa
from relayquant.codegen.kernels.recurrent import RecurrencePlan, build_planned
from relayquant.ir.reference.frame import Frame


def make_recurrence(plan: RecurrencePlan, isa: FloatIsa, name: str) -> PrimFunc:
    """Make the PrimFunc of `build_recurrence`. The plan has the instructions for integers."""
    return build_planned(plan, name)


@dataclass(frozen=True, eq=False)
class RecurrentStep:
    """A recurrent layer: reads the operands, and calls the kernel.

    `weights` are what the kernel takes for the weight: the packed arrays of an int8 weight, or the
    float32 weight. `others` are the optional operands that are given, by name.
    """

    plan: RecurrencePlan
    data: Operand
    weights: Sequence[Operand]
    others: Mapping[str, Operand]
    result: relax.Var
    kernels: KernelCache

    @property
    def key(self) -> KernelKey:
        return KernelKey(make_recurrence, self.plan)

    @cached_property
    def kernel(self) -> Any:
        """The compiled kernel."""
        return self.kernels.get(self.key)

    def run(self, frame: Frame) -> None:
        """Compute the result."""
        data, units = self.data.read(frame), self.plan.spec.units
        steps, batch, _ = data.shape
        result = empty_aligned((self.plan.spec.states + steps, batch, units), "float32")
        shapes = self.plan.spec.shape_optional(batch)
        given = [
            np.broadcast_to(operand.read(frame), shapes[name])
            for name, operand in self.others.items()
        ]
        arrays = [data, *(weight.read(frame) for weight in self.weights), *given]
        if result.size:
            self.kernel(
                *(view_aligned(align_array(array)) for array in arrays), view_aligned(result)
            )
        frame.values[self.result] = result
