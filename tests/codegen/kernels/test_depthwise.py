"""Depthwise convolutions, compiled for every instruction set, against the numpy model."""

from __future__ import annotations

import numpy as np
import pytest
from convolutions import check_conv2d
from drawing import count_examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import best_isa, every_isa_in_samples, runnable_target

from relayquant.codegen.kernels.conv_shape import JoinedSlices
from relayquant.codegen.kernels.integer.depthwise.plan import DepthwisePlan
from relayquant.codegen.kernels.integer.depthwise.rows import build_depthwise
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Slope, Store
from relayquant.codegen.kernels.integer.specs import Conv2d
from relayquant.codegen.kernels.isa.arm import NEON, SDOT, SMMLA
from relayquant.codegen.kernels.isa.base import PORTABLE
from relayquant.codegen.kernels.isa.timing import COMMON, ZEN4, ZEN5
from relayquant.codegen.kernels.isa.x86 import VNNI512, X86_ISAS


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
    "slope, 64 channels": depthwise(
        1, 8, 8, 64, (3, 3), (1, 1), SAME, in_zero_point=3,
        epilogue=Epilogue(zero_point=100, slope=Slope(-99, 155, 0.8)),
    ),
    "slope, 40 channels, 7 columns, residual": depthwise(
        1, 6, 7, 40, (3, 3), (1, 1), SAME, in_zero_point=3,
        epilogue=Epilogue(residual=Residual("int8", 4, 0.4), slope=Slope(None, 155, 1.2)),
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
    "3x3/2, 96 channels": depthwise(1, 11, 10, 96, (3, 3), (2, 2), SAME, in_zero_point=3),
    "3x3/2, 100 channels, int8, batch 2": depthwise(
        2, 12, 11, 100, (3, 3), (2, 2), (0, 0, 1, 1), in_dtype="int8", in_zero_point=-9,
        epilogue=Epilogue(dtype="int8", zero_point=5, low=5),
    ),
    "3x3, 32 channels, 6 rows, batch 2": depthwise(
        2, 6, 9, 32, (3, 3), (1, 1), SAME, in_zero_point=77
    ),
    "3x3, 112 channels, int8, 11 rows": depthwise(
        1, 11, 6, 112, (3, 3), (1, 1), (1, 1, 0, 1), in_dtype="int8", in_zero_point=-9,
        epilogue=Epilogue(dtype="int8", zero_point=5, high=99),
    ),
    "3x3/2, 144 channels, 8 rows": depthwise(
        1, 16, 10, 144, (3, 3), (2, 2), (0, 1, 1, 0), in_zero_point=200
    ),
    "3x3, 64 channels, 2 columns": depthwise(1, 5, 2, 64, (3, 3), (1, 1), SAME, in_zero_point=9),
    "3x3, 64 channels, no padding, 1 column": depthwise(2, 4, 3, 64, (3, 3), (1, 1)),
    "1x3/2, 64 channels, no padding": depthwise(1, 1, 9, 64, (1, 3), (1, 2), in_zero_point=3),
    "3x3/2, 1 column": depthwise(1, 5, 1, 64, (3, 3), (2, 2), SAME, in_zero_point=255),
    "4x4/3, dilation": depthwise(
        1, 13, 14, 64, (4, 4), (3, 3), (2, 3, 2, 3), (2, 2), in_zero_point=3
    ),
    "volumes, 3x3x3, 33 channels": depthwise(
        4, 15, 8, 33, (9, 3), (3, 1), (3, 1, 3, 1), in_zero_point=3,
        joined=JoinedSlices(4, 2, taps=3, stride=1, dilation=1),
    ),
    "volumes, 2x2x2/2 with dilation along the depth": depthwise(
        2, 12, 9, 64, (4, 2), (4, 2), (2, 0, 0, 1), in_dtype="int8", in_zero_point=-9,
        joined=JoinedSlices(5, 2, taps=2, stride=2, dilation=2), epilogue=Epilogue(dtype="int8"),
    ),
    "volumes of 5 channels": depthwise(
        3, 10, 6, 5, (4, 3), (2, 1), (2, 1, 0, 1), in_zero_point=7,
        joined=JoinedSlices(4, 3, taps=2, stride=1, dilation=1),
    ),
    "accumulators": depthwise(
        1, 5, 5, 17, (3, 3), (2, 1), SAME, epilogue=Epilogue(Store.ACCUMULATOR, "int32")
    ),
}  # fmt: skip


