"""A kernel that stores its result over the residual has the bits of one with two tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from emulated_unit import EMULATED, REFUSED, find_target
from machines import compile_kernel
from test_bf16 import find_target as find_bf16_target
from test_bf16 import hold

from relayquant.codegen.kernels.floating.bf16 import (
    make_bf16_conv2d,
    pack_bf16,
    read_bf16_conv2d,
)
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d
from relayquant.codegen.kernels.floating.stored import Stored
from relayquant.codegen.kernels.floating.tile import FloatEpilogue
from relayquant.codegen.kernels.in_place import can_overwrite, overwrite_operand
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan, pack_constants
from relayquant.codegen.kernels.integer.convolution.direct import build_planned
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Store
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, Tile
from relayquant.codegen.kernels.integer.tiled.plan import TiledPlan, TileRows, plan_tiles
from relayquant.codegen.kernels.integer.tiled.results import stores_once
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.bf16 import TILES_BF16
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS
from relayquant.codegen.kernels.isa.x86 import AMX

SUM = Epilogue(Store.REQUANTIZE, "uint8", 3, residual=Residual("uint8", 5, 0.7))


def make_plan(isa: Isa, size: tuple[int, int], channels: int, kernel: int, block=None) -> TiledPlan:
    tile = None if block is None else Tile(block[0], 16, block[1])
    spec = Conv2d(
        1,
        *size,
        32,
        channels,
        (kernel, kernel),
        padding=(kernel // 2,) * 4,
        epilogue=SUM,
        tile=tile,
    )
    plan = plan_tiles(ConvPlan(spec, isa.for_convolution(spec.in_dtype)))
    return replace(plan, rows=TileRows.PADDED) if size == (7, 7) else plan


def run_both(kernel, target, operands: list[np.ndarray], residual: np.ndarray):
    """Results of a kernel with two tensors and with one."""
    tensors = [tvm.runtime.tensor(each) for each in (*operands, residual, np.zeros_like(residual))]
    compile_kernel(kernel, target)(*tensors)
    *shared, over, separate = tensors
    compile_kernel(overwrite_operand(kernel), target)(*shared, over)
    return separate.numpy(), over.numpy()


@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
@pytest.mark.parametrize(("size", "kernel"), [((4, 16), 1), ((2, 16), 3)])
def test_overwrite_operand__bytes(isa, size, kernel):
    plan, rng = make_plan(isa, size, 64, kernel), np.random.default_rng(0)
    x, residual = (
        rng.integers(0, 255, shape).astype("uint8")
        for shape in (plan.spec.in_shape, plan.spec.out_shape)
    )
    w = rng.integers(-127, 127, plan.spec.weight_shape).astype("int8")
    packed = pack_constants(plan, Constants(w, np.zeros(64, "int32"), np.full(64, 1e-4, "float32")))
    built, operands = build_planned(plan), [x, *packed.arguments()]
    separate, over = run_both(built, find_target(isa), operands, residual)
    assert stores_once(plan)
    assert len(np.unique(separate)) > 100
    np.testing.assert_array_equal(over, separate)


@pytest.mark.parametrize("dtype", ["float32", BF16_BITS])
def test_overwrite_operand__bfloat16(dtype):
    stored = Stored(residual=dtype, result=dtype)
    conv = FloatConv2d(
        1, 4, 16, 32, 64, (1, 1), epilogue=FloatEpilogue(residual=True, low=0.0), stored=stored
    )
    spec, rng = read_bf16_conv2d(conv), np.random.default_rng(0)
    target = find_bf16_target(TILES_BF16)
    x, w, residual = (
        rng.normal(size=shape).astype("float32")
        for shape in (conv.in_shape, conv.weight_shape, conv.out_shape)
    )
    operands = [x, *pack_bf16(w, None, spec, TILES_BF16)]
    kernel = make_bf16_conv2d(spec, TILES_BF16)
    separate, over = run_both(kernel, target, operands, hold(residual, dtype))
    assert len(np.unique(separate)) > 100
    np.testing.assert_array_equal(over, separate)


@pytest.mark.parametrize(
    ("size", "channels", "kernel", "block", "is_possible"),
    [
        ((4, 16), 64, 1, (1, 4), True),
        ((14, 14), 64, 1, (1, 4), False),  # the last tile of 196 pixels is moved back
        ((3, 16), 64, 1, (2, 2), False),  # the last of 3 tiles is computed twice
        ((4, 16), 48, 1, (1, 2), False),  # so are 16 channels
        ((7, 7), 64, 3, (4, 1), False),  # a pixel stands for one in the padding
    ],
)
def test_stores_once__only_if_no_result_is_stored_twice(size, channels, kernel, block, is_possible):
    plan = make_plan(AMX, size, channels, kernel, block)
    assert stores_once(plan) == is_possible


@pytest.mark.parametrize(("pixels", "is_worth"), [(64, False), (128, True)])
def test_can_overwrite__only_a_residual_that_leaves_the_near_cache(pixels, is_worth):
    """Of 64 x 128 pixels and 64 channels, a residual has 512 KB."""
    assert can_overwrite(build_planned(make_plan(AMX, (pixels, 128), 64, 1))) == is_worth
