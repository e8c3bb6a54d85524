"""The generic schedule of one TIR function, by rules that look only at loops and accesses.

It inlines, tiles, vectorizes and parallelizes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad
from tvm.target import Target

from relayquant.codegen.kernels.emit import LEAST_EXTENT, ceil_div
from relayquant.codegen.kernels.isa.target import read_vector_bits
from relayquant.codegen.schedule.block_analysis import (
    SPATIAL,
    BlockInfo,
    Unschedulable,
    constant,
    is_contiguous,
    is_copy,
    is_expensive,
    is_identity,
    largest_divisor,
    list_conditions,
    list_loads,
    list_nodes,
    list_position_loads,
    list_repeating,
    mentions,
    pick_width,
    read_block,
    read_choice,
    tirx_bits,
)
from relayquant.codegen.schedule.flat_positions import FUSED_AXES

#: Below this many element operations, waking threads costs more than it gains: about 10
#: microseconds of vector operations.
PARALLEL_WORK = 1 << 17
#: Largest expression, in nodes, into which producers are inlined. Bounds a chain that doubles at
#: each step.
INLINE_NODES = 400
#: Longest axis that is kept whole in a local buffer when no vector divides it.
LONGEST_ROW = 1024
#: Accumulator registers of one tile. AVX-512 and Arm have 32 vector registers, others 16.
TILE_REGISTERS = {512: 12, 256: 6, 128: 8}
#: Most sections of an axis that is split where the operands of a concatenation change, fewest
#: elements of their vectors, and the annotation of the loop over parts: elements of one part.
MOST_SECTIONS, LEAST_LANES, PART_SIZE = 64, 4, "relayquant.part_size"
#: comparison that a guard may be -> its value for two numbers
COMPARISONS = {
    tirx.LT: operator.lt,
    tirx.LE: operator.le,
    tirx.GT: operator.gt,
    tirx.GE: operator.ge,
}
#: Enough tasks to split evenly over the threads of a machine.
PARALLEL_TASKS = 64


class FunctionScheduler:
    """Applies the rules to the blocks of one function, in program order."""

    def __init__(self, schedule: s_tir.Schedule, target: Target) -> None:
        self.sch = schedule
        self.bits = max(read_vector_bits(target), 128) if target.kind.name == "llvm" else 128
        self.registers = TILE_REGISTERS.get(self.bits, 8)

    def run(self) -> None:
        """Inline, then schedule each remaining block."""
        sch = self.sch
        root = sch.get_sblock("root")
        if not sch.get_child_blocks(root):
            raise Unschedulable("has no blocks: a handwritten kernel")
        self.outputs = list(sch.mod["main"].params)
        self.inline_producers(root)
        blocks = sch.get_child_blocks(root)
        done: set[str] = set()
        for block in blocks:
            name = sch.get(block).name_hint
            if name in done:
                continue
            info = read_block(sch.get(block))
            if not info.reduced:
                self.schedule_injective(block, info)
            else:
                done |= self.schedule_reduction(block, info)

    def info(self, block: s_tir.schedule.SBlockRV) -> BlockInfo:
        return read_block(self.sch.get(block))

    # ---- inlining ------------------------------------------------------------------------------

    def inline_producers(self, root: s_tir.schedule.SBlockRV) -> None:
        """Inline cheap intermediate values into the blocks that read them."""
        for block in self.sch.get_child_blocks(root):
            if self.may_inline(block):
                self.sch.compute_inline(block)

    def may_inline(self, block: s_tir.schedule.SBlockRV) -> bool:
        """Whether `block` can be inlined into all its consumers without repeating costly work."""
        node = self.sch.get(block)
        if not node.iter_vars:
            return False
        info = read_block(node)
        if info.reduced or not info.simple:
            return False
        if any(info.write.buffer.same_as(p) for p in self.outputs):
            return False
        if not is_identity(info):
            return False
        consumers = self.sch.get_consumers(block)
        if not consumers:
            return False
        if is_copy(info):
            return True
        # Arithmetic runs in vectors only if no look-up stands between. TVM takes very long for
        # positions that are computed from values at computed positions.
        if list_position_loads(info.value):
            return False
        is_move = isinstance(info.value, TensorLoad)
        expensive, size = is_expensive(info.value), len(list_nodes(info.value))
        repeats = bool(list_repeating(info.value))
        for consumer in consumers:
            reader = self.info(consumer)
            if not reader.simple:
                return False
            positions = list_position_loads(reader.value)
            if not is_move and any(p.source.same_as(info.write.buffer) for p in positions):
                return False
            loads = sum(r.buffer.same_as(info.write.buffer) for r in reader.reads)
            repeated = reader.volume() > info.volume() or len(consumers) > 1 or loads > 1
            if expensive and repeated:
                return False
            arguments = [load for call in list_repeating(reader.value) for load in list_loads(call)]
            if repeats and any(load.source.same_as(info.write.buffer) for load in arguments):
                return False
            if len(list_nodes(reader.value)) + loads * size > INLINE_NODES:
                return False
            if reader.reduced and (repeated or list_conditions(info.value)):
                return False
        return True

    # ---- elementwise ---------------------------------------------------------------------------

    def lanes(self, bits: int) -> int:
        """Return the elements of one vector register."""
        return max(self.bits // bits, 1)

    def schedule_injective(self, block: s_tir.schedule.SBlockRV, info: BlockInfo) -> None:
        """Fuse the contiguous inner axes into vectors, run the outer ones in parallel."""
        sch = self.sch
        loops = list(sch.get_loops(block))
        if not loops or not info.simple or len(loops) != len(info.spatial):
            self.parallelize(loops[:-1], info)
            return
        if self.guards_elements(info) and sch.can_decompose_padding(block, loops[0]):
            self.schedule_padding(block)
            return
        if not self.split_joined(loops, info):
            self.vectorize_loops(block, loops, info)

    def split_joined(self, loops: Sequence[s_tir.schedule.LoopRV], info: BlockInfo) -> bool:
        """Split the last axis where a guard changes along it, as in a concatenation, and vectorize.

        Returns whether there are such guards, and they change at multiples of vectors.
        """
        axis, lanes = info.spatial[-1], self.lanes(info.dtype_bits)
        part = constant(axis.dom.extent)
        guards = [each for each in list_conditions(info.value) if mentions(each, axis.var)]
        strides = {access.stride(axis.var) for access in info.reads}
        # None: a guard bounds the position, so that it is known in each part alone.
        if part is None or not guards or info.write.stride(axis.var) != 1 or strides - {0, 1, None}:
            return False
        bounds = {find_bound(guard, axis.var) for guard in guards}
        for bound in bounds:
            if bound is None:
                return False
            part = math.gcd(part, bound)
        lanes = math.gcd(part, lanes)
        if lanes < LEAST_LANES or len(bounds) >= MOST_SECTIONS:
            return False
        sch = self.sch
        parts, _, inside = sch.split(loops[-1], [None, part // lanes, lanes])
        sch.annotate(parts, PART_SIZE, part)
        sch.vectorize(inside)
        self.parallelize(loops[:-1], info)
        return True

    def guards_elements(self, info: BlockInfo) -> bool:
        """Whether a guard depends on the vector axis, so that it would be tested per element."""
        guards = list_conditions(info.value)
        inner = self.contiguous_suffix(info, self.lanes(info.dtype_bits)) if guards else 0
        inside = [axis.var for axis in info.spatial[-max(inner, 1) :]]
        return any(mentions(guard, var) for guard in guards for var in inside)

    def vectorize_loops(
        self,
        block: s_tir.schedule.SBlockRV,
        loops: Sequence[s_tir.schedule.LoopRV],
        info: BlockInfo,
    ) -> None:
        """Vectorize the contiguous suffix of `loops`, which has one loop per spatial axis.

        The other loops run in parallel. An axis that no vector divides stays a serial innermost
        loop. LLVM vectorizes it with a scalar remainder. A guard inside the vector would split it
        into scalars.
        """
        sch = self.sch
        lanes = self.lanes(info.dtype_bits)
        inner = self.contiguous_suffix(info, lanes)
        outer = list(loops[: -max(inner, 1)])
        if inner:
            extent = math.prod(constant(v.dom.extent) or 1 for v in info.spatial[-inner:])
            loop = loops[-1]
            if inner > 1:
                loop = sch.fuse(*loops[-inner:])
                sch.annotate(block, FUSED_AXES, inner)
            width = pick_width(extent, lanes)
            if width == extent:
                sch.vectorize(loop)
            elif width:
                outside, inside = sch.split(loop, [None, width])
                sch.vectorize(inside)
                outer.append(outside)
        self.parallelize(outer, info)

    def schedule_padding(self, block: s_tir.schedule.SBlockRV) -> None:
        """Fill the output, then copy the inside. Neither needs a guard for each element."""
        sch = self.sch
        fill = sch.decompose_padding(block, sch.get_loops(block)[0])
        for part in (fill, block):
            loops = list(sch.get_loops(part))
            part_info = self.info(part)
            if len(loops) == len(part_info.spatial):
                self.vectorize_loops(part, loops, part_info)
            else:
                self.parallelize(loops[:-1], part_info)

    def contiguous_suffix(self, info: BlockInfo, lanes: int) -> int:
        """Count the inner axes to fuse into the vector axis; 0 if none can be a vector."""
        last = info.spatial[-1]
        extent = constant(last.dom.extent)
        if extent is None or not self.fits_vectors(info, last.var):
            return 0
        count = 1
        while extent % lanes and count < len(info.spatial):
            count += 1
            size = constant(info.spatial[-count].dom.extent)
            if size is None or not all(
                is_contiguous(access, info.spatial[-count:]) for access in (info.write, *info.reads)
            ):
                count -= 1
                break
            extent *= size
        return count if extent > 1 else 0

    def fits_vectors(self, info: BlockInfo, var: tirx.Var) -> bool:
        """Whether every access moves by 0 or 1 elements along `var`, and no guard depends on it."""
        if info.write.stride(var) != 1:
            return False
        if any(access.stride(var) not in (0, 1) for access in info.reads):
            return False
        return not any(mentions(c, var) for c in list_conditions(info.value))

    def parallelize(self, loops: Sequence[s_tir.schedule.LoopRV], info: BlockInfo) -> None:
        """Run outer loops in parallel when there is work for more than one thread.

        Loops are fused only until there are enough tasks, since each task has to divide its index
        again. A symbolic extent counts as 1: if that is too little work, the extent decides at run
        time. A single sample, or row, should not wait for a thread to wake.
        """
        work = max(info.volume() * len(list_nodes(info.value)) // 4, 1)
        extents = [constant(self.sch.get(loop).extent) for loop in loops]
        # Fused loops are neighbours: units between them join.
        first = next((i for i, extent in enumerate(extents) if extent != 1), len(loops))
        end, tasks, is_worth = first, 1, work >= PARALLEL_WORK
        if is_worth:
            while end < len(loops) and tasks < PARALLEL_TASKS:
                tasks *= extents[end] or 1
                end += 1
        elif None in extents:
            end = len(extents) - extents[::-1].index(None)
            tasks = math.prod(extent or 1 for extent in extents[first:end])
        if first == end:
            return
        loop = self.sch.fuse(*loops[first:end]) if end - first > 1 else loops[first]
        self.sch.parallel(loop)
        if not is_worth:
            self.sch.annotate(loop, LEAST_EXTENT, ceil_div(PARALLEL_WORK * tasks, work))

    # ---- reductions ----------------------------------------------------------------------------

    def schedule_reduction(self, block: s_tir.schedule.SBlockRV, info: BlockInfo) -> set[str]:
        """Schedule a reduction and what is fused with it.

        Returns the names of the scheduled blocks.
        """
        if info.simple and info.spatial and is_identity(info):
            axes = [v for v in info.spatial if constant(v.dom.extent) != 1]
            extent = constant(axes[-1].dom.extent) if axes else None
            if extent is not None and extent >= 4 and self.fits_tile(info, axes[-1].var):
                lanes = self.lanes(tirx_bits(info.write.buffer.dtype))
                width = pick_width(extent, lanes) or pick_width(extent, 2 * lanes, 4)
                if width or extent <= LONGEST_ROW:
                    return self.tile_reduction(block, info, axes[-1], width)
        name = self.sch.get(block).name_hint
        if not (info.simple and self.split_lanes(block, info)):
            loops = self.sch.get_loops(block)
            outer = leading_spatial(self.sch, block)
            self.parallelize(loops[:outer], info)
            has_sizes = any(constant(axis.dom.extent) is None for axis in info.reduced)
            if has_sizes and outer + len(info.reduced) == len(loops):
                # Without iterations the start of the sums would not be stored.
                self.sch.decompose_reduction(block, loops[outer])
        return {name}

    def fits_tile(self, info: BlockInfo, var: tirx.Var) -> bool:
        """Like `fits_vectors`, but one operand may be gathered with the step of a strided conv."""
        if info.write.stride(var) != 1 or any(
            mentions(c, var) for c in list_conditions(info.value)
        ):
            return False
        strides = [access.stride(var) for access in info.reads]
        gathered = [s for s in strides if s not in (0, 1)]
        return not gathered or (len(gathered) == 1 and gathered[0] in (2, 3, 4))

    def tile_reduction(
        self,
        block: s_tir.schedule.SBlockRV,
        info: BlockInfo,
        vector_axis: tirx.IterVar,
        width: int,
    ) -> set[str]:
        """Keep a tile of results in registers while the reduced axes run.

        The tile has a few rows of an axis along which some operand is reused, times whole vectors
        (of `width` elements) of the contiguous axis. The elementwise consumer then runs on the
        tile. With width 0 the tile is one row, which LLVM vectorizes.
        """
        sch = self.sch
        name = sch.get(block).name_hint
        # The tile stays in scope "global": up to 1 KiB of that is on the stack, where LLVM finds
        # registers for it. Scope "local" is allocated on the heap.
        epilogue = self.fused_epilogue(block, info) or sch.cache_write(block, 0, "global")
        done = {name, sch.get(epilogue).name_hint}
        loops = list(sch.get_loops(epilogue))
        at = next(i for i, v in enumerate(info.spatial) if v.same_as(vector_axis))
        extent = constant(vector_axis.dom.extent) or 1
        lanes = self.lanes(tirx_bits(info.write.buffer.dtype))
        room = self.registers // max(1, -(-width // lanes))
        row_axis, rows = self.pick_rows(info, vector_axis, room) if width else (None, 1)
        vectors = 2 if width and extent % (2 * width) == 0 and rows * 2 <= room else 1
        step = width or extent
        vector_outer, vector_mid, vector_inner = sch.split(loops[at], [None, vectors, step])
        outer = [loop for i, loop in enumerate(loops) if i not in (at, row_axis)]
        inner = [vector_mid, vector_inner]
        if row_axis is not None:
            row_outer, row_inner = sch.split(loops[row_axis], [None, rows])
            outer.append(row_outer)
            inner.insert(0, row_inner)
        outer.append(vector_outer)
        sch.reorder(*outer, *inner)
        sch.compute_at(block, vector_outer, preserve_unit_loops=True)
        # compute_at leaves one loop per axis of the block below the target loop.
        mine = list(sch.get_loops(block))[len(outer) :]
        spatial, reduced = mine[: len(info.spatial)], mine[len(info.spatial) :]
        tile_mid, tile_inner = sch.split(spatial[at], [None, step])
        tile = [*(loop for i, loop in enumerate(spatial) if i != at), tile_mid, tile_inner]
        sch.reorder(*reduced, *tile)
        for loop in (*tile[:-1], *inner[:-1]):
            sch.unroll(loop)
        if width:
            sch.vectorize(tile[-1])
            sch.vectorize(inner[-1])
        self.parallelize(outer, info)
        # Last: nothing can be moved once the initial values have a separate block.
        sch.decompose_reduction(block, reduced[0])
        return done

    def pick_rows(
        self, info: BlockInfo, vector_axis: tirx.IterVar, most: int
    ) -> tuple[int | None, int]:
        """Choose (axis, rows) of the register tile.

        Axes that let an operand be reused come first.
        """
        best: tuple[tuple[int, int], int, int] | None = None
        for i, axis in enumerate(info.spatial):
            extent = constant(axis.dom.extent)
            if axis.same_as(vector_axis) or extent is None or extent == 1:
                continue
            rows = largest_divisor(extent, most)
            if rows == 1:
                continue
            reused = sum(read.stride(axis.var) == 0 for read in info.reads)
            key = (reused, rows)
            if best is None or key > best[0]:
                best = (key, i, rows)
        return (best[1], best[2]) if best is not None else (None, 1)

    def fused_epilogue(
        self, block: s_tir.schedule.SBlockRV, info: BlockInfo
    ) -> s_tir.schedule.SBlockRV | None:
        """Return the only reader of a reduction, if it reads element by element in order."""
        consumers = self.sch.get_consumers(block)
        if len(consumers) != 1:
            return None
        reader = self.info(consumers[0])
        if reader.reduced or not reader.simple or not is_identity(reader):
            return None
        reads = [r for r in reader.reads if r.buffer.same_as(info.write.buffer)]
        same_domain = len(reader.spatial) == len(info.spatial) and all(
            tvm_ffi.structural_equal(a.dom.extent, b.dom.extent)
            for a, b in zip(reader.spatial, info.spatial, strict=True)
        )
        if not same_domain or not all(
            all(i.same_as(v.var) for i, v in zip(r.indices, reader.spatial, strict=True))
            for r in reads
        ):
            return None
        if len(self.sch.get_loops(consumers[0])) != len(reader.spatial):
            return None
        return consumers[0]

    def split_lanes(self, block: s_tir.schedule.SBlockRV, info: BlockInfo) -> bool:
        """Split the reduced axis into vector lanes, which are reduced to one value at the end."""
        sch = self.sch
        last = info.reduced[-1]
        extents = [constant(v.dom.extent) for v in info.reduced]
        if extents[-1] is None or not is_identity(info):
            return False
        if any(access.stride(last.var) not in (0, 1) for access in info.reads):
            return False
        if any(mentions(c, last.var) for c in list_conditions(info.value)):
            return False
        lanes = self.lanes(max(tirx_bits(info.write.buffer.dtype), 32))
        extent, fuse = extents[-1] or 1, 1
        while extent % lanes and fuse < len(extents) and (size := extents[-fuse - 1]) is not None:
            if not all(is_contiguous(a, info.reduced[-fuse - 1 :]) for a in info.reads):
                break
            extent *= size
            fuse += 1
        width = largest_divisor(extent, lanes)
        # LoopPartition of TVM separates the remainder. With a symbolic extent it mixes int32 into
        # int64 positions.
        axes = (*info.spatial, *info.reduced)
        is_static = all(constant(axis.dom.extent) is not None for axis in axes)
        has_rest = width < 4 and extent >= 2 * lanes and is_static
        if has_rest:
            width = lanes
        if width < 4:
            return False
        loops = list(sch.get_loops(block))
        if len(loops) != len(info.spatial) + len(info.reduced):
            return False
        loop = sch.fuse(*loops[-fuse:]) if fuse > 1 else loops[-1]
        steps, lane = sch.split(loop, [None, width])
        if has_rest:
            sch.annotate(steps, "pragma_loop_partition_hint", True)
        partial = sch.rfactor(lane, len(info.spatial))
        partial_loops = list(sch.get_loops(partial))
        spatial = len(info.spatial)
        sch.vectorize(partial_loops[-1])
        # Each thread reduces the lanes of its results while they are in the cache.
        if spatial:
            sch.reverse_compute_at(block, partial_loops[spatial - 1], preserve_unit_loops=True)
        self.parallelize(partial_loops[:spatial], info)
        sch.decompose_reduction(partial, partial_loops[spatial])
        return True


def split_sections(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Split loops over parts where a guard changes. Each section is a loop without guards.

    TVM would resolve the guards only where it unrolls loops, after it has made vectors.

    for p in 7: y[p * 32 + j] = if_then_else(p * 32 + j < 64, a[..], b[..])
        -> for p in 2: y[p * 32 + j] = a[..];  for p in 2..6: y[p * 32 + j] = b[..]
    """

    def split(loop: tirx.For) -> tirx.Stmt:
        if PART_SIZE not in loop.annotations:
            return loop
        blocks: list[s_tir.SBlock] = []
        tvm_ffi.structural_walk(loop.body, (s_tir.SBlock, blocks.append))
        axis = blocks[0].iter_vars[-1].var
        size, count = int(loop.annotations[PART_SIZE]), constant(loop.extent) or 0
        found = {find_bound(each, axis) for each in list_conditions(loop.body)}
        bounds = {bound // size for bound in found if bound is not None}
        cuts = sorted({0, count, *(bound for bound in bounds if 0 < bound < count)})
        return tirx.SeqStmt(
            [write_section(loop, axis, size, cut) for cut in itertools.pairwise(cuts)]
        )

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, split)))


