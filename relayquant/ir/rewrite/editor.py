"""A mutable form of function main, for many small local edits with exact use counts.

The walker rebuilds a function once per pass. The editor applies hundreds of edits and rebuilds once
at the end. Each edit sees the effect of the edits before it, such as the readers of a value.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, Op

from relayquant.errors import ModelError
from relayquant.ir.rewrite.entry import find_entry, name_main
from relayquant.ir.rewrite.expressions import list_bindings, replace_vars
from relayquant.ir.rewrite.function import define_function, find_free_name
from relayquant.ir.rewrite.graph import free_vars
from relayquant.ir.rewrite.inline import inline_functions

#: Sorts after every helper that was defined for the same value.
_LAST = 2**62


@dataclass(frozen=True)
class Clamp:
    """A clamp of the model that a rule merged with others.

    Attributes:
        name: Its value.
        operator: Its operator, as "relax.nn.relu".
        low, high: Its bounds.
    """

    name: str
    operator: str
    low: float
    high: float


class Editor:
    """Function `main` of a module as a table of values. The module itself is never changed.

    Several binding blocks are merged. match_cast is accepted. Functions of the module that main
    calls are inlined. Control flow, recursion and side effects are refused. A model with another
    name is renamed to main (see `name_main`).

    Raises:
        ModelError: No single function is the model, or it has control flow, recursion or side
            effects.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self.entry = find_entry(mod)  #: the model's name in the module
        mod = name_main(mod)
        func = inline_functions(relax.transform.Normalize()(mod))
        if not func.is_pure:
            raise ModelError(
                "Function main has side effects (it is not pure). Its operators cannot be moved "
                "or replaced. Remove assertions, prints and in-place updates from the model.",
                code="RQ204",
            )
        self._mod = mod
        self.params: list[relax.Var] = list(func.params)
        self.attrs: dict[str, Any] = dict(func.attrs.items()) if func.attrs else {}
        self.attrs.pop("global_symbol", None)
        self.values: dict[relax.Var, relax.Expr] = {}
        self.names: dict[relax.Var, str] = {param: param.name for param in self.params}
        self.origins: dict[str, str] = {}  #: helper's name -> value that the helper was made for
        self.source_names: frozenset[str] = frozenset()  #: names from the user's model
        #: name of a clamp -> the clamps that it stands for, if they are several
        self.clamps: dict[str, tuple[Clamp, ...]] = {}
        self._taken = set(self.names.values())
        self._casts: dict[relax.Var, relax.MatchCast] = {}
        self._rank: dict[relax.Var, tuple[int, int]] = {}
        self._users: dict[relax.Var, Counter[relax.Var]] = {
            param: Counter() for param in self.params
        }
        self._builder = relax.BlockBuilder()
        self._helpers = 0
        for binding in list_bindings(func):
            self._read(binding)
        self.result: relax.Expr = func.body.body
        self._resolve_result()

    def _read(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value
        if isinstance(value, relax.If | relax.Function | relax.SeqExpr):
            raise ModelError(
                f"Value {var.name!r} of main is control flow ({type(value).__name__}), which is "
                "not supported. Export the model for one fixed path.",
                code="RQ204",
            )
        callee = value.op if isinstance(value, Call) else None
        if isinstance(callee, relax.Var):
            raise ModelError(
                f"Value {var.name!r} of main calls {callee.name!r}, a function that is defined "
                "inside main. Make it a function of the module, or write its operators into main.",
                code="RQ204",
            )
        if isinstance(binding, relax.MatchCast):
            self._casts[var] = binding
        self._rank[var] = (len(self.values), _LAST)
        self.names[var] = self.unique_name(var.name)
        self._users.setdefault(var, Counter())
        self.values[var] = value
        for read in free_vars(value):
            if read in self._users:
                self._users[read][var] += 1

    def _resolve_result(self) -> None:
        """Return the tuple itself: gv = (a, b); return gv -> return (a, b).

        Every returned value is then a separate variable.
        """

        def resolve(expr: relax.Expr) -> relax.Expr:
            value = self.values.get(expr) if isinstance(expr, relax.Var) else None
            if isinstance(value, relax.Tuple):
                expr = value
            if isinstance(expr, relax.Tuple):
                return relax.Tuple([resolve(field) for field in expr.fields])
            return expr

        self.result = resolve(self.result)
        self.prune()

    # -- questions ---------------------------------------------------------------------------------

    def order(self) -> list[relax.Var]:
        """Return the variables that are bound now, ordered by position."""
        return sorted(self.values, key=self._rank.__getitem__)

    def call_of(self, expr: relax.Expr) -> Call | None:
        """Return the operator call that binds the variable `expr`, else None."""
        value = self.values.get(expr) if isinstance(expr, relax.Var) else None
        return value if isinstance(value, Call) and expr not in self._casts else None

    def op_name(self, expr: relax.Expr) -> str:
        """Return the operator's name, such as "relax.nn.conv2d", or "" if no call binds `expr`."""
        call = self.call_of(expr)
        return call.op.name if call is not None and isinstance(call.op, Op) else ""

    def users(self, var: relax.Var) -> list[relax.Var]:
        """Return the variables with values that read `var`, each once."""
        return list(self._users[var])

    def outputs(self) -> list[relax.Var]:
        """Return the variables that main returns, with repetitions."""
        return list(free_vars(self.result))

    def is_output(self, var: relax.Var) -> bool:
        return any(var.same_as(out) for out in self.outputs())

    def has_one_use(self, var: relax.Var) -> bool:
        """Whether exactly one binding reads `var`, once, and main does not return it."""
        return var in self.values and self._users[var].total() == 1 and not self.is_output(var)

    def is_cast(self, var: relax.Var) -> bool:
        """Whether `var` is bound by match_cast, which defines symbolic dimensions."""
        return var in self._casts

    # -- edits -------------------------------------------------------------------------------------

    def unique_name(self, name: str) -> str:
        """Reserve and return `name`, or `name.1`, `name.2`, ... if it is taken."""
        unique = find_free_name(name, self._taken)
        self._taken.add(unique)
        return unique

    def define(
        self, anchor: relax.Var, expr: relax.Expr, name: str, origin: relax.Var | None = None
    ) -> relax.Var:
        """Define a new value `name` (made unique) before `anchor`.

        The value shares the source of `origin`, or of `anchor`.
        """
        value = self._builder.normalize(expr)
        self._helpers += 1
        unique = self.unique_name(name)
        var = relax.DataflowVar(unique, value.ty)
        self.names[var] = unique
        self.origins[unique] = self.names[anchor if origin is None else origin]
        self._rank[var] = (self._rank[anchor][0], self._helpers)
        self._users[var] = Counter()
        self.values[var] = value
        self._count(var, value, 1)
        return var

    def redefine(self, var: relax.Var, expr: relax.Expr) -> None:
        """Bind `var` to another value of the same type. Values without readers are removed."""
        value = self._builder.normalize(expr)
        if isinstance(value, relax.Var):
            self.replace(var, value)
            return
        old = self.values[var]
        self.values[var] = value
        self._casts.pop(var, None)
        self._count(var, value, 1)
        self._count(var, old, -1)
        self._drop_dead(old)

    def replace(self, var: relax.Var, by: relax.Expr) -> None:
        """Replace `var` everywhere by `by` (a variable bound earlier, a constant, ...)."""
        self._replace_reads(var, by)
        self._drop(var)

    def _replace_reads(self, var: relax.Var, by: relax.Expr) -> None:
        swapped = {var: by}
        for user in self.users(var):
            old = self.values[user]
            value = replace_vars(old, swapped)
            if isinstance(value, Call):
                value = self._builder.normalize(value)
            self.values[user] = value
            self._count(user, old, -1)
            self._count(user, value, 1)
        self.result = replace_vars(self.result, swapped)

    def alias(self, var: relax.Var, by: relax.Expr) -> None:
        """Bind `var` to an equal variable or constant, and keep its name as a result of main.

        All other readers read the equal value directly, so that patterns see the operator that
        computes it.
        """
        result = self.result
        self._replace_reads(var, by)
        self.result = result
        old = self.values[var]
        self.values[var] = by
        self._count(var, by, 1)
        self._count(var, old, -1)
        self._drop_dead(old)

    def bind_param(self, param: relax.Var, value: relax.Expr) -> None:
        """Replace a parameter of main by a constant."""
        self._replace_reads(param, value)
        self.params = [other for other in self.params if not other.same_as(param)]

    def function(self, gvar: relax.Expr) -> tvm.ir.BaseFunc:
        """Return the module function of a global variable."""
        return self._mod[gvar]

    def prune(self) -> None:
        """Remove every value that the results do not need."""
        for var in reversed(self.order()):
            if self._is_dead(var):
                self._drop(var)

    def _is_dead(self, var: relax.Var) -> bool:
        return (
            var in self.values
            and not self._users[var]
            and not self.is_output(var)
            and var not in self._casts
        )

    def _drop(self, var: relax.Var) -> None:
        """Remove a value, and those that only it read. A loop: there may be thousands in a row."""
        waiting = [var]
        while waiting:
            each = waiting.pop()
            if each not in self.values:
                continue
            old = self.values.pop(each)
            self._casts.pop(each, None)
            self._count(each, old, -1)
            waiting += [read for read in free_vars(old) if self._is_dead(read)]

    def _drop_dead(self, expr: relax.Expr) -> None:
        for read in list(free_vars(expr)):
            if self._is_dead(read):
                self._drop(read)

    def _count(self, user: relax.Var, value: relax.Expr, step: int) -> None:
        for read in free_vars(value):
            counts = self._users.get(read)
            if counts is None:
                continue
            counts[user] += step
            if counts[user] == 0:
                del counts[user]

    # -- result ------------------------------------------------------------------------------------

    def _schedule(self) -> Iterator[relax.Var]:
        """Iterate over the values in topological order, as close to their positions as possible."""
        waiting: dict[relax.Var, int] = {}
        ready: list[tuple[tuple[int, int], int, relax.Var]] = []
        for count, (var, value) in enumerate(self.values.items()):
            needed = {read for read in free_vars(value) if read in self.values}
            waiting[var] = len(needed)
            if not needed:
                heapq.heappush(ready, (self._rank[var], count, var))
        serial = len(self.values)
        while ready:
            _, _, var = heapq.heappop(ready)
            yield var
            for user in self._users[var]:
                waiting[user] -= 1
                if not waiting[user]:
                    serial += 1
                    heapq.heappush(ready, (self._rank[user], serial, user))

    def build(self, attrs: Mapping[str, Any] | None = None) -> tvm.IRModule:
        """Build a module of main in A-normal form with one dataflow block.

        The module keeps the functions that main calls by call_tir.

        Every result of main is a Var with its name. A returned parameter or constant gets an alias
        binding. `attrs` are added to the attributes of main.
        """
        builder = relax.BlockBuilder()
        new: dict[relax.Var, relax.Expr] = {}
        params = [relax.Var(self.names[param], param.ty) for param in self.params]
        new.update(zip(self.params, params, strict=True))
        functions = self._called_functions()
        outputs = {var for var in self.outputs() if var in self.values}

        def emit() -> relax.Expr:
            for var in self._schedule():
                value = builder.normalize(replace_vars(self.values[var], new))
                kind = relax.Var if var in outputs else relax.DataflowVar
                cast = self._casts.get(var)
                if cast is not None:
                    bound = kind(self.names[var], cast.ty)
                    builder.emit_normalized(relax.MatchCast(bound, value, cast.ty))
                else:
                    bound = kind(self.names[var], value.ty)
                    builder.emit_normalized(relax.VarBinding(bound, value))
                new[var] = bound
            return self._emit_result(builder, self.result, new)

        attrs = {**self.attrs, **(attrs or {}), "global_symbol": "main"}
        functions["main"] = define_function(builder, params, emit, attrs=attrs)
        mod = tvm.IRModule(functions, attrs=self._mod.attrs)
        relax.analysis.well_formed(mod)
        return mod

    def _emit_result(
        self, builder: relax.BlockBuilder, expr: relax.Expr, new: Mapping[relax.Var, relax.Expr]
    ) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            fields = [self._emit_result(builder, field, new) for field in expr.fields]
            return builder.normalize(relax.Tuple(fields))
        if isinstance(expr, relax.Var) and expr in self.values:
            return new[expr]
        value = builder.normalize(replace_vars(expr, new))
        hint = self.names.get(expr, "constant") if isinstance(expr, relax.Var) else "constant"
        out = relax.Var(self.unique_name(f"{hint}.output"), value.ty)
        builder.emit_normalized(relax.VarBinding(out, value))
        return out

    def _called_functions(self) -> dict[Any, tvm.ir.BaseFunc]:
        """Return the functions that are still called by call_tir, with their global variables."""
        functions: dict[Any, tvm.ir.BaseFunc] = {}
        for value in self.values.values():
            for arg in value.args[:] if isinstance(value, Call) else ():
                if isinstance(arg, tvm.ir.GlobalVar):
                    functions[arg] = self._mod[arg]
        return functions
