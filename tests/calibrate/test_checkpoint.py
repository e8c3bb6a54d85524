"""Checkpoints: a calibration that was stopped anywhere goes on and gives the same bits; what does
not belong to it is refused.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from float_models import MAP, build_model, draw_batches
from tvm.relax import op

import relayquant as rq
from relayquant.calibrate.checkpoint import FOLDERS, Workspace, open_checkpoint
from relayquant.calibrate.runner import pick_parameters
from relayquant.events import CallbackList
from relayquant.lower.eager import EagerModule

BATCHES = 40


def model() -> tvm.IRModule:
    return build_model(lambda e, x: e.conv("out", e("r", op.nn.relu(e.conv("a", x)))), MAP)


def data() -> list[dict[str, np.ndarray]]:
    return draw_batches(model(), BATCHES)


class Stop(rq.Callback):
    """Stops when a task has got so far."""

    def __init__(self, task: str, done: int, act) -> None:
        self.task, self.limit, self.act = task, done, act
        self.seen: list[tuple[str, int, int | None]] = []

    def on_progress(self, event) -> None:
        self.seen.append((event.task, event.done, event.total))
        if event.task == self.task and event.done >= self.limit:
            self.act()


class Stopped(Exception):
    """Not an error of ours."""


def stop() -> None:
    raise Stopped


@pytest.fixture(scope="module")
def prepared():
    return rq.prepare(model())


@pytest.fixture
def calibrate(prepared, tmp_path):
    """Calibrates the model; returns the bytes of what was chosen."""

    def run(samples=None, *, of=prepared, listener=None, **options) -> bytes:
        callbacks = CallbackList((listener,)) if listener else None
        result = pick_parameters(
            of, samples or data(), load_module=EagerModule, callbacks=callbacks, **options
        )
        path = tmp_path / "result"
        result.save(path)
        return path.read_bytes()

    return run


@pytest.mark.parametrize(
    "options",
    [
        {"order": rq.Order.TOPOLOGICAL},
        {"order": rq.Order.TOPOLOGICAL, "calibration": rq.MovingAverageMinMax()},
        {"order": rq.Order.PARALLEL, "calibration": rq.MSE()},
        {"order": rq.Order.PARALLEL, "fit": rq.FitSettings(values=1)},
    ],
)
def test_checkpoint__goes_on_from_wherever_it_was_stopped(calibrate, tmp_path, options):
    want = calibrate(**options)
    counter = Stop("none", 0, stop)
    assert calibrate(checkpoint=tmp_path / "whole", listener=counter, **options) == want
    total = counter.seen[-1][2]
    steps = [done for task, done, _ in counter.seen if task == "calibrate"]
    assert steps == sorted(set(steps))
    assert steps[-1] == total
    path = tmp_path / "checkpoint"
    stops = [("read data", 1)]
    stops += [("calibrate", done) for done in (1, BATCHES, total // 2, total)]
    before = 0
    for task, done in stops:
        if done > total:
            continue
        listener = Stop(task, done, stop)
        with pytest.raises(Stopped):
            calibrate(checkpoint=path, listener=listener, **options)
        assert path.is_dir()
        resumed = [done for task, done, _ in listener.seen if task == "calibrate"]
        if resumed:
            # At most the shard that was at work is done again.
            assert resumed[0] >= before - 3
            before = resumed[-1]
    assert calibrate(checkpoint=path, **options) == want
    assert not path.exists()


def test_checkpoint__calls_of_a_callable_are_made_up_for(calibrate, tmp_path):
    calls: list[str] = []

    def pick(info, samples):
        calls.append(info.name)
        low, high = min(a.min() for a in samples), max(a.max() for a in samples)
        return rq.choose_qparams(low, high, info.spec)

    want = calibrate(calibration=pick)
    path, all_calls = tmp_path / "checkpoint", calls.copy()
    calls.clear()
    with pytest.raises(Stopped):
        calibrate(
            calibration=pick, checkpoint=path, listener=Stop("calibrate", 2 * BATCHES + 1, stop)
        )
    assert 0 < len(calls) < len(all_calls)
    assert calibrate(calibration=pick, checkpoint=path) == want
    assert calls == all_calls


SCRIPT = """
import os, sys
sys.path[:0] = [{tests!r}, {here!r}]
import relayquant as rq
from test_checkpoint import Stop, data, model

checkpoint, out, *stops = sys.argv[1:]
for stop in (*stops, None):
    child = os.fork()  # before anything has run in TVM
    if child:
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), os.path.exists(checkpoint), flush=True)
        continue
    listeners = ()
    if stop:
        task, done, number = stop.split(":")
        listeners = (Stop(task, int(done), lambda: os.kill(os.getpid(), int(number))),)
    try:
        prepared = rq.prepare(model())
        rq.calibrate(prepared, data(), checkpoint=checkpoint, callbacks=listeners)
        rq.save_prepared(prepared, out)
    except KeyboardInterrupt:
        os._exit(3)
    os._exit(0)
