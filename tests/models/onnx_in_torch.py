"""An ONNX model as a PyTorch module that runs it node by node, to have its program in both formats.

Needs torch: import it behind `pytest.importorskip("torch")`.
"""

from __future__ import annotations

from typing import Any

import onnx
import torch
from onnx import helper, numpy_helper
from torch import nn

DTYPES = {onnx.TensorProto.FLOAT: torch.float32, onnx.TensorProto.INT32: torch.int32}


def convolve(x, w, *, dilations, strides, kernel_shape, group, pads=(0, 0, 0, 0)):
    assert pads[:2] == pads[2:] or list(pads[:2]) == list(pads[2:])
    return nn.functional.conv2d(x, w, None, strides, list(pads[:2]), dilations, group)


def cut(x, begins: list[int], ends: list[int], axes: list[int]):
    for begin, end, axis in zip(begins, ends, axes, strict=True):
        x = x.narrow(axis, begin, min(end, x.shape[axis]) - begin)
    return x


#: ONNX operator -> (tensors and lists, attributes) -> tensor
OPERATORS = {
    "Add": lambda a, b: a + b,
    "Cast": lambda a, to: a.to(DTYPES[to]),
    "Conv": convolve,
    "Div": lambda a, b: a / b,
    "Equal": lambda a, b: a == b,
    "Exp": torch.exp,
    "GlobalMaxPool": lambda a: a.amax(tuple(range(2, a.ndim)), keepdim=True),
    "MatMul": torch.matmul,
    "Max": torch.maximum,
    "Mul": lambda a, b: a * b,
    "Reciprocal": torch.reciprocal,
    "ReduceMax": lambda a, axes, keepdims: a.amax(axes, keepdim=bool(keepdims)),
    "ReduceSum": lambda a, axes, keepdims, noop_with_empty_axes: a.sum(axes, bool(keepdims)),
    "Reshape": lambda a, shape: a.reshape(shape),
    "Slice": cut,
    "Sqrt": torch.sqrt,
    "Squeeze": lambda a, axes: a.squeeze(tuple(axes)),
    "Sub": lambda a, b: a - b,
    "Tanh": torch.tanh,
    "Transpose": lambda a, perm: a.permute(perm),
    "Unsqueeze": lambda a, axes: a.unsqueeze(axes[0]),
}


class OnnxModule(nn.Module):
    """The graph of a model with one input, batch normalizations and such left out."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        self.nodes = list(model.graph.node)
        self.lists: dict[str, list[int]] = {}
        weights = {info.name for info in model.graph.initializer}
        (self.argument,) = [i.name for i in model.graph.input if i.name not in weights]
        (self.result,) = [info.name for info in model.graph.output]
        for tensor in model.graph.initializer:
            array = numpy_helper.to_array(tensor)
            if str(array.dtype) == "int64":
                self.lists[tensor.name] = array.tolist()
            else:
                self.register_buffer(tensor.name, torch.from_numpy(array.copy()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: dict[str, Any] = {self.argument: x, **self.lists, **dict(self.named_buffers())}
        for node in self.nodes:
            attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            operands = [values[name] for name in node.input]
            values[node.output[0]] = OPERATORS[node.op_type](*operands, **attrs)
        return values[self.result]
