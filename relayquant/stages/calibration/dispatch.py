"""Runs a step on all shards, in this process or on the workers of an executor, and merges what
was seen.
"""

from __future__ import annotations

import concurrent.futures as futures
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import tvm

from relayquant.base.runtime import LoadModule, count_threads
from relayquant.base.storage.archive import Archive, write_archive
from relayquant.errors import ConfigError, FileError, RelayQuantError, WorkerError, format_count
from relayquant.stages.calibration.checkpoint import Workspace
from relayquant.stages.calibration.shard import (
    ARGUMENTS_FORMAT,
    RemoteTask,
    ShardStates,
    ShardTask,
    run_shard,
    run_shard_remotely,
)
from relayquant.stages.calibration.store import Shard

J = TypeVar("J")
R = TypeVar("R")

#: a job is given to a worker so often before all of them are given up
ATTEMPTS = 3
#: seconds without a shard from any worker after which they count as hung: a day, which no shard of
#: a real data set takes
WORKER_TIMEOUT = 86400.0
#: seconds in which a pool notices that its processes are dead
NOTICE_SECONDS = 30
#: values, or shards, that a message names
MOST_NAMED = 3


def check_executor(executor: Any) -> futures.Executor:
    """`executor` if calibration can use it.

    Raises:
        ConfigError: it is no executor, or its processes are forks of this one.
    """
    if not isinstance(executor, futures.Executor):
        raise ConfigError(
            f"executor is {executor!r}; allowed: a concurrent.futures.Executor, such as a "
            "ProcessPoolExecutor or dask.distributed's Client(...).get_executor().",
            code="RQ101",
        )
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise ConfigError(
            "The ProcessPoolExecutor forks this process, whose TVM threads a fork does not have: "
            "its workers would hang. Make it with "
            "mp_context=multiprocessing.get_context('spawn').",
            code="RQ107",
        )
    return executor


def check_timeout(seconds: float | None) -> float | None:
    """`seconds` if workers can be waited for so long; None: for ever.

    Raises:
        ConfigError: they cannot.
    """
    if seconds is not None and not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ConfigError(
            f"worker_timeout is {seconds!r}; allowed: seconds, more than 0 and at most "
            f"{threading.TIMEOUT_MAX:.0f}, or None to wait for ever.",
            code="RQ101",
        )
    return seconds


def kill_processes(pool: futures.Executor, waiting: Collection[futures.Future[Any]]) -> None:
    """Kill the processes of a ProcessPoolExecutor: leaving its `with` block waits for them, and for
    ever for one that hangs. Other executors are left to their owners.
    """
    # Not public before Python 3.14, which has kill_workers().
    processes = list((getattr(pool, "_processes", None) or {}).values())
    for process in processes:
        process.kill()
    if processes:
        # The pool notices, and fails what waits; it does not bear that it is cancelled before.
        futures.wait(waiting, NOTICE_SECONDS)


class ShardRunner:
    """Runs the shards of a step, here or on the workers of `pool`, and merges what they saw."""

    def __init__(
        self,
        segments: tvm.IRModule,
        workspace: Workspace,
        load_module: LoadModule,
        pool: futures.Executor | None,
        timeout: float | None = WORKER_TIMEOUT,
    ) -> None:
        self.workspace = workspace
        functions = segments.functions
        # Workers load the segments themselves.
        is_here = pool is None and len(functions) > 0
        self.functions = load_module(segments) if is_here else None
        self.workers: Workers | None = None
        if pool is not None:
            module = workspace.write_module(tvm.ir.save_json(segments)) if functions else None
            self.workers = Workers(pool, module, load_module, timeout)

    @property
    def writes_states(self) -> bool:
        """Whether what was seen of a shard goes to a file: for a checkpoint, or from a worker."""
        return self.workers is not None or self.workspace.is_kept

    def run(
        self,
        index: int,
        tasks: Sequence[ShardTask],
        arguments: Mapping[str, Any],
        advance: Callable[[int], object],
    ) -> ShardStates:
        """What step `index` saw on all shards, merged in their order.

        Args:
            index: Of the step.
            tasks: One per shard.
            arguments: See `run_shard`.
            advance: Told how many batches more are done.
        """
        merge = partial(ShardStates.merge, tasks[0])
        if not self.writes_states:
            return reduce(merge, self.run_here(tasks, arguments, advance))
        paths = [self.workspace.states(index, task.shard) for task in tasks]
        missing = [(t, path) for t, path in zip(tasks, paths, strict=True) if not path.exists()]
        if len(missing) < len(tasks):
            advance(sum(len(t.shard) for t in tasks) - sum(len(t.shard) for t, _ in missing))
        if self.workers is None:
            seen = self.run_here([task for task, _ in missing], arguments, advance)
            for states, (_, path) in zip(seen, missing, strict=True):
                states.save(path)
        elif missing:
            shared = self.workspace.arguments(index)
            write_archive(shared, ARGUMENTS_FORMAT, Archive({}, dict(arguments)))
            for shard in self.workers.run(missing, shared):
                advance(len(shard))
            shared.unlink()
        return reduce(merge, (ShardStates.load(path, tasks[0]) for path in paths))

    def run_here(
        self,
        tasks: Sequence[ShardTask],
        arguments: Mapping[str, Any],
        advance: Callable[[int], object],
    ) -> Iterator[ShardStates]:
        """Each shard's states, in order; several at a time, one on each core."""
        threads = min(count_threads(), len(tasks))
        if threads < 2:
            for task in tasks:
                yield run_shard(task, self.functions, arguments)
                advance(len(task.shard))
            return
        with futures.ThreadPoolExecutor(threads, thread_name_prefix="relayquant") as pool:
            running: deque[futures.Future[ShardStates]] = deque()
            waiting = iter(tasks)
            try:
                for task in tasks:
                    # No more than one shard ahead for each thread: states are as large as they are
                    # many.
                    for later in islice(waiting, 2 * threads - len(running)):
                        running.append(pool.submit(run_shard, later, self.functions, arguments))
                    yield running.popleft().result()
                    advance(len(task.shard))
            finally:
                for future in running:
                    future.cancel()


