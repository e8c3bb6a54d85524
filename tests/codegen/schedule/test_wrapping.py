"""Unsigned integers wrap around, as numpy's do: also where a result is compared or divided."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from compiled_call import check_exactly
from tvm import relax

from relayquant.codegen.schedule.wrapping import wrap_unsigned

op = relax.op


def draw(dtype):
    """Two arrays of any numbers of a type, 8 x 16, with the least and the largest ones."""
    rng, most = np.random.default_rng(0), np.iinfo(dtype).max
    a, b = (rng.integers(0, most, (8, 16), dtype=dtype, endpoint=True) for _ in range(2))
    a[0, :5], b[0, :5] = [0, most, most, 1, 0], [1, 1, most, 0, 0]
    return a, b


def of_type(number, dtype):
    return relax.const(np.array(number, dtype))


TARGETS = [
    {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"},
    {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4"},
    {"kind": "llvm", "mtriple": "aarch64-linux-gnu"},
]

#: a name -> the operators, and what numpy makes of the same numbers and the number 3
CASES = {
    "sum is less": (lambda a, b, _: op.less(a + b, a), lambda a, b, _: a + b < a),
    "difference is more": (lambda a, b, _: op.greater(a - b, a), lambda a, b, _: a - b > a),
    "next is less": (lambda a, _, three: op.less(a + three, a), lambda a, _, k: a + k < a),
    "negative": (lambda a, b, _: op.negative(a), lambda a, b, _: -a),
    "0 - x": (lambda a, b, three: (three - three) - a, lambda a, b, k: -a),
    "minimum": (
        lambda a, _, three: op.minimum(three - a, three),
        lambda a, _, k: np.minimum(k - a, k),
    ),
    "quotient of a product": (
        lambda a, _, three: op.floor_divide(a * three, three),
        lambda a, _, k: a * k // k,
    ),
    "rest of a product": (
        lambda a, b, three: op.floor_mod(a * b + b, three),
        lambda a, b, k: (a * b + b) % k,
    ),
    "float": (
        lambda a, b, _: op.astype(a + b, "float64"),
        lambda a, b, _: (a + b).astype("float64"),
    ),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("name", CASES)
def test_unsigned__wraps_around(name, dtype):
    compute, expect = CASES[name]
    a, b = draw(dtype)
    expected = expect(a, b, np.array(3, dtype))
    check_exactly(lambda x, y: compute(x, y, of_type(3, dtype)), expected, a, b)


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_unsigned_reductions__wrap_around(dtype):
    a, b = draw(dtype)
    check_exactly(lambda x: op.sum(x, 1), a.sum(1, dtype=dtype), a)
    check_exactly(lambda x: op.prod(x, 1), a.prod(1, dtype=dtype), a)
    check_exactly(lambda x: op.cumsum(x, 1), a.cumsum(1, dtype=dtype), a)
    check_exactly(lambda x, y: op.matmul(x, op.permute_dims(y)), a @ b.T, a, b)
    is_less = a.sum(0, dtype=dtype) < a[0]
    check_exactly(lambda x, y: op.less(op.sum(x, 0), y), is_less, a, a[0])


@pytest.mark.parametrize("target", TARGETS, ids=lambda each: each.get("mcpu", "arm"))
@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_wide_arithmetic__is_gone_in_the_code(dtype, target):
    """LLVM computes in the type's own bits: there are no more instructions than TVM's."""
    a, b, c = (tvm.te.placeholder((64,), dtype, name) for name in "abc")
    y = tvm.te.compute((64,), lambda i: a[i] * b[i] + a[i] - c[i], name="y")
    func = tvm.te.create_prim_func([a, b, c, y]).with_attr("global_symbol", "wrapped")
    plain, wrapped = (
        tvm.compile(tvm.IRModule({"wrapped": each}), target=target).mod.inspect_source("asm")
        for each in (func, wrap_unsigned(func))
    )
    assert len(wrapped.splitlines()) <= len(plain.splitlines())
