"""Engines in processes of their own: what they answer, and how they fail."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from relayquant.analysis.speed import engine_process, openvino_baseline
from relayquant.analysis.speed.engines import Candidate, Engine, EngineProcess, measure_engines
from relayquant.analysis.speed.other_engines import OTHER_ENGINES, list_versions, prepare_candidates
from relayquant.demo import load_digits
from relayquant.errors import MissingDependencyError, ModelError
from relayquant.formats.load import load
from relayquant.stages.compilation import compile as compile_module

INPUTS = {"image": np.random.default_rng(0).normal(size=(1, 1, 8, 8)).astype("float32")}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, float, as a library."""
    path = tmp_path_factory.mktemp("library") / "digits.so"
    mod, _ = load(load_digits().model_path)
    compile_module(mod).export_library(str(path))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("interval", [0.0, 0.02])
def test_measure_engines__one_process_each(library, interval):
    pytest.importorskip("onnxruntime")
    candidates = {
        "ours": Candidate(Engine.RELAYQUANT, library),
        "ort": Candidate(Engine.ONNXRUNTIME, load_digits().model_path),
        "damaged": Candidate(Engine.ONNXRUNTIME, library),
    }
    found = measure_engines(candidates, INPUTS, threads=1, rounds=2, interval=interval)
    assert list(found.latencies) == ["ours", "ort"]
    for row in found.latencies.values():
        assert 0 < row.best <= row.median
        assert row.runs >= 2
    assert list(found.failures) == ["damaged"]
    assert "digits.so: " in found.failures["damaged"]


@pytest.mark.slow
def test_measure_engines__processes_get_the_environment(library):
    """Python cannot start with an encoding that it does not know."""
    candidates = {"ours": Candidate(Engine.RELAYQUANT, library)}
    environment = {"PYTHONIOENCODING": "unheard-of"}
    found = measure_engines(candidates, INPUTS, threads=1, rounds=1, environment=environment)
    assert "unknown encoding: unheard-of" in found.failures["ours"]


def test_time_turn__runs_start_at_intervals(monkeypatch):
    """A run that takes longer than the interval is followed by the next one at once."""
    clock, starts, lengths = [0.0], [], iter([0.002, 0.003, 0.03, 0.001, 0.01])

    def run() -> None:
        starts.append(round(clock[0], 6))
        clock[0] += next(lengths)

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(engine_process.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(engine_process.time, "sleep", sleep)
    timings = engine_process.time_turn(run, 0.09, 0.02)
    assert starts == [0.0, 0.02, 0.04, 0.07, 0.09]
    assert [round(passed, 6) for passed, _ in timings] == [0.003, 0.03, 0.001, 0.01]


@pytest.mark.parametrize(
    ("precision", "hint"), [("float32", "f32"), ("bf16", "bf16"), (None, None)]
)
def test_load_openvino__requests_the_precision_of_a_float_model(monkeypatch, precision, hint):
    openvino = pytest.importorskip("openvino")
    asked = []

    class Core:
        def read_model(self, path):
            return MagicMock(is_dynamic=lambda: False)

        def compile_model(self, model, device, settings):
            asked.append(settings.get("INFERENCE_PRECISION_HINT"))
            return MagicMock()

    monkeypatch.setattr(openvino, "Core", Core)
    engine_process.load_openvino("model.onnx", precision, {}, 1)
    assert asked == [hint]


def test_engine_process__ends_while_it_is_timed(library, tmp_path):
    """Whatever ends it, the message has its code; the block leaves no process behind."""
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, **INPUTS)
    with EngineProcess(Candidate(Engine.RELAYQUANT, library), inputs, 1) as process:
        process.wait_ready()
        process.process.kill()
        with pytest.raises(ModelError, match=r"process of relayquant ended with code -9"):
            process.take_turn()
    assert process.process.returncode == -9


@pytest.mark.parametrize("name", OTHER_ENGINES)
def test_rivals__missing_package_names_its_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'relayquant\[{name}\]'"):
        OTHER_ENGINES[name].check()


def test_quantize_with_nncf__missing(monkeypatch, tmp_path):
    monkeypatch.setattr(openvino_baseline, "import_openvino", lambda: None)
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(MissingDependencyError, match="pip install nncf"):
        openvino_baseline.quantize_with_nncf(Path("model.onnx"), [INPUTS], tmp_path)


def test_list_versions__of_what_is_there():
    found = list_versions(list(OTHER_ENGINES.values()))
    assert found[0].startswith("relayquant ")
    assert len({line.split()[0] for line in found}) == len(found)


def test_prepare_rivals__a_quantizer_that_fails_is_named(tmp_path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    mod, _ = load(load_digits().model_path)
    rivals = [OTHER_ENGINES["onnxruntime"]]
    found = prepare_candidates(rivals, tmp_path / "broken.onnx", mod, [INPUTS], tmp_path)
    assert "ONNX Runtime cannot quantize" in found.failures["onnxruntime int8"]
    assert found.candidates["onnxruntime float"].path == tmp_path / "broken.onnx"
    assert "onnxruntime int8" not in found.candidates
