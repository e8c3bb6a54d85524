"""Processes as users have them: other switches of Python, locales, homes and numbers of threads
give the same bits; pools and many compiles do no harm.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relayquant.demo import load_digits

#: From a file with a name beyond ASCII to the bits of a compiled model, by the command line, in
#: the processes of pools that are started so, with so many threads.
SCRIPT = """
import hashlib, multiprocessing, os, sys
from pathlib import Path
import numpy as np
import relayquant as rq
from relayquant import cli
from relayquant.cli.files import load_module
from relayquant.base.runtime import Executor

def run(path, threads):
    os.environ["TVM_NUM_THREADS"] = threads
    module = load_module(Path(path))
    (out,) = Executor(rq.compile(module)).run("main", [np.load("data.npz")["image"][:4]])
    return hashlib.sha256(out.tobytes()).hexdigest()

if __name__ == "__main__":
    model, quantized, *pools = sys.argv[1:]
    command = ["quantize", model, "--data", "data.npz", "--effort", "fast", "-o", quantized]
    # Before anything has run here a fork may run all.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        code = pool.apply(cli.main, [command])
    digests = set()
    for start, threads in (pool.split(":") for pool in pools):
        with multiprocessing.get_context(start).Pool(1) as pool:
            digests.add(pool.apply(run, [quantized, threads]))
    code = code or cli.main(["inspect", quantized])
    print(*digests)
    sys.exit(code)
"""

C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NO_HOME = {"HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none", "XDG_CONFIG_HOME": "/proc/none"}

#: (switches of Python, variables, pools with their threads): 0 is TVM's word for all cores, and 64
#: are more than most machines have.
ENVIRONMENTS = [
    (["-OO", "-W", "error"], NO_HOME, ["fork:0", "fork:1"]),
    ([], C_LOCALE, ["fork:64", "spawn:3"]),
]


@pytest.mark.slow
def test_environment__no_other_bits_in_any(tmp_path):
    demo = load_digits()
    (tmp_path / "modèle.onnx").write_bytes(demo.model_path.read_bytes())
    (tmp_path / "script.py").write_text(SCRIPT)
    np.savez(tmp_path / "data.npz", image=np.concatenate(demo.calibration))
    digests = []
    for switches, variables, pools in ENVIRONMENTS:
        (tmp_path / "modèle.json").unlink(missing_ok=True)
        run = subprocess.run(
            [sys.executable, *switches, "script.py", "modèle.onnx", "modèle.json", *pools],
            capture_output=True,
            cwd=tmp_path,
            env={**os.environ, **variables},
            timeout=400,
        )
        assert run.returncode == 0, (switches, variables, run.stderr.decode(errors="replace"))
        assert "modèle.json".encode() in run.stdout, "the name is printed as it was given"
        digests.append(run.stdout.splitlines()[-1])
    assert len(set(digests)) == 1, digests
    assert len(digests[0].split()) == 1, digests


FIFTY = """
import os, sys
sys.path.insert(0, {tests!r})
import relayquant as rq
from float_models import build_model

model = build_model(lambda e, x: e.dense("y", x, 8), (4, 8))
for i in range(50):
    rq.compile(model)
    if i in (9, 29, 49):
        with open("/proc/self/statm") as file:
            print(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_compile__fifty_times_in_one_process_keeps_its_memory():
    """Megabytes of the process after ten compiles, thirty and fifty: what grows in the first twenty
    is the room of allocators, what grows in each twenty is a leak.
    """
    script = FIFTY.format(tests=str(Path(__file__).parent))
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stderr
    ten, thirty, fifty = map(float, run.stdout.split())
    assert min(thirty - ten, fifty - thirty) < 5
    assert fifty - ten < 40


def test_tests__are_collected_without_pytorch():
    """The README's environment has no PyTorch: a test file that imports it skips itself before."""
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    begins = {path.name: path.read_text().split('importorskip("torch"')[0] for path in files}
    found = [
        name for name, text in begins.items() if re.search(r"(?m)^(?:import|from) torch\b", text)
    ]
    assert len(files) > 100
    assert found == []
