"""Before the data flow: trains the built-in example and writes its model and its digits.

    pip install torch onnx scikit-learn && python tools/train_digits.py --out FOLDER

Nothing needs it: `relayquant.demo` ships both files. The digits come out as they are shipped, the
weights depend on PyTorch's version and on the machine. (Those that are shipped were trained by the
same recipe in numpy, before this script was written.)

The network (logits of ten classes) has what a quantizer meets in real ones: a convolution with
batch normalization, a depthwise and a pointwise convolution, a residual add, a stride, a global
average pool and a dense layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

ORIGIN = (
    "Handwritten digits of scikit-learn's load_digits: the test part of 'Optical Recognition of "
    "Handwritten Digits', E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, "
    "https://doi.org/10.24432/C50P49, licensed CC BY 4.0; scikit-learn is BSD-3-Clause. "
    "8x8 pixels, 0..16. Split at random by relayquant, so a writer may be in both parts."
)
WIDTH, DEEP, CLASSES = 32, 64, 10  # channels of the first and of the second stage
PIXEL_MAX = 16
SEED = 2024
HELD_OUT, CALIBRATION = 500, 128
BATCH = 64


class Network(nn.Module):
    """Logits (N, 10) of images (N, 1, 8, 8) in 0..1."""

    def __init__(self) -> None:
        super().__init__()
        # The normalization has the offset; a bias before it would have no effect.
        self.conv1 = nn.Conv2d(1, WIDTH, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(WIDTH)
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False)
        self.norm2 = nn.BatchNorm2d(WIDTH)
        self.pointwise = nn.Conv2d(WIDTH, WIDTH, 1)
        self.conv2 = nn.Conv2d(WIDTH, DEEP, 3, stride=2, padding=1)
        self.dense = nn.Linear(DEEP, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        stem = self.norm1(self.conv1(images)).relu()
        branch = self.pointwise(self.norm2(self.depthwise(stem)).relu())
        return self.dense(self.conv2((branch + stem).relu()).relu().mean((2, 3)))


def shift_images(images: torch.Tensor) -> torch.Tensor:
    """Images (N, 1, 8, 8), each moved by -1, 0 or 1 pixel both ways; zeros move in."""
    padded = functional.pad(images, (1, 1, 1, 1))
    offsets = torch.randint(3, (len(images), 2)).tolist()
    return torch.stack([padded[n, :, i : i + 8, j : j + 8] for n, (i, j) in enumerate(offsets)])


def train_network(images: torch.Tensor, labels: torch.Tensor, epochs: int) -> Network:
    """A network trained on images (N, 1, 8, 8) in 0..1 with labels (N,)."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # layers so small lose more than they gain by a second one
    network = Network()
    steps = epochs * (len(images) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for _ in range(epochs):
        for chosen in torch.randperm(len(images))[: len(images) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            logits = network(shift_images(images[chosen]))
            functional.cross_entropy(logits, labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def export_onnx(network: Network, path: Path) -> None:
    """Write ONNX: input "image" float32 [N, 1, 8, 8] in 0..1, output "logits" float32 [N, 10].

    By hand and not by `torch.onnx`, for names that stay: README and tutorials speak of them.
    """
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def node(op: str, name: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output or name], name=name, **attributes))
        return output or name

    def constant(name: str, value: torch.Tensor) -> str:
        constants.append(numpy_helper.from_array(value.detach().numpy(), name))
        return name

    def conv(name: str, data: str, layer: nn.Conv2d) -> str:
        inputs = [data, constant(f"{name}.weight", layer.weight)]
        if layer.bias is not None:
            inputs.append(constant(f"{name}.bias", layer.bias))
        size, pad, stride = layer.kernel_size, layer.padding, layer.stride
        settings = {"kernel_shape": size, "pads": [*pad, *pad], "strides": stride}
        return node("Conv", name, *inputs, group=layer.groups, **settings)

    def norm(name: str, data: str, layer: nn.BatchNorm2d) -> str:
        values = {"gamma": layer.weight, "beta": layer.bias}
        values |= {"mean": layer.running_mean, "variance": layer.running_var}
        inputs = [constant(f"{name}.{key}", value) for key, value in values.items()]
        return node("BatchNormalization", name, data, *inputs, epsilon=layer.eps)

    stem = norm("conv1/bn", conv("conv1", "image", network.conv1), network.norm1)
    stem = node("Relu", "conv1/relu", stem)
    branch = conv("block1/depthwise", stem, network.depthwise)
    branch = norm("block1/depthwise/bn", branch, network.norm2)
    branch = node("Relu", "block1/depthwise/relu", branch)
    branch = conv("block1/pointwise", branch, network.pointwise)
    deep = node("Relu", "block1/relu", node("Add", "block1/add", branch, stem))
    deep = node("Relu", "conv2/relu", conv("conv2", deep, network.conv2))
    deep = node("Flatten", "flatten", node("GlobalAveragePool", "pool", deep), axis=1)
    weight = constant("dense.weight", network.dense.weight)
    bias = constant("dense.bias", network.dense.bias)
    node("Gemm", "dense", deep, weight, bias, output="logits", transB=1)

    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 8, 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])
    graph = helper.make_graph(nodes, "relayquant_digits", [image], [logits], constants)
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(graph, producer_name="relayquant", opset_imports=[opset])
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))


def split_digits() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """What is shipped, and images (N, 8, 8) uint8 in 0..16 and labels (N,) uint8 to train on."""
    source: Any = load_digits()
    images, labels = source.images.astype("uint8"), source.target.astype("uint8")
    order = np.random.default_rng(SEED).permutation(len(images))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]
    shipped = {
        "calibration": images[training[:CALIBRATION]],
        "images": images[held_out],
        "labels": labels[held_out],
        "origin": np.array(ORIGIN),
    }
    return shipped, images[training], labels[training]


def to_tensors(images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 1, 8, 8) float32 in 0..1, and labels int64."""
    pixels = torch.from_numpy(images[:, None].astype("float32") / PIXEL_MAX)
    return pixels, torch.from_numpy(labels.astype("int64"))


def write_demo(folder: Path, epochs: int) -> float:
    """Train, write model and digits into `folder`; the accuracy on the held-out digits."""
    shipped, images, labels = split_digits()
    network = train_network(*to_tensors(images, labels), epochs)
    folder.mkdir(parents=True, exist_ok=True)
    export_onnx(network, folder / "digits.onnx")
    np.savez_compressed(folder / "digits.npz", **shipped)
    pixels, expected = to_tensors(shipped["images"], shipped["labels"])
    with torch.no_grad():
        return float((network(pixels).argmax(1) == expected).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the built-in example of relayquant.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()
    accuracy = write_demo(options.out, options.epochs)
    print(f"accuracy on {HELD_OUT} held-out digits: {accuracy:.2%}")
