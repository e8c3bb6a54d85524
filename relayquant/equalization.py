"""Before the data flow, if asked for: float module -> the same function, easier to quantize. And
between annotate and simulate: what a level of effort does of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.sensitivity import take_samples
from relayquant.analysis.verify import expose_values
from relayquant.calibrate.datasets import open_dataset
from relayquant.calibrate.inputs import describe_inputs
from relayquant.calibrate.observers import Fixed
from relayquant.lower import EagerModule
from relayquant.plan import Plan
from relayquant.prepare import cross_layer, prepare_module, smooth
from relayquant.prepare.cross_layer import Declined
from relayquant.rewrite import Graph


def equalize_layers(
    mod: tvm.IRModule, params: Mapping[str, Any] | None = None
) -> tuple[tvm.IRModule, tuple[Declined, ...]]:
    """The same float function with the channels between its layers scaled (cross-layer
    equalization), to be quantized in place of `mod`; and the values that had to stay, with reasons.

    For weights with one scale per tensor. Per channel there is nothing to gain.

    Raises:
        ModelError: the model is not one this package can work with.
    """
    return cross_layer.equalize_layers(prepare_module(mod, params))


def equalize_planned(canonical: tvm.IRModule, plan: Plan, dataset: Any) -> tvm.IRModule:
    """The prepared module with those pairs of layers equalized whose weights are to have one scale
    each, if that is worth it; one float pass over the data, if there are clips between them.

    Parameters that are fixed stay right: values that have such are not scaled.
    """
    whole, fixed = set[str](), set[str]()
    for group in plan.groups:
        if group.is_fixed or isinstance(group.calibration, Fixed):
            fixed.update(group.members)
        elif group.constant is not None and not group.info.spec.is_per_channel:
            whole.update(plan.operator(group.constant[0]).values)
    pairs, _ = cross_layer.find_pairs(Graph(canonical), with_clips=True)
    pairs = [pair for pair in pairs if {pair.first.name, pair.second.name} <= whole]
    pairs = [pair for pair in pairs if fixed.isdisjoint(var.name for var in pair.between)]
    if not pairs:
        return canonical
    clips = {clip.name for pair in pairs for clip in pair.clips}
    peaks = measure_peaks(canonical, clips, dataset) if clips else {}
    layers = {pair.first.name for pair in pairs}
    exponents = cross_layer.choose_exponents(canonical, peaks, layers)
    scaled = cross_layer.scale_layers(canonical, exponents)
    if not cross_layer.is_worthwhile(canonical, scaled):
        return canonical
    return cross_layer.record_exponents(scaled, exponents)


def measure_peaks(
    canonical: tvm.IRModule, names: Collection[str], dataset: Any
) -> dict[str, np.ndarray]:
    """Largest value by channel, (C,), of clipped values between two layers."""
    axes = {n: axis for n, axis in cross_layer.find_clips(canonical).items() if n in names}
    values = EagerModule(expose_values(canonical, list(axes)))
    params = [param.name for param in Graph(canonical).func.params]
    peaks: dict[str, np.ndarray] = {}
    for batch in open_dataset(dataset, describe_inputs(canonical)):
        results = values.run("main", [batch[name] for name in params])
        for (name, axis), array in zip(axes.items(), results, strict=False):
            peak = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis]).max(axis=0)
            peaks[name] = np.maximum(peaks.get(name, peak), peak)
    return peaks


def smooth_activations(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    *,
    alpha: float = 0.5,
    samples: int = 32,
) -> tuple[tvm.IRModule, tuple[Declined, ...]]:
    """The same float function, to be quantized in place of `mod`, with part of what makes the
    activations of matrix products hard to quantize moved into their weights (SmoothQuant); and the
    values that had to stay, with reasons.

    For transformers with a few channels far larger than the rest. Only where constants before the
    product take the inverse scales: no operator is added.

    Args:
        mod, params, dataset: As for `quantize`.
        alpha: How much goes to the weights, 0 to 1; 0.5 is the paper's.
        samples: Ranges by channel are those of the first samples, about so many; run in numpy.

    Raises:
        ModelError: the model is not one this package can work with.
        DataError: the data does not fit the model.
        ConfigError: alpha or samples is out of range.
    """
    canonical = prepare_module(mod, params)
    batches = take_samples(open_dataset(dataset, describe_inputs(canonical)), samples)
    return smooth.smooth_activations(canonical, batches, alpha)
