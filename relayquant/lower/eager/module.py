"""Eager, top: a module whose functions run step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.lower.eager.kernel_cache import KernelCache, KernelKey, host_kernels
from relayquant.lower.eager.plan import Planner
from relayquant.lower.float_layout import list_bindings, shape_of, static_sizes
from relayquant.reference.interpreter import Frame, bind_input, evaluate, flatten_value


class EagerModule:
    """The functions of a module, run step by step on this machine."""

    def __init__(self, mod: tvm.IRModule, kernels: KernelCache | None = None) -> None:
        self.kernels = kernels or host_kernels()
        self.programs = {
            gvar.name_hint: Program(mod, func, self.kernels)
            for gvar, func in mod.functions_items()
            if isinstance(func, relax.Function)
        }
        programs = self.programs.values()
        self.kernels.request(key for program in programs for key in program.list_kernels())

    def run(self, name: str, args: Sequence[Any]) -> list[np.ndarray]:
        """Call a function with arrays and shapes; returns its results. Any thread may call.

        A weight that is the same array as in the call before is packed once.

        Raises:
            DataError, ModelError: as `relayquant.reference.run`.
        """
        return self.programs[name].run(args)


class Program:
    """A function as steps."""

    def __init__(self, mod: tvm.IRModule, func: relax.Function, kernels: KernelCache) -> None:
        self.mod, self.func = mod, func
        bindings = list(list_bindings(func))
        self.steps = list(Planner(func, bindings, kernels).plan())
        self.result = func.body.body if isinstance(func.body, relax.SeqExpr) else func.body
        #: (shape, dtype) of each parameter that is a tensor of static shape
        self.known = [find_static_type(param) for param in func.params]
        last: dict[relax.Var, int] = {}
        for i, step in enumerate(self.steps):
            for var in (*step.reads, step.var):
                last[var] = i
        kept = set(relax.analysis.free_vars(self.result))
        #: values that nothing reads after each step
        self.dead: list[list[relax.Var]] = [[] for _ in self.steps]
        for var, i in last.items():
            if var not in kept:
                self.dead[i].append(var)

    def list_kernels(self) -> Iterator[KernelKey]:
        """The kernels that are known to be needed, in the order of the steps."""
        for step in self.steps:
            if step.kernel is not None:
                yield step.kernel

    def run(self, args: Sequence[Any]) -> list[np.ndarray]:
        frame = Frame(self.mod)
        for param, known, value in zip(self.func.params, self.known, args, strict=True):
            if known is not None and known == (value.shape, value.dtype):
                frame.values[param] = value
            else:
                bind_input(frame, param, param.name, param.ty, value)
        with np.errstate(all="ignore"):
            for step, dead in zip(self.steps, self.dead, strict=True):
                step.run(frame)
                for var in dead:
                    frame.values.pop(var, None)
            if isinstance(self.result, relax.Var):
                return flatten_value(frame.values[self.result])
            return flatten_value(evaluate(frame, self.result, "result"))


def find_static_type(var: relax.Var) -> tuple[tuple[int, ...], np.dtype] | None:
    """(shape, dtype) of a tensor; None if its shape is symbolic, or it is none."""
    if not isinstance(var.ty, relax.TensorType) or not isinstance(var.ty.shape, relax.ShapeExpr):
        return None
    sizes = static_sizes(shape_of(var))
    return None if sizes is None else (tuple(sizes), np.dtype(str(var.ty.dtype)))
