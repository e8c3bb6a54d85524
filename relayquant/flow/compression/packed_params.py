"""Packed parameters: a function that takes weights as one tuple -> a parameter for each weight. It
runs first in compression.

    def decode(x, packed_params):        def decode(x, w0, w1):
        w = packed_params[1]         ->
        y = matmul(x, w)                     y = matmul(x, w1)

`relax.frontend.nn` exports this form with param_mode "packed".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import TupleType

from relayquant.errors import ModelError, format_count
from relayquant.ir.rewrite.expressions import list_bindings


def unpack_params(mod: tvm.IRModule, names: Sequence[str], *, is_ordered: bool) -> tvm.IRModule:
    """Replace tuples of weights by one parameter per member, called `names` in order. Without
    tuples, `mod` is returned.

    Args:
        mod: Functions whose attribute num_input says how many parameters are inputs.
        names: One for each member, the same for all functions.
        is_ordered: Whether `names` are known to have the order of the tuple. Otherwise the names of
            values in the functions must agree.

    Raises:
        ModelError: there are more or fewer names than members, or a name does not agree.
    """
    functions = dict(mod.functions_items())
    for gvar, func in functions.items():
        packed = find_packed(func)
        if packed is not None:
            members = make_members(gvar.name_hint, packed, names)
            if not is_ordered:
                check_names(gvar.name_hint, func, packed, names)
            functions[gvar] = Unpacking(packed, members).run(func)
    return tvm.IRModule(functions, attrs=mod.attrs)


def find_packed(func: Any) -> relax.Var | None:
    """Return the parameter of a function, after its inputs, that is a tuple of tensors."""
    if not isinstance(func, relax.Function) or "num_input" not in (func.attrs or {}):
        return None
    weights = func.params[int(func.attrs["num_input"]) :]
    if len(weights) != 1 or not isinstance(weights[0].ty, TupleType):
        return None
    is_bundle = all(isinstance(field, relax.TensorType) for field in weights[0].ty.fields)
    return weights[0] if is_bundle else None


def make_members(function: str, packed: relax.Var, names: Sequence[str]) -> list[relax.Var]:
    """Make a parameter for each member of the tuple."""
    fields = list(packed.ty.fields)
    if len(fields) != len(names):
        raise ModelError(
            f"params holds {format_count(len(names), 'value')}, {packed.name!r} of {function} has "
            f"{format_count(len(fields), 'member')}. Pass the list of (name, value) in the order "
            "in which `relax.frontend.nn` gives parameters with a module.",
            code="RQ204",
        )
    return [relax.Var(name, ty) for name, ty in zip(names, fields, strict=True)]


def check_names(
    function: str, func: relax.Function, packed: relax.Var, names: Sequence[str]
) -> None:
    """Raise unless the values bound to members have these names. TVM writes "a.b" as "a_b" and
    adds a number if the name is taken.
    """
    for binding in list_bindings(func):
        value = binding.value
        if not isinstance(value, relax.TupleGetItem) or not value.tuple_value.same_as(packed):
            continue
        name, found = names[value.index], binding.var.name
        if not re.fullmatch(re.escape(name.replace(".", "_")) + r"\d*", found):
            raise ModelError(
                f"params has {name!r} at place {value.index}, where {function} reads {found!r} of "
                f"{packed.name!r}. Pass a list of (name, value), or a mapping, in the order in "
                "which `relax.frontend.nn` gives parameters with a module.",
                code="RQ204",
            )


@relax.expr_functor.mutator
class Unpacking(relax.PyExprMutator):
    """Replaces the members of a tuple by parameters, in one function."""

    def __init__(self, packed: relax.Var, members: Sequence[relax.Var]) -> None:
        super().__init__()
        self.packed, self.members = packed, members

    def run(self, func: relax.Function) -> relax.Function:
        """Return the function with a parameter for each member, after its inputs."""
        params = [*func.params[:-1], *self.members]
        body = self.visit_expr(func.body)
        return relax.Function(params, body, func.ret_ty, func.is_pure, func.attrs)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value.same_as(self.packed):
            self.set_var_remap(binding.var, self.members[value.index])
        else:
            super().visit_var_binding_(binding)

    def visit_tuple_getitem_(self, op: relax.TupleGetItem) -> relax.Expr:
        if op.tuple_value.same_as(self.packed):
            return self.members[op.index]
        return super().visit_tuple_getitem_(op)
