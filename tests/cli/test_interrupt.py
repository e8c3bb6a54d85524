"""Ctrl-C, as a real signal to a real process: it says how to go on, and the same command does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path

import numpy as np
import pytest

from relayquant import cli
from relayquant.base.storage.lock import reserve_file
from relayquant.cli.output import ExitCode
from relayquant.cli.quantizing import open_workers
from relayquant.cli.resume import ResumeState
from relayquant.demo import load_digits
from relayquant.errors import ConfigError
from relayquant.stages.calibration.checkpoint import open_checkpoint

#: The command, and what slows its data down: a signal is to meet it at work.
SLOW = """
import sys, time
import relayquant.stages.calibration.runner
from relayquant.base.events import CallbackList
tell = CallbackList.on_progress
def wait(self, event):
    tell(self, event)
    if event.task == {task!r}:
        print(event.done, flush=True)
        time.sleep(0.05)
CallbackList.on_progress = wait
from relayquant.cli import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    demo = load_digits()
    (tmp_path / "digits.onnx").write_bytes(demo.model_path.read_bytes())
    np.savez(tmp_path / "data.npz", image=np.concatenate(demo.calibration)[:64])
    return tmp_path


def start_python(*words: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start Python with these words, what it prints to be read."""
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def interrupt(folder: Path, words: list[str], task: str, events: int) -> str:
    """What a command says on standard error that gets a signal after so many events."""
    (folder / "slow.py").write_text(SLOW.format(task=task))
    process = start_python("slow.py", *words, cwd=folder)
    assert process.stdout is not None
    for _ in range(events):
        assert process.stdout.readline(), "it ended before"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == ExitCode.INTERRUPTED, said
    return said.splitlines()[-1]


@pytest.mark.slow
def test_quantize__goes_on_after_a_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", "digits.onnx", "--data", "data.npz", "--effort", "fast", "-o", "q.json"]
    said = interrupt(folder, words, "calibrate", 20)
    (kept,) = folder.glob("q.json.checkpoint-*")
    assert said.endswith(f"the work so far is in {kept.name}. Run the same command again to resume")
    assert (kept / "checkpoint.json").is_file()
    monkeypatch.chdir(folder)
    assert cli.main([*words, "--quiet"]) == ExitCode.OK
    assert not kept.exists(), "what ended well leaves nothing"
    went_on = Path("q.json").read_bytes()
    Path("q.json").unlink()
    assert cli.main([*words, "--quiet"]) == ExitCode.OK
    assert Path("q.json").read_bytes() == went_on


@pytest.mark.slow
def test_quantize__search_goes_on_after_a_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", "digits.onnx", "--data", "data.npz", "--effort", "fast", "-o", "p.json"]
    words += ["--weights", "int4", "--metric", "agreement", "--max-drop", "0"]
    interrupt(folder, words, "search", 1)
    (kept,) = folder.glob("p.json.search-*")
    assert json.loads(kept.read_text())["trials"]
    monkeypatch.chdir(folder)
    assert cli.main([*words, "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["summary"]["search"]["is_met"]
    assert not kept.exists()


@pytest.mark.slow
def test_compress__goes_on_after_a_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compress", "digits.onnx", "--data", "data.npz", "-o", "w.json"]
    said = interrupt(folder, words, "compress weights", 1)
    (kept,) = folder.glob("w.json.checkpoint-*")
    assert said.endswith(f"the work so far is in {kept.name}. Run the same command again to resume")
    monkeypatch.chdir(folder)
    assert cli.main([*words, "--quiet"]) == ExitCode.OK
    assert not kept.exists()
    went_on = Path("w.json").read_bytes()
    assert cli.main([*words, "--quiet"]) == ExitCode.OK
    assert Path("w.json").read_bytes() == went_on


@pytest.mark.slow
def test_quantize__a_failure_leaves_no_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    with np.load("data.npz") as data:
        images = data["image"].copy()
    images[-1] = np.nan
    np.savez("bad.npz", image=images)
    words = ["quantize", "digits.onnx", "--data", "bad.npz", "--effort", "fast", "-o", "q.json"]
    assert cli.main(words) == ExitCode.USER_ERROR
    assert [path.name for path in folder.glob("q.json*")] == []
    own = Path("mine")
    assert cli.main([*words, "--checkpoint", str(own)]) == ExitCode.USER_ERROR
    assert own.is_dir(), "what the user named is the user's"


def test_quantize__what_another_process_works_in_stays(tmp_path: Path) -> None:
    """Two equal commands at once: the second one fails, and the first one goes on."""
    path = tmp_path / "q.rqm.checkpoint-1"
    state = ResumeState(path, is_search=False, is_own=True)
    with open_checkpoint(path, {"model": "a"}):
        files = {*path.iterdir()}
        second = open_checkpoint(path, {"model": "a"})
        with pytest.raises(ConfigError, match="in use by another"), state.keep(), second:
            pass
        assert {*path.iterdir()} == files
    with pytest.raises(ZeroDivisionError), state.keep(), open_checkpoint(path, {"model": "a"}):
        1 // 0  # noqa: B018
    assert not path.exists()


def test_quantize__the_search_of_another_process_stays(tmp_path: Path) -> None:
    path = tmp_path / "q.rqm.search-1"
    state = ResumeState(path, is_search=True, is_own=True)
    with reserve_file(path, "search_state", "search"):
        path.write_text("{}")
        second = reserve_file(path, "search_state", "search")
        with pytest.raises(ConfigError, match="in use by another"), state.keep(), second:
            pass
        assert path.read_text() == "{}"
    state.remove()
    assert [*tmp_path.iterdir()] == []


#: A command whose imports take a minute, one whose process is slow to end, and one that is slow to
#: clean up. An empty line asks for Ctrl-C.
SLOW_IMPORT = """
import sys, time
from relayquant import cli
def import_slowly(name):
    print(flush=True)
    time.sleep(60)
cli.import_module = import_slowly
sys.exit(cli.main())
"""
SLOW_END = """
import atexit, sys, time
from relayquant.cli import main
def end_slowly():
    print(flush=True)
    time.sleep(1)
atexit.register(end_slowly)
sys.exit(main())
"""
SLOW_CLEANING = """
import sys, time
from types import SimpleNamespace
from relayquant import cli
def run(*_):
    try:
        print(flush=True)
        time.sleep(60)
    finally:
        print(flush=True)
        time.sleep(1)
        print("cleaned", flush=True)
cli.import_module = lambda name: SimpleNamespace(run=run)
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("script", "words", "ends_with", "said"),
    [
        (SLOW_IMPORT, ["inspect", "x86"], (ExitCode.INTERRUPTED, "relayquant: interrupted\n"), ""),
        (SLOW_IMPORT, ["inspect", "x86", "--json"], (130, "relayquant: interrupted\n"), "130"),
        (SLOW_END, ["--version", "--quiet"], (ExitCode.OK, ""), ""),
        (SLOW_CLEANING, ["inspect", "x86"], (130, "relayquant: interrupted\n"), "cleaned"),
    ],
)
def test_interrupt__at_any_time_and_twice(script, words, ends_with, said) -> None:
    """While modules are imported, the process ends at once, also for machines. What is done and
    told stays done. A second Ctrl-C does not disturb what the first one began.
    """
    process = start_python("-c", script, *words)
    assert process.stdout is not None
    assert process.stderr is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if line == "\n":
            process.send_signal(signal.SIGINT)
    assert (process.wait(timeout=50), process.stderr.read()) == ends_with
    assert said in printed


