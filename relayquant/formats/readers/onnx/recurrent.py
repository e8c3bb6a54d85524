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
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call

from relayquant.errors import format_count
from relayquant.formats.readers.onnx.activations import find_activation
from relayquant.formats.readers.onnx.steps import (
    check_steps,
    find_length,
    slice_element,
    take_element,
)
from relayquant.formats.readers.recurrent_layer import emit_layer
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.qnn.recurrent import ACTIVATIONS
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
        hidden: Number of units.
        weight: Multiplies the inputs: (..., inputs) -> (..., gates * hidden).
        recurrence: Multiplies the state. One entry per product in a step.
        bias: Added to the product of the inputs, (gates * hidden,), or None.
        hidden_bias: GRU with linear_before_reset only: added to the recurrent product of the hidden
            gate.
        peepholes: LSTM only: weights of input, output and forget gate, (hidden,) each, or empty.
        activations: In the operator's order.
    """

    hidden: int
    weight: Multiply
    recurrence: tuple[Multiply, ...]
    bias: relax.Expr | None
    hidden_bias: relax.Expr | None
    peepholes: tuple[relax.Expr, ...]
    activations: tuple[Activate, ...]


#: Emits one step, given the product of the inputs. Returns the new state.
Step = Callable[
    [relax.BlockBuilder, Direction, relax.Expr, State, "dict[str, Any]"], Sequence[relax.Expr]
]


@dataclass(frozen=True)
class Cell:
    """A recurrent operator: its gates, the activations of a direction and its step."""

    gates: int
    activations: tuple[str, ...]
    states: int
    step: Step
    layer: Callable[..., Call]  #: constructor of the dialect


def convert_recurrent(
    cell: Cell, bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert LSTM, GRU or RNN -> (Y, last hidden state, last cell), as ONNX defines them.

    Raises:
        Refusal: a shape or an attribute does not fit the operator, or the operator is unrolled and
            the number of steps is unknown.
    """
    data, weight, recurrence, *others = (*inputs, *[None] * 8)[:8]
    directions = len(read_directions(attrs))
    shapes = [tensor_shape(operand) for operand in (data, weight, recurrence)]
    hidden = check_shapes(cell, shapes, attrs, directions)
    others = clear_empty(cell, bb, others, attrs)
    matrices = [
        [take_element(bb, matrix, at, 0) for matrix in (weight, recurrence)]
        for at in range(directions)
    ]
    activations = find_dialect_activations(cell, attrs, directions)
    if activations is not None and tensor_dtype(data) == "float32":
        return emit_layers(cell, bb, (data, *others), hidden, matrices, activations, attrs)
    products = [
        (
            multiply_by(bb, transpose(bb, own)),
            split_recurrence(cell, bb, state, hidden, attrs),
        )
        for own, state in matrices
    ]
    return unroll_steps(cell, bb, (data, *others), hidden, products, attrs)


def clear_empty(
    cell: Cell, bb: relax.BlockBuilder, others: Sequence[Any], attrs: dict[str, Any]
) -> list[Any]:
    """Return bias, lengths, states and peepholes with states of zero for sequences of no steps.

    ONNX does not define their last states. ONNX Runtime gives zeros.
    """
    bias, lengths, *operands = others
    array = None if lengths is None else constant_value(lengths)
    if lengths is None or (array is not None and array.all()):
        return [*others]
    for at, state in enumerate(operands[: cell.states]):
        if state is not None:
            is_filled = compare_length(bb, lengths, 0, int(attrs.get("layout", 0)))
            operands[at] = choose(bb, is_filled, state, None)
    return [bias, lengths, *operands]


# -- one operator per layer and direction ----------------------------------------------------------


def find_dialect_activations(
    cell: Cell, attrs: dict[str, Any], directions: int
) -> list[str] | None:
    """Return the names of all activations, or None if the dialect does not have one of them."""
    names = [name.decode().lower() for name in attrs.get("activations", ())]
    names = names or [name.lower() for name in cell.activations] * directions
    is_known = len(names) == len(cell.activations) * directions and set(names) <= set(ACTIVATIONS)
    return names if is_known else None


