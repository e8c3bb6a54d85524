"""calibrate: prepared model + data set -> parameters of every group, fitted weights and biases.

The subgraphs of a step run on all batches and their results are observed. Then parameters are
chosen or weights fitted, and the next step runs with these (`passes` says what makes up a step). No
operator runs twice on a batch in one pass, unless this takes less time than to store its result:
values that later steps need are stored on disk.
"""

from __future__ import annotations

import concurrent.futures as futures
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from relayquant.base.cores import count_threads
from relayquant.base.events import CallbackList, ParametersEvent, ProgressEvent
from relayquant.base.qtypes import QParams
from relayquant.base.runtime import LoadModule, limit_blas
from relayquant.config import FitSettings, Order
from relayquant.config.fitting import DEFAULT_FIT
from relayquant.config.observers import MinMax, Observer
from relayquant.config.observers.base import NotFiniteError, call_observer
from relayquant.data import Dataset, open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import DataError
from relayquant.ir.ops.base import group_weight
from relayquant.ir.plan import SharedQParams
from relayquant.ir.rewrite.graph import Graph
from relayquant.ir.rewrite.moves import axis_in_sources
from relayquant.stages.calibration.checkpoint import (
    describe_fingerprint,
    open_checkpoint,
    open_temporary,
)
from relayquant.stages.calibration.data import StoredData
from relayquant.stages.calibration.dispatch import (
    WORKER_TIMEOUT,
    ShardRunner,
    check_executor,
    check_timeout,
)
from relayquant.stages.calibration.observer_selection import OutputJudge, OutputSQNR
from relayquant.stages.calibration.parameters import (
    CalibrationContext,
    CallableCalibration,
    describe_needs,
    is_data_free,
    pick_given,
    raise_scale,
    resolve_observer,
)
from relayquant.stages.calibration.passes import (
    FEWEST_SAMPLES,
    DataPass,
    choose_batches,
    count_part,
    join_subgraphs,
    plan_passes,
)
from relayquant.stages.calibration.result import CalibrationResult
from relayquant.stages.calibration.shard import (
    FitObservation,
    GroupObservation,
    ShardTask,
    StepArguments,
    name_real,
)
from relayquant.stages.calibration.store import MOST_KEPT_BYTES, Shard, ValueMemory
from relayquant.stages.calibration.subgraphs import Subgraph
from relayquant.stages.calibration.weights.curves import Slopes, ValueCurve, find_curves
from relayquant.stages.calibration.weights.fit import fit_operator, round_bias
from relayquant.stages.calibration.weights.pick import (
    OperatorFit,
    find_fits,
    pick_weight_parameters,
)
from relayquant.stages.calibration.weights.ranges import RelativeMSE
from relayquant.stages.calibration.weights.statistics import InputStatistics
from relayquant.stages.prepared import FitPoint, GroupStatistics, PreparedModel, TunedBatches


