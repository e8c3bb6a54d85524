"""load: integer module and how many samples it is run on -> the module, ready to run.

To compile a module takes seconds, however little it is run. Step by step (`EagerModule`) there is
nothing to compile, but each multiply-add takes several times as long. The integers are the same bit
for bit; what operators in float compute may differ in its last bits.
"""

from __future__ import annotations

import tvm
from tvm import relax

from relayquant.base.runtime import CompileModule, Executor, FunctionRunner, LoadModule
from relayquant.codegen.eager import EagerModule
from relayquant.data import Dataset, count_samples
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.rewrite.expressions import list_bindings

#: Multiply-adds that steps take as long for as it takes to compile one operator. Measured: 5e9 in a
#: second, and MobileNet, ResNet-20 and KWT-1 take about 0.05 s for each of their operators.
WORK_PER_OPERATOR = 2.5e8


def load_integers(
    mod: tvm.IRModule, samples: int | None, compile_module: CompileModule
) -> FunctionRunner:
    """The functions of an integer module, for this machine: step by step or compiled, whichever is
    done earlier with so many samples (None: not known, and taken to be many).
    """
    functions = [func for _, func in mod.functions_items() if isinstance(func, relax.Function)]
    values = [binding.value for func in functions for binding in list_bindings(func)]
    work = sum(map(count_macs, values)) * (samples or 0)
    if samples is not None and work <= WORK_PER_OPERATOR * len(values):
        return EagerModule(mod)
    return Executor(compile_module(mod))


def bind_loader(data: Dataset, compile_module: CompileModule) -> LoadModule:
    """`load_integers` for the samples of a data set, of which the first batch is read."""
    first = count_samples(next(iter(data)))
    samples = None if data.length is None else data.length * first
    return lambda mod: load_integers(mod, samples, compile_module)
