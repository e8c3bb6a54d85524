"""Grouped weights in numpy, against rational arithmetic and ONNX Runtime."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from onnx import helper
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

from relayquant.base.packing import CODE_BITS, count_groups, pack_codes
from relayquant.errors import QnnError
from relayquant.ir.reference import qnn


def draw_weight(rng, shape, bits, group_size, has_zeros):
    """(codes, packed codes, scales, zero points)"""
    codes = rng.integers(0, 2**bits, shape).astype("uint8")
    groups = (shape[0], count_groups(shape[1], group_size))
    scale = rng.normal(size=groups).astype("float32")
    middle = np.array(2 ** (bits - 1), "uint8")
    zeros = rng.integers(0, 2**bits, groups).astype("uint8") if has_zeros else middle
    return codes, pack_codes(codes, bits), scale, zeros


def test_quantize_rows__half_to_even_of_each_row():
    x = np.array([[[254.0, 1.0, 3.0, -254.0], [0, 0, 0, 0]]], "float32")
    rows, scale = qnn.quantize_rows(x)
    np.testing.assert_array_equal(rows, [[[127, 0, 2, -127], [0, 0, 0, 0]]])
    np.testing.assert_array_equal(scale, [[[2], [1]]])
    assert rows.dtype == np.int8
    assert scale.dtype == np.float32


def test_quantize_rows__a_row_too_small_for_a_step_is_zeros():
    """The 127th of its values is less than float32 has: 0 is no divisor."""
    least = np.finfo("float32").smallest_subnormal
    with np.errstate(divide="raise", invalid="raise"):
        rows, scale = qnn.quantize_rows(np.array([[least, 0], [0, 63 * least]], "float32"))
        np.testing.assert_array_equal(rows, 0)
        np.testing.assert_array_equal(scale, 1)
    rows, scale = qnn.quantize_rows(np.array([[64 * least, 0]], "float32"))
    np.testing.assert_array_equal(rows, [[64, 0]])
    assert scale == least


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_grouped_dense__exact_to_rounding_of_sums(bits, has_zeros):
    """Against fractions; the bound is that of as many roundings to float32 as there are groups."""
    rng = np.random.default_rng(bits)
    codes, packed, scale, zeros = draw_weight(rng, (5, 23), bits, 8, has_zeros)
    data = rng.integers(-127, 128, (2, 3, 23)).astype("int8")
    row_scale = rng.uniform(0.1, 1, (2, 3, 1)).astype("float32")
    form = {"bits": bits, "group_size": 8, "features": 23}
    found = qnn.grouped_dense(data, row_scale, packed, scale, zeros, **form)
    as_float = (data * row_scale).astype("float32")
    floats = qnn.grouped_dense(as_float, 1.0, packed, scale, zeros, **form)
    spread = np.broadcast_to(zeros, scale.shape).astype(int)
    for index in np.ndindex(2, 3, 5):
        row, n = data[index[:2]], index[2]
        terms = [
            Fraction(float(scale[n, k // 8])) * int(row[k]) * (int(codes[n, k]) - spread[n, k // 8])
            for k in range(23)
        ]
        step = Fraction(float(row_scale[index[:2]][0]))
        expected, size = step * sum(terms), float(step * sum(map(abs, terms)))
        assert abs(float(found[index] - expected)) <= 1e-6 * size
        assert abs(float(floats[index] - expected)) <= 3e-6 * size


@pytest.mark.parametrize("row_scale", [np.float32(1), np.ones((0, 1), "float32")])
def test_grouped_dense__of_no_rows(row_scale):
    _, packed, scale, zeros = draw_weight(np.random.default_rng(0), (5, 24), 4, 8, True)
    form = {"bits": 4, "group_size": 8, "features": 24}
    for dtype in ("int8", "float32"):
        found = qnn.grouped_dense(np.zeros((0, 24), dtype), row_scale, packed, scale, zeros, **form)
        assert (found.shape, found.dtype) == ((0, 5), np.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_grouped_dense__scales_of_the_data_for_each_group(bits, has_offsets):
    """Rows that `quantize_rows` makes of groups, against float64."""
    rng = np.random.default_rng(bits)
    codes, packed, scale, _ = draw_weight(rng, (5, 24), bits, 8, False)
    zero = rng.normal(size=scale.shape).astype("float16") if has_offsets else np.uint8(2)
    data = rng.normal(size=(2, 3, 3, 8)).astype("float32") * [[1], [10], [100]]
    q, steps = qnn.quantize_rows(data)
    form = {"bits": bits, "group_size": 8, "features": 24}
    found = qnn.grouped_dense(q.reshape(2, 3, 24), steps[..., 0], packed, scale, zero, **form)
    real = codes.reshape(5, 3, 8) - (0 if has_offsets else 2.0)
    real = real * scale[..., None] + (zero[..., None].astype("float64") if has_offsets else 0)
    rows = q.astype("float64") * steps
    expected = rows.reshape(2, 3, 24) @ real.reshape(5, 24).T
    size = np.abs(rows).reshape(2, 3, 24) @ np.abs(real).reshape(5, 24).T
    assert (np.abs(found - expected) <= 1e-6 * size + 1e-6 * np.abs(rows).max() * 24).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_grouped_dense__offsets_are_exact_to_rounding_of_sums(bits):
    """real = scale * code + offset, against fractions: two roundings for each group."""
    rng = np.random.default_rng(bits)
    codes, packed, scale, _ = draw_weight(rng, (5, 23), bits, 8, False)
    offset = rng.normal(size=scale.shape).astype("float16")
    data = rng.integers(-127, 128, (3, 23)).astype("int8")
    row_scale = rng.uniform(0.1, 1, (3, 1)).astype("float32")
    form = {"bits": bits, "group_size": 8, "features": 23}
    found = qnn.grouped_dense(data, row_scale, packed, scale, offset, **form)
    as_float = (data * row_scale).astype("float32")
    floats = qnn.grouped_dense(as_float, 1.0, packed, scale, offset, **form)
    for row, n in np.ndindex(3, 5):
        pairs = [
            (
                int(data[row, k]) * int(codes[n, k]) * Fraction(float(scale[n, k // 8])),
                int(data[row, k]) * Fraction(float(offset[n, k // 8])),
            )
            for k in range(23)
        ]
        step = Fraction(float(row_scale[row, 0]))
        expected = step * sum(a + b for a, b in pairs)
        size = float(step * sum(abs(a) + abs(b) for a, b in pairs))
        assert abs(float(found[row, n] - expected)) <= 1e-6 * size
        assert abs(float(floats[row, n] - expected)) <= 3e-6 * size


def test_grouped_take__offsets_are_added_with_one_rounding():
    rng = np.random.default_rng(1)
    codes, packed, scale, _ = draw_weight(rng, (6, 10), 8, 4, False)
    offset = rng.normal(size=scale.shape).astype("float32")
    found = qnn.grouped_take(np.arange(6), packed, scale, offset, bits=8, group_size=4, features=10)
    for n, k in np.ndindex(6, 10):
        exact = int(codes[n, k]) * Fraction(float(scale[n, k // 4])) + Fraction(
            float(offset[n, k // 4])
        )
        near = [found[n, k], *(np.nextafter(found[n, k], np.float32(s)) for s in (-9e9, 9e9))]
        errors = [abs(Fraction(float(value)) - exact) for value in near]
        assert errors[0] == min(errors)


def test_grouped_take__rows_of_the_decoded_weight():
    rng = np.random.default_rng(1)
    codes, packed, scale, zeros = draw_weight(rng, (6, 10), 4, 4, True)
    spread = [np.repeat(part, 4, axis=1)[:, :10] for part in (scale, zeros)]
    expected = (codes.astype("float32") - spread[1]) * spread[0]
    found = qnn.grouped_take(
        np.array([[5, 0], [5, 2]]), packed, scale, zeros, bits=4, group_size=4, features=10
    )
    np.testing.assert_array_equal(found, expected[[[5, 0], [5, 2]]])
    beyond = qnn.grouped_take(
        np.array([-1, 8, -9]), packed, scale, zeros, bits=4, group_size=4, features=10
    )
    np.testing.assert_array_equal(beyond, np.take(expected, [-1, 8, -9], axis=0, mode="wrap"))


@pytest.mark.parametrize("has_zeros", [False, True])
def test_grouped_dense__as_matmul_nbits_of_onnx_runtime(has_zeros):
    rng = np.random.default_rng(2)
    _, packed, scale, zeros = draw_weight(rng, (7, 64), 4, 32, has_zeros)
    x = rng.normal(size=(3, 64)).astype("float32")
    initializers = {"b": packed.reshape(7, 2, 16), "s": scale.reshape(-1)}
    if has_zeros:
        initializers["z"] = pack_codes(zeros, 4).reshape(-1)
    node = helper.make_node(
        "MatMulNBits", ["x", *initializers], ["y"], domain="com.microsoft", K=64, N=7, bits=4,
        block_size=32,
    )  # fmt: skip
    model = make_onnx([node], {"x": x}, {"y": [3, 7]}, initializers, 21)
    (expected,) = run_onnxruntime(model, {"x": x})
    found = qnn.grouped_dense(x, 1.0, packed, scale, zeros, bits=4, group_size=32, features=64)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_grouped_dense__codes_of_another_length():
    with pytest.raises(QnnError, match=r"weight has shape \(3, 4\); allowed: \(N, 5\)"):
        qnn.grouped_dense(
            np.zeros((1, 9), "float32"), 1.0, np.zeros((3, 4), "uint8"),
            np.ones((3, 1), "float32"), np.uint8(8), bits=4, group_size=32, features=9,
        )  # fmt: skip
