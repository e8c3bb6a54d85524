"""At which of LLVM's levels a test compiles: most tests are about values, not about code."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import tvm
from tvm.target import Target

#: One of so many tests compiles as users do.
SAMPLE = 6

_compile = tvm.compile
_is_quick = False


def choose_level(test: pytest.Item) -> None:
    """What the test compiles from here on is compiled at level 0, which gives the same values in
    less time; at the level of users in one test of six, chosen by name, and in those that are
    marked `optimized`, whose code or speed is under test. A level that the target names stays.
    """
    global _is_quick
    is_sample = zlib.crc32(test.nodeid.encode()) % SAMPLE == 0
    _is_quick = not is_sample and test.get_closest_marker("optimized") is None


def compile_at_level(mod: Any, target: Any = None, **options: Any) -> Any:
    """`tvm.compile` at the level of the test."""
    if _is_quick and isinstance(target, Target) and target.kind.name == "llvm":
        target = Target({"opt-level": 0, **target.export()})
    return _compile(mod, target, **options)


def replace_compile() -> None:
    tvm.compile = compile_at_level
