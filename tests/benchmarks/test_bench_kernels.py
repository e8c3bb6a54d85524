"""How the layers of the benchmark are shared by threads: counted, on any machine."""

from __future__ import annotations

import pytest
import tvm_ffi
from bench_kernels import LAYERS
from tvm import tirx

from relayquant.codegen.kernels.emit import ceil_div
from relayquant.codegen.kernels.integer.convolution.direct import build_conv2d
from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.tiled.plan import TileRows
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import resolve_target

#: threads -> of the time of the busiest one, what all have to do in the mean at least. With many
#: threads the products of a row by a matrix set the bounds: they have few panels.
LEAST_BALANCE = {2: 0.98, 4: 0.96, 8: 0.75, 16: 0.75}
#: layer, CPU, threads -> the bound of this layer alone. It has 42 blocks of four vectors, and four
#: threads take 11 of them each. In blocks, MobileNetV2's depthwise layers are a seventh faster.
UNEVEN = {("depthwise 3x3 384 @14", "sapphirerapids", 4): 42 / 44}
#: the same of preparing the image, by rows: a small part of the time
LEAST_BALANCE_OF_IMAGE = 0.75
#: a kernel with more multiply-adds is shared; and how many times as many a matrix unit does at once
FEWEST_SHARED_MACS, UNIT_GAIN = 1_000_000, 8
#: of a kernel: preparing the image is one, or two where pixels are folded; the products are another
MOST_REGIONS = {False: 2, True: 3}


def count_shared(extent: tirx.PrimExpr) -> int:
    """What the threads share: the iterations, or the blocks, at most one part for each thread."""
    if isinstance(extent, tirx.Min):
        (extent,) = (side for side in (extent.a, extent.b) if isinstance(side, tirx.IntImm))
    return int(extent)


@pytest.mark.parametrize("mcpu", ["sapphirerapids", "haswell"])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers__are_split_evenly(layer, mcpu):
    spec = LAYERS[layer]
    isa = select_isa(resolve_target(f"llvm -mcpu={mcpu}"))
    func = build_conv2d(spec, isa)
    extents: list[int] = []

    def visit(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.PARALLEL:
            extents.append(count_shared(loop.extent))

    tvm_ffi.structural_walk(func.body, (tirx.For, visit))
    is_folded = getattr(choose_plan(spec, isa), "rows", None) is TileRows.FOLDED
    assert len(extents) <= MOST_REGIONS[is_folded]
    assert extents or spec.macs < FEWEST_SHARED_MACS * (1 if isa.unit is None else UNIT_GAIN)
    for place, extent in enumerate(reversed(extents)):
        for threads, least in LEAST_BALANCE.items():
            largest = ceil_div(extent, threads)  # TVM deals out runs of this length
            bound = UNEVEN.get((layer, mcpu, threads), least)
            bound = bound if place == 0 else LEAST_BALANCE_OF_IMAGE
            assert extent / (threads * largest) >= bound, (extent, threads)
