"""Before the data flow: trains the built-in example and writes its model and its digits.

Not needed to use them. Run `pip install 'relayquant[train]'`, then
`python -m relayquant.demo.train`: half a minute with numpy and the digits of scikit-learn. It is
seeded: the same machine and the same numpy write the same files; another BLAS may differ in the
last bits of the weights.

The network (logits of ten classes) has what a quantizer meets in real ones: a convolution with
batch normalization, a depthwise and a pointwise convolution, a residual add, a stride, a global
average pool and a dense layer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relayquant.demo import DATA_FILE, MODEL_FILE
from relayquant.errors import MissingDependencyError, format_count

Array = npt.NDArray[Any]
#: The second result of a layer: gradient of the output -> gradient of the input.
Backward = Callable[[Array], Array]

ORIGIN = (
    "Handwritten digits of scikit-learn's load_digits: the test part of 'Optical Recognition of "
    "Handwritten Digits', E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, "
    "https://doi.org/10.24432/C50P49, licensed CC BY 4.0; scikit-learn is BSD-3-Clause. "
    "8x8 pixels, 0..16. Split at random by relayquant, so a writer may be in both parts."
)

WIDTH = 32  #: channels of the first stage
DEEP = 64  #: channels of the second stage
CLASSES = 10
PIXEL_MAX = 16.0
BN_EPSILON = 1e-5
BN_MOMENTUM = 0.9


@dataclass(frozen=True)
class TrainSettings:
    """Everything the result depends on."""

    seed: int = 2024
    epochs: int = 100
    batch: int = 64
    learning_rate: float = 1e-2
    weight_decay: float = 1e-2
    held_out: int = 500
    calibration: int = 128


class Network:
    """The example network: parameters by name, one forward pass with its gradients.

    Images are (N, 8, 8, C) in here, so that a convolution is a sum of matrix products, one for each
    tap of the kernel. Weights are (kh, kw, C_in, C_out), depthwise ones (kh, kw, C).
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.params: dict[str, Array] = {}
        #: running mean and variance of each batch normalization
        self.statistics: dict[str, tuple[Array, Array]] = {}
        self.grads: dict[str, Array] = {}
        shapes = {
            "conv1": (3, 3, 1, WIDTH),
            "block1/depthwise": (3, 3, WIDTH),
            "block1/pointwise": (1, 1, WIDTH, WIDTH),
            "conv2": (3, 3, WIDTH, DEEP),
            "dense": (DEEP, CLASSES),
        }
        for name, shape in shapes.items():
            fan_in = int(np.prod(shape[:2] if name == "block1/depthwise" else shape[:-1]))
            weight = rng.normal(0.0, np.sqrt(2.0 / fan_in), shape)
            self.params[f"{name}.weight"] = weight.astype("float32")
            self.params[f"{name}.bias"] = np.zeros(shape[-1], "float32")
        for name in ("conv1", "block1/depthwise"):
            # The normalization has the offset; a bias before it would have no effect.
            del self.params[f"{name}.bias"]
            self.params[f"{name}.gamma"] = np.ones(WIDTH, "float32")
            self.params[f"{name}.beta"] = np.zeros(WIDTH, "float32")
            self.statistics[name] = (np.zeros(WIDTH, "float32"), np.ones(WIDTH, "float32"))

    def forward(self, x: Array, training: bool) -> tuple[Array, Callable[[Array], None]]:
        """Logits (N, 10) of images (N, 8, 8, 1); the function puts gradients into `self.grads`."""
        backwards: list[Backward] = []

        def chain(result: tuple[Array, Backward]) -> Array:
            backwards.append(result[1])
            return result[0]

        h = chain(self._conv(x, "conv1"))
        h = chain(self._normalize(h, "conv1", training))
        stem = chain(_relu(h))
        stem_end = len(backwards)
        h = chain(self._depthwise(stem, "block1/depthwise"))
        h = chain(self._normalize(h, "block1/depthwise", training))
        h = chain(_relu(h))
        h = chain(self._conv(h, "block1/pointwise", padding=0)) + stem
        branch_end = len(backwards)
        h = chain(_relu(h))
        h = chain(self._conv(h, "conv2", stride=2))
        h = chain(_relu(h))
        h = chain(_global_average(h))
        logits = chain(self._dense(h, "dense"))

        def backward(grad: Array) -> None:
            for step in reversed(backwards[branch_end:]):
                grad = step(grad)
            residual = grad
            for step in reversed(backwards[stem_end:branch_end]):
                grad = step(grad)
            grad = grad + residual
            for step in reversed(backwards[:stem_end]):
                grad = step(grad)

        return logits, backward

    def _conv(
        self, x: Array, name: str, stride: int = 1, padding: int = 1
    ) -> tuple[Array, Backward]:
        weight = self.params[f"{name}.weight"]
        bias = self.params.get(f"{name}.bias")
        taps = _Taps(x, weight.shape[:2], stride, padding)
        y = np.add.reduce([taps.read(i, j) @ weight[i, j] for i, j in taps.positions])
        y = y if bias is None else y + bias

        def backward(grad: Array) -> Array:
            flat = grad.reshape(-1, grad.shape[-1])
            dw = np.empty_like(weight)
            for i, j in taps.positions:
                dw[i, j] = taps.read(i, j).reshape(-1, weight.shape[2]).T @ flat
            self.grads[f"{name}.weight"] = dw
            if bias is not None:
                self.grads[f"{name}.bias"] = flat.sum(0)
            return taps.scatter(lambda i, j: grad @ weight[i, j].T)

        return y, backward

    def _depthwise(self, x: Array, name: str) -> tuple[Array, Backward]:
        weight = self.params[f"{name}.weight"]
        taps = _Taps(x, weight.shape[:2], stride=1, padding=1)
        y = np.zeros_like(x)
        for i, j in taps.positions:
            y += taps.read(i, j) * weight[i, j]

        def backward(grad: Array) -> Array:
            dw = np.empty_like(weight)
            for i, j in taps.positions:
                dw[i, j] = np.einsum("nhwc,nhwc->c", taps.read(i, j), grad)
            self.grads[f"{name}.weight"] = dw
            return taps.scatter(lambda i, j: grad * weight[i, j])

        return y, backward

    def _normalize(self, x: Array, name: str, training: bool) -> tuple[Array, Backward]:
        gamma, beta = self.params[f"{name}.gamma"], self.params[f"{name}.beta"]
        mean, variance = self.statistics[name]
        if training:
            batch_mean, batch_variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
            self.statistics[name] = (
                BN_MOMENTUM * mean + (1 - BN_MOMENTUM) * batch_mean,
                BN_MOMENTUM * variance + (1 - BN_MOMENTUM) * batch_variance,
            )
            mean, variance = batch_mean, batch_variance
        inverse = 1.0 / np.sqrt(variance + np.float32(BN_EPSILON))
        normal = (x - mean) * inverse

        def backward(grad: Array) -> Array:
            self.grads[f"{name}.gamma"] = (grad * normal).sum((0, 1, 2))
            self.grads[f"{name}.beta"] = grad.sum((0, 1, 2))
            centred = grad - grad.mean((0, 1, 2)) - normal * (grad * normal).mean((0, 1, 2))
            return gamma * inverse * centred

        return normal * gamma + beta, backward

    def _dense(self, x: Array, name: str) -> tuple[Array, Backward]:
        weight = self.params[f"{name}.weight"]

        def backward(grad: Array) -> Array:
            self.grads[f"{name}.weight"] = x.T @ grad
            self.grads[f"{name}.bias"] = grad.sum(0)
            return grad @ weight.T

        return x @ weight + self.params[f"{name}.bias"], backward


