"""The model of a module may have any name: whatever takes a module takes it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from float_models import build_model, draw_batches
from tvm import relax
from tvm.relax.frontend import nn
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant import cli
from relayquant.base.runtime import Executor
from relayquant.errors import ModelError
from relayquant.ir.rewrite.entry import find_entry, name_main, rename_function


def small_model() -> tvm.IRModule:
    def body(emit, x):
        return emit("out", relax.op.nn.relu(emit.dense("dense", x, 4)))

    return build_model(body, (2, 8))


MOD = small_model()
DATA = draw_batches(MOD, 4)
FORWARD = rename_function(MOD, "main", "forward")
QUANTIZED = rq.quantize(MOD, None, DATA, backend="x86", effort="fast", guard=rq.config.Guard.OFF)
QUANTIZED_FORWARD = rename_function(QUANTIZED, "main", "forward")
REFERENCE = rq.convert_to_reference(
    rq.calibrate(rq.prepare(MOD, None, backend="x86", effort="fast"), DATA)
)


def score(expected: Any, got: Any) -> float:
    return -float(np.abs(expected[0] - got[0]).max())


def rename_model(mod: tvm.IRModule) -> tvm.IRModule:
    return rename_function(mod, find_entry(mod), "main")


def torch_tensor(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array)


def compare_torch(name: str) -> str:
    """A module of PyTorch beside its integer module, which has this name."""
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
    with torch.no_grad():
        for value in net.parameters():
            value.fill_(0.125)
    data = [(torch_tensor(row["x"]),) for row in DATA]
    qmod = rq.torch.quantize(net, data[0], data, backend="x86", effort="fast", callbacks=())
    return str(rq.torch.compare(net, rename_function(qmod, "main", name), data))


def read_file(path: Path) -> bytes:
    return path.read_bytes()


def read_entry(folder: Path) -> Any:
    described = json.loads((folder / "bundle.json").read_text())
    return described["functions"][described["entry"]]


#: function that takes a module -> how it is called with (float module, quantized module, folder),
#: and what of its result has to be the same whatever the name
ENTRIES: dict[Callable[..., Any], Callable[[Any, Any, Path], Any]] = {
    rq.prepare: lambda mod, qmod, _: rq.prepare(mod).mod.script(),
    rq.quantize: lambda mod, qmod, _: [
        rq.quantize(mod, None, DATA, effort="fast", metric=metric).script()
        for metric in (None, score)
    ],
    rq.compile: lambda mod, qmod, _: [type(rq.compile(m)) for m in (mod, qmod)],
    rq.lower: lambda mod, qmod, _: rq.lower(
        REFERENCE if find_entry(mod) == "main" else rename_function(REFERENCE, "main", "forward"),
        "x86",
    ).script(),
    rq.compress_weights: lambda mod, qmod, _: rename_model(
        rq.compress_weights(mod, group_size=None)
    ).script(),
    rq.torch.finetune: lambda mod, qmod, _: rq.torch.finetune(
        mod, None, DATA, steps=2, effort="fast"
    ).script(),
    rq.torch.from_relax: lambda mod, qmod, _: [
        (name, value.tolist()) for name, value in rq.torch.from_relax(mod).state_dict().items()
    ],
    rq.report: lambda mod, qmod, _: rq.report(mod, None, qmod, DATA, rank=False).html,
    rq.verify: lambda mod, qmod, _: [rq.verify(m, DATA[0]).is_equal for m in (mod, qmod)],
    rq.compare: lambda mod, qmod, _: str(rq.compare(mod, None, qmod, DATA)),
    rq.ledger: lambda mod, qmod, _: rq.ledger(qmod).to_dict(),
    rq.lint: lambda mod, qmod, _: rq.lint(mod, None, DATA),
    rq.analysis.measure_growth: lambda mod, qmod, _: rq.analysis.measure_growth(mod, None, DATA),
    rq.analysis.accumulator_report: lambda mod, qmod, _: (
        rq.analysis.accumulator_report(qmod, DATA).rows
    ),
    rq.equalize_layers: lambda mod, qmod, _: rq.equalize_layers(mod)[0].script(),
    rq.smooth_activations: lambda mod, qmod, _: rq.smooth_activations(mod, None, DATA)[0].script(),
    rq.export_onnx: lambda mod, qmod, folder: read_file(
        rq.export_onnx(qmod, folder / "model.onnx")
    ),
    rq.export_bundle: lambda mod, qmod, folder: [
        read_entry(rq.export_bundle(each, folder / "deploy")) for each in (mod, qmod)
    ],
    rq.save_module: lambda mod, qmod, folder: rename_model(
        rq.load(rq.save_module(qmod, folder / "model.rqm"))[0]
    ).script(),
    rq.relay.to_text: lambda mod, qmod, _: rq.relay.to_text(qmod)[0],
    rq.reference.run: lambda mod, qmod, _: [
        rq.reference.run(m, DATA[0])[0].tolist() for m in (mod, qmod)
    ],
    rq.get_state: lambda mod, qmod, _: rq.get_state(qmod),
    rq.with_state: lambda mod, qmod, _: rename_model(rq.with_state(qmod, [])).script(),
    rq.torch.as_module: lambda mod, qmod, _: rq.torch.as_module(qmod)(
        torch_tensor(DATA[0]["x"])
    ).tolist(),
    rq.torch.compare: lambda mod, qmod, _: compare_torch(find_entry(qmod) or ""),
    rq.reference.run_values: lambda mod, qmod, _: [*rq.reference.run_values(qmod, DATA[0])],
}


def list_takers() -> set[Callable[..., Any]]:
    """The public functions with a module among their parameters."""
    return {
        found
        for home in (rq, rq.analysis, rq.reference, rq.relay, rq.torch)
        for found in (getattr(home, name) for name in getattr(home, "__all__", dir(home)))
        if inspect.isfunction(found)
        and any(
            re.search(r"\b(IRModule|Model)\b", str(p.annotation))
            for p in inspect.signature(found).parameters.values()
        )
    }


def test_entries__are_all_that_take_a_module():
    assert list_takers() == set(ENTRIES)


@pytest.mark.sample(3)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_entry__takes_a_model_of_any_name(entry, tmp_path):
    if entry.__module__.startswith("relayquant.torch"):
        pytest.importorskip("torch")
    before = FORWARD.script(show_meta=True)
    found = ENTRIES[entry](FORWARD, QUANTIZED_FORWARD, tmp_path)
    assert found == ENTRIES[entry](MOD, QUANTIZED, tmp_path)
    assert FORWARD.script(show_meta=True) == before


@pytest.mark.parametrize("module", [FORWARD, QUANTIZED_FORWARD], ids=["float", "quantized"])
def test_compile__keeps_the_name(module):
    found = Executor(rq.compile(module)).run("forward", [DATA[0]["x"]])
    np.testing.assert_allclose(found, rq.reference.run(module, DATA[0]), atol=1e-5)


@pytest.mark.slow
def test_commands__take_a_model_of_any_name(tmp_path, capsys):
    np.savez(tmp_path / "data.npz", x=np.concatenate([row["x"] for row in DATA]))
    data = ["--data", str(tmp_path / "data.npz")]
    model, int8 = str(tmp_path / "model.json"), str(tmp_path / "int8.json")
    (tmp_path / "model.json").write_text(tvm.ir.save_json(FORWARD))
    (tmp_path / "renamed.json").write_text(tvm.ir.save_json(QUANTIZED_FORWARD))
    for command in (
        ["lint", model, *data],
        ["quantize", model, *data, "-o", int8],
        ["inspect", model],
        ["inspect", str(tmp_path / "renamed.json")],
        ["compare", model, int8, *data],
        ["compare", model, str(tmp_path / "renamed.json"), *data],
        ["sensitivity", model, *data],
        ["export", model, "-o", str(tmp_path / "model.so")],
        ["bench", model, *data],
    ):
        assert cli.main(command) == 0, capsys.readouterr().err


class Net(nn.Module):
    def __init__(self) -> None:
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return nn.op.relu(self.fc(x))


def test_frontend_nn__is_quantized_and_compiled_as_exported():
    mod, named = Net().export_tvm({"forward": {"x": nn.spec.Tensor((2, 8), "float32")}})
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(p.shape).astype("float32") for name, p in named}
    x = DATA[0]["x"]
    want = np.maximum(x @ weights["fc.weight"].T + weights["fc.bias"], 0)
    for params in (weights, {"forward": [*weights.values()]}, {"main": [*weights.values()]}):
        qmod = rq.quantize(mod, params, DATA, effort="fast", guard=rq.config.Guard.OFF)
        np.testing.assert_allclose(rq.reference.run(qmod, x)[0], want, atol=0.1)
    # Weights without values are inputs of what is compiled.
    found = Executor(rq.compile(mod)).run("forward", [x, *weights.values()])
    np.testing.assert_allclose(found[0], want, atol=1e-5)


def several(**names: str) -> tvm.IRModule:
    """Functions by the names they have as keys, public where the value says so."""
    mod = tvm.IRModule()
    for name, kind in names.items():
        func = small_model()["main"].without_attr("global_symbol")
        mod[name] = func.with_attr("global_symbol", name) if kind == "public" else func
    return mod


@pytest.mark.parametrize(
    ("functions", "entry"),
    [
        ({"main": "public", "other": "public"}, "main"),
        ({"main": "private", "other": "public"}, "main"),
        ({"forward": "public", "helper": "private"}, "forward"),
        ({"forward": "private"}, "forward"),
        ({"forward": "public", "decode": "public"}, None),
        ({"forward": "private", "decode": "private"}, None),
        ({}, None),
    ],
)
def test_find_entry__main_or_the_only_public_function(functions, entry):
    mod = several(**functions)
    assert find_entry(mod) == entry
    if entry is not None:
        tvm.ir.assert_structural_equal(name_main(mod)["main"].body, mod[entry].body)
        return
    with pytest.raises(ModelError, match="no Relax function 'main'") as raised:
        rq.prepare(mod)
    assert all(name in str(raised.value) for name in functions)


def test_find_entry__a_kernel_called_main_is_none():
    mod = several(forward="public")
    mod["main"] = relax.transform.LegalizeOps()(MOD)["matmul"].with_attr("global_symbol", "main")
    with pytest.raises(ModelError, match=r"functions: forward, main"):
        name_main(mod)


def test_rename_function__calls_follow():
    @I.ir_module
    class Before:
        @R.function(private=True)
        def block(x: R.Tensor((2, 8), "float32")):
            return R.exp(x)

        @R.function
        def forward(x: R.Tensor((2, 8), "float32")):
            cls = Before
            y: R.Tensor((2, 8), "float32") = cls.block(x)
            return y

    renamed = rename_function(Before, "block", "part")
    assert {gvar.name_hint for gvar in renamed.get_global_vars()} == {"part", "forward"}
    assert rq.reference.run(renamed, DATA[0])[0] == pytest.approx(np.exp(DATA[0]["x"]))
