"""Behind the data flow: integer module and a few calibration samples -> the same module, or one
whose outputs follow the float model again.

Quantization fails in silence: every stage succeeds, and the answers are wrong. So what was built is
run, in numpy and on a handful of samples from all over the data, and compared with the float model.
Where it deviates, the operators that cause it are found on the calibration graph; `pipeline` builds
the module with these in float, and all other parameters as they were calibrated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.analysis.confidence import bound_share
from relayquant.analysis.error_statistics import ErrorSums
from relayquant.analysis.lint import lint_samples
from relayquant.analysis.outputs import (
    GapMeter,
    Interface,
    OutputGap,
    compute_results,
    find_agreement,
    measure_gaps,
    order_inputs,
)
from relayquant.analysis.sensitivity import Simulation, find_rounding_operators
from relayquant.base.events import CallbackList, ProgressEvent
from relayquant.codegen.eager import EagerModule
from relayquant.config import Guard, GuardSettings
from relayquant.data import (
    Batch,
    SpreadSample,
    count_samples,
    has_free_batch,
    open_dataset,
)
from relayquant.data.item import describe_inputs
from relayquant.errors import AccuracyWarning, ConfigError, DataWarning, format_count, warn_user
from relayquant.flow.refine.prepared_edit import Changes, split_changes
from relayquant.flow.refine.run_time_ranges import bound_sqnr, find_run_time_qconfigs
from relayquant.flow.refine.search import rank_operators, search_simulated
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.agreement import MOST_DECIBELS
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.ledger import (
    GuardResult,
    SpeedResult,
    list_changes,
    read_ledger,
    write_ledger,
)
from relayquant.ir.rewrite import Graph, expose_values
from relayquant.stages.prepared import PreparedModel, TunedBatches

#: operators, of those that went back on suspicion, that are tried on integers again
TAKEN_BACK = 8
#: samples of the first look, at least and at most
LEAST, FIRST = 4, 8
#: how many times the work may be spent where it is not settled whether outputs deviate
UNSETTLED = 4
#: what calling an operator takes, as multiply-adds
CALL_WORK = 2e5
#: samples that ranges are reviewed on, and the multiply-adds that this may take
FEW, FEW_WORK = 4, 2e9
#: elements of the inputs that are kept for looks, about
KEPT_ELEMENTS = 1 << 24

#: what a warning ends with
ADVICE = (
    "relayquant.compare shows every value and relayquant.lint whether the data is right; "
    "guard=Guard.OFF silences this."
)

Batches = Sequence[Mapping[str, np.ndarray]]


def start_watching(
    prepared: PreparedModel, dataset: Any, settings: QuantizeSettings
) -> tuple[Any, SpreadSample | None]:
    """(what calibration reads in place of the data set, the samples that are kept of it then).
    (None, None) without data.
    """
    if dataset is None:
        return None, None
    guarding, inputs = settings.guarding, describe_inputs(prepared.mod)
    sample = start_sample(prepared, guarding, holds_back=holds_back(settings))
    if settings.validation_dataset is not None:
        # What is wrong with it shows before anything takes time.
        next(iter(open_dataset(settings.validation_dataset, inputs)))
    if settings.validation_dataset is not None or not is_on(prepared, settings):
        sample = SpreadSample(tuple(inputs), FEW)
    return sample.watch(open_dataset(dataset, inputs)), sample


def holds_back(settings: QuantizeSettings) -> bool:
    """Whether calibration leaves out a part of the data, to measure the result on it."""
    is_off = settings.guarding.find_action(settings.level.value) is Guard.OFF
    return not is_off and settings.validation_dataset is None and settings.metric is None


def is_on(prepared: PreparedModel, settings: QuantizeSettings) -> bool:
    """Whether the guard looks at the outputs."""
    return settings.guarding.find_action(prepared.effort) is not Guard.OFF


def pick_few(prepared: PreparedModel, sample: SpreadSample) -> list[Batch]:
    """A few of the kept samples, fewer of a model that takes long to run."""
    count = int(np.clip(count_samples_for(prepared, FEW_WORK), 1, FEW))
    return [part.batch for part in sample.parts(count, sample.kept)]


def finish_watching(
    prepared: PreparedModel, dataset: Any, settings: QuantizeSettings, sample: SpreadSample | None
) -> SpreadSample:
    """The samples that the guard compares: those that were kept while calibration read the data,
    else from data that is read for it.
    """
    if settings.validation_dataset is None and sample is not None and sample.kept:
        return sample
    data = dataset if settings.validation_dataset is None else settings.validation_dataset
    return take_sample(prepared, data, settings.guarding)


def look_again(
    prepared: PreparedModel,
    dataset: Any,
    settings: QuantizeSettings,
    sample: SpreadSample | None,
    qmod: tvm.IRModule,
) -> GuardResult:
    """What the guard sees of a module that was changed after its look."""
    kept = finish_watching(prepared, dataset, settings, sample)
    return look_at_samples(prepared, qmod, kept, settings).summarize()


# --- The verdict ------------------------------------------------------------------------------


def judge_look(
    prepared: PreparedModel, qmod: tvm.IRModule, look: Look, settings: QuantizeSettings
) -> GuardResult:
    """What a first look says of the integer module; warns where the samples look wrong."""
    for finding in lint_samples(prepared.mod, look.first):
        warn_user(f"Calibration data: {finding}", DataWarning, code="RQ304")
    seen, batches, gaps = look.summarize(), look.batches, look.gaps
    if deviates(settings.guarding, gaps):
        culprit = find_first_off(prepared, qmod, pick_worst(prepared, batches, gaps, 2))
        return replace(seen, deviates=True, operator=culprit)
    if deviates_slightly(settings.guarding, gaps):
        culprit = find_first_off(prepared, qmod, pick_worst(prepared, batches, gaps, 1))
        return replace(seen, deviates_slightly=True, operator=culprit)
    return seen


def find_promise(prepared: PreparedModel, settings: QuantizeSettings) -> str:
    """Why no operator may be reverted, however far the outputs deviate; "" where they may."""
    if settings.guarding.find_action(prepared.effort) is Guard.WARN:
        return "with effort='fast' or guard=Guard.WARN nothing is done about it"
    if settings.strict:
        return "with strict=True no operator goes back to float"
    if any(value.is_integer for value in (*prepared.inputs, *prepared.outputs)):
        return "with input_dtypes or output_dtypes no operator goes back to float"
    return ""


def warn_of_deviation(seen: GuardResult, promise: str) -> None:
    """Name the first operator that is off where outputs deviate and none is reverted."""
    if not (seen.deviates or seen.deviates_slightly):
        return
    why = f"; {promise}. "
    if seen.deviates_slightly:
        why = (
            ". That is more than 8 bits usually cost; effort='best' or quantize(metric=) may help. "
        )
    warn_user(
        f"{describe_deviation(seen)} The first operator that is off is {seen.operator!r}{why}"
        f"{ADVICE}",
        AccuracyWarning,
        code="RQ401",
    )


def describe_deviation(seen: GuardResult) -> str:
    """What was seen, as a sentence."""
    return f"The integer model does not follow the float model: {seen.describe()}."


# --- What is compared -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Look:
    """What was compared.

    Attributes:
        first: Batches of the first look.
        batches: All of them, in the order in which they were run.
        numbers: Of each sample in them, its place in the data.
        tuned: How many of them are in batches that calibration tuned weights or ranges on.
        total: Samples of the data.
        gaps: Of every output, over all batches.
        is_held_out: Whether the samples are from a validation data set.
        held_back: How many of them, at the beginning, calibration did not read.
        held_gaps: Of every output, over these alone.
        ranged: Operators of the module that read their data's range at run time; see `loudness`.
    """

    first: list[Batch]
    batches: list[Batch]
    numbers: tuple[int, ...]
    tuned: int
    total: int
    gaps: list[OutputGap]
    is_held_out: bool = False
    held_back: int = 0
    held_gaps: Sequence[OutputGap] = ()
    ranged: tuple[str, ...] = ()

    def summarize(self) -> GuardResult:
        """For the ledger, what the gaps say: the worst of all outputs."""
        gaps = self.gaps
        worst = min(gaps, key=lambda gap: gap.worst, default=OutputGap(math.inf))
        number = None
        if len(worst.each) == len(self.numbers):
            number = self.numbers[int(np.argmin(worst.each))]
        by_output = tuple(clip_decibels(gap.sqnr) for gap in gaps)
        agreement = find_agreement(gaps, len(self.numbers))
        return GuardResult(
            len(self.numbers),
            min(by_output, default=clip_decibels(math.inf)),
            max((gap.disagreement for gap in gaps), default=0.0),
            worst=clip_decibels(worst.worst),
            least=clip_decibels(min((gap.least for gap in gaps), default=math.inf)),
            by_output=by_output,
            total=self.total,
            numbers=self.numbers,
            tuned=self.tuned,
            worst_number=number,
            is_held_out=self.is_held_out,
            held_back=self.held_back,
            held_sqnr=clip_decibels(min(gap.sqnr for gap in self.held_gaps))
            if self.held_gaps
            else None,
            answers=agreement.answers,
            equal=agreement.equal,
            ranged=self.ranged,
        )


def clip_decibels(value: float) -> float:
    """Within bounds that JSON has numbers for."""
    return float(np.clip(value, -MOST_DECIBELS, MOST_DECIBELS))


def look_at_samples(
    prepared: PreparedModel,
    qmod: tvm.IRModule,
    sample: SpreadSample,
    quantizing: QuantizeSettings,
    least: int = 0,
) -> Look:
    """Compare both modules on ever more samples, until more are not likely to change the verdict;
    see `GuardSettings`. Batches that calibration tuned on are looked at where there are no others.

    Args:
        prepared, qmod: The modules.
        sample: What to choose from.
        quantizing: When it is enough.
        least: So many samples in any case, as far as there are.
    """
    settings, is_held_out = quantizing.guarding, quantizing.validation_dataset is not None
    tuned = TunedBatches() if is_held_out else prepared.tuned
    meter, parts, first = GapMeter(prepared.mod, qmod), [], 0
    held = set() if sample.held is None else sample.held.all_numbers
    #: batches at the beginning that calibration did not read, and their gaps
    held_back, held_gaps = 0, []
    cheap = count_samples_for(prepared, settings.work)
    both = {*tuned.judged, *tuned.fitted}
    for fresh in sample.rounds(plan_looks(prepared, settings), (both, tuned.judged)):
        for part in fresh:
            meter.measure(part.batch)
            parts.append(part)
            if held.issuperset(part.numbers) and held_back == len(parts) - 1:
                held_back, held_gaps = len(parts), meter.gaps
        first = first or len(fresh)
        samples = sum(len(part.numbers) for part in parts)
        is_enough = 2 * samples > cheap or is_covered(settings, samples)
        if samples < least:
            continue
        if is_settled(settings, meter.gaps) and (is_enough or deviates(settings, meter.gaps)):
            break
    batches = [part.batch for part in parts]
    numbers = tuple(int(number) for part in parts for number in part.numbers)
    known = len(sample.find_numbers(both).intersection(numbers))
    return Look(
        batches[:first],
        batches,
        numbers,
        known,
        sample.total,
        meter.gaps,
        is_held_out,
        sum(len(part.numbers) for part in parts[:held_back]),
        held_gaps,
    )


def plan_looks(prepared: PreparedModel, settings: GuardSettings) -> list[int]:
    """How many samples there are after each look, if it does not end before."""
    first = int(np.clip(count_samples_for(prepared, settings.work), LEAST, FIRST))
    most = count_samples_for(prepared, UNSETTLED * settings.work)
    counts = [min(first, settings.samples)]
    while 2 * counts[-1] <= min(most, settings.samples):
        counts.append(2 * counts[-1])
    return counts


def start_sample(
    prepared: PreparedModel, settings: GuardSettings, *, holds_back: bool = False
) -> SpreadSample:
    """What keeps the samples that are compared, from data that is read for something else."""
    count = plan_looks(prepared, settings)[-1]
    return SpreadSample(tuple(describe_inputs(prepared.mod)), count, holds_back=holds_back)


def take_sample(prepared: PreparedModel, dataset: Any, settings: GuardSettings) -> SpreadSample:
    """As `start_sample`, of a data set that is read for it."""
    sample = start_sample(prepared, settings)
    for batch in open_dataset(dataset, describe_inputs(prepared.mod)):
        sample.note(batch)
    return sample


def count_samples_for(prepared: PreparedModel, work: float) -> int:
    """How many samples can be run for so many multiply-adds, and be kept while data is read."""
    inputs = describe_inputs(prepared.mod)
    calls = 0 if has_free_batch(inputs) else len(prepared.source.bindings)
    sizes = [math.prod(dim for dim in info.shape if isinstance(dim, int)) for info in inputs]
    kept = KEPT_ELEMENTS // max(sum(sizes), 1)
    return min(int(work / max(count_all_macs(prepared) + CALL_WORK * calls, 1)), kept)


def count_all_macs(prepared: PreparedModel) -> int:
    """Multiply-adds of the float model for one batch; for one sample, if that is symbolic."""
    return sum(count_macs(binding.value) for binding in prepared.source.bindings)


def pick_typical(
    prepared: PreparedModel, batches: Sequence[Batch], gaps: Sequence[OutputGap], count: int
) -> Sequence[Batch]:
    """Samples that stand for all, each as a batch: of those in the order of their worst output, as
    many from each part of it; all of them if there are no more.
    """
    ranked = rank_samples(batches, gaps)
    if len(ranked) <= count:
        return batches
    chosen = [ranked[(2 * i + 1) * len(ranked) // (2 * count)] for i in range(count)]
    return take_samples(prepared, batches, chosen)


def pick_bad(
    prepared: PreparedModel, batches: Sequence[Batch], gaps: Sequence[OutputGap], count: int
) -> list[Batch]:
    """Samples on which an output is as bad as on all together, or not much worse: to mend the very
    worst one takes more than to mend the model.
    """
    ranked, scores = rank_samples(batches, gaps), rate_worst(batches, gaps)
    sqnr = min((gap.sqnr for gap in gaps), default=math.inf)
    stop = max(int(np.count_nonzero(scores <= sqnr)), count)
    return take_samples(prepared, batches, ranked[max(stop - count, 0) : stop])


def pick_worst(
    prepared: PreparedModel, batches: Sequence[Batch], gaps: Sequence[OutputGap], count: int
) -> list[Batch]:
    """The samples on which an output is worst, in order, each as a batch; whole batches where their
    size is fixed.
    """
    return take_samples(prepared, batches, rank_samples(batches, gaps)[:count])


def rank_samples(batches: Sequence[Batch], gaps: Sequence[OutputGap]) -> list[tuple[int, int]]:
    """(batch, row) of each sample, the one with the worst output first."""
    places = [(i, row) for i, batch in enumerate(batches) for row in range(count_samples(batch))]
    return [places[number] for number in np.argsort(rate_worst(batches, gaps), kind="stable")]


def rate_worst(batches: Sequence[Batch], gaps: Sequence[OutputGap]) -> np.ndarray:
    """dB of the worst output on each sample; 0 of all where no output counts them."""
    samples = sum(map(count_samples, batches))
    rated = [gap.each for gap in gaps if len(gap.each) == samples]
    return np.min(rated, axis=0) if rated else np.zeros(samples)


def take_samples(
    prepared: PreparedModel, batches: Sequence[Batch], places: Sequence[tuple[int, int]]
) -> list[Batch]:
    """Samples by (batch, row), in order, each as a batch; whole batches where a size is fixed."""
    if has_free_batch(describe_inputs(prepared.mod)):
        rows = sorted(places)
        return [{k: v[row : row + 1] for k, v in batches[i].items()} for i, row in rows]
    return [batches[i] for i in sorted({i for i, _ in places})]


def find_first_off(
    prepared: PreparedModel, qmod: tvm.IRModule, batches: Batches, decibels: float = 15.0
) -> str:
    """The first operator whose result is off by more than `decibels`; else the one that is most."""
    interface = Interface.of(qmod)
    rows = {row.name: row for row in read_ledger(qmod).quantized}
    run_float, run_integer = (make_run(mod, rows) for mod in (prepared.mod, qmod))
    sums: dict[str, ErrorSums] = {}
    for batch in batches:
        expected, got = run_float(batch), run_integer(interface.to_inputs(batch))
        for name in expected:
            row = rows[name]
            # An accumulator has no parameters in the ledger; it is dequantized under its own name.
            if name not in got or (got[name].dtype.kind != "f" and not row.scale):
                continue
            x, y = expected[name], got[name].astype("float64")
            if got[name].dtype.kind != "f":
                y = (y - row.zero_point[0]) * row.scale[0]
            if x.shape == y.shape:
                sums[name] = sums.get(name, ErrorSums()).update(x, y)
    off = [name for name, total in sums.items() if total.sqnr < decibels]
    if off:
        return off[0]
    return min(sums, key=lambda name: sums[name].sqnr, default="")


def make_run(
    mod: tvm.IRModule, wanted: Container[str]
) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return a function from inputs to those of the wanted values that main binds, in order."""
    bound = [binding.var for binding in Graph(mod).bindings]
    names = [v.name for v in bound if v.name in wanted and isinstance(v.ty, relax.TensorType)]
    exposed = EagerModule(expose_values(mod, names))

    def run(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = exposed.run("main", order_inputs(mod, batch))
        return dict(zip(names, results, strict=False))

    return run


# --- Mending ----------------------------------------------------------------------------------


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
        return split_changes(self.changes)[0]

    def without(self, name: str) -> list[str]:
        """The operators but for one."""
        return [other for other in self.names if other != name]


@dataclass(frozen=True, eq=False)
class Suspects:
    """Operators that may cause what was seen, and what to revert next.

    Few are found on the calibration graph, where an operator is switched by a parameter, on bad
    samples. The integer module decides, on some that stand for all; while it falls short, twice as
    many more go, or, where the calibration graph sees nothing wrong, the next one that is off. Of
    those that went so, as many as can are quantized again.

    Attributes:
        prepared: The calibrated model.
        settings: When outputs deviate.
        order: All operators, the most sensitive first.
        first: What to begin with.
        milder: What may suffice without products in float; see `list_milder`.
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

    def list_spare(self, attempt: Attempt) -> list[str]:
        """Operators that may have gone in vain, the least sensitive first."""
        if deviates(self.settings, attempt.gaps) or len(attempt.names) <= len(self.first):
            return []
        return list(attempt.names[::-1][:TAKEN_BACK])

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
    order = rank_operators(simulation, settings.events, math.inf)
    target = guarding.target_sqnr
    is_arithmetic = simulation.sqnr(operators) >= target > min(gap.sqnr for gap in gaps)
    if is_arithmetic:
        first, milder = [find_first_off(prepared, qmod, bad)], []
    else:
        found = search_simulated(simulation, mapping, order, target, math.inf, settings.events)
        first = found or order[:1]
        milder = list_milder(simulation, first, target)
    return Suspects(
        prepared, guarding, order, first, milder, is_arithmetic, bad, judged, settings.events
    )


def list_milder(simulation: Simulation, first: Sequence[str], target: float) -> list[Changes]:
    """What may suffice without products in float: the first suspects, then all products, read
    their data's range at run time. Suspects that cannot do so go to float, as they would.

    A module takes long to build. So what the rounded weights alone keep from the target, in dB, is
    left out.
    """
    ranged = find_run_time_qconfigs(simulation.prepared)
    if not ranged:
        return []
    few = {name: ranged.get(name) for name in first}
    trials = [few] if any(few.values()) else []
    trials.append({**dict.fromkeys(first), **ranged})
    return [changes for changes in trials if bound_sqnr(simulation, changes) >= target]


def revert_operators(suspects: Suspects, build: Callable[[Changes], tvm.IRModule]) -> Attempt:
    """What brings the outputs back: ranges of the run time, where these suffice, else as few
    suspects in float as do, more until they follow, then fewer.

    Args:
        suspects: What to try.
        build: Makes the integer module with changes.
    """
    modules = itertools.count(1)

    def attempt(changes: Changes) -> Attempt:
        tried = suspects.judge(changes, build(changes))
        seen = ProgressEvent("revert operators", next(modules), None, unit="module")
        suspects.events.on_progress(seen)
        return tried

    for changes in suspects.milder:
        if suspects.follows(found := attempt(changes)):
            return found
    found = attempt(dict.fromkeys(suspects.first))
    while more := suspects.add_more(found):
        found = attempt(dict.fromkeys(more))
    for name in suspects.list_spare(found):
        fewer = attempt(dict.fromkeys(found.without(name)))
        found = fewer if suspects.suffices(fewer, found) else found
    return found


def is_enough(
    gaps: Sequence[OutputGap], reference: Sequence[OutputGap], settings: GuardSettings
) -> bool:
    """Whether outputs have the SQNR that operators are put back for, or what more of them give."""
    least = min(settings.target_sqnr, *(gap.sqnr for gap in reference))
    return all(gap.sqnr >= least for gap in gaps)


def write_reverted(
    found: Attempt, wide: Look, seen: GuardResult, suspects: Suspects, speed: SpeedResult | None
) -> tvm.IRModule:
    """The module that was found, with what was seen before and after in its ledger; warns.

    Args:
        found: The module.
        wide: What it was compared on in the end.
        seen: What the module with all of the plan quantized had.
        suspects: Where it was chosen from.
        speed: What was measured before.
    """
    reverted, ranged = split_changes(found.changes)
    guard = replace(
        wide.summarize(),
        deviates=True,
        operator=seen.operator,
        reverted=reverted,
        ranged=ranged,
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
    warn_user(
        f"{describe_deviation(seen)} {describe_changes(found.changes)} Now: "
        f"{guard.describe()}. {advice}",
        AccuracyWarning,
        code="RQ401",
    )
    ledger = replace(read_ledger(found.module), guard=guard, speed=speed)
    for name in found.names:
        ledger = ledger.with_refusal(
            name,
            f"reverted to float by the guard: quantized, {seen.describe()}",
            "relayquant.compare and relayquant.lint tell whether its range or the data is wrong; "
            "guard=Guard.OFF keeps it quantized",
        )
    return write_ledger(found.module, ledger)


def describe_changes(changes: Changes) -> str:
    """What was done about outputs that deviate, as sentences."""
    return " ".join(
        f"{what[0].upper()}{what[1:]}, {format_count(len(names), 'operator')}: {', '.join(names)}."
        for what, names in list_changes(*split_changes(changes))
    )


def deviates(settings: GuardSettings, gaps: Sequence[OutputGap]) -> bool:
    """Whether one of the outputs is too far from the float model's."""
    return any(
        gap.sqnr < settings.min_sqnr
        or bound_share(gap.differing, gap.samples)[0] > settings.disagreement
        for gap in gaps
    )


def deviates_slightly(settings: GuardSettings, gaps: Sequence[OutputGap]) -> bool:
    """Whether one of the outputs is so far from the float model's that users should know."""
    return any(
        gap.disagreement > settings.doubtful_disagreement
        if gap.samples
        else gap.least < settings.doubtful_sqnr or gap.worst < settings.sample_sqnr
        for gap in gaps
    )


def is_settled(settings: GuardSettings, gaps: Sequence[OutputGap]) -> bool:
    """Whether further samples are not likely to change whether outputs deviate."""
    answers = [bound_share(gap.differing, gap.samples) for gap in gaps if gap.differing]
    # One other answer of a few samples says little about one of a hundred.
    share = max(settings.disagreement, settings.doubtful_disagreement)
    if any(gap.most < settings.min_sqnr for gap in gaps):
        return True
    if any(least > share for least, _ in answers):
        return True
    if any(gap.least < settings.min_sqnr for gap in gaps):
        return False
    return all(most <= share for _, most in answers)


def is_covered(settings: GuardSettings, samples: int) -> bool:
    """Whether damage to many samples would show in so many, if it is in none of them."""
    return bound_share(0, samples)[1] <= settings.doubtful_disagreement
