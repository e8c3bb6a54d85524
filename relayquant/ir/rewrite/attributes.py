"""Attributes of operator calls: find attributes that differ from the operator's defaults.

Every table that takes operators by name (patterns, rules, the allow-list) lists the attributes that
it models. It declines a call if another attribute differs from its default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, Op

from relayquant.ir.rewrite.graph import call_name, tensor_dtype
from relayquant.ir.rewrite.rule import Skip


@dataclass(frozen=True)
class Attribute:
    """An attribute of a call that differs from its default, or has no default."""

    op: str  #: without "relax."
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.op} has {self.name}={self.value!r}"


def read_attributes(call: Call) -> dict[str, Any]:
    """Return the attributes of a call by name, as plain values (numbers, text, tuples of them)."""
    attrs = call.attrs
    if attrs is None:
        return {}
    if isinstance(attrs, tvm.ir.DictAttrs):
        return {str(name): to_plain(value) for name, value in attrs.items()}
    fields = type(attrs).__tvm_ffi_type_info__.fields
    return {field.name: to_plain(getattr(attrs, field.name)) for field in fields}


def to_plain(value: Any) -> Any:
    """Convert an attribute's value to a plain value that can be compared and printed.

    Arrays become tuples, IR numbers become numbers, dtypes become text.
    """
    if isinstance(value, tvm.DataType):
        return str(value)
    if isinstance(value, str | int | float) or value is None:
        return value
    if isinstance(value, tvm.tirx.IntImm | tvm.tirx.FloatImm):
        return value.value
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return tuple(to_plain(item) for item in value)
    return value


def find_constructor(call: Call) -> Callable[..., relax.Expr] | None:
    """Find the function of `relax.op` that makes calls of this operator. None if TVM has none."""
    if not isinstance(call.op, Op):
        return None
    prefix, *path = call_name(call).split(".")
    found: Any = relax.op if prefix == "relax" else None
    for part in path:
        found = getattr(found, part, None)
    return found if inspect.isroutine(found) else None


def read_defaults(call: Call, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operator's attributes if only `said` is given with these arguments.

    Required attributes that are not in `said` are left out.

    A default may depend on another attribute: the out_layout of a convolution defaults to its
    data_layout.
    """
    make = find_constructor(call)
    if make is None:
        return {}
    parameters = inspect.signature(make).parameters
    needed = {
        name
        for name, parameter in list(parameters.items())[len(call.args) :]
        if parameter.default is inspect.Parameter.empty
    }
    values = read_attributes(call)
    if not needed <= values.keys():
        return {}
    given = {name: value for name, value in said.items() if name in parameters}
    made = make(*call.args, **given, **{name: values[name] for name in needed - given.keys()})
    defaults = read_attributes(made)
    return {name: defaults[name] for name in defaults.keys() - (needed - given.keys())}


def find_unmodelled(calls: Iterable[Call], modelled: Collection[str]) -> Attribute | None:
    """Find the first attribute of the calls that is not in `modelled` and changes the meaning.

    An attribute changes nothing if it has its default, if it is the dtype of the operand, or if it
    is the default axis counted from the other end. An attribute without a default always counts.
    """
    for call in calls:
        values = read_attributes(call)
        unnamed = [name for name in values if name not in modelled]
        if not unnamed:
            continue
        said = {name: value for name, value in values.items() if name in modelled}
        defaults = read_defaults(call, said)
        for name in unnamed:
            if name in defaults and is_same(call, name, values[name], defaults[name]):
                continue
            return Attribute(call_name(call).removeprefix("relax."), name, values[name])
    return None


def is_same(call: Call, name: str, value: Any, default: Any) -> bool:
    """Whether a value of an attribute means the same as its default."""
    if value == default:
        return True
    data = call.args[0]
    if name == "out_dtype":
        unsaid = (None, "", "void", tensor_dtype(data))
        return value in unsaid and default in unsaid
    if name == "axis" and isinstance(value, int) and isinstance(default, int):
        rank = getattr(data.ty, "ndim", -1)
        return rank > 0 and value % rank == default % rank
    return False


def check_attributes(calls: Iterable[Call], modelled: Collection[str], what: str) -> Skip | None:
    """Decline calls with an attribute that `what` (a pattern, a rule) does not model."""
    found = find_unmodelled(calls, modelled)
    if found is None:
        return None
    return Skip(
        f"{found}, which {what} does not model",
        f"leave {found.name} at its default, or honour it in the callbacks and name it in "
        "attributes=(...)",
    )