class _Taps:
    """The shifted, strided views of an image batch that the taps of a kernel read."""

    def __init__(self, x: Array, kernel: tuple[int, ...], stride: int, padding: int) -> None:
        self.padding = padding
        self.stride = stride
        self.padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
        self.rows = (self.padded.shape[1] - kernel[0]) // stride + 1
        self.columns = (self.padded.shape[2] - kernel[1]) // stride + 1
        self.positions = [(i, j) for i in range(kernel[0]) for j in range(kernel[1])]

    def _window(self, i: int, j: int) -> tuple[slice, slice, slice]:
        rows = slice(i, i + self.stride * (self.rows - 1) + 1, self.stride)
        columns = slice(j, j + self.stride * (self.columns - 1) + 1, self.stride)
        return slice(None), rows, columns

    def read(self, i: int, j: int) -> Array:
        return self.padded[self._window(i, j)]

    def scatter(self, part: Callable[[int, int], Array]) -> Array:
        """The transpose of reading: adds each tap's part where it was read, without the padding."""
        total = np.zeros_like(self.padded)
        for i, j in self.positions:
            total[self._window(i, j)] += part(i, j)
        rows, columns = total.shape[1] - self.padding, total.shape[2] - self.padding
        return total[:, self.padding : rows, self.padding : columns]


