"""Grouped weights that reproduce a product's result on data: rounding in closed form, and scales.

The error of a result is (w - q) H (w - q)^T with H the sum of x x^T over rows of data. Codes are
rounded one column after the other, each making up for those before (`calibration.weights.fit`,
GPTQ); then, by turns, the scale of each group becomes the one of the least error for its codes, and
each code the best for the scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relayquant.calibration.weights.fit import (
    LeastSquares,
    improve_levels,
    round_rows,
)
from relayquant.grouping import (
    CHUNK,
    SMALLEST_SCALE,
    GroupedWeight,
    GroupFormat,
    choose_scales,
)
from relayquant.packing import count_groups, middle_code, pack_codes, spread_groups

Array = NDArray[np.float64]

#: Columns whose inputs are looked at together, at most: H is columns x columns.
MOST_COLUMNS = 2304
#: Columns whose scales change the gradient of one another at once, that of others later.
BLOCK = 256
#: Tried for the weight that makes up for changed data, as shares of the mean of the diagonal of H.
SHIFT_DAMPINGS = (0.01, 0.1, 1.0, 10.0)
#: Of a column, as a share of the mean: data may not have met what others will.
LEAST_IMPORTANCE = 0.01


@dataclass(frozen=True)
class GroupFit:
    """How grouped weights are fitted.

    Attributes:
        rounds: How many times scales and then codes are moved; 0: codes are rounded by the scales
            that are found for the weights.
        damping: Added to the diagonal of H, as a share of its mean.
        follows_float: Whether a product is to give what it gives in float, behind float weights,
            and so makes up for what weights before it have changed.
    """

    rounds: int = 2
    damping: float = 0.01
    follows_float: bool = False


class Gram:
    """Sums of x x^T over rows of data, float64, in blocks of columns that begin with a group.

    What inputs of different blocks have to do with one another is not kept.
    """

    def __init__(self, columns: int, group_size: int, *, with_shift: bool = False) -> None:
        count = -(-columns // MOST_COLUMNS)
        width = -(-columns // count)
        width = min(-(-width // group_size) * group_size, columns)
        self.parts = [slice(i, min(i + width, columns)) for i in range(0, columns, width)]
        self.blocks = [np.zeros((p.stop - p.start,) * 2) for p in self.parts]
        #: sums of (what x is in float, less x) x^T; none where that is not known
        self.shifts = [np.zeros_like(block) for block in self.blocks] if with_shift else []
        #: both, of half of the rows
        self.half_blocks = [np.zeros_like(block) for block in self.shifts]
        self.half_shifts = [np.zeros_like(block) for block in self.shifts]
        self.rows = 0

    def add(self, rows: NDArray[np.float32], exact: NDArray[np.float32] | None = None) -> None:
        """Count some rows of data (n, K); `exact` is what they are in float, for shifts."""
        if exact is not None and self.shifts:
            # Neighbours are alike: halves are told apart by what lies together.
            middle = (len(rows) + self.rows % 2) // 2
            for i, part in enumerate(self.parts):
                x = np.ascontiguousarray(rows[:middle, part])
                self.half_blocks[i] += x.T @ x
                self.half_shifts[i] += (exact[:middle, part] - x).T @ x
                self.shifts[i] += (exact[:, part] - rows[:, part]).T @ rows[:, part]
        self.rows += len(rows)
        for part, block in zip(self.parts, self.blocks, strict=True):
            x = np.ascontiguousarray(rows[:, part])
            block += x.T @ x

    def aim(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """The weight (N, K) whose products with the data are nearest to those of `weight` with what
        the data is in float: w + w S (H + damping)^-1, S being the sums of shifts.

        Damping is the one of `SHIFT_DAMPINGS` by which each half of the data tells most of the
        other; where none tells anything, as of little data, the weight stays.
        """
        if not self.shifts:
            return weight
        aimed = weight.copy()
        for i, part in enumerate(self.parts):
            own = weight[:, part]
            whole, half = (
                (blocks[i], own @ shifts[i])
                for blocks, shifts in (
                    (self.blocks, self.shifts),
                    (self.half_blocks, self.half_shifts),
                )
            )
            rest = whole[0] - half[0], whole[1] - half[1]
            losses = {
                damping: measure_shift(move_weight(*half, damping), *rest)
                + measure_shift(move_weight(*rest, damping), *half)
                for damping in SHIFT_DAMPINGS
            }
            best = min(losses, key=lambda damping: losses[damping])
            if losses[best] < 0:
                aimed[:, part] += move_weight(*whole, best)
        return aimed

    @property
    def diagonal(self) -> Array:
        """Sums of squares of each column, (K,)."""
        return np.concatenate([np.diagonal(block) for block in self.blocks])

    @property
    def importance(self) -> NDArray[np.float32]:
        """How much the squared error of each column counts, (K,) up to 1: none counts nothing."""
        diagonal = self.diagonal
        share = diagonal / max(diagonal.max(initial=0.0), SMALLEST_SCALE)
        return np.maximum(share, LEAST_IMPORTANCE * share.mean() + SMALLEST_SCALE).astype("float32")

    def measure(self, difference: NDArray[np.float32]) -> float:
        """Sum of the squares of x times the rows of a matrix (N, K), over all data."""
        total = 0.0
        for part, block in zip(self.parts, self.blocks, strict=True):
            own = difference[:, part]
            total += float(
                np.einsum("nk,nk->", own @ block.astype("float32"), own, dtype="float64")
            )
        return total


def move_weight(block: Array, shift: Array, damping: float) -> Array:
    """w S (H + damping)^-1 for w S (N, K), damping being a share of the mean of the diagonal."""
    extra = damping * max(float(np.diagonal(block).mean()), SMALLEST_SCALE)
    return np.linalg.solve(block + extra * np.eye(len(block)), shift.T).T


def measure_shift(move: Array, block: Array, shift: Array) -> float:
    """How the squared error of products changes if the weight moves; below 0 it becomes less."""
    return float(np.sum(move @ block * move) - 2 * np.sum(move * shift))


def fit_groups(
    weight: NDArray[np.float32], form: GroupFormat, gram: Gram, fit: GroupFit
) -> GroupedWeight:
    """Codes and scales of a weight (N, K) for data of which `gram` tells."""
    weight = gram.aim(np.asarray(weight, "float32"))
    rows, features = weight.shape
    size, middle = form.size(features), middle_code(form.bits)
    codes = np.empty((rows, features), "uint8")
    scale = np.empty((rows, count_groups(features, size)), form.scale_dtype)
    zero_point = np.full(scale.shape, middle, "uint8")
    importance = gram.importance
    for part, block in zip(gram.parts, gram.blocks, strict=True):
        problem = LeastSquares.of(block[None], fit.damping)
        groups = slice(part.start // size, count_groups(part.stop, size))
        step = max(1, CHUNK // (2 * features))
        for start in range(0, rows, step):
            own = slice(start, start + step)
            found = fit_block(weight[own, part], form, problem, importance[part], size, fit)
            codes[own, part], scale[own, groups], zero_point[own, groups] = found
    zeros = np.array(middle, "uint8") if form.is_symmetric else zero_point
    return GroupedWeight(pack_codes(codes, form.bits), scale, zeros, features, form)


def fit_block(
    weight: NDArray[np.float32],
    form: GroupFormat,
    problem: LeastSquares,
    importance: NDArray[np.float32],
    size: int,
    fit: GroupFit,
) -> tuple[NDArray, NDArray, NDArray]:
    """(codes, scales, zero points) of some rows and columns of a weight."""
    columns = weight.shape[1]
    scale, zero_point = choose_scales(weight, form, importance)
    zeros = np.full((1, 1, 1), float(middle_code(form.bits)))
    if not form.is_symmetric:
        zeros = spread_groups(zero_point, size, columns)[None].astype("float64")
    low, high = (limit - zeros for limit in (0.0, 2.0**form.bits - 1))
    if not form.is_symmetric:
        low, high = problem.permute(low), problem.permute(high)
    rows = problem.permute(weight[None].astype("float64"))

    def spread(values: NDArray) -> Array:
        return problem.permute(spread_groups(values.astype("float64"), size, columns)[None])

    levels = round_rows(problem, rows, spread(scale), low, high)
    best = problem.errors(rows - levels * spread(scale))[0]
    for _ in range(fit.rounds):
        trial = fit_scales(problem, rows, levels, scale, size)
        trial = np.where(abs(trial) > SMALLEST_SCALE, trial, scale).astype(form.scale_dtype)
        moved = improve_levels(problem, rows, levels, spread(trial), low, high, 1)
        error = problem.errors(rows - moved * spread(trial))[0]
        # Scales of float16 are rounded, by which an error may grow.
        better = error < best
        best = np.where(better, error, best)
        scale = np.where(better[:, None], trial, scale)
        levels = np.where(better[None, :, None], moved, levels)
    codes = np.rint(problem.restore(levels)[0] + zeros[0]).astype("uint8")
    return codes, scale, zero_point.astype("uint8")


def fit_scales(
    problem: LeastSquares, rows: Array, levels: Array, scale: NDArray, size: int
) -> Array:
    """Scales (N, G) of the least error for permuted levels (1, N, K): those of one group after the
    other, given all others.

    The columns lie group by group here. What the scales of `BLOCK` columns change in the gradient
    of all later columns is one product.
    """
    order, features = problem.order[0], rows.shape[-1]
    # place of each column of the weight among the permuted ones
    place = np.argsort(order)
    hessian = problem.hessian[0][np.ix_(place, place)]
    codes = levels[0][:, place]
    scale = scale.astype("float64")
    gradient = (rows[0][:, place] - codes * spread_groups(scale, size, features)) @ hessian
    width = max(BLOCK // size, 1) * size
    for start in range(0, features, width):
        stop = min(start + width, features)
        moved = np.empty((len(codes), stop - start))
        for first in range(start, stop, size):
            own = slice(first, min(first + size, stop))
            part = codes[:, own]
            reach = part @ hessian[own, start:stop]
            curve = np.einsum("nk,nk->n", reach[:, own.start - start : own.stop - start], part)
            slope = np.einsum("nk,nk->n", gradient[:, own], part)
            move = np.divide(slope, curve, out=np.zeros_like(slope), where=curve > 0)
            scale[:, first // size] += move
            gradient[:, start:stop] -= move[:, None] * reach
            moved[:, own.start - start : own.stop - start] = move[:, None] * part
        gradient[:, stop:] -= moved @ hessian[start:stop, stop:]
    return scale
