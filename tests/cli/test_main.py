"""The command line as a whole: exit codes and messages, before anything is computed."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest

from relayquant import cli
from relayquant.analysis.speed.other_engines import OTHER_ENGINES
from relayquant.base.qtypes import Scheme
from relayquant.cli import arguments, commands, grammar, parsers
from relayquant.cli.command import Parser
from relayquant.cli.data import METRICS
from relayquant.cli.output import ExitCode
from relayquant.cli.verbs import OTHER_VERBS
from relayquant.config import ModelType
from relayquant.config.observers import OBSERVERS
from relayquant.data.images import PRESETS
from relayquant.demo import load_digits
from relayquant.errors import ConfigError, ModelError
from relayquant.flow.settings import Guard
from relayquant.stages.effort import Effort

COMMANDS = [command.name for command in grammar.COMMANDS]
DATA = ["--data", "data.npz"]
FILES = ["a.onnx", "b.json", *DATA]
#: what help and mistakes do without
HEAVY = ["tvm", "tvm_ffi", "numpy", "onnx", "torch", "rich"]
SEARCH = ["quantize", "a.onnx", *DATA, "--metric", "agreement"]


@pytest.mark.parametrize("command", COMMANDS)
def test_main__every_command_has_help(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: relayquant {command}")
    assert max(map(len, text.splitlines())) <= 80
    options = text.partition("\noptions:\n")[2].partition("\n\n")[0]
    assert options.count("--") <= 2, "an option belongs to a group with a name"


@pytest.mark.parametrize("command", COMMANDS)
def test_main__every_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    lines = re.findall(rf"^ *relayquant ({command}\b.*)$", capsys.readouterr().out, re.MULTILINE)
    assert lines
    for line in lines:
        words = shlex.split(re.split("  +", line)[0])
        assert parsers.parse_words(words).command == command


def test_main__no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert not stop.value.code
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\S", text, re.MULTILINE) for name in COMMANDS)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "missing.onnx"], "There is no model file missing.onnx."),
        (["lint", "missing", *DATA], "There is no model file missing."),
        (
            ["quantize", "missing.onnx", "--data", "missing.npz"],
            "no data file or folder missing.npz",
        ),
        (["quantize", "a.onnx", *DATA, "-o", "a.txt"], "is written as .rqm"),
        (["quantize", "a.onnx", *DATA, "--report", "no/a.html"], "there is no folder no."),
        (
            ["quantize", "a.onnx", *DATA, "--metric", "top1"],
            "--metric top1 and --labels need each other",
        ),
        (
            ["quantize", "a.onnx", *DATA, "--time-limit", "3"],
            "this needs --metric",
        ),
        (["report", "a.onnx", *DATA, "-o", "no/a.html"], "there is no folder no."),
        (["export", "a.json", "-o", "a.txt"], "is written as .rqm"),
        (["verify", "a.json", *DATA, "--samples", "0"], "--samples is 0; allowed: 1 or more."),
        (["export", "missing.json", "-o", "a.so"], "There is no model file missing.json."),
        (["export", "missing.json"], "the following arguments are required: -o"),
        (["export", "a.json", "-o", "a.onnx", "--tune"], "--tune: only a library is compiled"),
        (["compare", "a.onnx", "no.rqm", *DATA], "There is no model file no.rqm."),
        (["demo", "--repeat", "0"], "--repeat is 0; allowed: 1 or more."),
        # What costs nothing to know is said before the model is read.
        (["export", "a.onnx", "-o", "no/a.so"], "there is no folder no."),
        (
            ["export", "a.onnx", "-o", "a.so", "--target", "nonsense"],
            "does not accept target nonsense",
        ),
        (["lint", "a.onnx", "--data", "no.npz"], "There is no data file or folder no.npz."),
        (
            ["compare", "a.onnx", "b.json", "--data", "no.npz"],
            "There is no data file or folder no.npz.",
        ),
        (["compare", *FILES, "--csv", "no/a.csv"], "there is no folder no."),
        (["compare", *FILES, "--samples", "0"], "--samples is 0; allowed: 1 or more."),
        (["quantize", "a.onnx", *DATA, "--backend", "arn"], "Did you mean 'arm'?"),
        (["sensitivity", "a.onnx", *DATA, "--samples", "0"], "--samples is 0; allowed: 1 or more"),
        (["sensitivity", "a.onnx", *DATA, "--keep", "0", "-o", "a.json"], "--keep is 0; allowed"),
        (["bench", "a.onnx", "--backend", "arn"], "Did you mean 'arm'?"),
        (["nothing"], "There is no command or file 'nothing'. Commands: inspect"),
        (["qantize"], "Did you mean 'quantize'?"),
        (["."], ". is no model file, and no folder with config.json"),
        (["nothing.onnx"], "There is no file or command nothing.onnx."),
        (["quantize"], "the following arguments are required: --data"),
        (["quantize", *DATA], "the following arguments are required: MODEL"),
        (["quantize", "a.onnx"], "the following arguments are required: --data"),
        (["quantize", "a.onnx", *DATA, "--group-size", "32"], "arguments: --group-size 32"),
        (["quantize", "a.onnx", "--dta=a.npz"], "no option --dta. Did you mean --data?"),
        (["compare", *FILES, "--smaples", "3"], "no option --smaples. Did you mean --samples?"),
        (["compress", "a.onnx", "--group-size", "0"], "--group-size is 0; allowed: 1 or more."),
        (
            ["compress", "a.onnx", "--max-size", "2kilos"],
            "'2kilos' is not a size; allowed: a number above 0",
        ),
        (["compress", "a.onnx", "--max-size", "-1MB"], "--max-size: expected one argument"),
        (["compress", "a.onnx", "--max-size", "0"], "'0' is not a size"),
        (["quantize", "a.onnx", *DATA, "--workers", "0"], "--workers is 0; allowed: 1 or more."),
        (["quantize", "a.onnx", *DATA, "--target", "nonsense"], "does not accept target nonsense"),
        (["quantize", "a.onnx", *DATA, "--backend", "no.json"], "--backend no.json: there is no"),
        (
            ["quantize", "a.onnx", *DATA, "--backend", "bad.json"],
            "bad.json is [1]; allowed: a dict",
        ),
        (
            ["quantize", "a.onnx", *DATA, "--metric", "agreement", "--workers", "2"],
            "--metric cannot be combined with --workers",
        ),
        ([*SEARCH, "--max-drop", "-1"], "--max-drop is -1; allowed: 0 or more."),
        ([*SEARCH, "--time-limit", "0"], "--time-limit is 0; allowed: more than 0"),
        ([*SEARCH, "--labels", "no.txt"], "--metric top1 and --labels need each other"),
        ([*SEARCH, "--save-config", "no/a.json"], "there is no folder no."),
        (["quantize", "a.onnx", *DATA, "--save-config", "a.json"], "this needs --metric"),
        (["report", "a.onnx", *DATA, "--pictures", "no/folder"], "no/folder"),
        (["sensitivity", "a.onnx", *DATA, "--plot", "no/a.png"], "there is no folder no."),
        (["bench", "a.onnx", "--plot", "no/a.png"], "there is no folder no."),
        (["bench", "a.onnx", "--samples", "0"], "--samples is 0; allowed: 1 or more."),
        (["inspect", "arn"], "Did you mean 'arm'?"),
        (["inspect", "x86", "--operator", "nn.conv9d"], "Backend 'x86' cannot run 'nn.conv9d'"),
        (["inspect", "a.onnx", "--operator", "nn.conv2d"], "--operator: for a backend"),
        (["inspect", "a.onnx", "-o", "b.json"], "-o: for a backend, such as `relayquant inspect"),
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
    for name in ("data.npz", "a.onnx", "a.json", "b.json"):
        Path(name).touch()
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

    monkeypatch.setattr("relayquant.cli.commands.inspect.run", warn)
    assert cli.main(["inspect", "model"]) == 0
    assert capsys.readouterr().err == "relayquant: warning: this looks wrong\n"


def test_main__what_nobody_thought_of_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object, answer: object) -> ExitCode:
        raise KeyError("x")

    monkeypatch.setattr("relayquant.cli.commands.inspect.run", fail)
    assert cli.main(["inspect", "model"]) == ExitCode.INTERNAL_ERROR
    text = "relayquant: internal error: KeyError: 'x' (--debug shows where)\n"
    assert capsys.readouterr().err == text
    with pytest.raises(KeyError):
        cli.main(["inspect", "model", "--debug"])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_main__names_that_the_output_cannot_spell(encoding, tmp_path, monkeypatch, capsys) -> None:
    """A name in Greek, and one that is no text in any encoding."""
    names = [tmp_path / "λ.onnx", tmp_path / os.fsdecode(b"\xe4.onnx")]
    for name in names:
        name.write_bytes(load_digits().model_path.read_bytes())
        output = io.TextIOWrapper(io.BytesIO(), encoding)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            code = cli.main(["inspect", str(name)])
        assert code == 0, capsys.readouterr().err
        shown = name.name.encode(encoding, "backslashreplace")
        output.seek(0)
        assert output.buffer.read().startswith(str(tmp_path).encode() + b"/" + shown), name


def test_main__interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: object, answer: object) -> ExitCode:
        raise KeyboardInterrupt

    monkeypatch.setattr("relayquant.cli.commands.inspect.run", interrupt)
    assert cli.main(["inspect", "model"]) == ExitCode.INTERRUPTED


def test_interrupt__modules_are_imported_whole(monkeypatch, capsys):
    """An extension in C that is interrupted while it is imported ends the process by a signal."""
    whole = []

    def import_and_interrupt(name):
        signal.raise_signal(signal.SIGINT)
        whole.append(name)

    monkeypatch.setattr(cli, "import_module", import_and_interrupt)
    handler = signal.getsignal(signal.SIGINT)
    assert cli.main(["inspect", "model"]) == ExitCode.INTERRUPTED
    assert whole == ["relayquant.cli.commands.inspect"]
    assert capsys.readouterr().err == "relayquant: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is handler


def test_commands__are_modules_of_their_names() -> None:
    files = {path.stem for path in Path(commands.__path__[0]).glob("*.py")}
    assert files == {*COMMANDS, "completion", "__init__"}


def test_parsers__choices_are_those_of_what_takes_them() -> None:
    assert set(arguments.EFFORTS) == {level.value for level in Effort}
    assert set(grammar.GUARDS) == {action.value for action in Guard}
    assert set(grammar.MODEL_TYPES) == {kind.value for kind in ModelType}
    assert set(grammar.SCHEMES) == {scheme.value for scheme in Scheme}
    assert set(grammar.OBSERVERS) == set(OBSERVERS)
    assert set(grammar.METRICS) == set(METRICS)
    assert set(grammar.ENGINES) == set(OTHER_ENGINES)
    assert set(arguments.PRESETS) == set(PRESETS)


@pytest.mark.parametrize("verb", OTHER_VERBS)
def test_main__a_verb_of_another_tool(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with a code says what to type, and that can be typed."""
    assert cli.main([verb, "model.onnx", "--any"]) == ExitCode.USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    advice = OTHER_VERBS[verb]
    start = f"relayquant: error: There is no command {verb!r}. Use: {advice} [RQ"
    assert line.startswith(start)
    assert verb not in COMMANDS
    named = set(re.findall(r"relayquant (\w+)", advice))
    assert named <= set(COMMANDS)
    assert named or "relayquant --" in advice or "in Python" in advice


