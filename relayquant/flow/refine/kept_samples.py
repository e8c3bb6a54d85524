"""Behind the data flow: a data set that calibration reads -> the samples of it that the integer
module is compared on, as many as the model's work allows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relayquant.config import Guard, GuardSettings
from relayquant.data import (
    Batch,
    CalibrationShare,
    SpreadSample,
    has_free_batch,
    open_dataset,
)
from relayquant.data.item import describe_inputs
from relayquant.errors import DataWarning, format_count, warn_user
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.dialect.cost import count_macs
from relayquant.stages.prepared import PreparedModel

#: samples of the first look, at least and at most
LEAST, FIRST = 4, 8
#: how many times the work may be spent where it is not settled whether outputs deviate
UNSETTLED = 4
#: what calling an operator takes, as multiply-adds
CALL_WORK = 2e5
#: samples that ranges are reviewed on, and the multiply-adds that this may take
FEW, FEW_WORK = 4, 2e9
#: elements of the inputs that are kept for looks, about
KEPT_ELEMENTS = 1 << 24


def start_watching(
    prepared: PreparedModel, dataset: Any, settings: QuantizeSettings
) -> tuple[Any, SpreadSample | None]:
    """(what calibration reads in place of the data set, the samples that are kept of it then).
    (None, None) without data.
    """
    if dataset is None:
        return None, None
    guarding, inputs = settings.guarding, describe_inputs(prepared.mod)
    sample = start_sample(prepared, guarding, holds_back=holds_back(settings))
    if settings.validation_dataset is not None:
        # What is wrong with it shows before anything takes time.
        next(iter(open_dataset(settings.validation_dataset, inputs)))
    if settings.validation_dataset is not None or not is_on(prepared, settings):
        sample = SpreadSample(tuple(inputs), FEW)
    return sample.watch(open_dataset(dataset, inputs)), sample


def warn_few(calibrated: PreparedModel) -> PreparedModel:
    """Warn if calibration read so few samples that they say little about the range of any value.
    Return the model.
    """
    samples = calibrated.tuned.samples
    if 0 < samples < LEAST:
        warn_user(
            f"Calibration data: it has only {format_count(samples, 'sample')}. Ranges are what "
            "the samples show, and real inputs beyond them are clipped: take 100 to 500 samples "
            "like those that the model will see.",
            DataWarning,
            code="RQ304",
        )
    return calibrated


def holds_back(settings: QuantizeSettings) -> bool:
    """Whether calibration leaves out a part of the data, to measure the result on it."""
    is_off = settings.guarding.find_action(settings.level.value) is Guard.OFF
    return not is_off and settings.validation_dataset is None and settings.metric is None


def choose_share(dataset: Any, settings: QuantizeSettings) -> Any:
    """What calibration sees of the data: without what is held back, if anything is."""
    is_shared = dataset is not None and holds_back(settings)
    return CalibrationShare(dataset) if is_shared else dataset


def is_on(prepared: PreparedModel, settings: QuantizeSettings) -> bool:
    """Whether the guard looks at the outputs."""
    return settings.guarding.find_action(prepared.effort) is not Guard.OFF


def pick_few(prepared: PreparedModel, sample: SpreadSample) -> list[Batch]:
    """A few of the kept samples, fewer of a model that takes long to run."""
    count = int(np.clip(count_samples_for(prepared, FEW_WORK), 1, FEW))
    return [part.batch for part in sample.parts(count, sample.kept)]


def finish_watching(
    prepared: PreparedModel, dataset: Any, settings: QuantizeSettings, sample: SpreadSample | None
) -> SpreadSample:
    """The samples that the guard compares: those that were kept while calibration read the data,
    else from data that is read for it.
    """
    if settings.validation_dataset is None and sample is not None and sample.kept:
        return sample
    data = dataset if settings.validation_dataset is None else settings.validation_dataset
    return take_sample(prepared, data, settings.guarding)


def plan_looks(prepared: PreparedModel, settings: GuardSettings) -> list[int]:
    """How many samples there are after each look, if it does not end before."""
    first = int(np.clip(count_samples_for(prepared, settings.work), LEAST, FIRST))
    most = count_samples_for(prepared, UNSETTLED * settings.work)
    counts = [min(first, settings.samples)]
    while 2 * counts[-1] <= min(most, settings.samples):
        counts.append(2 * counts[-1])
    return counts


def start_sample(
    prepared: PreparedModel, settings: GuardSettings, *, holds_back: bool = False
) -> SpreadSample:
    """What keeps the samples that are compared, from data that is read for something else."""
    count = plan_looks(prepared, settings)[-1]
    return SpreadSample(tuple(describe_inputs(prepared.mod)), count, holds_back=holds_back)


def take_sample(prepared: PreparedModel, dataset: Any, settings: GuardSettings) -> SpreadSample:
    """As `start_sample`, of a data set that is read for it."""
    sample = start_sample(prepared, settings)
    for batch in open_dataset(dataset, describe_inputs(prepared.mod)):
        sample.note(batch)
    return sample


def count_samples_for(prepared: PreparedModel, work: float) -> int:
    """How many samples can be run for so many multiply-adds, and be kept while data is read."""
    inputs = describe_inputs(prepared.mod)
    calls = 0 if has_free_batch(inputs) else len(prepared.source.bindings)
    sizes = [math.prod(dim for dim in info.shape if isinstance(dim, int)) for info in inputs]
    kept = KEPT_ELEMENTS // max(sum(sizes), 1)
    return min(int(work / max(count_all_macs(prepared) + CALL_WORK * calls, 1)), kept)


def count_all_macs(prepared: PreparedModel) -> int:
    """Multiply-adds of the float model for one batch; for one sample, if that is symbolic."""
    return sum(count_macs(binding.value) for binding in prepared.source.bindings)
