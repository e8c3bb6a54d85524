"""compare: matched by name, accumulated and isolated, and it names where the error starts."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
import tvm
from float_models import as_main
from tvm import relax
from tvm.script import relax as R

import relayquant as rq
from relayquant.analysis.error_statistics import BLOCK, ErrorSums
from relayquant.demo import load_digits
from relayquant.ir.rewrite.function import make_main


@pytest.fixture(scope="module")
def digits():
    demo = load_digits()
    mod, params = rq.load(str(demo.model_path))
    return mod, params, demo.calibration


@pytest.fixture(scope="module")
def report(digits):
    mod, params, data = digits
    return rq.compare(mod, params, rq.quantize(mod, params, data), data)


def test_error_sums__are_those_of_the_concatenation():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 100))
    sums = ErrorSums().update(x[:30], y[:30]).update(x[30:], y[30:])
    assert sums.sqnr == pytest.approx(10 * np.log10((x @ x) / ((y - x) @ (y - x))))
    assert sums.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
    assert sums.largest == np.abs(y - x).max()
    assert sums.mean == pytest.approx(np.abs(y - x).mean())


def test_error_sums__of_many_blocks():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 3, BLOCK + 7)).astype("float32")
    sums = ErrorSums().update(x, y)
    a, b = x.astype("float64"), y.astype("float64")
    assert sums.count == x.size
    assert sums.signal == pytest.approx((a * a).sum())
    assert sums.noise == pytest.approx(np.square(b - a).sum())
    assert sums.dot == pytest.approx((a * b).sum())
    assert sums.energy == pytest.approx((b * b).sum())
    assert sums.absolute == pytest.approx(np.abs(b - a).sum())
    assert sums.largest == np.abs(b - a).max()


@pytest.mark.parametrize("order", [(0, 3, 1, 2), (3, 2, 1, 0)])
def test_error_sums__of_any_memory_order(order):
    rng = np.random.default_rng(4)
    x, y = (rng.normal(size=(2, 30, 5, 70)).astype("float32") for _ in range(2))
    inverse = np.argsort(order)
    x = np.ascontiguousarray(x.transpose(order)).transpose(inverse)
    assert not x.flags.c_contiguous
    for other in (y, np.ascontiguousarray(y.transpose(order)).transpose(inverse)):
        sums = ErrorSums().update(x, other)
        error = other.astype("float64") - x
        np.testing.assert_allclose(sums.noise, np.square(error).sum(), rtol=1e-12)
        np.testing.assert_allclose(sums.dot, (x.astype("float64") * other).sum(), rtol=1e-9)


def test_error_sums__equal_arrays():
    sums = ErrorSums().update(np.zeros(3), np.zeros(3))
    assert sums.sqnr == float("inf")
    assert sums.cosine == 1.0


@pytest.mark.slow
def test_compare__has_a_row_for_every_operator(digits, report):
    names = [row.name for row in report.rows]
    mod, params, data = digits
    assert names == [row.name for row in rq.ledger(rq.quantize(mod, params, data)).rows]
    assert report.samples == sum(len(batch) for batch in data)


@pytest.mark.slow
def test_compare__int8_is_close_to_float(report):
    assert all(row.sqnr > 25 for row in report.rows)
    assert all(row.cosine > 0.999 for row in report.rows)
    assert report.first_below(15) is None


def test_compare__isolated_error_is_no_larger_than_accumulated(report):
    first, *others = report.rows
    assert first.isolated == pytest.approx(first.sqnr, abs=0.1)
    assert all(row.isolated > row.sqnr - 1 for row in others)
    assert report.worst is min(report.rows, key=lambda row: row.isolated)


@pytest.mark.slow
def test_compare__names_the_value_where_it_goes_wrong(digits):
    mod, params, data = digits

    def clip_one(info, samples):
        high = max(float(np.abs(array).max()) for array in samples)
        return rq.choose_qparams(0.0, high / (50 if info.name == "conv2/relu" else 1), info.spec)

    wrong = rq.quantize(mod, params, data, observer=clip_one, guard=rq.config.Guard.OFF)
    report = rq.compare(mod, params, wrong, data)
    assert report.first_below(15).name == "conv2/relu"
    assert str(report).endswith("; the first below 15 dB is conv2/relu")
    rows = {row.name: row for row in report.rows}
    assert rows["conv2/relu"].saturated > 0.1
    assert rows["conv1/relu"].saturated < 0.01


def test_compare__prints_a_line_for_each_value(report):
    head, *lines, last = str(report).splitlines()
    assert head.split("  ")[0] == "value"
    assert [line.split()[0] for line in lines] == [row.name for row in report.rows]
    assert f"{report.rows[0].sqnr:.1f}" in lines[0]
    assert last == f"{len(lines)} values, {report.samples} samples"


def test_compare__csv_reads_back(report):
    rows = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert [row["name"] for row in rows] == [row.name for row in report.rows]
    assert float(rows[0]["sqnr"]) == pytest.approx(report.rows[0].sqnr)


def test_compare__module_without_ledger_is_an_error(digits):
    mod, params, data = digits
    with pytest.raises(rq.ModelError, match="carries no ledger"):
        rq.compare(mod, params, mod, data)


@pytest.mark.slow
def test_compare__module_of_another_model_is_an_error(digits):
    mod, params, data = digits

    @as_main
    def other(image: R.Tensor(("n", 1, 8, 8), "float32")):
        return R.nn.relu(image)

    qmod = rq.quantize(mod, params, data)
    with pytest.raises(rq.ModelError, match="no value in common"):
        rq.compare(other, None, qmod, data)


def test_compare__a_model_without_operators_has_its_outputs():
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    mod, data = make_main([x], lambda _: x), [np.float32([[1, 2, 3], [4, 5, 6]])]
    qmod = rq.quantize(mod, None, data, effort="fast", callbacks=())
    report = rq.compare(mod, None, qmod, data)
    assert not report.rows
    assert [output.sqnr for output in report.outputs] == [float("inf")]


@pytest.mark.slow
def test_compare__integer_inputs_and_outputs_say_the_same(digits):
    mod, params, data = digits
    settings = {"effort": "fast"}
    plain = rq.compare(mod, params, rq.quantize(mod, params, data, **settings), data)
    qmod = rq.quantize(
        mod,
        params,
        data,
        input_dtypes={"image": "uint8"},
        output_dtypes={"logits": "int8"},
        **settings,
    )
    report = rq.compare(mod, params, qmod, data)
    assert [row.name for row in report.rows] == [row.name for row in plain.rows]
    # An integer output makes the last operator round its result, so only those before are equal.
    for row, other in zip(report.rows[:-1], plain.rows[:-1], strict=True):
        assert row.sqnr == pytest.approx(other.sqnr, abs=0.1)
        assert row.isolated == pytest.approx(other.isolated, abs=0.1)


def test_compare__prepared_model_is_an_error(digits):
    mod, params, data = digits
    with pytest.raises(rq.ModelError, match=r"qmod is PreparedModel.*[Aa]llowed: a tvm.IRModule"):
        rq.compare(mod, params, rq.prepare(mod, params), data)


def test_compare__no_data_shows_before_anything_is_compiled(digits, monkeypatch):
    mod, params, data = digits
    qmod = rq.quantize(mod, params, data, effort="fast")

    def fail(*args, **kwargs):
        raise AssertionError("something was compiled")

    monkeypatch.setattr(tvm, "compile", fail)
    with pytest.raises(rq.DataError, match="yields no sample"):
        rq.compare(mod, params, qmod, [])


@pytest.mark.slow
def test_compare__data_that_may_not_be_written(digits, report):
    mod, params, data = digits
    frozen = [np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape) for a in data]
    found = rq.compare(mod, params, rq.quantize(mod, params, data), frozen)
    assert found == report
