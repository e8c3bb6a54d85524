"""Float weights -> codes, scales and zero points of groups; see `relayquant.packing`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relayquant.packing import count_groups, middle_code, pack_codes, spread_groups, unpack_codes
from relayquant.qtypes import WHOLE_ROW, QSpec

Array = np.ndarray

#: Shares of the range that are tried as the range of the codes, the whole first.
SHARES = tuple(1.0 - 0.04 * step for step in range(11))
#: Scales below it would have no inverse.
SMALLEST_SCALE = 1e-30
#: Weights that are worked on at once, and those whose scales are chosen at once: these are in the
#: second level cache.
CHUNK, CACHED = 1 << 22, 1 << 17


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
        codes = unpack_codes(self.codes, self.format.bits, self.features).astype("int16")
        spread = lambda values: spread_groups(values, self.group_size, self.features)  # noqa: E731
        zeros = spread(self.zero_point) if self.zero_point.ndim else self.zero_point
        return (codes - zeros.astype("int16")).astype("float32") * spread(
            self.scale.astype("float32")
        )


def quantize_groups(
    weight: Array, form: GroupFormat, importance: Array | None = None
) -> GroupedWeight:
    """Codes nearest to a weight (N, K) float, by the scales of the least squared error.

    importance: (K,), how much the squared error of each column counts; None: all the same.
    """
    rows, features = weight.shape
    step = max(1, CHUNK // features)
    parts = [
        quantize_rows_of(weight[start : start + step], form, importance)
        for start in range(0, rows, step)
    ]
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
    short = groups * size - features
    counts = np.ones(features, "float32") if importance is None else importance
    counts = np.pad(counts.astype("float32"), (0, short)).reshape(groups, size)
    scale, zero_point = np.empty((rows, groups), form.scale_dtype), np.empty((rows, groups), "f4")
    step = max(1, CACHED // features)
    for start in range(0, rows, step):
        own = slice(start, start + step)
        # What fills the last group is a copy of its last weight, which changes no range.
        part = np.pad(weight[own], [(0, 0), (0, short)], mode="edge").reshape(-1, groups, size)
        scale[own], zero_point[own] = choose_of_groups(part, form, counts)
    return scale, zero_point


def choose_of_groups(grouped: Array, form: GroupFormat, counts: Array) -> tuple[Array, Array]:
    """(scales, zero points) of groups (N, G, size), the squared errors of whose weights count
    `counts` (G, size).
    """
    highest, middle = (1 << form.bits) - 1, float(middle_code(form.bits))
    low, high = grouped.min(axis=-1), grouped.max(axis=-1)
    best: tuple[Array, Array] | None = None
    bottom, error = np.minimum(low, 0), np.empty_like(grouped)
    least = np.full(low.shape, np.inf, "float32")
    for share in SHARES:
        for is_signed in (True, False) if form.is_symmetric else (False,):
            if form.is_symmetric:
                largest = np.where(-low > high, low, high)
                scale = (-largest / middle if is_signed else abs(largest) / (middle - 1)) * share
                zero = np.full_like(scale, middle)
            else:
                bottom, top = np.minimum(low, 0) * share, np.maximum(high, 0) * share
                scale = (top - bottom) / highest
                zero = np.zeros_like(scale)
            scale = np.where(abs(scale) > SMALLEST_SCALE, scale, 1)
            with np.errstate(over="ignore"):  # callers refuse scales that are not finite
                scale = scale.astype(form.scale_dtype)
            # What float16 rounds to nothing has no inverse.
            scale = np.where(scale == 0, np.finfo(form.scale_dtype).tiny, scale)
            steps = scale.astype("float32")
            if not form.is_symmetric:
                zero = np.clip(np.rint(-bottom / steps), 0, highest)
            # In place: what is worked on stays in the cache.
            np.divide(grouped, steps[..., None], out=error)
            np.rint(error, out=error)
            error += zero[..., None]
            np.clip(error, 0, highest, out=error)
            with np.errstate(invalid="ignore"):
                error -= zero[..., None]
                error *= steps[..., None]
                error -= grouped
                error *= error
                error *= counts
                loss = error.sum(axis=-1)
            if best is None:
                best, least = (scale, zero), loss
                continue
            is_less = loss < least
            least = np.where(is_less, loss, least)
            best = np.where(is_less, scale, best[0]), np.where(is_less, zero, best[1])
    assert best is not None
    return best