def pick_parameters(
    prepared: PreparedModel,
    dataset: Any,
    *,
    load_module: LoadModule,
    observer: Any = None,
    order: Order = Order.TOPOLOGICAL,
    callbacks: CallbackList | None = None,
    fit: FitSettings = DEFAULT_FIT,
    min_scales: Mapping[str, np.ndarray] | None = None,
    checkpoint: str | Path | None = None,
    workers: futures.Executor | None = None,
    worker_timeout: float | None = WORKER_TIMEOUT,
) -> CalibrationResult:
    """Choose the parameters of every group of the plan, and fit constants.

    The result is the same, bit for bit, for every `checkpoint` and `workers`.

    Args:
        prepared: The prepared model; not changed.
        dataset: See `open_dataset`. Read once. None if no value of the plan needs data.
        load_module: Makes the subgraphs runnable on this machine.
        observer: Observer or callable for all activations, instead of the plan's.
        order: See `Order`.
        callbacks: Called with progress and with every choice.
        fit: How weights are rounded and biases corrected.
        min_scales: Group key -> lower bound for its scales.
        checkpoint: A folder to work in. A calibration that was stopped continues from it. By
            default a folder in the system's temporary directory, which is removed. It needs about
            (largest activations alive at once) x (number of samples) x 4 bytes.
        workers: An executor whose processes run the shards of each subgraph. They must have access
            to the folder.
        worker_timeout: Seconds without a shard from any worker after which workers count as hung.

    Raises:
        DataError: the data set is empty, an item is wrong, or the data differs from the
            checkpoint's.
        ConfigError: `observer` is neither observer nor callable, or its result is wrong; the
            checkpoint belongs to another calibration; the executor cannot be used.
        WorkerError: workers died or hang.
    """
    callbacks = callbacks or CallbackList()
    plan = prepared.plan
    override = resolve_observer(observer) if observer is not None else None
    pool = check_executor(workers) if workers is not None else None
    timeout = check_timeout(worker_timeout)
    observers = [override or resolve_observer(group.observer) for group in plan.activations]
    needs_data = bool(plan.activations)
    if dataset is None and not all(map(is_data_free, observers)):
        raise DataError(describe_needs(plan, observers), code="RQ303")
    if dataset is None:
        needs_data = False
    data = None
    if needs_data or dataset is not None:
        data = open_dataset(dataset, describe_inputs(prepared.mod))
    parameters = pick_weight_parameters(prepared)
    for key in (min_scales or {}).keys() & parameters.keys():
        parameters[key] = raise_scale(parameters[key], plan.group(key), min_scales)
    fits = find_fits(prepared)
    fitted = {f.group.key for f in fits.values()} if fit.is_needed and needs_data else set()
    for group in plan.weights:
        if group.key not in fitted:
            callbacks.on_parameters(ParametersEvent(group.info, parameters[group.key]))
    constants = decode_grouped(prepared)
    if data is None:
        found = pick_given(plan, observers, parameters, callbacks, min_scales or {})
        return replace(found, constants=constants)
    if not needs_data:
        return CalibrationResult(parameters, constants)
    fit_points = [f.point for f in fits.values()] if fit.is_needed else []
    is_judged = order is Order.PARALLEL and any(isinstance(p, OutputSQNR) for p in observers)
    passes = plan_passes(prepared.graph, plan, order, fit_points, results=is_judged)
    judge = OutputJudge(prepared.graph, load_module) if is_judged else None
    with limit_blas(), ExitStack() as stack:
        if checkpoint is None:
            memory = ValueMemory(MOST_KEPT_BYTES) if pool is None else None
            workspace = stack.enter_context(open_temporary(memory))
        else:
            fingerprint = describe_fingerprint(prepared, order.value, override, fit)
            workspace = stack.enter_context(open_checkpoint(checkpoint, fingerprint))
        shards = ShardRunner(join_subgraphs(passes), workspace, load_module, pool, timeout)
        run = _Run(
            prepared,
            passes,
            shards,
            parameters,
            constants,
            override,
            callbacks,
            fits,
            fit,
            min_scales or {},
            judge,
        )
        run.load(data)
        for data_pass, chosen in zip(passes, run.chosen, strict=True):
            run.run_pass(data_pass, chosen)
    return CalibrationResult(
        parameters,
        run.constants,
        run.statistics,
        run.observers,
        tuned=TunedBatches(run.judged, run.chosen[-1] if run.fits else (), run.data.sample_count),
    )


