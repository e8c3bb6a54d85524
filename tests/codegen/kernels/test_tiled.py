"""Convolutions on a matrix unit have the bits of numpy: run, emulated, and without permission."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import tvm
from convolutions import check_conv2d, conv2d_accumulators
from drawing import count_examples
from emulated_unit import EMULATED, REFUSED, WITH_TILES, find_target
from exact import finish, random_multiplier, random_values, random_weights
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import compile_kernel, runnable_target

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.kernels.emit import repeat_over_batch
from relayquant.codegen.kernels.integer.conv_plan import ConvPlan, pack_constants
from relayquant.codegen.kernels.integer.convolution.direct import (
    build_conv2d,
    build_planned,
    pack_conv2d,
)
from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Slope, Store
from relayquant.codegen.kernels.integer.matmul import BatchMatmul, plan_batch_matmul
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, Dense, Tile
from relayquant.codegen.kernels.integer.tiled.plan import BLOCKS, TiledPlan, TileRows, list_rows
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.matrix_unit import AMX_INT8
from relayquant.codegen.kernels.isa.x86 import AMX, VNNI512


def list_plans(spec: Conv2d, isa: Isa) -> list[TiledPlan]:
    plan = ConvPlan(spec, isa.for_convolution(spec.in_dtype))
    own = {each.name: getattr(plan, each.name) for each in fields(ConvPlan)}
    return [TiledPlan(**own, rows=rows) for rows in list_rows(plan)]


def check_plan(plan: TiledPlan, isa: Isa, seed: int = 0) -> None:
    check_conv2d(
        plan.spec,
        isa,
        find_target(isa),
        seed,
        build=lambda spec, isa, name: build_planned(plan, name),
        pack=lambda spec, isa, constants: pack_constants(plan, constants),
    )


@st.composite
def draw_specs(draw):
    def small(low, high):
        return draw(st.integers(low, high))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    c_in = groups * draw(st.sampled_from([1, 3, 16, 17, 64, 70]))
    c_out = groups * draw(st.sampled_from([1, 5, 16, 17, 32, 48, 64, 100]))
    in_dtype = draw(st.sampled_from(["uint8", "int8"]))
    output = draw(st.sampled_from([Store.REQUANTIZE, Store.REQUANTIZE, *Store]))
    epilogue = Epilogue(output, {Store.DEQUANTIZE: "float32"}.get(output, "int32"))
    if output is Store.REQUANTIZE:
        dtype, added = (draw(st.sampled_from(["uint8", "int8", "int16"])) for _ in "yr")
        low, high = INTEGER_LIMITS[dtype]
        residual = Residual(added, small(0, 127), -0.7) if draw(st.booleans()) else None
        slope = Slope(-small(0, 255), small(0, 255), 0.8) if draw(st.booleans()) else None
        epilogue = Epilogue(output, dtype, small(low, high), residual=residual, slope=slope)
    kernel, dilation = (small(1, 3), small(1, 3)), (small(1, 2), small(1, 2))
    padding = tuple(small(0, 2) for _ in range(4))
    height, width = small(1, 6), small(1, 37)
    assume(height + padding[0] + padding[2] > (kernel[0] - 1) * dilation[0])
    assume(width + padding[1] + padding[3] > (kernel[1] - 1) * dilation[1])
    spec = Conv2d(
        small(1, 2), height, width, c_in, c_out, kernel, (small(1, 2), small(1, 2)), padding,
        dilation, groups, in_dtype, small(*INTEGER_LIMITS[in_dtype]), epilogue,
    )  # fmt: skip
    if spec.is_depthwise or epilogue.residual or draw(st.booleans()):
        return spec
    first = small(0, 9)
    return replace(spec, columns=(first, first + c_out + small(0, 9)))


@pytest.mark.slow
@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
@settings(max_examples=count_examples(60, 6), deadline=None, derandomize=True)
@given(spec=draw_specs(), choice=st.integers(0, 1000))
def test_build_planned__drawn_specs(isa, spec, choice):
    plans = list_plans(spec, isa)
    plan = plans[choice % len(plans)]
    tile = plan.ranked_tiles[choice % len(plan.ranked_tiles)]
    check_plan(replace(plan, spec=replace(spec, tile=tile)), isa, choice)


WIDE = Conv2d(1, 9, 20, 64, 96, (3, 3), padding=(1, 1, 1, 1), in_zero_point=7)


@pytest.mark.sample(9)
@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
@pytest.mark.parametrize("rows", [TileRows.LINES, TileRows.PADDED, TileRows.GATHERED])
@pytest.mark.parametrize("block", [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_build_planned__every_kind_of_rows(isa, rows, block, dtype):
    spec = replace(WIDE, in_dtype=dtype, tile=Tile(block[0], 16, block[1]))
    (plan,) = [plan for plan in list_plans(spec, isa) if plan.rows is rows]
    check_plan(plan, isa)


FIRST = Conv2d(2, 11, 20, 3, 32, (7, 5), (2, 2), (3, 1, 2, 0), in_zero_point=7)


@pytest.mark.sample(3)
@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
@pytest.mark.parametrize(
    ("channels", "kernel", "width"), [(3, (7, 5), 20), (1, (2, 3), 20), (8, (3, 4), 6)]
)
def test_build_planned__folded_pixels(isa, channels, kernel, width):
    spec = replace(FIRST, in_channels=channels, kernel=kernel, width=width)
    (plan,) = [plan for plan in list_plans(spec, isa) if plan.rows is TileRows.FOLDED]
    check_plan(plan, isa)


@pytest.mark.sample(4)
@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
@pytest.mark.parametrize(
    ("batch", "kernel", "strides", "padding", "dilation"),
    [
        (1, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        (2, (3, 2), (2, 2), (1, 0, 2, 1), (1, 1)),
        (1, (2, 3), (3, 1), (0, 2, 0, 0), (2, 2)),
        (1, (1, 3), (2, 3), (0, 0, 0, 0), (1, 1)),
    ],
)
def test_build_planned__copies_of_columns(isa, batch, kernel, strides, padding, dilation):
    spec = Conv2d(
        batch, 9, 7, 256, 40, kernel, strides, padding, dilation, in_zero_point=7
    )  # fmt: skip
    (plan,) = [plan for plan in list_plans(spec, isa) if plan.rows is TileRows.SHIFTED]
    check_plan(plan, isa)


@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
def test_build_conv2d__symbolic_batch_runs_on_tiles(isa):
    spec = Conv2d(1, 4, 9, 20, 16, (3, 3), padding=(1, 1, 1, 1), in_zero_point=7)
    assert isinstance(choose_plan(spec, isa), TiledPlan)
    rng, images = np.random.default_rng(0), 3
    weight = random_weights(rng, spec.weight_shape)
    bias, factor = np.zeros(16, "int32"), random_multiplier(rng, weight)
    packed = pack_conv2d(spec, isa, Constants(weight, bias, factor)).arguments()
    with repeat_over_batch((0, 4)):
        kernel = compile_kernel(build_conv2d(spec, isa), find_target(isa))
    many = replace(spec, batch=images)
    x = random_values(rng, many.in_shape, "uint8")
    y = tvm.runtime.tensor(np.zeros(many.out_shape, "uint8"))
    kernel(*map(tvm.runtime.tensor, [x, *packed]), y)
    wanted = finish(conv2d_accumulators(x, weight, bias, many), spec.epilogue, factor, None)
    np.testing.assert_array_equal(y.numpy(), wanted)


@pytest.mark.parametrize(
    ("size", "channels", "outputs", "kernel", "strides", "wanted"),
    [
        (56, 64, 256, 1, 1, TileRows.MATRIX),
        (7, 512, 512, 3, 1, TileRows.PADDED),
        (56, 64, 64, 3, 1, TileRows.LINES),
        (14, 512, 512, 3, 2, TileRows.SHIFTED),
        (28, 512, 512, 3, 2, TileRows.LINES),
        (224, 3, 64, 7, 2, TileRows.FOLDED),
    ],
)
def test_choose_plan__fills_tiles(size, channels, outputs, kernel, strides, wanted):
    pad = (kernel // 2,) * 4
    spec = Conv2d(1, size, size, channels, outputs, (kernel,) * 2, (strides,) * 2, pad)
    plan = choose_plan(spec, AMX)
    assert isinstance(plan, TiledPlan)
    assert plan.rows is wanted


def test_choose_plan__few_rows_stay_on_vectors():
    for rows in (1, 5):
        assert choose_plan(Dense(rows, 512, 512).as_conv2d(), AMX).isa.unit is None
    for rows in (16, 64):
        assert choose_plan(Dense(rows, 512, 512).as_conv2d(), AMX).isa.unit is AMX_INT8


@pytest.mark.parametrize(
    ("size", "channels", "outputs", "unit"),
    [(14, 48, 192, AMX_INT8), (14, 40, 240, AMX_INT8), (56, 24, 144, None), (55, 16, 64, None)],
)
def test_choose_plan__storing_results_counts_on_both_sides(size, channels, outputs, unit):
    """Of few channels results take most of the time; tiles store them while they multiply."""
    spec = Conv2d(1, size, size, channels, outputs, (1, 1), epilogue=Epilogue(is_small=True))
    assert choose_plan(spec, AMX).isa.unit is unit


def test_choose_plan__a_tile_that_is_asked_for_decides_nothing_else():
    plan = choose_plan(WIDE, AMX)
    for tile in plan.ranked_tiles:
        again = choose_plan(replace(WIDE, tile=tile), AMX)
        assert (again.tile, again.rows) == (tile, plan.rows)


def test_plan_batch_matmul__takes_the_unit():
    assert plan_batch_matmul(BatchMatmul(2, 64, 64, 64), AMX).isa.unit is AMX_INT8


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_shape_registers__fit_the_unit(dtype):
    for rows, blocks in BLOCKS:
        spec = replace(WIDE, in_dtype=dtype, tile=Tile(rows, 16, blocks))
        for plan in list_plans(spec, AMX):
            shapes = plan.shape_registers(plan.tile_rows)
            assert len(shapes) <= AMX_INT8.registers
            assert all(0 < r <= 16 and 0 < size <= 64 for r, size in shapes)


def compile_assembly(spec: Conv2d, isa: Isa) -> str:
    module = tvm.IRModule({"conv2d": build_conv2d(spec, isa)})
    return tvm.compile(module, target=WITH_TILES).mod.inspect_source("asm")


@pytest.mark.optimized
@pytest.mark.parametrize("rows", [1, 2])
def test_build_conv2d__tile_instructions_of_a_block(rows):
    """As many loads as operands for each product, and one store for each sum: nothing spills."""
    spec = replace(WIDE, tile=Tile(rows, 16, 4 // rows))
    text = compile_assembly(spec, AMX)
    count = {
        name: len(re.findall(rf"\t{name}\b", text))
        for name in ("tdpbusd", "tileloadd", "tilestored", "ldtilecfg", "tilerelease", "syscall")
    }
    assert count["tdpbusd"] % 4 == 0
    assert count["tilestored"] == 4
    loads_of_a_step = 5 if rows == 1 else 4
    assert count["tileloadd"] == 4 + count["tdpbusd"] // 4 * loads_of_a_step
    assert count["ldtilecfg"] == count["tilerelease"]
    assert count["syscall"] == 1


@pytest.mark.optimized
def test_emit_spare_store__long_blocks_store_a_tile_that_nothing_reads():
    """Of 36 steps of a block, each eighth stores weights; a block of 9 steps has its sums only."""
    for channels, is_long in ((256, True), (64, False)):
        spec = Conv2d(1, 28, 28, channels, 64, (3, 3), tile=Tile(2, 16, 2))
        text = compile_assembly(spec, AMX)
        assert len(re.findall(r"\ttilestored\s+%tmm[0-3]", text)) == 4
        assert bool(re.findall(r"\ttilestored\s+%tmm7", text)) is is_long


@pytest.mark.parametrize(
    ("rows", "blocks", "steps", "apart"),
    [
        (2, 2, 27, None),
        (2, 2, 28, 8),
        (4, 1, 72, 8),
        (3, 1, 72, 16),
        (1, 2, 72, 16),
        (1, 1, 144, 32),
    ],
)
def test_spare_store_steps__count_the_products(rows, blocks, steps, apart):
    spec = replace(Dense(128, 64 * steps, 64).as_conv2d(), tile=Tile(rows, 16, blocks))
    (plan,) = list_plans(spec, AMX)
    assert (plan.steps, plan.spare_store_steps) == (steps, apart)


def test_ranked_tiles__of_equal_times_one_block_has_all_pixels():
    for size, rows in ((7, 4), (8, 4), (28, 2)):
        plans = list_plans(Conv2d(1, size, size, 1024, 224, (1, 1)), AMX)
        assert plans[0].tile.rows == rows


@pytest.mark.parametrize(
    ("pixels", "inner", "outputs", "kernel", "streamed"),
    [
        (128, 512, 64, 1, (False, False)),  # operands of a block fit the first-level cache
        (128, 1024, 64, 1, (True, False)),  # a panel of 32 KB is read by four blocks
        (49, 1024, 64, 1, (False, True)),  # by two
        (128, 1536, 64, 1, (False, True)),  # a panel is larger than the cache
        (128, 1536, 2048, 1, (False, False)),  # the next panels are in the last-level cache
        (128, 128, 64, 3, (False, False)),  # taps read activations again
        (128, 256, 64, 3, (False, True)),
        (128, 256, 1024, 3, (False, True)),
    ],
)
def test_streamed__leaves_the_first_cache_to_what_is_read_again(
    pixels, inner, outputs, kernel, streamed
):
    spec = Conv2d(1, kernel, pixels + kernel - 1, inner, outputs, (kernel, kernel))
    (plan,) = [
        plan
        for plan in list_plans(replace(spec, tile=Tile(2, 16, 2)), AMX)
        if plan.rows in (TileRows.MATRIX, TileRows.LINES)
    ]
    assert plan.streamed == streamed


@pytest.mark.optimized
def test_build_conv2d__streams_the_operand_that_is_read_once():
    spec = Conv2d(1, 1, 128, 1024, 64, (1, 1), tile=Tile(2, 16, 2))
    text = compile_assembly(spec, AMX)
    count = {name: len(re.findall(rf"\t{name}\b", text)) for name in ("tdpbusd", "tileloaddt1")}
    assert count["tileloaddt1"] == count["tdpbusd"] // 2 > 0


#: Runs a library in a process whose signal stack is too small for the state of the tiles.
REFUSED_PROCESS = """
import ctypes, sys
import numpy as np

