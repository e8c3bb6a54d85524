"""Calibration: topological order, statistics that stream, and what is refused."""

from __future__ import annotations

import tempfile
import tracemalloc
from concurrent import futures

import numpy as np
import pytest
from float_models import MAP, build_model, draw_batches, residual_model
from stage_values import run_simulated
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.codegen.eager import EagerModule
from relayquant.config import BiasCorrection, FitSettings, WeightRounding
from relayquant.stages.calibration import runner
from relayquant.stages.calibration.runner import pick_parameters

#: parameters alone: every weight to its nearest level
NEAREST = FitSettings(rounding=WeightRounding.NEAREST, bias=BiasCorrection.NONE)


def branched_model():
    def body(emit, x):
        a = emit("a", op.nn.relu(emit.conv_bias("a.c", x)))
        b = emit("b", op.nn.softmax(a))
        c = emit("c", op.add(emit.conv("c.c", b), a))
        k = emit("k", op.clip(c, -0.2, 0.4))
        d = emit("d", op.concat([k, emit.conv("e", c), c], axis=1))
        m = emit("m", op.multiply(emit("s", op.sigmoid(d)), d))
        flat = emit("flat", op.reshape(emit("p", op.nn.max_pool2d(m, (2, 2), (2, 2))), (1, 108)))
        return relax.Tuple([emit.dense("out", flat, 5), c])

    return build_model(body, MAP)


def small_model():
    return build_model(lambda e, x: e.conv("out", e("r", op.nn.relu(e.conv("a", x)))), MAP)


def calibrate(mod, data, **options) -> rq.PreparedModel:
    return rq.calibrate(rq.prepare(mod, effort="fast"), data, **{"fit": NEAREST, **options})


def brute_force(prepared: rq.PreparedModel, data) -> dict[str, rq.QParams]:
    """Run the whole simulated graph for every group, with the parameters picked so far."""
    picked = {key: value for key, value in prepared.parameters.items() if ":" in key}
    assert set(picked) == {group.key for group in prepared.plan.weights}
    trial = rq.PreparedModel(prepared.mod, prepared.plan, prepared.graph, prepared.backend, picked)
    for group in prepared.plan.activations:
        arrays = []
        for batch in data:
            values = {**batch, **run_simulated(trial, batch)}
            arrays += [values[name] for name in group.points]
        picked[group.key] = rq.observers.MinMax().observe(group.info, arrays)
    return picked


@pytest.mark.parametrize("model", [residual_model, branched_model])
def test_topological__equals_rerunning_the_whole_graph_for_each_group(model):
    mod = model()
    data = draw_batches(mod, 3)
    prepared = calibrate(mod, data, order=rq.config.Order.TOPOLOGICAL)
    expected = brute_force(prepared, data)
    assert prepared.parameters.keys() == expected.keys()
    for key, qparams in expected.items():
        have = prepared.parameters[key]
        # The compiled graph sums in another order than numpy.
        np.testing.assert_allclose(have.scale, qparams.scale, rtol=1e-5, err_msg=key)
        np.testing.assert_array_equal(have.zero_point, qparams.zero_point, err_msg=key)


def test_topological__differs_from_float_statistics():
    mod = branched_model()
    data = draw_batches(mod, 3)
    one, other = (calibrate(mod, data, order=order) for order in rq.config.Order)
    assert one.parameters["x"] == other.parameters["x"]
    assert any(one.parameters[key] != other.parameters[key] for key in one.parameters)


@pytest.mark.parametrize("model", [residual_model, branched_model])
def test_parallel__equals_statistics_of_the_float_model(model):
    mod = model()
    data = draw_batches(mod, 3)
    prepared = calibrate(mod, data, order=rq.config.Order.PARALLEL)
    for group in prepared.plan.activations:
        arrays = []
        for batch in data:
            values = {**batch, **rq.reference.run_values(prepared.mod, batch)}
            arrays += [values[name] for name in group.points]
        expected = rq.observers.MinMax().observe(group.info, arrays)
        have = prepared.parameters[group.key]
        np.testing.assert_allclose(have.scale, expected.scale, rtol=1e-5, err_msg=group.key)
        np.testing.assert_array_equal(have.zero_point, expected.zero_point)


