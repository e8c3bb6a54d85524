"""The table of language models: its cells, and the Llama that it measures."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import language_table
import numpy as np
import onnx
import pytest
from encoders import Encoder, build_encoder
from language_table import Makers, Products
from llama_onnx import Llama, llama_inputs, save_llama
from models import build_transformer
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from speed_table import Machine, replace_table

from relayquant.analysis.speed.engines import Engine
from relayquant.analysis.speed.latency import Latency
from relayquant.codegen.kernels.isa.target import host_config, resolve_target
from relayquant.stages.compilation import compile as compile_module
from relayquant_runtime import Library

TIMES = {
    "relayquant": Latency(2e-3, 4e-3, 4e-3, 9),
    "openvino": Latency(3e-3, 8e-3, 6e-3, 9),
    "bandwidth": Latency(1.8e-3, 4e-3, 6e-3, 9),
}


def test_format_tables__times_of_one_product():
    times = {name: asdict(row) for name, row in TIMES.items()}
    measured = {"GEMV 4096x11008": {"1": times}}
    results = {"a CPU": {"versions": ["openvino 1"], "times": measured}}
    assert language_table.format_tables(results).splitlines()[-5:] == [
        "**a CPU** (openvino 1):",
        "",
        "| 4-bit weights, or as it says | 1 thread | MB |",
        "|---|---|---|",
        "| GEMV 4096x11008 | 0.40 (1.50, 2.00) (0.90, 1.00) |  |",
    ]


def test_format_memory__most_of_each():
    memory = {
        name: {"now": 1, "peak": peak}
        for name, peak in (("onnxruntime", 400e6), ("relayquant", 207.4e6), ("openvino", 448e6))
    }
    assert language_table.format_memory(memory) == "207 (448, 400)"
    assert language_table.format_memory({"relayquant": memory["relayquant"]}) == "207 (-, -)"


def test_products__bytes_of_codes_and_scales():
    assert Products(1, 64, 10, 3).weight_bytes == 10 * (32 + 2 * 2)


@pytest.mark.slow
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_build_encoder__runs_in_integers(is_dynamic, tmp_path):
    """The library gives what the float model does, nearly, and is not it."""
    encoder = Encoder(partial(build_transformer, 1, 32, 2, 8), is_dynamic)
    compile_module(build_encoder(encoder, tmp_path)).export_library(str(tmp_path / "own.so"))
    library = Library(tmp_path / "own.so")
    (x,) = encoder.draw_batches(tmp_path, 1)[0].values()
    (got,) = library.run("main", [x])
    (expected,) = ReferenceEvaluator(str(tmp_path / "float.onnx")).run(None, {"input": x})
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert 1e-4 < error < 0.1


def test_prepare_row__machines_share_the_rivals(monkeypatch, tmp_path):
    """Our libraries are compiled for each machine, once; a rival's file is made once."""
    made, targets = [], []

    def save(_, folder):
        made.append("openvino")
        (folder / "model.xml").touch()
        return folder / "model.xml"

    def compile_module(mod, target):
        targets.append(target)
        return compile_for(mod, target)

    compile_for = language_table.compile_module
    monkeypatch.setattr(language_table, "compile_module", compile_module)
    makers = Makers(language_table.GEMV_MAKERS.own, {Engine.OPENVINO: save})
    monkeypatch.setitem(language_table.ROWS, "GEMV", (Products(1, 64, 16, 2), makers))
    other = resolve_target({**host_config(), "num-cores": 1})
    machines = [Machine("a CPU"), Machine("a CPU, less", "less", other)] * 2
    found = [language_table.prepare_row("GEMV", tmp_path, machine) for machine in machines]
    assert made == ["openvino"]
    assert targets == [None, None, other, other]
    for (candidates, inputs), folder in zip(found, [tmp_path, tmp_path / "less"] * 2, strict=True):
        assert {name: each.path for name, each in candidates.items()} == {
            "relayquant": folder / "relayquant.so",
            "bandwidth": folder / "bandwidth.so",
            "openvino": tmp_path / "model.xml",
        }
        assert all(each.path.exists() for each in candidates.values())
        assert [*inputs] == ["x0", "x1"]


def test_page__has_the_tables():
    text = language_table.PAGE.read_text(encoding="utf-8")
    table = language_table.format_tables(language_table.read_results(language_table.RESULTS))
    assert replace_table(text, table, "language") == text


@pytest.mark.parametrize(("rows", "seen"), [(1, 5), (6, 0)])
def test_save_llama__groups_round_the_float_weights(rows, seen, tmp_path):
    """The float model runs; codes of MatMulNBits, unpacked by its specification, are its weights
    to half a step.
    """
    llama = Llama(rows, seen, width=32, hidden=64, layers=1, heads=2, vocabulary=32)
    models = []
    for group, file in ((None, "float.onnx"), (32, "groups.onnx")):
        save_llama(llama, group, tmp_path / file)
        models.append(onnx.load(tmp_path / file))
    found = ReferenceEvaluator(models[0]).run(None, llama_inputs(llama))
    assert found[0].shape == (1, rows, 32)
    assert found[1].shape == (1, 2, rows + seen, 16)
    assert np.isfinite(found[0]).all()
    floats, groups = (read_products(model) for model in models)
    assert len(floats) == len(groups) == 8
    for (weight,), (codes, scale) in zip(floats, groups, strict=True):
        units = len(codes)
        both = np.stack([codes & 15, codes >> 4], -1).reshape(units, -1, 32).astype("float32")
        steps = scale.reshape(units, -1, 1)
        error = (both - 8) * steps - weight.T.reshape(both.shape)
        assert (np.abs(error) <= steps * 0.501).all()


def read_products(model: onnx.ModelProto) -> list[list[np.ndarray]]:
    """Constants of each product by a weight, in order."""
    constants = {c.name: numpy_helper.to_array(c) for c in model.graph.initializer}
    return [
        [constants[name] for name in node.input[1:]]
        for node in model.graph.node
        if node.op_type.startswith("MatMul") and node.input[1] in constants
    ]
