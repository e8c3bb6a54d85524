"""Run a call that has no numpy form: the call is compiled alone with TVM."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from relayquant.errors import ModelError
from relayquant.ir.rewrite.function import make_main

Array = np.ndarray[Any, Any]


def get_tensor_dtype(ty: Any) -> str:
    """Return the dtype name of a tensor type, or "" if it is unknown."""
    dtype = ty.dtype
    text = "" if dtype is None else str(getattr(dtype, "dtype", dtype))
    return "" if text == "void" else text


def describe_operator(call: Any) -> str:
    """Describe the operator of a call for messages, with the function of a call_tir."""
    name = getattr(call.op, "name", None) or str(call.op)
    if name.startswith("relax.call") and call.args:
        return f"{name} of {getattr(call.args[0], 'name_hint', call.args[0])}"
    return name


#: TVM's virtual machine has one stack, so that only one thread may run it.
_COMPILING = threading.Lock()


def compile_call(mod: tvm.IRModule, call: Any, name: str, evaluate: Callable[[Any], Any]) -> Any:
    """Compile a function of this single call with TVM for the generic CPU, and run it.

    Args:
        mod: Module with the functions that the call uses.
        call: The call.
        name: Name of the value, for messages.
        evaluate: Returns the value of an operand, or of a size in a type.
    """
    params: list[Any] = []
    arrays: list[Array] = []

    def rebuild(expr: Any, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            ty = relax.TensorType(value.shape, value.dtype.name)
            params.append(relax.Var(f"p{len(params)}", ty))
            arrays.append(value)
            return params[-1]
        if isinstance(expr.ty, relax.ShapeType):
            return relax.ShapeExpr(list(value))
        if isinstance(value, tuple):
            fields = expr.fields if isinstance(expr, relax.Tuple) else expr.ty.fields
            if isinstance(expr, relax.Tuple):
                return relax.Tuple([rebuild(*pair) for pair in zip(fields, value, strict=True)])
            raise ModelError(
                f"value {name!r}: a tuple variable cannot be passed to a compiled call.",
                code="RQ206",
            )
        return tvm.tirx.const(value, str(expr.ty.dtype))

    def close_type(ty: Any) -> Any:
        if isinstance(ty, tvm.ir.TupleType):
            return tvm.ir.TupleType([close_type(part) for part in ty.fields])
        if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
            sizes = [evaluate(dim) for dim in ty.shape.values]
            return relax.TensorType(sizes, get_tensor_dtype(ty))
        return ty

    args = []
    for arg in call.args:
        fixed = (tvm.ir.GlobalVar, relax.ExternFunc)
        keep = isinstance(arg, fixed) or not isinstance(
            arg.ty, (relax.TensorType, relax.ShapeType, tvm.ir.TupleType, tvm.ir.PrimType)
        )
        args.append(arg if keep else rebuild(arg, evaluate(arg)))
    closed = relax.Call(call.op, args, call.attrs, [close_type(ty) for ty in call.ty_args])
    try:
        with _COMPILING:
            main = make_main(params, lambda _: closed)["main"]
            called = {arg: mod[arg] for arg in args if isinstance(arg, tvm.ir.GlobalVar)}
            single = tvm.IRModule({**called, tvm.ir.GlobalVar("main"): main})
            machine = compile_module(ModuleKey(single))
            result = machine["main"](*(tvm.runtime.tensor(np.array(a, order="C")) for a in arrays))
    except Exception as error:
        raise ModelError(
            f"value {name!r}: {describe_operator(call)} has no numpy form and TVM cannot compile "
            f"it alone: {str(error).strip().splitlines()[-1]}",
            code="RQ206",
        ) from error
    return to_numpy(result)


@dataclass(frozen=True, eq=False)
class ModuleKey:
    """Cache key of a module. It equals every module with the same structure."""

    mod: tvm.IRModule

    def __hash__(self) -> int:
        return hash(tvm_ffi.structural_hash(self.mod))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleKey) and tvm_ffi.structural_equal(self.mod, other.mod)


@lru_cache(maxsize=512)
def compile_module(key: ModuleKey) -> relax.VirtualMachine:
    """Compile a module for the generic CPU. The result is cached for the next run."""
    executable = tvm.compile(key.mod, tvm.target.Target({"kind": "llvm"}))
    return relax.VirtualMachine(executable, tvm.cpu())


def to_numpy(result: Any) -> Any:
    """Convert the result of a compiled function to arrays and tuples of arrays."""
    if hasattr(result, "numpy"):
        return result.numpy()
    if isinstance(result, (int, float)):
        return result
    return tuple(to_numpy(element) for element in result)
