"""Operators on grouped weights: loop nests against numpy, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from qnn_testing import make_module, run_module, type_of
from tvm import relax

from relayquant.base.packing import CODE_BITS, count_bytes, count_groups, unpack_codes
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


#: Values of codes of 4 bits, in no order.
LEVELS = (128, 255, 0, 7, 9, 130, 127, 80, 80, 200, 241, 1, 64, 65, 254, 32)
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


@pytest.mark.parametrize("zeros", [True, False, "float32"])
def test_levels__loop_nests_are_as_numpy(zeros):
    """And as a weight of 8 bits that has the levels."""
    rng = np.random.default_rng(0)
    packed, scale, zero = draw_weight(rng, 6, 21, 4, 8, zeros)
    wide = np.array(LEVELS, "uint8")[unpack_codes(packed, 4, 21)]
    parts, chosen = (scale, zero), np.array([[3, 0, -1]], "int64")
    cases = [
        (qnn.grouped_dense, (rng.normal(size=(1, 3, 21)).astype("float32"), np.float32(1)), {}),
        (qnn.grouped_take, (chosen,), {}),
        (
            qnn.grouped_expert_dense,
            (rng.normal(size=(1, 3, 21)).astype("float32"), np.float32(1), chosen),
            {"experts": 3},
        ),
    ]
    for make, data, attrs in cases:
        found = []
        for weight, form in ((packed, {"bits": 4, "levels": LEVELS}), (wide, {"bits": 8})):
            arrays = [*map(np.asarray, data), weight, *parts]

            def call(*args, make=make, form=form, attrs=attrs):
                return make(*args, group_size=8, features=21, **form, **attrs)

            module = make_module(call, [type_of(array) for array in arrays])
            again = tvm.script.from_source(module.script(show_meta=True))
            tvm.ir.assert_structural_equal(again, module)
            found += [run(module, arrays)[0], run_module(module, arrays)]
        np.testing.assert_array_equal(found[0], found[2])
        np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(found[1], found[3])


def test_attributes__of_a_module_written_before_there_were_levels():
    arrays = [np.array([0]), *draw_weight(np.random.default_rng(0), 6, 21, 4, 8, True)]
    module = make_module(
        lambda *args: qnn.grouped_take(*args, 4, 8, 21), [type_of(array) for array in arrays]
    )
    document = json.loads(tvm.ir.save_json(module))
    for node in document["nodes"]:
        if node["type"] == "relayquant.attrs.QGroupedAttrs":
            del node["data"]["levels"]
    tvm.ir.assert_structural_equal(tvm.ir.load_json(json.dumps(document)), module)


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
    r"bits=4, levels=\[1, 2\]; allowed: .*one integer of 0..255 for each code, 16 levels": {
        "form": (4, 8, 16, (1, 2))
    },
    "bits=2, levels=.*; allowed: no levels": {"form": (2, 8, 32, LEVELS)},
    "levels=.*256.*; allowed: no levels": {"form": (4, 8, 16, (*LEVELS[:15], 256))},
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
