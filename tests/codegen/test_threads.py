"""The pool of threads that compiled modules bring along: what runs on it, and what may go wrong
around it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from relayquant.codegen.kernels.emit import LEAST_EXTENT
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.threads import add_pool
from relayquant.codegen.threads.pool import MOST_THREADS, PAUSES, format_source

pytestmark = pytest.mark.optimized

ROWS, COLUMNS = 48, 64


@T.prim_func
def count_visits(visits: T.Buffer((ROWS, COLUMNS), "int32")):
    """Adds 1 to every element: a part computed twice, or not at all, shows."""
    T.func_attr({"global_symbol": "count_visits", "tirx.noalias": True})
    for i in T.parallel(ROWS):
        for j in range(COLUMNS):
            visits[i, j] = visits[i, j] + 1


@T.prim_func
def count_serially(visits: T.Buffer((ROWS, COLUMNS), "int32")):
    """Without a parallel loop."""
    T.func_attr({"global_symbol": "count_visits"})
    for i, j in T.grid(ROWS, COLUMNS):
        visits[i, j] = visits[i, j] + 1


@T.prim_func
def count_until(visits: T.Buffer((ROWS, COLUMNS), "int32")):
    """Fails at rows whose first element is negative."""
    T.func_attr({"global_symbol": "count_visits", "tirx.noalias": True})
    for i in T.parallel(ROWS):
        assert visits[i, 0] >= 0, "negative"
        for j in range(COLUMNS):
            visits[i, j] = visits[i, j] + 1


@T.prim_func
def count_unevenly(visits: T.Buffer((ROWS, COLUMNS), "int32"), threads: T.Buffer((ROWS,), "int32")):
    """The second half takes 4 milliseconds, the first 0.2: as long as a worker needs to wake up.
    Tells which thread a row was computed by.
    """
    T.func_attr({"global_symbol": "count_visits", "tirx.noalias": True})
    for i in T.parallel(ROWS):
        threads[i] = T.call_extern("int32", "gettid")
        for _, j in T.grid(T.if_then_else(i < ROWS // 2, 5_000, 100_000), COLUMNS):
            visits[i, j] = visits[i, j] * 3 + 1


@T.prim_func
def tell_threads(threads_handle: T.handle):
    """Tells which thread a row was computed by. Threads share it from 8 rows on."""
    T.func_attr({"global_symbol": "count_visits", "tirx.noalias": True})
    rows = T.int64()
    threads = T.match_buffer(threads_handle, (rows,), "int32")
    for i in T.parallel(rows, annotations={LEAST_EXTENT: 8}):
        threads[i] = T.call_extern("int32", "gettid")


@T.prim_func
def tell_processors(places: T.Buffer((ROWS, 2), "int32"), visits: T.Buffer((ROWS,), "int32")):
    """Tells which thread a row was computed by, and on which processor. A row takes 50 us."""
    T.func_attr({"global_symbol": "count_visits", "tirx.noalias": True})
    for i in T.parallel(ROWS):
        places[i, 0] = T.call_extern("int32", "gettid")
        places[i, 1] = T.call_extern("int32", "sched_getcpu")
        for _ in range(50_000):
            visits[i] = visits[i] * 3 + 1


def add_host_pool(func) -> tvm.IRModule:
    return add_pool(tvm.IRModule({"count_visits": func}), resolve_target(None))


@pytest.fixture
def make_counter(monkeypatch):
    """`count_visits` with a pool of so many threads, compiled in memory."""

    def make(threads: int):
        monkeypatch.setenv("TVM_NUM_THREADS", str(threads))  # read when the pool starts
        return tvm.compile(add_host_pool(count_visits), resolve_target(None))["count_visits"]

    return make


def new_visits() -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.zeros((ROWS, COLUMNS), "int32"))


def count_threads() -> int:
    """Of this process, those of all libraries."""
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 300])
def test_pool__every_part_once(make_counter, threads):
    count, visits, before = make_counter(threads), new_visits(), count_threads()
    for run in range(200):
        count(visits)
        if run % 50 == 0:
            time.sleep(0.002)  # the workers fall asleep
    np.testing.assert_array_equal(visits.numpy(), 200)
    assert count_threads() - before == min(threads, MOST_THREADS) - 1


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("row", [0, ROWS // 2, ROWS - 1])
def test_pool__part_that_fails(monkeypatch, threads, row):
    monkeypatch.setenv("TVM_NUM_THREADS", str(threads))
    count = tvm.compile(add_host_pool(count_until), resolve_target(None))["count_visits"]
    bad = np.zeros((ROWS, COLUMNS), "int32")
    bad[row, 0] = -1
    good = new_visits()
    for run in range(1, 100):
        with pytest.raises(RuntimeError, match="A part of a kernel's loop failed"):
            count(tvm.runtime.tensor(bad))
        count(good)  # the failure is that run's alone
        np.testing.assert_array_equal(good.numpy(), run)


def test_pool__two_callers_at_once(make_counter):
    count, all_visits = make_counter(3), [new_visits() for _ in range(4)]

    def work(visits) -> None:
        for _ in range(300):
            count(visits)

    callers = [threading.Thread(target=work, args=(visits,)) for visits in all_visits]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for visits in all_visits:
        np.testing.assert_array_equal(visits.numpy(), 300)


def test_pool__beside_busy_processes(make_counter):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        count, visits = make_counter(4), new_visits()
        for _ in range(500):
            count(visits)
        np.testing.assert_array_equal(visits.numpy(), 500)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_pool__workers_that_cost_more_than_they_save_rest(monkeypatch):
    monkeypatch.setenv("TVM_NUM_THREADS", "2")
    count = tvm.compile(add_host_pool(count_unevenly), resolve_target(None))["count_visits"]
    visits, threads = new_visits(), tvm.runtime.tensor(np.zeros(ROWS, "int32"))
    used = []
    for _ in range(60):
        count(visits, threads)
        used.append(len(set(threads.numpy())))
    assert max(used[:20]) == 2
    assert used[20:].count(2) <= 10  # they rest for longer and longer


def test_pool__switches_stand_where_they_are_read():
    """`ru_nivcsw` is the 18th word of `struct rusage`."""
    usage, libc = (ctypes.c_int64 * 32)(), ctypes.CDLL(None)
    assert libc.getrusage(resource.RUSAGE_THREAD, usage) == 0
    stop = time.perf_counter() + 0.05
    while time.perf_counter() < stop:
        before = resource.getrusage(resource.RUSAGE_THREAD)
        libc.getrusage(resource.RUSAGE_THREAD, usage)
        behind = resource.getrusage(resource.RUSAGE_THREAD)
        assert before.ru_nivcsw <= usage[17] <= behind.ru_nivcsw
        assert before.ru_nvcsw <= usage[16] <= behind.ru_nvcsw


@pytest.mark.slow
def test_pool__threads_end_with_the_module(make_counter):
    before = count_threads()
    for _ in range(3):
        count, visits = make_counter(3), new_visits()
        count(visits)
        np.testing.assert_array_equal(visits.numpy(), 1)
        assert count_threads() == before + 2
        del count
        gc.collect()
        assert count_threads() == before


FORK = """
import os, sys, time
import numpy as np, tvm
count = tvm.runtime.load_module(sys.argv[1])["count_visits"]
visits = tvm.runtime.tensor(np.zeros((48, 64), "int32"))
allowed = os.sched_getaffinity(0)
count(visits)
time.sleep(0.05)  # the workers fall asleep
child = os.fork()
count(visits)
count(visits)
assert (visits.numpy() == 3).all()
assert os.sched_getaffinity(0) == allowed
if child == 0:
    sys.exit(0)  # by the way that unloads libraries
