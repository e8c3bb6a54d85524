"""Fit of grouped weights: weight + data -> codes and scales that reproduce the product's result on
the data.

The error of a result is (w - q) H (w - q)^T, and H is the sum of x x^T over rows of data. Codes are
rounded one column after the other. Each column compensates for the columns before it
(`calibration.weights.fit`, GPTQ). Then two steps alternate: each group gets the scale with the
smallest error for its codes, and each weight gets the best code for the scales.
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
from relayquant.codegen.kernels.grouped.fit import (
    STRIP,
    GroupFitSpec,
    make_group_improvement,
    make_group_rounding,
)
from relayquant.stages.calibration.weights.fit import FloatArray, LeastSquares

Array = NDArray[np.float64]
Float32 = NDArray[np.float32]

#: largest number of columns in one H, which is columns x columns
MOST_COLUMNS = 2304
#: rows of data that one thread multiplies at a time
THREAD_ROWS = 2048
#: Columns whose scales and codes change each other's gradient at once. The gradient of other
#: columns is updated later. With all of 2048 columns in one block, errors are a third of a percent
#: smaller, in twice the time.
BLOCK = 256
#: dampings that are tried to compensate for changed data, as shares of the mean of H's diagonal
SHIFT_DAMPINGS = (0.01, 0.1, 1.0, 10.0)
#: About so many rows of a weight choose the damping. With all rows, this is most of the time.
SHIFT_ROWS = 128
#: smallest importance of a column, as a share of the mean: other data may use columns that this
#: data does not
LEAST_IMPORTANCE = 0.01


@dataclass(frozen=True)
class GroupFit:
    """How grouped weights are fitted.

    Attributes:
        rounds: Number of times that scales and then codes are improved. 0: codes are rounded with
            the scales that were chosen for the weights.
        damping: Added to the diagonal of H, as a share of its mean.
        follows_float: Whether a product should reproduce its result in the float model, and so
            compensate for the changes of weights before it.
    """

    rounds: int = 2
    damping: float = 0.01
    follows_float: bool = False


class Gram:
    """Sums of x x^T over rows of data, float64, in blocks of columns that start with a group.

    Correlations between inputs of different blocks are not kept.
    """

    def __init__(self, columns: int, group_size: int, *, with_shift: bool = False) -> None:
        self.group_size = group_size
        count = -(-columns // MOST_COLUMNS)
        width = -(-columns // count)
        width = min(-(-width // group_size) * group_size, columns)
        self.parts = [slice(i, min(i + width, columns)) for i in range(0, columns, width)]
        self.blocks = [np.zeros((p.stop - p.start,) * 2) for p in self.parts]
        #: sums of (float value of x - x) x^T; empty if the float value is not known
        self.shifts = [np.zeros_like(block) for block in self.blocks] if with_shift else []
        #: both sums for one half of the rows
        self.half_blocks = [np.zeros_like(block) for block in self.shifts]
        self.half_shifts = [np.zeros_like(block) for block in self.shifts]
        self.rows = 0
        self.problems: dict[tuple[int, float], GroupProblem] = {}

    def add(self, rows: NDArray[np.float32], exact: NDArray[np.float32] | None = None) -> None:
        """Add some rows of data (n, K). `exact` is their value in the float model, for shifts."""
        if exact is not None and self.shifts:
            # Neighbouring rows are similar, so the halves are contiguous.
            middle = (len(rows) + self.rows % 2) // 2
            for i, part in enumerate(self.parts):
                x = np.ascontiguousarray(rows[:middle, part])
                self.half_blocks[i] += x.T @ x
                self.half_shifts[i] += (exact[:middle, part] - x).T @ x
                self.shifts[i] += (exact[:, part] - rows[:, part]).T @ rows[:, part]
        self.rows += len(rows)
        self.problems.clear()
        # Each thread multiplies some rows and columns, and the results are added in order. So the
        # sums do not depend on the number of threads, bit for bit.
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
        """Return the weight (N, K) whose products with the data are nearest to the products of
        `weight` with the float data: w + w S (H + damping)^-1, where S is the sum of shifts.

        Of `SHIFT_DAMPINGS`, the damping is used with which each half of the data predicts the other
        half best. If no damping predicts anything, for example with little data, the weight stays.
        """
        if not self.shifts:
            return weight
        aimed = weight.copy()
        for i, part in enumerate(self.parts):
            own = weight[:, part]
            some = own[:: -(-len(own) // SHIFT_ROWS)]
            half = self.half_blocks[i], some @ self.half_shifts[i]
            rest = self.blocks[i] - half[0], some @ self.shifts[i] - half[1]
            losses = {
                damping: measure_shift(move_weight(*half, damping), *rest)
                + measure_shift(move_weight(*rest, damping), *half)
                for damping in SHIFT_DAMPINGS
            }
            best = min(losses, key=lambda damping: losses[damping])
            if losses[best] < 0:
                aimed[:, part] += move_weight(self.blocks[i], own @ self.shifts[i], best)
        return aimed

    @property
    def diagonal(self) -> Array:
        """Sums of squares of each column, (K,)."""
        return np.concatenate([np.diagonal(block) for block in self.blocks])

    @property
    def importance(self) -> NDArray[np.float32]:
        """Weight of the squared error of each column, (K,), up to 1. No column has 0."""
        diagonal = self.diagonal
        share = diagonal / max(diagonal.max(initial=0.0), SMALLEST_SCALE)
        return np.maximum(share, LEAST_IMPORTANCE * share.mean() + SMALLEST_SCALE).astype("float32")

    def prepare(self, part: int, damping: float) -> GroupProblem:
        """Prepare the problem of one of `parts`, once for all weights that read the data."""
        if (part, damping) not in self.problems:
            self.problems[part, damping] = GroupProblem.of(
                self.blocks[part], damping, self.group_size
            )
        return self.problems[part, damping]

    def measure(self, difference: NDArray[np.float32]) -> float:
        """Return the sum of squares of x times the rows of a matrix (N, K), over all data."""
        total = 0.0
        for part, block in zip(self.parts, self.blocks, strict=True):
            own = difference[:, part]
            total += float(
                np.einsum("nk,nk->", own @ block.astype("float32"), own, dtype="float64")
            )
        return total


def move_weight(block: Array, shift: Array, damping: float) -> Array:
    """Return w S (H + damping)^-1 for w S (N, K). The damping is a share of the diagonal's mean."""
    extra = damping * max(float(np.diagonal(block).mean()), SMALLEST_SCALE)
    return np.linalg.solve(block + extra * np.eye(len(block)), shift.T).T


