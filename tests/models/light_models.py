"""The "light" models of the onnx package, networks of the ImageNet years, with weights drawn here.

The package keeps most of their weights as tensors full of one number: all channels of all layers
would be equal, and their values grow or vanish with the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"

SHAPE = (1, 3, 224, 224)

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def draw_weight(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal values that keep the variance of what they are multiplied with (He et al. 2015)."""
    values = rng.standard_normal(shape, "float32")
    return values * np.float32(np.sqrt(2 / np.prod(shape[1:])))


def draw_factor(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.8, 1.2, shape).astype("float32")


def draw_offset(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, "float32") * np.float32(0.1)


#: (operator, which of its inputs) -> how that constant is drawn
ROLES: dict[tuple[str, int], Draw] = {
    ("Conv", 1): draw_weight,
    ("Conv", 2): draw_offset,
    ("Gemm", 1): draw_weight,
    ("Gemm", 2): draw_offset,
    ("BatchNormalization", 1): draw_factor,
    ("BatchNormalization", 2): draw_offset,
    ("BatchNormalization", 3): draw_offset,
    ("BatchNormalization", 4): draw_factor,
    ("Mul", 1): draw_factor,
    ("Add", 1): draw_offset,
}


def find_path(name: str) -> Path:
    """Of the file of a model."""
    return FOLDER / f"light_{name}.onnx"


def load_light(name: str) -> onnx.ModelProto:
    """A model with drawn weights, the same in every run, without its softmax: the probabilities
    that random weights give are 0 and 1, which hides what happened before.
    """
    model = onnx.load(str(find_path(name)))
    graph, rng = model.graph, np.random.default_rng(0)
    last = graph.node[-1]
    if last.op_type == "Softmax":
        graph.output[0].name = last.input[0]
        graph.output[0].type.tensor_type.ClearField("shape")
        del graph.node[-1]
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            shapes[node.output[0]] = tuple(read_initializer(graph, node.input[0]))
    # Factors of channels are unsqueezed before they are multiplied.
    sources = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Unsqueeze"}
    drawn: dict[str, np.ndarray] = {}
    for node in graph.node:
        for at, operand in enumerate(node.input):
            draw, tensor = ROLES.get((node.op_type, at)), sources.get(operand, operand)
            if draw is not None and tensor in shapes:
                drawn[tensor] = draw(rng, shapes[tensor])
    kept = [node for node in graph.node if node.output[0] not in drawn]
    tensors = [tensor for tensor in graph.initializer if tensor.name not in drawn]
    inputs = [info for info in graph.input if info.name not in drawn]
    tensors += [numpy_helper.from_array(array, name) for name, array in drawn.items()]
    for field, values in ((graph.node, kept), (graph.initializer, tensors), (graph.input, inputs)):
        copies = [type(value).FromString(value.SerializeToString()) for value in values]
        del field[:]
        field.extend(copies)
    return model


def read_initializer(graph: onnx.GraphProto, name: str) -> list[int]:
    (tensor,) = [tensor for tensor in graph.initializer if tensor.name == name]
    return numpy_helper.to_array(tensor).tolist()
