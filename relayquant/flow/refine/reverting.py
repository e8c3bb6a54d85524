"""Behind the guard: an integer module that deviates -> one whose outputs follow the float model.

As few operators as do are in float, have ranges of the run time, or weights of all bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import tvm

from relayquant.analysis.outputs import (
    OutputGap,
    compute_results,
    measure_gaps,
)
from relayquant.analysis.sensitivity import Simulation, find_rounding_operators
from relayquant.base.events import CallbackList, ProgressEvent
from relayquant.config import GuardSettings, QConfigMapping
from relayquant.data import (
    open_dataset,
)
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError, format_count
from relayquant.flow.refine.guard import (
    ADVICE,
    Batches,
    describe_deviation,
    find_first_off,
)
from relayquant.flow.refine.kept_samples import (
    count_all_macs,
    plan_looks,
)
from relayquant.flow.refine.look import (
    Look,
    deviates,
    pick_bad,
    pick_typical,
)
from relayquant.flow.refine.prepared_edit import Changes, split_changes
from relayquant.flow.refine.run_time_ranges import (
    bound_sqnr,
    find_run_time_qconfigs,
    forecast_sqnr,
    measure_ranges,
)
from relayquant.flow.refine.search import (
    bracket_prefix,
    rank_operators,
    search_simulated,
    start_trials,
)
from relayquant.flow.refine.wider_weights import find_wider_weights
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.ledger import (
    GuardResult,
    SpeedResult,
    list_changes,
    read_ledger,
    write_ledger,
)
from relayquant.stages.prepared import PreparedModel


@dataclass(frozen=True, eq=False)
class Attempt:
    """An integer module with changes.

    Attributes:
        changes: What they are.
        module: The module.
        gaps: Of every output, on the samples that decide.
    """

    changes: Changes
    module: tvm.IRModule
    gaps: list[OutputGap]

    @property
    def names(self) -> tuple[str, ...]:
        """The operators in float."""
        return tuple(name for name, qconfig in self.changes.items() if qconfig is None)

    def without(self, names: Sequence[str]) -> list[str]:
        """The operators in float but for these."""
        return [name for name in self.names if name not in names]


@dataclass(frozen=True, eq=False)
class Suspects:
    """Operators that may cause what was seen, and what to revert next.

    Few are found on the calibration graph, where an operator is switched by a parameter, on bad
    samples. The integer module decides, on some that stand for all. If it falls short, the
    calibration graph finds more on these samples, and then twice as many go as long as it falls
    short; or, where the calibration graph sees nothing wrong, the next one that is off. Bisection
    then finds some of these to quantize again.

    Attributes:
        prepared: The calibrated model.
        settings: When outputs deviate.
        order: All operators, the most sensitive first.
        first: What to begin with.
        milder: What may suffice without products in float: ranges of the run time (see
            `list_milder`), then weights of all bits for those to begin with that have fewer. A
            module takes long to build: what the calibration graph expects to fall short is left
            out.
        widest: Weights of all bits for all operators that have fewer, where that is new.
        is_arithmetic: Whether the simulated model has the SQNR that the integer module lacks.
        bad: Samples that the operators are sought on.
        judged: Samples that decide.
        events: Told of each module that is tried.
    """

    prepared: PreparedModel
    settings: GuardSettings
    order: Sequence[str]
    first: Sequence[str]
    milder: Sequence[Changes]
    widest: Changes
    is_arithmetic: bool
    bad: Batches
    judged: Batches
    events: CallbackList

    @cached_property
    def expected(self) -> list[list[np.ndarray]]:
        """The float model's results on the samples that decide."""
        return compute_results(self.prepared.mod, self.judged)

    def judge(self, changes: Changes, module: tvm.IRModule) -> Attempt:
        """Compare a module that has these changes."""
        gaps = measure_gaps(self.prepared.mod, module, self.judged, self.expected)
        return Attempt(changes, module, gaps)

    def follows(self, attempt: Attempt) -> bool:
        """Whether the outputs are as close to float as operators in float bring them."""
        target = self.settings.target_sqnr
        return not deviates(self.settings, attempt.gaps) and all(
            gap.sqnr >= target for gap in attempt.gaps
        )

    def find_more(self) -> list[str]:
        """The first suspects and the most sensitive operators that are enough on the calibration
        graph, on the samples that decide: a trial there takes less time than a module. Nothing
        where that is no more, or where only all are enough.
        """
        data = open_dataset(self.judged, describe_inputs(self.prepared.mod))
        simulation, target = Simulation(self.prepared, data), self.settings.target_sqnr
        base = self.prepared.mapping or QConfigMapping()
        suffices = start_trials(simulation, base, target, self.events)
        _, count = bracket_prefix(suffices, self.order, step=len(self.first))
        found = [name for i, name in enumerate(self.order) if i < count or name in self.first]
        return found if len(self.first) < len(found) and count < len(self.order) else []

    def add_more(self, attempt: Attempt) -> list[str]:
        """What to revert next; nothing where the outputs follow, or all is in float."""
        names = list(attempt.names)
        if not deviates(self.settings, attempt.gaps) or len(names) >= len(self.order):
            return []
        off = find_first_off(self.prepared, attempt.module, self.bad) if self.is_arithmetic else ""
        if off and off not in names:
            return [*names, off]
        count = min(2 * len(names) + 1, len(self.order))
        return [name for i, name in enumerate(self.order) if i < count or name in names]

    def list_spare(self, attempt: Attempt, known: Sequence[str]) -> list[str]:
        """Operators that went on suspicion alone, all but the ones `known`: the last one that was
        added first. In the order of sensitivity, that is the least sensitive one.
        """
        return [] if deviates(self.settings, attempt.gaps) else attempt.without(known)[::-1]

    def suffices(self, fewer: Attempt, more: Attempt) -> bool:
        """Whether fewer operators in float do as well as more."""
        follows = bool(fewer.names) and not deviates(self.settings, fewer.gaps)
        return follows and is_enough(fewer.gaps, more.gaps, self.settings)