_, status = os.waitpid(child, 0)
assert status == 0, status
print("parent ends too")
"""


def run_apart(code: str, folder: Path, threads: int, **environment: str) -> str:
    """What a process prints that runs Python code with the path of `count_visits` as argument."""
    library = str(folder / "count.so")
    tvm.compile(add_host_pool(count_visits), resolve_target(None)).export_library(library)
    result = subprocess.run(
        [sys.executable, "-c", code, library],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TVM_NUM_THREADS": str(threads), **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_pool__fork(tmp_path):
    """The child has no workers, and does without; it ends, and so does its parent."""
    assert run_apart(FORK, tmp_path, 3) == "parent ends too"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_pool__wakes_apart_from_the_caller(monkeypatch):
    """Linux in a virtual machine would wake the worker on the caller's processor, and leave the
    other one idle.
    """
    monkeypatch.setenv("TVM_NUM_THREADS", "2")
    tell = tvm.compile(add_host_pool(tell_processors), resolve_target(None))["count_visits"]
    places = tvm.runtime.tensor(np.zeros((ROWS, 2), "int32"))
    visits = tvm.runtime.tensor(np.zeros(ROWS, "int32"))
    shared: list[bool] = []
    for _ in range(100):
        time.sleep(0.02)
        tell(places, visits)
        found = places.numpy()
        own = found[:, 0] == threading.get_native_id()
        if not own.all():
            shared.append(bool(set(found[own, 1]) & set(found[~own, 1])))
    if len(shared) < 10:
        pytest.skip("this machine is too busy: no worker took part")
    assert np.mean(shared) < 0.3


def test_pool__threads_keep_their_processors(monkeypatch):
    """A worker takes back the processors that it may use, and so does a caller."""
    monkeypatch.setenv("TVM_NUM_THREADS", "3")
    before, allowed = list_tasks(), os.sched_getaffinity(0)
    count = tvm.compile(add_host_pool(count_unevenly), resolve_target(None))["count_visits"]
    visits, threads = new_visits(), tvm.runtime.tensor(np.zeros(ROWS, "int32"))
    seen: set[frozenset[int]] = set()
    whole: set[int] = set()
    for _ in range(60):
        time.sleep(0.005)
        count(visits, threads)
        assert os.sched_getaffinity(0) == allowed
        time.sleep(0.005)  # a worker that has been called wakes up
        for worker in list_tasks() - before:
            found = os.sched_getaffinity(worker)
            seen.add(frozenset(found))
            whole |= {worker} if found == allowed else set()
    # A worker that was called, but slept on because another one took the part, has its set later.
    assert len(whole) == 2
    assert all(found and found <= allowed for found in seen)


def list_tasks() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


PINNED = """
import os, sys, time
import numpy as np, tvm
only = {min(os.sched_getaffinity(0))}
os.sched_setaffinity(0, only)
count = tvm.runtime.load_module(sys.argv[1])["count_visits"]
visits, before = tvm.runtime.tensor(np.zeros((48, 64), "int32")), os.listdir("/proc/self/task")
for _ in range(20):
    count(visits)
    time.sleep(0.002)
