"""A read-only view of function main: the binding and the readers of each value, and the results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, Op
from tvm.sym import Analyzer

from relayquant.base.runtime import view_constant
from relayquant.errors import ModelError
from relayquant.ir.rewrite.entry import name_main

#: the classes of variables
VARIABLES = (relax.Var, relax.DataflowVar)


@dataclass(frozen=True, eq=False)
class Graph:
    """Function `main` of a module in A-normal form with one dataflow block.

    A model with another name is renamed to main (see `name_main`).

    Raises:
        ModelError: No single function is the model, or it has control flow or more than one block.
    """

    mod: tvm.IRModule

    def __post_init__(self) -> None:
        object.__setattr__(self, "mod", name_main(self.mod))
        body = self.mod["main"].body
        if not isinstance(body, relax.SeqExpr) or len(body.blocks) > 1:
            raise ModelError(
                "Function main must hold one dataflow block; this one has control flow or several "
                "blocks. Pass it through relayquant.prepare, or remove the control flow.",
                code="RQ204",
            )

    @staticmethod
    def of(mod: tvm.IRModule | Graph) -> Graph:
        """Return the view of a module, or a view that knows already what was sought in it."""
        return mod if isinstance(mod, Graph) else Graph(mod)

    @cached_property
    def found(self) -> dict[Any, Any]:
        """What was found in the graph so far, by what was sought: a row is matched once."""
        return {}

    @cached_property
    def func(self) -> relax.Function:
        return self.mod["main"]

    @cached_property
    def bindings(self) -> tuple[relax.VarBinding, ...]:
        """All bindings in order."""
        blocks = self.func.body.blocks
        return tuple(blocks[0].bindings[:]) if blocks else ()

    @cached_property
    def values(self) -> dict[relax.Var, relax.Expr]:
        """Bound variable -> its value, in order.

        The other tables have the same objects for variables: a table finds the same object at
        once, but has to ask TVM whether another one is equal.
        """
        return {binding.var: binding.value for binding in self.bindings}

    @cached_property
    def casts(self) -> frozenset[relax.Var]:
        """Variables bound by match_cast. The type of a cast may define symbolic dimensions."""
        pairs = zip(self.values, self.bindings, strict=True)
        return frozenset(var for var, binding in pairs if isinstance(binding, relax.MatchCast))

    @cached_property
    def size_casts(self) -> dict[tvm.tirx.Var, relax.Var]:
        """Data-dependent symbolic size -> the match_cast that defines it."""
        define = relax.analysis.definable_tir_vars_in_type
        known = {symbol for param in self.func.params for symbol in define(param.ty)}
        found: dict[tvm.tirx.Var, relax.Var] = {}
        for binding in self.bindings:
            for symbol in define(binding.var.ty) if binding.var in self.casts else ():
                if symbol not in known:
                    found.setdefault(symbol, binding.var)
        return found

    @cached_property
    def var2val(self) -> Any:
        """`values` as a TVM map. Without it, the matcher would build the map for every match."""
        return relax.analysis.get_var2val(self.func)

    @cached_property
    def bound(self) -> dict[relax.Expr, relax.Var]:
        """Call or tuple field -> its variable, the inverse of `values`."""
        operators = (Call, relax.TupleGetItem)
        return {value: var for var, value in self.values.items() if isinstance(value, operators)}

    @cached_property
    def vars(self) -> dict[str, relax.Var]:
        """Name -> variable, parameters included."""
        return {var.name: var for var in self.order}

    @cached_property
    def order(self) -> dict[relax.Var, int]:
        """Variable -> position. Parameters come first, with negative positions."""
        params = self.func.params[:]
        return {var: i - len(params) for i, var in enumerate((*params, *self.values))}

    @cached_property
    def users(self) -> dict[relax.Var, tuple[relax.Var, ...]]:
        """Variable -> its readers, each once, in order."""
        users: dict[relax.Var, list[relax.Var]] = {var: [] for var in self.order}
        for reader, value in self.values.items():
            if isinstance(value, relax.Tuple) and reader in self.outputs:
                continue  # the tuple of results is not an operator
            for var in dict.fromkeys(free_vars(value)):
                if (readers := users.get(var)) is not None:
                    readers.append(reader)
        return {var: tuple(readers) for var, readers in users.items()}

    @cached_property
    def outputs(self) -> frozenset[relax.Var]:
        """Variables that the function returns, directly or in a tuple, and the tuple's variable."""
        found: set[relax.Var] = set()
        stack = list(free_vars(self.func.body.body))
        while stack:
            var = stack.pop()
            found.add(var)
            value = self.values.get(var)
            if isinstance(value, relax.Tuple):
                stack += free_vars(value)
        return frozenset(found)

    def call_of(self, expr: relax.Expr) -> Call | None:
        """Return the operator call `expr`, or the operator call that binds the variable `expr`."""
        value: relax.Expr | None = expr
        if isinstance(expr, relax.Var):
            value = self.values.get(expr) if expr not in self.casts else None
        return value if isinstance(value, Call) else None

    def op_name(self, expr: relax.Expr) -> str:
        """Return the operator's name, such as "relax.nn.conv2d", or "" if `expr` is not a call."""
        call = self.call_of(expr)
        return call_name(call) if call is not None else ""

    def has_one_user(self, var: relax.Var) -> bool:
        """Whether exactly one binding reads `var` and the function does not return it."""
        return len(self.users[var]) == 1 and var not in self.outputs

    def only_user(self, var: relax.Var) -> relax.Var | None:
        """Return the only reader of `var`, if the function does not return `var`."""
        return self.users[var][0] if self.has_one_user(var) else None