def measure_shift(move: Array, block: Array, shift: Array) -> float:
    """Return the change of the products' squared error if the weight moves. Negative is better."""
    return float(np.sum(move @ block * move) - 2 * np.sum(move * shift))


@dataclass(frozen=True, eq=False)
class FitJob:
    """Some rows and columns of a weight that are fitted independently. It is plain data that can be
    sent to another process.

    Attributes:
        rows, columns: The slices of the weight.
        weight: The weight's values there.
        importance: Weight of the squared error of each column.
        form, fit: The weight's format and how it is fitted.
    """

    rows: slice
    columns: slice
    weight: NDArray[np.float32]
    importance: Float32
    form: GroupFormat
    fit: GroupFit


#: (codes, scales, zero points) of a job, and the function that runs jobs with their problems and
#: yields results in any order
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
    """Return codes and scales of a weight (N, K) for the data in `gram`. The result does not
    depend on how the jobs are run.
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
    """Yield slices of rows with at most half of `CHUNK` weights, all nearly equally large. So
    threads that share them finish together.
    """
    step = max(CHUNK // (2 * columns), 1)
    step = -(-rows // -(-rows // step))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


@dataclass(frozen=True, eq=False)
class GroupBlock:
    """Groups whose scales and codes are improved before the gradient of all others is updated.

    Attributes:
        columns: Columns of `GroupProblem.hessian`, one group after the other.
        groups: Indices of the groups.
        starts: Start of each group among the columns, and the end of the last, int32.
        members: Index into `groups` for each column, int32.
        order: Columns by falling importance, int32.
    """

    columns: slice
    groups: NDArray[np.int64]
    starts: NDArray[np.int32]
    members: NDArray[np.int32]
    order: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class GroupProblem:
    """H prepared for codes and scales, in float32. With float64 sums the error would change by less
    than a thousandth, in twice the time.

    Attributes:
        factor: Factor of `LeastSquares`, (1, K, K), columns by falling importance.
        order: Column of the weight at each index of `factor`, (K,).
        hessian: H + damping, (K, K), columns in `blocks`.
        importance: Importance of each column, (K,): the diagonal of H.
        size: Columns of a group.
        places: Column of the weight at each index of `hessian`, (K,).
        blocks: Blocks of groups by falling importance.
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
        """Prepare a block of a `Gram` for weights in groups of `size`."""
        gram = block.astype(dtype)
        try:
            problem = LeastSquares.of(gram[None], damping)
        except np.linalg.LinAlgError:  # nearly singular: its float32 form is not positive definite
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
        """Make a problem from `importance` alone, if nothing else is known."""
        places, blocks = order_groups(importance, size)
        return GroupProblem(factor, order, hessian, importance, size, places, blocks)


