"""How calibration rounds weights and corrects biases: settings of `stages.calibration.weights`."""

from __future__ import annotations

from dataclasses import dataclass

from relayquant.base.arguments import check_fields
from relayquant.config.choices import BiasCorrection, WeightRounding
from relayquant.errors import ConfigError

#: sampled rows of an operator's input per weight of one output, at least and at most
ROWS_PER_COLUMN = (4, 128)


@check_fields
@dataclass(frozen=True)
class AdaRoundSettings:
    """How rounding is learned.

    Attributes:
        steps: Of gradient descent. Each is two products of the weight with H.
        rate: Adam's step size.
        regularization: What a weight between two levels costs, as a multiple of the mean error
            that rounding to nearest makes per weight.
        warm_up: Share of the steps before that cost counts.
        sharpness: The exponent beta of that cost, first and last: the larger, the less it
            cares of weights that are far from both levels.
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
class FitSettings:
    """How weights and biases are fitted.

    Attributes:
        rounding, bias: See the enums.
        scale_factors: The scale of each channel (of the tensor, if it has one) is the best of these
            multiples of the scale that its observer picked, judged by the error of the result.
        tensor_factors: Where one scale serves several channels, it is first multiplied by the best
            of these, judged with weights rounded to nearest: a channel of huge weights whose input
            is nearly always zero may be clipped.
        sweeps: Passes over all weights after rounding, in each of which every level moves to where
            the error is least given the others (coordinate descent).
        damping: Added to the diagonal of H, as a share of its mean.
        samples: Positions of an operator's input that H is made of, all batches together; but per
            weight of one output at least `ROWS_PER_COLUMN[0]` and at most `ROWS_PER_COLUMN[1]`.
        values: In parallel order (`Order`), so many values of the operators' inputs are computed,
            all operators and samples together, but those of 32 samples at least: of more data a
            part is used, evenly spread. What more of it brings is less than chance: MobileNet's
            output has 23.9 dB with 16 samples and 24.0 dB with 200.
        max_columns: Operators with more weights per output are fitted in blocks of that many
            columns, one block on each thread at a time, as if the inputs of different blocks had
            nothing to do with one another: H is columns x columns.
        adaround: How `WeightRounding.ADAPTIVE` learns.
        seed: Of the choice of positions.
    """

    rounding: WeightRounding = WeightRounding.OPTIMAL
    bias: BiasCorrection = BiasCorrection.WEIGHT
    scale_factors: tuple[float, ...] = (1.0,)
    tensor_factors: tuple[float, ...] = tuple(round(0.85**i, 4) for i in range(25))
    sweeps: int = 0
    damping: float = 0.01
    samples: int = 8192
    values: int = 1 << 28
    max_columns: int = 2304
    adaround: AdaRoundSettings = DEFAULT_ADAROUND
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rounding, WeightRounding) or not isinstance(
            self.bias, BiasCorrection
        ):
            raise ConfigError(
                f"FitSettings.rounding is {self.rounding!r} and bias {self.bias!r}; allowed: "
                "members of "
                "WeightRounding and BiasCorrection.",
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

    def count_rows(self, columns: int) -> int:
        """Positions to sample for an operator with that many weights per output."""
        least, most = (factor * min(columns, self.max_columns) for factor in ROWS_PER_COLUMN)
        return min(max(self.samples, least), most)

    @property
    def is_needed(self) -> bool:
        """Whether operators have to be observed at all."""
        return self.rounding is not WeightRounding.NEAREST or self.bias is not BiasCorrection.NONE


DEFAULT_FIT = FitSettings()
