"""Codegen, last step on TIR: a generic CPU schedule for what has no special kernel.

TVM's default pipeline leaves fused functions as serial scalar loop nests. Here each of them is
inlined, tiled, vectorized and made parallel by rules that look only at loops and accesses, without
any tuning.

What a schedule may change: float reductions are reassociated and contracted. What it may not
change: integer results, and the rounding of float arithmetic between two operators. LLVM contracts
a product and a sum that meet in one expression to a fused multiply-add, so a product that is
inlined into its consumer is fenced (`llvm.arithmetic.fence`) and keeps its own rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, IRModule, TensorLoad
from tvm.sym import Analyzer
from tvm.target import Target
from tvm.target.codegen import llvm_get_vector_width

from relayquant.codegen.schedule.vector_math import EXPANSIONS
from relayquant.kernels.emit import IS_SCHEDULED

logger = logging.getLogger("relayquant.codegen")

#: Element operations below which waking threads costs more than it gains: about 10 microseconds of
#: them, in vectors.
PARALLEL_WORK = 1 << 17
#: Expression nodes up to which producers are inlined: bounds a chain that doubles at each step.
INLINE_NODES = 400
#: Longest axis that is kept whole in a local buffer when no vector divides it.
LONGEST_ROW = 1024
#: Accumulator registers of one tile; AVX-512 and Arm have 32 vector registers, others 16.
TILE_REGISTERS = {512: 12, 256: 6, 128: 8}
#: Enough tasks to split evenly over the threads of a machine.
PARALLEL_TASKS = 64

#: Calls that cost no more than an arithmetic instruction.
CHEAP_CALLS = frozenset(
    {
        "if_then_else",
        "likely",
        "fabs",
        "floor",
        "ceil",
        "nearbyint",
        "round",
        "trunc",
        "reinterpret",
        "call_llvm_pure_intrin",
        "call_llvm_intrin",
        "shift_left",
        "shift_right",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
    }
)

#: Calls whose argument stands many times in what they become: here, and in TVM's own rules for LLVM
#: (tan, atanh; tanh of other dtypes than float32). The variables that hold it do not help: TVM's
#: LLVM code generation puts their values in their places when it simplifies (`Analyzer::Bind`).
REPEATING_CALLS = frozenset({*EXPANSIONS, "tirx.tan", "tirx.atanh"})


@dataclass(frozen=True)
class ScheduleReport:
    """What `schedule_with_report` did: function names, and for the ones left alone the reason."""

    scheduled: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]


class Unschedulable(Exception):
    """This function is not of the form the rules handle; it stays as it is."""


def schedule_with_report(mod: IRModule, target: Target) -> tuple[IRModule, ScheduleReport]:
    """Schedule every TIR function of `mod` that nobody scheduled, and say which ones were not.

    Works on static and symbolic shapes. A function is left as it is when it carries the attribute
    `tirx.is_scheduled`, has no blocks to schedule (a kernel written by hand), or when a scheduling
    primitive rejects it; the last is logged to `relayquant.codegen` at level debug.
    """
    scheduled: list[str] = []
    skipped: list[tuple[str, str]] = []
    functions = {}
    for name, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc) or (func.attrs and func.attrs.get(IS_SCHEDULED)):
            continue
        hint = name.name_hint
        try:
            functions[name] = schedule_function(func, target)
            scheduled.append(hint)
        except Unschedulable as reason:
            skipped.append((hint, str(reason)))
        except RuntimeError as error:
            # A primitive raises on loops it cannot transform; the unscheduled form is correct.
            message = str(error).strip().splitlines() or [type(error).__name__]
            skipped.append((hint, f"{type(error).__name__}: {message[-1]}"))
    for hint, reason in skipped:
        logger.debug("left unscheduled: %s: %s", hint, reason)
    result = IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for name, func in functions.items():
        result.update_func(name, func)
    return result, ScheduleReport(tuple(scheduled), tuple(skipped))


def schedule_functions(mod: IRModule, target: Target) -> IRModule:
    """`schedule_with_report` without the report."""
    return schedule_with_report(mod, target)[0]


def create_schedule_pass(target: Target) -> Any:
    """`schedule_functions` as a module pass; it belongs behind FuseTIR."""

    def schedule(mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        return schedule_functions(mod, target)

    return tvm.transform.module_pass(schedule, opt_level=0, name="relayquant.ScheduleFunctions")


def schedule_function(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Scheduled form of one function.

    Raises Unschedulable where there is nothing to schedule, and TVM's ScheduleError where a
    primitive rejects the loops.
    """
    if not isinstance(func.body, s_tir.SBlockRealize):
        raise Unschedulable("has no root block")
    if target.kind.name == "llvm":
        func = fence_products(func)
    schedule = s_tir.Schedule(
        IRModule({"main": func}), debug_mask="none", error_render_level="fast", seed=1
    )
    FunctionScheduler(schedule, target).run()
    return schedule.mod["main"].with_attr(IS_SCHEDULED, True)