def emit_layers(
    cell: Cell,
    bb: relax.BlockBuilder,
    inputs: Sequence[Any],
    hidden: int,
    matrices: Sequence[Sequence[relax.Expr]],
    activations: Sequence[str],
    attrs: dict[str, Any],
) -> relax.Expr:
    """Emit one product and one operator of the dialect for each direction.

    The arguments are those of `unroll_steps`, with the weights (gates * hidden, ...) of inputs and
    state for each direction. Returns the results of `convert_recurrent`.
    """
    data, bias, lengths, *states = inputs
    states, peepholes = states[: cell.states], states[2] if cell.states == 2 else None
    layout, count = int(attrs.get("layout", 0)), len(cell.activations)
    if layout:
        data = bb.emit(relax.op.permute_dims(data, [1, 0, 2]))
    steps = data.ty.shape.values[0]
    if isinstance(steps, tirx.IntImm) and int(steps) < 1:
        raise Refusal("its sequence is empty")
    sequences, lasts = [], []
    for at, is_reversed in enumerate(read_directions(attrs)):
        own, state = matrices[at]
        outer, inner = split_bias(cell, bb, bias, at, hidden, attrs)
        operands: dict[str, Any] = {
            name: take_element(bb, value, at, layout)
            for name, value in zip(("hidden", "cell"), states, strict=False)
            if value is not None
        }
        if inner is not None:
            operands["hidden_bias"] = inner
        look = split_peepholes(bb, peepholes, at, hidden)
        if look:
            operands["peepholes"] = join(bb, [expand(bb, row, 0) for row in look], 0)
        if lengths is not None:
            operands["lengths"] = lengths
        if cell is LSTM:
            operands["input_forget"] = bool(attrs.get("input_forget", 0))
        if cell is GRU:
            operands["linear_before_reset"] = bool(attrs.get("linear_before_reset", 0))
        sequence, last = emit_layer(
            bb,
            cell.layer,
            data,
            (transpose(bb, own), transpose(bb, state), outer),
            cell.states,
            **operands,
            activations=activations[at * count : (at + 1) * count],
            clip=float(attrs.get("clip") or 0.0),
            is_reversed=is_reversed,
        )
        sequences.append(sequence)
        lasts.append(last)
    last = [join(bb, list(each), 0) for each in zip(*lasts, strict=True)]
    if layout:
        last = [bb.emit(relax.op.permute_dims(each, [1, 0, 2])) for each in last]
        sequences = [bb.emit(relax.op.permute_dims(each, [1, 0, 2])) for each in sequences]
    expanded = [expand(bb, each, 1 + layout) for each in sequences]
    return relax.Tuple([join(bb, expanded, 1 + layout), *last])


# -- unrolled --------------------------------------------------------------------------------------


def unroll_steps(
    cell: Cell,
    bb: relax.BlockBuilder,
    inputs: Sequence[Any],
    hidden: int,
    products: Sequence[tuple[Multiply, tuple[Multiply, ...]]],
    attrs: dict[str, Any],
) -> relax.Expr:
    """Emit all steps. Returns the results of `convert_recurrent`.

    Args:
        cell: The operator.
        bb: The builder.
        inputs: X, bias, lengths, states and peepholes. None for one that is left out.
        hidden: Number of units.
        products: For each direction, the products with the weights of the inputs and of the state.
        attrs: Attributes of the node.
    """
    data, bias, lengths, *states = inputs
    states, peepholes = states[: cell.states], states[2] if cell.states == 2 else None
    layout = int(attrs.get("layout", 0))
    backwards = read_directions(attrs)
    steps = find_length(bb, data, layout)
    check_steps(steps)
    functions = list(read_activations(cell, bb, attrs, len(backwards)))
    count = len(cell.activations)
    sequences, lasts = [], []
    for at, is_reversed in enumerate(backwards):
        direction = Direction(
            hidden,
            *products[at],
            *split_bias(cell, bb, bias, at, hidden, attrs),
            split_peepholes(bb, peepholes, at, hidden),
            tuple(functions[at * count : (at + 1) * count]),
        )
        state = [None if given is None else cut(bb, given, at, layout) for given in states]
        order = range(steps)[::-1] if is_reversed else range(steps)
        product = add(bb, direction.weight(data), direction.bias)
        outputs: dict[int, relax.Expr] = {}
        for step in order:
            part = product if steps == 1 else slice_element(bb, product, step, layout)
            new = cell.step(bb, direction, part, state, attrs)
            outputs[step] = new[0]
            if lengths is not None:
                is_inside = compare_length(bb, lengths, step, layout)
                outputs[step] = choose(bb, is_inside, new[0], None)
                new = [choose(bb, is_inside, *pair) for pair in zip(new, state, strict=True)]
            state = list(new)
        sequences.append(join(bb, [outputs[step] for step in range(steps)], layout))
        lasts.append(state)
    # Y has the axis of directions after the steps, or after batch and steps.
    expanded = [bb.emit(relax.op.expand_dims(values, 1 + layout)) for values in sequences]
    last = [join(bb, values, layout) for values in zip(*lasts, strict=True)]
    return relax.Tuple([join(bb, expanded, 1 + layout), *last])


