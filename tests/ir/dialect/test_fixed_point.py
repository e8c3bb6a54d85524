"""Fixed point and rounding in TIR, compiled for two targets, against the numpy reference."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import tvm
from qnn_testing import TARGETS
from tvm import relax, te

import relayquant as rq
from relayquant.base.qtypes import INTEGER_LIMITS, Arithmetic, Rounding
from relayquant.base.runtime import Executor
from relayquant.ir.dialect import fixed_point, qnn
from relayquant.ir.reference import qnn as reference
from relayquant.ir.reference.fixed_point import (
    finish_rounded,
    fma_float32,
    get_fixed_point_multiplier,
    multiply_fixed_point,
    round_values,
)
from relayquant.ir.rewrite.function import make_main


def run_elements(element, arrays, target):
    """element(*scalars) -> expression, for every index of 1-D arrays, compiled."""
    inputs = [te.placeholder(a.shape, a.dtype.name, f"x{i}") for i, a in enumerate(arrays)]
    output = te.compute(arrays[0].shape, lambda i: element(*(x(i) for x in inputs)))
    mod = tvm.IRModule({"main": te.create_prim_func([*inputs, output])})
    result = tvm.runtime.tensor(np.zeros(arrays[0].shape, str(output.dtype)))
    tvm.compile(mod, target=tvm.target.Target(target))(*map(tvm.runtime.tensor, arrays), result)
    return result.numpy()


# ---------------------------------------------------------------- multiplier and shift


@pytest.mark.parametrize("target", TARGETS, ids=("generic", "host"))
def test_split_multiplier__tir(target):
    rng = np.random.default_rng(0)
    reals = np.exp(rng.uniform(-80, 80, 5000))
    reals[:6] = [0.0, 1.0, 1 - 2.0**-40, 2.0**-270, 1 / 3, 0.5 - 2.0**-33]
    mantissa, exponent = get_fixed_point_multiplier(reals)
    for part, expected in enumerate((mantissa, exponent)):
        got = run_elements(
            lambda x, p=part: fixed_point.split_multiplier_tir(x)[p], [reals], target
        )
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rounding", list(Rounding))
def test_multiply_fixed_point__tir(rounding):
    rng = np.random.default_rng(1)
    value = rng.integers(-(2**31), 2**31, 4000).astype("int32")
    mantissa = rng.integers(2**30, 2**31, 4000).astype("int32")
    exponent = rng.integers(-45, 1, 4000).astype("int32")
    value[:3], mantissa[:3], exponent[:3] = (3, -3, -(2**31)), 2**30, (0, 0, -40)
    value[100:200] >>= 20  # room for a left shift
    exponent[100:200] = rng.integers(1, 9, 100)
    expected = multiply_fixed_point(value, mantissa, exponent, rounding)
    for target in TARGETS:
        got = run_elements(
            lambda v, m, e: fixed_point.multiply_fixed_point_tir(v, m, e, rounding),
            [value, mantissa, exponent],
            target,
        )
        np.testing.assert_array_equal(got, expected)


# ---------------------------------------------------------------- rounding and saturation


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        (Rounding.UPWARD, [-2, -1, 0, 0, 1, 2, 3]),
        (Rounding.TONEAREST, [-3, -2, -1, 0, 1, 2, 3]),
        (Rounding.TONEAREST_EVEN, [-2, -2, 0, 0, 0, 2, 2]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_round__ties(rounding, expected, dtype):
    values = np.array([-2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5], dtype)
    np.testing.assert_array_equal(round_values(values, rounding), expected)
    for target in TARGETS:
        got = run_elements(lambda v: fixed_point.round_tir(v, rounding), [values], target)
        np.testing.assert_array_equal(got, expected)


def test_round__largest_below_a_half():
    """trunc(v + 0.5) would give 1."""
    value = np.array([np.nextafter(np.float32(0.5), np.float32(0))])
    assert round_values(value, Rounding.TONEAREST) == 0
    for target in TARGETS:
        got = run_elements(lambda v: fixed_point.round_tir(v, Rounding.TONEAREST), [value], target)
        assert got == 0


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32"])
def test_saturate__limits(dtype):
    low, high = INTEGER_LIMITS[dtype]
    values = np.array([-np.inf, -1e30, -5e9, -1, 0, 1, 2**31 - 128, 5e9, np.inf, np.nan], "float32")
    zero = 3 if dtype != "int32" else 0
    zeros = np.full(values.shape, zero, "int32")
    finite = np.nan_to_num(values.astype("float64"), nan=0, posinf=1e30, neginf=-1e30)
    top = high if dtype != "int32" else 2**31 - 128
    expected = np.clip(finite + zero, low, top).astype(dtype)
    np.testing.assert_array_equal(finish_rounded(values, zeros, dtype), expected)
    for target in TARGETS:
        got = run_elements(
            lambda v, z: fixed_point.saturate_tir(v, z, dtype, may_be_nan=True),
            [values, zeros],
            target,
        )
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("zero", [-(2**31), -129, -1, 0, 1, 127, 200, 2**31 - 1])
def test_saturate__int32_with_every_zero_point(zero):
    """The sum of value and zero point is beyond int32 by up to its width; python's are exact."""
    low, high = INTEGER_LIMITS["int32"]
    values = np.array([-np.inf, -(2.0**31), -5.0, 0, 7, 2**30, 2**31 - 128, np.inf], "float32")
    zeros = np.full(values.shape, zero, "int32")
    held = [int(min(max(float(value), low), 2**31 - 128)) for value in values]
    expected = np.array([min(max(value + zero, low), high) for value in held], "int32")
    np.testing.assert_array_equal(finish_rounded(values, zeros, "int32"), expected)
    got = run_elements(
        lambda v, z: fixed_point.saturate_tir(v, z, "int32"), [values, zeros], TARGETS[0]
    )
    np.testing.assert_array_equal(got, expected)


