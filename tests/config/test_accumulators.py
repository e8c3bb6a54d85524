"""Narrow accumulators: every form of the model against exact Python integers, the report, and what
calibration does about overflow.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tvm
from drawing import count_examples
from float_models import MAP, build_model, draw_batches, residual_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.flow.testing.check import observe_parameters
from relayquant.ir.ops import BUILTIN_OPS
from relayquant.ir.reference import run_values

UNIT = rq.observers.Fixed(scale=1.0, zero_point=0)
#: real values are the integers themselves
INTEGERS = rq.QConfig(
    rq.TensorConfig(rq.QSpec("int8"), UNIT),
    rq.TensorConfig(rq.QSpec("int8", rq.config.Scheme.SYMMETRIC), UNIT),
)


def make_backend(accumulator: rq.config.Accumulator | str) -> rq.BackendConfig:
    """The backend `generic` with another accumulator."""
    patterns = tuple(
        replace(
            row,
            dtypes=tuple(
                replace(d, accumulator=accumulator)
                for d in row.dtypes
                if not d.is_dynamic and not d.is_grouped
            ),
        )
        for row in rq.get_backend_config("generic").patterns
    )
    return replace(rq.get_backend_config("generic"), name="narrow", patterns=patterns)


def narrow_exactly(total: int, accumulator: rq.config.Accumulator) -> int:
    """One sum in Python integers."""
    half = 2 ** (accumulator.bits - 1)
    if accumulator.overflow is rq.config.Overflow.SATURATE:
        return max(-half, min(half - 1, total))
    return (total + half) % (2 * half) - half


def draw_integers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, shape).astype("float32")


def make_product(kind: str, seed: int, k: int) -> tuple[tvm.IRModule, dict, np.ndarray]:
    """(model, inputs, exact sums before the accumulator) of integers."""
    if kind == "batch_matmul":
        x, y = draw_integers(seed, 2, 3, k), draw_integers(seed + 1, 2, k, 4)
        mod = build_model(lambda e, a, b: e("out", op.matmul(a, b)), x.shape, y.shape)
        return mod, {"x": x, "y": y}, x.astype("int64") @ y.astype("int64")
    x, bias = draw_integers(seed, 2, k, 4), draw_integers(seed + 1, 3) * 5
    if kind == "dense":
        x, weight = x.reshape(2, 4, k), draw_integers(seed + 2, k, 3)

        def dense(e, a):
            product = e("product", op.matmul(a, relax.const(weight)))
            return e("out", op.add(product, relax.const(bias)))

        sums = x.astype("int64") @ weight.astype("int64") + bias.astype("int64")
        return build_model(dense, x.shape), {"x": x}, sums
    weight = draw_integers(seed + 2, 3, k, 3)

    def conv(e, a):
        product = e("product", op.nn.conv1d(a, relax.const(weight), padding=1))
        return e("out", op.nn.relu(e("sum", op.add(product, relax.const(bias.reshape(1, 3, 1))))))

    padded = np.pad(x, ((0, 0), (0, 0), (1, 1))).astype("int64")
    sums = sum(
        np.einsum("nki,ok->noi", padded[:, :, j : j + 4], weight[:, :, j].astype("int64"))
        for j in range(3)
    )
    return build_model(conv, x.shape), {"x": x}, sums + bias.astype("int64").reshape(1, 3, 1)


@settings(max_examples=count_examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["dense", "conv", "batch_matmul"]),
    seed=st.integers(0, 10**6),
    k=st.integers(1, 12),
    bits=st.integers(8, 20),
    overflow=st.sampled_from(rq.config.Overflow),
)
def test_accumulator__every_form_is_exact(kind, seed, k, bits, overflow):
    accumulator = rq.config.Accumulator(bits, overflow, rq.config.OverflowBound.NONE)
    mod, inputs, sums = make_product(kind, seed, k)
    want = np.vectorize(lambda total: narrow_exactly(int(total), accumulator))(sums)
    np.testing.assert_array_equal(accumulator.narrow(sums), want)
    if kind == "conv":
        want = np.maximum(want, 0)  # the activation comes behind the accumulator
    backend = make_backend(accumulator)
    mapping = rq.QConfigMapping().set_global(INTEGERS)
    prepared = rq.prepare(mod, None, qconfig_mapping=mapping, backend=backend, strict=True)
    prepared = observe_parameters(prepared, [inputs])
    reference = rq.convert_to_reference(prepared)
    arguments = prepared.graph.arguments(prepared.parameters)
    simulated = run_values(prepared.graph.mod, {**inputs, **arguments})["out"]
    for have in (
        simulated,
        rq.reference.run(reference, inputs)[0],
        rq.reference.run(rq.lower(reference, backend), inputs)[0],
    ):
        np.testing.assert_array_equal(have.astype("int64"), want)
    # Without parameters the graph is the float model.
    free = run_values(prepared.graph.mod, {**inputs, **prepared.graph.arguments()})["out"]
    np.testing.assert_array_equal(free, np.maximum(sums, 0) if kind == "conv" else sums)


@pytest.mark.slow
def test_accumulator__compiled_code_equals_numpy():
    text = "int12 wrap"
    backend = make_backend(text)
    mod = residual_model()
    data = draw_batches(mod, 2)
    prepared = rq.prepare(mod, None, backend=backend, strict=True)
    prepared = observe_parameters(prepared, data)
    qmod = rq.lower(rq.convert_to_reference(prepared), backend)
    rows = {row.name: row.accumulator for row in rq.ledger(qmod).rows}
    expected = rq.config.Accumulator.parse(text).description
    assert rows == {
        name: expected if name in ("stem", "one", "two", "deep", "out") else "" for name in rows
    }
    report = rq.analysis.accumulator_report(qmod, data)
    assert len(report.overflowing) == 5
    assert rq.verify(qmod, data[0]).is_equal


def test_report__counts_and_bounds():
    mod, inputs, sums = make_product("dense", 7, 12)
    backend = make_backend(rq.config.Accumulator(14, bound=rq.config.OverflowBound.NONE))
    mapping = rq.QConfigMapping().set_global(INTEGERS)
    prepared = rq.prepare(mod, None, qconfig_mapping=mapping, backend=backend)
    prepared = rq.calibrate(prepared, [inputs])
    (row,) = rq.analysis.accumulator_report(prepared, [inputs, inputs]).rows
    flat = sums.reshape(-1, 3)
    outside = (flat < -8192) | (flat > 8191)
    assert row.name == "out"
    assert row.elements == 2 * sums.size
    assert row.overflows == tuple((2 * outside.sum(0)).tolist())
    assert row.channels == tuple(np.flatnonzero(outside.any(0)).tolist())
    assert (row.lowest, row.highest) == (tuple(flat.min(0)), tuple(flat.max(0)))
    assert abs(row.worst) == np.abs(flat).max()
    weight, bias = draw_integers(9, 12, 3).astype("int64"), draw_integers(8, 3).astype("int64") * 5
    top = np.maximum(weight * 127, weight * -128).sum(0) + np.maximum(bias, 0)
    assert row.bound_high == tuple(top.tolist())
    json.dumps(rq.analysis.accumulator_report(prepared, [inputs]).to_dict())
    assert "out: int14 saturate (-8192..8191)" in str(
        rq.analysis.accumulator_report(prepared, [inputs])
    )


@pytest.mark.parametrize(
    "bound", [rq.config.OverflowBound.OBSERVED, rq.config.OverflowBound.WORST_CASE]
)
def test_calibrate__raises_scales_until_sums_fit(bound):
    def body(emit, x, y):
        conv = emit("conv", op.nn.relu(emit.conv_bias("conv.b", x)))
        return relax.Tuple([conv, emit("both", op.matmul(x, y))])

    mod = build_model(body, MAP, (1, 4, 6, 6))
    data = draw_batches(mod, 2)
    prepared = rq.prepare(mod, None, backend=make_backend(rq.config.Accumulator(14, bound=bound)))
    plain = rq.prepare(mod, None, backend="generic")
    before = rq.calibrate(plain, data, order=rq.config.Order.PARALLEL).parameters
    prepared = rq.calibrate(prepared, data, order=rq.config.Order.PARALLEL)
    report = rq.analysis.accumulator_report(prepared, data)
    assert not report.overflowing
    assert (report.row("conv").excess(bound) <= 1).all()
    assert {row.name for row in report.rows} == {"conv", "both"}
    assert (prepared.parameters["conv:weight"].scale >= before["conv:weight"].scale).all()
    assert prepared.parameters["conv:weight"].scale.max() > before["conv:weight"].scale.max()
    # The factor that is an activation: nothing else can shrink the sums of two activations.
    assert prepared.parameters["y"].scale > before["y"].scale


def test_calibrate__warns_where_scales_may_not_grow():
    weight = rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, scale_max=0.01)
    config = replace(
        rq.get_backend_config("generic").default_qconfig,
        weight=rq.TensorConfig(weight, rq.observers.MinMax()),
    )
    mod = build_model(lambda e, x: e.conv("out", x), MAP)
    mapping = rq.QConfigMapping().set_global(config)
    prepared = rq.prepare(mod, None, qconfig_mapping=mapping, backend=make_backend("int9"))
    with pytest.warns(UserWarning, match="still overflow.*'out:weight'"):
        rq.calibrate(prepared, draw_batches(mod, 1))


@pytest.mark.slow
def test_plain_data__backend_and_plan():
    backend = make_backend(
        rq.config.Accumulator(14, rq.config.Overflow.WRAP, rq.config.OverflowBound.WORST_CASE)
    )
    data = json.loads(json.dumps(backend.to_dict()))
    assert rq.BackendConfig.from_dict(data, BUILTIN_OPS) == backend
    assert "accumulator int14 wrap" in backend.explain("conv2d")
    row = rq.config.DTypeConfig.from_dict(
        {"input": "int8", "output": "int8", "accumulator": "int14"}
    )
    assert row.accumulator == rq.config.Accumulator(14)
    plan = rq.prepare(residual_model(), None, backend=backend).plan
    assert rq.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.operator("stem").accumulator == backend.patterns[0].dtypes[0].accumulator
    assert plan.operator("left").accumulator is None


BYTE_DTYPES = partial(rq.config.DTypeConfig, input="int8", output="int8")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rq.config.Accumulator(7), "bits is 7; allowed: 8 to 32"),
        (lambda: rq.config.Accumulator(14.0), "bits is 14.0"),
        (lambda: rq.config.Accumulator(14, 1), "overflow is 1; allowed: a member of Overflow"),
        (lambda: BYTE_DTYPES(accumulator="in14"), "DTypeConfig.accumulator is"),
        (lambda: BYTE_DTYPES(accumulator=14), "allowed: an Accumulator"),
        (
            lambda: rq.config.DTypeConfig.from_dict(
                {"input": "int8", "output": "int8", "accumulator": {"bits": 14, "overflw": "wrap"}}
            ),
            "accumulator has no key 'overflw'. Did you mean 'overflow'",
        ),
    ],
)  # fmt: skip
def test_values__refuse_what_is_wrong(make, message):
    with pytest.raises(rq.ConfigError, match=message):
        make()
