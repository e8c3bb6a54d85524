"""Behind the data flow: integer modules of one model by two levels of effort + a few samples ->
whether the higher level follows the float model at least as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import tvm

from relayquant.analysis.outputs import OutputGap, compute_results, measure_gaps
from relayquant.config import Effort, Guard, GuardSettings
from relayquant.data import Batch, SpreadSample
from relayquant.flow.refine.kept_samples import count_samples_for
from relayquant.flow.settings import QuantizeSettings
from relayquant.stages.prepared import PreparedModel

#: fewest and most samples that levels are compared on
FEWEST, MOST = 4, 32
#: dB that an output may be worse with the higher level
TOLERANCE = 0.2


def keep_nearer(
    calibrated: PreparedModel,
    qmod: tvm.IRModule,
    sample: SpreadSample,
    settings: QuantizeSettings,
    below: Effort | None,
    calibrate: Callable[[QuantizeSettings], PreparedModel],
    lower: Callable[[PreparedModel], tvm.IRModule],
) -> tuple[PreparedModel, tvm.IRModule]:
    """(calibrated model, integer module) -> the same, or those of the level of effort `below` if
    its outputs are nearer to the float model's on a few samples.

    There is no comparison without a guard, and none with a checkpoint: a stopped calibration must
    continue.
    """
    is_off = settings.guarding.find_action(calibrated.effort) is Guard.OFF
    if below is None or is_off or settings.checkpoint is not None:
        return calibrated, qmod
    batches = pick_compared(calibrated, sample, settings.guarding)
    other = calibrate(replace(settings, effort=below))
    note = f"{below.value}, which follows the float model better on samples of the data"
    other = replace(other, effort=calibrated.effort, choices={"level": note, **other.choices})
    module = lower(other)
    expected = compute_results(calibrated.mod, batches)
    higher, lesser = (
        measure_gaps(calibrated.mod, each, batches, expected) for each in (qmod, module)
    )
    return (calibrated, qmod) if is_as_near(higher, lesser) else (other, module)


def pick_compared(
    prepared: PreparedModel, sample: SpreadSample, settings: GuardSettings
) -> list[Batch]:
    """Return the samples that levels are compared on, fewer of a model that takes long to run: only
    those that were held back from calibration if there are `FEWEST`, as a level may fit the others
    too closely.
    """
    count = int(np.clip(count_samples_for(prepared, settings.work), FEWEST, MOST))
    held = () if sample.held is None else sample.held.kept
    is_enough = sum(len(part.numbers) for part in held) >= FEWEST
    return [part.batch for part in sample.parts(count, held if is_enough else sample.kept)]


def is_as_near(higher: Sequence[OutputGap], lower: Sequence[OutputGap]) -> bool:
    """Whether the outputs of the higher level are as near to the float model's: not farther on
    average, none by more than `TOLERANCE`, and no more clearly different answers.
    """
    pairs = list(zip(higher, lower, strict=True))
    gains = [0.0 if a.sqnr == b.sqnr else a.sqnr - b.sqnr for a, b in pairs]
    if any(a.differing > b.differing for a, b in pairs):
        return False
    return not gains or (math.fsum(gains) >= 0 and min(gains) >= -TOLERANCE)
