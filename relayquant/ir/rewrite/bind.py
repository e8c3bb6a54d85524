"""What `relayquant.load` gives, a module and its parameters -> a module with these as constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import relax

from relayquant.errors import ConfigError, ModelError, format_count, suggest_name
from relayquant.ir.rewrite.constants import holds_constant
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.entry import find_entry
from relayquant.ir.rewrite.function import list_functions
from relayquant.ir.rewrite.graph import tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import MOVES

#: operators that change the layout of a weight for its reader
LAYOUTS = frozenset({*MOVES, "relax.astype"})


#: What public functions take as a model: a module, or what `relayquant.load` gives.
Model: TypeAlias = tvm.IRModule | tuple[tvm.IRModule, Mapping[str, Any] | None]


def split_model(model: Model, params: Any = None) -> tuple[tvm.IRModule, Any]:
    """A module and its parameters, which are given as one or as two.

    Raises:
        ConfigError: parameters are given twice.
    """
    if not isinstance(model, tuple):
        return model, params
    if params is not None:
        raise ConfigError(
            "mod is a pair (mod, params), and params is given too. Pass the pair and params=None, "
            "or the two apart.",
            code="RQ101",
        )
    return model


def bind_model(model: Model) -> tvm.IRModule:
    """A model as a module alone: of a pair, the parameters are constants, so that only the inputs
    are left.

    Raises:
        ModelError: a name is unknown, a shape or dtype differs, or a value is missing.
    """
    mod, params = split_model(model)
    if mod is model or not (params or has_weights(mod)):
        return mod
    if find_entry(mod) is None:
        return bind_functions(mod, params or {})
    editor = Editor(mod)
    bind_params(editor, params)
    return editor.build()


def bind_functions(mod: tvm.IRModule, params: Mapping[str, Any]) -> tvm.IRModule:
    """Replace parameters of all functions by constants. Functions share the constant of a name.

    Raises:
        ModelError: no function has a parameter of a name, or its shape or dtype differs.
    """
    functions = list_functions(mod)
    weights = {gvar: list_weights(func) for gvar, func in functions.items()}
    known = {name: param for own in weights.values() for name, param in own.items()}
    for name in params:
        if name not in known:
            raise ModelError(
                f"params has {name!r}, which no function takes. "
                f"{suggest_name(name, sorted(known))}",
                code="RQ103",
            )
    constants = {name: _to_const(known[name], params[name]) for name in params}
    for gvar, own in weights.items():
        values = {name: constants[name] for name in own if name in constants}
        if values:
            bind = relax.transform.BindParams(gvar.name_hint, values)
            mod = bind(mod)
    return mod


def list_weights(func: relax.Function) -> dict[str, relax.Var]:
    """Return the parameters of a function behind its inputs, by name."""
    first = int((func.attrs or {}).get("num_input", 0))
    return {param.name: param for param in func.params[first:]}


def has_weights(mod: tvm.IRModule) -> bool:
    """Whether a TVM frontend left weights as parameters of the model."""
    entry = find_entry(mod)
    return entry is not None and "num_input" in (mod[entry].attrs or {})


def bind_params(editor: Editor, params: Mapping[str, Any] | None) -> None:
    """Replace parameters of main by constants.

    Args:
        params: Parameter name -> numpy array or TVM tensor, or {function: [values in order]} as
            `tvm.relax.frontend.detach_params` returns it. If a TVM frontend kept parameters as
            inputs, the module has the attribute `num_input` (the number of real inputs) and may
            have `params` (the values of the other inputs). A value that is already a constant of
            the module may be passed again.

    Raises:
        ModelError: a name is unknown, a shape or dtype differs, or a value is missing.
    """
    values = dict(params or {})
    names = [param.name for param in editor.params]
    if len(set(names)) != len(names):
        raise ModelError(f"Parameters of main share names ({names}); rename them.", code="RQ204")
    num_input = int(editor.attrs.get("num_input", len(names)))
    weights = editor.params[num_input:]
    attached = editor.attrs.pop("params", None)
    function = next(iter(values), None)
    if len(values) == 1 and function in ("main", editor.entry) and function not in names:
        attached = values.pop(function)
        if len(attached) != len(weights):
            raise ModelError(
                f"params[{function!r}] holds {format_count(len(attached), 'value')}, main has "
                f"{format_count(len(weights), 'parameter')} behind its "
                f"{format_count(num_input, 'input')}. Pass what detach_params returned with this "
                "module.",
                code="RQ204",
            )
    if attached is not None and len(attached) == len(weights):
        values = {**dict(zip((w.name for w in weights), attached, strict=True)), **values}
    for name in [name for name in values if name not in names]:
        if not holds_constant(editor.values.values(), values.pop(name)):
            raise ModelError(
                f"params has {name!r}, which main does not. {suggest_name(name, names)} "
                "No constant of the module has its value.",
                code="RQ103",
            )
    missing = [weight.name for weight in weights if weight.name not in values]
    if missing:
        raise ModelError(
            f"main has {format_count(len(names), 'parameter')} with "
            f"{format_count(num_input, 'input')}; no value was given for "
            f"{', '.join(map(repr, missing))}. Pass them in params.",
            code="RQ204",
        )
    for param in list(editor.params):
        if param.name in values:
            editor.bind_param(param, _to_const(param, values[param.name]))
    if "num_input" in editor.attrs:
        editor.attrs["num_input"] = len(editor.params)


def describe_weights(editor: Editor, params: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return rows of `relayquant.sources` for the values that read parameters, before these are
    bound. Each row names the parameter's module path:

        matmul = matmul(x, permute_dims(block1.fc.weight))  ->  matmul: node "block1.fc"

    So `set_module_name("block1")` selects the operators that torch and `relax.frontend.nn` call by
    this name. A value that reads no parameter has no row.
    """
    first_weight = int(editor.attrs.get("num_input", len(editor.params)))
    rows: dict[str, dict[str, Any]] = {}
    for place, param in enumerate(editor.params):
        path = param.name.rpartition(".")[0]
        if not path or (place < first_weight and param.name not in (params or {})):
            continue
        readers = editor.users(param)
        while readers:
            reader = readers.pop()
            if editor.op_name(reader) in LAYOUTS:
                readers += editor.users(reader)
                continue
            row = {"node": path, "op": editor.op_name(reader), "constants": []}
            rows.setdefault(editor.names[reader], row)["constants"].append(param.name)
    return rows


def _to_const(param: relax.Var, value: Any) -> relax.Expr:
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    shape, dtype = tensor_shape(param), tensor_dtype(param)
    fits = shape is None or (
        len(shape) == array.ndim
        and all(
            isinstance(want, str) or want == have
            for want, have in zip(shape, array.shape, strict=True)
        )
    )
    if not fits or dtype != str(array.dtype):
        raise ModelError(
            f"params[{param.name!r}] is {array.dtype} of shape {array.shape}; main wants {dtype} "
            f"of shape {shape}.",
            code="RQ204",
        )
    return relax.const(np.asarray(array, order="C"), dtype)
