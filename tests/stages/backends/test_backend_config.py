"""Backends as tables: plain data, explain, constraints, and the three cases of support."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from float_models import MAP, build_model, draw_batches, residual_model
from stage_values import compare_stages, run_stages
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.config import Support
from relayquant.flow.testing.check import observe_parameters
from relayquant.ir.ops import BUILTIN_OPS
from relayquant.ir.reference import run_values
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.backends import ACCELERATOR, ARM, BACKENDS, GENERIC, X86

CONFIG = GENERIC.default_qconfig


def with_activation(spec: rq.QSpec) -> rq.QConfig:
    return replace(CONFIG, activation=rq.TensorConfig(spec, rq.observers.MinMax()))


def softmax_model() -> tvm.IRModule:
    def body(emit, x):
        conv = emit.conv("conv", x)
        soft = emit("soft", op.cumsum(conv, axis=1))
        return emit.conv("last", soft)

    return build_model(body, MAP)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_plain_data__survives_json(backend):
    data = json.loads(json.dumps(backend.to_dict()))
    assert rq.BackendConfig.from_dict(data, BUILTIN_OPS) == backend


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patern": []}, "BackendConfig has no key 'patern'. Did you mean 'patterns'?"),
        ({"patterns": [{"pattern": "conv2", "dtypes": []}]}, "'conv2'. Did you mean 'conv2d'?"),
        (
            {"patterns": [{"pattern": "conv2d", "dtypes": [{"input": "int8", "outptu": "int8"}]}]},
            r"patterns[0].dtypes[0] has no key 'outptu'. Did you mean 'output'?",
        ),
        (
            {"patterns": [{"pattern": "conv2d", "dtypes": [{"input": "int8", "output": "in8"}]}]},
            "'in8'. Did you mean 'int8'?",
        ),
        (
            {"patterns": [{"pattern": "conv2d", "dtypes": [], "observation": "shared"}]},
            "observation is 'shared'",
        ),
        ({"affine_rules": ["relax.tile"]}, "'relax.tile', which was not passed"),
    ],
)
def test_from_dict__names_what_is_wrong(change, message):
    data = {**ARM.to_dict(), **change}
    with pytest.raises(rq.ConfigError) as error:
        rq.BackendConfig.from_dict(data, BUILTIN_OPS)
    assert message in str(error.value)


def test_explain__pattern_operator_and_all():
    assert "uint8 x int8 -> uint8" in X86.explain("conv2d_bias_relu")
    assert len(X86.explain("nn.conv2d").splitlines()) > 10
    assert (
        X86.explain(X86.patterns[0].pattern)
        .splitlines()[1]
        .startswith(X86.patterns[0].pattern.name)
    )
    text = ACCELERATOR.explain("sigmoid")
    assert "int8 symmetric per_tensor power_of_two -127.. x int8" in text
    assert "fixed int8 symmetric: Fixed(scale=0.0078125" in text
    with pytest.raises(rq.ConfigError, match=r"cannot run 'conv2e'.*'conv2d'"):
        X86.explain("conv2e")


def spec_for(**changes) -> rq.QSpec:
    return rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, **changes)


@pytest.mark.parametrize(
    ("constraints", "spec", "reason"),
    [
        ({}, spec_for(), None),
        ({"schemes": (rq.config.Scheme.AFFINE,)}, spec_for(), "scheme symmetric is not supported"),
        (
            {"granularities": (rq.config.Granularity.PER_TENSOR,)},
            spec_for(granularity=rq.config.Granularity.PER_CHANNEL),
            "granularity per_channel is not supported",
        ),
        ({"quant_min_lower_bound": -127}, spec_for(), "quant_min -128 is below -127"),
        ({"quant_min_lower_bound": -127}, spec_for(quant_min=-127), None),
        ({"quant_max_upper_bound": 7}, spec_for(quant_max=8), "quant_max 8 is above 7"),
        ({"scale_min_lower_bound": 0.1}, spec_for(), "has no scale_min, the backend runs"),
        ({"scale_min_lower_bound": 0.1}, spec_for(scale_min=0.1), None),
        (
            {"scale_max_upper_bound": 1.0},
            spec_for(scale_max=2.0),
            "scale_max is 2.0, the backend runs scale_max <= 1.0",
        ),
        ({"power_of_two": True}, spec_for(), "must be powers of two"),
        ({"power_of_two": True}, spec_for(power_of_two=True), None),
    ],
)
def test_constraints__each_is_checked(constraints, spec, reason):
    found = rq.config.DTypeWithConstraints("int8", **constraints).find_conflict(spec, "weight")
    assert found == reason if reason is None else reason in found


def test_dtypes__dynamic_serves_no_static_qconfig():
    row = rq.config.DTypeConfig(input="uint8", output="float32", bias="float32", is_dynamic=True)
    assert "static" in row.find_conflict(CONFIG)
    assert row.description.endswith("dynamic")


# --- the three cases ----------------------------------------------------------------------------


def prepare(backend=X86, mapping=None, **options) -> rq.PreparedModel:
    return rq.prepare(softmax_model(), None, qconfig_mapping=mapping, backend=backend, **options)


def test_support__three_cases_in_the_plan():
    uint16 = with_activation(rq.QSpec("uint16"))
    mapping = rq.QConfigMapping().set_global(X86.default_qconfig).set_module_name("last", uint16)
    with pytest.warns(UserWarning, match="last .nn.conv2d, dtype unsupported.*runs uint8"):
        plan = prepare(mapping=mapping).plan
    found = {row.name: row.support for row in plan.operators}
    assert found == {
        "conv": Support.SERVED,
        "soft": Support.PATTERN_UNKNOWN,
        "last": Support.DTYPE_UNSUPPORTED,
    }
    assert plan.operator("last").rule == "module_name 'last'"
    assert plan.operator("soft").rule == "global"


def test_support__strict_lists_all_in_one_error():
    uint16 = with_activation(rq.QSpec("uint16"))
    mapping = rq.QConfigMapping().set_global(X86.default_qconfig).set_module_name("last", uint16)
    with pytest.raises(rq.ConfigError) as error:
        prepare(mapping=mapping, strict=True)
    text = str(error.value)
    assert text.startswith("2 operators")
    assert "soft (cumsum, pattern unknown)" in text
    assert "last (nn.conv2d, dtype unsupported)" in text


def test_support__what_is_kept_in_float_on_purpose_is_no_error():
    mapping = rq.QConfigMapping().set_global(X86.default_qconfig).set_object_type("cumsum", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepare(mapping=mapping, strict=True).plan.operator("last").quantized


def test_support__an_operator_named_in_vain_is_warned_about():
    """With the global line alone it is only in the ledger."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare()
    mapping = rq.QConfigMapping().set_object_type("cumsum", X86.default_qconfig)
    with pytest.warns(UserWarning, match="soft .cumsum, pattern unknown"):
        prepare(mapping=mapping)