# -- attributes and weights ------------------------------------------------------------------------


def read_directions(attrs: dict[str, Any]) -> tuple[bool, ...]:
    """Return for each direction whether it runs backwards.

    Raises:
        Refusal: the direction is unknown.
    """
    name = attrs.get("direction", b"forward").decode()
    known = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    if name not in known:
        raise Refusal(f"direction is {name!r}; allowed: {', '.join(known)}")
    return known[name]


def read_activations(
    cell: Cell, bb: relax.BlockBuilder, attrs: dict[str, Any], directions: int
) -> Iterator[Activate]:
    """Return the activations of all directions. alpha and beta are assigned in order to the
    activations that take them.

    Raises:
        Refusal: an activation is unknown, or their number does not fit the directions.
    """
    names = [name.decode() for name in attrs.get("activations", ())]
    names = names or list(cell.activations) * directions
    if len(names) != len(cell.activations) * directions:
        raise Refusal(
            f"activations has {format_count(len(names), 'name')}; expected: "
            f"{len(cell.activations) * directions}"
        )
    given = {key: list(attrs.get(f"activation_{key}", ())) for key in ("alpha", "beta")}
    for at, name in enumerate(names):
        activation = find_activation(name)
        parameters = activation.choose_parameters(given)
        # ONNX Runtime clips the input of gates, but not the output activation of an LSTM's cell.
        is_gate = at % len(cell.activations) < 2
        clip = attrs.get("clip") if is_gate else None
        yield functools.partial(apply_clipped, bb, activation.apply, parameters, clip)


def apply_clipped(
    bb: relax.BlockBuilder,
    apply: Callable[..., relax.Expr],
    parameters: Sequence[float],
    clip: float | None,
    value: relax.Expr,
) -> relax.Expr:
    """Apply an activation after attribute clip."""
    if clip:
        value = bb.emit(relax.op.clip(value, -float(clip), float(clip)))
    return apply(bb, value, *parameters)


def check_shapes(
    cell: Cell,
    shapes: Sequence[tuple[int | str, ...] | None],
    attrs: dict[str, Any],
    directions: int,
) -> int:
    """Return the number of hidden units from the shapes of X, W and R.

    Raises:
        Refusal: the shapes of the weights are unknown, or do not fit each other.
    """
    hidden = shapes[2][-1] if shapes[2] else None
    if not isinstance(hidden, int) or shapes[0] is None or len(shapes[0]) != 3:
        raise Refusal(f"X, W and R have the shapes {shapes}; expected: 3 dimensions, known")
    rows = cell.gates * hidden
    wanted = [(directions, rows, shapes[0][2]), (directions, rows, hidden)]
    if list(shapes[1:]) != wanted or int(attrs.get("hidden_size", hidden)) != hidden:
        raise Refusal(
            f"W and R have the shapes {shapes[1]} and {shapes[2]} with hidden_size "
            f"{attrs.get('hidden_size', hidden)}; expected: {wanted[0]} and {wanted[1]}"
        )
    return hidden


def split_recurrence(
    cell: Cell, bb: relax.BlockBuilder, matrix: relax.Expr, hidden: int, attrs: dict[str, Any]
) -> tuple[Multiply, ...]:
    """Return the products with R^T.

    A GRU that resets the state before its product needs a separate product for the hidden gate.
    """
    if cell is GRU and not attrs.get("linear_before_reset", 0):
        return tuple(
            multiply_by(bb, transpose(bb, slice_rows(bb, matrix, begin * hidden, end * hidden)))
            for begin, end in ((0, 2), (2, 3))
        )
    return (multiply_by(bb, transpose(bb, matrix)),)


def multiply_by(bb: relax.BlockBuilder, matrix: relax.Expr) -> Multiply:
    """Return the product with a matrix of floats."""
    return lambda value: bb.emit(relax.op.matmul(value, matrix))


