"""Loop nests of our own: what they compute, and what is in them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from compiled_call import build_call, check_exactly, run_compiled
from tvm import relax, tirx

import relayquant as rq
from relayquant.codegen.legalization.table import LEGALIZATIONS
from relayquant.errors import ModelError
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.function import make_main


def make_power(exponent, shape=(3, 40), dtype="float32"):
    x = relax.Var("x", relax.TensorType(shape, dtype))

    def emit(builder):
        y = builder.emit(relax.op.power(x, relax.const(exponent, dtype)))
        return relax.op.add(y, x)

    return make_main([x], emit)


@pytest.mark.sample(5)
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


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 7, 10])
def test_power__of_integers_wraps_around(exponent, dtype):
    data = np.array([0, 1, 2, 3, -1, -7, 11, 100]).astype(dtype)
    exact = [int(value) ** exponent for value in data]
    bits = np.iinfo(dtype).bits
    expected = np.array([value % 2**bits for value in exact], f"uint{bits}").astype(dtype)
    check_exactly(lambda x: relax.op.power(x, relax.const(exponent, dtype)), expected, data)


def raise_exactly(base: int, exponent: int) -> int:
    """Python's power; of a negative one what is before its point, 0 of 0."""
    if exponent < 0:
        return base**-exponent if base in (1, -1) else 0
    return pow(base, exponent, 2**64)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64"])
def test_power__of_integers_by_integers(dtype):
    """Every pair of the hardest, whose powers are as in PyTorch."""
    torch, info = pytest.importorskip("torch"), np.iinfo(dtype)
    bases = [0, 1, 2, 3, 15, 100, info.max, info.min] + ([-1, -2, -7] if info.min else [])
    exponents = [0, 1, 2, 3, 7, 31, 100, info.max, info.min] + ([-1, -2, -3] if info.min else [])
    pairs = np.meshgrid(np.array(bases, dtype), np.array(exponents, dtype))
    base, exponent = (each.reshape(-1) for each in pairs)
    exact = [raise_exactly(int(x), int(n)) for x, n in zip(base, exponent, strict=True)]
    expected = np.array([value % 2**info.bits for value in exact], f"uint{info.bits}").astype(dtype)
    if dtype != "uint32":  # which PyTorch does not raise
        found = torch.pow(torch.tensor(base), torch.tensor(exponent)).numpy()
        np.testing.assert_array_equal(found, expected)
    check_exactly(relax.op.power, expected, base, exponent)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("exponents", [[-1], [3, 0, 5], [2, -3, 1]])
def test_power__of_integers_by_a_constant_array(exponents):
    base = np.array([[2], [-1], [7], [0], [1]], "int32")
    exact = [[raise_exactly(int(x), n) % 2**32 for n in exponents] for x in base[:, 0]]
    expected = np.array(exact, "uint32").view("int32")
    constant = relax.const(np.array(exponents, "int32"))
    check_exactly(lambda x: relax.op.power(x, constant), expected, base)


@pytest.mark.parametrize("name", ["mean", "variance", "std"])
def test_averages__of_integers_have_the_type_they_declare(name):
    data = np.array([[3, 1, 2, 2], [-9, 4, 8, 1]], "int32")
    compiled, found = run_compiled(lambda x: getattr(relax.op, name)(x, 1), data)
    assert compiled.dtype == found.dtype == "int32"
    np.testing.assert_array_equal(compiled, found)


@pytest.mark.optimized
@pytest.mark.parametrize(("exponent", "calls"), [(2, 0), (3, 0), (4, 0), (2.5, 1)])
@pytest.mark.parametrize("ndim", [0, 1])
def test_power__small_ones_are_products(exponent, calls, ndim, capfd):
    """Nothing calls the C library for each element, and TVM warns of nothing."""
    mod = make_power(np.full((1,) * ndim, exponent, "float32"))
    lowered = relax.transform.LegalizeOps(LEGALIZATIONS)(mod)
    text = tvm.compile(lowered, tvm.target.Target("llvm")).mod.imports[0].inspect_source()
    assert ("powf" in text or "llvm.pow" in text) == bool(calls)
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["sinh", "cosh"])
def test_hyperbolic__is_that_of_numpy(name, dtype):
    """Near 0 and far from it, infinity and NaN."""
    data = np.concatenate([np.linspace(-80, 80, 50), np.logspace(-30, 1, 50)]).astype(dtype)
    data[:5] = np.inf, -np.inf, np.nan, 89, -89  # of which float32 has no power
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


