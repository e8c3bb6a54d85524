"""Model types that need more than the backend's defaults, their settings, and how a mapping says
that the type was recognized.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class ModelType(enum.Enum):
    """The type of a model that needs special settings. It is recognized if it is not given."""

    #: All operators are quantized. Nothing is recognized.
    GENERAL = "general"

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


#: Origin of the line that keeps all other operators of a recognized transformer in float.
RECOGNIZED = (
    "model_type=transformer, which was recognized by its attention and by a few channels that are "
    "far larger than the rest"
)


MODEL_TYPES: Mapping[ModelType, ModelTypeSettings] = {
    ModelType.TRANSFORMER: ModelTypeSettings(
        ("relax.matmul", "relax.nn.conv1d", "relax.nn.conv2d"), alpha=0.9
    ),
}
