"""Codes and scales of groups, fitted to data."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from relayquant.base.grouping import GroupFormat, quantize_groups
from relayquant.base.packing import CODE_BITS
from relayquant.base.runtime import align_array, empty_aligned
from relayquant.codegen.kernels.grouped.fit import STRIP
from relayquant.flow.compression.fit import (
    MOST_COLUMNS,
    SHIFT_DAMPINGS,
    Gram,
    Grid,
    GroupFit,
    GroupProblem,
    fit_block,
    fit_groups,
    improve_groups,
)
from relayquant.stages.calibration.weights.fit import (
    BLOCK,
    LeastSquares,
    improve_levels,
    round_rows,
    sweep_columns,
)


def draw_data(rows, columns, seed=0):
    """Rows whose columns have much to do with one another, and differ in size."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(rows, columns // 3 + 1)) @ rng.normal(size=(columns // 3 + 1, columns))
    own = rng.normal(size=(rows, columns))
    return ((mixed + 0.3 * own) * rng.lognormal(size=columns)).astype("float32")


def make_gram(data, size):
    gram = Gram(data.shape[1], size)
    gram.add(data[: len(data) // 2])
    gram.add(data[len(data) // 2 :])
    return gram


def measure(data, weight, found):
    """Error of the product in float64, from the data itself."""
    difference = weight.astype("float64") - found.decode()
    return np.square(data.astype("float64") @ difference.T).sum()


@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("bits", CODE_BITS)
def test_fit__the_product_changes_less(bits, is_symmetric, scale_dtype):
    """Than by nearest rounding, and by every further step; the last group is short."""
    data = draw_data(400, 72)
    weight = np.random.default_rng(1).standard_t(4, (40, 72)).astype("float32")
    form, gram = GroupFormat(bits, 16, is_symmetric, scale_dtype), make_gram(data, 16)
    nearest = measure(data, weight, quantize_groups(weight, form))
    errors = [
        measure(data, weight, fit_groups(weight, form, gram, GroupFit(rounds)))
        for rounds in (0, 1, 8)
    ]
    assert errors[0] < 0.7 * nearest
    assert errors[2] <= errors[1] * (1 + 1e-6) <= errors[0] * (1 + 2e-6)
    assert errors[2] < 0.9 * errors[0] or bits == 8


def test_fit__near_brute_force():
    """Two groups of two weights at 2 bits, for which all codes can be tried, each with the best
    scales: over all draws most of the way from nearest rounding to there.
    """
    form, totals = GroupFormat(2, 2), np.zeros(3)
    for seed in range(20):
        data = draw_data(50, 4, seed)
        weight = np.random.default_rng(seed).normal(size=(1, 4)).astype("float32")
        nearest = measure(data, weight, quantize_groups(weight, form))
        gram = make_gram(data, 2)
        found = measure(data, weight, fit_groups(weight, form, gram, GroupFit(8, damping=1e-6)))
        best = find_least(data.astype("float64"), weight[0])
        assert found >= best * (1 - 1e-5)
        totals += nearest, found, best
    assert totals[1] - totals[2] < 0.4 * (totals[0] - totals[2])


def find_least(data, weight):
    """The least error of any codes of 2 bits with any two scales."""
    best = np.inf
    for codes in itertools.product(range(-2, 2), repeat=4):
        parts = np.array([[*codes[:2], 0, 0], [0, 0, *codes[2:]]], "float64")
        basis = data @ parts.T
        solved, *_ = np.linalg.lstsq(basis, data @ weight, rcond=None)
        best = min(best, np.square(basis @ solved - data @ weight).sum())
    return best


def test_improve_levels__in_blocks_is_as_one_after_the_other():
    """Against a plain loop over single weights with steps of their own."""
    rng = np.random.default_rng(7)
    data, weight = draw_data(600, 150), rng.normal(size=(1, 5, 150))
    problem = LeastSquares.of((data.astype("float64").T @ data)[None], 0.01)
    rows = problem.permute(weight)
    step = rng.uniform(0.3, 0.6, rows.shape)
    low, high = np.full(rows.shape, -4.0), np.full(rows.shape, 3.0)
    levels = round_rows(problem, rows, step, low, high)
    found = improve_levels(problem, rows, levels, step, low, high, 2)
    expected = levels.copy()
    for _ in range(2):
        for k in range(150):
            gradient = ((rows - expected * step) @ problem.hessian)[..., k]
            best = expected[..., k] + gradient / (problem.hessian[0, k, k] * step[..., k])
            expected[..., k] = np.clip(np.rint(best), -4, 3)
    np.testing.assert_array_equal(found, expected)
    assert (problem.errors(rows - found * step) <= problem.errors(rows - levels * step)).all()


def test_sweep_columns__is_as_one_after_the_other():
    """Beyond a block, for each of several matrices; what changes nothing says so."""
    rng = np.random.default_rng(12)
    columns = 2 * BLOCK + 21
    matrix, values = rng.normal(size=(2, columns, columns)), rng.normal(size=(columns, 2, 3))
    matrix /= columns
    expected, found = values.copy(), values.copy()
    for k in range(columns):
        for later in range(k + 1, columns if k % 5 else 0):
            expected[later] -= matrix[:, k, later, None] * np.sin(expected[k])
    sweep_columns(matrix, found, lambda k, own: np.sin(own) if k % 5 else None)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("size", [16, 32, 150])
def test_fit__is_as_one_group_and_code_after_the_other(size, is_symmetric, dtypes, monkeypatch):
    """Against a plain loop in float64 over groups and single weights, whose gradient is computed
    anew each time: blocks change nothing but when it is. The last group is short; there are more
    rows than a kernel works on together.
    """
    monkeypatch.setattr("relayquant.flow.compression.fit.BLOCK", 48)
    rng, columns = np.random.default_rng(15), 150
    gram = make_gram(draw_data(400, columns), size)
    form = GroupFormat(3, size, is_symmetric, dtypes[1])
    weight = rng.normal(size=(STRIP + 7, columns)).astype(dtypes[0])
    problem = GroupProblem.of(gram.blocks[0], 0.01, size, dtypes[0])
    assert sorted(problem.places) == list(range(columns))
    hessian = gram.blocks[0] + 0.01 * gram.diagonal.mean() * np.eye(columns)
    ordered = hessian[np.ix_(problem.places, problem.places)]
    np.testing.assert_allclose(problem.hessian, ordered, rtol=1e-5, atol=1e-5 * hessian.max())
    start, scale, zeros = fit_block(weight, form, problem, gram.importance, GroupFit(0))
    found = fit_block(weight, form, problem, gram.importance, GroupFit(2))
    zeros = np.repeat(zeros.astype("float64"), size, axis=1)[:, :columns]
    levels, scale = start - zeros, scale.astype("float64")
    spread_out = lambda: np.repeat(scale, size, axis=1)[:, :columns]  # noqa: E731
    for _ in range(2):
        for block in problem.blocks:
            for group in block.groups:
                own = slice(group * size, (group + 1) * size)
                part = np.zeros_like(levels)
                part[:, own] = levels[:, own]
                left = weight - levels * spread_out()
                slope, curve = ((a @ hessian * part).sum(1) for a in (left, part))
                scale[:, group] = (scale[:, group] + slope / curve).astype(dtypes[1])
            for k in problem.places[block.columns][block.order]:
                slope = ((weight - levels * spread_out()) @ hessian)[:, k]
                best = levels[:, k] + slope / (hessian[k, k] * spread_out()[:, k])
                levels[:, k] = np.clip(np.rint(best), -zeros[:, k], 7 - zeros[:, k])
    np.testing.assert_array_equal(found[0], levels + zeros)
    step = 1e-5 if dtypes[1] == "float32" else 2e-3  # a tie of float16, by the last bits of sums
    np.testing.assert_allclose(found[1], scale, rtol=step)


@pytest.mark.parametrize("spread", [1.0, 2.0])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_fit__float32_is_enough(is_symmetric, spread):
    """The error is that of float64 to a thousandth; also where columns differ by
    powers of ten, and rounding one of them is nearly made up for by others.
    """
    rng = np.random.default_rng(13)
    data = (draw_data(500, 300) * rng.lognormal(sigma=spread, size=300)).astype("float32")
    weight = rng.normal(size=(60, 300)).astype("float32")
    form, gram = GroupFormat(4, 32, is_symmetric), make_gram(data, 32)
    found = fit_groups(weight, form, gram, GroupFit(3))
    problem = GroupProblem.of(gram.blocks[0], 0.01, 32, "float64")
    codes, scale, zero_point = fit_block(
        weight.astype("float64"), form, problem, gram.importance, GroupFit(3)
    )
    spread_out = lambda values: np.repeat(values.astype("float64"), 32, axis=1)[:, :300]  # noqa: E731
    difference = weight - (codes - spread_out(zero_point)) * spread_out(scale)
    expected = np.square(data.astype("float64") @ difference.T).sum()
    assert measure(data, weight, found) == pytest.approx(expected, rel=1e-3)


def test_fit__does_not_depend_on_threads(monkeypatch):
    """Rows are dealt out, and a problem is made once for all weights that read the data."""
    monkeypatch.setattr("relayquant.flow.compression.fit.CHUNK", 1500)
    data, form = draw_data(300, 72), GroupFormat(4, 16)
    weight = np.random.default_rng(14).normal(size=(50, 72)).astype("float32")
    gram, found = make_gram(data, 16), []
    for threads in ("1", "3"):
        monkeypatch.setenv("TVM_NUM_THREADS", threads)
        found.append(fit_groups(weight, form, gram, GroupFit()))
    np.testing.assert_array_equal(found[0].codes, found[1].codes)
    np.testing.assert_array_equal(found[0].scale, found[1].scale)
    problem = gram.prepare(0, 0.01)
    assert gram.prepare(0, 0.01) is problem
    assert gram.prepare(0, 0.02) is not problem
    gram.add(data)
    assert gram.prepare(0, 0.01) is not problem


def test_round_groups__is_as_one_column_after_the_other(monkeypatch):
    """In float64 against a plain loop, which takes what a column changes from all later ones."""
    monkeypatch.setattr("relayquant.flow.compression.fit.BLOCK", 48)
    rng, columns, size = np.random.default_rng(16), 150, 32
    gram, form = make_gram(draw_data(400, columns), size), GroupFormat(4, size, is_symmetric=False)
    weight = rng.normal(size=(7, columns))
    problem = GroupProblem.of(gram.blocks[0], 0.01, size, "float64")
    codes, scale, zeros = fit_block(weight, form, problem, gram.importance, GroupFit(0))
    rest, factor = weight.copy(), problem.factor[0]
    for k, column in enumerate(problem.order):
        step, zero = (a[:, column // size].astype("float64") for a in (scale, zeros))
        level = np.clip(np.rint(rest[:, column] / step), -zero, 15 - zero)
        np.testing.assert_array_equal(codes[:, column], level + zero)
        change = (rest[:, column] - level * step) / factor[k, k]
        rest[:, problem.order] -= np.outer(change, np.where(np.arange(columns) > k, factor[k], 0))


@pytest.mark.parametrize("start", [1.0, 6e4])
def test_improve_groups__scales_move_to_what_their_dtype_has(start):
    """The nearest of float16, by numpy; what would be nothing or no number stays. Of one column,
    whose only code is 1: the gradient is how far it is to move.
    """
    wanted = np.array([1e-4, 3e-4, 0.5, -start, 1e5], "float32")
    expected = np.full(5, start, "float16")
    expected[:3] = [np.float16(np.float32(start) + move) for move in wanted[:3]]
    problem = GroupProblem.of(np.eye(1), 0, 1)
    shape = 1, STRIP
    rows, levels, scale, zeros = (empty_aligned(shape, "float32") for _ in range(4))
    levels[:], zeros[:], scale[:] = 1, -1, start
    rows[:] = np.float32(np.float16(start))
    rows[0, :5] += wanted
    grid = Grid(align_array(scale.astype("float16")), zeros, np.zeros(1, "float32"))
    improve_groups(problem, rows, levels, grid, 1)
    np.testing.assert_array_equal(grid.scale[0, :5], expected)
    np.testing.assert_array_equal(levels, 1)


def test_gram__blocks_begin_with_a_group():
    gram = Gram(2 * MOST_COLUMNS + 100, 32)
    assert all(part.start % 32 == 0 for part in gram.parts)
    assert gram.parts[-1].stop == 2 * MOST_COLUMNS + 100
    assert max(len(block) for block in gram.blocks) <= MOST_COLUMNS
    small = Gram(40, 64)
    data = draw_data(30, 40)
    small.add(data)
    np.testing.assert_allclose(small.blocks[0], data.astype("float64").T @ data, rtol=1e-3)
    expected = np.square(data.astype("float64") @ np.ones((40, 3))).sum()
    assert small.measure(np.ones((3, 40), "float32")) == pytest.approx(expected, rel=1e-4)


def test_aim__makes_up_for_what_data_lost():
    """Against numpy's least squares: the weight whose products with changed data are nearest to the
    float products, damped towards what it was.
    """
    exact = draw_data(300, 40, seed=8)
    data = (exact + np.random.default_rng(9).normal(size=exact.shape) + 0.5).astype("float32")
    weight = np.random.default_rng(10).normal(size=(6, 40)).astype("float32")
    gram = Gram(40, 16, with_shift=True)
    gram.add(data[:100], exact[:100])
    gram.add(data[100:], exact[100:])
    found = gram.aim(weight)

    def solve(share):
        damping = share * np.square(data).sum() / 40
        rows = np.concatenate([data, np.sqrt(damping) * np.eye(40)])
        wanted = np.concatenate([exact @ weight.T, np.sqrt(damping) * weight.T])
        return np.linalg.lstsq(rows, wanted, rcond=None)[0].T

    assert any(np.allclose(found, solve(share), 2e-3, 2e-3) for share in SHIFT_DAMPINGS)
    np.testing.assert_array_equal(make_gram(data, 16).aim(weight), weight)
    fitted = fit_groups(weight, GroupFormat(4, 16), gram, GroupFit(8, follows_float=True))
    plain = fit_groups(weight, GroupFormat(4, 16), make_gram(data, 16), GroupFit(8))
    errors = [np.square(exact @ weight.T - data @ q.decode().T).sum() for q in (fitted, plain)]
    assert errors[0] < 0.9 * errors[1]


def test_aim__stays_where_halves_of_the_data_tell_nothing_of_each_other():
    """Changes that have nothing to do with the data, on fewer rows than columns: what fits them
    exactly is chance.
    """
    rng = np.random.default_rng(11)
    data = rng.normal(size=(24, 40)).astype("float32")
    exact = data + rng.normal(size=data.shape).astype("float32")
    weight = rng.normal(size=(6, 40)).astype("float32")
    gram = Gram(40, 16, with_shift=True)
    gram.add(data, exact)
    fresh = rng.normal(size=(4000, 40))
    assert (
        np.square(fresh @ (gram.aim(weight) - weight).T).mean()
        < 0.02 * np.square(weight).sum(1).mean()
    )
