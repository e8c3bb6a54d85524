"""At which of LLVM's levels a test compiles: most tests are about values, not about code."""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import Any

import pytest
import tvm
from tvm.ir.transform import PassContext
from tvm.target import Target

#: One of so many tests compiles as users do.
SAMPLE = 6

_compile = tvm.compile
_is_quick = False


def choose_level(test: pytest.Item) -> None:
    """What the test compiles from here on is compiled at level 0, which takes less time and gives
    the same values, unless LLVM rounds less often at a higher one. One test of six, chosen by name,
    is compiled at the level of users, and so are those that are marked `optimized`: their code,
    roundings or speed are under test. A level that the target names stays.
    """
    global _is_quick
    is_sample = zlib.crc32(test.nodeid.encode()) % SAMPLE == 0
    _is_quick = not is_sample and test.get_closest_marker("optimized") is None


def compile_at_level(mod: Any, target: Any = None, **options: Any) -> Any:
    """`tvm.compile` at the level of the test; functions that go through no pipeline of ours do not
    check their arguments either, which is most of what LLVM sees of a small one.
    """
    if not (_is_quick and isinstance(target, Target) and target.kind.name == "llvm"):
        return _compile(mod, target, **options)
    with nullcontext() if "relax_pipeline" in options else skip_argument_checks():
        return _compile(mod, Target({"opt-level": 0, **target.export()}), **options)


def skip_argument_checks() -> PassContext:
    """The current pass context, without assertions in functions."""
    current = PassContext.current()
    return PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=list(current.disabled_pass),
        instruments=list(current.instruments),
        config={**current.config, "tirx.disable_assert": True},
    )


def replace_compile() -> None:
    tvm.compile = compile_at_level
