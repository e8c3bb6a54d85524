"""Configurations that several backends share."""

from __future__ import annotations

from relayquant.calibrate.observers import MinMax
from relayquant.config import TensorConfig
from relayquant.qtypes import Granularity, QSpec, Scheme

#: stands where the backend leaves the choice to the level of effort (`relayquant.effort`)
DEFAULT_OBSERVER = MinMax()

#: symmetric, one scale per output channel, -127..127 so that negation never overflows
WEIGHT_INT8 = TensorConfig(
    QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_CHANNEL, quant_min=-127), MinMax()
)


def activation_config(dtype: str) -> TensorConfig:
    """Affine, one set of parameters per tensor."""
    return TensorConfig(QSpec(dtype, Scheme.AFFINE), DEFAULT_OBSERVER)
