"""Calls on constants -> their results, as the reference computes them, also of NaN.

TVM's own folding compiles them without the legalizations of `codegen`: it loses NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, Op

from relayquant.errors import ModelError
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.interpreter import conform_value, evaluate_call
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype, tensor_shape

Array = np.ndarray[Any, Any]

#: A result with more elements than this and than its operands stays an operator.
MAX_GROWTH = 2**20

#: Integers of less than a byte.
PACKED = ("int4", "uint4")

#: Prefixes of operators that are more than their result, or have another each time.
EFFECTS = ("relax.call_p", "relax.call_dps", "relax.call_inplace", "relax.random", "relax.print")


def compute_constant(call: Call, mod: tvm.IRModule | None = None) -> Array | str:
    """Compute a call of an operator on constants, shapes and numbers.

    Args:
        call: The call, with its type.
        mod: Module with the functions that the call uses, if it uses some.

    Returns:
        The result, or why the call is not folded.
    """
    shape, name = tensor_shape(call), call_name(call)
    if not isinstance(call.op, Op) or name.startswith(EFFECTS):
        return "no operator, or one with effects"
    if shape is None or any(isinstance(size, str) for size in shape):
        return "the result is no tensor of known shape"
    fields = [
        field
        for arg in call.args
        for field in (arg.fields if isinstance(arg, relax.Tuple) else [arg])
    ]
    if any(isinstance(field, relax.Var | Call | relax.TupleGetItem) for field in fields):
        return "an operand is computed"
    operands = [constant_value(field) for field in fields]
    arrays = [array for array in operands if array is not None]
    size = int(np.prod(shape, dtype="int64"))
    if size > MAX_GROWTH and size > sum(array.size for array in arrays):
        return "the constant would be large"
    if tensor_dtype(call) in PACKED:
        return "numpy has no arrays of the result's type"
    if name == "relax.astype" and not can_hold(tensor_dtype(call), arrays[0]):
        return "an integer of a float that no integer represents, which is left to the target"
    frame = Frame(mod or tvm.IRModule())
    try:
        with np.errstate(all="ignore"):
            value = evaluate_call(frame, call, name)
            return np.array(conform_value(frame, call.ty, value, name, call))
    except ModelError as error:  # compilation reports it, if it does not compile there either
        return str(error)


def can_hold(dtype: str, array: Array) -> bool:
    """Whether a cast to a dtype is the same on every target: each float has an integer in it."""
    if array.dtype.kind in "bui" or not dtype.startswith(("int", "uint")):
        return True
    whole, limits = np.trunc(array.astype("float64")), np.iinfo(dtype)
    return bool(((whole >= limits.min) & (whole < float(limits.max) + 1)).all())
