"""Calibration on the workers of an executor: the same bits as here, and no worker dies unseen."""

from __future__ import annotations

import concurrent.futures as futures
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tvm
from float_models import MAP, build_model, draw_batches
from tvm.relax import op

import relayquant as rq
from relayquant.stages.calibration import dispatch

BATCHES = 40


def model() -> tvm.IRModule:
    return build_model(lambda e, x: e.conv("out", e("r", op.nn.relu(e.conv("a", x)))), MAP)


def data() -> list[dict[str, np.ndarray]]:
    return draw_batches(model(), BATCHES)


@pytest.fixture(scope="module")
def pool():
    """Two processes that begin anew: what a user makes."""
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        yield executor


def calibrated(path: Path, **options) -> bytes:
    """The file of a calibrated model."""
    prepared = rq.prepare(model(), effort=options.pop("effort", "balanced"))
    prepared = rq.calibrate(prepared, data(), **options)
    rq.save_prepared(prepared, path)
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"order": rq.config.Order.TOPOLOGICAL},
        {"order": rq.config.Order.PARALLEL, "observer": rq.observers.AverageMax()},
        {"order": rq.config.Order.PARALLEL, "fit": rq.config.FitSettings(values=1)},
        {
            "fit": rq.config.FitSettings(
                reconstruction=rq.config.ReconstructionSettings(bits=8, samples=3)
            )
        },
    ],
)
def test_processes__give_the_same_bytes(pool, tmp_path, options):
    want = calibrated(tmp_path / "here", **options)
    assert calibrated(tmp_path / "there", workers=pool, **options) == want


@pytest.mark.slow
def test_processes__with_a_checkpoint_and_a_callable(pool, tmp_path):
    def pick(info, samples):
        low, high = min(a.min() for a in samples), max(a.max() for a in samples)
        return rq.choose_qparams(low, high, info.spec)

    want = calibrated(tmp_path / "here", observer=pick)
    path = tmp_path / "checkpoint"
    have = calibrated(tmp_path / "there", observer=pick, workers=pool, checkpoint=path)
    assert have == want
    assert not path.exists()


@dataclass(frozen=True)
class Deadly(rq.observers.MinMax):
    """Takes its process with it, once it has seen a few batches."""

    def update(self, state, array):
        if state.count >= 1:
            os._exit(7)
        return super().update(state, array)


@pytest.mark.slow
def test_processes__a_dead_one_is_reported_and_the_work_is_not_lost(tmp_path):
    path = tmp_path / "checkpoint"
    context = multiprocessing.get_context("spawn")
    with (
        futures.ProcessPoolExecutor(1, mp_context=context) as executor,
        pytest.raises(
            rq.errors.WorkerError,
            match=r"Batches \d+\.\.\d+ \(shard \d+\) were not calibrated: in attempt 1 a worker "
            r"failed with BrokenProcessPool.* observe 'x'",
        ),
    ):
        calibrated(tmp_path / "out", workers=executor, observer=Deadly(), checkpoint=path)
    assert (path / "data.json").exists()


class Inline(futures.Executor):
    """Runs what it is given at once; fails at the calls that are named."""

    def __init__(self, *fail: int, error: Exception | None = None) -> None:
        self.fail, self.error, self.calls = fail, error or OSError("the node is gone"), 0

    def submit(self, fn, /, *args, **kwargs):
        future = futures.Future()
        self.calls += 1
        try:
            if self.calls in self.fail:
                raise self.error
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def test_retry__a_shard_that_failed_is_done_again(tmp_path):
    want = calibrated(tmp_path / "here", effort="fast")
    executor = Inline(1, 2, 15)
    assert calibrated(tmp_path / "there", effort="fast", workers=executor) == want
    assert executor.calls == 20 + 3  # the shards, and three times again


def test_retry__ends(tmp_path):
    executor = Inline(*range(3, 1000))
    with pytest.raises(
        rq.errors.WorkerError, match=r"in attempt 3 a worker failed with OSError: the nod"
    ):
        calibrated(tmp_path / "there", effort="fast", workers=executor)


# --- Workers that hang ----------------------------------------------------------------------------


class Silent(futures.Executor):
    """Nothing that is given to it ever runs: a cluster without workers."""

    def __init__(self, act=lambda: None) -> None:
        self.act, self.futures = act, []

    def submit(self, fn, /, *args, **kwargs):
        self.futures.append(futures.Future())
        if len(self.futures) == 1:
            self.act()
        return self.futures[-1]


