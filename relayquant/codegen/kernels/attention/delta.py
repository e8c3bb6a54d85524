"""The gated delta rule -> its kernel (`qnn.gated_delta`).

    S' = decay * S + key * change,  change = strength * (value - decay * key^T S)
    result = query^T S'

Columns of the state do not depend on each other. A task takes some columns of one head through all
rows, and its part of the state stays in the nearest cache. Each row reads it twice: once for the
change, and once to change and read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_vectors,
    broadcast,
    build_kernel,
    constant,
    emit_shared_loop,
    flat_view,
    load_vector,
    name_extents,
    store_vector,
)
from relayquant.codegen.kernels.floating.tile import Buffer, Expr, FloatIsa

#: Most vectors of columns that a task takes, and sums of each that are added up in parallel.
VECTORS, SUMS = 4, 2
#: Rows of the state in one step of a loop.
STEP = 4


@dataclass(frozen=True)
class Delta:
    """A gated delta rule.

    Attributes:
        extents: Sequences, rows, value heads and value width. Sequences or rows are None if only
            the run knows them.
        groups, keys: Number of key heads, and their width.
        is_tiled: Whether value head h reads key head h % groups.
    """

    extents: tuple[int | None, int | None, int, int]
    groups: int
    keys: int
    is_tiled: bool

    def find_group(self, head: Expr) -> Expr:
        """Return the key head that a value head reads."""
        if self.is_tiled:
            return T.floormod(head, T.int64(self.groups))
        return T.floordiv(head, T.int64(self.extents[2] // self.groups))


def make_delta(spec: Delta, isa: FloatIsa) -> PrimFunc:
    """Make PrimFunc(query, key, value, decay, strength, state, positions, counts, y, next)."""

    def body() -> None:
        batch, rows, heads, width = name_extents(spec.extents)
        keys, values = (batch, rows, spec.groups, spec.keys), (batch, rows, heads, width)
        shapes = {
            "query": keys, "key": keys, "value": values, "decay": values[:3],
            "strength": values[:3], "state": (batch, heads, spec.keys, width),
            "positions": (batch,), "counts": (batch,), "y": values,
            "next": (batch, heads, spec.keys, width),
        }  # fmt: skip
        kinds = {"positions": "int32", "counts": "int64"}
        arguments = {
            name: T.arg(name, T.Buffer(shape, kinds.get(name, "float32")))
            for name, shape in shapes.items()
        }
        tensors = {name: flat_view(buffer) for name, buffer in arguments.items()}
        lanes, vectors = choose_columns(width, isa.lanes)
        blocks = width // (lanes * vectors)

        def emit_task(index: Expr) -> None:
            line, block = T.floordiv(index, blocks), T.floormod(index, blocks)
            task = Columns(spec, tensors, rows, line, block * (lanes * vectors), lanes, vectors)
            task.emit()

        work = batch * rows * (heads * spec.keys * width * 2)
        emit_shared_loop(batch * heads * blocks, work >= PARALLEL_THRESHOLD, emit_task)

    return build_kernel("gated_delta", body)


def choose_columns(width: int, lanes: int) -> tuple[int, int]:
    """Return the length of a vector and the number of vectors that a task takes."""
    while width % lanes:
        lanes //= 2
    vectors = next(count for count in range(VECTORS, 0, -1) if width % (count * lanes) == 0)
    return lanes, vectors


@dataclass(frozen=True, eq=False)
class Columns:
    """One task: `vectors` of columns from `first` on, of head `line` of all sequences' heads."""

    spec: Delta
    tensors: dict[str, Buffer]
    rows: Expr
    line: Expr
    first: Expr
    lanes: int
    vectors: int

    def emit(self) -> None:
        """Emit all rows."""
        heads, width = self.spec.extents[2:]
        sequence, head = T.floordiv(self.line, heads), T.floormod(self.line, heads)
        self.copy_state(sequence)
        group = T.bind(self.spec.find_group(T.Cast("int64", head)))
        count = T.bind(self.tensors["counts"][sequence])
        zero = constant("float32", 0, self.lanes)
        with T.serial(self.rows) as row:
            at = T.bind(T.Cast("int64", sequence) * self.rows + row)
            start = T.bind((at * heads + head) * width + self.first)
            with T.If(T.Cast("int64", row) < count):
                with T.Then():
                    self.emit_row(at * heads + head, (at * self.spec.groups + group), start)
                with T.Else():
                    for i in range(self.vectors):
                        store_vector(self.tensors["y"], zero, start + i * self.lanes, self.lanes)

    def copy_state(self, sequence: Expr) -> None:
        """Begin with the state before, or with zeros."""
        goes_on = T.bind(self.tensors["positions"][sequence] > T.int32(0))
        zero = constant("float32", 0, self.lanes)
        with T.serial(self.spec.keys) as k:
            for i in range(self.vectors):
                place = self.place(k, i)
                with T.If(goes_on):
                    with T.Then():
                        before = load_vector(self.tensors["state"], place, self.lanes)
                        store_vector(self.tensors["next"], before, place, self.lanes)
                    with T.Else():
                        store_vector(self.tensors["next"], zero, place, self.lanes)

    def place(self, k: Expr, i: int) -> Expr:
        """Return the place of vector i in row k of the state."""
        width = self.spec.extents[3]
        return (self.line * self.spec.keys + k) * width + self.first + i * self.lanes

    def emit_row(self, number: Expr, group: Expr, start: Expr) -> None:
        """Emit row `number` of decay and strength, row `group` of keys, results from `start` on."""
        tensors, lanes = self.tensors, self.lanes
        decay = T.bind(broadcast(tensors["decay"][number], lanes))
        strength = T.bind(broadcast(tensors["strength"][number], lanes))
        key, query = (T.bind(group * self.spec.keys) for _ in range(2))
        seen = self.sum_up(
            lambda k, i: (
                load_vector(tensors["next"], self.place(k, i), lanes)
                * broadcast(tensors["key"][key + k], lanes)
            )
        )
        changes = []
        for i, total in enumerate(seen):
            value = load_vector(tensors["value"], start + i * lanes, lanes)
            changes.append(T.bind(strength * (value - decay * total)))

        def change_and_read(k: Expr, i: int) -> Expr:
            place = self.place(k, i)
            before = load_vector(tensors["next"], place, lanes)
            own = broadcast(tensors["key"][key + k], lanes)
            state = T.bind(decay * before + own * changes[i])
            store_vector(tensors["next"], state, place, lanes)
            return state * broadcast(tensors["query"][query + k], lanes)

        for i, total in enumerate(self.sum_up(change_and_read)):
            store_vector(tensors["y"], total, start + i * lanes, lanes)

    def sum_up(self, emit: Callable[[Expr, int], Expr]) -> Sequence[Expr]:
        """Emit the sums over k of emit(k, i) for each vector i."""
        lanes, keys = self.lanes, self.spec.keys
        zero = constant("float32", 0, lanes)
        totals = [alloc_vectors(SUMS, lanes, "float32") for _ in range(self.vectors)]
        for own in totals:
            for total in own:
                store_vector(total, zero, 0, lanes)

        def add_row(k: Expr, part: int) -> None:
            for i, own in enumerate(totals):
                total = load_vector(own[part], 0, lanes)
                store_vector(own[part], total + emit(k, i), 0, lanes)

        if keys >= STEP:
            with T.serial(keys // STEP) as step:
                for part in range(STEP):
                    add_row(step * STEP + part, part % SUMS)
        for k in range(keys - keys % STEP, keys):
            add_row(k, k % SUMS)
        return [T.bind(reduce(add, [load_vector(t, 0, lanes) for t in own])) for own in totals]
