"""Products of an image and one integer a channel, against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from exact import F32, call_kernel, centre, random_values, store
from machines import best_isa, every_isa_in_samples, runnable_target

from relayquant.codegen.kernels.integer.channel_product import build_channel_product, fold_channels
from relayquant.codegen.kernels.integer.elementwise import Multiply
from relayquant.codegen.kernels.integer.epilogue import Epilogue
from relayquant.codegen.kernels.isa.base import PORTABLE
from relayquant.codegen.kernels.isa.x86 import VNNI512

OUT = Epilogue(zero_point=7, low=3, high=250)

#: shape and that of the second operand -> (outer, rows, values of a row) for vectors of 64 bytes
VIEWS = {
    ((2, 3, 5, 80), (2, 1, 1, 80)): (2, 15, 80),
    ((2, 2, 2, 80), (2, 1, 1, 80)): (2, 1, 320),
    ((1, 4, 8, 32), (1, 1, 1, 32)): (1, 16, 64),
    ((2, 2, 4, 16), (2, 1, 1, 16)): (2, 2, 64),
    ((6, 70), (70,)): (1, 6, 70),
    ((1, 3, 5, 32), (1, 1, 1, 32)): None,  # 15 pixels are no pairs
    ((1, 4, 4, 24), (1, 1, 1, 24)): (1, 2, 192),
    ((1, 4, 4, 64), (1, 4, 4, 64)): None,
    ((1, 64, 64), (1, 64, 1)): None,
}


def product(lhs: np.ndarray, rhs: np.ndarray, spec: Multiply) -> np.ndarray:
    real = centre(lhs, spec.lhs_zero_point) * centre(rhs, spec.rhs_zero_point)
    return store(real * F32(spec.multiplier), spec.out)


@pytest.mark.parametrize(("shape", "rhs_shape"), VIEWS)
def test_fold_channels__whole_pixels(shape, rhs_shape):
    spec = Multiply(shape, "int8", -3, "uint8", 9, 0.0077, OUT, rhs_shape)
    assert fold_channels(spec, VNNI512) == VIEWS[shape, rhs_shape]


@pytest.mark.parametrize(
    "change", [{"lhs_dtype": "int16"}, {"rhs_dtype": "int16"}, {"out": Epilogue(dtype="int16")}]
)
def test_fold_channels__only_bytes(change):
    spec = Multiply((1, 4, 64), "int8", 0, "int8", 0, 0.1, OUT, (1, 1, 64))
    assert fold_channels(spec, VNNI512) == (1, 4, 64)
    assert fold_channels(replace(spec, **change), VNNI512) is None
    assert fold_channels(spec, PORTABLE) is None


@pytest.mark.parametrize(("shape", "rhs_shape"), [each for each, view in VIEWS.items() if view])
@every_isa_in_samples
def test_build_channel_product__equals_numpy(isa, shape, rhs_shape):
    rng, lhs, rhs = np.random.default_rng(0), "uint8", "int8"
    a, b = random_values(rng, shape, lhs), random_values(rng, rhs_shape, rhs)
    out = Epilogue(dtype=lhs, zero_point=7, low=5)
    spec = Multiply(shape, lhs, -3, rhs, 9, 0.0077, out, rhs_shape)
    if fold_channels(spec, isa) is None:
        pytest.skip("these instructions have no such view")
    func = build_channel_product(spec, isa)
    got = call_kernel(func, runnable_target(isa), [a, b], shape, lhs)
    np.testing.assert_array_equal(got, product(a, b, spec))


@pytest.mark.parametrize("multiplier", [0.011, -0.011, 2.0**13, 3e38])
def test_build_channel_product__every_pair_of_bytes(multiplier):
    isa, shape = best_isa(), (1, 256, 256)
    spec = Multiply(shape, "int8", -3, "uint8", 13, multiplier, OUT, (1, 1, 256))
    if fold_channels(spec, isa) is None:
        pytest.skip(f"{isa.name} packs no bytes")
    lhs = np.arange(-128, 128).astype("int8").repeat(256).reshape(shape)
    rhs = np.arange(256).astype("uint8").reshape(1, 1, 256)
    got = call_kernel(
        build_channel_product(spec, isa), runnable_target(isa), [lhs, rhs], shape, "uint8"
    )
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, product(lhs, rhs, spec))
