"""Behind the data flow: integer modules of one model by two levels of effort + a few samples ->
whether the higher level follows the float model at least as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import tvm
from numpy.typing import NDArray

from relayquant.analysis.outputs import GapMeter, compute_results
from relayquant.config import Effort, Guard, GuardSettings
from relayquant.data import Batch, SpreadSample, count_samples
from relayquant.flow.refine.kept_samples import count_samples_for
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import iterate_results, result_expr
from relayquant.stages.calibration.observer_selection import (
    TOLERANCE,
    compare_noise,
    find_probabilities,
    measure_noise,
    take_logarithms,
)
from relayquant.stages.prepared import PreparedModel

#: fewest and most samples that levels are compared on
FEWEST, MOST = 4, 32


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
    measure = make_meter(calibrated, batches)
    (differing, noise), (other_differing, base) = measure(qmod), measure(module)
    is_kept = differing <= other_differing and is_nearer(noise, base)
    return (calibrated, qmod) if is_kept else (other, module)


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


def make_meter(
    calibrated: PreparedModel, batches: Sequence[Batch]
) -> Callable[[tvm.IRModule], tuple[int, NDArray[np.float64]]]:
    """Return a function: integer module -> (clearly different answers of all outputs, noise of each
    output on each sample). A softmax is judged by its logarithm, unless it is an integer output.
    """
    expected = compute_results(calibrated.mod, batches)
    view = Graph(calibrated.mod)
    found = find_probabilities(view, iterate_results(result_expr(view)))
    is_log = [
        each and not value.is_integer for each, value in zip(found, calibrated.outputs, strict=True)
    ]

    def measure(qmod: tvm.IRModule) -> tuple[int, NDArray[np.float64]]:
        meter, parts = GapMeter(calibrated.mod, qmod), []
        for batch, real in zip(batches, expected, strict=True):
            got = meter.measure(batch, real)
            pair = (take_logarithms(each, is_log) for each in (real, got))
            parts.append(measure_noise(*pair, count_samples(batch)))
        differing = sum(gap.differing for gap in meter.gaps)
        return differing, np.concatenate(parts, axis=1)

    return measure


def is_nearer(noise: NDArray[np.float64], base: NDArray[np.float64]) -> bool:
    """Whether the outputs are nearer to the float model's than with the noise `base`, both
    (outputs, samples): a gain on average that is larger than its standard error, and no output that
    may lose more than `TOLERANCE` within its own.
    """
    bounds = [math.fsum(compare_noise(*pair)) for pair in zip(noise, base, strict=True)]
    return math.fsum(bounds) <= 0 and max(bounds) <= TOLERANCE
