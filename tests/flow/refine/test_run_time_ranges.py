"""Products that read their data's range at run time, as a step before float."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from float_models import build_model
from tvm import relax

import relayquant as rq
from relayquant.analysis.sensitivity import Simulation
from relayquant.config import Granularity
from relayquant.flow.refine.run_time_ranges import (
    bound_sqnr,
    find_run_time_qconfigs,
    forecast_sqnr,
    measure_ranges,
)

RNG = np.random.default_rng(3)


def make_products(batch: int):
    """A convolution, and a product of its flattened result."""

    def body(emit, x):
        weight = relax.const(
            np.random.default_rng(3).standard_normal((4, 3, 3, 3)).astype("float32")
        )
        y = emit("conv", relax.op.nn.conv2d(x, weight, padding=1))
        return emit.dense("dense", emit("flat", relax.op.reshape(y, (batch, 256))), 4)

    return build_model(body, (batch, 3, 8, 8))


@pytest.mark.parametrize("backend", ["x86", "arm"])
def test_find_run_time_qconfigs__a_sample_never_sees_its_neighbours(backend):
    """A product has a range for each row; a convolution has one for its tensor, so only where that
    is one sample.
    """
    found = [
        find_run_time_qconfigs(rq.prepare(make_products(batch), backend=backend))
        for batch in (1, 2)
    ]
    ranges = [{k: v.activation.spec.granularity for k, v in one.items()} for one in found]
    assert ranges == [
        {"conv": Granularity.PER_TENSOR, "dense": Granularity.PER_ROW},
        {"dense": Granularity.PER_ROW},
    ]


def test_forecast_sqnr__of_ranges_for_each_row_only_weights_are_rounded():
    """Of a product with a range of the run time; nothing of one in float. numpy says how much."""
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((64, 4)).astype("float32")
    mod = build_model(
        lambda emit, x: emit("dense", relax.op.matmul(x, relax.const(weight))), (1, 64)
    )
    data = [rng.uniform(-1, 1, (1, 64)).astype("float32") for _ in range(8)]
    prepared = rq.calibrate(rq.prepare(mod, effort="fast"), data)
    simulation = Simulation(prepared, [{"x": batch} for batch in data])
    scale = prepared.parameters["dense:weight"].scale
    exact, rounded = np.concatenate(data) @ weight, np.round(weight / scale) * scale
    noise = np.concatenate(data) @ rounded - exact
    decibels = 10 * np.log10(np.sum(np.square(exact)) / np.sum(np.square(noise)))
    ranged = find_run_time_qconfigs(prepared)
    ranges = measure_ranges(simulation, ranged)
    assert forecast_sqnr(simulation, ranged, ranges) == pytest.approx(decibels, abs=0.01)
    assert forecast_sqnr(simulation, {}, ranges) < decibels - 0.1
    assert forecast_sqnr(simulation, {"dense": None}, ranges) > 100


def round_to_own_range(data: np.ndarray) -> np.ndarray:
    """256 steps from the least to the largest value of one sample."""
    scale = np.float32((data.max() - data.min()) / 255)
    zero_point = np.rint(-data.min() / scale)
    return (np.clip(np.rint(data / scale) + zero_point, 0, 255) - zero_point) * scale


@pytest.mark.parametrize("is_shared", [False, True])
def test_forecast_sqnr__each_sample_has_its_own_range(is_shared):
    """A convolution's data is rounded by the sample's range, unless an operator in float reads it
    too. numpy says how much.
    """
    rng = np.random.default_rng(5)
    weights = rng.standard_normal((2, 4, 8, 1, 1)).astype("float32")

    def body(emit, x):
        first, second = (relax.op.nn.conv2d(x, relax.const(weight)) for weight in weights)
        return emit("both", relax.op.concat([emit("a", first), emit("b", second)], 1))

    data = [(10.0**-i * rng.uniform(-1, 1, (1, 8, 4, 4))).astype("float32") for i in range(3)]
    prepared = rq.calibrate(rq.prepare(build_model(body, (1, 8, 4, 4)), effort="fast"), data)
    simulation = Simulation(prepared, [{"x": batch} for batch in data])
    qconfigs = find_run_time_qconfigs(prepared)
    ranges = measure_ranges(simulation, qconfigs)
    signal = noise = 0.0
    for batch in data:
        read = batch if is_shared else round_to_own_range(batch)
        for name, weight in zip("ab", weights, strict=True):
            scale = prepared.parameters[f"{name}:weight"].scale.reshape(-1, 1)
            exact, rounded = weight[..., 0, 0], np.rint(weight[..., 0, 0] / scale) * scale
            if is_shared and name == "b":
                rounded = exact
            want, got = (w @ x.reshape(8, 16) for w, x in ((exact, batch), (rounded, read)))
            signal, noise = signal + np.sum(want**2), noise + np.sum((got - want) ** 2)
    changes = {**qconfigs, "b": None} if is_shared else qconfigs
    found = forecast_sqnr(simulation, changes, ranges)
    assert found == pytest.approx(10 * np.log10(signal / noise), abs=0.02)


def test_bound_sqnr__is_what_exact_data_gives():
    """The weights alone are rounded: of a product that cannot have such ranges, nothing is."""
    rng = np.random.default_rng(5)
    weight, other = rng.standard_normal((2, 8, 8, 1, 1)).astype("float32")

    def body(emit, x):
        first = emit("a", relax.op.nn.conv2d(x, relax.const(weight)))
        return emit("b", relax.op.nn.conv2d(first, relax.const(other)))

    data = [rng.uniform(-1, 1, (1, 8, 4, 4)).astype("float32") for _ in range(3)]
    qconfig = rq.get_backend_config("x86").default_qconfig
    mapping = rq.QConfigMapping().set_global(qconfig).set_module_name("b", None)
    prepared = rq.prepare(
        build_model(body, (1, 8, 4, 4)), backend="x86", effort="fast", qconfig_mapping=mapping
    )
    prepared = rq.calibrate(prepared, data)
    scale = prepared.parameters["a:weight"].scale.reshape(-1, 1)
    exact, last = weight[..., 0, 0], other[..., 0, 0]
    pixels = np.concatenate([batch.reshape(8, 16) for batch in data], axis=1)
    noise = last @ (np.rint(exact / scale) * scale - exact) @ pixels
    want = 10 * np.log10(np.sum((last @ exact @ pixels) ** 2) / np.sum(noise**2))
    simulation = Simulation(prepared, [{"x": batch} for batch in data])
    assert bound_sqnr(simulation) == pytest.approx(want, abs=0.02)


@pytest.mark.slow
def test_guard__loud_and_quiet_samples():
    """Samples whose loudness differs a thousand times follow the float model, all on integers."""
    mod = make_products(1)
    loud = np.geomspace(1e-2, 10, 32)[:, None, None, None, None]
    rng = np.random.default_rng(3)  # its own: the order of the operators follows from the numbers
    data = [*(loud * rng.uniform(-1, 1, (32, 1, 3, 8, 8))).astype("float32")]
    with pytest.warns(rq.AccuracyWarning, match="With ranges computed at run time, 2 operators"):
        qmod = rq.quantize(mod, None, data, callbacks=())
    guard = rq.ledger(qmod).guard
    assert (guard.ranged, guard.reverted) == (("conv", "dense"), ())
    assert [row.name for row in rq.ledger(qmod).quantized if row.macs] == ["conv", "dense"]
    run, want = rq.Executor(rq.compile(qmod)), rq.Executor(rq.compile(mod))
    for batch in data:
        got, expected = run.run("main", [batch])[0], want.run("main", [batch])[0]
        assert np.sum((got - expected) ** 2) < 0.01 * np.sum(expected**2)


@pytest.mark.parametrize("backend", ["x86", "arm"])
def test_export_onnx__ranges_at_run_time(tmp_path, backend):
    """ONNX Runtime has the same numbers: an image's range, and one for each row."""
    onnxruntime = pytest.importorskip("onnxruntime")
    mod = make_products(1)
    mapping = rq.QConfigMapping()
    for name, qconfig in find_run_time_qconfigs(rq.prepare(mod, backend=backend)).items():
        mapping = mapping.set_module_name(name, qconfig)
    data = [RNG.uniform(-1, 1, (1, 3, 8, 8)).astype("float32") for _ in range(2)]
    qmod = rq.quantize(
        mod, None, data, qconfig_mapping=mapping, backend=backend, guard="off", callbacks=()
    )
    assert [row.name for row in rq.ledger(qmod).quantized if row.macs] == ["conv", "dense"]
    rq.export_onnx(qmod, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (got,) = session.run(None, {"x": 3 * data[0]})
    want = rq.Executor(rq.compile(qmod)).run("main", [3 * data[0]])[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_find_run_time_qconfigs__a_batch_of_free_size_may_be_many_samples():
    weight = relax.const(RNG.standard_normal((4, 3, 3, 3)).astype("float32"))

    def body(emit, x):
        return emit("conv", relax.op.nn.conv2d(x, weight, padding=1))

    assert find_run_time_qconfigs(rq.prepare(build_model(body, ("n", 3, 8, 8)))) == {}


def test_find_run_time_qconfigs__what_the_plan_refuses_is_not_named():
    """A backend's row that lists ranges of the run time, for a pattern that cannot have them."""
    backend = rq.get_backend_config("x86")
    dynamic = next(d for p in backend.patterns for d in p.dtypes if d.is_dynamic)
    rows = tuple(
        replace(
            row,
            dtypes=(*row.dtypes, dynamic),
            pattern=replace(row.pattern, realize_dynamic=None),
        )
        for row in backend.patterns
    )
    mod = make_products(1)
    assert find_run_time_qconfigs(rq.prepare(mod, backend=backend)).keys() == {"conv", "dense"}
    assert find_run_time_qconfigs(rq.prepare(mod, backend=replace(backend, patterns=rows))) == {}
