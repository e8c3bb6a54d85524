"""A Llama of one small layer in two functions, prefill and decode, and what it is called with."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from llama_program import (
    LlamaSizes,
    compute_angles,
    draw_weights,
    export_llama,
    make_mask,
)
from tvm.ir import Call

import relayquant as rq
from relayquant.flow.compression.sources import bind_params, open_params
from relayquant.ir.dialect.legality import iterate_bindings
from relayquant.ir.rewrite.graph import call_name

SIZES = LlamaSizes(width=32, hidden=44, layers=1, heads=4, groups=2, vocabulary=64)
ROWS = rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_ROW, is_dynamic=True)
GROUPS = rq.QSpec(
    "int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_GROUP, is_dynamic=True
)
AFFINE_ROWS = rq.QSpec(
    "int8", rq.config.Scheme.AFFINE, rq.config.Granularity.PER_ROW, is_dynamic=True
)
TOKENS = [1, 5, 9, 2]


def make_llama() -> tuple[tvm.IRModule, Any]:
    """(module, parameters)."""
    return export_llama(SIZES), draw_weights(SIZES)


def bind_weights(mod: tvm.IRModule, params: Any) -> tvm.IRModule:
    """The module with float weights as constants."""
    return bind_params(mod, open_params(mod, dict(params)))


def take_function(mod: tvm.IRModule, name: str) -> tvm.IRModule:
    """A module of one function, as its main."""
    return tvm.IRModule({"main": mod[name].with_attr("global_symbol", "main")})


def make_prefill(tokens: list[int]) -> tuple[np.ndarray, ...]:
    """Arguments of prefill."""
    angles = compute_angles(SIZES, 0, len(tokens))
    return np.array([tokens], "int32"), *angles, make_mask(len(tokens))


def list_calls(func: Any) -> list[Call]:
    """Calls of a function in order."""
    return [b.value for b in iterate_bindings(func) if isinstance(b.value, Call)]


def select_calls(mod: tvm.IRModule, name: str) -> dict[str, list[Call]]:
    """Calls of one operator, by function."""
    return {
        gvar.name_hint: [call for call in list_calls(func) if call_name(call) == name]
        for gvar, func in mod.functions_items()
    }