def write_section(loop: tirx.For, axis: tirx.Var, size: int, parts: tuple[int, int]) -> tirx.Stmt:
    """Return a loop over some of the parts, where all guards of `axis` are known."""
    first, stop = parts

    def resolve(expr: tirx.Expr) -> tirx.Expr:
        while choice := read_choice(expr):
            condition, yes, no = choice
            if find_bound(condition, axis) is None:
                break
            expr = yes if holds(condition, axis, first * size) else no
        return expr

    def bind(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        """Only the axes of the block read the number of the part."""
        values = [
            tvm_ffi.structural_map(
                value, (tirx.Var, lambda var: part if var.same_as(loop.loop_var) else var)
            )
            for value in realize.iter_values
        ]
        return s_tir.SBlockRealize(values, realize.predicate, realize.block)

    # TVM's analysis knows a variable by one range.
    part = tirx.Var(loop.loop_var.name, loop.loop_var.ty)
    low, extent = (tirx.IntImm(str(loop.extent.ty), n) for n in (first, stop - first))
    body = tvm_ffi.structural_map(
        loop.body, [((Call, tirx.Select), resolve), (s_tir.SBlockRealize, bind)], order="pre"
    )
    return tirx.For(part, low, extent, loop.kind, body)


def find_bound(guard: tirx.Expr, var: tirx.Var) -> int | None:
    """Return the first value of `var` for which a comparison with a constant is another; else None.

    x < 64, 64 <= x  ->  64
    """
    if not isinstance(guard, tuple(COMPARISONS)):
        return None
    bound = constant(guard.b if guard.a.same_as(var) else guard.a)
    if bound is None or not (guard.a.same_as(var) or guard.b.same_as(var)):
        return None
    is_after = isinstance(guard, tirx.LE | tirx.GT) == guard.a.same_as(var)
    return bound + is_after


def holds(guard: tirx.Expr, var: tirx.Var, value: int) -> bool:
    """Whether a comparison that `find_bound` knows is true for this value of `var`."""
    sides = (value if side.same_as(var) else constant(side) for side in (guard.a, guard.b))
    return COMPARISONS[type(guard)](*sides)


def leading_spatial(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> int:
    """Count the outer loops of `block` that belong only to spatial axes."""
    kinds = [int(v.iter_type) for v in schedule.get(block).iter_vars]
    loops = schedule.get_loops(block)
    if len(kinds) != len(loops):
        return 0
    count = 0
    while count < len(kinds) and kinds[count] == SPATIAL:
        count += 1
    return count
