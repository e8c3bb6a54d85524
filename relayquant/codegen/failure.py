"""A module that TVM could not compile -> an error that names the operator, for `compilation`: the
first of its calls that cannot be compiled alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.errors import ModelError
from relayquant.rewrite.expressions import list_bindings
from relayquant.rewrite.function import make_main
from relayquant.rewrite.graph import tensor_dtype


def explain_failure(
    mod: tvm.IRModule, compile_alone: Callable[[tvm.IRModule], Any]
) -> ModelError | None:
    """The error of the first call of a module that `compile_alone` cannot compile; None where each
    of them compiles, and it is their combination that does not.
    """
    for name, call in find_calls(mod):
        try:
            compile_alone(isolate_call(call))
        except Exception as alone:
            dtypes = ", ".join(filter(None, map(tensor_dtype, call.args)))
            return ModelError(
                f"value {name!r}, operator {call.op.name} of {dtypes or 'no tensors'}: TVM cannot "
                f"compile it: {last_line(alone)}. Other types may have code: cast the operands, "
                "and the result back."
            )
    return None


def find_calls(mod: tvm.IRModule) -> Iterator[tuple[str, Call]]:
    """Calls of operators with the names of their values, one of each that are equal but for
    operands.
    """
    seen: set[Any] = set()
    for _, func in mod.functions_items():
        if not isinstance(func, relax.Function):
            continue
        for binding in list_bindings(func):
            call = binding.value
            if not isinstance(call, Call) or not isinstance(call.op, tvm.ir.Op):
                continue
            if call.op.name.startswith("relax.call") or not isinstance(call.ty, relax.TensorType):
                continue
            key = tvm_ffi.structural_hash(isolate_call(call))
            if key not in seen:
                seen.add(key)
                yield binding.var.name, call


def isolate_call(call: Call) -> tvm.IRModule:
    """A module of this call alone, of operands of the same types; constants stay. Sizes that none
    of its operands has come with one more.
    """
    params: list[relax.Var] = []

    def pass_operand(expr: Any) -> Any:
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([pass_operand(field) for field in expr.fields])
        if isinstance(expr, GenericConst) or not isinstance(expr, relax.Var):
            return expr
        params.append(relax.Var(f"p{len(params)}", expr.ty))
        return params[-1]

    alone = Call(call.op, [pass_operand(arg) for arg in call.args], call.attrs, call.ty_args)
    sizes = relax.analysis.free_symbolic_vars(relax.Function(params, alone, call.ty))
    if sizes:
        params.append(relax.Var("sizes", relax.TensorType([*sizes], "bool")))
    return make_main(params, lambda _: alone)


def last_line(error: Exception) -> str:
    """What an error of TVM says, without the stack above it, and remarks on how it is printed."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("#")]
    return said[-1].rstrip(".:") if said else type(error).__name__