def find_suspects(
    prepared: PreparedModel, qmod: tvm.IRModule, look: Look, settings: QuantizeSettings
) -> Suspects:
    """Rank the operators by what they cost on the samples that are bad."""
    mapping, guarding = prepared.mapping, settings.guarding
    if mapping is None:
        raise ConfigError(
            "The guard needs the QConfigMapping that the model was prepared with.", code="RQ105"
        )
    batches, gaps = look.batches, look.gaps
    operators = find_rounding_operators(prepared)
    # Each operator is switched alone, and what is behind it computed anew: half of the model.
    each = max(count_all_macs(prepared) * len(operators) / 2, 1)
    bad = pick_bad(prepared, batches, gaps, max(int(guarding.search_work / each), 1))
    simulation = Simulation(prepared, open_dataset(bad, describe_inputs(prepared.mod)))
    judged = pick_typical(prepared, batches, gaps, plan_looks(prepared, guarding)[0])
    target = guarding.target_sqnr
    ranged = find_run_time_qconfigs(prepared) if bound_sqnr(simulation) >= target else {}
    ranges = measure_ranges(simulation, ranged)
    order = rank_operators(simulation, settings.events, math.inf)
    is_arithmetic = simulation.sqnr(operators) >= target > min(gap.sqnr for gap in gaps)
    if is_arithmetic:
        off = find_first_off(prepared, qmod, bad)
        first, milder, widest = [off] if off else order[:1], [], {}
    else:
        found = search_simulated(simulation, mapping, order, target, math.inf, settings.events)
        first = found or order[:1]
        milder = [
            changes
            for changes in list_milder(ranged, first)
            if forecast_sqnr(simulation, changes, ranges) >= target
        ]
        wider = find_wider_weights(prepared)
        trials, every = change_first(wider, first), {**dict.fromkeys(first), **wider}
        milder += trials
        # Few bits stay the user's where no suspect has them.
        widest = every if trials and every not in trials else {}
    return Suspects(
        prepared,
        guarding,
        order,
        first,
        milder,
        widest,
        is_arithmetic,
        bad,
        judged,
        settings.events,
    )


def list_milder(ranged: Changes, first: Sequence[str]) -> list[Changes]:
    """What may suffice without products in float: the first suspects, then all products, read
    their data's range at run time. Suspects that cannot do so go to float, as they would.
    """
    return [*change_first(ranged, first), {**dict.fromkeys(first), **ranged}] if ranged else []


