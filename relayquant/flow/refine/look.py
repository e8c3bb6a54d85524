"""Behind the data flow: both modules and the kept samples -> how far each output is from the float
model's, and whether that is too far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.confidence import bound_share
from relayquant.analysis.outputs import (
    GapMeter,
    OutputGap,
    PartMeter,
    find_agreement,
    order_inputs,
)
from relayquant.config import GuardSettings
from relayquant.data import (
    Batch,
    SpreadSample,
    count_samples,
    has_free_batch,
)
from relayquant.data.item import describe_inputs
from relayquant.flow.refine.kept_samples import (
    count_samples_for,
    finish_watching,
    plan_looks,
)
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.agreement import MOST_DECIBELS
from relayquant.ir.ledger import (
    GuardResult,
)
from relayquant.stages.prepared import PreparedModel, TunedBatches


def look_again(
    prepared: PreparedModel,
    dataset: Any,
    settings: QuantizeSettings,
    sample: SpreadSample | None,
    qmod: tvm.IRModule,
) -> GuardResult:
    """What the guard sees of a module that was changed after its look."""
    kept = finish_watching(prepared, dataset, settings, sample)
    return look_at_samples(prepared, qmod, kept, settings).summarize()


@dataclass(frozen=True, eq=False)
class Look:
    """What was compared.

    Attributes:
        first: Batches of the first look.
        batches: All of them, in the order in which they were run.
        numbers: Of each sample in them, its place in the data.
        tuned: How many of them are in batches that calibration tuned weights or ranges on.
        total: Samples of the data.
        gaps: Of every output, over all batches.
        is_held_out: Whether the samples are from a validation data set.
        held_back: How many of them, at the beginning, calibration did not read.
        held_gaps: Of every output, over these alone.
        ranged: Operators of the module that read their data's range at run time; see `loudness`.
        parts: Of every value that an output concatenates, by name.
    """

    first: list[Batch]
    batches: list[Batch]
    numbers: tuple[int, ...]
    tuned: int
    total: int
    gaps: list[OutputGap]
    is_held_out: bool = False
    held_back: int = 0
    held_gaps: Sequence[OutputGap] = ()
    ranged: tuple[str, ...] = ()
    parts: Mapping[str, OutputGap] = field(default_factory=dict)

    def summarize(self) -> GuardResult:
        """For the ledger, what the gaps say: the worst of all outputs."""
        gaps = self.gaps
        worst = min(gaps, key=lambda gap: gap.worst, default=OutputGap(math.inf))
        number = None
        if len(worst.each) == len(self.numbers):
            number = self.numbers[int(np.argmin(worst.each))]
        by_output = tuple(clip_decibels(gap.sqnr) for gap in gaps)
        agreement = find_agreement(gaps, len(self.numbers))
        part = min(self.parts, key=lambda name: self.parts[name].sqnr, default="")
        return GuardResult(
            len(self.numbers),
            min(by_output, default=clip_decibels(math.inf)),
            max((gap.disagreement for gap in gaps), default=0.0),
            worst=clip_decibels(worst.worst),
            least=clip_decibels(min((gap.least for gap in gaps), default=math.inf)),
            by_output=by_output,
            total=self.total,
            numbers=self.numbers,
            tuned=self.tuned,
            worst_number=number,
            is_held_out=self.is_held_out,
            held_back=self.held_back,
            held_sqnr=clip_decibels(min(gap.sqnr for gap in self.held_gaps))
            if self.held_gaps
            else None,
            answers=agreement.answers,
            equal=agreement.equal,
            ranged=self.ranged,
            part=part,
            part_sqnr=clip_decibels(self.parts[part].sqnr) if part else None,
        )


def clip_decibels(value: float) -> float:
    """Within bounds that JSON has numbers for."""
    return float(np.clip(value, -MOST_DECIBELS, MOST_DECIBELS))


def look_at_samples(
    prepared: PreparedModel,
    qmod: tvm.IRModule,
    sample: SpreadSample,
    quantizing: QuantizeSettings,
    least: int = 0,
) -> Look:
    """Compare both modules on ever more samples, until more are not likely to change the verdict;
    see `GuardSettings`. Batches that calibration tuned on are looked at where there are no others.

    Args:
        prepared, qmod: The modules.
        sample: What to choose from.
        quantizing: When it is enough.
        least: So many samples in any case, as far as there are.
    """
    settings, is_held_out = quantizing.guarding, quantizing.validation_dataset is not None
    tuned = TunedBatches() if is_held_out else prepared.tuned
    meter, joined = GapMeter(prepared.mod, qmod), PartMeter(prepared.mod)
    parts, first = [], 0
    held = set() if sample.held is None else sample.held.all_numbers
    #: batches at the beginning that calibration did not read, and their gaps
    held_back, held_gaps = 0, []
    cheap = count_samples_for(prepared, settings.work)
    both = {*tuned.judged, *tuned.fitted}
    for fresh in sample.rounds(plan_looks(prepared, settings), (both, tuned.judged)):
        for part in fresh:
            expected = meter.first.run("main", order_inputs(prepared.mod, part.batch))
            joined.measure(part.batch, expected, meter.measure(part.batch, expected))
            parts.append(part)
            if held.issuperset(part.numbers) and held_back == len(parts) - 1:
                held_back, held_gaps = len(parts), meter.gaps
        first = first or len(fresh)
        samples = sum(len(part.numbers) for part in parts)
        is_enough = 2 * samples > cheap or is_covered(settings, samples)
        if samples < least:
            continue
        if is_settled(settings, meter.gaps) and (is_enough or deviates(settings, meter.gaps)):
            break
    batches = [part.batch for part in parts]
    numbers = tuple(int(number) for part in parts for number in part.numbers)
    known = len(sample.find_numbers(both).intersection(numbers))
    return Look(
        batches[:first],
        batches,
        numbers,
        known,
        sample.total,
        meter.gaps,
        is_held_out,
        sum(len(part.numbers) for part in parts[:held_back]),
        held_gaps,
        parts=joined.gaps,
    )


def pick_typical(
    prepared: PreparedModel, batches: Sequence[Batch], gaps: Sequence[OutputGap], count: int
) -> Sequence[Batch]:
    """`count` samples that stand for all, each as a batch, or all if there are no more.

    Samples are ranked by their worst output, and taken at equal distances along the ranking.
    """
    ranked = rank_samples(batches, gaps)
    if len(ranked) <= count:
        return batches
    chosen = [ranked[(2 * i + 1) * len(ranked) // (2 * count)] for i in range(count)]
    return take_samples(prepared, batches, chosen)


def pick_bad(
    prepared: PreparedModel, batches: Sequence[Batch], gaps: Sequence[OutputGap], count: int
) -> list[Batch]:
    """Samples on which an output is as bad as on all together, or not much worse: to mend the very
    worst one takes more than to mend the model.
    """
    ranked, scores = rank_samples(batches, gaps), rate_worst(batches, gaps)
    sqnr = min((gap.sqnr for gap in gaps), default=math.inf)
    stop = max(int(np.count_nonzero(scores <= sqnr)), count)
    return take_samples(prepared, batches, ranked[max(stop - count, 0) : stop])


def pick_worst(
    prepared: PreparedModel, batches: Sequence[Batch], gaps: Sequence[OutputGap], count: int
) -> list[Batch]:
    """The samples on which an output is worst, in order, each as a batch; whole batches where their
    size is fixed.
    """
    return take_samples(prepared, batches, rank_samples(batches, gaps)[:count])


def rank_samples(batches: Sequence[Batch], gaps: Sequence[OutputGap]) -> list[tuple[int, int]]:
    """(batch, row) of each sample, the one with the worst output first."""
    places = [(i, row) for i, batch in enumerate(batches) for row in range(count_samples(batch))]
    return [places[number] for number in np.argsort(rate_worst(batches, gaps), kind="stable")]


def rate_worst(batches: Sequence[Batch], gaps: Sequence[OutputGap]) -> np.ndarray:
    """dB of the worst output on each sample; 0 of all where no output counts them."""
    samples = sum(map(count_samples, batches))
    rated = [gap.each for gap in gaps if len(gap.each) == samples]
    return np.min(rated, axis=0) if rated else np.zeros(samples)


def take_samples(
    prepared: PreparedModel, batches: Sequence[Batch], places: Sequence[tuple[int, int]]
) -> list[Batch]:
    """Samples by (batch, row), in order, each as a batch; whole batches where a size is fixed."""
    if has_free_batch(describe_inputs(prepared.mod)):
        rows = sorted(places)
        return [{k: v[row : row + 1] for k, v in batches[i].items()} for i, row in rows]
    return [batches[i] for i in sorted({i for i, _ in places})]


def deviates(settings: GuardSettings, gaps: Sequence[OutputGap]) -> bool:
    """Whether one of the outputs is too far from the float model's."""
    return any(
        gap.sqnr < settings.min_sqnr
        or bound_share(gap.differing, gap.samples)[0] > settings.disagreement
        for gap in gaps
    )


