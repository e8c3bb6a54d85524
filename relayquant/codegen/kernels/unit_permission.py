"""Matrix unit -> the question whether this process may use it, and for how many threads, as TIR."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from relayquant.codegen.kernels.emit import import_code
from relayquant.codegen.kernels.isa.base import Expr
from relayquant.codegen.kernels.isa.matrix_unit import COUNT_THREADS, MatrixUnit

#: Parts of a parallel loop where the threads cannot be counted.
PARTS = 16


def count_parts(unit: MatrixUnit) -> Expr | int:
    """Emit the number of parts of a loop: one for each thread, since each begins and ends anew."""
    if unit.permission is None:
        return PARTS
    return count_threads()


def count_threads() -> Expr:
    """Emit the number of threads that share a parallel loop, on Linux."""
    import_code(COUNT_THREADS.code)
    return T.bind(T.call_extern(COUNT_THREADS.function, dtype="int32"))


def ask_unit(unit: MatrixUnit | None, rows: Expr | int, fewest: int) -> Expr | bool:
    """Emit the question whether rows go to the unit: at least `fewest`, and it may be used."""
    if unit is None or (isinstance(rows, int) and rows < fewest):
        return False
    may_use = ask_permission(unit)
    if isinstance(rows, int):
        return may_use
    is_many = rows >= fewest
    return is_many if may_use is True else T.And(is_many, may_use)


def ask_permission(unit: MatrixUnit) -> Expr | bool:
    """Emit the question whether this process may use the unit."""
    if unit.permission is None:
        return True
    import_code(unit.permission.code)
    return T.bind(T.call_extern(unit.permission.function, dtype="int32")) != 0


def emit_if(
    condition: Expr | bool, emit: Callable[[], None], otherwise: Callable[[], None] | None = None
) -> None:
    """Emit one of two things, or the choice between them if it is made at run time."""
    if isinstance(condition, bool):
        if condition:
            emit()
        elif otherwise is not None:
            otherwise()
        return
    with T.If(condition):
        with T.Then():
            emit()
        if otherwise is not None:
            with T.Else():
                otherwise()