"""


def test_checkpoint__survives_kill_and_interrupt(tmp_path):
    """Real processes, really killed; the last one finishes."""
    here = Path(__file__).parent
    script = SCRIPT.format(tests=str(here.parent), here=str(here))
    checkpoint, out, want = tmp_path / "checkpoint", tmp_path / "out", tmp_path / "want"
    stops = [
        f"read data:9:{signal.SIGKILL}",
        f"calibrate:60:{signal.SIGINT}",
        f"calibrate:110:{signal.SIGKILL}",
    ]
    command = [sys.executable, "-c", script, str(checkpoint), str(out), *stops]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    killed = -signal.SIGKILL
    assert [line.split() for line in done.stdout.splitlines()] == [
        [str(killed), "True"], ["3", "True"], [str(killed), "True"], ["0", "False"],
    ], done.stderr  # fmt: skip
    prepared = rq.calibrate(rq.prepare(model()), data())
    rq.save_prepared(prepared, want)
    assert out.read_bytes() == want.read_bytes()


# --- What does not belong to it -----------------------------------------------------------------


@pytest.fixture
def stopped(calibrate, tmp_path) -> Path:
    """A checkpoint in the middle."""
    path = tmp_path / "checkpoint"
    with pytest.raises(Stopped):
        calibrate(checkpoint=path, listener=Stop("calibrate", 2 * BATCHES, stop))
    return path


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"order": rq.Order.PARALLEL}, r"differs: order \(was topological, is parallel\)\."),
        ({"fit": rq.FitSettings(sweeps=3)}, r"differs: fit \(was .*is .*sweeps=3"),
        (
            {"calibration": rq.MSE()},
            r"differs: calibration \(was that of the plan, is MSE\(bins=4096\)\)",
        ),
        ({"of": "plan"}, "differs: plan\\."),
        ({"of": "model"}, "differs: model, plan\\."),
    ],
)
def test_checkpoint__other_arguments_are_named(calibrate, stopped, options, what):
    if options.get("of") == "plan":
        plain = rq.QConfigMapping().set_global(rq.X86.default_qconfig)
        options = {"of": rq.prepare(model(), None, plain)}
    elif options.get("of") == "model":
        other = build_model(lambda e, x: e.conv("out", e.conv("a", x)), MAP)
        options = {"of": rq.prepare(other)}
    with pytest.raises(rq.ConfigError, match=f"belongs to another calibration; what {what}"):
        calibrate(checkpoint=stopped, **options)
    calibrate(checkpoint=stopped)  # and is not harmed


def test_checkpoint__other_data_is_named(calibrate, stopped):
    changed = data()
    changed[5]["x"] = changed[5]["x"] + 1
    with pytest.raises(rq.DataError, match="begun with other data: batch 5 differs"):
        calibrate(changed, checkpoint=stopped)
    with pytest.raises(rq.DataError, match="begun with 40 batches, the data set now has 39"):
        calibrate(data()[:-1], checkpoint=stopped)


def test_checkpoint__folders_that_are_none(calibrate, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(rq.ConfigError, match="is a file; allowed: a folder"):
        calibrate(checkpoint=tmp_path / "file")
    with pytest.raises(rq.ConfigError, match="holds files but no checkpoint"):
        calibrate(checkpoint=tmp_path / "full")
    with pytest.raises(rq.ConfigError, match="there is no folder"):
        calibrate(checkpoint=tmp_path / "none" / "checkpoint")
    assert (tmp_path / "full" / "file").read_text() == "x"


def test_checkpoint__one_process_at_a_time(tmp_path):
    with (
        open_checkpoint(tmp_path / "checkpoint", {}),
        pytest.raises(rq.ConfigError, match="in use by another process"),
        open_checkpoint(tmp_path / "checkpoint", {}),
    ):
        pass


@pytest.mark.parametrize("name", ["checkpoint", "data", "part", "module-0123"])
def test_checkpoint__what_a_kill_left_half_written_is_no_hindrance(calibrate, tmp_path, name):
    """A process may die between making the temporary file and renaming it, the first one too."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / f".{name}-k3v9x_0a.json").write_text('{"form')
    calibrate(checkpoint=path)
    assert not path.exists()


def test_checkpoint__survives_a_kill_in_its_removal(calibrate, tmp_path, monkeypatch):
    """Stopped before the first deletion, before the second, ...: each time it goes on."""
    want, path = calibrate(), tmp_path / "checkpoint"
    removals = 0

    def remove(self: Workspace) -> None:
        deletions = 0

        def before(act):
            def wrapped(*args, **options):
                nonlocal deletions
                if deletions == removals:
                    stop()
                deletions += 1
                return act(*args, **options)

            return wrapped

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", before(shutil.rmtree))
            patch.setattr(Path, "unlink", before(Path.unlink))
            whole_remove(self)

    whole_remove = Workspace.remove
    monkeypatch.setattr(Workspace, "remove", remove)
    while path.exists() or not removals:
        try:
            assert calibrate(checkpoint=path) == want
        except Stopped:
            removals += 1
    assert removals >= len(FOLDERS) + 3  # data.json, checkpoint.json and lock at least


def test_checkpoint__files_of_others_stay(calibrate, stopped):
    (stopped / "notes.txt").write_text("mine")
    calibrate(checkpoint=stopped)
    assert [path.name for path in stopped.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["checkpoint.json", "data.json", "steps/0"])
@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}'])
def test_checkpoint__damage_is_reported(calibrate, stopped, name, text):
    (stopped / name).write_text(text)
    with pytest.raises(rq.DataError):
        calibrate(checkpoint=stopped)


def test_checkpoint__holds_no_pickle(stopped):
    for path in stopped.rglob("*"):
        if path.is_file() and path.stat().st_size:
            start = path.read_bytes()[:6]
            assert start.startswith((b"PK", b"{")), path
    assert (
        json.loads((stopped / "checkpoint.json").read_text())["binding"]["order"] == "topological"
    )
    assert os.listdir(stopped / "shards") != []
