"""What is lowered does not depend on the seed of Python's hashes, which differs from process to
process: the same model gives the same kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
#: A float model with rows 2 * n + 1, and the text of its kernels. Functions of sizes are TVM's own.
SCRIPT = """
import numpy as np
from float_models import build_model
from tvm import relax
from tvm.relax import op
import relayquant as rq

def body(emit, x):
    rows = emit("rows", op.concat([x, x, relax.const(np.ones((1, 32), "float32"))], 0))
    product = emit("product", op.matmul(rows, relax.const(np.ones((32, 48), "float32"))))
    return emit("out", op.nn.relu(product))

for name, function in sorted(
    (str(var.name_hint), function)
    for var, function in rq.get_pipeline("llvm -mcpu=haswell")(build_model(body, ("n", 32)))
    .functions.items()
):
    if not name.startswith("shape_func"):
        print(name, function.script())
"""


def lower_in_process(seed: int) -> str:
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_pipeline__any_seed_of_hashes():
    first, second = map(lower_in_process, (0, 1))
    assert "dense" in first or "matmul" in first
    assert first == second
