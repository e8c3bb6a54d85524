"""Dispatch of compression jobs: rows of weights -> codes and scales, fitted by the processes of
an executor.
"""

from __future__ import annotations

import concurrent.futures as futures
import functools
import secrets
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from relayquant.base.runtime import limit_blas
from relayquant.base.storage.archive import Archive, read_archive, write_archive
from relayquant.base.storage.files import reading
from relayquant.errors import WorkerError, format_count
from relayquant.flow.compression.fit import (
    FitJob,
    FoundRows,
    GroupProblem,
    RunJobs,
    run_job,
    run_on_threads,
)
from relayquant.stages.calibration.checkpoint import Workspace, open_temporary
from relayquant.stages.calibration.dispatch import WORKER_TIMEOUT, JobMessages, dispatch_jobs
from relayquant.stages.calibration.store import BEGIN_ANEW

PROBLEM_FORMAT = "relayquant.group_problem.1"


@contextmanager
def open_workers(pool: futures.Executor | None, kept: Workspace | None) -> Iterator[RunJobs]:
    """Return the function that runs jobs: on threads of this process, or on the workers of
    `pool`. Workers find their files in the checkpoint or in a temporary folder.
    """
    if pool is None:
        yield run_on_threads
        return
    with ExitStack() as stack:
        workspace = kept or stack.enter_context(open_temporary())
        yield FitWorkers(pool, workspace).run


@dataclass(frozen=True, eq=False)
class FitWorkers:
    """The processes of `pool`. A problem is as large as many jobs, so workers load it from a
    file.
    """

    pool: futures.Executor
    workspace: Workspace
    # Workers cache files by path, and may outlive many runs in one folder.
    numbers: Iterator[int] = field(default_factory=lambda: count(secrets.randbits(62)))
    paths: MutableMapping[GroupProblem, Path] = field(default_factory=weakref.WeakKeyDictionary)

    def run(
        self, jobs: Iterable[tuple[FitJob, GroupProblem]]
    ) -> Iterator[tuple[FitJob, FoundRows]]:
        """Yield each job with its result, in any order.

        Raises:
            WorkerError: a job failed too often, the pool lost its workers, or they hang.
        """
        remote = [RemoteJob(job, self.place(problem)) for job, problem in jobs]
        for each, found in dispatch_jobs(
            self.pool, remote, run_remotely, WORKER_TIMEOUT, FIT_MESSAGES
        ):
            yield each.job, found

    def place(self, problem: GroupProblem) -> Path:
        """Return the file of a problem. It exists as long as the problem, for all weights that
        read one value.
        """
        if problem not in self.paths:
            path = self.paths[problem] = self.workspace.arguments(next(self.numbers))
            write_problem(path, problem)
            weakref.finalize(problem, path.unlink, missing_ok=True)
        return self.paths[problem]


@dataclass(frozen=True, eq=False)
class RemoteJob:
    """A job, and the file of its problem."""

    job: FitJob
    problem: Path


def run_remotely(remote: RemoteJob) -> FoundRows:
    """Run `run_job` in another process."""
    with limit_blas():
        return run_job(remote.job, load_problem(remote.problem))


def write_problem(path: Path, problem: GroupProblem) -> None:
    """Write the arrays of a problem; the file is never incomplete."""
    arrays = {name: getattr(problem, name) for name in ("factor", "order", "hessian", "importance")}
    write_archive(path, PROBLEM_FORMAT, Archive({"size": problem.size}, arrays))


@functools.lru_cache(maxsize=1)
def load_problem(path: Path) -> GroupProblem:
    """Load what `write_problem` wrote, once for all consecutive jobs with this problem. File
    names are unique in a folder, across runs.
    """
    with reading(path, "part of a compression", advice=BEGIN_ANEW):
        archive = read_archive(path, PROBLEM_FORMAT, "part of a compression")
        return GroupProblem.arrange(**archive.arrays, size=int(archive.header["size"]))


def describe_failure(remote: RemoteJob, attempt: int, error: BaseException) -> WorkerError:
    """Return the error for rows that no worker completed."""
    rows, columns = remote.job.rows, remote.job.columns
    return WorkerError(
        f"Rows from {rows.start} and columns from {columns.start} of a weight were not fitted: in "
        f"attempt {attempt} a worker failed with {type(error).__name__}: {error}. Give the workers "
        "more memory, or use fewer; a script that makes processes needs `if __name__ == "
        "'__main__':` around what it does; with checkpoint= the next run continues from here.",
        code="RQ504",
    )


def describe_silence(jobs: Sequence[RemoteJob], timeout: float | None) -> WorkerError:
    """Return the error for rows of which none came back."""
    return WorkerError(
        f"{format_count(len(jobs), 'part')} of a weight not fitted: no worker has returned "
        f"anything for {timeout:.10g} seconds, so they hang, or the executor has none. The "
        "processes of a ProcessPoolExecutor were killed. With checkpoint= the next run goes on "
        "from here.",
        code="RQ504",
    )


FIT_MESSAGES = JobMessages(describe_failure, describe_silence)
