"""Grouped weights that reproduce a product's result on data: rounding in closed form, and scales.

The error of a result is (w - q) H (w - q)^T with H the sum of x x^T over rows of data. Codes are
rounded one column after the other, each making up for those before (`calibration.weights.fit`,
GPTQ); then, by turns, the scale of each group becomes the one of the least error for its codes, and
each code the best for the scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relayquant.base.grouping import (
    CHUNK,
    SMALLEST_SCALE,
    GroupedWeight,
    GroupFormat,
    choose_scales,
)
from relayquant.base.packing import count_groups, middle_code, pack_codes
from relayquant.base.runtime import (
    align_array,
    empty_aligned,
    limit_blas,
    map_on_threads,
    view_tensor,
)
from relayquant.codegen.eager.kernel_cache import KernelKey, host_kernels
from relayquant.codegen.kernels.floating.group_fit import (
    STRIP,
    GroupFitSpec,
    make_group_improvement,
    make_group_rounding,
)
from relayquant.stages.calibration.weights.fit import FloatArray, LeastSquares

Array = NDArray[np.float64]
Float32 = NDArray[np.float32]

#: Columns whose inputs are looked at together, at most: H is columns x columns.
MOST_COLUMNS = 2304
#: Rows of data whose products are summed up on one thread.
THREAD_ROWS = 2048
#: Columns whose scales and codes change the gradient of one another at once, that of others later.
#: With all of 2048 columns in one, errors are a third of a percent smaller, in twice the time.
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
        self.group_size = group_size
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
        # Each thread some rows and columns, and all added in order: the bits of the sums do not
        # depend on the number of threads.
        cuts = [
            (i, slice(start, start + THREAD_ROWS))
            for i in range(len(self.parts))
            for start in range(0, len(rows), THREAD_ROWS)
        ]

        def multiply(cut: tuple[int, slice]) -> Float32:
            x = np.ascontiguousarray(rows[cut[1], self.parts[cut[0]]])
            return x.T @ x

        with limit_blas():
            for (i, _), product in zip(cuts, map_on_threads(multiply, cuts), strict=True):
                self.blocks[i] += product

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
            self.problems[part, damping] = GroupProblem.of(
                self.blocks[part], damping, self.group_size
            )
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


@dataclass(frozen=True, eq=False)
class FitJob:
    """Some rows and columns of a weight that are fitted by themselves: plain data, which may travel
    to another process.

    Attributes:
        rows, columns: Where they are.
        weight: Those of the weight.
        importance: How much the squared error of each column counts.
        form, fit: Of the weight.
    """

    rows: slice
    columns: slice
    weight: NDArray[np.float32]
    importance: Float32
    form: GroupFormat
    fit: GroupFit


#: (codes, scales, zero points) of a job, and what finds those of all jobs, in any order, for what
#: is known of the inputs of their columns.
FoundRows: TypeAlias = tuple[NDArray, NDArray, NDArray]
RunJobs: TypeAlias = Callable[
    [Iterable[tuple[FitJob, "GroupProblem"]]], Iterable[tuple[FitJob, FoundRows]]
]


def run_job(job: FitJob, problem: GroupProblem) -> FoundRows:
    """Fit some rows and columns."""
    return fit_block(job.weight, job.form, problem, job.importance, job.fit)


def run_on_threads(
    jobs: Iterable[tuple[FitJob, GroupProblem]],
) -> Iterator[tuple[FitJob, FoundRows]]:
    """Fit on the threads of this process."""
    return map_on_threads(lambda item: (item[0], run_job(*item)), jobs)


def fit_groups(
    weight: NDArray[np.float32],
    form: GroupFormat,
    gram: Gram,
    fit: GroupFit,
    run: RunJobs = run_on_threads,
) -> GroupedWeight:
    """Codes and scales of a weight (N, K) for data of which `gram` tells, which do not depend on
    who runs the jobs.
    """
    weight = gram.aim(np.asarray(weight, "float32"))
    rows, features = weight.shape
    size, middle = form.size(features), middle_code(form.bits)
    codes = np.empty((rows, features), "uint8")
    scale = np.empty((rows, count_groups(features, size)), form.scale_dtype)
    zero_point = np.full(scale.shape, middle, "uint8")
    importance = gram.importance
    jobs = (
        (FitJob(own, part, weight[own, part], importance[part], form, fit), problem)
        for i, part in enumerate(gram.parts)
        for problem in [gram.prepare(i, fit.damping)]
        for own in cut_rows(rows, part.stop - part.start)
    )
    with limit_blas():
        for job, found in run(jobs):
            own, part = job.rows, job.columns
            groups = slice(part.start // size, count_groups(part.stop, size))
            codes[own, part], scale[own, groups], zero_point[own, groups] = found
    zeros = np.array(middle, "uint8") if form.is_symmetric else zero_point
    return GroupedWeight(pack_codes(codes, form.bits), scale, zeros, features, form)


def cut_rows(rows: int, columns: int) -> Iterator[slice]:
    """Rows of half of `CHUNK` weights at most, all parts of nearly one size: threads that share
    them are done together.
    """
    step = max(CHUNK // (2 * columns), 1)
    step = -(-rows // -(-rows // step))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


@dataclass(frozen=True, eq=False)
class GroupBlock:
    """Groups whose scales and codes are moved before the gradient of all others follows.

    Attributes:
        columns: Of `GroupProblem.hessian`, those of one group after the other.
        groups: Their numbers.
        starts: Where each begins among the columns, and where the last ends, int32.
        members: Which of `groups` each column is of, int32.
        order: Columns by falling importance, int32.
    """

    columns: slice
    groups: NDArray[np.int64]
    starts: NDArray[np.int32]
    members: NDArray[np.int32]
    order: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class GroupProblem:
    """H prepared for codes and scales, float32: sums of float64 would change the error that is
    reached by less than a thousandth, and take twice as long.

    Attributes:
        factor: Of `LeastSquares`, (1, K, K), columns by falling importance.
        order: Column of the weight at each place of `factor`, (K,).
        hessian: H + damping, (K, K), columns in `blocks`.
        importance: Of each column, (K,): the diagonal of H.
        size: Columns of a group.
        places: Column of the weight at each place of `hessian`, (K,).
        blocks: Of groups by falling importance.
    """

    factor: FloatArray
    order: NDArray[np.int64]
    hessian: FloatArray
    importance: Array
    size: int
    places: NDArray[np.int64]
    blocks: tuple[GroupBlock, ...]

    @staticmethod
    def of(block: Array, damping: float, size: int, dtype: str = "float32") -> GroupProblem:
        """From a block of a `Gram`, of weights in groups of `size`."""
        gram = block.astype(dtype)
        try:
            problem = LeastSquares.of(gram[None], damping)
        except np.linalg.LinAlgError:  # nearly singular: what float32 has of it is not positive
            problem = LeastSquares.of(block[None], damping)
        order, importance = problem.order[0], np.diagonal(block).copy()
        places, _ = order_groups(importance, size)
        hessian = np.take(np.take(gram, places, axis=0), places, axis=1)
        index, back = np.arange(len(block)), np.argsort(order)[places]
        hessian[index, index] = np.diagonal(problem.hessian[0])[back]
        factor = np.ascontiguousarray(problem.factor, dtype)
        return GroupProblem.arrange(factor, order, hessian, importance, size)

    @staticmethod
    def arrange(
        factor: FloatArray, order: NDArray, hessian: FloatArray, importance: Array, size: int
    ) -> GroupProblem:
        """From what is not known by `importance` alone."""
        places, blocks = order_groups(importance, size)
        return GroupProblem(factor, order, hessian, importance, size, places, blocks)


def order_groups(importance: Array, size: int) -> tuple[NDArray, tuple[GroupBlock, ...]]:
    """(`GroupProblem.places`, its blocks), for the importance of each column."""
    groups = np.arange(len(importance)) // size
    means = np.bincount(groups, importance) / np.bincount(groups)
    by_mean = np.argsort(-means, kind="stable")
    count = max(BLOCK // size, 1)
    places, blocks, start = [], [], 0
    for first in range(0, len(by_mean), count):
        own = by_mean[first : first + count]
        parts = [np.arange(g * size, min((g + 1) * size, len(importance))) for g in own]
        columns, sizes = np.concatenate(parts), [len(part) for part in parts]
        blocks.append(
            GroupBlock(
                slice(start, start + len(columns)),
                own,
                np.cumsum([0, *sizes], dtype="int32"),
                np.repeat(np.arange(len(own), dtype="int32"), sizes),
                np.argsort(-importance[columns], kind="stable").astype("int32"),
            )
        )
        places.append(columns)
        start += len(columns)
    return np.concatenate(places), tuple(blocks)


def fit_block(
    weight: FloatArray,
    form: GroupFormat,
    problem: GroupProblem,
    importance: Float32,
    fit: GroupFit,
) -> FoundRows:
    """(codes, scales, zero points) of some rows and columns of a weight.

    No step makes the error larger: a scale is the one of its dtype that is best for its codes, and
    a code the one that is best for all else. Of each block of groups first scales move and then
    codes, and one product brings that to the gradient of all others.
    """
    scale, zero_point = choose_scales(weight, form, importance)
    grid = Grid.of(scale, zero_point, form, problem.hessian.dtype)
    columns, order, places = spread_rows(weight, grid.dtype), problem.order, problem.places
    levels = round_groups(problem, pick_columns(columns, order), grid)
    if fit.rounds:
        found, order = pick_columns(levels, np.argsort(order)[places]), places
        improve_groups(problem, pick_columns(columns, places), found, grid, fit.rounds)
        levels = found
    levels += grid.zero_point[order // problem.size]
    codes = np.empty(weight.shape, "uint8")
    codes[:, order] = np.rint(levels[:, : len(weight)]).T
    scale = np.ascontiguousarray(grid.scale[:, : len(weight)].T)
    return codes, scale, zero_point.astype("uint8")


@dataclass(frozen=True, eq=False)
class Grid:
    """What codes stand for, groups first, (G, N) with N up to a multiple of `STRIP`: rows beyond
    those of the weight are zeros.

    Attributes:
        scale: In the dtype of the format; changed while codes are fitted.
        zero_point: In the dtype that is computed in.
        most: The highest code, (1,).
    """

    scale: NDArray
    zero_point: FloatArray
    most: FloatArray

    @property
    def dtype(self) -> np.dtype:
        """What is computed in."""
        return self.zero_point.dtype

    @property
    def spec(self) -> GroupFitSpec:
        """Of the kernels."""
        return GroupFitSpec(str(self.dtype), str(self.scale.dtype))

    @staticmethod
    def of(scale: NDArray, zero_point: NDArray, form: GroupFormat, dtype: np.dtype) -> Grid:
        """From scales and zero points (N, G)."""
        rows, groups = scale.shape
        shape = groups, -(-rows // STRIP) * STRIP
        scales, zeros = empty_aligned(shape, scale.dtype), empty_aligned(shape, dtype)
        scales[:, :rows], scales[:, rows:] = scale.T, 1
        zeros[:, :rows], zeros[:, rows:] = zero_point.T, 0
        return Grid(scales, zeros, np.array([2**form.bits - 1], dtype))


def spread_rows(weight: FloatArray, dtype: np.dtype) -> FloatArray:
    """Rows (N, K) as kernels read them: (K, N), N up to a multiple of `STRIP` with zeros."""
    rows, columns = weight.shape
    spread: Any = empty_aligned((columns, -(-rows // STRIP) * STRIP), dtype)
    spread[:, :rows], spread[:, rows:] = weight.T, 0
    return spread


def pick_columns(columns: FloatArray, order: NDArray[np.int64]) -> FloatArray:
    """Columns (K, N) in another order."""
    picked: Any = empty_aligned(columns.shape, columns.dtype)
    np.take(columns, order, axis=0, out=picked, mode="clip")  # "raise" takes a copy more
    return picked


def round_groups(problem: GroupProblem, rows: FloatArray, grid: Grid) -> FloatArray:
    """Levels (K, N) of weights (K, N), which are used up, columns in `GroupProblem.order`: in
    closed form, one column after the other.
    """
    kernel = host_kernels().get(KernelKey(make_group_rounding, grid.spec))
    factor, members = problem.factor[0], (problem.order // problem.size).astype("int32")
    levels, changes = (empty_aligned(rows.shape, grid.dtype) for _ in range(2))
    work = empty_aligned((BLOCK, STRIP), grid.dtype)
    for start in range(0, len(rows), BLOCK):
        own = slice(start, min(start + BLOCK, len(rows)))
        if start:
            rows[own] -= factor[:start, own].T @ changes[:start]
        lower = align_array(factor[own, own].T)
        given = (lower, members[own], grid.scale, grid.zero_point, grid.most, rows[own])
        kernel(*map(view_tensor, (*given, levels[own], changes[own], work[: len(lower)])))
    return levels


def improve_groups(
    problem: GroupProblem, rows: FloatArray, levels: FloatArray, grid: Grid, rounds: int
) -> None:
    """Move scales and levels (K, N) of weights (K, N), columns in `GroupProblem.places`, in place:
    block after block, `rounds` times.
    """
    kernel = host_kernels().get(KernelKey(make_group_improvement, grid.spec))
    left = empty_aligned(rows.shape, grid.dtype)
    np.multiply(levels, grid.scale[problem.places // problem.size], out=left)
    np.subtract(rows, left, out=left)
    most = max(len(block.order) for block in problem.blocks)
    moved, work = (empty_aligned((most, STRIP), grid.dtype) for _ in range(2))
    space = empty_aligned((most, rows.shape[1]), grid.dtype)
    for _ in range(rounds):
        for block in problem.blocks:
            own, size = block.columns, len(block.order)
            gradient = np.matmul(problem.hessian[own], left, out=space[:size])
            hessian = align_array(problem.hessian[own, own])
            scale, zeros = (align_array(a[block.groups]) for a in (grid.scale, grid.zero_point))
            given = (hessian, gradient, block.starts, block.members, block.order, zeros, grid.most)
            changed = (scale, levels[own], left[own], moved[:size], work[:size])
            kernel(*map(view_tensor, (*given, rows[own], *changed)))
            grid.scale[block.groups] = scale
