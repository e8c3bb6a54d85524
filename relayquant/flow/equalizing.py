"""Optional equalization before quantization: float module -> the same function, easier to
quantize.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm

from relayquant.base.arguments import check_arguments
from relayquant.data import open_dataset, take_samples
from relayquant.data.item import describe_inputs
from relayquant.ir.rewrite.bind import Model, split_model
from relayquant.stages.equalization import cross_layer, smooth
from relayquant.stages.equalization.cross_layer import Declined
from relayquant.stages.equalization.equalize import SMOOTHING_SAMPLES
from relayquant.stages.preparation import prepare_module
from relayquant.stages.streams import follow_state


@check_arguments
def equalize_layers(
    mod: Model, params: Mapping[str, Any] | None = None
) -> tuple[tvm.IRModule, tuple[Declined, ...]]:
    """Scale the channels between layers (cross-layer equalization).

    Quantize the result instead of `mod`. The ranges of the weights become equal. This is best for
    weights with one scale per tensor. It also helps weights with a scale per channel if the
    channels of a value between layers have very different ranges, because the value always has one
    scale. Except with effort "fast", `quantize` does this itself where it pays off, by the ranges
    of values on data.

    Returns:
        The same float function, and the values that could not be scaled, with reasons.

    Raises:
        ModelError: the model is not one this package can work with.
    """
    return cross_layer.equalize_layers(prepare_module(*split_model(mod, params)))


@check_arguments
def smooth_activations(
    mod: Model,
    params: Mapping[str, Any] | None,
    dataset: Any,
    *,
    alpha: float = 0.5,
    samples: int = SMOOTHING_SAMPLES,
    inserts: bool = False,
) -> tuple[tvm.IRModule, tuple[Declined, ...]]:
    """Move a part of the activations' range into the weights of matrix products (SmoothQuant).

    Quantize the result instead of `mod`. This is for transformers with a few channels far larger
    than the rest. Constants before the product absorb the inverse scales, so no operator is added
    unless `inserts` is set.

    Args:
        mod, params, dataset: As for `quantize`.
        alpha: Share that moves to the weights, 0 to 1; 0.5 is the paper's.
        samples: Number of samples, from the first ones, that give the channel ranges; run in numpy.
        inserts: Whether to multiply a value in front of its products ("<name>.smooth") if no
            constant can absorb its scales, for example a value that a residual sum reads too. Then
            keep operators other than products in float,
            `QConfigMapping().set_object_type("relax.matmul", qconfig)`. Otherwise the
            multiplication reads a value that is already rounded. `quantize` does both with
            `model_type="transformer"`.

    Returns:
        The same float function, and the values that could not be scaled, with reasons.

    Raises:
        ModelError: the model is not one this package can work with.
        DataError: the data does not fit the model.
        ConfigError: alpha or samples is out of range.
    """
    canonical = prepare_module(*split_model(mod, params))
    data = open_dataset(follow_state(canonical, dataset), describe_inputs(canonical))
    batches = take_samples(data, samples)
    return smooth.smooth_activations(canonical, batches, alpha, inserts=inserts)
