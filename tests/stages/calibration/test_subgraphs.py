"""The split of the calibration graph: each operator runs once, in the order of the choices."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import tvm
from float_models import MAP, build_model, draw_batches, residual_model
from tvm import relax, topi
from tvm.relax import op

import relayquant as rq
from relayquant.ir.reference import folding
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.function import make_main
from relayquant.stages.calibration import subgraphs
from relayquant.stages.calibration.store import ValueStore
from relayquant.stages.calibration.subgraphs import split_graph


def bound_names(mod: tvm.IRModule, function: str = "main") -> list[str]:
    """Values that a function binds, the returned tuple aside."""
    (block,) = mod[function].body.blocks
    return [
        binding.var.name for binding in block.bindings if not isinstance(binding.value, relax.Tuple)
    ]


def branched_model():
    def body(emit, x):
        a = emit.conv_bias("a", x)
        b = emit("b", op.nn.softmax(a))
        c = emit.conv("c", b)
        d = emit("d", op.add(c, a))
        return relax.Tuple([emit.conv("e", d), emit("f", op.erf(d)), b])

    return build_model(body, MAP)


@pytest.mark.parametrize("model", [residual_model, branched_model])
@pytest.mark.parametrize("stops_at_groups", [False, True])
def test_split__no_binding_is_in_two_subgraphs(model, stops_at_groups):
    prepared = rq.prepare(model())
    groups = prepared.plan.activations if stops_at_groups else ()
    split = split_graph(prepared.graph, groups, prepared.graph.fits)
    functions = [subgraph.function for subgraph in split.subgraphs if subgraph.function]
    bound = [name for function in functions for name in bound_names(split.mod, function)]
    assert len(bound) == len(set(bound))
    assert split.constants_mod is not None
    constants = set(bound_names(split.constants_mod))
    assert not set(bound) & constants
    # Everything that a choice depends on is there: all ancestors of the observed values.
    view = Graph(prepared.graph.mod)
    known = {*bound, *constants}
    for subgraph in split.subgraphs:
        for name in subgraph.observed:
            assert name in known or name in prepared.graph.inputs
    assert all(name in view.vars for name in known)


@pytest.mark.parametrize("model", [residual_model, branched_model])
def test_split__one_subgraph_for_each_group_in_order(model):
    prepared = rq.prepare(model())
    split = split_graph(prepared.graph, prepared.plan.activations)
    assert [subgraph.groups for subgraph in split.subgraphs] == [
        (group.key,) for group in prepared.plan.activations
    ]
    assert {name for subgraph in split.subgraphs if (name := subgraph.function)} == {
        var.name_hint for var in split.mod.get_global_vars()
    }
    for subgraph, group in zip(split.subgraphs, prepared.plan.activations, strict=True):
        assert subgraph.observed == group.points


@pytest.mark.parametrize("model", [residual_model, branched_model])
def test_split__values_are_there_when_they_are_read_and_expire_afterwards(model):
    prepared = rq.prepare(model())
    split = split_graph(prepared.graph, prepared.plan.activations)
    variables = {p.name for p in prepared.graph.mod["main"].params}
    known = set(variables)
    if split.constants is not None:
        known.update(split.constants.outputs)
    expired: set[str] = set()
    for subgraph in split.subgraphs:
        assert set(subgraph.inputs) <= known
        assert not {*subgraph.inputs, *subgraph.observed} & expired
        known.update(subgraph.outputs)
        expired.update(subgraph.expired)
    # At the end nothing that was computed from data is still kept.
    computed = {name for subgraph in split.subgraphs for name in subgraph.outputs}
    assert computed <= expired


def test_split__value_that_is_only_looked_at_later_is_kept():
    """The last convolution reads a, which was computed for another group: its fit needs it."""

    def body(emit, x):
        a = emit.conv("a", x)
        out = emit.conv("out", emit("s", op.nn.silu(a)))
        return relax.Tuple([out, emit.conv("b", a)])

    prepared = rq.prepare(build_model(body, MAP))
    fits = prepared.graph.fits
    assert [fit.operator for fit in fits] == ["a", "out", "b"]
    split = split_graph(prepared.graph, prepared.plan.activations, fits)
    known = set(prepared.graph.inputs)
    for subgraph in split.subgraphs:
        known.update(subgraph.outputs)
        assert {fit.source for fit in subgraph.fits} <= known


def test_split__large_value_of_few_operations_is_computed_again_if_values_are_stored():
    """Before: "wide", 128 times as large as x, is stored for "out". Expected: x is."""

    def body(emit, x):
        wide = emit.conv("wide", x, 128)
        return emit.conv("out", emit.conv("wider", wide, 128), 1)

    prepared = rq.prepare(build_model(body, (1, 1, 128, 128)))
    values = {"x", "x.d", "wide", "wide.d", "wider"}

    def read(**settings) -> dict[str, list[str]]:
        split = split_graph(prepared.graph, (), prepared.graph.fits, **settings)
        return {
            fit.operator: [name for name in subgraph.inputs if name in values]
            for subgraph in split.subgraphs
            for fit in subgraph.fits
        }

    assert read() == {"wide": [], "wider": ["x"], "out": ["wide"]}
    # 1,152 multiply-adds for each element of "wider": it is stored.
    assert read(is_stored=True) == {"wide": [], "wider": ["x"], "out": ["x.d"]}


def test_split__value_that_is_moved_and_rounded_is_computed_again_if_values_are_stored():
    """Before: neighbouring slices that are joined, three times as large as "first", are stored for
    the convolution that reads them. Expected: "first" is.
    """

    def body(emit, x):
        first = emit("first", op.nn.relu(emit.conv("a", x, 8)))
        whole = emit("whole", op.nn.pad(first, [1, 1, 0, 0, 0, 0, 0, 0]))
        taps = [emit(f"tap{i}", op.strided_slice(whole, [0], [i], [i + 4])) for i in range(3)]
        joined = emit("joined", op.concat(taps, 1))
        return emit.conv("out", emit.conv("b", joined), 1)

    prepared = rq.prepare(build_model(body, (4, 1, 128, 128)))
    split = split_graph(prepared.graph, (), prepared.graph.fits, is_stored=True)
    inputs = {
        fit.operator: set(subgraph.inputs) for subgraph in split.subgraphs for fit in subgraph.fits
    }
    moved = {f"{name}{end}" for name in ("joined", "tap0", "whole") for end in ("", ".q", ".d")}
    assert "first" in inputs["out"]
    assert not inputs["out"] & moved


def test_calibrate__stores_nothing_that_every_reader_computes_again(monkeypatch):
    """Two convolutions read slices that are joined: each fit joins them itself."""

    def body(emit, x):
        first = emit("first", op.nn.relu(emit.conv("a", x, 8)))
        joined = emit("joined", op.concat([first, first, first], 1))
        return relax.Tuple([emit.conv("b", joined), emit.conv("c", joined)])

    names, write = [], ValueStore.write
    monkeypatch.setattr(subgraphs, "LARGE_MOVED", 1)
    monkeypatch.setattr(
        ValueStore,
        "write",
        lambda self, name, shard: names.append(name) or write(self, name, shard),
    )
    mod = build_model(body, (2, 3, 9, 9))
    rq.calibrate(rq.prepare(mod), draw_batches(mod, 3))
    assert "first" in names
    assert not any(name.startswith("joined") for name in names)


@pytest.mark.parametrize("model", [residual_model, branched_model])
@pytest.mark.parametrize("order", rq.config.Order)
def test_calibrate__has_the_same_bits_if_everything_is_computed_again(model, order, monkeypatch):
    mod = model()
    prepared, batches = rq.prepare(mod), draw_batches(mod, 20)
    expected = rq.calibrate(prepared, batches, order=order)
    monkeypatch.setattr(subgraphs, "LARGE", 1)
    monkeypatch.setattr(subgraphs, "LARGE_MOVED", 1)
    monkeypatch.setattr(subgraphs, "MOST_REPEATED", 1 << 20)
    monkeypatch.setattr(subgraphs, "LEAST_GROWTH", 0)
    found = rq.calibrate(prepared, batches, order=order)
    assert found.parameters.keys() == expected.parameters.keys()
    for key, qparams in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[key].scale, qparams.scale)
        np.testing.assert_array_equal(found.parameters[key].zero_point, qparams.zero_point)
    for name, array in expected.constants.items():
        np.testing.assert_array_equal(found.constants[name], array)


def test_split__weights_are_rounded_once_outside_of_all_subgraphs():
    prepared = rq.prepare(branched_model())
    split = split_graph(prepared.graph, prepared.plan.activations)
    names = bound_names(split.constants_mod)
    assert any(name.endswith(":weight.d") for name in names)
    for subgraph in split.subgraphs:
        if subgraph.function:
            assert not any(":weight" in name for name in bound_names(split.mod, subgraph.function))


def test_split__input_that_is_observed_needs_no_function():
    prepared = rq.prepare(branched_model())
    first = split_graph(prepared.graph, prepared.plan.activations).subgraphs[0]
    assert first.groups == ("x",)
    assert first.function == ""
    assert first.outputs == ()


@pytest.mark.slow
@pytest.mark.parametrize("order", rq.config.Order)
def test_calibrate__values_that_no_input_changes(order, monkeypatch):
    """A position embedding, say, of operators that are not computed before."""
    monkeypatch.setattr(folding, "MAX_GROWTH", 0)

    def body(emit, x):
        grid = emit("grid", op.reshape(op.arange(0, 12, 1, "float32"), (6, 2)))
        places = emit.dense("places", grid, 8)
        added = emit("sum", op.add(op.nn.relu(emit.dense("first", x, 8)), places))
        return relax.Tuple([emit.dense("last", added, 3), places, grid])

    mod = build_model(body, (6, 5))
    batches = draw_batches(mod, 4)
    prepared = rq.calibrate(rq.prepare(mod), batches, order=order)
    assert rq.sensitivity(prepared, batches[:1], samples=1).rows
    qmod = rq.lower(rq.convert_to_reference(prepared), prepared.backend)
    assert {row.name for row in rq.ledger(qmod).rows if row.quantized} >= {"places", "last"}
    assert rq.verify(qmod, batches[0]).is_equal
    for got, expected in zip(
        rq.reference.run(qmod, batches[1]), rq.reference.run(mod, batches[1]), strict=True
    ):
        noise = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert noise < 0.01  # 40 dB


def test_split__is_well_formed_and_changes_nothing():
    prepared = rq.prepare(branched_model())
    text = prepared.graph.mod.script(show_meta=True)
    split = split_graph(prepared.graph, prepared.plan.activations)
    relax.analysis.well_formed(split.mod)
    assert isinstance(split.mod, tvm.IRModule)
    assert prepared.graph.mod.script(show_meta=True) == text


def test_split__keeps_the_loops_that_a_frontend_lowered():
    x = relax.Var("x", relax.TensorType(MAP, "float32"))
    weight = relax.const(np.ones((MAP[1], MAP[1], 1, 1), "float32"))
    mod = make_main(
        [x], lambda builder: op.nn.conv2d(builder.emit_te(topi.tile, x, (1, 1, 2, 1)), weight)
    )
    samples = [np.ones(MAP, "float32")]
    qmod = rq.quantize(mod, None, samples, effort="fast")
    assert rq.ledger(qmod).quantized


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_split__a_constant_for_every_sample_waits_for_the_batch(effort):
    """The class token of a transformer, the first state of a recurrent layer: no input changes
    them, but they are as long as the batch.
    """

    def body(emit, x):
        batch = x.ty.shape.values[0]
        token = emit("token", op.broadcast_to(emit.constant(1, 1, 4), (batch, 1, 4)))
        state = emit("state", op.full((batch, 6), relax.const(0.5), "float32"))
        rows = emit.dense("rows", emit("all", op.concat([token, x], 1)), 6)
        gated = emit.dense("gated", state, 6)
        return emit("out", op.add(op.mean(rows, [1]), gated))

    mod = build_model(body, ("n", 3, 4))
    rng = np.random.default_rng(0)
    samples = [{"x": rng.standard_normal((n, 3, 4)).astype("float32")} for n in (1, 2, 3)]
    qmod = rq.quantize(mod, None, samples, effort=effort)
    assert {"rows", "gated"} <= {row.name for row in rq.ledger(qmod).quantized}
    (got,), (want,) = (rq.reference.run(each, samples[2]) for each in (qmod, mod))
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["fast", "best"])
def test_split__sizes_of_the_run_time_in_arguments(effort, tmp_path):
    """The first rows of a table, as many as the data has: positions of a sequence."""
    size = tvm.tirx.Var("n", "int64")
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((size, 16), "float32"))
    draw = np.random.default_rng(0).normal
    table, weight = (relax.const(draw(size=(n, 16)).astype("float32")) for n in (64, 16))
    with builder.function("main", [x]):
        with builder.dataflow():
            rows = builder.emit(op.strided_slice(table, [0], [0], [size], assume_inbound=True))
            first = builder.emit(op.matmul(builder.emit(op.add(x, rows)), weight))
            result = builder.emit_output(op.matmul(builder.emit(op.nn.relu(first)), weight))
        builder.emit_func_output(result)
    mod = builder.finalize()
    data = [{"x": draw(size=(n, 16)).astype("float32")} for n in (5, 6, 9)]
    qmod = rq.quantize(mod, None, data, effort=effort)
    assert [row.quantized for row in rq.ledger(qmod).rows if row.op == "matmul"] == [True, True]
    assert rq.verify(qmod, data[2]).is_equal
    (got,), (want,) = (rq.reference.run(m, data[2]) for m in (qmod, mod))
    assert np.square(got - want).mean() < 1e-3 * np.square(want).mean()
    exported = onnx.load(rq.export_onnx(qmod, tmp_path / "model.onnx"))
    onnx.checker.check_model(exported, full_check=True)
    assert "Shape" in {node.op_type for node in exported.graph.node}


def find_judged(body, *shapes: tuple[int | str, ...]) -> tuple[str, ...]:
    """Names of the values that ranges are judged by."""
    prepared = rq.prepare(build_model(body, *shapes))
    (subgraph,) = split_graph(prepared.graph, (), results=True).subgraphs
    return subgraph.observed


def emit_heads(emit, x):
    """Places and scores, (n, 8, 1) and (n, 4, 1)."""
    places = emit("places", op.expand_dims(emit.dense("places.m", x, 8), 2))
    scores = emit("scores", op.sigmoid(emit.dense("scores.m", x, 4)))
    return places, emit("scores.column", op.expand_dims(scores, 2))


def test_results__a_concatenation_is_judged_by_its_parts():
    def body(emit, x):
        both = emit("both", op.concat(list(emit_heads(emit, x)), axis=1))
        turned = emit("turned", op.permute_dims(both, [0, 2, 1]))
        rest = emit("rest", op.strided_slice(turned, [2], [4], [12]))
        return emit("again", op.concat([emit("exp", op.exp(rest)), turned], axis=2))

    assert set(find_judged(body, (3, 16))) == {"exp", "places.m", "scores"}


def test_results__are_judged_whole__where_samples_are_not_the_first_axis_of_a_part():
    def body(emit, x):
        heads = [
            emit(f"{i}", op.reshape(each, (-1,))) for i, each in enumerate(emit_heads(emit, x))
        ]
        return emit("all", op.concat(heads, axis=0))

    def many(emit, x):
        parts = [emit(f"p{i}", op.multiply(x, relax.const(np.float32(i + 2)))) for i in range(33)]
        return emit("all", op.concat(parts, axis=1))

    for each in (body, many, lambda emit, x: emit("all", op.expand_dims(op.exp(x), 2))):
        assert len(find_judged(each, (3, 16))) == 1
