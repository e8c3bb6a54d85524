"""Equalization: float module + data -> the same function with channels that are easier to
quantize.
"""

from relayquant.stages.equalization.cross_layer import read_exponents
from relayquant.stages.equalization.equalize import add_scales, move_scales
from relayquant.stages.equalization.recognition import recognize_type

__all__ = ["add_scales", "move_scales", "read_exponents", "recognize_type"]
