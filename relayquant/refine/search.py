"""Beside the data flow: which operators hurt accuracy, and the fewest to keep in float.

Uses the stages of `pipeline` as a user would.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.load import load_integers
from relayquant.analysis.sensitivity import (
    Metric,
    SensitivityReport,
    Simulation,
    add_float_lines,
    apply_metric,
    check_metric,
    find_rounding_operators,
    measure_sensitivity,
    name_metric,
)
from relayquant.annotation import annotate
from relayquant.arguments import check_arguments
from relayquant.calibration.checkpoint import digest_batch
from relayquant.calibration.observers import MinMax
from relayquant.config import BackendConfig, QConfig, QConfigMapping, TensorConfig
from relayquant.datasets import open_dataset
from relayquant.datasets.inputs import describe_inputs
from relayquant.effort import Effort, resolve_effort
from relayquant.errors import ConfigError, format_count
from relayquant.events import Callback, CallbackList, ProgressEvent
from relayquant.ledger import SearchResult, read_ledger, write_ledger
from relayquant.pipeline import (
    calibrate,
    compile,
    convert_to_reference,
    default_mapping,
    lower,
    prepare,
    prepare_quietly,
)
from relayquant.plan import OperatorPlan
from relayquant.prepared import PreparedModel
from relayquant.qtypes import QSpec, Scheme
from relayquant.refine.revert import describe_mapping
from relayquant.refine.search_state import SearchState, make_fingerprint, trial_key
from relayquant.refine.speed import Stopwatch, keep_faster_float
from relayquant.runtime import limit_blas, map_on_threads


@check_arguments
def sensitivity(
    prepared: PreparedModel,
    dataset: Any,
    metric: Metric | None = None,
    *,
    samples: int = 64,
    callbacks: Iterable[Callback] | Callback = (),
) -> SensitivityReport:
    """Rank operators by the damage that quantizing each alone does.

    Args: prepared: A calibrated model, as `relayquant.calibrate` returned it. dataset: As for
        `quantize`. metric: `(float outputs, quantized outputs) -> float`, higher is better; both
        are lists with one array for
            each output of the model, samples along axis 0. None: SQNR of the worst output in dB.
        samples: Measure on the first batches that hold so many samples; time grows with samples x
        operators.
        callbacks: Told of progress.

    Raises:
        ConfigError: the model is not calibrated, or the metric returns no number.
        DataError: the data does not fit the model.
    """
    if not isinstance(prepared, PreparedModel):
        raise ConfigError(
            f"sensitivity got {type(prepared).__name__}; it takes a calibrated model: "
            "calibrate(prepare(mod, params), dataset)."
        )
    data = open_dataset(dataset, describe_inputs(prepared.mod))
    return measure_sensitivity(
        prepared, data, metric, samples=samples, callbacks=CallbackList.of(callbacks)
    )


#: how far the metric may fall by default: a point of an accuracy
MAX_DROP = 0.01
#: what an operator is put back to
FLOAT, WIDE = "float32", "int16"


@dataclass(frozen=True)
class FallbackResult:
    """What `fallback` found. Unpacks as `qmod, mapping`.

    Attributes:
        mod: The quantized module.
        mapping: The QConfigMapping that makes it, for `quantize(..., qconfig_mapping=...)`.
        reverted: Names of the operators that were put back, the most sensitive first.
        dtype: What they were put back to: "float32", or "int16" where that was enough.
        score: The metric of `mod`.
        float_score: The metric of the float model against itself.
        is_met: Whether score >= float_score - max_drop.
        trials: How many modules were built and measured.
    """

    mod: tvm.IRModule = field(repr=False)
    mapping: QConfigMapping = field(repr=False)
    reverted: tuple[str, ...]
    score: float
    float_score: float
    is_met: bool
    trials: int
    dtype: str = FLOAT

    def __iter__(self) -> Iterator[Any]:
        return iter((self.mod, self.mapping))

    def __str__(self) -> str:
        lines = [f"{name} -> {self.dtype}" for name in self.reverted]
        met = "met" if self.is_met else "not met"
        score = f"score {self.score:.6g}, float {self.float_score:.6g}: the bound is {met}"
        return "\n".join([*lines, f"{score} after {format_count(self.trials, 'trial')}"])


@dataclass(frozen=True)
class Trial:
    """One choice of operators that are put back, and the metric of its integer module."""

    names: tuple[str, ...]
    dtype: str
    score: float
    is_met: bool

    @property
    def rank(self) -> tuple[float, ...]:
        """Higher is better: within the bound with few operators in float, or put back at all; else
        near it.
        """
        if not self.is_met:
            return (0, self.score)
        return (1, -len(self.names) if self.dtype == FLOAT else 0, -len(self.names))


@check_arguments
def minutes(count: float) -> float:
    """Seconds, for `budget=`.

    Raises:
        ConfigError: count is no number.
    """
    if not isinstance(count, Real) or isinstance(count, bool):
        raise ConfigError(f"minutes({count!r}): allowed is a number, as in minutes(2.5).")
    return 60.0 * float(count)


@check_arguments
def fallback(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    metric: Metric,
    *,
    max_drop: float = MAX_DROP,
    budget: float | None = None,
    validation: Any = None,
    backend: BackendConfig | str | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    calibration: Any = None,
    effort: Effort | str = Effort.BALANCED,
    search_state: str | Path | None = None,
    keep_faster: bool = False,
    callbacks: Iterable[Callback] | Callback = (),
) -> FallbackResult:
    """Quantize, and put the fewest operators back that bring accuracy back.

    Operators are ranked by `sensitivity`. The shortest prefix of that order that is good enough is
    found on the calibration graph, whose operators are switched without compiling anything, and
    thinned out there. Then the integer module is built and measured, with more operators in float
    if it falls short of the simulation, and with fewer as long as the bound is met. Last, the
    operators are tried in int16, where the backend runs all of them so.

    Args:
        mod, params, dataset, backend, qconfig_mapping, calibration, effort: As for `quantize`.
        metric: `(float outputs, quantized outputs) -> float`, higher is better; lists with one
            array for each output of the model, samples along axis 0 in the order of `validation`.
            For an accuracy, close over the labels:
            `lambda expected, got: (got[0].argmax(1) == labels).mean()`.
        max_drop: How far the metric may be below that of the float model against itself.
        budget: Seconds after which no further trial begins; what the search has found by then is
            still built and measured. None: no bound.
        validation: Samples that the metric is measured on; `dataset` if None.
        search_state: A JSON file that is written, whole, after every measurement: what was
            measured, and the best mapping so far. A search that finds it there goes on from it, if
            model, settings and data are the same, and the metric of the float model is.
        keep_faster: As for `quantize`: operators that run faster in float stay so too, as long as
            the metric then is within the bound, or no worse where the bound is not met.
        callbacks: Told of progress.

    Raises:
        ConfigError: max_drop is negative or budget not positive, the metric is no function or
            returns no number, or `search_state` is that of another search.
        ModelError, DataError: as `quantize`; or `search_state` is damaged.
        FileError: `search_state` cannot be written.
    """
    check_settings(metric, max_drop, budget)
    deadline = math.inf if budget is None else time.monotonic() + budget
    events = CallbackList.of(callbacks)
    level = resolve_effort(effort)

    prepared = prepare(mod, params, qconfig_mapping, backend, dataset=dataset, effort=level)
    state = open_state(search_state, prepared, max_drop, calibration)
    data = open_dataset(
        dataset if validation is None else validation, describe_inputs(prepared.mod)
    )
    next(iter(data))  # what is wrong with the data shows before anything takes time
    base = prepared.mapping or default_mapping(prepared.backend, level)
    prepared = calibrate(prepared, dataset, calibration=calibration, callbacks=events)
    simulation = Simulation(prepared, data, metric)
    float_score = score_float(metric, simulation)
    state.check_basis(
        {
            "calibration data": digest_first_batch(dataset, prepared),
            "validation data": simulation.data_digest,
            "scores of the float model": f"{float_score:.4g}",
        }
    )
    bound = float_score - max_drop
    built: dict[Trial, tuple[PreparedModel, tvm.IRModule]] = {}
    trials: list[Trial] = []

    def find_mapping(names: Sequence[str], dtype: str) -> QConfigMapping:
        wide = make_wide(prepared) if dtype == WIDE else None
        return add_float_lines(prepared, names, base, wide)

    def build(names: Sequence[str], dtype: str) -> tuple[PreparedModel, tvm.IRModule]:
        changed = prepared
        if names:
            found = find_mapping(names, dtype)
            changed = prepare_quietly(mod, params, found, backend, dataset=dataset, effort=level)
            changed = calibrate(changed, dataset, calibration=calibration, callbacks=events)
        return changed, lower(convert_to_reference(changed), changed.backend)

    def score_module(module: tvm.IRModule) -> float:
        return apply_metric(metric, simulation.expected, run_all(simulation, module))

    def measure(names: Sequence[str], dtype: str = FLOAT) -> Trial:
        """The integer module with these operators put back, measured; keeps the best so far."""
        key = trial_key(names, dtype)
        pair = None
        if key not in state.trials:
            pair = build(names, dtype)
            state.trials[key] = score_module(pair[1])
        score = state.trials[key]
        found = Trial(tuple(names), dtype, score, score >= bound)
        trials.append(found)
        if found is max(trials, key=lambda trial: trial.rank):
            built.clear()
            if pair is not None:
                built[found] = pair
            state.best = describe_best(found, find_mapping(names, dtype))
        state.save()
        events.on_progress(ProgressEvent("fallback", len(trials), None, unit="module"))
        return found

    if not measure(()).is_met and time.monotonic() < deadline:
        order = rank_operators(simulation, events, deadline, state)
        names = search_simulated(simulation, base, order, bound, deadline)
        found = search_integers(measure, order, names, deadline)
        if found.is_met and time.monotonic() < deadline:
            plan = annotate(prepared.mod, prepared.backend, find_mapping(found.names, WIDE))
            if all(plan.operator(name).quantized for name in found.names):
                measure(found.names, WIDE)
    best = max(trials, key=lambda trial: trial.rank)
    changed, module = built[best] if best in built else build(best.names, best.dtype)
    mapping, score = find_mapping(best.names, best.dtype), best.score
    if keep_faster:
        stopwatch = Stopwatch.on_this_machine([*next(iter(data)).values()])
        least = min(bound, best.score)
        accepted: list[float] = []

        def accept(faster: tvm.IRModule) -> bool:
            found = score_module(faster)
            if found >= least:
                accepted.append(found)  # of the last one, which is taken
            return found >= least

        changed, module = keep_faster_float(
            changed,
            module,
            stopwatch,
            dataset,
            calibration=calibration,
            accept=accept,
        )
        if accepted:
            mapping, score = changed.mapping or mapping, accepted[-1]
    seen = SearchResult(
        score,
        float_score,
        score >= bound,
        len(trials),
        best.names,
        best.dtype,
        describe_mapping(mapping),
    )
    module = write_ledger(module, replace(read_ledger(module), search=seen))
    return FallbackResult(
        module,
        mapping,
        best.names,
        score,
        float_score,
        score >= bound,
        len(trials),
        best.dtype,
    )


def digest_first_batch(dataset: Any, prepared: PreparedModel) -> str:
    """A digest of what a data set begins with; "" if there is none."""
    if dataset is None:
        return ""
    return digest_batch(next(iter(open_dataset(dataset, describe_inputs(prepared.mod)))))


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
            "for a signal to noise ratio, or minus the relative error."
        )
    return score


def check_settings(metric: Any, max_drop: Any, budget: Any) -> None:
    """Raise ConfigError where a search cannot work with these."""
    check_metric(metric)
    is_number = [isinstance(b, Real) and not isinstance(b, bool) for b in (max_drop, budget)]
    is_bound = is_number[0] and max_drop >= 0
    if not is_bound or not (budget is None or (is_number[1] and budget > 0)):
        raise ConfigError(
            f"The search got max_drop={max_drop!r} and budget={budget!r}; allowed are "
            "max_drop >= 0 and budget > 0 seconds, or None."
        )


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
    """int16 operands and results, weights as they are by default; None without a default."""
    qconfig = prepared.backend.default_qconfig
    if qconfig is None:
        return None
    wide = TensorConfig(QSpec(WIDE, Scheme.SYMMETRIC), MinMax())
    return replace(qconfig, activation=wide, output=None)


def open_state(
    path: str | Path | None, prepared: PreparedModel, max_drop: float, calibration: Any
) -> SearchState:
    """The state of this search; an empty one without a path."""
    if path is None:
        return SearchState(None, "")
    settings = {
        "backend": prepared.backend.name,
        "effort": prepared.effort,
        "max_drop": max_drop,
        "calibration": getattr(calibration, "__qualname__", repr(calibration)),
        "plan": [(op.name, op.quantized) for op in prepared.plan.operators],
        "formats": [(group.key, repr(group.info.spec)) for group in prepared.plan.groups],
    }
    return SearchState.open(path, make_fingerprint(prepared.mod, settings))


def describe_best(trial: Trial, mapping: QConfigMapping) -> dict[str, Any]:
    """The best trial for the file: what `QConfigMapping.from_dict` reads is under "mapping"; None
    where the mapping holds a callable.
    """
    return {
        "reverted": list(trial.names),
        "dtype": trial.dtype,
        "score": trial.score,
        "is_met": trial.is_met,
        "mapping": describe_mapping(mapping),
    }


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