assert (visits.numpy() == 20).all()
workers = set(os.listdir("/proc/self/task")) - set(before)
print(len(workers), all(os.sched_getaffinity(int(worker)) == only for worker in workers))
"""


def test_pool__one_processor_for_all(tmp_path):
    """Workers stay on the one processor that the user allows."""
    assert run_apart(PINNED, tmp_path, 2) == "1 True"


#: A machine of 8 processors: of 6 threads of a pool, two workers share a processor, and one sleeps
#: on the caller's. A line says who changes whose set, or that the caller asks where it is.
MACHINE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const int cpus[] = {0, 3, 3, 0, 5, 6};
static pthread_t known[64];
static int masks[64];  // ~ of the set, so that all have all at first
static int count = 1;  // 0 is the caller
static __thread int id = -1;

static int find(pthread_t thread) {
  int at = 0;
  for (int i = 1; i < 64; i++) at = known[i] == thread ? i : at;
  return at;
}

int sched_getcpu(void) {
  if (id < 0) {
    id = getpid() == gettid() ? 0 : __sync_fetch_and_add(&count, 1);
    if (id) known[id] = pthread_self();
  }
  if (id == 0) write(1, "?\\n", 2);
  return cpus[id];
}

FILE* fopen(const char* path, const char* mode) {
  FILE* (*open)(const char*, const char*) = dlsym(RTLD_NEXT, "fopen");
  char* siblings = getenv("SIBLINGS");
  if (siblings && strstr(path, "thread_siblings_list"))
    return *siblings ? fmemopen(siblings, strlen(siblings), mode) : NULL;
  return open(path, mode);
}

int pthread_getaffinity_np(pthread_t thread, size_t size, cpu_set_t* set) {
  memset(set, 0, size);
  for (int i = 0; i < 8; i++)
    if (~masks[find(thread)] >> i & 1) CPU_SET(i, set);
  return 0;
}

int pthread_setaffinity_np(pthread_t thread, size_t size, const cpu_set_t* set) {
  char line[64];
  int mask = 0;
  for (int i = 0; i < 8; i++) mask |= CPU_ISSET(i, set) << i;
  masks[find(thread)] = getenv("MEDDLE") ? ~0xF0 : ~mask;
  int length = snprintf(line, sizeof line, "%d %d %d\\n", find(pthread_self()), find(thread), mask);
  return write(1, line, length) != length;
}
"""