def deviates_slightly(
    settings: GuardSettings, gaps: Sequence[OutputGap], parts: Mapping[str, OutputGap]
) -> bool:
    """Whether one of the outputs, or a value that an output concatenates, is so far from the float
    model's that users should know.
    """
    return any(part.sqnr < settings.min_sqnr for part in parts.values()) or any(
        gap.disagreement > settings.doubtful_disagreement
        if gap.samples
        else gap.least < settings.doubtful_sqnr or gap.worst < settings.sample_sqnr
        for gap in gaps
    )


def is_settled(settings: GuardSettings, gaps: Sequence[OutputGap]) -> bool:
    """Whether further samples are not likely to change whether outputs deviate."""
    answers = [bound_share(gap.differing, gap.samples) for gap in gaps if gap.differing]
    # One other answer of a few samples says little about one of a hundred.
    share = max(settings.disagreement, settings.doubtful_disagreement)
    if any(gap.most < settings.min_sqnr for gap in gaps):
        return True
    if any(least > share for least, _ in answers):
        return True
    if any(gap.least < settings.min_sqnr for gap in gaps):
        return False
    return all(most <= share for _, most in answers)


def is_covered(settings: GuardSettings, samples: int) -> bool:
    """Whether damage to many samples would show in so many, if it is in none of them."""
    return bound_share(0, samples)[1] <= settings.doubtful_disagreement
