"""Arm backend: int8 activations and per-channel int8 weights, as sdot and smmla take them.

A model that needs int16 activations can have them, with half as many products per instruction.
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
