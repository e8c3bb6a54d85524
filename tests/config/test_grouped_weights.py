"""Weights in groups by lines of a mapping, from the QConfig to compiled code."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from float_models import build_model, draw_batches
from operator_names import list_operators
from tvm.relax import op

import relayquant as rq
from relayquant.config import DTypeConfig
from relayquant.errors import ConfigError
from relayquant.flow.compression.sequential import round_rows
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.backends import ARM, GENERIC, X86

ROWS = rq.TensorConfig(
    rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_ROW, is_dynamic=True)
)
SYMMETRIC = rq.config.Scheme.SYMMETRIC
AFFINE = rq.TensorConfig(
    rq.QSpec("int8", granularity=rq.config.Granularity.PER_ROW, is_dynamic=True)
)


def group_weights(*args, activation=None, group_size=16, **settings) -> rq.QConfig:
    spec = rq.QSpec(*args or ("int4",), group_size=group_size, **settings)
    return rq.QConfig(activation, rq.TensorConfig(spec))


def make_model():
    """dense + bias + relu, dense, a residual sum, dense + bias, for any number of rows."""

    def body(emit, x):
        up = emit("up", op.nn.relu(emit("up.sum", emit.dense("up.dot", x, 24) + emit.constant(24))))
        total = emit("total", op.add(emit.dense("down", up, 40), x))
        return emit("head", op.add(emit.dense("head.dot", total, 5), emit.constant(5)))

    return build_model(body, ("n", 40))


@pytest.fixture(scope="module")
def model():
    return make_model()


def quantize(mod, mapping, data=None, **settings):
    return rq.quantize(mod, None, data, qconfig_mapping=mapping, **settings)


def run(mod, batch):
    return rq.reference.run(mod, batch)[0]


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, ROWS], ids=["float", "rows"])
def test_plain_data__survives_json(activation):
    qconfig = group_weights("int8", SYMMETRIC, activation=activation, scale_dtype="float16")
    data = json.loads(json.dumps(qconfig.to_dict()))
    assert ("activation" in data) is (activation is not None)
    assert "observer" not in data["weight"]
    assert rq.QConfig.from_dict(data) == qconfig
    assert not {"group_size", "scale_dtype"} & rq.QSpec("int8").to_dict().keys()


#: limits -> bits
LIMITS = {(-8, 7): 4, (-7, 7): 4, (-4, 3): 3, (-2, 1): 2, (-128, 127): 8, (-127, 127): 8}


@pytest.mark.parametrize("limits", LIMITS)
def test_bits__are_those_that_the_limits_need(limits):
    low, high = limits
    spec = rq.QSpec("int8", SYMMETRIC, quant_min=low, quant_max=high, group_size=32)
    assert spec.code_bits == LIMITS[limits]


#: message -> what is written
WRONG = {
    r"group_size is 8; allowed: 16 to 256, or -1": lambda: group_weights(group_size=8),
    r"dtype int16.*allowed: int4 or int8": lambda: group_weights("int16"),
    r"-16..15; allowed: .* 2, 3, 4 or 8 bits": lambda: group_weights(
        "int8", quant_min=-16, quant_max=15
    ),
    r"scale_dtype is 'int8'; allowed: float32, float16": lambda: group_weights(scale_dtype="int8"),
    r"scale_dtype is 'float16', which is for": lambda: rq.QSpec("int8", scale_dtype="float16"),
    r"with any scale; leave": lambda: group_weights(power_of_two=True),
    r"activation is None, which weights in groups alone": lambda: rq.QConfig(
        None, X86.default_qconfig.weight
    ),
    r"with which activations are None": lambda: group_weights(
        activation=X86.default_qconfig.activation
    ),
    r"output has group_size=16; only weights": lambda: rq.QConfig(
        None, group_weights().weight, output=group_weights().weight
    ),
    r"bias is configured, but it is float32": lambda: rq.QConfig(
        None, group_weights().weight, bias=X86.default_qconfig.weight
    ),
    r"has a group_size: each group gets": lambda: rq.TensorConfig(
        group_weights().weight.spec, rq.observers.MinMax()
    ),
    r"weight is None; allowed": lambda: rq.QConfig(None, None),
    r"input is uint8, not float32 or int8": lambda: DTypeConfig(
        input="uint8", output="float32", bias="float32", is_grouped=True
    ),
    r"output is int8, but that of a grouped operator is float32": lambda: DTypeConfig(
        input="int8", output="int8", bias="float32", is_grouped=True
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_settings__that_do_not_go_together_are_refused(message):
    with pytest.raises(ConfigError, match=message):
        WRONG[message]()


# --- modules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [X86, ARM, GENERIC], ids=lambda backend: backend.name)
@pytest.mark.parametrize("activation", [None, ROWS], ids=["float", "rows"])
def test_quantize__every_product_needs_no_data(model, backend, activation):
    mapping = rq.QConfigMapping().set_global(group_weights(activation=activation))
    q = quantize(model, mapping, backend=backend, strict=True)
    rows = rq.ledger(q).rows
    assert [(row.name, row.dtype) for row in rows if row.quantized] == [
        ("up", "int4"),
        ("down", "int4"),
        ("head", "int4"),
    ]
    assert {row.is_dynamic for row in rows if row.quantized} == {activation is not None}
    assert rows[2].reason == "weights in groups are asked for, it has none"
    (batch,) = draw_batches(model, 1, n=3)
    assert np.abs(run(q, batch) - run(model, batch)).max() < 0.5 * np.abs(run(model, batch)).max()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [("int4",), ("int8", SYMMETRIC)], ids=["affine 4", "symmetric 8"])
def test_quantize__affine_rows_are_those_of_exact_arithmetic(spec):
    """One sign, both, a row of zeros: each by a scale that covers its values and 0 in 255 steps."""
    mod = build_model(lambda emit, x: emit.dense("y", x, 6), (5, 40))
    mapping = rq.QConfigMapping().set_global(group_weights(*spec, activation=AFFINE))
    q = quantize(mod, mapping)
    graph = Graph(q)
    (call,) = [
        graph.call_of(b.var)
        for b in graph.bindings
        if graph.op_name(b.var) == "relax.qnn.grouped_dense"
    ]
    codes, scale, zero = (constant_value(arg) for arg in call.args[2:])
    weight = rq.reference.qnn.grouped_dense(
        np.eye(40, dtype="float32"), 1, codes, scale, zero, **find_form(call)
    )
    (batch,) = draw_batches(mod, 1)
    x = batch["x"]
    x[0], x[1], x[2], x[3] = abs(x[0]), -abs(x[1]), 0, 3 + abs(x[3])
    seen = np.zeros((5, 40))
    for i, row in enumerate(x):
        low, high = Fraction(float(min(row.min(), 0))), Fraction(float(max(row.max(), 0)))
        step = Fraction(float(np.float32(float(high - low)) / np.float32(254))) or Fraction(1)
        shift = round(-127 - low / step)
        integers = [round(Fraction(float(v)) / step) + shift for v in row]
        assert all(-127 <= value <= 127 for value in integers)
        seen[i] = [float((value - shift) * step) for value in integers]
    # of a row of zeros, all 127 steps below 0, two sums of float32 are left to cancel
    np.testing.assert_allclose(run(q, {"x": x}), seen @ weight, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(round_rows(x), seen, rtol=1e-6)
    assert rq.verify(q, {"x": x}).is_equal


def find_form(call) -> dict[str, int]:
    return {name: int(getattr(call.attrs, name)) for name in ("bits", "group_size", "features")}


@pytest.mark.parametrize("spec", [("int4",), ("int8", SYMMETRIC)], ids=["affine 4", "symmetric 8"])
def test_quantize__products_are_those_of_exact_arithmetic(spec):
    mod = build_model(lambda emit, x: emit.dense("y", x, 3), (2, 20))
    q = quantize(mod, rq.QConfigMapping().set_global(group_weights(*spec)))
    graph = Graph(q)
    (call,) = [graph.call_of(b.var) for b in graph.bindings]
    codes, scale, zero = (constant_value(arg) for arg in call.args[2:])
    zero = np.broadcast_to(zero, scale.shape)
    (batch,) = draw_batches(mod, 1)
    for i, row in enumerate(batch["x"]):
        for n in range(3):
            exact = Fraction(0)
            for k in range(20):
                bits = int(call.attrs.bits)
                code = int(codes[n, k * bits // 8]) >> (k * bits % 8) & ((1 << bits) - 1)
                weight = (code - int(zero[n, k // 16])) * Fraction(float(scale[n, k // 16]))
                exact += weight * Fraction(float(row[k]))
            assert run(q, batch)[i, n] == pytest.approx(float(exact), rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_quantize__compiles_beside_integer_operators(model):
    mapping = rq.QConfigMapping().set_global(X86.default_qconfig)
    mapping = mapping.set_module_name("down", group_weights(activation=ROWS))
    data = draw_batches(model, 2, n=8)
    q = quantize(model, mapping, data, backend=X86, guard=rq.config.Guard.OFF)
    assert [row.dtype for row in rq.ledger(q).quantized][1] == "int4"
    assert rq.verify(q, data[0]).is_equal


def test_quantize__rows_are_quantized_once_for_all_readers():
    def body(emit, x):
        return emit("y", op.add(emit.dense("a", x, 4), emit.dense("b", x, 4)))

    mapping = rq.QConfigMapping().set_global(group_weights(activation=ROWS))
    names = list_operators(quantize(build_model(body, (2, 16)), mapping))
    assert names.count("qnn.quantize_rows") == 1
    assert names.count("qnn.grouped_dense") == 2


def test_mapping__a_line_by_name_beside_integer_operators(model):
    """What is calibrated behind a weight in groups sees what its codes stand for."""
    data = draw_batches(model, 4, n=8)
    alone = group_weights("int8", SYMMETRIC, quant_min=-2, quant_max=1)
    mapping = rq.QConfigMapping().set_global(X86.default_qconfig).set_module_name("up", alone)
    q = quantize(model, mapping, data, backend=X86, guard=rq.config.Guard.OFF)
    assert {row.name: row.dtype for row in rq.ledger(q).quantized if row.op == "matmul"} == {
        "up": "int2",
        "down": "int32",
        "head": "int32",
    }
    prepared = rq.prepare(model, None, qconfig_mapping=mapping, backend=X86)
    calibrated = rq.calibrate(
        prepared, data, observer=rq.observers.MinMax(), order=rq.config.Order.TOPOLOGICAL
    )
    weight, bias = calibrated.constants["up:weight"], prepared.graph.constants["up:bias"].value
    x = np.concatenate([batch["x"] for batch in data])
    seen = (x @ weight + bias).max()
    assert seen != pytest.approx((x @ prepared.graph.constants["up:weight"].value + bias).max())
    assert calibrated.parameters["up"].scale.item() * 255 == pytest.approx(seen, rel=1e-5)


def test_analysis__compares_and_ranks_what_has_weights_in_groups(model):
    data = draw_batches(model, 3, n=8)
    coarse = group_weights("int8", SYMMETRIC, quant_min=-2, quant_max=1)
    fine = group_weights("int8", SYMMETRIC)
    mapping = rq.QConfigMapping().set_global(fine).set_module_name("down", coarse)
    q = quantize(model, mapping)
    rows = {row.name: row for row in rq.compare(model, None, q, data).rows}
    assert rows["down"].sqnr < rows["up"].sqnr
    calibrated = rq.calibrate(rq.prepare(model, None, qconfig_mapping=mapping), data)
    report = rq.sensitivity(calibrated, data)
    assert report.rows[0].name == "down"
    assert {row.name for row in report.rows} == {"up", "down", "head"}
    worse = rq.quantize(model, None, None, qconfig_mapping=report.to_mapping(1, mapping))
    assert {row.name for row in rq.ledger(worse).quantized} == {"up", "head"}


def test_prepared__survives_a_file(model, tmp_path):
    mapping = rq.QConfigMapping().set_global(group_weights(activation=ROWS))
    calibrated = rq.calibrate(
        rq.prepare(model, None, qconfig_mapping=mapping), draw_batches(model, 1, n=2)
    )
    rq.save_prepared(calibrated, tmp_path / "p.rq")
    loaded = rq.load_prepared(tmp_path / "p.rq")
    assert loaded.plan == calibrated.plan
    (batch,) = draw_batches(model, 1, n=3)
    a, b = (run(rq.lower(each), batch) for each in (calibrated, loaded))
    np.testing.assert_array_equal(a, b)


def test_strict__a_backend_without_weights_in_groups_says_so(model):
    rows = tuple(
        rq.config.PatternConfig(row.pattern, tuple(d for d in row.dtypes if not d.is_grouped))
        for row in X86.patterns
    )
    backend = rq.BackendConfig("mine", rows)
    mapping = rq.QConfigMapping().set_global(group_weights())
    with pytest.raises(ConfigError, match=r"weights in groups are asked for \(group_size\)"):
        quantize(model, mapping, backend=backend, strict=True)


def test_convolution__has_no_form_with_groups():
    mod = build_model(lambda emit, x: emit.conv("y", x), (1, 4, 6, 6))
    mapping = rq.QConfigMapping().set_global(group_weights())
    with pytest.warns(UserWarning, match="weights in groups"):
        q = quantize(mod, mapping)
    (row,) = rq.ledger(q).rows
    assert not row.quantized
    assert "weights in groups are asked for" in row.reason
