"""Completion in a real bash: the script that the command prints completes what a user types."""

from __future__ import annotations

import builtins
import shutil
import subprocess
from pathlib import Path

import pytest

from relayquant import cli
from relayquant.cli.grammar import COMMANDS
from relayquant.cli.output import ExitCode


def complete(script: str, words: list[str], folder: Path) -> set[str]:
    """What bash offers for the last of these words."""
    quoted = " ".join(f"'{word}'" for word in words)
    lines = f"""{script}
COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE="${{COMP_WORDS[*]}}"
COMP_POINT=${{#COMP_LINE}}; COMPREPLY=()
name=$(complete -p relayquant | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$name" relayquant '{words[-1]}' '{words[-2]}' 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", lines], capture_output=True, text=True, check=False, cwd=folder
    )
    return set(done.stdout.split())


def test_completion__in_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    assert cli.main(["--completion", "bash"]) == ExitCode.OK
    script = capsys.readouterr().out
    (tmp_path / "model.onnx").touch()
    names = {command.name for command in COMMANDS}
    assert names <= complete(script, ["relayquant", ""], tmp_path)
    assert complete(script, ["relayquant", "quan"], tmp_path) == {"quantize"}
    assert "--max-drop" in complete(script, ["relayquant", "quantize", "--ma"], tmp_path)
    efforts = complete(script, ["relayquant", "quantize", "--effort", ""], tmp_path)
    assert efforts == {"fast", "balanced", "best"}
    assert "model.onnx" in complete(script, ["relayquant", "quantize", "mod"], tmp_path)
    for shell in ("zsh", "tcsh"):
        assert cli.main(["--completion", shell]) == ExitCode.OK
        assert "relayquant" in capsys.readouterr().out


def test_completion__says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name == "shtab":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert cli.main(["--completion", "zsh"]) == ExitCode.USER_ERROR
    assert "pip install 'relayquant[completion]'" in capsys.readouterr().err
