"""Loop nests of our own: what they compute, and what is in them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import relayquant as rq
from relayquant.codegen.legalization import LEGALIZATIONS
from relayquant.dialect import qnn


def make_power(exponent, shape=(3, 40), dtype="float32"):
    x, builder = relax.Var("x", relax.TensorType(shape, dtype)), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.power(x, relax.const(exponent, dtype)))
            result = builder.emit_output(relax.op.add(y, x))
        builder.emit_func_output(result)
    return builder.finalize()


def run_compiled(compute, *arrays):
    """What `compute`, of an operand for each array, gives compiled, and in the reference."""
    operands = [
        relax.Var(f"x{k}", relax.TensorType(array.shape, str(array.dtype)))
        for k, array in enumerate(arrays)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", operands):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(compute(*operands)))
        builder.emit_func_output(result)
    mod = builder.finalize()
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    compiled = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    (found,) = rq.reference.run(mod, list(arrays))
    return compiled, found


def check_exactly(compute, expected, *arrays):
    for found in run_compiled(compute, *arrays):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ndim", [0, 2, 3])
@pytest.mark.parametrize("exponent", [-1, 0, 0.5, 1, 2, 3, 4, 5, 2.5])
def test_power__by_a_number_is_that_of_numpy(exponent, ndim, dtype):
    """Of numbers of any rank, also one that adds axes; of negative ones, infinity and NaN."""
    rng = np.random.default_rng(0)
    data = rng.normal(0, 3, (3, 40)).astype(dtype)
    data[0, :4] = np.inf, np.nan, 0, -np.inf
    number = np.full((1,) * ndim, exponent, dtype)
    machine = relax.VirtualMachine(rq.compile(make_power(number, dtype=dtype)), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(data)).numpy()
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(found, data**number + data, rtol=1e-5, atol=1e-5)


def test_power__by_an_array():
    exponent = np.array([2, 3, 0.5, -1] * 10, "float32")
    data = np.random.default_rng(0).uniform(0.5, 2, (3, 40)).astype("float32")
    machine = relax.VirtualMachine(rq.compile(make_power(exponent)), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(data)).numpy()
    np.testing.assert_allclose(found, data**exponent + data, rtol=1e-5)


@pytest.mark.parametrize(("exponent", "calls"), [(2, 0), (3, 0), (4, 0), (2.5, 1)])
@pytest.mark.parametrize("ndim", [0, 1])
def test_power__small_ones_are_products(exponent, calls, ndim, capfd):
    """Nothing calls the C library for each element, and TVM warns of nothing."""
    mod = make_power(np.full((1,) * ndim, exponent, "float32"))
    lowered = relax.transform.LegalizeOps(LEGALIZATIONS)(mod)
    text = tvm.compile(lowered, tvm.target.Target("llvm")).mod.imports[0].inspect_source()
    assert ("powf" in text or "llvm.pow" in text) == bool(calls)
    assert "Warning" not in capfd.readouterr().err


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


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor", "logical_not"])
def test_logical__of_numbers(name, dtype):
    """Also of NaN, which is not 0, and of a negative 0, which is."""
    data, other = np.array([5, 0, -0.0, 3, 2, 0]), np.array([1, 0, 4, 0, 2, -0.0])
    if dtype.startswith("float"):
        data[3] = np.nan
    arrays = (data.astype(dtype), other.astype(dtype))[: 1 if name == "logical_not" else 2]
    check_exactly(getattr(relax.op, name), getattr(np, name)(*arrays).astype(dtype), *arrays)


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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["sinh", "cosh"])
def test_hyperbolic__is_that_of_numpy(name, dtype):
    """Near 0 and far from it, infinity and NaN."""
    data = np.concatenate([np.linspace(-80, 80, 50), np.logspace(-30, 1, 50)]).astype(dtype)
    data[:3] = np.inf, -np.inf, np.nan
    found, _ = run_compiled(getattr(relax.op, name), data)
    atol = 0 if dtype == "float32" else 1e-15  # TVM's tanh of float64 is not exact near 0
    np.testing.assert_allclose(found, getattr(np, name)(data), rtol=1e-5, atol=atol)


def read_pairs(x, i):
    return relax.op.index_tensor(x, relax.Tuple([i, i]))


def read_elements(x, i):
    return relax.op.gather_elements(x, relax.op.reshape(i, (2, 4)), axis=0)


def read_rows(x, i):
    return relax.op.gather_nd(x, relax.op.reshape(i, (-1, 1)))


def read_places(x, i):
    return relax.op.gather_nd(x, relax.op.reshape(i, (-1, 2)))


def read_of_batch(x, i):
    return relax.op.gather_nd(x, relax.op.reshape(i, (4, -1, 1)), batch_dims=1)


def compile_index(use, dtype):
    """A compiled function of 8 indices that reads of, or writes to, the numbers 0 to 15, 4 x 4."""
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    i, builder = relax.Var("i", relax.TensorType((8,), dtype)), relax.BlockBuilder()
    with builder.function("main", [x, i]):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(use(x, i)))
        builder.emit_func_output(result)
    machine = relax.VirtualMachine(rq.compile(builder.finalize()), tvm.cpu())
    data = np.arange(16, dtype="float32").reshape(4, 4)

    def run(indices):
        arrays = (data, np.array(indices, dtype))
        return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()

    return run


@pytest.mark.parametrize(
    ("read", "dtype"),
    [
        (read_pairs, "int32"),
        (read_pairs, "int64"),
        (read_elements, "int32"),
        (read_elements, "int64"),
        (read_rows, "int64"),
        (read_places, "int64"),
        (read_of_batch, "int64"),
    ],
)
def test_index__that_is_not_there_reads_the_nearest(read, dtype):
    """Negative ones count from the end; memory that is no part of the array is never read."""
    run = compile_index(read, dtype)
    np.testing.assert_array_equal(run([0, -1, 1, -2, 3, -4, 2, 1]), run([0, 3, 1, 2, 3, 0, 2, 1]))
    far = 10**8
    np.testing.assert_array_equal(run([far, -far, 4, -5] * 2), run([3, 0] * 4))


def write_elements(x, i):
    return relax.op.scatter_elements(
        x, relax.op.reshape(i, (2, 4)), relax.op.full((2, 4), relax.const(9.0), "float32")
    )


def write_rows(x, i):
    rows = relax.op.full((8, 4), relax.const(9.0), "float32")
    return relax.op.scatter_nd(x, relax.op.reshape(i, (8, 1)), rows)


def write_pairs(x, i):
    values = relax.op.full((8,), relax.const(9.0), "float32")
    return relax.op.index_put(x, relax.Tuple([i, i]), values)


@pytest.mark.parametrize("write", [write_elements, write_rows, write_pairs])
def test_index__that_is_not_there_writes_within_the_array(write):
    run = compile_index(write, "int64")
    np.testing.assert_array_equal(run([0, -1, 0, -2, 0, -1, 0, 0]), run([0, 3, 0, 2, 0, 3, 0, 0]))
    far = 10**8
    np.testing.assert_array_equal(run([far, -far, 4, -5] * 2), run([3, 0] * 4))


@pytest.mark.parametrize("axis", [0, 1])
def test_take__of_indices_that_are_not_there(axis, capfd):
    """In a module that holds integers, which compiles as it is; and TVM warns of nothing."""
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    i, builder = relax.Var("i", relax.TensorType((4,), "int64")), relax.BlockBuilder()
    scale, zero = relax.const(1.0, "float32"), relax.const(0, "int32")
    with builder.function("main", [x, i]):
        with builder.dataflow():
            taken = builder.emit(relax.op.take(x, i, axis, "fast"))
            codes = builder.emit(qnn.quantize(taken, scale, zero, out_dtype="int8"))
            result = builder.emit_output(qnn.dequantize(codes, scale, zero))
        builder.emit_func_output(result)
    machine = relax.VirtualMachine(rq.compile(builder.finalize()), tvm.cpu())
    data = np.arange(16, dtype="float32").reshape(4, 4)
    for indices in ([0, -1, 2, -4], [10**8, -(10**8), 17, -21]):
        arrays = (data, np.array(indices, "int64"))
        found = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
        np.testing.assert_array_equal(
            found, np.clip(np.take(*arrays, axis, mode="wrap"), -128, 127)
        )
    assert "Warning" not in capfd.readouterr().err
