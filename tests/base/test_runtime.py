"""Running compiled modules: arrays of any rank, nested results, threads that do not spin."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.base.runtime import (
    SPIN_VARIABLE,
    Executor,
    as_tensor,
    empty_aligned,
    map_on_threads,
    stop_spinning,
    view_tensor,
)


@I.ir_module
class Nested:
    @R.function
    def main(x: R.Tensor((2,), "float32"), s: R.Tensor((), "float32")):
        with R.dataflow():
            y = R.multiply(x, s)
            z = (y, (x, s))
            R.output(z)
        return z


def test_executor__takes_nested_results_apart():
    executor = Executor(tvm.compile(Nested, tvm.target.Target({"kind": "llvm"})))
    x, s = np.array([1, 2], "float32"), np.array(3, "float32")
    y, x2, s2 = executor.run("main", [x, s])
    np.testing.assert_array_equal(y, x * 3)
    np.testing.assert_array_equal(x2, x)
    assert s2.shape == ()


@pytest.mark.slow
def test_executor__a_module_for_another_kind_of_cpu():
    other = "x86_64" if platform.machine() == "aarch64" else "aarch64"
    executable = rq.compile(Nested, {"kind": "llvm", "mtriple": f"{other}-linux-gnu"})
    message = f"compiled for {other}-linux-gnu; this machine is {platform.machine()}"
    with pytest.raises(rq.ConfigError, match=message):
        Executor(executable)


def test_as_tensor__keeps_scalars_and_copies_strides():
    assert as_tensor(np.array(1.0, "float32")).shape == ()
    np.testing.assert_array_equal(as_tensor(np.eye(3)[:, ::2]).numpy(), np.eye(3)[:, ::2])


def test_stop_spinning__unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv(SPIN_VARIABLE, raising=False)
    stop_spinning()
    assert os.environ[SPIN_VARIABLE] == "0"
    monkeypatch.setenv(SPIN_VARIABLE, "1000")
    stop_spinning()
    assert os.environ[SPIN_VARIABLE] == "1000"


def test_map_on_threads__in_order_and_not_far_ahead(monkeypatch):
    monkeypatch.setenv("TVM_NUM_THREADS", "3")
    taken = []

    def items():
        for item in range(50):
            taken.append(item)
            yield item

    for item, result in enumerate(map_on_threads(lambda x: x * x, items())):
        assert result == item * item
        assert len(taken) <= item + 1 + 3
    assert len(taken) == 50


def test_map_on_threads__an_error_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        list(map_on_threads(lambda x: 1 // x, [2, 1, 0, 3]))


def test_view_tensor__copies_what_may_not_be_written():
    array = empty_aligned((4,), "float32")
    array[:] = 1
    array.flags.writeable = False
    np.testing.assert_array_equal(view_tensor(array).numpy(), array)


FORK = """
import os, signal
import relayquant as rq
from relayquant.demo import load_digits
from relayquant.base.runtime import Executor

demo = load_digits()
mod, params = rq.load(demo.model_path)
executor = Executor(rq.compile(mod))
x = next(iter(demo.calibration))
if {has_run}:
    executor.run("main", [x])
child = os.fork()
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    signal.alarm(200)  # a kernel that waits for threads which are not there
    try:
        executor.run("main", [x])
        rq.quantize(mod, params, demo.calibration, effort="fast")
    except rq.ConfigError as error:
        print(error, flush=True)
        os._exit(3)
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threads", "has_run", "code"), [("2", True, 3), ("2", False, 0), ("1", True, 0)]
)
def test_fork__error_where_the_threads_were_left_behind(threads, has_run, code):
    script = FORK.format(has_run=has_run)
    environment = {**os.environ, "TVM_NUM_THREADS": threads}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=400
    )
    assert run.stdout.splitlines()[-1:] == [str(code)], run.stderr
    assert ("get_context('spawn')" in run.stdout) == (code == 3)
