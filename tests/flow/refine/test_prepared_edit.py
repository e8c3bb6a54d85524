"""A prepared model is edited, saved, loaded in another process, merged, and converted to the same
integers.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import tvm_ffi
from float_models import draw_batches, residual_model

import relayquant as rq
from relayquant.config import BiasCorrection, FitSettings, WeightRounding
from relayquant.flow.refine.prepared_edit import change_operators, replace_plan

DATA = draw_batches(residual_model(), 6)
NEAREST = FitSettings(WeightRounding.NEAREST, BiasCorrection.NONE)


def prepare(observer=None, **options) -> rq.PreparedModel:
    mapping = None
    if observer is not None:
        config = rq.get_backend_config("generic").default_qconfig
        activation = rq.TensorConfig(config.activation.spec, observer)
        mapping = rq.QConfigMapping().set_global(replace(config, activation=activation))
    return rq.prepare(residual_model(), None, qconfig_mapping=mapping, backend="generic", **options)


def convert(prepared: rq.PreparedModel):
    return rq.lower(rq.convert_to_reference(prepared), prepared.backend)


@pytest.mark.slow
@pytest.mark.parametrize("order", rq.config.Order)
def test_save__converts_to_the_same_in_another_process(order, tmp_path):
    prepared = rq.calibrate(prepare(output_dtypes={"out": "uint8"}), DATA, order=order)
    path, out = tmp_path / "model.prepared", tmp_path / "out.npy"
    rq.save_prepared(prepared, path)
    script = (
        "import sys, numpy as np, relayquant as rq\n"
        "p = rq.load_prepared(sys.argv[1])\n"
        "x = np.load(sys.argv[2])\n"
        "q = rq.lower(rq.convert_to_reference(p), p.backend)\n"
        "np.save(sys.argv[3], rq.reference.run(q, x)[0])\n"
    )
    np.save(tmp_path / "x.npy", DATA[0]["x"])
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "x.npy"), str(out)]
    subprocess.run(command, check=True, timeout=300)
    want = rq.reference.run(convert(prepared), DATA[0])[0]
    np.testing.assert_array_equal(np.load(out), want)
    loaded = rq.load_prepared(path)
    assert loaded.plan == prepared.plan
    assert loaded.parameters == prepared.parameters
    assert loaded.mapping == prepared.mapping
    assert sorted(loaded.statistics) == sorted(prepared.statistics)
    assert tvm_ffi.structural_equal(loaded.mod, prepared.mod)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.prepared", "out.npy", "x.npy"]


def test_load__refuses_what_save_did_not_write(tmp_path):
    path = tmp_path / "model.prepared"
    rq.save_prepared(prepare(), path)
    whole = path.read_bytes()
    with pytest.raises(rq.ConfigError, match="prepared for backend 'generic', not 'arm'"):
        rq.load_prepared(path, "arm")
    for damaged in (b"", b"PK", whole[:1000], whole[: len(whole) // 2], b"x" * 5000):
        path.write_bytes(damaged)
        with pytest.raises(rq.DataError, match="no prepared model"):
            rq.load_prepared(path)
    with pytest.raises(rq.DataError, match="There is no file"):
        rq.load_prepared(tmp_path / "none")


def test_load__refuses_compressed_and_foreign_entries(tmp_path):
    path = tmp_path / "bomb"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", "0" * 10_000_000)
    with pytest.raises(rq.DataError, match="entries are not"):
        rq.load_prepared(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", '{"format": "other"}')
    with pytest.raises(rq.DataError, match="its format is not"):
        rq.load_prepared(path)


def test_load__names_the_wrong_key(tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    rq.save_prepared(prepare(), path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename == "header.json":
                data = data.replace(b'"points"', b'"piont"', 1)
            target.writestr(entry.filename, data)
    with pytest.raises(rq.ConfigError, match=r"no key 'piont'. Did you mean 'points'"):
        rq.load_prepared(other)


@pytest.mark.slow
@pytest.mark.sample(9)
@pytest.mark.parametrize(
    "observer", [rq.observers.MinMax(), rq.observers.MSE(), rq.observers.AverageMax()]
)
def test_merge__two_halves_are_the_whole(observer):
    whole = rq.calibrate(prepare(observer), DATA, order=rq.config.Order.PARALLEL, fit=NEAREST)
    halves = [
        rq.calibrate(prepare(observer), part, order=rq.config.Order.PARALLEL, fit=NEAREST)
        for part in (DATA[:3], DATA[3:])
    ]
    merged = rq.merge_statistics(*halves)
    assert set(merged.parameters) == set(whole.parameters)
    for key, want in whole.parameters.items():
        np.testing.assert_allclose(merged.parameters[key].scale, want.scale, rtol=1e-5)
        np.testing.assert_array_equal(merged.parameters[key].zero_point, want.zero_point)
    assert halves[0].parameters != merged.parameters
    assert rq.verify(convert(merged), DATA[0]).is_equal


def test_merge__what_does_not_belong_together():
    parallel = rq.calibrate(
        prepare(rq.observers.MinMax()), DATA[:1], order=rq.config.Order.PARALLEL, fit=NEAREST
    )
    order = rq.config.Order.TOPOLOGICAL
    topological = rq.calibrate(prepare(rq.observers.MinMax()), DATA[:1], order=order, fit=NEAREST)
    assert not topological.statistics
    with pytest.raises(rq.ConfigError, match=r"model 1 has no statistics.*Order.PARALLEL"):
        rq.merge_statistics(parallel, topological)
    with pytest.raises(rq.ConfigError, match="model 1 has another plan"):
        rq.merge_statistics(parallel, prepare(rq.observers.MSE()))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("observer", [rq.observers.MinMax(), rq.observers.RelativeMSE()])
def test_replace__another_spec_keeps_the_rest(observer):
    prepared = rq.calibrate(prepare(observer), DATA, order=rq.config.Order.PARALLEL)
    wide = rq.QSpec("int16")
    edited = replace_plan(prepared, prepared.plan.replace("deep", spec=wide))
    assert edited.parameters["deep"].dtype == "int16"
    assert prepared.parameters["deep"].dtype == "uint8"
    same = [k for k in prepared.parameters if k != "deep"]
    assert all(edited.parameters[k] == prepared.parameters[k] for k in same)
    qmod = convert(edited)
    assert rq.ledger(qmod).row("deep").dtype == "int16"
    assert rq.verify(qmod, DATA[0]).is_equal


def test_replace__another_observer_asks_for_data():
    prepared = rq.calibrate(prepare(rq.observers.MinMax()), DATA)
    plan = prepared.plan.replace("deep", observer=rq.observers.Fixed(low=0.0, high=3.0))
    edited = replace_plan(prepared, plan)
    with pytest.raises(rq.ConfigError, match=r"1 of .* values without parameters yet.*'deep'"):
        convert(edited)
    edited = rq.calibrate(edited, DATA)
    np.testing.assert_allclose(edited.parameters["deep"].scale, 3 / 255, rtol=1e-6)


@pytest.mark.slow
def test_replace__weights_are_picked_at_once():
    prepared = rq.calibrate(prepare(rq.observers.MinMax()), DATA)
    spec = prepared.plan.group("stem:weight").info.spec
    four = replace(spec, quant_min=-7, quant_max=7)
    edited = replace_plan(prepared, prepared.plan.replace("stem:weight", spec=four))
    assert "stem:weight" not in edited.constants
    assert "one:weight" in edited.constants
    assert rq.verify(convert(edited), DATA[0]).is_equal


@pytest.mark.parametrize(
    ("key", "spec", "message"),
    [
        ("depe", rq.QSpec("int8"), "no quantized value 'depe'. Did you mean 'deep'"),
        (
            "deep",
            rq.QSpec("int8", granularity=rq.config.Granularity.PER_CHANNEL),
            "no channel axis",
        ),
        ("deep", rq.QSpec("uint16"), "cannot run operator 'deep'.*dtype uint16"),
    ],
)
def test_replace__what_is_not_possible(key, spec, message):
    prepared = prepare()
    with pytest.raises(rq.ConfigError, match=message):
        replace_plan(prepared, prepared.plan.replace(key, spec=spec))


@pytest.mark.slow
def test_change_operators__the_rest_keeps_its_parameters():
    prepared = rq.calibrate(prepare(rq.observers.MinMax()), DATA, order=rq.config.Order.PARALLEL)
    edited = change_operators(prepared, {"two": None}, lambda model: rq.calibrate(model, DATA))
    assert not edited.plan.operator("two").quantized
    assert prepared.plan.operator("two").quantized
    assert edited.parameters["stem"] == prepared.parameters["stem"]
    qmod = convert(edited)
    assert "module_name 'two'" in rq.ledger(qmod).row("two").reason
    assert rq.verify(qmod, DATA[0]).is_equal
