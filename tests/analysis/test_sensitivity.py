"""sensitivity: the calibration graph switched per operator, ranked, and turned into a mapping."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from float_models import draw_batches, residual_model

import relayquant as rq
from relayquant.analysis.error_statistics import ErrorSums
from relayquant.analysis.sensitivity import (
    Simulation,
    add_lines,
    find_rounding_operators,
    join_batches,
    measure_sensitivity,
)
from relayquant.base.events import CallbackList
from relayquant.base.runtime import Executor
from relayquant.data import open_dataset, take_samples
from relayquant.data.item import describe_inputs
from relayquant.stages.annotation import annotate


@pytest.fixture(scope="module")
def prepared():
    mod = residual_model()
    prepared = rq.prepare(mod)
    return rq.calibrate(prepared, draw_batches(mod, 16))


@pytest.fixture(scope="module")
def data(prepared):
    return open_dataset(draw_batches(prepared.mod, 8, seed=1), describe_inputs(prepared.mod))


@pytest.fixture(scope="module")
def simulation(prepared, data):
    return Simulation(prepared, data)


@pytest.fixture(scope="module")
def report(prepared, data):
    return measure_sensitivity(prepared, data)


@pytest.mark.slow
def test_simulation__nothing_quantized_is_the_float_model(prepared, data, simulation):
    run = Executor(rq.compile(prepared.mod))
    for batch, (got,) in zip(data, simulation.run(()), strict=True):
        np.testing.assert_allclose(got, run.run("main", [*batch.values()])[0], rtol=1e-4, atol=1e-5)
    assert simulation.score(()) == float("inf")


@pytest.mark.slow
def test_simulation__all_quantized_is_near_the_integers(prepared, data, simulation, report):
    qmod = rq.lower(rq.convert_to_reference(prepared), prepared.backend)
    run = Executor(rq.compile(qmod))
    sums = ErrorSums()
    for batch, (expected,) in zip(data, simulation.expected, strict=True):
        sums = sums.update(expected, run.run("main", [*batch.values()])[0])
    assert report.score == pytest.approx(sums.sqnr, abs=3.0)


def test_sensitivity__one_row_for_each_operator_that_rounds(prepared, report):
    names = {row.name for row in report.rows}
    assert names == {operator.name for operator in find_rounding_operators(prepared)}
    quantized = {operator.name for operator in prepared.plan.operators if operator.quantized}
    assert "left" in quantized - names  # max_pool moves values
    assert names <= quantized


def test_sensitivity__worst_first_and_each_better_than_all(report):
    scores = [row.score for row in report.rows]
    assert scores == sorted(scores)
    assert all(np.isfinite(scores))
    assert max(scores) > report.score + 1


def test_sensitivity__finds_the_operator_with_a_bad_range(prepared, data):
    parameters = dict(prepared.parameters)
    key = next(k for n, k in prepared.plan.operator("deep").operands if n == "weight")
    good = parameters[key]
    bad = rq.QParams(good.scale * 60, good.zero_point, good.dtype, good.axis)
    # The fitted weight stands on the old grid: without it, the float weight meets the bad one.
    broken = rq.PreparedModel(
        prepared.mod,
        prepared.plan,
        prepared.graph,
        prepared.backend,
        {**parameters, key: bad},
        {k: v for k, v in prepared.constants.items() if k != "deep:weight"},
    )
    found = measure_sensitivity(broken, data)
    assert found.rows[0].name == "deep"
    assert found.rows[0].score < found.rows[1].score - 6


def test_sensitivity__is_deterministic(prepared, data, report):
    assert measure_sensitivity(prepared, data) == report


def test_sensitivity__user_metric_gets_whole_outputs(prepared, data):
    shapes = []

    def largest_error(expected, got):
        shapes.append((len(expected), expected[0].shape, got[0].shape))
        return -float(np.abs(expected[0] - got[0]).max())

    found = measure_sensitivity(prepared, data, largest_error, samples=5)
    assert set(shapes) == {(1, (5, 3), (5, 3))}
    assert found.metric == "largest_error"
    assert found.samples == 5
    assert all(row.score < 0 for row in found.rows)


def test_sensitivity__metric_without_a_number_is_an_error(prepared, data):
    with pytest.raises(rq.ConfigError, match="returned None"):
        measure_sensitivity(prepared, data, lambda a, b: None)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda a: 0.0, "cannot be called with two arguments"),
        (lambda a, b, c: 0.0, "cannot be called with two arguments.*'c'"),
        (lambda a, b: a[0] - b[0], r"returned an array of shape \(\d+, 3\); allowed: a number"),
        (lambda a, b: float("nan"), "returned nan"),
        (lambda a, b: (a.argmax(1) == b.argmax(1)).mean(), "no attribute 'argmax'.*two lists"),
        (lambda a, b: a[0] + np.zeros(999), r"failed \(ValueError.*of shape \(\d+, 3\)"),
        (lambda a, b: a[1].mean(), "failed .IndexError"),
        (lambda a, b: 1 // 0, "failed .ZeroDivisionError"),
    ],
)
def test_sensitivity__wrong_metric_is_explained(prepared, data, metric, message):
    with pytest.raises(rq.ConfigError, match=message):
        rq.sensitivity(prepared, data, metric)


@pytest.mark.parametrize("error", [RuntimeError("mine"), rq.DataError("no label", code="RQ301")])
def test_sensitivity__what_a_metric_raises_on_purpose_is_passed_on(prepared, data, error):
    def stop(expected, got):
        raise error

    with pytest.raises(type(error)) as caught:
        rq.sensitivity(prepared, data, stop)
    assert caught.value is error
    assert "raised by the metric stop. It gets two lists" in error.__notes__[0]


def test_simulation__data_that_is_shuffled_is_an_error(prepared, data):
    batches, order = list(data), [1]
    source = open_dataset(lambda: iter(batches[:: order[0]]), describe_inputs(prepared.mod))
    simulation = Simulation(prepared, source)
    assert len(list(simulation.pair_batches())) == len(batches)
    order[0] = -1
    with pytest.raises(rq.DataError, match=r"Batch 0 .* differs from the first.*shuffle=False"):
        list(simulation.pair_batches())


def test_sensitivity__csv(report):
    lines = report.to_csv().splitlines()
    assert lines[0] == "name,op,score"
    assert len(lines) == 1 + len(report.rows)
    assert lines[1].startswith(f"{report.rows[0].name},{report.rows[0].op},")


def test_sensitivity__metric_that_is_no_function_is_an_error(prepared, data):
    with pytest.raises(rq.ConfigError, match="metric is 'accuracy'; allowed: a function"):
        rq.sensitivity(prepared, data, "accuracy")


def test_sensitivity__quantized_module_is_an_error(prepared, data):
    qmod = rq.lower(rq.convert_to_reference(prepared), prepared.backend)
    with pytest.raises(rq.ModelError, match="allowed: a PreparedModel"):
        rq.sensitivity(qmod, data)


def test_sensitivity__not_calibrated_is_an_error(data):
    with pytest.raises(rq.ConfigError, match=r"^12 of 12 values without parameters yet"):
        rq.sensitivity(rq.prepare(residual_model()), data)


def test_sensitivity__reports_progress(prepared, data):
    events = []

    class Listen(rq.Callback):
        def on_progress(self, event):
            events.append((event.task, event.done, event.total))

    count = len(find_rounding_operators(prepared))
    measure_sensitivity(prepared, data, callbacks=CallbackList((Listen(),)))
    assert events == [("sensitivity", done, count) for done in range(1, count + 1)]


def test_to_mapping__keeps_exactly_the_worst_in_float(prepared, report):
    mapping = report.to_mapping(keep=3)
    plan = annotate(prepared.mod, prepared.backend, mapping)
    worst = {row.name for row in report.rows[:3]}
    asked = {op.name for op in plan.operators if "kept in float" in op.reason}
    assert asked == worst


def test_to_mapping__number_out_of_range_is_an_error(report):
    with pytest.raises(rq.ConfigError, match="keep=100"):
        report.to_mapping(keep=100)


@pytest.mark.parametrize("name", ["stem", "one", "two", "deep", "out"])
def test_add_lines__not_what_is_below_the_name(prepared, name):
    base = rq.QConfigMapping().set_global(prepared.backend.default_qconfig)
    mapping = add_lines(prepared, {name: None}, base)
    plan = annotate(prepared.mod, prepared.backend, mapping)
    assert [op.name for op in plan.operators if "kept in float" in op.reason] == [name]


def test_report__prints_one_line_for_each_operator(report):
    lines = str(report).splitlines()
    assert len(lines) == len(report.rows) + 2
    assert lines[1].startswith(report.rows[0].name)
    assert "SQNR" in lines[0]


def test_report__columns_of_long_names_are_aligned(report):
    rows = [replace(row, op="elementwise_chain") for row in report.rows[:1]] + [*report.rows[1:]]
    header, *lines, _ = str(replace(report, rows=tuple(rows))).splitlines()
    at = header.index("SQNR")
    assert all(line[at - 1] == " " and line[at] != " " for line in lines)


def test_take_samples__whole_batches(data):
    assert len(list(take_samples(data, 3))) == 3
    assert len(list(take_samples(data, 1000))) == 8
    with pytest.raises(rq.ConfigError, match="samples is 0"):
        take_samples(data, 0)


def test_join_batches__different_shapes_are_an_error():
    with pytest.raises(rq.DataError, match="different shapes"):
        join_batches([[np.zeros((1, 3))], [np.zeros((1, 4))]])
    (joined,) = join_batches([[np.zeros((1, 3))], [np.zeros((2, 3))]])
    assert joined.shape == (3, 3)


@pytest.mark.parametrize("memory", [0, 20_000])
def test_simulation__with_little_memory_gives_the_same_numbers(prepared, data, simulation, memory):
    small = Simulation(prepared, data, memory=memory)
    for operator in find_rounding_operators(prepared):
        assert small.score([operator]) == simulation.score([operator])


def test_simulation__data_in_one_buffer_that_is_filled_again(prepared, data, simulation):
    def yield_same_array():
        buffer = {name: np.empty_like(array) for name, array in next(iter(data)).items()}
        for batch in data:
            for name, array in batch.items():
                buffer[name][...] = array
            yield buffer

    inputs = describe_inputs(prepared.mod)
    reused = Simulation(prepared, open_dataset(yield_same_array, inputs))
    operators = find_rounding_operators(prepared)
    assert reused.score(operators) == simulation.score(operators)


def test_simulation__data_that_ends_earlier_the_next_time_is_an_error(prepared, data):
    counts = iter([4, 4, 4, 3])  # to count samples, to look at the first, to record, to score

    def yield_fewer():
        return iter(list(data)[: next(counts)])

    simulation = Simulation(prepared, open_dataset(yield_fewer, data.inputs), memory=0)
    with pytest.raises(rq.DataError, match="the same batches each time"):
        simulation.score(find_rounding_operators(prepared))
