"""Operators on grouped weights: loop nests against numpy, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from qnn_testing import make_module, run_module, type_of
from tvm import relax

from relayquant.base.packing import CODE_BITS, count_bytes, count_groups
from relayquant.errors import QnnError
from relayquant.ir.dialect import qnn
from relayquant.ir.reference import run


def draw_weight(rng, rows, features, bits, group_size, zeros, dtype="float32"):
    """zeros: whether groups have zero points, or the dtype of offsets"""
    groups = (rows, count_groups(features, group_size))
    packed = rng.integers(0, 256, (rows, count_bytes(features, bits))).astype("uint8")
    scale = rng.normal(size=groups).astype(dtype)
    if isinstance(zeros, str):
        return packed, scale, rng.normal(size=groups).astype(zeros)
    zeros = rng.integers(0, 2**bits, groups if zeros else ()).astype("uint8")
    return packed, scale, np.asarray(zeros, "uint8")


#: By bits: zero points, one for all, offsets.
ZEROS = {2: True, 3: True, 4: False, 8: "float32"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("kind", ["float32", "int8", "int8 with scales of groups"])
def test_grouped_dense__loop_nest_is_as_numpy(bits, kind):
    """Also a last group that is short, zero points, offsets and scales of float16."""
    rng = np.random.default_rng(bits)
    weight = draw_weight(rng, 5, 21, bits, 8, ZEROS[bits], "float16" if bits == 2 else "float32")
    x = rng.normal(size=(2, 3, 21)).astype("float32")
    form = (bits, 8, 21)

    def call(x, *weight):
        return qnn.grouped_dense(x, 1.0, *weight, *form)

    arrays = [x, *weight]
    if kind != "float32":
        scales = np.abs(x[..., : 1 if kind == "int8" else 3]) + 1
        arrays = [(40 * x).astype("int8"), scales, *weight]
        call = lambda *args: qnn.grouped_dense(*args, *form)  # noqa: E731
    module = make_module(call, [type_of(array) for array in arrays])
    (expected,) = run(module, arrays)
    np.testing.assert_allclose(run_module(module, arrays), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_grouped_take__loop_nest_is_as_numpy(bits):
    weight = draw_weight(np.random.default_rng(bits), 6, 21, bits, 16, bits != 4 or "float16")
    arrays = [np.array([[3, 0, 5, -1, 13]], "int32"), *weight]
    module = make_module(
        lambda *args: qnn.grouped_take(*args, bits, 16, 21), [type_of(array) for array in arrays]
    )
    # a target without fma rounds a product before it adds an offset
    rtol = 1e-5 if bits == 4 else 0
    np.testing.assert_allclose(run_module(module, arrays), run(module, arrays)[0], rtol=rtol)


def test_quantize_rows__loop_nest_is_as_numpy():
    x = np.random.default_rng(0).normal(size=(2, 5, 33)).astype("float32")
    x[1, 2:4] = [[0], [3e-45]]
    module = make_module(qnn.quantize_rows, [type_of(x)])
    for found, expected in zip(run_module(module, [x]), run(module, [x]), strict=True):
        np.testing.assert_array_equal(found, expected)


BAD = {
    "bits=5; allowed: 2, 3, 4, 8": {"form": (5, 8, 16)},
    r"operand 'weight' has rows whose length in bytes is 8; allowed: 9": {"form": (4, 8, 18)},
    r"operand 'weight_scale' has shape \(3, 2\); allowed: \(3, 4\)": {"form": (4, 4, 16)},
    r"operand 'data' has shape \(2, 15\); allowed: \(\.\.\., 16\)": {"data": ((2, 15), "float32")},
    "operand 'data' has dtype int32; allowed: float32, int8": {"data": ((2, 16), "int32")},
    "operand 'data_scale' has rank 2; allowed: rank 0": {"scale": (2, 1)},
    "operand 'data_scale' has rank 1; allowed: rank 2": {
        "data": ((2, 16), "int8"),
        "scale": (2,),
    },
    "operand 'weight_zero_point' has dtype int8; allowed: uint8, float32, float16": {
        "zero": "int8"
    },
    "operand 'weight_zero_point' has rank 0; allowed: rank 2": {"zero": "float16"},
    r"operand 'data_scale' has shape \(2, 3\); allowed: \(..., 1\), .*or \(..., 2\)": {
        "data": ((2, 16), "int8"),
        "scale": (2, 3),
        "form": (4, 8, 16),
    },
    "group_size=0, features=16; allowed": {"form": (4, 0, 16)},
}


@pytest.mark.parametrize("message", BAD)
def test_grouped_dense__refuses(message):
    bad = BAD[message]
    data, dtype = bad.get("data", ((2, 16), "float32"))
    types = [
        relax.TensorType(data, dtype),
        relax.TensorType(bad.get("scale", ()), "float32"),
        relax.TensorType((3, 8), "uint8"),
        relax.TensorType((3, 2), "float32"),
        relax.TensorType((), bad.get("zero", "uint8")),
    ]
    with pytest.raises(QnnError, match=message):
        make_module(lambda *args: qnn.grouped_dense(*args, *bad.get("form", (4, 8, 16))), types)
