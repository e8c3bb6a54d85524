"""Outputs of the trained and of the float model -> the default loss of `finetune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

#: outputs are probabilities up to this float32 rounding error
SUM_TOLERANCE = 1e-3


def match_outputs(outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Any:
    """The default loss: distance of outputs from the float model's, summed over outputs.

    For probabilities along the last axis: the Kullback-Leibler divergence. Otherwise: the squared
    distance, relative to the square of the expected output around its mean.
    """
    total = torch.zeros(())
    for got, want in zip(outputs, expected, strict=True):
        if not want.is_floating_point():
            continue
        if is_probability(want):
            tiny = torch.finfo(want.dtype).tiny
            ratio = want.clamp_min(tiny).log() - got.clamp_min(tiny).log()
            total = total + (want * ratio).sum(-1).mean()
        else:
            total = total + measure_distance(got, want)
    return total


def measure_distance(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return the squared distance, relative to the square of the expected output around its
    mean.
    """
    size = (want - want.mean()).square().mean().clamp_min(1e-12)
    return (got - want).square().mean() / size


def is_probability(values: torch.Tensor) -> bool:
    """Whether the last axis holds probabilities of several answers."""
    if values.ndim < 2 or values.shape[-1] < 2 or bool((values < 0).any()):
        return False
    return bool((values.sum(-1) - 1).abs().max() < SUM_TOLERANCE)
