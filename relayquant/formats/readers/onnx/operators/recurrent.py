"""ONNX reader: LSTM, GRU and RNN -> one operator of the dialect for each direction.

All inputs are multiplied by their weights at once. The operator multiplies the state:
    gates = matmul(X, W^T) + b            (steps, batch, gates * hidden)
    y = qnn.lstm(gates, R^T)              last states, then the hidden state of each step

Activations that the dialect does not have are unrolled into the operators of their steps:
    h = f(gates[t] + matmul(h, R^T))      for each step t
If no initial state is given, it is zero, and its products are left out in the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import relax, tirx
from tvm.ir import Call

from relayquant.errors import format_count
from relayquant.formats.readers.onnx.operators.activations import find_activation
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.steps import (
    check_steps,
    find_length,
    join_values,
    slice_element,
    take_element,
)
from relayquant.formats.readers.recurrent_layer import emit_layer
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.qnn.recurrent import ACTIVATIONS
from relayquant.ir.reference.folding import emit_folded
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape

#: An activation with its parameters, applied after the clip.
Activate = Callable[[relax.Expr], relax.Expr]

#: Product with a weight.
Multiply = Callable[[relax.Expr], relax.Expr]

#: Hidden state, then the cell of an LSTM. None is zero.
State = Sequence["relax.Expr | None"]


@dataclass(frozen=True)
class Direction:
    """Weights and activations of one direction of an operator.

    Attributes:
        weight: Multiplies the inputs: (..., inputs) -> (..., gates * hidden).
        recurrence: Multiplies the state. One entry per product in a step.
        bias: Added to the product of the inputs, (gates * hidden,), or None.
        hidden_bias: GRU with linear_before_reset only: added to the recurrent product of the hidden
            gate.
        peepholes: LSTM only: weights of input, output and forget gate, (hidden,) each, or empty.
        activations: In the operator's order.
    """

    weight: Multiply
    recurrence: tuple[Multiply, ...]
    bias: relax.Expr | None
    hidden_bias: relax.Expr | None
    peepholes: tuple[relax.Expr, ...]
    activations: tuple[Activate, ...]


@dataclass(frozen=True)
class Cell:
    """A recurrent operator: its gates, the activations of a direction and its step."""

    gates: int
    activations: tuple[str, ...]
    states: int
    #: Emits one step, given the product of the inputs. Returns the new state.
    step: Callable[[RecurrentNode, Direction, relax.Expr, State], Sequence[relax.Expr]]
    layer: Callable[..., Call]  #: constructor of the dialect


def convert_recurrent(
    cell: Cell, bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert LSTM, GRU or RNN -> (Y, last hidden state, last cell), as ONNX defines them.

    Raises:
        Refusal: a shape or an attribute does not fit the operator, or the operator is unrolled and
            the number of steps is unknown.
    """
    data, weight, recurrence, *others = (*inputs, *[None] * 8)[:8]
    layer = RecurrentNode.of(
        cell, bb, [tensor_shape(each) for each in (data, weight, recurrence)], attrs
    )
    others = layer.clear_empty(others)
    matrices = [
        [take_element(bb, matrix, at, 0) for matrix in (weight, recurrence)]
        for at in range(len(layer.directions))
    ]
    activations = layer.find_dialect_activations()
    if activations is not None and tensor_dtype(data) == "float32":
        return layer.emit_layers((data, *others), matrices, activations)
    products = [
        (layer.multiply_by(layer.transpose(own)), layer.split_recurrence(state))
        for own, state in matrices
    ]
    return layer.unroll_steps((data, *others), products)


