"""Equalization of inputs before planning: an input whose channels differ much in range -> the same
input scaled to one range.

matmul(x, w) -> matmul(multiply(x, 1 / d), d * w), with one power of two d per channel (row of w).
The product may read the input through operators that leave the channels last, as a recurrent layer
does that takes the steps first.

One scale for a whole input leaves few steps for its smallest channels. For cepstral coefficients,
the first is a hundred times larger than the last and carries no more information. Dividing each
channel by its range changes no bit of the float result, since a power of two changes no mantissa.
The weights have one scale per output and lose some resolution. The gain and the loss are estimated,
and nothing is done unless it pays off.

Nagel et al. 2019, "Data-free quantization through weight equalization and bias correction", section
4.1, scale channels against the next layer's weights. Here the range comes from data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.data import open_share
from relayquant.data.item import describe_inputs
from relayquant.ir.rewrite import Emitter, Graph, rewrite_main
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import MOVES, list_permutation, same_axis
from relayquant.stages.equalization.channels import (
    ChannelStatistics,
    estimate_noise,
    find_products,
    measure_channels,
)

#: factor by which the estimated noise of the product must fall
WORTHWHILE_GAIN = 2.0


def find_scaled_inputs(mod: tvm.IRModule) -> dict[str, list[relax.Var]]:
    """Map the inputs of a prepared module, by name, to the products with a constant matrix that
    read them, perhaps moved, with the same last axis.
    """
    graph = Graph(mod)
    found: dict[str, list[relax.Var]] = {}
    for param in graph.func.params:
        shape = tensor_shape(param)
        if tensor_dtype(param) == "float32" and shape and isinstance(shape[-1], int):
            found[param.name] = list_products(graph, param)
    return {name: products for name, products in found.items() if products}


def list_products(graph: Graph, value: relax.Var) -> list[relax.Var]:
    """List the products of a value, or of a move of it, with constant matrices."""
    products = find_products(graph, value)
    for user in graph.users[value]:
        if keeps_channels(graph, user):
            products += list_products(graph, user)
    return products


def keeps_channels(graph: Graph, moved: relax.Var) -> bool:
    """Whether a value is a move of another one with the same last axis."""
    call = graph.call_of(moved)
    if call is None or call_name(call) not in MOVES:
        return False
    before, after = tensor_shape(call.args[0]), tensor_shape(moved)
    if not before or not after:
        return False
    if call_name(call) == "relax.permute_dims":
        return list_permutation(call)[-1] == len(before) - 1
    return same_axis(before, after, len(before) - 1) == len(after) - 1


def is_more_exact(weights: Iterable[np.ndarray], statistics: ChannelStatistics) -> bool:
    """Whether equal ranges of the channels make the products that read them clearly more exact."""
    weights, scales = tuple(weights), statistics.scales().astype("float64")
    scaled = statistics.divide(scales)
    before = sum(estimate_noise(weight, statistics) for weight in weights)
    after = sum(estimate_noise(weight * scales[:, None], scaled) for weight in weights)
    return before > WORTHWHILE_GAIN * after


def scale_inputs(canonical: tvm.IRModule, dataset: Any, kept: Collection[str]) -> tvm.IRModule:
    """Scale the channels of a prepared module's inputs to one range where this pays off. `kept`
    inputs stay.
    """
    data = open_share(dataset, describe_inputs(canonical))  # reports a dataset that is not one
    names = [name for name in find_scaled_inputs(canonical) if name not in kept]
    return equalize_inputs(canonical, measure_channels(data, names)) if names else canonical


def equalize_inputs(mod: tvm.IRModule, statistics: Mapping[str, ChannelStatistics]) -> tvm.IRModule:
    """Scale those inputs where it pays off. The function stays the same, bit for bit.

    `mod` is prepared. What a product reads, `x`, becomes a value `x.equalized`. Inputs without
    statistics stay as they are.
    """
    graph = Graph(mod)
    scales: dict[relax.Var, np.ndarray] = {}
    for name, products in find_scaled_inputs(mod).items():
        weights = [constant_value(graph.values[var].args[1]) for var in products]
        if name in statistics and is_more_exact(
            [weight for weight in weights if weight is not None], statistics[name]
        ):
            scales.update(dict.fromkeys(products, statistics[name].scales()))
    if not scales:
        return mod
    equalized: dict[str, relax.Expr] = {}

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        if binding.var not in scales:
            return emitter.get(binding.value)
        call = graph.values[binding.var]
        scale, name = scales[binding.var], call.args[0].name
        if name not in equalized:
            inverse = relax.const(1.0 / scale, "float32")
            product = relax.op.multiply(emitter.get(call.args[0]), inverse)
            equalized[name] = emitter.emit(product, f"{name}.equalized")
        weight = constant_value(call.args[1]) * scale[:, None]
        out_dtype = str(call.attrs.out_dtype) if call.attrs.out_dtype else None
        return relax.op.matmul(equalized[name], relax.const(weight, "float32"), out_dtype)

    return rewrite_main(mod, visit)
