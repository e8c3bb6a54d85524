"""Statistics of an operator's input: a bounded sample of positions -> sums and second moments
for fitting its weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from relayquant.base.qtypes import QParams, QSpec
from relayquant.stages.calibration.weights.patches import LinearView

FloatArray = NDArray[np.float32]
Float64Array = NDArray[np.float64]

#: minimum rows that enter the matrix of second moments in one product; more if the matrix is wider
FEWEST_ROWS = 64


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """What is known of an operator's quantized input x, and of its input y in the float model.

    A long x is split into equal blocks, and the last is padded with zeros. Correlations between
    blocks are not kept.

    Attributes:
        gram: Sum of x x^T over the sampled rows without the waiting ones, (groups * blocks, k, k)
            float64. None while all rows wait, or if it is not needed.
        total: Sum of x over the sampled rows, (groups, K) float64.
        rows: Number of sampled rows.
        blocks: Number of blocks that each x is split into.
        waiting: Rows that have not entered `gram`, (groups, n, K) float32 each.
        with_gram: Whether `gram` is needed.
        real_total: Sum of y over the same rows. None if y is not observed.
        cross: Sum of x y^T without the waiting rows, as `gram`.
        real_waiting: y of the waiting rows.
    """

    gram: Float64Array | None
    total: Float64Array
    rows: int = 0
    blocks: int = 1
    waiting: tuple[FloatArray, ...] = ()
    with_gram: bool = True
    real_total: Float64Array | None = None
    cross: Float64Array | None = None
    real_waiting: tuple[FloatArray, ...] = ()

    @staticmethod
    def empty(
        groups: int,
        columns: int,
        *,
        with_gram: bool,
        most: int | None = None,
        with_real: bool = False,
    ) -> InputStatistics:
        """Return the statistics before any data; blocks have at most `most` columns."""
        blocks = -(-columns // (most or columns))
        total = np.zeros((groups, columns))
        real = total.copy() if with_real else None
        return InputStatistics(None, total, blocks=blocks, with_gram=with_gram, real_total=real)

    def add(
        self,
        view: LinearView,
        arrays: Sequence[NDArray],
        rows: int,
        rng: np.random.Generator,
        rounding: Callable[[FloatArray], FloatArray] | None = None,
        real: Sequence[NDArray] = (),
    ) -> InputStatistics:
        """Add at most `rows` rows of more batches, which may differ only in their first axis.

        `rounding` is applied to the drawn values. `real` is the input in the float model, if y is
        observed.
        """
        found = [np.asarray(array, "float32") for array in arrays]
        same = copy.deepcopy(rng) if self.real_total is not None else rng
        x = view.sample_rows(found, rows, rng, rounding)
        result = replace(
            self,
            # einsum adds the rows in the same order, in half the time.
            total=self.total + np.einsum("gnk->gk", x, dtype="float64"),
            rows=self.rows + x.shape[1],
            waiting=(*self.waiting, x) if self.with_gram else (),
        )
        if self.real_total is not None:
            y = view.sample_rows([np.asarray(array, "float32") for array in real], rows, same)
            result = replace(
                result,
                real_total=self.real_total + np.einsum("gnk->gk", y, dtype="float64"),
                real_waiting=(*self.real_waiting, y) if self.with_gram else (),
            )
        return result._settle_enough()

    def merge(self, other: InputStatistics) -> InputStatistics:
        """Merge with the statistics of the data that comes next. The result reuses the arrays of
        this one.
        """
        result = replace(self, total=self.total + other.total, rows=self.rows + other.rows)
        if self.real_total is not None and other.real_total is not None:
            result = replace(result, real_total=self.real_total + other.real_total)
        if other.gram is not None:
            result = result.settle()
            np.add(result.gram, other.gram, out=result.gram)
            if other.cross is not None:
                np.add(result.cross, other.cross, out=result.cross)
        result = replace(
            result,
            waiting=(*result.waiting, *other.waiting),
            real_waiting=(*result.real_waiting, *other.real_waiting),
        )
        return result._settle_enough()

    def _settle_enough(self) -> InputStatistics:
        """Settle the waiting rows if there are enough of them."""
        columns = -(-self.total.shape[1] // self.blocks)
        waiting = sum(part.shape[1] for part in self.waiting)
        return self.settle() if waiting >= max(FEWEST_ROWS, columns) else self

    def settle(self) -> InputStatistics:
        """Return the same statistics without waiting rows, and with a gram if it is needed."""
        if not self.with_gram or (self.gram is not None and not self.waiting):
            return self
        gram, cross = self.gram, self.cross
        if not self.waiting:
            columns = -(-self.total.shape[1] // self.blocks)
            gram = np.zeros((self.total.shape[0] * self.blocks, columns, columns))
            return replace(self, gram=gram, cross=None if self.real_total is None else gram.copy())
        x = split_columns(join_rows(self.waiting), self.blocks)
        # `overflows` says what became infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            gram = add_moments(gram, x, x)
            if self.real_total is not None:
                y = split_columns(join_rows(self.real_waiting), self.blocks)
                cross = add_moments(cross, x, y)
        return replace(self, gram=gram, cross=cross, waiting=(), real_waiting=())

    def cut_columns(self) -> list[slice]:
        """The columns of each block."""
        columns = self.total.shape[1]
        width = -(-columns // self.blocks)
        return [slice(i, min(i + width, columns)) for i in range(0, columns, width)]

    @property
    def overflows(self) -> bool:
        """Whether second moments overflow float32."""
        for moments in (self.gram, self.cross):
            with np.errstate(over="ignore", invalid="ignore"):
                if moments is not None and not np.isfinite(moments.sum(axis=(1, 2))).all():
                    return True
        most = float(np.finfo("float32").max)
        for part in (*self.waiting, *self.real_waiting):
            peak = float(np.abs(part).max(initial=0.0))
            # The bound first, because the sums are rarely needed.
            if peak * peak * part.shape[1] > most:
                squares = np.square(part, dtype="float64").sum(axis=1)
                if squares.max(initial=0.0) > most:
                    return True
        return False

    def find_gram(self, block: int) -> Float64Array:
        """Return the sum of x x^T over all sampled rows for the columns of one block, (groups,
        k, k).
        """
        return self._find_moments(block, self.gram, self.waiting)

    def find_cross(self, block: int) -> Float64Array:
        """As `find_gram`, the sum of x y^T."""
        return self._find_moments(block, self.cross, self.real_waiting)

    def _find_moments(
        self, block: int, settled: Float64Array | None, waiting: Sequence[FloatArray]
    ) -> Float64Array:
        """Return the sum of x times the waiting rows, and of what is settled."""
        columns = self.cut_columns()[block]
        k = columns.stop - columns.start
        moments = np.zeros((self.total.shape[0], k, k))
        if settled is not None:
            moments += settled[block :: self.blocks, :k, :k]
        if waiting:
            x = np.concatenate([part[:, :, columns] for part in self.waiting], axis=1)
            y = x  # the same array: numpy then computes half of the product
            if waiting is not self.waiting:
                y = np.concatenate([part[:, :, columns] for part in waiting], axis=1)
            moments += np.matmul(x.transpose(0, 2, 1), y)
        return moments

    def to_arrays(self) -> dict[str, NDArray]:
        """Return the statistics as arrays for a file; `restore` reads them back exactly."""
        arrays = {"total": self.total, "rows": np.array(self.rows, "int64")}
        if self.gram is not None:
            arrays["gram"] = self.gram
        if self.waiting:
            arrays["waiting"] = join_rows(self.waiting)
        if self.real_total is not None:
            arrays["real_total"] = self.real_total
        if self.cross is not None:
            arrays["cross"] = self.cross
        if self.real_waiting:
            arrays["real_waiting"] = join_rows(self.real_waiting)
        return arrays

    def restore(self, arrays: Mapping[str, NDArray]) -> InputStatistics:
        """Restore what `to_arrays` wrote, for statistics with the same start."""
        waiting, real = arrays.get("waiting"), arrays.get("real_waiting")
        return replace(
            self,
            gram=arrays.get("gram"),
            total=arrays["total"],
            rows=int(arrays["rows"]),
            waiting=() if waiting is None else (waiting,),
            real_total=arrays.get("real_total"),
            cross=arrays.get("cross"),
            real_waiting=() if real is None else (real,),
        )

    @property
    def mean(self) -> Float64Array:
        """E[x], (groups, K)."""
        return self.total / max(self.rows, 1)

    @property
    def real_mean(self) -> Float64Array:
        """E[y], (groups, K); E[x] if y is not observed."""
        total = self.total if self.real_total is None else self.real_total
        return total / max(self.rows, 1)


def join_rows(parts: Sequence[FloatArray]) -> FloatArray:
    """Join rows (groups, n, K) along n; a single part is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def add_moments(moments: Float64Array | None, x: FloatArray, y: FloatArray) -> Float64Array:
    """Return moments + x^T y over rows x and y (blocks, n, k). It takes the memory of the moments:
    for wide operators these are the largest arrays.
    """
    product = np.matmul(x.transpose(0, 2, 1), y)
    if moments is None:
        return product.astype("float64")
    return np.add(moments, product, out=moments)


def split_columns(rows: NDArray, blocks: int) -> NDArray:
    """Split (groups, n, K) into (groups * blocks, n, k), with the last block padded with zeros."""
    if blocks == 1:
        return rows
    groups, count, columns = rows.shape
    width = -(-columns // blocks)
    filled = np.zeros((groups, count, blocks * width), rows.dtype)
    filled[:, :, :columns] = rows
    split = filled.reshape(groups, count, blocks, width).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(split).reshape(groups * blocks, count, width)


def round_to_grid(values: FloatArray, qparams: QParams, spec: QSpec) -> FloatArray:
    """Return a new array with the nearest values that per-tensor parameters can express:
    quantize, then dequantize.
    """
    zero_point = np.float32(qparams.zero_point)
    low, high = (np.float32(limit) - zero_point for limit in spec.limits)
    rounded = values / qparams.scale
    np.rint(rounded, out=rounded)
    np.minimum(rounded, high, out=rounded)
    np.maximum(rounded, low, out=rounded)
    rounded *= qparams.scale
    return rounded
