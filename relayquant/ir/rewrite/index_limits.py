"""Which inputs of a model are indices, and how many places they select from: numbers of tokens, of
categories. Compiled code does not check an index, so wrong data would go unnoticed.
"""

from __future__ import annotations

import json

from tvm import relax
from tvm.ir import Call

from relayquant.errors import format_count
from relayquant.ir.rewrite.expressions import list_bindings, op_name
from relayquant.ir.rewrite.graph import tensor_dtype, tensor_shape

#: Attribute of main: JSON text, name of an input -> number of places. Preparation replaces the mode
#: of `take` in which an index must fit by one in which any does, so it writes the numbers down.
LIMITS_ATTR = "relayquant.indices"
#: operators after which an index is the same number
KEEPING = frozenset(
    f"relax.{name}"
    for name in ("astype", "reshape", "expand_dims", "squeeze", "flatten", "permute_dims")
)


def find_index_limits(func: relax.Function) -> dict[str, int]:
    """Map inputs of a function that select elements to the number of places: an index must be from
    -n to n - 1. An input that is changed before it selects, and one for which any number is
    allowed (`take` with mode "wrap" or "clip"), is left out.
    """
    attrs = func.attrs
    known = attrs is not None and LIMITS_ATTR in attrs
    limits: dict[str, int] = json.loads(str(attrs[LIMITS_ATTR])) if known else {}
    origins: dict[relax.Expr, str] = {param: param.name for param in func.params}
    moved: dict[relax.Expr, relax.Expr] = {}
    for binding in list_bindings(func):
        value = getattr(binding, "value", None)
        if isinstance(value, relax.Var) and value in origins:
            origins[binding.var] = origins[value]
        if not isinstance(value, Call):
            continue
        name, args = op_name(value), value.args
        if name == "relax.add" and args[0] in origins:
            moved[binding.var] = args[0]
        if name == "relax.where" and moved.get(args[1]) == args[2]:  # where(i < 0, i + n, i)
            origins[binding.var] = origins[args[2]]
        if name in KEEPING and args[0] in origins and "int" in str(tensor_dtype(binding.var)):
            origins[binding.var] = origins[args[0]]
        if name == "relax.take" and args[1] in origins and str(value.attrs.mode) == "fast":
            count = count_places(value)
            if count is not None:
                index = origins[args[1]]
                limits[index] = min(count, limits.get(index, count))
    return limits


def count_places(call: Call) -> int | None:
    """Return the number of places that a `take` selects from. None if it is symbolic."""
    shape, axis = tensor_shape(call.args[0]), call.attrs.axis
    if shape is None or (axis is None and len(shape) != 1):
        return None
    size = shape[0 if axis is None else int(axis)]
    return None if isinstance(size, str) else int(size)


def describe_places(places: int) -> str:
    """Say which indices a message about a wrong one allows."""
    count = format_count(places, "place")
    return f"the model selects from {count}, so {-places} to {places - 1} are allowed."
