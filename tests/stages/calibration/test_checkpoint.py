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
from relayquant.base.events import CallbackList
from relayquant.codegen.eager import EagerModule
from relayquant.stages.calibration import checkpoint
from relayquant.stages.calibration.checkpoint import FOLDERS, Workspace, open_checkpoint
from relayquant.stages.calibration.runner import pick_parameters

BATCHES = 40

#: weights fitted to the sums of the float model, which runs beside
AFTER_FLOAT = rq.config.FitSettings(reconstruction=rq.config.ReconstructionSettings(bits=8))


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


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "options",
    [
        {"order": rq.config.Order.TOPOLOGICAL},
        {"order": rq.config.Order.TOPOLOGICAL, "observer": rq.observers.MovingAverageMinMax()},
        {"order": rq.config.Order.PARALLEL, "observer": rq.observers.MSE()},
        {"order": rq.config.Order.PARALLEL, "fit": rq.config.FitSettings(values=1)},
        {"order": rq.config.Order.PARALLEL, "fit": AFTER_FLOAT},
        {"order": rq.config.Order.TOPOLOGICAL, "fit": AFTER_FLOAT},
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

    want = calibrate(observer=pick)
    path, all_calls = tmp_path / "checkpoint", calls.copy()
    calls.clear()
    with pytest.raises(Stopped):
        calibrate(observer=pick, checkpoint=path, listener=Stop("calibrate", 2 * BATCHES + 1, stop))
    assert 0 < len(calls) < len(all_calls)
    assert calibrate(observer=pick, checkpoint=path) == want
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
        prepared = rq.calibrate(prepared, data(), checkpoint=checkpoint, callbacks=listeners)
        rq.save_prepared(prepared, out)
    except KeyboardInterrupt:
        os._exit(3)
    os._exit(0)
"""


@pytest.mark.slow
def test_checkpoint__survives_kill_and_interrupt(tmp_path):
    """Real processes, really killed; the last one finishes."""
    here = Path(__file__).parent
    script = SCRIPT.format(tests=str(here.parents[1]), here=str(here))
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


#: Kills children before what they are about to do to the checkpoint's files; prints what became of
#: each, and of the one that went on.
MOMENTS = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import relayquant as rq
from float_models import build_model, draw_batches
from tvm.relax import op

ACTS = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir")
checkpoint, out, times = sys.argv[1], sys.argv[2], int(sys.argv[3])

def model():
    return build_model(
        lambda e, x: e.dense("out", e("r", op.nn.relu(e.dense("a", x, 4))), 3), (2, 8)
    )

def run(signal_at=None, number=signal.SIGKILL):
    done = 0

    def watch(act, arguments):
        nonlocal done
        if act in ACTS and checkpoint in str(arguments[0]):
            if done == signal_at:
                os.kill(os.getpid(), number)
            done += 1

    sys.addaudithook(watch)
    prepared = rq.prepare(model())
    prepared = rq.calibrate(prepared, draw_batches(model(), 6), checkpoint=checkpoint)
    rq.save_prepared(prepared, out)
    return done

def begin(act):
    child = os.fork()  # with one thread, so that nothing is left behind
    if child:
        return child
    try:
        print(act(), end=" ", flush=True)
        os._exit(0)
    except rq.ConfigError as error:
        print(error, end=" ", flush=True)
        os._exit(3)

def end(child, options=0):
    status = os.waitpid(child, options)[1]
    return os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)

def read_result():
    with open(out, "rb") as file:
        found = file.read()
    os.remove(out)
    return found

total = run()  # here: what is compiled is compiled for all of them
whole = read_result()
print(total, flush=True)
for i in range(times):
    killed = end(begin(lambda: run(total * i // times)))
    had = os.path.exists(out)
    went_on = end(begin(run))
    print(killed, had, went_on, read_result() == whole, os.path.exists(checkpoint), flush=True)
first = begin(lambda: run(total // 2, signal.SIGSTOP))
stopped = end(first, os.WUNTRACED)
print(stopped, end(begin(run)), flush=True)
os.kill(first, signal.SIGCONT)
print(end(first), read_result() == whole, os.path.exists(checkpoint), flush=True)
"""


@pytest.mark.slow
def test_checkpoint__killed_at_twenty_moments_and_used_by_two(tmp_path):
    """From before the folder is made to its removal: whoever goes on ends with the bits of a run
    that nothing disturbed. Who finds another process at work keeps away, and harms nothing.
    """
    script = MOMENTS.format(tests=str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", script, str(tmp_path / "checkpoint"), str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "20"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TVM_NUM_THREADS": "1"},
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 23, done.stderr
    total = int(lines[0])
    assert total > 100, "moments are apart"
    *kills, refused, finished = lines[1:]
    found = [line.split() for line in kills]
    for _, *became in found:
        assert became == [str(-signal.SIGKILL), "False", "0", "True", "False"], kills
    acts = [int(count) for count, *_ in found]
    assert acts[-1] < total / 2 < acts[0], "who goes on late has little to do"
    assert "in use by another process" in refused
    assert refused.split()[-2:] == [str(signal.SIGSTOP.value), "3"]
    assert finished.split()[-3:] == ["0", "True", "False"]


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
        ({"order": rq.config.Order.PARALLEL}, r"differs: order \(was topological, is parallel\)\."),
        ({"fit": rq.config.FitSettings(sweeps=3)}, r"differs: fit \(was .*is .*sweeps=3"),
        (
            {"observer": rq.observers.MSE()},
            r"differs: observer \(was that of the plan, is MSE\(bins=4096\)\)",
        ),
        ({"of": "plan"}, "differs: plan\\."),
        ({"of": "model"}, "differs: model, plan\\."),
    ],
)
def test_checkpoint__other_arguments_are_named(calibrate, stopped, options, what):
    if options.get("of") == "plan":
        plain = rq.QConfigMapping().set_global(rq.get_backend_config("x86").default_qconfig)
        options = {"of": rq.prepare(model(), None, qconfig_mapping=plain)}
    elif options.get("of") == "model":
        other = build_model(lambda e, x: e.conv("out", e.conv("a", x)), MAP)
        options = {"of": rq.prepare(other)}
    with pytest.raises(rq.ConfigError, match=f"belongs to another calibration; what {what}"):
        calibrate(checkpoint=stopped, **options)
    calibrate(checkpoint=stopped)  # and is not harmed


def test_checkpoint__another_cpu_is_named(calibrate, stopped, monkeypatch):
    """Float results may differ between CPUs of one name with other features."""
    own = checkpoint.name_host()
    monkeypatch.setattr(checkpoint, "name_host", lambda: f"{own} -fma")
    with pytest.raises(rq.ConfigError, match=rf"processor \(was .*{own[-5:]}, is .* -fma\)"):
        calibrate(checkpoint=stopped)


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


@pytest.mark.slow
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


@pytest.mark.sample(3)
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