@dataclass(frozen=True)
class RecurrentNode:
    """One node: what it computes, and the builder that takes its operators.

    Attributes:
        cell: The operator.
        bb: The builder.
        attrs: Attributes of the node.
        hidden: Number of units.
    """

    cell: Cell
    bb: Builder
    attrs: dict[str, Any]
    hidden: int

    @staticmethod
    def of(
        cell: Cell,
        bb: Builder,
        shapes: Sequence[tuple[int | str, ...] | None],
        attrs: dict[str, Any],
    ) -> RecurrentNode:
        """Read the number of hidden units from the shapes of X, W and R.

        Raises:
            Refusal: the shapes of the weights are unknown, or do not fit each other.
        """
        hidden = shapes[2][-1] if shapes[2] else None
        layer = RecurrentNode(cell, bb, attrs, hidden if isinstance(hidden, int) else 0)
        directions = len(layer.directions)
        if not isinstance(hidden, int) or shapes[0] is None or len(shapes[0]) != 3:
            raise Refusal(f"X, W and R have the shapes {shapes}; expected: 3 dimensions, known")
        wanted = [(directions, layer.rows, shapes[0][2]), (directions, layer.rows, hidden)]
        if list(shapes[1:]) != wanted or int(attrs.get("hidden_size", hidden)) != hidden:
            raise Refusal(
                f"W and R have the shapes {shapes[1]} and {shapes[2]} with hidden_size "
                f"{attrs.get('hidden_size', hidden)}; expected: {wanted[0]} and {wanted[1]}"
            )
        return layer

    @property
    def rows(self) -> int:
        """Rows of a weight: the units of all gates."""
        return self.cell.gates * self.hidden

    @cached_property
    def layout(self) -> int:
        """The axis of the steps: 1 if the batch comes first."""
        return int(self.attrs.get("layout", 0))

    @cached_property
    def resets_product(self) -> bool:
        """Whether a GRU resets the product with the state, not the state before it."""
        return self.cell is GRU and bool(self.attrs.get("linear_before_reset", 0))

    @cached_property
    def directions(self) -> tuple[bool, ...]:
        """For each direction, whether it runs backwards.

        Raises:
            Refusal: the direction is unknown.
        """
        name = self.attrs.get("direction", b"forward").decode()
        known = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
        if name not in known:
            raise Refusal(f"direction is {name!r}; allowed: {', '.join(known)}")
        return known[name]

    def clear_empty(self, others: Sequence[Any]) -> list[Any]:
        """Return bias, lengths, states and peepholes with states of zero for sequences of no steps.

        ONNX does not define their last states. ONNX Runtime gives zeros.
        """
        bias, lengths, *operands = others
        array = None if lengths is None else constant_value(lengths)
        if lengths is None or (array is not None and array.all()):
            return [*others]
        for at, state in enumerate(operands[: self.cell.states]):
            if state is not None:
                operands[at] = self.choose(self.compare_length(lengths, 0), state, None)
        return [bias, lengths, *operands]

    def split_inputs(self, inputs: Sequence[Any]) -> tuple[Any, Any, Any, list[Any], Any]:
        """Return X, bias, lengths, the states and the peepholes."""
        data, bias, lengths, *states = inputs
        peepholes = states[2] if self.cell.states == 2 else None
        return data, bias, lengths, states[: self.cell.states], peepholes

    # -- one operator per layer and direction ------------------------------------------------------

    def find_dialect_activations(self) -> list[str] | None:
        """Return the names of all activations, or None if the dialect does not have one of them."""
        names = [name.lower() for name in self.list_activations()]
        count = len(self.cell.activations) * len(self.directions)
        return names if len(names) == count and set(names) <= set(ACTIVATIONS) else None

    def emit_layers(
        self,
        inputs: Sequence[Any],
        matrices: Sequence[Sequence[relax.Expr]],
        activations: Sequence[str],
    ) -> relax.Expr:
        """Emit one product and one operator of the dialect for each direction.

        `inputs` are as `unroll_steps` takes them. For each direction, `matrices` has the weights of
        the inputs and of the state, both (gates * hidden, ...). Returns the results of
        `convert_recurrent`.
        """
        bb, layout, count = self.bb, self.layout, len(self.cell.activations)
        data, bias, lengths, states, peepholes = self.split_inputs(inputs)
        data = self.swap_batch(data)
        steps = data.ty.shape.values[0]
        if isinstance(steps, tirx.IntImm) and int(steps) < 1:
            raise Refusal("its sequence is empty")
        sequences, lasts = [], []
        for at, is_reversed in enumerate(self.directions):
            own, state = matrices[at]
            outer, inner = self.split_bias(bias, at)
            operands: dict[str, Any] = {
                name: take_element(bb, value, at, layout)
                for name, value in zip(("hidden", "cell"), states, strict=False)
                if value is not None
            }
            if inner is not None:
                operands["hidden_bias"] = inner
            look = self.split_peepholes(peepholes, at)
            if look:
                operands["peepholes"] = self.join([self.expand(row, 0) for row in look], 0)
            if lengths is not None:
                operands["lengths"] = lengths
            if self.cell is LSTM:
                operands["input_forget"] = bool(self.attrs.get("input_forget", 0))
            if self.cell is GRU:
                operands["linear_before_reset"] = self.resets_product
            sequence, last = emit_layer(
                bb,
                self.cell.layer,
                data,
                (self.transpose(own), self.transpose(state), outer),
                self.cell.states,
                **operands,
                activations=activations[at * count : (at + 1) * count],
                clip=float(self.attrs.get("clip") or 0.0),
                is_reversed=is_reversed,
            )
            sequences.append(sequence)
            lasts.append(last)
        last = [self.swap_batch(self.join(list(each), 0)) for each in zip(*lasts, strict=True)]
        expanded = [self.expand(self.swap_batch(each), 1 + layout) for each in sequences]
        return relax.Tuple([self.join(expanded, 1 + layout), *last])

    def swap_batch(self, value: relax.Expr) -> relax.Expr:
        """Exchange the first two axes if the layout has the batch before the steps."""
        return self.bb.emit(relax.op.permute_dims(value, [1, 0, 2])) if self.layout else value

    # -- unrolled ----------------------------------------------------------------------------------

    def unroll_steps(
        self, inputs: Sequence[Any], products: Sequence[tuple[Multiply, tuple[Multiply, ...]]]
    ) -> relax.Expr:
        """Emit all steps. Returns the results of `convert_recurrent`.

        Args:
            inputs: X, bias, lengths, states and peepholes. None for one that is left out.
            products: For each direction, the products with the weights of the inputs and of the
                state.
        """
        bb, layout, count = self.bb, self.layout, len(self.cell.activations)
        data, bias, lengths, states, peepholes = self.split_inputs(inputs)
        steps = find_length(bb, data, layout)
        check_steps(steps)
        functions = list(self.read_activations())
        sequences, lasts = [], []
        for at, is_reversed in enumerate(self.directions):
            direction = Direction(
                *products[at],
                *self.split_bias(bias, at),
                self.split_peepholes(peepholes, at),
                tuple(functions[at * count : (at + 1) * count]),
            )
            state = [None if given is None else self.cut(given, at) for given in states]
            order = range(steps)[::-1] if is_reversed else range(steps)
            product = self.add(direction.weight(data), direction.bias)
            outputs: dict[int, relax.Expr] = {}
            for step in order:
                part = product if steps == 1 else slice_element(bb, product, step, layout)
                new = self.cell.step(self, direction, part, state)
                outputs[step] = new[0]
                if lengths is not None:
                    is_inside = self.compare_length(lengths, step)
                    outputs[step] = self.choose(is_inside, new[0], None)
                    new = [self.choose(is_inside, *pair) for pair in zip(new, state, strict=True)]
                state = list(new)
            sequences.append(self.join([outputs[step] for step in range(steps)], layout))
            lasts.append(state)
        # Y has the axis of directions after the steps, or after batch and steps.
        expanded = [bb.emit(relax.op.expand_dims(values, 1 + layout)) for values in sequences]
        last = [self.join(values, layout) for values in zip(*lasts, strict=True)]
        return relax.Tuple([self.join(expanded, 1 + layout), *last])

    # -- attributes and weights --------------------------------------------------------------------

    def list_activations(self) -> list[str]:
        """Return the names of the activations of all directions."""
        names = [name.decode() for name in self.attrs.get("activations", ())]
        return names or list(self.cell.activations) * len(self.directions)

    def read_activations(self) -> Iterator[Activate]:
        """Return the activations of all directions. alpha and beta are assigned in order to the
        activations that take them.

        Raises:
            Refusal: an activation is unknown, or their number does not fit the directions.
        """
        names, count = self.list_activations(), len(self.cell.activations)
        if len(names) != count * len(self.directions):
            raise Refusal(
                f"activations has {format_count(len(names), 'name')}; expected: "
                f"{count * len(self.directions)}"
            )
        given = {key: list(self.attrs.get(f"activation_{key}", ())) for key in ("alpha", "beta")}
        for at, name in enumerate(names):
            activation = find_activation(name)
            parameters = activation.choose_parameters(given)
            # ONNX Runtime clips the input of gates, but not the output activation of an LSTM's
            # cell.
            clip = self.attrs.get("clip") if at % count < 2 else None
            yield functools.partial(self.apply_clipped, activation.apply, parameters, clip)

    def apply_clipped(
        self,
        apply: Callable[..., relax.Expr],
        parameters: Sequence[float],
        clip: float | None,
        value: relax.Expr,
    ) -> relax.Expr:
        """Apply an activation after attribute clip."""
        if clip:
            value = self.bb.emit(relax.op.clip(value, -float(clip), float(clip)))
        return apply(self.bb, value, *parameters)

    def split_recurrence(self, matrix: relax.Expr) -> tuple[Multiply, ...]:
        """Return the products with R^T.

        A GRU that resets the state before its product needs a separate product for the hidden gate.
        """
        if self.cell is GRU and not self.resets_product:
            return tuple(
                self.multiply_by(self.transpose(self.slice_gates(matrix, *gates)))
                for gates in ((0, 2), (2, 3))
            )
        return (self.multiply_by(self.transpose(matrix)),)

    def multiply_by(self, matrix: relax.Expr) -> Multiply:
        """Return the product with a matrix of floats."""
        return lambda value: self.bb.emit(relax.op.matmul(value, matrix))

    def split_bias(
        self, bias: relax.Expr | None, at: int
    ) -> tuple[relax.Expr | None, relax.Expr | None]:
        """Return (bias of the inputs' product, bias before the reset).

        This is (Wb + Rb, None). For a GRU with linear_before_reset, the hidden gate's part of Rb is
        separate.
        """
        if bias is None:
            return None, None
        both, gates = take_element(self.bb, bias, at, 0), self.cell.gates
        outer, inner = (self.slice_gates(both, k * gates, (k + 1) * gates) for k in (0, 1))
        if not self.resets_product:
            return self.add(outer, inner), None
        total = self.add(*(self.slice_gates(each, 0, 2) for each in (outer, inner)))
        total = self.join([total, self.slice_gates(outer, 2, 3)], 0)
        return total, self.slice_gates(inner, 2, 3)

    def split_peepholes(self, peepholes: relax.Expr | None, at: int) -> tuple[relax.Expr, ...]:
        """Return the peephole weights of the input, output and forget gates, or an empty tuple."""
        if peepholes is None:
            return ()
        row = take_element(self.bb, peepholes, at, 0)
        return tuple(self.slice_gates(row, k, k + 1) for k in range(3))

    def compare_length(self, lengths: relax.Expr, step: int) -> relax.Expr:
        """Return for each sample whether the step is inside its sequence: (1, batch, 1), or (batch,
        1, 1).

        Backwards, the steps after the end come first and leave the state unchanged.
        """
        inside = self.emit(relax.op.greater(lengths, relax.const(step, str(lengths.ty.dtype))))
        return self.emit(relax.op.expand_dims(inside, [1, 2] if self.layout else [0, 2]))

    # -- small pieces ------------------------------------------------------------------------------

    def emit(self, call: Call) -> relax.Expr:
        """Bind a call. The result for constants is a constant."""
        return emit_folded(self.bb, call)

    def add(self, left: relax.Expr, right: relax.Expr | None) -> relax.Expr:
        """Emit left + right. left if right is None."""
        return left if right is None else self.emit(relax.op.add(left, right))

    def multiply(self, left: relax.Expr, right: relax.Expr) -> relax.Expr:
        """Emit left * right."""
        return self.bb.emit(relax.op.multiply(left, right))

    def complement(self, value: relax.Expr) -> relax.Expr:
        """Emit 1 - value."""
        return self.bb.emit(relax.op.subtract(relax.const(1.0, str(value.ty.dtype)), value))

    def choose(
        self, condition: relax.Expr, left: relax.Expr, right: relax.Expr | None
    ) -> relax.Expr:
        """Emit left where the condition is true, else right. None is zero."""
        other = relax.const(0.0, str(left.ty.dtype)) if right is None else right
        return self.bb.emit(relax.op.where(condition, left, other))

    def split_gates(self, gates: relax.Expr, count: int) -> list[relax.Expr]:
        """Split the last of three axes into `count` gates."""
        size = self.hidden
        return [slice_element(self.bb, gates, k * size, 2, size) for k in range(count)]

    def cut(self, state: relax.Expr, at: int) -> relax.Expr:
        """Return one direction of a state. The axis is kept."""
        shape = tensor_shape(state)
        if shape is not None and shape[self.layout] == 1:
            return state
        return slice_element(self.bb, state, at, self.layout)

    def expand(self, value: relax.Expr, axis: int) -> relax.Expr:
        """Insert an axis of size 1."""
        return self.emit(relax.op.expand_dims(value, axis))

    def slice_gates(self, matrix: relax.Expr, first: int, last: int) -> relax.Expr:
        """Return the rows from gate `first` to before `last`."""
        size = self.hidden
        return slice_element(self.bb, matrix, first * size, 0, (last - first) * size)

    def transpose(self, matrix: relax.Expr) -> relax.Expr:
        return self.emit(relax.op.permute_dims(matrix, [1, 0]))

    def join(self, values: Sequence[relax.Expr], axis: int) -> relax.Expr:
        return join_values(self.bb, values, axis)