def fence_products(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Keep the rounding of float products that one block hands to another through a buffer.

    Products that reach the function's output are left alone: nothing can be contracted with them.
    """

    def fence(store: tirx.BufferStore) -> tirx.BufferStore:
        value = store.value
        if not isinstance(value, tirx.Mul) or not is_float(store.buffer.dtype):
            return store
        if any(store.buffer.same_as(param) for param in func.params):
            return store
        dtype = str(store.buffer.dtype)
        fenced = tirx.call_llvm_pure_intrin(dtype, "llvm.arithmetic.fence", value)
        return tirx.BufferStore(store.buffer, fenced, store.indices)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.BufferStore, fence)))


def is_float(dtype: object) -> bool:
    """Whether a TVM dtype is a floating point type of any width."""
    return "float" in str(dtype)


def constant(value: object) -> int | None:
    """The integer a TVM expression stands for, None if it is symbolic."""
    return int(value) if isinstance(value, int | tirx.IntImm) else None


def coefficient(expr: tirx.Expr, var: tirx.Var) -> int | None:
    """Factor of `var` in an index expression: 0 if absent, None if the index is not linear."""
    if isinstance(expr, tirx.IntImm):
        return 0
    if isinstance(expr, tirx.Var):
        return int(expr.same_as(var))
    if isinstance(expr, tirx.Add | tirx.Sub):
        a, b = coefficient(expr.a, var), coefficient(expr.b, var)
        if a is None or b is None:
            return None
        return a + b if isinstance(expr, tirx.Add) else a - b
    if isinstance(expr, tirx.Mul):
        for factor, other in ((expr.a, expr.b), (expr.b, expr.a)):
            if isinstance(factor, tirx.IntImm):
                inner = coefficient(other, var)
                return None if inner is None else inner * int(factor)
    return None if mentions(expr, var) else 0


def mentions(expr: tirx.Expr, var: tirx.Var) -> bool:
    """Whether `var` occurs anywhere below `expr`."""
    return any(isinstance(node, tirx.Var) and node.same_as(var) for node in list_nodes(expr))


@dataclass(frozen=True)
class Access:
    """One element access of a block: a buffer and indices in the block's axes."""

    buffer: tirx.Buffer
    indices: tuple[tirx.Expr, ...]
    #: position in the flat buffer, where the indices take others apart as behind a reshape
    offset: tirx.Expr | None = None

    def stride(self, var: tirx.Var) -> int | None:
        """Elements between the accesses for `var` and `var + 1`; None if that is not a constant."""
        if self.offset is not None:
            return coefficient(self.offset, var)
        total = 0
        step: int | None = 1
        for index, extent in zip(reversed(self.indices), reversed(self.buffer.shape), strict=True):
            factor = coefficient(index, var)
            if factor is None:
                return None
            if factor:
                if step is None:
                    return None
                total += factor * step
            size = constant(extent)
            step = None if step is None or size is None else step * size
        return total


@dataclass(frozen=True)
class BlockFacts:
    """What the rules need to know of one block."""

    spatial: tuple[tirx.IterVar, ...]
    reduced: tuple[tirx.IterVar, ...]
    write: Access
    reads: tuple[Access, ...]
    value: tirx.Expr
    #: the body is one store: anything else (a scan, an if, an extern call) is left serial
    simple: bool

    @property
    def dtype_bits(self) -> int:
        return max(tirx_bits(access.buffer.dtype) for access in (self.write, *self.reads))

    def volume(self) -> int:
        """Iterations of the block, symbolic extents counted as 1."""
        return math.prod(constant(v.dom.extent) or 1 for v in (*self.spatial, *self.reduced))


def tirx_bits(dtype: object) -> int:
    """Bits of one element."""
    return max(8, int(tvm_ffi.dtype(str(dtype)).bits))


def read_block(block: s_tir.SBlock) -> BlockFacts:
    """Gather the facts of a block; Unschedulable if it has no store the rules understand."""
    stores: list[tirx.BufferStore] = []
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(
        block.body, [(tirx.BufferStore, stores.append), (TensorLoad, loads.append)]
    )
    if not stores:
        raise Unschedulable(f"block {block.name_hint} stores nothing")
    kinds = [int(v.iter_type) for v in block.iter_vars]
    if any(kind not in (SPATIAL, REDUCED) for kind in kinds):
        raise Unschedulable(f"block {block.name_hint} has an opaque or scan axis")
    store = stores[0]
    write = Access(store.buffer, tuple(store.indices))
    reads = tuple(
        Access(load.source, tuple(load.indices), find_offset(load, block.iter_vars))
        for load in loads
        if not load.source.same_as(store.buffer)
    )
    simple = len(stores) == 1 and isinstance(block.body, tirx.BufferStore)
    spatial = tuple(v for v, k in zip(block.iter_vars, kinds, strict=True) if k == SPATIAL)
    reduced = tuple(v for v, k in zip(block.iter_vars, kinds, strict=True) if k == REDUCED)
    return BlockFacts(spatial, reduced, write, reads, store.value, simple)


def find_offset(load: TensorLoad, axes: Sequence[tirx.IterVar]) -> tirx.Expr | None:
    """Position of a load in its flat buffer, in the simplest form, if its indices divide.

    x[i // 64, i % 64] of 64 columns  ->  i

    None where no index divides, or an extent is symbolic.
    """
    divisions = (tirx.FloorDiv, tirx.FloorMod)
    if not any(isinstance(node, divisions) for index in load.indices for node in list_nodes(index)):
        return None
    analyzer = Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, axis.dom)
    offset: tirx.Expr = tirx.IntImm("int64", 0)
    for index, extent in zip(load.indices, load.source.shape, strict=True):
        if constant(extent) is None:
            return None
        offset = offset * extent + index
    return analyzer.simplify(offset)


