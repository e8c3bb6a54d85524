"""ONNX writer: collects nodes and constants. It knows the tensors of each value of the module, with
its integers or its real values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import helper, numpy_helper
from tvm import relax

from relayquant.config import GroupedForm, RecurrentForm
from relayquant.errors import ModelError
from relayquant.ir.dialect.qnn.grouped import GROUPED_FORMS
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.function import find_free_name
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape

#: First opset in which QuantizeLinear supports 16-bit and 4-bit integers (ONNX, operator
#: QuantizeLinear), and Pad wraps around (since 19).
WIDE_OPSET = 21
#: First opset with LayerNormalization, and with Clip and MaxPool of 8-bit integers.
BASE_OPSET = 17
#: First opset with dilations of AveragePool.
DILATED_OPSET = 19
#: First opset in which ONNX's own inference counts the windows of ceil_mode as runtimes do.
CEIL_OPSET = 22

#: First opset with BitwiseAnd and its kind.
BITWISE_OPSET = 18
BITWISE = tuple(f"relax.bitwise_{name}" for name in ("and", "or", "xor", "not"))

WIDE = ("int16", "uint16", "int4")
#: Operators that need blocks, which DequantizeLinear supports since 21.
GROUPED = tuple(f"relax.qnn.{name}" for name in GROUPED_FORMS.values())


@dataclass(frozen=True, eq=False)
class Affine:
    """Scale and zero point of a value, as constants. `axis` is None if there is one of each."""

    scale: np.ndarray
    zero_point: np.ndarray
    axis: int | None = None


def read_affine(scale: relax.Expr, zero_point: relax.Expr, axis: int, rank: int) -> Affine:
    """Read the constant quantization parameters of an operator of the dialect.

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
    """Return the first opset that can express a value."""
    call, name = graph.call_of(var), graph.op_name(var)
    if name in BITWISE and tensor_dtype(var) != "bool":
        return BITWISE_OPSET
    if tensor_dtype(var) in WIDE or name in GROUPED:
        return WIDE_OPSET
    if call is not None and name == "relax.nn.pad" and str(call.attrs.pad_mode) == "circular":
        return WIDE_OPSET
    if call is None or not hasattr(call.attrs, "pool_size"):
        return BASE_OPSET
    shape, layout = tensor_shape(call.args[0]), str(call.attrs.layout)
    sizes = zip(layout, shape or layout, strict=True)
    if all(isinstance(size, int) for letter, size in sizes if letter in "DHW"):
        return BASE_OPSET  # ceil_mode and dilations have other forms at known sizes
    if call.attrs.ceil_mode:
        return CEIL_OPSET
    is_dilated = "avg_pool" in name and any(int(step) != 1 for step in call.attrs.dilation)
    return DILATED_OPSET if is_dilated else BASE_OPSET


