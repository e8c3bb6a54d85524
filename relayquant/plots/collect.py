"""Float module, integer module and data -> everything that a report shows, as plain values.

One pass over the samples gives the error of every value and the elements of its histogram. The rest
comes from functions of `relayquant.analysis`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.accumulators import AccumulatorReport, AccumulatorRow, measure_sums
from relayquant.analysis.compare import CompareReport, CompareRow, compare_modules
from relayquant.analysis.finding import Finding, Severity
from relayquant.analysis.latency import Latency, measure_latency
from relayquant.analysis.lint import lint
from relayquant.analysis.loader import bind_loader
from relayquant.analysis.outputs import Interface, OutputGap, order_inputs
from relayquant.analysis.peak import measure_peak
from relayquant.analysis.profile import (
    KernelSite,
    OperatorTime,
    compile_with_sites,
    profile_executable,
)
from relayquant.analysis.sensitivity import (
    Metric,
    SensitivityReport,
    Simulation,
    add_lines,
    apply_metric,
    find_rounding_operators,
    name_metric,
)
from relayquant.base.cores import count_cores
from relayquant.base.events import CallbackList
from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.base.runtime import LoadModule, Machine, as_tensor
from relayquant.codegen.eager import EagerModule
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.config import BackendConfig, Effort
from relayquant.data import Batch, Dataset, count_samples, open_dataset, take_samples
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError
from relayquant.flow.evaluation import align_modules, sensitivity
from relayquant.flow.steps import calibrate, prepare
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.ledger import Ledger, LedgerRow, read_ledger
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.constants import count_constant_bytes
from relayquant.ir.rewrite.graph import constant_value, free_vars
from relayquant.stages.backends import find_backend
from relayquant.stages.compilation import compile, compile_draft
from relayquant.stages.effort import default_mapping
from relayquant.stages.prepared import PreparedModel
from relayquant.stages.streams import follow_state

#: elements in the histogram of a value, over all samples
SHOWN_ELEMENTS = 1 << 13
BINS = 48
#: channels of a weight that are drawn separately; with more channels, neighbours are drawn as one
SHOWN_CHANNELS = 96
#: number of worst samples that are shown
WORST_SAMPLES = 8
#: turns of each model when times are measured
ROUNDS = 10
#: a suggestion must gain this many dB, with at most this number of operators in float
WORTHWHILE, MOST_PUT_BACK = 3.0, 8


@dataclass(frozen=True, eq=False)
class DrawnHistogram:
    """Histogram of one value in the float and in the integer model.

    Attributes:
        low, high: Ends of the range, which is divided into equal bins.
        floating, integer: Counts of some elements, (BINS,) int64.
        chosen: The range that calibration chose. None for a float value.
    """

    low: float
    high: float
    floating: np.ndarray
    integer: np.ndarray
    chosen: tuple[float, float] | None


@dataclass(frozen=True, eq=False)
class WeightRanges:
    """Lowest and highest weight by output channel, (n,) float32.

    If there are more `channels` than are shown, neighbours are merged.
    """

    channels: int
    lowest: np.ndarray
    highest: np.ndarray


@dataclass(frozen=True)
class OperatorView:
    """All measurements of one operator.

    Attributes:
        row: Its row of the ledger.
        inputs: Positions of the operators whose results it reads, or names of model inputs.
        macs: Multiply-adds for one sample.
        error, histogram, weights, sums: None if there is nothing of this kind.
        score: dB at the outputs when only this operator is quantized. None if not measured.
        seconds: Time of its kernel. None if not measured, or if it is part of another operator's
            kernel.
        peak: Share of the integer peak that its kernel reaches. None if not measured, or if it sums
            no products of integers.
    """

    row: LedgerRow
    inputs: tuple[int | str, ...] = ()
    macs: int = 0
    error: CompareRow | None = None
    histogram: DrawnHistogram | None = None
    weights: WeightRanges | None = None
    sums: AccumulatorRow | None = None
    score: float | None = None
    seconds: float | None = None
    peak: float | None = None


@dataclass(frozen=True, eq=False)
class SampleView:
    """One sample: its position in the data, dB at the worst output, and its image inputs, (H,
    W, 3) uint8.
    """

    index: int
    sqnr: float
    images: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, eq=False)
class Suggestion:
    """Operators to keep in float, and dB at the outputs before and after."""

    names: tuple[str, ...]
    before: float
    after: float
    mapping: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Score:
    """The user's metric of both models, on all `samples` of the data."""

    name: str
    floating: float
    integer: float
    samples: int


