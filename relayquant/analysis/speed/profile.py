"""Time of a compiled module, for each kernel call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm.ir.instrument import pass_instrument

from relayquant.base.runtime import CompileModule, Machine, as_tensor
from relayquant.ir.dialect.cost import MACS_ATTR
from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.graph import static_size

#: After this pass every kernel call has its final name and still the name of its value.
LAST_NAMED_PASS = "relayquant.ScheduleFunctions"

#: Calls of kernels: with a new result, or into an existing buffer.
KERNEL_CALLS = frozenset({"relax.call_tir", "relax.call_tir_inplace"})
#: Functions of TVM's virtual machine itself.
MACHINE_PREFIX = "vm.builtin."


@dataclass(frozen=True)
class KernelSite:
    """One call site of a kernel in function main.

    Attributes:
        value: Name of the value it computes, which comes from the model.
        kernel: Name of the function. Equal operators share one.
        macs: Multiply-adds of one call, with a symbolic batch counted as 1. 0 if unknown.
    """

    value: str
    kernel: str
    macs: int


@dataclass(frozen=True)
class OperatorTime:
    """Time of one kernel call.

    Attributes:
        value, kernel: See `KernelSite`. The value is empty if the call could not be matched.
        seconds: Shortest time of one call, minus the time of an empty call.
        macs: Multiply-adds of one call at the batch that was run.
    """

    value: str
    kernel: str
    seconds: float
    macs: int

    @property
    def gops(self) -> float:
        """10^9 operations per second. A multiply-add is two operations."""
        return 2 * self.macs / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class Profile:
    """Where the time of a run goes.

    Attributes:
        operators: The kernel calls, in execution order.
        total: Seconds of the shortest run without instrumentation.
        machine_calls: Calls that the virtual machine makes for itself: memory, shapes.
    """

    operators: tuple[OperatorTime, ...]
    total: float
    machine_calls: int

    @property
    def outside(self) -> float:
        """Seconds of a run outside kernels. Separate runs are compared, so it may be below 0."""
        return self.total - sum(operator.seconds for operator in self.operators)


def compile_with_sites(
    mod: tvm.IRModule, compile_module: CompileModule
) -> tuple[Any, tuple[KernelSite, ...]]:
    """Compile a module and return (executable, the kernel calls of main in order).

    `compile_module` must use this package's pipeline. With any other pipeline there are no sites.
    """
    seen: list[tvm.IRModule] = []

    @pass_instrument
    class KeepModule:
        """Keeps the module after the last pass that names values."""

        def run_after_pass(self, after: tvm.IRModule, info: Any) -> None:
            if info.name == LAST_NAMED_PASS:
                seen.append(after)

    with tvm.transform.PassContext(instruments=[KeepModule()]):
        executable = compile_module(mod)
    return executable, list_sites(seen[-1]) if seen else ()


def list_sites(mod: tvm.IRModule) -> tuple[KernelSite, ...]:
    """List the kernel calls in main, in order."""
    sites = []
    for binding in list_bindings(mod["main"]):
        call = getattr(binding, "value", None)
        if not isinstance(call, tvm.ir.Call) or not isinstance(call.op, tvm.ir.Op):
            continue
        if call.op.name not in KERNEL_CALLS:
            continue
        func = mod[call.args[0]]
        macs = int(func.attrs.get(MACS_ATTR, 0)) if func.attrs else 0
        sites.append(KernelSite(str(binding.var.name), str(call.args[0].name_hint), macs))
    return tuple(sites)


def profile_module(
    mod: tvm.IRModule, inputs: Sequence[np.ndarray], compile_module: CompileModule, runs: int = 20
) -> Profile:
    """Compile a module and time every call of a kernel in it.

    Args:
        mod: Quantized or float module, weights bound.
        inputs: One array for each input of main.
        compile_module: Compiles for this machine.
        runs: Timed runs, >= 1.
    """
    return profile_executable(*compile_with_sites(mod, compile_module), mod, inputs, runs)


def profile_executable(
    executable: Any,
    sites: Sequence[KernelSite],
    mod: tvm.IRModule,
    inputs: Sequence[np.ndarray],
    runs: int = 20,
) -> Profile:
    """Time every kernel call in the results of `compile_with_sites`.

    Args: as for `profile_module`.
    """
    executor = Machine(executable)
    tensors = [as_tensor(array) for array in inputs]
    main = executor.vm["main"]
    main(*tensors)
    times = [time_calls(executor, tensors) for _ in range(runs)]
    totals = []
    executor = Machine(executable)  # a new machine, because an instrument cannot be removed
    main = executor.vm["main"]
    for _ in range(runs + 1):
        start = time.perf_counter()
        main(*tensors)
        totals.append(time.perf_counter() - start)
    # Other processes only add to a time, and a run is longer than a kernel: of a busy machine,
    # medians would blame what lies between the kernels.
    seconds = np.min([[spent for _, spent in calls] for calls in times], axis=0)
    batch = int(inputs[0].shape[0]) if has_symbolic_batch(mod) else 1
    names = [name for name, _ in times[0]]
    is_machine = [name.startswith(MACHINE_PREFIX) for name in names]
    # The shortest of the machine's own calls does nothing. Its time is the cost of measuring.
    empty = min((s for s, own in zip(seconds, is_machine, strict=True) if own), default=0.0)
    operators = tuple(
        OperatorTime(site.value, name, max(float(spent - empty), 0.0), site.macs * batch)
        for site, name, spent in zip(match_sites(names, sites), names, seconds, strict=True)
        if not name.startswith(MACHINE_PREFIX)
    )
    return Profile(operators, min(totals[1:]), sum(is_machine))


def time_calls(executor: Machine, tensors: Sequence[Any]) -> list[tuple[str, float]]:
    """Return (function, seconds) of every call in one run of main."""
    calls: list[tuple[str, float]] = []
    started = 0.0

    def observe(_func: Any, name: str, before: bool, _result: Any, *_args: Any) -> int:
        nonlocal started
        if before:
            started = time.perf_counter()
        else:
            calls.append((name, time.perf_counter() - started))
        return 0  # go on

    executor.vm.set_instrument(observe)
    executor.vm["main"](*tensors)
    return calls


def match_sites(names: Sequence[str], sites: Sequence[KernelSite]) -> list[KernelSite]:
    """Find the call site of each call. Both are in program order. Calls of the machine itself have
    none.
    """
    kernels = Counter(site.kernel for site in sites)
    matched, position = [], 0
    for name in names:
        if name not in kernels:
            matched.append(KernelSite("", name, 0))
            continue
        while position < len(sites) and sites[position].kernel != name:
            position += 1
        found = position < len(sites)
        matched.append(sites[position] if found else KernelSite("", name, 0))
        position += found
    return matched


def has_symbolic_batch(mod: tvm.IRModule) -> bool:
    """Whether the first dimension of the first input is known only at run time."""
    params = mod["main"].params
    dims = getattr(getattr(params[0].ty, "shape", None), "values", None) if params else None
    return bool(dims) and static_size(dims[0]) is None
