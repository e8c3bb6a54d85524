"""x86: uint8 activations, int8 weights per channel, as its dot-product instructions take them."""

from __future__ import annotations

from relayquant.backends.defaults import WEIGHT_INT8, activation_config
from relayquant.config import BackendConfig, DTypeConfig, PatternConfig, QConfig
from relayquant.ops import BUILTIN_OPS

X86_DTYPES = (DTypeConfig(input="uint8", output="uint8", weight="int8"),)

X86 = BackendConfig(
    name="x86",
    patterns=tuple(PatternConfig(op, X86_DTYPES) for op in BUILTIN_OPS),
    default_qconfig=QConfig(activation=activation_config("uint8"), weight=WEIGHT_INT8),
)
