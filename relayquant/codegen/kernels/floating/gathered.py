"""Float products of any shape -> two kernels; for functions that run step by step.

    product      y[m, n] = clip(bias[n] + sum_k x[rows[m] + steps[k]] * w[n, k] (+ residual[m, n]))
    depthwise    y[m, n] = clip(bias[n] + sum_k x[rows[m] + steps[k] + n] * w[k, n] (+ ...))

All sizes are arguments, and tables say where operands are: `rows` where the window of a result
begins, `steps` where its elements are. So a dense layer and every convolution run on the same code,
which is compiled once. Each sum adds its products in the order of k, as the kernels of `gemm` and
`convolution` do, and has the same bits. Padding must be part of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc, Var

from relayquant.codegen.kernels.emit import (
    broadcast,
    build_kernel,
    ceil_div,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.floating.tile import Buffer, Expr, FloatIsa, emit_tile

#: Rows that all panels are computed for before the next rows, so that they stay in a cache.
BLOCK_ROWS = 240
#: Most vectors of a panel.
MOST_VECTORS = 4

Floats = NDArray[np.float32]
Table = NDArray[np.int32]


@dataclass(frozen=True)
class GatheredProduct:
    """A product whose outputs are computed in panels of `vectors` vectors of `lanes`."""

    lanes: int
    vectors: int

    @staticmethod
    def choose(outputs: int, isa: FloatIsa) -> GatheredProduct:
        """Choose the panels for a group of this many outputs: as few vectors in all as possible."""
        lanes = isa.narrow(outputs).lanes
        needed = -(-outputs // lanes)
        most = range(min(needed, MOST_VECTORS), 0, -1)
        return GatheredProduct(lanes, min(most, key=lambda size: -(-needed // size) * size))

    def list_starts(self, groups: int, outputs: int) -> Table:
        """Return the first output of each vector, (panels, vectors). The last vectors of a group
        are moved back to end at its last output, so outputs may be computed twice.
        """
        needed = -(-outputs // self.lanes)
        total = -(-needed // self.vectors) * self.vectors
        each = np.minimum(np.arange(total) * self.lanes, outputs - self.lanes)
        starts = np.arange(groups)[:, None] * outputs + each
        return starts.reshape(-1, self.vectors).astype("int32")

    def list_origins(self, groups: int, outputs: int, inputs: int) -> Table:
        """Return the first channel of the data that each panel reads; a group has `inputs`."""
        starts = self.list_starts(groups, outputs)
        return (starts[:, 0] // outputs * inputs).astype("int32")

    def pack(self, weight: Floats) -> Floats:
        """Pack (groups, outputs, K) -> [panel][K][vector of the panel][lanes]."""
        groups, outputs, inner = weight.shape
        starts = self.list_starts(groups, outputs)
        rows = weight.reshape(-1, inner)[starts[..., None] + np.arange(self.lanes)]
        return np.ascontiguousarray(rows.transpose(0, 3, 1, 2), dtype="float32")


@dataclass(frozen=True)
class GatheredDepthwise:
    """A depthwise product whose channels are computed `lanes` at a time."""

    lanes: int

    @staticmethod
    def choose(channels: int, isa: FloatIsa) -> GatheredDepthwise:
        """Choose the vectors for this number of channels."""
        return GatheredDepthwise(isa.narrow(channels).lanes)

    def list_starts(self, channels: int, _outputs: int) -> Table:
        """Return the first channel of each vector, (vectors, 1), as `GatheredProduct` does."""
        first = np.minimum(np.arange(0, channels, self.lanes), channels - self.lanes)
        return first.astype("int32")[:, None]

    def list_origins(self, channels: int, outputs: int, _inputs: int) -> Table:
        """Return the first channel of the data that each vector reads."""
        return self.list_starts(channels, outputs)[:, 0]

    def pack(self, weight: Floats) -> Floats:
        """Pack (channels, 1, K) -> [K][channel]."""
        return np.ascontiguousarray(weight[:, 0].T, dtype="float32")


@dataclass(frozen=True)
class Extents:
    """Sizes of one call, in elements. The kernels take them as an int64 array, in this order.

    Attributes:
        images: Blocks of data that the tables are used for, one after the other.
        image_step, result_step: Distance between these in the data and in the results.
        pitch: Distance between rows of the results.
        first, first_result: Where the first block begins in the data and in the results.
        has_residual: Whether a residual is added.
    """

    images: int
    image_step: int
    result_step: int
    pitch: int
    first: int = 0
    first_result: int = 0
    has_residual: bool = False

    @property
    def array(self) -> NDArray[np.int64]:
        """The argument of the kernels."""
        return np.array([getattr(self, each.name) for each in fields(self)], "int64")


class ProductArguments:
    """The arguments of all kernels here and in `planar`."""

    def __init__(self) -> None:
        names = ("x", "rows", "steps", "w", "bias", "residual", "y", "starts", "origins", "sizes",
                 "limits")  # fmt: skip
        dtypes = {
            "sizes": "int64",
            **dict.fromkeys(("rows", "steps", "starts", "origins"), "int32"),
        }
        self.count = {name: Var(f"{name}_count", "int64") for name in names}
        self.buffers: dict[str, Buffer] = {
            name: T.arg(name, T.Buffer((self.count[name],), dtypes.get(name, "float32")))
            for name in names
        }

    def __getitem__(self, name: str) -> Buffer:
        return self.buffers[name]

    def size(self, name: str) -> Expr:
        """Read an entry of `Extents`."""
        names = [each.name for each in fields(Extents)]
        return self["sizes"][names.index(name)]

    def read(self, name: str, index: Any) -> Expr:
        """Read an entry of a table."""
        return T.Cast("int64", self[name][index])

    def finish_channels(self, value: Expr, channel: Expr, row: Expr, lanes: int) -> None:
        """Add the bias of channels that are next to each other, and finish."""
        self.finish(value + load_vector(self["bias"], channel, lanes), row + channel, lanes)

    def finish(self, value: Expr, at: Expr, lanes: int) -> None:
        """Add the residual, clip and store."""
        value = T.bind(value)
        low, high = (broadcast(self["limits"][i], lanes) for i in range(2))

        def store(total: Expr) -> None:
            # In this order NaN stays NaN.
            store_vector(self["y"], T.min(high, T.max(low, total)), at, lanes)

        with T.If(self.size("has_residual") != 0):
            with T.Then():
                store(value + load_vector(self["residual"], at, lanes))
            with T.Else():
                store(value)


#: tile(index of the panel, first elements of the rows, offsets of the rows' results)
EmitTile = Callable[[Expr, list[Expr], list[Expr]], None]


def make_product(spec: GatheredProduct, isa: FloatIsa, name: str) -> PrimFunc:
    """Make PrimFunc(x, rows, steps, w, bias, residual, y, starts, origins, sizes, limits).

    All are flat. Without a residual any array takes its place. `limits` are two bounds.
    """
    lanes, vectors = spec.lanes, spec.vectors
    # Registers also hold a vector of weights for each column, and an activation.
    height = min((isa.accumulators + 3 - vectors) // vectors, isa.addresses)

    def body() -> None:
        a = ProductArguments()

        def tile(panel: Expr, rows: list[Expr], results: list[Expr]) -> None:
            starts = [T.bind(a.read("starts", panel * vectors + b)) for b in range(vectors)]
            base = T.bind(panel * (a.count["steps"] * (vectors * lanes)))

            def reduce(step: Callable[[Expr, Callable[[int], Expr]], None]) -> None:
                with T.serial(a.count["steps"]) as k:
                    offset = T.bind(a.read("steps", k))
                    step(offset, lambda b: base + (k * vectors + b) * lanes)

            emit_tile(
                replace(isa, lanes=lanes),
                rows,
                vectors,
                a["x"],
                a["w"],
                reduce,
                lambda r, b, value: a.finish_channels(value, starts[b], results[r], lanes),
            )

        emit_loops(a, height, tile)

    return build_kernel(name, body)


def make_depthwise(spec: GatheredDepthwise, isa: FloatIsa, name: str) -> PrimFunc:
    """Make the PrimFunc of a depthwise product, with the arguments of `make_product`."""
    lanes = spec.lanes
    height = min(isa.accumulators // 3, isa.addresses)

    def body() -> None:
        a = ProductArguments()

        def tile(panel: Expr, rows: list[Expr], results: list[Expr]) -> None:
            channel = T.bind(a.read("starts", panel))
            sums = [T.alloc_buffer((lanes,), "float32") for _ in rows]
            for each in sums:
                store_vector(each, broadcast(T.float32(0), lanes), 0, lanes)
            with T.serial(a.count["steps"]) as k:
                offset = T.bind(a.read("steps", k))
                tap = load_vector(a["w"], k * a.size("pitch") + channel, lanes)
                for each, row in zip(sums, rows, strict=True):
                    product = load_vector(a["x"], row + offset, lanes) * tap
                    store_vector(each, load_vector(each, 0, lanes) + product, 0, lanes)
            for each, result in zip(sums, results, strict=True):
                a.finish_channels(load_vector(each, 0, lanes), channel, result, lanes)

        emit_loops(a, height, tile)

    return build_kernel(name, body)


def emit_loops(a: ProductArguments, height: int, tile: EmitTile) -> None:
    """Emit loops over images, blocks of rows, panels and tiles of `height` rows.

    The last tile is moved back over its neighbour. Fewer rows than that are computed one by one.
    """
    count, panels, per_block = a.count["rows"], a.count["origins"], BLOCK_ROWS // height

    def emit(image: Expr, panel: Expr, rows: Sequence[Expr]) -> None:
        source = image * a.size("image_step") + a.size("first") + a.read("origins", panel)
        target = image * a.size("result_step") + a.size("first_result")
        source, target = T.bind(source), T.bind(target)
        firsts = [T.bind(source + a.read("rows", row)) for row in rows]
        tile(panel, firsts, [T.bind(target + row * a.size("pitch")) for row in rows])

    with T.serial(a.size("images")) as image, T.If(count >= height):
        with T.Then():
            tiles = ceil_div(count, height)
            with T.serial(ceil_div(tiles, per_block)) as block:
                first = block * per_block
                with T.serial(panels) as panel, T.serial(T.min(tiles - first, per_block)) as index:
                    row = T.bind(T.min((first + index) * height, count - height))
                    emit(image, panel, [row + r for r in range(height)])
        with T.Else(), T.serial(panels) as panel, T.serial(count) as row:
            emit(image, panel, [row])
