"""Read Relax expressions: operators, shapes, scalars, and the readers of each value.

Works on functions of any form. `graph.Graph` is the view of a main with one dataflow block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, Op
from tvm.sym import Analyzer

from relayquant.ir.rewrite.graph import constant_value, free_vars, static_size

#: Upper bound of every size. Sizes are at least 0.
LARGEST = 2**48


class FunctionGraph:
    """View of a function of any form: the call that computes a value, and its readers."""

    def __init__(self, func: relax.Function) -> None:
        self.params, self.attrs = frozenset(func.params), dict(func.attrs or {})
        self.bindings = list(list_bindings(func))
        #: Bound variable -> its value, without match_cast
        self.values: dict[relax.Var, relax.Expr] = {
            b.var: b.value for b in self.bindings if not isinstance(b, relax.MatchCast)
        }
        self._users: dict[relax.Var, list[relax.Var]] = {}
        self._uses: Counter[relax.Var] = Counter()
        for binding in self.bindings:
            for var in list_reads(binding.value):
                self._uses[var] += 1
                self._users.setdefault(var, []).append(binding.var)
        result = func.body.body if isinstance(func.body, relax.SeqExpr) else func.body
        self._uses.update(relax.analysis.all_vars(result))

    def call_of(self, expr: relax.Var) -> Call | None:
        """Return the call that computes a value."""
        value = self.values.get(expr)
        return value if isinstance(value, Call) else None

    def only_user(self, var: relax.Var) -> relax.Var | None:
        """Return the only value that reads `var`, if it reads it once.

        Return None for more readers, no reader, or a `var` that the function returns.
        """
        return self._users[var][0] if self._uses[var] == 1 and var in self._users else None

    def count_uses(self, var: relax.Var) -> int:
        """Count how often values read `var`, and the function's result names it."""
        return self._uses[var]

    def users_of(self, var: relax.Var) -> list[relax.Var]:
        """Return the values that read `var`, once per read."""
        return self._users.get(var, [])


def list_bindings(expr: relax.Expr) -> Iterator[Any]:
    """Return all bindings of a function, or of the body of a function or branch, in order."""
    body = expr.body if isinstance(expr, relax.Function) else expr
    if isinstance(body, relax.SeqExpr):
        for block in body.blocks:
            yield from block.bindings[:]


def list_reads(expr: relax.Expr) -> list[relax.Var]:
    """Return the variables that a bound value reads, with repetitions. Of a branch or a function:
    all variables in it.
    """
    if isinstance(expr, relax.If | relax.Function | relax.SeqExpr):
        return list(relax.analysis.all_vars(expr))
    return free_vars(expr)


def op_name(expr: relax.Expr | None) -> str:
    """Return the name of the operator that `expr` calls, or ""."""
    return expr.op.name if isinstance(expr, Call) and isinstance(expr.op, Op) else ""


def shape_of(expr: relax.Expr) -> list[Any]:
    """Return the sizes of a tensor, or an empty list if they are unknown."""
    shape = expr.ty.shape if isinstance(expr.ty, relax.TensorType) else None
    return list(shape.values[:]) if isinstance(shape, relax.ShapeExpr) else []


def is_float32(expr: relax.Expr) -> bool:
    """Whether `expr` is a float32 tensor of known shape."""
    return (
        isinstance(expr.ty, relax.TensorType)
        and str(expr.ty.dtype) == "float32"
        and bool(shape_of(expr))
    )


def assume_sizes(symbols: Iterable[tirx.Var]) -> Analyzer:
    """Return an analyzer that knows that these variables are sizes: 0 to `LARGEST`."""
    analyzer = Analyzer()
    for symbol in symbols:
        analyzer.bind(symbol, tvm.ir.Range.from_min_extent(0, tirx.IntImm("int64", LARGEST)))
    return analyzer


def static_sizes(extents: list[Any]) -> list[int] | None:
    """Return the sizes as ints, or None if one is symbolic."""
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return [int(extent) for extent in extents]


def same_extents(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists of sizes are the same, also in their symbols, however they are written."""
    return len(left) == len(right) and all(map(same_size, left, right))


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are the same. 4 * n is n * 4."""
    if tvm_ffi.structural_equal(left, right):
        return True
    is_known = static_size(left) is not None or static_size(right) is not None
    return not is_known and bool(Analyzer().can_prove_equal(left, right))


def same_type(left: relax.Expr, right: relax.Expr) -> bool:
    """Whether both are tensors with the same dtype, known rank and provably the same shape."""
    if not (isinstance(left.ty, relax.TensorType) and isinstance(right.ty, relax.TensorType)):
        return False
    shapes = left.ty.shape, right.ty.shape
    return (
        str(left.ty.dtype) == str(right.ty.dtype)
        and all(isinstance(shape, relax.ShapeExpr) for shape in shapes)
        and same_extents(*(list(shape.values) for shape in shapes))
    )


def with_operands(call: Call, operands: Sequence[relax.Expr]) -> Call:
    """Return the call on other operands. It keeps its type if each operand has the type of the one
    before: TVM takes 0.4 ms or more to infer the type of a convolution.
    """
    keeps = all(map(is_alike, call.args[:], operands))
    type_ = call.ty if keeps else None
    return Call(call.op, operands, call.attrs, call.ty_args, ret_ty=type_)


def replace_vars(expr: relax.Expr, new: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """Return a value with other variables instead of those in `new`."""
    if isinstance(expr, relax.Var):
        return new.get(expr, expr)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([replace_vars(field, new) for field in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(replace_vars(expr.tuple_value, new), expr.index)
    if isinstance(expr, Call):
        return with_operands(expr, [replace_vars(arg, new) for arg in expr.args[:]])
    return expr


def is_alike(old: relax.Expr, new: relax.Expr) -> bool:
    """Whether a result has the same type with one operand as with the other. The numbers of a
    float tensor determine no type, but integers may be a shape.
    """
    if new.same_as(old):
        return True
    if not (isinstance(old.ty, relax.TensorType) and isinstance(new.ty, relax.TensorType)):
        return False
    is_known = all(isinstance(each, relax.Var) for each in (old, new))
    if not is_known and not str(old.ty.dtype).startswith("float"):
        return False
    return new.ty.same_as(old.ty) or tvm_ffi.structural_equal(new.ty, old.ty)


def read_number(expr: Any) -> float | None:
    """Return the number of a scalar, or of a constant with one element: many exporters write
    numbers so. Its axes may give the result of an operator more axes: see `same_type`.
    """
    array = constant_value(expr)
    if array is not None:
        return float(array.item()) if array.size == 1 else None
    if isinstance(expr, tirx.IntImm | tirx.FloatImm):
        return float(expr.value)
    return None
