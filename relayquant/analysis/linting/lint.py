"""lint: float module + data set -> problems of the calibration data, found before it is used.

Every check is a heuristic, of one input alone (`input_summary`) or with the layer that reads it
(`first_layer`). Each states its threshold and the source of the threshold. The thresholds were
measured on models with their authors' preprocessing, and on the same data broken on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.linting.finding import Finding, Severity
from relayquant.analysis.linting.first_layer import PROBE_SAMPLES, check_layer, find_first_layers
from relayquant.analysis.linting.input_summary import (
    InputSummary,
    check_batches,
    check_channels,
    check_range,
    check_samples,
    hash_samples,
)
from relayquant.analysis.linting.label_scores import check_labels
from relayquant.base.arguments import check_arguments
from relayquant.data import Dataset, count_samples, open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import DataError
from relayquant.ir.rewrite.bind import Model, split_model
from relayquant.ir.state import get_state
from relayquant.stages.preparation import prepare_module
from relayquant.stages.preparation.norm_statistics import read_norm_statistics
from relayquant.stages.streams import follow_state


@check_arguments
def lint(
    mod: Model,
    params: Mapping[str, Any] | None,
    dataset: Any,
    labels: Any = None,
) -> list[Finding]:
    """Check calibration data. Return what looks wrong; an empty list if nothing does.

    Wrong data is not an error here. Data that `quantize` would refuse (NaN, wrong shapes, no
    samples) is a finding of severity ERROR, and the data before it is still checked.

    Args:
        mod, params, dataset: As for `quantize`.
        labels: The class of each sample, (samples,) integers. With labels, the float model also
            runs, on the pictures as given and with other known preprocessing, and the first
            output's arg max is compared.

    Raises:
        ModelError: the model cannot be read.
        DataError: labels are not integers, their number differs from the number of samples, or the
            first output holds no scores.
    """
    mod, params = split_model(mod, params)
    prepared, norms = prepare_module(mod, params), read_norm_statistics(mod, params)
    layers = find_first_layers(prepared)
    findings, statistics, probe, seen, samples = [], {}, {}, set(), 0
    is_cut = False
    try:
        dataset = follow_state(prepared, dataset)
        for batch in read_batches(open_dataset(dataset, describe_inputs(prepared))):
            if samples < PROBE_SAMPLES:
                for name, array in batch.items():
                    probe.setdefault(name, []).append(array)
            samples += count_samples(batch)
            for name, array in batch.items():
                before, layer = statistics.get(name, InputSummary()), layers.get(name)
                statistics[name] = before.update(array, samples, layer and layer.channel)
            seen.update(hash_samples(batch))
    except DataError as error:
        is_cut = True
        findings.append(
            Finding(Severity.ERROR, "data", "", str(error), "Nothing after it was read.")
        )
    states = {value.name for value in get_state(prepared)}
    for info in describe_inputs(prepared):
        if info.name in statistics:
            findings += check_range(info.name, info.dtype, statistics[info.name], samples)
            findings += check_channels(info.name, statistics[info.name])
            if info.name not in states:  # a state is zeros where a sequence begins
                findings += check_batches(info.name, statistics[info.name])
    for name, layer in layers.items():
        if name in probe:
            findings += check_layer(
                name, layer, statistics[name], probe[name], norms.get(layer.result)
            )
    if samples and not is_cut:  # how many samples follow an error is not known
        findings += check_samples(samples, len(seen))
    if labels is not None and not any(f.severity is Severity.ERROR for f in findings):
        findings = add_scores(findings, check_labels(prepared, dataset, labels))
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def find_unchecked(mod: tvm.IRModule, params: Mapping[str, Any] | None) -> list[str]:
    """Find picture inputs whose normalization cannot be checked without labels.

    No batch norm follows their first layer, or it was folded before the export.

    Raises:
        ModelError: the model cannot be read.
    """
    prepared, norms = prepare_module(mod, params), read_norm_statistics(mod, params)
    layers = find_first_layers(prepared)
    found = []
    for info in describe_inputs(prepared):
        is_picture = len(info.shape) == 4 and {info.shape[1], info.shape[3]} & {1, 3}
        layer = layers.get(info.name)
        if is_picture and (layer is None or layer.result not in norms):
            found.append(info.name)
    return found


def add_scores(findings: list[Finding], scored: list[Finding]) -> list[Finding]:
    """Add findings from labels. They replace findings on the same fact that are only likely
    without labels.
    """
    known = {finding.check for finding in scored}
    return [finding for finding in findings if finding.check not in known] + scored


def lint_samples(
    prepared: tvm.IRModule, batches: Sequence[Mapping[str, np.ndarray]]
) -> list[Finding]:
    """Check a few samples of float inputs: constant or equal samples, far outliers, a scale or
    layout different from the training data.

    A small part of `lint` for samples that are at hand. It costs the first layer, in numpy. States
    are left out: they are zeros where a sequence begins, as here.

    Args:
        prepared: A prepared module.
        batches: Inputs by name, without NaN.
    """
    layers, states = find_first_layers(prepared), {value.name for value in get_state(prepared)}
    statistics: dict[str, InputSummary] = {}
    seen: set[bytes] = set()
    samples = 0
    for batch in batches:
        hashes = hash_samples(batch)
        samples, seen = samples + len(hashes), seen | set(hashes)
        for name, array in batch.items():
            if array.dtype.kind == "f" and array.size and name not in states:
                before, layer = statistics.get(name, InputSummary()), layers.get(name)
                array = array.astype("float32")
                statistics[name] = before.update(array, samples, layer and layer.channel)
    findings = []
    for name, found in statistics.items():
        findings += check_range(name, "float32", found, samples)
        findings += check_channels(name, found)
        arrays = [batch[name].astype("float32") for batch in batches]
        if found.low < found.high and name in layers:
            findings += check_layer(name, layers[name], found, arrays)
    if samples > 1 and len(seen) == 1:
        findings += check_samples(samples, 1)
    return [finding for finding in findings if finding.severity is not Severity.INFO]


@check_arguments
def measure_growth(
    mod: Model, params: Mapping[str, Any] | None, dataset: Any
) -> dict[str, list[tuple[int, float]]]:
    """Return how the range of each input grows: (samples, share of the final range) at each growth.

    If the curve is flat from some number of samples on, more samples do not help.

    Raises:
        ModelError: the model cannot be read.
        DataError: the data does not fit it.
    """
    statistics: dict[str, InputSummary] = {}
    samples = 0
    prepared = prepare_module(*split_model(mod, params))
    for batch in open_dataset(follow_state(prepared, dataset), describe_inputs(prepared)):
        samples += count_samples(batch)
        for name, array in batch.items():
            statistics[name] = statistics.get(name, InputSummary()).update(array, samples)
    return {
        name: [(count, width / max(found.high - found.low, 1e-30)) for count, width in found.widths]
        for name, found in statistics.items()
    }


def read_batches(data: Dataset) -> Iterator[dict[str, np.ndarray]]:
    """Read the batches, floats in at least single precision."""
    for batch in data:
        yield {n: a.astype("float32") if a.dtype == "float16" else a for n, a in batch.items()}
