"""The enums of user settings. A setting takes a member, or its value as text."""

from __future__ import annotations

import enum


class Effort(enum.Enum):
    """The effort of calibration."""

    FAST = "fast"  #: ranges from the extremes, weights rounded to nearest
    #: ranges and weights with the smallest error in the results, layers equalized if it helps; the
    #: default
    BALANCED = "balanced"
    #: BALANCED with a search of weight scales and ranges that see the rounding of values before
    #: them. `quantize` also makes the BALANCED model, and returns it if the BEST model is not
    #: clearly nearer to the float model on some samples
    BEST = "best"


class Order(enum.Enum):
    """The order in which parameters are chosen."""

    #: One operator after the other. Each sees the rounding of the operators before it.
    TOPOLOGICAL = "topological"
    #: All ranges from one pass of the float model. Then weights, in topological order, from a part
    #: of the data (`FitSettings.values`).
    PARALLEL = "parallel"


class WeightRounding(enum.Enum):
    """The rounding of weights to integers."""

    NEAREST = "nearest"  #: each to the nearest integer
    OPTIMAL = "optimal"  #: with the smallest error of the operator's result on the calibration data
    ADAPTIVE = "adaptive"  #: the same aim, learned by gradient descent: `fit_adaround`


class BiasCorrection(enum.Enum):
    """The error that is corrected in the bias (Nagel et al. 2019,
    https://arxiv.org/abs/1906.04721).
    """

    NONE = "none"
    WEIGHT = "weight"  #: the mean error from rounding this operator's weights


class Guard(enum.Enum):
    """The action of the guard (accuracy control) if the outputs deviate from the float model."""

    REVERT = "revert"  #: the operators that cause it are reverted to float, with a warning
    WARN = "warn"  #: a warning names the first operator with a wrong result
    OFF = "off"  #: the guard is off


class GroupedForm(enum.Enum):
    """The form of matrix products with grouped weights in ONNX."""

    BLOCKS = "blocks"  #: DequantizeLinear with block_size (opset 21) and MatMul: plain ONNX
    NBITS = "nbits"  #: com.microsoft.MatMulNBits of ONNX Runtime, if it supports the weight


class RecurrentForm(enum.Enum):
    """The form of recurrent layers with integer weights in ONNX."""

    STEPS = "steps"  #: Scan, which quantizes the hidden state in each step, as the module does
    OPERATOR = "operator"  #: LSTM, GRU or RNN: faster, but the hidden state stays in float


class Ranges(enum.Enum):
    """The source of fake quantization scales during training.

    The first scales come from calibration, or else from the first training batches.
    """

    FROZEN = "frozen"  #: they stay
    #: the extremes of the batches, and the current extremes of weights, as in FX observers
    MOVING_AVERAGE = "moving_average"
    LEARNED = "learned"  #: learned by the gradient of the loss (LSQ); zero points stay

    @property
    def moves(self) -> bool:
        """Whether the scales change while the module trains."""
        return self is not Ranges.FROZEN


class BatchNorm(enum.Enum):
    """The treatment of batch norms behind convolutions and matrix products."""

    FROZEN = "frozen"  #: folded into weights and biases with their statistics
    #: folded with the running statistics, normalized by the batch statistics: ConvBn of FX
    LIVE = "live"


class Unseen(enum.Enum):
    """The treatment of an operator that is reached later but was never reached in calibration."""

    ERROR = "error"  #: an error that names it and what to calibrate
    FLOAT = "float"  #: it stays in PyTorch, in float


class Precision(enum.Enum):
    """The operands of float products: convolutions and matrix products with constant weights.

    Sums are float32.
    """

    FLOAT32 = "float32"
    #: rounded to bfloat16, which has 8 bits of precision; only on CPUs with instructions for it
    BF16 = "bf16"


class Support(enum.Enum):
    """The backend's answer to an operator's QConfig: the three cases of FX and two more."""

    SERVED = "served"  #: the backend runs the pattern with these dtypes
    DTYPE_UNSUPPORTED = "dtype unsupported"  #: it runs the pattern with other dtypes
    PATTERN_UNKNOWN = "pattern unknown"  #: it has no pattern for the operator
    FORM_UNSUPPORTED = "form unsupported"  #: its pattern excludes this use
    NOT_ASKED = "not asked"  #: there is no QConfig for it