def make_index(use, dtype):
    """A function of 8 indices that reads of, or writes to, an array of 4 x 4."""
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    i = relax.Var("i", relax.TensorType((8,), dtype))
    return make_main([x, i], lambda _: use(x, i))


def compile_index(use, dtype):
    """Compiled, on the numbers 0 to 15."""
    machine = relax.VirtualMachine(rq.compile(make_index(use, dtype)), tvm.cpu())
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


READS = [read_pairs, read_elements, read_rows, read_places, read_of_batch]


@pytest.mark.parametrize("use", [*READS, write_elements, write_rows, write_pairs])
def test_index__reference_is_the_compiled_code_or_says_what_is_not_there(use):
    """TVM alone would write to memory that is not the array's: the process could end."""
    data, indices = np.arange(16, dtype="float32").reshape(4, 4), [0, -1, 3, -4, 1, 2, -2, 1]
    mod, dtype = make_index(use, "int64"), "int64"
    (found,) = rq.reference.run(mod, [data, np.array(indices, dtype)])
    np.testing.assert_array_equal(found, compile_index(use, dtype)(indices))
    for outside in (4, -5, 10**9):
        with pytest.raises(ModelError, match="out of bounds for axis"):
            rq.reference.run(mod, [data, np.array([*indices[:7], outside], dtype)])


@pytest.mark.parametrize("reduction", ["update", "add", "mul", "min", "max"])
def test_scatter__reductions_of_the_reference(reduction):
    """Two values for one place count one after the other."""

    def use(x, i):
        rows = relax.op.strided_slice(relax.op.concat([x, x]), [0], [0], [8])
        return relax.op.scatter_nd(x, relax.op.reshape(i, (8, 1)), rows, reduction)

    data, indices = np.arange(16, dtype="float32").reshape(4, 4), [0, 1, 1, 3, 3, 3, 0, 1]
    (found,) = rq.reference.run(make_index(use, "int64"), [data, np.array(indices)])
    np.testing.assert_array_equal(found, compile_index(use, "int64")(indices))


@pytest.mark.parametrize("axis", [0, 1])
def test_take__of_indices_that_are_not_there(axis, capfd):
    """In a module that holds integers, which compiles as it is; and TVM warns of nothing."""
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    i = relax.Var("i", relax.TensorType((4,), "int64"))
    scale, zero = relax.const(1.0, "float32"), relax.const(0, "int32")

    def emit(builder):
        taken = builder.emit(relax.op.take(x, i, axis, "fast"))
        codes = builder.emit(qnn.quantize(taken, scale, zero, out_dtype="int8"))
        return qnn.dequantize(codes, scale, zero)

    mod = make_main([x, i], emit)
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    data = np.arange(16, dtype="float32").reshape(4, 4)
    for indices in ([0, -1, 2, -4], [10**8, -(10**8), 17, -21]):
        arrays = (data, np.array(indices, "int64"))
        found = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
        np.testing.assert_array_equal(
            found, np.clip(np.take(*arrays, axis, mode="wrap"), -128, 127)
        )
    assert "Warning" not in capfd.readouterr().err


def make_pad(shape, widths, mode):
    x = relax.Var("x", relax.TensorType(shape, "float32"))

    def emit(builder):
        return builder.emit(relax.op.nn.pad(x, widths, mode))

    return make_main([x], emit)


