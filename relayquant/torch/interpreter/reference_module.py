"""The module that `reference.convert_to_reference` returns: the reference form, with constants
as buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import tvm
from torch import nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401 # defines quantized_decomposed
from tvm import relax
from tvm.ir import Call

from relayquant.base.qtypes import INTEGER_LIMITS, Rounding
from relayquant.errors import ModelError
from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE, QUANTIZE
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype
from relayquant.stages.prepared import CalibrationGraph
from relayquant.torch.interpreter.program import ProgramBuilder, Reader, Values, make_conform
from relayquant.torch.submodule_cut import Parts, Placeholder, TensorTree

QUANTIZE_ROWS = "relax.qnn.quantize_rows"


class ReferenceModule(nn.Module):
    """A model in reference form, called with its inputs.

    Buffers are called "constant_<n>", in the order in which the model reads them.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        inputs: tuple[str, ...],
        placeholders: Sequence[Placeholder] = (),
        parts: Mapping[str, nn.Module] | None = None,
        form: TensorTree | None = None,
    ) -> None:
        """Build the module.

        Args:
            mod: The reference form.
            inputs: Names of its inputs, in call order.
            placeholders: Calls of submodules.
            parts: The submodules, by path.
            form: Structure of the model's result without its tensors. None: a tensor, or a flat
                tuple.
        """
        super().__init__()
        self.program = ReferenceBuilder(CalibrationGraph(mod, {}, inputs)).build(placeholders)
        self.placeholders, self.form = tuple(placeholders), form
        self.parts = Parts(parts or {})
        for i, constant in enumerate(self.program.constants.values()):
            self.register_buffer(f"constant_{i}", constant)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the model's outputs for these inputs."""
        names = (f"constant_{i}" for i in range(len(self.program.constants)))
        constants = {
            constant: self.get_buffer(name)
            for constant, name in zip(self.program.constants, names, strict=True)
        }
        fill = self.parts.make_filler(self.placeholders)
        result = self.program.run(inputs, {}, constants, refuse_rounding, {}, fill)
        return result if self.form is None else self.form.join(TensorTree.split(result)[1])


def refuse_rounding(key: str, axis: int, value: torch.Tensor) -> torch.Tensor:
    """Refuse simulated quantization: a reference form has none."""
    raise ModelError(f"Value {key!r} is simulated in a reference form.", code="RQ206")


class ReferenceBuilder(ProgramBuilder):
    """Builder for the reference form: nothing trains, and values are quantized."""

    def make_call(self, call: Call, name: str, var: relax.Var) -> Reader:
        """Make the function that computes a call of an operator."""
        if name == QUANTIZE_ROWS:
            read = self.read(call.args[0])
            return lambda values: quantize_rows(read(values))
        if name not in (QUANTIZE, DEQUANTIZE):
            return super().make_call(call, name, var)
        rounding = str(getattr(call.attrs, "rounding", Rounding.TONEAREST_EVEN.value))
        if Rounding(rounding) is not Rounding.TONEAREST_EVEN:
            raise ModelError(
                f"Operator {var.name!r} rounds {rounding}; quantized_decomposed of PyTorch rounds "
                "half to even.",
                code="RQ206",
            )
        is_quantize = name == QUANTIZE
        dtype = str(call.attrs.out_dtype) if is_quantize else tensor_dtype(call.args[0])
        function = choose_function(call, is_quantize)
        readers = [self.read(arg) for arg in call.args[:1]] + self.read_parameters(call)
        conform = make_conform(var.ty)
        limits, kind = INTEGER_LIMITS[dtype], getattr(torch, dtype)

        def compute(values: Values) -> Any:
            return conform(function(*(read(values) for read in readers), *limits, kind))

        return compute

    def read_parameters(self, call: Call) -> list[Reader]:
        """Return readers of the scale, the zero point and, for several scales, their axis, as
        torch needs them.
        """
        arrays = [constant_value(arg) for arg in call.args[1:3]]
        if any(array is None for array in arrays) and not call.args[1].ty.ndim:
            return [self.read(arg) for arg in call.args[1:3]]
        if any(array is None for array in arrays):
            row_scale, row_zero = (self.read(arg) for arg in call.args[1:3])
            row_axis = int(call.attrs.axis) % call.args[0].ty.ndim
            return [
                row_scale,
                lambda values: row_zero(values).expand_as(row_scale(values)),
                lambda values: row_axis,
            ]
        scale, zero_point = arrays
        if scale.ndim == 0 and zero_point.ndim == 0:
            numbers = float(scale), int(zero_point)
            return [lambda values: numbers[0], lambda values: numbers[1]]
        axis, size = int(call.attrs.axis) % call.args[0].ty.ndim, max(scale.size, zero_point.size)
        # Constants in wide dtypes: readers of the program do not treat results computed from
        # constants as parameters.
        wide = [
            relax.const(np.broadcast_to(array, (size,)).copy(), str(array.dtype))
            for array in (scale, zero_point)
        ]
        return [*map(self.read, wide), lambda values: axis]

    def note_trained(self, expr: relax.Expr, place: tuple[str, int], name: str) -> None:
        """Do nothing: nothing trains."""


def quantize_rows(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as `qnn.quantize_rows`: int8 of -127..127, and a scale for each row."""
    largest = data.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return torch.clamp(torch.round(data / scale), -127, 127).to(torch.int8), scale


def choose_function(call: Call, is_quantize: bool) -> Callable[..., torch.Tensor]:
    """Choose the operator of quantized_decomposed for constant parameters, or for run-time
    parameters.
    """
    name = "quantize" if is_quantize else "dequantize"
    space, parameters = torch.ops.quantized_decomposed, call.args[1:3]
    if any(parameter.ty.ndim for parameter in parameters):
        return getattr(space, f"{name}_per_channel").default
    overloads = getattr(space, f"{name}_per_tensor")
    is_known = all(constant_value(parameter) is not None for parameter in parameters)
    return overloads.default if is_known else overloads.tensor