SPATIAL, REDUCED = int(tirx.IterVar.DataPar), int(tirx.IterVar.CommReduce)


def list_nodes(expr: tirx.Expr) -> list[tirx.Expr]:
    """All subexpressions of `expr`, itself included."""
    nodes: list[tirx.Expr] = []

    def collect(node: object) -> None:
        if isinstance(node, tirx.Expr):
            nodes.append(node)

    tvm_ffi.structural_walk(expr, (Any, collect))
    return nodes


def list_loads(expr: tirx.Expr) -> list[TensorLoad]:
    """All loads of `expr`, those in the indices of others included."""
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(expr, (TensorLoad, loads.append))
    return loads


def list_position_loads(expr: tirx.Expr) -> list[TensorLoad]:
    """Loads of `expr` that say where another one reads, as the data of a look-up do."""
    indices = [index for load in list_loads(expr) for index in load.indices]
    return [load for index in indices for load in list_loads(index)]


def call_name(call: Call) -> str:
    """Operator name without the dialect before it, which differs between TVM releases."""
    return str(getattr(call.op, "name", call.op)).rsplit(".", 1)[-1]


def is_expensive(expr: tirx.Expr) -> bool:
    """Whether computing `expr` twice costs more than storing it: a division or a math function."""
    return any(
        isinstance(node, tirx.Div)
        or (isinstance(node, Call) and call_name(node) not in CHEAP_CALLS)
        for node in list_nodes(expr)
    )


def list_repeating(expr: tirx.Expr) -> list[Call]:
    """Calls of `expr` whose argument is written out many times."""
    return [
        node
        for node in list_nodes(expr)
        if isinstance(node, Call) and str(getattr(node.op, "name", "")) in REPEATING_CALLS
    ]


def list_conditions(expr: tirx.Expr) -> list[tirx.Expr]:
    """Conditions that guard a part of `expr`, as padding does."""
    conditions = []
    for node in list_nodes(expr):
        if isinstance(node, tirx.Select):
            conditions.append(node.condition)
        elif isinstance(node, Call) and call_name(node) == "if_then_else":
            conditions.append(node.args[0])
    return conditions


