"""Small Relay texts: one expression over given inputs, and what it computes; and the modules that
TVM wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

import relayquant as rq

#: Modules as TVM 0.19 wrote them, with inputs and the outputs of its compiled code.
WRITTEN_BY_TVM = Path(__file__).parents[1] / "recorded" / "relay"


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


def compile_and_run(mod: tvm.IRModule, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The results of compiled code."""
    machine = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    found = machine["main"](*[tvm.runtime.tensor(array) for array in inputs.values()])
    return [each.numpy() for each in (found if isinstance(found, Sequence) else [found])]


def value_names(mod: tvm.IRModule) -> list[str]:
    """Names of the values that main binds, in order."""
    return [binding.var.name for block in mod["main"].body.blocks for binding in block.bindings]


def draw_xavier(mod: tvm.IRModule) -> dict[str, np.ndarray]:
    """The weights that `relay.testing.create_workload` gave the parameters of main, in their order:
    uniform by Xavier with seed 0, and biases of zero.
    """
    rng = np.random.RandomState(0)
    weights = {}
    for param in mod["main"].params[1:]:
        shape = tuple(int(dim) for dim in param.ty.shape.values)
        weights[param.name] = np.zeros(shape, "float32")
        if param.name.endswith("weight"):
            bound = np.sqrt(6 / ((shape[0] + shape[1]) * np.prod(shape[2:])))
            weights[param.name] = rng.uniform(-bound, bound, shape).astype("float32")
    return weights
