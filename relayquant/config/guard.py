"""Settings of the guard (accuracy control) of `relayquant.quantize`."""

from __future__ import annotations

from dataclasses import dataclass

from relayquant.base.arguments import check_fields
from relayquant.config.choices import Effort, Guard
from relayquant.errors import ConfigError


@check_fields
@dataclass(frozen=True)
class GuardSettings:
    """The bounds of the guard (accuracy control), and its action if outputs deviate from float.

    Outputs deviate if the SQNR of one output is below `min_sqnr`, or if it is 95 % certain that
    more than `disagreement` of all data gets a clearly different answer
    (`relayquant.analysis.outputs.count_differing`): one of 16 samples, or 4 of 128.
    Networks that quantize well reach 25 to 45 dB with 8 bits. The worst network that still keeps
    most answers (MobileNet, ranges from the extremes, 97 % equal) has 15 dB. At 15 dB, the error
    has a thirtieth of the output's energy, at 10 dB a tenth. The guard finds broken models. For a
    bound on accuracy, use `quantize(..., metric=)`.

    The guard runs a few samples, spread over the data, and doubles the number until the result is
    certain. The result is certain if the probable lower bound of the SQNR
    (`relayquant.analysis.outputs.OutputGap.least`) is above `min_sqnr`, or the probable upper bound
    is below. Models that are cheap to run get more samples: enough to find damage to more than
    `doubtful_disagreement` of all samples with 95 % confidence.

    If outputs do not deviate, the guard warns if more than `doubtful_disagreement` of the answers
    differ. For an output without answers (boxes, a mask, a signal), it warns if the SQNR may be
    below `doubtful_sqnr`, or is below `sample_sqnr` on one sample.

    Attributes:
        action: See `Guard`. None is WARN with effort "fast", else REVERT.
        samples: Maximum number of compared samples.
        work: Multiply-adds of the float model that are always spent, over all samples. At least 4
            samples are compared. If the result is uncertain, up to 4 times as many are spent.
        min_sqnr: SQNR in dB. An output below it deviates.
        disagreement: Share of all data with a different answer. An output that is certainly above
            it deviates.
        target_sqnr: SQNR in dB to reach by reverting operators to float, if outputs deviate.
        doubtful_sqnr, doubtful_disagreement, sample_sqnr: See above.
        search_work: Approximate limit of multiply-adds of the float model for the search of these
            operators. The search uses fewer samples, the worst ones, at least one.
    """

    action: Guard | None = None
    samples: int = 128
    work: float = 1.5e9
    min_sqnr: float = 15.0
    disagreement: float = 0.01
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
