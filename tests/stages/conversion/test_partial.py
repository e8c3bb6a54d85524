"""A model that is quantized in part keeps what it has; the rest is calibrated. Parameters that the
user gives are kept as well.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from operator_names import count_operators
from quantized_models import GraphBuilder

import relayquant as rq
from relayquant.config.observers import Fixed
from relayquant.errors import ConfigError, ModelError
from relayquant.formats.readers import import_onnx
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.conversion.partial import fix_parameters

SHAPE = (2, 4, 8, 8)


def half_quantized(dtype: str = "uint8"):
    """conv1 with parameters - conv2 in float - conv3 with parameters, as ONNX."""
    b = GraphBuilder()
    zero = np.array(120 if dtype == "uint8" else -8, dtype)
    x = b.round_trip("x", 0.02, zero)
    weight, scale = b.weight((4, 4, 3, 3))
    y = b.node("Conv", x, weight, b.bias(4, np.float32(0.02) * scale), pads=[1, 1, 1, 1])
    y = b.round_trip(b.node("Relu", y), 0.04, np.array(0 if dtype == "uint8" else -128, dtype))
    filters = b.constant(b.random.normal(0, 0.2, (4, 4, 3, 3)).astype("float32"))
    y = b.node("Conv", y, filters, pads=[1, 1, 1, 1])
    y = b.round_trip(y, 0.03, zero)
    weight, scale = b.weight((4, 4, 3, 3))
    y = b.node("Conv", y, weight, b.bias(4, np.float32(0.03) * scale), pads=[1, 1, 1, 1])
    y = b.round_trip(y, 0.05, zero)
    return b.model({"x": ("float32", SHAPE)}, {y: ("float32", SHAPE)})


def batches(count: int = 4) -> list[np.ndarray]:
    return [np.random.default_rng(i).normal(0, 1.2, SHAPE).astype("float32") for i in range(count)]


@pytest.mark.parametrize(("dtype", "backend"), [("uint8", "x86"), ("int8", "arm")])
def test_quantize__finishes_what_is_float(dtype, backend):
    mod, _ = import_onnx(half_quantized(dtype))
    before = rq.lower(mod, backend)
    assert count_operators(before)["nn.conv2d"] == 1
    assert [row.op for row in rq.ledger(before).floating] == ["nn.conv2d"]
    after = rq.quantize(mod, None, batches(), backend=backend, effort="fast")
    found = count_operators(after)
    assert found["qnn.conv2d"] == 3
    assert found["nn.conv2d"] == 0
    assert found["qnn.quantize"] == found["qnn.dequantize"] == 1
    assert not rq.ledger(after).floating, str(rq.ledger(after))
    (one,), (two,) = (rq.reference.run(m, [batches()[0]]) for m in (before, after))
    # Only the weights of one convolution were rounded.
    assert np.sqrt(np.mean((one - two) ** 2)) < 0.03


def test_quantize__keeps_the_parameters():
    mod, _ = import_onnx(half_quantized())
    scales = [
        set(
            np.concatenate(
                [
                    constant_value(arg).ravel()
                    for binding in Graph(module).bindings
                    if Graph(module).op_name(binding.var) == "relax.qnn.requantize"
                    for arg in binding.value.args[3:4]
                ]
            ).tolist()
        )
        for module in (rq.lower(mod), rq.quantize(mod, None, batches(), effort="fast"))
    ]
    assert scales[1] == {float(np.float32(s)) for s in (0.04, 0.03, 0.05)}
    assert scales[0] <= scales[1]


def test_quantize__a_finished_model_needs_no_calibration():
    b = GraphBuilder()
    weight, _ = b.weight((4, 4, 3, 3))
    y = b.round_trip(b.node("Conv", b.round_trip("x", 0.02, np.uint8(9)), weight), 0.1, np.uint8(9))
    mod, _ = import_onnx(b.model({"x": ("float32", SHAPE)}, {y: ("float32", (2, 4, 6, 6))}))
    one, two = rq.lower(mod), rq.quantize(mod, None, batches(), effort="fast")
    np.testing.assert_array_equal(*(rq.reference.run(m, [batches()[0]])[0] for m in (one, two)))


def test_quantize__our_own_result_is_refused():
    mod, _ = import_onnx(half_quantized())
    qmod = rq.quantize(mod, None, batches(), effort="fast")
    with pytest.raises(ModelError, match="cannot be quantized again"):
        rq.quantize(qmod, None, batches())


def float_model():
    b = GraphBuilder()
    filters = b.constant(b.random.normal(0, 0.2, (4, 4, 3, 3)).astype("float32"))
    y = b.node("Relu", b.node("Conv", "x", filters, pads=[1, 1, 1, 1]))
    y = b.node("Conv", y, filters, pads=[1, 1, 1, 1])
    return import_onnx(b.model({"x": ("float32", SHAPE)}, {y: ("float32", SHAPE)}))[0]


def test_parameters__of_the_user_are_not_calibrated():
    mod = float_model()
    given = {"x": rq.QParams(0.0625, -5, "int8")}
    prepared = rq.prepare(mod, qparams=given, effort="fast")
    prepared = rq.calibrate(prepared, batches())
    assert prepared.parameters["x"] == rq.QParams(0.0625, 123, "uint8")


def named_model():
    """Two convolutions and a product, their weights called "one", "two" and "three"."""
    b = GraphBuilder()
    draw = lambda *shape: b.random.normal(0, 0.2, shape).astype("float32")  # noqa: E731
    y = b.node("Conv", "x", b.constant(draw(4, 4, 3, 3), "one"), b.constant(draw(4)))
    y = b.node("Conv", b.node("Relu", y), b.constant(draw(4, 4, 3, 3), "two"))
    y = b.node("Gemm", b.node("Flatten", y), b.constant(draw(5, 64), "three"), transB=1)
    return import_onnx(b.model({"x": ("float32", SHAPE)}, {y: ("float32", (2, 5))}))[0]


def test_parameters__of_weights_by_their_names():
    scales = np.linspace(0.004, 0.01, 5).astype("float32")
    given = {
        "one": rq.QParams(scales[:4], np.zeros(4), "int8", 0),
        "two": rq.QParams(scales[0], 0, "int8"),
        "three": rq.QParams(scales, np.zeros(5), "int8", 0),
    }
    prepared = rq.prepare(named_model(), qparams=given, effort="fast")
    prepared = rq.calibrate(prepared, batches())
    weights = [group for group in prepared.plan.groups if group.constant is not None]
    found = [prepared.parameters[group.key] for group in weights if group.info.axis != 0]
    assert [(q.scale.tolist(), q.axis) for q in found] == [
        (scales[0].tolist(), None),
        (scales.tolist(), 1),
    ]
    (first,) = [prepared.parameters[group.key] for group in weights if group.info.axis == 0]
    np.testing.assert_array_equal(first.scale, scales[:4])


def test_parameters__of_values_inside_an_operator_warn():
    mod = named_model()
    graph = Graph(mod)
    (relu,) = [b.value for b in graph.bindings if graph.op_name(b.var) == "relax.nn.relu"]
    inner = relu.args[0].name
    given = {inner: rq.QParams(0.1, 0, "uint8")}
    with pytest.warns(UserWarning, match=rf"1 of the given parameters are not used.*'{inner}'"):
        rq.prepare(mod, qparams=given, effort="fast")


@pytest.mark.parametrize(
    ("name", "qparams", "message"),
    [
        ("y", rq.QParams(0.1, 0, "uint8"), r"'y', which the plan does not quantize.*Known"),
        ("x", rq.QParams(0.1, 0, "int16"), r"parameters\['x'\].*cannot be uint8"),
        ("x", rq.QParams(np.ones(4), 0, "uint8", 1), "per channel"),
    ],
)
def test_parameters__that_do_not_fit(name, qparams, message):
    with pytest.raises(ConfigError, match=message):
        rq.prepare(float_model(), qparams={name: qparams})


@pytest.mark.parametrize(
    ("zero_point", "scheme"), [(128, rq.config.Scheme.SYMMETRIC), (120, rq.config.Scheme.AFFINE)]
)
def test_parameters__scheme_is_theirs(zero_point, scheme):
    """Symmetric only where the configuration says so and the zero point is in the middle."""
    config = rq.get_backend_config("x86").default_qconfig
    for wanted in rq.config.Scheme:
        spec = rq.QSpec("uint8", wanted)
        mapping = rq.QConfigMapping().set_global(
            replace(config, activation=replace(config.activation, spec=spec))
        )
        given = {"x": rq.QParams(0.0625, zero_point, "uint8")}
        plan = rq.prepare(float_model(), None, qconfig_mapping=mapping, qparams=given).plan
        both = scheme if wanted is rq.config.Scheme.SYMMETRIC else rq.config.Scheme.AFFINE
        assert plan.group("x").info.spec.scheme is both


@pytest.mark.parametrize(("zero_points", "scheme"), [((0, 0), "SYMMETRIC"), ((0, 3), "AFFINE")])
def test_parameters__of_channels_are_symmetric_only_together(zero_points, scheme):
    scales = np.linspace(0.004, 0.01, 4)
    given = {"one": rq.QParams(scales, np.tile(zero_points, 2), "int8", 0)}
    plan = rq.prepare(named_model(), qparams=given, effort="fast").plan
    (fixed,) = [group for group in plan.groups if group.is_fixed]
    assert fixed.info.spec.scheme is rq.config.Scheme[scheme]
    assert fixed.info.spec.granularity is rq.config.Granularity.PER_CHANNEL


def test_fix_parameters__of_the_model_in_another_width_are_left_to_calibration():
    prepared = rq.prepare(float_model(), backend="x86", effort="fast")

    def fix(dtype):
        found = {"x": rq.QParams(0.1, 0, dtype)}
        return fix_parameters(prepared.mod, prepared.plan, found, None, Fixed)

    assert fix("int16") == prepared.plan
    assert fix("int8").group("x").is_fixed