@pytest.mark.sample(5)
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("widths", [[0, 0, 1, 2], [1, 0, 3, 3], [0, 5, 7, 9], [2, 2, 0, 0]])
@pytest.mark.parametrize("is_known", [True, False])
def test_pad__wider_than_its_axis_reads_nothing_beyond(mode, widths, is_known):
    """Mirror images of mirror images, as numpy makes them; TVM reads memory that is not its own."""
    for shape in ((1, 4), (3, 1), (2, 4)):
        data = np.random.default_rng(0).normal(size=shape).astype("float32")
        sizes = shape if is_known else [tvm.tirx.Var("n", "int64"), shape[1]]
        machine = relax.VirtualMachine(rq.compile(make_pad(sizes, widths, mode)), tvm.cpu())
        found = machine["main"](tvm.runtime.tensor(data)).numpy()
        name = {"replicate": "edge", "circular": "wrap"}.get(mode, mode)
        np.testing.assert_array_equal(found, np.pad(data, np.reshape(widths, (-1, 2)), name))


@pytest.mark.parametrize("axes", [[2], [1, 2], [1]])
@pytest.mark.parametrize("form", [{}, {"scale": False}, {"center": False}], ids=str)
def test_layer_norm__of_float64(axes, form):
    """TVM's kernel takes narrower floats only."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((2, 3, 4))
    scale, shift = rng.standard_normal((2, *(data.shape[axis] for axis in axes)))
    weights = [relax.const(each, "float64") for each in (scale, shift)]

    def normalize(x):
        return relax.op.nn.layer_norm(x, *weights, axes=axes, epsilon=0.1, **form)

    axis = tuple(axes)
    centered = data - data.mean(axis, keepdims=True)
    wanted = centered / np.sqrt((centered**2).mean(axis, keepdims=True) + 0.1)
    extents = [size if at in axes else 1 for at, size in enumerate(data.shape)]
    wanted = wanted * (scale.reshape(extents) if form.get("scale", True) else 1)
    wanted = wanted + (shift.reshape(extents) if form.get("center", True) else 0)
    found, _ = run_compiled(normalize, data)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_selu__keeps_its_digits_near_zero(dtype):
    """1 ulp or a few: e^x - 1 of two rounded numbers has no digit of x = -1e-10."""
    torch = pytest.importorskip("torch")
    sizes = np.geomspace(1e-7 if dtype == "float16" else 1e-30, 50, 300)
    data = np.concatenate([-sizes, sizes, [0, np.inf, -np.inf, np.nan]]).astype(dtype)
    expected = torch.selu(torch.tensor(data).double()).numpy()
    tolerance = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    least = 6e-8 if dtype == "float16" else 0  # the smallest number
    for found in run_compiled(relax.op.nn.selu, data):
        np.testing.assert_allclose(found, expected, tolerance, least)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("beta", "threshold"), [(1, 20), (2, 5), (0.5, 40), (-2, 20)])
def test_softplus__keeps_its_digits_far_below_zero(beta, threshold, dtype):
    """log(1 + e^x) of rounded numbers is 0 from x = -17 on."""
    torch = pytest.importorskip("torch")
    sizes = np.geomspace(1e-4, 40, 200)
    data = np.concatenate([-sizes, sizes, [0, np.inf, -np.inf, np.nan]]).astype(dtype)
    data = data[~(np.abs(data * beta - threshold) < 0.01)]  # on either side of the jump
    expected = torch.nn.functional.softplus(torch.tensor(data).double(), beta, threshold).numpy()
    tolerance = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    least = 6e-8 if dtype == "float16" else 0  # the smallest number
    found, _ = run_compiled(lambda x: relax.op.nn.softplus(x, beta, threshold), data)
    np.testing.assert_allclose(found, expected, tolerance, least)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "function"), [("tanh", np.tanh), ("atanh", np.arctanh)])
def test_hyperbolic_tangent__keeps_its_digits_near_zero(name, function, dtype):
    """TVM's forms are a difference from 1 and the logarithm of one: 0 for x = 1e-20."""
    sizes = np.geomspace(1e-30, 0.9, 300)
    data = np.concatenate([-sizes, sizes]).astype(dtype)
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    for found in run_compiled(getattr(relax.op, name), data):
        np.testing.assert_allclose(found, function(data.astype("float64")), tolerance)


