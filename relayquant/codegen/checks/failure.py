"""A module that TVM could not compile -> an error that names the operator; for `compilation`.

The operator is the first one that cannot be compiled alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, GenericConst

from relayquant.codegen.checks.shape_rules import describe_misfit
from relayquant.codegen.rewrites.inner_sizes import describe_conflict
from relayquant.errors import ModelError
from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.function import list_functions, make_main
from relayquant.ir.rewrite.graph import tensor_dtype

FIX_SIZE = (
    "Fix the symbolic dimension that it depends on: load with shapes=, or export a PyTorch "
    "program without it in dynamic_shapes."
)


def explain_failure(
    mod: tvm.IRModule, compile_alone: Callable[[tvm.IRModule], Any]
) -> ModelError | None:
    """Find the first call of a module that `compile_alone` cannot compile, and return its error.

    Before that, products that contradict each other are named. If each call compiles, the error
    names the first value whose size is computed when the model runs. None if there is no such value
    either: only the combination of the calls does not compile.
    """
    if conflict := describe_conflict(mod):
        return ModelError(conflict, code="RQ206")
    for name, call in find_calls(mod):
        try:
            compile_alone(isolate_call(call))
        except Exception as alone:
            if misfit := describe_misfit(call):
                return ModelError(
                    f"value {name!r}, operator {call.op.name}, {misfit}: its sizes do not fit: "
                    f"{last_line(alone)}. Give the model larger inputs, or pad them in it.",
                    code="RQ206",
                )
            # An error of relayquant says what to do. Its type is lost in TVM.
            if own := re.fullmatch(r"(?:\w+: )?(.*) \[RQ206\]", last_line(alone)):
                return ModelError(f"value {name!r}: {own[1]}", code="RQ206")
            dtypes = ", ".join(filter(None, map(tensor_dtype, call.args)))
            unsized = describe_size([*call.args, call])
            advice = (
                f"{unsized}. {FIX_SIZE}"
                if unsized
                else "Another dtype may work: cast the operands to it and cast the result back."
            )
            return ModelError(
                f"value {name!r}, operator {call.op.name} of {dtypes or 'no tensors'}: TVM cannot "
                f"compile it: {last_line(alone)}. {advice}",
                code="RQ206",
            )
    for func in list_functions(mod).values():
        for binding in list_bindings(func):
            unsized = describe_size([binding.var])
            if unsized:
                return ModelError(
                    f"TVM cannot compile the module. {unsized}. {FIX_SIZE}", code="RQ206"
                )
    return None


def describe_size(values: Iterable[Any]) -> str:
    """Describe the first value with an unknown shape, or with a size that a min or max computes.

    "" if there is none.
    """
    for value in values:
        if isinstance(value, relax.Tuple):
            found = describe_size(value.fields)
            if found:
                return found
        ty = getattr(value, "ty", None)
        name = f"value {value.name!r}" if isinstance(value, relax.Var) else "its result"
        if isinstance(ty, relax.TensorType) and not isinstance(ty.shape, relax.ShapeExpr):
            return f"The shape of {name} is known at run time only"
        if isinstance(ty, relax.TensorType):
            for size in ty.shape.values:
                if compares_sizes(size):
                    return f"A size of {name} is {size}, known at run time only"
    return ""


def compares_sizes(size: Any) -> bool:
    """Whether min or max computes a size, as after a slice along a symbolic dimension."""
    if isinstance(size, tirx.Min | tirx.Max):
        return True
    parts = (getattr(size, name, None) for name in ("a", "b"))
    return any(compares_sizes(part) for part in parts if part is not None)


def find_calls(mod: tvm.IRModule) -> Iterator[tuple[str, Call]]:
    """List the operator calls with the names of their values.

    Calls that differ only in operands are listed once.
    """
    seen: set[Any] = set()
    for func in list_functions(mod).values():
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
    """Make a module with only this call, whose parameters have the types of its operands.

    Constant operands stay. One more parameter declares the sizes that no operand has.
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
    """Return the message of a TVM error, without stack trace and notes on its printing."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("#")]
    return said[-1].rstrip(".:") if said else type(error).__name__
