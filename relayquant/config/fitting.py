"""Settings of `stages.calibration.weights`: how calibration rounds weights and corrects biases."""

from __future__ import annotations

from dataclasses import dataclass, replace

from relayquant.base.arguments import check_fields
from relayquant.base.qtypes import QSpec
from relayquant.config.choices import BiasCorrection, WeightRounding
from relayquant.errors import ConfigError

#: minimum and maximum of sampled input rows of an operator per weight of one output
ROWS_PER_COLUMN = (4, 128)
#: the maximum for weights of few bits
ROWS_OF_FEW = 512
#: the maximum for weights that are rounded to nearest: only the mean of the input is needed
ROWS_OF_MEAN = 1024


@check_fields
@dataclass(frozen=True)
class AdaRoundSettings:
    """Settings of learned rounding.

    Attributes:
        steps: Steps of gradient descent. Each step costs two products of the weight with H.
        rate: Adam's step size.
        regularization: Cost of a weight between two levels, as a multiple of the mean error per
            weight from rounding to nearest.
        warm_up: Share of the steps before this cost counts.
        sharpness: First and last exponent beta of this cost. A larger beta affects weights far from
            both levels less.
    """

    steps: int = 300
    rate: float = 0.05
    regularization: float = 10.0
    warm_up: float = 0.2
    sharpness: tuple[float, float] = (20.0, 2.0)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rate <= 0 or self.regularization <= 0:
            raise ConfigError(
                f"AdaRoundSettings.steps is {self.steps}, rate {self.rate} and regularization "
                f"{self.regularization}; allowed: steps >= 1, the others > 0.",
                code="RQ101",
            )
        if not 0 <= self.warm_up < 1 or min(self.sharpness) < 1:
            raise ConfigError(
                f"AdaRoundSettings.warm_up is {self.warm_up} and sharpness {self.sharpness}; "
                "allowed: 0 <= warm_up < 1, sharpness >= 1.",
                code="RQ101",
            )


DEFAULT_ADAROUND = AdaRoundSettings()


