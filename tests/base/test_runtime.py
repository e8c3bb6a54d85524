"""Running compiled modules: arrays of any rank, nested results, threads that do not spin."""

from __future__ import annotations

import ast
import ctypes
import os
import platform
import subprocess
import sys

import ml_dtypes
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
    find_address,
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


def test_executor__results_share_no_memory_with_inputs():
    """main returns an input as it is. A later change of the caller's array is none of the result's,
    also of an array that compiled code could read in place.
    """
    executor = Executor(tvm.compile(Nested, tvm.target.Target({"kind": "llvm"})))
    x = empty_aligned((2,), "float32")
    x[:] = 1
    _, x2, _ = executor.run("main", [x, np.float32(3)])
    x[:] = 5
    np.testing.assert_array_equal(x2, [1, 1])


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


def test_as_tensor__has_the_byte_order_of_this_machine():
    np.testing.assert_array_equal(as_tensor(np.arange(5, dtype=">f4")).numpy(), np.arange(5))
    np.testing.assert_array_equal(as_tensor(np.arange(5, dtype=">i8")).numpy(), np.arange(5))


def test_as_tensor__masked_values_are_no_data():
    array = np.ma.masked_array(np.arange(4.0), mask=[False, False, True, False])
    with pytest.raises(ValueError, match=r"values are masked; .* as array.filled\(0\)"):
        as_tensor(array)
    np.testing.assert_array_equal(as_tensor(array[:2]).numpy(), [0, 1])


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


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 4), "float32"),
        np.zeros(8, "int64")[3:],
        np.zeros(3, "bool"),
        np.zeros(3, "float16"),
        np.zeros(3, ml_dtypes.bfloat16),
        np.zeros((0, 4), "float32"),
        np.zeros((), "float64"),
        np.broadcast_to(np.float32(1), (1, 1)),  # read-only
    ],
    ids=lambda each: f"{each.dtype}{each.shape}",
)
def test_find_address__is_numpys(array):
    assert find_address(array) == array.__array_interface__["data"][0]


#: Prints of each step how many arrays glibc asked the system for, and how many MB more it keeps.
COUNT_MAPPED = """
import ctypes
import numpy as np
from relayquant.base.runtime import keep_freed_memory

names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Counts = type("Counts", (ctypes.Structure,), {"_fields_": [(n, ctypes.c_size_t) for n in names]})
count = ctypes.CDLL(None).mallinfo2
count.restype = Counts

def allocate(*sizes):
    before = count()
    arrays = [np.empty(int(size * 2**20), "uint8") for size in sizes]
    mapped = count().hblks - before.hblks
    del arrays
    return mapped, (count().arena - before.arena) >> 20

found = [allocate(1)]
keep_freed_memory()
found += [allocate(size) for size in (8, 20, 31.9, 33)]
keep_freed_memory()
print(*found, allocate(20, 20, 20, 20), sep=";")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="counted by glibc 2.33")
def test_keep_freed_memory__arrays_of_up_to_32_mb_are_not_asked_of_the_system():
    run = subprocess.run(
        [sys.executable, "-c", COUNT_MAPPED], capture_output=True, text=True, check=True
    )
    before, *kept, larger, many = map(ast.literal_eval, run.stdout.split(";"))
    assert before == (1, 0)
    assert [mapped for mapped, _ in kept] == [0, 0, 0]
    assert sum(growth for _, growth in kept) >= 20  # freed, but not given back
    assert larger == (1, 0)
    mapped, growth = many
    assert (mapped, growth < 0) == (0, True)  # free memory above 64 MB goes back
