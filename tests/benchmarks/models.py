"""Well-known architectures with random weights as ONNX models, for measurements of speed.

    python tests/benchmarks/models.py resnet50 resnet50.onnx

The weights are scaled so that activations keep a spread of about 1 through the whole network, as
training and batch normalization would have it: ranges, and hence scales, are sane. Results mean
nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8


class GraphBuilder:
    """Collects nodes and weights; values are named after the node that makes them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, name: str, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def normal(self, name: str, shape: tuple[int, ...], spread: float) -> str:
        return self.weight(name, self.rng.normal(0, spread, shape).astype("float32"))

    def node(self, op: str, inputs: list[str], name: str, **attributes) -> str:
        """Add a node with one result, which gets the node's name."""
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def conv(
        self,
        x: str,
        name: str,
        channels: tuple[int, int],
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        gain: float = 1.0,
        activation: str | None = "Relu",
    ) -> str:
        """Conv without bias, BatchNormalization, and Relu, Clip(0, 6) or x * Sigmoid(x); channels
        are (in, out).
        """
        c_in, c_out = channels
        fan_in = c_in // groups * kernel * kernel
        weight = self.normal(
            f"{name}.weight", (c_out, c_in // groups, kernel, kernel), math.sqrt(2 / fan_in)
        )
        pad = kernel // 2
        y = self.node(
            "Conv", [x, weight], f"{name}/conv", kernel_shape=[kernel] * 2, strides=[stride] * 2,
            pads=[pad] * 4, group=groups,
        )  # fmt: skip
        statistics = {
            "scale": gain * self.rng.uniform(0.7, 1.3, c_out),
            "shift": self.rng.normal(0, 0.1, c_out),
            "mean": self.rng.normal(0, 0.1, c_out),
            "variance": self.rng.uniform(0.7, 1.3, c_out),
        }
        names = [
            self.weight(f"{name}.{key}", value.astype("float32"))
            for key, value in statistics.items()
        ]
        y = self.node("BatchNormalization", [y, *names], f"{name}/bn")
        if activation == "Relu":
            return self.node("Relu", [y], f"{name}/relu")
        if activation == "Clip":
            return self.node("Clip", [y, *self.clip_bounds()], f"{name}/clip")
        if activation == "Swish":
            return self.swish(y, name)
        return y

    def swish(self, x: str, name: str) -> str:
        return self.node("Mul", [x, self.node("Sigmoid", [x], f"{name}/sigmoid")], f"{name}/swish")

    def clip_bounds(self) -> list[str]:
        if not any(weight.name == "clip.low" for weight in self.weights):
            self.weight("clip.low", np.array(0, "float32"))
            self.weight("clip.high", np.array(6, "float32"))
        return ["clip.low", "clip.high"]

    def classifier(self, x: str, features: int, classes: int = 1000) -> str:
        """GlobalAveragePool, Flatten, Gemm."""
        x = self.node("GlobalAveragePool", [x], "pool")
        x = self.node("Flatten", [x], "flatten")
        weight = self.normal("fc.weight", (classes, features), math.sqrt(1 / features))
        bias = self.normal("fc.bias", (classes,), 0.1)
        return self.node("Gemm", [x, weight, bias], "fc", transB=1)

    def dense(self, x: str, name: str, features: tuple[int, int], gain: float = 1.0) -> str:
        """MatMul over the last axis and Add; features are (in, out)."""
        spread = gain * math.sqrt(1 / features[0])
        y = self.node("MatMul", [x, self.normal(f"{name}.weight", features, spread)], f"{name}/mm")
        return self.node("Add", [y, self.normal(f"{name}.bias", features[1:], 0.1)], name)

    def normalize(self, x: str, name: str, width: int) -> str:
        """LayerNormalization over the last axis."""
        scale = self.weight(f"{name}.scale", self.rng.uniform(0.7, 1.3, width).astype("float32"))
        shift = self.normal(f"{name}.shift", (width,), 0.1)
        return self.node("LayerNormalization", [x, scale, shift], name, axis=-1)

    def constant(self, name: str, value: object, dtype: str) -> str:
        """A weight that may be asked for several times."""
        if not any(weight.name == name for weight in self.weights):
            self.weight(name, np.array(value, dtype))
        return name

    def encoder(self, x: str, name: str, tokens: int, width: int, heads: int, first: bool) -> str:
        """An encoder layer of a transformer, GELU by Erf; LayerNormalization comes first (ViT) or
        last (BERT).
        """
        depth = width // heads
        split = self.constant("split_heads", [0, tokens, heads, depth], "int64")
        join = self.constant("join_heads", [0, tokens, width], "int64")
        scale = self.constant("scale", math.sqrt(1 / depth), "float32")

        def split_heads(x: str, key: str, axes: list[int]) -> str:
            y = self.node("Reshape", [x, split], f"{name}.{key}/split")
            return self.node("Transpose", [y], f"{name}.{key}/heads", perm=axes)

        y = self.normalize(x, f"{name}.norm1", width) if first else x
        q, k, v = (self.dense(y, f"{name}.{key}", (width, width)) for key in "qkv")
        q = split_heads(q, "q", [0, 2, 1, 3])
        k = split_heads(k, "k", [0, 2, 3, 1])
        v = split_heads(v, "v", [0, 2, 1, 3])
        scores = self.node("MatMul", [q, k], f"{name}/scores")
        scores = self.node("Mul", [scores, scale], f"{name}/scaled")
        share = self.node("Softmax", [scores], f"{name}/softmax", axis=-1)
        y = self.node("MatMul", [share, v], f"{name}/context")
        y = self.node("Transpose", [y], f"{name}/joined", perm=[0, 2, 1, 3])
        y = self.node("Reshape", [y, join], f"{name}/flat")
        y = self.dense(y, f"{name}.out", (width, width), gain=0.3)
        x = self.node("Add", [x, y], f"{name}/add1")
        if not first:
            x = self.normalize(x, f"{name}.norm1", width)
        y = self.normalize(x, f"{name}.norm2", width) if first else x
        y = self.gelu(self.dense(y, f"{name}.up", (width, 4 * width)), f"{name}/gelu")
        y = self.dense(y, f"{name}.down", (4 * width, width), gain=0.3)
        x = self.node("Add", [x, y], f"{name}/add2")
        return x if first else self.normalize(x, f"{name}.norm2", width)

    def gelu(self, x: str, name: str) -> str:
        """x (1 + erf(x / sqrt 2)) / 2, as PyTorch exports it."""
        bell = self.node("Div", [x, self.constant("sqrt2", math.sqrt(2), "float32")], f"{name}.1")
        bell = self.node("Erf", [bell], f"{name}.2")
        bell = self.node("Add", [bell, self.constant("one", 1.0, "float32")], f"{name}.3")
        y = self.node("Mul", [x, bell], f"{name}.4")
        return self.node("Mul", [y, self.constant("half", 0.5, "float32")], name)

    def build(self, name: str, shape: tuple[int | str, ...], result: str) -> onnx.ModelProto:
        """The model with one input "input" of this shape and one result "output"."""
        self.node("Identity", [result], "output")
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
            self.weights,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
        )
        model = onnx.shape_inference.infer_shapes(model)
        onnx.checker.check_model(model)
        return model


