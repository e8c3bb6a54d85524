"""Truth values and bits: what compiled code makes of them is what numpy does, of every type."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from compiled_call import check_exactly
from tvm import relax

import relayquant as rq
from relayquant.ir.rewrite.function import make_main


@pytest.mark.parametrize("shape", [(5, 8), (8,), ()])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_not_equal__of_nan_is_true(dtype, shape):
    """A number that is none differs from all, also from itself, in vectors and in their rest."""
    x, builder = relax.Var("x", relax.TensorType((5, 8), dtype)), relax.BlockBuilder()
    y = relax.Var("y", relax.TensorType(shape, dtype))
    with builder.function("main", [x, y]):
        with builder.dataflow():
            parts = [relax.op.not_equal(x, y), relax.op.not_equal(y, x), relax.op.not_equal(x, x)]
            result = builder.emit_output(relax.Tuple([builder.emit(part) for part in parts]))
        builder.emit_func_output(result)
    data = np.arange(40).reshape(5, 8).astype(dtype)
    other = np.array(np.broadcast_to(data[:1], (5, 8))[(0,) * (2 - len(shape))])
    if dtype != "int32":
        data[0, 3], data[4, 7] = np.nan, np.nan
    machine = relax.VirtualMachine(rq.compile(builder.finalize()), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(data), tvm.runtime.tensor(other))
    for got, expected in zip(found, (data != other, other != data, data != data), strict=True):
        np.testing.assert_array_equal(got.numpy(), expected)


COMPARISONS = ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"]
HARD = np.array([[1, np.nan, np.inf, -np.inf], [0, 2, np.nan, 3]])
OTHER = np.array([[1, 1, np.inf, np.inf], [np.nan, 1, np.nan, 4]])


@pytest.mark.sample(15)
@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison__and_its_negation(name, dtype, width):
    """`not (a < b)` is not `a >= b` where one is NaN; in vectors and in their rest."""
    data, other = (
        np.tile(np.nan_to_num(each, nan=7) if dtype == "int32" else each, width // 4)
        for each in (HARD, OTHER)
    )
    data, other = np.clip(data, -9, 9).astype(dtype), np.clip(other, -9, 9).astype(dtype)
    compare, expected = getattr(relax.op, name), getattr(np, name)(data, other)
    check_exactly(compare, expected, data, other)
    check_exactly(lambda x, y: relax.op.logical_not(compare(x, y)), ~expected, data, other)
    check_exactly(lambda x, y: relax.op.bitwise_not(compare(x, y)), ~expected, data, other)
    chosen = lambda x, y: relax.op.where(relax.op.logical_not(compare(x, y)), x, y)  # noqa: E731
    check_exactly(chosen, np.where(expected, other, data), data, other)


@pytest.mark.parametrize("is_negated", [False, True])
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison__of_a_value_with_itself(name, is_negated):
    data, compare = HARD.astype("float32"), getattr(relax.op, name)

    def compute(x):
        return relax.op.logical_not(compare(x, x)) if is_negated else compare(x, x)

    check_exactly(compute, getattr(np, name)(data, data) ^ is_negated, data)


@pytest.mark.parametrize("name", [*COMPARISONS, "maximum", "minimum", "add", "multiply"])
def test_truths__are_compared_as_0_and_1(name):
    data, other = np.array([1, 1, 0, 0, 1], bool), np.array([1, 0, 1, 0, 1], bool)
    check_exactly(getattr(relax.op, name), getattr(np, name)(data, other), data, other)
    constant = relax.const(True, "bool")
    expected = getattr(np, name)(data, True)
    check_exactly(lambda x: getattr(relax.op, name)(x, constant), expected, data)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor", "logical_not"])
def test_logical__of_numbers(name, dtype):
    """Also of NaN, which is not 0, and of a negative 0, which is."""
    data, other = np.array([5, 0, -0.0, 3, 2, 0]), np.array([1, 0, 4, 0, 2, -0.0])
    if dtype.startswith("float"):
        data[3] = np.nan
    arrays = (data.astype(dtype), other.astype(dtype))[: 1 if name == "logical_not" else 2]
    check_exactly(getattr(relax.op, name), getattr(np, name)(*arrays).astype(dtype), *arrays)


@pytest.mark.sample(4)
@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64"])
@pytest.mark.parametrize("name", ["left_shift", "right_shift"])
def test_shift__by_more_than_the_bits(name, dtype, is_constant):
    """0, or the sign; x86 takes a count modulo the bits, Arm does not. Exact integers say which."""
    bits, whole = np.iinfo(dtype).bits, np.array([5, -7, 1, -1, 3, 100, 2, 9]).astype(dtype)
    counts = np.array([0, 1, bits - 1, bits, bits + 1, 2 * bits, 127, 2]).astype(dtype)
    python_shift = (lambda a, n: a << n) if name == "left_shift" else (lambda a, n: a >> n)
    exact = [python_shift(int(a), int(n)) for a, n in zip(whole, counts, strict=True)]
    expected = np.array([value % 2**bits for value in exact], f"uint{bits}").astype(dtype)
    shift, arrays = getattr(relax.op, name), (whole, counts)
    if is_constant:
        check_exactly(lambda x: shift(x, relax.const(counts, dtype)), expected, whole)
    else:
        check_exactly(shift, expected, *arrays)


@pytest.mark.optimized
@pytest.mark.parametrize("wanted", ["int8", "uint8", "int16", "uint16", "uint32"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_cast__of_floats_that_an_integer_does_not_hold(dtype, wanted):
    """They wrap around, as in numpy and PyTorch, also if the integer becomes a float again, from
    which LLVM would make no cast at all.
    """
    data = np.array([-70000, -300.7, -129, -3.7, 0, 1.9, 127, 128, 200, 255, 300.2, 40000, 70000])
    data = np.tile(data[np.abs(data) < (60000 if dtype == "float16" else 1e6)], 3)
    data = data.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    exact = [int(value) % 2 ** np.iinfo(wanted).bits for value in data.astype("float64")]
    expected = np.array(exact).astype(f"uint{np.iinfo(wanted).bits}").view(wanted)
    check_exactly(lambda x: relax.op.astype(x, wanted), expected, data)

    def cast_twice(x):
        return relax.op.astype(relax.op.astype(x, wanted), "float32")

    check_exactly(cast_twice, expected.astype("float32"), data)


@pytest.mark.parametrize("wanted", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "erf"])
def test_cast__of_a_comparison_to_a_float(name, wanted):
    """One loop compares, casts and computes the function, which reads its argument more than once.
    TVM did not compile it.
    """
    data = np.array([-1, 0, 0.5, 2, np.nan] * 4, "float32")

    def compute(x):
        is_larger = relax.op.greater(x, relax.const(np.zeros(20, "float32")))
        return getattr(relax.op, name)(relax.op.astype(is_larger, wanted))

    values = {"exp": np.exp(1), "tanh": np.tanh(1), "sigmoid": 1 / (1 + np.exp(-1)), "erf": 0.8427}
    at_zero = {"exp": 1, "sigmoid": 0.5}.get(name, 0)
    expected = np.where(data > 0, values[name], at_zero).astype(wanted)
    x = relax.Var("x", relax.TensorType(data.shape, "float32"))
    mod = make_main([x], lambda _: compute(x))
    (found,) = rq.Executor(rq.compile(mod)).run("main", [data])
    assert found.dtype == wanted
    np.testing.assert_allclose(found, expected, 1e-3)
