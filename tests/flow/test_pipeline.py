"""The whole flow on small models: integral, equal to numpy bit for bit, honest about the rest."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import tvm
from drawing import count_examples
from float_models import MAP, build_model, draw_batches, residual_model
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_graphs import TARGETS, draw_configurations, draw_inputs, draw_models
from stage_values import Stages, compare_stages
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.flow import pipeline
from relayquant.flow.settings import QuantizeSettings
from relayquant.flow.testing.check import observe_parameters
from relayquant.ir.dialect.legality import Stage, check_stage
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import tensor_dtype


def float_operators(mod: tvm.IRModule) -> list[str]:
    """Operators of main that compute floats from floats."""
    graph = Graph(mod)
    return [
        graph.op_name(binding.var)
        for binding in graph.bindings
        if tensor_dtype(binding.var).startswith("float")
        and graph.op_name(binding.var) not in ("", "relax.qnn.dequantize")
    ]


def two_inputs_model():
    def body(emit, x, y):
        a = emit("a", op.nn.relu(emit.conv_bias("a.b", x)))
        b = emit("b", op.nn.max_pool2d(emit.conv("b.c", y), (2, 2), (2, 2)))
        s = emit("s", op.add(emit.conv("s.c", a, 3), emit.conv("s.d", b, 3)))
        flat = emit("flat", op.reshape(emit("m", op.mean(s, [2, 3])), (1, 3)))
        return relax.Tuple([emit.dense("out", flat, 4), s, relax.Tuple([b, y])])

    return build_model(body, MAP, (1, 2, 12, 12))


def assert_close(mod, qmod, inputs, relative: float = 0.06) -> None:
    """Every output is near that of the float model, with its shape and dtype."""
    pairs = zip(rq.reference.run(qmod, inputs), rq.reference.run(mod, inputs), strict=True)
    for have, want in pairs:
        assert have.shape == want.shape
        assert have.dtype == want.dtype
        assert np.abs(have - want).max() <= relative * np.abs(want).max()


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", ["x86", "arm", "generic"])
def test_quantize__fully_integral_and_equal_to_numpy(backend):
    mod = residual_model()
    data = draw_batches(mod, 3)
    text = mod.script(show_meta=True)
    qmod = rq.quantize(mod, None, data, backend=backend)
    assert mod.script(show_meta=True) == text
    check_stage(qmod, Stage.QNN)
    assert float_operators(qmod) == []
    script = qmod.script()
    assert script.count("R.qnn.quantize(") == 1
    assert script.count("R.qnn.dequantize(") == 1
    assert all(row.quantized for row in rq.ledger(qmod).rows)
    assert rq.ledger(qmod).backend == backend
    assert rq.verify(qmod, data[0]).is_equal
    assert_close(mod, qmod, data[0])


@pytest.mark.slow
def test_quantize__several_inputs_and_outputs():
    mod = two_inputs_model()
    data = draw_batches(mod, 3)
    qmod = rq.quantize(mod, None, data)
    assert [param.name for param in qmod["main"].params] == ["x", "y"]
    tvm.ir.assert_structural_equal(qmod["main"].ret_ty, mod["main"].ret_ty)
    assert float_operators(qmod) == []
    assert rq.verify(qmod, data[1]).is_equal
    assert_close(mod, qmod, data[1])
    np.testing.assert_array_equal(rq.reference.run(qmod, data[0])[-1], data[0]["y"])


@pytest.mark.parametrize("form", ["dicts", "tuples", "arrays", "function", "npz", "mapping"])
def test_quantize__data_sets_of_every_form(form, tmp_path):
    mod = build_model(lambda e, x: e.conv("out", x), MAP)
    batches = draw_batches(mod, 3)
    stacked = np.concatenate([batch["x"] for batch in batches])
    np.savez(tmp_path / "data.npz", x=stacked)
    dataset = {
        "dicts": batches,
        "tuples": [(batch["x"],) for batch in batches],
        "arrays": [batch["x"] for batch in batches],
        "function": lambda: iter(batches),
        "npz": tmp_path / "data.npz",
        "mapping": {"x": stacked},
    }[form]
    expected = rq.quantize(mod, None, batches)
    tvm.ir.assert_structural_equal(
        rq.quantize(mod, None, dataset)["main"], expected["main"], map_free_vars=True
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: [], "yields no sample"),
        (lambda x: iter([{"x": x}]), "once"),
        (lambda x: [{"y": x}], "x"),
        (lambda x: [{"x": x, "z": x}], "z"),
        (lambda x: [{"x": x[:, :3]}], "axis 1 is 3 instead of 4"),
        (lambda x: [{"x": x.astype("complex64")}], "complex64"),
        (lambda x: [{"x": np.where(x > 1, np.nan, x)}], "(?i)nan"),
        (lambda x: [{"x": np.where(x > 1, np.inf, x)}], "(?i)inf"),
        (lambda x: lambda: None, "iter"),
        (lambda x: "no/such/file.npz", "no/such/file.npz"),
    ],
)
def test_quantize__bad_data(make, message):
    mod = build_model(lambda e, x: e.conv("out", x), MAP)
    (batch,) = draw_batches(mod, 1)
    with pytest.raises(rq.DataError, match=message):
        rq.quantize(mod, None, make(batch["x"]))


@pytest.mark.slow
def test_quantize__a_larger_batch_than_at_calibration():
    def body(emit, x):
        a = emit("a", op.nn.relu(emit.conv_bias("a.b", x)))
        return emit.dense("out", emit("m", op.mean(a, [2, 3])), 5)

    mod = build_model(body, ("n", 4, 6, 6))
    qmod = rq.quantize(mod, None, draw_batches(mod, 4, n=1))
    assert float_operators(qmod) == []
    (inputs,) = draw_batches(mod, 1, seed=5, n=7)
    assert rq.verify(qmod, inputs).is_equal
    whole = rq.reference.run(qmod, inputs)[0]
    parts = [rq.reference.run(qmod, inputs["x"][i : i + 1])[0] for i in range(7)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_quantize__parameters_bound_or_by_name():
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((4, 4, 3, 3)), rng.standard_normal((1, 4, 1, 1))
    params = {"w": weight.astype("float32"), "b": bias.astype("float32")}

    def unbound(emit, x, y, z):
        return emit("out", op.add(emit("c", op.nn.conv2d(x, y, padding=1)), z))

    def bound(emit, x):
        conv = emit("c", op.nn.conv2d(x, relax.const(params["w"]), padding=1))
        return emit("out", op.add(conv, relax.const(params["b"])))

    free = build_model(unbound, MAP, weight.shape, bias.shape)
    fixed = build_model(bound, MAP)
    data = draw_batches(fixed, 2)
    named = {"y": params["w"], "z": params["b"]}
    text = free.script(show_meta=True)
    one = rq.quantize(free, named, data)
    assert free.script(show_meta=True) == text
    tvm.ir.assert_structural_equal(
        one["main"], rq.quantize(fixed, None, data)["main"], map_free_vars=True
    )
    assert [param.name for param in one["main"].params] == ["x"]


def test_quantize__saved_and_loaded_module_runs():
    mod = residual_model()
    data = draw_batches(mod, 2)
    qmod = rq.quantize(mod, None, data)
    loaded = tvm.ir.load_json(tvm.ir.save_json(qmod))
    assert rq.ledger(loaded) == rq.ledger(qmod)
    assert [b.var.name for b in Graph(loaded).bindings] == [
        b.var.name for b in Graph(qmod).bindings
    ]
    assert rq.verify(loaded, data[0]).is_equal
    np.testing.assert_array_equal(
        rq.reference.run(loaded, data[0])[0], rq.reference.run(qmod, data[0])[0]
    )


@pytest.mark.slow
def test_compile__plain_tvm_gives_the_same_integers():
    mod = residual_model()
    data = draw_batches(mod, 2)
    qmod = rq.quantize(mod, None, data)
    plain = Executor(tvm.compile(qmod, tvm.target.Target({"kind": "llvm"})))
    fast = Executor(rq.compile(qmod))
    for batch in data:
        (one,), (other,) = plain.run("main", [batch["x"]]), fast.run("main", [batch["x"]])
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_steps__equal_quantize():
    mod = residual_model()
    data = draw_batches(mod, 2)
    prepared = rq.prepare(mod)
    prepared = rq.calibrate(prepared, data)
    steps = rq.lower(rq.convert_to_reference(prepared), "x86")
    whole = rq.quantize(mod, None, data, guard=rq.config.Guard.OFF)
    tvm.ir.assert_structural_equal(steps["main"], whole["main"], map_free_vars=True)


def test_quantize__what_a_backend_cannot_run():
    mod = residual_model()
    data = draw_batches(mod, 1)
    config = rq.get_backend_config("x86").default_qconfig
    wide = replace(config, activation=rq.TensorConfig(rq.QSpec("uint16"), rq.observers.MinMax()))
    mapping = rq.QConfigMapping().set_global(wide)
    with pytest.raises(rq.ConfigError, match=r"stem \(.*uint16.*uint8"):
        rq.quantize(mod, None, data, qconfig_mapping=mapping, strict=True)
    with pytest.warns(UserWarning, match="10 operators"):
        qmod = rq.quantize(mod, None, data, qconfig_mapping=mapping)
    assert not rq.ledger(qmod).quantized
    np.testing.assert_allclose(
        rq.reference.run(qmod, data[0])[0], rq.reference.run(mod, data[0])[0], rtol=1e-4, atol=1e-5
    )
    # What is kept in float on purpose is no reason to stop.
    kept = rq.QConfigMapping().set_global(config).set_module_name("stem", None)
    qmod = rq.quantize(mod, None, data, qconfig_mapping=kept, strict=True)
    assert [row.name for row in rq.ledger(qmod).floating] == ["stem"]


@pytest.mark.parametrize(
    "body",
    [
        lambda e, x: e("out", op.nn.softmax(x)),
        lambda e, x: x,
        lambda e, x: relax.Tuple([x, x]),
        lambda e, x: e("out", op.reshape(x, (1, 144))),
    ],
)
def test_quantize__nothing_to_quantize(body):
    mod = build_model(body, MAP)
    data = draw_batches(mod, 1)
    qmod = rq.quantize(mod, None, data)
    assert not rq.ledger(qmod).quantized
    assert rq.verify(qmod, data[0]).is_equal
    for have, want in zip(
        rq.reference.run(qmod, data[0]), rq.reference.run(mod, data[0]), strict=True
    ):
        np.testing.assert_array_equal(have, want)


def test_quantize__values_of_one_name():
    """A script may bind a name twice; the values stay apart."""

    def body(emit, x):
        return emit.conv("a", emit("a", op.nn.relu(emit.conv("a", x))))

    mod = build_model(body, MAP)
    data = draw_batches(mod, 2)
    qmod = rq.quantize(mod, None, data)
    names = [row.name for row in rq.ledger(qmod).rows]
    assert len(set(names)) == len(names) == 2
    assert_close(mod, qmod, data[0])


def test_quantize__unknown_backend():
    mod = build_model(lambda e, x: e.conv("out", x), MAP)
    with pytest.raises(rq.ConfigError, match=r"no backend 'x68'.*x86"):
        rq.quantize(mod, None, draw_batches(mod, 1), backend="x68")


@pytest.mark.slow
@settings(
    max_examples=count_examples(140, 12),
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_quantize__random_models_and_configurations(draw):
    mod = draw.draw(draw_models())
    backend, mapping = draw.draw(draw_configurations(mod))
    check_random_model(mod, backend, mapping, next(examples))


examples = iter(range(10**9))


def check_random_model(mod, backend, mapping, number: int) -> None:
    """No crash, one ledger row per operator, stages agree, and compiled code equals numpy.

    One model in ten is compiled and one in twenty calibrated by the runner, which compiles too:
    that is where the time goes.
    """
    data = draw_inputs(mod, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # drawn configurations ask for what a backend cannot do
        prepared = rq.prepare(mod, None, qconfig_mapping=mapping, backend=backend)
    if number % 20 == 10:
        prepared = rq.calibrate(prepared, data)
    else:
        prepared = observe_parameters(prepared, data)
    reference = rq.convert_to_reference(prepared)
    stages = Stages(prepared, reference, rq.lower(reference, prepared.backend))
    check_rows(stages)
    check_values(stages, data[1])
    for have, want in zip(
        rq.reference.run(stages.integer, data[0]), rq.reference.run(mod, data[0]), strict=True
    ):
        assert have.shape == want.shape
        assert np.isfinite(have).all()
    # numpy and LLVM need not round every float16 alike, and a step apart is carried on.
    if number % 10 == 0 and not any(op.compute for op in prepared.plan.operators):
        report = rq.verify(stages.integer, data[1], TARGETS[number // 10 % len(TARGETS)])
        assert report.is_equal, report.first


def check_values(stages: Stages, inputs) -> None:
    """From the same integers reference form and integer module compute the same to one step, at
    ties. A step of float16 is one of the 11 bits of its mantissa, which is many steps of 16 bits.
    """
    has_float16 = any(op.compute for op in stages.prepared.plan.operators)
    for name, _, reference, integer in compare_stages(stages, inputs):
        span = float(integer.max(initial=0) - integer.min(initial=0))
        limit = max(1.0, span / 2**10) if has_float16 else 1.0
        assert np.abs(reference - integer).max(initial=0) <= limit, name


def check_rows(stages: Stages) -> None:
    """Every value that an operator computes is in one row of the ledger."""
    rows = rq.ledger(stages.integer).rows
    graph = Graph(stages.prepared.mod)
    covered = Counter(value for row in rows for value in row.values)
    assert set(covered) == {b.var.name for b in graph.bindings if graph.call_of(b.var) is not None}
    assert set(covered.values()) <= {1}


@pytest.mark.parametrize(
    ("effort", "activations", "weights"),
    [
        ("fast", "MinMax()", "MinMax(), rounding nearest, bias correction none"),
        ("balanced", "OutputSQNR()", "MinMax(), rounding optimal, bias correction weight"),
        ("best", "RelativeMSE(values=1048576)", "sweeps 2, samples 32768"),
    ],
)
def test_ledger__says_what_the_effort_picked(effort, activations, weights):
    mod = build_model(lambda emit, x: emit.dense("y", x, 3), (4, 5))
    qmod = rq.quantize(mod, None, draw_batches(mod, 2), effort=effort, guard=rq.config.Guard.OFF)
    choices = rq.ledger(qmod).choices
    assert choices["activations"] == activations
    assert choices["weights"].endswith(weights)
    assert rq.ledger(qmod).to_dict()["choices"] == choices


def test_ledger__says_what_the_user_picked():
    mod = build_model(lambda emit, x: emit.dense("y", x, 3), (4, 5))
    prepared = rq.prepare(mod)
    prepared = rq.calibrate(prepared, draw_batches(mod, 2), observer=rq.observers.Percentile(99.0))
    assert prepared.choices["activations"] == "Percentile(percentile=99.0)"


#: Operators of several results where they have one, which is a tensor and no tuple.
SINGLE_RESULTS = {
    "split into one": lambda x: op.split(x, 1, axis=1),
    "split at no index": lambda x: op.split(x, [], axis=1),
    "values of topk": lambda x: op.topk(x, 3, ret_type="values"),
    "indices of topk": lambda x: op.astype(op.topk(x, 3, ret_type="indices"), "float32"),
    "one of a split": lambda x: op.split(x, [6], axis=1)[0],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", SINGLE_RESULTS.values(), ids=SINGLE_RESULTS)
def test_quantize__one_result_of_several(make):
    """Step by step, compiled and in numpy: each has its own idea of a tuple of one."""

    def body(emit, x):
        cut = emit(
            "cut", emit.builder.normalize(make(emit("r", op.nn.relu(emit.dense("a", x, 6)))))
        )
        return emit.dense("b", cut, 4)

    mod = build_model(body, (2, 6))
    data = draw_batches(mod, 4)
    qmod = rq.quantize(mod, None, data, effort="fast")
    assert rq.verify(qmod, data[0]).is_equal
    have = Executor(rq.compile(mod)).run("main", list(data[0].values()))
    np.testing.assert_allclose(have[0], rq.reference.run(mod, data[0])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("attrs", "is_quantized"),
    [
        ({"padding": (1, 1, 1, 1)}, True),
        ({"padding": (2, 0, 0, 0)}, False),
        ({"padding": (0, 0, 0, 3)}, False),
        ({"padding": (2, 2, 2, 2), "dilation": (2, 2)}, True),
        ({"padding": (0, 0, 1, 1), "strides": (2, 2), "ceil_mode": True}, False),
        ({"padding": (0, 0, 0, 0), "strides": (2, 2), "ceil_mode": True}, True),
    ],
)
def test_quantize__max_pool_of_padding_alone_stays_float(attrs, is_quantized):
    """Its maximum is -inf, as the float model has it."""
    mod = build_model(
        lambda emit, x: emit("pool", op.nn.max_pool2d(emit.conv("conv", x), (2, 2), **attrs)),
        (1, 4, 7, 7),
    )
    data = draw_batches(mod, 2)
    qmod = rq.quantize(mod, None, data, effort="fast", guard=rq.config.Guard.OFF)
    (row,) = [row for row in rq.ledger(qmod).rows if row.name == "pool"]
    assert row.quantized == is_quantized
    assert is_quantized or "padding alone" in row.reason
    (have,), (want,) = (rq.reference.run(each, data[0]) for each in (qmod, mod))
    np.testing.assert_array_equal(np.isinf(have), np.isinf(want))
    np.testing.assert_allclose(have, want, atol=0.1)


def test_quantize__ends_with_one_line(capsys):
    """What was lost, on samples that calibration did not read; silent if asked."""
    mod = build_model(lambda emit, x: emit.dense("out", emit("s", op.nn.softmax(x)), 8), (4, 16))
    data = draw_batches(mod, 64)
    qmod = rq.quantize(mod, None, data)
    guard = rq.ledger(qmod).guard
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"relayquant: {rq.ledger(qmod).summarize()}"
    assert "1 of 2 operators on integers (100% of the multiply-adds)" in line
    assert f"outputs: {guard.sqnr:.1f} dB SQNR" in line
    assert "on 32 of 256 samples (24 held back, 8 calibrated with)" in line
    assert f"{guard.equal} of 32 answers equal" in line
    assert "in float: 1 nn.softmax" in line
    assert guard.held_back == 24
    assert guard.total == 256
    assert rq.quantize(mod, None, data, callbacks=()) is not None
    assert not capsys.readouterr().err


def test_quantize__small_data_is_calibrated_with_whole():
    mod = build_model(lambda emit, x: emit.dense("out", x, 8), (4, 16))
    seen = []

    def note(info, samples):
        seen.append(sum(len(array) for array in samples))
        return rq.choose_qparams(-4, 4, info.spec)

    for count in (23, 64):
        rq.quantize(mod, None, draw_batches(mod, count), observer=note, callbacks=())
    assert seen[0] == 23 * 4
    assert seen[-1] == 58 * 4


@pytest.mark.slow
def test_rebuild__checks_the_integer_module_once(monkeypatch):
    """A guard builds a dozen modules; each check infers all types anew."""
    data = draw_batches(mod := two_inputs_model(), 4)
    prepared = rq.calibrate(rq.prepare(mod, None), data)
    name = prepared.plan.operators[0].name
    seen: list[Stage] = []
    monkeypatch.setattr(pipeline, "check_stage", lambda _, stage, **__: seen.append(stage))
    changed, module = pipeline.rebuild(prepared, {name: None}, data, QuantizeSettings())
    assert seen == [Stage.QNN]
    assert not rq.ledger(module).row(name).quantized
    tvm.ir.assert_structural_equal(module, pipeline.lower_prepared(changed))
