"""ONNX reader, on the graph: a network in float16 is computed in float32, as ONNX Runtime does on
CPUs.

The rows of the dialect match float32, and float32 kernels are faster. A float16 value between two
quantized values is rounded to a step of the second one, so its precision hardly matters. Inputs and
outputs stay float16:

    x (float16) -> Cast -> float32 operators -> Cast -> y (float16)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relayquant.formats.readers.onnx.graph.functions import list_nodes
from relayquant.ir.rewrite.function import find_free_name

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT

#: Attributes with the dtype of a result.
TYPES = ("dtype", "output_dtype", "to")

#: Operator with a grouped weight -> index of its scales input.
SCALES = {"MatMulNBits": 2}

#: Name parts of operators that take or return quantized values.
QUANTIZED = (
    "QuantizeLinear",
    "MatMulInteger",
    "NBits",
    "Bnb4",
    "BlockQuantized",
    "DynamicQuantize",
)

#: Operators that have the weights of a network.
PRODUCTS = {"Conv", "ConvTranspose", "GRU", "Gemm", "LSTM", "MatMul", "RNN"}


def widen_halves(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with float32 instead of float16, except for inputs and outputs. The same
    model if no product with a weight and no quantized operator has float16.
    """
    if not has_halves(model.graph):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [info.name for info in select_halves(graph.input) if info.name not in constants]
    outputs = [info.name for info in select_halves(graph.output) if info.name not in inputs]
    taken = {name for node in list_nodes(graph.node) for name in (*node.input, *node.output)}
    renamed: dict[str, str] = {}
    for name in (*inputs, *outputs):
        renamed[name] = find_free_name(f"{name}.float32", taken)
        taken.add(renamed[name])
    widen_graph(graph, renamed, find_scales(graph))
    before = [make_cast(name, renamed[name], FLOAT) for name in inputs]
    behind = [make_cast(renamed[name], name, HALF) for name in outputs]
    nodes = [*before, *graph.node, *behind]
    del graph.node[:]
    graph.node.extend(nodes)
    return copy


def has_halves(graph: onnx.GraphProto) -> bool:
    """Return whether a product has a float16 weight, or a quantized operator reads a float16 value,
    as far as the model declares types, or returns one.
    """
    nodes = list(list_nodes(graph.node))
    weights = {tensor.name for tensor in graph.initializer if tensor.data_type == HALF}
    for node in nodes:
        if any(gives_half(attribute) for attribute in node.attribute):
            weights.update(node.output)
    halves = {info.name for info in select_halves((*graph.input, *graph.value_info))} | weights
    return any(
        halves.intersection((*node.input, *node.output))
        if any(part in node.op_type for part in QUANTIZED)
        else node.op_type in PRODUCTS and weights.intersection(node.input[1:])
        for node in nodes
    )


def gives_half(attribute: onnx.AttributeProto) -> bool:
    """Return whether an attribute makes the result of its node float16."""
    is_type = attribute.name in TYPES and attribute.i == HALF
    return is_type or (attribute.name == "value" and attribute.t.data_type == HALF)


def select_halves(infos: Iterable[onnx.ValueInfoProto]) -> list[onnx.ValueInfoProto]:
    """Return the float16 tensors among values."""
    return [info for info in infos if info.type.tensor_type.elem_type == HALF]


def find_scales(graph: onnx.GraphProto) -> set[str]:
    """Return the names of tensors that are only read as scales of grouped weights. These may stay
    float16.
    """
    scales, others = set(), set()
    for node in list_nodes(graph.node):
        for at, name in enumerate(node.input):
            is_scale = node.op_type in SCALES and at == SCALES[node.op_type]
            (scales if is_scale else others).add(name)
    return scales - others


def widen_graph(graph: onnx.GraphProto, renamed: Mapping[str, str], kept: Collection[str]) -> None:
    """Make a graph float32 in place, including bodies. The types of its inputs and outputs and the
    `kept` constants stay.
    """
    for tensor in graph.initializer:
        if tensor.name not in kept:
            widen_tensor(tensor)
        tensor.name = renamed.get(tensor.name, tensor.name)
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
        for attribute in node.attribute:
            if attribute.name in TYPES and attribute.i == HALF:
                attribute.i = FLOAT
            widen_tensor(attribute.t)
            for inner in (attribute.g, *attribute.graphs):
                widen_graph(inner, renamed, kept)
                for info in (*inner.input, *inner.output):
                    info.name = renamed.get(info.name, info.name)
                for info in select_halves((*inner.input, *inner.output)):
                    info.type.tensor_type.elem_type = FLOAT


def widen_tensor(tensor: onnx.TensorProto) -> None:
    """Make a float16 tensor float32 in place. Other tensors stay."""
    if tensor.data_type == HALF:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def make_cast(name: str, output: str, dtype: int) -> onnx.NodeProto:
    """Make a node that casts tensor `name`."""
    return helper.make_node("Cast", [name], [output], name=output, to=dtype)
