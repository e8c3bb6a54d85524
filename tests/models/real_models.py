"""Real models and data: each reader gives a model, calibration batches and held-out samples.

A reader takes a function from a file's name to its path among the real models and data.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Array = np.ndarray
#: name of a file -> its path
Find = Callable[[str], Path]


@dataclass(frozen=True, eq=False)
class Case:
    """A model file, batches to calibrate with, held-out samples, and their labels if there
    are any.
    """

    model: Path
    calibration: list[Array]
    samples: Array
    labels: Array | None = None


def batches(array: Array, size: int) -> list[Array]:
    """Consecutive batches along the first axis."""
    return [array[i : i + size] for i in range(0, len(array), size)]


def read_resnet20(find: Find) -> Case:
    images = np.load(find("cifar10_unlabelled_1000.npz"))["x"]
    if images.shape[-1] == 3:
        images = images.transpose(0, 3, 1, 2)
    mean = np.array([0.485, 0.456, 0.406], "float32").reshape(1, 3, 1, 1)
    std = np.array([0.229, 0.224, 0.225], "float32").reshape(1, 3, 1, 1)
    x = ((images / np.float32(255) - mean) / std).astype("float32")
    return Case(find("resnet20_cifar10.onnx"), batches(x[:200], 10), x[500:])


def read_resnet8(find: Find) -> Case:
    images = np.load(find("cifar10_unlabelled_1000.npz"))["x"]
    if images.shape[-1] != 3:
        images = images.transpose(0, 2, 3, 1)
    x = np.ascontiguousarray(images).astype("float32")
    return Case(find("ic_resnet8_fp32.tflite"), batches(x[:200], 1), x[500:])


def read_mobilenet(find: Find) -> Case:
    from PIL import Image

    with np.load(find("imagenet_200.npz")) as data:
        jpeg, offsets, labels = data["jpeg"].tobytes(), data["offset"], data["y"]
    pictures = [
        np.asarray(Image.open(io.BytesIO(jpeg[a:b])).convert("RGB"))[1:225, 1:225]
        for a, b in itertools.pairwise(offsets)
    ]
    x = np.stack(pictures).astype("float32") / np.float32(127.5) - 1
    x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    model = find("mobilenet_v1_0.75_224.onnx")
    return Case(model, batches(x[:100], 2), x[100:], labels[100:])


def read_dscnn(find: Find) -> Case:
    with np.load(find("kws_1000.npz")) as data:
        x, labels, split = data["x"], data["y"], data["split"]
    x = ((x.astype("float32") - 83) * np.float32(0.58470291)).reshape(-1, 1, 49, 10)
    x = x.astype("float32")
    model = find("kws_dscnn.onnx")
    return Case(model, batches(x[split == 0][:200], 10), x[split == 1], labels[split == 1])


def read_mnist(find: Find) -> Case:
    with np.load(find("mnist_1000.npz")) as data:
        x, labels = data["x"].astype("float32").reshape(-1, 1, 28, 28), data["y"]
    return Case(find("mnist-8.onnx"), batches(x[:100], 1), x[100:], labels[100:])


def read_kwt1(find: Find) -> Case:
    x = np.load(find("kwt_unlabelled_100.npz"))["x"].astype("float32")
    return Case(find("kwt1_mfcc.onnx"), batches(x[:50], 10), x[50:])


def read_magika(find: Find) -> Case:
    with np.load(find("magika_filetype_152.npz")) as data:
        x, labels = data["x"].astype("int32"), data["y"]
    return Case(find("magika_v3_3_b1.onnx"), batches(x[:50], 1), x[50:], labels[50:])


def read_digits() -> Case:
    from relayquant.demo import load_digits

    demo = load_digits()
    return Case(Path(demo.model_path), demo.calibration, demo.images, demo.labels)