ON_MACHINE = """
import sys, time
import numpy as np, tvm
count = tvm.runtime.load_module(sys.argv[1])["count_visits"]
visits = tvm.runtime.tensor(np.zeros((48, 64), "int32"))
for _ in range(20):
    count(visits)
    time.sleep(0.02)  # the workers fall asleep
assert (visits.numpy() == 20).all()
"""


@pytest.fixture
def machine(tmp_path):
    """A library with the machine, to be loaded first."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "machine.c", tmp_path / "machine.so"
    source.write_text(MACHINE)
    command = ["cc", "-shared", "-fPIC", "-O1", "-pthread", source, "-o", library]
    subprocess.run(command, check=True)
    return str(library)


def test_pool__leaves_alone_what_somebody_else_changed(machine, tmp_path):
    """A set that is not as the pool made it is the user's, as of `taskset`."""
    environment = {"LD_PRELOAD": machine, "TVM_BIND_THREADS": "1", "MEDDLE": "1"}
    printed = run_apart(ON_MACHINE, tmp_path, 6, **environment).splitlines()
    changes = [line.split() for line in printed if line != "?"]
    assert changes
    assert not [line for line in changes if line[0] == line[1] and line[2] == "255"]
    again = [int(mask) for who, worker, mask in changes if who == "0" != worker]
    assert any(mask and mask & 0xF0 == mask for mask in again)  # of what the user allows


@pytest.mark.parametrize("value", ["0", "no"])
def test_pool__may_be_told_to_leave_threads_alone(machine, tmp_path, value):
    """Where a filter ends a process that asks, it does not ask."""
    environment = {"LD_PRELOAD": machine, "TVM_BIND_THREADS": value}
    assert run_apart(ON_MACHINE, tmp_path, 6, **environment) == ""


