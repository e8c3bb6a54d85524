"""Behind the data flow: what two levels of effort make of a model + samples -> what is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tvm
from numpy.typing import NDArray

from relayquant.analysis.outputs import GapMeter, compute_results
from relayquant.config import Effort, Guard, GuardSettings
from relayquant.data import Batch, SpreadSample, count_samples
from relayquant.flow.refine.guard import Guarded
from relayquant.flow.refine.kept_samples import count_samples_for
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.ledger import read_ledger, write_ledger
from relayquant.ir.rewrite import Graph
from relayquant.stages.calibration.observer_selection import (
    TOLERANCE,
    compare_noise,
    find_probabilities,
    measure_noise,
    take_logarithms,
)
from relayquant.stages.calibration.output_parts import find_common_parts
from relayquant.stages.prepared import PreparedModel

#: fewest and most samples that levels are compared on
FEWEST, MOST = 4, 32


@dataclass(frozen=True, eq=False)
class Distance:
    """How far a module's outputs are from the float model's.

    Attributes:
        differing: Clearly different answers of all outputs.
        noise: Noise of each part of the outputs on each sample, (parts, samples).
    """

    differing: int
    noise: NDArray[np.float64]


def keep_nearer(
    made: Guarded,
    sample: SpreadSample,
    settings: QuantizeSettings,
    below: Effort | None,
    build: Callable[[QuantizeSettings], Guarded],
) -> Guarded:
    """What was made, or what `build` makes with the level of effort `below` if the outputs of the
    first are not clearly nearer to the float model's on a few samples. Both are what the guard
    leaves: operators that it puts back to float make up for much, or for little.

    There is no comparison without a guard or kept samples (nothing read the data, as nothing is
    quantized), and none with a checkpoint: a stopped calibration must continue.
    """
    asked = made.prepared.effort
    is_off = settings.guarding.find_action(asked) is Guard.OFF
    if below is None or is_off or settings.checkpoint is not None or not sample.kept:
        return made
    other = build(replace(settings, effort=below))
    measure = make_meter(made.prepared, pick_compared(made.prepared, sample, settings.guarding))
    if not (flaw := find_flaw(measure(made.module), measure(other.module))):
        return made
    ledger = read_ledger(other.module)
    choices = {"level": f"{below.value}: {asked} {flaw}", **ledger.choices}
    return other.change(write_ledger(other.module, replace(ledger, effort=asked, choices=choices)))


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
) -> Callable[[tvm.IRModule], Distance]:
    """Return a function: integer module -> its distance. A softmax is judged by its logarithm,
    unless it is an integer output.
    """
    expected = compute_results(calibrated.mod, batches)
    view = Graph(calibrated.mod)
    parts = find_common_parts(view, batches)
    is_softmax = find_probabilities(view, (part.value for part in parts[0]))
    is_log = [
        each and not calibrated.outputs[part.result].is_integer
        for each, part in zip(is_softmax, parts[0], strict=True)
    ]

    def measure(qmod: tvm.IRModule) -> Distance:
        meter, noise = GapMeter(calibrated.mod, qmod), []
        for batch, cut, real in zip(batches, parts, expected, strict=True):
            both = (real, meter.measure(batch, real))
            pair = (take_logarithms((part.take(each) for part in cut), is_log) for each in both)
            noise.append(measure_noise(*pair, count_samples(batch)))
        differing = sum(gap.differing for gap in meter.gaps)
        return Distance(differing, np.concatenate(noise, axis=1))

    return measure


def find_flaw(distance: Distance, base: Distance) -> str:
    """Why a level with this distance is not clearly nearer to the float model than one with the
    distance `base`; "" if it is: a gain on average that is larger than its standard error, no
    output that may lose more than `TOLERANCE` within its own, and no more different answers.
    """
    if distance.differing > base.differing:
        return "has more different answers"
    if distance.noise.shape[1] < FEWEST:  # too few for a standard error
        return f"is compared on fewer than {FEWEST} samples"
    found = [compare_noise(*pair) for pair in zip(distance.noise, base.noise, strict=True)]
    if math.fsum(ratio for ratio, _ in found) > 0:
        return "is farther from the float model"
    bounds = [math.fsum(pair) for pair in found]
    if math.fsum(bounds) > 0:
        return "gains less than its standard error"
    if max(bounds, default=0) > TOLERANCE:
        return f"may lose more than {TOLERANCE} dB at an output"
    return ""