# -- steps -----------------------------------------------------------------------------------------


def step_lstm(
    layer: RecurrentNode, direction: Direction, gates: relax.Expr, state: State
) -> Sequence[relax.Expr]:
    """i, o, f = f(gates + peepholes * c); c' = f * c + i * g(gates); h' = o * h(c')."""
    (hidden, cell), add, multiply = state, layer.add, layer.multiply
    inner, outer, last = direction.activations
    if hidden is not None:
        gates = add(gates, direction.recurrence[0](hidden))
    before_in, before_out, before_forget, before_cell = layer.split_gates(gates, 4)
    look = direction.peepholes
    if look and cell is not None:
        before_in = add(before_in, multiply(cell, look[0]))
        before_forget = add(before_forget, multiply(cell, look[2]))
    gate = inner(before_in)
    new = multiply(gate, outer(before_cell))
    if cell is not None:
        is_coupled = layer.attrs.get("input_forget", 0)
        forget = layer.complement(gate) if is_coupled else inner(before_forget)
        new = add(multiply(forget, cell), new)
    if look:
        before_out = add(before_out, multiply(new, look[1]))
    return multiply(inner(before_out), last(new)), new


def step_gru(
    layer: RecurrentNode, direction: Direction, gates: relax.Expr, state: State
) -> Sequence[relax.Expr]:
    """z, r = f(gates); n = g(gates + r * h); h' = (1 - z) * n + z * h. The reset is before or after
    the product with R.
    """
    (hidden,), add, multiply = state, layer.add, layer.multiply
    inner, outer = direction.activations
    update, reset, before = layer.split_gates(gates, 3)
    if hidden is not None:
        count = 2 if len(direction.recurrence) == 2 else 3
        products = layer.split_gates(direction.recurrence[0](hidden), count)
        update, reset = add(update, products[0]), add(reset, products[1])
        if len(products) == 3:
            product = add(products[2], direction.hidden_bias)
            before = add(before, multiply(inner(reset), product))
        else:
            kept = multiply(inner(reset), hidden)
            before = add(before, direction.recurrence[1](kept))
    elif direction.hidden_bias is not None:
        before = add(before, multiply(inner(reset), direction.hidden_bias))
    gate = inner(update)
    new = multiply(layer.complement(gate), outer(before))
    return (new if hidden is None else add(new, multiply(gate, hidden)),)


def step_rnn(
    layer: RecurrentNode, direction: Direction, gates: relax.Expr, state: State
) -> Sequence[relax.Expr]:
    """h' = f(gates)"""
    (hidden,) = state
    if hidden is not None:
        gates = layer.add(gates, direction.recurrence[0](hidden))
    return (direction.activations[0](gates),)


LSTM = Cell(4, ("Sigmoid", "Tanh", "Tanh"), 2, step_lstm, qnn.lstm)
GRU = Cell(3, ("Sigmoid", "Tanh"), 1, step_gru, qnn.gru)
RNN = Cell(1, ("Tanh",), 1, step_rnn, qnn.rnn)
