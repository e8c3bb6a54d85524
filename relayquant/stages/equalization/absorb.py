"""Absorption of channel scales: a value + its channels -> the constants before it that can take
the scales, so that no operator is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tvm import relax

from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value, tensor_shape
from relayquant.ir.rewrite.moves import list_permutation
from relayquant.stages.equalization.channels import MATMUL
from relayquant.stages.equalization.cross_layer import Declined

#: largest number of elements of a channel array behind a reshape
MAX_CHANNELS = 1 << 20

#: Channel numbers in an array that broadcasts to a value: each axis has the value's size or size 1.
Channels = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Edit:
    """A constant that absorbs the scales.

    Attributes:
        var, operand: The constant is this operand of the value's operator.
        channels: The channel of each element; broadcasts to the constant.
    """

    var: relax.Var
    operand: int
    channels: Channels


Absorbed = tuple[Edit, ...] | Declined


def absorb(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """Return the constants to scale so that `var` is scaled by channel, or why there are none."""
    rule = ABSORBERS.get(graph.op_name(var))
    if rule is None:
        kind = graph.op_name(var).removeprefix("relax.") or "an input"
        return Declined(var.name, f"it is computed by {kind}, which cannot absorb a factor")
    return rule(graph, var, channels)


def absorb_layer_norm(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """layer_norm(x, g, b) * s -> layer_norm(x, g * s, b * s)"""
    return join(absorb_operand(graph, var, at, channels) for at in (1, 2))


def absorb_rms_norm(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """rms_norm(x, g) * s -> rms_norm(x, g * s)"""
    return absorb_operand(graph, var, 1, channels)


def absorb_matmul(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """(x @ w) * s -> x @ (w * s) for s by column, with a constant or computed w; (x @ w) * s ->
    (x * s) @ w for s by row.
    """
    shapes = [tensor_shape(arg) or () for arg in graph.values[var].args]
    if min(map(len, shapes)) < 2:
        return Declined(var.name, "it is a product of vectors")
    by_row, by_column = (channels.shape[axis] > 1 for axis in (-2, -1))
    if by_row and by_column:
        return Declined(var.name, "rows and columns of a product would need different factors")
    return absorb_operand(graph, var, 0 if by_row else 1, channels)


def absorb_add(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """(x + y) * s -> x * s + y * s"""
    return join(absorb_operand(graph, var, at, channels) for at in (0, 1))


def absorb_multiply(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """(x * y) * s -> x * (y * s); y is the constant if one of them is"""
    args = graph.values[var].args
    order = sorted((1, 0), key=lambda at: isinstance(args[at], relax.Var))
    first = absorb_operand(graph, var, order[0], channels)
    return absorb_operand(graph, var, order[1], channels) if isinstance(first, Declined) else first


def absorb_homogeneous(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """f(x) * s -> f(x * s) for s > 0"""
    return absorb_operand(graph, var, 0, channels)


def absorb_permute(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """permute_dims(x) * s -> permute_dims(x * s')"""
    order = list_permutation(graph.values[var])
    return absorb_operand(graph, var, 0, np.transpose(channels, np.argsort(order)))


def absorb_reshape(graph: Graph, var: relax.Var, channels: Channels) -> Absorbed:
    """reshape(x) * s -> reshape(x * s')"""
    source = tensor_shape(graph.values[var].args[0])
    moved = None
    if source is not None:
        moved = reshape_channels(channels, tensor_shape(var) or (), source)
    if moved is None:
        return Declined(var.name, "it cuts the channels in a way that is not followed")
    return absorb_operand(graph, var, 0, moved)


#: operator -> rule that scales its result by channel
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
    """Return the constants that scale one operand of `var`. `channels` are the channels of the
    result.
    """
    call = graph.values[var]
    arg = call.args[at]
    array = constant_value(arg)
    fitted = fit_channels(channels, tensor_shape(arg) or ())
    if fitted is None or (array is not None and array.dtype != np.float32):
        # A scalar must stay a scalar, because operators are recognized by these constants.
        return Declined(var.name, "an operand has one number for all channels")
    if array is not None:
        return (Edit(var, at, fitted),)
    if sum(arg.same_as(other) for other in call.args) > 1 or not graph.has_one_user(arg):
        return Declined(arg.name, "several operators read it, or the model returns it")
    return absorb(graph, arg, fitted)


def join(parts: Iterator[Absorbed]) -> Absorbed:
    """Join the edits of all parts, or return the first refusal."""
    edits: list[Edit] = []
    for part in parts:
        if isinstance(part, Declined):
            return part
        edits += part
    return tuple(edits)


def fit_channels(channels: Channels, shape: tuple[int | str, ...]) -> Channels | None:
    """Return a result's channels for an operand of `shape` that broadcasts to it. None if the
    operand lacks an axis along which the channels vary.
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
    """Return the channels of a value of `shape` for the value of `source` from which it is
    reshaped. None if a symbolic axis is split or merged.
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
