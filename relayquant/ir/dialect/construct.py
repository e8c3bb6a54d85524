"""Dialect: constructor arguments -> call of a `relax.qnn` operator, with messages for wrong
arguments.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tvm_ffi
from tvm import relax
from tvm.ir import Attrs, Call, Op

from relayquant.base.qtypes import Arithmetic, Rounding
from relayquant.errors import QnnError
from relayquant.ir.dialect.operands import Argument

#: Tensor operand: an expression, or an array that becomes a constant.
Operand = Any

#: Scale or zero point: an expression, a number or an array.
Parameter = Any

Function = TypeVar("Function", bound=Callable[..., Call])


def _is_expr(value: Any) -> bool:
    return isinstance(value, relax.Expr)


def make_data(value: Operand, operator: str, name: str) -> relax.Expr:
    if _is_expr(value):
        return value
    if isinstance(value, np.ndarray):
        return relax.const(value, value.dtype.name)
    raise QnnError(
        f"qnn.{operator}: operand '{name}' is a {type(value).__name__}; "
        "allowed: a relax expression or a numpy array.",
        code="RQ601",
    )


def make_parameter(value: Parameter, dtype: str, operator: str, name: str) -> relax.Expr:
    """Make a constant of `dtype` from a number or an array. An expression is returned as it is."""
    if _is_expr(value):
        return value
    try:
        array = np.asarray(value)
        converted = array.astype(dtype)
    except (TypeError, ValueError) as error:
        raise QnnError(
            f"qnn.{operator}: operand '{name}' is a {type(value).__name__}; "
            "allowed: a relax expression, a number or an array.",
            code="RQ601",
        ) from error
    if dtype == "int32" and not np.array_equal(converted, array):
        raise QnnError(
            f"qnn.{operator}: operand '{name}' is {value}; allowed: integers that fit into int32.",
            code="RQ601",
        )
    return relax.const(converted, dtype)


def make_operand(operator: str, argument: Argument, value: Any) -> relax.Expr:
    """Make the expression for one operand, a tuple from a sequence. An expression is returned as it
    is.
    """
    if not argument.is_tuple:
        if argument.dtype:
            return make_parameter(value, argument.dtype, operator, argument.name)
        return make_data(value, operator, argument.name)
    if _is_expr(value):
        return value
    if not isinstance(value, list | tuple | tvm_ffi.Array | np.ndarray):
        raise QnnError(
            f"qnn.{operator}: operand '{argument.name}' is a {type(value).__name__}; "
            "allowed: a list or tuple, or a relax expression of tuple type.",
            code="RQ601",
        )
    fields = (Argument(f"{argument.name}[{i}]", argument.dtype) for i in range(len(value)))
    return relax.Tuple([make_operand(operator, *pair) for pair in zip(fields, value, strict=True)])


def rounding_value(rounding: Rounding | str, operator: str) -> str:
    """Return the mode's value. A printed module holds the value already, as a string."""
    return _mode_value(Rounding, rounding, operator, "rounding")


def arithmetic_value(arithmetic: Arithmetic | str, operator: str) -> str:
    """Return the mode's value, as `rounding_value` does."""
    return _mode_value(Arithmetic, arithmetic, operator, "compute_dtype")


def _mode_value(
    kind: type[Rounding] | type[Arithmetic], mode: enum.Enum | str, operator: str, name: str
) -> str:
    allowed = [member.value for member in kind]
    value = mode.value if isinstance(mode, kind) else mode
    if value not in allowed:
        raise QnnError(
            f"qnn.{operator}: {name}={mode!r} is not allowed; allowed: qtypes.{kind.__name__}, "
            f"one of {', '.join(allowed)}.",
            code="RQ601",
        )
    return str(value)


def make_integers(
    value: int | Sequence[int], length: int, operator: str, name: str
) -> tvm_ffi.Array:
    """Make a list of `length` integers. A single number is repeated."""
    numbers = [value] * length if isinstance(value, int | np.integer) else list(value)
    if len(numbers) != length:
        raise QnnError(
            f"qnn.{operator}: {name}={numbers} is not allowed; allowed: one integer or {length}.",
            code="RQ601",
        )
    return tvm_ffi.Array([int(v) for v in numbers])


def make_padding(value: int | Sequence[int], rank: int, operator: str) -> tvm_ffi.Array:
    """Return the padding before each axis, then the padding after each axis.

    `padding` may also be one number, or one number per axis, for both sides.
    """
    numbers = [value] * (2 * rank) if isinstance(value, int | np.integer) else list(value)
    if len(numbers) == 1:
        numbers = numbers * (2 * rank)
    elif len(numbers) == rank:
        numbers = numbers * 2
    if len(numbers) != 2 * rank:
        raise QnnError(
            f"qnn.{operator}: padding={numbers} is not allowed; allowed: 1, {rank} or {2 * rank} "
            "integers.",
            code="RQ601",
        )
    return tvm_ffi.Array([int(v) for v in numbers])


def make_call(
    operator: str, arguments: Sequence[Argument], values: Sequence[Any], attrs: Attrs | None
) -> Call:
    """Make a call of `relax.qnn.<operator>`. `values` are in the order of the declared operands."""
    pairs = zip(arguments, values, strict=True)
    operands = [make_operand(operator, argument, value) for argument, value in pairs]
    return Call(Op.get(f"relax.qnn.{operator}"), operands, attrs)


def describe_constructor(construct: Function, name: str, meaning: str) -> Function:
    """Give a shared constructor the name, docstring and module of operator `name`."""
    construct.__name__ = construct.__qualname__ = name
    construct.__doc__ = meaning
    return construct
