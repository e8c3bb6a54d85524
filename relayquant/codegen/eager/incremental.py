"""Incremental re-execution: a float function and changed parameters -> results of recorded batches.

The function is called on the same batches again and again, each time with other values for a few
parameters. Values that do not depend on these parameters are taken from an earlier call: the first,
or one that was recorded since and is nearer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from relayquant.base.runtime import freeze_array
from relayquant.codegen.eager.module import Program, find_dead, run_steps
from relayquant.codegen.eager.operand import find_static_type
from relayquant.codegen.eager.plan import Step
from relayquant.ir.reference.frame import Frame


@dataclass(frozen=True, eq=False)
class Recording:
    """What is kept of an earlier call on one batch.

    Attributes:
        values: Some values, inputs among them.
        symbols: Symbolic dimensions.
        results: What the function returned.
    """

    values: Mapping[relax.Var, np.ndarray]
    symbols: Mapping[Any, Any]
    results: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class ParameterUpdate:
    """Other values for some parameters, and the steps that have to run again.

    Attributes:
        values: The changed parameters, and values that depend only on parameters.
        changed: Every value that depends on a changed parameter.
        steps: Steps that run for each batch.
        dead: For each step, the values that no later step reads.
        inputs: Whether the steps read inputs that recordings do not hold.
    """

    values: Mapping[relax.Var, Any]
    changed: frozenset[relax.Var]
    steps: tuple[Step, ...]
    dead: Sequence[Sequence[relax.Var]]
    inputs: bool


class IncrementalFunction:
    """A function with default values for all parameters except its inputs.

    Args:
        program: The function.
        arguments: The default values, by name.
        changes: Sets of parameters that will change at the same time; several sets may change
            together. Other parameters may change too, but then more is computed again.
        batch: Inputs in the order of their parameters, to measure the size of values.
        memory: Bytes that the recording of such a batch may take. Values that do not fit are
            computed again when needed. The smallest values are kept. In a convolutional network
            these are the late values, which take the longest to compute.
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
        #: steps that depend only on arguments, and all others
        self.early: list[Step] = []
        self.late: list[Step] = []
        for step in program.steps:
            # A step without operands may depend on a symbolic dimension.
            is_fixed = step.reads and fixed.issuperset(step.reads) and find_static_type(step.var)
            (self.early if is_fixed else self.late).append(step)
            if is_fixed:
                fixed.add(step.var)
        read = {var for step in self.late for var in step.reads} | self.results
        self.shared = frozenset(fixed & read)
        #: shared value -> the arguments it depends on, and what it was computed from last
        self.sources = self.find_sources(arguments)
        self.latest: dict[relax.Var, tuple[list[Any], Any]] = {}
        #: default values, and values computed only from them
        self.defaults = arguments
        self.values = self.compute_shared(arguments, {})
        boundaries = set(self.results).union(*map(self.find_boundary, changes))
        self.kept = self.choose_kept(boundaries, batch, memory)

    def find_sources(self, names: Iterable[str]) -> dict[relax.Var, tuple[str, ...]]:
        """Return the arguments that each shared value of early steps depends on."""
        found = {self.params[name]: frozenset((name,)) for name in names}
        for step in self.early:
            found[step.var] = frozenset().union(*(found.get(var, ()) for var in step.reads))
        return {step.var: tuple(found[step.var]) for step in self.early if step.var in self.shared}

    def compute_shared(
        self, arguments: Mapping[str, Any], known: Mapping[relax.Var, Any]
    ) -> dict[relax.Var, Any]:
        """Compute the values that late steps read and that depend only on arguments. A value whose
        arguments are the same arrays as the last time is taken from there: rounded weights.
        """
        frame = Frame(self.program.mod, dict(known))
        for name, value in arguments.items():
            self.program.bind(frame, self.params[name], value)
        changed = find_reached(self.early, {self.params[name] for name in arguments})
        have = known.keys() - changed
        given = {
            var: [arguments.get(name, self.defaults[name]) for name in names]
            for var, names in self.sources.items()
            if var in changed
        }
        for var, arrays in given.items():
            latest, value = self.latest.get(var, ([], None))
            if arrays and [*map(id, arrays)] == [*map(id, latest)]:
                frame.values[var] = value
                have.add(var)
        steps = select_steps(self.early, self.shared, have)
        run_steps(frame, steps, find_dead(steps, self.shared | frame.values.keys()))
        for var in {step.var for step in steps} & self.shared:
            if isinstance(frame.values[var], np.ndarray):  # late steps need not compare it
                frame.values[var] = freeze_array(frame.values[var])
        if known:  # other values than the defaults, which `values` has
            self.latest.update((var, (arrays, frame.values[var])) for var, arrays in given.items())
        return frame.values

    def find_boundary(self, names: Collection[str]) -> set[relax.Var]:
        """Find the boundary: values independent of these parameters, with dependent readers."""
        reached = find_reached(self.program.steps, {self.params[name] for name in names})
        steps = [step for step in self.late if step.var in reached]
        return {var for step in steps for var in step.reads} - reached

    def choose_kept(
        self, useful: Set[relax.Var], batch: Sequence[np.ndarray], memory: float
    ) -> frozenset[relax.Var]:
        """Choose useful values whose memory together is within a bound."""
        frame = self.start(batch)
        owners: dict[relax.Var, relax.Var] = {}  # value -> the first value in the same memory
        sizes: dict[relax.Var, int] = {}
        wanted = set(self.results)

        def measure(var: relax.Var, reads: Sequence[relax.Var]) -> None:
            value = frame.values[var]
            if not isinstance(value, np.ndarray):  # a tuple or a shape: cheap to make again
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
        # Returned values first: a caller that compares holds them anyway. Of equal ones, the later
        # first.
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
        """Make a frame for one batch."""
        frame = Frame(self.program.mod, dict(self.values))
        for param, array in zip(self.inputs, batch, strict=True):
            self.program.bind(frame, param, array)
        return frame

    def record(self, batch: Sequence[np.ndarray]) -> Recording:
        """Call the function with the default values. `batch` must not change afterwards."""
        frame = self.start(batch)
        dead = find_dead(self.late, self.kept | self.results | self.values.keys())
        run_steps(frame, self.late, dead)
        values = {var: frame.values[var] for var in self.kept}
        return Recording(values, frame.symbols, self.program.find_results(frame))

    def plan_update(
        self,
        arguments: Mapping[str, Any],
        recorded: Mapping[str, Any] = {},
        *,
        keeps: bool = False,
    ) -> ParameterUpdate:
        """Prepare other values than the defaults for these parameters, by name.

        Args:
            arguments: The values.
            recorded: The values that the recorded call had.
            keeps: Whether `renew` will run it.
        """
        values = self.compute_shared(arguments, self.values) if arguments else self.values
        differing = {
            self.params[name]
            for name in arguments.keys() | recorded.keys()
            if arguments.get(name) is not recorded.get(name)
        }
        changed = find_reached(self.program.steps, differing)
        wanted = self.results | self.kept if keeps else self.results
        steps = select_steps(self.late, wanted, self.kept - changed)
        read = self.results.union(*(step.reads for step in steps))
        missing = read & set(self.inputs) - self.kept
        dead = find_dead(steps, wanted | values.keys())
        return ParameterUpdate(values, frozenset(changed), tuple(steps), dead, bool(missing))

    def run(
        self,
        update: ParameterUpdate,
        recording: Recording,
        batch: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """Call the function on the batch of a recording, which is needed if `update.inputs`."""
        return self.program.find_results(self.run_again(update, recording, batch))

    def renew(
        self,
        update: ParameterUpdate,
        recording: Recording,
        batch: Sequence[np.ndarray] | None = None,
    ) -> Recording:
        """As `run`, and return what to keep of this call, in place of the recording."""
        frame = self.run_again(update, recording, batch)
        values = {var: frame.values[var] for var in self.kept}
        return Recording(values, frame.symbols, self.program.find_results(frame))

    def run_again(
        self, update: ParameterUpdate, recording: Recording, batch: Sequence[np.ndarray] | None
    ) -> Frame:
        """Return the frame of a call, once its steps have run."""
        frame = Frame(self.program.mod, dict(update.values), dict(recording.symbols))
        kept = recording.values
        frame.values |= {var: kept[var] for var in kept if var not in update.changed}
        for param, array in zip(self.inputs, batch or (), strict=batch is not None):
            self.program.bind(frame, param, array)
        run_steps(frame, update.steps, update.dead)
        return frame


def find_reached(steps: Sequence[Step], params: set[relax.Var]) -> set[relax.Var]:
    """Find every value that depends on one of these parameters, and the parameters."""
    reached = set(params)
    for step in steps:
        if not reached.isdisjoint(step.reads):
            reached.add(step.var)
    return reached


def select_steps(
    steps: Sequence[Step], wanted: frozenset[relax.Var], known: set[relax.Var]
) -> list[Step]:
    """Select the steps that compute the `wanted` values from `known` values and parameters."""
    needed, found = set(wanted), []
    for step in reversed(steps):
        if step.var in needed and step.var not in known:
            found.append(step)
            needed.update(step.reads)
    return found[::-1]


def find_memory(array: np.ndarray) -> np.ndarray:
    """Return the array that holds the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
