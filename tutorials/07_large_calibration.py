"""
Calibrate with much data
========================

Calibration data may be larger than memory, calibration may take longer than a machine stays up, and
there may be more processors than one process uses. None of it changes the result: the same data
gives the same bits.
"""

# %%
# Data that is never in memory
# ----------------------------
# A data set may be a function that returns an iterator. Samples are read once, one batch at a time;
# observers keep a state of fixed size (a range, a histogram that gets coarser as the range grows, a
# bounded sample of rows), and values that later steps need wait on disk. Memory is the same for ten
# samples and for ten million.

import concurrent.futures
import multiprocessing
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import relayquant as rq
from relayquant.demo import load_digits

demo = load_digits()
mod, params = rq.load(str(demo.model_path))


def draw_samples() -> Iterator[np.ndarray]:
    """A thousand digits, made when they are needed; the same ones every time."""
    rng = np.random.default_rng(0)
    for _ in range(64):
        batch = demo.calibration[rng.integers(len(demo.calibration))]
        yield (batch + rng.normal(0, 0.02, batch.shape)).astype("float32")


def prepare() -> rq.PreparedModel:
    """The model before calibration."""
    return rq.prepare(mod, params, effort="fast")


def save(prepared: rq.PreparedModel, path: Path) -> bytes:
    """Write a calibrated model to one file; equal models give equal bytes."""
    rq.save_prepared(prepared, path)
    return path.read_bytes()


# %%
# The rest of this file makes processes, which begin by reading it: what they must not do again
# stands in functions, and the last lines call them.
#
# Stop and go on
# --------------
# With ``checkpoint=`` a folder holds what has been computed. A calibration that is interrupted, or
# killed, goes on from there when it is started again with the same arguments. The folder is bound
# to the model, the plan, the settings and the data; with other ones there is an error that says
# what differs. In the end it is deleted.


class PowerCut(Exception):
    """What goes wrong in this tutorial."""


class CutPower(rq.Callback):
    """Stops the calibration after so many batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_progress(self, event) -> None:
        if event.task == "calibrate" and event.done >= self.batches:
            raise PowerCut(f"after {event.done} of {event.total} batches")


class ShowStart(rq.Callback):
    """Prints where calibration begins."""

    shown = False

    def on_progress(self, event) -> None:
        if event.task == "calibrate" and not self.shown:
            print(f"goes on at {event.done} of {event.total} batches")
            self.shown = True


def stop_and_go_on(folder: Path) -> bytes:
    prepared, checkpoint = prepare(), folder / "checkpoint"
    try:
        rq.calibrate(prepared, draw_samples, checkpoint=checkpoint, callbacks=CutPower(40))
    except PowerCut as cut:
        print(f"power cut {cut}")
    prepared = rq.calibrate(prepared, draw_samples, checkpoint=checkpoint, callbacks=ShowStart())
    return save(prepared, folder / "resumed")


# %%
# Several processes
# -----------------
# ``workers=`` takes any ``concurrent.futures.Executor``: here two processes, on a cluster
# ``dask.distributed.Client(...).get_executor()``. Each step's batches are cut into shards, the
# workers run them, and what their observers saw is merged in the order of the data. Processes must
# be spawned, not forked. A worker that dies is an error that names its batches; together with
# ``checkpoint=`` nothing else is lost. Across machines the checkpoint also is the folder that all
# of them see. A terminal sends Ctrl-C to all processes: workers that ignore it print no tracebacks.


def use_processes(folder: Path) -> bytes:
    context = multiprocessing.get_context("spawn")
    prepared = prepare()
    with concurrent.futures.ProcessPoolExecutor(
        2,
        mp_context=context,
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    ) as executor:
        prepared = rq.calibrate(prepared, draw_samples, workers=executor)
    return save(prepared, folder / "parallel")


# %%
# Files instead of an executor
# ----------------------------
# Where processes cannot talk to each other, each calibrates with its own data and writes a file.
# With ``order="parallel"``, the default but for ``effort="best"``, all values are observed
# in the float model, so that what two processes saw can be put together. (In topological order
# each value is seen with everything before it already rounded, and only one process can decide.)


def merge_files(folder: Path) -> None:
    batches = list(draw_samples())
    parts = []
    for i, part in enumerate((batches[:40], batches[40:])):
        prepared = prepare()
        prepared = rq.calibrate(prepared, part, order=rq.config.Order.PARALLEL)
        save(prepared, folder / f"part{i}")
        parts.append(rq.load_prepared(folder / f"part{i}"))
    merged = rq.merge_statistics(*parts)
    whole = rq.calibrate(prepare(), batches, order=rq.config.Order.PARALLEL)
    same = merged.parameters == whole.parameters
    print(f"parameters of two files together are those of all data: {same}")


# %%
# All of it
# ---------


def main(folder: Path) -> None:
    prepared = rq.calibrate(prepare(), draw_samples)
    whole = save(prepared, folder / "whole")
    print("resumed: the same bytes:", stop_and_go_on(folder) == whole)
    print("two processes: the same bytes:", use_processes(folder) == whole)
    merge_files(folder)
    qmod = rq.lower(rq.convert_to_reference(prepared), prepared.backend)
    (logits,) = rq.reference.run(qmod, demo.images)
    print(f"accuracy of the integers {(logits.argmax(1) == demo.labels).mean():.1%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
