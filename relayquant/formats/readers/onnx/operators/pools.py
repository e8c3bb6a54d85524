"""ONNX reader: pools, as windows that all readers emit.

Each function is a `Convert`, as `conversion` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax

from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.convolutions import (
    measure_same_pads,
    read_auto_pad,
    resolve_auto_pad,
)
from relayquant.formats.readers.onnx.operators.sizes import known_shape
from relayquant.formats.readers.pooling import Windows, emit_pool, emit_window_sum
from relayquant.formats.readers.refusal import Refusal


def read_windows(data: relax.Expr, attrs: Mapping[str, Any]) -> Windows:
    """Read the windows of a pool over this data.

    Raises:
        Refusal: auto_pad cannot be resolved, or would crop (see `check_same_pads`).
    """
    kernel, sizes = list(attrs["kernel_shape"]), known_shape(data, "input")[2:]
    pads = resolve_auto_pad(attrs, sizes, kernel)
    windows = Windows(
        kernel,
        list(attrs.get("strides") or [1] * len(kernel)),
        list(attrs.get("dilations") or [1] * len(kernel)),
        pads or list(attrs.get("pads") or [0] * 2 * len(kernel)),
        bool(attrs.get("ceil_mode", 0)),
    )
    check_same_pads(windows, sizes, attrs)
    return windows


def check_same_pads(windows: Windows, sizes: Sequence[int | str], attrs: Mapping[str, Any]) -> None:
    """Refuse SAME_* padding of a pool whose sum is so negative that the first window would begin
    inside the data.

    ONNX's formula for pools gives such sums for a kernel far smaller than the stride. Its text and
    TensorFlow never crop, ONNX Runtime crops for some operators and versions and refuses for
    others, and onnx's evaluator fails.
    """
    mode = read_auto_pad(attrs)
    if not mode.startswith("SAME"):
        return
    for size, extent, stride in zip(sizes, windows.extents, windows.strides, strict=True):
        if isinstance(size, str):
            continue
        if measure_same_pads(size, extent, stride) + (mode == "SAME_LOWER") <= -2:
            raise Refusal(
                f"its auto_pad is {mode} with kernel_shape {list(windows.kernel)} and strides "
                f"{list(windows.strides)} over data of {list(sizes)}: tools differ in where the "
                "first window begins; supported: kernels that are not so much smaller than strides",
                f"Write pads={[0] * len(windows.pads)} in place of auto_pad if windows begin at "
                "the first element",
            )


def convert_average_pool(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert AveragePool, see `emit_pool`."""
    counts = bool(attrs.get("count_include_pad", 0))
    return emit_pool(bb, "average", inputs[0], read_windows(inputs[0], attrs), counts)


def convert_max_pool(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert MaxPool, see `emit_pool`. TVM lacks its second output, the indices of the maxima."""
    return emit_pool(bb, "maximum", inputs[0], read_windows(inputs[0], attrs))


def convert_lp_pool(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert LpPool: the sum of |x| ** p of each window, to the power of 1 / p.

    TVM multiplies an average by the kernel size, although fewer elements count with ceil_mode.
    """
    data, order = inputs[0], float(attrs.get("p", 2))
    exponents = [relax.const(number, str(data.ty.dtype)) for number in (order, 1 / order)]
    powers = bb.emit(relax.op.power(bb.emit(relax.op.abs(data)), exponents[0]))
    total = emit_window_sum(bb, powers, read_windows(data, attrs))
    return relax.op.power(total, exponents[1])
