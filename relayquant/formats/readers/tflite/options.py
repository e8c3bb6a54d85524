"""TensorFlow Lite reader: the options of an operator."""

from __future__ import annotations

from typing import Any

from relayquant.formats.readers.refusal import Refusal


def read_options(op: Any, options_class: Any) -> Any:
    """Read the options of an operator.

    Raises:
        Refusal: it has no options, or another operator's options.
    """
    from tflite import BuiltinOptions, BuiltinOptions2

    name = options_class.__name__
    table, kind = op.BuiltinOptions(), op.BuiltinOptionsType()
    if hasattr(BuiltinOptions2, name):
        table, kind = op.BuiltinOptions2(), op.BuiltinOptions2Type()
        expected = getattr(BuiltinOptions2, name)
    else:
        expected = getattr(BuiltinOptions, name)
    if table is None or kind != expected:
        raise Refusal(f"it lacks its options ({name})")
    options = options_class()
    options.Init(table.Bytes, table.Pos)
    return options