def iterate_results(expr: relax.Expr) -> Iterator[relax.Expr]:
    """Iterate over the results of main. Nested tuples are flattened."""
    if isinstance(expr, relax.Tuple):
        for field in expr.fields:
            yield from iterate_results(field)
    else:
        yield expr


def result_expr(graph: Graph) -> relax.Expr:
    """Return the result of main. A variable that is bound to a tuple is returned as the tuple."""
    body = graph.func.body.body
    value = graph.values.get(body) if isinstance(body, relax.Var) else None
    return value if isinstance(value, relax.Tuple) else body


def call_name(call: Call) -> str:
    """Return the operator name of a call, or the callee's name for call_tir and functions."""
    if isinstance(call.op, Op):
        return call.op.name
    return str(getattr(call.op, "name_hint", type(call.op).__name__))


def free_vars(expr: relax.Expr) -> list[relax.Var]:
    """Return the variables that a value (call, tuple, projection) reads, in order, with
    repetitions.
    """
    # By the exact class: `isinstance` takes five times as long to say no.
    kind: Any = type(expr)
    found: list[Any] = [expr] if kind in VARIABLES else []
    if kind is Call:
        # A slice: TVM's arrays take three times as long to iterate over.
        parts = expr.args[:]
    elif kind is relax.Tuple:
        parts = expr.fields[:]
    else:
        parts = [expr.tuple_value] if kind is relax.TupleGetItem else []
    for part in parts:
        if type(part) in VARIABLES:
            found.append(part)
        else:
            found += free_vars(part)
    return found


def constant_value(expr: relax.Expr) -> np.ndarray | None:
    """Return the array of a tensor constant, which nothing may write to, else None."""
    if isinstance(expr, GenericConst) and isinstance(expr.value, tvm.runtime.Tensor):
        return view_constant(expr.value)
    return None


def tensor_shape(expr: relax.Expr) -> tuple[int | str, ...] | None:
    """Return the shape, with symbolic dimensions as text. None if it is unknown or not a tensor."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or ty.shape is None:
        return None
    dims = getattr(ty.shape, "values", None)
    if dims is None:
        return None
    return tuple(dim_name(dim) if (size := static_size(dim)) is None else size for dim in dims[:])


def static_size(dim: Any) -> int | None:
    """Return a dimension or other integer expression as int, or None if it is symbolic."""
    return int(dim) if isinstance(dim, int | tvm.tirx.IntImm) else None


#: What TVMScript writes around a number of an expression, and before a function.
SCRIPT = re.compile(r"T\.int(?:32|64)\((-?\d+)\)|\bT\.")


def dim_name(dim: Any) -> str:
    """Return a symbolic dimension as text, "n * 4". Sizes of one canonical form, such as 4 * n and
    n * 4, have the same text.
    """
    # TVM prints a dimension named "T" as "T_1", because T is a name in TVMScript.
    if isinstance(dim, tvm.tirx.Var):
        return dim.name
    return SCRIPT.sub(r"\1", str(Analyzer().canonical_simplify(dim)))


def tensor_dtype(expr: relax.Expr) -> str:
    """Return the dtype of a tensor, or "" for anything else."""
    return str(expr.ty.dtype) if isinstance(expr.ty, relax.TensorType) else ""
