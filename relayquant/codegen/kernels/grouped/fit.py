"""Grouped weights and data -> fitted codes and scales: the column by column steps, as TIR.

The columns of a block are fixed one after the other, for `STRIP` rows of the weight (outputs) at a
time, so all values they share stay in the cache. The caller adds the effect of a block on the other
blocks as one product. Arrays have columns first, (K, N), so rows of the weight are neighbours in
memory. N is a multiple of `STRIP`. Sums consist of several chains of multiply-adds, fused if the
target has them, so their last bits depend on the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    alloc_vectors,
    broadcast,
    build_kernel,
    constant,
    declare_arguments,
    load_vector,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.floating.tile import Buffer, Expr, FloatIsa

#: Rows of a weight that are processed together.
STRIP = 32
#: Number of sums that are added to in turn, so that no addition waits for the one before.
CHAINS = 8
#: Scales up to this size have no inverse.
SMALLEST_SCALE = 1e-30


@dataclass(frozen=True)
class GroupFitSpec:
    """Dtypes of weights and scales while they are fitted. Sizes are arbitrary."""

    dtype: str = "float32"
    scale_dtype: str = "float32"


def make_group_rounding(spec: GroupFitSpec, isa: FloatIsa, name: str = "round_groups") -> PrimFunc:
    """Make PrimFunc(factor, group, scale, zero_point, most, weight, levels, changes, work).

    It computes codes of a block of columns in closed form. Each column compensates the errors of
    the columns before it. For column j, with u = factor:

        rest = weight[j] - sum of u[j, k] * changes[k] for all k < j
        levels[j] = clip(rint(rest / s) + z, 0, most) - z
        changes[j] = (rest - levels[j] * s) / u[j, j]

    s and z are scale and zero point of `group[j]`.

    Arguments of the kernel: factor (B, B), lower triangular; group int32 (B,); scale (G, N) in its
    dtype; zero_point (G, N); most (1,), the highest code; weight (B, N); levels and changes (B, N),
    written; work (B, STRIP), scratch.
    """

    def body() -> None:
        columns, groups, rows = (tirx.Var(each, "int64") for each in ("b", "g", "n"))
        declared: list[Buffer] = declare_arguments(
            ("factor", (columns, columns), spec.dtype),
            ("group", (columns,), "int32"),
            ("scale", (groups, rows), spec.scale_dtype),
            ("zero_point", (groups, rows), spec.dtype),
            ("most", (1,), spec.dtype),
            ("weight", (columns, rows), spec.dtype),
            ("levels", (columns, rows), spec.dtype),
            ("changes", (columns, rows), spec.dtype),
            ("work", (columns, STRIP), spec.dtype),
        )
        factor, group, scale, zero, most, weight, levels, changes, work = declared
        strip = Strip(spec, isa)
        with T.serial(T.floordiv(rows, STRIP)) as index:
            start = T.bind(index * STRIP)
            with T.serial(columns) as j:
                sums = strip.emit_dots(factor, j * columns, work, 0, j)
                base = T.bind(T.Cast("int64", group[j]) * rows + start)
                inverse = T.bind(getattr(T, spec.dtype)(1) / factor[j * columns + j])
                for lane, total in zip(strip.offsets, sums, strict=True):
                    at = j * rows + start + lane
                    rest = T.bind(strip.load(weight, at) - total)
                    step = T.bind(strip.load_scale(scale, base + lane))
                    zeros = strip.load(zero, base + lane)
                    level = T.bind(strip.round(rest / step, zeros, most))
                    change = T.bind((rest - level * step) * broadcast(inverse, strip.lanes))
                    store_vector(levels, level, at, strip.lanes)
                    store_vector(changes, change, at, strip.lanes)
                    store_vector(work, change, j * STRIP + lane, strip.lanes)

    return build_kernel(name, body)


def make_group_improvement(
    spec: GroupFitSpec, isa: FloatIsa, name: str = "improve_groups"
) -> PrimFunc:
    """Make PrimFunc(hessian, gradient, starts, group, order, zero_point, most, weight, scale,
    levels, left, moved, work).

    It improves scales and then codes of a block of groups. Each gets the value with the least
    error, given all others. With h = hessian and d the sum of all changes of level * scale in the
    block so far, the current gradient is the given gradient minus h d. First, for each group in
    turn, with columns p:

        scale += (gradient[p] . levels[p]) / (levels[p] h[p, p] levels[p])

    rounded to the dtype of the scale. A scale stays if the new one would not be finite or would
    have no inverse. Then for each column j, in the order of `order`:

        levels[j] = clip(rint(levels[j] + gradient[j] / (h[j, j] * s)) + z, 0, most) - z

    Arguments of the kernel: hessian (B, B), symmetric; gradient, weight and levels (B, N), levels
    changed; starts int32 (G + 1,), where groups begin; group int32 (B,), group of each column;
    order int32 (B,); zero_point (G, N); most (1,); scale (G, N), changed; left (B, N), weight -
    levels * scale, written; moved and work (B, STRIP), scratch.
    """

    def body() -> None:
        columns, groups, rows = (tirx.Var(each, "int64") for each in ("b", "g", "n"))
        ends = tirx.Var("ends", "int64")
        declared: list[Buffer] = declare_arguments(
            ("hessian", (columns, columns), spec.dtype),
            ("gradient", (columns, rows), spec.dtype),
            ("starts", (ends,), "int32"),
            ("group", (columns,), "int32"),
            ("order", (columns,), "int32"),
            ("zero_point", (groups, rows), spec.dtype),
            ("most", (1,), spec.dtype),
            ("weight", (columns, rows), spec.dtype),
            ("scale", (groups, rows), spec.scale_dtype),
            ("levels", (columns, rows), spec.dtype),
            ("left", (columns, rows), spec.dtype),
            ("moved", (columns, STRIP), spec.dtype),
            ("work", (columns, STRIP), spec.dtype),
        )
        strip = Strip(spec, isa)
        slope, curve = strip.allocate(), strip.allocate()
        improvement = GroupImprovement(strip, columns, rows, slope, curve, *declared)
        with T.serial(T.floordiv(rows, STRIP)) as index:
            start = T.bind(index * STRIP)
            with T.serial(columns) as j:
                for lane in strip.offsets:
                    value = strip.load(improvement.levels, j * rows + start + lane)
                    store_vector(improvement.work, value, j * STRIP + lane, strip.lanes)
            with T.serial(groups) as g:
                improvement.emit_scale(g, start)
            with T.serial(columns) as i:
                improvement.emit_code(T.bind(T.Cast("int64", improvement.order[i])), start)
            with T.serial(columns) as j:
                improvement.emit_results(j, start)

    return build_kernel(name, body)


@dataclass(frozen=True)
class GroupImprovement:
    """The steps of `make_group_improvement` for one strip of rows, from `start` on.

        levels -> work | of each group: scale, moved | of each column: work, moved | -> levels, left

    `work` holds the codes of the strip and `moved` how far codes and scales have moved the weight.
    """

    strip: Strip
    columns: Expr
    rows: Expr
    slope: Buffer  #: of the error along a scale; then how far the scale moves
    curve: Buffer  #: of the error along a scale
    hessian: Buffer
    gradient: Buffer
    starts: Buffer
    group: Buffer
    order: Buffer
    zero: Buffer
    most: Buffer
    weight: Buffer
    scale: Buffer
    levels: Buffer
    left: Buffer
    moved: Buffer
    work: Buffer

    def emit_scale(self, index: Expr, start: Expr) -> None:
        """Emit the best scale of a group, given its codes, and what it moves."""
        strip, lanes = self.strip, self.strip.lanes
        first, end = (T.bind(T.Cast("int64", self.starts[index + i])) for i in (0, 1))
        self.emit_slope_and_curve(first, end, start)
        for lane in strip.offsets:
            self.emit_scale_step(index * self.rows + start + lane, lane)
        with T.serial(end - first) as i:
            at = T.bind((first + i) * STRIP)
            for lane in strip.offsets:
                value = strip.load(self.work, at + lane) * strip.load(self.slope, lane)
                store_vector(self.moved, value, at + lane, lanes)

    def emit_slope_and_curve(self, first: Expr, end: Expr, start: Expr) -> None:
        """Emit the derivatives of the error along the scale of columns first .. end."""
        strip, lanes = self.strip, self.strip.lanes
        for lane in strip.offsets:
            for total in (self.slope, self.curve):
                store_vector(total, strip.zeros, lane, lanes)
        with T.serial(end - first) as i:
            j = T.bind(first + i)

            def add(total: Buffer, values: list[Expr]) -> None:
                for lane, value in zip(strip.offsets, values, strict=True):
                    level = strip.load(self.work, j * STRIP + lane)
                    store_vector(total, strip.load(total, lane) + value * level, lane, lanes)

            add(self.slope, self.emit_gradient(j, start, first))
            add(
                self.curve,
                strip.emit_dots(self.hessian, j * self.columns, self.work, first, end - first),
            )

    def emit_gradient(self, j: Expr, start: Expr, known: Expr) -> list[Expr]:
        """Emit the current gradient of column j, if the first `known` columns have moved."""
        sums = self.strip.emit_dots(self.hessian, j * self.columns, self.moved, 0, known)
        at = j * self.rows + start
        return [
            self.strip.load(self.gradient, at + lane) - total
            for lane, total in zip(self.strip.offsets, sums, strict=True)
        ]

    def emit_scale_step(self, at: Expr, lane: int) -> None:
        """Emit a vector of new scales, rounded to their dtype; `slope` is then how far each moves.

        A scale stays if the new one would not be finite or would have no inverse.
        """
        spec, strip, lanes = self.strip.spec, self.strip, self.strip.lanes
        old = T.bind(strip.load_scale(self.scale, at))
        bent = T.bind(strip.load(self.curve, lane))
        best = strip.load(self.slope, lane) / bent
        wanted = old + T.Select(bent > strip.zeros, best, strip.zeros)
        found = T.bind(T.Cast(vector(spec.scale_dtype, lanes), wanted))
        value = T.bind(T.Cast(vector(spec.dtype, lanes), found))
        size = T.bind(T.abs(value))
        largest = float(np.finfo(spec.scale_dtype).max)
        is_fit = T.bitwise_and(
            size > constant(spec.dtype, SMALLEST_SCALE, lanes),
            size <= constant(spec.dtype, largest, lanes),
        )
        value = T.bind(T.Select(is_fit, value, old))
        store_vector(self.scale, T.Cast(vector(spec.scale_dtype, lanes), value), at, lanes)
        store_vector(self.slope, value - old, lane, lanes)

    def emit_code(self, j: Expr, start: Expr) -> None:
        """Emit the best codes of column j, given all others, and what they move."""
        strip, lanes = self.strip, self.strip.lanes
        slopes = self.emit_gradient(j, start, self.columns)
        base = T.bind(T.Cast("int64", self.group[j]) * self.rows + start)
        bend = T.bind(self.hessian[j * self.columns + j])
        for lane, own in zip(strip.offsets, slopes, strict=True):
            at = j * STRIP + lane
            step = T.bind(strip.load_scale(self.scale, base + lane))
            level = T.bind(strip.load(self.work, at))
            found = own / (broadcast(bend, lanes) * step) + level
            found = T.bind(strip.round(found, strip.load(self.zero, base + lane), self.most))
            store_vector(self.work, found, at, lanes)
            value = strip.load(self.moved, at) + (found - level) * step
            store_vector(self.moved, value, at, lanes)

    def emit_results(self, j: Expr, start: Expr) -> None:
        """Emit the codes of column j and what they leave of its weight."""
        strip, lanes = self.strip, self.strip.lanes
        base = T.bind(T.Cast("int64", self.group[j]) * self.rows + start)
        for lane in strip.offsets:
            at = j * self.rows + start + lane
            level = T.bind(strip.load(self.work, j * STRIP + lane))
            store_vector(self.levels, level, at, lanes)
            value = level * strip.load_scale(self.scale, base + lane)
            store_vector(self.left, strip.load(self.weight, at) - value, at, lanes)


class Strip:
    """The vectors of `STRIP` neighbouring rows, in a kernel that is being built."""

    def __init__(self, spec: GroupFitSpec, isa: FloatIsa) -> None:
        self.spec = spec
        self.lanes = isa.lanes if spec.dtype == "float32" else max(isa.lanes // 2, 1)
        self.zeros = constant(spec.dtype, 0, self.lanes)
        #: Start of each vector.
        self.offsets = range(0, STRIP, self.lanes)
        self.turns = max(CHAINS // len(self.offsets), 1)
        self.sums = [
            alloc_vectors(len(self.offsets), self.lanes, spec.dtype) for _ in range(self.turns)
        ]

    def allocate(self) -> Buffer:
        """Allocate a number for each row."""
        return T.alloc_buffer((STRIP,), self.spec.dtype)

    def load(self, buffer: Buffer, at: Expr) -> Expr:
        return load_vector(buffer, at, self.lanes)

    def load_scale(self, scale: Buffer, at: Expr) -> Expr:
        """Load scales in the dtype of the computation."""
        value = load_vector(scale, at, self.lanes)
        if self.spec.scale_dtype == self.spec.dtype:
            return value
        return T.Cast(vector(self.spec.dtype, self.lanes), value)

    def round(self, value: Expr, zero_point: Expr, most: Buffer) -> Expr:
        """Round to integers that codes can represent: clip(rint(v), -z, most - z)."""
        zero_point = T.bind(zero_point)
        low = self.zeros - zero_point
        high = broadcast(most[0], self.lanes) - zero_point
        return T.min(T.max(T.nearbyint(value), low), high)

    def emit_dots(
        self, matrix: Buffer, row: Expr, values: Buffer, first: Expr, count: Expr
    ) -> list[Expr]:
        """Emit the sum of matrix[row + k] * values[k] for `count` columns k from `first` on.

        Returns:
            One vector of sums for each of `offsets`.
        """
        lanes = self.lanes
        for chain in self.sums:
            for total in chain:
                store_vector(total, self.zeros, 0, lanes)

        def emit(k: Expr, chain: list[Buffer]) -> None:
            factor = T.bind(broadcast(matrix[row + k], lanes))
            for total, lane in zip(chain, self.offsets, strict=True):
                product = factor * self.load(values, k * STRIP + lane)
                store_vector(total, load_vector(total, 0, lanes) + product, 0, lanes)

        with T.serial(T.floordiv(count, self.turns)) as i:
            start = T.bind(first + i * self.turns)
            for turn, chain in enumerate(self.sums):
                emit(start + turn, chain)
        with T.serial(T.floormod(count, self.turns)) as i:
            emit(first + count - 1 - i, self.sums[0])
        totals = []
        for i in range(len(self.offsets)):
            parts = [load_vector(chain[i], 0, lanes) for chain in self.sums]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
            totals.append(T.bind(parts[0]))
        return totals
