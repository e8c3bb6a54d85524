"""Every command from end to end on the built-in example, as a user types it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tvm

from relayquant import cli
from relayquant.demo import load_digits

pytest.importorskip("relayquant.pipeline", reason="the pipeline is not part of this tree")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's model, its calibration digits, and the quantized module."""
    folder = tmp_path_factory.mktemp("digits")
    demo = load_digits()
    (folder / "digits.onnx").write_bytes(demo.model_path.read_bytes())
    np.savez(folder / "calibration.npz", image=np.concatenate(demo.calibration))
    np.savez(folder / "held_out.npz", image=demo.images, labels=demo.labels)
    arguments = [str(folder / "digits.onnx"), "--data", str(folder / "calibration.npz")]
    assert cli.main(["quantize", *arguments, "-o", str(folder / "digits.int8.json")]) == 0
    return folder


def test_quantize__writes_a_quantized_module(folder: Path) -> None:
    mod = tvm.ir.load_json((folder / "digits.int8.json").read_text())
    assert "qnn.conv2d" in mod.script()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_inspect__ledger_of_the_quantized_module(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(folder / "digits.int8.json")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^block1/depthwise\S*\s+nn\.conv2d\s+yes", text, re.MULTILINE)
    assert re.search(r"^\d+ of \d+ operators quantized", text, re.MULTILINE)
    assert re.search(r"^guard: outputs on 8 samples: [\d.]+ dB SQNR, 0% of", text, re.MULTILINE)


def test_inspect__operators_of_the_float_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(folder / "digits.onnx")]) == 0
    assert re.search(r"^nn\.conv2d\s+4\s*$", capsys.readouterr().out, re.MULTILINE)


def test_compile__library_runs(folder: Path) -> None:
    library = folder / "digits.so"
    module = str(folder / "digits.int8.json")
    assert cli.main(["compile", module, "-o", str(library)]) == 0
    demo = load_digits()
    main = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())["main"]
    logits = main(tvm.runtime.tensor(demo.images)).numpy()
    assert (logits.argmax(1) == demo.labels).mean() >= 0.97


def test_compare__outputs_agree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(folder / name) for name in ("digits.onnx", "digits.int8.json")]
    data = str(folder / "held_out.npz")
    assert cli.main(["compare", *arguments, "--data", data, "--batches", "200"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"batches\s+200", text)
    (agreement,) = re.findall(r"same top-1\s+([\d.]+)%", text)
    assert float(agreement) >= 97.0
    (sqnr,) = re.findall(r"SQNR \[dB\]\s+(\S+)", text)
    assert float(sqnr) > 15.0


def test_demo__accuracy_size_speed_and_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--runs", "3"]) == 0
    text = capsys.readouterr().out
    accuracies = [float(value) for value in re.findall(r"accuracy\s+([\d.]+)%", text)]
    sizes = [float(value) for value in re.findall(r"constants\s+([\d.]+) kB", text)]
    assert accuracies[0] == pytest.approx(98.6, abs=0.21)
    assert accuracies[1] >= accuracies[0] - 1.0
    assert sizes[1] < 0.4 * sizes[0]
    assert "operators quantized" in text
    assert "times the speed of float" in text
