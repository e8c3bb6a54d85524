"""Relax module -> a module whose float functions run step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.base.runtime import check_threads
from relayquant.codegen.eager.kernel_cache import KernelCache, KernelKey, host_kernels
from relayquant.codegen.eager.operand import find_static_type
from relayquant.codegen.eager.plan import Planner, Step
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.inputs import bind_input
from relayquant.ir.reference.interpreter import evaluate, flatten_value
from relayquant.ir.rewrite.function import list_functions
from relayquant.ir.rewrite.lifetimes import find_ends

#: Number of argument kinds that a function remembers.
MOST_CHECKED = 64


class EagerModule:
    """The functions of a module, run step by step on this machine."""

    def __init__(self, mod: tvm.IRModule, kernels: KernelCache | None = None) -> None:
        check_threads()
        self.kernels = kernels or host_kernels()
        self.programs = {
            gvar.name_hint: Program(mod, func, self.kernels)
            for gvar, func in list_functions(mod).items()
        }
        programs = self.programs.values()
        self.kernels.request(key for program in programs for key in program.list_kernels())

    def run(self, name: str, args: Sequence[Any]) -> list[np.ndarray]:
        """Call a function with arrays and shapes, and return its results. Any thread may call.

        A weight, bias or scale that is the same array with the same numbers as in the call before
        is packed, or read, only once.

        Raises:
            DataError, ModelError: as `relayquant.reference.run`.
            ConfigError: The process is a fork of one that has run kernels.
        """
        check_threads()
        return self.programs[name].run(args)


class Program:
    """A function as a sequence of steps."""

    def __init__(self, mod: tvm.IRModule, func: relax.Function, kernels: KernelCache) -> None:
        self.mod, self.func, self.params = mod, func, list(func.params)
        planner = Planner(self.params, func, kernels)
        self.steps = list(planner.plan())
        result = func.body.body if isinstance(func.body, relax.SeqExpr) else func.body
        self.result = planner.find_object(result) if isinstance(result, relax.Var) else result
        #: (shape, dtype) of each parameter that is a tensor of static shape
        self.known = {param: find_static_type(param) for param in self.params}
        #: shapes and dtypes of checked arguments -> symbolic dimensions
        self.checked: dict[tuple[Any, ...], dict[Any, Any]] = {}
        self.dead = find_dead(self.steps, set(relax.analysis.free_vars(self.result)))

    def list_kernels(self) -> Iterator[KernelKey]:
        """List the kernels that are known to be needed, in the order of the steps."""
        for step in self.steps:
            if step.kernel is not None:
                yield step.kernel

    def run(self, args: Sequence[Any]) -> list[np.ndarray]:
        frame = Frame(self.mod)
        likeness = describe_arguments(args)
        symbols = None if likeness is None else self.checked.get(likeness)
        if symbols is not None:
            frame.values.update(zip(self.params, args, strict=True))
            frame.symbols.update(symbols)
        else:
            for param, value in zip(self.params, args, strict=True):
                self.bind(frame, param, value)
            if likeness is not None and len(self.checked) < MOST_CHECKED:
                self.checked[likeness] = dict(frame.symbols)
        run_steps(frame, self.steps, self.dead)
        return self.find_results(frame)

    def bind(self, frame: Frame, param: relax.Var, value: Any) -> None:
        """Check an argument, and store it."""
        known = self.known[param]
        is_array = type(value) is np.ndarray  # a subclass may compute otherwise: masked arrays
        if is_array and known is not None and known == (value.shape, value.dtype):
            frame.values[param] = value
        else:
            bind_input(frame, param, param.name, param.ty, value)

    def find_results(self, frame: Frame) -> list[np.ndarray]:
        """Return the results of the function once its steps have run."""
        if isinstance(self.result, relax.Var):
            return flatten_value(frame.values[self.result])
        return flatten_value(evaluate(frame, self.result, "result"))


def describe_arguments(args: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return shapes and dtypes of arrays. None if an argument has to be converted to one that
    kernels read.
    """
    if not all(type(arg) is np.ndarray and arg.dtype.isnative for arg in args):
        return None
    return tuple((arg.shape, arg.dtype) for arg in args)


def find_dead(steps: Sequence[Step], kept: Set[relax.Var]) -> list[list[relax.Var]]:
    """List for each step the values that no later step reads, without values in `kept`."""
    return find_ends(((*step.reads, step.var) for step in steps), kept)


def run_steps(frame: Frame, steps: Sequence[Step], dead: Sequence[Sequence[relax.Var]]) -> None:
    """Run steps in order, and drop dead values after each step."""
    with np.errstate(all="ignore"):
        for step, vars_ in zip(steps, dead, strict=True):
            step.run(frame)
            for var in vars_:
                frame.values.pop(var, None)
