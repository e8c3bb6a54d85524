"""Small quantized ONNX models for the tests, and what ONNX Runtime says of them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx_models import make_onnx


class GraphBuilder:
    """Collects nodes and constants of one model; every method returns the name of a tensor."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(seed)
        self.count = 0

    def fresh(self, base: str) -> str:
        self.count += 1
        return f"{base}{self.count}"

    def constant(self, array, name: str = "") -> str:
        name = name or self.fresh("c")
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op: str, *inputs: str, domain: str = "", outputs: int = 1, **attrs):
        names = [self.fresh(op.lower()) for _ in range(outputs)]
        self.nodes.append(
            helper.make_node(op, list(inputs), names, name=names[0], domain=domain, **attrs)
        )
        return names[0] if outputs == 1 else names

    def quantize(self, data: str, scale, zero_point) -> str:
        """`zero_point` is a numpy scalar or array of the dtype wanted."""
        return self.node(
            "QuantizeLinear", data, self.constant(np.float32(scale)), self.constant(zero_point)
        )

    def dequantize(self, data: str, scale, zero_point, axis: int = 1) -> str:
        return self.node(
            "DequantizeLinear",
            data,
            self.constant(np.asarray(scale, "float32")),
            self.constant(zero_point),
            axis=axis,
        )

    def round_trip(self, data: str, scale, zero_point) -> str:
        return self.dequantize(self.quantize(data, scale, zero_point), scale, zero_point)

    def weight(self, shape, *, axis: int | None = 0, dtype: str = "int8", zero_point: int = 0):
        """(dequantized weight, its scale): per channel along `axis`, None for one scale."""
        limits = np.iinfo(dtype)
        integers = self.random.integers(limits.min, limits.max + 1, shape).astype(dtype)
        size = () if axis is None else (shape[axis],)
        scale = self.random.uniform(0.5, 1.5, size).astype("float32") / np.float32(500)
        zero = np.full(size, zero_point, dtype)
        return self.dequantize(self.constant(integers), scale, zero, axis=axis or 0), scale

    def bias(self, length: int, scale) -> str:
        integers = self.random.integers(-3000, 3000, length).astype("int32")
        scale = np.asarray(scale, "float32")
        return self.dequantize(self.constant(integers), scale, np.zeros(scale.shape, "int32"), 0)

    def model(self, inputs: dict, outputs: dict, opset: int = 13) -> onnx.ModelProto:
        """`inputs` and `outputs`: name -> (dtype, shape)."""
        return make_onnx(self.nodes, inputs, outputs, self.constants, opset)