@dataclass(frozen=True, eq=False)
class Workers:
    """The processes of `pool`, which load the segments in the file `module` once each; None when
    there is nothing to compute. When no shard has come back for `timeout` seconds, they hang.
    """

    pool: futures.Executor
    module: Path | None
    load_module: LoadModule
    timeout: float | None = WORKER_TIMEOUT

    def run(self, tasks: Sequence[tuple[ShardTask, Path]], arguments: Path) -> Iterator[Shard]:
        """Have each shard's states written to its path; yields each as it is done.

        A shard that fails is given out again.

        Args:
            tasks: With the paths.
            arguments: File of the step's arguments.

        Raises:
            WorkerError: it failed too often, or the pool lost its workers, or they hang; names the
                batches.
            RelayQuantError: what the task itself raises, for instance DataError.
        """
        jobs = [RemoteTask(task, self.module, arguments, path) for task, path in tasks]
        run = partial(run_shard_remotely, load_module=self.load_module)
        for remote, _ in deal_out(self.pool, jobs, run, self.timeout, SHARD_WORDS):
            yield remote.task.shard


@dataclass(frozen=True)
class JobWords(Generic[J]):
    """The errors for jobs that no worker does.

    Attributes:
        failure: For a job, the attempt, and what a worker failed with.
        silence: For jobs of which none came back in so many seconds.
    """

    failure: Callable[[J, int, BaseException], WorkerError]
    silence: Callable[[Sequence[J], float | None], WorkerError]


def deal_out(
    pool: futures.Executor,
    jobs: Iterable[J],
    run: Callable[[J], R],
    timeout: float | None,
    words: JobWords[J],
) -> Iterator[tuple[J, R]]:
    """Have the workers of `pool` run every job; yields each with its result as it is done.

    A job that fails is given out again.

    Args:
        jobs: Plain data, as `run` is: they travel to other processes.
        timeout: Seconds without a result after which workers count as hung.

    Raises:
        WorkerError: a job failed too often, or the pool lost its workers, or they hang.
        RelayQuantError: what the job itself raises, for instance DataError.
    """
    waiting: dict[futures.Future[R], tuple[J, int]] = {}

    def submit(job: J, attempt: int) -> None:
        try:
            future = pool.submit(run, job)
        except RuntimeError as error:  # it is broken, or shut down
            raise words.failure(job, attempt, error) from error
        waiting[future] = job, attempt

    try:
        for job in jobs:
            submit(job, 1)
        while waiting:
            done, _ = futures.wait(waiting, timeout, futures.FIRST_COMPLETED)
            if not done:
                silent = [job for job, _ in waiting.values()]
                kill_processes(pool, waiting)
                raise words.silence(silent, timeout)
            for future in done:
                job, attempt = waiting.pop(future)
                try:
                    result = future.result()
                except Exception as error:
                    # A file system may come back; data or a model stays wrong.
                    if isinstance(error, RelayQuantError) and not isinstance(error, FileError):
                        raise
                    if isinstance(error, futures.BrokenExecutor) or attempt >= ATTEMPTS:
                        raise words.failure(job, attempt, error) from error
                    submit(job, attempt + 1)
                    continue
                yield job, result
    finally:
        for future in waiting:
            future.cancel()


def describe_silence(jobs: Sequence[RemoteTask], timeout: float | None) -> WorkerError:
    """The error for shards of which none came back."""
    tasks = [job.task for job in jobs]
    named = ", ".join(f"{t.shard.start}..{t.shard.stop - 1}" for t in tasks[:MOST_NAMED])
    if len(tasks) > MOST_NAMED:
        named += f" and {format_count(len(tasks) - MOST_NAMED, 'shard')} more"
    return WorkerError(
        f"Batches {named} were not calibrated: no worker has returned anything for {timeout:.10g} "
        "seconds, so they hang, or the executor has none. The processes of a ProcessPoolExecutor "
        "were killed. If a shard does take so long, call calibrate with a longer worker_timeout= "
        "(None waits for ever); with checkpoint= the next run goes on from here.",
        code="RQ504",
    )


def describe_failure(job: RemoteTask, attempt: int, error: BaseException) -> WorkerError:
    """The error for a shard that no worker finished."""
    task, shard = job.task, job.task.shard
    observed = dict.fromkeys(name for segment in task.segments for name in segment.observed)
    names = ", ".join(map(repr, islice(observed, MOST_NAMED))) or "nothing"
    if len(observed) > MOST_NAMED:
        names += f" and {format_count(len(observed) - MOST_NAMED, 'value')} more"
    return WorkerError(
        f"Batches {shard.start}..{shard.stop - 1} (shard {shard.index}) were not calibrated: in "
        f"attempt {attempt} a worker failed with {type(error).__name__}: {error}. It was to "
        f"observe {names}. Nothing of them was used. Give the workers more memory, or use fewer; "
        "a script that makes processes needs `if __name__ == '__main__':` around what it does; "
        "with checkpoint= the next run goes on from here.",
        code="RQ504",
    )


SHARD_WORDS = JobWords(describe_failure, describe_silence)
