"""Readers: a module whose state is among its inputs and results -> the same module with the state
last and described.

    main(h, x) -> (h', y)    ->    main(x, h) -> (y, h')     with state "h"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from relayquant.errors import ModelError, suggest_name
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.state import StateValue, get_state, is_type, with_state


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
            f"a value. Fix them: shapes={{{name!r}: (1, 2, 128)}} for ONNX and TFLite, or "
            "without dynamic_shapes in torch.export.",
            code="RQ204",
        )
    value = StateValue(name, tuple(int(size) for size in sizes), str(param.ty.dtype), initial)
    if not is_type(new.ty, value):
        raise ModelError(
            f"State {name!r} is {param.ty}, and its new value is {new.ty}. Both must be the same.",
            code="RQ204",
        )
    return value


def pair_state(mod: tvm.IRModule, pairs: Mapping[str, str | int]) -> tvm.IRModule:
    """Make state of inputs and results of main that the caller pairs. It begins with zeros.

    Args:
        pairs: Input -> the result that is its new value, by name or number.

    Raises:
        ModelError: there is no such input or result, two inputs have the same new value, or types
            differ. Names pairs that are likely.
    """
    if get_state(mod):
        names = ", ".join(value.name for value in get_state(mod))
        raise ModelError(
            f"state= is given, and the model has state of its own: {names}. Leave state= out, or "
            "describe all of it with relayquant.with_state.",
            code="RQ102",
        )
    params, results = list_interface(mod)
    found = []
    for name, new in pairs.items():
        numbers = [at for at, (result, _) in enumerate(results) if new in (at, result)]
        for kind, given, known in (
            ("input", name, name in dict(params)),
            ("result", new, len(numbers) == 1),
        ):
            if not known:
                names = [each for each, _ in (params if kind == "input" else results)]
                raise ModelError(
                    f"state= names {given!r}, which is no {kind} of the model. "
                    f"{suggest_name(str(given), names)}{describe_likely(mod)}",
                    code="RQ103",
                )
        if numbers[0] in [pair.result for pair in found]:
            raise ModelError(
                f"state= names the result {new!r} twice. Each state has its own new value."
                f"{describe_likely(mod)}",
                code="RQ103",
            )
        found.append(StatePair(name, numbers[0], name))
    return hold_state(mod, found)


def list_interface(
    mod: tvm.IRModule,
) -> tuple[list[tuple[str, relax.Expr]], list[tuple[str, relax.Expr]]]:
    """Return the inputs and the results of main in order, each as (name, expression)."""
    editor = Editor(mod)
    is_tuple = isinstance(editor.result, relax.Tuple)
    results = list(editor.result.fields) if is_tuple else [editor.result]
    names = [
        editor.names.get(each, str(at)) if isinstance(each, relax.Var) else str(at)
        for at, each in enumerate(results)
    ]
    return (
        [(param.name, param) for param in editor.params],
        list(zip(names, results, strict=True)),
    )


def find_likely(mod: tvm.IRModule) -> dict[str, str]:
    """Find inputs and results that look like state. They have one type, and the name of the result
    begins or ends with the name of the input. Input -> result.
    """
    params, results = list_interface(mod)
    found = {}
    for name, param in params:
        for new, result in results:
            is_named = new.startswith(name) or new.endswith(name)
            is_free = name not in found and new not in found.values()
            if is_named and is_free and str(param.ty) == str(result.ty):
                found[name] = new
    return found


def describe_likely(mod: tvm.IRModule) -> str:
    """Return a sentence with the likely pairs, "" if there are none."""
    likely = find_likely(mod)
    return f" Likely: state={likely}." if likely else ""