class _Run:
    """State of one calibration: what is known of the data, and the choices so far."""

    def __init__(
        self,
        prepared: PreparedModel,
        passes: Sequence[DataPass],
        shards: ShardRunner,
        parameters: dict[str, QParams],
        constants: dict[str, np.ndarray],
        override: Observer[Any] | CallableCalibration | None,
        callbacks: CallbackList,
        fits: Mapping[str, OperatorFit],
        settings: FitSettings,
        min_scales: Mapping[str, np.ndarray],
        judge: OutputJudge | None,
    ) -> None:
        self.prepared, self.plan, self.passes = prepared, prepared.plan, passes
        self.graph = Graph(prepared.graph.mod)
        self.shards, self.workspace = shards, shards.workspace
        self.parameters, self.constants, self.override = parameters, constants, override
        self.callbacks = callbacks
        self.known, self.settings, self.min_scales = fits, settings, min_scales
        self.fits = fits if settings.is_needed else {}
        #: whether the float model runs beside, while weights are fitted
        self.runs_real = any(settings.reconstructs(f.group.info.spec) for f in self.fits.values())
        reads_curves = any(isinstance(g.observer, RelativeMSE) for g in self.plan.activations)
        self.curves = find_curves(prepared) if reads_curves or override is not None else {}
        self.statistics: dict[str, GroupStatistics] = {}
        self.observers: dict[str, str] = {}
        #: chooses between ranges; None if no observer asks for it
        self.judge = judge
        self.data = StoredData(shards.workspace)
        #: indices of the batches that each pass runs on
        self.chosen: list[tuple[int, ...]] = []
        #: indices of the batches that ranges are chosen by
        self.judged: tuple[int, ...] = ()
        #: whether the float pass leaves their results: not if the judge uses parts of batches
        self.knows_results = False
        self.steps = 0  # number of steps done
        self.done = 0  # number of batches done, over all steps
        #: arrays for all variables of the graph, and for the values that depend only on them
        self.variables: dict[str, np.ndarray] = {}
        self.fixed: dict[str, Any] = {}
        #: the same in the float model; None if it does not run beside
        self.real: dict[str, Any] | None = None

    def load(self, data: Dataset) -> None:
        """Store the inputs that subgraphs read."""
        used = {
            name
            for data_pass in self.passes
            for subgraph in data_pass.split.subgraphs
            for name in (*subgraph.inputs, *subgraph.observed)
        }
        used.update(self.judge.inputs if self.judge is not None else ())
        self.data.load(data, used, self.callbacks)
        self.chosen = [self.choose_batches(data_pass) for data_pass in self.passes]
        if self.judge is not None:
            self.judged = self.data.choose_judged(self.judge)
            self.knows_results = self.data.find_cut(self.judge, self.judged) is None

    def choose_batches(self, data_pass: DataPass) -> tuple[int, ...]:
        """Return the indices of the batches that a pass runs on."""
        count = self.data.count
        if data_pass.is_part:
            fit_points = [fit.point for fit in self.fits.values()]
            symbols = self.data.record.symbols[0] if self.data.record.symbols else {}
            values = self.settings.values
            fewest = self.settings.reconstruction.samples if self.runs_real else FEWEST_SAMPLES
            count = count_part(
                self.prepared.graph, fit_points, self.data.inputs, symbols, values, fewest
            )
        return choose_batches(self.data.count, count)

    def run_pass(self, data_pass: DataPass, chosen: Sequence[int]) -> None:
        """Run all steps of a pass on the batches `chosen`."""
        self.data.keep(chosen)
        known = () if data_pass.is_float else (self.parameters, self.constants)
        self.variables = self.prepared.graph.arguments(*known)
        # Fitted weights replace these once they are known.
        self.fixed = data_pass.split.compute_constants(self.variables)
        self.real = None
        if self.runs_real and not data_pass.is_float:
            real = self.prepared.graph.arguments()
            self.real = {**real, **data_pass.split.compute_constants(real)}
        for subgraphs in data_pass.steps:
            self.step(data_pass, subgraphs)

    def step(self, data_pass: DataPass, subgraphs: tuple[Subgraph, ...]) -> None:
        """Run one step on all batches and make its choices, or take the choices from the
        checkpoint.
        """
        index, self.steps = self.steps, self.steps + 1
        observers = {
            key: self.find_observer(key) for subgraph in subgraphs for key in subgraph.groups
        }
        shards = self.data.shards
        observed = {
            key: GroupObservation(observer, group.info, group.points)
            for key, observer in observers.items()
            if isinstance(observer, Observer)
            for group in [self.plan.group(key)]
        }
        path = self.workspace.choices(index)
        if self.workspace.is_kept and path.exists():
            self.adopt(data_pass, subgraphs, CalibrationResult.load(path, observed))
            self.done += self.data.count
        else:
            result = self.choose(index, data_pass, subgraphs, observers, observed)
            if self.workspace.is_kept:
                result.save(path)
            self.adopt(data_pass, subgraphs, result)
        is_last = data_pass is self.passes[-1]
        for subgraph in subgraphs:
            for name in subgraph.expired:
                # A later pass reads the model's inputs again.
                if is_last or name not in self.data.record.starts:
                    self.data.values.drop(name, shards)
                    if self.runs_real:
                        self.data.values.drop(name_real(name), shards)
        if self.shards.writes_states:
            for shard in shards:
                self.workspace.states(index, shard).unlink(missing_ok=True)

    def choose(
        self,
        index: int,
        data_pass: DataPass,
        subgraphs: tuple[Subgraph, ...],
        observers: Mapping[str, Observer[Any] | CallableCalibration],
        observed: Mapping[str, GroupObservation],
    ) -> CalibrationResult:
        """Run one step on all batches. Then choose the parameters of its groups and fit its
        operators.
        """
        later = {
            name
            for step in data_pass.steps[data_pass.steps.index(subgraphs) + 1 :]
            for other in step
            for name in (*other.inputs, *other.observed)
            if name not in other.outputs  # it is computed again
        }
        replay = {
            name
            for key, observer in observers.items()
            if isinstance(observer, CallableCalibration)
            for name in self.plan.group(key).points
        }
        computed = dict.fromkeys(name for subgraph in subgraphs for name in subgraph.outputs)
        stored = tuple(name for name in computed if name in later | replay)
        results = data_pass.results if self.knows_results else ()
        judged = {*stored, *results}
        fits = {
            point.operator: self.observe_fit(point)
            for subgraph in subgraphs
            for point in subgraph.fits
        }
        has_symbols = any(subgraph.symbols for subgraph in subgraphs)
        shards = self.data.shards
        parts = {key: seen.for_part(shards[0], self.data.count) for key, seen in observed.items()}

        def make_task(shard: Shard) -> ShardTask:
            is_judged = results and any(shard.start <= n < shard.stop for n in self.judged)
            return ShardTask(
                subgraphs if is_judged or not data_pass.results else subgraphs[:-1],
                shard,
                self.data.values,
                parts,
                fits,
                tuple(name for name in computed if name in judged) if is_judged else stored,
                self.data.record.symbols[shard.start : shard.stop] if has_symbols else (),
            )

        tasks = [make_task(shard) for shard in shards]
        known = {**self.variables, **self.fixed}
        read = dict.fromkeys(
            name for subgraph in subgraphs for name in (*subgraph.inputs, *subgraph.observed)
        )
        arguments = StepArguments(
            {name: known[name] for name in read if name in known},
            {n: self.real[n] for n in read if n in self.real} if self.real is not None else None,
        )
        states = self.shards.run(index, tasks, arguments, self.advance)
        result = CalibrationResult({}, {})
        with futures.ThreadPoolExecutor(count_threads()) as pool:
            found = {
                key: pool.submit(call_observer, observer.qparams, info, states.groups[key], info)
                for key, observer in observers.items()
                if isinstance(observer, Observer)
                for info in (self.plan.group(key).info,)
            }
        for key, observer in observers.items():
            result.parameters[key] = (
                found[key].result()
                if isinstance(observer, Observer)
                else observer.qparams(
                    self.data.samples(self.plan.group(key)), self.describe(result)
                )
            )
            result.observers[key] = observer.name
        if data_pass.is_float and self.judge is not None:
            self.choose_ranges(self.judge, observers, states.groups, result, results)
        for key, observer in observers.items():
            if key in self.min_scales:
                raised = raise_scale(result.parameters[key], self.plan.group(key), self.min_scales)
                result.parameters[key] = raised
            if data_pass.is_float and isinstance(observer, Observer):
                result.statistics[key] = GroupStatistics(observer, states.groups[key])
        for name, statistics in states.fits.items():
            self.fit(self.fits[name], statistics, result)
        return result

    def choose_ranges(
        self,
        judge: OutputJudge,
        observers: Mapping[str, Observer[Any] | CallableCalibration],
        states: Mapping[str, Any],
        result: CalibrationResult,
        results: Sequence[str],
    ) -> None:
        """Replace ranges in `result` by the ranges that the outputs favour. Of the judged batches,
        these results are stored.
        """
        judged = {
            key: observer for key, observer in observers.items() if isinstance(observer, OutputSQNR)
        }
        if not judged:
            return
        relative = dict(result.parameters)

        def find(key: str, name: str) -> QParams:
            info = self.plan.group(key).info
            return judged[key].find_range(name, relative[key], states[key], info)

        batches = self.data.read_judged(judge, results)
        chosen = judge.choose(relative, judged.keys(), find, batches)
        for key, (name, qparams) in chosen.items():
            result.observers[key], result.parameters[key] = name, qparams

    def advance(self, batches: int) -> None:
        """Report that a step has run on this many more batches."""
        self.done += batches
        passes = zip(self.passes, self.chosen, strict=True)
        total = sum(len(data_pass.steps) * len(chosen) for data_pass, chosen in passes)
        self.callbacks.on_progress(ProgressEvent("calibrate", self.done, total))

    def adopt(
        self, data_pass: DataPass, subgraphs: Sequence[Subgraph], result: CalibrationResult
    ) -> None:
        """Use these parameters, weights and biases in later steps."""
        self.parameters.update(result.parameters)
        self.constants.update(result.constants)
        self.statistics.update(result.statistics)
        self.observers.update(result.observers)
        if not data_pass.is_float:
            graph = self.prepared.graph
            for key, qparams in result.parameters.items():
                self.variables.update(graph.group_arguments(key, qparams))
            for key, array in result.constants.items():
                self.variables[graph.constants[key].var.name] = array
        for point in (point for subgraph in subgraphs for point in subgraph.fits):
            if point.weight in self.fixed:
                self.fixed[point.weight] = result.constants[f"{point.operator}:weight"]
        for key, qparams in result.parameters.items():
            self.callbacks.on_parameters(ParametersEvent(self.plan.group(key).info, qparams))

    def find_observer(self, key: str) -> Observer[Any] | CallableCalibration:
        """Return the observer of a group. If the observer depends on the consumers, it gets
        their weights.
        """
        group = self.plan.group(key)
        override = None if group.is_fixed else self.override
        observer = override or resolve_observer(group.observer)
        if not isinstance(observer, RelativeMSE) or observer.importance:
            return observer
        readers = [
            fit
            for name, fit in self.known.items()
            if dict(self.plan.operator(name).operands).get("data") == key
        ]
        if key in self.curves:
            return self.find_behind(group, observer, self.curves[key])
        if not readers:
            return MinMax()
        first = readers[0]
        source, read = first.point.source, first.view.channel_axis
        axis = axis_in_sources(self.graph, group.points, source, read)
        if axis is None:  # no axis of the observed values is the one that the weights weigh
            return observer
        importance = tuple(
            tuple(fit.view.channel_importance(fit.weight).tolist()) for fit in readers
        )
        return replace(observer, axis=axis, importance=importance)

    def find_behind(
        self, group: SharedQParams, observer: RelativeMSE, curve: ValueCurve | Slopes
    ) -> Observer[Any]:
        """Return the observer of a value that a function reads: the result counts, as its own
        readers see it.
        """
        result = self.plan.operator(curve.reader).output
        behind = None if result is None else self.find_observer(result)
        if isinstance(behind, RelativeMSE) and behind.curve is None:
            return replace(observer, axis=behind.axis, importance=behind.importance, curve=curve)
        producer = self.known.get(group.points[0])
        axis = observer.axis if producer is None else producer.view.channel_axis
        return replace(observer, axis=axis, curve=curve)

    def observe_fit(self, point: FitPoint) -> FitObservation:
        """Describe what to observe of an operator's input. Second moments are left out if
        nothing uses them.
        """
        fit = self.fits[point.operator]
        spec = fit.group.info.spec
        data = self.find_data(point.operator)
        size = fit.columns, spec, self.plan.group(data).info.spec if data is not None else None
        return FitObservation(
            point.source,
            fit.view,
            fit.columns,
            self.settings.max_columns,
            self.settings.needs_moments(*size),
            -(-self.settings.count_rows(*size) // self.data.count),
            (self.settings.seed, self.prepared.graph.fits.index(point)),
            tuple(
                (self.parameters[key], self.plan.group(key).info.spec) for key in point.roundings
            ),
            self.settings.reconstructs(spec),
        )

    def find_data(self, operator: str) -> str | None:
        """Return the group of an operator's data, or None if the data stays in float."""
        return dict(self.plan.operator(operator).operands).get("data")

    def fit(self, fit: OperatorFit, statistics: InputStatistics, chosen: CalibrationResult) -> None:
        """Fit one operator and store the result in `chosen`."""
        key, name = fit.group.key, fit.point.operator
        settings = self.settings.for_spec(fit.group.info.spec)
        if statistics.overflows:
            raise NotFiniteError(
                f"Operator {name!r} reads values whose squares pass what float32 holds, so that "
                f"its weight cannot be fitted. {self.data.largest}; check the preprocessing.",
                fit.point.source,
                code="RQ302",
            )
        if key in self.min_scales:  # the scale is fixed, only the rounding is open
            settings = replace(settings, scale_factors=(1.0,), tensor_factors=(1.0,))
        result = fit_operator(
            fit.view,
            statistics,
            fit.weight,
            fit.bias,
            self.parameters[key],
            fit.group.info.spec,
            settings,
        )
        chosen.parameters[key] = result.qparams
        chosen.constants[f"{name}:weight"] = result.weight
        if result.bias is not None:
            data = self.parameters.get(self.find_data(name) or "")
            is_few = self.settings.reconstructs(fit.group.info.spec)
            bias = (
                round_bias(result, fit.view, data) if is_few and data is not None else result.bias
            )
            chosen.constants[f"{name}:bias"] = bias

    def describe(self, chosen: CalibrationResult) -> CalibrationContext:
        """Return the choices so far for a callable, including `chosen` of the running step."""
        return CalibrationContext(
            self.plan,
            self.prepared.graph,
            MappingProxyType({**self.parameters, **chosen.parameters}),
            MappingProxyType({**self.constants, **chosen.constants}),
        )


def decode_grouped(prepared: PreparedModel) -> dict[str, np.ndarray]:
    """Return the dequantized values of weights in groups, by name. Operators behind them are
    calibrated with the rounded weights.
    """
    found: dict[str, np.ndarray] = {}
    for operator in prepared.plan.operators:
        if operator.grouped is not None:
            key = f"{operator.name}:weight"
            weight = group_weight(prepared.graph.constants[key].value, operator.grouped)
            found[key] = weight.decode().T
    return found
