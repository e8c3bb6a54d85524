"""torch.export programs."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.errors import MissingDependencyError, ModelError
from relayquant.formats.load import load
from relayquant.formats.readers import import_torch
from relayquant.ir.rewrite.graph import call_name
from relayquant.stages.preparation import prepare_module


def test_torch_missing__extra_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'relayquant\[torch\]'"):
        load(tmp_path / "model.pt2")


def test_no_archive__refused(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "model.pt2"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match=r"no torch.export archive"):
        import_torch(path)


@pytest.mark.parametrize(
    ("name", "shape", "gone"),
    [
        ("resnet20_cifar10", (1, 3, 32, 32), "relax.nn.batch_norm"),
        ("kwt1_mfcc", (1, 98, 40), "relax.broadcast_to"),
    ],
)
def test_real_model__same_answer_as_its_onnx_twin(name, shape, gone, shared_data):
    pytest.importorskip("torch")
    ort = pytest.importorskip("onnxruntime")
    mod, params = load(shared_data(f"{name}.pt2"))
    assert params == {}
    prepared = prepare_module(mod)
    bindings = prepared["main"].body.blocks[0].bindings
    operators = [call_name(b.value) for b in bindings if isinstance(b.value, Call)]
    assert len(operators) == len(bindings)
    assert gone not in operators
    assert "relax.call_tir" not in operators
    names = [b.var.name for b in bindings]
    assert len(set(names)) == len(names)
    assert set(names) <= set(json.loads(prepared["main"].attrs["relayquant.sources"]))
    assert not any(name.startswith("lv") for name in names)
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    session = ort.InferenceSession(
        str(shared_data(f"{name}.onnx")), providers=["CPUExecutionProvider"]
    )
    (expected,) = session.run(None, {session.get_inputs()[0].name: x})
    machine = relax.VirtualMachine(tvm.compile(prepared, "llvm"), tvm.cpu())
    actual = machine["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
