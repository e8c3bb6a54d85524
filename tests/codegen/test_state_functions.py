"""Libraries of modules with state, in a program without Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from native_program import compile_program
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq


@I.ir_module
class RunningSum:
    @R.function
    def main(
        x: R.Tensor((1, 3), "float32"),
        total: R.Tensor((1, 3), "float32"),
        count: R.Tensor((), "float16"),
    ):
        with R.dataflow():
            new, more = R.add(x, total), R.add(count, R.const(1, "float16"))
            result = (R.multiply(new, R.astype(more, "float32")), new, more)
            R.output(result)
        return result


@pytest.mark.slow
def test_library__streams_without_python(tmp_path):
    start = np.array([[1, 2, 3]], "float32")
    values = [
        rq.StateValue("total", (1, 3), "float32", start),
        rq.StateValue("count", (), "float16"),
    ]
    rq.compile(rq.with_state(RunningSum, values)).export_library(str(tmp_path / "sum.so"))
    program = compile_program(tmp_path, Path(__file__).with_name("run_stream.cc"))
    steps = np.random.default_rng(0).standard_normal((5, 1, 3), "float32")
    steps.tofile(tmp_path / "in")
    command = [program, tmp_path / "sum.so", tmp_path / "in", tmp_path / "out", len(steps), 1, 3]
    subprocess.run([*map(str, command)], check=True, env={**os.environ, "TVM_NUM_THREADS": "1"})
    found = np.fromfile(tmp_path / "out", "float32").reshape(steps.shape)
    totals = np.cumsum(np.concatenate([start[None], steps]), axis=0, dtype="float32")[1:]
    np.testing.assert_array_equal(found, totals * np.arange(1, 6, dtype="float32").reshape(5, 1, 1))
