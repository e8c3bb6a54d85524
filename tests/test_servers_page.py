"""The programs of docs/how_to/servers.md, with stand-ins for the servers' packages."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from float_models import build_model, draw_batches

import relayquant as rq

PAGE = Path(__file__).parents[1] / "docs" / "how_to" / "servers.md"
MOD = build_model(lambda emit, x: emit.dense("d", x, 4), (2, 8))
(DATA,) = draw_batches(MOD, 1)


def read_program(name: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    (program,) = [block for block in blocks if f"class {name}" in block]
    return program


class Tensor:
    """An input or output of either server."""

    def __init__(self, name, *values):
        self.name, self.values = name, values

    def as_numpy(self):
        return self.values[0]

    def set_data_from_numpy(self, array, binary_data):
        self.values = (array,)


@pytest.fixture
def bundle(tmp_path) -> Path:
    rq.export_bundle(MOD, tmp_path / "bundle")
    return tmp_path / "bundle"


def test_triton__answers_requests(bundle, monkeypatch):
    stub = types.ModuleType("triton_python_backend_utils")
    stub.Tensor = Tensor
    stub.TritonError = type("TritonError", (Exception,), {"INVALID_ARG": 3})
    stub.InferenceResponse = lambda tensors=(), error=None: (tensors, error)
    stub.get_input_tensor_by_name = lambda request, name: request[name]
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(sys, "path", [*sys.path])
    program = {"__file__": str(bundle.parent / "model.py")}
    exec(read_program("TritonPythonModel"), program)
    model = program["TritonPythonModel"]()
    model.initialize({})
    wrong = DATA["x"][:, :3]
    right, refused = model.execute([{"x": Tensor("x", x)} for x in (DATA["x"], wrong)])
    ((output,), error) = right
    assert (output.name, error) == ("output0", None)
    np.testing.assert_allclose(output.values[0], rq.reference.run(MOD, DATA)[0], atol=1e-5)
    assert "input 'x' of 'main' is float32 of shape (2, 3)" in refused[1].args[0]


def test_kserve__answers_requests(bundle, monkeypatch):
    stub = types.ModuleType("kserve")
    stub.Model = type("Model", (), {"__init__": lambda self, name: setattr(self, "name", name)})
    stub.InferOutput = Tensor
    stub.InferResponse = lambda number, name, outputs: (number, name, outputs)
    stub.errors = types.SimpleNamespace(InvalidInput=type("InvalidInput", (ValueError,), {}))
    monkeypatch.setitem(sys.modules, "kserve", stub)
    program = {}
    exec(read_program("BundleModel"), program)
    model = program["BundleModel"]("digits", bundle)
    assert model.load()
    number, name, (output,) = model.predict(
        types.SimpleNamespace(id="7", inputs=[Tensor("x", DATA["x"])])
    )
    assert (number, name, output.name) == ("7", "digits", "output0")
    np.testing.assert_allclose(output.values[0], rq.reference.run(MOD, DATA)[0], atol=1e-5)
    for inputs, message in (
        ([], "the number of inputs of 'main' is 0"),
        ([Tensor("x", DATA["x"][:1, :3])], r"of shape \(1, 3\)"),
    ):
        with pytest.raises(stub.errors.InvalidInput, match=message):
            model.predict(types.SimpleNamespace(id="8", inputs=inputs))
