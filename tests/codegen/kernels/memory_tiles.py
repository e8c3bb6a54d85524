"""A matrix unit whose tiles are in memory, with loops over their elements: it runs on any CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS, MatrixUnit, Question, Tiles


@dataclass(frozen=True)
class MemoryUnit(MatrixUnit):
    """A matrix unit whose tiles are in memory."""

    def configure(self, shapes: Sequence[tuple[int, int]]) -> Tiles:
        return MemoryTiles(
            [(T.alloc_buffer((self.rows * size,), "int8"), rows, size) for rows, size in shapes]
        )


class MemoryTiles(Tiles):
    def __init__(self, tiles) -> None:
        self.tiles = tiles

    def view(self, tile: int, dtype: str):
        memory, rows, size = self.tiles[tile]
        count = size // {"int32": 4, "float32": 4, BF16_BITS: 2}.get(dtype, 1)
        return T.decl_buffer((16 * count,), dtype, data=memory.data), rows, count

    def clear(self, tile):
        memory, rows, count = self.view(tile, "int32")
        with T.serial(rows * count) as i:
            T.buffer_store(memory, T.int32(0), [i])

    def load(self, tile, buffer, at, distance):
        memory, rows, size = self.view(tile, buffer.dtype)
        with T.grid(rows, size) as (r, i):
            T.buffer_store(memory, buffer[at + r * distance + i], [r * size + i])

    stream = load

    def store(self, tile, buffer, at, distance):
        memory, rows, size = self.view(tile, buffer.dtype)
        with T.grid(rows, size) as (r, i):
            T.buffer_store(buffer, memory[r * size + i], [at + r * distance + i])

    def multiply(self, sums, a, b, dtypes):
        is_float = BF16_BITS in dtypes
        c, rows, lanes = self.view(sums, "float32" if is_float else "int32")
        x, _, size = self.view(a, dtypes[0])
        w, words, row = self.view(b, dtypes[1])
        count = row // lanes
        assert words * count == size
        with T.grid(rows, words, count, lanes) as (r, word, i, n):
            left, right = x[r * size + word * count + i], w[word * row + n * count + i]
            product = widen(left, is_float) * widen(right, is_float)
            T.buffer_store(c, c[r * lanes + n] + product, [r * lanes + n])

    def release(self):
        pass


def widen(value, is_float: bool):
    """An integer as int32, or the bits of a bfloat16 as float32."""
    if not is_float:
        return T.Cast("int32", value)
    return T.reinterpret("float32", T.shift_left(T.Cast("uint32", value), T.uint32(16)))


class Refusal(Question):
    @property
    def code(self) -> str:
        return "define linkonce_odr hidden i32 @refuse() { ret i32 0 }"
