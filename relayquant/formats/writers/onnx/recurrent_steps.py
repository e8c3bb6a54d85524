"""ONNX writer: lstm, gru and rnn -> Scan, whose body is one step.

    lstm(x, int8 w, scale)  ->  Scan(h, c, x): h', c' = step(x + round(h / s) @ w * s * scale)

LSTM, GRU and RNN of ONNX cannot quantize the hidden state in each step, nor clip a cell. The body
has the steps of `reference.qnn.recurrent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from onnx import TensorProto, helper
from tvm import relax
from tvm.ir import Call

from relayquant.formats.writers.onnx.builder import OnnxBuilder
from relayquant.formats.writers.onnx.grouped import write_levels
from relayquant.ir.dialect.qnn.recurrent import CELLS, has_integer_weight
from relayquant.ir.rewrite.graph import constant_value


def write_steps(
    builder: OnnxBuilder, var: relax.Var, call: Call, operands: Mapping[str, relax.Expr]
) -> str:
    """Write Scan, and the concatenation of its results.

    Args:
        builder, var, call: As of every writer.
        operands: The optional operands that are not left out.
    """
    name, attrs = var.name, call.attrs
    kind = call.op.name.removeprefix("relax.qnn.")
    cell, units = CELLS[kind], int(call.args[1].ty.shape.values[0])
    data = builder.tensor(call.args[0], name)
    given = {each: builder.tensor(operand, name) for each, operand in operands.items()}
    parts = NodeWriter(builder, name)
    sizes = builder.step("Shape", [data], f"{name}.sizes")
    batch, count = (parts.take(sizes, at, at + 1, 0) for at in (1, 0))
    shape = parts.apply("Concat", batch, parts.integers([units]), axis=0)
    states = ("hidden", "cell")[: cell.states]
    inputs = [parts.apply("Expand", given.get(each) or parts.number(0), shape) for each in states]
    elements = [data]
    if "lengths" in given:
        zero, one = (builder.constant(np.array(at, "int64"), f"{name}.range") for at in (0, 1))
        elements.append(parts.apply("Range", zero, parts.apply("Squeeze", count), one))
        given["lengths"] = parts.apply("Cast", given["lengths"], to=TensorProto.INT64)
        if operands["lengths"].ty.ndim:
            given["lengths"] = parts.apply("Unsqueeze", given["lengths"], parts.integers([1]))
    bounds = [0, cell.gates * units]
    if kind == "gru" and not attrs.linear_before_reset:
        bounds.insert(1, 2 * units)  # the last gate multiplies another row
    weights = [list_columns(parts, call, *pair) for pair in pairwise(bounds)]

    old = [builder.unique_name(f"{name}.old_{each}") for each in states]
    read = [builder.unique_name(f"{name}.{each}") for each in ("gates", "step")[: len(elements)]]
    with builder.collect() as nodes:
        step = StepWriter(parts, call, units, weights, given)
        new = step.write(kind, read[0], old)
        result = new[0]
        if "lengths" in given:
            is_inside = parts.apply("Less", read[1], given["lengths"])
            result = parts.apply("Where", is_inside, new[0], parts.number(0))
            new = [parts.apply("Where", is_inside, *pair) for pair in zip(new, old, strict=True)]
        ends = [parts.apply("Identity", value) for value in (*new, result)]
    types = [TensorProto.FLOAT] * (len(old) + 1) + [TensorProto.INT64] * (len(read) - 1)
    body = helper.make_graph(
        nodes,
        f"{name}.step",
        [
            helper.make_tensor_value_info(each, dtype, None)
            for each, dtype in zip((*old, *read), types, strict=True)
        ],
        [helper.make_tensor_value_info(each, TensorProto.FLOAT, None) for each in ends],
    )
    outputs = [builder.unique_name(f"{name}.{each}") for each in (*states, "steps")]
    direction = int(attrs.is_reversed)
    builder.add_node(
        "Scan",
        [*inputs, *elements],
        outputs,
        f"{name}/Scan",
        body=body,
        num_scan_inputs=len(elements),
        scan_input_directions=[direction] * len(elements),
        scan_output_directions=[direction],
    )
    axes = parts.integers([0])
    last = [parts.apply("Unsqueeze", each, axes) for each in outputs[:-1]]
    return builder.emit("Concat", [*last, outputs[-1]], name, axis=0)


def list_columns(parts: NodeWriter, call: Call, begin: int, end: int) -> tuple[str, str | None]:
    """Write the weight of some gates (units, end - begin), and its scale if it is an integer."""
    weight, scale = call.args[1:3]

    def take(expr: relax.Expr) -> str:
        array = constant_value(expr)
        if array is not None:
            return parts.builder.constant(array[..., begin:end], f"{parts.name}.weight")
        return parts.take(parts.builder.tensor(expr, parts.name), begin, end, -1)

    if not has_integer_weight(call):
        return take(weight), None
    return take(weight), take(scale) if scale.ty.ndim else parts.builder.tensor(scale, parts.name)


@dataclass(frozen=True)
class NodeWriter:
    """Writes nodes that are parts of one value of the module."""

    builder: OnnxBuilder
    name: str

    def apply(self, op: str, *operands: str, **attrs: object) -> str:
        return self.builder.step(op, operands, f"{self.name}.{op.lower()}", **attrs)

    def number(self, value: float) -> str:
        return self.builder.constant(np.float32(value), f"{self.name}.number")

    def integers(self, values: list[int]) -> str:
        return self.builder.constant(np.array(values, "int64"), f"{self.name}.integers")

    def take(self, data: str, begin: int, end: int, axis: int) -> str:
        """Write the values from `begin` to before `end` along an axis."""
        return self.apply("Slice", data, *(self.integers([at]) for at in (begin, end, axis)))


@dataclass(frozen=True)
class StepWriter:
    """The body of Scan: one step of a cell.

    Attributes:
        parts, call, units: What is written.
        weights: (weight, scale or None if it is float) of all gates, or of the first and the last.
        given: The optional operands that are not left out.
    """

    parts: NodeWriter
    call: Call
    units: int
    weights: list[tuple[str, str | None]]
    given: dict[str, str]

    def write(self, kind: str, gates: str, states: list[str]) -> list[str]:
        """Write the new states, from the gates without the hidden state (B, gates * units)."""
        return {"lstm": self.write_lstm, "gru": self.write_gru, "rnn": self.write_rnn}[kind](
            gates, states
        )

    def multiply(self, rows: str, at: int) -> str:
        """Write the product of rows (B, H) and a weight. For integers, rows are rounded first."""
        apply, (weight, scale) = self.parts.apply, self.weights[at]
        if scale is None:
            return apply("MatMul", rows, weight)
        levels, step = write_levels(self.parts.builder, rows, self.parts.name)
        # In the body, where runtimes know the weight as a constant.
        sums = apply("MatMul", levels, apply("Cast", weight, to=TensorProto.FLOAT))
        return apply("Mul", sums, apply("Mul", step, scale))

    def split(self, gates: str, first: int, last: int) -> list[str]:
        """Write the gates from `first` to before `last`, each (B, H)."""
        take, units = self.parts.take, self.units
        return [take(gates, at * units, (at + 1) * units, 1) for at in range(first, last)]

    def activate(self, at: int, value: str) -> str:
        """Write activation number `at`, after the clip."""
        attrs = self.call.attrs
        if float(attrs.clip) and at < 2:
            value = self.clip(value, float(attrs.clip))
        return self.parts.apply(str(attrs.activations[at]).capitalize(), value)

    def clip(self, value: str, bound: float) -> str:
        return self.parts.apply("Clip", value, *map(self.parts.number, (-bound, bound)))

    def invert(self, gate: str) -> str:
        """Write 1 - gate."""
        return self.parts.apply("Sub", self.parts.number(1), gate)

    def mix(self, first: str, value: str, second: str, other: str) -> str:
        """Write first * value + second * other."""
        apply = self.parts.apply
        return apply("Add", apply("Mul", first, value), apply("Mul", second, other))

    def write_rnn(self, gates: str, states: list[str]) -> list[str]:
        total = self.parts.apply("Add", gates, self.multiply(states[0], 0))
        return [self.activate(0, total)]

    def write_gru(self, gates: str, states: list[str]) -> list[str]:
        apply, (old,) = self.parts.apply, states
        is_linear = bool(self.call.attrs.linear_before_reset)
        product = self.multiply(old, 0)
        pairs = zip(self.split(gates, 0, 2), self.split(product, 0, 2), strict=True)
        update, reset = (self.activate(0, apply("Add", *pair)) for pair in pairs)
        if is_linear:
            (inner,) = self.split(product, 2, 3)
            if "hidden_bias" in self.given:
                inner = apply("Add", inner, self.given["hidden_bias"])
            inner = apply("Mul", reset, inner)
        else:
            inner = self.multiply(apply("Mul", reset, old), 1)
        new = self.activate(1, apply("Add", *self.split(gates, 2, 3), inner))
        return [self.mix(self.invert(update), new, update, old)]

    def write_lstm(self, gates: str, states: list[str]) -> list[str]:
        apply, (old, state), attrs = self.parts.apply, states, self.call.attrs
        total = apply("Add", gates, self.multiply(old, 0))
        entry, exit_, forget, new = self.split(total, 0, 4)
        entry = self.activate(0, self.look(entry, 0, state))
        if attrs.input_forget:
            forget = self.invert(entry)
        else:
            forget = self.activate(0, self.look(forget, 2, state))
        state = self.mix(forget, state, entry, self.activate(1, new))
        if float(attrs.cell_clip):
            state = self.clip(state, float(attrs.cell_clip))
        gate = self.activate(0, self.look(exit_, 1, state))
        return [apply("Mul", gate, self.activate(2, state)), state]

    def look(self, gate: str, at: int, state: str) -> str:
        """Write the sum of a gate and what it sees of the cell."""
        if "peepholes" not in self.given:
            return gate
        seen = self.given["peepholes"]
        if self.call.args[5].ty.ndim:
            seen = self.parts.take(seen, at, at + 1, 0)
        return self.parts.apply("Add", gate, self.parts.apply("Mul", seen, state))