def split_bias(
    cell: Cell,
    bb: relax.BlockBuilder,
    bias: relax.Expr | None,
    at: int,
    hidden: int,
    attrs: dict[str, Any],
) -> tuple[relax.Expr | None, relax.Expr | None]:
    """Return (bias of the inputs' product, bias before the reset).

    This is (Wb + Rb, None). For a GRU with linear_before_reset, the hidden gate's part of Rb is
    separate.
    """
    if bias is None:
        return None, None
    both, rows = take_element(bb, bias, at, 0), cell.gates * hidden
    outer, inner = slice_rows(bb, both, 0, rows), slice_rows(bb, both, rows, 2 * rows)
    if cell is not GRU or not attrs.get("linear_before_reset", 0):
        return add_constants(bb, outer, inner), None
    gates = add_constants(
        bb, slice_rows(bb, outer, 0, 2 * hidden), slice_rows(bb, inner, 0, 2 * hidden)
    )
    total = join(bb, [gates, slice_rows(bb, outer, 2 * hidden, rows)], 0)
    return total, slice_rows(bb, inner, 2 * hidden, rows)


def split_peepholes(
    bb: relax.BlockBuilder, peepholes: relax.Expr | None, at: int, hidden: int
) -> tuple[relax.Expr, ...]:
    """Return the peepholes of input, output and forget gate. Empty if there are none."""
    if peepholes is None:
        return ()
    row = take_element(bb, peepholes, at, 0)
    return tuple(slice_rows(bb, row, k * hidden, (k + 1) * hidden) for k in range(3))


# -- steps -----------------------------------------------------------------------------------------


def step_lstm(
    bb: relax.BlockBuilder,
    direction: Direction,
    gates: relax.Expr,
    state: State,
    attrs: dict[str, Any],
) -> Sequence[relax.Expr]:
    """i, o, f = f(gates + peepholes * c); c' = f * c + i * g(gates); h' = o * h(c')."""
    hidden, cell = state
    inner, outer, last = direction.activations
    if hidden is not None:
        gates = add(bb, gates, direction.recurrence[0](hidden))
    before_in, before_out, before_forget, before_cell = split_gates(bb, gates, 4, direction.hidden)
    look = direction.peepholes
    if look and cell is not None:
        before_in = add(bb, before_in, multiply(bb, cell, look[0]))
        before_forget = add(bb, before_forget, multiply(bb, cell, look[2]))
    gate = inner(before_in)
    new = multiply(bb, gate, outer(before_cell))
    if cell is not None:
        forget = complement(bb, gate) if attrs.get("input_forget", 0) else inner(before_forget)
        new = add(bb, multiply(bb, forget, cell), new)
    if look:
        before_out = add(bb, before_out, multiply(bb, new, look[1]))
    return multiply(bb, inner(before_out), last(new)), new


def step_gru(
    bb: relax.BlockBuilder,
    direction: Direction,
    gates: relax.Expr,
    state: State,
    attrs: dict[str, Any],
) -> Sequence[relax.Expr]:
    """z, r = f(gates); n = g(gates + r * h); h' = (1 - z) * n + z * h. The reset is before or after
    the product with R.
    """
    (hidden,) = state
    inner, outer = direction.activations
    update, reset, before = split_gates(bb, gates, 3, direction.hidden)
    if hidden is not None:
        products = split_gates(
            bb,
            direction.recurrence[0](hidden),
            2 if len(direction.recurrence) == 2 else 3,
            direction.hidden,
        )
        update, reset = add(bb, update, products[0]), add(bb, reset, products[1])
        if len(products) == 3:
            product = add(bb, products[2], direction.hidden_bias)
            before = add(bb, before, multiply(bb, inner(reset), product))
        else:
            kept = multiply(bb, inner(reset), hidden)
            before = add(bb, before, direction.recurrence[1](kept))
    elif direction.hidden_bias is not None:
        before = add(bb, before, multiply(bb, inner(reset), direction.hidden_bias))
    gate = inner(update)
    new = multiply(bb, complement(bb, gate), outer(before))
    return (new if hidden is None else add(bb, new, multiply(bb, gate, hidden)),)


def step_rnn(
    bb: relax.BlockBuilder,
    direction: Direction,
    gates: relax.Expr,
    state: State,
    attrs: dict[str, Any],
) -> Sequence[relax.Expr]:
    """h' = f(gates)"""
    (hidden,) = state
    if hidden is not None:
        gates = add(bb, gates, direction.recurrence[0](hidden))
    return (direction.activations[0](gates),)


