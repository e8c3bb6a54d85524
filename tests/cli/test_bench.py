"""`relayquant bench` from end to end on the built-in example."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx_runtime import run_onnxruntime

from relayquant import cli
from relayquant.analysis.speed.engines import Comparison
from relayquant.analysis.speed.latency import Latency
from relayquant.analysis.speed.onnxruntime_baseline import quantize_with_onnxruntime
from relayquant.analysis.speed.openvino_baseline import has_nncf
from relayquant.analysis.speed.other_engines import OTHER_ENGINES
from relayquant.analysis.speed.profile import OperatorTime, Profile
from relayquant.cli.commands import bench
from relayquant.cli.files import load_model
from relayquant.cli.parsers import parse_words
from relayquant.demo import load_digits
from relayquant.ir.rewrite.bind import bind_model

QUICK = ["--repeat", "1", "--operators", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's model and ten of its digits."""
    folder = tmp_path_factory.mktemp("digits")
    demo = load_digits()
    (folder / "digits.onnx").write_bytes(demo.model_path.read_bytes())
    np.savez(folder / "digits.npz", image=demo.images[:10])
    return folder


@pytest.mark.slow
def test_bench__random_inputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", str(folder / "digits.onnx"), *QUICK]) == 0
    text = capsys.readouterr().out
    assert "inputs: random numbers" in text
    assert re.search(r"^relayquant int8(\s+[\d.]+){7}\s*$", text, re.MULTILINE)
    assert re.search(r"^relayquant float(\s+[\d.]+){7}\s*$", text, re.MULTILINE)
    assert re.search(r"^qnn_conv2d\s+\d+\s+[\d.]+\s+[\d.]+%", text, re.MULTILINE)
    assert "1 thread" in text
    assert "onnxruntime" not in text


def test_bench__takes_the_threads_of_the_environment(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    few = ["--repeat", "1", "--operators", "0"]
    assert cli.main(["bench", str(folder / "digits.onnx"), *few, "--json"]) == 0
    assert '"threads": 1' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kernels", "text"),
    [
        (60e-6, "outside kernels: 40 us of 100 us, 3 calls"),
        (118e-6, "the kernels took 18 us more than the whole run, 100 us"),
    ],
)
def test_outside__is_no_negative_time(kernels: float, text: str) -> None:
    profile = Profile((OperatorTime("value", "kernel", kernels, 0),), 100e-6, 3)
    said = bench.describe_outside(profile)
    assert text in said
    assert "-" not in said


