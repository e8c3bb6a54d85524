"""In place of one run of the data flow, if a metric is given: model, data and metric -> the module
with the fewest operators in float or int16 that keeps the metric within its bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.label_scores import find_better_score
from relayquant.analysis.loader import load_integers
from relayquant.analysis.sensitivity import (
    Metric,
    Simulation,
    add_float_lines,
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
from relayquant.flow.pipeline import calibrate_model, lower_prepared, prepare_model, review_prepared
from relayquant.flow.refine.prepared_edit import describe_mapping
from relayquant.flow.refine.search_result import FLOAT, WIDE, SearchOutcome, Trial, describe_best
from relayquant.flow.refine.search_state import SearchState, make_fingerprint, trial_key
from relayquant.flow.refine.speed import Stopwatch, keep_faster_float
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.ledger import SearchResult, read_ledger, write_ledger
from relayquant.ir.plan import OperatorPlan
from relayquant.stages.annotation import annotate
from relayquant.stages.backends import resolve_backend
from relayquant.stages.calibration.checkpoint import digest_batch
from relayquant.stages.compilation import compile
from relayquant.stages.effort import default_mapping
from relayquant.stages.prepared import PreparedModel


def search_operators(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    metric: Metric,
    settings: QuantizeSettings,
) -> SearchOutcome:
    """Quantize, and put the fewest operators back that bring accuracy back.

    Operators are ranked by sensitivity. The shortest prefix of that order that is good enough is
    found on the calibration graph, whose operators are switched without compiling anything, and
    thinned out there. Then the integer module is built and measured, with more operators in float
    if it falls short of the simulation, and with fewer as long as the bound is met. Last, the
    operators are tried in int16, where the backend runs all of them so.

    Args:
        mod, params, dataset: As for `quantize`.
        metric: See `quantize`.
        settings: Bound and budget of the search, and those of each quantization.

    Raises:
        ConfigError: the metric returns no number, or `search_state` is that of another search.
        ModelError, DataError: as `quantize`; or `search_state` is damaged.
        FileError: `search_state` cannot be written.
    """
    validation, events = settings.validation, settings.events
    deadline = math.inf if settings.budget is None else time.monotonic() + settings.budget
    backend = resolve_backend(settings.backend)

    def prepare(mapping: QConfigMapping | None) -> PreparedModel:
        return prepare_model(mod, params, dataset, mapping, backend, settings)

    def calibrate(prepared: PreparedModel) -> PreparedModel:
        return calibrate_model(prepared, dataset, settings.calibrating)

    prepared = prepare(settings.qconfig_mapping)
    review_prepared(prepared, settings.strict)
    state = open_state(prepared, settings)
    data = open_dataset(
        dataset if validation is None else validation, describe_inputs(prepared.mod)
    )
    next(iter(data))  # what is wrong with the data shows before anything takes time
    base = prepared.mapping or default_mapping(backend, settings.level, settings.model_type)
    simulation = Simulation(calibrate(prepared), data, metric)
    float_score = score_float(metric, simulation)
    review_score(prepared, data, metric, float_score)
    state.check_basis(
        {
            "calibration data": digest_first_batch(dataset, prepared),
            "validation data": simulation.data_digest,
            "scores of the float model": f"{float_score:.4g}",
        }
    )
    bound = float_score - settings.max_drop
    trials = ModuleTrials(
        simulation, metric, bound, base, lambda found: calibrate(prepare(found)), state, events
    )
    try_modules(trials, deadline)
    best = trials.best
    changed, module = trials.take_best()
    mapping, score = trials.find_mapping(best.names, best.dtype), best.score
    if settings.only_if_faster:
        stopwatch = Stopwatch.on_this_machine([*next(iter(data)).values()])
        least = min(bound, best.score)
        accepted: list[float] = []

        def accept(faster: tvm.IRModule) -> bool:
            found = trials.score(faster)
            if found >= least:
                accepted.append(found)  # of the last one, which is taken
            return found >= least

        changed, module = keep_faster_float(
            changed,
            module,
            stopwatch,
            dataset,
            calibration=settings.calibration,
            accept=accept,
        )
        if accepted:
            mapping, score = changed.mapping or mapping, accepted[-1]
    seen = SearchResult(
        score,
        float_score,
        score >= bound,
        len(trials.done),
        best.names,
        best.dtype,
        describe_mapping(mapping),
    )
    module = write_ledger(module, replace(read_ledger(module), search=seen))
    return SearchOutcome(
        module,
        mapping,
        best.names,
        score,
        float_score,
        score >= bound,
        len(trials.done),
        best.dtype,
    )


class ModuleTrials:
    """Integer modules with some operators put back: built, measured, and the best one kept.

    Attributes:
        done: What was measured, in order.
    """

    def __init__(
        self,
        simulation: Simulation,
        metric: Metric,
        bound: float,
        base: QConfigMapping,
        calibrate: Callable[[QConfigMapping], PreparedModel],
        state: SearchState,
        events: CallbackList,
    ) -> None:
        """
        Args:
            simulation: Of the model with nothing put back.
            bound: What `metric` has to be at least.
            base: The mapping without what is put back.
            calibrate: Gives the calibrated model of another mapping.
            state: Holds the scores; what it knows is not measured again.
            events: Told of each trial.
        """
        self.simulation, self.metric, self.bound = simulation, metric, bound
        self.base, self.calibrate = base, calibrate
        self.state, self.events = state, events
        self.done: list[Trial] = []
        #: of the best trial, unless its score was known
        self._built: tuple[PreparedModel, tvm.IRModule] | None = None

    @property
    def best(self) -> Trial:
        """The first of the highest rank."""
        return max(self.done, key=lambda trial: trial.rank)

    def find_mapping(self, names: Sequence[str], dtype: str) -> QConfigMapping:
        """The mapping that puts these operators back to a dtype."""
        prepared = self.simulation.prepared
        wide = make_wide(prepared) if dtype == WIDE else None
        return add_float_lines(prepared, names, self.base, wide)

    def build(self, names: Sequence[str], dtype: str) -> tuple[PreparedModel, tvm.IRModule]:
        """(calibrated model, integer module) with these operators put back."""
        changed = self.simulation.prepared
        if names:
            changed = self.calibrate(self.find_mapping(names, dtype))
        return changed, lower_prepared(changed)

    def score(self, module: tvm.IRModule) -> float:
        """The metric of an integer module."""
        found = run_all(self.simulation, module)
        return apply_metric(self.metric, self.simulation.expected, found)

    def measure(self, names: Sequence[str], dtype: str = FLOAT) -> Trial:
        """Try the integer module with these operators put back."""
        key = trial_key(names, dtype)
        pair = None
        if key not in self.state.trials:
            pair = self.build(names, dtype)
            self.state.trials[key] = self.score(pair[1])
        score = self.state.trials[key]
        trial = Trial(tuple(names), dtype, score, score >= self.bound)
        self.done.append(trial)
        if trial is self.best:
            self._built = pair
            self.state.best = describe_best(trial, self.find_mapping(names, dtype))
        self.state.save()
        self.events.on_progress(ProgressEvent("search", len(self.done), None, unit="module"))
        return trial

    def take_best(self) -> tuple[PreparedModel, tvm.IRModule]:
        """What the best trial measured, built now where its score was known."""
        return self._built or self.build(self.best.names, self.best.dtype)


def try_modules(trials: ModuleTrials, deadline: float) -> None:
    """Measure modules until few operators are in float, or int16, or time is over."""
    if trials.measure(()).is_met or time.monotonic() >= deadline:
        return
    simulation = trials.simulation
    order = rank_operators(simulation, trials.events, deadline, trials.state)
    names = search_simulated(simulation, trials.base, order, trials.bound, deadline)
    found = search_integers(trials.measure, order, names, deadline)
    if found.is_met and time.monotonic() < deadline:
        prepared, mapping = simulation.prepared, trials.find_mapping(found.names, WIDE)
        plan = annotate(prepared.mod, prepared.backend, mapping)
        if all(plan.operator(name).quantized for name in found.names):
            trials.measure(found.names, WIDE)


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


def search_integers(
    measure: Callable[[Sequence[str]], Trial],
    order: Sequence[str],
    names: Sequence[str],
    deadline: float,
) -> Trial:
    """From what suffices in simulation to what suffices in integers, and no more."""
    found, count = measure(names), len(names)
    while not found.is_met and count < len(order) and time.monotonic() < deadline:
        # The simulation promised more than the integers keep: twice as many more each time.
        count = min(2 * count + 1, len(order))
        names = [name for i, name in enumerate(order) if i < count or name in names]
        found = measure(names)
    # It may also promise less: its ranges were picked behind what is now in float.
    low, high = 0, len(names) if found.is_met else 0
    while high - low > 1 and time.monotonic() < deadline:
        middle = (low + high) // 2
        fewer = measure(names[:middle])
        low, high = (low, middle) if fewer.is_met else (middle, high)
        found = fewer if fewer.is_met else found
    return found


def make_wide(prepared: PreparedModel) -> QConfig | None:
    """int16 operands and results, weights as they are by default; None without a default that
    has such operands.
    """
    qconfig = prepared.backend.default_qconfig
    if qconfig is None:
        return None
    wide = TensorConfig(QSpec(WIDE, Scheme.SYMMETRIC), MinMax())
    return None if qconfig.is_grouped else replace(qconfig, activation=wide, output=None)


def open_state(prepared: PreparedModel, settings: QuantizeSettings) -> SearchState:
    """The state of this search; an empty one without a path."""
    if settings.search_state is None:
        return SearchState(None, "")
    calibration = settings.calibration
    basis = {
        "backend": prepared.backend.name,
        "effort": prepared.effort,
        "max_drop": settings.max_drop,
        "calibration": getattr(calibration, "__qualname__", repr(calibration)),
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
) -> list[str]:
    """Few operators, in this order, without which the simulated model scores at least `bound`.

    First the shortest prefix, by doubling and bisection; then members are tried as quantized
    again, the least sensitive first. All of `order` when nothing else suffices. Ends early at the
    deadline with what it has.
    """

    def suffices(names: Sequence[str]) -> bool:
        return simulation.score(find_remaining(simulation.prepared, base, names)) >= bound

    low, high, step = 0, len(order), 1  # `low` operators do not suffice, `high` do
    while high - low > 1 and time.monotonic() < deadline:
        middle = min(max(step, low + 1), high - 1) if high == len(order) else (low + high) // 2
        if suffices(order[:middle]):
            high = middle
        else:
            low, step = middle, 2 * middle
    if high == len(order) and time.monotonic() >= deadline:
        return list(order[: max(low, 1)])  # not enough, but the nearest that was seen
    names = list(order[:high])
    size = max(len(names) // 2, 1)
    while size:
        for end in range(len(names) - 1, 0, -size):
            fewer = [*names[: max(end - size, 0)], *names[end:]]
            if time.monotonic() < deadline and suffices(fewer):
                names = fewer
        size //= 2
    return names


def rank_operators(
    simulation: Simulation,
    events: CallbackList,
    deadline: float,
    state: SearchState | None = None,
) -> list[str]:
    """Names of the operators, the most sensitive first; in half of the time that is left.

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
    return sorted((op.name for op in operators), key=lambda name: scores.get(name, math.inf))


def find_remaining(
    prepared: PreparedModel, base: QConfigMapping, names: Sequence[str]
) -> list[OperatorPlan]:
    """Operators that still run on integers when these are in float: others may go with them."""
    plan = annotate(prepared.mod, prepared.backend, add_float_lines(prepared, names, base))
    return [operator for operator in plan.operators if operator.quantized]


def run_all(simulation: Simulation, mod: tvm.IRModule) -> list[list[np.ndarray]]:
    """Outputs of an integer module for every batch of the simulation."""
    runner = load_integers(mod, simulation.samples, compile)
    with limit_blas():
        pairs = simulation.pair_batches()
        return list(map_on_threads(lambda pair: runner.run("main", pair[1]), pairs))
