"""Fit of weights and biases: input statistics + float weight -> integer weights that reproduce an
operator's float result on its quantized input.

Rounding each weight to the nearest level minimizes the error of the weight. The error of the result
matters more: (w - q) H (w - q)^T with H = E[x x^T]. Weights that are rounded later can compensate
for the rounding error of earlier weights. This is optimal brain quantization in closed form
(Hassibi & Stork 1993; Frantar et al. 2022, GPTQ, https://arxiv.org/abs/2210.17323).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dtrtri, spotrf, strtri

from relayquant.base.qtypes import QParams, QSpec, conform_scale
from relayquant.base.runtime import map_on_threads
from relayquant.config import BiasCorrection, FitSettings, WeightRounding
from relayquant.stages.calibration.weights.adaround import learn_rounding
from relayquant.stages.calibration.weights.patches import LinearView
from relayquant.stages.calibration.weights.statistics import InputStatistics
from relayquant.stages.calibration.weights.target import find_target

Float64Array = NDArray[np.float64]
FloatArray = NDArray[np.float32 | np.float64]


#: columns that are settled before the rest of a matrix is updated, and before the rest of their
#: block is updated
BLOCK, PART = 128, 16

#: weights that are rounded at a time, as float64 in about eight arrays
MOST_WEIGHTS = 1 << 21

#: sums of squares above this, or all below its inverse, are computed in float64
MOST_SQUARES = 1e30


@dataclass(frozen=True, eq=False)
class FittedWeight:
    """An operator's fitted weight and bias. The weight is on the grid of `qparams`, float32, in
    the weight's layout.
    """

    weight: NDArray[np.float32]
    qparams: QParams
    bias: NDArray[np.float32] | None


def fit_operator(
    view: LinearView,
    statistics: InputStatistics,
    weight: NDArray,
    bias: NDArray | None,
    qparams: QParams,
    spec: QSpec,
    settings: FitSettings,
) -> FittedWeight:
    """Round `weight` and correct `bias` for the inputs in `statistics`.

    Args:
        view: The operator as matrix products.
        statistics: Statistics of the data operand as it is at inference. With the float model's
            data operand, the sums are fitted to the float model's (see `target`).
        weight: float32, in the operator's layout.
        bias: One value per output channel in any shape, or one for all; None if the operator has
            none.
        qparams: Parameters of the weight from its observer; the zero point is kept.
        spec: dtype and limits of the weight.
        settings: See `FitSettings`.
    """
    original = rows = view.weight_to_rows(weight.astype("float32", copy=False))
    mean, shift = statistics.mean, None
    if statistics.real_total is not None:
        shift = statistics.real_mean - mean
        outputs = rows.shape[0] * rows.shape[1]
        is_corrected = bias is not None and bias.size == outputs
        is_corrected &= settings.bias is BiasCorrection.WEIGHT
        ridge = settings.reconstruction.ridge
        target = find_target(statistics, rows, ridge, with_bias=is_corrected)
        rows, statistics = target.rows, target.statistics
    scale = view.channels_to_rows(qparams.scale.astype("float64"))
    zero_point = view.channels_to_rows(qparams.zero_point.astype("float64"))
    low, high = spec.limits[0] - zero_point, spec.limits[1] - zero_point
    if settings.rounding is not WeightRounding.NEAREST and statistics.with_gram:
        scale, levels = search_scales(statistics, rows, scale, low, high, spec, settings)
    else:
        levels = np.empty(rows.shape, "int32")
        grid = [np.broadcast_to(a, rows.shape[:2])[..., None] for a in (scale, low, high)]
        for part in cut_outputs(rows.shape):
            step, least, most = (a[:, part] for a in grid)
            levels[:, part] = np.clip(np.rint(rows[:, part] / step), least, most)
    new = scale.astype("float32").reshape(qparams.scale.shape)
    qparams = QParams(new, qparams.zero_point, qparams.dtype, qparams.axis)
    # float32 products: exactly what dequantize gives.
    rounded = levels.astype("float32") * view.channels_to_rows(new)[..., None]
    if bias is not None and settings.bias is BiasCorrection.WEIGHT:
        error = np.empty(rows.shape[:2])
        for part in cut_outputs(rows.shape):
            difference = original[:, part].astype("float64") - rounded[:, part]
            error[:, part] = np.einsum("gok,gk->go", difference, mean)
            if shift is not None:
                error[:, part] += np.einsum("gok,gk->go", original[:, part], shift)
        bias = correct_bias(bias, error.reshape(-1))
    return FittedWeight(view.rows_to_weight(rounded, weight.shape), qparams, bias)


def cut_outputs(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield slices of the outputs of weights (G, O, K), with about `MOST_WEIGHTS` weights each."""
    groups, outputs, columns = shape
    size = max(MOST_WEIGHTS // (groups * columns), 1)
    for start in range(0, outputs, size):
        yield slice(start, start + size)


def correct_bias(bias: NDArray, error: NDArray) -> NDArray[np.float32]:
    """Return `bias` plus one number per output channel; unchanged if it is one number for
    several channels.
    """
    if bias.size != error.size:
        return bias.astype("float32")
    return (bias.astype("float64") + error.reshape(bias.shape)).astype("float32")


def round_bias(result: FittedWeight, view: LinearView, data: QParams) -> NDArray | None:
    """Return the bias in whole units of the accumulator, data scale x weight scale, as the integer
    module has it.

    With few bits a unit may be larger than a step of the result, so that the simulation would be
    off without it. A sum that no data changes keeps its bias: such operators stay in float if
    rounding loses it.
    """
    bias, scale = result.bias, result.qparams.scale.reshape(-1)
    is_moved = view.weight_to_rows(result.weight).any(axis=-1).reshape(-1)
    if bias is None or data.scale.size != 1 or scale.size not in (1, bias.size):
        return bias
    if is_moved.size != bias.size:
        return bias
    real, unit = bias.reshape(-1).astype("float64"), data.scale.astype("float64") * scale
    rounded = np.where(is_moved, np.rint(real / unit) * unit, real)
    return rounded.reshape(bias.shape).astype("float32")


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """H prepared for rounding: columns by falling importance, and the triangular factor of its
    inverse.

    Attributes:
        hessian: H + damping, permuted, (G, K, K).
        factor: Upper triangular U with U^T U = H^-1, (G, K, K).
        order: Column of the weight at each position, (G, K).
    """

    hessian: FloatArray
    factor: FloatArray
    order: NDArray[np.int64]

    @staticmethod
    def of(gram: FloatArray, damping: float) -> LeastSquares:
        """Prepare H, given as the sum of x x^T, (G, K, K), in its dtype."""
        diagonal = np.einsum("gkk->gk", gram)
        order = np.argsort(-diagonal, axis=1, kind="stable")
        # Rows and then columns of a matrix: a tenth of the time of single elements.
        hessian = np.empty_like(gram)
        for to, matrix, index in zip(hessian, gram, order, strict=True):
            np.take(np.take(matrix, index, axis=0), index, axis=1, out=to)
        mean = diagonal.mean(axis=1)
        # If an input was always zero, its weights are rounded to nearest.
        extra = damping * np.where(mean > 0, mean, 1)
        index = np.arange(gram.shape[1])
        hessian[:, index, index] += extra[:, None]
        # U^T U = H^-1 from the Cholesky factor of H with rows and columns reversed: one
        # factorization and one triangular inverse instead of an inverse and a second factorization.
        is_double, reverse = gram.dtype == "float64", hessian[:, ::-1, ::-1]
        reverse = np.linalg.cholesky(reverse) if is_double else reverse.copy()
        for matrix in reverse:  # transposed: LAPACK stores columns first, so it needs no copy
            if not is_double:  # numpy takes as long for these as for float64
                _, failed = spotrf(matrix.T, lower=0, clean=1, overwrite_a=1)
                if failed:
                    raise np.linalg.LinAlgError("Matrix is not positive definite")
            invert = dtrtri if is_double else strtri
            matrix[:] = invert(matrix.T, lower=0, overwrite_c=1)[0].T
        return LeastSquares(hessian, reverse[:, ::-1, ::-1], order)

    def permute(self, rows: Float64Array) -> Float64Array:
        """Put the columns of (G, O, K) into the order of `order`."""
        return np.take_along_axis(rows, self.order[:, None, :], axis=2)

    def restore(self, rows: Float64Array) -> Float64Array:
        """Undo `permute`."""
        return np.take_along_axis(rows, np.argsort(self.order, axis=1)[:, None, :], axis=2)

    def errors(self, difference: Float64Array) -> FloatArray:
        """Return d H d^T for each row of (G, O, K): (G, O), in the dtype of H."""
        rows: FloatArray = difference.astype(self.hessian.dtype, copy=False)
        return np.einsum("gok,gok->go", rows @ self.hessian, rows)


def round_rows(
    problem: LeastSquares,
    rows: Float64Array,
    scale: Float64Array,
    low: Float64Array,
    high: Float64Array,
) -> Float64Array:
    """Round the permuted weights (G, O, K), one column after the other. Later columns compensate
    for the change that a column's rounding makes in the result.

    scale, low and high broadcast to (G, O). If weights of one output differ in them, they broadcast
    to (G, O, K), permuted. Levels are integers in low..high, float64.
    """
    # Columns first, so that each is contiguous.
    rest = np.ascontiguousarray(rows.transpose(2, 0, 1))
    step, least, most = (spread_columns(a, rows.shape) for a in (scale, low, high))
    levels = round_columns(problem.factor, rest, step, least, most)
    return np.ascontiguousarray(levels.transpose(1, 2, 0))


def round_columns(
    factor: FloatArray, rest: FloatArray, step: FloatArray, least: FloatArray, most: FloatArray
) -> FloatArray:
    """Run `round_rows` on weights (K, G, O), columns first, in their dtype.

    `rest` is overwritten. The other arguments have the same shape, factor is (G, K, K).
    """
    levels = np.empty_like(rest)

    def settle(k: int, own: FloatArray) -> FloatArray:
        level = np.divide(own, step[k], out=levels[k])
        round_between(level, least[k], most[k])
        change = level * step[k]
        np.subtract(own, change, out=change)
        change /= factor[:, k, k][:, None]
        return change

    sweep_columns(factor, rest, settle)
    return levels


def round_between(values: FloatArray, least: FloatArray, most: FloatArray) -> None:
    """Round to the nearest integers within limits, in place. For the few rows of a column
    `np.clip` would take as long as everything else.
    """
    np.rint(values, out=values)
    np.maximum(values, least, out=values)
    np.minimum(values, most, out=values)


def sweep_columns(
    matrix: FloatArray,
    values: FloatArray,
    settle: Callable[[int, FloatArray], FloatArray | None],
) -> None:
    """Settle one column after the other and subtract its effect from all later ones: `values[j] -=
    matrix[k, j] * settle(k, values[k])` for all j > k.

    Most of this is done for `BLOCK` columns at once, as a product (lazy updates: Frantar et al.
    2022, section 3.2). `PART` of them are small enough for the cache.

    Args:
        matrix: (G, K, K).
        values: (K, G, O), changed in place.
        settle: Returns the change; None means no change.
    """

    def spread(start: int, stop: int, end: int, changes: FloatArray) -> None:
        if stop < end and changes.any():
            rows = matrix[:, start:stop, stop:end].transpose(0, 2, 1)
            values[stop:end] -= np.matmul(rows, changes.transpose(1, 0, 2)).transpose(1, 0, 2)

    columns = len(values)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        changes = np.zeros((stop - start, *values.shape[1:]), values.dtype)
        for first in range(start, stop, PART):
            last = min(first + PART, stop)
            for k in range(first, last):
                change = settle(k, values[k])
                if change is not None:
                    changes[k - start] = change
                    values[k + 1 : last] -= matrix[:, k, k + 1 : last].T[:, :, None] * change
            spread(first, last, stop, changes[first - start : last - start])
        spread(start, stop, columns, changes)


def spread_columns(values: Float64Array, shape: tuple[int, ...]) -> Float64Array:
    """Broadcast values to (G, O) or to `shape` (G, O, K), columns first: (K, G, O)."""
    if values.shape == shape:
        return np.ascontiguousarray(values.transpose(2, 0, 1))
    return np.broadcast_to(values if values.ndim == 3 else values[..., None], shape).transpose(
        2, 0, 1
    )


def improve_levels(
    problem: LeastSquares,
    rows: Float64Array,
    levels: Float64Array,
    scale: Float64Array,
    low: Float64Array,
    high: Float64Array,
    sweeps: int,
) -> Float64Array:
    """Move single levels while this reduces the error, in up to `sweeps` passes.

    Arguments as for `round_rows`. The error never increases.
    """
    if not sweeps:
        return levels
    step, least, most = (spread_columns(a, rows.shape) for a in (scale, low, high))
    spread = scale if scale.ndim == 3 else scale[..., None]
    found = np.ascontiguousarray(levels.transpose(2, 0, 1))
    for _ in range(sweeps):
        difference = rows - found.transpose(1, 2, 0) * spread
        gradient = np.ascontiguousarray((difference @ problem.hessian).transpose(2, 0, 1))
        if not improve_columns(problem.hessian, gradient, found, step, least, most):
            break
    return np.ascontiguousarray(found.transpose(1, 2, 0))


def improve_columns(
    hessian: FloatArray,
    gradient: FloatArray,
    levels: FloatArray,
    step: FloatArray,
    least: FloatArray,
    most: FloatArray,
) -> bool:
    """Run one pass of `improve_levels` over levels (K, G, O), columns first, in place and in their
    dtype. Return whether any level moved.

    gradient, (K, G, O), is H times (weight - level * step). It is overwritten.
    """
    changed = False

    def settle(k: int, own: FloatArray) -> FloatArray | None:
        nonlocal changed
        level, move = levels[k], hessian[:, k, k][:, None] * step[k]
        np.divide(own, move, out=move)
        move += level
        round_between(move, least[k], most[k])
        move -= level
        if not move.any():
            return None
        changed = True
        level += move
        move *= step[k]
        return move

    sweep_columns(hessian, gradient, settle)
    return changed


@dataclass(frozen=True, eq=False)
class BlockedRows:
    """Weights (G, O, K) and the problem to round them for, one block of columns after the other.

    The memory for one block is bounded. All blocks together share at most one number per weight, so
    a wide layer needs little more memory than its weights.
    """

    statistics: InputStatistics
    rows: NDArray[np.float32]
    low: Float64Array
    high: Float64Array
    settings: FitSettings

    def visit_blocks(self, visit: Callable[[LeastSquares, slice], Float64Array]) -> Float64Array:
        """Sum `visit` over all blocks; it gets a block's problem and columns."""
        blocks = enumerate(self.statistics.cut_columns())
        if self.statistics.blocks == 1:
            return sum((visit(self.problem, columns) for _, columns in blocks), np.zeros(()))

        def run(item: tuple[int, slice]) -> Float64Array:
            number, columns = item
            return visit(self.make_problem(number), columns)

        return sum(map_on_threads(run, blocks), np.zeros(()))

    @functools.cached_property
    def problem(self) -> LeastSquares:
        """The problem of the only block."""
        return self.make_problem(0)

    def make_problem(self, block: int) -> LeastSquares:
        """Return the problem of a block: in float32, unless its data is too large or too small for
        squares in it, or damping is too little.
        """
        gram, damping = self.statistics.find_gram(block), self.settings.damping
        if 1 / MOST_SQUARES < gram.max(initial=0) < MOST_SQUARES:
            with suppress(np.linalg.LinAlgError):
                return LeastSquares.of(gram.astype("float32"), damping)
        return LeastSquares.of(gram, damping)

    def nearest_error(self, scale: Float64Array) -> float:
        """Error of rounding to nearest with one scale for all weights, (1, 1)."""
        step, low, high = scale[..., None], self.low[..., None], self.high[..., None]

        def visit(problem: LeastSquares, columns: slice) -> Float64Array:
            total = np.zeros(())
            for part in cut_outputs((*self.rows.shape[:2], columns.stop - columns.start)):
                rows = self.rows[:, part, columns].astype("float64")
                rows -= np.clip(np.rint(rows / step), low, high) * step
                total = total + problem.errors(problem.permute(rows)).sum()
            return total

        return float(self.visit_blocks(visit))

    def round(
        self, scale: Float64Array, *, with_errors: bool
    ) -> tuple[NDArray[np.int32], Float64Array]:
        """Return (levels (G, O, K), error of each output (G, O) or zeros) for scales that
        broadcast to (G, O).
        """
        grid = [
            np.broadcast_to(a.astype("float32"), self.rows.shape[:2])
            for a in (scale, self.low, self.high)
        ]
        levels = np.empty(self.rows.shape, "int32")

        def visit(problem: LeastSquares, columns: slice) -> Float64Array:
            errors = np.zeros(self.rows.shape[:2])
            for part in cut_outputs((*self.rows.shape[:2], columns.stop - columns.start)):
                step, low, high = (a[:, part] for a in grid)
                rows = problem.permute(self.rows[:, part, columns])
                found = self.round_part(problem, rows, step, low, high)
                if with_errors:
                    errors[:, part] = problem.errors(rows - found * step[..., None])
                levels[:, part, columns] = problem.restore(found)
            return errors

        errors = self.visit_blocks(visit)
        return levels, errors

    def round_part(
        self,
        problem: LeastSquares,
        rows: Float64Array,
        scale: Float64Array,
        low: Float64Array,
        high: Float64Array,
    ) -> Float64Array:
        """Return the levels of permuted weights, as the settings say."""
        settings = self.settings
        if settings.rounding is WeightRounding.ADAPTIVE:
            adaround = settings.adaround
            levels = learn_rounding(problem.hessian, rows, scale, low, high, adaround)
        else:
            levels = round_rows(problem, rows, scale, low, high)
        return improve_levels(problem, rows, levels, scale, low, high, settings.sweeps)


def search_scales(
    statistics: InputStatistics,
    rows: NDArray[np.float32],
    scale: Float64Array,
    low: Float64Array,
    high: Float64Array,
    spec: QSpec,
    settings: FitSettings,
) -> tuple[Float64Array, NDArray[np.int32]]:
    """Return (scale, levels) with the smallest error among multiples of `scale`: per output, or in
    total if there is one scale.

    rows: (G, O, K); scale, low and high: (G, O) or (1, 1).
    """
    blocks = BlockedRows(statistics, rows, low, high, settings)
    per_tensor = scale.size == 1 and rows.shape[0] * rows.shape[1] > 1
    factors = settings.tensor_factors
    if per_tensor and len(factors) > 1:
        scale = scale * min(factors, key=lambda factor: blocks.nearest_error(scale * factor))
    elif per_tensor:
        scale = scale * max(factors)

    def attempt(factor: float) -> tuple[Float64Array, NDArray[np.int32], Float64Array]:
        # The scale is float32 in the model, so rounding must use the float32 value.
        trial = np.asarray(conform_scale(scale * factor, spec))
        trial = trial.astype("float32").astype("float64")
        # With one multiple there is nothing to compare, and errors take longer than rounding.
        levels, error = blocks.round(trial, with_errors=bool(others))
        return trial, levels, error.sum(keepdims=True) if per_tensor else error

    first, *others = settings.scale_factors
    best_scale, best_levels, best_error = attempt(first)
    for factor in others:
        trial, levels, error = attempt(factor)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, trial, best_scale)
        np.copyto(best_levels, levels, where=better[..., None])
    return best_scale, best_levels
