"""Small Relay texts: one expression over given inputs, and what it computes."""

from __future__ import annotations

import numpy as np
import tvm

import relayquant as rq


def type_text(array: np.ndarray) -> str:
    """The type of an array in Relay."""
    dims = ", ".join(map(str, array.shape))
    return f"Tensor[({dims}), {array.dtype}]"


def module_text(body: str, **inputs: np.ndarray) -> str:
    """A module whose main has the inputs as parameters."""
    params = ", ".join(f"%{name}: {type_text(array)}" for name, array in inputs.items())
    return f'#[version = "0.0.5"]\ndef @main({params}) {{\n  {body}\n}}\n'


def run_text(body: str, **inputs: np.ndarray) -> list[np.ndarray]:
    """The results of an expression in numpy."""
    return rq.reference.run(rq.relay.from_text(module_text(body, **inputs)), inputs)


def value_names(mod: tvm.IRModule) -> list[str]:
    """Names of the values that main binds, in order."""
    return [binding.var.name for block in mod["main"].body.blocks for binding in block.bindings]
