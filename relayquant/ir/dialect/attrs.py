"""Dialect: the typed attributes of the `relax.qnn` operators, as printed, parsed and saved as JSON.

Every field is always present. A rounding or an arithmetic is stored as the `.value` of its enum
(`qtypes.Rounding`, `qtypes.Arithmetic`), because an attribute has to survive printing and JSON. A
module that holds these types loads only in a process that imported this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tvm.ir import Attrs
from tvm_ffi.dataclasses import py_class

AttrsType = TypeVar("AttrsType", bound=type)


def define_attrs(type_key: str) -> Callable[[AttrsType], AttrsType]:
    """Register a class of attributes, or return the one registered before.

    A type key is registered once per process, and this module may be imported again.
    """
    for known in Attrs.__subclasses__():
        info = getattr(known, "__tvm_ffi_type_info__", None)
        if info is not None and info.type_key == type_key:
            return lambda _cls: known  # type: ignore[return-value]
    return py_class(type_key)


def replace_attrs(attrs: Any, **changes: Any) -> Any:
    """A copy of typed attributes with some of them changed."""
    fields = [field.name for field in type(attrs).__tvm_ffi_type_info__.fields]
    values = {name: getattr(attrs, name) for name in fields}
    return type(attrs)(**{**values, **changes})
