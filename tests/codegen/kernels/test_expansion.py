"""Expanded weights: numpy and compiled code agree to the bit, with exact arithmetic."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import tvm

from relayquant.codegen.kernels.expansion import COLUMNS, Expanded, build_expansion
from relayquant.codegen.kernels.floating.convolution import winograd as floating
from relayquant.codegen.kernels.integer.convolution import winograd as integer
from relayquant.codegen.kernels.isa.target import resolve_target

RULES = {"int8": integer.EXPANSION, "float32": floating.EXPANSION}
#: fewest; vectors that overlap; two blocks of numpy, the second of which is no whole one
SIZES = (64, 1001, COLUMNS + 80)


def draw_taps(kind: str, columns: int) -> np.ndarray:
    rng = np.random.default_rng(columns)
    if kind == "int8":
        taps = rng.integers(-128, 128, (9, columns)).astype("int8")
        taps[:, :2] = -128, 127
        return taps
    return rng.standard_normal((9, columns)).astype("float32")


def cancel_sums(taps: np.ndarray) -> np.ndarray:
    """Float taps whose sums of one point nearly vanish, so that rounding errors are left."""
    taps, coefficients = taps.copy(), RULES["float32"].matrix[7]
    for last in (8, 7):  # the second one cancels what rounding the first one left
        taps[last] = 0
        taps[last] = -(coefficients @ taps.astype("float64")) / coefficients[last]
    return taps


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """Kind -> function of C, as libraries have it."""
    path = str(tmp_path_factory.mktemp("expansion") / "both.so")
    kernels = {rule.name: build_expansion(rule) for rule in RULES.values()}
    tvm.compile(tvm.IRModule(kernels), target=resolve_target(None)).export_library(path)
    library = ctypes.CDLL(path)
    return {kind: getattr(library, rule.name) for kind, rule in RULES.items()}


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("kind", [*RULES, "float32, sums that cancel"])
def test_build_expansion__gives_the_bits_of_numpy(kind, columns, functions):
    kind, *cancels = kind.split(", ")
    taps = draw_taps(kind, columns)
    weights = Expanded(RULES[kind], cancel_sums(taps) if cancels else taps)
    expected = weights.expand()
    assert len(set(expected.tolist())) > columns
    got = np.zeros_like(expected)
    addresses = [ctypes.c_void_p(each.ctypes.data) for each in (weights.taps, got)]
    assert functions[kind](*addresses, ctypes.c_int64(columns)) == 0
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("columns", SIZES)
def test_expand__integers_are_exact(columns):
    taps = draw_taps("int8", columns)
    g = [[6, 0, 0], [4, 4, 4], [4, -4, 4], [1, 2, 4], [1, -2, 4], [0, 0, 12]]
    squares = np.array(taps.reshape(3, 3, columns), "int64")
    expected = np.einsum("ai,bj,ijn->abn", g, g, squares).reshape(-1)
    np.testing.assert_array_equal(Expanded(RULES["int8"], taps).expand(), expected)


def test_expand__floats_are_rounded_once():
    """From the sums in long double, of coefficients as exact as those of the rule."""
    taps = draw_taps("float32", 4096)
    exact = RULES["float32"].matrix.astype("longdouble") @ taps.astype("longdouble")
    got = Expanded(RULES["float32"], taps).expand().reshape(exact.shape)
    np.testing.assert_array_equal(got, exact.astype("float32"))
