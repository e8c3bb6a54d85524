"""Convolutions by Winograd's transforms, compiled for the instruction sets that take them, against
the numpy model of the direct form.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from convolutions import check_conv2d, conv2d_accumulators
from drawing import count_examples
from exact import call_kernel, finish
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import best_isa, runnable_target, take_samples

from relayquant.codegen.kernels.integer.conv_plan import list_tiles
from relayquant.codegen.kernels.integer.convolution.winograd import (
    LARGEST_SUM,
    WinogradPlan,
    build_winograd,
    can_winograd,
    find_largest_sum,
    pack_winograd,
    plan_prefetch,
    saves_time,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Slope, Store
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, KernelSchedule
from relayquant.codegen.kernels.isa.arm import SDOT
from relayquant.codegen.kernels.isa.base import PORTABLE
from relayquant.codegen.kernels.isa.timing import COMMON, ZEN4, ZEN5
from relayquant.codegen.kernels.isa.x86 import AVX2, VNNI512, X86_ISAS
from relayquant.codegen.kernels.winograd import PanelRange
from relayquant.codegen.tuning.tuner import keep_estimate

SAME, RAW = (1, 1, 1, 1), Epilogue(Store.ACCUMULATOR, "int32")
LAYER = Conv2d(1, 28, 28, 64, 64, (3, 3), padding=SAME, epilogue=Epilogue(is_small=True))
CASES = {
    "tiles that fit": Conv2d(1, 8, 12, 32, 16, (3, 3), padding=SAME, in_zero_point=3),
    "tiles that overlap, int8, residual": Conv2d(
        1, 9, 7, 16, 32, (3, 3), padding=(1, 2, 0, 1), in_dtype="int8", in_zero_point=-100,
        epilogue=Epilogue(dtype="int8", zero_point=-5, low=-5, residual=Residual("uint8", 4, 0.3)),
    ),
    "one tile, no padding": Conv2d(1, 6, 6, 48, 48, (3, 3), in_zero_point=255),
    "batch 2, zero point 255 at the border": Conv2d(
        2, 5, 6, 64, 32, (3, 3), padding=SAME, in_zero_point=255,
        epilogue=Epilogue(zero_point=7, high=90, residual=Residual("int8", 4, -0.3)),
    ),
    "chunks of several sizes": Conv2d(
        1, 27, 26, 128, 64, (3, 3), padding=SAME, in_zero_point=9,
        epilogue=Epilogue(is_small=True),
    ),
    "one chunk in parts, the last panel no whole one": Conv2d(
        1, 14, 13, 64, 176, (3, 3), padding=SAME, in_zero_point=9,
    ),
    "batch 2, chunks in parts": Conv2d(
        2, 14, 13, 64, 128, (3, 3), padding=SAME, in_zero_point=9,
        epilogue=Epilogue(residual=Residual("uint8", 4, 0.3)),
    ),
    "one chunk in parts, partial panels": Conv2d(
        1, 28, 28, 80, 112, (3, 3), padding=SAME, in_zero_point=9,
        epilogue=Epilogue(is_small=True),
    ),
    "slope, residual": Conv2d(
        1, 9, 7, 16, 32, (3, 3), padding=SAME, in_zero_point=9,
        epilogue=Epilogue(
            residual=Residual("uint8", 4, 0.3), slope=Slope(-90, None, 1.3), is_small=True
        ),
    ),
    "float output": Conv2d(
        1, 7, 9, 16, 16, (3, 3), padding=SAME, epilogue=Epilogue(Store.DEQUANTIZE, "float32")
    ),
    "columns of a larger result": Conv2d(
        1, 9, 7, 16, 48, (3, 3), padding=SAME, in_zero_point=9, columns=(16, 80)
    ),
    "int16 output, columns": Conv2d(
        1, 4, 4, 16, 16, (3, 3), padding=SAME, epilogue=Epilogue(dtype="int16"), columns=(3, 20)
    ),
    "int16 output": Conv2d(
        1, 4, 4, 16, 16, (3, 3), padding=SAME, epilogue=Epilogue(dtype="int16", zero_point=99)
    ),
    "sums": Conv2d(1, 10, 5, 32, 48, (3, 3), padding=SAME, in_zero_point=77, epilogue=RAW),
}  # fmt: skip

#: as on systems whose threads kernels cannot count
UNCOUNTED = replace(COMMON, counts_threads=False)
ON_ZEN4 = replace(VNNI512, timing=ZEN4)
ON_ZEN5 = VNNI512.with_timing(ZEN5)

every_x86_in_samples = take_samples(X86_ISAS)


@pytest.mark.sample(12)
@pytest.mark.parametrize("timing", [COMMON, UNCOUNTED, ZEN4], ids=["common", "uncounted", "zen4"])
@pytest.mark.parametrize("name", CASES)
@every_x86_in_samples
def test_winograd__equals_the_direct_form(name, isa, timing):
    isa = isa.with_timing(timing)
    check_conv2d(CASES[name], isa, runnable_target(isa), 0, build_winograd, pack_winograd)


@pytest.mark.parametrize("threads", [2, 3, 40])
@pytest.mark.parametrize("name", [name for name in CASES if "in parts" in name])
def test_winograd__parts_for_any_number_of_threads(name, threads, monkeypatch):
    isa = best_isa().with_timing(COMMON)
    assert WinogradPlan(CASES[name], isa).grid.splits_late
    monkeypatch.setenv("TVM_NUM_THREADS", str(threads))
    check_conv2d(CASES[name], isa, runnable_target(isa), 0, build_winograd, pack_winograd)


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["chunks of several sizes", "batch 2, chunks in parts"])
@every_x86_in_samples
def test_winograd__of_every_tile_that_is_timed(name, isa):
    tiles = list_tiles(WinogradPlan(CASES[name], isa).product, 4)
    assert len(tiles) > 2
    for tile in tiles[1:]:
        spec = replace(CASES[name], tile=tile)
        check_conv2d(spec, isa, runnable_target(isa), 0, build_winograd, pack_winograd)


@pytest.mark.slow
@given(
    size=st.tuples(st.integers(4, 21), st.integers(4, 21)),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    dtype=st.sampled_from(["uint8", "int8"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=count_examples(15), deadline=None)
def test_winograd__of_any_size(size, channels, padding, dtype, seed):
    isa, (c_in, c_out) = best_isa(), channels
    height, width = (max(length, 6) for length in size)
    spec = Conv2d(
        1, height, width, 16 * c_in, 16 * c_out, (3, 3), padding=padding, in_dtype=dtype,
        in_zero_point=seed, epilogue=Epilogue(dtype=dtype, zero_point=seed),
    )  # fmt: skip
    check_conv2d(spec, isa, runnable_target(isa), seed, build_winograd, pack_winograd)


@pytest.mark.sample(12)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("signs", ["same", "by point"])
@pytest.mark.parametrize("zero_point", [0, 128])
@every_x86_in_samples
def test_winograd__sums_as_large_as_they_get(isa, largest, signs, zero_point):
    """Sums next to the bound, and products of transforms that are as large as they get."""
    dtype = "uint8" if zero_point else "int8"
    spec = Conv2d(1, 8, 8, 224, 16, (3, 3), in_dtype=dtype, in_zero_point=zero_point, epilogue=RAW)
    weight = np.full(spec.weight_shape, -128, "int8")
    if signs == "by point":  # of 1, -1, 1: what the transforms add up
        checks = (-1) ** np.add.outer(np.arange(3), np.arange(3))
        weight = np.where(checks[None, :, :, None] > 0, weight, 127).astype("int8")
    value = 127 if largest else -128
    x = np.full(spec.in_shape, value, "int8")
    if signs == "by point":
        odd = np.add.outer(np.arange(8), np.arange(8)) % 2 == 1
        x = np.where(odd[None, :, :, None], x, -1 - x).astype("int8")
    x = (x + np.int16(zero_point)).astype(dtype)
    bias = np.arange(16, dtype="int32")
    assert 0.97 * LARGEST_SUM < find_largest_sum(spec, weight, bias) < LARGEST_SUM
    inputs = [x, *pack_winograd(spec, isa, Constants(weight, bias, None)).arguments()]
    got = call_kernel(
        build_winograd(spec, isa), runnable_target(isa), inputs, spec.out_shape, "int32"
    )
    expected = finish(conv2d_accumulators(x, weight, bias, spec), RAW)
    assert np.abs(expected).max() > 0.97 * LARGEST_SUM
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("epilogue", [Epilogue(dtype="int16", is_small=True), RAW])
@pytest.mark.parametrize("sign", [1, -1])
def test_winograd__bias_as_large_as_it_gets(sign, epilogue):
    """The bias is most of the sums next to the bound, which the direct form takes, too."""
    isa, spec = best_isa(), Conv2d(1, 8, 8, 16, 16, (3, 3), in_zero_point=3, epilogue=epilogue)
    rng = np.random.default_rng(0)
    weight = rng.integers(-128, 128, spec.weight_shape).astype("int8")
    x = rng.integers(0, 256, spec.in_shape).astype("uint8")
    left = LARGEST_SUM - 1 - find_largest_sum(spec, weight, np.zeros(16, "int32"))
    bias = np.full(16, sign * left, "int32")
    assert can_winograd(spec, isa, weight, bias)
    assert not can_winograd(spec, isa, weight, bias + sign * 2**20)
    multiplier = np.float32(sign * 9e-4) if epilogue.has_multiplier else None
    inputs = [x, *pack_winograd(spec, isa, Constants(weight, bias, multiplier)).arguments()]
    got = call_kernel(
        build_winograd(spec, isa), runnable_target(isa), inputs, spec.out_shape, epilogue.dtype
    )
    expected = finish(conv2d_accumulators(x, weight, bias, spec), epilogue, multiplier)
    assert np.unique(expected).size > 5
    np.testing.assert_array_equal(got, expected)


def test_winograd__sums_that_are_too_large_are_refused():
    spec, bias = replace(LAYER, in_channels=120), np.full(64, 7, "int32")
    weight = np.full(spec.weight_shape, 127, "int8")
    assert not can_winograd(spec, VNNI512, weight, bias)
    multiplier, largest = np.float32(1e-6), 255 * 127 * 9 * 120 + 7
    with pytest.raises(ValueError, match=f"reach {largest}; allowed: below 33554432"):
        pack_winograd(spec, VNNI512, Constants(weight, bias, multiplier))


@pytest.mark.parametrize(
    ("changes", "isa", "expected"),
    [
        ({}, VNNI512, True),
        ({}, AVX2, True),
        ({"in_dtype": "int8"}, VNNI512, True),
        ({}, PORTABLE, False),  # multiplies numbers of 32 bits
        ({}, SDOT, False),  # 16 products of bytes by one instruction, 4 of int16
        ({"kernel": (3, 1)}, VNNI512, False),
        ({"strides": (2, 2)}, VNNI512, False),
        ({"dilation": (2, 2)}, VNNI512, False),
        ({"groups": 2}, VNNI512, False),
        ({"in_dtype": "int16"}, VNNI512, False),
        ({"in_channels": 24}, VNNI512, False),  # not of whole vectors
        ({"in_channels": 24}, AVX2, True),
        ({"out_channels": 72}, VNNI512, False),
        ({"height": 3}, VNNI512, False),  # smaller than a tile
        ({"height": 5, "width": 5}, VNNI512, False),  # four tiles for little more than one
        # 19 MB of weights for four tiles
        ({"height": 7, "width": 7, "in_channels": 512, "out_channels": 512}, AVX2, False),
        # Intel's servers read the 4.7 MB of weights slowly from their last-level cache: more slowly
        # than they multiply 14 x 14 pixels, less slowly than 16 x 16, which have as many tiles.
        ({"height": 14, "width": 14, "in_channels": 256, "out_channels": 256}, VNNI512, False),
        ({"height": 16, "width": 16, "in_channels": 256, "out_channels": 256}, VNNI512, True),
        ({"height": 14, "width": 14, "in_channels": 256, "out_channels": 256}, ON_ZEN4, True),
        # Zen 5 reads weights while products go on.
        ({"height": 14, "width": 14, "in_channels": 128, "out_channels": 128}, ON_ZEN4, False),
        ({"height": 14, "width": 14, "in_channels": 128, "out_channels": 128}, ON_ZEN5, True),
        ({"height": 13, "width": 13, "in_channels": 48, "out_channels": 192}, ON_ZEN5, False),
        ({"height": 13, "width": 13, "out_channels": 256}, ON_ZEN5, True),
        ({"height": 13, "width": 13, "out_channels": 256}, ON_ZEN4, False),
        ({"height": 7, "width": 7, "in_channels": 256, "out_channels": 256}, ON_ZEN5, False),
        # With more tiles the products take longer than the weights take to come.
        ({"height": 28, "width": 28, "in_channels": 256, "out_channels": 256}, VNNI512, True),
        ({"in_channels": 128, "out_channels": 128}, VNNI512, True),
        ({"height": 55, "width": 55, "in_channels": 16}, VNNI512, False),  # mostly transforms
        ({"height": 55, "width": 55, "in_channels": 16}, ON_ZEN4, True),
        # A product without VNNI takes two instructions, and twice as many of them.
        ({"height": 14, "width": 14, "in_channels": 256, "out_channels": 256}, AVX2, True),
    ],
)
def test_winograd__where_it_can_and_pays(changes, isa, expected):
    spec = replace(LAYER, **changes)
    able = can_winograd(spec, isa, np.ones(spec.weight_shape, "int8"), np.zeros(spec.out_channels))
    assert keep_estimate(spec, isa, able) == KernelSchedule(transforms=expected)


def test_winograd__weights_from_memory_do_not_pay_on_zen5():
    """A module of more weights than the last-level cache holds reads them from memory in each run,
    once for all images of a batch.
    """
    spec = replace(LAYER, height=14, width=14, in_channels=256, out_channels=256)
    small, large = (ON_ZEN5.with_timing(ZEN5.for_constants(size << 20)) for size in (12, 25))
    assert saves_time(spec, small)
    assert not saves_time(spec, large)
    assert saves_time(replace(spec, batch=8), large)
    assert saves_time(replace(spec, height=28, width=28), large)


DEEP = {"in_channels": 256, "out_channels": 256}


@pytest.mark.parametrize(
    ("changes", "isa", "expected"),
    [
        ({}, ON_ZEN4, (7, 1)),  # as many as there are rows of tiles
        ({"height": 56, "width": 56}, ON_ZEN4, (8, 1)),
        ({"height": 14, "width": 14, **DEEP}, ON_ZEN4, (2, 4)),
        ({"batch": 8, "height": 14, "width": 14, "out_channels": 256}, ON_ZEN4, (2, 1)),
        ({"height": 6, "width": 6, "in_channels": 16, "out_channels": 16}, ON_ZEN4, (1, 1)),
        # If weights come slowly, few chunks read them, and have parts only at run time.
        ({"height": 56, "width": 56}, VNNI512, (8, 1)),
        ({"height": 56, "width": 56, "in_channels": 128, "out_channels": 128}, VNNI512, (4, 1)),
        ({"in_channels": 128, "out_channels": 128}, VNNI512, (2, 1)),
        ({"height": 28, "width": 28, **DEEP}, VNNI512, (2, 1)),
        ({"height": 14, "width": 14, **DEEP}, VNNI512, (1, 1)),
        ({"batch": 8, "in_channels": 128, "out_channels": 128}, VNNI512, (1, 1)),
        # Without Linux their number is fixed.
        ({"in_channels": 128, "out_channels": 128}, VNNI512.with_timing(UNCOUNTED), (1, 4)),
    ],
)
def test_winograd_plan__work_for_many_threads(changes, isa, expected):
    plan = WinogradPlan(replace(LAYER, **changes), isa)
    assert (plan.grid.chunks, plan.parts) == expected


@pytest.mark.parametrize("isa", [VNNI512, ON_ZEN4], ids=["common", "zen4"])
@pytest.mark.parametrize(
    ("size", "channels"), [((56, 56), 64), ((14, 14), 256), ((28, 28), 48), ((14, 13), 176)]
)
def test_plan_prefetch__covers_the_next_panel_of_the_part(size, channels, isa):
    """While a part multiplies a panel, its tiles together fetch the panel that it reads next."""
    height, width = size
    spec = replace(LAYER, height=height, width=width, in_channels=channels, out_channels=channels)
    plan = WinogradPlan(spec, isa)
    product, panels, parts = plan.product, plan.product.panels, plan.parts
    length = product.panel_vectors * product.isa.weight_vector
    steps = -(-plan.grid.least_tiles // product.tile.cols)
    for part in range(parts):
        own = PanelRange(part * panels // parts, (part + 1) * panels // parts)
        order = [(point, panel) for point in range(36) for panel in range(own.first, own.end)]
        for (point, panel), following in pairwise(order):
            fetched = np.zeros(plan.weight_size, bool)
            for step in range(steps):
                share = plan_prefetch(plan, point, panel - own.first, own, step)
                fetched[int(share.start) :][: product.words * share.step] = True
            first = (following[0] * panels + following[1]) * length
            assert fetched[first : first + length].all()
            assert fetched.sum() == length
        share = plan_prefetch(plan, *order[-1][:1], own.end - own.first - 1, own, steps - 1)
        assert int(share.start) + product.words * share.step <= plan.weight_size


@pytest.mark.parametrize("height", [7, 28, 56, 57, 224])
@pytest.mark.parametrize("channels", [16, 64, 256])
def test_winograd_plan__chunks(height, channels):
    """Two threads have as many of them, and every chunk has enough tiles for the product's tile."""
    spec = replace(LAYER, height=height, width=height, in_channels=channels, out_channels=channels)
    plan = WinogradPlan(spec, VNNI512)
    grid = plan.grid
    assert grid.chunks == 1 or grid.chunks % 2 == 0 or grid.chunks == grid.tiles[0]
    bounds = [chunk * grid.units // grid.chunks for chunk in range(grid.chunks + 1)]
    sizes = np.diff(bounds) * grid.unit
    assert bounds[-1] * grid.unit == np.prod(grid.tiles)
    assert max(sizes) == grid.most_tiles
    assert min(sizes) == grid.least_tiles >= plan.product.tile.cols
