"""The options of relay.quantize: defaults, what they quantize, and what has no counterpart."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pytest
import tvm
from old_relay import needs_old_relay, run_old_code

import relayquant as rq
from relayquant import relay
from relayquant.errors import ConfigError
from relayquant.flow.relay_scripts import SUCCESSORS
from relayquant.relay import RelayQConfig, current_qconfig, from_text, qconfig

#: what `tvm.relay.quantize.QConfig` of TVM 0.10 has
DEFAULTS = {
    "nbit_input": 8,
    "nbit_weight": 8,
    "nbit_activation": 32,
    "dtype_input": "int8",
    "dtype_weight": "int8",
    "dtype_activation": "int32",
    "calibrate_mode": "global_scale",
    "global_scale": 8.0,
    "weight_scale": "power2",
    "skip_dense_layer": True,
    "skip_conv_layers": [0],
    "do_simulation": False,
    "round_for_shift": True,
    "debug_enabled_ops": None,
    "rounding": "UPWARD",
    "calibrate_chunk_by": -1,
    "partition_conversions": "disabled",
}

CNN = """
def @main(%x: Tensor[(1, 3, 8, 8), float32], %w1: Tensor[(8, 3, 3, 3), float32],
          %w2: Tensor[(8, 8, 3, 3), float32], %w3: Tensor[(8, 8, 1, 1), float32],
          %w4: Tensor[(4, 8), float32]) {
  let %conv1 = nn.conv2d(%x, %w1, padding=[1, 1, 1, 1], channels=8, kernel_size=[3, 3]);
  let %relu1 = nn.relu(%conv1);
  let %conv2 = nn.conv2d(%relu1, %w2, padding=[1, 1, 1, 1], channels=8, kernel_size=[3, 3]);
  let %relu2 = nn.relu(%conv2);
  let %conv3 = nn.conv2d(%relu2, %w3, channels=8, kernel_size=[1, 1]);
  let %sum = add(%conv3, %relu2);
  let %gate = sigmoid(%sum);
  %0 = nn.global_avg_pool2d(%gate);
  %1 = nn.batch_flatten(%0);
  let %fc = nn.dense(%1, %w4, units=4);
  %fc
}
"""


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    shapes = {"w1": (8, 3, 3, 3), "w2": (8, 8, 3, 3), "w3": (8, 8, 1, 1), "w4": (4, 8)}
    weights = {
        name: (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype("float32")
        for name, shape in shapes.items()
    }
    data = [rng.standard_normal((1, 3, 8, 8)).astype("float32") for _ in range(4)]
    return from_text(CNN, weights), data


def quantized_names(mod, dataset=None, **options):
    config = qconfig(**options)
    qmod = rq.quantize(mod, None, dataset, **config.settings)
    rows = rq.ledger(qmod).to_dict()["operators"]
    return qmod, {row["name"] for row in rows if row["quantized"]}


def test_defaults__are_those_of_relay():
    assert asdict(qconfig()) == {**DEFAULTS, "skip_conv_layers": (0,)}
    assert qconfig() == RelayQConfig()


def test_defaults__outside_of_any_scope():
    """`QConfig::Current()` of a TVM 0.10 skips no convolution there, unlike `qconfig()`."""
    assert relay.quantize.current_qconfig() == qconfig(skip_conv_layers=None)


@needs_old_relay
def test_defaults__as_a_relay_says():
    script = (
        "import importlib, json; quantize = importlib.import_module('tvm.relay.quantize.quantize');"
        "print(json.dumps(quantize.QConfig._node_defaults))"
    )
    assert run_old_code(script) == DEFAULTS


def test_global_scale__needs_no_data(model):
    """Relay's parameters: 8 / 2^7, and the first convolution and the dense layer in float."""
    mod, data = model
    qmod, names = quantized_names(mod)
    assert names == {"relu2", "sum"}
    prepared = rq.prepare(
        mod,
        None,
        qconfig_mapping=qconfig().mapping,
        backend=rq.get_backend_config("generic"),
        effort="fast",
    )
    prepared = rq.calibrate(prepared, None)
    picked = [prepared.parameters[group.key] for group in prepared.plan.activations]
    assert picked
    for each in picked:
        assert (each.dtype, each.zero_point, each.scale) == ("int8", 0, np.float32(8 / 128))
    for group in prepared.plan.weights:
        mantissa, _ = np.frexp(prepared.parameters[group.key].scale)
        assert mantissa == 0.5
    want, got = (rq.reference.run(each, [data[0]])[0] for each in (mod, qmod))
    np.testing.assert_allclose(got, want, atol=0.1)