def change_first(qconfigs: Changes, first: Sequence[str]) -> list[Changes]:
    """The first suspects with these QConfigs, and in float those without; nothing where none has
    one.
    """
    few = {name: qconfigs.get(name) for name in first}
    return [few] if any(few.values()) else []


def revert_operators(suspects: Suspects, build: Callable[[Changes], tvm.IRModule]) -> Attempt:
    """What brings the outputs back: ranges of the run time or weights of all bits for the first
    suspects, where these suffice, else these in float. Where that is not enough either, all weights
    get all bits, or more suspects go to float until the outputs follow, then fewer.

    Args:
        suspects: What to try.
        build: Makes the integer module with changes.
    """
    tried: list[Changes] = []

    def attempt(changes: Changes) -> Attempt:
        found = suspects.judge(changes, build(changes))
        tried.append(changes)
        seen = ProgressEvent("revert operators", len(tried), None, unit="module")
        suspects.events.on_progress(seen)
        return found

    for changes in suspects.milder:
        if suspects.follows(found := attempt(changes)):
            return found
    found = attempt(dict.fromkeys(suspects.first))
    if suspects.widest and deviates(suspects.settings, found.gaps):
        widest = attempt(suspects.widest)
        if suspects.follows(widest):
            return widest
    known = suspects.first
    is_open = deviates(suspects.settings, found.gaps) and not suspects.is_arithmetic
    if is_open and (enough := suspects.find_more()):
        known, found = enough, attempt(dict.fromkeys(enough))
    while more := suspects.add_more(found):
        found = attempt(dict.fromkeys(more))
    # A module takes long to build: half of what may be spared at a time.
    spare = suspects.list_spare(found, known)
    while spare:
        part = spare[: -(-len(spare) // 2)]
        changes = dict.fromkeys(found.without(part))
        fewer = None if changes in tried else attempt(changes)
        if fewer is not None and suspects.suffices(fewer, found):
            found, spare = fewer, spare[len(part) :]
        else:
            spare = part if len(part) > 1 else spare[1:]
    return found


def is_enough(
    gaps: Sequence[OutputGap], reference: Sequence[OutputGap], settings: GuardSettings
) -> bool:
    """Whether outputs have the SQNR that operators are put back for, or what more of them give."""
    least = min([settings.target_sqnr, *(gap.sqnr for gap in reference)])
    return all(gap.sqnr >= least for gap in gaps)


def write_reverted(
    found: Attempt, wide: Look, seen: GuardResult, suspects: Suspects, speed: SpeedResult | None
) -> tuple[tvm.IRModule, str]:
    """The module that was found, with what was seen before and after in its ledger, and what to
    warn of.

    Args:
        found: The module.
        wide: What it was compared on in the end.
        seen: What the module with all of the plan quantized had.
        suspects: Where it was chosen from.
        speed: What was measured before.
    """
    reverted, ranged, widened = split_changes(suspects.prepared, found.changes)
    guard = replace(
        wide.summarize(),
        deviates=True,
        operator=seen.operator,
        reverted=reverted,
        ranged=ranged,
        widened=widened,
        sqnr_before=seen.sqnr,
        disagreement_before=seen.disagreement,
    )
    advice = ADVICE
    if suspects.is_arithmetic:
        advice = (
            "In simulation the quantized model follows the float model, so neither ranges nor data "
            "are the cause but integers, such as sums that do not fit int32: see "
            "relayquant.analysis.accumulator_report. guard=Guard.OFF silences this."
        )
    done = describe_changes(suspects.prepared, found.changes)
    ledger = replace(read_ledger(found.module), guard=guard, speed=speed)
    for name in found.names:
        ledger = ledger.with_refusal(
            name,
            f"reverted to float by the guard: quantized, {seen.describe()}",
            "relayquant.compare and relayquant.lint tell whether its range or the data is wrong; "
            "guard=Guard.OFF keeps it quantized",
        )
    warning = f"{describe_deviation(seen)} {done} Now: {guard.describe()}. {advice}"
    return write_ledger(found.module, ledger), warning


def describe_changes(prepared: PreparedModel, changes: Changes) -> str:
    """What was done about outputs that deviate, as sentences."""
    return " ".join(
        f"{what[0].upper()}{what[1:]}, {format_count(len(names), 'operator')}: {', '.join(names)}."
        for what, names in list_changes(*split_changes(prepared, changes))
    )
