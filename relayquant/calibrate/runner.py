"""calibrate: prepared model + data set -> parameters of every group, fitted weights and biases.

In topological order: a group's values are computed with all earlier groups already rounded, so that
each choice sees the effect of those before it. Segments make this cost one pass over the data; what
later segments need waits on disk.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from relayquant.calibrate.datasets import Dataset, InputInfo, open_dataset
from relayquant.calibrate.fit import (
    DEFAULT_FIT,
    FitSettings,
    WeightRounding,
    fit_operator,
)
from relayquant.calibrate.fit_patches import LinearView, make_linear_view
from relayquant.calibrate.fit_ranges import RelativeMSE
from relayquant.calibrate.fit_statistics import InputStatistics, round_to_grid
from relayquant.calibrate.inputs import describe_inputs
from relayquant.calibrate.observers import MinMax, Observer
from relayquant.calibrate.parameters import CallableCalibration, resolve_calibration
from relayquant.calibrate.segments import Segment, SegmentedGraph, split_graph
from relayquant.calibrate.store import ValueStore
from relayquant.events import CallbackList, ParametersEvent, ProgressEvent
from relayquant.ops.find import match_operator, operand_constant
from relayquant.plan import GroupPlan
from relayquant.prepared import FitPoint, GroupStatistics, PreparedModel
from relayquant.qtypes import QParams, ValueInfo, conform_scale
from relayquant.rewrite import Graph
from relayquant.runtime import CompileModule, Executor, as_shape, as_tensor


class Order(enum.Enum):
    """When parameters are picked."""

    TOPOLOGICAL = "topological"  #: one after the other, each sees the rounding of those before it
    PARALLEL = "parallel"  #: all from one pass of the float model


@dataclass(frozen=True, eq=False)
class StoredSamples:
    """The arrays of a group's observed values, read from disk each time they are iterated over."""

    info: ValueInfo
    read: Callable[[], Iterator[np.ndarray]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return self.read()


@dataclass(frozen=True, eq=False)
class CalibrationResult:
    """What calibration found: see `PreparedModel.parameters`, `.constants` and `.statistics`."""

    parameters: dict[str, QParams]
    constants: dict[str, np.ndarray]
    statistics: dict[str, GroupStatistics] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class OperatorFit:
    """An operator to be fitted: where, as what matrices, and its constants in the float model."""

    point: FitPoint
    view: LinearView
    weight: np.ndarray
    bias: np.ndarray | None
    group: GroupPlan

    @property
    def columns(self) -> int:
        """Weights per output."""
        return self.view.weight_to_rows(self.weight).shape[2]


def find_fits(prepared: PreparedModel) -> dict[str, OperatorFit]:
    """Operators whose weights can be fitted, by name, in topological order."""
    graph = Graph(prepared.mod)
    constants = prepared.graph.constants
    found = {}
    for point in prepared.graph.fits:
        operator = prepared.plan.operator(point.operator)
        view = make_linear_view(match_operator(graph, prepared.backend, operator))
        if view is not None:
            bias = constants.get(f"{operator.name}:bias")
            found[operator.name] = OperatorFit(
                point,
                view,
                constants[f"{operator.name}:weight"].value,
                bias.value if bias is not None else None,
                prepared.plan.group(dict(operator.operands)["weight"]),
            )
    return found


def pick_parameters(
    prepared: PreparedModel,
    dataset: Any,
    *,
    compile_module: CompileModule,
    calibration: Any = None,
    order: Order = Order.TOPOLOGICAL,
    callbacks: CallbackList | None = None,
    directory: str | Path | None = None,
    fit: FitSettings = DEFAULT_FIT,
    min_scales: Mapping[str, np.ndarray] | None = None,
) -> CalibrationResult:
    """Parameters of every group of the plan, and fitted constants.

    Args:
        prepared: The prepared model; not changed.
        dataset: See `open_dataset`. Read once.
        compile_module: Compiles the segments for this machine.
        calibration: Observer or callable for all activations, instead of the plan's.
        order: See `Order`.
        callbacks: Told of progress and of every choice.
        directory: Where intermediate values wait; the system's temporary directory by default.
            Needs about (largest activations alive at once) x (number of samples) x 4 bytes.
        fit: How weights are rounded and biases corrected.
        min_scales: By group key, scales that those picked are raised to where they are smaller.

    Raises:
        DataError: the data set is empty or an item is wrong.
        ConfigError: `calibration` is neither observer nor callable, or picked something wrong.
    """
    callbacks = callbacks or CallbackList()
    plan = prepared.plan
    override = resolve_calibration(calibration) if calibration is not None else None
    data = open_dataset(dataset, describe_inputs(prepared.mod))
    parameters = pick_weight_parameters(prepared)
    for key in (min_scales or {}).keys() & parameters.keys():
        parameters[key] = raise_scale(parameters[key], plan.group(key), min_scales)
    fits = find_fits(prepared)
    fitted = {f.group.key for f in fits.values()} if fit.is_needed else set()
    for group in plan.weights:
        if group.key not in fitted:
            callbacks.on_parameters(ParametersEvent(group.info, parameters[group.key]))
    if not plan.activations:
        return CalibrationResult(parameters, {})
    single = order is Order.PARALLEL
    stops = [f.point for f in fits.values()] if fit.is_needed else []
    split = split_graph(prepared.graph, plan, single=single, fits=stops)
    executor = Executor(compile_module(split.mod)) if split.mod.functions else None
    with ValueStore(directory) as store:
        run = _Run(
            prepared,
            split,
            executor,
            store,
            parameters,
            override,
            callbacks,
            order,
            fits,
            fit,
            min_scales or {},
        )
        run.load(data)
        for index, segment in enumerate(split.segments):
            run.segment(index, segment)
    return CalibrationResult(parameters, run.constants, run.statistics)


def read_symbols(inputs: Sequence[InputInfo], batch: Mapping[str, np.ndarray]) -> dict[str, int]:
    """What the symbolic dimensions of the inputs are in one batch."""
    return {
        dim: size
        for info in inputs
        for dim, size in zip(info.shape, batch[info.name].shape, strict=True)
        if isinstance(dim, str)
    }


def pick_weight_parameters(prepared: PreparedModel) -> dict[str, QParams]:
    """Parameters of constant operands, from the constants themselves."""
    graph = Graph(prepared.mod)
    parameters = {}
    for group in prepared.plan.weights:
        name, operand = group.constant or ("", "")
        match = match_operator(graph, prepared.backend, prepared.plan.operator(name))
        array = operand_constant(match, operand)
        picker = resolve_calibration(group.calibration)
        if isinstance(picker, CallableCalibration):
            samples = StoredSamples(group.info, lambda array=array: iter([array]))
            parameters[group.key] = picker.qparams(samples)
        else:
            parameters[group.key] = picker.observe(group.info, [array])
    return parameters


def raise_scale(
    qparams: QParams, group: GroupPlan, min_scales: Mapping[str, np.ndarray]
) -> QParams:
    """Parameters with scales of at least those in `min_scales`, and the same zero points."""
    scale = np.maximum(qparams.scale, min_scales.get(group.key, 0.0))
    scale = conform_scale(scale, group.info.spec).astype("float32")
    return QParams(scale, qparams.zero_point, qparams.dtype, qparams.axis)


class _Run:
    """State of one calibration: what is stored, what is picked."""

    def __init__(
        self,
        prepared: PreparedModel,
        split: SegmentedGraph,
        executor: Executor | None,
        store: ValueStore,
        parameters: dict[str, QParams],
        override: Observer[Any] | CallableCalibration | None,
        callbacks: CallbackList,
        order: Order,
        fits: Mapping[str, OperatorFit],
        settings: FitSettings,
        min_scales: Mapping[str, np.ndarray],
    ) -> None:
        self.prepared, self.plan, self.split, self.executor = (
            prepared, prepared.plan, split, executor,
        )  # fmt: skip
        self.store, self.parameters, self.override = store, parameters, override
        self.callbacks, self.order, self.batches = callbacks, order, 0
        self.known, self.settings, self.min_scales = fits, settings, min_scales
        self.fits = fits if settings.is_needed else {}
        self.constants: dict[str, np.ndarray] = {}
        self.statistics: dict[str, GroupStatistics] = {}
        self.symbols: list[dict[str, int]] = []  # by batch
        self.fixed = self.compute_constants(split.constants)

    def compute_constants(self, segment: Segment | None) -> dict[str, Any]:
        """Rounded weights, once for all batches; fitted weights take their places when known."""
        if segment is None or self.executor is None:
            return {}
        variables = self.variable_values()
        results = self.executor.run(segment.function, [variables[n] for n in segment.inputs])
        return {
            name: as_tensor(array) for name, array in zip(segment.outputs, results, strict=True)
        }

    def variable_values(self) -> dict[str, np.ndarray]:
        """Arrays for all variables of the graph; all pass through in float when the order is
        parallel.
        """
        if self.order is Order.PARALLEL:
            return self.prepared.graph.arguments()
        return self.prepared.graph.arguments(self.parameters, self.constants)

    def load(self, data: Dataset) -> None:
        """Store the inputs that segments read. The only pass over the user's data."""
        used = {
            name for segment in self.split.segments for name in (*segment.inputs, *segment.observed)
        }
        for batch in data:
            self.symbols.append(read_symbols(data.inputs, batch))
            for name, array in batch.items():
                if name in used:
                    self.store.append(name, array)
            self.batches += 1
            self.callbacks.on_progress(ProgressEvent("read data", self.batches, None))

    def segment(self, index: int, segment: Segment) -> None:
        """Run one segment on all batches, then pick the parameters of its groups."""
        variables = self.variable_values()
        pickers = {key: self.find_picker(key) for key in segment.groups}
        states = {
            key: picker.start(self.plan.group(key).info)
            for key, picker in pickers.items()
            if isinstance(picker, Observer)
        }
        inputs = {
            point.operator: self.start_statistics(self.fits[point.operator])
            for point in segment.fits
        }
        later = {
            name
            for other in self.split.segments[index + 1 :]
            for name in (*other.inputs, *other.observed)
        }
        replay = {
            name
            for key, picker in pickers.items()
            if isinstance(picker, CallableCalibration)
            for name in self.plan.group(key).points
        }
        stored = set(segment.outputs) & (later | replay)
        for batch in range(self.batches):
            values = self.run_batch(segment, batch, variables)
            for key in states:
                for name in self.plan.group(key).points:
                    array = values[name] if name in values else self.store.read(name, batch)
                    states[key] = pickers[key].update(states[key], array)
            for point in segment.fits:
                name = point.source
                array = values[name] if name in values else self.store.read(name, batch)
                inputs[point.operator] = self.add_statistics(
                    inputs[point.operator], point, array, batch
                )
            for name in stored:
                self.store.append(name, values[name])
            done = index * self.batches + batch + 1
            total = len(self.split.segments) * self.batches
            self.callbacks.on_progress(ProgressEvent("calibrate", done, total))
        for key, picker in pickers.items():
            group = self.plan.group(key)
            self.parameters[key] = (
                picker.qparams(states[key], group.info)
                if isinstance(picker, Observer)
                else picker.qparams(self.samples(group))
            )
            if key in self.min_scales:
                self.parameters[key] = raise_scale(self.parameters[key], group, self.min_scales)
            self.callbacks.on_parameters(ParametersEvent(group.info, self.parameters[key]))
        if self.order is Order.PARALLEL:
            self.statistics |= {
                key: GroupStatistics(pickers[key], state) for key, state in states.items()
            }
        for name, statistics in inputs.items():
            self.fit(self.fits[name], statistics)
        for name in segment.expired:
            self.store.drop(name)

    def find_picker(self, key: str) -> Observer[Any] | CallableCalibration:
        """Who picks a group's parameters; told of the consumers if it asks for them."""
        group = self.plan.group(key)
        override = None if group.is_fixed else self.override
        picker = override or resolve_calibration(group.calibration)
        if not isinstance(picker, RelativeMSE) or picker.importance:
            return picker
        readers = [
            fit
            for name, fit in self.known.items()
            if dict(self.plan.operator(name).operands).get("data") == key
        ]
        if not readers:
            return MinMax()
        importance = tuple(
            tuple(fit.view.channel_importance(fit.weight).tolist()) for fit in readers
        )
        return replace(picker, axis=readers[0].view.channel_axis, importance=importance)

    def start_statistics(self, fit: OperatorFit) -> InputStatistics:
        """Before any data; without second moments where they would not be used."""
        with_gram = self.settings.rounding is not WeightRounding.NEAREST
        return InputStatistics.empty(
            fit.view.groups, fit.columns, with_gram=with_gram, most=self.settings.max_columns
        )

    def add_statistics(
        self, statistics: InputStatistics, point: FitPoint, array: np.ndarray, batch: int
    ) -> InputStatistics:
        """With the operator's data in one batch; which rows are sampled depends on settings,
        operator and batch.
        """
        fit = self.fits[point.operator]
        rows = self.settings.count_rows(fit.columns)
        place = self.prepared.graph.fits.index(point)
        rng = np.random.default_rng((self.settings.seed, place, batch))

        def round_data(values: np.ndarray) -> np.ndarray:
            for key in point.roundings:
                spec = self.plan.group(key).info.spec
                values = round_to_grid(values, self.parameters[key], spec)
            return values

        rounding = round_data if self.order is Order.TOPOLOGICAL else None
        return statistics.add(fit.view, array, -(-rows // self.batches), rng, rounding)

    def fit(self, fit: OperatorFit, statistics: InputStatistics) -> None:
        """Fit one operator; later segments run with its new weight and bias."""
        key, name = fit.group.key, fit.point.operator
        settings = self.settings
        if key in self.min_scales:  # the scale is decided, only the rounding is not
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
        self.parameters[key] = result.qparams
        self.constants[f"{name}:weight"] = result.weight
        if result.bias is not None:
            self.constants[f"{name}:bias"] = result.bias
        if fit.point.weight in self.fixed:
            self.fixed[fit.point.weight] = as_tensor(result.weight)
        self.callbacks.on_parameters(ParametersEvent(fit.group.info, result.qparams))

    def run_batch(
        self, segment: Segment, batch: int, variables: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """What a segment computes for one batch."""
        if not segment.function or self.executor is None:
            return {}
        args = [
            variables[name]
            if name in variables
            else self.fixed[name]
            if name in self.fixed
            else self.store.read(name, batch)
            for name in segment.inputs
        ]
        if segment.symbols:
            args.append(as_shape(self.symbols[batch][name] for name in segment.symbols))
        results = self.executor.run(segment.function, args)
        return dict(zip(segment.outputs, results, strict=True))

    def samples(self, group: GroupPlan) -> StoredSamples:
        """All arrays of a group's observed values."""

        def read() -> Iterator[np.ndarray]:
            for name in group.points:
                yield from self.store.read_all(name)

        return StoredSamples(group.info, read)
