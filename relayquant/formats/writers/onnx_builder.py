"""Export, the ONNX side: collects nodes and constants, and knows of every value of the module under
which tensors it is there, as integers or as real numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tvm import relax

from relayquant.errors import ModelError
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.function import find_free_name
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape

#: from here on QuantizeLinear knows 16-bit and 4-bit integers (ONNX, operator QuantizeLinear), and
#: Pad wraps around (since 19)
WIDE_OPSET = 21
#: has LayerNormalization, and Clip and MaxPool of 8-bit integers
BASE_OPSET = 17
#: from here on AveragePool has dilations
DILATED_OPSET = 19
#: from here on ONNX's own inference counts windows of ceil_mode as everybody does
CEIL_OPSET = 22

WIDE = ("int16", "uint16", "int4")
#: operators that blocks are written for, which DequantizeLinear has since 21
GROUPED = ("relax.qnn.grouped_dense", "relax.qnn.grouped_take")


@dataclass(frozen=True, eq=False)
class Affine:
    """Scale and zero point of a value, as constants; axis None for one of each."""

    scale: np.ndarray
    zero_point: np.ndarray
    axis: int | None = None


def read_affine(scale: relax.Expr, zero_point: relax.Expr, axis: int, rank: int) -> Affine:
    """Parameters of an operator of the dialect.

    Raises:
        ModelError: they are computed at run time.
    """
    arrays = constant_value(scale), constant_value(zero_point)
    if arrays[0] is None or arrays[1] is None:
        raise ModelError(
            "export_onnx: quantization parameters that are computed at run time have no QDQ form; "
            "allowed: constants.",
            code="RQ203",
        )
    size = max(array.size for array in arrays)
    if size == 1:
        return Affine(arrays[0].reshape(()), arrays[1].reshape(()))
    full = [np.broadcast_to(array.reshape(-1), size) for array in arrays]
    return Affine(full[0], full[1], axis % rank)


def find_opset(graph: Graph, var: relax.Var) -> int:
    """The first opset that a value can be written in."""
    call, name = graph.call_of(var), graph.op_name(var)
    if tensor_dtype(var) in WIDE or name in GROUPED:
        return WIDE_OPSET
    if call is not None and name == "relax.nn.pad" and str(call.attrs.pad_mode) == "circular":
        return WIDE_OPSET
    if call is None or not hasattr(call.attrs, "pool_size"):
        return BASE_OPSET
    shape, layout = tensor_shape(call.args[0]), str(call.attrs.layout)
    sizes = zip(layout, shape or layout, strict=True)
    if all(isinstance(size, int) for letter, size in sizes if letter in "DHW"):
        return BASE_OPSET  # where both have other forms
    if call.attrs.ceil_mode:
        return CEIL_OPSET
    is_dilated = "avg_pool" in name and any(int(step) != 1 for step in call.attrs.dilation)
    return DILATED_OPSET if is_dilated else BASE_OPSET


class OnnxBuilder:
    """State of one export.

    Attributes:
        graph: The module.
        opset: Of the file.
        nodes, constants: What was emitted.
        real: Value -> tensor of its real values.
        integers: Value -> tensor of its integers.
        rows: Integers of rows, or the pair with their scales -> tensor that they are made of.
        grouped: How products with weights in groups are written.
        merged: Values that a node before them has computed already (a bias within a convolution).
    """

    def __init__(self, graph: Graph, grouped: enum.Enum | None = None) -> None:
        self.graph, self.grouped = graph, grouped
        self.opset = max([BASE_OPSET, *(find_opset(graph, var) for var in graph.order)])
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.real: dict[relax.Var, str] = {}
        self.integers: dict[relax.Var, str] = {}
        self.rows: dict[relax.Expr, str] = {}
        self.merged: set[relax.Var] = set()
        self._taken: set[str] = {var.name for var in graph.order}

    def unique_name(self, base: str) -> str:
        """`base`, or with a number behind it; taken from now on."""
        name = find_free_name(base, self._taken)
        self._taken.add(name)
        return name

    def emit(self, op: str, inputs: Sequence[str], output: str, **attrs: Any) -> str:
        """A node that computes tensor `output`; returns its name."""
        name = f"{output}/{op}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=name, **attrs))
        return output

    def step(self, op: str, inputs: Sequence[str], base: str, **attrs: Any) -> str:
        """A node of a tensor that no value of the module is."""
        return self.emit(op, inputs, self.unique_name(base), **attrs)

    def constant(self, array: Any, base: str) -> str:
        """A constant tensor; returns its name."""
        name = self.unique_name(base)
        self.constants.append(numpy_helper.from_array(np.array(array, order="C"), name))
        return name

    def dequantize(self, tensor: str, affine: Affine, dtype: str, output: str) -> str:
        """Node DequantizeLinear from `tensor` to `output`."""
        inputs = [tensor, *self._parameters(affine, dtype, output)]
        return self.emit("DequantizeLinear", inputs, output, **_axis(affine))

    def quantize(self, tensor: str, affine: Affine, dtype: str, output: str) -> str:
        """Node QuantizeLinear from `tensor` to `output`."""
        inputs = [tensor, *self._parameters(affine, dtype, output)]
        return self.emit("QuantizeLinear", inputs, output, **_axis(affine))

    def _parameters(self, affine: Affine, dtype: str, base: str) -> list[str]:
        return [
            self.constant(affine.scale.astype("float32"), f"{base}.scale"),
            self.constant(affine.zero_point.astype(dtype), f"{base}.zero_point"),
        ]

    # -- operands ----------------------------------------------------------------------------------

    def tensor(self, expr: relax.Expr, base: str) -> str:
        """The tensor of an operand as it is, integers or floats."""
        array = constant_value(expr)
        if array is not None:
            return self.constant(array, f"{base}.constant")
        if isinstance(expr, relax.Var):
            found = self.integers.get(expr) or self.real.get(expr)
            if found is not None:
                return found
        raise ModelError(
            f"export_onnx: an operand of {base!r} is no tensor of the module.", code="RQ203"
        )

    def is_accumulator(self, expr: relax.Expr) -> bool:
        """Whether integers are there as real values only."""
        is_known = isinstance(expr, relax.Var) and expr in self.real
        return is_known and not tensor_dtype(expr).startswith("float")

    def real_tensor(self, expr: relax.Expr, affine: Affine | None, base: str) -> str:
        """The real values of an integer operand with these parameters; an accumulator has none but
        its real values.
        """
        if self.is_accumulator(expr):
            return self.real[expr]
        if affine is None:
            return self.tensor(expr, base)
        name = self.unique_name(f"{base}.real")
        return self.dequantize(self.tensor(expr, base), affine, tensor_dtype(expr), name)


def _axis(affine: Affine) -> Mapping[str, int]:
    return {} if affine.axis is None else {"axis": affine.axis}