class OnnxBuilder:
    """State of one export.

    Attributes:
        graph: The module.
        opset: Opset of the file.
        nodes, constants: The emitted nodes and constants.
        real: Value -> tensor of its real values.
        integers: Value -> tensor of its integers.
        rows: Integers of rows, or the pair with their scales -> tensor that they are computed from.
        parts: Tuple -> the tensors of its parts.
        grouped: How products with grouped weights are written.
        recurrent: How recurrent layers with integer weights are written.
        units: Accumulators whose real values are their integers: the scale comes later, because it
            is computed at run time.
        sizes: Symbolic size that is read from integers -> its tensor, int64 (1,).
        merged: Values that an earlier node has already computed (a bias inside a convolution).
    """

    def __init__(
        self,
        graph: Graph,
        grouped: GroupedForm = GroupedForm.BLOCKS,
        recurrent: RecurrentForm = RecurrentForm.STEPS,
    ) -> None:
        self.graph, self.grouped, self.recurrent = graph, grouped, recurrent
        self.opset = max([BASE_OPSET, *(find_opset(graph, var) for var in graph.order)])
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.real: dict[relax.Var, str] = {}
        self.integers: dict[relax.Var, str] = {}
        self.rows: dict[relax.Expr, str] = {}
        self.parts: dict[relax.Expr, Sequence[str]] = {}
        self.units: set[relax.Expr] = set()
        self.sizes: dict[tvm.tirx.Var, str] = {}
        self.merged: set[relax.Var] = set()
        self._taken: set[str] = {var.name for var in graph.order}

    def unique_name(self, base: str) -> str:
        """Return `base`, or `base` with a number appended if it is taken. The name is taken from
        now on.
        """
        name = find_free_name(base, self._taken)
        self._taken.add(name)
        return name

    def emit(self, op: str, inputs: Sequence[str], output: str, **attrs: Any) -> str:
        """Add a node that computes tensor `output`, and return its name."""
        self.add_node(op, inputs, [output], f"{output}/{op}", **attrs)
        return output

    def add_node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], name: str, **attrs: Any
    ) -> None:
        """Add a node with several outputs."""
        self.nodes.append(helper.make_node(op, list(inputs), list(outputs), name=name, **attrs))

    def step(self, op: str, inputs: Sequence[str], base: str, **attrs: Any) -> str:
        """Add a node for a tensor that is not a value of the module."""
        return self.emit(op, inputs, self.unique_name(base), **attrs)

    def reduce(
        self, op: str, data: str, axes: Sequence[int], output: str, keeps: bool = True
    ) -> str:
        """Add a reduction. Axes are an attribute before opset 18, an input from then on."""
        keep = int(keeps)
        if self.opset < 18 and op != "ReduceSum":
            return self.emit(op, [data], output, axes=list(axes), keepdims=keep)
        given = self.constant(np.array(axes, "int64"), f"{output}.axes")
        return self.emit(op, [data, given], output, keepdims=keep)

    @contextlib.contextmanager
    def collect(self) -> Iterator[list[onnx.NodeProto]]:
        """Add the nodes of a block to a list of their own: the body of a Scan. Its constants are
        those of the graph.
        """
        outer, self.nodes = self.nodes, []
        try:
            yield self.nodes
        finally:
            self.nodes = outer

    def constant(self, array: Any, base: str) -> str:
        """Add a constant tensor and return its name."""
        name = self.unique_name(base)
        self.constants.append(numpy_helper.from_array(np.array(array, order="C"), name))
        return name

    def dequantize(self, tensor: str, affine: Affine, dtype: str, output: str) -> str:
        """Add DequantizeLinear from `tensor` to `output`."""
        inputs = [tensor, *self._parameters(affine, dtype, output)]
        return self.emit("DequantizeLinear", inputs, output, **_axis(affine))

    def quantize(self, tensor: str, affine: Affine, dtype: str, output: str) -> str:
        """Add QuantizeLinear from `tensor` to `output`."""
        inputs = [tensor, *self._parameters(affine, dtype, output)]
        return self.emit("QuantizeLinear", inputs, output, **_axis(affine))

    def _parameters(self, affine: Affine, dtype: str, base: str) -> list[str]:
        return [
            self.constant(affine.scale.astype("float32"), f"{base}.scale"),
            self.constant(affine.zero_point.astype(dtype), f"{base}.zero_point"),
        ]

    # -- operands ----------------------------------------------------------------------------------

    def tensor(self, expr: relax.Expr, base: str) -> str:
        """Return the tensor of an operand as it is, integers or floats."""
        array = constant_value(expr)
        if array is not None:
            return self.constant(array, f"{base}.constant")
        if isinstance(expr, relax.Var):
            found = self.integers.get(expr) or self.real.get(expr)
            if found is not None:
                return found
        raise ModelError(
            f"export_onnx: an operand of {base!r} is not a tensor of the module.", code="RQ203"
        )

    def is_accumulator(self, expr: relax.Expr) -> bool:
        """Return whether an integer value exists only as a tensor of real values."""
        is_known = isinstance(expr, relax.Var) and expr in self.real
        return is_known and not tensor_dtype(expr).startswith("float")

    def real_tensor(self, expr: relax.Expr, affine: Affine | None, base: str) -> str:
        """Return the tensor of an integer operand's real values, with these parameters. An
        accumulator has only a tensor of real values.
        """
        if self.is_accumulator(expr):
            return self.real[expr]
        if affine is None:
            return self.tensor(expr, base)
        name = self.unique_name(f"{base}.real")
        return self.dequantize(self.tensor(expr, base), affine, tensor_dtype(expr), name)


def _axis(affine: Affine) -> Mapping[str, int]:
    return {} if affine.axis is None else {"axis": affine.axis}
