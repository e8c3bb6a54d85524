"""Backend for any CPU that LLVM supports: 8-bit activations of either sign or 16-bit ones,
unsigned by default.
"""

from __future__ import annotations

from relayquant.config import BackendConfig, QConfig
from relayquant.stages.backends.defaults import BYTES, WEIGHT_INT8, activation_config, make_patterns

GENERIC = BackendConfig(
    name="generic",
    patterns=make_patterns((*BYTES, "int16")),
    default_qconfig=QConfig(activation=activation_config("uint8"), weight=WEIGHT_INT8),
    float_dtypes=("float16",),
)
