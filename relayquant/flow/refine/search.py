"""In place of the guard, if a metric is given: what was measured so far -> which operators to put
back next, to find the fewest in float or int16, or with weights of 8 bits instead of fewer, that
keep the metric within its bound. `pipeline` builds what is measured.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.linting.label_scores import find_better_score
from relayquant.analysis.loader import load_integers
from relayquant.analysis.sensitivity import (
    Metric,
    Simulation,
    add_lines,
    apply_metric,
    find_rounding_operators,
    name_metric,
)
from relayquant.base.events import CallbackList, ProgressEvent
from relayquant.base.qtypes import QSpec, Scheme
from relayquant.base.runtime import limit_blas, map_on_threads
from relayquant.config import QConfig, QConfigMapping, TensorConfig
from relayquant.config.observers import MinMax
from relayquant.data import Dataset, open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError, DataWarning, warn_user
from relayquant.flow.refine.prepared_edit import describe_mapping
from relayquant.flow.refine.search_result import (
    WIDE,
    Choice,
    SearchOutcome,
    Trial,
    describe_best,
)
from relayquant.flow.refine.search_state import SearchState, make_fingerprint, trial_key
from relayquant.flow.refine.wider_weights import find_wider_weights
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.ledger import SearchResult, read_ledger, write_ledger
from relayquant.ir.rewrite import Graph
from relayquant.stages.annotation import annotate, plan_without
from relayquant.stages.calibration.checkpoint import digest_batch
from relayquant.stages.compilation import compile
from relayquant.stages.effort import default_mapping
from relayquant.stages.prepared import PreparedModel

#: dB of the outputs within which operators count as about as sensitive
ALIKE = 3.0


@dataclass(frozen=True, eq=False)
class SearchBasis:
    """What a search knows before anything is calibrated.

    Attributes:
        deadline: When no further trial begins, by `time.monotonic`.
        data: What the metric is measured on.
        digest: Of the first batch of the data of calibration.
        state: What an earlier run of the same search has measured.
    """

    deadline: float
    data: Dataset
    digest: str
    state: SearchState


def open_search(
    prepared: PreparedModel, dataset: Any, settings: QuantizeSettings, start: float
) -> SearchBasis:
    """Read what the search begins with: what is wrong with it shows before anything takes time.

    Args:
        prepared: The model with nothing put back.
        dataset: What it is calibrated with.
        settings: Those of the search.
        start: When the search began, by `time.monotonic`.

    Raises:
        ConfigError: `search_state` is that of another search.
        DataError: it is damaged, or the data does not fit the model.
    """
    state = open_state(prepared, settings)
    validation = dataset if settings.validation_dataset is None else settings.validation_dataset
    data = open_dataset(validation, describe_inputs(prepared.mod))
    next(iter(data))
    deadline = math.inf if settings.budget is None else start + settings.budget
    return SearchBasis(deadline, data, digest_first_batch(dataset, prepared), state)


def start_search(
    calibrated: PreparedModel, basis: SearchBasis, metric: Metric, settings: QuantizeSettings
) -> ModuleSearch:
    """Measure the float model, and see that it is the one of `search_state`.

    Raises:
        ConfigError: the metric returns no number, or `search_state` is that of another search.
    """
    simulation = Simulation(calibrated, basis.data, metric)
    float_score = score_float(metric, simulation)
    review_score(calibrated, basis.data, metric, float_score)
    basis.state.check_basis(
        {
            "calibration data": basis.digest,
            "validation data": simulation.data_digest,
            "scores of the float model": f"{float_score:.4g}",
        }
    )
    return ModuleSearch(simulation, metric, float_score, basis, settings)


#: what is put back -> (calibrated model, integer module)
Build = Callable[[Choice], tuple[PreparedModel, tvm.IRModule]]


class ModuleSearch:
    """What a search has measured so far of integer modules with some operators put back.

    Attributes:
        simulation: The model with nothing put back.
        bound: What the metric has to be at least.
        done: What was measured, in order.
    """

    def __init__(
        self,
        simulation: Simulation,
        metric: Metric,
        float_score: float,
        basis: SearchBasis,
        settings: QuantizeSettings,
    ) -> None:
        """
        Args:
            simulation: The model with nothing put back.
            metric: See `quantize`.
            float_score: The metric of the float model against itself.
            basis: Its state holds the scores; what it knows is not measured again.
            settings: Those of the search; told of each trial.
        """
        prepared = simulation.prepared
        self.simulation, self.metric, self.float_score = simulation, metric, float_score
        self.bound = float_score - settings.max_drop
        self.base = prepared.mapping or default_mapping(
            prepared.backend, settings.level, settings.model_type
        )
        self.state, self.deadline, self.events = basis.state, basis.deadline, settings.events
        self.done: list[Trial] = []
        #: of the best trial, unless its score was known
        self._built: tuple[PreparedModel, tvm.IRModule] | None = None
        #: of a module that is faster than that of the best trial, and accepted
        self._faster_score: float | None = None

    @property
    def best(self) -> Trial:
        """The first of the highest rank."""
        return max(self.done, key=lambda trial: trial.rank)

    @property
    def is_over(self) -> bool:
        """Whether no further trial may begin."""
        return time.monotonic() >= self.deadline

    def find_mapping(self, choice: Choice) -> QConfigMapping:
        """The mapping that puts these operators back."""
        prepared, back = self.simulation.prepared, dict.fromkeys(choice.reverted)
        if choice.dtype == WIDE:
            back = {name: make_wide(prepared, name) for name in choice.reverted}
        wider = find_wider_weights(prepared) if choice.widened else {}
        changes = {name: wider[name] for name in choice.widened}
        return add_lines(prepared, {**back, **changes}, self.base)

    def propose(self) -> Iterator[Choice]:
        """What to measure next, as long as few operators are not enough and there is time.

        What comes depends on what was measured: each choice is measured before the next is asked
        for. Operators are ranked by sensitivity. The shortest prefix of that order that is good
        enough is found on the calibration graph, whose operators are switched without compiling
        anything, and thinned out there. Then modules are proposed, with more operators in float as
        long as the integers fall short of the simulation, and with fewer as long as the bound is
        met. Last, the same operators on integers: those with weights of few bits with all bits,
        then those that are left in float in int16, where the backend runs all of them so.
        """
        yield Choice()
        if self.best.is_met or self.is_over:
            return
        simulation = self.simulation
        order = rank_operators(simulation, self.events, self.deadline, self.state)
        names = search_simulated(
            simulation, self.base, order, self.bound, self.deadline, self.events
        )
        for proposed in propose_integers(self.done, order, names, self.deadline):
            yield Choice(tuple(proposed))
        found, wider = self.best.choice.reverted, find_wider_weights(simulation.prepared)
        widened = tuple(name for name in found if name in wider)
        if widened and self.best.is_met and not self.is_over:
            yield Choice(tuple(name for name in found if name not in wider), widened=widened)
        choice = replace(self.best.choice, dtype=WIDE)
        if choice.reverted and self.best.is_met and not self.is_over:
            prepared, mapping = simulation.prepared, self.find_mapping(choice)
            plan = annotate(prepared.source, prepared.backend, mapping, prepared.integer_outputs)
            if all(plan.operator(name).quantized for name in choice.reverted):
                yield choice

    def score(self, module: tvm.IRModule) -> float:
        """The metric of an integer module."""
        found = run_all(self.simulation, module)
        return apply_metric(self.metric, self.simulation.expected, found)

    def measure(self, choice: Choice, build: Build) -> Trial:
        """Try the integer module with these operators put back; it is built unless its score is
        known.
        """
        key = trial_key(choice.reverted, choice.dtype, choice.widened)
        pair = None
        if key not in self.state.trials:
            pair = build(choice)
            self.state.trials[key] = self.score(pair[1])
        score = self.state.trials[key]
        trial = Trial(choice, score, score >= self.bound)
        self.done.append(trial)
        if trial is self.best:
            self._built = pair
            self.state.best = describe_best(trial, self.find_mapping(choice))
        self.state.save()
        self.events.on_progress(ProgressEvent("search", len(self.done), None, unit="module"))
        return trial

    def take_best(self, build: Build) -> tuple[PreparedModel, tvm.IRModule]:
        """What the best trial measured, built now where its score was known."""
        return self._built or build(self.best.choice)

    def accept_faster(self, module: tvm.IRModule) -> bool:
        """Whether a faster module is within the bound, or no worse than the best trial."""
        score = self.score(module)
        is_accepted = score >= min(self.bound, self.best.score)
        if is_accepted:
            self._faster_score = score
        return is_accepted

    def finish(self, changed: PreparedModel, module: tvm.IRModule) -> SearchOutcome:
        """What was found, which the ledger of the module says too.

        Args:
            changed, module: What `take_best` gave, or the last that `accept_faster` accepted.
        """
        best, score = self.best.choice, self.best.score
        mapping = self.find_mapping(best)
        if self._faster_score is not None:
            mapping, score = changed.mapping or mapping, self._faster_score
        is_met, trials = score >= self.bound, len(self.done)
        seen = SearchResult(
            score,
            self.float_score,
            is_met,
            trials,
            best.reverted,
            best.dtype,
            describe_mapping(mapping),
            best.widened,
        )
        return SearchOutcome(
            write_ledger(module, replace(read_ledger(module), search=seen)),
            mapping,
            best.reverted,
            score,
            self.float_score,
            is_met,
            trials,
            best.dtype,
            best.widened,
        )


def digest_first_batch(dataset: Any, prepared: PreparedModel) -> str:
    """A digest of what a data set begins with; "" if there is none."""
    if dataset is None:
        return ""
    return digest_batch(next(iter(open_dataset(dataset, describe_inputs(prepared.mod)))))


def review_score(
    prepared: PreparedModel, data: Dataset, metric: Metric, float_score: float
) -> None:
    """Warn where the float model itself does clearly better on the pictures prepared otherwise: a
    bound below a wrong score is met by a wrong model.
    """
    with limit_blas():
        better = find_better_score(
            prepared.mod, data, lambda outputs: apply_metric(metric, outputs, outputs), float_score
        )
    if better is None:
        return
    picture, form, score = better
    seen = f", which look prepared as {picture.given.text!r}" if picture.given.text else ""
    warn_user(
        f"Validation data: the float model itself has a {name_metric(metric)} of "
        f"{float_score:.4g} on these pictures{seen}, and of {score:.4g} on the same prepared as "
        f"{form.text!r}. Preprocess as in training (--preprocess {form.text} in a shell); "
        "relayquant.lint(mod, params, data, labels) tells more.",
        DataWarning,
        code="RQ304",
    )


def score_float(metric: Metric, simulation: Simulation) -> float:
    """The metric of the float model against itself.

    Raises:
        ConfigError: it is no finite number, so nothing can be within a bound of it.
    """
    score = apply_metric(metric, simulation.expected, simulation.expected)
    if not math.isfinite(score):
        raise ConfigError(
            f"The metric {name_metric(metric)} gives {score} where both outputs are equal, and "
            "nothing is within max_drop of that. Let it have a largest value: min(decibels, 100) "
            "for a signal to noise ratio, or minus the relative error.",
            code="RQ106",
        )
    return score


def propose_integers(
    done: Sequence[Trial], order: Sequence[str], names: Sequence[str], deadline: float
) -> Iterator[Sequence[str]]:
    """From what suffices in simulation to what suffices in integers, and no more.

    Args:
        done: What was measured, the last one at the end; it grows while this runs.
        order: All operators, the most sensitive first.
        names: What suffices in simulation.
        deadline: When no further trial begins.
    """
    yield names
    count = len(names)
    while not done[-1].is_met and count < len(order) and time.monotonic() < deadline:
        # The simulation promised more than the integers keep: twice as many more each time.
        count = min(2 * count + 1, len(order))
        names = [name for i, name in enumerate(order) if i < count or name in names]
        yield names
    # It may also promise less: its ranges were picked behind what is now in float.
    low, high = 0, len(names) if done[-1].is_met else 0
    while high - low > 1 and time.monotonic() < deadline:
        middle = (low + high) // 2
        yield names[:middle]
        low, high = (low, middle) if done[-1].is_met else (middle, high)


def make_wide(prepared: PreparedModel, name: str) -> QConfig | None:
    """An operator's int16 operands and results, weights as they are by default; None without a
    default that has such operands.
    """
    qconfig = prepared.backend.find_default(prepared.plan.operator(name).pattern)
    if qconfig is None:
        return None
    wide = TensorConfig(QSpec(WIDE, Scheme.SYMMETRIC), MinMax())
    return None if qconfig.is_grouped else replace(qconfig, activation=wide, output=None)


def open_state(prepared: PreparedModel, settings: QuantizeSettings) -> SearchState:
    """The state of this search; an empty one without a path."""
    if settings.search_state is None:
        return SearchState(None, "")
    observer = settings.observer
    basis = {
        "backend": prepared.backend.name,
        "effort": prepared.effort,
        "max_drop": settings.max_drop,
        "observer": getattr(observer, "__qualname__", repr(observer)),
        "plan": [(op.name, op.quantized) for op in prepared.plan.operators],
        "formats": [(group.key, repr(group.info.spec)) for group in prepared.plan.groups],
    }
    return SearchState.open(settings.search_state, make_fingerprint(prepared.mod, basis))


def search_simulated(
    simulation: Simulation,
    base: QConfigMapping,
    order: Sequence[str],
    bound: float,
    deadline: float,
    events: CallbackList,
) -> list[str]:
    """Few operators, in this order, without which the simulated model scores at least `bound`.

    First the shortest prefix, by doubling and bisection; then members are tried as quantized
    again, the least sensitive first, twice as many at a time after each success. All of `order`
    when nothing else suffices. Ends early at the deadline with what it has.
    """
    suffices = start_trials(simulation, base, bound, events)
    low, high = bracket_prefix(suffices, order, deadline)
    if high == len(order) and time.monotonic() >= deadline:
        return list(order[: max(low, 1)])  # not enough, but the nearest that was seen
    names = list(order[:high])
    end, size = high - 1, 1  # without the last one, it is a prefix that does not suffice
    while end > 0 and time.monotonic() < deadline:
        start = max(end - size, 0)
        if suffices([*names[:start], *names[end:]]):
            del names[start:end]
            end, size = start, 2 * size
        elif size > 1:
            size = 1
        else:
            end = start
    return names


def start_trials(
    simulation: Simulation, base: QConfigMapping, bound: float, events: CallbackList
) -> Callable[[Sequence[str]], bool]:
    """Return what says whether the simulated model without these operators scores at least
    `bound`.
    """
    trials, prepared = itertools.count(1), simulation.prepared
    find_remaining = plan_without(prepared.source, prepared.backend, base, prepared.integer_outputs)

    def suffices(names: Sequence[str]) -> bool:
        remaining = find_remaining(names)
        is_met = simulation.score(remaining) >= bound
        events.on_progress(ProgressEvent("find operators", next(trials), None, unit="trial"))
        if is_met:  # what is tried next differs little from it
            simulation.start_from(remaining)
        return is_met

    return suffices


def bracket_prefix(
    suffices: Callable[[Sequence[str]], bool],
    order: Sequence[str],
    deadline: float = math.inf,
    step: int = 1,
) -> tuple[int, int]:
    """(how many operators at the beginning do not suffice, how many do), next to each other unless
    the deadline comes first. By doubling from `step`, and bisection; all of them do.
    """
    low, high = 0, len(order)
    while high - low > 1 and time.monotonic() < deadline:
        middle = min(max(step, low + 1), high - 1) if high == len(order) else (low + high) // 2
        if suffices(order[:middle]):
            high = middle
        else:
            low, step = middle, 2 * middle
    return low, high


def rank_operators(
    simulation: Simulation,
    events: CallbackList,
    deadline: float,
    state: SearchState | None = None,
) -> list[str]:
    """Names of the operators, the most sensitive first, of those that are about as sensitive the
    ones with the fewest multiply-adds first; in half of the time that is left.

    By SQNR: a metric such as an accuracy does not tell small damage from none. Those that time did
    not suffice for come last. What `state` knows is not measured again.
    """
    start = time.monotonic()
    half = start + (deadline - start) / 2
    operators = find_rounding_operators(simulation.prepared)
    state = state or SearchState(None, "")
    scores = state.ranking
    # From both ends of the model, where the sensitive ones usually are.
    outside = sorted(operators, key=lambda op: min(operators.index(op), operators[::-1].index(op)))
    for done, operator in enumerate(outside, 1):
        if operator.name not in scores:
            if time.monotonic() >= half:
                break
            scores[operator.name] = simulation.sqnr([operator])
            state.save()
        events.on_progress(ProgressEvent("sensitivity", done, len(operators), unit="operator"))
    graph = Graph(simulation.prepared.mod)
    work = {
        op.name: sum(count_macs(graph.values[graph.vars[value]]) for value in op.values)
        for op in operators
    }
    return order_alike({name: scores.get(name, math.inf) for name in work}, work)


def order_alike(scores: Mapping[str, float], work: Mapping[str, int]) -> list[str]:
    """Names in the order of their scores in dB. Of the names within `ALIKE` of the lowest score
    that is left, the one with the least work comes next.
    """
    waiting, found = sorted(scores, key=lambda name: scores[name]), []
    while waiting:
        bound = scores[waiting[0]] + ALIKE
        alike = [name for name in waiting if not scores[name] > bound]
        found.append(min(alike, key=lambda name: work[name]))
        waiting.remove(found[-1])
    return found


def run_all(simulation: Simulation, mod: tvm.IRModule) -> list[list[np.ndarray]]:
    """Outputs of an integer module for every batch of the simulation."""
    runner = load_integers(mod, simulation.samples, compile)
    with limit_blas():
        pairs = simulation.pair_batches()
        return list(map_on_threads(lambda pair: runner.run("main", pair[1]), pairs))
