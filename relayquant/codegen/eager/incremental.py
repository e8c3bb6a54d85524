"""Eager, replay: a function that is called on the same batches again and again, each time with
other values for a few of its parameters. What these do not reach is taken from the first call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from relayquant.codegen.eager.module import Program, find_dead, find_static_type, run_steps
from relayquant.codegen.eager.plan import Step
from relayquant.ir.reference.frame import Frame


@dataclass(frozen=True, eq=False)
class Recording:
    """What is kept of the first call on one batch.

    Attributes:
        values: Some values, inputs among them.
        symbols: Symbolic dimensions.
        results: What the function returned.
    """

    values: Mapping[relax.Var, np.ndarray]
    symbols: Mapping[Any, Any]
    results: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class Variation:
    """Other values for some parameters, and what has to run because of them.

    Attributes:
        values: The changed parameters, and what depends on parameters alone.
        changed: Every value that they reach.
        steps: What runs for each batch.
        dead: For each step, what none behind it reads.
        inputs: Whether inputs are read that recordings do not hold.
    """

    values: Mapping[relax.Var, Any]
    changed: frozenset[relax.Var]
    steps: tuple[Step, ...]
    dead: Sequence[Sequence[relax.Var]]
    inputs: bool


class Replay:
    """A function with default values for all parameters but its inputs.

    Args:
        program: The function.
        arguments: The default values, by name.
        changes: Sets of parameters that will have other values at the same time, or several such
            sets together. Any others may change too, but then more is computed again.
        batch: Inputs in the order of their parameters, to see how large values are.
        memory: Bytes that the recording of such a batch may take; values that find no room are
            computed again when they are needed. The smallest are kept: of a convolutional network
            those are the late ones, which take the longest to come by.
    """

    def __init__(
        self,
        program: Program,
        arguments: Mapping[str, Any],
        changes: Iterable[Collection[str]],
        batch: Sequence[np.ndarray],
        memory: float,
    ) -> None:
        self.program = program
        self.params = {param.name: param for param in program.params}
        self.inputs = [param for name, param in self.params.items() if name not in arguments]
        self.results = frozenset(relax.analysis.free_vars(program.result))
        fixed = {self.params[name] for name in arguments}
        #: steps that depend on arguments alone, and all others
        self.early: list[Step] = []
        self.late: list[Step] = []
        for step in program.steps:
            # One without operands may depend on a symbolic dimension.
            is_fixed = step.reads and fixed.issuperset(step.reads) and find_static_type(step.var)
            (self.early if is_fixed else self.late).append(step)
            if is_fixed:
                fixed.add(step.var)
        read = {var for step in self.late for var in step.reads} | self.results
        self.shared = frozenset(fixed & read)
        #: of the default values, and what is computed from them alone
        self.values = self.compute_shared(arguments, {})
        borders = set(self.results).union(*map(self.find_border, changes))
        self.kept = self.choose_kept(borders, batch, memory)

    def compute_shared(
        self, arguments: Mapping[str, Any], known: Mapping[relax.Var, Any]
    ) -> dict[relax.Var, Any]:
        """Arguments, and what late steps read that depends on arguments alone."""
        frame = Frame(self.program.mod, dict(known))
        for name, value in arguments.items():
            self.program.bind(frame, self.params[name], value)
        changed = find_reached(self.early, {self.params[name] for name in arguments})
        steps = select_steps(self.early, self.shared, known.keys() - changed)
        run_steps(frame, steps, find_dead(steps, self.shared | frame.values.keys()))
        return frame.values

    def find_border(self, names: Collection[str]) -> set[relax.Var]:
        """What the values that these parameters reach are computed from besides."""
        reached = find_reached(self.program.steps, {self.params[name] for name in names})
        steps = [step for step in self.late if step.var in reached]
        return {var for step in steps for var in step.reads} - reached

    def choose_kept(
        self, useful: Set[relax.Var], batch: Sequence[np.ndarray], memory: float
    ) -> frozenset[relax.Var]:
        """Those of the useful values whose memory, all together, is within a bound."""
        frame = self.start(batch)
        owners: dict[relax.Var, relax.Var] = {}  # value -> the first in the same memory
        sizes: dict[relax.Var, int] = {}
        wanted = set(self.results)

        def measure(var: relax.Var, reads: Sequence[relax.Var]) -> None:
            value = frame.values[var]
            if not isinstance(value, np.ndarray):  # a tuple or a shape: no work to make again
                wanted.update(reads if var in wanted else ())
                return
            memory_of = find_memory(value)
            for other in reads:
                if other in owners and find_memory(frame.values[other]) is memory_of:
                    owners[var] = owners[other]
                    return
            owners[var], sizes[var] = var, memory_of.nbytes

        for param in self.inputs:
            measure(param, ())
        dead = find_dead(self.late, self.results | self.values.keys())
        for step, vars_ in zip(self.late, dead, strict=True):
            run_steps(frame, [step], [[]])
            measure(step.var, step.reads)
            for var in vars_:
                frame.values.pop(var, None)
        members: dict[relax.Var, list[relax.Var]] = {}
        for var, owner in owners.items():
            if var in useful or var in wanted:
                members.setdefault(owner, []).append(var)
        # What is returned first: whoever compares holds it anyway. Of equal ones the later first.
        order = list(reversed(members))
        order.sort(key=lambda owner: (wanted.isdisjoint(members[owner]), sizes[owner]))
        kept: set[relax.Var] = set()
        for owner in order:
            memory -= sizes[owner]
            if memory < 0:
                break
            kept.update(members[owner])
        return frozenset(kept)

    def start(self, batch: Sequence[np.ndarray]) -> Frame:
        """A frame for one batch."""
        frame = Frame(self.program.mod, dict(self.values))
        for param, array in zip(self.inputs, batch, strict=True):
            self.program.bind(frame, param, array)
        return frame

    def record(self, batch: Sequence[np.ndarray]) -> Recording:
        """Call the function with the default values; `batch` must not change afterwards."""
        frame = self.start(batch)
        dead = find_dead(self.late, self.kept | self.results | self.values.keys())
        run_steps(frame, self.late, dead)
        values = {var: frame.values[var] for var in self.kept}
        return Recording(values, frame.symbols, self.program.find_results(frame))

    def vary(self, arguments: Mapping[str, Any]) -> Variation:
        """Other values for these parameters, by name."""
        values = self.compute_shared(arguments, self.values) if arguments else self.values
        changed = find_reached(self.program.steps, {self.params[name] for name in arguments})
        steps = select_steps(self.late, self.results, self.kept - changed)
        read = self.results.union(*(step.reads for step in steps))
        missing = read & set(self.inputs) - self.kept
        dead = find_dead(steps, self.results | values.keys())
        return Variation(values, frozenset(changed), tuple(steps), dead, bool(missing))

    def run(
        self, variation: Variation, recording: Recording, batch: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Call the function on the batch of a recording, which is needed if `variation.inputs`."""
        frame = Frame(self.program.mod, dict(variation.values), dict(recording.symbols))
        kept = recording.values
        frame.values |= {var: kept[var] for var in kept if var not in variation.changed}
        for param, array in zip(self.inputs, batch or (), strict=batch is not None):
            self.program.bind(frame, param, array)
        run_steps(frame, variation.steps, variation.dead)
        return self.program.find_results(frame)


def find_reached(steps: Sequence[Step], params: set[relax.Var]) -> set[relax.Var]:
    """These parameters, and every value that depends on one of them."""
    reached = set(params)
    for step in steps:
        if not reached.isdisjoint(step.reads):
            reached.add(step.var)
    return reached


def select_steps(
    steps: Sequence[Step], wanted: frozenset[relax.Var], known: set[relax.Var]
) -> list[Step]:
    """The steps that compute the `wanted` values from `known` ones and parameters."""
    needed, found = set(wanted), []
    for step in reversed(steps):
        if step.var in needed and step.var not in known:
            found.append(step)
            needed.update(step.reads)
    return found[::-1]


def find_memory(array: np.ndarray) -> np.ndarray:
    """The array that holds the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
