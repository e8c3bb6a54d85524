"""ONNX writer: lstm, gru and rnn -> LSTM, GRU and RNN.

    lstm(x @ w + b, r)  ->  LSTM(x, w, r, b)

ONNX multiplies the inputs too, so a product before the operator becomes part of the node. Without
one, the inputs are multiplied by the identity. What the operator cannot say is written as a Scan
(`recurrent_steps`).
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto
from tvm import relax
from tvm.ir import Call

from relayquant.config import RecurrentForm
from relayquant.formats.writers.onnx.builder import OnnxBuilder, read_affine
from relayquant.formats.writers.onnx.recurrent_steps import write_steps
from relayquant.ir.dialect.qnn.recurrent import CELLS, has_integer_weight, is_left_out
from relayquant.ir.rewrite.graph import call_name


def write_recurrent(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write one node, and the concatenation of its results."""
    kind = call_name(call).removeprefix("relax.qnn.")
    cell, name, attrs = CELLS[kind], var.name, call.attrs
    data, weight, scale, *others = call.args
    pairs = zip(cell.optional, others, strict=True)
    operands = {each: operand for each, operand in pairs if not is_left_out(each, operand)}
    is_integer = has_integer_weight(call)
    is_rounded = is_integer and builder.recurrent is RecurrentForm.STEPS
    is_spread = any(not operand.ty.ndim for operand in operands.values())
    if is_rounded or is_spread or getattr(attrs, "cell_clip", 0.0):
        return write_steps(builder, var, call, operands)
    state = builder.tensor(weight, name)
    if is_integer:
        affine = read_affine(scale, relax.const(0, "int32"), 1, 2)
        state = builder.dequantize(state, affine, "int8", builder.unique_name(f"{name}.state"))
    given = {each: builder.tensor(operand, name) for each, operand in operands.items()}
    units = int(weight.ty.shape.values[0])
    width = units * cell.gates
    source, matrix, bias = find_product(builder, builder.tensor(data, name)) or (
        builder.tensor(data, name),
        builder.constant(np.eye(width, dtype="float32"), f"{name}.identity"),
        None,
    )
    ones = builder.constant(np.array([0], "int64"), f"{name}.axis")

    def expand(tensor: str) -> str:
        return builder.step("Unsqueeze", [tensor, ones], f"{name}.expanded")

    def transpose(tensor: str) -> str:
        return expand(builder.step("Transpose", [tensor], f"{name}.transposed", perm=[1, 0]))

    def flatten(tensor: str, size: int) -> str:
        shape = builder.constant(np.array([1, size], "int64"), f"{name}.shape")
        return builder.step("Reshape", [tensor, shape], f"{name}.row")

    zeros = builder.constant(np.zeros((1, width), "float32"), f"{name}.zeros")
    inner = zeros
    if "hidden_bias" in given:
        start = builder.constant(np.zeros((1, width - units), "float32"), f"{name}.zeros")
        parts = [start, flatten(given["hidden_bias"], units)]
        inner = builder.step("Concat", parts, f"{name}.inner", axis=1)
    outer = zeros if bias is None else flatten(bias, width)
    inputs = [source, transpose(matrix), transpose(state)]
    inputs.append(builder.step("Concat", [outer, inner], f"{name}.bias", axis=1))
    inputs.append(given.get("lengths", ""))
    states = ("hidden", "cell")[: cell.states]
    inputs += [expand(given[each]) if each in given else "" for each in states]
    if "peepholes" in given:
        inputs.append(flatten(given["peepholes"], 3 * units))
    while not inputs[-1]:
        inputs.pop()
    settings = {
        "hidden_size": units,
        "activations": [str(each).capitalize() for each in attrs.activations],
        "direction": "reverse" if attrs.is_reversed else "forward",
    }
    if float(attrs.clip):
        settings["clip"] = float(attrs.clip)
    for each in ("linear_before_reset", "input_forget"):
        if getattr(attrs, each, False):
            settings[each] = 1
    outputs = [builder.unique_name(f"{name}.{each}") for each in ("steps", *states)]
    builder.add_node(kind.upper(), inputs, outputs, f"{name}/{kind.upper()}", **settings)
    axis = builder.constant(np.array([1], "int64"), f"{name}.axis")
    steps = builder.step("Squeeze", [outputs[0], axis], f"{name}.squeezed")
    return builder.emit("Concat", [*outputs[1:], steps], name, axis=0)


def find_product(builder: OnnxBuilder, name: str) -> tuple[str, str, str | None] | None:
    """Return (data, matrix, bias or None) of the product that computes a tensor.

    None if it is not a product with a constant matrix.
    """
    makers = {output: node for node in builder.nodes for output in node.output}
    constants = {tensor.name for tensor in builder.constants}

    def find(tensor: str) -> NodeProto | None:
        node = makers.get(tensor)
        while node is not None and node.op_type == "Identity":
            node = makers.get(node.input[0])
        return node

    def is_constant(tensor: str) -> bool:
        node = find(tensor)
        is_integer = node is not None and node.op_type == "DequantizeLinear"
        return (node.input[0] if is_integer and node is not None else tensor) in constants

    node, bias = find(name), None
    if node is not None and node.op_type == "Add":
        product, bias = node.input if is_constant(node.input[1]) else reversed(node.input)
        node = find(product) if is_constant(bias) else None
    if node is None or node.op_type != "MatMul" or not is_constant(node.input[1]):
        return None
    return node.input[0], node.input[1], bias


RECURRENT_WRITERS = {f"relax.qnn.{name}": write_recurrent for name in CELLS}
