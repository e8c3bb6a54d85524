"""For the command line: data of a command, an .npz or a folder of pictures, and their classes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm

from relayquant.cli.files import bind_weights
from relayquant.data.images import PRESETS, Preprocessing, list_images, open_images, read_labels
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError, DataError, format_count


def open_data(options: argparse.Namespace, mod: tvm.IRModule, params: Any) -> Any:
    """What `--data` names, as `relayquant.quantize` takes it.

    Raises:
        ConfigError: pictures without `--preprocess`, or that without pictures.
        DataError: there is no picture, or the model takes none.
    """
    if options.data is None or not options.data.is_dir():
        if options.preprocess is not None:
            raise ConfigError(
                "--preprocess is for pictures: --data names no folder. What is in an .npz is taken "
                "as it is.",
                code="RQ102",
            )
        return options.data
    if options.preprocess is None:
        raise ConfigError(
            f"--data {options.data} is a folder of pictures: say with --preprocess how the model "
            f"was trained ({', '.join(PRESETS)}, or mean=..., std=...).",
            code="RQ102",
        )
    inputs = describe_inputs(bind_weights(mod, params))
    return open_images(options.data, Preprocessing.parse(options.preprocess), inputs)


def make_agreement(_options: argparse.Namespace) -> Callable[..., float]:
    """The share of samples whose largest output is where the float model has it."""

    def agreement(expected: list[np.ndarray], got: list[np.ndarray]) -> float:
        a, b = (arrays[0].reshape(len(arrays[0]), -1) for arrays in (expected, got))
        return float((a.argmax(1) == b.argmax(1)).mean())

    return agreement


def read_classes(options: argparse.Namespace) -> np.ndarray:
    """The class of each sample of `--data`, of the file `--labels`.

    Raises:
        DataError: there is no such file, or it does not fit the data.
    """
    if not options.labels.is_file():
        raise DataError(f"There is no file of labels {options.labels}.", code="RQ301")
    images = list_images(options.data) if options.data.is_dir() else None
    return read_labels(options.labels, images, options.data)


def make_top1(options: argparse.Namespace) -> Callable[..., float]:
    """The share of samples whose largest output is at their class, of `--labels`."""
    labels = read_classes(options)

    def top1(_expected: list[np.ndarray], got: list[np.ndarray]) -> float:
        if len(got[0]) != len(labels):
            raise ConfigError(
                f"--labels {options.labels} has {format_count(len(labels), 'class')}, the data "
                f"{format_count(len(got[0]), 'sample')}; allowed: one for each.",
                code="RQ102",
            )
        return float((got[0].reshape(len(labels), -1).argmax(1) == labels).mean())

    return top1


#: what `--metric` names -> what makes it of the options
METRICS: Mapping[str, Callable[[argparse.Namespace], Callable[..., float]]] = {
    "top1": make_top1,
    "agreement": make_agreement,
}