@pytest.mark.parametrize("slopes", [1, 4])
def test_prelu__along_an_axis_of_symbolic_size(slopes):
    """TVM compares the sizes of both, as numbers."""
    count = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((2, count), "float32"))
    slope = relax.Var("slope", relax.TensorType((1 if slopes == 1 else count,), "float32"))
    mod = make_main([x, slope], lambda _: relax.op.nn.prelu(x, slope, axis=-1))
    draw = np.random.default_rng(0).standard_normal
    data, factors = draw((2, 4)).astype("float32"), draw(slopes).astype("float32")
    (found,) = rq.Executor(rq.compile(mod)).run("main", [data, factors])
    np.testing.assert_array_equal(found, np.where(data > 0, data, data * factors))


@pytest.mark.parametrize("reduction", ["update", "add", "max"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scatter_elements__of_fewer_indices_than_data(axis, reduction):
    """TVM counts the places of the updates by the sizes of the data."""
    rng = np.random.default_rng(0)
    data, updates = (rng.standard_normal(size).astype("float32") for size in ((4, 5, 6), (2, 3, 2)))
    indices = np.argsort(rng.random(data.shape), axis)[:2, :3, :2] - data.shape[axis] * (axis == 1)
    places = [*np.indices(indices.shape)]
    places[axis] = indices
    expected = data.copy()
    if reduction == "update":
        expected[tuple(places)] = updates
    else:
        {"add": np.add, "max": np.maximum}[reduction].at(expected, tuple(places), updates)
    check_exactly(
        lambda x, i, u: relax.op.scatter_elements(x, i, u, axis, reduction),
        expected, data, indices, updates,
    )  # fmt: skip


def scatter_means(data, indices, updates):
    return run_compiled(
        lambda x, i, u: relax.op.scatter_elements(x, i, u, 0, "mean"), data, indices, updates
    )


def test_scatter_elements__mean_is_of_two_values_at_a_time():
    """As TVM's: the mean of an element and the first value, then of this mean and the next one."""
    rng = np.random.default_rng(0)
    data, updates = (rng.standard_normal(size).astype("float32") for size in ((2, 3), (4, 3)))
    indices = rng.integers(0, 2, (4, 3))
    expected = data.copy()
    for row, column in np.ndindex(4, 3):
        place = indices[row, column], column
        expected[place] = (expected[place] + updates[row, column]) / 2
    for found in scatter_means(data, indices, updates):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(rq.ModelError, match=r"the sums and the counts with 'add', .* \[RQ206\]$"):
        scatter_means(data, np.ascontiguousarray(indices[:, :2]), updates[:, :2].copy())


def test_batch_norm__of_an_axis_counted_from_the_end():
    """TVM's loop nest, which takes its statistics from the batch, knows no axis -1."""
    data = np.random.default_rng(0).normal(1, 2, (5, 3, 4)).astype("float32")
    scale, shift, *moving = np.random.default_rng(1).uniform(0.5, 2, (4, 4)).astype("float32")

    def compute(x):
        operands = [relax.const(each) for each in (scale, shift, *moving)]
        return relax.op.nn.batch_norm(x, *operands, axis=-1, training=True)

    machine = relax.VirtualMachine(rq.compile(build_call(compute, data)), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(data))[0].numpy()
    mean, variance = data.mean((0, 1)), data.var((0, 1))
    expected = (data - mean) / np.sqrt(variance + 1e-5) * scale + shift
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["full_like", "ones_like", "zeros_like"])
def test_filling__of_bfloat16_in_vectors(name):
    """TVM does not compile a vector of a bfloat16 constant."""
    data = np.ones((4, 32), "float32").astype("bfloat16")
    number = relax.const(np.array(2.5, "float32").astype("bfloat16"))
    numbers = [number] if name == "full_like" else []
    expected = {"full_like": 2.5, "ones_like": 1, "zeros_like": 0}[name]
    check_exactly(
        lambda x: getattr(relax.op, name)(x, *numbers),
        np.full((4, 32), expected, "float32").astype("bfloat16"),
        data,
    )