def _relu(x: Array) -> tuple[Array, Backward]:
    return np.maximum(x, 0), lambda grad: grad * (x > 0)


def _global_average(x: Array) -> tuple[Array, Backward]:
    count = x.shape[1] * x.shape[2]

    def backward(grad: Array) -> Array:
        return np.broadcast_to(grad[:, None, None, :] / np.float32(count), x.shape)

    return x.mean((1, 2)), backward


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[float, Array]:
    """Mean loss of logits (N, 10) against labels (N,), and its gradient by the logits."""
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    probability = shifted / shifted.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(probability[rows, labels]).mean()
    probability[rows, labels] -= 1
    return float(loss), probability / np.float32(len(labels))


class Adam:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101)."""

    def __init__(self, params: dict[str, Array], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self.first = {name: np.zeros_like(value) for name, value in params.items()}
        self.second = {name: np.zeros_like(value) for name, value in params.items()}
        self.step_count = 0

    def step(self, params: dict[str, Array], grads: dict[str, Array], rate: float) -> None:
        self.step_count += 1
        for name, grad in grads.items():
            first = self.first[name] = 0.9 * self.first[name] + 0.1 * grad
            second = self.second[name] = 0.999 * self.second[name] + 0.001 * grad * grad
            update = first / (1 - 0.9**self.step_count)
            update = update / (np.sqrt(second / (1 - 0.999**self.step_count)) + 1e-8)
            if name.endswith(".weight"):
                update = update + self.weight_decay * params[name]
            params[name] = (params[name] - rate * update).astype("float32")


def shift_images(images: Array, rng: np.random.Generator) -> Array:
    """Images (N, 8, 8, 1), each moved by -1, 0 or 1 pixel both ways; zeros move in."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    offsets = rng.integers(0, 3, (len(images), 2))
    return np.stack(
        [image[i : i + 8, j : j + 8] for image, (i, j) in zip(padded, offsets, strict=True)]
    )


