"""A convolution and the maximum pool behind it in one kernel, against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from convolutions import conv2d_accumulators
from exact import call_kernel, finish, random_multipliers, random_values, random_weights
from machines import ISAS, runnable_target
from test_pool import taps

from relayquant.codegen.kernels.integer.convolution import pooled as pooled_module
from relayquant.codegen.kernels.integer.convolution.pooled import (
    PooledConv2d,
    build_pooled_conv2d,
    pack_pooled_conv2d,
    plan_pooled,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Slope, Store
from relayquant.codegen.kernels.integer.pool import PoolWindow
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d
from relayquant.codegen.kernels.isa.arm import SDOT, SMMLA
from relayquant.codegen.kernels.isa.x86 import AMX, VNNI512

OUT = Epilogue(zero_point=7, low=9, high=250)
STEM = Conv2d(1, 27, 29, 3, 64, (3, 3), (2, 2), in_zero_point=5, epilogue=OUT)


@pytest.fixture(autouse=True)
def any_time(monkeypatch):
    """Tiles need not be fast, as few divide a small image well, and reductions not short."""
    monkeypatch.setattr(pooled_module, "MOST_WORDS", 999)
    monkeypatch.setattr(pooled_module, "MOST_TIME", 9.0)


def pooled(conv: Conv2d, kernel=(3, 3), strides=(2, 2), padding=(0, 0, 0, 0), **options):
    window = PoolWindow(
        conv.batch, *conv.out_size, conv.out_channels, kernel, strides, padding, **options
    )
    return PooledConv2d(conv, window)


def conv(height, width, channels, kernel=3, stride=1, images=1, epilogue=OUT, dtype="uint8"):
    pads = (kernel // 2,) * 4
    return Conv2d(
        images, height, width, 3, channels, (kernel, kernel), (stride, stride), pads,
        in_dtype=dtype, in_zero_point=3, epilogue=epilogue,
    )  # fmt: skip


CASES = {
    "first layer": pooled(STEM),
    "padded": pooled(conv(22, 28, 64, 7, 2), padding=(1, 1, 1, 1)),
    "padded before": pooled(conv(9, 12, 16), padding=(1, 2, 0, 0)),
    "padded behind": pooled(conv(9, 12, 16), padding=(0, 0, 1, 1)),
    "ceil mode": pooled(conv(10, 10, 32), ceil_mode=True),
    "images, channels beyond a vector": pooled(conv(9, 9, 24, images=2)),
    "few channels": pooled(conv(9, 9, 5)),
    "other steps": pooled(conv(11, 14, 48), (2, 4), (1, 3), (0, 1, 0, 1)),
    "int8": pooled(conv(9, 9, 64, epilogue=Epilogue(dtype="int8", zero_point=-3), dtype="int8")),
    "int16": pooled(conv(9, 9, 20, epilogue=Epilogue(dtype="int16", zero_point=-30), dtype="int8")),
    "slope": pooled(conv(9, 9, 32, epilogue=replace(OUT, slope=Slope(-99, None, 1.1)))),
    "with threads": pooled(conv(80, 60, 32, 3, 2), padding=(1, 1, 1, 1)),
}


def check(spec: PooledConv2d, isa) -> None:
    own, rng = spec.conv, np.random.default_rng(0)
    x = random_values(rng, own.in_shape, own.in_dtype)
    w = random_weights(rng, own.weight_shape)
    bias = rng.integers(-5000, 5000, own.out_channels).astype("int32")
    multiplier = np.abs(random_multipliers(rng, w, own.epilogue))
    multiplier[..., 0] = 0.0
    packed = pack_pooled_conv2d(spec, isa, Constants(w, bias, multiplier))
    results = finish(conv2d_accumulators(x, w, bias, own), own.epilogue, multiplier)
    got = call_kernel(
        build_pooled_conv2d(spec, isa),
        runnable_target(isa),
        [x, *packed.arguments()],
        spec.window.out_shape,
        own.epilogue.dtype,
    )
    np.testing.assert_array_equal(got, taps(results, spec.window).max(axis=0))


@pytest.mark.sample(12)
@pytest.mark.parametrize("isa", [i for i in ISAS if i is not AMX], ids=lambda isa: isa.name)
@pytest.mark.parametrize("case", CASES)
def test_build_pooled_conv2d__equals_numpy(isa, case):
    check(CASES[case], isa)


def replaced(**changes) -> PooledConv2d:
    return pooled(replace(STEM, **changes))


@pytest.mark.parametrize(
    "spec",
    [
        pooled(STEM, (2, 2)),
        pooled(STEM, (3, 3), (1, 1)),
        pooled(STEM, (3, 3), dilation=(2, 1)),
        pooled(conv(28, 28, 16, 1)),
        pooled(conv(8, 12, 32, 1)),
        replaced(in_channels=64, groups=64),
        replaced(in_channels=64, groups=2),
        replaced(columns=(0, 128)),
        replaced(epilogue=Epilogue(Store.DEQUANTIZE, "float32")),
        replaced(epilogue=Epilogue(residual=Residual("uint8", 3, 0.5))),
    ],
)
def test_plan_pooled__declines(spec):
    assert plan_pooled(spec, VNNI512) is None
    with pytest.raises(ValueError, match="no kernel of vnni512"):
        build_pooled_conv2d(spec, VNNI512)


def test_plan_pooled__tiles_begin_where_windows_do():
    for isa in (VNNI512, SDOT, SMMLA):
        plan = plan_pooled(CASES["padded"], isa)
        assert plan is not None
        assert (plan.tile.rows, plan.tile.cols % 2) == (1, 0)


def test_plan_pooled__declines_slow_tiles(monkeypatch):
    monkeypatch.undo()
    assert plan_pooled(CASES["int8"], VNNI512) is None  # 9 columns divide into tiles of 3
    assert plan_pooled(pooled(conv(224, 224, 64, 3, 2)), VNNI512) is not None
    assert plan_pooled(pooled(conv(224, 224, 64, 7, 2)), VNNI512) is None  # many words
