"""An emulated aarch64 machine with TVM's runtime: set up once, runs kernels and serves RPC."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import rpc
from tvm.target import Target

HERE = Path(__file__).parent
TRIPLE = "aarch64-linux-gnu"
#: Emulated CPUs: one without the dot product, which stops at an instruction it lacks; one with it;
#: one that has matrix products too.
PLAIN_CPUS = ("cortex-a53", "cortex-a76")
MATRIX_CPU = "max"
CPUS = (*PLAIN_CPUS, MATRIX_CPU)
SETUP_SECONDS = 300
RUN_SECONDS = 300


def target_of(cpu: str) -> Target:
    """What code for an emulated CPU is compiled for; of all that "max" has, i8mm only."""
    features = {"mcpu": "cortex-a76", "mattr": ["+i8mm"]} if cpu == MATRIX_CPU else {"mcpu": cpu}
    return Target({"kind": "llvm", "mtriple": TRIPLE, **features})


@dataclass(frozen=True)
class Emulator:
    """A folder made by `tools/setup_arm.sh`."""

    folder: Path

    def link(self, output: str, objects: Sequence[str], **_: Any) -> None:
        """For `export_library(fcompile=...)`: object files to a shared library."""
        subprocess.run([self.folder / "armld", "-shared", "-o", output, *objects], check=True)

    def environment(self, cpu: str) -> dict[str, str]:
        return {**os.environ, "ARM_CPU": cpu, "PYTHONPATH": ""}

    def run_kernels(
        self,
        cpu: str,
        library: Path,
        calls: Mapping[str, Sequence[np.ndarray]],
    ) -> dict[str, list[np.ndarray]]:
        """Call every function of a library once, in one process; its arguments afterwards."""
        arguments, results = library.with_suffix(".in.npz"), library.with_suffix(".out.npz")
        np.savez(
            arguments,
            **{f"{name}:{i}": a for name, args in calls.items() for i, a in enumerate(args)},
        )
        command = [self.folder / "armpy", HERE / "run_kernels.py", library, arguments, results]
        done = subprocess.run(
            command, env=self.environment(cpu), capture_output=True, text=True, timeout=RUN_SECONDS
        )
        assert done.returncode == 0, f"{cpu}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        with np.load(results) as loaded:
            return {
                name: [loaded[f"{name}:{i}"] for i in range(len(args))]
                for name, args in calls.items()
            }

    @contextmanager
    def serve(self, cpu: str) -> Iterator[int]:
        """Port of an RPC server on the emulated machine."""
        server = subprocess.Popen(
            [self.folder / "armpy", HERE / "rpc_server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=self.environment(cpu),
        )
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            assert port.isdigit(), f"the RPC server on {cpu} did not start"
            yield int(port)
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # the server and the sessions it forked
            server.wait()

    def export(self, executable: Any, path: Path) -> Path:
        executable.export_library(str(path), fcompile=self.link)
        return path


def run_remotely(port: int, library: Path, *inputs: np.ndarray) -> list[np.ndarray]:
    """Upload a compiled module and call main, in a session of its own.

    The session is closed here: the server takes the next one only then, and this one may live in a
    cycle of references until a search for garbage finds it.
    """
    session = rpc.connect("127.0.0.1", port, session_timeout=RUN_SECONDS)
    try:
        session.upload(str(library))
        machine = tvm.relax.VirtualMachine(session.load_module(library.name), [session.cpu()])
        machine.set_input("main", *[tvm.runtime.tensor(x, session.cpu()) for x in inputs])
        machine.invoke_stateful("main")
        outputs = machine.get_outputs("main")
        outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        return [out.numpy() for out in outputs]
    finally:
        session.get_function("CloseRPCConnection")()


def find_or_set_up(temporary: Path) -> Emulator:
    """The environment, made now if need be; skips the test where that fails."""
    folder = Path(os.environ.get("RELAYQUANT_ARM_ENV") or temporary / "arm").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failure = folder / "failure"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        if not (folder / "ready").exists() and not failure.exists():
            reason = set_up(folder)
            if reason:
                failure.write_text(reason)
    if failure.exists():
        reason = failure.read_text()
        if "RELAYQUANT_ARM_ENV" in os.environ:
            failure.unlink()  # try again another time
        pytest.skip(f"no emulated Arm machine: {reason}")
    return Emulator(folder)


def set_up(folder: Path) -> str:
    """Run setup_arm.sh; the reason why it failed, or nothing."""
    command = ["bash", str(HERE.parents[1] / "tools" / "setup_arm.sh"), str(folder)]
    env = {**os.environ, "PYTHON": sys.executable}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=SETUP_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or ["setup_arm.sh failed"]
    return lines[-1] if done.returncode else ""
