"""Smoothing before fitting: weights found + data -> factors that move range between the columns of
a weight and the elements of its data.

    x w^T = (x / s) (w s)^T

A column with large data and small weights loses most where data and weights share scales with their
neighbours. Factors make both sides more even. Source: SmoothQuant, which takes s = max|x|^a /
max|w|^(1-a), and AWQ, which takes powers of the data's size and tries several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from tvm import relax

from relayquant.base.grouping import GroupFormat
from relayquant.flow.compression.find import WeightKey, WeightUse
from relayquant.flow.compression.fit import Float32, Gram
from relayquant.flow.compression.fit_layers import CompressData, Formats
from relayquant.flow.compression.settings import CompressSettings, find_data_group
from relayquant.ir.dialect.qnn.grouped import ROW_LIMIT

#: Number of batches, from the first ones, and rows of a weight that are looked at.
BATCHES, ROWS = 4, 1024
#: Powers of the data's size; a factor falls with the same power, at most 1 minus it, of the size of
#: the weight.
POWERS = (0.25, 0.5, 0.75, 1.0)
#: Factors are used if they lower the expected error at least to this share.
WORTHWHILE = 0.8
#: The largest magnitude of a group of data is estimated as this norm of the sizes of its elements:
#: right for one loud element, and for 32 to 576 alike within 15 %, if they are normal.
PEAK_NORM = 5
#: Smallest size of an element or a column, as a share of the mean.
SMALLEST = 0.01


def smooth_weights(
    uses: Sequence[WeightUse], forms: Formats, data: CompressData
) -> tuple[list[WeightUse], CompressData]:
    """Return the uses with the factors of their weights, and the data with these uses."""
    factors = choose_factors(uses, forms, data) if data.batches else {}
    smoothed = {id(use): replace(use, smoothing=factors.get(use.key)) for use in uses}
    own = {var: smoothed[id(use)] for var, use in data.uses.items() if id(use) in smoothed}
    return list(smoothed.values()), replace(data, uses=own)


def choose_factors(
    uses: Sequence[WeightUse], forms: Formats, data: CompressData
) -> dict[WeightKey, Float32]:
    """Return factors (K,) of the weights that gain by them; one array for weights that read the
    same data.

    A table keeps its rows as they are. So does a weight that the function reads several times, as
    its data differ.
    """
    counts = Counter(use.key for use in data.uses.values())
    tables = {use.source.key for use in uses if use.op == "take"}
    readers: dict[relax.Expr, list[WeightUse]] = {}
    for use in data.uses.values():
        readers.setdefault(use.data, []).append(use)
    found: dict[WeightKey, Float32] = {}
    seen: set[relax.Expr] = set()

    def meet(use: WeightUse, gram: Gram | None) -> np.ndarray:
        own = readers[use.data]
        if gram is not None and use.data not in seen:
            seen.add(use.data)
            if all(
                each.key in forms and counts[each.key] == 1 and each.source.key not in tables
                for each in own
            ):
                factors = find_best(own, forms, gram, data.settings)
                if factors is not None:
                    found.update({each.key: factors for each in own})
        return use.array

    replace(data, batches=data.batches[:BATCHES]).walk(meet)
    return found


def find_best(
    uses: Sequence[WeightUse], forms: Formats, gram: Gram, settings: CompressSettings
) -> Float32 | None:
    """Return the factors with the smallest expected error of the products that read one value.
    None: the weights stay.
    """
    weights = [np.array(use.array[:: -(-use.shape[0] // ROWS)]) for use in uses]  # one at a time
    own = [forms[use.key] for use in uses]
    size = floor_sizes(np.sqrt(gram.diagonal / max(gram.rows, 1)))
    columns = floor_sizes(np.sqrt(sum(np.square(w, dtype="float64").sum(axis=0) for w in weights)))
    candidates = [*list_factors(size, columns)]
    errors = [expect_error(weights, own, size, factors, settings) for factors in candidates]
    least = min(errors)
    if least > WORTHWHILE * errors[0]:
        return None
    return candidates[errors.index(least)].astype("float32")


def floor_sizes(sizes: np.ndarray) -> np.ndarray:
    """Return sizes (K,) without those that are far below the mean: other data may have them."""
    return np.maximum(sizes, max(SMALLEST * float(sizes.mean()), 1e-30))


def list_factors(size: np.ndarray, columns: np.ndarray) -> Iterator[np.ndarray]:
    """Yield candidates (K,), no change first. Their geometric mean is 1."""
    yield np.ones_like(size)
    for power in POWERS:
        logs = power * np.log(size) - min(power, 1 - power) * np.log(columns)
        yield np.exp(logs - logs.mean())


def expect_error(
    weights: Sequence[np.ndarray],
    forms: Sequence[GroupFormat],
    size: np.ndarray,
    factors: np.ndarray,
    settings: CompressSettings,
) -> float:
    """Return the expected squared error of products, up to a factor.

    Rounding changes each number by up to half a step, and a step is the largest magnitude of the
    group over the number of codes on one side. The numbers of a product are taken as independent.
    """
    features, total = len(size), 0.0
    scaled = size / factors
    for weight, form in zip(weights, forms, strict=True):
        moved = weight * factors.astype("float32")
        step = find_largest(np.abs(moved), form.size(features)) / 2 ** (form.bits - 1)
        groups = find_sums(np.square(scaled), form.size(features))
        total += float((np.square(step, dtype="float64") @ groups).sum())
        if settings.activation is not None:
            group = find_data_group(settings.activation, form.size(features), features) or features
            steps = find_sums(scaled**PEAK_NORM, group) ** (1 / PEAK_NORM) / ROW_LIMIT
            sums = find_sums(np.square(moved, dtype="float64").sum(axis=0), group)
            total += float(np.square(steps) @ sums)
    return total


def find_largest(values: np.ndarray, group: int) -> np.ndarray:
    """Return the largest of each group of the last axis."""
    return np.maximum.reduceat(values, np.arange(0, values.shape[-1], group), axis=-1)


def find_sums(values: np.ndarray, group: int) -> np.ndarray:
    """Return the sum of each group of the last axis."""
    return np.add.reduceat(values, np.arange(0, values.shape[-1], group), axis=-1)
