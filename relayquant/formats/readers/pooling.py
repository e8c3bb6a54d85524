"""Pooling of channels-first data -> Relax, for several readers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import relax

from relayquant.base.windows import count_windows, reach_end
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.rewrite.graph import tensor_dtype, tensor_shape

POOLS: dict[str, tuple[Callable[..., relax.Expr], ...]] = {
    "average": (relax.op.nn.avg_pool1d, relax.op.nn.avg_pool2d, relax.op.nn.avg_pool3d),
    "maximum": (relax.op.nn.max_pool1d, relax.op.nn.max_pool2d, relax.op.nn.max_pool3d),
}


@dataclass(frozen=True)
class Windows:
    """Attributes of a pool, with a number per spatial axis. `pads` has all begins, then all
    ends.
    """

    kernel: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    pads: Sequence[int]
    ceil_mode: bool

    def __post_init__(self) -> None:
        if not 1 <= len(self.kernel) <= len(POOLS["average"]):
            raise Refusal(f"its kernel_shape is {list(self.kernel)}; supported: 1 to 3 sizes")

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def extents(self) -> list[int]:
        """Distance from the first to the last element of a window, both included."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    def list_free(self, sizes: Sequence[int]) -> list[int]:
        """Return how many elements of the padded data remain after the first window. Negative if
        the window is wider.
        """
        befores, afters = self.pads[: self.rank], self.pads[self.rank :]
        rows = zip(sizes, befores, afters, self.extents, strict=True)
        return [size + before + after - extent for size, before, after, extent in rows]

    def count(self, sizes: Sequence[int]) -> list[int]:
        """Count the windows along each axis.

        If a window is less than one stride wider than the padded data, it counts, as in ONNX
        Runtime, which divides towards zero.

        Raises:
            Refusal: a window is wider by two strides or more.
        """
        counts = []
        for axis, free in enumerate(self.list_free(sizes)):
            stride, pads = self.strides[axis], (self.pads[axis], self.pads[axis + self.rank])
            if free < 0:
                counts.append(1 - -free // stride)
            else:
                extent = self.extents[axis]
                counts.append(count_windows(sizes[axis], extent, stride, 1, pads, self.ceil_mode))
        if min(counts) < 0:
            raise self.refuse(sizes)
        return counts

    def check(self, sizes: Sequence[int | str]) -> None:
        """Check that a window fits along each axis of known size, as convolutions need.

        Raises:
            Refusal: a window is wider than the padded data.
        """
        known = [size if isinstance(size, int) else sys.maxsize for size in sizes]
        if min(self.list_free(known)) < 0:
            raise self.refuse(sizes)

    def refuse(self, sizes: Sequence[int | str]) -> Refusal:
        shown = ", ".join(map(str, sizes))
        return Refusal(
            f"its kernel_shape {list(self.kernel)} is wider than data of [{shown}] with pads "
            f"{list(self.pads)}; supported: windows that fit",
            "Give the model larger inputs, or more padding",
        )

    def reach_ends(self, sizes: Sequence[int]) -> list[int]:
        """Return pads with the same windows without `ceil_mode`: the last window ends in the
        padding.
        """
        befores = self.pads[: self.rank]
        rows = zip(
            self.count(sizes),
            sizes,
            self.kernel,
            self.strides,
            self.dilations,
            befores,
            strict=True,
        )
        ends = [reach_end(*row) for row in rows]
        return [*befores, *ends]


def emit_pool(
    bb: relax.BlockBuilder,
    kind: str,
    data: relax.Expr,
    windows: Windows,
    count_include_pad: bool = False,
) -> relax.Expr:
    """Emit R.nn.avg_pool or max_pool. Without windows the result has no elements.

    Raises:
        Refusal: a window is far wider than the data.
    """
    sizes, pads = read_sizes(data), windows.pads
    if sizes is None or min(windows.list_free(sizes)) >= 0:
        return call_pool(kind, data, windows, pads, windows.ceil_mode, count_include_pad)
    if 0 in windows.count(sizes):
        return emit_nothing(data, windows.count(sizes))
    ends = windows.reach_ends(sizes)
    if kind == "average" and count_include_pad and any(pads):
        # Elements beyond the padding do not count, so the padding becomes data.
        own = [min(one, two) for one, two in zip(pads, ends, strict=True)]
        pairs = [0] * 4 + [
            own[at + side] for at in range(windows.rank) for side in (0, windows.rank)
        ]
        data = bb.emit(relax.op.nn.pad(data, pairs, "constant", 0.0))
        ends = [two - one for one, two in zip(own, ends, strict=True)]
    return call_pool(kind, data, windows, ends, False, False)


def emit_window_sum(
    bb: relax.BlockBuilder, data: relax.Expr, windows: Windows, divisor: float = 1.0
) -> relax.Expr:
    """Emit the sum of each window divided by `divisor`, however much of the window is padding.

    Raises:
        Refusal: `ceil_mode` over a symbolic size, or a window is far wider than the data.
    """
    sizes, pads = read_sizes(data), windows.pads
    if sizes is not None:
        if 0 in windows.count(sizes):
            return emit_nothing(data, windows.count(sizes))
        pads = windows.reach_ends(sizes)
    elif windows.ceil_mode:
        raise Refusal("it has ceil_mode over a symbolic size; supported: fixed sizes")
    average = bb.emit(call_pool("average", data, windows, pads, False, True))
    factor = relax.const(prod(windows.kernel) / divisor, tensor_dtype(data))
    return bb.emit(relax.op.multiply(average, factor))


def call_pool(
    kind: str,
    data: relax.Expr,
    windows: Windows,
    pads: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
) -> relax.Expr:
    pool, sizes = POOLS[kind][windows.rank - 1], (windows.kernel, windows.strides)
    return pool(
        data, *map(list, sizes), list(pads), list(windows.dilations), ceil_mode, count_include_pad
    )


def emit_nothing(data: relax.Expr, counts: Sequence[int]) -> relax.Expr:
    """Emit zeros of a shape without elements."""
    shape = relax.ShapeExpr([*list(data.ty.shape)[:2], *counts])
    return relax.op.zeros(shape, tensor_dtype(data))


def read_sizes(data: relax.Expr) -> list[int] | None:
    """Return the spatial sizes, None for an unknown one."""
    sizes: Any = (tensor_shape(data) or ("",))[2:]
    return list(sizes) if sizes and all(isinstance(size, int) for size in sizes) else None
