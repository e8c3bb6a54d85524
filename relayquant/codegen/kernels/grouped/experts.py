"""Specification of a product with the grouped weights that rows choose -> its kernel.

    y[t, s, n] = x[t, s] times row n of the weight of expert chosen[t, s]

The arithmetic is that of `product`. The weights of the experts follow each other in memory.

If there are fewer rows than experts, most rows have one of their own. All rows are prepared, and
threads share the panels of each. With more rows, a list of rows is made for each expert, and the
experts are multiplied one after the other, each like a product of its rows. Rows are read from
where they are, and results are written to where they belong.
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
        is_many = count >= FEWEST_TILE_ROWS
        on_tiles = may_use if may_use is False else T.And(is_many, may_use)
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
