"""Before the data flow, if asked for: float module -> the same function, easier to quantize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm

from relayquant.analysis.sensitivity import take_samples
from relayquant.calibrate.datasets import open_dataset
from relayquant.calibrate.inputs import describe_inputs
from relayquant.prepare import cross_layer, prepare_module, smooth
from relayquant.prepare.cross_layer import Declined


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
