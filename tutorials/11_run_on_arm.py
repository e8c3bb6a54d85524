"""
Run on Arm
==========

Quantize and compile on a PC, run on an Arm CPU: a board in the network, or one that QEMU emulates
on the PC itself. Both are reached through TVM's RPC. The integers that come back are those that the
PC computes, bit for bit.

Without a board and without an emulator this tutorial compiles, says what is missing, and ends.
"""

# %%
# Quantize for Arm
# ----------------
# Backends differ in the integers they want: the dot-product instructions of x86 take uint8
# activations, those of Arm int8. ``rq.get_backend_config`` knows which backend suits a target.
#
# The target names the CPU. What it can do follows from the name, and nothing is taken from the PC:
# a Cortex-A53 gets widening multiplies, a Cortex-A76 the ``sdot`` instruction.

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tvm
from tvm import relax, rpc

import relayquant as rq
from relayquant.demo import load_digits

CPU = "cortex-a76"
target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": CPU}

demo = load_digits()
mod, params = rq.load(str(demo.model_path))
backend = rq.get_backend_config(target=target)
qmod = rq.quantize(mod, params, demo.calibration, backend=backend)
print(f"quantized for the backend {backend.name!r}")

# %%
# Cross-compile
# -------------
# LLVM compiles for any CPU it knows, so this needs nothing but the target. A library holds the
# weights and the code; its assembly shows what the kernels are made of.

executable = rq.compile(qmod, target)
assembly = executable.mod.imports[0].inspect_source("asm")
print(f"{assembly.count('sdot')} dot-product instructions for {CPU}")
older = rq.compile(qmod, {**target, "mcpu": "cortex-a53"})
print(f"{older.mod.imports[0].inspect_source('asm').count('sdot')} for cortex-a53, which has none")

# %%
# Link
# ----
# ``export_library`` writes object files and calls a linker to join them. The compiler of the PC
# cannot do that for Arm: take ``aarch64-linux-gnu-gcc`` (on Debian and Ubuntu in the package
# gcc-aarch64-linux-gnu), or the bare linker ``aarch64-linux-gnu-ld`` (binutils-aarch64-linux-gnu),
# which is enough for code that LLVM wrote. A script in the repository, ``tools/setup_arm.sh``,
# fetches the linker together with an emulator into a folder, without root; name that folder in
# RELAYQUANT_ARM_ENV.

emulator = Path(os.environ["RELAYQUANT_ARM_ENV"]) if "RELAYQUANT_ARM_ENV" in os.environ else None


def find_linker() -> str | None:
    """A linker for aarch64, of the emulator's folder or installed."""
    if emulator is not None and (emulator / "armld").exists():
        return str(emulator / "armld")
    return shutil.which("aarch64-linux-gnu-gcc") or shutil.which("aarch64-linux-gnu-ld")


def link(output, objects, **_):
    """The last step of ``export_library``: object files to a shared library."""
    subprocess.run([find_linker(), "-shared", "-o", output, *objects], check=True)


folder = Path(tempfile.mkdtemp())
library = folder / "digits-arm.so"
if find_linker():
    executable.export_library(str(library), fcompile=link)
    print(f"{library.name}: {library.stat().st_size / 1e6:.2f} MB")

# %%
# A machine to run on
# -------------------
# **A board.** Install the same versions of apache-tvm and apache-tvm-ffi on it and start
#
# .. code-block:: console
#
#    python -m tvm.exec.rpc_server --host 0.0.0.0 --port 9090
#
# then name it here: ``RELAYQUANT_ARM_BOARD=192.168.1.20:9090``. The server runs whatever it is
# sent; keep it inside a network you trust. An application on the board needs no RPC: it loads the
# library with ``tvm.runtime.load_module`` and calls it like below.
#
# **An emulator.** QEMU runs the programs of another CPU one by one ("user mode"). It is exact, so
# it serves to test; it says nothing about speed.

SERVER = """
from tvm.rpc.server import PopenRPCServerState
server = PopenRPCServerState("127.0.0.1", 19100, 19300, silent=True)
print(server.port, flush=True)
server.thread.join()
"""


@contextmanager
def connect_to_arm():
    """A session on the board or the emulator; None if there is neither."""
    if "RELAYQUANT_ARM_BOARD" in os.environ:
        host, port = os.environ["RELAYQUANT_ARM_BOARD"].rsplit(":", 1)
        yield rpc.connect(host, int(port), session_timeout=120)
    elif emulator is not None and (emulator / "armpy").exists():
        environment = {**os.environ, "ARM_CPU": CPU, "PYTHONPATH": ""}
        command = [str(emulator / "armpy"), "-c", SERVER]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            yield rpc.connect("127.0.0.1", int(server.stdout.readline()), session_timeout=120)
        finally:
            server.terminate()
            server.wait()
    else:
        yield None


# %%
# Run
# ---
# Upload the library, load it there, and call it with arrays that live there. The results must be
# the ones of this PC and of the numpy reference in every bit: scales are applied with one rounding
# wherever the model runs.

images = demo.images[:64]
here = rq.Executor(rq.compile(qmod)).run("main", [images])[0]
with connect_to_arm() as session:
    if session is None or not library.exists():
        print(
            "Compiled only. To run, set RELAYQUANT_ARM_BOARD to the host:port of a board, or "
            "RELAYQUANT_ARM_ENV to a folder made by tools/setup_arm.sh."
        )
    else:
        session.upload(str(library))
        machine = relax.VirtualMachine(session.load_module(library.name), [session.cpu()])
        machine.set_input("main", tvm.runtime.tensor(images, session.cpu()))
        machine.invoke_stateful("main")
        there = machine.get_outputs("main").numpy()
        right = (there.argmax(axis=1) == demo.labels[:64]).mean()
        print(f"on Arm: {right:.0%} of {len(images)} digits right")
        assert np.array_equal(here, there)
        assert np.array_equal(rq.reference.run(qmod, [images])[0], there)
        print("Arm, this machine and the numpy reference agree in every bit")

# %%
# Time
# ----
# On a board, ``time_evaluator`` measures there, without the network:
#
# .. code-block:: python
#
#    machine.set_input("main", tvm.runtime.tensor(images[:1], session.cpu()))
#    timer = machine.time_evaluator("invoke_stateful", session.cpu(), number=50)
#    print(timer("main"))

shutil.rmtree(folder)
