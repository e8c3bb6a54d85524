"""Transposed convolutions, compiled for every instruction set, against the numpy model."""

from __future__ import annotations

import numpy as np
import pytest
from convolutions import conv2d_transpose_accumulators
from exact import call_kernel, finish, random_multipliers, random_values, random_weights
from machines import every_isa_in_samples, runnable_target

from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.convolution.transposed import (
    Conv2dTranspose,
    build_conv2d_transpose,
    choose_transpose_plan,
    pack_conv2d_transpose,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Slope
from relayquant.codegen.kernels.integer.specs import Constants
from relayquant.codegen.kernels.isa.timing import ZEN5
from relayquant.codegen.kernels.isa.x86 import VNNI512

CASES = {
    "4x4/2": Conv2dTranspose(1, 4, 5, 16, 32, (4, 4), (2, 2), (1, 1, 1, 1), in_zero_point=5),
    "groups, output padding, int8, batch 2": Conv2dTranspose(
        2, 3, 5, 6, 9, (3, 2), (2, 3), (1, 0, 0, 0), (1, 1), 3, (1, 2), "int8", -7
    ),
    "dilation with and without a common factor, groups": Conv2dTranspose(
        2, 4, 3, 6, 10, (3, 4), (4, 2), (2, 3, 1, 0), (6, 3), 2, (1, 0), in_zero_point=5
    ),
    "dilation at stride 1": Conv2dTranspose(
        1, 3, 4, 5, 8, (2, 3), padding=(1, 0, 1, 2), dilation=(2, 3), in_zero_point=200
    ),
    "slope, groups": Conv2dTranspose(
        1,
        4,
        5,
        32,
        40,
        (3, 3),
        (2, 2),
        (1, 1, 1, 1),
        groups=2,
        in_zero_point=5,
        epilogue=Epilogue(dtype="int8", zero_point=3, slope=Slope(-100, 155, 1.1)),
    ),
    "2x2/2": Conv2dTranspose(1, 4, 4, 8, 8, (2, 2), (2, 2)),
    "3x3": Conv2dTranspose(1, 4, 4, 8, 8, (3, 3), (1, 1), (1, 1, 1, 1), in_zero_point=9),
    "kernel smaller than stride": Conv2dTranspose(1, 4, 4, 8, 8, (1, 1), (3, 2), in_zero_point=9),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES)
@every_isa_in_samples
def test_build_conv2d_transpose__equals_numpy(isa, case):
    spec, rng = CASES[case], np.random.default_rng(0)
    x = random_values(rng, spec.in_shape, spec.in_dtype)
    w = random_weights(rng, spec.weight_shape)
    bias = rng.integers(-500, 500, spec.out_channels).astype("int32")
    multiplier = random_multipliers(rng, w, spec.epilogue)
    packed = pack_conv2d_transpose(spec, isa, Constants(w, bias, multiplier))
    got = call_kernel(
        build_conv2d_transpose(spec, isa), runnable_target(isa), [x, *packed.arguments()],
        spec.out_shape, spec.epilogue.dtype,
    )  # fmt: skip
    expected = finish(conv2d_transpose_accumulators(x, w, bias, spec), spec.epilogue, multiplier)
    np.testing.assert_array_equal(got, expected)


def test_choose_transpose_plan__phases_have_one_form():
    """They share the packed weights. Each phase alone would take the form of two pixels."""
    isa = VNNI512.with_timing(ZEN5)
    spec = Conv2dTranspose(1, 28, 28, 96, 24, (4, 4), (2, 2), (1, 1, 1, 1))
    plan = choose_transpose_plan(spec, isa)
    assert {part.isa for part in plan.parts} == {isa}
    assert {choose_plan(part.spec, isa).isa.sharing for part in plan.parts} == {2}


def test_conv2d_transpose__padding_takes_everything():
    with pytest.raises(ValueError, match="leaves no output"):
        Conv2dTranspose(1, 1, 1, 4, 4, (2, 2), padding=(1, 1, 1, 1))
