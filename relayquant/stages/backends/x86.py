"""x86: uint8 activations, int8 weights per channel, as its dot-product instructions take them.

int16 activations too, for a model that needs them: half as many products per instruction. Weights
of 7 bits are a choice for CPUs without VNNI: faster, and half as fine.
"""

from __future__ import annotations

from dataclasses import replace

from relayquant.config import BackendConfig, QConfig
from relayquant.stages.backends.defaults import (
    WEIGHT_7BIT,
    WEIGHT_INT8,
    activation_config,
    make_patterns,
)

X86 = BackendConfig(
    name="x86",
    patterns=make_patterns(("uint8", "int16")),
    default_qconfig=QConfig(activation=activation_config("uint8"), weight=WEIGHT_INT8),
    float_dtypes=("float16",),
)

X86_7BIT = replace(
    X86,
    name="x86-7bit",
    default_qconfig=QConfig(activation=activation_config("uint8"), weight=WEIGHT_7BIT),
)
