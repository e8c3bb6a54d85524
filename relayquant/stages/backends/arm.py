"""Arm: int8 activations and int8 weights per channel, as sdot and smmla take them.

int16 activations too, for a model that needs them: half as many products per instruction.
"""

from __future__ import annotations

from relayquant.config import BackendConfig, QConfig
from relayquant.stages.backends.defaults import WEIGHT_INT8, activation_config, make_patterns

ARM = BackendConfig(
    name="arm",
    patterns=make_patterns(("int8", "int16")),
    default_qconfig=QConfig(activation=activation_config("int8"), weight=WEIGHT_INT8),
    float_dtypes=("float16",),
)
