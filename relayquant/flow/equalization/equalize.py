"""Optional last step of prepare: inputs whose channels differ much in range are scaled to one
range.

matmul(x, w) -> matmul(multiply(x, 1 / d), d * w), with one power of two d per channel (row of w).

One scale for a whole input gives its smallest channels few steps: of cepstral coefficients, the
first is a hundred times larger than the last, and carries no more information. Dividing each
channel by its range leaves the model what it is, bit for bit, since a power of two changes no
mantissa; the weights, which have one scale per output, pay with some of their resolution. What is
gained and paid is estimated, and nothing is done unless it is worth it. Scaling channels against
the next layer's weights is Nagel et al. 2019, "Data-free quantization through weight equalization
and bias correction", section 4.1 (https://arxiv.org/abs/1906.04721); here the range comes from
data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.ir.rewrite import Emitter, Graph, rewrite_main
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape

#: the estimated noise of the product must fall by this factor
WORTHWHILE_GAIN = 2.0
#: steps of an 8-bit value on either side of zero
STEPS = 127.0


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """What is known of the channels (last axis) of an input: float64 (C,), or (G, C) in groups."""

    largest: np.ndarray  #: largest magnitude
    mean_square: np.ndarray

    def scales(self) -> np.ndarray:
        """Power of two next to the largest magnitude of each channel, float32; 1 where all
        are 0.
        """
        magnitude = np.where(self.largest > 0, self.largest, 1.0)
        return np.exp2(np.rint(np.log2(magnitude))).astype("float32")

    def divide(self, scales: np.ndarray) -> ChannelStatistics:
        """Those of the channels divided by `scales` (C,)."""
        return ChannelStatistics(self.largest / scales, self.mean_square / scales**2)


def find_products(mod: tvm.IRModule) -> dict[str, tuple[relax.Var, ...]]:
    """Input name -> products with a constant matrix that read it, of a prepared module."""
    graph = Graph(mod)
    found: dict[str, tuple[relax.Var, ...]] = {}
    for param in graph.func.params:
        shape = tensor_shape(param)
        if tensor_dtype(param) != "float32" or not shape or not isinstance(shape[-1], int):
            continue
        products = []
        for user in graph.users[param]:
            call = graph.values[user]
            if graph.op_name(user) == "relax.matmul" and call.args[0].same_as(param):
                weight = constant_value(call.args[1])
                if weight is not None and weight.ndim == 2 and weight.dtype == np.float32:
                    products.append(user)
        if products:
            found[param.name] = tuple(products)
    return found


def measure_channels(
    batches: Iterable[Mapping[str, np.ndarray]], names: Iterable[str]
) -> dict[str, ChannelStatistics]:
    """Statistics of the named inputs over a data set of `{input: array}`; memory does not grow with
    it.
    """
    names = tuple(names)
    largest: dict[str, np.ndarray] = {}
    squares: dict[str, np.ndarray] = {}
    rows = dict.fromkeys(names, 0)
    for batch in batches:
        for name in names:
            values = np.asarray(batch[name], "float64")
            values = values.reshape(-1, values.shape[-1])
            peak, square = np.abs(values).max(axis=0, initial=0.0), (values**2).sum(axis=0)
            largest[name] = np.maximum(largest.get(name, 0.0), peak)
            squares[name] = squares.get(name, 0.0) + square
            rows[name] += len(values)
    return {
        name: ChannelStatistics(largest[name], squares[name] / max(rows[name], 1))
        for name in names
        if name in largest
    }


def estimate_noise(weight: np.ndarray, statistics: ChannelStatistics) -> float:
    """Mean square error of x @ weight when both are rounded to 8 bits, up to a common factor.

    The rounding of x has the variance of its step for every channel, and meets all weights of the
    channel; that of the weights has one step per output, and meets the mean square of every
    channel. `weight`: (C, N); (G, C, N) where the channels of a group meet its own weights only.
    """
    step = statistics.largest.max() / STEPS
    steps = np.abs(weight).max(axis=-2) / STEPS
    of_data = step**2 * np.square(weight, dtype="float64").sum()
    squares = np.square(steps, dtype="float64").sum(axis=-1)
    of_weights = (squares * statistics.mean_square.sum(axis=-1)).sum()
    return float(of_data + of_weights)


def is_worthwhile(weights: Iterable[np.ndarray], statistics: ChannelStatistics) -> bool:
    """Whether equal ranges of the channels make the products that read them clearly more exact."""
    weights, scales = tuple(weights), statistics.scales().astype("float64")
    scaled = statistics.divide(scales)
    before = sum(estimate_noise(weight, statistics) for weight in weights)
    after = sum(estimate_noise(weight * scales[:, None], scaled) for weight in weights)
    return before > WORTHWHILE_GAIN * after


def equalize(canonical: tvm.IRModule, dataset: Any, kept: Collection[str] = ()) -> tvm.IRModule:
    """A prepared module with the channels of its inputs brought to one range, where that is worth
    it; `kept` stay.
    """
    data = open_dataset(dataset, describe_inputs(canonical))  # what is no data set is told here
    names = {name: users for name, users in find_products(canonical).items() if name not in kept}
    return equalize_inputs(canonical, measure_channels(data, names)) if names else canonical


def equalize_inputs(mod: tvm.IRModule, statistics: Mapping[str, ChannelStatistics]) -> tvm.IRModule:
    """The module with those inputs scaled where it is worth it; the same function, bit for bit.

    `mod` is prepared; the scaled input `x` is a value `x.equalized`. Inputs without statistics stay
    as they are.
    """
    graph = Graph(mod)
    scales: dict[relax.Var, tuple[str, np.ndarray]] = {}
    for name, products in find_products(mod).items():
        weights = [constant_value(graph.values[var].args[1]) for var in products]
        if name in statistics and is_worthwhile(
            [weight for weight in weights if weight is not None], statistics[name]
        ):
            scales.update(dict.fromkeys(products, (name, statistics[name].scales())))
    if not scales:
        return mod
    equalized: dict[str, relax.Expr] = {}

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        if binding.var not in scales:
            return emitter.get(binding.value)
        call = graph.values[binding.var]
        name, scale = scales[binding.var]
        if name not in equalized:
            product = relax.op.multiply(
                emitter.get(call.args[0]), relax.const(1.0 / scale, "float32")
            )
            equalized[name] = emitter.emit(product, f"{name}.equalized")
        weight = constant_value(call.args[1]) * scale[:, None]
        out_dtype = str(call.attrs.out_dtype) if call.attrs.out_dtype else None
        return relax.op.matmul(equalized[name], relax.const(weight, "float32"), out_dtype)

    return rewrite_main(mod, visit)