def test_calibrate__gives_a_new_model_and_leaves_its_own_as_it_is():
    mod = small_model()
    prepared = rq.prepare(mod, effort="fast")
    float_text = prepared.mod.script(show_meta=True)
    graph_text = prepared.graph.mod.script(show_meta=True)
    with pytest.raises(rq.ConfigError, match="without parameters yet, the first is 'r:weight'"):
        rq.convert_to_reference(prepared)
    calibrated = rq.calibrate(prepared, draw_batches(mod, 2))
    assert set(calibrated.parameters) == {group.key for group in prepared.plan.groups}
    filled = ("parameters", "statistics", "choices", "observers")
    assert all(getattr(calibrated, name) and not getattr(prepared, name) for name in filled)
    assert calibrated.plan is prepared.plan
    assert prepared.mod.script(show_meta=True) == float_text
    assert prepared.graph.mod.script(show_meta=True) == graph_text


def test_calibrate__again_replaces_what_was_picked():
    mod = small_model()
    first = rq.calibrate(rq.prepare(mod, effort="fast"), draw_batches(mod, 2))
    scale = first.parameters["x"].scale
    larger = [{"x": 10 * batch["x"]} for batch in draw_batches(mod, 2)]
    again = rq.calibrate(first, larger)
    assert again.parameters["x"].scale == pytest.approx(10 * scale, rel=1e-5)
    assert first.parameters["x"].scale == scale


@pytest.mark.slow
def test_calibrate__two_threads_one_prepared_model(tmp_path):
    """Each gets what it would get alone, bit for bit: nothing of it is shared but what is read."""
    mod = small_model()
    prepared = rq.prepare(mod)
    shares = [draw_batches(mod, 4, seed=seed) for seed in range(4)]

    def calibrate_share(number):
        rq.save_prepared(rq.calibrate(prepared, shares[number]), tmp_path / f"{number}")
        return (tmp_path / f"{number}").read_bytes()

    alone = [calibrate_share(number) for number in range(4)]
    assert len(set(alone)) == 4
    with futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(calibrate_share, range(4))) == alone


@pytest.mark.parametrize("order", list(rq.config.Order))
@pytest.mark.parametrize(
    "observer",
    [
        rq.observers.MinMax(),
        rq.observers.Percentile(99.9),
        rq.observers.KLDivergence(),
        rq.observers.MSE(),
        rq.observers.AverageMax(),
    ],
)
def test_calibrate__observers(observer, order):
    mod = small_model()
    prepared = rq.calibrate(
        rq.prepare(mod, effort="fast"), draw_batches(mod, 3), observer=observer, order=order
    )
    assert set(prepared.parameters) == {group.key for group in prepared.plan.groups}


def test_calibrate__fixed():
    mod = small_model()
    prepared = rq.calibrate(
        rq.prepare(mod, effort="fast"),
        draw_batches(mod, 1),
        observer=rq.observers.Fixed(0.125, 100),
    )
    for group in prepared.plan.activations:
        assert float(prepared.parameters[group.key].scale) == 0.125
        assert int(prepared.parameters[group.key].zero_point) == 100


@pytest.mark.parametrize("order", list(rq.config.Order))
def test_calibrate__callable_sees_every_sample_again_and_again(order):
    mod = branched_model()
    data = draw_batches(mod, 3)
    seen: dict[str, int] = {}

    def pick(info, samples):
        first = [array.copy() for array in samples]
        again = list(samples)
        assert len(first) == len(again) > 0
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other)
        seen[info.name] = len(first)
        low, high = min(a.min() for a in first), max(a.max() for a in first)
        return rq.choose_qparams(low, high, info.spec)

    prepared = calibrate(mod, data, observer=pick, order=order)
    # One array per batch, also where several values share the parameters.
    assert max(len(group.points) for group in prepared.plan.activations) > 1
    assert seen == {group.key: 3 for group in prepared.plan.activations}
    expected = calibrate(mod, data, order=order)
    assert prepared.parameters == expected.parameters


