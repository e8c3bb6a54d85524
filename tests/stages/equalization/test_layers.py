"""Layers are scaled against one another where it is worth it; the rest of the flow knows of it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import Chain, build_model
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.analysis.compare import CompareReport
from relayquant.config import Guard
from relayquant.ir import reference
from relayquant.stages.equalization.cross_layer import (
    add_exponents,
    choose_exponents,
    find_noise_ratio,
    read_exponents,
    record_exponents,
    scale_layers,
)

RNG = np.random.default_rng(5)
SPREAD = np.geomspace(0.004, 2, 8).astype("float32").reshape(8, 1, 1, 1)
W1 = RNG.standard_normal((8, 3, 3, 3)).astype("float32") * SPREAD
W2 = RNG.standard_normal((8, 1, 3, 3)).astype("float32") / SPREAD
W3 = RNG.standard_normal((4, 8, 1, 1)).astype("float32") * SPREAD[::-1].reshape(1, 8, 1, 1)
DATA = [RNG.standard_normal((1, 3, 8, 8)).astype("float32") / 20 for _ in range(4)]
PER_TENSOR = rq.QSpec(
    "int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_TENSOR, quant_min=-127
)


def build_chain(*weights: np.ndarray) -> tvm.IRModule:
    """conv -> relu6 -> depthwise -> relu6 -> 1x1 conv, ranges of channels far apart."""
    first, depthwise, last = (relax.const(w) for w in (weights or (W1, W2, W3)))

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        y = emit("first", op.nn.conv2d(x, first, padding=1))
        y = emit("first_clip", op.clip(y, 0, 6))
        y = emit("depthwise", op.nn.conv2d(y, depthwise, groups=8))
        y = emit("depthwise_clip", op.clip(y, 0, 6))
        return emit.builder.normalize(op.nn.conv2d(y, last))

    return build_model(body, (1, 3, 8, 8))


def make_mapping(activation: rq.TensorConfig | None = None) -> rq.QConfigMapping:
    """Weights with one scale each."""
    default = rq.get_backend_config("x86").default_qconfig
    weight = rq.TensorConfig(PER_TENSOR, rq.observers.MinMax())
    return rq.QConfigMapping().set_global(rq.QConfig(activation or default.activation, weight))


def quantize(effort: str = "best", **options) -> tvm.IRModule:
    return rq.quantize(build_chain(), None, DATA, effort=effort, guard=Guard.OFF, **options)


def measure(qmod: tvm.IRModule) -> CompareReport:
    return rq.compare(build_chain(), None, qmod, DATA)


@pytest.mark.slow
def test_best__equalizes_layers_of_one_scale_and_says_so() -> None:
    qmod = quantize(qconfig_mapping=make_mapping())
    assert rq.ledger(qmod).choices["equalized"] == "channels between 2 pairs of layers"
    assert set(read_exponents(qmod)) == {"first", "depthwise"}
    assert read_exponents(quantize("balanced", qconfig_mapping=make_mapping()))
    plain = quantize("fast", qconfig_mapping=make_mapping())
    assert "equalized" not in rq.ledger(plain).choices
    assert not read_exponents(plain)
    # Values between the layers are compared in the units that they have in the integer model.
    rows, before = measure(qmod).rows, measure(plain).rows
    assert min(row.sqnr for row in rows) > 30
    assert rows[-1].sqnr > before[-1].sqnr + 6


def test_best__what_is_not_worth_it_is_left_alone() -> None:
    # One factor for all channels takes nothing from the noise.
    even = build_chain(W1 / SPREAD, W2 * SPREAD / 64, W3)
    peaks = dict.fromkeys(("first_clip", "depthwise_clip"), np.full(8, 3, "float32"))
    assert any(choose_exponents(even, peaks)["first"])
    prepared = rq.prepare(even, None, DATA, qconfig_mapping=make_mapping(), effort="best")
    assert not read_exponents(prepared.mod)


def test_find_noise_ratio__largest_over_mean_square() -> None:
    assert find_noise_ratio(np.float32([[3, -4], [0, 5]])) == pytest.approx(25 / 12.5)


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["balanced", "best"])
def test_quantize__per_channel_is_balanced_too_and_nothing_is_clipped(effort: str) -> None:
    qmod = quantize(effort)
    assert read_exponents(qmod)
    scaled = scale_layers(build_chain(), read_exponents(qmod))
    for x in DATA:
        want, got = (reference.run(mod, [x])[0] for mod in (build_chain(), scaled))
        np.testing.assert_array_equal(got, want)
    assert measure(qmod).rows[-1].sqnr > measure(quantize("fast")).rows[-1].sqnr + 3


def test_best__compare_takes_the_equalized_float_model_too() -> None:
    prepared = rq.prepare(build_chain(), None, DATA, qconfig_mapping=make_mapping(), effort="best")
    assert read_exponents(prepared.mod)
    prepared = rq.calibrate(prepared, DATA)
    qmod = rq.lower(rq.convert_to_reference(prepared))
    assert rq.compare(prepared.mod, None, qmod, DATA).rows == measure(qmod).rows


@pytest.mark.slow
def test_best__parameters_of_the_equalized_module_fit_it() -> None:
    prepared = rq.prepare(build_chain(), None, DATA, qconfig_mapping=make_mapping(), effort="best")
    prepared = rq.calibrate(prepared, DATA)
    first = rq.lower(rq.convert_to_reference(prepared))
    given = prepared.parameters
    again = rq.quantize(
        prepared.mod,
        None,
        DATA,
        qconfig_mapping=make_mapping(),
        qparams=given,
        effort="best",
        guard=rq.config.Guard.OFF,
    )
    assert read_exponents(again) == read_exponents(prepared.mod)
    assert measure(again).rows[-1].sqnr == pytest.approx(measure(first).rows[-1].sqnr, abs=3)


def test_record_exponents__adds_to_what_was_noted_before() -> None:
    once = record_exponents(build_chain(), {"first": [1, 0], "last": [2]})
    twice = record_exponents(once, {"first": [-3, 1], "last": [-2]})
    assert read_exponents(twice) == {"first": [-2, 1]}
    assert add_exponents({"first": [1, 2]}, {"first": [1, 0]}, sign=-1) == {"first": [0, 2]}


@pytest.mark.parametrize("how", ["parameters", "observer"])
def test_best__values_with_fixed_parameters_are_not_scaled(how: str) -> None:
    scale = np.float32(6 / 255)
    if how == "parameters":
        given = {"depthwise_clip": rq.QParams(scale, np.int32(0), "uint8")}
        qmod = quantize(qconfig_mapping=make_mapping(), qparams=given)
        assert set(read_exponents(qmod)) == {"first"}
        return
    fixed = rq.TensorConfig(rq.QSpec("uint8"), rq.observers.Fixed(float(scale), 0))
    assert not read_exponents(quantize(qconfig_mapping=make_mapping(fixed)))


def test_finetune__values_inside_have_the_units_of_the_equalized_layers() -> None:
    """What operators inside give is compared with the model that was equalized, too: 8 bits are
    near it before anything has trained.
    """
    pytest.importorskip("torch", reason="pip install torch")
    losses = []

    class Watch(rq.Callback):
        def on_training(self, event) -> None:
            losses.append(event.loss)

    trained = rq.torch.finetune(
        build_chain(), None, DATA, lambda got, want: got[0].sum() * 0, hidden_weight=1.0, steps=1,
        lr=1e-6, qconfig_mapping=make_mapping(), callbacks=Watch(),
    )  # fmt: skip
    assert "equalized" in rq.ledger(trained).choices
    assert 0 < losses[-1] < 0.01
