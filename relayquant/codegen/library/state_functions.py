"""Lowered module + its state -> the same module with two functions, by which whoever runs it knows
the state.

    relayquant_state()          ->  uint8 tensor, the JSON text of `describe_state`
    relayquant_initial_state()  ->  array of new tensors, one for each state
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import tvm
from tvm import relax, te
from tvm.target import Target

from relayquant.base.runtime import DESCRIPTION, INITIAL_STATE
from relayquant.codegen.kernels.emit import IS_SCHEDULED
from relayquant.ir.rewrite.function import add_functions, define_function
from relayquant.ir.state import StatePlace, StateValue


def add_state_functions(
    lowered: tvm.IRModule,
    values: Sequence[StateValue],
    places: Mapping[str, StatePlace],
    target: Target,
) -> tvm.IRModule:
    """Add the two functions to a lowered module. A module without state stays as it is."""
    if not values:
        return lowered
    text = json.dumps(describe_state(values, places))
    builder = relax.BlockBuilder()
    described = relax.const(np.frombuffer(text.encode(), "uint8"))
    added = {
        DESCRIPTION: define_function(builder, [], lambda: builder.emit_output(described)),
        INITIAL_STATE: define_function(builder, [], lambda: emit_values(builder, values)),
    }
    mod = builder.finalize()
    for name, func in added.items():
        mod[name] = func.with_attr("global_symbol", name)
    with target:
        # Not with the other functions: constants are folded there, and a call must make new tensors
        mod = tvm.transform.Sequential(
            [
                relax.transform.ToNonDataflow(),
                relax.transform.RemovePurityChecking(),
                relax.transform.CallTIRRewrite(),
                relax.transform.LowerAllocTensor(),
                relax.transform.KillAfterLastUse(),
                relax.transform.LowerRuntimeBuiltin(),
                relax.transform.VMShapeLower(),
                relax.transform.AttachGlobalSymbol(),
            ]
        )(mod)
    return add_functions(lowered, dict(mod.functions_items()))


def describe_state(
    values: Iterable[StateValue], places: Mapping[str, StatePlace]
) -> dict[str, Any]:
    """Describe the state as plain data.

    Returns:
        "values" -> rows of name, shape and dtype; "functions" -> function name -> its `StatePlace`.
    """
    rows = [{"name": each.name, "shape": each.shape, "dtype": each.dtype} for each in values]
    return {"values": rows, "functions": {name: asdict(place) for name, place in places.items()}}


def emit_values(builder: relax.BlockBuilder, values: Iterable[StateValue]) -> relax.Expr:
    """Emit the initial values as a tuple."""
    return builder.emit_output(relax.Tuple([emit_value(builder, value) for value in values]))


def emit_value(builder: relax.BlockBuilder, value: StateValue) -> relax.Expr:
    """Emit a call of a kernel that writes the initial value into a new tensor."""
    if value.initial is None:
        zeros = te.compute(value.shape, lambda *_: tvm.tirx.const(0, value.dtype), name="zeros")
        arguments, tensors = [], [zeros]
    else:
        given = te.placeholder(value.shape, value.dtype, name="given")
        copy = te.compute(value.shape, lambda *at: given(*at), name="copy")
        arguments, tensors = [relax.const(value.initial, value.dtype)], [given, copy]
    kernel = te.create_prim_func(tensors).without_attr("global_symbol")
    gvar = builder.add_func(kernel.with_attr(IS_SCHEDULED, True), "relayquant_state_value")
    ty = relax.TensorType(value.shape, value.dtype)
    return builder.emit(relax.call_tir(gvar, relax.Tuple(arguments), ty))