def build_resnet(
    depth: int, batch: int | str = 1, size: int = 224, seed: int = 0
) -> onnx.ModelProto:
    """ResNet-18, -34, -50, -101 (v1.5: the 3x3 convolution strides); data NCHW."""
    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}[depth]
    expansion = 4 if depth >= 50 else 1
    g = GraphBuilder(seed)
    x = g.conv("input", "stem", (3, 64), kernel=7, stride=2)
    x = g.node("MaxPool", [x], "maxpool", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            stride = 2 if stage and not block else 1
            out = width * expansion
            shortcut = x
            if stride != 1 or channels != out:
                shortcut = g.conv(
                    x, f"{name}.down", (channels, out), stride=stride, gain=0.7, activation=None
                )
            if expansion == 4:
                y = g.conv(x, f"{name}.1", (channels, width))
                y = g.conv(y, f"{name}.2", (width, width), kernel=3, stride=stride)
                y = g.conv(y, f"{name}.3", (width, out), gain=0.3, activation=None)
            else:
                y = g.conv(x, f"{name}.1", (channels, width), kernel=3, stride=stride)
                y = g.conv(y, f"{name}.2", (width, width), kernel=3, gain=0.3, activation=None)
            y = g.node("Add", [y, shortcut], f"{name}/add")
            x = g.node("Relu", [y], f"{name}/relu")
            channels = out
    logits = g.classifier(x, channels)
    return g.build(f"resnet{depth}", (batch, 3, size, size), logits)


#: expansion, channels, blocks, stride of the first block
MOBILENET_V2_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def build_mobilenet_v2(batch: int | str = 1, size: int = 224, seed: int = 0) -> onnx.ModelProto:
    """MobileNetV2 of width 1.0, input (batch, 3, size, size)."""
    g = GraphBuilder(seed)
    x = g.conv("input", "stem", (3, 32), kernel=3, stride=2, activation="Clip")
    channels = 32
    for stage, (expansion, out, count, first_stride) in enumerate(MOBILENET_V2_STAGES):
        for block in range(count):
            name = f"block{stage}.{block}"
            stride = first_stride if block == 0 else 1
            hidden = channels * expansion
            y = x
            if expansion != 1:
                y = g.conv(y, f"{name}.expand", (channels, hidden), activation="Clip")
            y = g.conv(
                y, f"{name}.depthwise", (hidden, hidden), kernel=3, stride=stride, groups=hidden,
                activation="Clip",
            )  # fmt: skip
            y = g.conv(y, f"{name}.project", (hidden, out), gain=0.7, activation=None)
            x = g.node("Add", [x, y], f"{name}/add") if stride == 1 and channels == out else y
            channels = out
    x = g.conv(x, "head", (channels, 1280), activation="Clip")
    return g.build("mobilenet_v2", (batch, 3, size, size), g.classifier(x, 1280))


#: channels behind each depthwise convolution, and its stride
MOBILENET_V1_BLOCKS = (
    (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2),
    *[(512, 1)] * 5, (1024, 2), (1024, 1),
)  # fmt: skip


def build_mobilenet_v1(batch: int | str = 1, size: int = 224, seed: int = 0) -> onnx.ModelProto:
    """MobileNet v1 of width 1.0."""
    g = GraphBuilder(seed)
    x, channels = g.conv("input", "stem", (3, 32), kernel=3, stride=2, activation="Clip"), 32
    for block, (out, stride) in enumerate(MOBILENET_V1_BLOCKS):
        x = g.conv(
            x, f"block{block}.depthwise", (channels, channels), kernel=3, stride=stride,
            groups=channels, activation="Clip",
        )  # fmt: skip
        x = g.conv(x, f"block{block}.pointwise", (channels, out), activation="Clip")
        channels = out
    return g.build("mobilenet_v1", (batch, 3, size, size), g.classifier(x, channels))


#: squeeze and expand channels of the fire modules; None: a pool
SQUEEZENET_MODULES = (
    None, (16, 64), (16, 64), None, (32, 128), (32, 128),
    None, (48, 192), (48, 192), (64, 256), (64, 256),
)  # fmt: skip


def build_squeezenet(batch: int | str = 1, size: int = 224, seed: int = 0) -> onnx.ModelProto:
    """SqueezeNet 1.1: convolutions with bias, without batch normalization."""
    g = GraphBuilder(seed)

    def conv(x: str, name: str, channels: tuple[int, int], kernel: int, **attributes) -> str:
        spread = math.sqrt(2 / (channels[0] * kernel * kernel))
        weight = g.normal(f"{name}.weight", (channels[1], channels[0], kernel, kernel), spread)
        bias = g.normal(f"{name}.bias", channels[1:], 0.1)
        x = g.node("Conv", [x, weight, bias], name, kernel_shape=[kernel] * 2, **attributes)
        return g.node("Relu", [x], f"{name}/relu")

    x, channels = conv("input", "stem", (3, 64), 3, strides=[2, 2]), 64
    for number, module in enumerate(SQUEEZENET_MODULES):
        name = f"fire{number}"
        if module is None:
            x = g.node("MaxPool", [x], name, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
            continue
        squeeze, expand = module
        x = conv(x, f"{name}.squeeze", (channels, squeeze), 1)
        parts = [
            conv(x, f"{name}.expand1", (squeeze, expand), 1),
            conv(x, f"{name}.expand3", (squeeze, expand), 3, pads=[1] * 4),
        ]
        x, channels = g.node("Concat", parts, f"{name}/concat", axis=1), 2 * expand
    x = conv(x, "classifier", (channels, 1000), 1)
    x = g.node("Flatten", [g.node("GlobalAveragePool", [x], "pool")], "flatten")
    return g.build("squeezenet", (batch, 3, size, size), x)


#: expansion, channels, blocks, stride of the first block, kernel
EFFICIENTNET_B0_STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


def build_efficientnet(batch: int | str = 1, size: int = 224, seed: int = 0) -> onnx.ModelProto:
    """EfficientNet-B0: swish, and channels scaled by what a squeezed map says."""
    g = GraphBuilder(seed)

    def squeeze_excite(x: str, name: str, channels: int, squeezed: int) -> str:
        y = g.node("GlobalAveragePool", [x], f"{name}/pool")
        for key, (c_in, c_out) in {
            "down": (channels, squeezed),
            "up": (squeezed, channels),
        }.items():
            weight = g.normal(f"{name}.{key}.weight", (c_out, c_in, 1, 1), math.sqrt(1 / c_in))
            bias = g.normal(f"{name}.{key}.bias", (c_out,), 0.1)
            y = g.node("Conv", [y, weight, bias], f"{name}.{key}", kernel_shape=[1, 1])
            y = g.swish(y, f"{name}.{key}") if key == "down" else y
        return g.node("Mul", [x, g.node("Sigmoid", [y], f"{name}/gate")], f"{name}/scaled")

    x, channels = g.conv("input", "stem", (3, 32), kernel=3, stride=2, activation="Swish"), 32
    for stage, (expansion, out, count, first_stride, kernel) in enumerate(EFFICIENTNET_B0_STAGES):
        for block in range(count):
            name, stride = f"block{stage}.{block}", first_stride if block == 0 else 1
            hidden, y = channels * expansion, x
            if expansion != 1:
                y = g.conv(y, f"{name}.expand", (channels, hidden), activation="Swish")
            y = g.conv(
                y, f"{name}.depthwise", (hidden, hidden), kernel=kernel, stride=stride,
                groups=hidden, activation="Swish",
            )  # fmt: skip
            y = squeeze_excite(y, f"{name}.se", hidden, channels // 4)
            y = g.conv(y, f"{name}.project", (hidden, out), gain=0.7, activation=None)
            x = g.node("Add", [x, y], f"{name}/add") if stride == 1 and channels == out else y
            channels = out
    x = g.conv(x, "head", (channels, 1280), activation="Swish")
    return g.build("efficientnet_b0", (batch, 3, size, size), g.classifier(x, 1280))


def build_unet(
    batch: int | str = 1, size: int = 128, width: int = 32, depth: int = 3, seed: int = 0
) -> onnx.ModelProto:
    """A U-Net: pairs of 3x3 convolutions, pools down, transposed convolutions up, maps joined."""
    g = GraphBuilder(seed)

    def pair(x: str, name: str, c_in: int, c_out: int) -> str:
        x = g.conv(x, f"{name}.1", (c_in, c_out), kernel=3)
        return g.conv(x, f"{name}.2", (c_out, c_out), kernel=3)

    x, channels, maps = "input", 3, []
    for level in range(depth):
        x, channels = pair(x, f"down{level}", channels, width << level), width << level
        maps.append(x)
        x = g.node("MaxPool", [x], f"pool{level}", kernel_shape=[2, 2], strides=[2, 2])
    x, channels = pair(x, "bottom", channels, width << depth), width << depth
    for level in reversed(range(depth)):
        out = width << level
        weight = g.normal(f"up{level}.weight", (channels, out, 2, 2), math.sqrt(1 / channels))
        x = g.node(
            "ConvTranspose", [x, weight, g.normal(f"up{level}.bias", (out,), 0.1)], f"up{level}",
            kernel_shape=[2, 2], strides=[2, 2],
        )  # fmt: skip
        x = g.node("Concat", [maps[level], x], f"join{level}", axis=1)
        x, channels = pair(x, f"out{level}", 2 * out, out), out
    weight = g.normal("head.weight", (2, channels, 1, 1), math.sqrt(1 / channels))
    x = g.node("Conv", [x, weight, g.normal("head.bias", (2,), 0.1)], "head", kernel_shape=[1, 1])
    return g.build("unet", (batch, 3, size, size), x)


def build_transformer(
    layers: int = 4,
    width: int = 256,
    heads: int = 4,
    tokens: int = 128,
    batch: int | str = 1,
    seed: int = 0,
    norm_first: bool = True,
    name: str = "transformer",
) -> onnx.ModelProto:
    """Encoder layers, input (batch, tokens, width)."""
    g = GraphBuilder(seed)
    x = "input"
    for layer in range(layers):
        x = g.encoder(x, f"layer{layer}", tokens, width, heads, norm_first)
    return g.build(name, (batch, tokens, width), x)


def build_vit(
    batch: int | str = 1,
    size: int = 224,
    patch: int = 16,
    width: int = 192,
    heads: int = 3,
    layers: int = 12,
    classes: int = 1000,
    seed: int = 0,
) -> onnx.ModelProto:
    """ViT-tiny: patches by a convolution, the mean of the tokens is classified."""
    g = GraphBuilder(seed)
    tokens = (size // patch) ** 2
    spread = math.sqrt(1 / (3 * patch * patch))
    weight = g.normal("patches.weight", (width, 3, patch, patch), spread)
    bias = g.normal("patches.bias", (width,), 0.1)
    x = g.node(
        "Conv", ["input", weight, bias], "patches", kernel_shape=[patch] * 2, strides=[patch] * 2
    )
    x = g.node("Reshape", [x, g.constant("flat", [0, width, tokens], "int64")], "tokens")
    x = g.node("Transpose", [x], "embedded", perm=[0, 2, 1])
    x = g.node("Add", [x, g.normal("positions", (1, tokens, width), 0.1)], "positioned")
    for layer in range(layers):
        x = g.encoder(x, f"layer{layer}", tokens, width, heads, first=True)
    x = g.node("ReduceMean", [g.normalize(x, "norm", width)], "pooled", axes=[1], keepdims=0)
    return g.build("vit_tiny", (batch, 3, size, size), g.dense(x, "head", (width, classes)))


def build_kwt(batch: int | str = 1, seed: int = 0) -> onnx.ModelProto:
    """KWT-1, the keyword transformer: 98 frames of 40 coefficients, 12 layers of width 64 with one
    head, LayerNormalization last.
    """
    g = GraphBuilder(seed)
    x = g.dense("input", "frames", (40, 64))
    x = g.node("Add", [x, g.normal("positions", (1, 98, 64), 0.1)], "positioned")
    for layer in range(12):
        x = g.encoder(x, f"layer{layer}", 98, 64, 1, first=False)
    x = g.node("ReduceMean", [x], "pooled", axes=[1], keepdims=0)
    return g.build("kwt1", (batch, 98, 40), g.dense(x, "head", (64, 35)))


MODELS: dict[str, Callable[..., onnx.ModelProto]] = {
    "resnet18": lambda **options: build_resnet(18, **options),
    "resnet50": lambda **options: build_resnet(50, **options),
    "mobilenet_v1": build_mobilenet_v1,
    "mobilenet_v2": build_mobilenet_v2,
    "squeezenet": build_squeezenet,
    "efficientnet_b0": build_efficientnet,
    "unet": build_unet,
    "transformer": build_transformer,
    "bert": lambda **options: build_transformer(
        layers=3, width=768, heads=12, norm_first=False, name="bert", **options
    ),
    "vit_tiny": build_vit,
    "kwt1": build_kwt,
}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(f"usage: python {sys.argv[0]} {{{','.join(MODELS)}}} FILE.onnx")
    onnx.save(MODELS[sys.argv[1]](), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
