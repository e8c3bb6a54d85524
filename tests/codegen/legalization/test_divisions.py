"""Divisions: compiled code gives what exact numbers give, and ends the process by no number."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from compiled_call import check_exactly, run_compiled
from tvm import relax

INTEGERS = ["int8", "uint8", "int16", "int32", "uint32", "int64"]
DIVISIONS = ["divide", "floor_divide", "floor_mod", "mod"]


def divide_exactly(name: str, a: int, b: int) -> int:
    """What Python's integers give; 0 of a division by 0."""
    if b == 0:
        return 0
    truncated = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    results = {
        "divide": truncated, "floor_divide": a // b, "floor_mod": a % b, "mod": a - b * truncated,
    }  # fmt: skip
    return results[name]


def find_expected(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = 8 * a.itemsize
    exact = [divide_exactly(name, int(x), int(y)) for x, y in np.broadcast(a, b)]
    return np.array([value % 2**bits for value in exact], f"uint{bits}").astype(a.dtype)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", DIVISIONS)
def test_integers__every_pair_of_the_hardest(name, dtype):
    """Also 0, and the smallest by -1, at which the instruction of x86 stops the process."""
    info = np.iinfo(dtype)
    hard = [0, 1, 2, 3, 7, 100, info.max, info.max - 1, info.min, info.min + 1]
    hard = np.array(hard + ([-1, -2, -3, -7, -100] if info.min else []), dtype)
    a, b = (each.reshape(-1) for each in np.meshgrid(hard, hard))
    check_exactly(getattr(relax.op, name), find_expected(name, a, b), a, b)


@pytest.mark.sample(4)
@pytest.mark.parametrize("divisor", [3, -3, 8, 1, 0, -1])
@pytest.mark.parametrize("name", DIVISIONS)
def test_integers__by_a_constant(name, divisor):
    info = np.iinfo("int32")
    data = np.array([0, 5, -5, 7, -8, info.max, info.min, 1], "int32")
    constant = relax.const(divisor, "int32")
    expected = find_expected(name, data, np.array(divisor))
    check_exactly(lambda x: getattr(relax.op, name)(x, constant), expected, data)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("divisor", [0.1, -0.1, 0.3, 1e-3, 3.0, 0.25, -2.0])
def test_floats__are_divided_exactly(divisor, dtype):
    """1 // 0.1 is 9, as 0.1 is a little more than a tenth: exact fractions say so."""
    data = np.linspace(-3, 3, 61).astype(dtype)
    divisor = data.dtype.type(divisor)
    constant = relax.const(divisor, dtype)
    quotients = [Fraction(float(value)) // Fraction(float(divisor)) for value in data]
    remainders = [Fraction(float(value)) % Fraction(float(divisor)) for value in data]
    for name, exact in (("floor_divide", quotients), ("floor_mod", remainders)):
        expected = np.array([float(value) for value in exact]).astype(dtype)
        check_exactly(lambda x, name=name: getattr(relax.op, name)(x, constant), expected, data)


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("name", ["divide", "floor_divide", "floor_mod", "mod"])
def test_floats__by_zero(name, zero, is_constant):
    """Infinity by the signs of both, or NaN, as in numpy; TVM compiles no such constant."""
    data, divide = np.array([1.5, -2, 0, -0.0, np.inf, np.nan], "float32"), getattr(relax.op, name)
    constant, zeros = relax.const(zero, "float32"), np.full(6, zero, "float32")
    with np.errstate(all="ignore"):
        numpy_names = {"divide": "true_divide", "floor_mod": "mod", "mod": "fmod"}
        expected = getattr(np, numpy_names.get(name, name))(data, zeros)
        if is_constant:
            compiled, _ = run_compiled(lambda x: divide(x, constant), data)
        else:
            compiled, _ = run_compiled(divide, data, zeros)
    np.testing.assert_array_equal(compiled, expected)


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("divisor", [2.0, -2.0, 0.5, 3.0])
@pytest.mark.parametrize("name", ["floor_divide", "floor_mod"])
def test_floats__limits(name, divisor, is_constant):
    """Infinity has no quotient. The half of the smallest number is no -0 when it is rounded
    down.
    """
    data, divide = (
        np.array([np.inf, -np.inf, np.nan, 1e-45, -1e-45], "float32"),
        getattr(relax.op, name),
    )
    divisors = np.full(5, divisor, "float32")
    with np.errstate(all="ignore"):
        expected = getattr(np, name.replace("floor_mod", "mod"))(data, divisors)
    if is_constant:
        compiled, _ = run_compiled(lambda x: divide(x, relax.const(divisor, "float32")), data)
    else:
        compiled, _ = run_compiled(divide, data, divisors)
    np.testing.assert_array_equal(compiled, expected)


@pytest.mark.parametrize(
    "divisor", [2.0, -4.0, 0.5, -(2.0**-120), 2.0**103, 2.0**127, 0.1, -3.0, 7e-5]
)
@pytest.mark.parametrize("name", ["floor_divide", "floor_mod"])
def test_floats__of_any_bits(name, divisor):
    """Powers of 2 make no calls of C's fmod, but for remainders by fractions."""
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, "uint32")
    data = bits.view("float32")
    with np.errstate(all="ignore"):
        expected = getattr(np, name.replace("floor_mod", "mod"))(data, np.float32(divisor))
    divide = getattr(relax.op, name)
    compiled, _ = run_compiled(lambda x: divide(x, relax.const(divisor, "float32")), data)
    np.testing.assert_array_equal(compiled, expected)
