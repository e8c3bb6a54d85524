"""Simulated quantization of a whole tensor: one kernel for arrays of every size.

    y[i] = (clip(rint(x[i] / scale) + zero_point, low, high) - zero_point) * scale

in float32, rounding half to even: what simulated_quantize and then simulated_dequantize give.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import broadcast, build_kernel, load_vector, store_vector
from relayquant.codegen.kernels.floating.tile import Expr, FloatIsa, declare_arguments

#: entries of the kernel's `parameters`
SCALE, ZERO_POINT, LOW, HIGH = range(4)


@dataclass(frozen=True)
class FloatRound:
    """The rounding of n float32 values; n is an argument of the compiled kernel."""


def make_round(spec: FloatRound, isa: FloatIsa, name: str = "float_round") -> PrimFunc:
    """PrimFunc(x (n,), parameters (4,), y (n,)), float32; `parameters` holds scale, zero point, low
    and high.
    """
    lanes = isa.lanes
    size = tirx.Var("n", "int64")

    def body() -> None:
        x, parameters, y = declare_arguments(("x", (size,)), ("parameters", (4,)), ("y", (size,)))

        def emit(offset: Expr, width: int) -> None:
            def read(entry: int) -> Expr:
                return broadcast(parameters[entry], width)

            level = T.nearbyint(load_vector(x, offset, width) / read(SCALE))
            # NaN becomes the zero point.
            level = T.Select(T.isnan(level), broadcast(T.float32(0), width), level)
            level = level + read(ZERO_POINT)
            level = T.max(T.min(level, read(HIGH)), read(LOW))
            store_vector(y, (level - read(ZERO_POINT)) * read(SCALE), offset, width)

        with T.serial(T.floordiv(size, lanes)) as index:
            emit(index * lanes, lanes)
        with T.serial(T.floormod(size, lanes)) as index:
            emit(size - 1 - index, 1)

    return build_kernel(name, body)
