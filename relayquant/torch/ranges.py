"""What the ranges of fake quantization and the statistics of batch norms do while a module trains:
what users choose.
"""

from __future__ import annotations

import enum


class Ranges(enum.Enum):
    """Where the scales of fake quantization come from, once calibration has found the first, or
    the first training batches without it.
    """

    FROZEN = "frozen"  #: they stay
    #: they follow the extremes of the batches, of weights the extremes of now, as FX's observers do
    MOVING_AVERAGE = "moving average"
    LEARNED = "learned"  #: by the gradient of the loss (LSQ); zero points stay

    @property
    def moves(self) -> bool:
        """Whether they change while the module trains."""
        return self is not Ranges.FROZEN


class BatchNorm(enum.Enum):
    """What becomes of batch norms behind convolutions and matrix products."""

    FROZEN = "frozen"  #: folded into weights and biases with the statistics that they have
    #: folded with the running statistics, normalized by those of each batch: FX's ConvBn
    LIVE = "live"