def compare_length(
    bb: relax.BlockBuilder, lengths: relax.Expr, step: int, layout: int
) -> relax.Expr:
    """Return for each sample whether the step is inside its sequence: (1, batch, 1), or (batch, 1,
    1).

    Backwards, the steps after the end come first and leave the state unchanged.
    """
    array, axes = constant_value(lengths), [1, 2] if layout else [0, 2]
    if array is not None:
        return relax.const(np.expand_dims(step < array, axes), "bool")
    inside = bb.emit(relax.op.greater(lengths, relax.const(step, str(lengths.ty.dtype))))
    return bb.emit(relax.op.expand_dims(inside, axes))


# -- small pieces ----------------------------------------------------------------------------------


def add(bb: relax.BlockBuilder, left: relax.Expr, right: relax.Expr | None) -> relax.Expr:
    """Emit left + right. left if right is None."""
    return left if right is None else bb.emit(relax.op.add(left, right))


def add_constants(bb: relax.BlockBuilder, left: relax.Expr, right: relax.Expr) -> relax.Expr:
    """Emit left + right. The sum of constants is a constant."""
    arrays = constant_value(left), constant_value(right)
    if arrays[0] is None or arrays[1] is None:
        return add(bb, left, right)
    return relax.const(arrays[0] + arrays[1], str(arrays[0].dtype))


def multiply(bb: relax.BlockBuilder, left: relax.Expr, right: relax.Expr) -> relax.Expr:
    """Emit left * right."""
    return bb.emit(relax.op.multiply(left, right))


def complement(bb: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
    """Emit 1 - value."""
    return bb.emit(relax.op.subtract(relax.const(1.0, str(value.ty.dtype)), value))


def choose(
    bb: relax.BlockBuilder, condition: relax.Expr, left: relax.Expr, right: relax.Expr | None
) -> relax.Expr:
    """Emit left where the condition is true, else right. None is zero."""
    other = relax.const(0.0, str(left.ty.dtype)) if right is None else right
    return bb.emit(relax.op.where(condition, left, other))


def split_gates(
    bb: relax.BlockBuilder, gates: relax.Expr, count: int, size: int
) -> list[relax.Expr]:
    """Split the last of three axes into `count` parts of `size` elements."""
    return [slice_element(bb, gates, k * size, 2, size) for k in range(count)]


def cut(bb: relax.BlockBuilder, state: relax.Expr, at: int, layout: int) -> relax.Expr:
    """Return one direction of a state. The axis is kept."""
    shape = tensor_shape(state)
    array = constant_value(state)
    if array is not None:
        return relax.const(np.take(array, [at], layout), str(array.dtype))
    if shape is not None and shape[layout] == 1:
        return state
    return slice_element(bb, state, at, layout)


def expand(bb: relax.BlockBuilder, value: relax.Expr, axis: int) -> relax.Expr:
    """Insert an axis of size 1. A constant stays a constant."""
    array = constant_value(value)
    if array is not None:
        return relax.const(np.expand_dims(array, axis), str(array.dtype))
    return bb.emit(relax.op.expand_dims(value, axis))


def slice_rows(bb: relax.BlockBuilder, matrix: relax.Expr, begin: int, end: int) -> relax.Expr:
    """Return matrix[begin:end]. A constant stays a constant."""
    array = constant_value(matrix)
    if array is not None:
        return relax.const(np.ascontiguousarray(array[begin:end]), str(array.dtype))
    return slice_element(bb, matrix, begin, 0, end - begin)


def transpose(bb: relax.BlockBuilder, matrix: relax.Expr) -> relax.Expr:
    """Transpose the matrix. A constant stays a constant."""
    array = constant_value(matrix)
    if array is not None:
        return relax.const(np.ascontiguousarray(array.T), str(array.dtype))
    return bb.emit(relax.op.permute_dims(matrix, [1, 0]))


def join(bb: relax.BlockBuilder, values: Sequence[relax.Expr], axis: int) -> relax.Expr:
    """Concatenate values along an axis. The result for constants is a constant."""
    if len(values) == 1:
        return values[0]
    arrays = [constant_value(value) for value in values]
    if all(array is not None for array in arrays):
        joined = np.concatenate(arrays, axis)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return relax.const(joined, str(joined.dtype))
    return bb.emit(relax.op.concat(list(values), axis))


LSTM = Cell(4, ("Sigmoid", "Tanh", "Tanh"), 2, step_lstm, qnn.lstm)
GRU = Cell(3, ("Sigmoid", "Tanh"), 1, step_gru, qnn.gru)
RNN = Cell(1, ("Tanh",), 1, step_rnn, qnn.rnn)
