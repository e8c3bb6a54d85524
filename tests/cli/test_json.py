"""--json: every command gives one document of one schema, on success and on failure, and the
documentation has every key of it.
"""

from __future__ import annotations

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_files import draw_weights, write_folder, write_tokenizer

from relayquant import cli
from relayquant.cli.grammar import COMMANDS as ALL_COMMANDS
from relayquant.cli.output import SCHEMA, CommandOutput, ExitCode, make_plain
from relayquant.demo import load_digits

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "commands.md").read_text("utf-8")
DATA = ["--data", "data.npz"]
FAST = [*DATA, "--effort", "fast"]
SHORT = ["--operators", "0"]
SEARCH = ["--metric", "agreement", "--save-config", "patch.json"]
MODEL, MODULE = "digits.onnx", "digits.json"
LEDGER_KEYS = {"operators", "quantized", "backend", "effort", "choices", "inputs", "outputs"}
LEDGER_KEYS |= {"guard", "search", "speed"}
MODEL_KEYS = {"path", "kind", "format", "bytes"}

#: command -> (words, keys of the summary, tables, files)
COMMANDS: dict[str, tuple[list[str], set[str], set[str], list[str]]] = {
    "inspect": (
        [MODULE],
        LEDGER_KEYS | MODEL_KEYS,
        {"inputs", "outputs", "operators", "commands"},
        [],
    ),
    "inspect a float model": (
        ["inspect", MODEL],
        MODEL_KEYS | {"operators", "quantizable", "backend"},
        {"inputs", "outputs", "operators", "commands"},
        [],
    ),
    "inspect a backend": (
        ["inspect", "arm"],
        {"name", "reduce_range", "default_qconfig", "float_dtypes", "affine_rules"},
        {"patterns"},
        [],
    ),
    "demo": (
        ["demo", "--repeat", "1"],
        LEDGER_KEYS | {"speedup"},
        {"models", "operators"},
        [],
    ),
    "lint": (
        ["lint", MODEL, *DATA, "--growth"],
        {"error", "warning", "info"},
        {"findings", "growth"},
        [],
    ),
    "quantize": (
        ["quantize", MODEL, *FAST, "-o", "q.json"],
        LEDGER_KEYS,
        {"operators"},
        ["q.json"],
    ),
    "quantize --metric": (
        ["quantize", MODEL, *FAST, "-o", "q.json", *SEARCH],
        LEDGER_KEYS,
        {"operators"},
        ["q.json", "patch.json"],
    ),
    "compress": (["compress", MODEL, "-o", "w.json"], LEDGER_KEYS, {"operators"}, ["w.json"]),
    "report": (
        ["report", MODEL, MODULE, *FAST, "-o", "r.html", "--pictures", "pictures"],
        {"verdict", "agreement", "samples", "shares", "bytes", "score", "latencies"},
        {"outputs", "suggestion", "ranges"},
        ["r.html", *(f"pictures/{name}.png" for name in ("ranges", "error", "sensitivity"))],
    ),
    "export": (["export", MODULE, "-o", "q.onnx"], set(), set(), ["q.onnx"]),
    "verify": (
        ["verify", MODULE, *DATA],
        {"is_equal", "samples", "compared"},
        {"differences"},
        [],
    ),
    "compare": (
        ["compare", MODEL, MODULE, *DATA, "--csv", "c.csv", "--plot", "c.png"],
        {"samples", "agreement"},
        {"outputs", "values"},
        ["c.csv", "c.png"],
    ),
    "sensitivity": (
        ["sensitivity", MODEL, *FAST, "--plot", "s.svg"],
        {"metric", "score", "samples"},
        {"operators"},
        ["s.svg"],
    ),
    "bench": (
        ["bench", MODEL, MODULE, "--repeat", "1", "--samples", "1", *SHORT, "--plot", "b.png"],
        {"cpu", "versions", "threads"},
        {"latencies"},
        ["b.png"],
    ),
    "generate": (
        ["generate", ".", "-p", "hello", "--max-tokens", "3"],
        {
            "text",
            "tokens",
            "reason",
            "prompt_tokens",
            "prompt_tokens_per_second",
            "text_tokens_per_second",
            "seconds_to_start",
        },
        set(),
        [],
    ),
    "completion": (["--completion", "bash"], {"shell", "script"}, set(), []),
}
NEEDS = {"report": ("jinja2", "grandalf"), "completion": ("shtab",)}
NEEDS["generate"] = ("tokenizers",)
NEEDS |= dict.fromkeys(("compare", "sensitivity", "bench"), ("matplotlib",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    demo = load_digits()
    (folder / MODEL).write_bytes(demo.model_path.read_bytes())
    np.savez(folder / "data.npz", image=np.concatenate(demo.calibration)[:32])
    if find_spec("tokenizers"):
        write_tokenizer(write_folder(folder, draw_weights()))
    words = [str(folder / MODEL), "--data", str(folder / "data.npz"), "--effort", "fast"]
    assert cli.main(["quantize", *words, "-o", str(folder / MODULE), "--quiet"]) == 0
    return folder


def read_document(text: str) -> dict[str, Any]:
    """The document, by a reader that knows no NaN and no infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(text, parse_constant=refuse)
    kinds = {"schema": int, "relayquant": str, "command": str, "exit_code": int}
    kinds |= {"warnings": list, "summary": dict, "tables": dict, "files": list}
    assert {*found} == {*kinds, "error"}
    assert all(isinstance(found[key], kind) for key, kind in kinds.items())
    assert found["schema"] == SCHEMA
    assert found["error"] is None or {*found["error"]} == {"type", "code", "message"}
    for rows in found["tables"].values():
        assert all(isinstance(row, dict) for row in rows)
    return found


def test_commands__all_are_here() -> None:
    names = {command.name for command in ALL_COMMANDS}
    assert names | {"completion"} == {name.split()[0] for name in COMMANDS}


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize("command", COMMANDS)
def test_json__is_one_document(
    command: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in NEEDS.get(command, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(folder)
    words, summary, tables, files = COMMANDS[command]
    assert cli.main([*words, "--json"]) == ExitCode.OK
    found = read_document(capsys.readouterr().out)
    name = command.split()[0]
    assert (found["command"], found["exit_code"], found["error"]) == (name, 0, None)
    assert {*found["summary"]} == summary
    assert {*found["tables"]} == tables
    assert found["files"] == files
    assert all(Path(name).is_file() for name in files)
    (line,) = re.findall(rf"^\| `{command}` \|(.*)$", PAGE, re.MULTILINE)
    documented = set(re.findall(r"`(\w+)`", line))
    shared = LEDGER_KEYS if "ledger" in line else set()
    # Where the time goes takes longer to measure than all else here; `test_bench` does.
    # A model with state has a key more.
    more = {"bench": {"peak_gops", "kernels"}, "compare": {"stream_sqnr"}}.get(command, set())
    assert {*summary, *tables, *more} == documented | shared


@pytest.mark.parametrize("words", [["inspect", "none.onnx"], ["nothing"], ["lint", MODEL]])
def test_json__also_of_what_failed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--json", *words]) == ExitCode.USER_ERROR
    captured = capsys.readouterr()
    found = read_document(captured.out)
    assert found["exit_code"] == ExitCode.USER_ERROR
    assert found["error"]["message"] in captured.err
    assert found["error"]["type"] in ("ModelError", "ConfigError")
    assert found["error"]["message"].endswith(f"[{found['error']['code']}]")


@pytest.mark.slow
def test_json__holds_warnings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    np.savez("one.npz", image=np.zeros((4, 1, 8, 8), "float32"))
    words = ["quantize", MODEL, "--data", "one.npz", "--effort", "fast", "-o", "one.json"]
    # Without --quiet a stage that takes long says so on standard error.
    assert cli.main([*words, "--json", "--quiet"]) == ExitCode.OK
    captured = capsys.readouterr()
    warned = read_document(captured.out)["warnings"]
    assert warned
    assert captured.err.splitlines() == [f"relayquant: warning: {text}" for text in warned]


def test_make_plain__has_no_value_that_json_lacks() -> None:
    values = [math.nan, math.inf, -math.inf, np.float32(0.5), np.int64(3), np.arange(2)]
    plain = make_plain({"x": (*values, ExitCode.OK, Path("a"), None, True)})
    expected = [None, "Infinity", "-Infinity", 0.5, 3, [0, 1], 0, "a", None, True]
    assert json.loads(json.dumps(plain, allow_nan=False)) == {"x": expected}
    assert float(plain["x"][2]) == -math.inf


def test_exit_codes__are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"^\| (\d+) \| .* \|$", PAGE, re.MULTILINE)
    assert rows == [str(int(code)) for code in ExitCode]
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    (line,) = re.findall(r"^Exit code: .*$", capsys.readouterr().out, re.MULTILINE)
    # Those that say that a process was ended are left to the page.
    numbers = [int(code) for code in ExitCode if code < ExitCode.INTERRUPTED]
    assert [int(number) for number in re.findall(r"\d+", line)] == numbers


def test_quiet__prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    output = CommandOutput("x", is_quiet=True)
    output.print("a")
    output.add_file(Path("a"))
    output.finish(ExitCode.OK)
    assert capsys.readouterr() == ("", "")
