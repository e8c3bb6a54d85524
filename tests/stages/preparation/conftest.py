"""Compares the canonical form of a module with what a test writes in TVMScript."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relayquant.stages.preparation import prepare_module


def run_module(mod: tvm.IRModule, *inputs: np.ndarray) -> list[np.ndarray]:
    """Outputs of main, compiled for this machine."""
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(array) for array in inputs])
    return [out.numpy() for out in ([result] if hasattr(result, "numpy") else result)]


@pytest.fixture
def check_prepared():
    """Function (before, expected): prepare gives `expected`, leaves `before` alone, and is "
    "idempotent."""

    def check(before: tvm.IRModule, expected: tvm.IRModule) -> tvm.IRModule:
        text = before.script(show_meta=True)
        prepared = prepare_module(before)
        assert before.script(show_meta=True) == text
        tvm.ir.assert_structural_equal(prepared["main"], expected["main"], map_free_vars=True)
        again = prepare_module(prepared)
        tvm.ir.assert_structural_equal(again["main"], prepared["main"], map_free_vars=True)
        relax.analysis.well_formed(prepared)
        return prepared

    return check


@pytest.fixture
def check_same_numbers():
    """Function (before, *inputs): prepare changes no output by more than 1e-5."""

    def check(before: tvm.IRModule, *inputs: np.ndarray) -> tvm.IRModule:
        prepared = prepare_module(before)
        expected, actual = run_module(before, *inputs), run_module(prepared, *inputs)
        assert len(expected) == len(actual)
        for want, have in zip(expected, actual, strict=True):
            assert want.dtype == have.dtype
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)
        return prepared

    return check
