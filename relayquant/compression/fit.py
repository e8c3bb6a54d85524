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
    FloatArray,
    LeastSquares,
    improve_columns,
    round_columns,
)
from relayquant.grouping import (
    CHUNK,
    SMALLEST_SCALE,
    GroupedWeight,
    GroupFormat,
    choose_scales,
)
from relayquant.packing import count_groups, middle_code, pack_codes
from relayquant.runtime import limit_blas, map_on_threads

Array = NDArray[np.float64]
Float32 = NDArray[np.float32]

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
        self.problems: dict[tuple[int, float], GroupProblem] = {}

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
        self.problems.clear()
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

    def prepare(self, part: int, damping: float) -> GroupProblem:
        """The problem of one of `parts`, made once for all weights that read the data."""
        if (part, damping) not in self.problems:
            self.problems[part, damping] = GroupProblem.of(self.blocks[part], damping)
        return self.problems[part, damping]

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
    step = max(1, CHUNK // (2 * features))

    def fit_part(item: tuple[slice, slice, GroupProblem]) -> None:
        own, part, problem = item
        groups = slice(part.start // size, count_groups(part.stop, size))
        found = fit_block(weight[own, part], form, problem, importance[part], size, fit)
        codes[own, part], scale[own, groups], zero_point[own, groups] = found

    items = (
        (slice(start, start + step), part, gram.prepare(i, fit.damping))
        for i, part in enumerate(gram.parts)
        for start in range(0, rows, step)
    )
    with limit_blas():
        for _ in map_on_threads(fit_part, items):
            pass
    zeros = np.array(middle, "uint8") if form.is_symmetric else zero_point
    return GroupedWeight(pack_codes(codes, form.bits), scale, zeros, features, form)


@dataclass(frozen=True, eq=False)
class GroupProblem:
    """H prepared for codes and scales, float32: sums of float64 would change the error that is
    reached by less than a thousandth, and take twice as long.

    Attributes:
        hessian: H + damping, (K, K), columns as they lie in the weight.
        ordered: The same, (1, K, K), columns by falling importance.
        factor: Of `LeastSquares`, (1, K, K), in that order.
        order: Column of the weight at each place, (K,).
    """

    hessian: Float32
    ordered: Float32
    factor: Float32
    order: NDArray[np.int64]

    @staticmethod
    def of(block: Array, damping: float) -> GroupProblem:
        """From a block of a `Gram`."""
        problem = LeastSquares.of(block[None], damping)
        order = problem.order[0]
        hessian = block.astype("float32")
        hessian[order, order] = np.diagonal(problem.hessian[0])
        ordered, factor = (
            a.astype("float32", order="C") for a in (problem.hessian, problem.factor)
        )
        return GroupProblem(hessian, ordered, factor, order)


def fit_block(
    weight: Float32,
    form: GroupFormat,
    problem: GroupProblem,
    importance: Float32,
    size: int,
    fit: GroupFit,
) -> tuple[NDArray, NDArray, NDArray]:
    """(codes, scales, zero points) of some rows and columns of a weight.

    No step makes the error larger: a scale is the one of its dtype that is best for its codes, and
    a code the one that is best for all else.
    """
    scale, zero_point = choose_scales(weight, form, importance)
    # Columns first, as (K, 1, N): each is contiguous.
    rows = np.ascontiguousarray(weight.T)[:, None]

    def spread(values: NDArray) -> Float32:
        each = np.repeat(np.ascontiguousarray(values.T, "float32"), size, axis=0)
        return each[: len(rows), None]

    zeros = spread(zero_point)
    low, high = -zeros, 2.0**form.bits - 1 - zeros
    order, steps = problem.order, spread(scale)
    # Codes move in the order in which they were rounded: otherwise errors are one percent larger.
    grid = low[order], high[order]
    ordered = round_columns(problem.factor, rows[order], steps[order], *grid)
    levels = np.empty_like(rows)
    levels[order] = ordered
    for _ in range(fit.rounds):
        gradient = problem.hessian @ (rows - levels * steps)[:, 0]
        scale = fit_scales(problem.hessian, gradient, levels[:, 0], scale, size)
        steps = spread(scale)
        improve_columns(problem.ordered, gradient[order][:, None], ordered, steps[order], *grid)
        levels[order] = ordered
    return np.rint(levels + zeros)[:, 0].T.astype("uint8"), scale, zero_point.astype("uint8")


def fit_scales(
    hessian: FloatArray, gradient: FloatArray, levels: FloatArray, scale: NDArray, size: int
) -> NDArray:
    """Scales (N, G) of the least error for levels (K, N): those of one group after the other, given
    all others, in the dtype of `scale`.

    What the scales of `BLOCK` columns change in the gradient of the others is one product.

    Args:
        hessian: H, (K, K).
        gradient: H (weight - level * scale), (K, N); what it is for the new scales is put there.
    """
    scale = scale.T.copy()
    width = max(BLOCK // size, 1) * size
    for start in range(0, len(levels), width):
        stop = min(start + width, len(levels))
        own, moved = gradient[start:stop].copy(), np.empty_like(gradient[start:stop])
        for first in range(start, stop, size):
            group = slice(first, min(first + size, stop))
            part = levels[group]
            reach = hessian[start:stop, group] @ part
            inner = slice(group.start - start, group.stop - start)
            curve = np.einsum("kn,kn->n", reach[inner], part)
            slope = np.einsum("kn,kn->n", own[inner], part)
            best = np.divide(slope, curve, out=np.zeros_like(slope), where=curve > 0)
            move = move_scale(scale[first // size], best)
            own -= reach * move
            moved[inner] = part * move
        gradient -= hessian[:, start:stop] @ moved
    return np.ascontiguousarray(scale.T)


def move_scale(scale: NDArray, move: FloatArray) -> FloatArray:
    """Add to scales in place, as far as their dtype has it: what was added. A scale that would
    have no inverse, or be none, stays.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        old = scale.astype(move.dtype)
        moved = (old + move).astype(scale.dtype)
        fits = np.isfinite(moved) & (abs(moved) > SMALLEST_SCALE)
        scale[fits] = moved[fits]
        return scale.astype(move.dtype) - old
