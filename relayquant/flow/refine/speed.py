"""After calibration, if asked for: calibrated model and integer module -> the same, with those
operators in float that this machine runs faster so.

Not every operator gains from integers: where there is no integer kernel, or where an operator
between two float ones needs conversions on both sides. What helps is measured, not guessed: both
forms are timed kernel by kernel, and a module is changed only when the whole of it became faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.latency import measure_latency
from relayquant.analysis.profile import profile_module
from relayquant.base.runtime import Executor, as_tensor
from relayquant.flow.pipeline import lower_prepared
from relayquant.flow.refine.prepared_edit import describe_mapping, keep_parameters
from relayquant.ir.ledger import SpeedResult, read_ledger, write_ledger
from relayquant.ir.plan import Plan
from relayquant.ir.rewrite import Graph
from relayquant.stages.compilation import compile
from relayquant.stages.prepared import PreparedModel

#: by how much of its time the whole model has to become faster, to be sure it is no chance
LEAST_GAIN = 0.02
#: modules that are built and timed, at most; each has half of the operators of the one before
TRIALS = 4
#: turns of each module when whole models are compared
TURNS = 10

Inputs = Sequence[np.ndarray]


@dataclass(frozen=True)
class Stopwatch:
    """How time is measured.

    Attributes:
        time_values: Module -> seconds of the kernel that computes each value, by name. What is
            fused into the kernel of a later value has none.
        time_modules: Modules -> seconds of one run of each, measured in turns.
    """

    time_values: Callable[[tvm.IRModule], Mapping[str, float]]
    time_modules: Callable[[Sequence[tvm.IRModule]], Sequence[float]]

    @staticmethod
    def on_this_machine(inputs: Inputs) -> Stopwatch:
        """The clock of this machine, on these inputs of main."""

        def time_values(mod: tvm.IRModule) -> dict[str, float]:
            seconds: dict[str, float] = {}
            for call in profile_module(mod, inputs, compile).operators:
                seconds[call.value] = seconds.get(call.value, 0.0) + call.seconds
            return seconds

        @functools.lru_cache(maxsize=2)  # one module is compared with several others
        def bind(mod: tvm.IRModule) -> Callable[[], object]:
            return bind_run(mod, inputs)

        def time_modules(mods: Sequence[tvm.IRModule]) -> list[float]:
            runs = {str(i): bind(mod) for i, mod in enumerate(mods)}
            return [found.median for found in measure_latency(runs, TURNS).values()]

        return Stopwatch(time_values, time_modules)


def bind_run(mod: tvm.IRModule, inputs: Inputs) -> Callable[[], object]:
    """A function that runs main of a module, compiled for this machine, once."""
    main, tensors = Executor(compile(mod)).vm["main"], [as_tensor(array) for array in inputs]
    return lambda: main(*tensors)


@dataclass(frozen=True)
class Part:
    """Operators that go to float together, and the seconds of their kernels in both forms."""

    operators: tuple[str, ...]
    integer: float
    float_: float

    @property
    def gain(self) -> float:
        """Seconds that float saves, not counting conversions at its borders."""
        return self.integer - self.float_


def keep_faster_float(
    prepared: PreparedModel,
    qmod: tvm.IRModule,
    stopwatch: Stopwatch,
    dataset: Any,
    *,
    calibration: Any = None,
    accept: Callable[[tvm.IRModule], bool] = lambda _: True,
) -> tuple[PreparedModel, tvm.IRModule]:
    """(calibrated model, integer module) with operators in float where that is faster; the ledger
    says which and by how much.

    All operators whose float kernels took less time go to float first, then the half of them that
    promises most, and so on, neighbours together: conversions at their borders, which no kernel's
    time tells, count only in a whole model. The fastest one is taken, if it is faster than `qmod`.

    Args:
        prepared: The calibrated model that `qmod` was made from; parameters stay as they are.
        qmod: Its integer module.
        stopwatch: Measures.
        dataset, calibration: As for `quantize`; used when a new plan has values that were never
            observed.
        accept: Whether a faster module will do otherwise; what it accepted last is returned.
    """
    parts = find_faster_parts(prepared, qmod, stopwatch)
    best = prepared, qmod, SpeedResult(stopwatch.time_modules([qmod])[0])
    count = len(parts)
    for _ in range(TRIALS):
        if not count:
            break
        names = tuple(name for part in parts[:count] for name in part.operators)
        changed = keep_parameters(prepared, names, dataset, calibration)
        module = lower_prepared(changed)
        before, now = stopwatch.time_modules([qmod, module])
        faster_than_best = now / before < min(1 - LEAST_GAIN, best[2].ratio)
        if faster_than_best and accept(module):
            mapping = describe_mapping(changed.mapping) if changed.mapping is not None else None
            best = changed, module, SpeedResult(before, now, names, mapping)
        count //= 2
    changed, module, result = best
    ledger = replace(read_ledger(module), speed=result)
    for part in parts:
        for name in set(part.operators) & set(result.reverted):
            others = f", with {len(part.operators) - 1} others" if len(part.operators) > 1 else ""
            reason = (
                f"faster in float on this machine: {part.float_ * 1e6:.1f} us{others}, "
                f"{part.integer * 1e6:.1f} us on integers"
            )
            ledger = ledger.with_refusal(name, reason, "only_if_faster=False quantizes it")
    return changed, write_ledger(module, ledger)


def find_faster_parts(
    prepared: PreparedModel, qmod: tvm.IRModule, stopwatch: Stopwatch
) -> list[Part]:
    """Parts of the model whose float kernels take less time, the largest gain first."""
    seconds = [stopwatch.time_values(module) for module in (qmod, prepared.mod)]
    graph, plan = Graph(prepared.mod), prepared.plan
    owners = {value: op.name for op in plan.operators for value in op.values}
    times: dict[str, tuple[float, float]] = {}
    faster: list[list[str]] = []
    for names in join_by(plan, find_fused(plan, graph, owners, seconds)):
        values = [value for name in names for value in plan.operator(name).values]
        integer, float_ = (sum(found.get(value, 0.0) for value in values) for found in seconds)
        times[names[0]] = integer, float_
        if float_ < integer and any(plan.operator(name).quantized for name in names):
            faster.append(names)
    edges = [(names[0], name) for names in faster for name in names]
    inside = {name for _, name in edges}
    for value, owner in owners.items():
        readers = {owners.get(user.name, "") for user in graph.users[graph.vars[value]]}
        edges += [(owner, reader) for reader in readers & inside if owner in inside]
    parts = []
    for names in join_by(plan, edges):
        if not inside.issuperset(names):
            continue
        both = [times[name] for name in names if name in times]
        quantized = tuple(name for name in names if plan.operator(name).quantized)
        parts.append(Part(quantized, sum(i for i, _ in both), sum(f for _, f in both)))
    return sorted(parts, key=lambda part: -part.gain)


def find_fused(
    plan: Plan, graph: Graph, owners: Mapping[str, str], seconds: Sequence[Mapping[str, float]]
) -> list[tuple[str, str]]:
    """Pairs of operators that share a kernel in one of the forms.

    A kernel has the name of the last value that is fused into it: an operator without time of its
    own belongs to its only reader.
    """
    pairs = []
    for times in seconds:
        for operator in plan.operators:
            last = graph.vars[operator.values[-1]]
            is_timed = any(value in times for value in operator.values)
            if not is_timed and graph.has_one_user(last):
                reader = owners.get(graph.users[last][0].name)
                pairs += [(operator.name, reader)] if reader is not None else []
    return pairs


def join_by(plan: Plan, pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """All operators of the plan in sets, in order: two of one pair are in one set."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while name in leader:
            name = leader[name]
        return name

    for one, other in pairs:
        if find(one) != find(other):
            leader[find(one)] = find(other)
    found: dict[str, list[str]] = {}
    for operator in plan.operators:
        found.setdefault(find(operator.name), []).append(operator.name)
    return list(found.values())
