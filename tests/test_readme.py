"""The README keeps its word: its commands are those of the checks, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def find_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_readme__first_two_commands_install_and_run() -> None:
    demo, test = (block.strip() for block in find_blocks("bash")[:2])
    for command in (demo, test):
        assert "\n" not in command
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -q -e ")
    assert demo.endswith("&& .venv/bin/relayquant demo")
    assert test.endswith("&& .venv/bin/python -m pytest -n 2")


def test_readme__checks_take_the_second_command_from_it() -> None:
    line = next(
        line for line in (ROOT / ".ci/run").read_text().splitlines() if "README.md)" in line
    )
    (needle,) = re.findall(r'grep -F -m 1 "(.*)" README\.md', line)
    first = next(line for line in README.splitlines() if needle in line)
    assert first == find_blocks("bash")[1].strip()


def test_readme__example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("relayquant.pipeline", reason="the pipeline is not part of this tree")
    (example,) = find_blocks("python")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "digits.so").stat().st_size > 0
    assert "conv1" in capsys.readouterr().out