#: options -> what is quantized beyond the second and third convolution, and what is not
VARIED = {
    "skip_conv_layers=[]": ({"skip_conv_layers": []}, {"relu1"}, {"fc"}),
    "skip_conv_layers=None": ({"skip_conv_layers": None}, {"relu1"}, {"fc"}),
    "skip_conv_layers=[1]": ({"skip_conv_layers": [1]}, {"relu1"}, {"relu2"}),
    "skip_conv_layers=[7]": ({"skip_conv_layers": [7]}, {"relu1"}, set()),
    "skip_dense_layer": ({"skip_dense_layer": False}, {"fc"}, {"relu1"}),
    "debug_enabled_ops": ({"debug_enabled_ops": ["nn.conv2d"]}, {"relu2"}, {"fc", "gate"}),
    "kl": ({"calibrate_mode": "kl_divergence"}, {"relu2"}, {"gate"}),
    "percentile": ({"calibrate_mode": "percentile", "weight_scale": "max"}, {"relu2"}, {"gate"}),
    "int16": ({"dtype_input": "int16", "nbit_input": 16}, {"relu2"}, {"gate"}),
    "fewer bits": ({"nbit_input": 6, "nbit_weight": 4}, {"relu2"}, {"gate"}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", VARIED)
def test_options__say_what_is_quantized(model, name):
    options, among, absent = VARIED[name]
    mod, data = model
    needs_data = qconfig(**options).needs_data
    assert needs_data == ("calibrate_mode" in options)
    _, names = quantized_names(mod, data if needs_data else None, **options)
    assert among <= names
    assert not absent & names


def test_options__a_model_without_convolutions_or_dense_layers():
    """Lines of the mapping that select nothing are no error: they are for any model."""
    text = """def @main(%x: Tensor[(1, 2, 4), float32], %w: Tensor[(3, 2, 1), float32]) {
      nn.conv1d(%x, %w, channels=3, kernel_size=[1]) }"""
    _, names = quantized_names(from_text(text, {"w": np.ones((3, 2, 1), "float32")}))
    assert names == {"output"}


def test_bits__are_those_of_the_specs():
    config = qconfig(nbit_input=6, nbit_weight=4, global_scale=4.0).qconfig
    assert config.activation.spec.limits == (-31, 31)
    assert config.activation.observer == rq.observers.Fixed(scale=4 / 32)
    assert config.weight.spec.limits == (-7, 7)
    assert config.weight.spec.power_of_two
    assert not qconfig(weight_scale="max").qconfig.weight.spec.power_of_two


#: option, value, part of the message
REFUSED = (
    ("dtype_input", "uint8", "signed"),
    ("dtype_weight", "int4", "allowed: int8"),
    ("dtype_activation", "float32", "the dtype of sums"),
    ("nbit_activation", 64, "the bits of sums"),
    ("nbit_input", 16, "holds 8 bits"),
    ("nbit_input", 1, "2 to 16"),
    ("nbit_weight", 16, "2 to 8"),
    ("calibrate_mode", "minmax", "global_scale, kl_divergence, percentile"),
    ("global_scale", 0.0, "above 0"),
    ("weight_scale", "mean", "power2, max"),
    ("skip_dense_layer", None, "True, False"),
    ("skip_conv_layers", [-1], "from 0"),
    ("do_simulation", None, "True, False"),
    ("round_for_shift", 0, "True, False"),
    ("debug_enabled_ops", ["nn.conv2"], "Did you mean 'nn.conv2d'"),
    ("rounding", "DOWNWARD", "UPWARD, TONEAREST"),
    ("calibrate_chunk_by", 0.5, "a count"),
    ("partition_conversions", "fully_integral", "input_dtypes="),
    ("nbits", 8, "no option 'nbits'"),
    ("skip_conv_layer", [0], "Did you mean 'skip_conv_layers'"),
    # those of TVM 0.5 and 0.6
    ("skip_k_conv", 1, "skip_conv_layers=range(k)"),
    ("store_lowbit_output", True, "Leave it out"),
)


@pytest.mark.parametrize(("option", "value", "message"), REFUSED, ids=str)
def test_options__without_counterpart_are_errors(option, value, message):
    with pytest.raises(ConfigError, match=option) as raised:
        qconfig(**{option: value})
    assert message in str(raised.value)


def test_options__every_one_is_refused_somewhere():
    assert {option for option, _, _ in REFUSED} >= DEFAULTS.keys()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype_activation", "int8"),
        ("nbit_activation", 16),
        ("round_for_shift", False),
        ("partition_conversions", "enabled"),
    ],
)
def test_options__without_effect_are_warnings(option, value):
    with pytest.warns(UserWarning, match=rf"{option}={value!r} has no effect: .*RQ104") as raised:
        config = qconfig(**{option: value})
    assert raised[0].filename == __file__
    assert config.mapping == qconfig().mapping