#: A command whose signal meets what Python makes of a text, as when it makes a dataclass.
IN_A_TEXT = """
import sys
from types import SimpleNamespace
from relayquant import cli
def run(*_):
    exec("import time; print(flush=True); time.sleep(60)")
cli.import_module = lambda name: SimpleNamespace(run=run)
sys.exit(cli.main())
"""


def test_interrupt__of_a_module_that_runs_a_text(tmp_path: Path) -> None:
    """`python -m` would end by the signal, though the signal was heard."""
    (tmp_path / "in_a_text.py").write_text(IN_A_TEXT)
    process = start_python("-m", "in_a_text", "inspect", "x86", cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=50)
    assert (process.returncode, said) == (130, "relayquant: interrupted\n")


def test_workers__end_at_once() -> None:
    """Ctrl-C does not wait for the shards that workers are at. A result would be `None`."""
    at_work: list[Future[None]] = []

    def interrupt_work() -> None:
        with open_workers(1) as pool:
            assert pool is not None
            assert pool.submit(os.getpid).result() != os.getpid()
            at_work.append(pool.submit(time.sleep, 5))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_work()
    assert isinstance(at_work[0].exception(), BrokenExecutor)


@pytest.mark.slow
def test_output__that_nobody_reads_any_more() -> None:
    """As `relayquant inspect x86 | head -1` leaves it: no traceback, the exit code of shells."""
    process = start_python("-m", "relayquant", "inspect", "x86")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=300) == ExitCode.CUT_OFF
    assert process.stderr.read() == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["inspect", "--help"],
        ["--version"],
        pytest.param(["inspect", "x86"], marks=pytest.mark.slow),
        pytest.param(["inspect", "x86", "--json"], marks=pytest.mark.slow),
    ],
)
def test_output__of_a_full_disk(words: list[str]) -> None:
    """One line, and the exit code of a file that cannot be written."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "relayquant", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    expected = "relayquant: error: Cannot write standard output: No space left on device."
    assert done.stderr.startswith(expected), done.stderr
    assert (done.stderr.count("\n"), done.returncode) == (1, ExitCode.USER_ERROR)


def run_in_shell(words: str) -> tuple[int, str]:
    """The exit code of a command with redirections of a shell, and its standard error."""
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m relayquant {words}', sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_output__a_command_that_failed_on_a_full_disk():
    """One line says both, and the exit code is that of the command."""
    code, said = run_in_shell("nosuch --json >/dev/full")
    assert (code, said.count("\n")) == (ExitCode.USER_ERROR, 1), said
    assert said.startswith("relayquant: error: There is no command or file 'nosuch'.")
    assert "Cannot write standard output: No space left on device." in said


@pytest.mark.parametrize("words", ["nosuch", "bench nosuch.onnx", "nosuch --json"])
def test_output__a_mistake_that_cannot_be_told(words):
    """The exit code still says that the command line was wrong."""
    code, said = run_in_shell(f"{words} 2>/dev/full >/dev/null")
    assert (code, said) == (ExitCode.USER_ERROR, "")


def test_output__a_command_that_failed_into_a_closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "relayquant", "nosuch", "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(writer)
    assert (done.returncode, done.stderr.count("\n")) == (ExitCode.CUT_OFF, 1), done.stderr


@pytest.mark.parametrize(
    ("words", "code", "lines"),
    [
        ("--help >&-", ExitCode.OK, 0),
        ("--version --json >&-", ExitCode.OK, 0),
        ("nosuch --json >&-", ExitCode.USER_ERROR, 1),
        ("nosuch 2>&-", ExitCode.USER_ERROR, 0),
    ],
)
def test_output__a_closed_stream_takes_nothing(words: str, code: ExitCode, lines: int) -> None:
    done, said = run_in_shell(words)
    assert (done, said.count("\n")) == (code, lines), said
