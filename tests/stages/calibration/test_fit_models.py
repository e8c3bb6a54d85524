"""Fitting inside calibration: whole small models, from data to integer weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from float_models import Chain, build_model
from tvm import relax

import relayquant as rq
from relayquant.ir import reference


def build_net(seed: int = 0) -> tvm.IRModule:
    """conv, depthwise of very unequal channels, grouped conv, mean, dense; biases everywhere."""
    rng = np.random.default_rng(seed)

    def constant(*shape: int) -> relax.Constant:
        return relax.const(rng.standard_normal(shape).astype("float32") * 0.4)

    x = relax.Var("x", relax.TensorType((4, 3, 12, 12), "float32"))
    builder = relax.BlockBuilder()

    def emit(expr: relax.Expr, name: str) -> relax.Var:
        value = builder.normalize(expr)
        var = relax.DataflowVar(name, value.ty)
        builder.emit_normalized(relax.VarBinding(var, value))
        return var

    def conv(data: relax.Expr, name: str, *shape: int, groups: int = 1) -> relax.Expr:
        weight = constant(*shape)
        if shape[1] == 1:
            spread = np.geomspace(0.02, 5, shape[0]).astype("float32").reshape(-1, 1, 1, 1)
            weight = relax.const(weight.value.numpy() * spread)
        out = emit(relax.op.nn.conv2d(data, weight, padding=1, groups=groups), f"{name}_linear")
        out = emit(relax.op.add(out, constant(1, shape[0], 1, 1)), f"{name}_biased")
        return emit(relax.op.nn.relu(out), name)

    with builder.function("main", [x]):
        with builder.dataflow():
            y = conv(x, "first", 8, 3, 3, 3)
            y = conv(y, "depthwise", 8, 1, 3, 3, groups=8)
            y = conv(y, "grouped", 12, 4, 3, 3, groups=2)
            y = emit(relax.op.mean(y, [2, 3]), "mean")
            y = emit(relax.op.matmul(y, constant(12, 10)), "product")
            out = builder.emit_output(builder.normalize(relax.op.add(y, constant(10))))
        builder.emit_func_output(out)
    return builder.finalize()


def draw_batches(count: int, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1, 2, (4, 3, 12, 12)).astype("float32") for _ in range(count)]


def output_sqnr(mod: tvm.IRModule, quantized: tvm.IRModule) -> float:
    """Signal to quantization noise of the outputs on other data, dB."""
    signal = noise = 0.0
    for x in draw_batches(4, seed=9):
        exact = reference.run(mod, [x])[0].astype("float64")
        signal += np.square(exact).sum()
        noise += np.square(exact - reference.run(quantized, [x])[0]).sum()
    return float(10 * np.log10(signal / noise))


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("effort", ["fast", "balanced", "best"])
def test_quantize__compiled_equals_numpy(effort: str) -> None:
    quantized = rq.quantize(build_net(), None, draw_batches(3), effort=effort)
    assert rq.verify(quantized, draw_batches(1, seed=5)[0]).is_equal
    assert rq.ledger(quantized).to_dict()["effort"] == effort


def weight_config(granularity: rq.config.Granularity, limit: int) -> rq.QConfigMapping:
    spec = rq.QSpec(
        "int8", rq.config.Scheme.SYMMETRIC, granularity, quant_min=-limit, quant_max=limit
    )
    default = rq.get_backend_config("x86").default_qconfig
    assert default is not None
    config = rq.QConfig(default.activation, rq.TensorConfig(spec, rq.observers.MinMax()))
    return rq.QConfigMapping().set_global(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("granularity", "limit", "gain"),
    [(rq.config.Granularity.PER_CHANNEL, 7, 3.0), (rq.config.Granularity.PER_TENSOR, 127, 3.0)],
    ids=["4 bits", "one scale per tensor"],
)
def test_quantize__fitted_weights_lose_less(
    granularity: rq.config.Granularity, limit: int, gain: float
) -> None:
    mod, data = build_net(), draw_batches(6)
    mapping = weight_config(granularity, limit)
    found = {
        effort: output_sqnr(
            mod, rq.quantize(mod, None, data, qconfig_mapping=mapping, effort=effort)
        )
        for effort in ("fast", "balanced", "best")
    }
    assert found["balanced"] > found["fast"] + gain
    assert found["best"] > found["fast"] + gain


def test_calibrate__wide_weights_of_8_bits_are_rounded_to_nearest() -> None:
    """Two layers of 48 and 840 weights per output; H is needed for the first, or for both."""

    def body(emit: Chain, x: relax.Var) -> relax.Expr:
        y = emit("narrow", relax.op.nn.relu(emit.dense("product", x, 840)))
        return emit.dense("wide", y, 4)

    rng = np.random.default_rng(0)
    prepared = rq.prepare(build_model(body, (16, 48)))
    data = [rng.standard_normal((16, 48)).astype("float32") for _ in range(8)]
    fits = {
        "narrow": rq.config.FitSettings(),
        "all": rq.config.FitSettings(optimal_columns=None),
        "none": rq.config.FitSettings(rq.config.WeightRounding.NEAREST),
    }
    found = {kind: rq.calibrate(prepared, data, fit=fit).constants for kind, fit in fits.items()}

    def is_equal(layer: str, first: str, second: str) -> bool:
        return np.array_equal(*(found[kind][f"{layer}:weight"] for kind in (first, second)))

    assert is_equal("narrow", "narrow", "all")
    assert not is_equal("narrow", "narrow", "none")
    assert is_equal("wide", "narrow", "none")
    assert not is_equal("wide", "narrow", "all")


@pytest.mark.slow
@pytest.mark.parametrize("order", rq.config.Order)
def test_calibrate__weights_of_few_bits_follow_the_float_model(order: rq.config.Order) -> None:
    """More than weights whose sums stay as they are on quantized inputs, with the same search of
    scales; without this, later operators cannot make up for what earlier ones lost.
    """
    mod, data = build_net(), draw_batches(24)
    mapping, few = weight_config(rq.config.Granularity.PER_CHANNEL, 3), rq.config.FitSettings()
    plain = replace(
        few.for_spec(rq.QSpec("int8", quant_min=-3, quant_max=3)),
        reconstruction=rq.config.ReconstructionSettings(bits=0),
    )
    prepared = rq.prepare(mod, None, qconfig_mapping=mapping)
    found = [
        output_sqnr(mod, rq.lower(rq.calibrate(prepared, data, order=order, fit=fit)))
        for fit in (plain, few)
    ]
    assert found[1] > found[0] + 0.4


def test_calibrate__constants_are_on_the_grid_and_reach_the_integer_model() -> None:
    prepared = rq.calibrate(rq.prepare(build_net()), draw_batches(3))
    names = {key for key in prepared.constants if key.endswith(":weight")}
    assert names == {key for key in prepared.graph.constants if key.endswith(":weight")}
    assert len(names) == 4
    module = rq.convert_to_reference(prepared)
    integers = {
        str(binding.var.name): binding.value.args[0].value.numpy()
        for binding in module["main"].body.blocks[0].bindings
        if binding.var.name.endswith(".weight")
    }
    for key in names:
        qparams = prepared.parameters[key]
        shape = [1] * prepared.constants[key].ndim
        shape[qparams.axis] = -1
        levels = prepared.constants[key] / qparams.scale.reshape(shape)
        assert np.abs(levels - np.rint(levels)).max() < 1e-3
        assert np.abs(levels).max() < 127.5
        assert np.array_equal(integers[key.replace(":weight", ".weight")], np.rint(levels))


def test_calibrate__graph_with_fitted_constants_is_what_was_calibrated() -> None:
    # Rounding a fitted weight again gives the same weight: the graph can be run with any constants.
    prepared = rq.calibrate(rq.prepare(build_net()), draw_batches(3))
    x = draw_batches(1, seed=3)[0]
    arguments = prepared.graph.arguments(prepared.parameters, prepared.constants)
    simulated = reference.run(prepared.graph.mod, [x, *arguments.values()])[0]
    integer = reference.run(rq.lower(rq.convert_to_reference(prepared)), [x])[0]
    # Requantize rounds an integer sum, the simulation a float one: a level here and there.
    assert np.abs(simulated - integer).max() < 0.05 * np.abs(simulated).max()


def test_calibrate__is_deterministic() -> None:
    first, second = (rq.calibrate(rq.prepare(build_net()), draw_batches(3)) for _ in range(2))
    assert first.parameters == second.parameters
    assert first.constants.keys() == second.constants.keys()
    for key, array in first.constants.items():
        assert np.array_equal(array, second.constants[key]), key


def test_calibrate__later_values_see_fitted_weights() -> None:
    def pick(rounding: rq.config.WeightRounding) -> rq.QParams:
        mapping = weight_config(rq.config.Granularity.PER_CHANNEL, 3)
        prepared = rq.prepare(build_net(), None, qconfig_mapping=mapping)
        settings = rq.config.FitSettings(rounding, rq.config.BiasCorrection.NONE)
        order = rq.config.Order.TOPOLOGICAL
        prepared = rq.calibrate(
            prepared, draw_batches(2), observer=rq.observers.MinMax(), fit=settings, order=order
        )
        assert bool(prepared.constants) == (rounding is rq.config.WeightRounding.OPTIMAL)
        return prepared.parameters["grouped"]

    assert pick(rq.config.WeightRounding.OPTIMAL) != pick(rq.config.WeightRounding.NEAREST)


def test_calibrate__nearest_without_correction_leaves_constants_alone() -> None:
    prepared = rq.calibrate(rq.prepare(build_net(), effort="fast"), draw_batches(2))
    assert prepared.constants == {}


def test_effort__unknown_level() -> None:
    with pytest.raises(rq.ConfigError, match="balanced"):
        rq.prepare(build_net(), effort="balance")


@pytest.mark.parametrize("groups", [1, 2])
def test_quantize__transposed_convolutions_are_fitted(groups: int) -> None:
    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        weight = emit.constant(8, 6, 3, 3)
        y = relax.op.nn.conv2d_transpose(x, weight, strides=(2, 2), padding=1, groups=groups)
        y = emit("sum", relax.op.add(emit("up", y), emit.constant(1, 6 * groups, 1, 1)))
        return emit("out", relax.op.nn.relu(y))

    mod = build_model(body, (2, 8, 7, 7))
    # Rows that have much in common leave something for the other weights to make up.
    rng = np.random.default_rng(2)
    mix = rng.standard_normal((8, 8)) * np.geomspace(1, 0.05, 8)
    draws = rng.uniform(0, 1, (9, 2, 7, 7, 8)) @ mix.T
    data = list(np.ascontiguousarray(draws.transpose(0, 1, 4, 2, 3)).astype("float32"))
    granularity = (
        rq.config.Granularity.PER_CHANNEL if groups == 1 else rq.config.Granularity.PER_TENSOR
    )
    found = {}
    for effort in ("fast", "balanced"):
        quantized = rq.quantize(
            mod,
            None,
            data[:6],
            qconfig_mapping=weight_config(granularity, 7),
            effort=effort,
            guard=rq.config.Guard.OFF,
        )
        errors = [
            np.square(reference.run(mod, [x])[0] - reference.run(quantized, [x])[0]).sum()
            for x in data[6:]
        ]
        found[effort] = sum(errors)
    assert found["balanced"] < 0.5 * found["fast"]