def order_groups(importance: Array, size: int) -> tuple[NDArray, tuple[GroupBlock, ...]]:
    """Return (`GroupProblem.places`, its blocks) for the importance of each column."""
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
    """Return (codes, scales, zero points) of some rows and columns of a weight.

    No step makes the error larger: a scale is the best one of its dtype for its codes, and a code
    is the best one for everything else. In each block of groups, first scales and then codes are
    improved. One product then updates the gradient of all others.
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
    """Scales and zero points of codes, groups first, (G, N). N is rounded up to a multiple of
    `STRIP`, and the added rows are weights of zero.

    Attributes:
        scale: In the dtype of the format; changed while codes are fitted.
        zero_point: In the dtype of the computation.
        most: The highest code, (1,).
    """

    scale: NDArray
    zero_point: FloatArray
    most: FloatArray

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the computation."""
        return self.zero_point.dtype

    @property
    def spec(self) -> GroupFitSpec:
        """Specification of the kernels."""
        return GroupFitSpec(str(self.dtype), str(self.scale.dtype))

    @staticmethod
    def of(scale: NDArray, zero_point: NDArray, form: GroupFormat, dtype: np.dtype) -> Grid:
        """Make a grid from scales and zero points (N, G)."""
        rows, groups = scale.shape
        shape = groups, -(-rows // STRIP) * STRIP
        scales, zeros = empty_aligned(shape, scale.dtype), empty_aligned(shape, dtype)
        scales[:, :rows], scales[:, rows:] = scale.T, 1
        zeros[:, :rows], zeros[:, rows:] = zero_point.T, 0
        return Grid(scales, zeros, np.array([2**form.bits - 1], dtype))


def spread_rows(weight: FloatArray, dtype: np.dtype) -> FloatArray:
    """Transpose rows (N, K) for the kernels: (K, N), with N padded by zeros to a multiple of
    `STRIP`.
    """
    rows, columns = weight.shape
    spread: Any = empty_aligned((columns, -(-rows // STRIP) * STRIP), dtype)
    spread[:, :rows], spread[:, rows:] = weight.T, 0
    return spread


def pick_columns(columns: FloatArray, order: NDArray[np.int64]) -> FloatArray:
    """Put columns (K, N) into another order."""
    picked: Any = empty_aligned(columns.shape, columns.dtype)
    np.take(columns, order, axis=0, out=picked, mode="clip")  # "raise" would make another copy
    return picked


def round_groups(problem: GroupProblem, rows: FloatArray, grid: Grid) -> FloatArray:
    """Return levels (K, N) of weights (K, N) with columns in `GroupProblem.order`, in closed
    form, one column after the other. The weights are overwritten.
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
    """Improve scales and levels (K, N) of weights (K, N) with columns in `GroupProblem.places`,
    in place: block after block, `rounds` times.
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
