"""The binding walker: rebuilds main once, in topological order, with exact value names.

Unlike `relax.dpl.rewrite_call`, it visits every binding once. A replacement may therefore contain
the replaced operator, and values keep their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.ir.rewrite.casts import canonicalize_bindings
from relayquant.ir.rewrite.expressions import replace_vars, with_operands
from relayquant.ir.rewrite.function import define_function, find_free_name
from relayquant.ir.rewrite.graph import Graph, call_name, free_vars

#: Returns the new value of a binding, which keeps its name, or None to drop the binding.
Visitor = Callable[["Emitter", relax.VarBinding], "relax.Expr | None"]

#: Expressions that have operands.
COMPOSED = Call | relax.Tuple | relax.TupleGetItem


class Emitter:
    """Builder of the new function, for one rewrite."""

    def __init__(
        self, mod: tvm.IRModule, taken: Iterable[str], casts: Iterable[relax.Var] = ()
    ) -> None:
        self.builder = relax.BlockBuilder(mod)
        self._casts = set(casts)
        self._new: dict[relax.Var, relax.Expr] = {}
        self._taken = set(taken)

    def emit(self, expr: relax.Expr, name: str) -> relax.Expr:
        """Bind `expr` to a new variable `name` (made unique). Variables and constants are returned
        as they are.
        """
        return self._bind_new(self.normalize(expr, name), name)

    def normalize(self, expr: relax.Expr, name: str) -> relax.Expr:
        """Infer the type of `expr`. Each call inside it is bound to a new variable, named after
        `name` and the call's operator. The builder alone would name it lv, and so may the model.
        """
        new: dict[relax.Expr, relax.Expr] = {}
        for inner, inner_name in list_inner(expr, name):
            opened = replace_operands(inner, new)
            if not isinstance(inner, relax.Tuple):
                opened = self._bind_new(self.builder.normalize(opened), inner_name)
            new[inner] = opened
        return self.builder.normalize(replace_operands(expr, new))

    def _bind_new(self, expr: relax.Expr, name: str) -> relax.Expr:
        return self._bind(expr, self.unique_name(name)) if isinstance(expr, COMPOSED) else expr

    def _bind(self, expr: relax.Expr, name: str) -> relax.Var:
        var = relax.DataflowVar(name, expr.ty)
        self.builder.emit_normalized(relax.VarBinding(var, expr))
        return var

    def unique_name(self, name: str) -> str:
        """Reserve and return `name`, or `name.1`, `name.2`, ... if it is taken."""
        unique = find_free_name(name, self._taken)
        self._taken.add(unique)
        return unique

    def get(self, expr: relax.Expr) -> relax.Expr:
        """Translate an expression of the old function to the new function."""
        if isinstance(expr, relax.Var):
            return self._new.get(expr, expr)
        if isinstance(expr, relax.Tuple):
            fields = self._get_all(expr.fields)
            return expr if fields is None else relax.Tuple(fields)
        if isinstance(expr, relax.TupleGetItem):
            value = self.get(expr.tuple_value)
            kept = value.same_as(expr.tuple_value)
            return expr if kept else relax.TupleGetItem(value, expr.index)
        if isinstance(expr, Call):
            args = self._get_all(expr.args[:])
            return expr if args is None else with_operands(expr, args)
        return expr

    def _get_all(self, operands: Sequence[relax.Expr]) -> list[relax.Expr] | None:
        """Translate each operand. None if all are the same in the new function."""
        new = [self.get(operand) for operand in operands]
        is_same = all(a.same_as(b) for a, b in zip(new, operands, strict=True))
        return None if is_same else new

    def keep(self, binding: relax.Binding) -> None:
        """Take over a binding that reads only unchanged values, without inferring its type
        again.
        """
        self._casts.discard(binding.var)
        self._new.pop(binding.var, None)
        self.builder.emit_normalized(binding)

    def bind(self, old: relax.Var, expr: relax.Expr) -> relax.Expr:
        """Bind `expr` to the name of `old`. From now on, it replaces `old`."""
        expr = self.normalize(expr, old.name)
        if old in self._casts:
            self._casts.remove(old)
            var = relax.DataflowVar(old.name, old.ty)
            self.builder.emit_normalized(relax.MatchCast(var, expr, old.ty))
            expr = var
        elif isinstance(expr, COMPOSED):
            expr = self._bind(expr, old.name)
        self._new[old] = expr
        return expr

    def replace(self, old: relax.Var, expr: relax.Expr) -> None:
        """Replace `old` by `expr`, which is already emitted, from now on."""
        self._new[old] = expr


def list_operands(expr: relax.Expr) -> list[relax.Expr]:
    """Return the operands of a call, the fields of a tuple, or the tuple of a projection."""
    if isinstance(expr, Call):
        return list(expr.args[:])
    if isinstance(expr, relax.TupleGetItem):
        return [expr.tuple_value]
    return list(expr.fields) if isinstance(expr, relax.Tuple) else []


def list_inner(expr: relax.Expr, name: str) -> list[tuple[relax.Expr, str]]:
    """List what is composed inside `expr`, each once behind its operands, with a name that says
    where it is. Without recursion: a callback may return thousands of nested calls.
    """
    found: list[tuple[relax.Expr, str]] = []
    seen: set[relax.Expr] = set()
    waiting = [(expr, name, False)]
    while waiting:
        each, own, is_done = waiting.pop()
        if is_done:
            found.append((each, own))
        elif each not in seen:
            seen.add(each)
            waiting.append((each, own, True))
            inner = [operand for operand in list_operands(each) if isinstance(operand, COMPOSED)]
            waiting += [(operand, name_inner(operand, own), False) for operand in inner[::-1]]
    return found[:-1]


def name_inner(operand: relax.Expr, name: str) -> str:
    """Return the name of a call or projection inside a value. A tuple has that of its value."""
    if isinstance(operand, relax.Tuple):
        return name
    operator = call_name(operand) if isinstance(operand, Call) else "field"
    return f"{name}.{operator.rpartition('.')[-1]}"


def replace_operands(expr: relax.Expr, new: Mapping[relax.Expr, relax.Expr]) -> relax.Expr:
    """Return an expression with new operands instead of those in `new`."""
    operands = list_operands(expr) if new else []
    replaced = [new[each] if isinstance(each, COMPOSED) else each for each in operands]
    if all(a.same_as(b) for a, b in zip(operands, replaced, strict=True)):
        return expr
    if isinstance(expr, relax.Tuple):
        return relax.Tuple(replaced)
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(replaced[0], expr.index)
    return Call(expr.op, replaced, expr.attrs, expr.ty_args)


def rewrite_main(
    mod: tvm.IRModule,
    visit: Visitor,
    *,
    params: Sequence[relax.Var] | None = None,
    before: Callable[[Emitter], None] | None = None,
    result: Callable[[Emitter, relax.Expr], relax.Expr] | None = None,
    attrs: Mapping[str, Any] | None = None,
    tidy: bool = True,
) -> tvm.IRModule:
    """Rebuild main by `visit`. Other functions are kept if they are still called.

    Args:
        mod: A module that `Graph` accepts. It is not changed.
        visit: Called once per binding, in order. `emitter.get` translates old expressions.
        params: Parameters of the new function. They must include the old parameters that are still
            used.
        before: Called before the first binding, to emit values at the start.
        result: Maps the translated result expression to the new one.
        attrs: Function attributes to add or replace. The value None removes an attribute.
        tidy: Whether `tidy_module` is applied. False saves time if the new module may be discarded.
    """
    graph = Graph(mod)
    mod = graph.mod  # its model is named main
    func_attrs = dict(graph.func.attrs.items()) if graph.func.attrs else {}
    func_attrs.pop("global_symbol", None)
    for key, value in (attrs or {}).items():
        func_attrs.pop(key, None)
        if value is not None:
            func_attrs[key] = value
    taken = {binding.var.name for binding in graph.bindings}
    taken.update(param.name for param in (params or graph.func.params))
    emitter = Emitter(mod, taken, graph.casts)
    params = list(graph.func.params) if params is None else list(params)

    def emit() -> relax.Expr:
        if before is not None:
            before(emitter)
        for binding in graph.bindings:
            value = visit(emitter, binding)
            is_inner = isinstance(binding.var, relax.DataflowVar)
            if value is not None and is_inner and value.same_as(binding.value):
                emitter.keep(binding)
            elif value is not None:
                emitter.bind(binding.var, value)
        out = emitter.get(graph.func.body.body)
        if result is not None:
            out = result(emitter, out)
        return emitter.builder.emit_output(out)

    main = define_function(emitter.builder, params, emit, attrs=func_attrs)
    built = emitter.builder.finalize()
    functions = {gv: func for gv, func in built.functions.items() if gv.name_hint != "main"}
    own = mod.get_global_var("main")  # by which other functions may call it
    functions[own] = _name_output(main).with_attr("global_symbol", "main")
    rebuilt = tvm.IRModule(functions, attrs=mod.attrs)
    return tidy_module(rebuilt) if tidy else rebuilt


def _name_output(func: relax.Function) -> relax.Function:
    """Give the returned value its name back. `emit_output` of a variable adds an alias `gv`.

    v = f(x); gv = v; return gv -> v = f(x); return v (v is a Var, not a DataflowVar)
    """
    (block,) = func.body.blocks
    *bindings, alias = block.bindings
    old = alias.value
    if not isinstance(old, relax.DataflowVar):
        return func
    new = relax.Var(old.name, old.ty)
    swap = partial(replace_vars, new={old: new})
    builder = relax.BlockBuilder()
    builder.begin_scope(func.params)  # symbolic sizes of parameters are at least 0
    renamed = []
    for binding in bindings:
        if not any(var.same_as(old) for var in (binding.var, *free_vars(binding.value))):
            renamed.append(binding)
            continue
        value = builder.normalize(swap(binding.value))
        if isinstance(binding, relax.MatchCast):
            renamed.append(relax.MatchCast(swap(binding.var), value, binding.ty))
        else:
            renamed.append(relax.VarBinding(swap(binding.var), value))
    builder.end_scope()
    body = relax.SeqExpr([relax.DataflowBlock(renamed)], new)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def tidy_module(mod: tvm.IRModule) -> tvm.IRModule:
    """Remove alias bindings, unused values and uncalled functions, and check the result.

    Types were inferred when the values were bound. `check_stage` infers them once more, at the end
    of a stage.
    """
    mod = relax.transform.DeadCodeElimination(["main"])(canonicalize_bindings(mod))
    relax.analysis.well_formed(mod, check_ty=False)
    return mod


def expose_values(mod: tvm.IRModule, names: list[str]) -> tvm.IRModule:
    """Return a module in which main returns the named values before its results."""
    found: dict[str, relax.Expr] = {}

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        value = emitter.bind(binding.var, emitter.get(binding.value))
        found[binding.var.name] = value
        return value

    return rewrite_main(
        mod, visit, result=lambda emitter, out: relax.Tuple([*(found[n] for n in names), out])
    )
