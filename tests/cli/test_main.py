"""The command line as a whole: exit codes and messages, before anything is computed."""

from __future__ import annotations

import warnings
from importlib import metadata
from pathlib import Path

import pytest

from relayquant import cli
from relayquant.cli.answer import ExitCode
from relayquant.errors import ModelError

COMMANDS = [module.__name__.rpartition(".")[2].rstrip("_") for module in cli.COMMANDS]
DATA = ["--data", "data.npz"]
FILES = ["a.onnx", "b.json", *DATA]


@pytest.mark.parametrize("command", COMMANDS)
def test_main__every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"relayquant {command}" in capsys.readouterr().out


def test_main__no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == ExitCode.USER_ERROR
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "missing.onnx"], "There is no model file missing.onnx."),
        (["quantize", "missing.onnx", "--data", "missing.npz"], "no data file missing.npz"),
        (["quantize", "a.onnx", "--data", "a.npz", "-o", "a.txt"], "is written as .json"),
        (["quantize", "a.onnx", *DATA, "--report", "no/a.html"], "there is no folder no."),
        (
            ["quantize", "a.onnx", *DATA, "--metric", "top1"],
            "--metric top1 and --labels go together",
        ),
        (["quantize", "a.onnx", *DATA, "--budget", "3"], "nothing is searched without --metric"),
        (["report", "a.onnx", *DATA, "-o", "no/a.html"], "there is no folder no."),
        (["export", "a.json", "-o", "a.txt"], "is written as .json"),
        (["verify", "a.json", *DATA, "--batches", "0"], "--batches is 0; allowed: 1 or more."),
        (["compile", "missing.json"], "There is no model file missing.json."),
        (["compile", "missing.json", "-o", "a.txt"], "a library is written as .so"),
        (["compare", *FILES], "There is no model file a.onnx."),
        (["demo", "--runs", "0"], "--runs is 0; allowed: 1 or more."),
        # What costs nothing to know is said before the model is read.
        (["compile", "missing.onnx", "-o", "no/a.so"], "there is no folder no."),
        (["compile", "missing.onnx", "--target", "nonsense"], "does not accept target nonsense"),
        (["lint", "a.onnx", "--data", "no.npz"], "There is no data file no.npz,"),
        (["compare", "a.onnx", "b.json", "--data", "no.npz"], "There is no data file no.npz,"),
        (["compare", *FILES, "--csv", "no/a.csv"], "there is no folder no."),
        (["compare", *FILES, "--batches", "0"], "--batches is 0; allowed: 1 or more."),
        (["quantize", "a.onnx", *DATA, "--backend", "arn"], "Did you mean 'arm'?"),
        (["sensitivity", "a.onnx", *DATA, "--samples", "0"], "--samples is 0; allowed: 1 or more"),
        (["sensitivity", "a.onnx", *DATA, "--keep", "0", "-o", "a.json"], "--keep is 0; allowed"),
        (["bench", "a.onnx", "--backend", "arn"], "Did you mean 'arm'?"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["nothing.onnx"], "There is no file nothing.onnx, and no command of that name."),
        (["quantize"], "the following arguments are required: model"),
        (["quantize", "a.onnx"], "needs --data; only with --group-size it does without"),
        (["quantize", "a.onnx", *DATA, "--group-size", "32"], "say --weights int4, too"),
        (["quantize", "a.onnx", *DATA, "--workers", "0"], "--workers is 0; allowed: 1 or more."),
        (["quantize", "a.onnx", *DATA, "--target", "nonsense"], "does not accept target nonsense"),
        (["quantize", "a.onnx", *DATA, "--backend", "no.json"], "--backend no.json: there is no"),
        (
            ["quantize", "a.onnx", *DATA, "--backend", "bad.json"],
            "bad.json is [1]; allowed: a dict",
        ),
        (
            ["quantize", "a.onnx", *DATA, "--metric", "agreement", "--workers", "2"],
            "may put any operator back to float; not together with --workers.",
        ),
        (
            ["quantize", "a.onnx", *DATA, "--weights", "int4", "--group-size", "32"],
            "leaves all else in float; not together with --data.",
        ),
        (["search", "a.onnx", *DATA, "--max-drop", "-1"], "--max-drop is -1; allowed: 0 or more."),
        (["search", "a.onnx", *DATA, "--budget", "0"], "--budget is 0; allowed: more than 0"),
        (["search", "a.onnx", *DATA, "--metric", "top1"], "--metric top1 and --labels go together"),
        (["plot", "ranges", "a.onnx", *DATA, "-o", "no/a.png"], "there is no folder no."),
        (["plot", "ranges", "a.onnx", *DATA, "--quantized", "b.json"], "--quantized: ranges is"),
        (["backend", "arn"], "Did you mean 'arm'?"),
        (["backend", "x86", "nn.conv9d"], "Backend 'x86' cannot run 'nn.conv9d'"),
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
    Path("data.npz").touch()
    Path("bad.json").write_text("[1]")
    assert cli.main(arguments) == ExitCode.USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("relayquant: error: ")
    assert "Traceback" not in line
    assert message in line


@pytest.mark.parametrize(
    "arguments",
    [["--debug", "inspect", "a"], ["inspect", "--debug", "a"], ["inspect", "a", "--debug"]],
)
def test_main__debug_shows_where(arguments: list[str]) -> None:
    with pytest.raises(ModelError, match="There is no model file"):
        cli.main(arguments)


def test_main__version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"relayquant {metadata.version('relayquant')}\n"


def test_main__a_warning_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn(options: object, answer: object) -> ExitCode:
        warnings.warn("this looks\nwrong", UserWarning, stacklevel=1)
        return ExitCode.OK

    monkeypatch.setattr("relayquant.cli.inspect_.run", warn)
    assert cli.main(["inspect", "model.onnx"]) == 0
    assert capsys.readouterr().err == "relayquant: warning: this looks wrong\n"


def test_main__what_nobody_thought_of_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object, answer: object) -> ExitCode:
        raise KeyError("x")

    monkeypatch.setattr("relayquant.cli.inspect_.run", fail)
    assert cli.main(["inspect", "model.onnx"]) == ExitCode.INTERNAL_ERROR
    text = "relayquant: internal error: KeyError: 'x' (--debug shows where)\n"
    assert capsys.readouterr().err == text
    with pytest.raises(KeyError):
        cli.main(["inspect", "model.onnx", "--debug"])


def test_main__interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: object, answer: object) -> ExitCode:
        raise KeyboardInterrupt

    monkeypatch.setattr("relayquant.cli.inspect_.run", interrupt)
    assert cli.main(["inspect", "model.onnx"]) == ExitCode.INTERRUPTED
