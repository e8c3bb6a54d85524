"""exp, tanh, erf and sigmoid as polynomials, against double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

from relayquant.lower.target import resolve_target
from relayquant.lower.vector_math import create_math_pass
from relayquant.runtime import Executor

OPERATORS = {"exp": R.exp, "tanh": R.tanh, "erf": R.erf, "sigmoid": R.sigmoid}


def run_operator(name: str, x: np.ndarray) -> np.ndarray:
    """The operator compiled for this machine with the functions written out."""
    builder = relax.BlockBuilder()
    data = relax.Var("x", relax.TensorType(x.shape, "float32"))
    with builder.function("main", [data]):
        builder.emit_func_output(builder.emit(OPERATORS[name](data)))
    target = resolve_target(None)
    with target:
        mod = tvm.transform.Sequential([relax.transform.LegalizeOps(), create_math_pass(target)])(
            builder.get()
        )
    assert f"T.{name}(" not in mod.script()
    return Executor(tvm.compile(mod, target)).run("main", [x])[0]


def grid() -> np.ndarray:
    """Every exponent of float32 with both signs, and a fine grid where the functions change."""
    fine = np.linspace(-100, 100, 200_001)
    powers = np.ldexp(np.linspace(1, 2, 9), np.arange(-126, 127)[:, None]).reshape(-1)
    return np.concatenate([fine, fine / 50, powers, -powers]).astype("float32")


def test_expand_math__exp() -> None:
    x = grid()
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype("float64"))
    got = run_operator("exp", x).astype("float64")
    largest = float(np.finfo("float32").max)
    normal = (exact > 1.18e-38) & (exact <= largest)
    assert np.abs(got[normal] / exact[normal] - 1).max() <= 2e-7
    assert np.isinf(got[exact > largest * 1.0000001]).all()
    assert (got[exact < 1.17e-38] == 0).all()


@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_expand_math__bounded_functions(name: str) -> None:
    x = grid()
    exact = np.array([getattr(math, name)(float(value)) for value in x])
    got = run_operator(name, x).astype("float64")
    assert np.abs(got - exact).max() <= 5e-7
    assert np.abs(got).max() <= 1
    small = (np.abs(x) < 1e-3) & (np.abs(x) > 1e-30)
    assert np.abs(got[small] / exact[small] - 1).max() <= 5e-7


def test_expand_math__sigmoid() -> None:
    x = grid()
    with np.errstate(over="ignore"):
        exact = 1 / (1 + np.exp(-x.astype("float64")))
    got = run_operator("sigmoid", x).astype("float64")
    assert np.abs(got - exact).max() <= 2e-7


@pytest.mark.parametrize(
    ("name", "limits"),
    [("exp", (0, np.inf)), ("tanh", (-1, 1)), ("erf", (-1, 1)), ("sigmoid", (0, 1))],
)
def test_expand_math__not_a_number_and_infinity(name: str, limits: tuple[float, float]) -> None:
    x = np.array([-np.inf, np.inf, np.nan] * 6, "float32")
    got = run_operator(name, x)[:3]
    np.testing.assert_allclose(got[:2], limits, atol=5e-7)
    assert np.isnan(got[2])


def test_expand_math__masked_softmax_is_exactly_zero() -> None:
    got = run_operator("exp", np.full(16, -np.inf, "float32"))
    assert (got == 0).all()
