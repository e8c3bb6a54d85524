"""Analysis: what this machine can do at most, the measure of how good a kernel is."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tvm
from tvm.script.ir_builder import tirx as T
from tvm.target import Target
from tvm.tirx import PrimFunc

from relayquant.kernels.emit import (
    alloc_vectors,
    build_kernel,
    declare_arguments,
    load_vector,
    store_vector,
)
from relayquant.kernels.isa.base import Isa
from relayquant.kernels.isa.select import select_isa

#: Dot products per call: long enough that the call itself does not count.
ITERATIONS = 20_000


def measure_peak(target: Target, seconds: float = 0.2) -> float:
    """10^9 integer operations per second of one core: dot products in registers, nothing else.

    A multiply-add is two operations. `target` must be one this machine can run. The best of many
    runs within `seconds`, by CPU time, so that a busy machine matters little.
    """
    call, operations = compile_peak(target)
    call()
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return operations / best / 1e9


def compile_peak(target: Target) -> tuple[Callable[[], None], int]:
    """What `measure_peak` runs, and the integer operations of one call."""
    isa = select_isa(target)
    registers = min(isa.accumulators, 24) // isa.pixels
    func = build_peak(isa, registers)
    name = str(func.attrs["global_symbol"])
    kernel = tvm.compile(tvm.IRModule({name: func}), target=target)[name]
    arrays = (
        np.ones(64, isa.activation),
        np.ones(isa.weight_vector, isa.weight_dtype),
        np.zeros(registers * isa.accumulator_lanes, "int32"),
    )
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    products = isa.accumulator_lanes * isa.products * registers * ITERATIONS
    return lambda: kernel(*tensors), 2 * products


def build_peak(isa: Isa, registers: int) -> PrimFunc:
    """PrimFunc(x, w, y): `registers` independent sums of dot products, `ITERATIONS` each."""

    def body() -> None:
        lanes = isa.accumulator_lanes
        x, w, y = declare_arguments(
            ("x", (64,), isa.activation),
            ("w", (isa.weight_vector,), isa.weight_dtype),
            ("y", (registers * lanes,), "int32"),
        )
        sums = alloc_vectors(registers, lanes)
        for i, total in enumerate(sums):
            store_vector(total, load_vector(y, i * lanes, lanes), 0, lanes)
        with T.serial(ITERATIONS):
            for total in sums:
                operand = isa.join_words([isa.load_activation(x, 0)] * isa.pixels)
                value = isa.dot(load_vector(total, 0, lanes), operand, isa.load_weights(w, 0))
                store_vector(total, value, 0, lanes)
        for i, total in enumerate(sums):
            store_vector(y, load_vector(total, 0, lanes), i * lanes, lanes)

    return build_kernel("peak", body)
