"""User inputs -> checked and bound parameters of the interpreter."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.base.runtime import check_unmasked
from relayquant.errors import DataError, format_count, suggest_name
from relayquant.ir.reference.frame import Frame, match_shape
from relayquant.ir.reference.single_call import get_tensor_dtype

#: the largest size in TVM
MOST = 2**63 - 1
#: dtype kind -> accepted kinds of Python numbers, as numpy kinds
TAKEN = {"b": "b", "i": "iu", "u": "iu", "f": "fiu"}


def bind_inputs(frame: Frame, params: Sequence[Any], inputs: Any) -> None:
    """Check inputs against the parameters, bind their symbolic dimensions, and store them.

    Inputs are arrays by parameter name, arrays in the order of the parameters, or a single array.

    Raises:
        DataError: Number, name, type, dtype or shape do not match.
    """
    for param, value in zip(params, order_inputs(params, inputs), strict=True):
        bind_input(frame, param, param.name, param.ty, value)


def order_inputs(params: Sequence[Any], inputs: Any) -> list[Any]:
    """Return one value per parameter, in order."""
    names = [param.name for param in params]
    if isinstance(inputs, Mapping):
        for name in inputs:
            if name not in names:
                raise DataError(
                    f"input {name!r} is not a parameter of the model. "
                    f"{suggest_name(str(name), names)}",
                    code="RQ302",
                )
        missing = [name for name in names if name not in inputs]
        if missing:
            raise DataError(
                f"inputs {missing} are missing; the parameters are {names}.", code="RQ302"
            )
        return [inputs[name] for name in names]
    if not isinstance(inputs, (tuple, list)):
        inputs = (inputs,)
    if any(isinstance(value, Mapping) for value in inputs):
        raise DataError(
            "the inputs are a list with a dict in it; allowed: one sample, as a dict of arrays by "
            f"name, or a list of the arrays in the order of the parameters, {names}. Pass the "
            "dict itself.",
            code="RQ302",
        )
    if len(inputs) != len(names):
        raise DataError(
            f"got {format_count(len(inputs), 'input')} for "
            f"{format_count(len(names), 'parameter')}: {names}.",
            code="RQ302",
        )
    return list(inputs)


def bind_input(frame: Frame, var: Any, name: str, ty: Any, value: Any) -> None:
    """Check one input against its parameter's type, bind its symbolic dimensions, and store it."""
    if isinstance(ty, tvm.ir.PrimType):
        frame.symbols[var] = frame.values[var] = check_number(name, str(ty.dtype), value)
        return
    frame.values[var] = check_input(frame, name, ty, value)


def check_input(frame: Frame, name: str, ty: Any, value: Any) -> Any:
    """Convert `value` for the interpreter. Raise if it is not of type `ty`."""
    if isinstance(ty, tvm.ir.TupleType):
        if not isinstance(value, (tuple, list)) or len(value) != len(ty.fields):
            raise DataError(
                f"input {name!r} must be a tuple of {format_count(len(ty.fields), 'value')}.",
                code="RQ302",
            )
        return tuple(
            check_input(frame, f"{name}.{i}", part, element)
            for i, (part, element) in enumerate(zip(ty.fields, value, strict=True))
        )
    if isinstance(ty, relax.ShapeType):
        shape = check_shape(name, value)
        if ty.values is not None:
            match_shape(frame, name, ty.values, shape)
        return shape
    if not isinstance(ty, relax.TensorType):
        return value
    dtype = get_tensor_dtype(ty)
    array = as_native_array(name, value)
    if dtype and array.dtype.name != dtype:
        raise DataError(
            f"input {name!r} has dtype {array.dtype.name}; the model takes {dtype}. "
            f"Convert it: array.astype({dtype!r}).",
            code="RQ302",
        )
    if ty.shape is not None and isinstance(ty.shape, relax.ShapeExpr):
        match_shape(frame, name, ty.shape.values, array.shape, is_input=True)
    elif ty.ndim not in (-1, array.ndim):
        raise DataError(
            f"input {name!r} has shape {array.shape}; allowed: {format_count(ty.ndim, 'axis')}.",
            code="RQ302",
        )
    return array


def as_native_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Convert an array, nested lists or a tensor of TVM or PyTorch to a numpy array in native byte
    order.

    Raises:
        DataError: The value cannot be converted.
    """
    try:
        check_unmasked(value)
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except (TypeError, ValueError, RuntimeError) as error:  # raised by numpy or by the tensor
        raise DataError(
            f"input {name!r} cannot be made a numpy array: {error}", code="RQ302"
        ) from error
    if array.dtype.kind == "O":
        kind = type(value).__name__
        raise DataError(
            f"input {name!r} is a {kind}, not an array of numbers. Pass a numpy array.",
            code="RQ302",
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def check_shape(name: str, value: Any) -> tuple[int, ...]:
    """Return the sizes of an input that is a shape."""
    try:
        sizes = tuple(operator.index(size) for size in value)
    except TypeError:
        sizes = None
    if sizes is None or not all(0 <= size <= MOST for size in sizes):
        raise DataError(
            f"input {name!r} is {value!r}; the model takes a shape: a tuple of integers from 0 to "
            f"{MOST}.",
            code="RQ302",
        )
    return sizes


def check_number(name: str, dtype: str, value: Any) -> bool | int | float:
    """Return an input that is a number of `dtype`, not a tensor."""
    array = as_native_array(name, value)
    kind = np.dtype(dtype).kind
    if array.size == 1 and array.dtype.kind in TAKEN[kind]:
        number = array.item()
        if kind not in "iu" or np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
            return number
    raise DataError(
        f"input {name!r} is {value!r}; the model takes a number of dtype {dtype}.", code="RQ302"
    )
