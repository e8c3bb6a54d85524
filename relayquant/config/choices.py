"""Words that settings take: what a user chooses among, each a member or its value as text."""

from __future__ import annotations

import enum


class Effort(enum.Enum):
    """Levels of effort."""

    FAST = "fast"  #: ranges from the extremes, weights rounded to nearest
    #: ranges and weights by what they change in the results, layers scaled against one another
    #: where that is worth it; the default
    BALANCED = "balanced"
    #: as BALANCED, with a search of the weights' scales; for few bits or one scale per tensor
    BEST = "best"


class Order(enum.Enum):
    """When parameters are picked."""

    #: One after the other, each sees the rounding of those before it.
    TOPOLOGICAL = "topological"
    #: Ranges all from one pass of the float model; then weights, in topological order, from a part
    #: of the data (`FitSettings.values`).
    PARALLEL = "parallel"


class WeightRounding(enum.Enum):
    """How weights become integers."""

    NEAREST = "nearest"  #: each to its nearest level
    OPTIMAL = "optimal"  #: so that the operator's result changes least on the calibration data
    ADAPTIVE = "adaptive"  #: the same aim, up or down by gradient descent: `fit_adaround`


class BiasCorrection(enum.Enum):
    """What is taken back through the bias (Nagel et al. 2019, https://arxiv.org/abs/1906.04721)."""

    NONE = "none"
    WEIGHT = "weight"  #: the mean error that rounding this operator's weights makes


class Guard(enum.Enum):
    """What happens when the outputs of float and integer model part."""

    REVERT = "revert"  #: operators that cause it go back to float, with a warning
    WARN = "warn"  #: a warning names the first operator that is off
    OFF = "off"  #: nothing is run


class GroupedForm(enum.Enum):
    """How products with weights in groups are written to ONNX."""

    BLOCKS = "blocks"  #: DequantizeLinear with block_size (opset 21) and MatMul: plain ONNX
    NBITS = "nbits"  #: com.microsoft.MatMulNBits, of ONNX Runtime, where it takes the weight


class Ranges(enum.Enum):
    """Where the scales of fake quantization come from, once calibration has found the first, or
    the first training batches without it.
    """

    FROZEN = "frozen"  #: they stay
    #: they follow the extremes of the batches, of weights the extremes of now, as FX's observers do
    MOVING_AVERAGE = "moving_average"
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


class Unseen(enum.Enum):
    """What becomes of an operator that calibration never passed, when it is reached later."""

    ERROR = "error"  #: an error that names it, and what to calibrate
    FLOAT = "float"  #: it stays in PyTorch, in float


class Support(enum.Enum):
    """What became of the QConfig that the mapping gave an operator: FX's three cases, two more."""

    SERVED = "served"  #: the backend has the pattern and runs these dtypes
    DTYPE_UNSUPPORTED = "dtype unsupported"  #: it has the pattern, and runs other dtypes
    PATTERN_UNKNOWN = "pattern unknown"  #: it has no pattern for the operator
    FORM_UNSUPPORTED = "form unsupported"  #: its pattern does not take this use of the operator
    NOT_ASKED = "not asked"  #: no QConfig asks for it
