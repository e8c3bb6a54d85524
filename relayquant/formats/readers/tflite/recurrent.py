"""TensorFlow Lite reader: LSTM, RNN and their sequence operators -> one operator of the dialect for
each direction.

Their states are variables of the model, which TFLite keeps from run to run: states of the module.

A projection, h = P m + b, becomes part of the weights: the operator's state is m, and
    gates = x W^T + m (P^T R^T) + b R^T        instead of x W^T + h R^T
    y = m P^T + b                              for all steps at once
The first step adds the product of the state that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.recurrent_layer import emit_layer
from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.tflite.control_flow import find_variable_tensor
from relayquant.formats.readers.tflite.options import read_options
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.graph import tensor_shape

#: Fused activations that the dialect has.
ACTIVATIONS = {"RELU": "relu", "TANH": "tanh"}

#: Advice about an operator of integers.
FLOATS = "Convert the model without optimizations: relayquant quantizes the float model itself"


@dataclass(frozen=True)
class Places:
    """Numbers of the operands of one direction.

    Attributes:
        first: Its weights. All its constants follow.
        states: Its states.
    """

    first: int
    states: tuple[int, ...]


@dataclass(frozen=True)
class Projection:
    """h = m @ matrix + bias. `recurrence` multiplies h: (outputs, gates * hidden)."""

    matrix: np.ndarray
    bias: np.ndarray
    recurrence: np.ndarray


@dataclass(frozen=True)
class Weights:
    """Constants of one direction, with the gates in ONNX's order.

    Attributes:
        own: Multiplies the inputs, (inputs, gates * hidden).
        state: Multiplies the hidden state, (hidden, gates * hidden).
        bias: (gates * hidden,).
        settings: Other arguments of the dialect's constructor.
        projection: None without one.
    """

    own: np.ndarray
    state: np.ndarray
    bias: np.ndarray
    settings: dict[str, Any]
    projection: Projection | None = None


def find_index(op: Any, at: int) -> int:
    """Return the tensor of operand `at`, -1 if it is left out."""
    return op.Inputs(at) if at < op.InputsLength() else -1


def read_array(converter: Any, op: Any, at: int) -> np.ndarray | None:
    """Return the value of operand `at`, None if it is left out.

    Raises:
        NotConstant: it is computed at run time.
    """
    index = find_index(op, at)
    if index < 0:
        return None
    (tensor,) = converter.get_tensors([index])
    return np.asarray(converter.get_tensor_value(tensor))


def check_floats(converter: Any, op: Any) -> None:
    """Raise Refusal for a layer of integers: TFLite's rounding in it is not known here. Its weights
    alone may be integers.
    """
    for tensor in converter.get_input_tensors(op):
        is_weight = tensor.qnn_params and converter.find_value(tensor.tensor_idx) is None
        if tensor.tensor_idx < 0 or is_weight:
            continue
        dtype = converter.get_tensor_type_str(tensor.tensor.Type())
        if dtype != "float32":
            name = converter.find_name(tensor.tensor_idx)
            raise Refusal(f"its operand {name!r} is {dtype}; supported: float32", FLOATS)


def find_activation(converter: Any, options: Any) -> str:
    """Return the dialect's name of the fused activation.

    Raises:
        Refusal: the dialect lacks it.
    """
    number = options.FusedActivationFunction()
    name = converter.activation_fn_type.get(number, str(number))
    if name not in ACTIVATIONS:
        raise Refusal(f"its fused activation is {name}; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


# -- weights ---------------------------------------------------------------------------------------


def read_rnn(converter: Any, op: Any, options: Any, places: Places) -> Weights:
    """Read the constants of one direction of a simple recurrent layer."""
    own, state, bias = (read_array(converter, op, places.first + at) for at in range(3))
    if own is None or state is None or bias is None:
        raise Refusal("it lacks a weight or its bias")
    return Weights(own.T, state.T, bias, {"activations": (find_activation(converter, options),)})


def read_lstm(converter: Any, op: Any, options: Any, places: Places) -> Weights:
    """Read the constants of one direction of an LSTM.

    TFLite's order of gates is input, forget, cell, output. Without weights of an input gate, the
    gate is 1 - forget gate: the sigmoid of the negative sum.
    """

    def read(first: int, count: int) -> list[np.ndarray | None]:
        return [read_array(converter, op, places.first + first + at) for at in range(count)]

    own, state, bias = read(0, 4), read(4, 4), read(11, 4)
    look: list[np.ndarray | None] = read(8, 3)
    is_coupled = own[0] is None
    for row in (own, state, bias, *([look] if look[1] is not None else [])):
        if is_coupled and row[1] is not None:
            row[0] = -row[1]
        if any(each is None for each in row):
            raise Refusal("it lacks weights of a gate, a bias or a peephole")
    activation = find_activation(converter, options)
    settings: dict[str, Any] = {
        "activations": ("sigmoid", activation, activation),
        "input_forget": is_coupled,
        "cell_clip": float(options.CellClip()),
    }
    if look[1] is not None:
        rows = np.stack([each for each in (look[0], look[2], look[1]) if each is not None])
        settings["peepholes"] = relax.const(rows, "float32")
    matrices = [np.concatenate([each.T for each in arrange(row)], 1) for row in (own, state)]
    row = np.concatenate(arrange(bias))
    matrix, offset = read(15, 2)
    if matrix is None:
        return Weights(*matrices, row, settings)
    if options.ProjClip():
        raise Refusal(f"its projection is clipped at {options.ProjClip()}; supported: no clip")
    offset = np.zeros(len(matrix), "float32") if offset is None else offset
    projection = Projection(np.ascontiguousarray(matrix.T), offset, matrices[1])
    return Weights(
        matrices[0],
        multiply(matrix.T, matrices[1]),
        row + multiply(offset, matrices[1]),
        settings,
        projection,
    )


def arrange(row: Sequence[Any]) -> list[Any]:
    """Bring input, forget, cell, output into ONNX's order."""
    return [row[at] for at in (0, 3, 1, 2)]


