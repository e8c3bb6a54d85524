"""The peak integer rate of this machine, as a yardstick for kernels.

LLVM must not see that the products repeat. Otherwise it computes them once, before the loop, and
leaves only additions. If the ISA has a separate product instruction, every sum has a different word
of activations. The weights come from memory, from a new address in each iteration: one load for all
the sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tvm
from tvm.script.ir_builder import tirx as T
from tvm.target import Target
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    build_kernel,
    declare_arguments,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.matrix_unit import MatrixUnit
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant_runtime.tiles import may_use_tiles

#: Vectors of weights that are read in turns. They stay in the first-level cache.
WEIGHTS = 8
#: Symmetric 8-bit weights, as layers have them by default.
SYMMETRIC = np.array([-127, 127], "int8")
#: How long the peak is measured.
SECONDS = 0.2
#: Dot products per call: long enough that the call overhead does not count.
ITERATIONS = 20_000
#: Tiles of sums of a matrix unit that are multiplied in turns.
TILE_SUMS = 4


def measure_peak(target: Target) -> float:
    """Measure 10^9 integer operations per second of one core: dot products in registers only.

    A multiply-add is two operations. This machine must be able to run `target`. Returns the best of
    many runs within `SECONDS` by CPU time, so a busy machine matters little.
    """
    call, operations = compile_peak(target)
    call()
    best, deadline = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < deadline:
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return operations / best / 1e9


def compile_peak(target: Target) -> tuple[Callable[[], None], int]:
    """Compile the function of `measure_peak`, and count the integer operations of one call."""
    isa = choose_peak_isa(target)
    if isa.unit is not None:
        return compile_tile_peak(isa, isa.unit, target)
    sums = count_sums(isa)
    func = build_peak(isa, sums)
    name = str(func.attrs["global_symbol"])
    kernel = tvm.compile(tvm.IRModule({name: func}), target=target)[name]
    arrays = (
        np.ones(isa.products * sums, isa.activation),
        np.ones(WEIGHTS * isa.weight_vector, isa.weight_dtype),
        np.zeros(sums * isa.accumulator_lanes, "int32"),
    )
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    products = isa.lanes * isa.pixels * isa.products * sums * ITERATIONS
    return lambda: kernel(*tensors), 2 * products


def choose_peak_isa(target: Target) -> Isa:
    """Return the instructions for convolutions with symmetric weights.

    A matrix unit counts if this process may use it.
    """
    isa = select_isa(target)
    if isa.unit is not None and not may_use_tiles():
        isa = isa.companion
    return isa.for_weights(SYMMETRIC).for_convolution("uint8")


def compile_tile_peak(isa: Isa, unit: MatrixUnit, target: Target) -> tuple[Callable[[], None], int]:
    """Do the same for products of tiles: four independent tiles of sums."""
    full, shape = (unit.rows, unit.row_bytes), (unit.rows * unit.row_bytes,)
    dtypes = isa.activation, isa.weight_dtype

    def body() -> None:
        x, w, y = declare_arguments(
            ("x", shape, isa.activation), ("w", shape, isa.weight_dtype), ("y", (256,), "int32")
        )
        tiles = unit.configure([full] * unit.registers)
        for tile in range(TILE_SUMS):
            tiles.load(tile, y, 0, isa.lanes)
        tiles.load(TILE_SUMS, x, 0, unit.row_bytes)
        tiles.load(TILE_SUMS + 1, w, 0, unit.row_bytes)
        with T.serial(ITERATIONS):
            for tile in range(TILE_SUMS):
                tiles.multiply(tile, TILE_SUMS, TILE_SUMS + 1, dtypes)
        for tile in range(TILE_SUMS):
            tiles.store(tile, y, 0, isa.lanes)
        tiles.release()

    kernel = tvm.compile(tvm.IRModule({"peak": build_kernel("peak", body)}), target=target)["peak"]
    arrays = (np.ones(shape, isa.activation), np.ones(shape, "int8"), np.zeros(256, "int32"))
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    products = unit.rows * unit.row_bytes * isa.lanes * TILE_SUMS * ITERATIONS
    return lambda: kernel(*tensors), 2 * products


def count_sums(isa: Isa) -> int:
    """Count the independent sums that fit into the registers, with one operand each unless they
    share it.

    Sums with fused products need many of them to hide the latency. Other sums only wait for an
    addition.
    """
    if isa.is_fused:
        return min(isa.accumulators, 24) // isa.pixels
    registers = isa.accumulator_lanes // isa.lanes
    return isa.registers // (4 * registers)


def build_peak(isa: Isa, count: int) -> PrimFunc:
    """Build PrimFunc(x, w, y): `count` independent sums of dot products, `ITERATIONS` each."""

    def body() -> None:
        lanes = isa.accumulator_lanes
        x, w, y = declare_arguments(
            ("x", (isa.products * count,), isa.activation),
            ("w", (WEIGHTS * isa.weight_vector,), isa.weight_dtype),
            ("y", (count * lanes,), "int32"),
        )
        sums = alloc_vectors(count, lanes)
        for i, total in enumerate(sums):
            store_vector(total, load_vector(y, i * lanes, lanes), 0, lanes)
        with T.serial(ITERATIONS) as i:
            weights = isa.load_weights(w, 0 if isa.is_fused else T.floormod(i, WEIGHTS))
            for number, total in enumerate(sums):
                word = isa.load_activation(x, 0 if isa.is_fused else number * isa.products)
                operand = isa.join_words([word] * isa.pixels)
                value = isa.dot(load_vector(total, 0, lanes), operand, weights)
                store_vector(total, value, 0, lanes)
        for i, total in enumerate(sums):
            store_vector(y, load_vector(total, 0, lanes), i * lanes, lanes)

    return build_kernel("peak", body)
