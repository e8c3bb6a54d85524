"""Weights fitted by the workers of an executor: the same bits as here, and none dies unseen."""

from __future__ import annotations

import concurrent.futures as futures
import multiprocessing
import shutil
import tempfile

import numpy as np
import pytest
import tvm
from test_compress_data import StopAfter, Stopped, compress_with_data, draw_texts
from tiny_llama import make_llama
from tvm import relax

import relayquant as rq
from relayquant.flow.compression import workers


class Inline(futures.Executor):
    """Runs calls at once, of which those with certain numbers fail; knows the files they saw."""

    def __init__(self, *failing):
        self.failing, self.calls, self.files = failing, 0, set()

    def submit(self, function, /, *args, **kwargs):
        self.calls += 1
        self.files.add(args[0].problem)
        future = futures.Future()
        if self.calls in self.failing:
            future.set_exception(MemoryError("no more"))
        else:
            future.set_result(function(*args, **kwargs))
        return future


class Silent(futures.Executor):
    """Never runs anything."""

    def submit(self, function, /, *args, **kwargs):
        return futures.Future()


@pytest.fixture
def few_rows(monkeypatch):
    """Jobs of a few rows."""
    monkeypatch.setattr("relayquant.flow.compression.fit.CHUNK", 800)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"effort": "best", "is_symmetric": False}])
def test_executor__processes_give_the_same_bits(llama, few_rows, settings, tmp_path):
    """And go on from what a run without them has finished."""
    expected = compress_with_data(llama, **settings)
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        found = compress_with_data(llama, workers=pool, **settings)
        tvm.ir.assert_structural_equal(found, expected)
        path = tmp_path / "weights"
        with pytest.raises(Stopped):
            compress_with_data(llama, checkpoint=path, callbacks=StopAfter(3), **settings)
        found = compress_with_data(llama, checkpoint=path, workers=pool, **settings)
    tvm.ir.assert_structural_equal(found, expected)
    assert not path.exists()


@pytest.mark.parametrize("is_kept", [False, True])
def test_executor__what_fails_is_given_out_again(llama, few_rows, is_kept, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    expected, executor = compress_with_data(llama), Inline(1, 4)
    kept = {"checkpoint": tmp_path / "kept"} if is_kept else {}
    tvm.ir.assert_structural_equal(compress_with_data(llama, workers=executor, **kept), expected)
    assert executor.calls == (6 + 3 + 4 + 4 + 4) + 2  # five weights by 12 or 9 rows; two again
    assert len(executor.files) == 4  # two of the weights read one value
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        rq.RelayQuantError,
        match=r"Rows from \d+ and columns from 0 of a weight were not fitted: in attempt 3 a "
        r"worker failed with MemoryError: no more",
    ):
        compress_with_data(llama, workers=Inline(*range(2, 999)), **kept)


def test_executor__weights_that_read_one_value_share_a_file(monkeypatch, tmp_path):
    """Which is gone with the problem in it, before the next is written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    builder, written, there = relax.BlockBuilder(), [], []
    x = relax.Var("x", relax.TensorType([8, 32], "float32"))
    with builder.function("main", [x]):
        rng = np.random.default_rng(0)
        weights = [rng.normal(size=(32, 32)).astype("float32") for _ in range(4)]
        parts = [builder.emit(relax.op.matmul(x, relax.const(each))) for each in weights[:3]]
        total = builder.emit(relax.op.add(builder.emit(relax.op.add(*parts[:2])), parts[2]))
        builder.emit_func_output(builder.emit(relax.op.matmul(total, relax.const(weights[3]))))
    data = [rng.normal(size=(8, 32)).astype("float32") for _ in range(4)]
    write = workers.write_problem

    def watch(path, problem):
        there.append([each for each in written if each.exists()])
        written.append(path)
        write(path, problem)

    monkeypatch.setattr(workers, "write_problem", watch)
    executor = Inline()
    rq.compress_weights(builder.finalize(), None, data, workers=executor)
    assert executor.calls == 4
    assert len(written) == 2
    assert there == [[], []]
    assert not list(tmp_path.iterdir())


def test_executor__workers_that_hang(llama, monkeypatch):
    monkeypatch.setattr(workers, "WORKER_TIMEOUT", 0.05)
    with pytest.raises(rq.RelayQuantError, match=r"1 part of a weight not fitted: no worker"):
        compress_with_data(llama, workers=Silent())


def test_executor__is_used_for_data_alone(llama):
    executor = Inline()
    rq.compress_weights(*llama, workers=executor)
    compress_with_data(llama, effort="fast", workers=executor)
    assert executor.calls == 0


def test_executor__refuses():
    with pytest.raises(rq.ConfigError, match="workers is 2; allowed: "):
        rq.compress_weights(*make_llama(), workers=2)
    context = multiprocessing.get_context("fork")
    with (
        futures.ProcessPoolExecutor(1, mp_context=context) as pool,
        pytest.raises(rq.ConfigError, match="forks this process"),
    ):
        rq.compress_weights(*make_llama(), workers=pool)


def test_executor__workers_tell_runs_in_one_folder_apart(llama, few_rows, tmp_path):
    """A worker that outlives a run keeps what it loaded last, by its path."""
    expected, kept = compress_with_data(llama), {"checkpoint": tmp_path / "weights"}
    workers.load_problem.cache_clear()
    other = {"dataset": draw_texts(3), "workers": Inline(), "callbacks": StopAfter(2)}
    with pytest.raises(Stopped):
        compress_with_data(llama, **other, **kept)
    assert workers.load_problem.cache_info().currsize == 1
    shutil.rmtree(tmp_path / "weights")
    found = compress_with_data(llama, workers=Inline(), **kept)
    tvm.ir.assert_structural_equal(found, expected)
