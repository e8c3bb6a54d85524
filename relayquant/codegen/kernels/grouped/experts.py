"""Specification of a product with the grouped weights that rows choose -> its kernel.

    y[t, s, n] = x[t, s] times row n of the weight of expert chosen[t, s]

The arithmetic is that of `product`. Memory holds the weight of one expert after the other.

Few rows, not more than there are experts, rarely choose the same one. They are multiplied one by
one, and threads share the panels of each. Many rows are sorted: each expert gets a list of the rows
that chose it. Then experts take turns, and each is a product like any other, but for where it reads
its rows and writes their results.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_workspace,
    build_kernel,
    ceil_div,
)
from relayquant.codegen.kernels.grouped.plan import (
    Arguments,
    ChosenRows,
    GroupedExperts,
    GroupedPlan,
    declare_grouped,
    plan_grouped,
)
from relayquant.codegen.kernels.grouped.product import (
    FEWEST_TILE_ROWS,
    emit_preparation,
    emit_rows,
    emit_tile,
    list_panels,
    locate_band,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa
from relayquant.codegen.kernels.unit_permission import ask_unit, emit_if


def build_grouped_experts(spec: GroupedExperts, isa: Isa) -> PrimFunc:
    """Make PrimFunc(x (*leading, K)[, x_scale (*leading, 1 or G)], chosen (*leading[:-1], S),
    codes, scale[, zeros], y (*leading[:-1], S, N)).

    The constants come from `pack_experts`.
    """

    def body() -> None:
        plan = plan_grouped(spec.dense, isa)
        arguments = declare_grouped(plan, spec)
        may_use = ask_unit(plan.unit, FEWEST_TILE_ROWS, FEWEST_TILE_ROWS)
        emit_if(
            arguments.rows <= spec.count,
            partial(emit_few_rows, spec, plan, arguments),
            partial(emit_each_expert, spec, plan, arguments, may_use),
        )

    return build_kernel("grouped_experts", body)


def read_choice(spec: GroupedExperts, arguments: Arguments, row: Expr) -> Expr:
    """Return the expert of a row of the result."""
    assert arguments.choices is not None
    return T.floormod(T.Cast("int64", arguments.choices[row]), spec.count)


def emit_few_rows(spec: GroupedExperts, plan: GroupedPlan, arguments: Arguments) -> None:
    """Emit rows that are multiplied one by one."""
    dense, side = spec.dense, plan.row_panels
    own = replace(arguments, chosen=ChosenRows(T.int64(0), spec.slots_of_row))
    prepared = emit_preparation(plan, own, T.int64(0), arguments.rows, spec.count)
    bands = ceil_div(plan.panels, side)
    is_shared = dense.units * dense.features * spec.slots >= PARALLEL_THRESHOLD
    with (T.parallel if is_shared else T.serial)(arguments.rows * bands) as number:
        row = T.bind(T.floordiv(number, bands))
        expert = read_choice(spec, arguments, row)
        chosen = ChosenRows(T.bind(expert * plan.panels), spec.slots_of_row)
        first = locate_band(plan, T.bind(number - row * bands), side)
        panels = list_panels(plan, first, side)
        emit_tile(plan, replace(arguments, chosen=chosen), prepared, [row], panels)


def emit_each_expert(
    spec: GroupedExperts, plan: GroupedPlan, arguments: Arguments, may_use: Expr | bool
) -> None:
    """Emit one expert after the other, many rows on the matrix unit if it `may_use` it."""
    dense = spec.dense
    threads = dense.units * dense.features >= PARALLEL_THRESHOLD
    starts, order = emit_order(spec, arguments)
    with T.serial(spec.count) as expert:
        start = T.bind(T.Cast("int64", starts[expert]))
        count = T.bind(T.Cast("int64", starts[expert + 1]) - start)
        first = T.bind(expert * plan.panels)
        chosen = ChosenRows(first, spec.slots_of_row, order, start)
        own = replace(arguments, rows=count, chosen=chosen)
        on_tiles = may_use is not False and T.And(count >= FEWEST_TILE_ROWS, may_use)
        with T.If(count > 0), T.Then():
            emit_rows(plan, own, on_tiles, threads)


def emit_order(spec: GroupedExperts, arguments: Arguments) -> tuple[Buffer, Buffer]:
    """Emit where the list of each expert's rows begins, int32 (experts + 1,), and the lists one
    after the other, int32 (rows,).
    """
    rows = arguments.rows
    starts = alloc_workspace(spec.count + 1, "int32")
    ends = alloc_workspace(spec.count, "int32")
    order = alloc_workspace(rows, "int32")
    with T.serial(spec.count + 1) as expert:
        T.buffer_store(starts, T.int32(0), [expert])
    with T.serial(rows) as row:
        expert = T.bind(read_choice(spec, arguments, row))
        T.buffer_store(starts, starts[expert + 1] + 1, [expert + 1])
    with T.serial(spec.count) as expert:
        T.buffer_store(ends, starts[expert], [expert])
        T.buffer_store(starts, starts[expert] + starts[expert + 1], [expert + 1])
    with T.serial(rows) as row:
        expert = T.bind(read_choice(spec, arguments, row))
        at = T.bind(ends[expert])
        T.buffer_store(order, T.Cast("int32", row), [at])
        T.buffer_store(ends, at + 1, [expert])
    return starts, order
