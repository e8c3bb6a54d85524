"""Entry point of equalization: float module + data -> the same function with channels that are
easier to quantize.

There are two steps. `add_scales` adds operators. It runs before planning, because the plan names
operators. `move_scales` moves factors between constants. It runs after planning, because the plan
says which weights have one scale and which values have parameters that must stay correct.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tvm

from relayquant.codegen.eager import EagerModule
from relayquant.config import ModelType
from relayquant.config.model_type import MODEL_TYPES
from relayquant.config.observers import Fixed
from relayquant.data import Batch, SpreadSample, count_samples, open_share, take_samples
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.plan import Plan
from relayquant.ir.rewrite import Graph, expose_values
from relayquant.stages.equalization import balance, cross_layer, smooth
from relayquant.stages.equalization.channels import measure_channels
from relayquant.stages.equalization.cross_layer import Exponents, LayerPair
from relayquant.stages.equalization.inputs import scale_inputs

#: Minimum and maximum number of samples that decide whether equalizing pays off, and the budget for
#: them in multiply-adds of the float model.
SAMPLES = (4, 256)
SAMPLE_WORK = 2e9

#: about as many numbers of a value show what rounding costs
SAMPLED_VALUES = 1 << 18

#: number of samples that give the channel ranges of the values that matrix products read
SMOOTHING_SAMPLES = 32


def add_scales(
    canonical: tvm.IRModule,
    dataset: Any,
    kept: Collection[str] = (),
    model_type: ModelType | None = None,
) -> tvm.IRModule:
    """Add multiplications by one power of two per channel in front of products of the prepared
    module.

    Inputs of the model are multiplied where this pays off, except the inputs `kept`. If the model's
    type needs it, all values that products with weights read are multiplied too.

    Raises:
        ConfigError: there is a type and no data.
        DataError: the data does not fit the model.
    """
    if dataset is not None:
        canonical = scale_inputs(canonical, dataset, kept)
    if model_type in MODEL_TYPES:
        canonical = smooth_products(canonical, dataset, model_type)
    return canonical


def smooth_products(canonical: tvm.IRModule, dataset: Any, model_type: ModelType) -> tvm.IRModule:
    """Multiply the values that products with weights read, as a model of this type needs it.

    All other values of the prepared module stay as they are. So fixed parameters stay correct, and
    a comparison with the float model finds the same values.

    Raises:
        ConfigError: there is no data.
        DataError: the data does not fit the model.
    """
    if dataset is None:
        raise ConfigError(
            f"model_type={model_type}: data is measured by channel, so dataset=None does not go "
            "with it. Pass some samples, or leave model_type out.",
            code="RQ102",
        )
    batches = take_samples(open_share(dataset, describe_inputs(canonical)), SMOOTHING_SAMPLES)
    alpha = MODEL_TYPES[model_type].alpha
    return smooth.smooth_activations(canonical, batches, alpha, absorbs=False, inserts=True)[0]


def move_scales(canonical: tvm.IRModule, plan: Plan, dataset: Any) -> tvm.IRModule:
    """Scale the channels between layers of the prepared module where this pays off: for weights
    with one scale (`cross_layer`) and with a scale per channel (`balance`).

    A few samples give an estimate of the gain. If values in between are clipped and there is
    something to gain, a float pass over all data finds the peaks of the scaled values. Values with
    fixed parameters are not scaled.
    """
    whole, channelwise, fixed = set[str](), set[str](), set[str]()
    for group in plan.groups:
        if group.is_fixed or isinstance(group.observer, Fixed):
            fixed.update(group.members)
        elif group.constant is not None:
            values = plan.operator(group.constant[0]).values
            (channelwise if group.info.axis is not None else whole).update(values)
    pairs, _ = cross_layer.find_pairs(Graph(canonical), with_clips=True)
    pairs = [pair for pair in pairs if fixed.isdisjoint(var.name for var in pair.between)]
    balanced = balance_layers(canonical, select_pairs(pairs, channelwise), dataset)
    return equalize_ranges(balanced, select_pairs(pairs, whole), dataset)


def select_pairs(pairs: Sequence[LayerPair], names: Collection[str]) -> list[LayerPair]:
    """Return the pairs whose layers are both named."""
    return [pair for pair in pairs if pair.first.name in names and pair.second.name in names]


def balance_layers(
    canonical: tvm.IRModule, pairs: Sequence[LayerPair], dataset: Any
) -> tvm.IRModule:
    """Scale the pairs that lose much because the values between them have one scale. The weights
    of these pairs have a scale per channel.
    """
    if not pairs:
        return canonical
    names = {pair.between[-1].name for pair in pairs}
    layers = {pair.first.name for pair in pairs}
    samples = pick_samples(canonical, dataset)
    kept = SAMPLED_VALUES // len(samples)
    statistics = measure_channels(run_values(canonical, names, samples), names, kept)
    exponents = balance.choose_balanced(canonical, statistics, layers)
    clipped = [pair for pair in pairs if pair.clips and pair.first.name in exponents]
    if clipped:
        peaks = measure_peaks(canonical, clipped, dataset)
        layers = set(exponents)
        exponents = balance.choose_balanced(canonical, statistics, layers, peaks)
    return scale_and_record(canonical, exponents)


def equalize_ranges(
    canonical: tvm.IRModule, pairs: Sequence[LayerPair], dataset: Any
) -> tvm.IRModule:
    """Equalize the pairs whose weights have one scale each, if this pays off."""
    if not pairs:
        return canonical
    peaks = measure_peaks(canonical, pairs, dataset)
    layers = {pair.first.name for pair in pairs}
    exponents = cross_layer.choose_exponents(canonical, peaks, layers)
    scaled = cross_layer.scale_layers(canonical, exponents)
    if not cross_layer.is_clear_gain(canonical, scaled):
        return canonical
    return scale_and_record(canonical, exponents)


def scale_and_record(canonical: tvm.IRModule, exponents: Exponents) -> tvm.IRModule:
    """Scale the prepared module by these factors and add a note of them. Without factors it
    stays as it is.
    """
    if not exponents:
        return canonical
    scaled = cross_layer.scale_layers(canonical, exponents)
    return cross_layer.record_exponents(scaled, exponents)


def pick_samples(canonical: tvm.IRModule, dataset: Any) -> list[Batch]:
    """Return a few samples of the data, spread over it if it can be read in any order."""
    macs = sum(count_macs(binding.value) for binding in Graph(canonical).bindings)
    least, most = SAMPLES
    count = int(np.clip(SAMPLE_WORK / max(macs, 1), least, most))
    data = open_share(dataset, describe_inputs(canonical))
    (first,) = data.pick(1)
    sample = SpreadSample(data.inputs, count)
    for batch in data.pick(-(-count // max(count_samples(first), 1))):
        sample.note(batch)
    return sample.batches()


def measure_peaks(
    canonical: tvm.IRModule, pairs: Sequence[LayerPair], dataset: Any
) -> dict[str, np.ndarray]:
    """Return the largest value by channel, (C,), of clipped values between these layers, over
    all data. If there are none, the data is not read.
    """
    names = {clip.name for pair in pairs for clip in pair.clips}
    peaks: dict[str, np.ndarray] = {}
    if not names:
        return peaks
    data = open_share(dataset, describe_inputs(canonical))
    for found in run_values(canonical, names, data):
        for name, array in found.items():
            peak = array.reshape(-1, array.shape[-1]).max(axis=0)
            peaks[name] = np.maximum(peaks.get(name, peak), peak)
    return peaks


def run_values(
    canonical: tvm.IRModule, names: Collection[str], batches: Iterable[Batch]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield values between two layers for each batch, channels last."""
    between = cross_layer.find_between(canonical)
    axes = {name: axis for name, axis in between.items() if name in names}
    values = EagerModule(expose_values(canonical, list(axes)))
    params = [param.name for param in Graph(canonical).func.params]
    for batch in batches:
        results = values.run("main", [batch[name] for name in params])
        found = zip(axes.items(), results, strict=False)
        yield {name: np.moveaxis(array, axis, -1) for (name, axis), array in found}