def pick_width(extent: int, lanes: int, least: int = 2) -> int:
    """Elements of one vector along an axis: a divisor of at least half a register, 0 if none is."""
    width = largest_divisor(extent, lanes)
    return width if width == extent or width >= max(lanes // 2, least) else 0


def largest_divisor(extent: int, limit: int) -> int:
    """Largest divisor of `extent` that is at most `limit`."""
    return next(d for d in range(min(extent, limit), 0, -1) if extent % d == 0)


class FunctionScheduler:
    """Applies the rules to the blocks of one function, in program order."""

    def __init__(self, schedule: s_tir.Schedule, target: Target) -> None:
        self.sch = schedule
        self.bits = max(llvm_get_vector_width(target), 128) if target.kind.name == "llvm" else 128
        self.registers = TILE_REGISTERS.get(self.bits, 8)

    def run(self) -> None:
        """Inline, then schedule each block that is left."""
        sch = self.sch
        root = sch.get_sblock("root")
        if not sch.get_child_blocks(root):
            raise Unschedulable("has no blocks: a kernel that is written by hand")
        self.outputs = list(sch.mod["main"].params)
        self.inline_producers(root)
        blocks = sch.get_child_blocks(root)
        done: set[str] = set()
        for block in blocks:
            name = sch.get(block).name_hint
            if name in done:
                continue
            facts = read_block(sch.get(block))
            if not facts.reduced:
                self.schedule_injective(block, facts)
            else:
                done |= self.schedule_reduction(block, facts)

    def facts(self, block: s_tir.schedule.SBlockRV) -> BlockFacts:
        return read_block(self.sch.get(block))

    # ---- inlining ------------------------------------------------------------------------------

    def inline_producers(self, root: s_tir.schedule.SBlockRV) -> None:
        """Inline cheap intermediate values into the blocks that read them."""
        for block in self.sch.get_child_blocks(root):
            if self.may_inline(block):
                self.sch.compute_inline(block)

    def may_inline(self, block: s_tir.schedule.SBlockRV) -> bool:
        """Whether `block` may vanish into all its consumers without repeating costly work."""
        node = self.sch.get(block)
        if not node.iter_vars:
            return False
        facts = read_block(node)
        if facts.reduced or not facts.simple:
            return False
        if any(facts.write.buffer.same_as(p) for p in self.outputs):
            return False
        if not is_identity(facts):
            return False
        consumers = self.sch.get_consumers(block)
        if not consumers:
            return False
        if is_copy(facts):
            return True
        # Arithmetic runs in vectors only where no look-up stands between, and TVM takes very long
        # for positions that are computed from values at computed positions.
        if list_position_loads(facts.value):
            return False
        is_move = isinstance(facts.value, TensorLoad)
        expensive, size = is_expensive(facts.value), len(list_nodes(facts.value))
        repeats = bool(list_repeating(facts.value))
        for consumer in consumers:
            reader = self.facts(consumer)
            if not reader.simple:
                return False
            positions = list_position_loads(reader.value)
            if not is_move and any(p.source.same_as(facts.write.buffer) for p in positions):
                return False
            loads = sum(r.buffer.same_as(facts.write.buffer) for r in reader.reads)
            repeated = reader.volume() > facts.volume() or len(consumers) > 1 or loads > 1
            if expensive and repeated:
                return False
            arguments = [load for call in list_repeating(reader.value) for load in list_loads(call)]
            if repeats and any(load.source.same_as(facts.write.buffer) for load in arguments):
                return False
            if len(list_nodes(reader.value)) + loads * size > INLINE_NODES:
                return False
            if reader.reduced and (repeated or list_conditions(facts.value)):
                return False
        return True

    # ---- elementwise ---------------------------------------------------------------------------

    def lanes(self, bits: int) -> int:
        """Elements of one vector register."""
        return max(self.bits // bits, 1)

    def schedule_injective(self, block: s_tir.schedule.SBlockRV, facts: BlockFacts) -> None:
        """Fuse the contiguous inner axes into vectors, run the outer ones in parallel."""
        sch = self.sch
        loops = list(sch.get_loops(block))
        if not loops or not facts.simple or len(loops) != len(facts.spatial):
            self.parallelize(loops[:-1], facts)
            return
        if list_conditions(facts.value) and sch.can_decompose_padding(block, loops[0]):
            self.schedule_padding(block, facts)
            return
        self.vectorize_loops(loops, facts)

    def vectorize_loops(
        self, loops: Sequence[s_tir.schedule.LoopRV], facts: BlockFacts, parallel: bool = True
    ) -> None:
        """Vectorize the contiguous suffix of `loops`, one per spatial axis of `facts`.

        An axis that no vector divides stays a serial innermost loop, which LLVM vectorizes with a
        scalar remainder: a guard inside the vector would take it apart into scalars.
        """
        sch = self.sch
        lanes = self.lanes(facts.dtype_bits)
        inner = self.contiguous_suffix(facts, lanes)
        outer = list(loops[: -max(inner, 1)])
        if inner:
            extent = math.prod(constant(v.dom.extent) or 1 for v in facts.spatial[-inner:])
            loop = sch.fuse(*loops[-inner:]) if inner > 1 else loops[-1]
            width = pick_width(extent, lanes)
            if width == extent:
                sch.vectorize(loop)
            elif width:
                outside, inside = sch.split(loop, [None, width])
                sch.vectorize(inside)
                outer.append(outside)
        if parallel:
            self.parallelize(outer, facts)

    def schedule_padding(self, block: s_tir.schedule.SBlockRV, facts: BlockFacts) -> None:
        """Fill, then copy the inside: neither needs a guard for each element."""
        sch = self.sch
        fill = sch.decompose_padding(block, sch.get_loops(block)[0])
        for part in (fill, block):
            loops = list(sch.get_loops(part))
            part_facts = self.facts(part)
            if len(loops) == len(part_facts.spatial):
                self.vectorize_loops(loops, part_facts)
            else:
                self.parallelize(loops[:-1], part_facts)

    def contiguous_suffix(self, facts: BlockFacts, lanes: int) -> int:
        """How many inner axes to fuse into the vector axis; 0 if none is fit for vectors."""
        last = facts.spatial[-1]
        extent = constant(last.dom.extent)
        if extent is None or not self.fits_vectors(facts, last.var):
            return 0
        count = 1
        while extent % lanes and count < len(facts.spatial):
            count += 1
            size = constant(facts.spatial[-count].dom.extent)
            if size is None or not all(
                is_contiguous(access, facts.spatial[-count:])
                for access in (facts.write, *facts.reads)
            ):
                count -= 1
                break
            extent *= size
        return count if extent > 1 else 0

    def fits_vectors(self, facts: BlockFacts, var: tirx.Var) -> bool:
        """Whether every access moves by 0 or 1 elements along `var`, and no guard depends on it."""
        if facts.write.stride(var) != 1:
            return False
        if any(access.stride(var) not in (0, 1) for access in facts.reads):
            return False
        return not any(mentions(c, var) for c in list_conditions(facts.value))

    def parallelize(self, loops: Sequence[s_tir.schedule.LoopRV], facts: BlockFacts) -> None:
        """Run outer loops in parallel when there is work for more than one thread.

        Loops are fused only until they give enough tasks: each task takes its indices apart again.
        A symbolic extent counts as 1, as for the kernels: what is known only at run time is the
        batch, and one sample should not wait for a thread to wake.
        """
        work = facts.volume() * len(list_nodes(facts.value)) // 4
        chosen, tasks = [], 1
        for loop in loops:
            if tasks >= PARALLEL_TASKS:
                break
            extent = constant(self.sch.get(loop).extent)
            if extent != 1 or chosen:  # fused loops are neighbours, so units between them join
                chosen.append(loop)
                tasks *= extent or 1
        if not chosen or work < PARALLEL_WORK:
            return
        self.sch.parallel(self.sch.fuse(*chosen) if len(chosen) > 1 else chosen[0])

    # ---- reductions ----------------------------------------------------------------------------

    def schedule_reduction(self, block: s_tir.schedule.SBlockRV, facts: BlockFacts) -> set[str]:
        """Schedule a reduction and what is fused with it; returns the blocks dealt with."""
        if facts.simple and facts.spatial and is_identity(facts):
            axes = [v for v in facts.spatial if constant(v.dom.extent) != 1]
            extent = constant(axes[-1].dom.extent) if axes else None
            if extent is not None and extent >= 4 and self.fits_tile(facts, axes[-1].var):
                lanes = self.lanes(tirx_bits(facts.write.buffer.dtype))
                width = pick_width(extent, lanes) or pick_width(extent, 2 * lanes, 4)
                if width or extent <= LONGEST_ROW:
                    return self.tile_reduction(block, facts, axes[-1], width)
        name = self.sch.get(block).name_hint
        if not (facts.simple and self.split_lanes(block, facts)):
            loops = self.sch.get_loops(block)
            self.parallelize(loops[: leading_spatial(self.sch, block)], facts)
        return {name}

    def fits_tile(self, facts: BlockFacts, var: tirx.Var) -> bool:
        """As `fits_vectors`, but one operand may be gathered with the step of a strided conv."""
        if facts.write.stride(var) != 1 or any(
            mentions(c, var) for c in list_conditions(facts.value)
        ):
            return False
        strides = [access.stride(var) for access in facts.reads]
        gathered = [s for s in strides if s not in (0, 1)]
        return not gathered or (len(gathered) == 1 and gathered[0] in (2, 3, 4))

    def tile_reduction(
        self,
        block: s_tir.schedule.SBlockRV,
        facts: BlockFacts,
        vector_axis: tirx.IterVar,
        width: int,
    ) -> set[str]:
        """Keep a tile of results in registers while the reduced axes run.

        The tile is a few rows of an axis along which some operand is reused, times whole vectors
        (of `width` elements) of the axis that is contiguous. Behind it the element-wise consumer
        runs on the tile. With width 0 the tile is one row, left to LLVM.
        """
        sch = self.sch
        name = sch.get(block).name_hint
        # The tile stays in scope "global": up to 1 KiB of that lives on the stack, where LLVM finds
        # registers for it, whereas scope "local" is fetched from the heap.
        epilogue = self.fused_epilogue(block, facts) or sch.cache_write(block, 0, "global")
        done = {name, sch.get(epilogue).name_hint}
        loops = list(sch.get_loops(epilogue))
        at = next(i for i, v in enumerate(facts.spatial) if v.same_as(vector_axis))
        extent = constant(vector_axis.dom.extent) or 1
        lanes = self.lanes(tirx_bits(facts.write.buffer.dtype))
        room = self.registers // max(1, -(-width // lanes))
        row_axis, rows = self.pick_rows(facts, vector_axis, room) if width else (None, 1)
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
        # compute_at leaves one loop per axis of the block below the place it moved it to.
        mine = list(sch.get_loops(block))[len(outer) :]
        spatial, reduced = mine[: len(facts.spatial)], mine[len(facts.spatial) :]
        tile_mid, tile_inner = sch.split(spatial[at], [None, step])
        tile = [*(loop for i, loop in enumerate(spatial) if i != at), tile_mid, tile_inner]
        sch.reorder(*reduced, *tile)
        for loop in (*tile[:-1], *inner[:-1]):
            sch.unroll(loop)
        if width:
            sch.vectorize(tile[-1])
            sch.vectorize(inner[-1])
        self.parallelize(outer, facts)
        # Last: nothing may be moved once the initial values have a block of their own.
        sch.decompose_reduction(block, reduced[0])
        return done

    def pick_rows(
        self, facts: BlockFacts, vector_axis: tirx.IterVar, most: int
    ) -> tuple[int | None, int]:
        """(axis, rows) of the register tile: an axis that lets an operand be reused comes first."""
        best: tuple[tuple[int, int], int, int] | None = None
        for i, axis in enumerate(facts.spatial):
            extent = constant(axis.dom.extent)
            if axis.same_as(vector_axis) or extent is None or extent == 1:
                continue
            rows = largest_divisor(extent, most)
            if rows == 1:
                continue
            reused = sum(read.stride(axis.var) == 0 for read in facts.reads)
            key = (reused, rows)
            if best is None or key > best[0]:
                best = (key, i, rows)
        return (best[1], best[2]) if best is not None else (None, 1)

    def fused_epilogue(
        self, block: s_tir.schedule.SBlockRV, facts: BlockFacts
    ) -> s_tir.schedule.SBlockRV | None:
        """The only reader of a reduction, if it reads element by element in the same order."""
        consumers = self.sch.get_consumers(block)
        if len(consumers) != 1:
            return None
        reader = self.facts(consumers[0])
        if reader.reduced or not reader.simple or not is_identity(reader):
            return None
        reads = [r for r in reader.reads if r.buffer.same_as(facts.write.buffer)]
        same_domain = len(reader.spatial) == len(facts.spatial) and all(
            tvm_ffi.structural_equal(a.dom.extent, b.dom.extent)
            for a, b in zip(reader.spatial, facts.spatial, strict=True)
        )
        if not same_domain or not all(
            all(i.same_as(v.var) for i, v in zip(r.indices, reader.spatial, strict=True))
            for r in reads
        ):
            return None
        if len(self.sch.get_loops(consumers[0])) != len(reader.spatial):
            return None
        return consumers[0]

    def split_lanes(self, block: s_tir.schedule.SBlockRV, facts: BlockFacts) -> bool:
        """Split the reduced axis into vector lanes, reduced among each other at the end."""
        sch = self.sch
        last = facts.reduced[-1]
        extents = [constant(v.dom.extent) for v in facts.reduced]
        if any(e is None for e in extents) or not is_identity(facts):
            return False
        if any(access.stride(last.var) not in (0, 1) for access in facts.reads):
            return False
        if any(mentions(c, last.var) for c in list_conditions(facts.value)):
            return False
        lanes = self.lanes(max(tirx_bits(facts.write.buffer.dtype), 32))
        extent = extents[-1] or 1
        fuse = 1
        while extent % lanes and fuse < len(extents):
            fuse += 1
            if not all(is_contiguous(a, facts.reduced[-fuse:]) for a in facts.reads):
                fuse -= 1
                break
            extent *= extents[-fuse] or 1
        width = largest_divisor(extent, lanes)
        # TVM's LoopPartition, which takes the rest apart, mixes int32 into the positions where a
        # symbolic extent keeps them int64.
        is_static = all(constant(axis.dom.extent) is not None for axis in facts.spatial)
        has_rest = width < 4 and extent >= 2 * lanes and is_static
        if has_rest:
            width = lanes
        if width < 4:
            return False
        loops = list(sch.get_loops(block))
        if len(loops) != len(facts.spatial) + len(facts.reduced):
            return False
        loop = sch.fuse(*loops[-fuse:]) if fuse > 1 else loops[-1]
        steps, lane = sch.split(loop, [None, width])
        if has_rest:
            sch.annotate(steps, "pragma_loop_partition_hint", True)
        partial = sch.rfactor(lane, len(facts.spatial))
        partial_loops = list(sch.get_loops(partial))
        spatial = len(facts.spatial)
        sch.vectorize(partial_loops[-1])
        self.parallelize(partial_loops[:spatial], facts)
        sch.decompose_reduction(partial, partial_loops[spatial])
        return True


def is_identity(facts: BlockFacts) -> bool:
    """Whether the block writes each element at the position of its spatial axes."""
    return len(facts.write.indices) == len(facts.spatial) and all(
        index.same_as(axis.var)
        for index, axis in zip(facts.write.indices, facts.spatial, strict=True)
    )


def is_copy(facts: BlockFacts) -> bool:
    """Whether the block copies a buffer as it is, like padding by nothing."""
    value = facts.value
    return (
        isinstance(value, TensorLoad)
        and all(
            index.same_as(axis.var)
            for index, axis in zip(value.indices, facts.spatial, strict=False)
        )
        and len(value.indices) == len(facts.spatial)
    )


def is_contiguous(access: Access, axes: Sequence[tirx.IterVar]) -> bool:
    """Whether `axes` together walk `access` element by element, or do not move it at all."""
    if not any(mentions(index, axis.var) for index in access.indices for axis in axes):
        return True
    if len(access.indices) < len(axes):
        return False
    tail = access.indices[-len(axes) :]
    shape = access.buffer.shape[-len(axes) :]
    heads = access.indices[: -len(axes)]
    return not any(mentions(index, axis.var) for index in heads for axis in axes) and all(
        index.same_as(axis.var) and constant(size) == constant(axis.dom.extent)
        for index, size, axis in zip(tail, shape, axes, strict=True)
    )


def leading_spatial(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> int:
    """Number of outer loops of `block` that belong to spatial axes alone."""
    kinds = [int(v.iter_type) for v in schedule.get(block).iter_vars]
    loops = schedule.get_loops(block)
    if len(kinds) != len(loops):
        return 0
    count = 0
    while count < len(kinds) and kinds[count] == SPATIAL:
        count += 1
    return count
