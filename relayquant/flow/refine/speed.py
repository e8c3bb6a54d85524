"""After calibration, if asked for: calibrated model and integer module -> the same, with those
operators in float that this machine runs faster so.

Not every operator gains from integers: where there is no integer kernel, or where an operator
between two float ones needs conversions on both sides. What helps is measured, not guessed: both
forms are timed kernel by kernel, and a module is changed only when the whole of it became faster.
`pipeline` builds what is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.speed.latency import measure_latency
from relayquant.analysis.speed.profile import profile_module
from relayquant.base.runtime import Machine, as_tensor
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.flow.refine.prepared_edit import describe_mapping
from relayquant.ir.ledger import SpeedResult, read_ledger, write_ledger
from relayquant.ir.plan import Plan
from relayquant.ir.rewrite import Graph
from relayquant.stages.compilation import compile_silently
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
            for call in profile_module(mod, inputs, compile_silently).operators:
                seconds[call.value] = seconds.get(call.value, 0.0) + call.seconds
            return seconds

        @functools.lru_cache(maxsize=2)  # one module is compared with several others
        def bind(mod: tvm.IRModule) -> Callable[[], object]:
            return bind_run(mod, inputs)

        def time_modules(mods: Sequence[tvm.IRModule]) -> list[float]:
            runs = {str(i): bind(mod) for i, mod in enumerate(mods)}
            return [found.median for found in measure_latency(runs, TURNS).values()]

        return Stopwatch(time_values, time_modules)


def start_stopwatch(dataset: Any, prepared: PreparedModel) -> Stopwatch:
    """The clock of this machine, on the first batch of a data set."""
    batch = next(iter(open_dataset(dataset, describe_inputs(prepared.mod))))
    return Stopwatch.on_this_machine([*batch.values()])


def bind_run(mod: tvm.IRModule, inputs: Inputs) -> Callable[[], object]:
    """A function that runs main of a module, compiled for this machine, once."""
    main = Machine(compile_silently(mod)).vm["main"]
    tensors = [as_tensor(array) for array in inputs]
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


@dataclass(frozen=True, eq=False)
class SpeedTrial:
    """A calibrated model, its integer module, and what was timed of it."""

    prepared: PreparedModel
    module: tvm.IRModule
    result: SpeedResult

    def is_faster_than(self, other: SpeedTrial) -> bool:
        """Whether the whole model is, and by so much that it is no chance."""
        return self.result.ratio < min(1 - LEAST_GAIN, other.result.ratio)

    def explain(self, parts: Sequence[Part]) -> tuple[PreparedModel, tvm.IRModule]:
        """(calibrated model, module whose ledger says what is in float and how much it gains)."""
        ledger = replace(read_ledger(self.module), speed=self.result)
        for part in parts:
            for name in set(part.operators) & set(self.result.reverted):
                count = len(part.operators) - 1
                others = f", with {count} others" if count else ""
                reason = (
                    f"faster in float on this machine: {part.float_ * 1e6:.1f} us{others}, "
                    f"{part.integer * 1e6:.1f} us on integers"
                )
                ledger = ledger.with_refusal(name, reason, "only_if_faster=False quantizes it")
        return self.prepared, write_ledger(self.module, ledger)


def time_first(prepared: PreparedModel, qmod: tvm.IRModule, stopwatch: Stopwatch) -> SpeedTrial:
    """The model with all of its plan quantized."""
    return SpeedTrial(prepared, qmod, SpeedResult(stopwatch.time_modules([qmod])[0]))


def time_beside(
    qmod: tvm.IRModule,
    changed: PreparedModel,
    module: tvm.IRModule,
    names: tuple[str, ...],
    stopwatch: Stopwatch,
) -> SpeedTrial:
    """The model with operators in float, timed in turns with the integer module."""
    before, now = stopwatch.time_modules([qmod, module])
    mapping = describe_mapping(changed.mapping) if changed.mapping is not None else None
    return SpeedTrial(changed, module, SpeedResult(before, now, names, mapping))


def list_trials(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    """What to try in float: all operators whose float kernels take less time, then the half of them
    that promises most, and so on. Neighbours are together: conversions at their borders, which no
    kernel's time tells, count only in a whole model.
    """
    counts = [len(parts) >> i for i in range(TRIALS)]
    return [
        tuple(name for part in parts[:count] for name in part.operators)
        for count in counts
        if count
    ]


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
