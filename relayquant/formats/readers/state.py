"""Readers: a module whose state is among its inputs and results -> the same module with the state
last and described.

    main(h, x) -> (h', y)    ->    main(x, h) -> (y, h')     with state "h"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from relayquant.errors import ModelError
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.state import StateValue, is_type, with_state


@dataclass(frozen=True, eq=False)
class StatePair:
    """A parameter and the result that is its new value.

    Attributes:
        param: Name of the parameter.
        result: Number of the result.
        name: Name of the state.
        initial: Initial value. None: zeros.
    """

    param: str
    result: int
    name: str
    initial: np.ndarray | None = None


def hold_state(mod: tvm.IRModule, pairs: Sequence[StatePair]) -> tvm.IRModule:
    """Move the state of main behind its other parameters and results, and describe it.

    Raises:
        ModelError: a size of a state is not known, or its new value has another type.
    """
    if not pairs:
        return mod
    editor = Editor(mod)
    params = {param.name: param for param in editor.params}
    held = [params[pair.param] for pair in pairs]
    is_tuple = isinstance(editor.result, relax.Tuple)
    results = list(editor.result.fields) if is_tuple else [editor.result]
    taken = {pair.result for pair in pairs}
    others = [result for i, result in enumerate(results) if i not in taken]
    news = [results[pair.result] for pair in pairs]
    values = []
    for pair, param, new in zip(pairs, held, news, strict=True):
        if editor.names[param] != pair.name:
            editor.names[param] = editor.unique_name(pair.name)
        values.append(describe_state(editor.names[param], param, new, pair.initial))
    editor.params = [param for param in editor.params if param not in held] + held
    editor.result = relax.Tuple([*others, *news])
    return with_state(editor.build(), values)


def describe_state(
    name: str, param: relax.Var, new: relax.Expr, initial: np.ndarray | None
) -> StateValue:
    """Describe a state.

    Raises:
        ModelError: a size is not known, or the new value has another type.
    """
    sizes = getattr(param.ty.shape, "values", None)
    if sizes is None or not all(isinstance(size, tvm.tirx.IntImm) for size in sizes):
        raise ModelError(
            f"State {name!r} is {param.ty}. Its sizes must be known, because the first call needs "
            f"a value. Fix them: shapes={{{name!r}: (1, 2, 128)}} for ONNX, or without "
            "dynamic_shapes in torch.export.",
            code="RQ204",
        )
    value = StateValue(name, tuple(int(size) for size in sizes), str(param.ty.dtype), initial)
    if not is_type(new.ty, value):
        raise ModelError(
            f"State {name!r} is {param.ty}, and its new value is {new.ty}. Both must be the same.",
            code="RQ204",
        )
    return value
