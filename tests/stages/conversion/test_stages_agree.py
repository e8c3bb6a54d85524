"""Simulated graph, reference form and integer module agree in every quantized value."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from float_models import MAP, ask_for, build_model, draw_batches, residual_model
from stage_values import compare_stages, run_stages
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.ir.rewrite import Graph


def check_agreement(mod, data, inputs, params=None, **options) -> int:
    """Every value differs by at most one step; returns how many values were compared."""
    count = 0
    for name, simulated, reference, integer in compare_stages(
        run_stages(mod, data, params, **options), inputs
    ):
        assert np.abs(simulated - integer).max(initial=0) <= 1, name
        assert np.abs(reference - integer).max(initial=0) <= 1, name
        count += 1
    return count


def unary_model():
    def body(emit, x):
        value = emit.conv("c", x)
        tables = [op.sigmoid, op.tanh, op.exp, op.erf, op.abs, op.nn.gelu, op.nn.silu]
        results = [emit(f"f{i}", function(value)) for i, function in enumerate(tables)]
        results.append(emit("leaky", op.nn.leakyrelu(value, 0.1)))
        return relax.Tuple([emit.conv(f"out{i}", result) for i, result in enumerate(results)])

    return build_model(body, MAP)


def arithmetic_model():
    def body(emit, x):
        a, b = emit.conv("a", x), emit.conv("b", x)
        values = [
            emit("add", op.add(a, b)),
            emit("same", op.add(a, a)),
            emit("subtract", op.subtract(a, b)),
            emit("multiply", op.multiply(a, b)),
            emit("scaled", op.multiply(a, emit.constant(*MAP))),
            emit("shifted", op.add(a, emit.constant(*MAP))),
            emit("from", op.subtract(emit.constant(*MAP), a)),
            emit("relu_add", op.nn.relu(emit("sum", op.add(b, a)))),
            emit("pool", op.nn.avg_pool2d(a, (3, 3), padding=(1, 1))),
            emit("padded", op.nn.pad(a, [0, 0, 0, 2, 0, 0, 0, 0])),
        ]
        return emit.conv("out", emit("all", op.concat([values[0], *values], axis=1)))

    return build_model(body, MAP)


def attention_model():
    def body(emit, x):
        q, k, v = (emit(f"{n}.b", op.add(emit.dense(n, x, 8), emit.constant(8))) for n in "qkv")
        scores = emit("scores", op.matmul(q, emit("kt", op.permute_dims(k, [0, 2, 1]))))
        weights = emit("weights", op.nn.softmax(scores))
        mixed = emit("mixed", op.matmul(weights, v))
        return emit("out", op.add(emit.dense("proj", mixed, 8), x))

    return build_model(body, (2, 5, 8))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("model", "least"),
    [(residual_model, 8), (unary_model, 9), (arithmetic_model, 9), (attention_model, 4)],
)
@pytest.mark.parametrize("backend", ["x86", "arm"])
def test_stages_agree__on_small_models(model, least, backend):
    mod = model()
    data = draw_batches(mod, 3)
    assert check_agreement(mod, data, data[0], backend=backend) >= least


@pytest.mark.slow
def test_stages_agree__resnet20(shared_data):
    mod, params = rq.load(shared_data("resnet20_cifar10.onnx"))
    images = np.load(shared_data("cifar10_unlabelled_1000.npz"))["x"][:24]
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    images = ((images / 255 - mean) / std).transpose(0, 3, 1, 2).astype("float32")
    stages = run_stages(mod, [images[:16]], params)
    images = {"input": images[16:]}
    apart = [
        np.abs(found - integer).reshape(-1)
        for _, *others, integer in compare_stages(stages, images)
        for found in others
    ]
    assert len(apart) >= 2 * 20
    # Ties: the simulation does not round biases.
    assert np.concatenate(apart).max() <= 1
    assert np.concatenate(apart).mean() <= 0.01


@pytest.mark.slow
def test_no_stage_changes_its_input():
    mod = residual_model()
    data = draw_batches(mod, 2)
    before = mod.script(show_meta=True)
    prepared = rq.prepare(mod)
    canonical, graph = prepared.mod, prepared.graph.mod
    texts = [canonical.script(show_meta=True), graph.script(show_meta=True)]
    given, prepared = prepared, rq.calibrate(prepared, data)
    assert not given.parameters
    parameters = dict(prepared.parameters)
    reference = rq.convert_to_reference(prepared)
    text = reference.script(show_meta=True)
    first = rq.lower(reference, prepared.backend)
    second = rq.lower(reference, prepared.backend)
    assert mod.script(show_meta=True) == before
    assert [canonical.script(show_meta=True), graph.script(show_meta=True)] == texts
    assert reference.script(show_meta=True) == text
    assert prepared.parameters == parameters
    tvm.ir.assert_structural_equal(first, second, map_free_vars=True)


def test_reference_of_another_backend__says_so():
    mod = residual_model()
    prepared = rq.calibrate(rq.prepare(mod), draw_batches(mod, 1))
    reference = rq.convert_to_reference(prepared)
    empty = replace(
        rq.get_backend_config("generic"),
        name="mine",
        patterns=rq.get_backend_config("generic").patterns[-3:],
    )
    with pytest.raises(rq.ConfigError, match="Backend 'mine' has no pattern 'conv2d_bias_relu'"):
        rq.lower(reference, empty)


@pytest.mark.slow
def test_lower__a_prepared_model_knows_its_backend():
    mod = residual_model()
    given = {}
    for backend in (
        rq.get_backend_config("arm"),
        replace(rq.get_backend_config("generic"), name="mine"),
    ):
        prepared = rq.calibrate(rq.prepare(mod, None, backend=backend), draw_batches(mod, 1))
        reference, want = rq.convert_to_reference(prepared), rq.lower(prepared)
        assert rq.ledger(want).backend == backend.name
        again = rq.lower(reference, backend)
        tvm.ir.assert_structural_equal(again, want, map_free_vars=True)
        given[backend.name] = reference
        with pytest.raises(rq.ConfigError, match=f"prepared for backend '{backend.name}' and runs"):
            rq.lower(prepared, "x86")
    # A reference form has the name of its backend: of this machine's nothing is asked.
    assert rq.ledger(rq.lower(given["arm"])).backend == "arm"
    with pytest.raises(rq.ConfigError, match=r"backend 'mine', whose patterns.*calibrate returned"):
        rq.lower(given["mine"])


def test_ledger__says_what_could_not_be_expanded():
    """A slice of an accumulator with one scale per channel stays float, and the ledger knows."""

    def body(emit, x):
        s = emit("s", op.strided_slice(emit.conv("a", x), [1], [0], [2]))
        return relax.Tuple([s, emit("r", op.reshape(s, (2, 36)))])

    mod = build_model(body, MAP)
    data = draw_batches(mod, 2)
    qmod = rq.quantize(mod, None, data, qconfig_mapping=ask_for("strided_slice", "reshape"))
    rows = {row.name: row for row in rq.ledger(qmod).rows}
    assert rows["a"].quantized
    assert rows["a"].dtype == "int32"
    assert not rows["s"].quantized
    assert rows["s"].dtype == "float32"
    assert "per channel" in rows["s"].reason
    graph = Graph(qmod)
    for row in rows.values():
        is_float = graph.op_name(graph.vars[row.name]) == f"relax.{row.op}"
        assert is_float != row.quantized
