"""--data and --labels -> a data set and classes, from an .npz or a folder of pictures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.linting.preset_guess import guess_preset
from relayquant.data import InputInfo
from relayquant.data.images import Preprocessing, list_images, open_images, read_labels
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError, DataError, DataWarning, format_count, warn_user
from relayquant.ir.rewrite.bind import bind_model
from relayquant.ir.rewrite.entry import name_main

#: pictures that the preprocessing is guessed with
GUESS_SAMPLES = 24


def open_data(options: argparse.Namespace, mod: tvm.IRModule, params: Any) -> Any:
    """Open --data as `relayquant.quantize` needs it.

    Raises:
        ConfigError: `--preprocess` without pictures.
        DataError: there is no picture, or the model takes none.
    """
    if options.data is None or not options.data.is_dir():
        if options.preprocess is not None:
            raise ConfigError(
                "--preprocess is for pictures, but --data is not a folder. Leave it out: arrays "
                "of an .npz are used unchanged.",
                code="RQ102",
            )
        return options.data
    inputs = describe_inputs(name_main(bind_model((mod, params))))
    if options.preprocess is None:
        # Set, so that what is shown later names it too.
        options.preprocess = guess_preprocessing(options.data, mod, params, inputs)
    return open_images(options.data, Preprocessing.parse(options.preprocess), inputs)


def guess_preprocessing(
    folder: Path, mod: tvm.IRModule, params: Any, inputs: tuple[InputInfo, ...]
) -> str:
    """Guess `--preprocess` from the model and some pictures, and say so in a warning.

    Raises:
        DataError: there is no picture, or the model takes none.
    """
    raw = open_images(folder, Preprocessing(scale=1.0), inputs)
    step = -(-len(raw) // GUESS_SAMPLES)
    pixels = [raw[number][raw.info.name] for number in range(0, len(raw), step)]
    found = guess_preset(mod, params, raw.info, [pixel.astype("float32") for pixel in pixels])
    warn_user(
        f"--preprocess is not given; guessed: --preprocess {found.text}, because {found.reason}. "
        "Give the preprocessing in training if you know it. `relayquant lint --labels FILE` "
        "measures the accuracy with each preset.",
        DataWarning,
        code="RQ304",
    )
    return found.text


def make_agreement(_options: argparse.Namespace) -> Callable[..., float]:
    """Make a metric: the share of samples whose largest output is at the same position as in
    the float model.
    """

    def agreement(expected: list[np.ndarray], got: list[np.ndarray]) -> float:
        a, b = (arrays[0].reshape(len(arrays[0]), -1) for arrays in (expected, got))
        return float((a.argmax(1) == b.argmax(1)).mean())

    return agreement


def read_classes(options: argparse.Namespace) -> np.ndarray:
    """Read the class of each sample of `--data` from the file `--labels`.

    Raises:
        DataError: there is no such file, or it does not fit the data.
    """
    if not options.labels.is_file():
        raise DataError(f"There is no file of labels {options.labels}.", code="RQ301")
    images = list_images(options.data) if options.data.is_dir() else None
    return read_labels(options.labels, images, options.data)


def make_top1(options: argparse.Namespace) -> Callable[..., float]:
    """Make a metric: the share of samples whose largest output is at their class, from
    `--labels`.
    """
    labels = read_classes(options)

    def top1(_expected: list[np.ndarray], got: list[np.ndarray]) -> float:
        if len(got[0]) != len(labels):
            raise ConfigError(
                f"--labels {options.labels} has {format_count(len(labels), 'class')}, the data "
                f"{format_count(len(got[0]), 'sample')}; allowed: one class for each sample.",
                code="RQ102",
            )
        return float((got[0].reshape(len(labels), -1).argmax(1) == labels).mean())

    return top1


#: value of `--metric` -> makes the metric from the options
METRICS: Mapping[str, Callable[[argparse.Namespace], Callable[..., float]]] = {
    "top1": make_top1,
    "agreement": make_agreement,
}
