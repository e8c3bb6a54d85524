"""The command line as a whole: exit codes and messages, before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayquant import cli
from relayquant.errors import ModelError

COMMANDS = ["demo", "quantize", "compile", "compare", "inspect"]


@pytest.mark.parametrize("command", COMMANDS)
def test_main__every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"relayquant {command}" in capsys.readouterr().out


def test_main__no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == cli.USER_ERROR
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "missing.onnx"], "There is no model file missing.onnx."),
        (["quantize", "missing.onnx", "--data", "missing.npz"], "no data file missing.npz"),
        (["quantize", "a.onnx", "--data", "a.npz", "-o", "a.so"], "is written as .json"),
        (["compile", "missing.json"], "There is no model file missing.json."),
        (["compile", "missing.json", "-o", "a.txt"], "a library is written as .so"),
        (["compare", "a.onnx", "b.json", "--data", "c.npz"], "There is no model file a.onnx."),
        (["demo", "--runs", "0"], "--runs is 0; allowed: 1 or more."),
    ],
)
def test_main__a_mistake_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == cli.USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("relayquant: error: ")
    assert message in line


def test_main__debug_shows_where(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no model file"):
        cli.main(["--debug", "inspect", str(tmp_path / "missing.onnx")])


def test_main__interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("relayquant.cli.inspect_.run", interrupt)
    assert cli.main(["inspect", "model.onnx"]) == cli.INTERRUPTED
