"""Example backend for hardware that shifts instead of multiplying: int8, symmetric, power-of-two
scales.

Copy it for a custom backend. Its integers run on any CPU.
"""

from __future__ import annotations

from relayquant.base.qtypes import Granularity, QSpec, Scheme
from relayquant.config import (
    BackendConfig,
    DTypeConfig,
    DTypeWithConstraints,
    FixedOutput,
    ObservationType,
    PatternConfig,
    QConfig,
    TensorConfig,
)
from relayquant.config.observers import MSE, Fixed
from relayquant.ir.ops import BUILTIN_OPS

#: -127 to 127: a shifter negates without overflow
BYTE = DTypeWithConstraints(
    "int8",
    schemes=(Scheme.SYMMETRIC,),
    granularities=(Granularity.PER_TENSOR,),
    quant_min_lower_bound=-127,
    power_of_two=True,
)
WEIGHT = DTypeWithConstraints(
    "int8", schemes=(Scheme.SYMMETRIC,), quant_min_lower_bound=-127, power_of_two=True
)

ACCELERATOR_DTYPES = (DTypeConfig(input=BYTE, output=BYTE, weight=WEIGHT),)

#: operators whose results lie between -1 and 1 for any data
UNIT_RANGE = (FixedOutput("int8", Scheme.SYMMETRIC, Fixed(scale=1 / 128, zero_point=0)),)
UNIT_PATTERNS = ("sigmoid", "tanh", "softmax")


def find_observation(name: str) -> tuple[ObservationType | None, tuple[FixedOutput, ...]]:
    """Choose where a built-in pattern's result gets its parameters on this hardware."""
    if name in UNIT_PATTERNS:
        return ObservationType.OUTPUT_USE_FIXED_QPARAMS, UNIT_RANGE
    return None, ()


def activation_spec(granularity: Granularity = Granularity.PER_TENSOR) -> QSpec:
    """Return the activation specification: int8 within -127..127, symmetric, power-of-two scale."""
    return QSpec("int8", Scheme.SYMMETRIC, granularity, quant_min=-127, power_of_two=True)


ACCELERATOR = BackendConfig(
    name="accelerator",
    patterns=tuple(
        PatternConfig(op, ACCELERATOR_DTYPES, *find_observation(op.name)) for op in BUILTIN_OPS
    ),
    default_qconfig=QConfig(
        activation=TensorConfig(activation_spec(), MSE()),
        weight=TensorConfig(activation_spec(Granularity.PER_CHANNEL), MSE()),
    ),
)
