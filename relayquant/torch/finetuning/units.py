"""Trainable module -> the units in which a step changes its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from relayquant.ir.ops.find import find_pattern, match_operator
from relayquant.ir.rewrite import Graph
from relayquant.torch.training.rounding import FakeQuantize, align_channels
from relayquant.torch.training.trainable import TrainableModule, name_parameter

#: unit of tensors whose numbers are all near 0, such as a bias before training
LEAST_UNIT = 1e-2
#: unit of a channel without weights, relative to the unit of the largest
LEAST_SHARE = 1e-4


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """A weight s * u that moves with its learned scale s. u stays unchanged.

    Attributes:
        weight: The weight.
        quantizer: Rounds it.
        factor: The logarithm of its scale, (n,).
    """

    weight: nn.Parameter
    quantizer: FakeQuantize
    factor: nn.Parameter

    @property
    def axis(self) -> int:
        """Axis of the channels."""
        return self.quantizer.group.info.axis or 0

    @torch.no_grad()
    def carry_gradient(self) -> None:
        """Change the factor's gradient from the gradient of s alone to the gradient of s with fixed
        u.

        The weight's gradient along the weight itself is added, times LSQ's factor.
        """
        if self.weight.grad is None or self.factor.grad is None:
            return
        slope = (self.weight.grad * self.weight).transpose(0, self.axis)
        along = slope.reshape(len(self.factor), -1).sum(1)
        self.factor.grad.add_(along, alpha=self.quantizer.find_gradient_scale(self.weight))

    @torch.no_grad()
    def carry_weight(self, before: torch.Tensor) -> None:
        """Change the weight for a factor that has moved."""
        self.weight.mul_(align_channels((self.factor - before).exp(), self.weight, self.axis))


def find_scaled(student: TrainableModule) -> Iterator[ScaledWeight]:
    """Find weights with a learned scale.

    Weights whose specification restricts the scale are left out, because such a scale jumps while
    the factor moves.
    """
    for quantizer in student.list_quantizers():
        name, factor = name_parameter(quantizer.group.key), quantizer.log_factor
        if name in student.weights and factor is not None and not quantizer.is_conformed:
            yield ScaledWeight(student.weights[name], quantizer, factor)


def measure_units(module: TrainableModule) -> dict[str, torch.Tensor]:
    """Return the unit of a step for each parameter, shaped to broadcast.

    For weights it is the root mean square of an output channel, because preparation folds and
    scales channels, so channels of a tensor may differ by a factor of a thousand. For their biases
    it is the expected sum of the channel: that unit, times the root of the number of products,
    times an eighth of the range of the data. For factors (`log_factor`) it is 1.
    """
    prepared, units = module.source.prepared, {}
    for name, parameter in module.named_parameters():
        size = parameter.detach().square().mean().sqrt().clamp_min(LEAST_UNIT)
        units[name] = torch.ones(()) if name.endswith("log_factor") else size
    graph = Graph(prepared.mod)
    for operator in prepared.plan.operators:
        weight = f"{operator.name}:weight"
        path = f"weights.{name_parameter(weight)}"
        if path not in units:
            continue
        pattern = find_pattern(prepared.backend, operator.pattern)
        axis_of = pattern.operand("weight").axis
        axis = axis_of(match_operator(graph, prepared.backend, operator)) if axis_of else None
        values = module.weights[name_parameter(weight)].detach()
        axes = [i for i in range(values.ndim) if i != axis]
        unit = values.square().mean(axes, keepdim=True).sqrt()
        units[path] = unit.clamp_min(float(unit.max()) * LEAST_SHARE)
        bias = f"weights.{name_parameter(f'{operator.name}:bias')}"
        data = dict(operator.operands).get("data")
        if bias in units and data is not None:
            shape = module.get_parameter(bias).shape
            low, high = prepared.plan.group(data).info.spec.limits
            spread = float(prepared.parameters[data].scale.max()) * (high - low) / 8
            products = values.numel() / max(unit.numel(), 1)
            expected = units[path].reshape(-1) * math.sqrt(products) * spread
            units[bias] = (
                expected.reshape(shape) if expected.numel() == shape.numel() else (expected.mean())
            )
    return units