def test_silence__is_an_error_that_names_the_batches(tmp_path):
    executor, path = Silent(), tmp_path / "checkpoint"
    with pytest.raises(
        rq.errors.WorkerError,
        match=r"Batches 0\.\.1, 2\.\.3, 4\.\.5 and 17 shards more were not calibrated: no worker "
        r"has returned anything for 0\.1 seconds.*longer worker_timeout=",
    ):
        calibrated(
            tmp_path / "out", effort="fast", workers=executor, checkpoint=path, worker_timeout=0.1
        )
    assert all(future.cancelled() for future in executor.futures)
    want = calibrated(tmp_path / "here", effort="fast")
    assert calibrated(tmp_path / "out", effort="fast", checkpoint=path) == want


@dataclass(frozen=True)
class Hanging(rq.observers.MinMax):
    """Does not come back, as far as a test can wait."""

    def update(self, state, array):
        time.sleep(300)
        return super().update(state, array)


@pytest.mark.slow
def test_silence__processes_are_killed_so_that_the_pool_can_be_left(tmp_path):
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        with pytest.raises(
            rq.errors.WorkerError, match="no worker has returned anything for 1 seconds"
        ):
            calibrated(tmp_path / "out", workers=executor, observer=Hanging(), worker_timeout=1)
        processes = set(multiprocessing.active_children()) - others
    # Asked by number: the pool's own thread collects the processes, and then a Process object
    # that another thread asks cannot tell that it is dead.
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


@pytest.mark.slow
def test_interrupt__leaves_nothing_in_the_executor(tmp_path):
    """Ctrl-C while workers are waited for."""
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    executor, path = Silent(timer.start), tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        calibrated(tmp_path / "out", effort="fast", workers=executor, checkpoint=path)
    assert all(future.cancelled() for future in executor.futures)
    want = calibrated(tmp_path / "here", effort="fast")
    assert calibrated(tmp_path / "out", effort="fast", checkpoint=path) == want


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_timeout__what_is_none(seconds):
    prepared = rq.prepare(model(), effort="fast")
    with pytest.raises(rq.ConfigError, match=r"worker_timeout is .*; allowed: seconds, more than"):
        rq.calibrate(prepared, data(), workers=Inline(), worker_timeout=seconds)


def test_threads__share_one_virtual_machine(tmp_path):
    want = calibrated(tmp_path / "here", effort="fast")
    with futures.ThreadPoolExecutor(4) as executor:
        assert calibrated(tmp_path / "there", effort="fast", workers=executor) == want


@pytest.mark.parametrize("is_short", [True, False])
def test_threads__short_shards_run_on_the_calling_thread(tmp_path, monkeypatch, is_short):
    ran, run_shard = set(), dispatch.run_shard

    def note_thread(*args):
        ran.add(threading.get_ident())
        return run_shard(*args)

    want = calibrated(tmp_path / "unchanged")
    monkeypatch.setattr(dispatch, "run_shard", note_thread)
    monkeypatch.setattr(dispatch, "count_threads", lambda: 2)
    monkeypatch.setattr(dispatch, "SHORT_SHARD", float("inf") if is_short else 0.0)
    assert calibrated(tmp_path / "states") == want
    assert (ran == {threading.get_ident()}) is is_short


def test_error__of_the_data_is_the_same_as_here():
    def bad():
        yield from data()[:7]
        yield {"x": np.full(MAP, 3e38, "float32")}

    messages = []
    for executor in (None, Inline()):
        with pytest.raises(rq.DataError, match="infinite") as caught:
            rq.calibrate(rq.prepare(model(), effort="fast"), bad, workers=executor)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.slow
def test_executor__what_is_none():
    prepared = rq.prepare(model(), effort="fast")
    with pytest.raises(rq.ConfigError, match="workers is 2; allowed: an Executor"):
        rq.calibrate(prepared, data(), workers=2)
    context = multiprocessing.get_context("fork")
    with (
        futures.ProcessPoolExecutor(1, mp_context=context) as executor,
        pytest.raises(rq.ConfigError, match=r"forks this process.*get_context.'spawn'"),
    ):
        rq.calibrate(prepared, data(), workers=executor)
    with futures.ThreadPoolExecutor(1) as executor:
        pass
    with pytest.raises(rq.errors.WorkerError, match="cannot schedule new futures after shutdown"):
        rq.calibrate(prepared, data(), workers=executor)


@pytest.mark.slow
def test_dask__a_cluster_of_two_processes(tmp_path):
    distributed = pytest.importorskip("distributed", reason="the extra dask is not installed")
    want = calibrated(tmp_path / "here", effort="fast")
    with (
        mock.patch.dict(os.environ),  # dask sets glibc's limits there for all later tests
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        have = calibrated(tmp_path / "there", effort="fast", workers=client.get_executor())
    assert have == want
