"""Parameters of the run time: QSpec(is_dynamic=True), from the QConfig to compiled code."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import tvm
from drawing import count_examples
from float_models import MAP, build_model, draw_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_names import list_operators
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.config import Support
from relayquant.ir.dialect import qnn
from relayquant.ir.ops.dynamic import quantize_at_run_time
from relayquant.ir.rewrite import Graph
from relayquant.stages.backends import ARM, GENERIC, X86

SPEC = rq.QSpec("uint8", is_dynamic=True)
SYMMETRIC = replace(SPEC, scheme=rq.config.Scheme.SYMMETRIC)
BY_ROW = replace(SPEC, granularity=rq.config.Granularity.PER_ROW)
WEIGHT = X86.default_qconfig.weight


def dynamic_qconfig(dtype: str = "uint8", **settings) -> rq.QConfig:
    return rq.QConfig(rq.TensorConfig(rq.QSpec(dtype, is_dynamic=True, **settings)), WEIGHT)


DYNAMIC = dynamic_qconfig()
EVERYWHERE = rq.QConfigMapping().set_global(DYNAMIC)


def chain_model() -> tvm.IRModule:
    """dense + bias + relu, dense, dense + bias, for any number of rows."""

    def body(emit, x):
        a = emit("a", op.nn.relu(emit("a.sum", emit.dense("a.dot", x, 24) + emit.constant(24))))
        b = emit.dense("b", a, 16)
        return emit("c", op.add(emit.dense("c.dot", b, 5), emit.constant(5)))

    return build_model(body, ("n", 20))


def run(mod: tvm.IRModule, x: np.ndarray) -> np.ndarray:
    return rq.reference.run(mod, {"x": x})[0]


# --- configuration --------------------------------------------------------------------------------


def test_plain_data__survives_json():
    data = json.loads(json.dumps(DYNAMIC.to_dict()))
    assert "observer" not in data["activation"]
    assert data["activation"]["spec"]["is_dynamic"] is True
    assert rq.QConfig.from_dict(data) == DYNAMIC
    assert "is_dynamic" not in rq.QSpec("uint8").to_dict()


def test_plan__survives_a_file(tmp_path):
    prepared = rq.prepare(chain_model(), None, qconfig_mapping=EVERYWHERE)
    assert [row.dynamic for row in prepared.plan.operators] == [SPEC] * 3
    rq.save_prepared(prepared, tmp_path / "model.rq")
    assert rq.load_prepared(tmp_path / "model.rq").plan == prepared.plan


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: replace(SYMMETRIC, quant_max=100), "in 0..100 is symmetric; allowed: the full"),
        (
            lambda: replace(SPEC, granularity=rq.config.Granularity.PER_CHANNEL),
            "one set of parameters",
        ),
        (lambda: replace(SPEC, power_of_two=True), "leave PER_CHANNEL, power_of_two"),
        (lambda: replace(SPEC, scale_min=0.1), "leave PER_CHANNEL, power_of_two"),
        (lambda: replace(BY_ROW, is_dynamic=False), "PER_ROW, whose parameters are computed when"),
        (lambda: replace(BY_ROW, dtype="int16", quant_max=None), "with PER_ROW: int8, uint8"),
        (lambda: rq.QSpec(is_dynamic="yes"), "is_dynamic is 'yes'; allowed: True or False"),
        (
            lambda: rq.TensorConfig(SPEC, rq.observers.MinMax()),
            "computed at run time. Leave the observer",
        ),
        (lambda: rq.TensorConfig(rq.QSpec("uint8")), "observer is missing; give an observer"),
        (lambda: rq.QConfig(WEIGHT, rq.TensorConfig(SPEC)), "QConfig.weight is dynamic; only"),
        (
            lambda: rq.prepare(chain_model(), None).plan.replace("x", spec=SPEC),
            "set a QConfig with a dynamic activation before prepare",
        ),
    ],
)
def test_messages__say_what_is_allowed(build, message):
    with pytest.raises(rq.ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("qconfig", "message"),
    [
        (dynamic_qconfig("int16"), "activation dtype int16 is asked for"),
        (replace(DYNAMIC, output=X86.default_qconfig.activation), "output is configured, but"),
        (replace(DYNAMIC, bias=WEIGHT), "bias is configured, but"),
    ],
)
def test_find_conflict__names_the_tensor(qconfig, message):
    assert message in X86.find_pattern("dense_bias").find_conflict(qconfig)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": "uint8"}, "output is uint8, but that of a dynamic operator is float32"),
        ({"bias": "int32"}, "bias is int32, but that of a dynamic operator is float32"),
        ({"accumulator": "int14"}, "accumulator is int14 saturate, but that of a dynamic operator"),
        ({"input": "float32"}, "DTypeConfig.input is float32: no QConfig fits"),
        (
            {"input": rq.config.DTypeWithConstraints("uint8", power_of_two=True)},
            "input is uint8 power_of_two, but parameters of the run time are one set per tensor or",
        ),
    ],
)
def test_dtypes__that_no_dynamic_qconfig_can_fit_are_refused(change, message):
    row = rq.config.DTypeConfig(input="uint8", output="float32", bias="float32", is_dynamic=True)
    assert row.find_conflict(DYNAMIC) is None
    with pytest.raises(rq.ConfigError, match=message):
        replace(row, **change)


def test_explain__shows_the_dynamic_row():
    assert "uint8 x int8 -> float32, bias float32, dynamic" in X86.explain("dense_bias")
    assert "int8 x int8 -> float32, bias float32, dynamic" in ARM.explain("dense_bias")
    assert "uint8 x int8 -> float32, bias float32, dynamic" in X86.explain("conv2d_bias")
    assert "dynamic" not in X86.explain("add")


# --- what is quantized ------------------------------------------------------------------------


def test_support__only_operators_with_weights_are_served():
    def body(emit, x):
        flat = emit("flat", op.reshape(emit.conv("conv", x), (1, 144)))
        return emit.dense("dense", flat, 4)

    plan = rq.prepare(build_model(body, MAP), None, qconfig_mapping=EVERYWHERE).plan
    found = {row.name: (row.quantized, row.support) for row in plan.operators}
    assert found == {
        "conv": (True, Support.SERVED),
        "flat": (False, Support.NOT_ASKED),
        "dense": (True, Support.SERVED),
    }
    assert "operators with weights" in plan.operator("flat").reason


def test_support__an_operator_selected_by_type_is_reported():
    model = build_model(lambda emit, x: emit("y", op.add(x, x)), (2, 3))
    mapping = rq.QConfigMapping().set_object_type("add", DYNAMIC)
    with pytest.raises(rq.ConfigError, match=r"y \(add, dtype unsupported\).*static"):
        rq.prepare(model, None, qconfig_mapping=mapping, strict=True)


def test_support__a_pattern_without_the_callback_is_reported():
    row = X86.find_pattern("dense")
    backend = X86.with_pattern(replace(row.pattern, realize_dynamic=None), row.dtypes)
    model = build_model(lambda emit, x: emit.dense("y", x, 4), (2, 3))
    with pytest.raises(rq.ConfigError, match=r"no callback for parameters of.*realize"):
        rq.prepare(model, None, qconfig_mapping=EVERYWHERE, backend=backend, strict=True)


def test_output_dtypes__a_dynamic_result_is_float():
    with pytest.raises(rq.ConfigError, match=r"'c' .matmul. is computed in float: its data has"):
        rq.prepare(chain_model(), None, qconfig_mapping=EVERYWHERE, output_dtypes={"c": "uint8"})


@pytest.mark.slow
def test_plan__a_dynamic_operator_neither_takes_nor_gives_integers():
    """a -> b (dynamic) -> c: the result of a stays float, c quantizes that of b for itself."""
    mapping = rq.QConfigMapping().set_global(X86.default_qconfig).set_module_name("b", DYNAMIC)
    model = chain_model()
    plan = rq.prepare(model, None, qconfig_mapping=mapping).plan
    assert plan.operator("b").operands == (("weight", "b:weight"),)
    assert plan.operator("a").output is None
    assert plan.operator("c").operands[0] == ("data", "b")
    data = draw_batches(model, 6, n=4)
    qmod = rq.quantize(model, None, data, qconfig_mapping=mapping)
    assert [row.is_dynamic for row in rq.ledger(qmod).rows] == [False, True, False]
    assert rq.verify(qmod, data[0]).is_equal
    expected, got = run(model, data[0]["x"]), run(qmod, data[0]["x"])
    assert np.abs(got - expected).max() < 0.02 * np.abs(expected).max()


def test_reference_form__readers_share_the_parameters():
    def body(emit, x):
        return relax.Tuple([emit.dense("q", x, 4), emit.dense("k", x, 4)])

    prepared = rq.prepare(build_model(body, ("n", 8)), None, qconfig_mapping=EVERYWHERE)
    reference = rq.convert_to_reference(rq.calibrate(prepared, None))
    assert list_operators(reference).count("qnn.quantize") == 1
    assert list_operators(rq.lower(reference)).count("qnn.quantize") == 1


# --- what is computed -------------------------------------------------------------------------


def test_realize__one_dense():
    model = build_model(lambda emit, x: emit.dense("y", x, 4), ("n", 8))
    qmod = rq.quantize(model, None, None, qconfig_mapping=EVERYWHERE)
    assert list_operators(qmod)[-6:] == [
        "qnn.quantize", "qnn.dense", "multiply", "subtract", "multiply", "qnn.dequantize",
    ]  # fmt: skip
    dense = next(b.value for b in Graph(qmod).bindings if b.var.name == "y.product")
    assert float(dense.args[2].value.numpy()) == 0, "the kernel's zero point is a constant"


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("backend", "qconfig"),
    [
        (X86, DYNAMIC),
        (ARM, dynamic_qconfig("int8")),
        (
            GENERIC,
            rq.QConfig(
                dynamic_qconfig(quant_max=127).activation,
                rq.TensorConfig(rq.QSpec("int8"), rq.observers.MinMax()),
            ),
        ),
    ],
    ids=["uint8", "int8", "reduced range, affine weights"],
)
def test_quantize__needs_no_data_and_compiled_equals_numpy(backend, qconfig):
    model = chain_model()
    mapping = rq.QConfigMapping().set_global(qconfig)
    qmod = rq.quantize(model, None, None, backend=backend, qconfig_mapping=mapping, strict=True)
    rows = rq.ledger(qmod).rows
    assert [(r.quantized, r.is_dynamic) for r in rows] == [(True, True)] * 3
    assert "dynamic" in str(rq.ledger(qmod))
    prepared = rq.calibrate(rq.prepare(model, None, qconfig_mapping=mapping, backend=backend), None)
    reference = rq.convert_to_reference(prepared)
    random = np.random.default_rng(0)
    compiled = Executor(rq.compile(qmod))
    for x in (random.normal(0, 3, (7, 20)), random.uniform(1, 2, (1, 20)), np.zeros((3, 20))):
        x = x.astype("float32")
        expected, got = run(model, x), run(qmod, x)
        assert np.abs(got - expected).max() <= 0.03 * np.abs(expected).max()
        np.testing.assert_allclose(got, run(reference, x), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(compiled.run("main", [x])[0], got)


def quantize_by_hand(x, spec):
    """(integers, scale, zero point) by int64 and float64, the latter two with an axis of 1 last."""
    axis = -1 if spec.granularity is rq.config.Granularity.PER_ROW else None
    x = x.astype("float64")
    low, high = (np.asarray(f(x, axis=axis, keepdims=True)) for f in (np.min, np.max))
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    lowest, highest = spec.limits
    if spec.is_symmetric:
        middle = spec.symmetric_zero_point
        scale = np.maximum(-low, high) / (highest - middle)
        zero = np.full(scale.shape, middle)
    else:
        scale = (high - low) / (highest - lowest)
        zero = np.rint(lowest - low / np.where(scale == 0, 1, scale))
    scale = np.where(scale == 0, 1, scale)
    return np.clip(np.rint(x / scale) + zero, lowest, highest).astype("int64"), scale, zero


#: Each pair of a shape, a scheme, and a backend with a dtype.
PER_ROW_CASES = [
    (shape, list(rq.config.Scheme)[(i + j) % len(rq.config.Scheme)], backend, dtype)
    for i, shape in enumerate([("n", 20), (2, "n", 20), (3, 2, 20)])
    for j, (backend, dtype) in enumerate(
        [(X86, "uint8"), (X86, "int8"), (ARM, "int8"), (ARM, "uint8")]
    )
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("shape", "scheme", "backend", "dtype"), PER_ROW_CASES)
def test_per_row__a_set_of_parameters_for_each_row(shape, scheme, backend, dtype):
    """Rows of very different size: each is as precise as if it were alone."""
    spec = rq.QSpec(dtype, scheme, rq.config.Granularity.PER_ROW, is_dynamic=True)

    def body(emit, x):
        return emit("y", op.add(emit.dense("y.dot", x, 5), emit.constant(5)))

    model = build_model(body, shape)
    mapping = rq.QConfigMapping().set_global(rq.QConfig(rq.TensorConfig(spec), WEIGHT))
    qmod = rq.quantize(
        model, None, None, backend=backend, qconfig_mapping=mapping, strict=True, effort="fast"
    )
    random = np.random.default_rng(0)
    x = random.normal(0.3, 1, [3 if size == "n" else size for size in shape])
    x *= 10.0 ** random.integers(-4, 5, x.shape[:-1])[..., None]
    x[..., -1, :] = 0
    x = x.astype("float32")
    got = run(qmod, x)
    q, scale, zero = quantize_by_hand(x, spec)
    graph = Graph(model)
    weight, bias = (
        next(
            arg.value.numpy()
            for b in graph.bindings
            if graph.op_name(b.var) == name
            for arg in b.value.args
            if isinstance(arg, tvm.ir.GenericConst)
        )
        for name in ("relax.matmul", "relax.add")
    )
    units = np.abs(weight.astype("float64")).max(axis=0) / 127
    integers = np.rint(weight / units).astype("int64")
    expected = ((q - zero.astype("int64")) @ integers) * scale * units + bias
    step = scale * units * 127  # of a sum, for one step of the data
    assert (np.abs(got - expected) <= 1e-5 * np.abs(expected) + 1e-2 * step).all()
    assert rq.verify(qmod, [x]).is_equal


def test_per_row__parameters_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.ao.quantization.fx._decomposed")
    x = np.random.default_rng(0).normal(0, 3, (6, 20)).astype("float32")

    def body(emit, value):
        affine = quantize_at_run_time(lambda e, name: emit(name, e), value, "int8", is_row=True)
        return relax.Tuple([affine.scale, affine.zero_point, qnn.quantize_rows(value)[1]])

    scale, zero, symmetric = rq.reference.run(build_model(body, x.shape), {"x": x})
    space = torch.ops.quantized_decomposed
    theirs, their_zero = space._choose_qparams_per_token_asymmetric_impl(
        torch.from_numpy(x), torch.int8
    )
    np.testing.assert_allclose(scale, theirs.numpy().ravel(), rtol=1e-6)
    assert np.abs(zero - their_zero.numpy().ravel()).max() <= 1
    theirs, _ = space.choose_qparams_per_token(torch.from_numpy(x), torch.int8)
    np.testing.assert_allclose(symmetric, theirs.numpy(), rtol=1e-6)


def test_per_row__is_for_products_alone():
    spec = rq.QSpec("uint8", granularity=rq.config.Granularity.PER_ROW, is_dynamic=True)
    mapping = rq.QConfigMapping().set_global(rq.QConfig(rq.TensorConfig(spec), WEIGHT))
    model = build_model(lambda emit, x: emit.conv("conv", x), MAP)
    (row,) = rq.prepare(model, None, qconfig_mapping=mapping, backend=X86).plan.operators
    assert "activation granularity per_row is not supported" in row.reason


def test_per_row__of_an_unknown_shape_stays_float_and_says_so():
    """The plan says so, before anything is calibrated."""
    begin, end, step = (relax.const(np.array(row), "int64") for row in ([0, 0], [2, 8], [1, 1]))

    def body(emit, x):
        first = emit.dense("first", x, 8)
        kept = emit("kept", op.dynamic_strided_slice(first, begin, end, step))
        return emit("y", op.matmul(kept, emit.constant(8, 5)))

    model = build_model(body, ("n", 20))
    mapping = rq.QConfigMapping().set_global(rq.QConfig(rq.TensorConfig(BY_ROW), WEIGHT))
    rows = {
        row.name: row
        for row in rq.prepare(model, None, qconfig_mapping=mapping, backend=X86).plan.operators
    }
    assert rows["first"].quantized
    assert not rows["y"].quantized
    assert "the shape of its data is not known" in rows["y"].reason
    qmod = rq.quantize(model, None, None, qconfig_mapping=mapping)
    x = np.random.default_rng(0).normal(size=(3, 20)).astype("float32")
    expected = run(model, x)
    assert np.abs(run(qmod, x) - expected).max() < 0.05 * np.abs(expected).max()


def test_quantize__a_static_model_needs_data():
    message = "data decides parameters of 3 operators: a "
    with pytest.raises(rq.DataError, match=message):
        rq.quantize(chain_model(), None, None)


ROWS = st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=1, max_size=8).map(
    lambda values: np.array(values, "float32")
)


@settings(max_examples=count_examples(60), deadline=None)
@given(x=ROWS, dtype=st.sampled_from(["uint8", "int8"]), bits=st.sampled_from([7, 8]))
def test_quantize_at_run_time__errs_by_half_a_step(x, dtype, bits):
    low = 0 if dtype == "uint8" else -(2 ** (bits - 1))
    limits = (low, low + 2**bits - 1)

    def body(emit, value):
        found = quantize_at_run_time(lambda e, name: emit(name, e), value, dtype, limits)
        return relax.Tuple([found.value, found.scale, found.zero_point])

    q, scale, zero = rq.reference.run(build_model(body, x.shape), {"x": x})
    assert q.dtype == dtype
    assert limits[0] <= min(q.min(), zero)
    assert max(q.max(), zero) <= limits[1]
    step = Fraction(float(scale))
    if not x.any():
        assert scale == 1
    for real, integer in zip(x, q, strict=True):
        error = abs(Fraction(float(real)) - step * (int(integer) - int(zero)))
        # Both the zero point and the value are rounded; the clip costs no more than the first.
        assert error <= step * Fraction(1001, 1000)
        assert real != 0 or error == 0


def test_quantize__as_onnx_runtime_does(tmp_path):
    """Same matrix product as after onnxruntime's quantize_dynamic, within a step of the weights."""
    ort = pytest.importorskip("onnxruntime")
    quantization = pytest.importorskip("onnxruntime.quantization")
    from onnx import helper, save
    from onnx_models import make_onnx

    random = np.random.default_rng(1)
    weight = random.normal(0, 0.3, (32, 12)).astype("float32")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = make_onnx([node], {"x": ["n", 32]}, {"y": ["n", 12]}, {"w": weight}, 13)
    source, target = tmp_path / "float.onnx", tmp_path / "int8.onnx"
    save(model, source)
    quantization.quantize_dynamic(
        source, target, per_channel=True, weight_type=quantization.QuantType.QInt8
    )
    session = ort.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    assert "DynamicQuantizeLinear" in target.read_bytes().decode("latin-1")

    mod, params = rq.load(str(source))
    qmod = rq.quantize(mod, params, None, qconfig_mapping=EVERYWHERE)
    x = random.normal(0, 2, (9, 32)).astype("float32")
    (expected,) = session.run(None, {"x": x})
    step = np.abs(weight).max(axis=0) / 127 * np.ptp(x) / 255  # of each column's sums
    got = rq.reference.run(qmod, {"x": x})[0]
    assert (np.abs(got - expected) <= step).all()