@dataclass(frozen=True, eq=False)
class OtherView:
    """Another integer module of the same float model, on the same samples."""

    ledger: Ledger
    compare: CompareReport
    size: int
    score: Score | None = None


@dataclass(frozen=True)
class CommandWords:
    """The words of a command line that make a report's commands ready to be pasted.

    Attributes:
        model, qmodel: The files.
        data: The data, with `--preprocess` for pictures.
        library: The file that is proposed for the compiled model.
        is_written: Whether the quantized module's file exists.
    """

    model: str = "MODEL"
    qmodel: str = "QMODEL"
    data: str = "DATA"
    library: str = "model.so"
    is_written: bool = True


@dataclass(frozen=True, eq=False)
class ReportData:
    """What a report shows.

    Attributes:
        operators: In the order of the ledger.
        sizes: Bytes of the constants of the float and the integer module.
        latencies: Times of "float", "int8" and "other", if measured.
        no_ranking: Why there is no `ranking`.
        other: None if there is no other module to compare with.
        words: Of the commands on the page.
    """

    title: str
    ledger: Ledger
    operators: tuple[OperatorView, ...]
    compare: CompareReport
    sizes: tuple[int, int]
    samples: tuple[SampleView, ...]
    findings: tuple[Finding, ...] = ()
    score: Score | None = None
    latencies: Mapping[str, Latency] = field(default_factory=dict)
    sums: AccumulatorReport | None = None
    ranking: SensitivityReport | None = None
    no_ranking: str = ""
    suggestion: Suggestion | None = None
    other: OtherView | None = None
    words: CommandWords = CommandWords()

    @property
    def shares(self) -> dict[str, float]:
        """The shares of operators and of multiply-adds on integers."""
        quantized = [view for view in self.operators if view.row.quantized]
        macs = sum(view.macs for view in self.operators)
        shares = {"operators": len(quantized) / max(len(self.operators), 1)}
        if macs:
            shares["multiply-adds"] = sum(view.macs for view in quantized) / macs
        return shares


@dataclass(frozen=True)
class ReportSettings:
    """What is measured in addition to the errors. See `relayquant.report`."""

    metric: Metric | None = None
    latency: bool = False
    other: tvm.IRModule | None = None
    samples: int = 32
    rank: bool = True
    backend: BackendConfig | str | None = None
    title: str = ""
    words: CommandWords = CommandWords()


