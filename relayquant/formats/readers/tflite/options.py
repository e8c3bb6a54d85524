"""TensorFlow Lite reader: the options of an operator, and the name of a custom one."""

from __future__ import annotations

from typing import Any

from relayquant.formats.readers.refusal import Refusal


def read_options(op: Any, name: str) -> Any:
    """Read the options of an operator. `name`: of their class in the package tflite.

    Raises:
        Refusal: it has no options, or another operator's options.
    """
    import tflite

    kinds, table, kind = tflite.BuiltinOptions, op.BuiltinOptions(), op.BuiltinOptionsType()
    if hasattr(tflite.BuiltinOptions2, name):
        kinds, table, kind = tflite.BuiltinOptions2, op.BuiltinOptions2(), op.BuiltinOptions2Type()
    if table is None or kind != getattr(kinds, name):
        raise Refusal(f"it lacks its options ({name})")
    options = getattr(tflite, name)()
    options.Init(table.Bytes, table.Pos)
    return options


def name_custom_operator(code: Any) -> str:
    """Return the name of an operator code that stands for a custom operator, "" of another one."""
    from tflite import BuiltinOperator

    is_custom = max(code.BuiltinCode(), code.DeprecatedBuiltinCode()) == BuiltinOperator.CUSTOM
    return (code.CustomCode() or b"").decode("utf-8", "replace") if is_custom else ""
