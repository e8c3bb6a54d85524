"""Depthwise convolutions, compiled for every instruction set, against the numpy model."""

from __future__ import annotations

import pytest
from convolutions import check_conv2d
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import best_isa, every_isa, runnable_target

from relayquant.kernels.integer.depthwise import DepthwisePlan
from relayquant.kernels.integer.epilogue import Epilogue, Residual, Store
from relayquant.kernels.integer.specs import Conv2d
from relayquant.kernels.isa.base import PORTABLE, VNNI512


def depthwise(batch, height, width, channels, kernel, *geometry, multiplier=1, **more) -> Conv2d:
    return Conv2d(
        batch, height, width, channels, channels * multiplier, kernel, *geometry,
        groups=channels, **more,
    )  # fmt: skip


SAME = (1, 1, 1, 1)
CASES = {
    "3x3": depthwise(1, 8, 8, 16, (3, 3), (1, 1), SAME, in_zero_point=3),
    "3x3/2, 33 channels, int8, batch 2, residual": depthwise(
        2, 9, 8, 33, (3, 3), (2, 2), (0, 1, 1, 1), in_dtype="int8", in_zero_point=3,
        epilogue=Epilogue(residual=Residual("uint8", 4, -0.37)),
    ),
    "5 channels, no padding": depthwise(2, 9, 8, 5, (5, 5), (1, 2), in_zero_point=3),
    "dilation": depthwise(1, 9, 18, 48, (3, 3), (1, 3), (2, 2, 2, 2), (2, 2), in_zero_point=3),
    "7x3": depthwise(1, 9, 18, 20, (7, 3), (1, 1), (2, 2, 2, 2), in_zero_point=255),
    "channel multiplier 2": depthwise(1, 6, 7, 24, (3, 3), (1, 1), SAME, multiplier=2),
    "1x1": depthwise(1, 1, 1, 48, (1, 1), in_zero_point=3),
    "one row": depthwise(1, 1, 5, 32, (3, 3), (1, 1), SAME, in_dtype="int8", in_zero_point=-128),
    "kernel larger than the image": depthwise(1, 2, 2, 32, (5, 5), (1, 1), (2, 2, 2, 2)),
    "residual int8, 7 columns": depthwise(
        1, 6, 7, 40, (3, 3), (1, 1), SAME, in_zero_point=3,
        epilogue=Epilogue(dtype="int8", zero_point=-20, low=-20, residual=Residual("int8", 4, 0.4)),
    ),
    "int16": depthwise(
        1, 8, 8, 16, (3, 3), (1, 1), SAME, in_dtype="int16", in_zero_point=-300,
        epilogue=Epilogue(dtype="int16", zero_point=99),
    ),
    "int16, 33 channels, strides, dilation, residual": depthwise(
        2, 9, 8, 33, (3, 3), (2, 2), (2, 1, 1, 2), (1, 2), in_dtype="int16", in_zero_point=1000,
        epilogue=Epilogue(dtype="int16", low=-9, residual=Residual("int16", 4, -0.37)),
    ),
    "int16 to int8, 5 channels": depthwise(
        2, 9, 8, 5, (5, 5), (1, 2), in_dtype="int16", in_zero_point=-(2**15),
        epilogue=Epilogue(dtype="int8"),
    ),
    "accumulators": depthwise(
        1, 5, 5, 17, (3, 3), (2, 1), SAME, epilogue=Epilogue(Store.ACCUMULATOR, "int32")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@every_isa
def test_build_depthwise__equals_numpy(isa, case):
    check_conv2d(CASES[case], isa, runnable_target(isa))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    channels=st.sampled_from([2, 5, 16, 33, 40]),
    kernel=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    size=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    in_dtype=st.sampled_from(["uint8", "int8"]),
    zero_point=st.integers(0, 127),
)
def test_build_depthwise__drawn_specs(
    channels, kernel, strides, dilation, padding, size, in_dtype, zero_point
):
    assume(size[0] + padding[0] + padding[2] > (kernel[0] - 1) * dilation[0])
    assume(size[1] + padding[1] + padding[3] > (kernel[1] - 1) * dilation[1])
    isa = best_isa()
    spec = depthwise(
        1, *size, channels, kernel, strides, padding, dilation, in_dtype=in_dtype,
        in_zero_point=zero_point,
    )  # fmt: skip
    check_conv2d(spec, isa, runnable_target(isa))


def test_depthwise_plan__rows_share_words():
    spec = depthwise(1, 8, 8, 16, (3, 3), (1, 1), SAME)
    assert DepthwisePlan(spec, VNNI512).out_rows == 2  # 4 input rows serve 2 output rows
    assert DepthwisePlan(spec, PORTABLE).out_rows == 1  # a word is one row
