"""Dispatch of a step: shards -> merged states, in this process or on the workers of an executor."""

from __future__ import annotations

import concurrent.futures as futures
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import tvm

from relayquant.base.cores import count_threads
from relayquant.base.runtime import LoadModule
from relayquant.errors import ConfigError, FileError, RelayQuantError, WorkerError, format_count
from relayquant.stages.calibration.checkpoint import Workspace
from relayquant.stages.calibration.shard import (
    RemoteTask,
    ShardStates,
    ShardTask,
    StepArguments,
    run_shard,
    run_shard_remotely,
)
from relayquant.stages.calibration.store import Shard

J = TypeVar("J")
R = TypeVar("R")

#: attempts per job before the whole step fails
ATTEMPTS = 3
#: Seconds below which a shard is short: Python's threads take turns in this interval. Short shards
#: hand the interpreter lock to and fro, so two threads take as long as one, and more CPU time.
SHORT_SHARD = 5e-3
#: seconds without a result from any worker after which workers count as hung: a day, longer than
#: any real shard takes
WORKER_TIMEOUT = 86400.0
#: seconds in which a pool notices that its processes are dead
NOTICE_SECONDS = 30
#: number of values or shards that a message names
MOST_NAMED = 3


def check_executor(executor: Any) -> futures.Executor:
    """Return `executor` if calibration can use it.

    Raises:
        ConfigError: it is not an executor, or its processes are forks of this one.
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
    """Return `seconds` if it is a valid timeout. None waits without limit.

    Raises:
        ConfigError: it is not.
    """
    if seconds is not None and not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ConfigError(
            f"worker_timeout is {seconds!r}; allowed: seconds, more than 0 and at most "
            f"{threading.TIMEOUT_MAX:.0f}, or None to wait without limit.",
            code="RQ101",
        )
    return seconds


def kill_processes(pool: futures.Executor, waiting: Collection[futures.Future[Any]]) -> None:
    """Kill the processes of a ProcessPoolExecutor. Its `with` block would wait without limit for
    a process that hangs. Other executors are left to their owners.
    """
    # Before Python 3.14, which has kill_workers(), this is not public.
    processes = list((getattr(pool, "_processes", None) or {}).values())
    for process in processes:
        process.kill()
    if processes:
        # The pool notices the dead processes and fails its waiting jobs. Cancelling it earlier
        # breaks it.
        futures.wait(waiting, NOTICE_SECONDS)


class ShardRunner:
    """Runs the shards of a step, here or on the workers of `pool`, and merges their states."""

    def __init__(
        self,
        subgraphs: tvm.IRModule,
        workspace: Workspace,
        load_module: LoadModule,
        pool: futures.Executor | None,
        timeout: float | None = WORKER_TIMEOUT,
    ) -> None:
        self.workspace = workspace
        functions = subgraphs.functions
        # Workers load the subgraphs themselves.
        is_here = pool is None and len(functions) > 0
        self.functions = load_module(subgraphs) if is_here else None
        self.workers: Workers | None = None
        if pool is not None:
            module = workspace.write_module(tvm.ir.save_json(subgraphs)) if functions else None
            self.workers = Workers(pool, module, load_module, timeout)

    @property
    def writes_states(self) -> bool:
        """Whether the states of a shard are written to a file: for a checkpoint, or by a worker."""
        return self.workers is not None or self.workspace.is_kept

    def run(
        self,
        index: int,
        tasks: Sequence[ShardTask],
        arguments: StepArguments,
        advance: Callable[[int], object],
    ) -> ShardStates:
        """Return the states of step `index` on all shards, merged in shard order.

        Args:
            index: Index of the step.
            tasks: One per shard.
            arguments: See `run_shard`.
            advance: Called with the number of batches just completed.
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
            arguments.save(shared)
            for shard in self.workers.run(missing, shared):
                advance(len(shard))
            shared.unlink()
        return reduce(merge, (ShardStates.load(path, tasks[0]) for path in paths))

    def run_here(
        self,
        tasks: Sequence[ShardTask],
        arguments: StepArguments,
        advance: Callable[[int], object],
    ) -> Iterator[ShardStates]:
        """Yield each shard's states, in order. From the first one that is not short, several
        shards run at a time, one per core.
        """
        threads, rest, is_short = min(count_threads(), len(tasks)), deque(tasks), True
        while rest and (is_short or threads < 2):
            task, started = rest.popleft(), time.perf_counter()
            states = run_shard(task, self.functions, arguments)
            is_short = time.perf_counter() - started < SHORT_SHARD
            yield states
            advance(len(task.shard))
        if not rest:
            return
        with futures.ThreadPoolExecutor(threads, thread_name_prefix="relayquant") as pool:
            running: deque[futures.Future[ShardStates]] = deque()
            waiting = iter(rest)
            try:
                for task in rest:
                    # At most one shard ahead for each thread, because states can be large.
                    for later in islice(waiting, 2 * threads - len(running)):
                        running.append(pool.submit(run_shard, later, self.functions, arguments))
                    yield running.popleft().result()
                    advance(len(task.shard))
            finally:
                for future in running:
                    future.cancel()