def multiply(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return a product of constants, rounded once."""
    return (left.astype("float64") @ right.astype("float64")).astype("float32")


# -- operators -------------------------------------------------------------------------------------


def emit_direction(
    converter: Any, op: Any, data: relax.Expr, weights: Weights, places: Places, is_reversed: bool
) -> relax.Expr:
    """Emit one direction, and assign its states. Returns the hidden state of each step.

    Raises:
        Refusal: the file's states are of another batch than the input.
    """
    bb, layer = converter.bb, qnn.lstm if len(places.states) == 2 else qnn.rnn
    keys = [find_variable_tensor(converter, find_index(op, at)) for at in places.states]
    values = converter.conversion_state["resource_values"]
    given = {name: values[key] for name, key in zip(("hidden", "cell"), keys, strict=False)}
    sizes = tensor_shape(bb.normalize(data))
    for value in given.values():
        rows = tensor_shape(value)
        if sizes is not None and rows is not None and rows[0] != sizes[1]:
            raise Refusal(
                f"its state has the batch {rows[0]} and its input {sizes[1]}; supported: equal "
                "batches",
                f"Only one batch is in the file: pass it in shapes=, here {rows[0]}",
            )
    own, state, bias = (
        relax.const(np.ascontiguousarray(each), "float32")
        for each in (weights.own, weights.state, weights.bias)
    )
    projection = weights.projection
    first = None
    if projection is not None:
        before = bb.emit(
            relax.op.subtract(given.pop("hidden"), relax.const(projection.bias, "float32"))
        )
        matrix = relax.const(projection.recurrence, "float32")
        first = bb.emit(relax.op.matmul(before, matrix))
    sequence, lasts = emit_layer(
        bb,
        layer,
        data,
        (own, state, bias),
        len(keys),
        first=first,
        **weights.settings,
        **given,
        is_reversed=is_reversed,
    )
    if projection is not None:
        matrix, offset = (
            relax.const(each, "float32") for each in (projection.matrix, projection.bias)
        )
        sequence, lasts[0] = (
            bb.emit(relax.op.add(bb.emit(relax.op.matmul(each, matrix)), offset))
            for each in (sequence, lasts[0])
        )
    for key, last in zip(keys, lasts, strict=True):
        values[key] = bb.emit(relax.op.squeeze(last, [0]))
    return sequence


@dataclass(frozen=True)
class Layer:
    """A recurrent operator.

    Attributes:
        options: Name of its options.
        read: Reads the constants of a direction.
        directions: Forwards, then backwards if it has two.
        unsupported: Operands that must be left out: (description, numbers).
        is_sequence: Whether its input has an axis of steps.
    """

    options: str
    read: Callable[[Any, Any, Any, Places], Weights]
    directions: tuple[Places, ...]
    unsupported: tuple[str, Sequence[int]] = ("", ())
    is_sequence: bool = True


def convert_layer(converter: Any, op: Any) -> relax.Expr:
    """Convert a recurrent operator.

    With merged outputs and the batch first, TFLite's kernel of bidirectional LSTMs writes all
    samples but the first to wrong places. Here they are right.
    """
    layer = LAYERS[converter.kind]
    options = read_options(op, layer.options)
    what, numbers = layer.unsupported
    if any(find_index(op, at) >= 0 for at in numbers):
        raise Refusal(f"it has {what}; supported: none")
    if getattr(options, "KernelType", int)():
        raise Refusal("its kernel is BASIC; supported: FULL")
    if getattr(options, "DiagonalRecurrentTensors", int)():
        raise Refusal("its recurrent weights are diagonals; supported: matrices")
    bb, data = converter.bb, converter.get_expr(op.Inputs(0))
    is_sequence = layer.is_sequence
    is_turned = is_sequence and not options.TimeMajor()
    shape = tensor_shape(data)
    if shape is None or len(shape) != 2 + is_sequence:
        raise Refusal(f"its input has shape {shape}; supported: rank {2 + is_sequence}")

    def turn(value: relax.Expr) -> relax.Expr:
        return bb.emit(relax.op.permute_dims(value, [1, 0, 2])) if is_turned else value

    data = turn(data) if is_sequence else bb.emit(relax.op.expand_dims(data, [0]))
    results = []
    for at, places in enumerate(layer.directions):
        weights = layer.read(converter, op, options, places)
        results.append(turn(emit_direction(converter, op, data, weights, places, bool(at))))
    if not is_sequence:
        return relax.op.squeeze(results[0], [0])
    if len(results) == 1:
        return results[0]
    return relax.op.concat(results, 2) if options.MergeOutputs() else relax.Tuple(results)


NORMS = ("layer normalization", range(20, 24))
LAYERS = {
    "BIDIRECTIONAL_SEQUENCE_LSTM": Layer(
        "BidirectionalSequenceLSTMOptions",
        read_lstm,
        (Places(1, (35, 36)), Places(18, (37, 38))),
        ("an auxiliary input", range(39, 48)),
    ),
    "BIDIRECTIONAL_SEQUENCE_RNN": Layer(
        "BidirectionalSequenceRNNOptions",
        read_rnn,
        (Places(1, (4,)), Places(5, (8,))),
        ("an auxiliary input", range(9, 12)),
    ),
    "LSTM": Layer("LSTMOptions", read_lstm, (Places(1, (18, 19)),), NORMS, is_sequence=False),
    "RNN": Layer("RNNOptions", read_rnn, (Places(1, (4,)),), is_sequence=False),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": Layer(
        "UnidirectionalSequenceLSTMOptions", read_lstm, (Places(1, (18, 19)),), NORMS
    ),
    "UNIDIRECTIONAL_SEQUENCE_RNN": Layer("SequenceRNNOptions", read_rnn, (Places(1, (4,)),)),
}
