"""Arm: int8 activations and int8 weights per channel, as sdot and smmla take them."""

from __future__ import annotations

from relayquant.backends.defaults import WEIGHT_INT8, activation_config
from relayquant.config import BackendConfig, DTypeConfig, PatternConfig, QConfig
from relayquant.ops import BUILTIN_OPS

ARM_DTYPES = (DTypeConfig(input="int8", output="int8", weight="int8"),)

ARM = BackendConfig(
    name="arm",
    patterns=tuple(PatternConfig(op, ARM_DTYPES) for op in BUILTIN_OPS),
    default_qconfig=QConfig(activation=activation_config("int8"), weight=WEIGHT_INT8),
)
