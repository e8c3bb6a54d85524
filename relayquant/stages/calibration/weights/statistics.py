"""Statistics of an operator's input: a bounded sample of positions -> sums and second moments
for fitting its weight.
"""

from __future__ import annotations

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
    """What is known of an operator's quantized input x.

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
    """

    gram: Float64Array | None
    total: Float64Array
    rows: int = 0
    blocks: int = 1
    waiting: tuple[FloatArray, ...] = ()
    with_gram: bool = True

    @staticmethod
    def empty(
        groups: int, columns: int, *, with_gram: bool, most: int | None = None
    ) -> InputStatistics:
        """Return the statistics before any data; blocks have at most `most` columns."""
        blocks = -(-columns // (most or columns))
        return InputStatistics(
            None, np.zeros((groups, columns)), blocks=blocks, with_gram=with_gram
        )

    def add(
        self,
        view: LinearView,
        arrays: Sequence[NDArray],
        rows: int,
        rng: np.random.Generator,
        rounding: Callable[[FloatArray], FloatArray] | None = None,
    ) -> InputStatistics:
        """Add at most `rows` rows of more batches, which may differ only in their first axis.

        `rounding` is applied to the drawn values.
        """
        found = [np.asarray(array, "float32") for array in arrays]
        x = view.sample_rows(found, rows, rng, rounding)
        result = replace(
            self,
            # einsum adds the rows in the same order, in half the time.
            total=self.total + np.einsum("gnk->gk", x, dtype="float64"),
            rows=self.rows + x.shape[1],
            waiting=(*self.waiting, x) if self.with_gram else (),
        )
        return result._settle_enough()

    def merge(self, other: InputStatistics) -> InputStatistics:
        """Merge with the statistics of the data that comes next. The result reuses the arrays of
        this one.
        """
        result = replace(self, total=self.total + other.total, rows=self.rows + other.rows)
        if other.gram is not None:
            result = result.settle()
            np.add(result.gram, other.gram, out=result.gram)
        result = replace(result, waiting=(*result.waiting, *other.waiting))
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
        gram = self.gram
        if gram is None:
            columns = -(-self.total.shape[1] // self.blocks)
            gram = np.zeros((self.total.shape[0] * self.blocks, columns, columns))
        if self.waiting:
            x = split_columns(np.concatenate(self.waiting, axis=1), self.blocks)
            # In place: for wide operators this is the largest array.
            gram += np.matmul(x.transpose(0, 2, 1), x)
        return replace(self, gram=gram, waiting=())

    def cut_columns(self) -> list[slice]:
        """The columns of each block."""
        columns = self.total.shape[1]
        width = -(-columns // self.blocks)
        return [slice(i, min(i + width, columns)) for i in range(0, columns, width)]

    @property
    def overflows(self) -> bool:
        """Whether second moments overflow float32."""
        if self.gram is not None and not np.isfinite(self.gram.sum(axis=(1, 2))).all():
            return True
        most = float(np.finfo("float32").max)
        for part in self.waiting:
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
        columns = self.cut_columns()[block]
        k = columns.stop - columns.start
        gram = np.zeros((self.total.shape[0], k, k))
        if self.gram is not None:
            gram += self.gram[block :: self.blocks, :k, :k]
        if self.waiting:
            x = np.concatenate([part[:, :, columns] for part in self.waiting], axis=1)
            gram += np.matmul(x.transpose(0, 2, 1), x)
        return gram

    def to_arrays(self) -> dict[str, NDArray]:
        """Return the statistics as arrays for a file; `restore` reads them back exactly."""
        arrays = {"total": self.total, "rows": np.array(self.rows, "int64")}
        if self.gram is not None:
            arrays["gram"] = self.gram
        if self.waiting:
            arrays["waiting"] = np.concatenate(self.waiting, axis=1)
        return arrays

    def restore(self, arrays: Mapping[str, NDArray]) -> InputStatistics:
        """Restore what `to_arrays` wrote, for statistics with the same start."""
        waiting = arrays.get("waiting")
        return replace(
            self,
            gram=arrays.get("gram"),
            total=arrays["total"],
            rows=int(arrays["rows"]),
            waiting=() if waiting is None else (waiting,),
        )

    @property
    def mean(self) -> Float64Array:
        """E[x], (groups, K)."""
        return self.total / max(self.rows, 1)


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
