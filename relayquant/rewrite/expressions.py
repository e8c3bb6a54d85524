"""What expressions of Relax say of themselves: operator, shape, scalars; and who reads whom.

For functions of any form. `graph.Graph` is the view of a main in one dataflow block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, Op

#: Operators that only bound what they get.
CLAMPS = ("relax.nn.relu", "relax.clip")


class Bounded(Protocol):
    """A frozen dataclass with bounds of its results."""

    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


BoundedT = TypeVar("BoundedT", bound=Bounded)


def take_clamp(product: BoundedT, call: Call) -> BoundedT | None:
    """`product` with the bounds of one of `CLAMPS`; None if they are not known."""
    if op_name(call) == "relax.nn.relu":
        return replace(product, low=0.0)  # pyright: ignore[reportArgumentType]
    low, high = (read_scalar(arg) for arg in call.args[1:3])
    if low is None or high is None:
        return None
    return replace(product, low=low, high=high)  # pyright: ignore[reportArgumentType]


class Readers:
    """Which values of a function read which."""

    def __init__(self, func: relax.Function, bindings: Iterable[Any]) -> None:
        self.users: dict[relax.Var, list[relax.Var]] = {}
        self.uses: Counter[relax.Var] = Counter()
        for binding in bindings:
            for var in list_reads(binding.value):
                self.uses[var] += 1
                self.users.setdefault(var, []).append(binding.var)
        result = func.body.body if isinstance(func.body, relax.SeqExpr) else func.body
        self.uses.update(relax.analysis.all_vars(result))

    def find_only(self, var: relax.Var) -> relax.Var | None:
        """The only value that reads `var`, once; None if there are more, or none, or main returns
        it.
        """
        return self.users[var][0] if self.uses[var] == 1 and var in self.users else None


def list_bindings(func: relax.Function) -> Iterator[Any]:
    """All bindings of a function in order."""
    if isinstance(func.body, relax.SeqExpr):
        for block in func.body.blocks:
            yield from block.bindings


def list_reads(expr: relax.Expr) -> Iterator[relax.Var]:
    """Variables a bound value reads, with repetitions."""
    if isinstance(expr, relax.Var):
        yield expr
    elif isinstance(expr, relax.Tuple):
        for part in expr.fields:
            yield from list_reads(part)
    elif isinstance(expr, relax.TupleGetItem):
        yield from list_reads(expr.tuple_value)
    elif isinstance(expr, Call):
        for part in expr.args:
            yield from list_reads(part)
    elif isinstance(expr, relax.If | relax.Function | relax.SeqExpr):
        yield from relax.analysis.all_vars(expr)


def op_name(expr: relax.Expr) -> str:
    """Name of the operator that `expr` calls, "" if it calls none."""
    return expr.op.name if isinstance(expr, Call) and isinstance(expr.op, Op) else ""


def shape_of(expr: relax.Expr) -> list[Any]:
    """Extents of a tensor; an empty list if they are unknown."""
    shape = expr.ty.shape if isinstance(expr.ty, relax.TensorType) else None
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else []


def is_float32(expr: relax.Expr) -> bool:
    """Whether `expr` is a float32 tensor of known shape."""
    return (
        isinstance(expr.ty, relax.TensorType)
        and str(expr.ty.dtype) == "float32"
        and bool(shape_of(expr))
    )


def static_sizes(extents: list[Any]) -> list[int] | None:
    """The extents as ints, None if one is symbolic."""
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return [int(extent) for extent in extents]


def same_extents(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists of extents are the same, symbol by symbol."""
    return len(left) == len(right) and all(
        tvm_ffi.structural_equal(a, b) for a, b in zip(left, right, strict=True)
    )


def same_type(left: relax.Expr, right: relax.Expr) -> bool:
    """Whether two values are float32 tensors of one shape."""
    return is_float32(left) and is_float32(right) and same_extents(shape_of(left), shape_of(right))


def read_scalar(expr: Any) -> float | None:
    """The number a scalar argument stands for."""
    if isinstance(expr, GenericConst):
        return float(expr.value.numpy()) if expr.value.numpy().ndim == 0 else None
    if isinstance(expr, tirx.IntImm | tirx.FloatImm):
        return float(expr.value)
    return None


def pair(values: Any) -> tuple[int, int]:
    """(h, w) of an attribute that holds one or two numbers."""
    numbers = [int(v) for v in values]
    return (numbers[0], numbers[-1])


def expand_padding(values: Any) -> tuple[int, int, int, int]:
    """(top, left, bottom, right) of an attribute that holds one, two or four numbers."""
    numbers = [int(v) for v in values]
    if len(numbers) == 4:
        return numbers[0], numbers[1], numbers[2], numbers[3]
    return numbers[0], numbers[-1], numbers[0], numbers[-1]
