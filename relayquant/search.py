"""Beside the data flow: which operators hurt accuracy, and the fewest to keep in float.

Uses the stages of `pipeline` as a user would.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm

from relayquant.analysis.sensitivity import (
    Metric,
    SensitivityReport,
    Simulation,
    add_float_lines,
    apply_metric,
    find_rounding_operators,
    measure_sensitivity,
)
from relayquant.annotate import annotate
from relayquant.calibrate.datasets import Dataset, open_dataset
from relayquant.calibrate.inputs import describe_inputs
from relayquant.config import BackendConfig, QConfigMapping
from relayquant.effort import Effort, resolve_effort
from relayquant.errors import ConfigError
from relayquant.events import Callback, CallbackList, ProgressEvent
from relayquant.pipeline import (
    calibrate,
    compile,
    convert_to_reference,
    default_mapping,
    lower,
    prepare,
)
from relayquant.plan import OperatorPlan
from relayquant.prepared import PreparedModel
from relayquant.runtime import Executor


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
    data = open_dataset(dataset, describe_inputs(prepared.mod))
    return measure_sensitivity(
        prepared, data, compile, metric, samples=samples, callbacks=CallbackList.of(callbacks)
    )


@dataclass(frozen=True)
class FallbackResult:
    """What `fallback` found. Unpacks as `qmod, mapping`.

    Attributes:
        mod: The quantized module.
        mapping: The QConfigMapping that makes it, for `quantize(..., qconfig_mapping=...)`.
        reverted: Names of the operators that were put back to float, the most sensitive first.
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

    @property
    def rank(self) -> tuple[bool, float]:
        """Higher is better: within the bound with few operators in float, else near it."""
        return self.is_met, -len(self.reverted) if self.is_met else self.score

    def __iter__(self) -> Iterator[Any]:
        return iter((self.mod, self.mapping))


def fallback(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    metric: Metric,
    *,
    max_drop: float = 0.01,
    budget: float | None = None,
    validation: Any = None,
    backend: BackendConfig | str = "x86",
    qconfig_mapping: QConfigMapping | None = None,
    calibration: Any = None,
    effort: Effort | str = Effort.BALANCED,
    callbacks: Iterable[Callback] | Callback = (),
) -> FallbackResult:
    """Quantize, and put the fewest operators back to float that bring accuracy back.

    Operators are ranked by `sensitivity`. The shortest prefix of that order that is good enough is
    found on the calibration graph, whose operators are switched without compiling anything, and
    thinned out there. Then the integer module is built and measured, with more operators in float
    if it falls short of the simulation, and with fewer as long as the bound is met.

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
        callbacks: Told of progress.

    Raises:
        ConfigError: max_drop is negative or budget not positive, or the metric returns no number.
        ModelError, DataError: as `quantize`.
    """
    if not max_drop >= 0 or (budget is not None and not budget > 0):
        raise ConfigError(
            f"fallback(max_drop={max_drop!r}, budget={budget!r}): allowed are max_drop >= 0 "
            "and budget > 0 seconds, or None."
        )
    deadline = math.inf if budget is None else time.monotonic() + budget
    events = CallbackList.of(callbacks)
    level = resolve_effort(effort)

    def calibrated(mapping: QConfigMapping | None) -> PreparedModel:
        prepared = prepare(mod, params, mapping, backend, dataset=dataset, effort=level)
        return calibrate(prepared, dataset, calibration=calibration)

    prepared = calibrated(qconfig_mapping)
    base = qconfig_mapping or default_mapping(prepared.backend, level)
    data = open_dataset(
        dataset if validation is None else validation, describe_inputs(prepared.mod)
    )
    simulation = Simulation(prepared, data, compile, metric)
    float_score = apply_metric(metric, simulation.expected, simulation.expected)
    bound = float_score - max_drop
    best: FallbackResult | None = None
    trials = 0

    def build(names: Sequence[str]) -> FallbackResult:
        """The integer module with these operators in float, measured; keeps the best so far."""
        nonlocal best, trials
        mapping = add_float_lines(prepared, names, base)
        changed = calibrated(mapping) if names else prepared
        qmod = lower(convert_to_reference(changed), changed.backend)
        score = apply_metric(metric, simulation.expected, run_all(qmod, data))
        trials += 1
        events.on_progress(ProgressEvent("fallback", trials, None, unit="module"))
        found = FallbackResult(
            qmod, mapping, tuple(names), score, float_score, score >= bound, trials
        )
        if best is None or found.rank > best.rank:
            best = found
        return found

    found = build(())
    if found.is_met or time.monotonic() >= deadline:
        return found
    order = rank_operators(simulation, events, deadline)
    names = search_simulated(simulation, base, order, bound, deadline)
    found, count = build(names), len(names)
    while not found.is_met and count < len(order) and time.monotonic() < deadline:
        # The simulation promised more than the integers keep: twice as many more each time.
        count = min(2 * count + 1, len(order))
        names = [name for i, name in enumerate(order) if i < count or name in names]
        found = build(names)
    # It may also promise less: its ranges were picked behind what is now in float.
    low, high = 0, len(names) if found.is_met else 0
    while high - low > 1 and time.monotonic() < deadline:
        middle = (low + high) // 2
        low, high = (low, middle) if build(names[:middle]).is_met else (middle, high)
    return replace(best or found, trials=trials)


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


def rank_operators(simulation: Simulation, events: CallbackList, deadline: float) -> list[str]:
    """Names of the operators, the most sensitive first; in half of the time that is left.

    By SQNR: a metric such as an accuracy does not tell small damage from none. Those that time did
    not suffice for come last.
    """
    start = time.monotonic()
    half = start + (deadline - start) / 2
    operators = find_rounding_operators(simulation.prepared)
    scores: dict[str, float] = {}
    # From both ends of the model, where the sensitive ones usually are.
    outside = sorted(operators, key=lambda op: min(operators.index(op), operators[::-1].index(op)))
    for done, operator in enumerate(outside, 1):
        if time.monotonic() >= half:
            break
        scores[operator.name] = simulation.sqnr([operator])
        events.on_progress(ProgressEvent("sensitivity", done, len(operators), unit="operator"))
    return sorted((op.name for op in operators), key=lambda name: scores.get(name, math.inf))


def find_remaining(
    prepared: PreparedModel, base: QConfigMapping, names: Sequence[str]
) -> list[OperatorPlan]:
    """Operators that still run on integers when these are in float: others may go with them."""
    plan = annotate(prepared.mod, prepared.backend, add_float_lines(prepared, names, base))
    return [operator for operator in plan.operators if operator.quantized]


def run_all(mod: tvm.IRModule, data: Dataset) -> list[list[Any]]:
    """Outputs of a module for every batch."""
    executor = Executor(compile(mod))
    return [executor.run("main", [*batch.values()]) for batch in data]
