"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from code_level import choose_level, replace_compile
from drawing import FULL, QUICK
from hypothesis import HealthCheck, settings
from real_relay import VARIABLE, RealRelay

# A change must not fail by what was drawn on that day: `--hypothesis-profile=drawn` draws anew.
# `--hypothesis-profile=full` takes all examples, as `.ci/run` does.
# On a busy machine any draw is slow.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", PATIENT, derandomize=True, max_examples=QUICK)
settings.register_profile("full", PATIENT, derandomize=True, max_examples=FULL)
settings.register_profile("drawn", PATIENT, derandomize=False, max_examples=FULL)
settings.load_profile("quick")

# A shell lets what it starts in the background ignore Ctrl-C, which the tests of interruptions send
# to themselves and to their children: they would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers share the cores: threads of BLAS and PyTorch beside them take longer than one (numpy is
# loaded after this).
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.update(OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

# Garbage is sought less often, while tests are collected too: a sixteenth of the time.
gc.set_threshold(50_000, 20, 50)

# Each process that a test starts would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

#: So many slow instances of a test are many, of which one in RARE runs.
MANY, RARE = 6, 8
#: Of the quick instances of a test one in so many runs every time.
QUICK_SHARE = 5
#: Marks instances that are slow for that reason alone: `.ci/run` takes all of them.
IS_LEFT_OUT = pytest.StashKey[bool]()
#: Steps of this size spread evenly however often a parameter of a test repeats (the golden ratio).
SPREAD = (5**0.5 - 1) / 2

#: Reason of a test that did not run because of `--until`.
NO_TIME = "no time left: the tests of this run end here"

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


replace_compile()

_find_module = inspect.getmodule


def find_module(thing: Any, filename: str | None = None) -> ModuleType | None:
    """`inspect.getmodule`, which seeks what stands in no file among all modules. A decorator of
    TVMScript asks for the sources of the whole call stack, frames of the import system too: that
    was a tenth of the time to collect the tests.
    """
    is_file = filename is None or not filename.startswith("<")
    return _find_module(thing, filename) if is_file else None


inspect.getmodule = find_module


def pytest_addoption(parser):
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="skip tests that would begin later; seconds since 1970. What is left out is counted",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip(NO_TIME)
    choose_level(item)


def pytest_terminal_summary(terminalreporter):
    late = [
        each for each in terminalreporter.stats.get("skipped", []) if NO_TIME in each.longreprtext
    ]
    if late:
        terminalreporter.write_line(f"{len(late)} tests did not run: {NO_TIME}")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    """Mark instances of a test as slow: with the mark `sample(n)` all but one in n, and of the
    others all but one in `QUICK_SHARE`.
    """
    made = yield
    items = made if isinstance(made, list) else []
    marked = [item for item in items if item.get_closest_marker("sample")]
    for at, item in enumerate(marked):
        (step,) = item.get_closest_marker("sample").args
        if not is_chosen(at, step):
            item.add_marker("slow")
    quick = [item for item in items if not item.get_closest_marker("slow")]
    for at, item in enumerate(quick):
        if not is_chosen(at, QUICK_SHARE):
            item.add_marker("slow")
            item.stash[IS_LEFT_OUT] = True
    return made


def is_chosen(at: int, count: int) -> bool:
    """Whether instance number `at` is among the one in `count` that runs. The first one is."""
    return at * SPREAD % 1 < 1 / count


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of a test with many slow instances `.ci/run` takes an eighth, `-m nightly` the others. A run
    that may end early begins at another file each time, so that no test is always left out.
    """
    until = config.getoption("until")
    if until is not None and items:
        files = list(dict.fromkeys(item.path for item in items))
        begin = files[int(int(until) * SPREAD % 1 * len(files))]
        at = next(at for at, item in enumerate(items) if item.path == begin)
        items[:] = items[at:] + items[:at]
    slow = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") and IS_LEFT_OUT not in item.stash:
            slow[item.nodeid.partition("[")[0]].append(item)
    for instances in slow.values():
        for at, item in enumerate(instances if len(instances) >= MANY else []):
            if not is_chosen(at, RARE):
                item.add_marker("nightly")


def pytest_collection_finish():
    """Leave what is imported by now, millions of objects, out of every search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def shared_data():
    """Function from a file name to its path among the real models and data; skips when missing."""

    def find(name: str) -> Path:
        path = SHARED_DATA / name
        if not path.exists():
            pytest.skip(f"real data is not here: {path}")
        return path

    return find


@pytest.fixture
def real_relay(tmp_path):
    """A TVM that still has Relay, in which modules are built and run; skips when missing."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"no TVM with Relay: {VARIABLE} names the Python of one")
    return RealRelay(python, tmp_path)
