"""load: integer module + number of samples -> the module, ready to run.

Compiling takes seconds, even for a single run. Step by step (`EagerModule`) nothing is compiled,
but each multiply-add takes several times as long. Integers are equal bit for bit. Results of float
operators may differ in the last bits.
"""

from __future__ import annotations

import tvm

from relayquant.base.runtime import CompileModule, FunctionRunner, LoadModule, Machine
from relayquant.codegen.eager import EagerModule
from relayquant.data import Dataset, count_samples
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.function import list_functions

#: Multiply-adds that take as long step by step as compiling one operator. Measured: 5e9 take one
#: second, and MobileNet, ResNet-20 and KWT-1 compile in about 0.05 s for each operator.
WORK_PER_OPERATOR = 2.5e8


def load_integers(
    mod: tvm.IRModule, samples: int | None, compile_module: CompileModule
) -> FunctionRunner:
    """Make the functions of an integer module for this machine, compiled or step by step.

    The faster one for this number of samples is chosen. None: unknown, treated as many.
    """
    functions = list_functions(mod).values()
    values = [binding.value for func in functions for binding in list_bindings(func)]
    work = sum(map(count_macs, values)) * (samples or 0)
    if samples is not None and work <= WORK_PER_OPERATOR * len(values):
        return EagerModule(mod)
    return Machine(compile_module(mod))


def bind_loader(data: Dataset, compile_module: CompileModule) -> LoadModule:
    """Return `load_integers` for the sample count of a data set. Reads the first batch."""
    first = count_samples(next(iter(data)))
    samples = None if data.length is None else data.length * first
    return lambda mod: load_integers(mod, samples, compile_module)
