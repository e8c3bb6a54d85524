"""Float convolution with few outputs -> a kernel whose vectors hold neighbouring pixels.

    y[n, p] = clip(bias[n] + sum_k w[k, n] * x[rows[p] + steps[k]] (+ residual[n, p]))

The data lie in planes, one for each channel, so that the pixels p of a vector are next to each
other. A vector of outputs, as in `gathered`, would be nearly empty. Each sum adds its products in
the order of k and has the same bits as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import broadcast, build_kernel, ceil_div
from relayquant.codegen.kernels.floating.gathered import Floats, ProductArguments, Table
from relayquant.codegen.kernels.floating.tile import Expr, FloatIsa, emit_tile

#: Most vectors of a tile: as many sums as hide the latency of an FMA.
MOST_VECTORS = 8


@dataclass(frozen=True)
class PlanarProduct:
    """A product of all `outputs` for `vectors` vectors of `lanes` pixels at a time."""

    lanes: int
    outputs: int
    vectors: int

    @staticmethod
    def choose(outputs: int, isa: FloatIsa) -> PlanarProduct | None:
        """Choose the tile. None if the outputs fill more than half of a vector."""
        if outputs > isa.lanes // 2:
            return None
        # Registers also hold a vector of each row of pixels, and a weight.
        vectors = (isa.accumulators + 3) // (outputs + 1)
        return PlanarProduct(isa.lanes, outputs, max(min(vectors, MOST_VECTORS), 1))

    def list_starts(self, _groups: int, _outputs: int) -> Table:
        """Return no places of outputs: each tile computes all of them."""
        return np.zeros(0, "int32")

    def list_origins(self, _groups: int, _outputs: int, _inputs: int) -> Table:
        """Return no first channels: each tile reads all of them."""
        return np.zeros(0, "int32")

    def pack(self, weight: Floats) -> Floats:
        """Pack (1, outputs, K) -> [K][output]."""
        return np.ascontiguousarray(weight[0].T, dtype="float32")


def make_planar(spec: PlanarProduct, isa: FloatIsa, name: str) -> PrimFunc:
    """Make a PrimFunc with the arguments of `gathered.make_product`.

    `rows` says where each vector of pixels begins in the data, and `starts` where in a plane of
    results. The pitch is the size of that plane. `origins` are not read.
    """
    lanes, outputs, vectors = spec.lanes, spec.outputs, spec.vectors

    def body() -> None:
        a = ProductArguments()

        def tile(image: Expr, at: Sequence[Expr]) -> None:
            source = T.bind(image * a.size("image_step") + a.size("first"))
            target = T.bind(image * a.size("result_step") + a.size("first_result"))
            starts = [T.bind(source + a.read("rows", each)) for each in at]
            results = [T.bind(target + a.read("starts", each)) for each in at]

            def reduce(step: Callable[[Expr, Callable[[int], Expr]], None]) -> None:
                with T.serial(a.count["steps"]) as k:
                    offset = T.bind(a.read("steps", k))
                    step(k * outputs, lambda b: starts[b] + offset)

            def finish(output: int, b: int, value: Expr) -> None:
                bias = broadcast(a["bias"][output], lanes)
                a.finish(value + bias, results[b] + output * a.size("pitch"), lanes)

            emit_tile(
                replace(isa, lanes=lanes),
                [T.int64(output) for output in range(outputs)],
                len(at),
                a["w"],
                a["x"],
                reduce,
                finish,
                prefetch=False,
            )

        count = a.count["rows"]
        with T.serial(a.size("images")) as image, T.If(count >= vectors):
            with T.Then(), T.serial(ceil_div(count, vectors)) as index:
                first = T.bind(T.min(index * vectors, count - vectors))
                tile(image, [first + b for b in range(vectors)])
            with T.Else(), T.serial(count) as index:
                tile(image, [index])

    return build_kernel(name, body)
