"""Recurrent layers that `export_onnx` writes, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_runtime import run_onnxruntime
from tvm import relax, tirx

import relayquant as rq
from relayquant.config import RecurrentForm
from relayquant.formats.writers.onnx.file import export_onnx
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.qnn.recurrent import CELLS
from relayquant.ir.rewrite.graph import constant_value

STEPS, BATCH, UNITS = 5, 3, 6
SHAPES = {
    "hidden": (BATCH, UNITS),
    "cell": (BATCH, UNITS),
    "peepholes": (3, UNITS),
    "hidden_bias": (UNITS,),
}
LENGTHS = {"lengths": np.array([2, 0, STEPS], "int32")}

CASES = [
    *((kind, {}) for kind in CELLS),
    *((kind, {"is_reversed": True} | LENGTHS) for kind in CELLS),
    *((kind, {"hidden": None, "clip": 0.3} | LENGTHS) for kind in CELLS),
    *((kind, {"hidden": np.float32(0.5)}) for kind in CELLS),
    *((kind, {"lengths": np.int32(3)}) for kind in CELLS),
    ("lstm", {"peepholes": None, "cell": None, "hidden": None, "is_reversed": True}),
    ("lstm", {"peepholes": np.float32(0.25)}),
    ("lstm", {"input_forget": True, "activations": ("sigmoid", "relu", "tanh")}),
    ("lstm", {"cell_clip": 0.2, "is_reversed": True}),
    ("gru", {"linear_before_reset": True}),
    ("gru", {"linear_before_reset": True, "hidden_bias": None} | LENGTHS),
    ("gru", {"activations": ("sigmoid", "relu"), "clip": 0.4}),
    ("rnn", {"activations": ("relu",)}),
]


def build(kind: str, settings: dict, is_integer: bool, *, has_sizes: bool = True):
    """(module of one layer, values of its input): None among the settings is drawn"""
    rng = np.random.default_rng(3)
    width = CELLS[kind].gates * UNITS
    options = {
        name: rng.uniform(-1, 1, SHAPES[name]).astype("float32") if value is None else value
        for name, value in settings.items()
    }
    options = {
        name: relax.const(value) if isinstance(value, np.ndarray | np.generic) else value
        for name, value in options.items()
    }
    weight, scale = rng.uniform(-1, 1, (UNITS, width)).astype("float32"), relax.const(1.0)
    if is_integer:
        weight = rng.integers(-127, 128, weight.shape).astype("int8")
        scale = relax.const(rng.uniform(0.5, 1, width).astype("float32") / 127)
    sizes = [STEPS, BATCH] if has_sizes else [tirx.Var(name, "int64") for name in "TB"]
    x = relax.Var("x", relax.TensorType([*sizes, width], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            layer = getattr(qnn, kind)(x, relax.const(weight), scale, **options)
            y = builder.emit(layer, "y")
            builder.emit_output(y)
        builder.emit_func_output(y)
    return builder.get(), rng.uniform(-2, 2, (STEPS, BATCH, width)).astype("float32")


def run(path, x) -> np.ndarray:
    return run_onnxruntime(path, {"x": x})[0]


def list_kinds(path) -> set[str]:
    return {node.op_type for node in onnx.load(str(path)).graph.node}


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_export__recurrent_layer_with_rounded_states(kind, settings, tmp_path):
    """One hidden state that is rounded differently is wrong by 0.004."""
    mod, x = build(kind, settings, is_integer=True)
    path = export_onnx(mod, tmp_path / "m.onnx")
    (want,) = rq.reference.run(mod, [x])
    np.testing.assert_allclose(run(path, x), want, rtol=1e-5, atol=1e-5)
    assert "Scan" in list_kinds(path)


@pytest.mark.parametrize("kind", CELLS)
def test_export__recurrent_layer_of_symbolic_sizes(kind, tmp_path):
    mod, x = build(kind, LENGTHS if kind == "gru" else {}, is_integer=True, has_sizes=False)
    path = export_onnx(mod, tmp_path / "m.onnx")
    (want,) = rq.reference.run(mod, [x])
    np.testing.assert_allclose(run(path, x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CELLS)
def test_export__recurrent_layer_as_one_operator(kind, tmp_path):
    """The hidden state is not rounded: as a layer whose weight is float."""
    mod, x = build(kind, {}, is_integer=True)
    path = export_onnx(mod, tmp_path / "m.onnx", recurrent=RecurrentForm.OPERATOR)
    assert kind.upper() in list_kinds(path)
    call = mod["main"].body.blocks[0].bindings[0].value
    weight = constant_value(call.args[1]) * constant_value(call.args[2])
    builder = relax.BlockBuilder()
    data = relax.Var("x", relax.TensorType(x.shape, "float32"))
    with builder.function("main", [data]):
        y = builder.emit(getattr(qnn, kind)(data, relax.const(weight.astype("float32"))))
        builder.emit_func_output(y)
    (want,) = rq.reference.run(builder.get(), [x])
    got = run(path, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.abs(got - rq.reference.run(mod, [x])[0]).max() > 1e-4


@pytest.mark.parametrize("settings", [{"cell_clip": 0.2}, {"hidden": np.float32(0.5)}])
def test_export__recurrent_layer_beyond_the_operator(settings, tmp_path):
    """ONNX's LSTM has no clip of the cell, and its states have one number for each unit."""
    mod, x = build("lstm", {"peepholes": None} | settings, is_integer=False)
    path = export_onnx(mod, tmp_path / "m.onnx")
    (want,) = rq.reference.run(mod, [x])
    np.testing.assert_allclose(run(path, x), want, rtol=1e-5, atol=1e-5)


def test_export__recurrent_layer_of_float_is_one_operator(tmp_path):
    mod, x = build("lstm", {"hidden": None}, is_integer=False)
    path = export_onnx(mod, tmp_path / "m.onnx")
    (want,) = rq.reference.run(mod, [x])
    np.testing.assert_allclose(run(path, x), want, rtol=1e-5, atol=1e-5)
    assert "LSTM" in list_kinds(path)


@pytest.mark.parametrize("kind", CELLS)
def test_export__recurrent_layer_is_read_back(kind, tmp_path):
    mod, x = build(kind, LENGTHS, is_integer=True)
    again, _ = rq.load(export_onnx(mod, tmp_path / "m.onnx"))
    (want,), (got,) = (rq.reference.run(each, [x]) for each in (mod, again))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
