"""Loop nests of operators -> the same, or an error if they give another type than the operator
declares; around `table`, for `passes`.

What an operator declares and what its loop nest computes is written in two places, of TVM or here.
Where they differ, values behind the operator are taken for values of another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tvm import relax, tirx
from tvm.ir import Call, Op

from relayquant.codegen.legalization.table import LEGALIZATIONS
from relayquant.errors import ModelError
from relayquant.ir.rewrite.inline import list_dimensions

Legalize = Callable[[relax.BlockBuilder, Call], Any]


@cache
def list_legalizations() -> Mapping[str, Legalize]:
    """List the legalizations of all operators that have one, each with the check."""
    of_tvm = {name: Op.get(name).get_attr("FLegalize") for name in Op.list_op_names()}
    known = {**{name: found for name, found in of_tvm.items() if found}, **LEGALIZATIONS}
    return {name: check_declared(legalize) for name, legalize in known.items()}


def check_declared(legalize: Legalize) -> Legalize:
    """Return a legalization that raises ModelError if its result contradicts the call's type."""

    def run(builder: relax.BlockBuilder, call: Call) -> Any:
        made = builder.normalize(legalize(builder, call))
        if contradicts(made.ty, call.ty):
            raise ModelError(
                f"{call.op.name} declares {call.ty}, its loop nest gives {made.ty}. This is a "
                "defect of relayquant or TVM; please report it with the operator's attributes.",
                code="RQ206",
            )
        return made

    return run


def contradicts(made: Any, declared: Any) -> bool:
    """Whether two types differ in what both of them know: fields, dtype, rank, fixed sizes."""
    if isinstance(made, relax.TupleType) and isinstance(declared, relax.TupleType):
        pairs = zip(made.fields, declared.fields, strict=False)
        return len(made.fields) != len(declared.fields) or any(contradicts(*pair) for pair in pairs)
    if not isinstance(made, relax.TensorType) or not isinstance(declared, relax.TensorType):
        return relax.TupleType in (type(made), type(declared))
    dtypes = {str(ty.dtype) for ty in (made, declared) if ty.dtype is not None}
    if len(dtypes) == 2:
        return True
    if -1 not in (made.ndim, declared.ndim) and made.ndim != declared.ndim:
        return True
    sizes = zip(list_dimensions(made), list_dimensions(declared), strict=False)
    return any(
        isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm) and int(a) != int(b)
        for a, b in sizes
    )
