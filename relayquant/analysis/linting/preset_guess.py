"""Float module + pixels of pictures -> the preprocessing that fits the model best, and why.

A model with a batch norm behind its first layer says what it was trained on: the preset whose
results have the stored mean and spread is chosen. Without one, the usual preset of the model's
layout is tried first, and the first preset whose scale fits the layer's bias is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.linting.first_layer import (
    FORM_RATIO,
    FirstLayer,
    check_scale,
    find_first_layers,
    measure_misfit,
    measure_moments,
)
from relayquant.analysis.linting.normalization import RAW, PixelForm, list_forms
from relayquant.data import InputInfo
from relayquant.data.images import PRESETS, ImageLayout, Preprocessing
from relayquant.stages.preparation import prepare_module
from relayquant.stages.preparation.norm_statistics import NormStatistics, read_norm_statistics

#: A larger misfit (see `measure_misfit`) fits nothing known. Prepared as in training: up to 0.27.
LARGEST_MISFIT = 0.6
#: pixels; smaller pictures are resized to the input and not cut
SMALL = 64
#: presets by layout, the usual one first: PyTorch's models are NCHW, those of TensorFlow NHWC
USUAL: Mapping[ImageLayout, tuple[str, ...]] = {
    ImageLayout.NCHW: ("imagenet", "unit", RAW),
    ImageLayout.NHWC: ("tflite", "unit", RAW),
}


@dataclass(frozen=True)
class PresetGuess:
    """A guessed preprocessing.

    Attributes:
        text: In the syntax of `--preprocess`.
        reason: What it was guessed from, part of a sentence.
    """

    text: str
    reason: str


def guess_preset(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    info: InputInfo,
    pixels: Sequence[np.ndarray],
) -> PresetGuess:
    """Guess the preprocessing of pictures.

    Args:
        mod, params: The float model.
        info: Its input, which takes pictures.
        pixels: Some pictures as the input takes them, with values of 0 to 255 and red first.

    Raises:
        DataError: the input does not take pictures.
        ModelError: the model cannot be read.
    """
    layout, channels, height, width = Preprocessing(crop=224).read_shape(info)
    prepared, norms = prepare_module(mod, params), read_norm_statistics(mod, params)
    layer = find_first_layers(prepared).get(info.name)
    axis = 1 if layout is ImageLayout.NCHW else 3
    batches = {
        form.text: [PixelForm.of(RAW, channels).convert(x, axis, form) for x in pixels]
        for form in list_forms(channels)
    }
    norm = None if layer is None else norms.get(layer.result)
    found = None
    if layer is not None and norm is not None and norm.mean.size == layer.bias.size:
        found = guess_by_norm(layer, norm, info.name, batches)
    found = found or guess_by_layout(layer, layout, info.name, batches)
    return PresetGuess(fit_size(found.text, height, width), found.reason)


def guess_by_norm(
    layer: FirstLayer, norm: NormStatistics, name: str, batches: Mapping[str, list[np.ndarray]]
) -> PresetGuess | None:
    """Choose the preset with the smallest misfit. None if none fits.

    Another channel order or raw pixels must fit clearly better than a preset.
    """
    misfits = {
        text: measure_misfit(measure_moments(name, layer, arrays), norm)
        for text, arrays in batches.items()
    }
    best = min((text for text in misfits if text in PRESETS), key=misfits.__getitem__)
    other = min(misfits, key=misfits.__getitem__)
    best = other if misfits[other] < FORM_RATIO * misfits[best] else best
    if misfits[best] > LARGEST_MISFIT:
        return None
    return PresetGuess(
        best,
        f"results of the first layer ({layer.name!r}) are off by {misfits[best]:.2f} standard "
        "deviations from the mean and spread that its batch norm stores",
    )


def guess_by_layout(
    layer: FirstLayer | None,
    layout: ImageLayout,
    name: str,
    batches: Mapping[str, list[np.ndarray]],
) -> PresetGuess:
    """Choose the first usual preset of a layout whose scale fits the first layer."""
    usual = [text for text in USUAL[layout] if text in batches]
    reason = f"it is usual for the layout {layout.value.upper()}"
    if layer is None:
        return PresetGuess(usual[0], reason)
    fitting = (text for text in usual if not check_scale(name, layer, batches[text]))
    text = next(fitting, usual[0])
    if text != usual[0]:
        reason = f"its scale fits the bias of the first layer ({layer.name!r}), others do not"
    return PresetGuess(text, f"{reason}; no batch norm confirms it")


def fit_size(text: str, height: int, width: int) -> str:
    """Return the preprocessing for pictures of another size than the preset's.

    Pictures below `SMALL` pixels, such as CIFAR's, are not cut.
    """
    known = Preprocessing.parse(text)
    if known.crop is None or known.size is None or height != width or known.crop == height:
        return text
    size = height if height < SMALL else round(height * known.size / known.crop)
    return f"{text},size={size},crop={height}"
