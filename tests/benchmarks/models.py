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
        """Conv without bias, BatchNormalization, and Relu or Clip(0, 6); channels are (in, out)."""
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
        return y

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


def build_transformer(
    layers: int = 4,
    width: int = 256,
    heads: int = 4,
    tokens: int = 128,
    batch: int | str = 1,
    seed: int = 0,
) -> onnx.ModelProto:
    """Encoder layers (LayerNormalization first, GELU by Erf), input (batch, tokens, width)."""
    g = GraphBuilder(seed)
    depth = width // heads
    split = g.weight("split_heads", np.array([0, tokens, heads, depth], "int64"))
    join = g.weight("join_heads", np.array([0, tokens, width], "int64"))
    constants = {"half": 0.5, "one": 1.0, "sqrt2": math.sqrt(2), "scale": math.sqrt(1 / depth)}
    for key, value in constants.items():
        g.weight(key, np.array(value, "float32"))

    def normalize(x: str, name: str) -> str:
        scale = g.weight(f"{name}.scale", g.rng.uniform(0.7, 1.3, width).astype("float32"))
        shift = g.normal(f"{name}.shift", (width,), 0.1)
        return g.node("LayerNormalization", [x, scale, shift], name, axis=-1)

    def split_heads(x: str, name: str, axes: list[int]) -> str:
        y = g.node("Reshape", [x, split], f"{name}/split")
        return g.node("Transpose", [y], f"{name}/heads", perm=axes)

    x = "input"
    for layer in range(layers):
        name = f"layer{layer}"
        y = normalize(x, f"{name}.norm1")
        q, k, v = (g.dense(y, f"{name}.{key}", (width, width)) for key in "qkv")
        q = split_heads(q, f"{name}.q", [0, 2, 1, 3])
        k = split_heads(k, f"{name}.k", [0, 2, 3, 1])
        v = split_heads(v, f"{name}.v", [0, 2, 1, 3])
        scores = g.node("MatMul", [q, k], f"{name}/scores")
        scores = g.node("Mul", [scores, "scale"], f"{name}/scaled")
        share = g.node("Softmax", [scores], f"{name}/softmax", axis=-1)
        y = g.node("MatMul", [share, v], f"{name}/context")
        y = g.node("Transpose", [y], f"{name}/joined", perm=[0, 2, 1, 3])
        y = g.node("Reshape", [y, join], f"{name}/flat")
        y = g.dense(y, f"{name}.out", (width, width), gain=0.3)
        x = g.node("Add", [x, y], f"{name}/add1")
        y = normalize(x, f"{name}.norm2")
        y = g.dense(y, f"{name}.up", (width, 4 * width))
        bell = g.node("Div", [y, "sqrt2"], f"{name}/gelu.1")
        bell = g.node("Erf", [bell], f"{name}/gelu.2")
        bell = g.node("Add", [bell, "one"], f"{name}/gelu.3")
        y = g.node("Mul", [y, bell], f"{name}/gelu.4")
        y = g.node("Mul", [y, "half"], f"{name}/gelu")
        y = g.dense(y, f"{name}.down", (4 * width, width), gain=0.3)
        x = g.node("Add", [x, y], f"{name}/add2")
    return g.build("transformer", (batch, tokens, width), x)


MODELS: dict[str, Callable[..., onnx.ModelProto]] = {
    "resnet18": lambda **options: build_resnet(18, **options),
    "resnet50": lambda **options: build_resnet(50, **options),
    "mobilenet_v2": build_mobilenet_v2,
    "transformer": build_transformer,
}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(f"usage: python {sys.argv[0]} {{{','.join(MODELS)}}} FILE.onnx")
    onnx.save(MODELS[sys.argv[1]](), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
