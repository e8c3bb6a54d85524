"""Four accumulator vectors -> one stored byte vector, with the saturating packs of x86.

Packing works within 128-bit blocks of a register: lanes 4q + e of vectors v = 0..3 become byte 4v +
e of block q. So the channels are assigned to the lanes accordingly when the weights are packed
(`channel_order`), and no shuffle is needed afterwards. The packs saturate, which clamps at the
limits of the dtype for free, and four vectors share one store.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.kernels.emit import (
    ceil_div,
    constant,
    flip_sign_bit,
    load_vector,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Store
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa, Narrowing, fence

#: Allowed dtypes of results and residuals.
BYTES = ("uint8", "int8")
#: Accumulator vectors that become one byte vector.
PACKED = 4
#: int32 lanes of the 128-bit blocks that packs treat separately.
PART = 4


def can_narrow(isa: Isa, epilogue: Epilogue) -> bool:
    """Whether results of this epilogue can be stored by `emit_narrow_store`."""
    return (
        isa.narrowing is not None
        and epilogue.output is Store.REQUANTIZE
        and epilogue.dtype in BYTES
        and (epilogue.residual is None or epilogue.residual.dtype in BYTES)
    )


def channel_order(lanes: int, blocks: int) -> NDArray[np.int64]:
    """Return [block, lane] -> channel within a panel of `blocks` (1 to 4) vectors."""
    part, element = np.divmod(np.arange(lanes), PART)
    block = np.arange(blocks)[:, None]
    return part * (PART * blocks) + block * PART + element


def count_packed(blocks: int) -> int:
    """Count the vectors of whole pixels, of `blocks` each, that are packed together."""
    return PACKED // blocks * blocks


def word_order(lanes: int, blocks: int) -> NDArray[np.int64]:
    """Return the positions of words of pixels, [pixel][part][block], in a packed vector."""
    parts = lanes // PART
    packed = np.arange(PACKED * parts).reshape(parts, PACKED)[:, : count_packed(blocks)]
    return packed.reshape(parts, -1, blocks).transpose(1, 0, 2).reshape(-1)


def emit_word_shuffle(words: list[Expr], order: NDArray[np.int64]) -> Expr:
    """Reorder the concatenated elements of float32 vectors.

    The fence keeps LLVM from merging this shuffle with shuffles before or after it. A shuffle of
    words, and some shuffles of bytes within 128-bit blocks, take one instruction each; merged they
    take several.
    """
    return fence(T.Shuffle(words, [T.int32(int(i)) for i in order]), order.size)


def emit_narrow_residuals(
    buffer: Buffer, offsets: list[Expr], lanes: int, vectors: int, blocks: int, width: int
) -> list[Expr]:
    """Load bytes of pixels as `vectors` int32 vectors, of which `blocks` are from the same pixels.

    The reverse of `emit_narrow_store` with the same `offsets`. int8 bytes become uint8 + 128.
    """
    count = lanes * vectors // len(offsets)
    pixels = [
        flip_sign_bit(load_pieces(buffer, at, count, width), buffer.dtype, "uint8", count)
        for at in offsets
    ]
    if blocks == 1 and len(offsets) == vectors:
        return [T.Cast(vector("int32", lanes), pixel) for pixel in pixels]
    packed = pixels[0]
    if count < PACKED * lanes:
        # A shuffle has no more results than operands.
        pixels += pixels[:1] * (ceil_div(PACKED * lanes, count) - len(pixels))
        words = [T.reinterpret(vector("float32", count // 4), pixel) for pixel in pixels]
        order, positions = np.zeros(lanes, "int64"), word_order(lanes, blocks)
        order[positions] = np.arange(positions.size)
        packed = emit_word_shuffle(words, order)
        packed = T.reinterpret(vector("uint8", PACKED * lanes), packed)
    return emit_spread(packed, lanes)[:vectors]


def emit_spread(packed: Expr, lanes: int) -> list[Expr]:
    """Split a vector of uint8 into four int32 vectors, in the order that `emit_packed` packs."""
    zeros = constant("uint8", 0, PACKED * lanes)
    part, element = np.divmod(np.arange(lanes), PART)
    vectors = []
    for v in range(PACKED):
        order = []
        for byte in (part * PACKED + v) * PART + element:
            order += [T.int32(int(byte))] + [T.int32(PACKED * lanes)] * 3  # zero-extended
        vectors.append(T.reinterpret(vector("int32", lanes), T.Shuffle([packed, zeros], order)))
    return vectors


def load_pieces(buffer: Buffer, offset: Expr, count: int, width: int) -> Expr:
    """Load a vector, reading only the first `width` of `count` elements. The others repeat.

    The reverse of what `store_vector` does with a partial vector.
    """
    if width == count:
        return load_vector(buffer, offset, count)
    pieces, piece, done = [], 0, 0
    while done < width:
        piece = 1 << ((width - done).bit_length() - 1)
        pieces.append(load_vector(buffer, offset + done, piece))
        done += piece
    # A shuffle has no more results than operands.
    pieces += pieces[-1:] * ceil_div(count - width, piece)
    return T.Shuffle(pieces, [T.int32(min(i, width - 1)) for i in range(count)])


def emit_narrow_store(
    isa: Isa,
    epilogue: Epilogue,
    reals: list[Expr],
    buffer: Buffer,
    offsets: list[Expr],
    blocks: int,
    width: int,
) -> None:
    """Round, clamp and store four float32 vectors, none NaN, in channel order.

    `reals` are the `blocks` vectors of each pixel, pixel by pixel; or of each set of pixels.
    `offsets` are the targets of the pixels, or of the sets, of which `width` channels exist.
    Vectors without a pixel are not stored.
    """
    lanes, count = isa.accumulator_lanes, len(reals) * isa.accumulator_lanes // len(offsets) // 4
    packed = emit_packed(isa, epilogue, reals + reals[:1] * (PACKED - len(reals)))
    if blocks == PACKED and len(offsets) == 1:
        store_vector(buffer, packed, offsets[0], PACKED * lanes, width)
        return
    # Gather the words of each pixel once. Storing them one by one costs as much as four vectors.
    order = np.resize(word_order(lanes, blocks), lanes)
    words = emit_word_shuffle([T.reinterpret(vector("float32", lanes), packed)], order)
    for pixel, offset in enumerate(offsets):
        own = T.Shuffle([words], [T.int32(pixel * count + i) for i in range(count)])
        own = T.reinterpret(vector(epilogue.dtype, count * 4), own)
        store_vector(buffer, own, offset, count * 4, width)


def emit_packed(isa: Isa, epilogue: Epilogue, reals: list[Expr]) -> Expr:
    """Round, clamp and pack four float32 vectors, none NaN, to bytes in channel order."""
    lanes, narrowing = isa.accumulator_lanes, isa.narrowing
    assert isinstance(narrowing, Narrowing)
    low, high = epilogue.bounds
    zero_point = epilogue.zero_point
    integers = []
    for real in reals:
        if low != INTEGER_LIMITS[epilogue.dtype][0]:
            real = T.max(real, constant("float32", low - zero_point, lanes))
        # The conversion gives the least integer for numbers above 2**31. So the upper bound is
        # applied before it, unless nothing can be that large. The packs saturate at the limits of
        # the dtype.
        if not epilogue.is_small or high != INTEGER_LIMITS[epilogue.dtype][1]:
            real = T.min(real, constant("float32", high - zero_point, lanes))
        integers.append(narrowing.round(real, lanes))
    halves = []
    for i in (0, 2):
        half = narrowing.pack_words(integers[i], integers[i + 1], lanes)
        if zero_point:
            half = narrowing.add_words(half, constant("int16", zero_point, 2 * lanes), lanes)
        halves.append(half)
    return narrowing.pack_bytes(halves[0], halves[1], epilogue.dtype, lanes)
