"""Float weights -> codes, scales and zero points of groups; see `relayquant.base.packing`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from relayquant.base.packing import (
    count_groups,
    middle_code,
    pack_codes,
    spread_groups,
    unpack_codes,
)
from relayquant.base.qtypes import WHOLE_ROW, QSpec
from relayquant.base.runtime import map_on_threads

Array = np.ndarray

#: Shares of the range that are tried as the range of the codes, the whole first; and how far beside
#: the best of them another two.
SHARES, NEAR = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6), 0.04
#: Scales below it would have no inverse.
SMALLEST_SCALE = 1e-30
#: Weights that are worked on at once, and those whose scales are chosen at once: these are in the
#: second level cache.
CHUNK, CACHED = 1 << 22, 1 << 18


@dataclass(frozen=True)
class GroupFormat:
    """How weights are held: bits of a code, weights with one scale, and what scales are.

    `group_size` None is one group for each row.
    """

    bits: int = 4
    group_size: int | None = 32
    is_symmetric: bool = True
    scale_dtype: str = "float32"

    @staticmethod
    def of(spec: QSpec) -> GroupFormat:
        """What a specification with a `group_size` asks for."""
        size = None if spec.group_size == WHOLE_ROW else spec.group_size
        return GroupFormat(spec.code_bits, size, spec.is_symmetric, spec.scale_dtype)

    def size(self, features: int) -> int:
        """Weights of a group, of rows of so many."""
        return features if self.group_size is None else min(self.group_size, features)


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight (N, K) as `qnn.grouped_dense` takes it.

    Attributes:
        codes: Packed, uint8 (N, bytes of a row).
        scale: (N, groups), in the dtype of the format.
        zero_point: uint8 (N, groups), or () where the format is symmetric.
        features: K.
    """

    codes: Array
    scale: Array
    zero_point: Array
    features: int
    format: GroupFormat

    @property
    def group_size(self) -> int:
        """Weights of a group."""
        return self.format.size(self.features)

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays."""
        return self.codes.nbytes + self.scale.nbytes + self.zero_point.nbytes

    def decode(self) -> Array:
        """The weight that the codes stand for, float32 (N, K)."""
        found = np.empty((len(self.codes), self.features), "float32")
        step = max(1, CACHED // self.features)
        for start in range(0, len(found), step):
            own = slice(start, start + step)
            self.decode_rows(own, found[own])
        return found

    def decode_rows(self, rows: slice, out: Array) -> None:
        """Put what some rows of codes stand for into `out`."""
        spread = lambda values: spread_groups(values, self.group_size, self.features)  # noqa: E731
        out[:] = unpack_codes(self.codes[rows], self.format.bits, self.features)
        out -= spread(self.zero_point[rows]) if self.zero_point.ndim else self.zero_point
        out *= spread(self.scale[rows].astype("float32"))


def quantize_groups(
    weight: Array, form: GroupFormat, importance: Array | None = None
) -> GroupedWeight:
    """Codes nearest to a weight (N, K) float, by the scales of the least squared error.

    importance: (K,), how much the squared error of each column counts; None: all the same.
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
    """(packed codes, scales, zero points) of some rows."""
    weight = np.asarray(weight, "float32")
    scale, zero_point = choose_scales(weight, form, importance)
    codes = round_codes(weight, scale, zero_point, form)
    return pack_codes(codes, form.bits), scale, zero_point.astype("uint8")


def round_codes(weight: Array, scale: Array, zero_point: Array, form: GroupFormat) -> Array:
    """Nearest codes, uint8, of a weight (N, K) by scales and zero points (N, G)."""
    size, features = form.size(weight.shape[1]), weight.shape[1]
    steps = spread_groups(scale.astype("float32"), size, features)
    zeros = spread_groups(zero_point.astype("float32"), size, features)
    return np.clip(np.rint(weight / steps) + zeros, 0, (1 << form.bits) - 1).astype("uint8")


def choose_scales(
    weight: Array, form: GroupFormat, importance: Array | None = None
) -> tuple[Array, Array]:
    """(scales in the dtype of the format, zero points float32), (N, G) each, of a weight (N, K).

    Of each group the range that loses least among `SHARES` of its own. A symmetric range uses all
    codes: the weight of the largest magnitude gets the lowest code, of which there is one more
    below the middle than above, by a negative scale where it is positive; scales that are positive
    alone lose one of the codes, which at 2 and 3 bits are few.
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
        # What fills the last group is a copy of its last weight, which changes no range.
        part = np.pad(part, [(0, 0), (0, -part.shape[1] % size)], mode="edge")
        # Rows last: what differs between groups is then next to each other in memory.
        grouped = np.ascontiguousarray(part.T).reshape(-1, size, len(part))
        found = choose_of_groups(grouped, form, counts[some])
        scale[own, some], zero_point[own, some] = (each.T for each in found)
    return scale, zero_point


def choose_of_groups(grouped: Array, form: GroupFormat, counts: Array) -> tuple[Array, Array]:
    """(scales, zero points), (G, N) each, of groups (G, size, N), the squared errors of whose
    weights count `counts` (G, size).
    """
    low, high, error = grouped.min(axis=1), grouped.max(axis=1), np.empty_like(grouped)

    def attempt(share: Array, is_signed: bool) -> tuple[Array, ...]:
        scale, zero = place_codes(low, high, share, is_signed, form)
        steps, most = scale.astype("float32")[:, None], np.float32((1 << form.bits) - 1)
        # In place: what is worked on stays in the cache.
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
    """Of two tuples of arrays, at each place what belongs to the smaller number of their first."""
    is_less = other[0] < one[0]
    return tuple(np.where(is_less, b, a) for a, b in zip(one, other, strict=True))


def place_codes(
    low: Array, high: Array, share: Array, is_signed: bool, form: GroupFormat
) -> tuple[Array, Array]:
    """(scales in the dtype of the format, zero points float32) by which the codes cover a share of
    the range from `low` to `high`; symmetric ones have a sign where `is_signed`.
    """
    highest, middle = (1 << form.bits) - 1, np.float32(middle_code(form.bits))
    bottom = np.minimum(low, 0) * share
    if form.is_symmetric:
        largest = np.where(-low > high, low, high)
        scale = (-largest / middle if is_signed else abs(largest) / (middle - 1)) * share
    else:
        scale = (np.maximum(high, 0) * share - bottom) / highest
    scale = np.where(abs(scale) > SMALLEST_SCALE, scale, np.float32(1))
    with np.errstate(over="ignore"):  # callers refuse scales that are not finite
        scale = scale.astype(form.scale_dtype)
    # What float16 rounds to nothing has no inverse.
    scale = np.where(scale == 0, np.finfo(form.scale_dtype).tiny, scale)
    if form.is_symmetric:
        return scale, np.full_like(bottom, middle)
    return scale, np.clip(np.rint(-bottom / scale.astype("float32")), 0, highest)
