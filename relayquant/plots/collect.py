"""Float module, integer module and data -> everything that a report shows, as plain values.

One pass over the samples gives the error of every value and the elements of its histogram. The rest
comes from functions of `relayquant.analysis`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import tvm

from relayquant.analysis.accumulators import measure_sums
from relayquant.analysis.compare import CompareReport, compare_modules
from relayquant.analysis.linting.finding import Severity
from relayquant.analysis.linting.lint import lint
from relayquant.analysis.loader import bind_loader
from relayquant.analysis.outputs import Interface, order_inputs
from relayquant.analysis.sensitivity import (
    Metric,
    SensitivityReport,
    Simulation,
    add_lines,
    apply_metric,
    find_rounding_operators,
    name_metric,
)
from relayquant.analysis.speed.latency import Latency
from relayquant.base.events import CallbackList
from relayquant.base.runtime import LoadModule
from relayquant.codegen.eager import EagerModule
from relayquant.config import BackendConfig, Effort
from relayquant.data import Batch, Dataset, count_samples, open_dataset, take_samples
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError
from relayquant.flow.evaluation import align_modules, sensitivity
from relayquant.flow.steps import calibrate, prepare
from relayquant.ir.ledger import Ledger, read_ledger
from relayquant.ir.rewrite.constants import count_constant_bytes
from relayquant.plots.operator_views import Sampler, view_operators
from relayquant.plots.report_data import (
    OtherView,
    ReportData,
    ReportSettings,
    Score,
    Suggestion,
)
from relayquant.plots.times import Deployed, compile_runs, time_executables, time_operators
from relayquant.plots.worst_samples import find_worst_samples
from relayquant.stages.backends import find_backend
from relayquant.stages.compilation import compile_draft
from relayquant.stages.effort import default_mapping
from relayquant.stages.prepared import PreparedModel
from relayquant.stages.streams import follow_state

#: a suggestion must gain this many dB, with at most this number of operators in float
WORTHWHILE, MOST_PUT_BACK = 3.0, 8


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


def recalibrate(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    data: Dataset,
    ledger: Ledger,
    backend: BackendConfig,
) -> PreparedModel:
    """Calibrate the model again with effort "fast" and the same operators in float."""
    mapping = default_mapping(backend, Effort.FAST)
    build = partial(prepare, mod, params, data, backend=backend, effort=Effort.FAST)
    prepared = build(qconfig_mapping=mapping)
    floating = {row.name for row in ledger.floating}
    names = [op.name for op in prepared.plan.operators if op.quantized and op.name in floating]
    if names:
        prepared = build(qconfig_mapping=add_lines(prepared, dict.fromkeys(names), mapping))
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