@pytest.mark.slow
def test_bench__against_onnxruntime(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    arguments = ["--data", str(folder / "digits.npz"), "--against", "onnxruntime", "--batch", "5"]
    assert cli.main(["bench", str(folder / "digits.onnx"), *arguments, *QUICK]) == 0
    text = capsys.readouterr().out
    assert "random" not in text
    assert "(5, 1, 8, 8)" in text
    own = ["relayquant int8", "relayquant float"]
    engine = ["onnxruntime float", "onnxruntime int8", "onnxruntime int8, our QDQ"]
    assert read_rows(text) == own + engine
    assert re.search(r"^.+; relayquant \S+, onnxruntime \d", text, re.MULTILINE)  # the CPU


def test_bench__against_openvino_and_onnxruntime(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openvino")
    pytest.importorskip("onnxruntime")
    peers = ["--against", "openvino", "--against", "onnxruntime", "--against", "openvino"]
    arguments = ["--data", str(folder / "digits.npz"), "--batch", "5", *peers]
    assert cli.main(["bench", str(folder / "digits.onnx"), *arguments, *QUICK]) == 0
    text = capsys.readouterr().out
    rows = read_rows(text)
    assert {"openvino float", "openvino int8, our QDQ", "onnxruntime int8"} <= set(rows)
    assert len(rows) == len(set(rows))
    assert ("openvino int8, NNCF" in rows) == has_nncf()
    assert "left out" not in text
    assert re.search(r"openvino \d", text)


@pytest.mark.parametrize(
    ("source", "options", "sizes"),
    [
        ([], [], [1] * 4),
        ([], ["--batch", "3", "--samples", "7"], [3] * 3),
        (["--data", "digits.npz"], [], [1] * 4),
        (["--data", "digits.npz"], ["--batch", "3", "--samples", "5"], [3, 3]),
        (["--data", "digits.npz"], ["--batch", "4", "--samples", "100"], [4, 4, 2]),
        (["--data", "pictures", "--preprocess", "unit"], [], [1] * 4),
        (["--data", "pictures", "--preprocess", "unit"], ["--batch", "4"], [4, 2]),
    ],
)
def test_bench__batches(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: list[str],
    options: list[str],
    sizes: list[int],
) -> None:
    if "pictures" in source:
        image = pytest.importorskip("PIL.Image")
        (folder / "pictures").mkdir(exist_ok=True)
        for i in range(6):
            image.new("L", (8, 8), 40 * i).save(folder / "pictures" / f"{i}.png")
    monkeypatch.chdir(folder)
    parsed = parse_words(["bench", "digits.onnx", *source, *options])
    batches = bench.read_batches(parsed, bind_model(load_model(parsed.model)))
    assert [len(batch["image"]) for batch in batches] == sizes
    if "pictures" in source:
        values = np.concatenate([batch["image"] for batch in batches])[:, 0, 0, 0]
        np.testing.assert_allclose(values, np.arange(len(values)) * 40 / 255, atol=1e-6)


def read_rows(text: str) -> list[str]:
    """Names of the rows of the table of latencies, whose best times are above 0."""
    rows = re.findall(r"^(\w+ (?:int8|float)(?:, [\w ]*\w)?)\s+([\d.]+)", text, re.MULTILINE)
    assert all(float(best) > 0 for _, best in rows)
    return [name for name, _ in rows]


@pytest.mark.parametrize("peer", OTHER_ENGINES)
def test_bench__peer_is_missing(
    peer: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, peer, None)
    assert cli.main(["bench", str(folder / "digits.onnx"), "--against", peer, *QUICK]) == 2
    assert f"pip install 'relayquant[{peer}]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "--threads is 0"),
        (["--repeat", "0"], "--repeat is 0"),
        (["--operators", "-1"], "--operators is -1"),
    ],
)
def test_bench__wrong_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["bench", str(folder / "digits.onnx"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bench__only_onnx_against_onnxruntime(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.json").touch()
    arguments = ["bench", str(tmp_path / "model.json"), "--against", "onnxruntime"]
    assert cli.main(arguments) == 2
    assert ".onnx" in capsys.readouterr().err


@pytest.mark.slow
def test_bench__model_that_onnxruntime_cannot_quantize(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")

    def fail(*_args: object, **_options: object) -> None:
        raise ValueError("some reason")

    def measure(candidates: dict, *_args: object, **_options: object) -> Comparison:
        return Comparison(dict.fromkeys(candidates, Latency(1e-3, 2e-3, 2e-3, 1)), {}, {})

    monkeypatch.setattr(quantization, "quantize_static", fail)
    monkeypatch.setattr(bench, "measure_engines", measure)  # what it does is tested elsewhere
    arguments = ["bench", str(folder / "digits.onnx"), "--against", "onnxruntime", *QUICK]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "onnxruntime int8 is left out" in text
    assert "some reason" in text
    rows = read_rows(text)
    assert "onnxruntime float" in rows
    assert "onnxruntime int8" not in rows


@pytest.mark.parametrize("opset", [7, 11])
def test_onnxruntime__below_opset_13(opset: int, tmp_path: Path) -> None:
    """Its tools quantize per channel from opset 13 on: the model is converted first. In models of
    IR version 3 weights are inputs too.
    """
    pytest.importorskip("onnxruntime")
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype("float32")
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    info = helper.make_tensor_value_info
    inputs = [info("x", 1, [1, 3, 8, 8]), info("w", 1, list(weight.shape))]
    outputs = [info("z", 1, [1, 4, 6, 6])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [numpy_helper.from_array(weight, "w")])
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=3 if opset < 9 else 7)
    onnx.save(model, tmp_path / "model.onnx")
    x = {"x": np.random.default_rng(1).random((1, 3, 8, 8), "float32")}
    path = quantize_with_onnxruntime(tmp_path / "model.onnx", [x], tmp_path)
    assert any(node.op_type == "DequantizeLinear" for node in onnx.load(path).graph.node)
    want, got = (run_onnxruntime(p, x)[0] for p in (tmp_path / "model.onnx", path))
    np.testing.assert_allclose(got, want, atol=0.02 * want.max())


@pytest.mark.slow
def test_bench__a_quantized_module_is_timed_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, module = str(folder / "digits.onnx"), str(tmp_path / "digits.int8.rqm")
    data = ["--data", str(folder / "digits.npz")]
    assert cli.main(["quantize", model, *data, "--effort", "fast", "-o", module]) == 0
    capsys.readouterr()
    assert cli.main(["bench", module, *data, *QUICK]) == 0
    assert read_rows(capsys.readouterr().out) == ["relayquant int8"]
    assert cli.main(["bench", module, module, *QUICK]) == 2
    assert "is quantized already" in capsys.readouterr().err