ON_ZEN5 = VNNI512.with_timing(ZEN5)


def has_blocks(spec: Conv2d) -> bool:
    return DepthwisePlan(spec, ON_ZEN5.for_convolution(spec.in_dtype)).has_blocks


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES)
@every_isa_in_samples
def test_build_depthwise__equals_numpy(isa, case):
    check_conv2d(CASES[case], isa, runnable_target(isa))


@pytest.mark.sample(4)
@pytest.mark.parametrize("timing", [COMMON, ZEN4, ZEN5], ids=["common", "zen4", "zen5"])
@pytest.mark.parametrize("case", [case for case in CASES if has_blocks(CASES[case])])
def test_build_depthwise__rows_stored_after_the_products_of_the_next(case, timing):
    isa = VNNI512.with_timing(timing)
    assert DepthwisePlan(CASES[case], isa).is_delayed == (timing is not ZEN4)
    check_conv2d(CASES[case], isa, runnable_target(VNNI512))


@pytest.mark.parametrize("isa", [*X86_ISAS, PORTABLE, NEON, SDOT, SMMLA], ids=lambda isa: isa.name)
def test_build_depthwise__code_grows_as_the_window(isa):
    """Four times the products, four times the code: not its fourth power, which never compiles."""

    def measure(size: int) -> int:
        spec = depthwise(1, 9, 9, 24, (size, size), (1, 1))
        return len(build_depthwise(spec, isa, "f").script())

    assert measure(6) < 6 * measure(3)


@settings(max_examples=count_examples(25), deadline=None, derandomize=True)
@given(
    channels=st.sampled_from([2, 5, 16, 33, 40, 64, 90]),
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


@pytest.mark.parametrize("strides", [(1, 1), (2, 2)], ids=str)
def test_depthwise_plan__blocks_and_vectors_hold_every_channel(strides):
    for channels in range(2, 300):
        plan = DepthwisePlan(depthwise(1, 9, 9, channels, (3, 3), strides, SAME), VNNI512)
        count = plan.blocks.count
        assert count == channels // 64
        inside = plan.channel_map.reshape(-1)
        assert {*inside[inside < channels]} == {*range(channels)}
        blocks = np.sort(plan.channel_map[: 4 * count].reshape(-1, 64))
        assert (blocks == np.arange(64 * count).reshape(-1, 64)).all()
        if plan.split_blocks is not None:
            for block in np.sort(plan.channel_map[4 * count :].reshape(-1, 64)):
                assert (block == np.repeat(block[0] + np.arange(32), 2)).all()


@pytest.mark.parametrize(
    ("channels", "height", "stride", "split"),
    [
        (32, 112, 1, (1, 28)),
        (96, 28, 2, (1, 7)),
        (48, 28, 1, None),
        (48, 28, 2, (2, 7)),
        (144, 56, 1, None),  # one vector takes less time than half a block
        (144, 56, 2, None),
        (96, 112, 2, (1, 28)),
        (32, 3, 1, None),  # fewer rows than two groups have
        (128, 28, 1, None),
    ],
)
def test_depthwise_plan__split_blocks(channels, height, stride, split):
    spec = depthwise(1, height, height, channels, (3, 3), (stride, stride), SAME)
    found = DepthwisePlan(spec, VNNI512).split_blocks
    assert (found and (found.count, found.row_units)) == split


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (depthwise(1, 8, 8, 64, (3, 6), (2, 1), SAME), "words do not fit the registers"),
        (depthwise(1, 8, 8, 64, (3, 3), (1, 1), (1, 3, 1, 3)), "many columns read padding"),
        (depthwise(1, 8, 8, 64, (5, 5), (2, 2), (2, 2, 2, 2)), "a row takes two words"),
        (depthwise(1, 8, 8, 64, (3, 3), (2, 2), SAME, in_dtype="int16"), "values are no bytes"),
        (depthwise(1, 8, 8, 64, (3, 3), (2, 2), SAME, epilogue=Epilogue(dtype="int16")), "results"),
    ],
)
def test_depthwise_plan__vectors_one_by_one(spec, why):
    assert not DepthwisePlan(spec, VNNI512.for_activations(spec.in_dtype)).has_blocks, why
