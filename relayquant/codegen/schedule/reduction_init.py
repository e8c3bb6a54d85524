"""Scheduled TIR -> the same TIR where maxima and minima of floats start at infinity.

    y = -3.4028235e+38; y = max(y, x[k])    ->    y = -inf; y = max(y, x[k])

TVM starts at the largest finite number, so the maximum of only -inf would be finite. Then a row of
attention scores that is completely masked would not be recognized. This pass runs after the generic
schedule, which splits only reductions with TVM's own initial value.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

#: Maximum or minimum of two values -> initial value of its reduction.
STARTS = {tirx.Max: float("-inf"), tirx.Min: float("inf")}


def find_starts(func: tirx.PrimFunc) -> dict[tirx.Buffer, float]:
    """Find float buffers with a maximum or minimum -> initial value.

    Buffers with both are left out.
    """
    found: dict[tirx.Buffer, set[float]] = {}

    def visit(store: tirx.BufferStore) -> None:
        start = STARTS.get(type(store.value))
        if start is not None and str(store.buffer.dtype).startswith("float"):
            found.setdefault(store.buffer, set()).add(start)

    tvm_ffi.structural_walk(func.body, (tirx.BufferStore, visit))
    return {buffer: starts.pop() for buffer, starts in found.items() if len(starts) == 1}


def begin_at_infinity(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make the float maxima and minima of a function start at infinity."""
    starts = find_starts(func)

    def replace(store: tirx.BufferStore) -> tirx.BufferStore:
        start = starts.get(store.buffer)
        if start is None or not is_limit(store.value, store.buffer.dtype, start):
            return store
        value: Any = tirx.const(start, str(store.buffer.dtype))
        if isinstance(store.value, tirx.Broadcast):
            value = tirx.Broadcast(value, store.value.lanes)
        return tirx.BufferStore(store.buffer, value, store.indices)

    if not starts:
        return func
    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.BufferStore, replace)))


def is_limit(value: Any, dtype: Any, start: float) -> bool:
    """Whether `value` is the finite number nearest to `start`, which is TVM's initial value."""
    if isinstance(value, tirx.Broadcast):
        value = value.value
    limit = tirx.min_value(str(dtype)) if start < 0 else tirx.max_value(str(dtype))
    return isinstance(value, tirx.FloatImm) and value.value == limit.value


def create_reduction_init_pass() -> Any:
    """Make a pass that applies `begin_at_infinity` to every TIR function."""

    def begin(func: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        return begin_at_infinity(func)

    return tirx.transform.prim_func_pass(begin, opt_level=0, name="relayquant.BeginAtInfinity")
