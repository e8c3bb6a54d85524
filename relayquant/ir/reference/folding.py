"""Calls on constants -> their results, as the reference computes them, also of NaN.

TVM's own folding compiles them without the legalizations of `codegen`: it loses NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, Op

from relayquant.errors import ModelError
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.interpreter import conform_value, evaluate_call
from relayquant.ir.reference.single_call import get_tensor_dtype
from relayquant.ir.rewrite.graph import call_name, constant_value, static_size, tensor_dtype

Array = np.ndarray[Any, Any]

#: A result with more elements than this and than its operands stays an operator.
MAX_GROWTH = 2**20

#: The only dtype of less than a byte whose arrays TVM takes from numpy and gives to it.
PACKED = "float4_e2m1fn"

#: Prefixes of operators that are more than their result: they call functions, which may have
#: effects or be for another CPU, write to an operand, or allocate memory without values.
EFFECTS = ("relax.call_", "relax.builtin.", "relax.memory.", "relax.vm.")


def emit_folded(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Bind a call of an operator with one result, or return that as a constant if the operands
    are constants.
    """
    typed: Any = builder.normalize(call)
    folded = fold_call(typed)
    return builder.emit(typed) if isinstance(folded, str) else folded


def fold_call(call: Call, mod: tvm.IRModule | None = None) -> relax.Expr | str:
    """Compute a call of an operator on constants, shapes and numbers.

    Args:
        call: The call, with its type.
        mod: Module with the functions that the call uses, if it uses some.

    Returns:
        The result, a tuple of constants if it is a tuple of tensors, or why the call is not folded.
    """
    name = call_name(call)
    if not isinstance(call.op, Op) or name.startswith(EFFECTS) or not call.op.get_attr("FPurity"):
        return "no operator, or one with effects"
    types = [*call.ty.fields] if isinstance(call.ty, tvm.ir.TupleType) else [call.ty]
    if not all(map(is_stored, types)):
        return "the result is no tensor of known shape, of a dtype that numpy has"
    fields = [
        field
        for arg in call.args
        for field in (arg.fields if isinstance(arg, relax.Tuple) else [arg])
    ]
    if any(isinstance(field, relax.Var | Call | relax.TupleGetItem) for field in fields):
        return "an operand is computed"
    operands = [field.ty for field in fields]
    size, given = (sum(count_elements(ty) or 0 for ty in each) for each in (types, operands))
    if size > MAX_GROWTH and size > given:
        return "the constant would be large"
    array = constant_value(fields[0]) if name == "relax.astype" else None
    if array is not None and not can_hold(tensor_dtype(call), array):
        return "an integer of a float that no integer represents, which is left to the target"
    frame = Frame(mod or tvm.IRModule())
    try:
        with np.errstate(all="ignore"):
            value = evaluate_call(frame, call, name)
            found = conform_value(frame, call.ty, value, name, call)
    except ModelError as error:  # compilation reports it, if it fails too
        return str(error)
    if isinstance(found, tuple):
        return relax.Tuple([*map(make_constant, found, types)])
    return make_constant(found, call.ty)


def make_constant(array: Any, ty: Any) -> relax.Expr:
    return relax.const(np.array(array, order="C"), get_tensor_dtype(ty))


def is_stored(ty: Any) -> bool:
    """Whether a type is a tensor of known shape that numpy can hold: its elements have the same
    bytes there. The exception is float4, which TVM itself packs and unpacks.
    """
    if count_elements(ty) is None:
        return False
    dtype = get_tensor_dtype(ty)
    try:
        return dtype == PACKED or ty.dtype.dtype.bits == 8 * np.dtype(dtype).itemsize
    except TypeError:  # numpy has no such elements, or the dtype is unknown
        return False


def count_elements(ty: Any) -> int | None:
    """Return how many elements a tensor has. None if its shape is unknown, or it is no tensor."""
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    sizes = [static_size(size) for size in ty.shape.values]
    return None if None in sizes else math.prod(size or 0 for size in sizes)


def can_hold(dtype: str, array: Array) -> bool:
    """Whether a cast to a dtype is the same on every target: each float has an integer in it."""
    if array.dtype.kind in "bui" or not dtype.startswith(("int", "uint")):
        return True
    whole, limits = np.trunc(array.astype("float64")), np.iinfo(dtype)
    return bool(((whole >= limits.min) & (whole < float(limits.max) + 1)).all())