def test_calibrate__callable_with_a_third_parameter_sees_the_graph_and_what_was_picked():
    """The context computes what the samples hold, value by value: all is rounded that was picked
    before, and nothing else."""
    mod = branched_model()
    data = draw_batches(mod, 2)
    picked: list[str] = []

    def pick(info, samples, context):
        assert [key for key in context.parameters if ":" not in key] == picked
        assert info.name not in context.parameters
        points = context.plan.group(info.name).points
        for batch, have in zip(data, samples, strict=True):
            values = context.run(batch)
            want = np.concatenate([values[name].reshape(-1) for name in points])
            np.testing.assert_allclose(have.reshape(-1), want, rtol=1e-5, atol=1e-5)
        picked.append(info.name)
        qparams = rq.observers.MinMax().observe(info, list(samples))
        # What is tried changes nothing that was picked.
        tried = context.run(data[0], {info.name: qparams})
        assert tried.keys() == context.run(data[0]).keys()
        with pytest.raises(TypeError):
            context.parameters[info.name] = qparams
        return qparams

    prepared = calibrate(mod, data, observer=pick, order=rq.config.Order.TOPOLOGICAL)
    assert sorted(picked) == sorted(group.key for group in prepared.plan.activations)
    assert prepared.parameters == calibrate(mod, data, order=rq.config.Order.TOPOLOGICAL).parameters


@pytest.mark.parametrize(
    ("tried", "message"),
    [
        ({"xx": rq.QParams(np.float32(1), np.int32(0), "uint8")}, r"for 'xx'.*Did you mean 'x'"),
        ({"x": rq.QParams(np.float32(1), np.int32(0), "int16")}, r"'x' of dtype int16; the plan"),
        ({"x": 0.5}, r"value 'x' but returned float"),
    ],
)
def test_calibration_context__refuses_parameters_that_it_cannot_try(tried, message):
    """They would change nothing, and the callable would believe what it measured."""
    mod = small_model()
    data = draw_batches(mod, 1)
    with pytest.raises(rq.ConfigError, match=message):
        calibrate(mod, data, observer=lambda info, samples, context: context.run(data[0], tried))


def test_calibration_context__a_callable_cannot_write_into_inputs_and_weights():
    mod = small_model()
    data = draw_batches(mod, 1)
    before = {name: array.copy() for name, array in data[0].items()}

    def pick(info, samples, context):
        for array in context.run(data[0]).values():
            if array.flags.writeable:
                array[...] = 0
        return look(info, samples)

    def look(info, samples):
        return rq.observers.MinMax().observe(info, list(samples))

    prepared = calibrate(mod, data, observer=pick)
    assert all(np.array_equal(data[0][name], before[name]) for name in before)
    assert prepared.parameters == calibrate(mod, data, observer=look).parameters


def test_calibrate__without_data_names_the_operators_that_need_it():
    """Also with strict: the operators, and what can be set for them."""
    mod = small_model()
    for strict in (False, True):
        with pytest.raises(rq.DataError) as error:
            rq.quantize(mod, None, None, strict=strict)
        assert "data decides parameters of 2 operators: r (nn.conv2d), out" in (str(error.value))
        assert "QSpec(is_dynamic=True)" in str(error.value)


def test_calibrate__callable_that_picks_something_wrong():
    mod = small_model()

    def wrong(info, samples):
        return rq.QParams(np.float32(1), np.int32(0), "int8")

    with pytest.raises(rq.ConfigError, match=r"wrong.* value 'x' of dtype int8.*uint8"):
        calibrate(mod, draw_batches(mod, 1), observer=wrong)
    with pytest.raises(rq.ConfigError, match="allowed: an observer"):
        calibrate(mod, draw_batches(mod, 1), observer=3)


def test_calibrate__constant_zero_activations_get_scale_one():
    def body(emit, x):
        dead = emit(
            "dead",
            op.nn.relu(emit("down", op.add(emit.conv("c", x), relax.const(np.float32(-1e6))))),
        )
        return emit.conv("out", dead)  # fmt: skip

    mod = build_model(body, MAP)
    data = draw_batches(mod, 2)
    prepared = rq.calibrate(rq.prepare(mod, effort="fast"), data)
    assert float(prepared.parameters["dead"].scale) == 1.0
    assert int(prepared.parameters["dead"].zero_point) == 0
    qmod = rq.lower(rq.convert_to_reference(prepared))
    assert not rq.reference.run(qmod, data[0])[0].any()

    zeros = [{"x": np.zeros(MAP, "float32")}]
    qmod = rq.quantize(small_model(), None, zeros)
    assert not rq.reference.run(qmod, zeros[0])[0].any()


def test_calibrate__data_is_read_once():
    mod = small_model()
    opened = []

    def open_again():
        opened.append(1)
        return iter(draw_batches(mod, 2))

    calibrate(mod, open_again)
    assert len(opened) == 1