def collect_report(
    mod: tvm.IRModule,
    qmod: tvm.IRModule,
    dataset: Any,
    params: Mapping[str, Any] | None,
    settings: ReportSettings,
    callbacks: CallbackList,
) -> ReportData:
    """Measure what a report shows. See `relayquant.report`."""
    run = callbacks.run_stage
    canonical, quantized = align_modules(mod, qmod, params)
    ledger = read_ledger(quantized)
    data = open_dataset(follow_state(canonical, dataset), describe_inputs(canonical))
    # Copies, because the data set may reuse the memory of its batches.
    batches = [
        {name: array.copy() for name, array in batch.items()}
        for batch in take_samples(data, settings.samples)
    ]
    shown = open_dataset(batches, data.inputs)
    sampler = Sampler(len(batches))
    load_module = bind_loader(shown, compile_draft)

    def count(task: str) -> Iterator[Batch]:
        return callbacks.follow(task, shown, shown.length, "batch")

    compared = run(
        "compare", compare_modules, canonical, quantized, count("compare"), load_module, sampler
    )
    interface = Interface.of(quantized)
    integers = [interface.to_inputs(batch) for batch in shown]
    sums = run("accumulators", measure_sums, quantized, integers)
    ranking, suggestion, no_ranking = None, None, "It was not asked for."
    if settings.rank:
        try:
            backend = find_backend(quantized, settings.backend)
        except ConfigError as error:
            no_ranking = str(error)
        else:
            prepared = run("calibrate", recalibrate, mod, params, shown, ledger, backend)
            ranking = sensitivity(prepared, shown, samples=8, callbacks=callbacks.callbacks)
            suggestion = run("suggest", suggest_float, ranking, shown)
            # With ranges of effort "fast" it must end above the module that there is already.
            if suggestion and suggestion.after < compared.agreement.sqnr + WORTHWHILE:
                suggestion = None
    beside = None if settings.other is None else align_modules(mod, settings.other, params)
    latencies: Mapping[str, Latency] = {}
    times: Mapping[str, tuple[float, float | None]] = {}
    load_deployed = bind_loader(data, compile_draft)
    if settings.latency:
        built = run("compile", Deployed.build, quantized)
        other = None if beside is None else beside[1]
        runs = compile_runs(canonical, built, other, next(iter(shown)))
        latencies = run("latency", time_executables, runs)
        times = run("profile", time_operators, built, runs["int8"][1])
        load_deployed = built.load
    metric, score, view = settings.metric, None, None
    if metric is not None:
        score = run("metric", apply_to_data, metric, canonical, quantized, data, load_deployed)
    if beside is not None:
        batches = count("compare the other")
        compared_other = run("compare", compare_modules, *beside, batches, load_module)
        view = view_other(beside, compared_other, metric, data)
    findings = run("check data", lint, mod, params, shown)
    return ReportData(
        settings.title,
        ledger,
        view_operators(canonical, quantized, ledger, compared, sampler, sums, ranking, times),
        compared,
        (count_constant_bytes(canonical), count_constant_bytes(quantized)),
        tuple(find_worst_samples(compared.outputs, shown)),
        tuple(found for found in findings if found.severity is not Severity.INFO),
        score,
        latencies,
        sums,
        ranking,
        no_ranking,
        suggestion,
        view,
        settings.words,
    )


def compile_runs(
    canonical: tvm.IRModule,
    built: Deployed,
    other: tvm.IRModule | None,
    batch: Mapping[str, np.ndarray],
) -> dict[str, tuple[Any, list[np.ndarray]]]:
    """Compile "float", "int8" and, if there is one, "other": name -> (executable, inputs of a
    batch).
    """
    runs = {"float": (compile(canonical), order_inputs(canonical, batch))}
    modules = {"int8": (built.mod, built.executable)}
    if other is not None:
        modules["other"] = other, compile(other)
    for name, (module, executable) in modules.items():
        integers = Interface.of(module).to_inputs(batch)
        runs[name] = executable, order_inputs(module, integers)
    return runs


def view_other(
    modules: tuple[tvm.IRModule, tvm.IRModule],
    compared: CompareReport,
    metric: Metric | None,
    data: Dataset,
) -> OtherView:
    """Collect what is shown of a second integer module. `modules`: the float module and it,
    aligned.
    """
    canonical, other = modules
    score = None
    if metric is not None:
        score = apply_to_data(metric, canonical, other, data, bind_loader(data, compile_draft))
    return OtherView(read_ledger(other), compared, count_constant_bytes(other), score)


