"""Integer module -> the executable that a report measures, and its times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.outputs import Interface, order_inputs
from relayquant.analysis.speed.latency import Latency, measure_latency
from relayquant.analysis.speed.peak import measure_peak
from relayquant.analysis.speed.profile import (
    KernelSite,
    OperatorTime,
    compile_with_sites,
    profile_executable,
)
from relayquant.base.cores import count_threads
from relayquant.base.runtime import Machine, as_tensor
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.ir.ledger import Ledger, LedgerRow, read_ledger
from relayquant.stages.compilation import compile

#: turns of each model when times are measured
ROUNDS = 10


def compile_runs(
    canonical: tvm.IRModule,
    built: Deployed,
    other: tvm.IRModule | None,
    batch: Mapping[str, np.ndarray],
) -> dict[str, tuple[Any, list[np.ndarray]]]:
    """Compile "float", "int8" and, if there is one, "other": name -> (executable, inputs of a
    batch).
    """
    runs = {"float": (compile(canonical), order_inputs(canonical, batch))}
    modules = {"int8": (built.mod, built.executable)}
    if other is not None:
        modules["other"] = other, compile(other)
    for name, (module, executable) in modules.items():
        integers = Interface.of(module).to_inputs(batch)
        runs[name] = executable, order_inputs(module, integers)
    return runs


@dataclass(frozen=True, eq=False)
class Deployed:
    """An integer module compiled for this machine, once for all runs and measurements."""

    mod: tvm.IRModule
    executable: Any
    sites: tuple[KernelSite, ...]

    @staticmethod
    def build(mod: tvm.IRModule) -> Deployed:
        return Deployed(mod, *compile_with_sites(mod, compile))

    def load(self, _mod: tvm.IRModule) -> Machine:
        """Load this module. Same interface as `LoadModule`, for no other module."""
        return Machine(self.executable)


def time_executables(
    runs: Mapping[str, tuple[Any, Sequence[np.ndarray]]],
) -> dict[str, Latency]:
    """Time one run of each executable on its inputs, in turns."""
    candidates = {
        name: partial(Machine(executable).vm["main"], *map(as_tensor, inputs))
        for name, (executable, inputs) in runs.items()
    }
    return measure_latency(candidates, ROUNDS)


def time_operators(
    built: Deployed, inputs: Sequence[np.ndarray]
) -> dict[str, tuple[float, float | None]]:
    """Map each operator to (seconds, share of the integer peak of all cores) of its kernels."""
    ledger = read_ledger(built.mod)
    peak = measure_peak(resolve_target(None)) * count_threads()
    found: dict[str, list[OperatorTime]] = {}
    profile = profile_executable(built.executable, built.sites, built.mod, inputs)
    for time in profile.operators:
        row = find_row(ledger, time.value)
        if row is not None:
            found.setdefault(row.name, []).append(time)
    result = {}
    for name, times in found.items():
        seconds, macs = sum(t.seconds for t in times), sum(t.macs for t in times)
        row = ledger.row(name)
        is_integer = macs and seconds and row is not None and row.quantized
        result[name] = seconds, 2 * macs / seconds / 1e9 / peak if is_integer else None
    return result


def find_row(ledger: Ledger, value: str) -> LedgerRow | None:
    """Find the operator that a value of the integer module belongs to.

    A value such as "name.sum" belongs to the operator of "name".
    """
    while value:
        row = ledger.row(value)
        if row is not None:
            return row
        value = value.rpartition(".")[0]
    return None