# -- scripts as they were --------------------------------------------------------------------------


@pytest.mark.slow
def test_script__runs_as_it_was(model):
    """As `from tvm import relay` had it; also with the functions by their names."""
    mod, data = model
    with relay.quantize.qconfig(skip_conv_layers=[0]) as config:
        assert relay.quantize.current_qconfig() is config
        qmod = relay.quantize.quantize(mod)
    expected = rq.quantize(mod, None, None, **qconfig(skip_conv_layers=[0]).settings)
    tvm.ir.assert_structural_equal(qmod, expected)
    samples = [{"x": tvm.runtime.tensor(sample)} for sample in data]
    with qconfig(calibrate_mode="kl_divergence", skip_conv_layers=None):
        qmod = relay.quantize(mod, params=None, dataset=samples)
    assert {row.name for row in rq.ledger(qmod).rows if row.quantized} >= {"relu1", "relu2"}


@pytest.mark.parametrize("mode", ["kl_divergence", "percentile"])
def test_script__no_data(model, mode):
    message = rf"calibrate_mode='{mode}' .* Pass dataset=, or .*'global_scale'.* \[RQ303\]"
    with qconfig(calibrate_mode=mode), pytest.raises(rq.DataError, match=message):
        relay.quantize.quantize(model[0])


def test_script__data_from_a_generator(model):
    """As in the tutorial of TVM, which calls its generator function. It may fill one array again
    and again.
    """
    mod, data = model
    buffer = np.empty_like(data[0])

    def read_samples():
        for sample in data:
            buffer[:] = sample
            yield {"x": buffer}

    with relay.quantize.qconfig(calibrate_mode="percentile"), tvm.transform.PassContext(3):
        expected = relay.quantize.quantize(mod, None, [{"x": sample} for sample in data])
        qmod = relay.quantize.quantize(mod, None, dataset=read_samples())
    tvm.ir.assert_structural_equal(qmod, expected)


def test_script__simulation_rounds_in_float(model):
    """Old Relay returns the module with simulated quantization; here it is the reference form."""
    mod, data = model
    with qconfig(do_simulation=True) as config:
        simulated = relay.quantize.quantize(mod)
    integers = rq.quantize(mod, None, None, **qconfig().settings)
    text = simulated.script()
    assert "R.qnn.quantize" in text
    assert "R.qnn.conv2d" not in text
    assert "R.qnn.conv2d" in integers.script()
    got, want = (rq.reference.run(each, [data[0]])[0] for each in (simulated, integers))
    np.testing.assert_allclose(got, want, atol=0.02)
    with pytest.raises(ConfigError, match=r"do_simulation is True.*with config"):
        rq.quantize(mod, None, None, **config.settings)


def test_scopes__nest_and_end():
    outside = current_qconfig()
    with qconfig(nbit_input=6):
        with qconfig(nbit_input=4):
            assert current_qconfig().nbit_input == 4
        assert current_qconfig().nbit_input == 6
    with pytest.raises(ConfigError), qconfig(nbit_input=6):
        qconfig(nbit_input=1)
    assert current_qconfig() == outside
    config = qconfig(nbit_input=5)
    with config, config:
        assert current_qconfig() is config
    assert current_qconfig() == outside


def test_scopes__belong_to_their_thread():
    with qconfig(nbit_input=6), ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_qconfig).result().nbit_input == 8