@dataclass(frozen=True, eq=False)
class Workers:
    """The processes of `pool`. Each loads the subgraphs once from the file `module`, which is
    None if there is nothing to compute. Workers count as hung after `timeout` seconds without a
    shard.
    """

    pool: futures.Executor
    module: Path | None
    load_module: LoadModule
    timeout: float | None = WORKER_TIMEOUT

    def run(self, tasks: Sequence[tuple[ShardTask, Path]], arguments: Path) -> Iterator[Shard]:
        """Write each shard's states to its path on a worker. Yield each shard when it is done.

        A shard that fails is retried.

        Args:
            tasks: The tasks with the paths.
            arguments: File with the step's arguments.

        Raises:
            WorkerError: a shard failed too often, the pool lost its workers, or they hang; names
                the batches.
            RelayQuantError: an error of the task itself, for instance DataError.
        """
        jobs = [RemoteTask(task, self.module, arguments, path) for task, path in tasks]
        run = partial(run_shard_remotely, load_module=self.load_module)
        for remote, _ in dispatch_jobs(self.pool, jobs, run, self.timeout, SHARD_MESSAGES):
            yield remote.task.shard


@dataclass(frozen=True)
class JobMessages(Generic[J]):
    """The errors for jobs that no worker completed.

    Attributes:
        failure: Makes the error from the job, the attempt and the worker's exception.
        silence: Makes the error from the jobs without a result and the seconds waited.
    """

    failure: Callable[[J, int, BaseException], WorkerError]
    silence: Callable[[Sequence[J], float | None], WorkerError]


def dispatch_jobs(
    pool: futures.Executor,
    jobs: Iterable[J],
    run: Callable[[J], R],
    timeout: float | None,
    messages: JobMessages[J],
) -> Iterator[tuple[J, R]]:
    """Have the workers of `pool` run every job. Yield each job with its result when it is done.

    A job that fails is retried.

    Args:
        jobs: Plain data, as `run` is, because they are sent to other processes.
        timeout: Seconds without a result after which workers count as hung.

    Raises:
        WorkerError: a job failed too often, the pool lost its workers, or they hang.
        RelayQuantError: an error of the job itself, for instance DataError.
    """
    waiting: dict[futures.Future[R], tuple[J, int]] = {}

    def submit(job: J, attempt: int) -> None:
        try:
            future = pool.submit(run, job)
        except RuntimeError as error:  # it is broken, or shut down
            raise messages.failure(job, attempt, error) from error
        waiting[future] = job, attempt

    try:
        for job in jobs:
            submit(job, 1)
        while waiting:
            done, _ = futures.wait(waiting, timeout, futures.FIRST_COMPLETED)
            if not done:
                silent = [job for job, _ in waiting.values()]
                kill_processes(pool, waiting)
                raise messages.silence(silent, timeout)
            for future in done:
                job, attempt = waiting.pop(future)
                try:
                    result = future.result()
                except Exception as error:
                    # A file system error may be temporary. Wrong data or a wrong model stays wrong.
                    if isinstance(error, RelayQuantError) and not isinstance(error, FileError):
                        raise
                    if isinstance(error, futures.BrokenExecutor) or attempt >= ATTEMPTS:
                        raise messages.failure(job, attempt, error) from error
                    submit(job, attempt + 1)
                    continue
                yield job, result
    finally:
        for future in waiting:
            future.cancel()


def describe_silence(jobs: Sequence[RemoteTask], timeout: float | None) -> WorkerError:
    """Return the error for shards of which none came back."""
    tasks = [job.task for job in jobs]
    named = ", ".join(f"{t.shard.start}..{t.shard.stop - 1}" for t in tasks[:MOST_NAMED])
    if len(tasks) > MOST_NAMED:
        named += f" and {format_count(len(tasks) - MOST_NAMED, 'shard')} more"
    return WorkerError(
        f"Batches {named} were not calibrated: no worker has returned anything for {timeout:.10g} "
        "seconds, so they hang, or the executor has none. The processes of a ProcessPoolExecutor "
        "were killed. If a shard needs more time, call calibrate with a longer worker_timeout= "
        "(None waits without limit); with checkpoint= the next run continues from here.",
        code="RQ504",
    )


def describe_failure(job: RemoteTask, attempt: int, error: BaseException) -> WorkerError:
    """Return the error for a shard that no worker completed."""
    task, shard = job.task, job.task.shard
    observed = dict.fromkeys(name for subgraph in task.subgraphs for name in subgraph.observed)
    names = ", ".join(map(repr, islice(observed, MOST_NAMED))) or "nothing"
    if len(observed) > MOST_NAMED:
        names += f" and {format_count(len(observed) - MOST_NAMED, 'value')} more"
    return WorkerError(
        f"Batches {shard.start}..{shard.stop - 1} (shard {shard.index}) were not calibrated: in "
        f"attempt {attempt} a worker failed with {type(error).__name__}: {error}. It was to "
        f"observe {names}. Nothing of them was used. Give the workers more memory, or use fewer; "
        "a script that makes processes needs `if __name__ == '__main__':` around what it does; "
        "with checkpoint= the next run continues from here.",
        code="RQ504",
    )


SHARD_MESSAGES = JobMessages(describe_failure, describe_silence)