# --- what runs, to the end ----------------------------------------------------------------------


def weights(low: int, high: int = 7) -> rq.QConfig:
    spec = replace(CONFIG.weight.spec, quant_min=low, quant_max=high)
    return replace(CONFIG, weight=rq.TensorConfig(spec, rq.observers.MSE()))


NARROW_BIAS = replace(
    GENERIC,
    patterns=tuple(
        replace(
            row,
            dtypes=tuple(
                replace(d, bias="int8") for d in row.dtypes if not d.is_dynamic and not d.is_grouped
            ),
        )
        for row in GENERIC.patterns
    ),
)
CASES = {
    "int8": (GENERIC, with_activation(rq.QSpec("int8"))),
    "int16": (GENERIC, with_activation(rq.QSpec("int16"))),
    "x86 int16": (X86, with_activation(rq.QSpec("int16"))),
    "arm int16": (ARM, with_activation(rq.QSpec("int16"))),
    "int4 weights": (GENERIC, weights(-8)),
    "narrow int4 weights": (GENERIC, weights(-7)),
    "int4 by name": (
        replace(
            GENERIC,
            patterns=tuple(
                replace(row, dtypes=tuple(replace(dtypes, weight="int4") for dtypes in row.dtypes))
                for row in GENERIC.patterns
            ),
        ),
        replace(
            CONFIG,
            weight=rq.TensorConfig(
                replace(CONFIG.weight.spec, dtype="int4", quant_min=-7, quant_max=7),
                rq.observers.MSE(),
            ),
        ),
    ),
    "reduced range": (replace(X86, reduce_range=True), X86.default_qconfig),
    "accelerator": (ACCELERATOR, ACCELERATOR.default_qconfig),
    "int8 bias": (
        NARROW_BIAS,
        replace(
            CONFIG,
            bias=rq.TensorConfig(
                rq.QSpec("int8", rq.config.Scheme.SYMMETRIC), rq.observers.MinMax()
            ),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES)
def test_backend__whole_model(case):
    """From the same integers simulation, reference form and integer module are a step apart at
    most, and that seldom; compiled code has the same bits.
    """
    backend, qconfig = CASES[case]
    mod = residual_model()
    data = draw_batches(mod, 6)
    mapping = rq.QConfigMapping().set_global(qconfig)
    stages = run_stages(mod, data, qconfig_mapping=mapping, backend=backend, strict=True)
    ledger = rq.ledger(stages.integer)
    assert not ledger.floating
    for group in stages.prepared.plan.groups:
        low, high = group.info.spec.limits
        scale = stages.prepared.parameters[group.key].scale
        if group.info.spec.power_of_two:
            assert (np.frexp(scale)[0] == 0.5).all()
        assert low < high
    compared = 0
    for name, simulated, reference, integer in compare_stages(stages, data[0]):
        low, high = stages.prepared.plan.group(
            stages.prepared.plan.value_groups[name][0]
        ).info.spec.limits
        for found in (simulated, reference, integer):
            assert low <= found.min()
            assert found.max() <= high
        for found in (simulated, reference):
            assert np.abs(found - integer).max() <= 1, name
            assert np.abs(found - integer).mean() < 0.1, name
        compared += 1
    assert compared >= 6
    # Backends that plan the same have the same module, which is compiled once.
    if not any(tvm_ffi.structural_equal(stages.integer["main"], main) for main in VERIFIED):
        report = rq.verify(stages.integer, data[0])
        assert report.is_equal, report.first
        VERIFIED.append(stages.integer["main"])


#: integer functions that were compiled and found equal to numpy
VERIFIED: list[tvm.relax.Function] = []


def integer_constants(mod: tvm.IRModule) -> list[np.ndarray]:
    from relayquant.ir.rewrite import Graph
    from relayquant.ir.rewrite.graph import constant_value

    graph = Graph(mod)
    calls = [graph.call_of(binding.var) for binding in graph.bindings]
    arrays = [constant_value(arg) for call in calls if call is not None for arg in call.args]
    return [a for a in arrays if a is not None and a.dtype == np.int8 and a.ndim > 1]


@pytest.mark.parametrize("low", [-8, -7])
def test_backend__int4_weights_are_int4(low):
    mod = residual_model()
    mapping = rq.QConfigMapping().set_global(weights(low))
    stages = run_stages(mod, draw_batches(mod, 3), qconfig_mapping=mapping, backend=GENERIC)
    found = integer_constants(stages.integer)
    assert found
    assert min(a.min() for a in found) >= low
    assert max(a.max() for a in found) == 7


def test_backend__own_bias_is_on_its_grid():
    """The int32 bias is a few hundred steps of int8 at most: 255 different values."""
    backend, qconfig = CASES["int8 bias"]
    mod = residual_model()
    mapping = rq.QConfigMapping().set_global(qconfig)
    prepared = rq.prepare(mod, None, qconfig_mapping=mapping, backend=backend)
    key = "stem:bias"
    assert prepared.plan.group(key).info.role is rq.config.Role.BIAS
    prepared = rq.calibrate(prepared, draw_batches(mod, 3))
    reference = rq.convert_to_reference(prepared)
    bias = rq.reference.interpreter.run_values(reference, draw_batches(mod, 1)[0])["stem.bias"]
    steps = bias.reshape(-1) / prepared.parameters[key].scale.reshape(-1)
    np.testing.assert_allclose(steps, np.rint(steps), atol=0.05)


@pytest.mark.slow
def test_observation__shared_with_input():
    """The backend says that a mean keeps the grid of its input; the model runs so."""
    rows = tuple(
        replace(r, observation=rq.config.ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
        if r.pattern.name in ("mean", "avg_pool2d")
        else r
        for r in X86.patterns
    )
    mod = residual_model()
    data = draw_batches(mod, 4)
    stages = run_stages(mod, data, backend=replace(X86, patterns=rows))
    groups = stages.prepared.plan.value_groups
    assert groups["mean"] == groups["deep"]
    assert groups["right"] == groups["two"]
    assert rq.verify(stages.integer, data[0]).is_equal
    assert not rq.ledger(stages.integer).floating


def test_observation__not_observed_stays_in_float():
    rows = tuple(
        replace(r, observation=rq.config.ObservationType.INPUT_OUTPUT_NOT_OBSERVED)
        if r.pattern.name == "mean"
        else r
        for r in X86.patterns
    )
    plan = rq.prepare(residual_model(), None, backend=replace(X86, patterns=rows), strict=True).plan
    assert "in float on purpose" in plan.operator("mean").reason


def gate_model() -> tvm.IRModule:
    def body(emit, x):
        gate = emit("gate", op.sigmoid(emit.conv("conv", x)))
        return emit.conv("last", gate)

    return build_model(body, MAP)


@pytest.mark.slow
def test_observation__fixed_parameters_whatever_the_data():
    mod = gate_model()
    data = draw_batches(mod, 3)
    prepared = rq.prepare(mod, None, backend=ACCELERATOR, strict=True)
    assert prepared.plan.group("gate").is_fixed
    prepared = rq.calibrate(prepared, data, observer=rq.observers.MinMax())
    assert float(prepared.parameters["gate"].scale) == 1 / 128
    qmod = rq.lower(rq.convert_to_reference(prepared), ACCELERATOR)
    assert rq.verify(qmod, data[0]).is_equal


def test_observation__no_fixed_parameters_for_the_dtype():
    row = replace(ACCELERATOR.find_pattern("sigmoid"), dtypes=GENERIC.patterns[0].dtypes)
    assert "fixed, for int8 symmetric; not for uint8 affine" in row.find_conflict(CONFIG)


@pytest.mark.parametrize(
    ("backend", "name", "dtype", "scale", "zero_point"),
    [
        (X86, "sigmoid", "uint8", 1 / 256, 0),
        (X86, "tanh", "uint8", 1 / 128, 128),
        (ARM, "sigmoid", "int8", 1 / 256, -128),
        (ARM, "tanh", "int8", 1 / 128, 0),
        (GENERIC, "sigmoid", "int16", 1 / 65536, -32768),
    ],
)
def test_observation__fixed_parameters_as_in_fx(backend, name, dtype, scale, zero_point):
    spec = rq.QSpec(dtype)
    observer = backend.find_pattern(name).find_fixed(spec)
    picked = observer.observe(rq.observers.ValueInfo("v", rq.config.Role.OUTPUT, spec, (1,)), [])
    assert (float(picked.scale), int(picked.zero_point)) == (scale, zero_point)


def test_observation__fixed_parameters_keep_within_a_reduced_range():
    spec = rq.QSpec("uint8").with_reduced_range()
    observer = X86.find_pattern("sigmoid").find_fixed(spec)
    picked = observer.observe(rq.observers.ValueInfo("v", rq.config.Role.OUTPUT, spec, (1,)), [])
    assert 127 * float(picked.scale) == pytest.approx(255 / 256)


# --- several precisions in one graph ------------------------------------------------------------


SAME = replace(
    GENERIC,
    patterns=tuple(
        replace(row, dtypes=tuple(d for d in row.dtypes if d.input == d.output))
        for row in GENERIC.patterns
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "groups"), [(GENERIC, ("first",)), (SAME, ("first", "first:int16"))]
)
def test_mixed__requantize_between_dtypes_and_none_twice(backend, groups):
    """uint8 -> int16 for two readers: in one rounding where the backend can, else with one
    requantize for both.
    """

    def body(emit, x):
        first = emit("first", op.nn.relu(emit.conv("first.c", x)))
        left = emit.conv("left", first)
        right = emit.conv("right", first)
        return emit.conv("last", emit("sum", op.subtract(left, right)))

    mod = build_model(body, MAP)
    data = draw_batches(mod, 4)
    wide = with_activation(rq.QSpec("int16"))
    mapping = rq.QConfigMapping().set_global(wide).set_module_name("first", CONFIG)
    stages = run_stages(mod, data, qconfig_mapping=mapping, backend=backend, strict=True)
    assert stages.prepared.plan.value_groups["first"] == groups
    values = [b.value for b in stages.integer["main"].body.blocks[0].bindings]
    ops = [str(value.op.name) for value in values if hasattr(value, "op")]
    assert ops.count("relax.qnn.quantize") == 1
    # one result of each of three products, and one conversion of the first where it takes two steps
    assert ops.count("relax.qnn.requantize") == 3 + (len(groups) - 1)
    for stage in (stages.reference, stages.integer):
        calls = [b.value for b in stage["main"].body.blocks[0].bindings if hasattr(b.value, "op")]
        conversions = [
            c for c in calls if c.op.name in ("relax.qnn.quantize", "relax.qnn.requantize")
        ]
        for i, call in enumerate(conversions):
            for other in conversions[:i]:
                assert not tvm_ffi.structural_equal(call, other)
    assert rq.verify(stages.integer, data[0]).is_equal
    want = rq.reference.run(mod, data[0])[0]
    got = rq.reference.run(stages.integer, data[0])[0]
    assert np.abs(want - got).max() < 0.05 * np.abs(want).max()


@pytest.mark.slow
def test_mixed__float_operator_between():
    mapping = rq.QConfigMapping().set_global(CONFIG).set_module_name("two", None)
    mod = residual_model()
    data = draw_batches(mod, 4)
    stages = run_stages(mod, data, qconfig_mapping=mapping, backend=GENERIC)
    assert rq.ledger(stages.integer).row("two").reason.startswith("kept in float")
    assert rq.verify(stages.integer, data[0]).is_equal
    want = rq.reference.run(mod, data[0])[0]
    got = rq.reference.run(stages.integer, data[0])[0]
    assert np.abs(want - got).max() < 0.1 * np.abs(want).max()


#: of a prelu, for each channel
SLOPES = np.array([-0.5, 0, 0.3, 1.25], "float32")


def same_dtype_model(name: str) -> tvm.IRModule:
    """conv -> an operator whose integer form has one dtype -> conv."""
    operators = {
        "avg_pool2d": lambda x: op.nn.avg_pool2d(x, (2, 2), padding=(1, 1)),
        "leaky_relu": lambda x: op.nn.leakyrelu(x, 0.3),
        "prelu": lambda x: op.nn.prelu(x, relax.const(SLOPES), 1),
        "concat": lambda x: op.concat([x, x], axis=2),
    }

    def body(emit, x):
        value = emit.conv("before", x)
        return emit.conv("after", emit("it", operators[name](value)))

    return build_model(body, MAP)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["avg_pool2d", "leaky_relu", "prelu", "concat"])
@pytest.mark.parametrize(
    ("source", "result"), [("int8", "int16"), ("int16", "uint8"), ("uint8", "int8")]
)
def test_mixed__operators_of_one_dtype_round_once(name, source, result):
    """The operands are widened, or the result narrowed: exactly, so that one rounding is left."""
    mod = same_dtype_model(name)
    data = draw_batches(mod, 2)
    own = rq.TensorConfig(rq.QSpec(result), rq.observers.MinMax())
    mapping = (
        rq.QConfigMapping()
        .set_global(with_activation(rq.QSpec(result)))
        .set_module_name("it", replace(with_activation(rq.QSpec(source)), output=own))
    )
    prepared = rq.prepare(mod, None, qconfig_mapping=mapping, backend=GENERIC, strict=True)
    prepared = observe_parameters(prepared, data)
    integer = rq.lower(rq.convert_to_reference(prepared), GENERIC)
    values = run_values(integer, data[0])
    given, out = values["before"], values["it"]
    assert (given.dtype, out.dtype) == (source, result)
    before, after = (prepared.parameters[key] for key in ("before", "it"))
    real = (given.astype("float64") - int(before.zero_point)) * float(before.scale)
    if name == "leaky_relu":
        want = np.where(real < 0, np.float32(0.3) * real, real)
    elif name == "prelu":
        want = np.where(real < 0, SLOPES[:, None, None] * real, real)
    elif name == "concat":
        want = np.concatenate([real, real], axis=2)
    else:
        padded = np.pad(real, ((0, 0), (0, 0), (1, 1), (1, 1)))
        count = np.pad(np.ones(real.shape), ((0, 0), (0, 0), (1, 1), (1, 1)))
        sums = [
            sum(a[:, :, i : i + 7, j : j + 7] for i in (0, 1) for j in (0, 1))
            for a in (padded, count)
        ]
        want = sums[0] / sums[1]
    exact = want / float(after.scale) + int(after.zero_point)
    info = np.iinfo(result)
    # Within half a step, and a little for float32.
    assert np.abs(np.clip(exact, info.min, info.max) - out).max() <= 0.5 + 2e-3
    if source == "int16":
        assert rq.verify(integer, data[1]).is_equal


def test_int4__is_stored_in_int8_within_its_range():
    """By name on a backend of int8 weights, and from the plain data of a file."""
    mod = residual_model()
    data = CONFIG.to_dict()
    data["weight"]["spec"] |= {"dtype": "int4", "quant_min": -8, "quant_max": 7}
    mapping = rq.QConfigMapping.from_dict({"global": data})
    prepared = rq.prepare(mod, None, qconfig_mapping=mapping, backend=X86, strict=True)
    prepared = observe_parameters(prepared, draw_batches(mod, 1))
    assert {group.info.spec.dtype for group in prepared.plan.weights} == {"int8"}
    integer = rq.lower(rq.convert_to_reference(prepared), X86)
    graph = Graph(integer)
    weights = [
        constant_value(graph.values[b.var].args[1])
        for b in graph.bindings
        if graph.op_name(b.var) in ("relax.qnn.conv2d", "relax.qnn.dense")
    ]
    assert len(weights) == 5
    for weight in weights:
        assert weight.dtype == "int8"
        assert -8 <= weight.min() < 0 < weight.max() <= 7
    edited = prepared.plan.replace("stem:weight", spec=rq.QSpec("int4", rq.config.Scheme.SYMMETRIC))
    assert edited.group("stem:weight").info.spec.limits == (-8, 7)
    assert edited.group("stem:weight").info.spec.dtype == "int8"


def test_tiny_scales__of_two_activations_do_not_underflow():
    mod = build_model(lambda e, x, y: e("out", op.matmul(x, y)), (2, 3, 4), (2, 4, 3))
    inputs = {"x": np.full((2, 3, 4), 1e-33, "f4"), "y": np.full((2, 4, 3), 1e-33, "f4")}
    prepared = rq.prepare(mod, None, backend=X86)
    prepared = observe_parameters(prepared, [inputs])
    integer = rq.lower(rq.convert_to_reference(prepared), X86)
    assert np.abs(rq.reference.run(integer, inputs)[0]).max() < 1e-30


def product_model(kind: str) -> tvm.IRModule:
    """The product of two values that are not negative: of elements, or of matrices."""

    def body(emit, x):
        left, right = (emit(name, op.nn.relu(emit.conv(f"{name}.c", x))) for name in ("a", "b"))
        return emit.conv("last", emit("y", getattr(op, kind)(left, right)))

    return build_model(body, MAP)


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("kind", "scheme", "reason"),
    [
        ("multiply", rq.config.Scheme.SYMMETRIC, None),
        ("multiply", rq.config.Scheme.AFFINE, "activation scheme affine is not supported"),
        ("matmul", rq.config.Scheme.SYMMETRIC, "activation dtype int16 is asked for"),
    ],
)
@pytest.mark.parametrize("backend", [X86, ARM, GENERIC], ids=lambda b: b.name)
def test_int16__products_that_overflow_stay_in_float(backend, kind, scheme, reason):
    mod = product_model(kind)
    data = draw_batches(mod, 2)
    wide = with_activation(rq.QSpec("int16", scheme))
    mapping = rq.QConfigMapping().set_global(wide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says what the ledger's row says
        qmod = rq.quantize(
            mod, None, data, backend=backend, qconfig_mapping=mapping, guard=rq.config.Guard.OFF
        )
    row = rq.ledger(qmod).row("y")
    assert row.quantized == (reason is None)
    assert reason is None or reason in row.reason
    expected, got = (rq.reference.run(each, data[0])[0] for each in (mod, qmod))
    assert np.abs(got - expected).max() < 0.02 * np.abs(expected).max()
