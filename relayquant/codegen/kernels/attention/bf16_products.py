"""Products of blocks of attention in bfloat16 -> their statements, on tiles or on vectors.

    scores      32 keys x 32 rows         A: keys as they are stored    B: pairs of query numbers
    result^T    32 numbers x 32 rows      A: values^T                   B: pairs of powers

Both ways read the same memory. Tiles multiply two of A by two of B in each step. Vectors hold 16
rows; a register tile has 8 keys, or 8 numbers, and reads a pair of each for all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    broadcast,
    constant,
    load_vector,
    store_vector,
)
from relayquant.codegen.kernels.floating.tile import Buffer, Expr
from relayquant.codegen.kernels.isa.bf16 import Bf16Isa
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS, MoveTile, Tiles

#: Rows, keys or numbers of two tiles. A tile has half as many pairs.
SIDE = 32
#: Rows of a vector, and of a tile; elements of a tile of bfloat16.
LANES, TILE = 16, 512
#: Keys or numbers of a register tile of vectors. It has a sum of each for two vectors of rows,
#: which is more than are in flight.
HEIGHT = 8


@dataclass(frozen=True, eq=False)
class RoundedBlocks:
    """What the products of a task read and write: bits of bfloat16, and float32.

    Attributes:
        width: Numbers of a key, of a value and of a row.
        query: (tile of rows, step of 32 numbers): tiles of 16 pairs x 16 rows.
        keys: As in the cache.
        values: (step of 32 keys, tile of numbers): tiles of 16 numbers x 32 keys.
        scores: (key, 32 rows), float32.
        powers: (pair of keys, 32 rows): pairs.
        sums: (32 rows, step of 32 numbers): blocks of 32 numbers x 32 rows, float32.
    """

    width: int
    query: Buffer
    keys: Buffer
    values: Buffer
    scores: Buffer
    powers: Buffer
    sums: Buffer

    @property
    def steps(self) -> int:
        """Steps of 32 numbers."""
        return self.width // SIDE


class Products(ABC):
    """Statements of the products of a task."""

    def __init__(self, isa: Bf16Isa, blocks: RoundedBlocks) -> None:
        self.isa, self.blocks = isa, blocks

    @abstractmethod
    def emit_scores(self, part: Expr, steps: Expr) -> None:
        """Store the scores of 32 rows, and what nothing reads for missing keys."""

    @abstractmethod
    def emit_values(self, part: Expr, steps: Expr) -> None:
        """Add the weighted values to the sums of 32 rows."""

    @abstractmethod
    def finish(self) -> None:
        """Emit what follows the last product."""


class TileProducts(Products):
    """Products on tiles, which the task configures."""

    def __init__(self, isa: Bf16Isa, blocks: RoundedBlocks) -> None:
        super().__init__(isa, blocks)
        assert isa.unit is not None
        unit = isa.unit
        self.registers: Tiles = unit.configure([(unit.rows, unit.row_bytes)] * unit.registers)

    def emit_scores(self, part: Expr, steps: Expr) -> None:
        blocks, registers = self.blocks, self.registers
        with T.serial(steps) as block:

            def load_keys(tile: int, i: int, step: Expr) -> None:
                at = (block * SIDE + i * LANES) * blocks.width + step * SIDE
                registers.load(tile, blocks.keys, at, blocks.width)

            def load_query(tile: int, i: int, step: Expr) -> None:
                at = ((part * 2 + i) * blocks.steps + step) * TILE
                registers.load(tile, blocks.query, at, SIDE)

            for i in range(4):
                registers.clear(i)
            self.emit_products(blocks.steps, load_keys, load_query)
            self.each_sum(registers.store, blocks.scores, block)

    def emit_values(self, part: Expr, steps: Expr) -> None:
        blocks, registers = self.blocks, self.registers
        with T.serial(blocks.steps) as block:

            def load_values(tile: int, i: int, step: Expr) -> None:
                at = ((step * blocks.steps + block) * 2 + i) * TILE
                registers.load(tile, blocks.values, at, SIDE)

            def load_powers(tile: int, i: int, step: Expr) -> None:
                registers.load(tile, blocks.powers, step * (2 * TILE) + i * SIDE, 2 * SIDE)

            at = part * blocks.steps + block
            self.each_sum(registers.load, blocks.sums, at)
            self.emit_products(steps, load_values, load_powers)
            self.each_sum(registers.store, blocks.sums, at)

    def finish(self) -> None:
        self.registers.release()

    def emit_products(
        self,
        steps: Expr | int,
        load_a: Callable[[int, int, Expr], None],
        load_b: Callable[[int, int, Expr], None],
    ) -> None:
        """Add to the tiles 0 to 3 the products of two times two tiles in each step."""
        with T.serial(steps) as step:
            for i in range(2):
                load_a(4 + i, i, step)
                load_b(6 + i, i, step)
            for i, j in product(range(2), repeat=2):
                self.registers.multiply(2 * i + j, 4 + i, 6 + j, (BF16_BITS, BF16_BITS))

    def each_sum(self, move: MoveTile, buffer: Buffer, at: Expr) -> None:
        """Load or store the tiles 0 to 3, from the block of 32 x 32 number `at` on."""
        for i, j in product(range(2), repeat=2):
            move(2 * i + j, buffer, at * (SIDE * SIDE) + i * (LANES * SIDE) + j * LANES, SIDE)


class VectorProducts(Products):
    """Products on vectors of 16 rows."""

    def emit_scores(self, part: Expr, steps: Expr) -> None:
        blocks = self.blocks
        with T.serial(steps * (SIDE // HEIGHT)) as index:
            sums = self.alloc_sums(None, T.int64(0))
            with T.grid(blocks.steps, LANES) as (step, pair):
                rows = [
                    load_vector(
                        blocks.query,
                        ((part * 2 + i) * blocks.steps + step) * TILE + pair * SIDE,
                        SIDE,
                    )
                    for i in range(2)
                ]
                first = index * (HEIGHT * blocks.width) + step * SIDE + pair * 2
                self.emit_dots(sums, blocks.keys, first, blocks.width, rows)
            self.store_sums(sums, blocks.scores, index * (HEIGHT * SIDE))

    def emit_values(self, part: Expr, steps: Expr) -> None:
        blocks = self.blocks
        with T.serial(blocks.width // HEIGHT) as index:
            number = index * HEIGHT
            tile, own = T.floordiv(number, LANES), T.floormod(number, LANES)
            at = (part * blocks.width + number) * SIDE
            sums = self.alloc_sums(blocks.sums, at)
            with T.grid(steps, LANES) as (step, pair):
                powers = step * (2 * TILE) + pair * (2 * SIDE)
                rows = [load_vector(blocks.powers, powers + i * SIDE, SIDE) for i in range(2)]
                first = (step * (2 * blocks.steps) + tile) * TILE + own * SIDE + pair * 2
                self.emit_dots(sums, blocks.values, first, SIDE, rows)
            self.store_sums(sums, blocks.sums, at)

    def finish(self) -> None:
        """Nothing follows."""

    def alloc_sums(self, start: Buffer | None, at: Expr) -> list[list[Buffer]]:
        """Sums of each of `HEIGHT` keys or numbers for two vectors of rows. They begin at 0, or at
        the sums in the buffer `start`.
        """
        sums = [alloc_vectors(2, LANES, "float32") for _ in range(HEIGHT)]
        for i, own in enumerate(sums):
            for j, each in enumerate(own):
                value = constant("float32", 0, LANES)
                if start is not None:
                    value = load_vector(start, at + i * SIDE + j * LANES, LANES)
                store_vector(each, value, 0, LANES)
        return sums

    def store_sums(self, sums: list[list[Buffer]], buffer: Buffer, at: Expr) -> None:
        for i, own in enumerate(sums):
            for j, each in enumerate(own):
                store_vector(buffer, load_vector(each, 0, LANES), at + i * SIDE + j * LANES, LANES)

    def emit_dots(
        self, sums: list[list[Buffer]], pairs: Buffer, first: Expr, stride: int, rows: list[Expr]
    ) -> None:
        """Add the products of a pair of each key or number, `stride` elements apart, and of the
        pairs of all rows.
        """
        for i, own in enumerate(sums):
            word = T.reinterpret("int32", load_vector(pairs, first + i * stride, 2))
            for each, row in zip(own, rows, strict=True):
                before = load_vector(each, 0, LANES)
                store_vector(each, self.isa.dot(before, broadcast(word, LANES), row), 0, LANES)
