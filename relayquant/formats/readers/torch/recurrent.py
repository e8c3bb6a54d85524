"""PyTorch reader: lstm, gru and rnn -> one operator of the dialect for each layer and direction.

PyTorch decomposes them into the operators of each step. `keep_layers` keeps them whole, where their
weights are parameters of the module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.recurrent_layer import emit_layer
from relayquant.formats.readers.torch.arguments import Convert
from relayquant.ir.dialect import qnn

#: operator -> (constructor of the dialect, places of its gates in PyTorch's order, activation)
LAYERS = {
    "lstm.input": (qnn.lstm, (0, 3, 1, 2), ()),  # PyTorch: i, f, g, o
    "gru.input": (qnn.gru, (1, 0, 2), ()),  # PyTorch: r, z, n
    "rnn_tanh.input": (qnn.rnn, (0,), ()),
    "rnn_relu.input": (qnn.rnn, (0,), ("relu",)),
}


def keep_layers(program: Any, table: Any) -> None:
    """Take operators out of a table of decompositions if all of their nodes can be converted."""
    import torch  # pyright: ignore[reportMissingImports]

    signature = program.graph_signature
    known = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    for name in LAYERS:
        packet, overload = name.split(".")
        target = getattr(getattr(torch.ops.aten, packet), overload)
        parts = [part for part in program.graph_module.modules() if hasattr(part, "graph")]
        nodes = [node for part in parts for node in part.graph.nodes if node.target == target]
        if nodes and len(parts) == 1 and all(is_plain(node, known) for node in nodes):
            table.pop(target, None)


def is_plain(node: Any, known: set[str]) -> bool:
    """Whether a node has the usual float32 weights, all of them parameters."""
    _, _, weights, has_biases, layers, _, _, is_bidirectional, _ = node.args
    count = int(layers) * (1 + bool(is_bidirectional)) * (4 if has_biases else 2)
    is_float = str(node.args[0].meta["val"].dtype) == "torch.float32"
    return is_float and len(weights) == count and all(each.name in known for each in weights)


def make_recurrent_converters(constants: Mapping[str, Any]) -> dict[str, Convert]:
    """Make the conversions of a program, given its parameters by their names in the graph."""

    def convert(node: Any, importer: Any) -> relax.Expr:
        arrays = [constants[each.name].detach().cpu().numpy() for each in node.args[2]]
        return convert_layers(node, importer, arrays)

    return dict.fromkeys(LAYERS, convert)


def convert_layers(node: Any, importer: Any, arrays: list[np.ndarray]) -> relax.Expr:
    """Convert lstm(x, states, weights, ...) to (y, last hidden states[, last cells])."""
    operand, hx, _, has_biases, layers, _, _, is_bidirectional, batch_first = node.args
    bb, env = importer.block_builder, importer.env
    layer, order, activations = LAYERS[str(node.target).removeprefix("aten.")]
    data, given = env[operand], [env[each] for each in (hx if layer is qnn.lstm else [hx])]
    names = ("hidden", "cell")[: len(given)]
    size, directions = 4 if has_biases else 2, 1 + bool(is_bidirectional)
    if batch_first:
        data = bb.emit(relax.op.permute_dims(data, [1, 0, 2]))
    lasts: list[list[relax.Expr]] = []
    for at in range(int(layers)):
        sequences = []
        for direction in range(directions):
            place = at * directions + direction
            own = arrays[place * size : (place + 1) * size]
            settings = read_weights(layer, order, own)
            start = {
                name: bb.emit(
                    relax.op.squeeze(
                        bb.emit(relax.op.strided_slice(state, [0], [place], [place + 1], [1])), [0]
                    )
                )
                for name, state in zip(names, given, strict=True)
            }
            sequence, last = emit_layer(
                bb,
                layer,
                data,
                settings.pop("weights"),
                len(given),
                **settings,
                **start,
                activations=activations,
                is_reversed=bool(direction),
            )
            sequences.append(sequence)
            lasts.append(last)
        data = sequences[0] if directions == 1 else bb.emit(relax.op.concat(sequences, 2))
    if batch_first:
        data = bb.emit(relax.op.permute_dims(data, [1, 0, 2]))
    states = [
        each[0] if len(each) == 1 else bb.emit(relax.op.concat(list(each), 0))
        for each in zip(*lasts, strict=True)
    ]
    return relax.Tuple([data, *states])


def read_weights(layer: Any, order: tuple[int, ...], arrays: list[Any]) -> dict[str, Any]:
    """Return the weights of one direction in ONNX's order of gates, and the other settings.

    `arrays` are weight_ih (G * H, inputs), weight_hh (G * H, H), bias_ih and bias_hh (G * H,).
    """
    arranged = []
    for array in arrays:
        parts = np.split(array, len(order))
        arranged.append(np.concatenate([parts[k] for k in order]))
    own, state, *biases = arranged
    settings: dict[str, Any] = {}
    bias = None
    if biases:
        outer, inner = biases
        if layer is qnn.gru:
            units = len(inner) // 3
            settings["hidden_bias"] = np.ascontiguousarray(inner[2 * units :])
            inner = np.concatenate([inner[: 2 * units], np.zeros(units, inner.dtype)])
        bias = relax.const(outer + inner, "float32")
    if layer is qnn.gru:
        settings["linear_before_reset"] = True
    matrices = [relax.const(np.ascontiguousarray(each.T), "float32") for each in (own, state)]
    return {"weights": (*matrices, bias), **settings}
