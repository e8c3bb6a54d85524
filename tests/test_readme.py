"""The README keeps its word: its commands are those of the checks, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import relayquant as rq

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def find_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_readme__first_two_commands_install_and_run() -> None:
    demo, test = (block.strip() for block in find_blocks("bash")[:2])
    for command in (demo, test):
        assert "\n" not in command
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -q ")
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
    (example,) = find_blocks("python")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "digits.so").stat().st_size > 0
    assert "conv1" in capsys.readouterr().out


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def find_anchors(page: Path) -> set[str]:
    """What a link to a heading of the page says behind `#`, as GitHub and MyST make it."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages__links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    local = [target.partition("#") for target in targets if "://" not in target]
    assert local or page.name not in ("README.md", "start.md", "accuracy.md")
    assert [file for file, _, _ in local if not (page.parent / file).exists()] == []
    wanted = [(page.parent / file if file else page, anchor) for file, _, anchor in local]
    assert [each for each in wanted if each[1] and each[1] not in find_anchors(each[0])] == []


def test_pages__are_reached_from_the_readme() -> None:
    """From the index, which leads to every page, and first of all from the one to begin with."""
    assert {"docs/index.md", "docs/start.md"} <= set(re.findall(r"\]\(([^)]+)\)", README))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages__name_what_is_public(page: Path) -> None:
    """`rq.name` in a page is a public name, or of a public module."""
    names = set(re.findall(r"\brq\.(\w+)", page.read_text("utf-8")))
    assert names <= set(rq.__all__)


def test_readme__is_one_screen() -> None:
    assert len(README.splitlines()) <= 100
