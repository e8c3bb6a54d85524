"""What shards saw: merged in their order it is what one process would have seen."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

import relayquant as rq
from relayquant.stages.calibration.weights.patches import LinearView
from relayquant.stages.calibration.weights.ranges import SampledRows
from relayquant.stages.calibration.weights.statistics import InputStatistics

DENSE = LinearView(None, (1, 0))
INFO = rq.observers.ValueInfo("x", rq.config.Role.ACTIVATION, rq.QSpec("uint8"), (1, 3))
ARRAYS = [np.random.default_rng(i).normal(size=(7, 3)).astype("float32") for i in range(12)]


def gather(observer, arrays):
    return reduce(observer.update, arrays, observer.start(INFO))


def add_all(statistics: InputStatistics, batches) -> InputStatistics:
    for i, array in batches:
        statistics = statistics.add(DENSE, [array], 100, np.random.default_rng(i))
    return statistics


@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("rows", [3, 200])  # fewer and more than enter the matrix at once
def test_input_statistics__parts_are_the_whole(rows, most):
    rng = np.random.default_rng(0)
    batches = [(i, rng.normal(size=(rows, 10)).astype("float32")) for i in range(6)]
    empty = InputStatistics.empty(1, 10, with_gram=True, most=most)
    whole = add_all(empty, batches).settle()
    parts = [add_all(empty, batches[i : i + 2]) for i in (0, 2, 4)]
    arrays = [{name: a.copy() for name, a in part.to_arrays().items()} for part in parts]
    saved = [empty.restore(part) for part in arrays]  # merging takes arrays over
    merged = reduce(InputStatistics.merge, saved).settle()
    again = reduce(InputStatistics.merge, parts).settle()
    assert merged.rows == whole.rows == 6 * min(rows, 100)
    np.testing.assert_allclose(merged.gram, whole.gram, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-9)
    np.testing.assert_array_equal(merged.gram, again.gram)


def test_input_statistics__without_second_moments():
    empty = InputStatistics.empty(1, 3, with_gram=False)
    parts = [add_all(empty, [(0, array)]) for array in ARRAYS[:2]]
    merged = reduce(InputStatistics.merge, parts)
    assert merged.settle().gram is None
    np.testing.assert_allclose(merged.mean, np.mean(ARRAYS[:2], axis=(0, 1))[None], rtol=1e-6)


def test_relative_mse__its_sample_does_not_depend_on_the_order():
    observer = rq.observers.RelativeMSE(values=60)
    whole = gather(observer, ARRAYS)
    merged = observer.merge(gather(observer, ARRAYS[5:]), gather(observer, ARRAYS[:5]))
    rows = [SampledRows.join(state.parts).take(20) for state in (whole, merged)]
    assert len(rows[0].values) == 20
    np.testing.assert_array_equal(rows[0].values, rows[1].values)
    assert observer.qparams(whole, INFO) == observer.qparams(merged, INFO)


def test_moving_average__merging_is_going_on():
    observer = rq.observers.MovingAverageMinMax(0.8)
    whole = gather(observer, ARRAYS)
    low, high = None, None
    for array in ARRAYS:
        a, b = float(array.min()), float(array.max())
        low = a if low is None else 0.8 * low + 0.2 * a
        high = b if high is None else 0.8 * high + 0.2 * b
    merged = observer.merge(gather(observer, ARRAYS[:5]), gather(observer, ARRAYS[5:]))
    for state in (whole, merged):
        np.testing.assert_allclose([state.low, state.high], [low, high], rtol=1e-12)
        assert state.count == 12
