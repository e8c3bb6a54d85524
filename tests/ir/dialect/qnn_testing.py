"""Building, compiling and running one operator, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

import relayquant.ir.dialect  # noqa: F401  registers the operators
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.ir.rewrite.function import make_main

HOST_TARGET = resolve_target(None)
TARGETS: tuple[Any, ...] = ("llvm", HOST_TARGET)


def make_module(make_call: Callable[..., Any], types: Sequence[relax.TensorType]) -> tvm.IRModule:
    """A module whose main takes tensors of `types` and returns make_call(*variables)."""
    variables = [relax.Var(f"v{i}", ty) for i, ty in enumerate(types)]
    return make_main(variables, lambda builder: builder.emit(make_call(*variables)))


def type_of(array: np.ndarray) -> relax.TensorType:
    return relax.TensorType(array.shape, array.dtype.name)


def run_module(module: tvm.IRModule, arrays: Sequence[np.ndarray], target: Any = "llvm") -> Any:
    """The array that main returns, or a tuple of them."""
    executable = tvm.compile(module, target=tvm.target.Target(target))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(np.array(a, order="C")) for a in arrays])
    if hasattr(result, "numpy"):
        return result.numpy()
    return tuple(part.numpy() for part in result)


def run_call(
    make_call: Callable[..., Any], *arrays: np.ndarray, targets: Sequence[Any] = TARGETS
) -> np.ndarray:
    """Compile make_call for every target, check that all agree, return the result."""
    module = make_module(make_call, [type_of(a) for a in arrays])
    results = [run_module(module, arrays, target) for target in targets]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    return results[0]


def run_constant_and_variable(
    make_call: Callable[..., Any],
    data: Sequence[np.ndarray],
    parameters: Sequence[Any],
    targets: Sequence[Any] = TARGETS,
) -> np.ndarray:
    """make_call(*data, *parameters) with parameters as constants and as variables: equal bits."""
    constant = run_call(lambda *d: make_call(*d, *parameters), *data, targets=targets)
    arrays = [
        np.asarray(p, "float32" if np.asarray(p).dtype.kind == "f" else "int32") for p in parameters
    ]
    variable = run_call(make_call, *data, *arrays, targets=targets)
    np.testing.assert_array_equal(variable, constant)
    return constant
