"""Inline the functions that main calls, before the editor reads main.

TVM's `inline_functions` leaves symbolic dimensions of an inlined function undefined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, GlobalVar, TupleType

from relayquant.errors import ModelError
from relayquant.ir.rewrite.expressions import list_bindings

#: Replacements for the parameters, values and dimensions of one call of a function.
Substitution = dict[relax.Var, Any]
Node = TypeVar("Node")


def inline_functions(mod: tvm.IRModule) -> relax.Function:
    """Return main with all calls of Relax functions of the module inlined.

    Values are named after the call that they come from:

        block(x, w): product = matmul(x, w); return relu(product)
        main(x):     first = block(x, w1); ...
    ->  main(x):     first.product = matmul(x, w1); first = relu(first.product); ...

    Symbolic dimensions of the function become the sizes at the call. The module is not changed.

    Raises:
        ModelError: A function calls itself, directly or through others. Or the caller does not know
            the size of a symbolic dimension of the function.
    """
    main = mod["main"]
    if not any(find_callee(mod, binding.value) for binding in list_bindings(main)):
        return main
    bindings = list(_copy_bindings(mod, main, {}, ("main",), ""))
    result = bindings.pop().value
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], result)
    return relax.Function(main.params, body, main.ret_ty, bool(main.is_pure), main.attrs)


def find_callee(mod: tvm.IRModule, value: relax.Expr) -> GlobalVar | None:
    """Return the Relax function of the module that `value` calls, or None."""
    callee = value.op if isinstance(value, Call) else None
    if isinstance(callee, GlobalVar) and isinstance(mod[callee], relax.Function):
        return callee
    return None


def _copy_bindings(
    mod: tvm.IRModule,
    func: relax.Function,
    new: Substitution,
    path: tuple[str, ...],
    prefix: str,
) -> Iterator[relax.Binding]:
    """Iterate over copies of the bindings of `func`, with all calls inlined.

    `path` holds the functions on the way to `func`. Names get `prefix`. The last binding binds the
    result.
    """
    for binding in list_bindings(func):
        value, kind = substitute(binding.value, new), substitute(binding.var.ty, new)
        name = prefix + binding.var.name
        callee = find_callee(mod, value)
        if callee is not None:
            *inner, last = _copy_call(mod, callee, value, path, name)
            yield from inner
            value = last.value
        var = binding.var
        if prefix:
            new[var] = type(var)(name, kind)
            var = new[var]
        if isinstance(binding, relax.MatchCast):
            yield relax.MatchCast(var, value, substitute(binding.ty, new))
        else:
            yield relax.VarBinding(var, value)
    result = substitute(func.body.body, new)
    yield relax.VarBinding(relax.Var(f"{prefix}result", func.ret_ty), result)


def _copy_call(
    mod: tvm.IRModule, callee: GlobalVar, call: Call, path: tuple[str, ...], name: str
) -> Iterator[relax.Binding]:
    """Iterate over the bindings of the function that value `name` of `path[-1]` calls."""
    inner = callee.name_hint
    if inner in path:
        cycle = " -> ".join((*path[path.index(inner) :], inner))
        raise ModelError(
            f"Value {name!r} of main calls {inner} within {inner} ({cycle}): the depth of this "
            "recursion is unknown before the model runs. Unroll it to a fixed depth.",
            code="RQ204",
        )
    func = mod[callee]
    new: Substitution = dict(zip(func.params, call.args, strict=True))
    for param, arg in zip(func.params, call.args, strict=True):
        for dim, size in match_dimensions(param.ty, arg.ty):
            if size is None:
                raise ModelError(
                    f"Value {name!r} of main calls {inner}, which has dimension {dim.name!r} of "
                    f"{param.name!r}, but the argument is {arg.ty}. Give its shape with match_cast "
                    "before the call.",
                    code="RQ204",
                )
            new.setdefault(dim, size)
    for dim in relax.analysis.defined_symbolic_vars(func):  # defined by match_cast inside
        new.setdefault(dim, tirx.Var(dim.name, dim.ty))
    return _copy_bindings(mod, func, new, (*path, inner), f"{name}.")


def match_dimensions(wanted: Any, given: Any) -> Iterator[tuple[tirx.Var, Any]]:
    """Iterate over the symbolic dimensions of type `wanted` and their sizes in type `given`.

    An unknown size is None.
    """
    if isinstance(wanted, TupleType):
        fields = given.fields if isinstance(given, TupleType) else [None] * len(wanted.fields)
        for pair in zip(wanted.fields, fields, strict=True):
            yield from match_dimensions(*pair)
        return
    dims, sizes = list_dimensions(wanted), list_dimensions(given)
    for place, dim in enumerate(dims):
        if isinstance(dim, tirx.Var):
            yield dim, sizes[place] if place < len(sizes) else None


def list_dimensions(kind: Any) -> list[Any]:
    """Return the dimensions of a tensor type or shape type. Empty if they are unknown."""
    shape = kind if isinstance(kind, relax.ShapeType) else getattr(kind, "shape", None)
    return list(getattr(shape, "values", None) or ())


def substitute(node: Node, new: Substitution) -> Node:
    """Replace variables in an expression or a type, also the variables of dimensions."""
    if not new:
        return node
    result: Any = tvm_ffi.structural_map(node, (relax.Var, lambda var: new.get(var, var)))
    return result