def train_network(images: Array, labels: Array, settings: TrainSettings) -> Network:
    """A network trained on images (N, 8, 8, 1) float32 in 0..1 with labels (N,)."""
    rng = np.random.default_rng(settings.seed)
    network = Network(rng)
    adam = Adam(network.params, settings.weight_decay)
    steps = settings.epochs * (len(images) // settings.batch)
    for epoch in range(settings.epochs):
        order = rng.permutation(len(images))
        losses = []
        for start in range(0, len(images) - settings.batch + 1, settings.batch):
            chosen = order[start : start + settings.batch]
            logits, backward = network.forward(shift_images(images[chosen], rng), training=True)
            loss, grad = softmax_cross_entropy(logits, labels[chosen])
            backward(grad)
            # A cosine from the full rate to zero.
            rate = settings.learning_rate * 0.5 * (1 + np.cos(np.pi * adam.step_count / steps))
            adam.step(network.params, network.grads, float(rate))
            losses.append(loss)
        print(f"epoch {epoch + 1:3d} of {settings.epochs}: loss {np.mean(losses):.4f}")
    return network


def measure_accuracy(network: Network, images: Array, labels: Array) -> float:
    """Share of images (N, 8, 8, 1) whose largest logit is at the label."""
    logits, _ = network.forward(images, training=False)
    return float((logits.argmax(1) == labels).mean())


def export_onnx(network: Network, path: Path) -> None:
    """Write ONNX: input "image" float32 [N, 1, 8, 8] in 0..1, output "logits" float32 [N, 10]."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes, initializers = [], []

    def constant(name: str, value: Array) -> str:
        value = np.ascontiguousarray(value, "float32")
        initializers.append(numpy_helper.from_array(value, name))
        return name

    def node(op: str, name: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        output = output or name
        nodes.append(helper.make_node(op, inputs, [output], name=name, **attributes))
        return output

    def conv(name: str, data: str, stride: int = 1) -> str:
        weight = network.params[f"{name}.weight"]
        depthwise = weight.ndim == 3
        # (kh, kw, I, O) -> (O, I, kh, kw); a depthwise kernel (kh, kw, C) -> (C, 1, kh, kw).
        oihw = weight.transpose(2, 0, 1)[:, None] if depthwise else weight.transpose(3, 2, 0, 1)
        inputs = [data, constant(f"{name}.weight", oihw)]
        if f"{name}.bias" in network.params:
            inputs.append(constant(f"{name}.bias", network.params[f"{name}.bias"]))
        size = weight.shape[0]
        attributes: dict[str, Any] = {"kernel_shape": [size, size], "strides": [stride, stride]}
        attributes["pads"] = [size // 2] * 4
        attributes["group"] = weight.shape[2] if depthwise else 1
        return node("Conv", name, inputs, **attributes)

    def normalize(name: str, data: str) -> str:
        mean, variance = network.statistics[name]
        inputs = [
            data,
            constant(f"{name}/bn.gamma", network.params[f"{name}.gamma"]),
            constant(f"{name}/bn.beta", network.params[f"{name}.beta"]),
            constant(f"{name}/bn.mean", mean),
            constant(f"{name}/bn.variance", variance),
        ]
        return node("BatchNormalization", f"{name}/bn", inputs, epsilon=BN_EPSILON)

    stem = node("Relu", "conv1/relu", [normalize("conv1", conv("conv1", "image"))])
    h = normalize("block1/depthwise", conv("block1/depthwise", stem))
    h = conv("block1/pointwise", node("Relu", "block1/depthwise/relu", [h]))
    h = node("Add", "block1/add", [h, stem])
    h = conv("conv2", node("Relu", "block1/relu", [h]), stride=2)
    h = node("GlobalAveragePool", "pool", [node("Relu", "conv2/relu", [h])])
    h = node("Flatten", "flatten", [h], axis=1)
    weight = constant("dense.weight", network.params["dense.weight"].T)
    bias = constant("dense.bias", network.params["dense.bias"])
    node("Gemm", "dense", [h, weight, bias], "logits", transB=1)

    graph = helper.make_graph(
        nodes,
        "relayquant_digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])],
        initializers,
    )
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(graph, producer_name="relayquant", opset_imports=[opset])
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))


def load_source() -> tuple[Array, Array]:
    """scikit-learn's digits: images (1797, 8, 8) uint8 in 0..16, labels (1797,) uint8.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load_sklearn_digits
    except ImportError:
        raise MissingDependencyError(
            "Training the example needs scikit-learn's digits. Run: pip install 'relayquant[train]'"
        ) from None
    source: Any = load_sklearn_digits()
    return source.images.astype("uint8"), source.target.astype("uint8")


def write_demo(folder: Path, settings: TrainSettings) -> float:
    """Train, write model and digits into `folder`; returns the accuracy on the held-out digits."""
    images, labels = load_source()
    order = np.random.default_rng(settings.seed).permutation(len(images))
    held_out, training = order[: settings.held_out], order[settings.held_out :]
    pixels = (images[..., None] / np.float32(PIXEL_MAX)).astype("float32")
    network = train_network(pixels[training], labels[training], settings)
    accuracy = measure_accuracy(network, pixels[held_out], labels[held_out])
    folder.mkdir(parents=True, exist_ok=True)
    export_onnx(network, folder / MODEL_FILE)
    np.savez_compressed(
        folder / DATA_FILE,
        calibration=images[training[: settings.calibration]],
        images=images[held_out],
        labels=labels[held_out],
        origin=np.array(ORIGIN),
    )
    return accuracy


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train the built-in example of relayquant.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write")
    parser.add_argument("--epochs", type=int, default=TrainSettings.epochs)
    parser.add_argument("--seed", type=int, default=TrainSettings.seed)
    options = parser.parse_args(argv)
    settings = TrainSettings(seed=options.seed, epochs=options.epochs)
    accuracy = write_demo(options.out, settings)
    print(f"accuracy on {format_count(settings.held_out, 'held-out digit')}: {accuracy:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
