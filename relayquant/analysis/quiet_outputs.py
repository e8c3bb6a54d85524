"""quiet_outputs: float module -> the energy that a sample of each output counts as at least.

A network that looks for a hand gives 0.0003 for most pictures and 0.9 for a few. An error of 0.0001
matters for none of them, but pictures without a hand have an SQNR of 10 dB by it. So if the last
operator keeps an output within -1..1, each sample counts as if one element were 0.1 at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import tvm
from tvm import relax

from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import call_name, iterate_results, result_expr
from relayquant.ir.rewrite.moves import find_moved

#: energy of one element of a tenth
LEAST = 0.01
#: operators with results of a magnitude of at most 1
BOUNDED = ("relax.sigmoid", "relax.tanh")


def find_least_energies(mod: tvm.IRModule) -> list[float]:
    """Return the energy that a sample of each result of main counts as at least, in order.

    Args:
        mod: A float module with one dataflow block, as `prepare_module` gives.
    """
    view = Graph(mod)
    return [find_least_energy(view, result) for result in iterate_results(result_expr(view))]


def find_least_energy(view: Graph, value: relax.Expr) -> float:
    """Return the energy that a sample of a value counts as at least: `LEAST`, or 0 if its operator
    does not bound it.
    """
    call = find_moved(view, value)
    if call is None:
        return 0.0
    if call_name(call) == "relax.clip":
        bounds = [getattr(bound, "value", math.inf) for bound in call.args[1:]]
        return LEAST if all(abs(float(bound)) <= 1 for bound in bounds) else 0.0
    return LEAST if call_name(call) in BOUNDED else 0.0


def measure_energies(expected: np.ndarray, got: np.ndarray, samples: int) -> np.ndarray:
    """Return signal and noise of each sample, (2, samples) float64.

    (2, 1) for the whole batch if axis 0 of the output does not count samples.
    """
    rows = samples if expected.ndim and len(expected) == samples else 1
    x, y = (array.reshape(rows, -1).astype("float64") for array in (expected, got))
    usable = np.isfinite(x)
    x, noise = np.where(usable, x, 0), np.where(usable, y - x, 0)
    return np.stack([np.square(x).sum(axis=1), np.square(noise).sum(axis=1)])


def find_missing(signal: np.ndarray, least: float) -> np.ndarray:
    """Return what the energies of samples lack to `least`, of the same shape."""
    return np.maximum(least - signal, 0.0)


def sum_missing(
    batches: Iterable[tuple[Sequence[np.ndarray], int]], least: Sequence[float]
) -> list[float]:
    """Return what the energies of each output's samples lack to `least`, over all batches.

    Args:
        batches: (results, number of samples) of each batch.
    """
    missing = [0.0] * len(least)
    for results, samples in batches:
        for i, (value, energy) in enumerate(zip(results, least, strict=True)):
            if energy:
                signal, _ = measure_energies(value, value, samples)
                missing[i] += float(find_missing(signal, energy).sum())
    return missing
