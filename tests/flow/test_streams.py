"""Models with state: calibration over sequences, and one set of parameters for a state and its new
value.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from float_models import as_main
from tvm import relax
from tvm.script import relax as R

import relayquant as rq
from relayquant.cli import main
from relayquant.data import open_dataset, open_sequences
from relayquant.data.item import describe_inputs
from relayquant.errors import DataError
from relayquant.flow.refine.prepared_edit import change_operators
from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE, QUANTIZE
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import call_name, iterate_results, result_expr
from relayquant.plots.pictures import collect_ranges
from relayquant.stages.annotation import plan_without
from relayquant.stages.streams import open_streams

RNG = np.random.default_rng(0)
#: the first and the last steps of 300
PARTS = slice(100), slice(200, 300)
WEIGHT = RNG.standard_normal((3, 2, 3), "float32")


def seed(number: int) -> None:
    RNG.bit_generator.state = np.random.default_rng(number).bit_generator.state


@pytest.fixture(autouse=True)
def draws():
    """Every test draws the same, whatever ran before it."""
    seed(1)


def make_stream() -> object:
    """A convolution over the last three columns of a stream: the two before are the state."""
    x = relax.Var("x", relax.TensorType((1, 2, 1), "float32"))
    past = relax.Var("past", relax.TensorType((1, 2, 2), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, past]):
        with builder.dataflow():
            joined = builder.emit(relax.op.concat([past, x], axis=2), "joined")
            y = builder.emit(relax.op.nn.conv1d(joined, relax.const(WEIGHT)), "y")
            new = builder.emit(relax.op.strided_slice(joined, [2], [1], [3]), "new")
            result = builder.emit_output(relax.Tuple([y, new]))
        builder.emit_func_output(result)
    return rq.with_state(builder.get(), [rq.StateValue("past", (1, 2, 2), "float32")])


def draw_columns(count: int) -> list[np.ndarray]:
    return [*RNG.uniform(-1, 1, (count, 1, 2, 1)).astype("float32")]


def test_open_streams__state_runs_on_within_a_sequence():
    mod = make_stream()
    first, second = draw_columns(4), draw_columns(3)
    single = draw_columns(1)[0]
    items = [rq.SampleSequence(first), {"x": single}, rq.SampleSequence(second)]
    batches = list(open_dataset(open_streams(mod, None, items), describe_inputs(mod)))
    assert len(batches) == 8
    for sequence, start in ((first, 0), ([single], 4), (second, 5)):
        columns = np.concatenate([np.zeros((1, 2, 2), "float32"), *sequence], axis=2)
        for at, x in enumerate(sequence):
            np.testing.assert_array_equal(batches[start + at]["x"], x)
            np.testing.assert_array_equal(batches[start + at]["past"], columns[:, :, at : at + 2])


def test_open_streams__a_given_state_stays():
    mod, past = make_stream(), np.ones((1, 2, 2), "float32")
    data = open_streams(mod, None, [{"x": draw_columns(1)[0], "past": past}])
    (batch,) = open_dataset(data, describe_inputs(mod))
    np.testing.assert_array_equal(batch["past"], past)
    assert open_streams(rq.with_state(mod, []), None, data) is data


def test_open_sequences__says_what_is_wrong():
    inputs = describe_inputs(make_stream())
    initial = {"past": np.zeros((1, 2, 2), "float32")}

    def read(*samples: object) -> None:
        list(open_sequences([rq.SampleSequence(samples)], inputs, initial, lambda _: initial))

    with pytest.raises(DataError, match="sequence at sample 0 is empty"):
        read()
    with pytest.raises(DataError, match=r"Sample 0, step 1: input 'x' does not fit.*\(1, 2, 1\)"):
        read(np.zeros((1, 2, 1), "float32"), np.zeros((1, 3, 1), "float32"))


def make_cell() -> object:
    """A recurrent layer whose state is computed, read and returned as integers."""
    x, h = (relax.Var(name, relax.TensorType((4, 8), "float32")) for name in "xh")
    turn, _ = np.linalg.qr(RNG.standard_normal((8, 8)))
    weights = [relax.const(w.astype("float32")) for w in (np.eye(8), 0.9 * turn, turn)]
    builder = relax.BlockBuilder()
    with builder.function("main", [x, h]):
        with builder.dataflow():
            taken = builder.emit(relax.op.matmul(x, weights[0]), "taken")
            held = builder.emit(relax.op.matmul(h, weights[1]), "held")
            new = builder.emit(relax.op.nn.relu(relax.op.add(taken, held)), "new")
            y = builder.emit(relax.op.matmul(new, weights[2]), "y")
            result = builder.emit_output(relax.Tuple([y, new]))
        builder.emit_func_output(result)
    return rq.with_state(builder.get(), [rq.StateValue("h", (4, 8), "float32")])


def draw_rows(count: int) -> list[np.ndarray]:
    return [*RNG.uniform(-1, 1, (count, 4, 8)).astype("float32")]


@pytest.fixture(scope="module")
def quantized():
    seed(2)
    mod = make_cell()
    data = [rq.SampleSequence(draw_rows(30)) for _ in range(4)]
    return mod, rq.quantize(mod, None, data, callbacks=())


def test_quantize__a_state_and_its_new_value_have_one_scale():
    # Each step begins with zeros: a range of its own would be empty.
    qmod = rq.quantize(make_cell(), None, draw_rows(16), callbacks=())
    assert [value.name for value in rq.get_state(qmod)] == ["h"]
    graph = Graph(qmod)
    (taken,) = [
        graph.values[var]
        for var in graph.order
        if graph.op_name(var) == QUANTIZE and getattr(graph.values[var].args[0], "name", "") == "h"
    ]
    given = graph.values[list(iterate_results(result_expr(graph)))[-1]]
    assert call_name(given) == DEQUANTIZE
    for at in (1, 2):  # scale and zero point
        np.testing.assert_array_equal(taken.args[at].value.numpy(), given.args[at].value.numpy())


def test_plan_made_again__a_state_and_its_new_value_have_one_group():
    data = draw_rows(16)
    prepared = rq.calibrate(rq.prepare(make_cell(), None, data, callbacks=()), data, callbacks=())
    again = change_operators(prepared, {}, lambda model: model)
    find = plan_without(prepared.source, prepared.backend, prepared.mapping, ())
    groups = prepared.plan.value_groups
    assert groups["h"] == groups["new"]
    assert again.plan.value_groups == groups
    assert [row.output for row in find([])] == [row.output for row in prepared.plan.operators]


@pytest.mark.slow
def test_quantize__a_stream_does_not_drift(quantized):
    mod, qmod = quantized
    executors = [rq.Executor(rq.compile(each)) for each in (mod, qmod)]
    energy, noise = np.zeros(300), np.zeros(300)
    for at, x in enumerate(draw_rows(300)):
        expected, got = (executor.run("main", [x])[0] for executor in executors)
        energy[at], noise[at] = (expected**2).sum(), ((expected - got) ** 2).sum()
    first, last = (10 * np.log10(energy[part].sum() / noise[part].sum()) for part in PARTS)
    assert min(first, last) > 30


@as_main
def plain(x: R.Tensor((1, 2), "float32")):
    return R.nn.relu(x)


def test_open_streams__a_model_without_state_keeps_its_data():
    data = [np.zeros((1, 2), "float32")]
    assert open_streams(plain, None, data) is data


def make_integrator() -> object:
    """Sums what a matmul gives: a small error in each step adds up without end."""
    x, h = (relax.Var(name, relax.TensorType((1, 8), "float32")) for name in "xh")
    # the columns cancel but for a little: rounding is as large as what is left
    weight = RNG.standard_normal((8, 8)).astype("float32")
    weight[4:] = 0.02 * weight[4:] - weight[:4]
    builder = relax.BlockBuilder()
    with builder.function("main", [x, h]):
        with builder.dataflow():
            part = builder.emit(relax.op.matmul(x, relax.const(weight)), "part")
            new = builder.emit(relax.op.add(part, h), "new")
            y = builder.emit(relax.op.sin(new), "y")
            result = builder.emit_output(relax.Tuple([y, new]))
        builder.emit_func_output(result)
    return rq.with_state(builder.get(), [rq.StateValue("h", (1, 8), "float32")])


def draw_equal_halves(count: int) -> list[np.ndarray]:
    half = RNG.uniform(-1, 1, (count, 1, 4)).astype("float32")
    return [*np.concatenate([half, half], axis=2)]


@pytest.mark.slow
def test_quantize__what_drifts_goes_back_to_float():
    mod = make_integrator()
    data = [rq.SampleSequence(draw_equal_halves(64)) for _ in range(2)]
    with pytest.warns(rq.AccuracyWarning, match=r"to the end of the sequences.*: part\. Now: "):
        qmod = rq.quantize(mod, None, data, callbacks=())
    ledger = rq.ledger(qmod)
    assert ledger.guard.reverted == ("part",)
    assert ledger.guard.stream_sqnr > 20
    (row,) = [row for row in ledger.rows if row.name == "part"]
    assert not row.quantized
    assert "at the end of sequences" in row.reason
    off = rq.quantize(mod, None, data, callbacks=(), guard="off")
    assert any(row.quantized for row in rq.ledger(off).rows)


def make_smoother() -> object:
    """A mean over time of products."""
    x, h = (relax.Var(name, relax.TensorType((1, 8), "float32")) for name in "xh")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, h]):
        with builder.dataflow():
            weight = relax.const(RNG.standard_normal((8, 8)).astype("float32"))
            part = builder.emit(relax.op.nn.relu(relax.op.matmul(x, weight)), "part")
            kept = builder.emit(relax.op.multiply(h, relax.const(0.5)), "kept")
            new = builder.emit(relax.op.add(part, kept), "new")
            result = builder.emit_output(relax.Tuple([new, new]))
        builder.emit_func_output(result)
    return rq.with_state(builder.get(), [rq.StateValue("h", (1, 8), "float32")])


def test_quantize__what_gets_quiet_has_its_range_at_run_time():
    """The first half of a sequence is 200 times as loud as the second: a step of the calibrated
    range is larger than all of that.
    """
    loudness = np.repeat([1.0, 0.005], 32)[:, None, None]
    data = [
        rq.SampleSequence((loudness * RNG.uniform(-1, 1, (64, 1, 8))).astype("float32"))
        for _ in range(2)
    ]
    with pytest.warns(rq.AccuracyWarning, match="at run time, 1 operator: part"):
        qmod = rq.quantize(make_smoother(), None, data, callbacks=())
    ledger = rq.ledger(qmod)
    assert (ledger.guard.ranged, ledger.guard.reverted) == (("part",), ())
    assert ledger.guard.stream_sqnr > 20
    assert "with ranges computed at run time: part" in str(ledger.guard)
    assert [row.name for row in ledger.quantized if row.macs] == ["part"]


def test_quantize__what_follows_says_how_far(quantized):
    _, qmod = quantized
    guard = rq.ledger(qmod).guard
    assert guard.stream_sqnr > 30
    assert "at the end of sequences" in str(guard)


@pytest.mark.slow
def test_compare__looks_at_the_end_of_sequences(quantized):
    mod, qmod = quantized
    report = rq.compare(mod, None, qmod, [rq.SampleSequence(draw_rows(20))])
    assert report.stream_sqnr > 30
    assert "at the end of sequences" in str(report)
    assert rq.compare(mod, None, qmod, draw_rows(4)).stream_sqnr is None


@pytest.mark.parametrize("form", ["array", "dict", "archive"])
def test_open_streams__arrays_are_one_sequence(form, tmp_path):
    mod, columns = make_stream(), np.stack(draw_columns(5))
    np.savez(tmp_path / "x.npz", x=columns)
    items = {"array": columns, "dict": {"x": columns}, "archive": tmp_path / "x.npz"}[form]
    batches = list(open_dataset(open_streams(mod, None, items), describe_inputs(mod)))
    whole = np.concatenate([np.zeros((1, 2, 2), "float32"), *columns], axis=2)
    for at, batch in enumerate(batches):
        np.testing.assert_array_equal(batch["x"], columns[at])
        np.testing.assert_array_equal(batch["past"], whole[:, :, at : at + 2])
    assert len(batches) == 5


def test_open_streams__an_archive_with_the_state_stays(tmp_path):
    mod, past = make_stream(), RNG.uniform(-1, 1, (5, 1, 2, 2)).astype("float32")
    np.savez(tmp_path / "both.npz", x=np.stack(draw_columns(5)), past=past)
    data = open_streams(mod, None, str(tmp_path / "both.npz"))
    found = [batch["past"] for batch in open_dataset(data, describe_inputs(mod))]
    np.testing.assert_array_equal(found, past)


def test_sample_sequence__what_can_be_read_once_is_refused():
    with pytest.raises(DataError, match=r"SampleSequence got generator.*Pass a list"):
        rq.SampleSequence(column for column in draw_columns(2))


@pytest.mark.slow
def test_calls_that_take_data__take_sequences(quantized):
    mod, qmod = quantized
    data = [rq.SampleSequence(draw_rows(count)) for count in (6, 4)]
    assert not [each for each in rq.lint(mod, None, data) if each.severity.value == "error"]
    steps, shares = zip(*rq.analysis.measure_growth(mod, None, data)["h"], strict=True)
    assert steps[0] == 4
    assert shares[-1] == 1
    sums = rq.analysis.accumulator_report(qmod, data)
    assert {row.elements for row in sums.rows} == {10 * 4 * 8}
    report = rq.report(mod, None, qmod, data, samples=64, rank=False)
    assert report.data.compare.samples == 40
    prepared = rq.calibrate(rq.prepare(mod, None, effort="fast"), data)
    assert collect_ranges(prepared, data)
    assert rq.smooth_activations(mod, None, data)[0]["main"].params[1].name == "h"


@pytest.mark.slow
def test_verify__state_begins_with_the_initial_one(quantized):
    _, qmod = quantized
    (x,) = draw_rows(1)
    for inputs in ([x], {"x": x}, [x, np.ones((4, 8), "float32")]):
        assert rq.verify(qmod, inputs).is_equal


@pytest.mark.slow
def test_commands__an_archive_is_one_sequence(quantized, tmp_path, capsys):
    mod, qmod = quantized
    rq.save_module(mod, tmp_path / "cell.rqm")
    rq.save_module(qmod, tmp_path / "cell.int8.rqm")
    np.savez(tmp_path / "x.npz", x=np.stack(draw_rows(30)))
    data = ["--data", str(tmp_path / "x.npz")]
    both = [str(tmp_path / "cell.rqm"), str(tmp_path / "cell.int8.rqm")]
    for command in (["verify", both[1]], ["compare", *both], ["lint", both[0]]):
        code = main([*command, *data, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert code == 0, found
        assert found["error"] is None
        samples = {"verify": 4, "compare": 120}.get(command[0])  # verify takes one batch
        assert found["summary"].get("samples") == samples


@pytest.mark.slow
def test_command__compare_shows_the_end_of_sequences(tmp_path, capsys):
    """The same number as `compare`. A part of the data is no sequence."""
    mod, steps = make_stream(), np.stack(draw_columns(40))
    data = [rq.SampleSequence(steps)]
    qmod = rq.quantize(mod, None, data, callbacks=(), effort="fast")
    paths = [str(tmp_path / name) for name in ("m.rqm", "q.rqm", "d.npz")]
    rq.save_module(mod, paths[0])
    rq.save_module(qmod, paths[1])
    np.savez(paths[2], x=steps)
    expected = rq.compare(mod, None, qmod, data).stream_sqnr
    assert expected is not None
    words = ["compare", *paths[:2], "--data", paths[2]]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["summary"]["stream_sqnr"]
    assert found == pytest.approx(expected, abs=0.1)
    assert main(words) == 0
    assert f"at the end of sequences: {found:.1f} dB" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--samples", "4", "--json"]) == 0
    assert "stream_sqnr" not in json.loads(capsys.readouterr().out)["summary"]
