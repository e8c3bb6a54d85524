"""The calibration graph: simulated quantization with variables, float when they say so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from float_models import MAP, build_model, draw_batches, residual_model
from stage_values import run_simulated
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.config import QConfigMapping
from relayquant.ir.dialect.legality import Stage, check_stage
from relayquant.ir.rewrite import Graph
from relayquant.stages.annotation import annotate
from relayquant.stages.backends import GENERIC, X86
from relayquant.stages.preparation import prepare_module
from relayquant.stages.simulation import build_calibration_graph


def make(mod, backend=X86):
    canonical = prepare_module(mod)
    mapping = QConfigMapping().set_global(backend.default_qconfig)
    plan = annotate(canonical, backend, mapping)
    return canonical, plan, build_calibration_graph(canonical, plan, backend)


def conv_model():
    return build_model(lambda e, x: e.conv("out", e("r", op.nn.relu(e.conv_bias("a", x)))), MAP)


def test_graph__holds_simulated_operators_with_variables():
    _, plan, graph = make(conv_model())
    check_stage(graph.mod, Stage.SIMULATED)
    view = Graph(graph.mod)
    params = {param.name for param in view.func.params}
    assert graph.inputs == ("x",)
    counts = {"relax.qnn.simulated_quantize": 0, "relax.qnn.simulated_dequantize": 0}
    for binding in view.bindings:
        name = view.op_name(binding.var)
        if name in counts:
            counts[name] += 1
            assert all(arg.name in params for arg in binding.value.args[1:])
        assert name not in ("relax.qnn.quantize", "relax.qnn.dequantize")
    # x, r, and two weights; the last convolution stays an accumulator
    assert set(counts.values()) == {4}
    assert set(graph.variables) == {"x", "r", "r:weight", "out:weight"}
    assert graph.variables["r:weight"].length == 4
    assert graph.variables["x"].length == 1
    assert {group.key for group in plan.groups} == set(graph.variables)


def test_graph__passes_through_in_float():
    for mod in (conv_model(), residual_model()):
        canonical, plan, graph = make(mod)
        prepared = rq.PreparedModel(canonical, plan, graph, X86)
        (inputs,) = draw_batches(mod, 1)
        values = run_simulated(prepared, inputs, pass_through=True)
        expected = rq.reference.run(canonical, inputs)
        out = Graph(graph.mod).func.body.body.name
        np.testing.assert_array_equal(values[out], expected[0])


@pytest.mark.slow
def test_graph__compiled_once_serves_different_scales():
    canonical, plan, graph = make(conv_model())
    (inputs,) = draw_batches(canonical, 1)
    executor = Executor(rq.compile(graph.mod))

    def pick(group, scale: float) -> rq.QParams:
        length = graph.variables[group.key].length
        per_channel = group.info.spec.is_per_channel
        return rq.QParams(
            np.full(length, scale, "float32") if per_channel else np.float32(scale),
            np.int32(0 if per_channel else 128),
            group.info.spec.dtype,
            group.info.axis,
        )

    def run(scale: float) -> np.ndarray:
        parameters = {group.key: pick(group, scale) for group in plan.groups if scale}
        arguments = graph.arguments(parameters)
        expected = rq.reference.run(graph.mod, {**inputs, **arguments})
        args = [{**inputs, **arguments}[param.name] for param in graph.mod["main"].params]
        (result,) = executor.run("main", args)
        np.testing.assert_allclose(result, expected[0], rtol=1e-4, atol=1e-4)
        return result

    fine, coarse, exact = run(0.08), run(0.8), run(0)
    assert np.abs(coarse - exact).mean() > 2 * np.abs(fine - exact).mean() > 0


def test_graph__concat_of_one_value_and_shared_weights():
    def body(emit, x):
        weight = emit.constant(4, 4, 3, 3)
        a = emit("a", op.nn.conv2d(x, weight, padding=1))
        b = emit("b", op.nn.conv2d(a, weight, padding=1))
        return emit.conv("out", emit("k", op.concat([b, b], axis=1)))

    _, plan, graph = make(build_model(body, MAP))
    assert {"a:weight", "b:weight"} <= set(graph.variables)
    view = Graph(graph.mod)
    assert view.op_name(view.vars["k"]) == "relax.concat"
    assert len({arg.name for arg in view.values[view.vars["k"]].args[0].fields}) == 1
    assert plan.operator("k").quantized


def test_graph__float_operators_read_exact_values():
    """softmax is float: a quantized reader of its result does not change what a float one reads."""

    def body(emit, x):
        s = emit("s", op.nn.softmax(x))
        return relax.Tuple([emit.conv("out", s), emit("e", op.erf(s))])

    _, plan, graph = make(build_model(body, MAP))
    assert not plan.operator("e").quantized
    view = Graph(graph.mod)
    assert view.values[view.vars["e"]].args[0].name == "s"
    assert view.values[view.vars["out"]].args[0].name == "s.d"


def test_graph__second_specification_is_rounded_wherever_the_value_is_moved():
    """int8 for one reader, uint8 for the other, both behind a pool that both groups share."""

    def body(emit, x):
        t = emit("t", op.nn.max_pool2d(emit.conv("a", x), (2, 2)))
        return relax.Tuple([emit.conv("u", t), emit.conv("s", t)])

    int8 = replace(
        X86.default_qconfig, activation=rq.TensorConfig(rq.QSpec("int8"), rq.observers.MinMax())
    )
    mapping = QConfigMapping().set_global(GENERIC.default_qconfig).set_module_name("s", int8)
    prepared = rq.prepare(build_model(body, MAP), None, qconfig_mapping=mapping, backend="generic")
    first, second = prepared.plan.value_groups["t"]
    view = Graph(prepared.graph.mod)

    def find_data(name: str) -> relax.Expr:
        product = view.values[view.vars[name]].args[0]
        return view.values[product].args[0]

    data = find_data("s")
    scale = prepared.graph.variables[second].scale
    assert view.values[data].args[2].name == scale.name
    # It converts what the first specification has rounded.
    source = view.values[view.values[data].args[0]].args[0]
    assert source.same_as(find_data("u"))
    assert first != second


def test_graph__clip_of_a_rounded_value_is_rounded_again():
    """Its bounds need not be on the grid."""

    def body(emit, x):
        a = emit.conv("a", x)
        k = emit("k", op.clip(a, -0.3, 0.31))
        return relax.Tuple([emit.conv("out", k), emit.conv("side", a)])

    _, plan, graph = make(build_model(body, MAP))
    assert plan.group("a").clamped == ("k",)
    view = Graph(graph.mod)
    data = view.values[view.vars["out"]].args[0]
    assert data.name == "k.d"
    assert view.values[data].args[2].name == graph.variables["a"].scale.name


def test_graph__variable_names_avoid_those_of_the_model():
    def body(emit, x):
        a = emit("x.scale", op.nn.softmax(x))
        return emit("out", op.add(emit.conv("c", x), a))

    _, _, graph = make(build_model(body, MAP))
    names = [param.name for param in graph.mod["main"].params]
    names += [binding.var.name for binding in Graph(graph.mod).bindings]
    assert len(set(names)) == len(names)


def test_graph__symbolic_batch():
    mod = build_model(lambda e, x: e.conv("out", x), ("n", 4, 6, 6))
    canonical, plan, graph = make(mod)
    prepared = rq.PreparedModel(canonical, plan, graph, X86)
    for n in (1, 3):
        (inputs,) = draw_batches(mod, 1, n=n)
        assert run_simulated(prepared, inputs, pass_through=True)["out"].shape[0] == n


def test_graph__input_module_is_not_changed():
    mod = prepare_module(residual_model())
    text = mod.script(show_meta=True)
    plan = annotate(mod, X86, QConfigMapping().set_global(X86.default_qconfig))
    build_calibration_graph(mod, plan, X86)
    assert mod.script(show_meta=True) == text
