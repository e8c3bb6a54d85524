"""Every argument of every public function and class, given what it does not take: an error of this
package that says what is allowed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from float_models import MAP, build_model, draw_batches

import relayquant as rq
from relayquant.config import Role, Scheme
from relayquant.formats.readers import import_onnx, import_tflite, import_torch
from relayquant.ir.ops import Kind, Operand, Output, QuantOp
from relayquant.ir.ops.find import find_pattern
from relayquant.stages.backends import X86

ERRORS = (rq.ConfigError, rq.ModelError, rq.DataError)

#: kind of value -> one that is of that kind alone
PROBES: dict[str, Any] = {
    "none": None,
    "flag": True,
    "number": 5,
    "fraction": 2.5,
    "text": "no such thing",
    "names": ["x"],
    "table": {"x": 1},
    "class": rq.observers.MinMax,
    "function": lambda one: one,
    "object": object(),
    "bytes": b"x",
}


def conv_model():
    return build_model(lambda emit, x: emit.conv("c", emit.conv("a", x)), MAP)


MOD = conv_model()
DATA = draw_batches(MOD, 1)
DENSE = build_model(lambda emit, x: emit.dense("d", x, 4), (4, 16))
PREPARED = rq.prepare(MOD)
QCONFIG = X86.default_qconfig
SPEC = rq.QSpec()
ROW = find_pattern(X86, "conv2d")
RULE = rq.extend.AffineRule("relax.flip", lambda call, operand: operand)
DTYPES = rq.config.DTypeConfig(input="int8", output="int8")
MAPPING = rq.QConfigMapping()

MODEL = {"mod": MOD, "params": None}

#: word of an annotation -> kinds of probe that it takes
WORDS = {
    "bool": "flag",
    "int": "number",
    "float": "number fraction",
    "str": "text",
    "PathLike": "text",
    "Path": "text",
    "None": "none",
    "Inputs": "table",
    "Callable": "function class",
    "Metric": "function class",
}
#: of parameters that are annotated as Any, the kinds that are wrong
WRONG_ANY = {
    "dataset": "number text object",
    "validation_dataset": "number object",
    "inputs": "number text object none",
    "finetune.calibration_dataset": "number text object",  # data; elsewhere it picks parameters
    "observer": "flag number text names table class object bytes",
    "target": "number text names class object",
    "program_or_path": "number object",
    "data": "none number text names class object",
    "low": "text object none",
    "high": "text object none",
}


#: public name -> (what is called, arguments that are right)
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "quantize": (rq.quantize, {**MODEL, "dataset": DATA}),
    "prepare": (rq.prepare, {**MODEL}),
    "calibrate": (rq.calibrate, {"prepared": PREPARED, "dataset": DATA}),
    "convert_to_reference": (rq.convert_to_reference, {"prepared": PREPARED}),
    "lower": (rq.lower, {"reference": MOD}),
    "get_pipeline": (rq.get_pipeline, {}),
    "compile": (rq.compile, {"mod": MOD}),
    "verify": (rq.verify, {"mod": MOD, "inputs": DATA[0]}),
    "compare": (rq.compare, {"mod": MOD, "params": None, "qmod": MOD, "dataset": DATA}),
    "ledger": (rq.ledger, {"mod": MOD}),
    "accumulator_report": (rq.analysis.accumulator_report, {"model": PREPARED, "dataset": DATA}),
    "sensitivity": (rq.sensitivity, {"prepared": PREPARED, "dataset": DATA}),
    "equalize_layers": (rq.equalize_layers, {"mod": MOD}),
    "smooth_activations": (rq.smooth_activations, {**MODEL, "dataset": DATA}),
    "get_backend_config": (rq.get_backend_config, {}),
    "export_onnx": (rq.export_onnx, {"mod": MOD, "path": "never.onnx"}),
    "export_bundle": (rq.export_bundle, {"mod": MOD, "folder": "/no/folder/deploy"}),
    "load_prepared": (rq.load_prepared, {"path": "never"}),
    "merge_statistics": (rq.merge_statistics, {"first": PREPARED}),
    "save_prepared": (rq.save_prepared, {"prepared": PREPARED, "path": "/no/folder"}),
    "save_module": (rq.save_module, {"mod": MOD, "path": "/no/folder/m.rqm"}),
    "load_qparams": (rq.load_qparams, {"path": "never"}),
    "save_qparams": (rq.save_qparams, {"parameters": {}, "path": "/no/folder"}),
    "lint": (rq.lint, {**MODEL, "dataset": DATA}),
    "measure_latency": (rq.analysis.measure_latency, {"candidates": {"a": dict}, "rounds": 1}),
    "measure_growth": (rq.analysis.measure_growth, {**MODEL, "dataset": DATA}),
    "load": (rq.load, {"model": "never"}),
    "load_gguf": (rq.load_gguf, {"path": "never"}),
    "load_tokenizer": (rq.load_tokenizer, {"path": "never"}),
    "get_state": (rq.get_state, {"mod": MOD}),
    "with_state": (rq.with_state, {"mod": MOD, "values": []}),
    "import_tflite": (import_tflite, {"path": "never"}),
    "import_torch": (import_torch, {"program_or_path": "never"}),
    "import_onnx": (import_onnx, {"model_or_path": "never"}),
    "compress_weights": (rq.compress_weights, {"mod": DENSE}),
    "finetune": (rq.torch.finetune, {**MODEL, "dataset": DATA}),
    "report": (rq.report, {"mod": MOD, "params": None, "qmod": MOD, "dataset": DATA}),
    "plot_error_by_depth": (rq.plots.plot_error_by_depth, {"report": None}),
    "plot_latency": (rq.plots.plot_latency, {"latencies": {}}),
    "plot_ranges": (rq.plots.plot_ranges, {"prepared": PREPARED, "dataset": DATA}),
    "plot_sensitivity": (rq.plots.plot_sensitivity, {"report": None}),
    "choose_qparams": (rq.choose_qparams, {"low": -1.0, "high": 1.0, "spec": SPEC}),
    "relay.from_text": (rq.relay.from_text, {"text": ""}),
    "relay.from_json": (rq.relay.from_json, {"text": ""}),
    "relay.to_text": (rq.relay.to_text, {"mod": MOD}),
    "QSpec": (rq.QSpec, {}),
    "TensorConfig": (rq.TensorConfig, {"spec": SPEC, "observer": rq.observers.MinMax()}),
    "QConfig": (rq.QConfig, {"activation": QCONFIG.activation, "weight": QCONFIG.weight}),
    "FloatConfig": (rq.config.FloatConfig, {"dtype": "float16"}),
    "Accumulator": (rq.config.Accumulator, {}),
    "DTypeWithConstraints": (rq.config.DTypeWithConstraints, {"dtype": "int8"}),
    "DTypeConfig": (rq.config.DTypeConfig, {"input": "int8", "output": "int8"}),
    "FixedOutput": (
        rq.config.FixedOutput,
        {"dtype": "int8", "scheme": Scheme.AFFINE, "observer": rq.observers.Fixed(1.0, 0)},
    ),
    "PatternConfig": (rq.config.PatternConfig, {"pattern": ROW, "dtypes": (DTYPES,)}),
    "BackendConfig": (rq.BackendConfig, {"name": "mine"}),
    "AffineRule": (rq.extend.AffineRule, {"op": "relax.flip", "rewrite": RULE.rewrite}),
    "Skip": (rq.extend.Skip, {"reason": "no"}),
    "ValueInfo": (
        rq.observers.ValueInfo, {"name": "x", "role": Role.WEIGHT, "spec": SPEC, "shape": (2,)}
    ),
    "GuardSettings": (rq.config.GuardSettings, {}),
    "FitSettings": (rq.config.FitSettings, {}),
    "AdaRoundSettings": (rq.config.AdaRoundSettings, {}),
    "ReconstructionSettings": (rq.config.ReconstructionSettings, {}),
    "QuantOp": (
        QuantOp,
        {
            "name": "mine", "op": ROW.op, "pattern": ROW.pattern, "operands": (Operand("data"),),
            "kind": Kind.ANCHOR, "output": Output.OWN, "realize": None,
        },
    ),
    "BackendConfig.with_pattern": (X86.with_pattern, {"pattern": ROW}),
    "BackendConfig.without_pattern": (X86.without_pattern, {"name": "conv2d"}),
    "BackendConfig.with_affine_rule": (X86.with_affine_rule, {"rule": RULE}),
    "BackendConfig.find_pattern": (X86.find_pattern, {"name": "conv2d"}),
    "BackendConfig.explain": (X86.explain, {}),
    "BackendConfig.from_dict": (
        rq.BackendConfig.from_dict,
        {"data": X86.to_dict(), "patterns": rq.extend.BUILTIN_OPS},
    ),
    "QConfigMapping.set_global": (MAPPING.set_global, {"qconfig": None}),
    "QConfigMapping.set_object_type": (MAPPING.set_object_type, {"op": "add", "qconfig": None}),
    "QConfigMapping.set_module_name": (MAPPING.set_module_name, {"name": "a", "qconfig": None}),
    "QConfigMapping.set_module_name_regex": (
        MAPPING.set_module_name_regex,
        {"regex": "a", "qconfig": None},
    ),
    "QConfigMapping.set_module_name_object_type_order": (
        MAPPING.set_module_name_object_type_order,
        {"name": "a", "op": "add", "index": 0, "qconfig": None},
    ),
    "QConfigMapping.from_dict": (rq.QConfigMapping.from_dict, {"data": {}}),
    "Plan.replace": (PREPARED.plan.replace, {"key": "x"}),
    "Plan.group": (PREPARED.plan.group, {"key": "x"}),
    "Plan.operator": (PREPARED.plan.operator, {"name": "a"}),
}  # fmt: skip


def find_wrong(public: str, name: str, parameter: inspect.Parameter) -> list[str]:
    """Kinds of probe that a parameter does not take, by the words of its annotation."""
    if parameter.annotation == "Any":
        return WRONG_ANY.get(f"{public}.{name}", WRONG_ANY.get(name, "")).split()
    if parameter.annotation == "object":
        return WRONG_ANY["data"].split()
    text = parameter.annotation
    while "[" in text:
        text = re.sub(r"\[[^\[\]]*\]", "", text)  # what a collection holds
    taken = {kind for word in re.findall(r"\w+", text) for kind in WORDS.get(word, "").split()}
    return [kind for kind in PROBES if kind not in taken]


#: how messages say what is right
REMEDIES = (
    "[Aa]llowed|Did you mean|Known|Pass|expected|names are given|wants|look like|Run relayquant|"
    "Readable|Convert it|needs|is not JSON|no QSpec fits|write "
)
#: `lint` says what is wrong with data as findings; `where` is for messages of nested values
LEFT_OUT = [("lint", "dataset"), ("QConfigMapping.from_dict", "where")]

CASES = [
    (public, name)
    for public, (function, _) in CALLS.items()
    for name in inspect.signature(function).parameters
    if (public, name) not in LEFT_OUT
]


@pytest.mark.parametrize(("public", "name"), CASES)
def test_argument__of_a_wrong_type_is_an_error_that_says_what_is_allowed(public, name):
    if public == "finetune":
        pytest.importorskip("torch")  # what it says first
    function, right = CALLS[public]
    for kind in find_wrong(public, name, inspect.signature(function).parameters[name]):
        parameter = inspect.signature(function).parameters[name]
        args, named = [], {**right, name: PROBES[kind]}
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            args = [*right.values(), named.pop(name)]
            named = {}
        with pytest.raises(ERRORS) as error:
            function(*args, **named)
        assert re.search(REMEDIES, str(error.value)), error.value


def test_arguments__of_every_public_function_are_in_the_table():
    functions = {name for name in rq.__all__ if inspect.isfunction(getattr(rq, name))}
    assert functions <= set(CALLS)
    checked = [name for name in CALLS if not name[0].isupper()]
    assert all(hasattr(CALLS[name][0], "__wrapped__") for name in checked)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: rq.quantize(MOD, None, DATA, efort="fast"), "argument 'efort'.*mean 'effort'"),
        (lambda: rq.verify(MOD, DATA, zzz=1), "argument 'zzz'.*Known: 'inputs', 'mod', 'target'"),
        (lambda: rq.verify(MOD), "missing a required argument: 'inputs'$"),
    ],
)
def test_arguments__by_a_wrong_name_name_the_function_and_the_nearest(call, told):
    with pytest.raises(TypeError, match=rf"^(quantize|verify)\(\) .*{told}"):
        call()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: rq.QSpec("int8", "symetric"), "'symmetric', 'affine'. Did you mean 'symmetric'?"),
        (lambda: rq.QSpec("int8", "odd"), "'symmetric', 'affine'. [RQ101]"),
    ],
)
def test_argument__of_a_wrong_text_lists_what_is_allowed_once(call, told):
    with pytest.raises(rq.ConfigError, match=re.escape(told)) as error:
        call()
    assert str(error.value).count("'affine'") == 1


def test_load__of_a_missing_path_without_a_suffix_says_that_it_is_missing():
    with pytest.raises(rq.ModelError, match=r"There is no model file 'never'\. Readable: \.onnx"):
        rq.load("never")


def test_argument__of_a_file_where_a_module_is_wanted_says_how_to_read_it(tmp_path):
    with pytest.raises(
        rq.ModelError, match=r"allowed: a tvm.IRModule, or .*\. Read a file with relayq"
    ):
        rq.quantize(tmp_path / "model.onnx", None, DATA)


def test_argument__of_pytorch_where_a_module_is_wanted_says_what_takes_it():
    torch = pytest.importorskip("torch")
    with pytest.raises(rq.ModelError, match=r"a Linear; .*: relayquant\.torch\.quantize"):
        rq.quantize(torch.nn.Linear(2, 2), None, DATA)
