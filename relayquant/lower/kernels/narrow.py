"""Storing four accumulator vectors as one byte vector, with the saturating packs of x86.

Packing narrows within 128-bit parts of a register: vectors v = 0..3 of lanes 4q + e give, in part
q, the bytes 4v + e. So the channels are dealt out to the lanes accordingly when the weights are
packed (`channel_order`), and no shuffle is needed to put them back. The packs saturate, which does
the clamping at the limits of the dtype for free, and four vectors share one store.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from relayquant.lower.kernels.emit import constant, store_vector, vector
from relayquant.lower.kernels.epilogue import Epilogue, Output
from relayquant.lower.kernels.isa import Buffer, Expr, Isa, Narrowing
from relayquant.qtypes import INTEGER_LIMITS

#: What results and residuals have to be.
BYTES = ("uint8", "int8")
#: Accumulator vectors that become one byte vector.
PACKED = 4
#: int32 lanes of the 128-bit parts that packs treat separately.
PART = 4


def can_narrow(isa: Isa, epilogue: Epilogue) -> bool:
    """Whether results of this epilogue can be stored by `emit_narrow_store`."""
    return (
        isa.narrowing is not None
        and epilogue.output is Output.REQUANTIZE
        and epilogue.dtype in BYTES
        and (epilogue.residual is None or epilogue.residual.dtype in BYTES)
    )


def channel_order(lanes: int, blocks: int) -> NDArray[np.int64]:
    """[block, lane] -> channel within a panel of `blocks` (1, 2 or 4) vectors."""
    part, element = np.divmod(np.arange(lanes), PART)
    block = np.arange(blocks)[:, None]
    return part * (PART * blocks) + block * PART + element


def emit_narrow_residual(buffer: Buffer, at: Expr, lanes: int, blocks: int, block: int) -> Expr:
    """Bytes of channels `at` .. of a panel as an int32 vector, in the channel order of `block`.

    int8 bytes come as uint8 + 128.
    """
    count = lanes * blocks
    values = T.reinterpret(vector("uint8", count), buffer.vload([at], vector(buffer.dtype, count)))
    if buffer.dtype == "int8":
        values = T.bitwise_xor(values, constant("uint8", 128, count))
    if blocks == 1:
        return T.Cast(vector("int32", lanes), values)
    zeros = constant("uint8", 0, count)
    order = []
    for channel in channel_order(lanes, blocks)[block]:
        order += [T.int32(int(channel))] + [T.int32(count)] * 3  # a byte, zero-extended
    return T.reinterpret(vector("int32", lanes), T.Shuffle([values, zeros], order))


def emit_narrow_store(
    isa: Isa,
    epilogue: Epilogue,
    reals: list[Expr],
    buffer: Buffer,
    offsets: list[Expr],
    blocks: int,
) -> None:
    """Round, clamp and store four float32 vectors, none NaN, in channel order.

    `reals` are the `blocks` vectors of one pixel after the other; `offsets` is where each pixel
    goes. Vectors without a pixel are not stored.
    """
    lanes, narrowing = isa.lanes, isa.narrowing
    assert isinstance(narrowing, Narrowing)
    low, high = epilogue.bounds
    zero_point = epilogue.zero_point
    integers = []
    for real in reals:
        if low != INTEGER_LIMITS[epilogue.dtype][0]:
            real = T.max(real, constant("float32", low - zero_point, lanes))
        # The conversion gives the least integer above 2**31; so the upper bound comes before it,
        # unless nothing can be that large. The packs saturate at the limits of the dtype.
        if not epilogue.is_small or high != INTEGER_LIMITS[epilogue.dtype][1]:
            real = T.min(real, constant("float32", high - zero_point, lanes))
        integers.append(narrowing.round(real, lanes))
    halves = []
    for i in (0, 2):
        half = narrowing.pack_words(integers[i], integers[i + 1], lanes)
        if zero_point:
            half = narrowing.add_words(half, constant("int16", zero_point, 2 * lanes), lanes)
        halves.append(half)
    packed = narrowing.pack_bytes(halves[0], halves[1], epilogue.dtype, lanes)
    if blocks == PACKED:
        store_vector(buffer, packed, offsets[0], PACKED * lanes)
        return
    # Bring the words of each pixel together, once; the fence keeps LLVM from doing everything
    # apart for each pixel, which costs as much as storing the vectors one by one.
    pixels, parts = PACKED // blocks, lanes // PART
    order = [
        T.int32(part * PART + pixel * blocks + block)
        for pixel in range(pixels)
        for part in range(parts)
        for block in range(blocks)
    ]
    words = T.Shuffle([T.reinterpret(vector("float32", lanes), packed)], order)
    name = f"llvm.arithmetic.fence.v{lanes}f32"
    words = T.call_llvm_pure_intrin(name, words, dtype=vector("float32", lanes))
    count = parts * blocks
    for pixel, offset in enumerate(offsets):
        own = T.Shuffle([words], [T.int32(pixel * count + i) for i in range(count)])
        own = T.reinterpret(vector(epilogue.dtype, count * 4), own)
        store_vector(buffer, own, offset, count * 4)
