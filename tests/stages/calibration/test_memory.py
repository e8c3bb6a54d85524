"""Peak memory of a calibration does not grow with the data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="the system does not tell the peak of a process")

#: 64 kB for each sample in the first activation: 2,000 samples that are kept are 130 MB
SCRIPT = """
import resource, sys
sys.path.insert(0, {tests!r})
import numpy as np
from tvm.relax import op
import relayquant as rq
from float_models import build_model

def body(emit, x):
    y = emit("relu", op.nn.relu(emit.conv_bias("first", x, 16)))
    return emit.dense("logits", emit("pool", op.mean(y, [2, 3])), 10)

def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count // 16):
        yield rng.standard_normal((16, 3, 32, 32), dtype="float32")

mod = build_model(body, ("n", 3, 32, 32))
rq.quantize(mod, None, lambda: batches(int(sys.argv[1])))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def measure_peak(samples: int) -> int:
    """Peak resident set of a process that calibrates with so many samples, kB."""
    script = SCRIPT.format(tests=str(Path(__file__).parents[2]))
    done = subprocess.run(
        [sys.executable, "-c", script, str(samples)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.slow
def test_peak_memory__64_and_2000_samples_are_equal_within_5_percent() -> None:
    few, many = measure_peak(64), measure_peak(2000)
    assert many == pytest.approx(few, rel=0.05)