def test_namespace__says_what_became_of_the_rest():
    assert {"quantize", "qconfig", "current_qconfig"} <= set(dir(relay.quantize))
    for name in ("prerequisite_optimize", "annotate", "calibrate", "partition", "QConfig"):
        with pytest.raises(AttributeError, match=rf"no '{name}'\. Use relayquant\."):
            getattr(relay.quantize, name)
    for name in ("build", "frontend", "transform", "var", "nn", "vm"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'\. Use \w+\."):
            getattr(relay, name)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = relay.quantise
    with pytest.raises(AttributeError, match=r"no 'kl'\. It has quantize"):
        _ = relay.quantize.kl


@needs_old_relay
def test_namespace__has_the_signatures_of_a_relay():
    script = (
        "import json, inspect; from tvm.relay import quantize as q;"
        "print(json.dumps([str(inspect.signature(q.quantize)), q.current_qconfig()"
        ".skip_conv_layers, [n for n in dir(q) if callable(getattr(q, n))]]))"
    )
    signature, skipped, names = run_old_code(script)
    ours = inspect.signature(relay.quantize).parameters.values()
    written = [each.name + "=None" * (each.default is None) for each in ours]
    assert signature == f"({', '.join(written)})"
    assert skipped == relay.quantize.current_qconfig().skip_conv_layers
    assert {"quantize", "qconfig", "current_qconfig", *SUCCESSORS} <= set(names)


def test_ledger__names_the_option(model):
    mod, _ = model
    with qconfig(skip_conv_layers=[0]):
        rows = {row.name: row.reason for row in rq.ledger(relay.quantize(mod)).rows}
    assert rows["relu1"] == "kept in float by skip_conv_layers=[0]"
    assert rows["fc"] == "kept in float by skip_dense_layer=True"
    with qconfig(skip_conv_layers=[2, 0], debug_enabled_ops=["nn.conv2d"]):
        rows = {row.name: row.reason for row in rq.ledger(relay.quantize(mod)).rows}
    assert rows["relu1"] == "kept in float by skip_conv_layers=[2, 0]"
    assert rows["fc"] == "kept in float by debug_enabled_ops=['nn.conv2d']"


@pytest.mark.parametrize(("value", "near"), [("kl", "kl_divergence"), ("global", "global_scale")])
def test_modes__near_names(value, near):
    with pytest.raises(ConfigError, match=f"calibrate_mode is '{value}'.*mean '{near}'"):
        qconfig(calibrate_mode=value)


# -- names of Relay's operators --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("nn.dense", "fc"),
        ("nn.conv2d", "relu2"),
        ("sigmoid", "gate"),
        ("nn.global_avg_pool2d", "0"),
    ],
)
def test_object_type__takes_names_of_relay(model, name, kept):
    mod, _ = model
    mapping = (
        rq.QConfigMapping()
        .set_global(rq.get_backend_config("x86").default_qconfig)
        .set_object_type(name, None)
    )
    plan = rq.prepare(mod, None, qconfig_mapping=mapping).plan
    assert "object_type" in {op.name: op for op in plan.operators}[kept].reason


def test_object_type__dense_is_no_batch_matmul():
    text = """def @main(%x: Tensor[(2, 4, 4), float32], %w: Tensor[(4, 4), float32]) {
      let %square = nn.batch_matmul(%x, %x, transpose_b=True);
      let %flat = reshape(%square, newshape=[8, 4]);
      let %fc = nn.dense(%flat, %w, units=4); %fc }"""
    mod = from_text(text, {"w": np.eye(4, dtype="float32")})
    for name, kept in (("nn.dense", "fc"), ("nn.batch_matmul", "square"), ("nn.matmul", "both")):
        mapping = (
            rq.QConfigMapping()
            .set_global(rq.get_backend_config("x86").default_qconfig)
            .set_object_type(name, None)
        )
        plan = rq.prepare(mod, None, qconfig_mapping=mapping).plan
        found = {op.name for op in plan.operators if "object_type" in op.reason}
        assert found & {"fc", "square"} == ({kept} if kept != "both" else {"fc", "square"})


def test_object_type__unknown_name_is_an_error_with_a_suggestion(model):
    mapping = rq.QConfigMapping().set_object_type("nn.dence", None)
    with pytest.raises(ConfigError, match=r"'nn\.dence' selects no operator.*mean 'nn\.dense'"):
        rq.prepare(model[0], None, qconfig_mapping=mapping)


def test_optional_lines__are_written_and_read():
    mapping = qconfig().mapping
    assert rq.QConfigMapping.from_dict(mapping.to_dict()) == mapping
