"""Model types that need more than the backend's defaults, and their settings."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class ModelType(enum.Enum):
    """The type of a model that needs special settings."""

    #: Residual sums have a few channels that are much larger than the rest. Only matrix products
    #: and convolutions are quantized, and the inputs of matrix products are smoothed.
    TRANSFORMER = "transformer"


@dataclass(frozen=True)
class ModelTypeSettings:
    """The settings for a model type.

    Attributes:
        operators: Operator types that are quantized if no mapping is given. All others stay in
            float.
        alpha: Share of the quantization difficulty that moves from the inputs of products to the
            weights, 0 to 1 (`relayquant.smooth_activations`).
    """

    operators: tuple[str, ...]
    alpha: float


MODEL_TYPES: Mapping[ModelType, ModelTypeSettings] = {
    ModelType.TRANSFORMER: ModelTypeSettings(
        ("relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d"), alpha=0.9
    ),
}
