"""Integer module + the guard's samples, loud and quiet by turns -> the same module, or one whose
products read their data's range at run time, if that follows the float model much better.

A calibrated range fits the loudest sample. A signal of a hundredth of its size uses two or three of
256 steps, and the outputs may lose much of it while they still count as following.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import tvm

from relayquant.analysis.outputs import OutputGap
from relayquant.data import SpreadSample
from relayquant.flow.refine.guard import find_promise
from relayquant.flow.refine.look import Look, deviates, look_at_samples
from relayquant.flow.refine.prepared_edit import Changes
from relayquant.flow.refine.run_time_ranges import find_run_time_qconfigs
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.ledger import read_ledger, write_ledger
from relayquant.stages.calibration.observer_selection import TOLERANCE
from relayquant.stages.prepared import PreparedModel

#: A sample is quiet if it is smaller than the loudest one by this factor: half of 8 bits are left.
QUIET = 16.0
#: SQNR in dB of the worst output from which on nothing is tried
GOOD = 30.0
#: dB that the worst output gains at least
LEAST_GAIN = 6.0


def follow_loudness(
    calibrated: PreparedModel,
    qmod: tvm.IRModule,
    look: Look,
    sample: SpreadSample,
    settings: QuantizeSettings,
    build: Callable[[Changes], tvm.IRModule],
) -> tuple[tvm.IRModule, Look]:
    """The module to go on with, and what was seen of it.

    Args:
        calibrated, qmod: The modules.
        look: What the guard saw of `qmod`. If the outputs deviate, the guard finds out why.
        sample: The samples that it looked at.
        settings: When outputs deviate, and what was promised.
        build: Makes the integer module with changes.
    """
    worst = min((gap.sqnr for gap in look.gaps), default=GOOD)
    is_done = worst >= GOOD or deviates(settings.guarding, look.gaps)
    if is_done or find_promise(calibrated, settings) or not is_uneven(look.batches):
        return qmod, look
    ranged = find_run_time_qconfigs(calibrated)
    if not ranged:
        return qmod, look
    module = build(ranged)
    found = look_at_samples(calibrated, module, sample, settings, len(look.numbers))
    gain = min(gap.sqnr for gap in found.gaps) - worst
    if gain < LEAST_GAIN or not loses_nothing(found.gaps, look.gaps):
        return qmod, look
    module = write_ledger(module, replace(read_ledger(module), speed=read_ledger(qmod).speed))
    return module, replace(found, ranged=tuple(ranged))


def loses_nothing(found: Sequence[OutputGap], before: Sequence[OutputGap]) -> bool:
    """Whether the outputs are not farther from the float model's on average, none by more than
    `TOLERANCE`, and no more answers are clearly different.
    """
    pairs = list(zip(found, before, strict=True))
    gains = [0.0 if a.sqnr == b.sqnr else a.sqnr - b.sqnr for a, b in pairs]
    if any(a.differing > b.differing for a, b in pairs):
        return False
    return not gains or (math.fsum(gains) >= 0 and min(gains) >= -TOLERANCE)


def is_uneven(batches: Sequence[Mapping[str, np.ndarray]]) -> bool:
    """Whether half of the samples or more are quiet, in an input of floats."""
    for name, first in batches[0].items():
        if first.dtype.kind != "f" or not first.ndim:
            continue
        rows = [batch[name].reshape(len(batch[name]), -1) for batch in batches]
        peaks = np.concatenate([np.abs(row).max(axis=1, initial=0.0) for row in rows])
        if QUIET * np.median(peaks) < peaks.max():
            return True
    return False
