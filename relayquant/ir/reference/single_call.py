"""Run a call that has no numpy form: the call is compiled alone with TVM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    values = [arg if is_fixed(arg) else evaluate(arg) for arg in call.args]
    return SingleCall(mod, call, name).run(values, evaluate)


def is_fixed(arg: Any) -> bool:
    """Whether an operand of a call stays as it is, because it has no value in numpy."""
    return isinstance(arg, (tvm.ir.GlobalVar, relax.ExternFunc)) or not isinstance(
        arg.ty, (relax.TensorType, relax.ShapeType, tvm.ir.TupleType, tvm.ir.PrimType)
    )


class SingleCall:
    """A call as a function of its own, compiled with TVM for the generic CPU.

    Attributes:
        mod: Module with the functions that the call uses.
        call: The call.
        name: Name of the value, for messages.
    """

    def __init__(self, mod: tvm.IRModule, call: Any, name: str) -> None:
        self.mod, self.call, self.name = mod, call, name
        #: kind of the last operands, and the function for it
        self.last: tuple[Any, relax.VirtualMachine] | None = None

    def run(self, values: Sequence[Any], evaluate: Callable[[Any], Any] = int) -> Any:
        """Run the call on the values of its operands. It is compiled again only for operands of
        other shapes or dtypes than the last ones. `evaluate` returns the value of a size in a type.

        Raises:
            ModelError: TVM cannot compile or run the call.
        """
        kind, arrays = [*map(describe_kind, values)], [*list_arrays(values)]
        try:
            with _COMPILING:
                if self.last is None or self.last[0] != kind:
                    self.last = kind, compile_module(ModuleKey(self.make_module(values, evaluate)))
                tensors = (tvm.runtime.tensor(np.array(array, order="C")) for array in arrays)
                return to_numpy(self.last[1]["main"](*tensors))
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"value {self.name!r}: {describe_operator(self.call)} has no numpy form and TVM "
                f"cannot compile it alone: {str(error).strip().splitlines()[-1]}",
                code="RQ206",
            ) from error

    def make_module(self, values: Sequence[Any], evaluate: Callable[[Any], Any]) -> tvm.IRModule:
        """Make a module whose `main` takes the arrays in `values` and returns the call's result."""
        params: list[Any] = []

        def rebuild(expr: Any, value: Any) -> Any:
            if isinstance(value, np.ndarray):
                ty = relax.TensorType(value.shape, value.dtype.name)
                params.append(relax.Var(f"p{len(params)}", ty))
                return params[-1]
            if isinstance(expr.ty, relax.ShapeType):
                return relax.ShapeExpr(list(value))
            if isinstance(value, tuple):
                if isinstance(expr, relax.Tuple):
                    pairs = zip(expr.fields, value, strict=True)
                    return relax.Tuple([rebuild(*pair) for pair in pairs])
                raise ModelError(
                    f"value {self.name!r}: a tuple variable cannot be passed to a compiled call.",
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

        call = self.call
        args = [
            arg if is_fixed(arg) else rebuild(arg, value)
            for arg, value in zip(call.args, values, strict=True)
        ]
        closed = relax.Call(call.op, args, call.attrs, [close_type(ty) for ty in call.ty_args])
        main = make_main(params, lambda _: closed)["main"]
        called = {arg: self.mod[arg] for arg in args if isinstance(arg, tvm.ir.GlobalVar)}
        return tvm.IRModule({**called, tvm.ir.GlobalVar("main"): main})


def describe_kind(value: Any) -> Any:
    """Describe what the compiled function depends on: shape and dtype of an array, else the value
    itself.
    """
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.name
    return tuple(map(describe_kind, value)) if isinstance(value, tuple) else value


def list_arrays(values: Iterable[Any]) -> Iterator[Array]:
    """List the arrays among values and in their tuples, in order."""
    for value in values:
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, tuple):
            yield from list_arrays(value)


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