# ---------------------------------------------------------------- fused multiply-add


@pytest.mark.parametrize("target", TARGETS, ids=("generic", "host"))
def test_fused_multiply_add__tir(target):
    rng = np.random.default_rng(2)
    a, b, c = (
        (rng.standard_normal(20000) * 10 ** rng.uniform(-3, 3, 20000)).astype("float32")
        for _ in range(3)
    )
    c[:10000] = -(a * b)[:10000]  # cancellation shows the low bits of the product
    expected = fma_float32(a, b, c)
    assert (expected != a * b + c).sum() > 1000
    got = run_elements(fixed_point.fused_multiply_add_tir, [a, b, c], target)
    np.testing.assert_array_equal(got, expected)


# ---------------------------------------------------------------- requantize


@pytest.mark.sample(5)
@pytest.mark.parametrize("arithmetic", list(Arithmetic))
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("out_dtype", ["int8", "int32"])
def test_requantize__tir(rounding, arithmetic, out_dtype):
    rng = np.random.default_rng(3)
    value = rng.integers(-30000, 30000, 5000).astype("int32")
    scales = np.exp(rng.uniform(-9, -3, 5000)).astype("float32")
    scales[:1000] = 2.0 ** -rng.integers(1, 6, 1000)  # ties
    zeros, output = rng.integers(-128, 128, 5000).astype("int32"), np.int32(-7)
    expected = reference.requantize(
        *(value, scales, zeros, np.float32(1), output),
        out_dtype=out_dtype,
        rounding=rounding,
        compute_dtype=arithmetic,
    )
    reals, outputs = scales.astype("float64"), np.full_like(value, output)
    for target in TARGETS:
        got = run_elements(
            lambda v, r, z, o: fixed_point.requantize_tir(
                v,
                z,
                fixed_point.encode_multiplier_tir(r, arithmetic),
                o,
                out_dtype,
                rounding,
                arithmetic,
            ),
            [value, reals, zeros, outputs],
            target,
        )
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rounding", [Rounding.UPWARD, Rounding.TONEAREST])
def test_requantize__product_and_sum_are_not_contracted(rounding):
    """Values whose answer changes when product and zero point are added by one FMA."""
    rng = np.random.default_rng(4)
    value = rng.integers(-300000, 300000, 50000).astype("int32")
    multiplier = np.float32(0.7)  # a little less than 7/10: ties come from below
    product = value.astype("float32") * multiplier
    outputs = -np.trunc(product).astype("int32")  # the sum shows the low bits of the product
    separate = round_values(product + outputs.astype("float32"), rounding)
    fused = round_values(fma_float32(value, multiplier, outputs), rounding)
    chosen = np.flatnonzero(separate != fused)
    assert chosen.size > 100
    value, outputs = value[chosen], outputs[chosen]
    scale = np.full(value.shape, multiplier)
    zeros = np.zeros_like(value)
    for target in TARGETS:
        got = run_elements(
            lambda v, m, z, o: fixed_point.requantize_tir(
                v, z, (m,), o, "int32", rounding, Arithmetic.FLOAT32
            ),
            [value, scale, zeros, outputs],
            target,
        )
        np.testing.assert_array_equal(got, separate[chosen].astype("int32"))


@pytest.mark.parametrize("dtype", ["int8", "int32"])
@pytest.mark.parametrize("mode", [Rounding.TONEAREST_EVEN, Rounding.UPWARD])
@pytest.mark.parametrize(
    ("scale", "out_scale"), [(10.0, 1e-38), (3e38, 1e-45), (1e-38, 3e38), (1e10, 1e-30)]
)
def test_requantize__by_more_than_the_largest_float32(scale, out_scale, mode, dtype):
    """Exact: 0 stays 0, and all else saturates, or vanishes."""
    limits = np.iinfo(dtype)
    data = np.array([limits.min, -2, -1, 0, 1, 2, limits.max], dtype)
    x = relax.Var("x", relax.TensorType(data.shape, dtype))
    mod = make_main(
        [x], lambda _: qnn.requantize(x, scale, 0, out_scale, 7, out_dtype="int8", rounding=mode)
    )
    ratio = Fraction(float(np.float32(scale))) / Fraction(float(np.float32(out_scale)))
    wanted = [min(127, max(-128, round(int(value) * ratio) + 7)) for value in data]
    assert rq.reference.run(mod, [data])[0].tolist() == wanted
    assert Executor(rq.compile(mod)).run("main", [data])[0].tolist() == wanted


def test_fixed_point__shifts_of_64_and_more_compile():
    x = relax.Var("x", relax.TensorType((3,), "int8"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            call = qnn.requantize(
                x, 10.0, 0, 1e-38, 7, out_dtype="int8", compute_dtype=Arithmetic.INT64
            )
            y = builder.emit_output(call)
        builder.emit_func_output(y)
    mod, data = builder.finalize(), np.array([-1, 0, 5], "int8")
    wanted = rq.reference.run(mod, [data])[0]
    np.testing.assert_array_equal(Executor(rq.compile(mod)).run("main", [data])[0], wanted)
