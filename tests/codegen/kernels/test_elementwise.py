"""Elementwise operators, with and without a hardware FMA, against numpy."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from drawing import count_examples
from exact import F32, call_kernel, centre, exact_fma, random_values, store
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import runnable_target

from relayquant.codegen.kernels.integer.elementwise import (
    Add,
    Concatenate,
    Dequantize,
    Multiply,
    Quantize,
    QuantizeImage,
    Requantize,
    ScaleChannels,
    Space,
    broadcast_view,
    build_add,
    build_concatenate,
    build_dequantize,
    build_multiply,
    build_quantize,
    build_quantize_image,
    build_requantize,
    build_scale_channels,
    count_corrections,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Store
from relayquant.codegen.kernels.isa.x86 import AVX2, AVX512BW, SSE2

OUT = Epilogue(zero_point=7, low=3, high=250)
SIZES = (1, 5, 16, 37, 1000)

with_machines = pytest.mark.parametrize("isa", [SSE2, AVX2, AVX512BW], ids=lambda isa: isa.name)
with_sizes = pytest.mark.parametrize("size", SIZES)


@with_machines
@with_sizes
def test_build_quantize__equals_numpy(isa, size):
    x = (np.random.default_rng(0).normal(size=size) * 4).astype("float32")
    x[::5] = np.round(x[::5] / F32(0.25)) * F32(0.25) + F32(0.125)  # ties
    spec = Quantize((size,), 0.25, OUT, isa.has_fma)
    got = call_kernel(build_quantize(spec), runnable_target(isa), [x], x.shape, "uint8")
    np.testing.assert_array_equal(got, store(x / F32(0.25), OUT))


@with_machines
def test_build_quantize__not_a_number_and_infinity(isa):
    x = np.array([np.nan, np.inf, -np.inf, 3e38, -0.0, 1e-40] * 4, "float32")
    for dtype in ("uint8", "int8", "int16"):
        spec = Quantize(x.shape, 0.01, Epilogue(dtype=dtype, zero_point=5), isa.has_fma)
        got = call_kernel(build_quantize(spec), runnable_target(isa), [x], x.shape, dtype)
        limits = np.iinfo(dtype)
        expected = [5, limits.max, limits.min, limits.max, 5, 5] * 4
        np.testing.assert_array_equal(got, np.array(expected, dtype))


@with_machines
@pytest.mark.parametrize("shape", [(2, 3, 7, 5), (1, 4, 1, 3), (1, 2, 9, 16), (3, 1, 6, 6)])
def test_build_quantize_image__equals_numpy(isa, shape):
    x = (np.random.default_rng(0).normal(size=shape) * 30).astype("float32")
    x.reshape(-1)[:4] = 0.0, np.inf, -np.inf, 8e37
    expected = store(x / F32(0.25), OUT)
    x.reshape(-1)[0] = np.nan  # like 0
    spec = QuantizeImage(Quantize(shape, 0.25, OUT, isa.has_fma))
    func = build_quantize_image(spec, isa)
    got = call_kernel(func, runnable_target(isa), [x], spec.out_shape, "uint8")
    np.testing.assert_array_equal(got, expected.transpose(0, 2, 3, 1))


@with_machines
@pytest.mark.parametrize("scale", [2.0**-60, 1e-9, 0.0187, 2.0**-2, 3063.228])
def test_build_quantize_image__numbers_beyond_int32_saturate(isa, scale):
    rng, scale = np.random.default_rng(0), F32(scale)
    x = (rng.normal(size=(1, 3, 8, 16)) * 150 * scale).astype("float32")
    ends = [np.inf, 3.4e38, 1e30, 2.0**33 * scale, 2.0**31 * scale, 1e-40]
    x.reshape(3, -1)[:, : 2 * len(ends)] = [*ends, *(-end for end in np.array(ends))]
    for out in (Epilogue(zero_point=114), Epilogue(dtype="int8", zero_point=-7)):
        with np.errstate(over="ignore"):
            expected = store(x / scale, out).transpose(0, 2, 3, 1)
        spec = QuantizeImage(Quantize(x.shape, float(scale), out, isa.has_fma))
        func = build_quantize_image(spec, isa)
        got = call_kernel(func, runnable_target(isa), [x], spec.out_shape, out.dtype)
        np.testing.assert_array_equal(got, expected)


#: A scale with a float32 number that is 2**-44 from where the result changes.
NEEDS_ONE = 0.3535158336162567


def test_count_corrections__depends_on_the_scale():
    out = Epilogue(zero_point=9, low=1, high=254)
    counts = [count_corrections(Quantize((1,), scale, out)) for scale in (0.0187, NEEDS_ONE)]
    assert counts == [0, 1]


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
@pytest.mark.parametrize("scale", [0.0187, 1 / 3, 7.1e-6, 3063.228, NEEDS_ONE])
def test_build_quantize__reciprocal_decides_ties_as_a_division(scale, dtype):
    rng, scale, limits = np.random.default_rng(0), F32(scale), np.iinfo(dtype)
    middles = (rng.integers(limits.min - 300, limits.max + 300, 20_000) + 0.5) * scale
    neighbours = middles.astype("float32").view("int32") + rng.integers(-3, 4, middles.size)
    x = neighbours.astype("int32").view("float32")
    out = Epilogue(dtype=dtype, zero_point=9, low=limits.min + 1, high=limits.max - 1)
    spec = Quantize(x.shape, float(scale), out, has_fma=True)
    got = call_kernel(build_quantize(spec), runnable_target(AVX2), [x], x.shape, dtype)
    np.testing.assert_array_equal(got, store(x / scale, out))


@pytest.mark.sample(4)
@with_machines
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["int8", "int32"])
@pytest.mark.parametrize(
    "out", [OUT, Epilogue(Store.DEQUANTIZE, "float32")], ids=["requantize", "dequantize"]
)
def test_build_scale_channels__equals_numpy(isa, axis, dtype, out):
    rng, shape = np.random.default_rng(0), (3, 37, 5)
    x = random_values(rng, shape, "int8").astype(dtype)
    factors = rng.uniform(0.1, 2, shape[axis]).astype("float32")
    spec = ScaleChannels(shape, axis, dtype, -3, out)
    func = build_scale_channels(spec)
    got = call_kernel(func, runnable_target(isa), [x, factors], shape, out.dtype)
    along = factors.reshape([-1 if i == axis else 1 for i in range(3)])
    real = centre(x, -3) * along
    is_float = out.output is Store.DEQUANTIZE
    np.testing.assert_array_equal(got, real if is_float else store(real, out))


@with_machines
@with_sizes
def test_build_dequantize__equals_numpy(isa, size):
    q = random_values(np.random.default_rng(0), (size,), "int8")
    spec = Dequantize((size,), "int8", -3, 0.37)
    got = call_kernel(build_dequantize(spec), runnable_target(isa), [q], q.shape, "float32")
    np.testing.assert_array_equal(got, centre(q, -3) * F32(0.37))


@with_machines
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_build_requantize__equals_numpy(isa, dtype):
    limit = min(np.iinfo(dtype).max, 10**6)
    q = np.random.default_rng(0).integers(0, limit, 333).astype(dtype)
    spec = Requantize(q.shape, Space(dtype, 11, 100 / limit), OUT)
    got = call_kernel(build_requantize(spec), runnable_target(isa), [q], q.shape, "uint8")
    np.testing.assert_array_equal(got, store(centre(q, 11) * F32(100 / limit), OUT))


@with_machines
@with_sizes
def test_build_add__rounds_once(isa, size):
    rng = np.random.default_rng(0)
    a, b = random_values(rng, (size,), "int8"), random_values(rng, (size,), "uint8")
    spec = Add((size,), Space("int8", -3, 0.37), Space("uint8", 13, -0.77), OUT)
    got = call_kernel(build_add(spec), runnable_target(isa), [a, b], (size,), "uint8")
    expected = exact_fma(centre(b, 13), F32(-0.77), centre(a, -3) * F32(0.37))
    np.testing.assert_array_equal(got, store(expected, OUT))


def all_pairs():
    """Every pair of an int8 and a uint8 value."""
    a, b = np.meshgrid(np.arange(-128, 128).astype("int8"), np.arange(256).astype("uint8"))
    return a.reshape(-1), b.reshape(-1)


@with_machines
def test_build_add__every_pair_at_factors_where_two_roundings_differ(isa):
    a, b = all_pairs()
    out = Epilogue(zero_point=100)
    first, second = centre(a, -3) * F32(2 / 3), centre(b, 13)
    expected = store(exact_fma(second, F32(1 / 6), first), out)
    assert (expected != store(second * F32(1 / 6) + first, out)).any()
    func = build_add(Add(a.shape, Space("int8", -3, 2 / 3), Space("uint8", 13, 1 / 6), out))
    got = call_kernel(func, runnable_target(isa), [a, b], a.shape, "uint8")
    np.testing.assert_array_equal(got, expected)


BROADCASTS = [
    ((2, 3, 4, 20), (2, 1, 1, 20)),
    ((2, 3, 4, 5), (5,)),
    ((2, 3, 4, 5), (1,)),
    ((2, 3, 33), (2, 3, 1)),
    ((2, 3, 33), (2, 3, 33)),
]


@with_machines
@pytest.mark.parametrize(("shape", "rhs_shape"), BROADCASTS)
def test_build_multiply__broadcasts(isa, shape, rhs_shape):
    rng = np.random.default_rng(0)
    a, b = random_values(rng, shape, "int8"), random_values(rng, rhs_shape, "uint8")
    spec = Multiply(shape, "int8", -3, "uint8", 9, 0.0077, OUT, rhs_shape)
    got = call_kernel(build_multiply(spec), runnable_target(isa), [a, b], shape, "uint8")
    product = (a.astype("int32") + 3) * (b.astype("int32") - 9)
    np.testing.assert_array_equal(got, store(product.astype("float32") * F32(0.0077), OUT))


def test_broadcast_view__folds_neighbouring_axes():
    assert broadcast_view((2, 3, 4), (2, 3, 4)) == (24, 1, 1)
    assert broadcast_view((2, 3, 4), (4,)) == (1, 6, 4)
    assert broadcast_view((2, 3, 4), (2, 3, 1)) == (6, 4, 1)
    assert broadcast_view((2, 3, 4, 5), (1, 3, 1, 5)) is None
    assert broadcast_view((2, 3, 4, 5), (2, 3, 1, 5)) == (6, 4, 5)


def test_build_add__broadcast_apart():
    spec = Add((2, 3, 4), Space("int8", 0, 1), Space("int8", 0, 1), OUT, (2, 7, 4))
    with pytest.raises(ValueError, match="is not broadcast"):
        build_add(spec)


@with_machines
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_build_concatenate__requantizes_and_copies(isa, axis):
    rng, out = np.random.default_rng(0), Epilogue(zero_point=7)
    shapes = [[3, 4, 5], [3, 4, 5]]
    shapes[0][axis], shapes[1][axis] = 2, 70
    a, b = random_values(rng, shapes[0], "int8"), random_values(rng, shapes[1], "uint8")
    data = (Space("int8", -3, 0.37), Space("uint8", 7, 1))
    spec = Concatenate(tuple(map(tuple, shapes)), axis, data, out)
    func = build_concatenate(spec)
    got = call_kernel(func, runnable_target(isa), [a, b], spec.out_shape, "uint8")
    expected = np.concatenate([store(centre(a, -3) * F32(0.37), out), b], axis)
    np.testing.assert_array_equal(got, expected)


def test_concatenate__shapes_do_not_join():
    data = (Space("int8", 0, 1), Space("int8", 0, 1))
    with pytest.raises(ValueError, match="agree in all other dimensions"):
        Concatenate(((2, 3), (4, 5)), 1, data, OUT)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float32"},
        {"low": -1},
        {"low": 9, "high": 8},
        {"zero_point": 256},
        {"dtype": "int32", "zero_point": 1},
        {"output": Store.ACCUMULATOR, "dtype": "int32", "zero_point": 1},
        {"output": Store.DEQUANTIZE, "dtype": "float32", "residual": Residual("uint8", 0, 1.0)},
    ],
)
def test_epilogue__rejects(arguments):
    with pytest.raises(ValueError, match="Epilogue"):
        Epilogue(**arguments)


@given(
    a=st.integers(-255, 255),
    b=st.floats(2**-20, 8, width=32),
    c=st.floats(-(2**20), 2**20, width=32, allow_subnormal=False),
)
@settings(max_examples=count_examples(300), deadline=None)
def test_exact_fma__model_of_the_tests_rounds_the_exact_sum(a, b, c):
    got = exact_fma(np.array([a], "float32"), F32(b), np.array([c], "float32"))[0]
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    error = abs(Fraction(float(got)) - exact)
    for neighbour in (np.nextafter(got, F32(np.inf)), np.nextafter(got, F32(-np.inf))):
        other = abs(Fraction(float(neighbour)) - exact)
        assert error < other or (error == other and got.view("int32") % 2 == 0)


@with_machines
def test_build_requantize__int32_saturates_on_both_sides(isa):
    """Beyond int32 by a factor of four; the largest float32 below 2^31 is 2^31 - 128."""
    q = np.array(
        [-(2**30), -(2**29) - 64, -(2**29), -5, 0, 7, 2**29 - 64, 2**29, 2**30] * 5, "int32"
    )
    spec = Requantize(q.shape, Space("int32", 0, 4.0), Epilogue(dtype="int32"))
    got = call_kernel(build_requantize(spec), runnable_target(isa), [q], q.shape, "int32")
    assert got.tolist() == [max(-(2**31), min(2**31 - 128, 4 * value)) for value in q.tolist()]


@with_machines
@pytest.mark.parametrize("bounds", [(-1000, 3000), (-(2**30), 2**30), (-6, -5)])
def test_build_requantize__int32_within_bounds_of_its_own(isa, bounds):
    """Halves go to even, and what is outside to the bound; python's integers say which."""
    q = np.array(
        [-(2**31), -(2**30), -2005, -2000, -11, -1, 0, 3, 5999, 6001, 2**31 - 128], "int32"
    )
    spec = Requantize(
        q.shape, Space("int32", 0, 0.5), Epilogue(dtype="int32", low=bounds[0], high=bounds[1])
    )
    got = call_kernel(build_requantize(spec), runnable_target(isa), [q], q.shape, "int32")
    exact = [round(Fraction(value, 2)) for value in q.tolist()]
    assert got.tolist() == [max(bounds[0], min(bounds[1], value)) for value in exact]
