"""Channel statistics of a value: data -> range and mean square per channel, and the estimated
noise of rounding them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from tvm import relax

from relayquant.base.qtypes import QSpec, choose_qparams
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value

MATMUL = "relax.matmul"
#: steps of an 8-bit value on each side of zero
STEPS = 127.0
#: an 8-bit value
UINT8 = QSpec("uint8")
#: shares of its range that are tried
SHARES = tuple(0.84**i for i in range(12))
#: elements that are measured together: they fit the second-level cache
PART_ELEMENTS = 1 << 16


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """Statistics of the channels (last axis) of a value: float64 (C,), or (G, C) in groups."""

    largest: np.ndarray  #: largest magnitude
    mean_square: np.ndarray
    #: some of the values, float32 (n, C)
    rows: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), "float32"))

    def scales(self) -> np.ndarray:
        """The power of two next to the largest magnitude of each channel, float32; 1 if all are
        0.
        """
        magnitude = np.where(self.largest > 0, self.largest, 1.0)
        return np.exp2(np.rint(np.log2(magnitude))).astype("float32")

    def divide(self, scales: np.ndarray) -> ChannelStatistics:
        """Return the statistics of the channels divided by `scales` (C,)."""
        return ChannelStatistics(self.largest / scales, self.mean_square / scales**2)


def measure_channels(
    batches: Iterable[Mapping[str, np.ndarray]], names: Iterable[str], kept: int = 0
) -> dict[str, ChannelStatistics]:
    """Measure the named values over a data set of `{input: array}`. Of each batch, about `kept`
    numbers are kept, in rows that are evenly spread. Else memory does not grow with the data.
    """
    names = tuple(names)
    largest: dict[str, np.ndarray] = {}
    squares: dict[str, np.ndarray] = {}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    rows = dict.fromkeys(names, 0)
    for batch in batches:
        for name in names:
            values = np.asarray(batch[name])
            values = values.reshape(-1, values.shape[-1])
            rows[name] += len(values)
            if kept:
                count = min(-(-kept // values.shape[-1]), len(values))
                at = np.linspace(0, len(values) - 1, count).astype("int64")
                parts[name].append(values[at].astype("float32"))
            # The squares of all values would take twice their memory.
            for part in np.array_split(values, max(values.size // PART_ELEMENTS, 1)):
                peak = np.maximum(part.max(axis=0, initial=0), -part.min(axis=0, initial=0))
                square = np.square(part, dtype="float64").sum(axis=0)
                largest[name] = np.maximum(largest.get(name, 0.0), peak)
                squares[name] = squares.get(name, 0.0) + square
    return {
        name: ChannelStatistics(
            largest[name],
            squares[name] / max(rows[name], 1),
            np.concatenate(parts[name] or [np.zeros((0, len(largest[name])), "float32")]),
        )
        for name in names
        if name in largest
    }


def estimate_noise(weight: np.ndarray, statistics: ChannelStatistics) -> float:
    """Estimate the mean square error of x @ weight if both are rounded to 8 bits, up to a common
    factor.

    The rounding of x has the variance of one step for every channel, times all weights of the
    channel. The rounding of the weights has one step per output, times the mean square of every
    channel.

    Args:
        weight: (C, N), or (G, C, N) if the channels of a group are read only by its own weights.
    """
    step = float(statistics.largest.max()) / STEPS  # its square may be beyond float32
    steps = np.abs(weight).max(axis=-2) / STEPS
    of_data = step**2 * np.square(weight, dtype="float64").sum()
    squares = np.square(steps, dtype="float64").sum(axis=-1)
    of_weights = (squares * statistics.mean_square.sum(axis=-1)).sum()
    return float(of_data + of_weights)


def measure_noise(rows: np.ndarray, scales: np.ndarray, importance: np.ndarray) -> float:
    """Measure the mean over rows (n, C) of the squared error of each channel, times its
    `importance` (C,), if rows / scales (C,) are rounded to 8 bits.

    It is less than `estimate_noise` says: zeros have no error, and of the range of all values as
    much is cut off as lowers the error.
    """
    scaled = (rows / scales).astype("float32")
    low, high = float(scaled.min(initial=0)), float(scaled.max(initial=0))
    least = math.inf
    for share in SHARES:
        qparams = choose_qparams(share * low, share * high, UINT8)
        scale, offset = np.float32(qparams.scale), np.float32(qparams.zero_point)
        first, last = UINT8.limits
        error = np.clip(np.rint(scaled / scale), first - offset, last - offset) * scale - scaled
        squares = np.square(error, dtype="float64").mean(axis=0)
        noise = float(squares @ (importance * scales**2))
        if noise >= least:  # a narrower range is worse still
            break
        least = noise
    return least


def divide_range(largest: np.ndarray, others: np.ndarray, power: float) -> np.ndarray:
    """Return log2 of largest^power / others^(1 - power) by channel, float64 (C,); 0 if one of
    the two is 0. This share of a channel's range moves to the weights (SmoothQuant, equation 4).
    """
    usable = (largest > 0) & (others > 0)
    values, weights = (np.log2(np.where(usable, each, 1.0)) for each in (largest, others))
    return np.where(usable, power * values - (1 - power) * weights, 0.0)


def find_products(graph: Graph, left: relax.Var) -> list[relax.Var]:
    """Return the products of `left` with constant float32 matrices."""
    return [user for user in graph.users[left] if is_weighted_product(graph, user, left)]


def is_weighted_product(graph: Graph, user: relax.Var, left: relax.Var) -> bool:
    """Whether `user` is a product of `left` with a constant float32 matrix."""
    if graph.op_name(user) != MATMUL or not graph.values[user].args[0].same_as(left):
        return False
    weight = constant_value(graph.values[user].args[1])
    return weight is not None and weight.ndim == 2 and weight.dtype == np.float32
