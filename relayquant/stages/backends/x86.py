"""x86 backend: uint8 activations and per-channel int8 weights, as the dot-product instructions take
them.

A model that needs int16 activations can have them, with half as many products per instruction. On
CPUs without VNNI, 7-bit weights are an option: faster, with twice the step.
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
