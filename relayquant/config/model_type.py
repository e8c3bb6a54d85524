"""Kinds of models that need more than the backend's defaults, and what each needs, as data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class ModelType(enum.Enum):
    """What a model is, where that says how to quantize it."""

    #: residual sums in which a few channels are far larger than the rest: products and convolutions
    #: alone are quantized, and what products read is smoothed
    TRANSFORMER = "transformer"


@dataclass(frozen=True)
class ModelTypeSettings:
    """What a kind of model needs.

    Attributes:
        operators: Types that are quantized where no mapping is given; all others stay in float.
        alpha: How much of what products read is hard to quantize goes to their weights, 0 to 1
            (`relayquant.smooth_activations`).
    """

    operators: tuple[str, ...]
    alpha: float


MODEL_TYPES: Mapping[ModelType, ModelTypeSettings] = {
    ModelType.TRANSFORMER: ModelTypeSettings(
        ("relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d"), alpha=0.9
    ),
}