class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

system = ctypes.CDLL(None)
memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, 8192)
assert system.sigaltstack(ctypes.byref(stack), None) == 0
import tvm
kernel = tvm.runtime.load_module(sys.argv[1])["conv2d"]
with np.load(sys.argv[2]) as arrays:
    inputs = [arrays[name] for name in arrays.files]
    kernel(*map(tvm.runtime.tensor, inputs[:-1]), y := tvm.runtime.tensor(inputs[-1]))
np.save(sys.argv[3], y.numpy())
granted = ctypes.c_uint64()
system.syscall(158, 0x1022, ctypes.byref(granted))
print("granted" if granted.value >> 18 & 1 else "refused")
"""


@pytest.mark.slow
def test_permission__a_process_that_may_not_use_tiles_computes_the_same(tmp_path):
    """As on a CPU without tiles, no tile instruction is executed: it would end the process."""
    runnable_target(VNNI512)
    rng = np.random.default_rng(0)
    weight = random_weights(rng, WIDE.weight_shape)
    bias = np.zeros(WIDE.out_channels, "int32")
    factor = random_multiplier(rng, weight)
    x = random_values(rng, WIDE.in_shape, "uint8")
    packed = pack_conv2d(WIDE, AMX, Constants(weight, bias, factor)).arguments()
    kernel = tvm.IRModule({"conv2d": build_conv2d(WIDE, AMX)})
    tvm.compile(kernel, target=WITH_TILES).export_library(str(tmp_path / "kernel.so"))
    np.savez(tmp_path / "inputs.npz", x, *packed, np.zeros(WIDE.out_shape, "uint8"))
    paths = [str(tmp_path / name) for name in ("kernel.so", "inputs.npz", "y.npy")]
    command = [sys.executable, "-c", REFUSED_PROCESS, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "refused"
    wanted = finish(conv2d_accumulators(x, weight, bias, WIDE), WIDE.epilogue, factor, None)
    np.testing.assert_array_equal(np.load(paths[-1]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
def test_build_planned__threads_without_a_block(isa):
    """Threads share a loop over two blocks. One block is no loop, and nothing to share."""
    for width, is_shared in ((64, True), (32, False)):
        spec = Conv2d(1, 1, width, 2**14, 32, (1, 1), tile=Tile(2, 16, 2))
        (plan,) = list_plans(spec, isa)
        assert ("T.parallel(" in build_planned(plan).script()) is is_shared
        check_plan(plan, isa)


def test_zero_point_shift__both_kinds_of_bytes_are_read_in_place():
    for dtype in ("uint8", "int8"):
        spec = Conv2d(1, 8, 8, 64, 64, (1, 1), in_dtype=dtype)
        plan = choose_plan(spec, AMX)
        assert isinstance(plan, TiledPlan)
        assert not plan.needs_copy
        assert plan.shift == 0
