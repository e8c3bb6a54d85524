"""Optional last step of prepare: channels between two layers are scaled so that both use their
range alike.

linear(relu(linear(x, w1) + b1), w2) -> linear(relu(linear(x, w1 / s) + b1 / s), s * w2), with one
power of two s per channel in between: the same function, bit for bit, since relu(a * s) = s *
relu(a) for s > 0 and a power of two changes no mantissa.

Nagel et al. 2019, "Data-free quantization through weight equalization and bias correction", section
4.1 (https://arxiv.org/abs/1906.04721): s = sqrt(r1 / r2) makes the ranges r1 of a channel's weights
in the first layer and r2 in the second equal. It is meant for weights with one scale per tensor.

Measured on a keyword-spotting DS-CNN with such weights, rounded to nearest: agreement with float
98.1 % without and 98.0 % with it, within chance of one another; hence no level of effort uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.rewrite import Emitter, Graph, rewrite_main
from relayquant.rewrite.graph import constant_value, tensor_shape

CONV2D, MATMUL, ADD = "relax.nn.conv2d", "relax.matmul", "relax.add"
#: f(s * x) = s * f(x) for s > 0, channel by channel
HOMOGENEOUS = frozenset({"relax.nn.relu", "relax.nn.leakyrelu", "relax.nn.max_pool2d"})
#: passes over all pairs: a layer in the middle of a chain belongs to two of them
SWEEPS = 20


@dataclass(frozen=True)
class Declined:
    """A value between two layers whose channels cannot be scaled, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class LayerPair:
    """Two layers and what is between them.

    Attributes:
        first, second: The linear operators.
        bias: The sum with the first one's bias, if it has one.
        first_axis: Axis of the first weight that runs over the channels in between.
        second_axis: The same of the second weight.
    """

    first: relax.Var
    second: relax.Var
    bias: relax.Var | None
    first_axis: int
    second_axis: int


def equalize_layers(mod: tvm.IRModule) -> tuple[tvm.IRModule, tuple[Declined, ...]]:
    """The prepared module with every pair of layers equalized that allows it, and those that do
    not.

    Values between the layers of a pair change by their channel's factor, all others stay.
    """
    graph = Graph(mod)
    pairs, declined = find_pairs(graph)
    constants = {
        var: constant_value(graph.values[var].args[1])
        for pair in pairs
        for var in (pair.first, pair.second, pair.bias)
        if var is not None
    }
    arrays = {var: array for var, array in constants.items() if array is not None}
    for _ in range(SWEEPS):
        changed = [scale_pair(pair, arrays) for pair in pairs]
        if not any(changed):
            break

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        array = arrays.get(binding.var)
        if array is None:
            return emitter.get(binding.value)
        call = binding.value
        args = [emitter.get(call.args[0]), relax.const(array, "float32")]
        return Call(call.op, args, call.attrs, call.ty_args)

    return (rewrite_main(mod, visit) if pairs else mod), declined


def find_pairs(graph: Graph) -> tuple[list[LayerPair], tuple[Declined, ...]]:
    """Pairs of layers in topological order, and values between two layers that are left alone."""
    pairs, declined = [], []
    for binding in graph.bindings:
        axis = output_axis(graph, binding.var)
        if axis is None:
            continue
        found = follow(graph, binding.var, axis)
        if isinstance(found, LayerPair):
            pairs.append(found)
        elif found is not None:
            declined.append(found)
    return pairs, tuple(declined)


def follow(graph: Graph, first: relax.Var, first_axis: int) -> LayerPair | Declined | None:
    """The pair that a layer begins; None where no layer follows it."""
    at, bias = first, None
    while True:
        if not graph.has_one_user(at):
            return Declined(at.name, "several operators read it, or the model returns it")
        (user,) = graph.users[at]
        kind, call = graph.op_name(user), graph.values[user]
        if kind in (CONV2D, MATMUL) and call.args[0].same_as(at):
            axis = input_axis(graph, user)
            if axis is None:
                return Declined(at.name, f"{user.name} reads it in groups, or has no fixed weight")
            return LayerPair(first, user, bias, first_axis, axis)
        if kind == ADD and at is first and is_channel_bias(graph, user, first):
            bias = user
        elif kind == "relax.clip":
            return Declined(at.name, f"{user.name} clips all channels at one value (relu6)")
        elif kind not in HOMOGENEOUS:
            return None
        at = user


