"""Before the data flow, if asked for: float module -> the same function, easier to quantize."""

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


@check_arguments
def equalize_layers(
    mod: Model, params: Mapping[str, Any] | None = None
) -> tuple[tvm.IRModule, tuple[Declined, ...]]:
    """The same float function with the channels between its layers scaled (cross-layer
    equalization), to be quantized in place of `mod`; and the values that had to stay, with reasons.

    The ranges of weights are made alike, which is best for weights with one scale per tensor, and
    helps weights with a scale per channel where values between the layers, which always have one
    scale, have channels of very different ranges. `quantize` does what is worth it by itself, by
    the ranges that values have on data, except with effort "fast".

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
    """The same float function, to be quantized in place of `mod`, with part of what makes the
    activations of matrix products hard to quantize moved into their weights (SmoothQuant); and the
    values that had to stay, with reasons.

    For transformers with a few channels far larger than the rest. Constants before the product take
    the inverse scales: no operator is added, unless `inserts`.

    Args:
        mod, params, dataset: As for `quantize`.
        alpha: How much goes to the weights, 0 to 1; 0.5 is the paper's.
        samples: Ranges by channel are those of the first samples, about so many; run in numpy.
        inserts: Values that no constant takes the scales for, as those that a residual sum reads
            too, are multiplied before their products ("<name>.smooth"). Leave other operators than
            products in float then, `QConfigMapping().set_object_type("relax.matmul", qconfig)`, or
            the multiplication reads what is rounded already. `quantize` does both with
            `model_type=ModelType.TRANSFORMER`.

    Raises:
        ModelError: the model is not one this package can work with.
        DataError: the data does not fit the model.
        ConfigError: alpha or samples is out of range.
    """
    canonical = prepare_module(*split_model(mod, params))
    batches = take_samples(open_dataset(dataset, describe_inputs(canonical)), samples)
    return smooth.smooth_activations(canonical, batches, alpha, inserts=inserts)
