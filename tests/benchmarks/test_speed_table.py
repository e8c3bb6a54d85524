"""The tables of times are written from measured times, and the pages have a place for them."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import pytest
import speed_table
from models import build_transformer
from speed_table import Machine
from tvm.target import Target

from relayquant.analysis.speed.engines import Candidate, Engine
from relayquant.analysis.speed.latency import Latency
from relayquant.analysis.speed.other_engines import CandidateModels
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import host_config, list_instructions, resolve_target
from relayquant.codegen.kernels.isa.x86 import VNNI512
from relayquant.config import Precision

TIMES = {
    "relayquant int8": Latency(2e-3, 4e-3, 4e-3, 9),
    "relayquant float": Latency(8e-3, 8e-3, 8e-3, 9),
    "openvino int8, NNCF": Latency(5e-3, 6e-3, 6e-3, 9),
    "openvino int8, our QDQ": Latency(3e-3, 7e-3, 6e-3, 9),
    "openvino float": Latency(6e-3, 8e-3, 8e-3, 9),
}
FIELDS = {name: asdict(row) for name, row in TIMES.items()}
OTHER_FIELDS = {
    "relayquant int8": asdict(Latency(1e-3, 1e-3, 1e-3, 9)),
    "onnxruntime int8": asdict(Latency(2.5e-3, 5e-3, 5e-3, 9)),
}
FASTER_FIELDS = {"onnxruntime int8": asdict(Latency(2.5e-3, 5e-3, 5e-3, 9))}
RESULTS = {
    "a CPU": {
        "versions": ["openvino 1", "onnxruntime 2"],
        "times": {"ResNet-18": {"1": FIELDS}},
    },
    "another": {
        "versions": ["openvino 3"],
        "times": {"ResNet-18": {"2": OTHER_FIELDS}, "KWT-1": {"2": OTHER_FIELDS}},
    },
}


def test_format_ratios__against_the_faster_of_a_peers_models():
    assert speed_table.format_ratios(TIMES, "int8") == "2.00 (1.50, 1.75) (-)"
    assert speed_table.format_ratios(TIMES, "float") == "8.00 (0.75, 1.00) (-)"


def test_format_tables__one_for_each_cpu():
    """A table has the rows and threads that were measured on its CPU."""
    table = speed_table.format_tables(RESULTS, ["ResNet-50", "KWT-1", "ResNet-18"], ("int8",))
    assert table.splitlines()[-12:] == [
        "**a CPU** (openvino 1, onnxruntime 2):",
        "",
        "| model | int8, 1 thread |",
        "|---|---|",
        "| ResNet-18 | 2.00 (1.50, 1.75) (-) |",
        "",
        "**another** (openvino 3):",
        "",
        "| model | int8, 2 threads |",
        "|---|---|",
        "| KWT-1 | 1.00 (-) (2.50, 5.00) |",
        "| ResNet-18 | 1.00 (-) (2.50, 5.00) |",
    ]


def test_format_tables__all_kinds():
    results = {"a CPU": RESULTS["a CPU"]}
    table = speed_table.format_tables(results, ["ResNet-18"], ("int8", "float"))
    assert "| model | int8, 1 thread | float, 1 thread |" in table
    assert "| ResNet-18 | 2.00 (1.50, 1.75) (-) | 8.00 (0.75, 1.00) (-) |" in table


def test_format_summary__a_column_for_each_cpu():
    """The parentheses have the faster of the rivals, whichever it is."""
    both = {"ResNet-18": {"1": FIELDS | FASTER_FIELDS}}
    results = {"both (x +amx-int8 -sgx)": {"times": both}} | RESULTS
    table = speed_table.format_summary(results, ["KWT-1", "ResNet-18"]).splitlines()
    assert "1 thread / 2 threads" in table[0]
    assert table[2:6] == [
        "| model | both (x), with AMX | a CPU | another |",
        "|---|---|---|---|",
        "| KWT-1 | - | - | - / 1.00 (- / 2.50) |",
        "| ResNet-18 | 2.00 / - (1.25 / -) | 2.00 / - (1.50 / -) | - / 1.00 (- / 2.50) |",
    ]


def test_open_entry__keeps_other_cpus(monkeypatch, tmp_path):
    """Another row of a CPU joins its rows. With other versions, its rows are dropped, and only
    its rows.
    """
    file = tmp_path / "results.json"
    monkeypatch.setattr(speed_table, "list_versions", lambda _: ["openvino 3"])
    results = {}
    for cpu, row in (("a", "first"), ("b", "first"), ("a", "second")):
        results = speed_table.read_results(file)
        speed_table.open_entry(results, cpu)["times"][row] = {"1": FIELDS}
        speed_table.write_results(results, file)
    before = speed_table.read_results(file)
    assert {cpu: [*entry["times"]] for cpu, entry in before.items()} == {
        "a": ["first", "second"],
        "b": ["first"],
    }
    monkeypatch.setattr(speed_table, "list_versions", lambda _: ["openvino 4"])
    assert speed_table.open_entry(results, "a") == {"versions": ["openvino 4"], "times": {}}
    assert results["b"] == before["b"]


def test_machine_without_amx__is_named_without_its_tiles(monkeypatch):
    monkeypatch.setattr(speed_table, "name_cpu", lambda: "Xeon (rocketlake +amx-int8 +avxvnni)")
    assert speed_table.machine_without_amx().cpu == "Xeon (rocketlake +avxvnni), without AMX"


@pytest.mark.parametrize(
    "config",
    [
        {"kind": "llvm", "mcpu": "rocketlake", "mattr": ["+amx-int8", "+avx512bf16"]},
        {"kind": "llvm", "mcpu": "emeraldrapids"},
        {"kind": "llvm", "mcpu": "diamondrapids", "mattr": ["-avx10.2"]},
    ],
)
def test_target_without_amx__has_all_the_rest(config):
    """What LLVM lists without AMX is what it lists with AMX, less AMX."""
    config = {**config, "mtriple": "x86_64-linux-gnu"}
    target = speed_table.target_without_amx(config)
    full = list_instructions(Target(config))
    assert "amx-int8" in full
    assert list_instructions(target) == {name for name in full if not name.startswith("amx")}
    assert select_isa(target) is VNNI512


@pytest.mark.slow
def test_prepare_row__machines_share_the_rivals(monkeypatch, tmp_path):
    """Ours is compiled for each machine, once; the rivals are prepared once."""
    prepared, targets = [], []

    def prepare_candidates(*_):
        prepared.append("rivals")
        (tmp_path / "rival.onnx").touch()
        return CandidateModels(
            {"onnxruntime float": Candidate(Engine.ONNXRUNTIME, tmp_path / "rival.onnx")}, {}
        )

    def compile_module(mod, target):
        targets.append(target)
        return compile_for(mod, target)

    compile_for = speed_table.compile_module
    monkeypatch.setattr(speed_table, "prepare_candidates", prepare_candidates)
    monkeypatch.setattr(speed_table, "compile_module", compile_module)
    monkeypatch.setitem(speed_table.MODELS, "kwt1", partial(build_transformer, 1, 32, 2, 8))
    other = resolve_target({**host_config(), "num-cores": 1})
    machines = [Machine("a CPU"), Machine("a CPU, less", "less", other)] * 2
    found = [speed_table.prepare_row("KWT-1", tmp_path, machine) for machine in machines]
    assert prepared == ["rivals"]
    assert targets == [None, None, other, other]
    for (candidates, inputs), folder in zip(found, [tmp_path, tmp_path / "less"] * 2, strict=True):
        assert {name: each.path.parent for name, each in candidates.items()} == {
            "onnxruntime float": tmp_path,
            "relayquant int8": folder,
            "relayquant float": folder,
        }
        assert all(each.path.exists() for each in candidates.values())
        assert candidates["relayquant float"].precision is Precision.FLOAT32
        assert [*inputs] == ["input"]


def test_prepare_row__bf16_has_float_models_only(monkeypatch, tmp_path):
    """OpenVINO is asked for the same precision. Nothing is quantized."""
    precisions = []

    def compile_module(mod, target, precision):
        precisions.append(precision)
        return compile_for(mod, target)  # on any CPU

    compile_for = speed_table.compile_module
    monkeypatch.setattr(speed_table, "compile_module", compile_module)
    monkeypatch.setattr(speed_table, "quantize_quickly", None)
    monkeypatch.setitem(speed_table.MODELS, "bert", partial(build_transformer, 1, 32, 2, 8))
    candidates, inputs = speed_table.prepare_row("BERT, 3 layers, bf16", tmp_path, Machine("a CPU"))
    assert precisions == [Precision.BF16]
    assert {name: each.precision for name, each in candidates.items()} == {
        "openvino float": Precision.BF16,
        "relayquant float": Precision.BF16,
    }
    assert [*inputs] == ["input"]


def test_format_pages__are_written():
    """The pages hold what docs/speed.json says."""
    for page, table in speed_table.format_pages(
        speed_table.read_results(speed_table.RESULTS)
    ).items():
        text = page.read_text(encoding="utf-8")
        assert speed_table.replace_table(text, table) == text


@pytest.mark.parametrize("page", ["docs/speed.md", "README.md"])
def test_replace_table__leaves_the_rest_of_a_page(page):
    text = (speed_table.ROOT / page).read_text(encoding="utf-8")
    changed = speed_table.replace_table(text, "| a table |")
    assert "| a table |" in changed
    assert speed_table.replace_table(changed, "| another |").replace("| another |", "") == (
        speed_table.replace_table(text, "")
    )
    begin, end = speed_table.find_marks("speed")
    before, after = text.split(begin)[0], text.split(end)[1]
    assert changed.startswith(before)
    assert changed.endswith(after)


def test_rows__name_models_that_exist():
    assert {row.model for row in speed_table.ROWS.values()} <= set(speed_table.MODELS)
    assert set(speed_table.SHOWN) <= set(speed_table.ROWS)