def weight_of(graph: Graph, var: relax.Var) -> np.ndarray | None:
    """The constant float32 weight of a convolution or matrix product."""
    if graph.op_name(var) not in (CONV2D, MATMUL):
        return None
    weight = constant_value(graph.values[var].args[1])
    is_matrix = graph.op_name(var) == CONV2D or (weight is not None and weight.ndim == 2)
    return weight if weight is not None and weight.dtype == np.float32 and is_matrix else None


def output_axis(graph: Graph, var: relax.Var) -> int | None:
    """Axis of a layer's weight that runs over its output channels; None if `var` is no layer."""
    if weight_of(graph, var) is None:
        return None
    attrs = graph.values[var].attrs
    return 1 if graph.op_name(var) == MATMUL else str(attrs.kernel_layout).index("O")


def input_axis(graph: Graph, var: relax.Var) -> int | None:
    """Axis of a layer's weight that runs over its input channels; None where no single one does."""
    weight = weight_of(graph, var)
    if weight is None:
        return None
    if graph.op_name(var) == MATMUL:
        return 0
    attrs = graph.values[var].attrs
    kernel, groups = str(attrs.kernel_layout), int(attrs.groups)
    if groups == 1:
        return kernel.index("I")
    shape = dict(zip(kernel, weight.shape, strict=True))
    # Depthwise: output channel i reads input channel i alone.
    return kernel.index("O") if shape["I"] == 1 and shape["O"] == groups else None


def is_channel_bias(graph: Graph, add: relax.Var, layer: relax.Var) -> bool:
    """Whether `add` adds a constant that has one number for each output channel of `layer`."""
    bias = constant_value(graph.values[add].args[1])
    shape = tensor_shape(layer)
    if bias is None or bias.dtype != np.float32 or shape is None:
        return False
    axis = len(shape) - 1
    if graph.op_name(layer) == CONV2D:
        axis = str(graph.values[layer].attrs.data_layout).index("C")
    full = (1,) * (len(shape) - bias.ndim) + bias.shape
    return len(full) == len(shape) and full[axis] == shape[axis] == bias.size


def scale_pair(pair: LayerPair, arrays: dict[relax.Var, np.ndarray]) -> bool:
    """Equalize one pair in `arrays`; whether anything changed."""
    first, second = arrays[pair.first], arrays[pair.second]
    scales = choose_scales(
        channel_ranges(first, pair.first_axis), channel_ranges(second, pair.second_axis)
    )
    if (scales == 1).all():
        return False
    arrays[pair.first] = first / spread(scales, pair.first_axis, first.ndim)
    arrays[pair.second] = second * spread(scales, pair.second_axis, second.ndim)
    if pair.bias is not None:
        bias = arrays[pair.bias]
        arrays[pair.bias] = bias / scales.reshape(bias.shape)
    return True


def choose_scales(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Power of two next to sqrt(r1 / r2) for each channel, float32; 1 where a range is 0."""
    usable = (first > 0) & (second > 0)
    ratio = np.where(usable, first, 1.0) / np.where(usable, second, 1.0)
    # Truncated towards 1: what is nearly equal stays, so that the sweeps come to rest.
    return np.exp2(np.trunc(np.log2(ratio) / 2)).astype("float32")


def channel_ranges(weight: np.ndarray, axis: int) -> np.ndarray:
    """Largest magnitude of each channel along `axis`, float64."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    return np.abs(weight).max(axis=others).astype("float64")


def spread(values: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """(C,) shaped to broadcast along one axis of an array of that rank."""
    shape = [1] * rank
    shape[axis] = -1
    return values.reshape(shape)