@check_fields
@dataclass(frozen=True)
class ReconstructionSettings:
    """Settings of weights of few bits: they are fitted to what the float model computes.

    Other weights are rounded so that the sums of the float weight on the quantized input stay.
    With few bits the error of that input is large. So the float model runs beside, and the weight
    W* that is rounded, x the quantized and y the float input, is

        W* = argmin norm(W x - W0 y)^2 + ridge norm(W - W0)^2

    The target is that of GPTAQ (Li et al. 2025, https://arxiv.org/abs/2504.02692).

    Attributes:
        bits: Weights of at most so many bits are fitted this way. 0: none; 8: all.
        ridge: How much the float weight holds, as a share of the mean square of x. The number of
            weights per output, divided by the number of rows, is added.
        scale_factors, sweeps: Used for these weights in place of the same fields of `FitSettings`.
        rows: At least so many `FitSettings.samples`, up to `ROWS_OF_FEW` per weight of one output.
        samples: Number of samples of the model's inputs to run, with `Order.PARALLEL`.
    """

    bits: int = 4
    ridge: float = 0.3
    scale_factors: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
    sweeps: int = 2
    rows: int = 16384
    samples: int = 256

    def __post_init__(self) -> None:
        if not self.scale_factors or min(self.scale_factors) <= 0 or self.ridge <= 0:
            raise ConfigError(
                f"ReconstructionSettings.scale_factors is {self.scale_factors} and ridge "
                f"{self.ridge}; allowed: at least one factor > 0, ridge > 0.",
                code="RQ101",
            )
        least = {"bits": 0, "sweeps": 0, "rows": 1, "samples": 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ConfigError(
                    f"ReconstructionSettings.{name} is {getattr(self, name)}; allowed: >= "
                    f"{number}.",
                    code="RQ101",
                )


DEFAULT_RECONSTRUCTION = ReconstructionSettings()


@check_fields
@dataclass(frozen=True)
class FitSettings:
    """Settings of the fit of weights and biases, as in GPTQ.

    Attributes:
        rounding, bias: See the enums.
        optimal_columns: With `WeightRounding.OPTIMAL`, 8-bit weights with more columns (weights per
            output) are rounded to nearest if each output has its scale and the data has 8 bits or
            fewer. H of many columns takes long and gains little: a seventh of the time of
            quantizing YOLOv8n and less than 0.1 dB, a tenth for MiniLM-L6 and 0.4 dB. H of up to
            576 columns (3 x 3 taps of 64 channels) gains 1 dB at an output of MTCNN. None: H for
            all.
        scale_factors: Multiples of the observer's scale that are tried for each channel (or for a
            per-tensor scale). The multiple with the smallest error of the result is used.
        tensor_factors: Multiples that are tried first for a scale of several channels, with weights
            rounded to nearest. They can clip a channel of huge weights with an input that is nearly
            always zero.
        sweeps: Passes over all weights after rounding. Each pass moves every level to the smallest
            error, given the other levels (coordinate descent).
        damping: Added to the diagonal of H, as a share of its mean.
        samples: Number of positions of an operator's input for H, over all batches. Per weight of
            one output, it is at least `ROWS_PER_COLUMN[0]` and at most `ROWS_PER_COLUMN[1]`.
        values: Number of input values that are computed in parallel order (`Order`), over all
            operators and samples. At least 16 samples are used, evenly spread over a larger data
            set. More data has little effect: MobileNet's output has 23.9 dB with 16 samples and
            24.0 dB with 200, but 23.6 dB with 4.
        max_columns: Operators with more weights per output are fitted in blocks of this many
            columns, one block per thread at a time. Inputs of different blocks are treated as
            uncorrelated. H is columns x columns.
        adaround: Settings of `WeightRounding.ADAPTIVE`.
        reconstruction: Settings of weights of few bits. Nothing with `WeightRounding.NEAREST`.
        seed: Seed for the choice of positions.
    """

    rounding: WeightRounding = WeightRounding.OPTIMAL
    bias: BiasCorrection = BiasCorrection.WEIGHT
    optimal_columns: int | None = 800
    scale_factors: tuple[float, ...] = (1.0,)
    tensor_factors: tuple[float, ...] = tuple(round(0.85**i, 4) for i in range(25))
    sweeps: int = 0
    damping: float = 0.01
    samples: int = 8192
    values: int = 1 << 23
    max_columns: int = 2304
    adaround: AdaRoundSettings = DEFAULT_ADAROUND
    reconstruction: ReconstructionSettings = DEFAULT_RECONSTRUCTION
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rounding, WeightRounding) or not isinstance(
            self.bias, BiasCorrection
        ):
            raise ConfigError(
                f"FitSettings.rounding is {self.rounding!r} and bias {self.bias!r}; allowed: "
                "members of WeightRounding and BiasCorrection.",
                code="RQ101",
            )
        for name in ("scale_factors", "tensor_factors"):
            factors = getattr(self, name)
            if not factors or min(factors) <= 0:
                raise ConfigError(
                    f"FitSettings.{name} is {factors}; allowed: factors > 0, at least one.",
                    code="RQ101",
                )
        if not 0 < self.damping <= 1:
            raise ConfigError(
                f"FitSettings.damping is {self.damping}; allowed: 0 < damping <= 1.", code="RQ101"
            )
        least = {"samples": 1, "values": 1, "max_columns": 1, "sweeps": 0}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ConfigError(
                    f"FitSettings.{name} is {getattr(self, name)}; allowed: >= {number}.",
                    code="RQ101",
                )
        if self.optimal_columns is not None and self.optimal_columns < 0:
            raise ConfigError(
                f"FitSettings.optimal_columns is {self.optimal_columns}; allowed: >= 0, or None.",
                code="RQ101",
            )

    def reconstructs(self, spec: QSpec) -> bool:
        """Whether a weight is fitted to the sums of the float model."""
        is_few = spec.code_bits <= self.reconstruction.bits
        return is_few and self.rounding is not WeightRounding.NEAREST

    def for_spec(self, spec: QSpec) -> FitSettings:
        """Return the settings for one weight."""
        if not self.reconstructs(spec):
            return self
        few = self.reconstruction
        return replace(self, scale_factors=few.scale_factors, sweeps=few.sweeps)

    def needs_moments(self, columns: int, weight: QSpec, data: QSpec | None) -> bool:
        """Whether H is needed for a weight with `columns` weights per output; `data` is the
        operand that it multiplies, None if this stays in float.
        """
        if self.rounding is not WeightRounding.OPTIMAL or self.optimal_columns is None:
            return self.rounding is not WeightRounding.NEAREST
        is_fine = weight.is_per_channel and weight.code_bits == 8
        is_coarse = data is not None and data.code_bits <= 8
        return columns <= self.optimal_columns or not (is_fine and is_coarse)

    def count_rows(self, columns: int, weight: QSpec, data: QSpec | None) -> int:
        """Return the number of positions to sample for an operator, with arguments as above."""
        if self.reconstructs(weight):
            return min(max(self.samples, self.reconstruction.rows), ROWS_OF_FEW * columns)
        least, most = (factor * min(columns, self.max_columns) for factor in ROWS_PER_COLUMN)
        if not self.needs_moments(columns, weight, data):
            least, most = 1, min(most, ROWS_OF_MEAN)
        return min(max(self.samples, least), most)

    @property
    def is_needed(self) -> bool:
        """Whether operators must be observed."""
        return self.rounding is not WeightRounding.NEAREST or self.bias is not BiasCorrection.NONE


DEFAULT_FIT = FitSettings()