@pytest.mark.parametrize(
    ("siblings", "find_sibling"),
    [
        ("", lambda cpu: cpu),
        ("0\n", lambda cpu: cpu),
        ("0,4\n", lambda cpu: (cpu + 4) % 8),
        ("0-1\n", lambda cpu: cpu ^ 1),
        ("0,1\n", lambda cpu: cpu ^ 1),
        ("0-3\n", lambda cpu: cpu),
        ("0,2,4,6\n", lambda cpu: cpu),
        ("0,99999999999999999999\n", lambda cpu: cpu),
    ],
)
def test_pool__excludes_processors_of_others(machine, tmp_path, siblings, find_sibling):
    """And the other threads of their cores, as long as any core is left."""
    environment = {"LD_PRELOAD": machine, "TVM_BIND_THREADS": "1", "SIBLINGS": siblings}
    printed = run_apart(ON_MACHINE, tmp_path, 6, **environment)
    cpus, whole = [0, 3, 3, 0, 5, 6], 0xFF
    used, changes = set(), []
    for line in printed.splitlines():
        if line == "?":
            used = {cpus[0]}
            continue
        changes.append(tuple(map(int, line.split())))
        who, worker, mask = changes[-1]
        if who == 0 and worker:
            left = set(range(8)) - used - {find_sibling(cpu) for cpu in used}
            assert mask == sum(1 << cpu for cpu in left or set(range(8)) - used)
            used.add(cpus[worker])
    assert {worker for who, worker, _ in changes if who == 0} >= {1, 2, 3, 4, 5}
    taken_back = [mask for who, worker, mask in changes if who == worker != 0]
    assert set(taken_back) == {whole}
    own = [mask for who, worker, mask in changes if who == worker == 0]
    assert own == [1 << cpus[0], whole] * (len(own) // 2)  # the caller slept, or not


def test_pool__kernel_is_the_same_code():
    """What stands beside a kernel leaves it alone: TVM takes `noalias` from a module as a whole."""
    target = resolve_target(None)
    alone = tvm.compile(tvm.IRModule({"count_visits": count_visits}), target)
    beside = tvm.compile(add_host_pool(count_visits), target)

    def count_distinct(module) -> list[int]:
        """Pointers of the kernel's functions that LLVM may take to be distinct."""
        lines = module.mod.inspect_source("ll").splitlines()
        return [x.count("noalias") for x in lines if re.match("define.* @[a-z_]*count_", x)]

    assert count_distinct(alone) == count_distinct(beside)
    assert sum(count_distinct(beside)) > 0


def test_pool__loops_are_launched_there():
    """Not by what TVM's runtime stores in the pointer when it loads the code."""
    text = tvm.compile(add_host_pool(count_visits), resolve_target(None)).mod.inspect_source("ll")
    launches = re.findall(r"call i32 (\S+)\(ptr \S+ @__tvm_parallel_lambda", text)
    assert launches == ["@relayquant_launch"]


def test_pool__code_of_a_loop_is_there_once():
    """Both launches call one function for the rows."""
    text = tvm.compile(add_host_pool(tell_threads), resolve_target(None)).mod.inspect_source("ll")
    assert text.count("call i32 @gettid") == 1
    assert "select i1" in text or "@relayquant_launch_alone(ptr" in text


@pytest.mark.parametrize(
    ("target", "waits"),
    [
        ("llvm -mtriple=x86_64-linux-gnu", "pause"),
        ("llvm -mtriple=aarch64-linux-gnu", "isb"),
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n1", "isb"),
    ],
)
def test_pool__code_for(target, waits):
    resolved = resolve_target(target)
    mod = add_pool(tvm.IRModule({"count_visits": count_visits}), resolved)
    assembly = tvm.compile(mod, resolved).mod.inspect_source("asm")
    assert re.search(rf"^\s*{waits}\b", assembly, re.MULTILINE)
    # Nothing of the pool is called: what is not inlined has no body.
    assert not re.search(r"\b(call|bl)\w*\s+_?pool_", assembly)


def test_pool__extent_decides_at_run_time(monkeypatch):
    """Part 0 is the caller's, so all others need not be on a worker: a busy machine has none."""
    monkeypatch.setenv("TVM_NUM_THREADS", "4")
    tell = tvm.compile(add_host_pool(tell_threads), resolve_target(None))["count_visits"]

    def list_threads(rows: int) -> set[int]:
        threads = tvm.runtime.tensor(np.zeros(rows, "int32"))
        tell(threads)
        return set(threads.numpy().tolist())

    before = count_threads()
    for rows in (0, 1, 7):
        assert list_threads(rows) <= {threading.get_native_id()}
    assert count_threads() == before  # the pool has not started
    assert threading.get_native_id() in list_threads(8)
    assert count_threads() == before + 3
    assert any(len(list_threads(4000)) > 1 for _ in range(200))
    assert list_threads(7) == {threading.get_native_id()}


@pytest.mark.parametrize("system_lib", [True, False])
def test_pool__without_it_such_a_loop_is_serial(system_lib):
    """TVM's threads would share one row too."""
    mod = tvm.IRModule({"count_visits": tell_threads, "other": count_visits})
    if system_lib:
        mod = mod.with_attr("system_lib_prefix", "a_")
    target = None if system_lib else "llvm -mtriple=aarch64-apple-darwin"
    text = {
        gv.name_hint: f.script()
        for gv, f in add_pool(mod, resolve_target(target)).functions_items()
    }
    assert "T.parallel" in text.pop("other")
    assert "T.parallel" not in text["count_visits"]
    assert LEAST_EXTENT not in text["count_visits"]
    assert [*text] == ["count_visits"]


@pytest.mark.parametrize(
    "target",
    [
        "llvm -mtriple=aarch64-apple-darwin",
        "llvm -mtriple=x86_64-pc-windows-msvc",
        "llvm -mtriple=armv7a-linux-gnueabihf",
        "llvm -mtriple=riscv64-linux-gnu",
    ],
)
def test_pool__not_for(target):
    mod = tvm.IRModule({"count_visits": count_visits})
    assert add_pool(mod, resolve_target(target)).same_as(mod)


def test_pool__not_without_parallel_loops():
    assert [gv.name_hint for gv in add_host_pool(count_serially).get_global_vars()] == [
        "count_visits"
    ]


def test_pool__not_for_static_linking():
    mod = tvm.IRModule({"count_visits": count_visits}).with_attr("system_lib_prefix", "a_")
    assert add_pool(mod, resolve_target(None)).same_as(mod)


def test_source__has_all_numbers():
    for pause in PAUSES.values():
        assert "{most" not in format_source(*pause)
