"""When the guard of `relayquant.quantize` says that outputs deviate, and what it does then."""

from __future__ import annotations

from dataclasses import dataclass

from relayquant.base.arguments import check_fields
from relayquant.config.choices import Effort, Guard
from relayquant.errors import ConfigError


@check_fields
@dataclass(frozen=True)
class GuardSettings:
    """When the guard says that outputs deviate, and what it does.

    Outputs deviate when the SQNR of one of them is below `min_sqnr`, or when more than
    `disagreement` of the samples get clearly another answer
    (`relayquant.analysis.outputs.count_differing`). What 8 bits can give is 25 to 45 dB at the
    outputs of networks that quantize well; the worst one that still keeps most answers (MobileNet,
    ranges from the extremes, 97 % equal) has 15 dB. At 15 dB the error holds a thirtieth of the
    output's energy, at 10 dB a tenth. Both bounds are far from what is normal: the guard is for
    models that broke, not for the last points of accuracy; for those there is
    `quantize(..., metric=)`.

    The guard looks at a few samples, spread over the data, and then at twice as many, until it is
    settled whether outputs deviate: what they are not likely to fall below
    (`relayquant.analysis.outputs.OutputGap.least`) is above `min_sqnr`, or what they are not likely
    to exceed is below. Models that are cheap to run are looked at on so many samples, too, that
    damage to more than `doubtful_disagreement` of all samples is seen at a confidence of 95 %.

    Where outputs do not deviate, there is a warning of more than `doubtful_disagreement` other
    answers, or, of an output that holds no answers (boxes, a mask, a signal), of one that may be
    below `doubtful_sqnr` by what the samples tell, or is below `sample_sqnr` on one sample.

    Attributes:
        action: See `Guard`; None: WARN with effort "fast", else REVERT.
        samples: Samples that are compared, at most.
        work: Multiply-adds of the float model for all samples together that are spent in any case;
            at least 4 samples are compared. Up to 4 times as many are spent where it is not
            settled whether outputs deviate.
        min_sqnr: dB at an output, below which it deviates.
        disagreement: Share of samples with another answer, above which an output deviates.
        target_sqnr: dB that operators are reverted to float for, once outputs deviated.
        doubtful_sqnr, doubtful_disagreement, sample_sqnr: See above.
        search_work: Multiply-adds of the float model that finding these operators may take, about;
            it looks at fewer samples for that, the worst ones, one at least.
    """

    action: Guard | None = None
    samples: int = 128
    work: float = 1.5e9
    min_sqnr: float = 15.0
    disagreement: float = 0.5
    target_sqnr: float = 20.0
    doubtful_sqnr: float = 15.0
    doubtful_disagreement: float = 0.1
    search_work: float = 2e10
    sample_sqnr: float = 10.0

    def __post_init__(self) -> None:
        if self.action is not None and not isinstance(self.action, Guard):
            raise ConfigError(
                f"GuardSettings.action is {self.action!r}; allowed: a member of Guard, or None.",
                code="RQ101",
            )
        if self.samples < 1 or not self.work > 0 or not 0 < self.disagreement <= 1:
            raise ConfigError(
                f"GuardSettings: samples is {self.samples}, work {self.work} and disagreement "
                f"{self.disagreement}; allowed: samples >= 1, work > 0, 0 < disagreement <= 1.",
                code="RQ101",
            )
        if not self.search_work > 0 or not 0 <= self.doubtful_disagreement <= 1:
            raise ConfigError(
                f"GuardSettings: search_work is {self.search_work} and doubtful_disagreement "
                f"{self.doubtful_disagreement}; allowed: search_work > 0, 0 <= "
                "doubtful_disagreement <= 1.",
                code="RQ101",
            )
        if not self.min_sqnr <= self.target_sqnr:
            raise ConfigError(
                f"GuardSettings: min_sqnr is {self.min_sqnr} and target_sqnr {self.target_sqnr}; "
                "allowed: min_sqnr <= target_sqnr.",
                code="RQ102",
            )

    def find_action(self, effort: str) -> Guard:
        """What to do at a level of effort."""
        if self.action is not None:
            return self.action
        return Guard.WARN if effort == Effort.FAST.value else Guard.REVERT
