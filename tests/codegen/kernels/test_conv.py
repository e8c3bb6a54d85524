"""Convolutions and dense layers, compiled for every instruction set, against the numpy model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from convolutions import check_conv2d, conv2d_accumulators
from drawing import count_examples
from exact import call_kernel, finish, random_multiplier, random_values, random_weights
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import best_isa, every_isa, every_isa_in_samples, runnable_target
from tvm import relax

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan, merge_groups, rank_tiles
from relayquant.codegen.kernels.integer.convolution.direct import (
    build_conv2d,
    build_dense,
    pack_conv2d,
    pack_dense,
)
from relayquant.codegen.kernels.integer.convolution.order import (
    PANEL_ORDER,
    PIXEL_ORDER,
    find_halved_axis,
    pick_order,
    plan_pixel_prefetch,
    plan_prefetch,
)
from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.convolution.tile import locate_tile
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Slope, Store
from relayquant.codegen.kernels.integer.operands import Image, Placement
from relayquant.codegen.kernels.integer.saturating_pack import channel_order
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, Dense, Tile
from relayquant.codegen.kernels.isa.timing import ZEN4, ZEN5, Timing
from relayquant.codegen.kernels.isa.x86 import (
    AVX2,
    AVX2_SMALL,
    AVX512BW,
    AVX512BW_SMALL,
    SMALL_WEIGHT,
    VNNI256,
    VNNI512,
)
from relayquant.codegen.tuning.tuner import list_schedules

RAW = Epilogue(Store.ACCUMULATOR, "int32")
CASES = {
    "3x3": Conv2d(1, 8, 8, 16, 32, (3, 3), padding=(1, 1, 1, 1), in_zero_point=3),
    "odd channels, strides, asymmetric padding, batch 2, residual": Conv2d(
        2, 5, 7, 3, 33, (3, 3), (2, 1), (0, 1, 2, 1), (2, 1), in_zero_point=200,
        epilogue=Epilogue(dtype="int8", zero_point=-5, low=-5, residual=Residual("int8", 4, 0.37)),
    ),
    "1x1 int8 17 -> 5, residual": Conv2d(
        1, 5, 7, 17, 5, (1, 1), in_dtype="int8", in_zero_point=-100,
        epilogue=Epilogue(zero_point=7, residual=Residual("uint8", 4, -0.37)),
    ),
    "small groups, dilation, clip": Conv2d(
        1, 5, 7, 24, 36, (3, 3), padding=(1, 1, 1, 1), dilation=(2, 2), groups=6, in_dtype="int8",
        in_zero_point=-100, epilogue=Epilogue(zero_point=7, low=20, high=200),
    ),
    "large groups": Conv2d(1, 5, 4, 64, 66, (3, 2), groups=2, in_zero_point=9),
    "1x1 on one pixel": Conv2d(1, 1, 1, 100, 100, (1, 1), in_zero_point=255),
    "1x1, stride 2, no padding": Conv2d(1, 7, 6, 32, 48, (1, 1), (2, 2)),
    "first convolution 7x7/2": Conv2d(
        1, 23, 20, 3, 64, (7, 7), (2, 2), (3, 3, 3, 3), in_dtype="int8", in_zero_point=-14,
        epilogue=Epilogue(dtype="int8", zero_point=-128),
    ),
    "ends of two values in four dilated rows": Conv2d(
        2, 11, 9, 3, 33, (4, 2), (1, 2), (1, 0, 1, 1), (2, 1), in_zero_point=77
    ),
    "ends of five rows, read in place": Conv2d(1, 9, 8, 1, 24, (5, 5), (2, 1)),
    "ends on one pixel, several chains": Conv2d(1, 3, 3, 3, 16, (3, 3), in_dtype="int8"),
    "one input channel, stride 3": Conv2d(1, 11, 9, 1, 17, (5, 5), (3, 3), (2, 2, 2, 2)),
    "conv1d": Conv2d(2, 1, 30, 20, 12, (1, 5), (1, 2), (0, 2, 0, 1), in_zero_point=77),
    "2x3 map": Conv2d(1, 2, 3, 64, 48, (2, 3), epilogue=RAW),
    "4 blocks, int8 residual, relu above the lowest value": Conv2d(
        1, 3, 7, 20, 128, (1, 1), in_zero_point=9,
        epilogue=Epilogue(dtype="int8", zero_point=-7, low=-7, residual=Residual("int8", 3, 0.6)),
    ),
    "2 blocks, overlapping panels, residual": Conv2d(
        1, 5, 13, 12, 80, (3, 1),
        epilogue=Epilogue(zero_point=1, residual=Residual("uint8", 3, 0.6)),
    ),
    "2 blocks, an odd number of pixels, residual": Conv2d(
        1, 1, 7, 12, 32, (1, 1), epilogue=Epilogue(residual=Residual("int8", 5, 0.6))
    ),
    "slope, 4 blocks, residual": Conv2d(
        1, 3, 7, 20, 128, (1, 1), in_zero_point=9,
        epilogue=Epilogue(
            dtype="int8", zero_point=-7, residual=Residual("int8", 3, 0.6),
            slope=Slope(-9, 246, 2.0),
        ),
    ),
    "slope, 10 channels": Conv2d(
        1, 9, 8, 3, 10, (3, 3), epilogue=Epilogue(zero_point=40, slope=Slope(-55, 200, 0.6, True))
    ),
    "slope, int16": Conv2d(
        1, 5, 7, 17, 33, (1, 1), in_dtype="int16", in_zero_point=-100,
        epilogue=Epilogue(dtype="int16", zero_point=99, slope=Slope(-999, 2**16 - 1, 0.9)),
    ),
    "1 block, pixels left over": Conv2d(
        1, 1, 23, 8, 16, (1, 1), epilogue=Epilogue(high=90, residual=Residual("int8", -3, 0.6))
    ),
    "24 channels, packed in pieces, residual": Conv2d(
        1, 3, 7, 20, 24, (1, 1), in_zero_point=9,
        epilogue=Epilogue(zero_point=3, residual=Residual("uint8", 3, 0.6)),
    ),
    "48 channels, int8 residual": Conv2d(
        2, 3, 5, 8, 48, (1, 1),
        epilogue=Epilogue(dtype="int8", zero_point=-3, residual=Residual("int8", 3, 0.6)),
    ),
    "8 channels in each of 3 groups": Conv2d(
        1, 4, 5, 36, 24, (3, 3), groups=3, epilogue=Epilogue(residual=Residual("int8", 5, 0.6))
    ),
    "small multipliers": Conv2d(
        1, 3, 7, 20, 64, (1, 1), in_zero_point=9, epilogue=Epilogue(zero_point=3, is_small=True)
    ),
    "small multipliers, clip": Conv2d(
        1, 3, 7, 20, 64, (1, 1), epilogue=Epilogue(zero_point=3, high=200, is_small=True)
    ),
    "float output": Conv2d(1, 2, 3, 5, 3, (2, 3), epilogue=Epilogue(Store.DEQUANTIZE, "float32")),
    "int16 output": Conv2d(1, 4, 4, 8, 19, (3, 3), epilogue=Epilogue(dtype="int16", zero_point=99)),
    "columns of a larger result": Conv2d(
        1, 5, 7, 20, 80, (1, 1), in_zero_point=9, epilogue=Epilogue(zero_point=3), columns=(7, 99)
    ),
    "columns, groups, batch 2": Conv2d(
        2, 4, 5, 36, 24, (3, 3), groups=3, in_dtype="int8", columns=(0, 25),
    ),
    "columns, float output": Conv2d(
        1, 4, 3, 5, 33, (2, 3), epilogue=Epilogue(Store.DEQUANTIZE, "float32"), columns=(3, 40)
    ),
    "int32 output": Conv2d(1, 4, 4, 8, 19, (3, 3), epilogue=Epilogue(dtype="int32")),
    "int16": Conv2d(
        1, 8, 8, 16, 32, (3, 3), padding=(1, 1, 1, 1), in_dtype="int16", in_zero_point=-300,
        epilogue=Epilogue(dtype="int16", zero_point=99),
    ),
    "int16, odd channels, strides, dilation, residual": Conv2d(
        2, 5, 7, 17, 33, (3, 3), (2, 1), (0, 1, 2, 1), (2, 1), in_dtype="int16",
        epilogue=Epilogue(dtype="int16", low=0, residual=Residual("int16", -400, 0.37)),
    ),
    "int16 to uint8, residual int16": Conv2d(
        1, 5, 7, 3, 64, (1, 1), in_dtype="int16",
        epilogue=Epilogue(zero_point=7, residual=Residual("int16", 4, 0.01)),
    ),
    "int16 to int8, groups": Conv2d(
        1, 5, 7, 24, 36, (3, 3), (1, 1), (1, 0, 0, 1), groups=6, in_dtype="int16",
        in_zero_point=2**15 - 1, epilogue=Epilogue(dtype="int8", residual=Residual("int8", 3, 2.0)),
    ),
}  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES)
@every_isa_in_samples
def test_build_conv2d__equals_numpy(isa, case):
    check_conv2d(CASES[case], isa, runnable_target(isa))


#: Reductions whose results are stored between the products of the next tile. The tiles leave
#: pixels and channels over, and threads do not share them evenly.
DELAYED_CASES = {
    "3 blocks, int8 residual": Conv2d(
        1, 27, 13, 24, 144, (1, 1), in_zero_point=9, tile=Tile(1, 4, 3),
        epilogue=Epilogue(dtype="int8", zero_point=-3, residual=Residual("int8", 3, 0.6)),
    ),
    "3 blocks, 40 channels in pieces, residual": Conv2d(
        1, 13, 17, 8, 40, (1, 1), tile=Tile(1, 3, 3),
        epilogue=Epilogue(zero_point=1, low=1, residual=Residual("uint8", 3, 0.6)),
    ),
    "2 blocks, odd channels, batch 2": Conv2d(
        2, 15, 17, 19, 88, (1, 1), in_dtype="int8", in_zero_point=-9, tile=Tile(1, 6, 2),
        epilogue=Epilogue(zero_point=77, high=201),
    ),
    "4 blocks, 1 panel, stride": Conv2d(
        2, 14, 21, 32, 64, (1, 1), (2, 1), in_zero_point=3, tile=Tile(2, 1, 4)
    ),
    "1 block, threads": Conv2d(1, 61, 67, 32, 16, (1, 1), in_zero_point=3, tile=Tile(1, 8, 1)),
    "columns, groups": Conv2d(
        1, 14, 25, 48, 96, (1, 1), groups=3, columns=(7, 120), tile=Tile(1, 5, 2)
    ),
    "int16 in": Conv2d(1, 21, 17, 12, 40, (1, 1), in_dtype="int16", tile=Tile(1, 2, 2)),
    "10 words": Conv2d(1, 9, 24, 40, 96, (1, 1), in_zero_point=9, tile=Tile(1, 3, 4)),
    "a loop of words, int8 residual": Conv2d(
        1, 11, 19, 127, 96, (1, 1), tile=Tile(1, 3, 2),
        epilogue=Epilogue(zero_point=1, low=1, residual=Residual("int8", 3, 0.6)),
    ),
}  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", DELAYED_CASES)
@pytest.mark.parametrize("isa", [VNNI512, VNNI256], ids=lambda isa: isa.name)
def test_build_conv2d__results_stored_between_products(isa, case):
    spec, target = DELAYED_CASES[case], runnable_target(isa)
    if isa.registers == 16:  # has half of the sums, in two blocks at most
        tile = Tile(spec.tile.rows, min(spec.tile.cols, 2), min(spec.tile.blocks, isa.max_blocks))
        spec = replace(spec, tile=tile)
    isa = isa.with_timing(ZEN5)
    assert ConvPlan(spec, isa.for_convolution(spec.in_dtype)).is_delayed
    check_conv2d(spec, isa, target)


@pytest.mark.parametrize(
    ("timing", "delayed"), [(Timing(), False), (ZEN4, False), (ZEN5, True)], ids=("any", "4", "5")
)
def test_conv_plan__stores_results_between_products_on_zen5(timing, delayed):
    isa = VNNI512.with_timing(timing)
    for size, channels, results in ((112, 16, 96), (56, 24, 144), (27, 32, 128), (28, 128, 512)):
        plan = ConvPlan(Conv2d(1, size, size, channels, results, (1, 1)), isa)
        assert plan.is_delayed == delayed
        sums = plan.tile.pixels * plan.tile.blocks
        assert (1 + delayed) * sums + plan.tile.blocks < isa.registers
    for spec in (
        Conv2d(1, 56, 56, 256, 64, (1, 1)),  # long sums
        Conv2d(1, 7, 7, 32, 384, (1, 1)),  # few tiles, which fetch weights
        Conv2d(1, 224, 224, 3, 32, (3, 3), (2, 2)),  # several runs of words
        Conv2d(1, 14, 14, 16, 96, (1, 1), epilogue=RAW),
        Dense(1, 32, 64).as_conv2d(),  # one pixel, several chains
    ):
        assert not ConvPlan(spec, isa).is_delayed


#: Channels that leave half a vector empty: two pixels share each. Of an odd number of pixels the
#: last tile overlaps its neighbour by one.
HALVED_CASES = {
    "24 channels, odd pixels": Conv2d(
        1, 27, 13, 24, 24, (1, 1), in_zero_point=9, tile=Tile(1, 8, 3, 1, 2)
    ),
    "24 channels, int8 residual": Conv2d(
        1, 25, 25, 20, 24, (1, 1), in_zero_point=9, tile=Tile(1, 6, 3, 1, 2),
        epilogue=Epilogue(dtype="int8", zero_point=-3, residual=Residual("int8", 3, 0.6)),
    ),
    "24 channels, few pixels, residual": Conv2d(
        1, 3, 7, 36, 24, (1, 1), tile=Tile(1, 14, 3, 1, 2),
        epilogue=Epilogue(zero_point=1, low=1, residual=Residual("uint8", 3, 0.6)),
    ),
    "8 channels, a pixel left over": Conv2d(
        1, 3, 11, 17, 8, (1, 1), in_dtype="int8", in_zero_point=-9, tile=Tile(1, 32, 1, 1, 2),
        epilogue=Epilogue(high=90, residual=Residual("int8", -3, 0.6)),
    ),
    "3x3/2, padding, batch 3": Conv2d(
        3, 13, 15, 16, 24, (3, 3), (2, 2), (1, 1, 1, 1), in_zero_point=7, tile=Tile(1, 6, 3, 1, 2)
    ),
    "pixels of two rows": Conv2d(
        1, 9, 7, 12, 24, (3, 3), padding=(1, 1, 1, 1), tile=Tile(2, 3, 3, 1, 2),
        epilogue=Epilogue(residual=Residual("uint8", 3, 0.6)),
    ),
    "ends of three rows": Conv2d(
        1, 19, 18, 3, 24, (3, 3), (2, 2), in_zero_point=5, tile=Tile(1, 8, 3, 1, 2)
    ),
    "two chains, two pixels": Conv2d(1, 1, 2, 64, 24, (1, 1), tile=Tile(1, 2, 3, 2, 2)),
    "40 channels in overlapping panels, residual": Conv2d(
        1, 5, 9, 20, 40, (1, 1), tile=Tile(1, 10, 3, 1, 2),
        epilogue=Epilogue(residual=Residual("int8", 3, 0.6)),
    ),
    "56 channels in four blocks": Conv2d(2, 5, 5, 20, 56, (1, 1), tile=Tile(1, 10, 4, 1, 2)),
    "72 channels, residual, clip": Conv2d(
        2, 7, 7, 20, 72, (1, 1), tile=Tile(1, 14, 3, 1, 2),
        epilogue=Epilogue(zero_point=7, low=20, high=200, residual=Residual("uint8", 3, 0.6)),
    ),
    "2 blocks of 16 channels, residual": Conv2d(
        1, 11, 12, 24, 72, (3, 3), tile=Tile(1, 10, 2, 1, 2),
        epilogue=Epilogue(residual=Residual("uint8", 3, 0.6)),
    ),
    "2 blocks of 16 channels": Conv2d(1, 5, 5, 20, 16, (1, 1), tile=Tile(1, 10, 2, 1, 2)),
    "groups": Conv2d(1, 6, 7, 32, 48, (3, 3), groups=2, tile=Tile(1, 4, 3, 1, 2)),
    "odd channels": Conv2d(1, 5, 7, 19, 21, (1, 1), tile=Tile(1, 8, 3, 1, 2)),
    "columns": Conv2d(1, 5, 7, 20, 24, (1, 1), columns=(7, 40), tile=Tile(1, 8, 3, 1, 2)),
    "sums": Conv2d(1, 5, 7, 20, 24, (1, 1), epilogue=RAW, tile=Tile(1, 8, 3, 1, 2)),
    "float output": Conv2d(
        1, 5, 7, 20, 24, (1, 1), tile=Tile(1, 8, 3, 1, 2),
        epilogue=Epilogue(Store.DEQUANTIZE, "float32"),
    ),
    "int16 output, residual": Conv2d(
        1, 5, 7, 20, 24, (1, 1), tile=Tile(1, 8, 3, 1, 2),
        epilogue=Epilogue(dtype="int16", zero_point=99, residual=Residual("int16", -400, 0.37)),
    ),
    "threads": Conv2d(1, 61, 67, 96, 24, (1, 1), tile=Tile(1, 8, 3, 1, 2)),
    "threads, panels of 3x3": Conv2d(
        1, 30, 30, 64, 72, (3, 3), padding=(1, 1, 1, 1), tile=Tile(1, 14, 3, 1, 2)
    ),
}  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", HALVED_CASES)
def test_build_conv2d__pixels_share_vectors(case):
    isa, spec = VNNI512.with_timing(ZEN5), HALVED_CASES[case]
    plan = choose_plan(spec, isa)
    assert plan.isa.sharing == 2
    assert not plan.is_delayed
    check_conv2d(spec, isa, runnable_target(isa))


@pytest.mark.parametrize(
    ("timing", "shares"), [(Timing(), False), (ZEN4, False), (ZEN5, True)], ids=("any", "4", "5")
)
def test_choose_plan__pixels_share_vectors_on_zen5(timing, shares):
    """Where half a vector would be empty otherwise, unless storing pixels apart takes as long."""
    isa = VNNI512.with_timing(timing)
    layers = {
        Conv2d(1, 56, 56, 96, 24, (1, 1)): shares,
        Conv2d(1, 28, 28, 64, 24, (3, 3), padding=(1, 1, 1, 1)): shares,
        Conv2d(1, 112, 112, 32, 8, (1, 1)): shares,
        Conv2d(1, 28, 28, 240, 72, (1, 1)): shares,
        Conv2d(1, 28, 28, 16, 72, (1, 1)): False,
        Conv2d(1, 28, 28, 240, 40, (1, 1)): False,
        Conv2d(1, 56, 56, 96, 32, (1, 1)): False,
        Conv2d(1, 56, 56, 96, 24, (1, 1), in_dtype="int16"): False,
        Dense(1, 512, 24).as_conv2d(): False,
    }
    for spec, wanted in layers.items():
        plan = choose_plan(spec, isa)
        assert (plan.isa.sharing == 2) == wanted, spec
        asked = replace(spec, tile=plan.tile)
        assert choose_plan(asked, isa) == replace(plan, spec=asked)


@pytest.mark.slow
@pytest.mark.parametrize("residual", [None, Residual("uint8", 3, 0.6)], ids=["plain", "residual"])
@pytest.mark.parametrize("channels", [8, 24, 40, 72])
def test_build_conv2d__every_tile_that_tuning_times(channels, residual):
    isa = VNNI512.with_timing(ZEN5)
    spec = Conv2d(1, 5, 9, 24, channels, (3, 3), epilogue=Epilogue(residual=residual))
    for schedule in list_schedules(spec, isa, can_winograd=False):
        check_conv2d(replace(spec, tile=schedule.tile), isa, runnable_target(isa))


@pytest.mark.slow
def test_build_conv2d__large_enough_for_threads_and_panel_order():
    for spec in (
        Conv2d(1, 30, 30, 64, 96, (3, 3), padding=(1, 1, 1, 1), in_zero_point=9),
        Conv2d(1, 1, 112, 512, 128, (1, 1), epilogue=Epilogue(residual=Residual("uint8", 3, 0.6))),
        Conv2d(2, 7, 7, 256, 160, (3, 3), padding=(1, 1, 1, 1), in_dtype="int8"),
        Conv2d(3, 28, 28, 512, 128, (1, 1)),  # more pixels than the second-level cache holds
    ):
        isa = best_isa()
        check_conv2d(spec, isa, runnable_target(isa))


@st.composite
def conv2d_specs(draw):
    def small(low, high):
        return draw(st.integers(low, high))

    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    c_in = groups * draw(st.sampled_from([1, 3, 4, 5, 17, 33]))
    c_out = groups * draw(st.sampled_from([1, 3, 5, 16, 17, 33, 64, 100]))
    in_dtype, out_dtype, added = (draw(st.sampled_from(["uint8", "int8", "int16"])) for _ in "xyr")
    low, high = INTEGER_LIMITS[out_dtype]
    bounds = sorted((small(low, high), small(low, high)))
    residual = None
    if draw(st.booleans()):
        factor = draw(st.sampled_from([0.25, -0.7, 1.3]))
        residual = Residual(added, small(0, 127), factor)
    kernel, dilation = (small(1, 4), small(1, 4)), (small(1, 2), small(1, 2))
    padding = tuple(small(0, 2) for _ in range(4))
    height, width = small(1, 9), small(1, 18)
    assume(height + padding[0] + padding[2] > (kernel[0] - 1) * dilation[0])
    assume(width + padding[1] + padding[3] > (kernel[1] - 1) * dilation[1])
    return Conv2d(
        small(1, 2), height, width, c_in, c_out, kernel, (small(1, 3), small(1, 3)), padding,
        dilation, groups, in_dtype, small(*INTEGER_LIMITS[in_dtype]),
        Epilogue(Store.REQUANTIZE, out_dtype, small(low, high), *bounds, residual),
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=count_examples(40), deadline=None, derandomize=True)
@given(spec=conv2d_specs(), seed=st.integers(0, 1000))
def test_build_conv2d__drawn_specs(spec, seed):
    isa = best_isa()
    check_conv2d(spec, isa, runnable_target(isa), seed)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 100), (1, 37, 10), (5, 33, 17), (30, 128, 64)])
@every_isa_in_samples
def test_build_dense__equals_numpy(isa, m, k, n):
    rng = np.random.default_rng(m)
    spec = Dense(m, k, n, "int8", 7, Epilogue(dtype="int8", zero_point=3))
    x, w = random_values(rng, (m, k), "int8"), random_weights(rng, (n, k))
    bias = rng.integers(-999, 999, n).astype("int32")
    multiplier = random_multiplier(rng, w)
    acc = (x.astype("int64") - 7) @ w.T.astype("int64") + bias
    inputs = [x, *pack_dense(spec, isa, Constants(w, bias, multiplier)).arguments()]
    got = call_kernel(build_dense(spec, isa), runnable_target(isa), inputs, (m, n), "int8")
    np.testing.assert_array_equal(got, finish(acc, spec.epilogue, multiplier))


@every_isa
def test_build_dense__residual_at_factors_where_two_roundings_differ(isa):
    x, r = np.meshgrid(np.arange(256).astype("uint8"), np.arange(256).astype("uint8"))
    x, r = x.reshape(-1, 1), np.repeat(r.reshape(-1, 1), 16, axis=1)
    epilogue = Epilogue(zero_point=100, residual=Residual("uint8", 13, 1 / 6))
    spec = Dense(len(x), 1, 16, "uint8", 125, epilogue)
    ones, zeros = np.ones((16, 1), "int8"), np.zeros(16, "int32")
    packed = pack_dense(spec, isa, Constants(ones, zeros, np.array(2 / 3, "float32")))
    inputs = [x, *packed.arguments(), r]
    got = call_kernel(build_dense(spec, isa), runnable_target(isa), inputs, r.shape, "uint8")
    acc = np.repeat(x.astype("int64") - 125, 16, axis=1)
    np.testing.assert_array_equal(got, finish(acc, epilogue, np.float32(2 / 3), r))


def test_build_conv2d__accumulators_wrap_like_int32():
    isa = best_isa()
    spec = Dense(1, 4, 4, epilogue=RAW)
    x, w = np.full((1, 4), 255, "uint8"), np.full((4, 4), 127, "int8")
    bias = np.array([2**31 - 1, -(2**31), 0, 2**31 - 1 - 4 * 255 * 127], "int32")
    inputs = [x, *pack_dense(spec, isa, Constants(w, bias, None)).arguments()]
    got = call_kernel(build_dense(spec, isa), runnable_target(isa), inputs, (1, 4), "int32")
    wrapped = (bias.astype("int64") + 4 * 255 * 127).astype("uint32").view("int32")
    np.testing.assert_array_equal(got[0], wrapped)


def test_build_dense__runs_from_relax():
    isa, rng = best_isa(), np.random.default_rng(0)
    target = runnable_target(isa)
    spec = Dense(6, 32, 20, in_zero_point=9)
    x, w = random_values(rng, (2, 3, 32), "uint8"), random_weights(rng, (20, 32))
    bias, multiplier = np.zeros(20, "int32"), random_multiplier(rng, w)
    func = build_dense(spec, isa, "dense", (2, 3, 32), (2, 3, 20))
    builder = relax.BlockBuilder()
    kernel = builder.add_func(func, "dense")
    x_var = relax.Var("x", relax.TensorType(x.shape, "uint8"))
    constants = pack_dense(spec, isa, Constants(w, bias, multiplier)).arguments()
    args = [x_var] + [relax.const(a) for a in constants]
    with builder.function("main", [x_var]):
        with builder.dataflow():
            call = relax.call_tir(kernel, args, relax.TensorType((2, 3, 20), "uint8"))
            y = builder.emit_output(call)
        builder.emit_func_output(y)
    vm = relax.VirtualMachine(tvm.compile(builder.get(), target=target), tvm.cpu())
    got = vm["main"](tvm.runtime.tensor(x)).numpy()
    acc = (x.astype("int64") - 9) @ w.T.astype("int64")
    np.testing.assert_array_equal(got, finish(acc, spec.epilogue, multiplier))


def test_rank_tiles__divides_small_maps_evenly():
    tile = rank_tiles((7, 7), 32, 1152, VNNI512)[0].tile
    assert 7 % tile.rows == 0
    assert 7 % tile.cols == 0
    assert tile.pixels * tile.blocks <= VNNI512.accumulators


def test_rank_tiles__splits_a_vector_product_into_chains():
    tile = rank_tiles((1, 1), 4, 512, VNNI512)[0].tile
    assert tile.blocks * tile.chains >= VNNI512.dots_in_flight
    assert tile.blocks * tile.chains <= VNNI512.accumulators


def test_merge_groups__fills_vectors():
    narrow = Conv2d(1, 8, 8, 128, 128, (3, 3), groups=32)  # 4 channels per group
    assert merge_groups(narrow, VNNI512.lanes, VNNI512.products) == 4
    assert merge_groups(narrow, AVX2.lanes, AVX2.products) == 2
    wide = Conv2d(1, 8, 8, 128, 128, (3, 3), groups=4)
    assert merge_groups(wide, VNNI512.lanes, VNNI512.products) == 1


def test_conv_plan__reads_in_place_when_it_can():
    assert not ConvPlan(Conv2d(1, 8, 8, 16, 32, (3, 3)), VNNI512).needs_copy
    assert ConvPlan(Conv2d(1, 8, 8, 16, 32, (1, 1), in_dtype="int8"), VNNI512).needs_copy
    assert ConvPlan(Conv2d(1, 8, 8, 17, 32, (1, 1)), VNNI512).needs_copy


@pytest.mark.parametrize(
    ("channels", "kernel", "words"),
    [
        (3, (3, 3), 7),  # 27 values
        (3, (7, 7), 37),  # 147
        (1, (5, 5), 7),  # 25
        (3, (4, 2), 6),  # 24
        (3, (1, 3), 3),  # one row
        (3, (5, 5), 20),  # ends of three values
        (1, (3, 3), 3),  # no whole word
        (16, (3, 3), 36),  # no end
    ],
)
def test_conv_plan__joins_the_ends_of_kernel_rows(channels, kernel, words):
    spec = Conv2d(1, 9, 9, channels, 32, kernel)
    plan = ConvPlan(spec, VNNI512)
    assert plan.panel_words == words
    assert plan.weight_size == words * plan.tile.blocks * plan.panels * VNNI512.weight_vector
    # Where a dot product takes several instructions, words that are joined do not pay.
    assert not ConvPlan(spec, AVX2.wide).end_words


@every_isa
@pytest.mark.parametrize("c_out", [5, 8, 16, 24, 33, 48, 64, 80, 100])
def test_conv_plan__channel_map_covers_every_channel(isa, c_out):
    plan = ConvPlan(Conv2d(1, 8, 8, 16, c_out, (1, 1)), isa)
    channels = plan.channel_map.reshape(-1)
    assert set(range(c_out)) <= set(channels)
    if c_out >= (plan.panel_channels if plan.is_narrow else isa.lanes):
        assert channels.max() < c_out


def test_conv_plan__packs_panels_that_are_not_full():
    def is_narrow(channels):
        return ConvPlan(Conv2d(1, 8, 8, 16, channels, (1, 1)), VNNI512).is_narrow

    assert all(map(is_narrow, (8, 16, 24, 48, 64)))
    assert not any(map(is_narrow, (3, 5, 12)))


@pytest.mark.parametrize("timing", [Timing(), ZEN4, ZEN5], ids=["common", "zen4", "zen5"])
@pytest.mark.parametrize("words", [1, 4, 16, 64, 512])
def test_rank_tiles__every_timing_keeps_sums_in_registers(timing, words):
    isa = VNNI512.with_timing(timing)
    for vectors in (1, 2, 3, 4, 7, 16):
        tile = rank_tiles((14, 14), vectors, words, isa, (1, 2, 4))[0].tile
        sums = tile.pixels * tile.blocks * tile.chains
        assert isa.dots_in_flight <= sums <= isa.accumulators


@pytest.mark.parametrize("timing", [ZEN4, ZEN5], ids=["zen4", "zen5"])
def test_rank_tiles__short_reductions_get_small_tiles_on_zen(timing):
    """Results of a large tile are stored while no dot product is near enough to begin."""
    isa = VNNI512.with_timing(timing)
    short = rank_tiles((112, 112), 6, 4, isa, (1, 2, 4))[0].tile
    long = rank_tiles((14, 14), 16, 256, isa, (1, 2, 4))[0].tile
    assert short.pixels * short.blocks <= timing.tiles.ahead < long.pixels * long.blocks


def on_zen5(**changes):
    """VNNI on Zen 5, with other times of tiles."""
    return VNNI512.with_timing(replace(ZEN5, tiles=replace(ZEN5.tiles, **changes)))


def test_rank_tiles__long_reductions_are_not_bound_by_loads_on_zen5():
    """A tile of one block loads a word for each product, and its weights.

    Where products are few, the conversion of results takes longer than that.
    """
    isa = VNNI512.with_timing(ZEN5)
    assert rank_tiles((1, 3136), 9, 6, isa, (1, 2, 4))[0].tile.blocks == 1
    assert rank_tiles((1, 169), 63, 128, isa, (1, 2, 4))[0].tile.blocks == 2
    assert rank_tiles((1, 169), 63, 128, on_zen5(load=0.0))[0].tile.blocks == 1
    wide = isa.for_activations("int16")
    assert rank_tiles((1, 28), 4, 32, wide)[0].tile.blocks == 2  # of transforms, 64 channels
    assert rank_tiles((1, 256), 2, 16, wide)[0].tile.blocks == 2


def test_rank_tiles__sums_wait_for_their_last_product_in_loops_on_zen5():
    """Eight sums take as long as a dot product of each: a loop that waits once stays late."""
    isa, late = (on_zen5(delayed_words=0, **changes) for changes in ({}, {"looped": 0.0}))
    tiles = [rank_tiles((1, 196), 24, 16, each, (1, 2, 4))[0].tile for each in (isa, late)]
    assert [tile.pixels * tile.blocks * tile.chains for tile in tiles] == [16, 8]
    unrolled = rank_tiles((1, 784), 12, 6, isa, (1, 2, 4))[0].tile
    assert unrolled.pixels * unrolled.blocks == 8


def test_channel_order__is_what_packs_undo():
    """Packs join vectors by 128-bit parts: bytes 4v .. 4v + 3 of part q are of vector v."""
    for blocks in (1, 2, 3, 4):
        order = channel_order(16, blocks)
        parts = order.reshape(blocks, 4, 4).transpose(1, 0, 2)  # [part, block, element]
        np.testing.assert_array_equal(parts.reshape(-1), np.arange(16 * blocks))


def test_pack_conv2d__wrong_weight_shape():
    spec = Conv2d(1, 8, 8, 16, 32, (3, 3))
    with pytest.raises(ValueError, match=r"OHWI \(32, 3, 3, 16\)"):
        pack_conv2d(
            spec, VNNI512, Constants(np.zeros((32, 16, 3, 3), "int8"), np.zeros(32, "int32"), None)
        )


def test_pack_conv2d__multiplier_where_none_is_taken():
    spec = Dense(1, 8, 8, epilogue=RAW)
    weight, bias = np.zeros((8, 8), "int8"), np.zeros(8, "int32")
    with pytest.raises(ValueError, match="takes no multiplier"):
        pack_dense(spec, VNNI512, Constants(weight, bias, np.ones(8, "float32")))


def test_pack_conv2d__multiplier_that_is_not_small():
    spec = Dense(1, 8, 8, epilogue=Epilogue(is_small=True))
    weight, bias = np.zeros((8, 8), "int8"), np.zeros(8, "int32")
    with pytest.raises(ValueError, match=r"reaches 0\.75. Allowed: up to 0\.5"):
        pack_dense(spec, VNNI512, Constants(weight, bias, np.full(8, 0.75, "float32")))


@every_isa
@pytest.mark.parametrize("tiles", [1, 3, 7, 64])
def test_plan_prefetch__covers_the_next_panel_and_nothing_else(isa, tiles):
    plan = ConvPlan(Conv2d(1, 7, 7, 36, 160, (3, 3)), isa)
    place = Placement((7, 7))
    size, words = plan.panel_vectors * isa.weight_vector, plan.panel_vectors // plan.tile.blocks
    for panel in range(plan.panels):
        fetched = np.zeros(plan.weight_size, bool)
        for tile in range(tiles):
            share = plan_prefetch(plan, place, panel, tile, tiles)
            start = int(share.start)
            assert 0 <= start <= start + words * share.step <= plan.weight_size
            fetched[start : start + words * share.step] = True
        following = min(panel + 1, plan.panels - 1)
        expected = np.zeros(plan.weight_size, bool)
        expected[following * size :][:size] = True
        np.testing.assert_array_equal(fetched, expected)


def test_find_halved_axis__deals_out_pixels_where_weights_are_smaller():
    def find(height, width, channels):
        plan = ConvPlan(Conv2d(1, height, width, channels, 256, (3, 3)), VNNI512)
        return find_halved_axis(plan, PANEL_ORDER, {"n": 1, "row": height - 2, "col": 1})

    assert find(30, 30, 256) == "row"
    assert find(31, 30, 256) is None  # no axis divides by two
    assert find(6, 6, 256) is None  # 16 times as many weights as inputs


def test_build_conv2d__fetches_large_weights_ahead():
    large, small = (Conv2d(1, 7, 7, c, c, (3, 3)) for c in (128, 16))
    assert "llvm.prefetch" in build_conv2d(large, VNNI512).script()
    assert "llvm.prefetch" not in build_conv2d(small, VNNI512).script()


@every_isa
@pytest.mark.parametrize("order", [PANEL_ORDER, PIXEL_ORDER])
def test_plan_pixel_prefetch__covers_the_pixels_of_the_next_tile(isa, order):
    plan = ConvPlan(Conv2d(4, 28, 28, 512, 96, (1, 1)), isa)
    size = plan.tile.cols * plan.spec.in_channels
    place = Placement((1, 28 * 28 * 4))
    image = Image(None, 1, 28 * 28 * 4)
    fetched = np.zeros(3 * size, bool)
    for panel in range(plan.panels):
        at = locate_tile(plan, image, place, 0, 0, 0, 0, panel)
        share = plan_pixel_prefetch(plan, at, order, panel)
        own = np.zeros_like(fetched)
        own[int(share.start) :][: plan.words * share.step] = True
        assert order == PIXEL_ORDER or own[size : 2 * size].all()
        fetched |= own
    assert fetched[size : 2 * size].all()
    assert not fetched[:size].any()


def test_build_conv2d__fetches_pixels_ahead_that_no_cache_holds():
    large, small = (Conv2d(batch, 28, 28, 512, 16, (1, 1)) for batch in (4, 1))
    assert "llvm.prefetch" in build_conv2d(large, VNNI512).script()
    assert "llvm.prefetch" not in build_conv2d(small, VNNI512).script()


def test_pick_order__counts_bytes():
    """int16 weights take twice the room."""
    spec = Conv2d(1, 30, 30, 128, 128, (1, 1))
    assert pick_order(ConvPlan(spec, VNNI512)) == PIXEL_ORDER
    assert pick_order(ConvPlan(spec, VNNI512.for_activations("int16"))) == PANEL_ORDER


def test_build_conv2d__fetches_residual_and_output_ahead():
    spec = Conv2d(1, 1, 6, 16, 64, (1, 1), epilogue=Epilogue(residual=Residual("uint8", 5, 0.6)))
    lines = [x for x in build_conv2d(spec, VNNI512).script().splitlines() if "prefetch" in x]
    assert len(lines) == 2 * 6  # every pixel is one line of each


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 3}, "cannot divide into 3 groups"),
        ({"kernel": (9, 9)}, "does not fit"),
        ({"in_dtype": "int32"}, "allowed: uint8, int8"),
    ],
)
def test_conv2d__rejects(arguments, message):
    defaults = {
        "batch": 1, "height": 4, "width": 4, "in_channels": 4, "out_channels": 4, "kernel": (1, 1)
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        Conv2d(**(defaults | arguments))


def test_conv2d_accumulators__model_of_the_tests_on_a_known_case():
    spec = Conv2d(1, 2, 2, 1, 1, (2, 2), padding=(1, 0, 0, 0), in_zero_point=1)
    x = np.array([[1, 2], [3, 4]], "uint8").reshape(1, 2, 2, 1)
    w = np.array([[1, 2], [3, 4]], "int8").reshape(1, 2, 2, 1)
    acc = conv2d_accumulators(x, w, np.array([10]), spec)
    np.testing.assert_array_equal(acc.reshape(-1), [3 * 0 + 4 * 1 + 10, 2 * 1 + 3 * 2 + 4 * 3 + 10])


def test_build_conv2d__shapes_of_a_conv1d():
    isa, rng = best_isa(), np.random.default_rng(0)
    spec = Conv2d(1, 1, 9, 4, 6, (1, 3))
    w = random_weights(rng, spec.weight_shape)
    x, multiplier = random_values(rng, (1, 9, 4), "uint8"), random_multiplier(rng, w)
    func = build_conv2d(spec, isa, "conv1d", (1, 9, 4), (1, 7, 6))
    packed = pack_conv2d(spec, isa, Constants(w, np.zeros(6, "int32"), multiplier))
    got = call_kernel(func, runnable_target(isa), [x, *packed.arguments()], (1, 7, 6), "uint8")
    acc = conv2d_accumulators(x[:, None], w, np.zeros(6), spec)[:, 0]
    np.testing.assert_array_equal(got, finish(acc, spec.epilogue, multiplier))


SMALL = {"avx2": (AVX2, AVX2_SMALL), "avx512bw": (AVX512BW, AVX512BW_SMALL)}


def check_small_weights(isa, small, spec, x, w):
    """The kernel that these weights choose gives the sums of the numpy model."""
    target = runnable_target(isa)
    assert isa.for_weights(w) is small
    bias = np.zeros(spec.out_channels, "int32")
    packed = pack_conv2d(spec, small, Constants(w, bias, None))
    got = call_kernel(
        build_conv2d(spec, small), target, [x, *packed.arguments()], spec.out_shape, "int32"
    )
    np.testing.assert_array_equal(got, conv2d_accumulators(x, w, bias, spec))


@pytest.mark.parametrize(("isa", "small"), SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("sign", [1, -1])
def test_small_weights__largest_products_do_not_saturate(isa, small, sign):
    spec = Conv2d(1, 3, 5, 32, 40, (3, 3), padding=(1, 1, 1, 1), in_zero_point=255, epilogue=RAW)
    x = np.full(spec.in_shape, 255, "uint8")
    x[:, 1] = 0
    w = np.full(spec.weight_shape, sign * SMALL_WEIGHT, "int8")
    check_small_weights(isa, small, spec, x, w)
    assert 2 * 255 * SMALL_WEIGHT <= 2**15 - 1 < 2 * 255 * (SMALL_WEIGHT + 1)


@pytest.mark.parametrize(("isa", "small"), SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(
    "shape",
    [(1, 9, 8, 24, 40, (3, 3)), (2, 7, 7, 17, 5, (1, 1)), (1, 1, 1, 100, 100, (1, 1))],
    ids=str,
)
def test_small_weights__bits_are_equal(isa, small, dtype, shape):
    spec = Conv2d(*shape, in_dtype=dtype, in_zero_point=-9 if dtype == "int8" else 9, epilogue=RAW)
    rng = np.random.default_rng(1)
    w = rng.integers(-SMALL_WEIGHT, SMALL_WEIGHT + 1, spec.weight_shape).astype("int8")
    check_small_weights(isa, small, spec, random_values(rng, spec.in_shape, dtype), w)


@pytest.mark.parametrize(("isa", "small"), SMALL.values(), ids=SMALL)
def test_small_weights__depthwise(isa, small):
    spec = Conv2d(1, 7, 6, 40, 40, (3, 3), padding=(1, 1, 1, 1), groups=40, epilogue=RAW)
    rng = np.random.default_rng(2)
    w = rng.choice([-SMALL_WEIGHT, SMALL_WEIGHT], spec.weight_shape).astype("int8")
    check_small_weights(isa, small, spec, random_values(rng, spec.in_shape, "uint8"), w)


@pytest.mark.parametrize("weight", [65, -65, 127, -128])
@pytest.mark.parametrize(("isa", "small"), SMALL.values(), ids=SMALL)
def test_small_weights__larger_ones_are_refused(isa, small, weight):
    spec = Conv2d(1, 2, 2, 4, 8, (1, 1), epilogue=RAW)
    w = np.zeros(spec.weight_shape, "int8")
    w[3, 0, 0, 1] = weight
    assert isa.for_weights(w) is isa
    with pytest.raises(ValueError, match="Allowed: up to 64"):
        pack_conv2d(spec, small, Constants(w, np.zeros(8, "int32"), None))


def test_small_weights__other_instructions_do_not_care():
    weight = np.zeros((8, 1, 1, 4), "int8")
    assert VNNI512.for_weights(weight) is VNNI512


def test_choose_plan__of_a_form_that_there_is_not():
    spec = Conv2d(1, 5, 7, 20, 24, (1, 1), tile=Tile(1, 8, 3, 1, 2))
    with pytest.raises(ValueError, match="no form has 2 pixels in a vector"):
        choose_plan(spec, VNNI512)