def view_operators(
    canonical: tvm.IRModule,
    quantized: tvm.IRModule,
    ledger: Ledger,
    compared: CompareReport,
    sampler: Sampler,
    sums: AccumulatorReport,
    ranking: SensitivityReport | None,
    times: Mapping[str, tuple[float, float | None]],
) -> tuple[OperatorView, ...]:
    """Collect the measurements of each operator, in the order of the ledger."""
    graph = Graph(canonical)
    scores = {row.name: row.score for row in ranking.rows} if ranking else {}
    errors = {row.name: row for row in compared.rows}
    sources = find_sources(graph, Graph(quantized), ledger.rows)
    return tuple(
        OperatorView(
            row,
            inputs,
            count_row_macs(graph, row),
            errors.get(row.name),
            sampler.build_histogram(row),
            find_weight_ranges(graph, row),
            sums.row(row.name),
            scores.get(row.name),
            *times.get(row.name, (None, None)),
        )
        for row, inputs in zip(ledger.rows, sources, strict=True)
    )


class Sampler:
    """Keeps some elements of every value while `compare_modules` runs."""

    def __init__(self, batches: int) -> None:
        self.kept = max(SHOWN_ELEMENTS // max(batches, 1), 1)
        self.values: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def __call__(self, row: LedgerRow, expected: np.ndarray, real: np.ndarray) -> None:
        """Same interface as `relayquant.analysis.compare.Watch`."""
        # Drawn at random, because a fixed step could always hit the same channel.
        places = np.random.default_rng(0).integers(max(expected.size, 1), size=self.kept)
        places = slice(None) if expected.size <= self.kept else places
        pair = (a.reshape(-1)[places].astype("float32") for a in (expected, real))
        self.values.setdefault(row.name, []).append(tuple(pair))  # pyright: ignore[reportArgumentType]

    def build_histogram(self, row: LedgerRow) -> DrawnHistogram | None:
        """Build the histogram of a value. None if the value was not seen or has no finite
        element.
        """
        pairs = self.values.get(row.name)
        if not pairs:
            return None
        floating, integer = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        floating, integer = floating[np.isfinite(floating)], integer[np.isfinite(integer)]
        chosen = find_range(row)
        ends = [*(chosen or ()), *(f(a) for a in (floating, integer) if a.size for f in (min, max))]
        if not ends:
            return None
        low, high = float(min(ends)), float(max(ends))
        high = high if high > low else low + max(abs(low), 1.0) * 1e-3
        counts = (np.histogram(array, BINS, (low, high))[0] for array in (floating, integer))
        return DrawnHistogram(low, high, *counts, chosen)


def find_range(row: LedgerRow) -> tuple[float, float] | None:
    """Return the range that the result of an operator can represent, in the units of the float
    model.
    """
    if not row.scale or row.dtype not in INTEGER_LIMITS:
        return None
    low, high = ((q - row.zero_point[0]) * row.scale[0] for q in INTEGER_LIMITS[row.dtype])
    return float(low), float(high)


def recalibrate(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    data: Dataset,
    ledger: Ledger,
    backend: BackendConfig,
) -> PreparedModel:
    """Calibrate the model again with effort "fast" and the same operators in float."""
    mapping = default_mapping(backend, Effort.FAST)
    prepared = prepare(
        mod, params, data, qconfig_mapping=mapping, backend=backend, effort=Effort.FAST
    )
    floating = {row.name for row in ledger.floating}
    names = [op.name for op in prepared.plan.operators if op.quantized and op.name in floating]
    if names:
        mapping = add_lines(prepared, dict.fromkeys(names), mapping)
        prepared = prepare(
            mod, params, data, qconfig_mapping=mapping, backend=backend, effort=Effort.FAST
        )
    return calibrate(prepared, data)


def suggest_float(ranking: SensitivityReport, data: Dataset) -> Suggestion | None:
    """Find the fewest of the worst operators that gain `WORTHWHILE` dB in float, as measured.

    The number doubles from 1, up to `MOST_PUT_BACK` and to a quarter of all. None if that is not
    enough.
    """
    if not ranking.rows:
        return None
    simulation = Simulation(ranking.prepared, take_samples(data, ranking.samples))
    operators = find_rounding_operators(ranking.prepared)
    names = [row.name for row in ranking.rows]
    count = 1
    while count <= min(MOST_PUT_BACK, max(len(names) // 4, 1)):
        put_back = names[:count]
        after = simulation.score([op for op in operators if op.name not in put_back])
        if after >= ranking.score + WORTHWHILE:
            mapping = ranking.to_mapping(count).to_dict()
            return Suggestion(tuple(put_back), ranking.score, after, mapping)
        count *= 2
    return None


@dataclass(frozen=True, eq=False)
class Deployed:
    """An integer module compiled for this machine, once for all runs and measurements."""

    mod: tvm.IRModule
    executable: Any
    sites: tuple[KernelSite, ...]

    @staticmethod
    def build(mod: tvm.IRModule) -> Deployed:
        return Deployed(mod, *compile_with_sites(mod, compile))

    def load(self, _mod: tvm.IRModule) -> Machine:
        """Load this module. Same interface as `LoadModule`, for no other module."""
        return Machine(self.executable)


def time_executables(
    runs: Mapping[str, tuple[Any, Sequence[np.ndarray]]],
) -> dict[str, Latency]:
    """Time one run of each executable on its inputs, in turns."""
    candidates = {
        name: partial(Machine(executable).vm["main"], *map(as_tensor, inputs))
        for name, (executable, inputs) in runs.items()
    }
    return measure_latency(candidates, ROUNDS)


def time_operators(
    built: Deployed, inputs: Sequence[np.ndarray]
) -> dict[str, tuple[float, float | None]]:
    """Map each operator to (seconds, share of the integer peak of all cores) of its kernels."""
    ledger = read_ledger(built.mod)
    peak = measure_peak(resolve_target(None)) * count_cores()
    found: dict[str, list[OperatorTime]] = {}
    profile = profile_executable(built.executable, built.sites, built.mod, inputs)
    for time in profile.operators:
        row = find_row(ledger, time.value)
        if row is not None:
            found.setdefault(row.name, []).append(time)
    result = {}
    for name, times in found.items():
        seconds, macs = sum(t.seconds for t in times), sum(t.macs for t in times)
        row = ledger.row(name)
        is_integer = macs and seconds and row is not None and row.quantized
        result[name] = seconds, 2 * macs / seconds / 1e9 / peak if is_integer else None
    return result


def find_row(ledger: Ledger, value: str) -> LedgerRow | None:
    """Find the operator that a value of the integer module belongs to.

    A value such as "name.sum" belongs to the operator of "name".
    """
    while value:
        row = ledger.row(value)
        if row is not None:
            return row
        value = value.rpartition(".")[0]
    return None


def apply_to_data(
    metric: Metric,
    mod: tvm.IRModule,
    quantized: tvm.IRModule,
    data: Dataset,
    load_module: LoadModule,
) -> Score:
    """Apply the user's metric to both models, on all of the data."""
    floating, integer = EagerModule(mod), load_module(quantized)
    interface = Interface.of(quantized)
    expected, got, samples = [], [], 0
    for batch in data:
        samples += count_samples(batch)
        expected.append(floating.run("main", order_inputs(mod, batch)))
        inputs = order_inputs(quantized, interface.to_inputs(batch))
        got.append(interface.to_real(integer.run("main", inputs)))
    return Score(
        name_metric(metric),
        apply_metric(metric, expected, expected),
        apply_metric(metric, expected, got),
        samples,
    )


def find_sources(
    graph: Graph, integers: Graph, rows: Sequence[LedgerRow]
) -> list[tuple[int | str, ...]]:
    """Map each row to the positions of the rows that its values read, or to names of inputs.

    An operator that quantization inserted after an input exists only in the integer module. It is
    placed between the input and its readers.
    """
    owner = {name: i for i, row in enumerate(rows) for name in (*row.values, row.name)}
    params = {param.name for param in graph.func.params}
    found: dict[str, tuple[int | str, ...]] = {}  # value -> its source
    for binding in graph.bindings:
        name, names = binding.var.name, [var.name for var in free_vars(binding.value)]
        read = dict.fromkeys(source for one in names for source in found.get(one, (one,)))
        found[name] = (owner[name],) if name in owner else tuple(read)
    result: list[tuple[int | str, ...]] = []
    behind: dict[int | str, int] = {}  # input -> the row that was inserted after it
    for i, row in enumerate(rows):
        names = row_names(graph, row)
        inside = [graph.values[graph.vars[n]] for n in names if graph.vars[n] in graph.values]
        if not names and row.name in integers.vars:
            value = integers.values.get(integers.vars[row.name])
            inside = [] if value is None else [value]
            behind.update((v.name, i) for one in inside for v in free_vars(one))
        read = (var.name for value in inside for var in free_vars(value))
        sources = (source for name in read for source in found.get(name, (name,)))
        known = (s for s in sources if s != i and (isinstance(s, int) or s in params))
        result.append(tuple(dict.fromkeys(known)))
    return [
        tuple(source if behind.get(source, i) == i else behind[source] for source in sources)
        for i, sources in enumerate(result)
    ]


def row_names(graph: Graph, row: LedgerRow) -> list[str]:
    """Names of the float model's values inside an operator, each once."""
    return [name for name in dict.fromkeys((*row.values, row.name)) if name in graph.vars]


def row_calls(graph: Graph, row: LedgerRow) -> Iterable[Any]:
    """Calls of the float model inside an operator."""
    calls = (graph.call_of(graph.vars[name]) for name in row_names(graph, row))
    return [call for call in calls if call is not None]


def count_row_macs(graph: Graph, row: LedgerRow) -> int:
    return sum(map(count_macs, row_calls(graph, row)))


def find_weight_ranges(graph: Graph, row: LedgerRow) -> WeightRanges | None:
    """Return the weight ranges of the constant that a convolution or product reads. None
    without one.
    """
    for call in row_calls(graph, row):
        weight = constant_value(call.args[1]) if count_macs(call) else None
        if weight is None or not weight.size:
            continue
        layout = str(getattr(call.attrs, "kernel_layout", "")) if call.attrs else ""
        axis = layout.index("O") if "O" in layout else -1
        channels = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).astype("float32")
        parts = np.array_split(channels, min(len(channels), SHOWN_CHANNELS))
        lowest, highest = (np.array([f(part) for part in parts]) for f in (np.min, np.max))
        return WeightRanges(len(channels), lowest, highest)
    return None


def find_worst_samples(gaps: Sequence[OutputGap], data: Dataset) -> list[SampleView]:
    """Find the samples with the largest error of the integer model, the worst first."""
    each = [gap.each for gap in gaps]
    counts = [count_samples(batch) for batch in data]
    if not each or any(len(rated) != sum(counts) for rated in each):
        return []  # an output whose first axis does not count samples
    rated = np.min(np.array(each), axis=0)
    worst = [int(i) for i in np.argsort(rated, kind="stable")[:WORST_SAMPLES]]
    starts = np.cumsum([0, *counts])
    images: dict[int, tuple[np.ndarray, ...]] = {}
    for batch, start, count in zip(data, starts, counts, strict=False):
        for index in worst:
            if start <= index < start + count:
                samples = (a[index - start] for a in batch.values() if a.ndim == 4)
                drawn = map(draw_image, samples)
                images[index] = tuple(image for image in drawn if image is not None)
    return [SampleView(index, float(rated[index]), images.get(index, ())) for index in worst]


def draw_image(array: np.ndarray) -> np.ndarray | None:
    """Convert (C, H, W) or (H, W, C) with 1 or 3 channels to an (H, W, 3) uint8 image.

    None for any other shape. The user's preprocessing is not known, so the range of the values
    becomes black to white.
    """
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in (1, 3) or min(array.shape[:2]) < 8:
        return None
    step = -(-max(array.shape[:2]) // 96)
    image = np.nan_to_num(array[::step, ::step].astype("float64"))
    low, high = image.min(), image.max()
    scaled = (image - low) / max(high - low, 1e-30) * 255
    return np.broadcast_to(scaled.astype("uint8"), (*scaled.shape[:2], 3))
