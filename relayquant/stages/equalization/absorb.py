"""Which constants take the scales of a value's channels, so that no operator is added: those of
what is computed before it, as far as channels stay apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tvm import relax

from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value, tensor_shape
from relayquant.stages.equalization.channels import MATMUL
from relayquant.stages.equalization.cross_layer import Declined

#: elements of an array of channels behind a reshape, at most
MAX_CHANNELS = 1 << 20

#: Channel numbers in an array that broadcasts to a value: equal along all axes but those of size 1.
Channels = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Edit:
    """A constant that takes the scales.

    Attributes:
        var, operand: It is this operand of the value's operator.
        channels: The channel of each of its elements; broadcasts to it.
    """

    var: relax.Var
    operand: int
    channels: Channels


Absorbed = tuple[Edit, ...] | Declined


def absorb(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """Constants that multiply `var` by channel when they are multiplied, or why there are none."""
    rule = ABSORBERS.get(graph.op_name(var))
    if rule is None:
        kind = graph.op_name(var).removeprefix("relax.") or "an input"
        return Declined(var.name, f"it is computed by {kind}, which no factor passes")
    return rule(graph, var, channels)


def absorb_layer_norm(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """layer_norm(x, g, b) * s -> layer_norm(x, g * s, b * s)"""
    return join(absorb_operand(graph, var, at, channels) for at in (1, 2))


def absorb_rms_norm(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """rms_norm(x, g) * s -> rms_norm(x, g * s)"""
    return absorb_operand(graph, var, 1, channels)


def absorb_matmul(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """(x @ w) * s -> x @ (w * s) for s by column; w constant or computed; s by row: (x * s) @ w"""
    shapes = [tensor_shape(arg) or () for arg in graph.values[var].args]
    if min(map(len, shapes)) < 2:
        return Declined(var.name, "it is a product of vectors")
    by_row, by_column = (channels.shape[axis] > 1 for axis in (-2, -1))
    if by_row and by_column:
        return Declined(var.name, "rows and columns of a product would need factors of their own")
    return absorb_operand(graph, var, 0 if by_row else 1, channels)


def absorb_add(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """(x + y) * s -> x * s + y * s"""
    return join(absorb_operand(graph, var, at, channels) for at in (0, 1))


def absorb_multiply(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """(x * y) * s -> x * (y * s), y a constant if one of them is"""
    args = graph.values[var].args
    order = sorted((1, 0), key=lambda at: isinstance(args[at], relax.Var))
    first = absorb_operand(graph, var, order[0], channels)
    return absorb_operand(graph, var, order[1], channels) if isinstance(first, Declined) else first


def absorb_homogeneous(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """f(x) * s -> f(x * s) for s > 0"""
    return absorb_operand(graph, var, 0, channels)


def absorb_permute(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """permute_dims(x) * s -> permute_dims(x * s')"""
    axes = graph.values[var].attrs.axes
    order = range(channels.ndim)[::-1] if axes is None else [int(a) % channels.ndim for a in axes]
    return absorb_operand(graph, var, 0, np.transpose(channels, np.argsort(list(order))))


def absorb_reshape(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """reshape(x) * s -> reshape(x * s')"""
    source = tensor_shape(graph.values[var].args[0])
    moved = None
    if source is not None:
        moved = reshape_channels(channels, tensor_shape(var) or (), source)
    if moved is None:
        return Declined(var.name, "it cuts the channels in a way that is not followed")
    return absorb_operand(graph, var, 0, moved)


#: Operator -> what takes a factor by channel of its result.
ABSORBERS: Mapping[str, Callable[[Graph, relax.Var, Channels], Absorbed]] = {
    "relax.nn.layer_norm": absorb_layer_norm,
    "relax.nn.rms_norm": absorb_rms_norm,
    MATMUL: absorb_matmul,
    "relax.add": absorb_add,
    "relax.subtract": absorb_add,
    "relax.multiply": absorb_multiply,
    "relax.nn.relu": absorb_homogeneous,
    "relax.nn.leakyrelu": absorb_homogeneous,
    "relax.permute_dims": absorb_permute,
    "relax.reshape": absorb_reshape,
    "relax.expand_dims": absorb_reshape,
    "relax.squeeze": absorb_reshape,
}


def absorb_operand(graph: Graph, var: relax.Var, at: int, channels: Channels) -> Absorbed:
    """What takes a factor of one operand of `var`; `channels` are those of the result."""
    call = graph.values[var]
    arg = call.args[at]
    array = constant_value(arg)
    fitted = fit_channels(channels, tensor_shape(arg) or ())
    if fitted is None or (array is not None and array.dtype != np.float32):
        # One number for all channels must stay one: operators are recognized by such constants.
        return Declined(var.name, "an operand has one number for all channels")
    if array is not None:
        return (Edit(var, at, fitted),)
    if sum(arg.same_as(other) for other in call.args) > 1 or not graph.has_one_user(arg):
        return Declined(arg.name, "several operators read it, or the model returns it")
    return absorb(graph, arg, fitted)


def join(parts: Iterator[Absorbed]) -> Absorbed:
    """The edits of all parts, or the first refusal."""
    edits: list[Edit] = []
    for part in parts:
        if isinstance(part, Declined):
            return part
        edits += part
    return tuple(edits)


def fit_channels(channels: Channels, shape: tuple[int | str, ...]) -> Channels | None:
    """Channels of a result for an operand of `shape` that broadcasts to it; None where it lacks an
    axis that they run along.
    """
    extra = channels.ndim - len(shape)
    if extra < 0 or any(size > 1 for size in channels.shape[:extra]):
        return None
    fitted = channels.reshape(channels.shape[extra:])
    matches = (size in (1, have) for size, have in zip(fitted.shape, shape, strict=True))
    return fitted if all(matches) else None


def reshape_channels(
    channels: Channels, shape: tuple[int | str, ...], source: tuple[int | str, ...]
) -> Channels | None:
    """Channels of a value of `shape` for the value of `source` that it is reshaped from; None where
    a symbolic axis is cut or joined.
    """
    same = 0
    while same < min(len(shape), len(source)) and shape[same] == source[same]:
        same += 1
    sizes, wanted = shape[same:], source[same:]
    if any(isinstance(size, str) for size in (*sizes, *wanted)):
        return None
    kept = channels.shape[:same]
    full = (*kept, *(int(size) for size in sizes))
    if np.prod(full, dtype="int64") > MAX_CHANNELS:
        return None
    moved = np.broadcast_to(channels, full).reshape(*kept, *(int(size) for size in wanted))
    for axis in range(moved.ndim):
        first = moved.take([0], axis)
        moved = first if (moved == first).all() else moved
    return moved