@pytest.mark.parametrize(
    "words",
    [
        ["report", "a.onnx", "b.json", "--data", "x.npz"],
        ["report", "a.onnx", "--data", "x.npz", "b.json"],
        ["report", "--data", "x.npz", "a.onnx", "b.json", "--json"],
        ["--json", "report", "--data", "x.npz", "a.onnx", "--latency", "b.json"],
    ],
)
def test_parsers__arguments_in_any_order(words: list[str]) -> None:
    options = parsers.parse_words(words)
    found = options.command, str(options.model), str(options.qmodel), str(options.data)
    assert found == ("report", "a.onnx", "b.json", "x.npz")
    assert getattr(options, "json", False) == ("--json" in words)


def test_parsers__a_quantized_module_may_be_left_out() -> None:
    assert parsers.parse_words(["report", "a.onnx", "--data", "x.npz"]).qmodel is None


@pytest.mark.parametrize(
    ("words", "tune"), [([], False), (["--tune"], True), (["--tune", "x"], Path("x"))]
)
def test_parsers__tune_takes_a_file(words: list[str], tune: object) -> None:
    assert parsers.parse_words(["export", "a.onnx", "-o", "a.so", *words]).tune == tune


@pytest.mark.parametrize(
    ("text", "size"), [("1500", 1500), ("2kB", 2000), ("1.5MB", 1_500_000), ("2GB", 2 * 10**9)]
)
def test_parsers__size(text: str, size: int) -> None:
    assert arguments.parse_size(text) == size


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 0),
        (["--help"], 0),
        (["--version"], 0),
        (["benchmark"], 2),
        (["qantize", "--json"], 2),
        (["quantize"], 2),
        (["quantize", "missing.onnx", "--data", "."], 2),
        (["quantize", "--help"], 0),
    ],
)
def test_main__answers_without_tvm(words: list[str], code: int) -> None:
    program = (
        "import atexit, sys\n"
        f"heavy = {HEAVY}\n"
        "atexit.register(lambda: print('loaded:', [n for n in heavy if n in sys.modules]))\n"
        "from relayquant.cli import main\n"
        f"sys.exit(main({words}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.endswith("loaded: []\n")


def test_check_words__what_follows_two_dashes_is_no_option():
    parser = Parser(prog="relayquant")
    parser.add_argument("--data")
    parser.check_words(["--", "--dta"])
    with pytest.raises(ConfigError, match="no option --dta"):
        parser.check_words(["--dta", "--"])
