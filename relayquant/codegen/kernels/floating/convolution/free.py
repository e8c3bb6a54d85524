"""Float convolution over images whose size is known only at run time -> its kernel in NHWC.

    y[m] = window[m] @ w (+ bias) (+ residual[m]), clipped          m = all places of all images

`direct` and `winograd` are planned for one height and width. Here the windows of some places are
copied next to one another, and multiplied as the rows of a dense layer. The copies stay in the
cache. Groups follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    COPY_BYTES,
    alloc_workspace,
    build_kernel,
    declare_argument,
    flat_view,
)
from relayquant.codegen.kernels.floating.convolution.direct import emit_packing
from relayquant.codegen.kernels.floating.convolution.operands import FloatOperands
from relayquant.codegen.kernels.floating.gemm import emit_row_tiles, make_dense_tile, pack_groups
from relayquant.codegen.kernels.floating.tile import (
    PARALLEL_MACS,
    Buffer,
    Expr,
    FloatEpilogue,
    FloatIsa,
    Panels,
    choose_panels,
    declare_arguments,
)
from relayquant.codegen.kernels.windows import ConvWindows, WindowParts, declare_windows


@dataclass(frozen=True)
class FreeFloatConv2d:
    """x (N, H, W, C), weights (O, KH, KW, C / groups) -> y (N, OH, OW, O)."""

    windows: ConvWindows
    outputs: int
    epilogue: FloatEpilogue = field(default_factory=FloatEpilogue)

    @property
    def is_depthwise(self) -> bool:
        """Whether there are several groups of one input channel and one output channel each."""
        return self.windows.groups == self.windows.channels == self.outputs > 1

    @property
    def group_outputs(self) -> int:
        """Output channels of a group."""
        return self.outputs // self.windows.groups

    def plan(self, isa: FloatIsa) -> tuple[FloatIsa, Panels]:
        """Choose vector width and panels of one group, as for a dense layer of many rows."""
        return choose_panels(self.group_outputs, None, isa, self.windows.row)

    def count_weights(self, isa: FloatIsa) -> int:
        """Count the elements of a group's packed weights."""
        isa, panels = self.plan(isa)
        return panels.vectors * isa.lanes * self.windows.row

    def declare(self, weights: int) -> tuple[Buffer, Buffer, FloatOperands]:
        """Declare the arguments of a kernel.

        Returns:
            Data and result with their shapes, and flat views of all arguments.
        """
        epilogue = self.epilogue
        shape = (*self.windows.places, epilogue.pitch(self.outputs))
        x = declare_windows(self.windows)
        weight = declare_argument("w", (weights,), "float32")
        bias = residual = None
        if epilogue.bias:
            bias = declare_argument("bias", (self.outputs,), "float32")
        if epilogue.residual:
            residual = declare_argument("residual", shape, "float32")
        y = declare_argument("y", shape, "float32")
        if residual is not None:
            residual = flat_view(residual)
        return x, y, FloatOperands(flat_view(x), weight, bias, residual, flat_view(y))


def pack_free_conv2d(
    weight: NDArray[np.float32], spec: FreeFloatConv2d, isa: FloatIsa
) -> NDArray[np.float32]:
    """Pack OHWI as `pack_groups`; depthwise: [KH][KW][C]."""
    if spec.is_depthwise:
        return np.ascontiguousarray(weight.reshape(spec.outputs, -1).T, "float32").reshape(-1)
    _, panels = spec.plan(isa)
    groups = weight.reshape(spec.windows.groups, spec.group_outputs, spec.windows.row)
    return pack_groups(groups, panels)


def make_free_packing(
    spec: FreeFloatConv2d, isa: FloatIsa, name: str = "float_free_packing"
) -> PrimFunc:
    """Make PrimFunc(w OHWI, packed), `pack_free_conv2d` at run time, for weights that vary."""
    windows = spec.windows
    taps = prod(windows.kernel)
    kernel = windows.kernel[1:] if windows.is_sequence else windows.kernel

    def body() -> None:
        weight, packed = declare_arguments(
            ("w", (spec.outputs, *kernel, windows.group_channels)),
            ("packed", (count_packed(spec, isa),)),
        )
        if not spec.is_depthwise:
            emit_packing(weight, packed, windows.groups, windows.row, spec.plan(isa)[1])
            return
        with T.grid(taps, spec.outputs) as (tap, channel):
            T.buffer_store(packed, weight[channel * taps + tap], [tap * spec.outputs + channel])

    return build_kernel(name, body)


def count_packed(spec: FreeFloatConv2d, isa: FloatIsa) -> int:
    """Count the elements of all packed weights."""
    if spec.is_depthwise:
        return prod(spec.windows.kernel) * spec.outputs
    return spec.windows.groups * spec.count_weights(isa)


def make_free_conv2d(
    spec: FreeFloatConv2d, isa: FloatIsa, name: str = "float_free_conv2d"
) -> PrimFunc:
    """Make PrimFunc(x, packed weights, (bias,) (residual,) y), for `call_tir`."""
    size = spec.count_weights(isa)
    isa, panels = spec.plan(isa)
    windows, pitch = spec.windows, spec.epilogue.pitch(spec.outputs)

    def body() -> None:
        x, y, operands = spec.declare(windows.groups * size)
        parts, rows = WindowParts.of(windows, x, y), windows.part_rows

        def emit_part(first: Expr, count: Expr) -> None:
            copy = alloc_workspace(rows * windows.row + COPY_BYTES, "float32")
            own = replace(operands, data=copy)

            def emit_group(group: Expr) -> None:
                parts.emit_copies(first, count, copy, group)
                tile = make_dense_tile(
                    windows.row,
                    isa,
                    spec.epilogue,
                    own,
                    lambda row: (first + row) * pitch,
                    group * size,
                    group * spec.group_outputs,
                )
                emit_row_tiles(count, panels, tile, threads=False)

            if windows.groups == 1:
                emit_group(0)
                return
            with T.serial(windows.groups) as group:
                emit_group(group)

        parts.emit(rows, windows.row * spec.outputs, PARALLEL_MACS, emit_part)

    return build_kernel(name, body)