def test_calibrate__every_batch_runs_every_operator_once(monkeypatch):
    """Each subgraph is called once for each batch, and no operator is in two subgraphs."""
    mod = branched_model()
    calls: list[str] = []

    prepared = rq.prepare(mod, effort="fast")
    run = EagerModule.run

    def counted(self, name, args):
        calls.append(name)
        return run(self, name, args)

    monkeypatch.setattr(EagerModule, "run", counted)
    pick_parameters(prepared, draw_batches(mod, 4), load_module=EagerModule, fit=NEAREST)
    subgraphs = set(calls)
    assert len(subgraphs) >= 5
    assert all(calls.count(name) == 4 for name in subgraphs)


@pytest.mark.parametrize("order", list(rq.config.Order))
def test_calibrate__memory_does_not_grow_with_the_data(order, tmp_path, monkeypatch):
    """Values of all batches wait on disk, but for so many bytes: numpy holds a few batches."""
    mod = build_model(
        lambda e, x: e.conv("out", e("r", op.nn.relu(e.conv("a", x, 8))), 2), (1, 4, 32, 32)
    )
    prepared = rq.prepare(mod, effort="fast")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one_batch = 8 * 32 * 32 * 4
    monkeypatch.setattr(runner, "MOST_KEPT_BYTES", 2 * one_batch)

    def peak(batches: int) -> int:
        def data():
            rng = np.random.default_rng(0)
            for _ in range(batches):
                yield {"x": rng.standard_normal((1, 4, 32, 32)).astype("float32")}

        tracemalloc.start()
        pick_parameters(prepared, data, load_module=EagerModule, order=order)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    peak(2)  # what the first run imports and caches
    few, many = peak(4), peak(40)
    assert many < few + 8 * one_batch  # 36 more batches of one value are 36 x one_batch
    assert list(tmp_path.iterdir()) == []


def test_calibrate__progress_and_choices_are_reported():
    mod = small_model()
    stages, progress, picked = [], [], []

    class Listener(rq.Callback):
        def on_stage_start(self, event):
            stages.append(event.stage)

        def on_progress(self, event):
            progress.append((event.task, event.done, event.total))

        def on_parameters(self, event):
            picked.append(event.info.name)

    prepared = rq.prepare(mod, callbacks=Listener())
    prepared = rq.calibrate(prepared, draw_batches(mod, 2), callbacks=Listener())
    assert stages == ["prepare", "annotate", "simulate", "calibrate"]
    assert [p for p in progress if p[0] == "read data"] == [
        ("read data", 1, 2), ("read data", 2, 2),
    ]  # fmt: skip
    done = [p for p in progress if p[0] == "calibrate"]
    assert done[-1][1] == done[-1][2] == len(done)
    assert sorted(picked) == sorted(group.key for group in prepared.plan.groups)
    order = [name for name in picked if ":" not in name]
    assert order == [group.key for group in prepared.plan.activations]


def test_calibrate__symbolic_dimensions_between_subgraphs():
    def body(emit, x):
        n = x.ty.shape.values[0]
        a = emit("a", op.reshape(x, [n * 2, 4]))
        b = emit("b", op.nn.relu(emit.dense("b.m", a, 6)))
        c = emit("c", op.reshape(b, [n, 12]))
        d = emit("d", op.concat([c, c], axis=0))
        return emit.dense("out", emit("e", op.tanh(d)), 3)

    mod = build_model(body, ("n", 8))
    data = draw_batches(mod, 2, n=3)
    prepared = calibrate(mod, data)
    assert set(prepared.parameters) == {group.key for group in prepared.plan.groups}
    assert {"x", "b"} <= set(prepared.parameters)


def test_calibrate__store_is_emptied_even_when_it_fails(tmp_path, monkeypatch):
    mod = small_model()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def data():
        yield from draw_batches(mod, 1)
        raise OSError("disk")

    with pytest.raises((OSError, rq.DataError)):
        pick_parameters(rq.prepare(mod, effort="fast"), data, load_module=EagerModule)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", rq.config.Order)
def test_data__whose_squares_overflow_is_named(order):
    """1e30 is a number in float32 and its square is none: no scale is NaN because of it."""
    mod = build_model(lambda emit, x: emit.conv("a", x), MAP)
    data = draw_batches(mod, 6)
    data[4]["x"][0, 1, 2, 3] = -1e30
    message = r"Operator 'a' reads values .* is 1e\+30, in sample 4 of input 'x'"
    with pytest.raises(rq.DataError, match=message):
        rq.calibrate(rq.prepare(mod), data, order=order)
