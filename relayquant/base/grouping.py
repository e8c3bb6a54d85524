"""Quantize weights in groups: float weights -> packed codes, scales and zero points.

`relayquant.base.packing` describes the codes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from relayquant.base.packing import (
    count_groups,
    middle_code,
    pack_codes,
    read_levels,
    spread_groups,
    unpack_codes,
    value_bits,
)
from relayquant.base.qtypes import WHOLE_ROW, QSpec
from relayquant.base.runtime import map_on_threads

Array = np.ndarray

#: Shares of the range that the codes may cover, the whole range first. NEAR: two more shares are
#: tried, at this distance on both sides of the best one.
SHARES, NEAR = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6), 0.04
#: Smaller scales have no finite inverse.
SMALLEST_SCALE = 1e-30
#: Number of weights processed at once, and number of weights whose scales are chosen at once (they
#: fit into the second-level cache).
CHUNK, CACHED = 1 << 22, 1 << 18


@dataclass(frozen=True)
class GroupFormat:
    """How grouped weights are stored: bits per code, group size, symmetry, and dtype of the scales.

    With `group_size` None, each row is one group. `levels` are the values of codes, 0..255 each, if
    the codes are numbers of levels (see `base.packing`).
    """

    bits: int = 4
    group_size: int | None = 32
    is_symmetric: bool = True
    scale_dtype: str = "float32"
    levels: tuple[int, ...] = ()

    @property
    def value_bits(self) -> int:
        """Bits of the value of a code."""
        return value_bits(self.bits, self.levels)

    @staticmethod
    def of(spec: QSpec) -> GroupFormat:
        """Return the format for a specification with a `group_size`."""
        size = None if spec.group_size == WHOLE_ROW else spec.group_size
        return GroupFormat(spec.code_bits, size, spec.is_symmetric, spec.scale_dtype)

    def size(self, features: int) -> int:
        """Return the number of weights per group for rows of `features` weights."""
        return features if self.group_size is None else min(self.group_size, features)


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight (N, K) as `qnn.grouped_dense` takes it.

    Attributes:
        codes: Packed, uint8 (N, bytes per row).
        scale: (N, groups), in the dtype of the format.
        zero_point: uint8 (N, groups), or () for a symmetric format. Offsets if it is a float array
            (N, groups).
        features: K.
    """

    codes: Array
    scale: Array
    zero_point: Array
    features: int
    format: GroupFormat

    @property
    def group_size(self) -> int:
        """Number of weights per group."""
        return self.format.size(self.features)

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the operators that take the three arrays."""
        form = self.format
        return {
            "bits": form.bits,
            "group_size": self.group_size,
            "features": self.features,
            "levels": form.levels,
        }

    @property
    def nbytes(self) -> int:
        """Size of the three arrays in bytes."""
        return self.codes.nbytes + self.scale.nbytes + self.zero_point.nbytes

    def decode(self) -> Array:
        """Dequantize the codes to a weight, float32 (N, K)."""
        found = np.empty((len(self.codes), self.features), "float32")
        step = max(1, CACHED // self.features)
        for start in range(0, len(found), step):
            own = slice(start, start + step)
            self.decode_rows(own, found[own])
        return found

    def decode_rows(self, rows: slice, out: Array) -> None:
        """Dequantize some rows of codes into `out`."""
        spread = lambda values: spread_groups(values, self.group_size, self.features)  # noqa: E731
        codes = unpack_codes(self.codes[rows], self.format.bits, self.features)
        out[:] = read_levels(codes, self.format.levels)
        scale = spread(self.scale[rows].astype("float32"))
        if self.zero_point.dtype != np.uint8:
            out *= scale
            out += spread(self.zero_point[rows].astype("float32"))
            return
        out -= spread(self.zero_point[rows]) if self.zero_point.ndim else self.zero_point
        out *= scale


def quantize_groups(
    weight: Array, form: GroupFormat, importance: Array | None = None
) -> GroupedWeight:
    """Quantize a weight (N, K) to the nearest codes, with the scales of the smallest squared error.

    Args:
        importance: (K,), the factor of each column's squared error. None weights all columns
            equally.
    """
    rows, features = weight.shape
    step = max(1, CHUNK // (4 * features))
    parts = list(
        map_on_threads(
            lambda start: quantize_rows_of(weight[start : start + step], form, importance),
            range(0, rows, step),
        )
    )
    codes = np.concatenate([part[0] for part in parts])
    scale = np.concatenate([part[1] for part in parts])
    zero_point = np.array(middle_code(form.bits), "uint8")
    if not form.is_symmetric:
        zero_point = np.concatenate([part[2] for part in parts])
    return GroupedWeight(codes, scale, zero_point, features, form)


def quantize_rows_of(
    weight: Array, form: GroupFormat, importance: Array | None
) -> tuple[Array, Array, Array]:
    """Return (packed codes, scales, zero points) of some rows."""
    weight = np.asarray(weight, "float32")
    scale, zero_point = choose_scales(weight, form, importance)
    codes = round_codes(weight, scale, zero_point, form)
    return pack_codes(codes, form.bits), scale, zero_point.astype("uint8")


def round_codes(weight: Array, scale: Array, zero_point: Array, form: GroupFormat) -> Array:
    """Round a weight (N, K) to the nearest codes, uint8, with scales and zero points (N, G)."""
    size, features = form.size(weight.shape[1]), weight.shape[1]
    steps = spread_groups(scale.astype("float32"), size, features)
    zeros = spread_groups(zero_point.astype("float32"), size, features)
    return np.clip(np.rint(weight / steps) + zeros, 0, (1 << form.bits) - 1).astype("uint8")


def choose_scales(
    weight: Array, form: GroupFormat, importance: Array | None = None
) -> tuple[Array, Array]:
    """Choose the scales of a weight (N, K) by the smallest squared error.

    For each group, every share in `SHARES` of its range is tried, and the one with the smallest
    error is kept. A symmetric format has one more code below the middle than above. The weight of
    the largest magnitude gets the lowest code, so a positive one needs a negative scale. With
    positive scales only, one code would stay unused, which matters at 2 and 3 bits.

    Returns:
        (scales in the dtype of the format, zero points float32), each (N, G).
    """
    size, (rows, features) = form.size(weight.shape[1]), weight.shape
    groups = count_groups(features, size)
    counts = np.ones(features, "float32") if importance is None else importance
    counts = np.pad(counts.astype("float32"), (0, groups * size - features)).reshape(groups, size)
    scale, zero_point = np.empty((rows, groups), form.scale_dtype), np.empty((rows, groups), "f4")
    step = min(max(CACHED // size, 64), 1024)
    width = max(CACHED // (step * size), 1)
    for start, first in itertools.product(range(0, rows, step), range(0, groups, width)):
        own, some = slice(start, start + step), slice(first, first + width)
        part = weight[own, first * size : (first + width) * size]
        # The last group is filled with copies of its last weight, which do not change the range.
        part = np.pad(part, [(0, 0), (0, -part.shape[1] % size)], mode="edge")
        # Rows go last, so that the same weight of neighbouring groups is adjacent in memory.
        grouped = np.ascontiguousarray(part.T).reshape(-1, size, len(part))
        found = choose_of_groups(grouped, form, counts[some])
        scale[own, some], zero_point[own, some] = (each.T for each in found)
    return scale, zero_point


def choose_of_groups(grouped: Array, form: GroupFormat, counts: Array) -> tuple[Array, Array]:
    """Choose (scales, zero points), each (G, N), for groups (G, size, N).

    `counts` (G, size) are the factors of the squared errors.
    """
    low, high, error = grouped.min(axis=1), grouped.max(axis=1), np.empty_like(grouped)

    def attempt(share: Array, is_signed: bool) -> tuple[Array, ...]:
        scale, zero = place_codes(low, high, share, is_signed, form)
        steps, most = scale.astype("float32")[:, None], np.float32((1 << form.bits) - 1)
        # In place: the working set stays in the cache.
        with np.errstate(invalid="ignore"):
            np.multiply(grouped, 1 / steps, out=error)
            np.rint(error, out=error)
            np.maximum(error, -zero[:, None], out=error)
            np.minimum(error, most - zero[:, None], out=error)
            np.multiply(error, steps, out=error)
            np.subtract(error, grouped, out=error)
            np.multiply(error, error, out=error)
            loss = np.matmul(counts[:, None], error)[:, 0]
        return loss, scale, zero, np.broadcast_to(share, loss.shape)

    best: tuple[Array, ...] | None = None
    for is_signed in (True, False) if form.is_symmetric else (False,):
        own = attempt(np.float32(SHARES[0]), is_signed)
        for share in SHARES[1:]:
            own = choose_less(own, attempt(np.float32(share), is_signed))
        for share in (own[3] - NEAR, own[3] + NEAR):
            own = choose_less(own, attempt(share, is_signed))
        best = own if best is None else choose_less(best, own)
    assert best is not None
    return best[1], best[2]


def choose_less(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
    """Choose between two tuples of arrays elementwise, by the smaller value in their first
    arrays.
    """
    is_less = other[0] < one[0]
    return tuple(np.where(is_less, b, a) for a, b in zip(one, other, strict=True))


def place_codes(
    low: Array, high: Array, share: Array, is_signed: bool, form: GroupFormat
) -> tuple[Array, Array]:
    """Compute scales and zero points with which the codes cover a share of the range `low`..`high`.

    With `is_signed`, the scales of a symmetric format may be negative.

    Returns:
        (scales in the dtype of the format, zero points float32).
    """
    highest, middle = (1 << form.bits) - 1, np.float32(middle_code(form.bits))
    bottom = np.minimum(low, 0) * share
    if form.is_symmetric:
        largest = np.where(-low > high, low, high)
        scale = (-largest / middle if is_signed else abs(largest) / (middle - 1)) * share
    else:
        scale = (np.maximum(high, 0) * share - bottom) / highest
    scale = np.where(abs(scale) > SMALLEST_SCALE, scale, np.float32(1))
    with np.errstate(over="ignore"):  # Callers reject scales that are not finite.
        scale = scale.astype(form.scale_dtype)
    # A scale that float16 rounds to 0 has no inverse.
    scale = np.where(scale == 0, np.finfo(form.scale_dtype).tiny, scale)
    if form.is_symmetric:
        return scale, np.full_like(bottom, middle)
    return scale, np.clip(np.rint(-bottom / scale.astype("float32")), 0, highest)
