"""Run the same model in several engines, each in its own process, to compare speed.

Engines in one process disturb each other: their threads spin while they wait, and their allocators
differ. Here each has its own process, and they take turns, so a busy moment of the machine affects
all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from relayquant.analysis.speed.latency import TURN, Latency, Timing, measure_turns
from relayquant.base.storage.files import TEMPORARY, open_temporary_folder, writing
from relayquant.config import Precision
from relayquant.errors import ModelError

SCRIPT = Path(__file__).with_name("engine_process.py")
#: runs of a turn in which runs do not follow each other at once
SPACED_RUNS = 10
#: characters of a process's stderr that a message repeats
TAIL = 500


class Engine(Enum):
    """An engine that runs a model. Its value is the package name."""

    RELAYQUANT = "relayquant"
    ONNXRUNTIME = "onnxruntime"
    OPENVINO = "openvino"


@dataclass(frozen=True)
class Candidate:
    """A model for one engine: a library that `export_library` wrote, an ONNX file or an OpenVINO
    file.
    """

    engine: Engine
    path: Path
    precision: Precision | None = None  #: of the products of a float model


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a process, including the engine, the model and file pages."""

    now: int
    peak: int  #: maximum since the process started


@dataclass(frozen=True)
class Comparison:
    """Times of the engines that ran, and why others failed.

    Attributes:
        latencies: Name -> times.
        failures: Name -> the engine's message.
        memory: Name -> memory of its process after all were timed.
    """

    latencies: Mapping[str, Latency]
    failures: Mapping[str, str]
    memory: Mapping[str, Memory]


class EngineProcess:
    """A process with one engine and one loaded model. Ends with the `with` block."""

    def __init__(
        self,
        candidate: Candidate,
        inputs: Path,
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.candidate = candidate
        with writing("temporary files", TEMPORARY):
            self.stderr: IO[str] = tempfile.TemporaryFile(  # noqa: SIM115
                "w+", errors="replace"
            )
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            env={
                **os.environ,
                **(environment or {}),
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "TVM_NUM_THREADS": str(threads),
            },
        )
        self.send(
            {
                "engine": candidate.engine.value,
                "path": str(candidate.path),
                "precision": candidate.precision and candidate.precision.value,
                "inputs": str(inputs),
                "threads": threads,
            }
        )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.stderr.close()

    def wait_ready(self) -> None:
        """Wait until the model has run once.

        Raises:
            ModelError: the engine cannot load or run it.
        """
        answer = self.receive()
        if "error" in answer:
            raise ModelError(f"{self.candidate.path.name}: {answer['error']}", code="RQ504")

    def take_turn(self, interval: float = 0.0) -> Sequence[Timing]:
        """Return the timed runs of one turn, which start every `interval` seconds."""
        self.send({"turn": max(TURN, SPACED_RUNS * interval), "interval": interval})
        return [(passed, cpu) for passed, cpu in self.receive()]

    def read_memory(self) -> Memory:
        """Return the memory of the process now. Zeros if the system is not Linux."""
        self.send({"memory": True})
        return Memory(*self.receive())

    def send(self, message: Mapping[str, Any]) -> None:
        pipe = self.process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()
        except BrokenPipeError:
            pass  # The process has ended: `receive` reports how.

    def receive(self) -> Any:
        """Return the next answer.

        Raises:
            ModelError: the process has ended.
        """
        pipe = self.process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            code = self.process.wait()
            self.stderr.seek(0)
            words = self.stderr.read()[-TAIL:].strip()
            raise ModelError(
                f"{self.candidate.path.name}: the process of {self.candidate.engine.value} ended "
                f"with code {code}: {words}",
                code="RQ504",
            )
        return json.loads(line)


def measure_engines(
    candidates: Mapping[str, Candidate],
    inputs: Mapping[str, np.ndarray],
    *,
    threads: int,
    rounds: int,
    interval: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> Comparison:
    """Time each candidate in its own process, in `rounds` turns.

    Args:
        candidates: Name -> model and engine.
        inputs: Input -> array, in the order of the model's inputs.
        threads: Number of threads for each engine.
        rounds: Turns of each, >= 1.
        interval: Seconds from the start of a run to the start of the next run in a turn. 0: runs
            follow each other at once. After an idle time, caches are cold and threads asleep.
        environment: Variables that each process gets besides ours, such as limits of an engine.

    Raises:
        ModelError: an engine ended while it was timed. An engine that cannot load its model is
            listed in the failures.
    """
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        file = stack.enter_context(open_temporary_folder()) / "inputs.npz"
        with writing(file, TEMPORARY):
            np.savez(file, **inputs)
        started = {
            name: stack.enter_context(EngineProcess(candidate, file, threads, environment))
            for name, candidate in candidates.items()
        }
        for name, process in started.items():
            try:
                process.wait_ready()
            except ModelError as error:
                failures[name] = str(error)
        ready = {name: each for name, each in started.items() if name not in failures}
        turns = {name: partial(process.take_turn, interval) for name, process in ready.items()}
        latencies = measure_turns(turns, rounds)
        memory = {name: process.read_memory() for name, process in ready.items()}
        return Comparison(latencies, failures, memory)
