"""The data flow on one page: load -> prepare -> annotate -> simulate -> calibrate -> convert ->
expand -> fold -> lower.

The only module that knows all stages. Each stage takes values and gives new ones; none edits its
input.
"""

from __future__ import annotations

import concurrent.futures as futures
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tvm
from tvm.ir import Call

from relayquant.analysis import (
    AccumulatorReport,
    CompareReport,
    VerifyReport,
    compare_modules,
    find_min_scales,
    measure_accumulators,
    verify_module,
)
from relayquant.analysis.load import bind_loader
from relayquant.annotation import annotate, review_plan
from relayquant.arguments import check_arguments
from relayquant.backends import resolve_backend
from relayquant.calibration.distribute import WORKER_TIMEOUT
from relayquant.calibration.observers import Fixed
from relayquant.calibration.phases import Order
from relayquant.calibration.runner import pick_parameters
from relayquant.calibration.weights.fit import BiasCorrection, FitSettings
from relayquant.codegen import make_pipeline
from relayquant.config import BackendConfig, OverflowBound, QConfigMapping
from relayquant.conversion import (
    build_reference,
    expand_affine,
    fold_qnn,
    realize_qnn,
    set_interface,
)
from relayquant.conversion.partial import (
    find_known,
    fix_parameters,
    has_quantized_values,
    realize_quantized,
)
from relayquant.datasets import open_dataset
from relayquant.datasets.inputs import describe_inputs
from relayquant.dialect.legality import Stage, check_stage
from relayquant.eager import EagerModule
from relayquant.effort import (
    EFFORTS,
    Effort,
    apply_effort,
    choose_order,
    describe_choices,
    describe_observers,
    resolve_effort,
)
from relayquant.equalization.cross_layer import add_exponents, read_exponents, scale_layers
from relayquant.equalization.equalize import equalize_inputs, find_products, measure_channels
from relayquant.equalization.layers import equalize_planned
from relayquant.errors import ConfigError, ModelError, format_count, suggest_name, warn_user
from relayquant.events import Callback, CallbackList, StageEvent
from relayquant.kernels.isa.target import host_config, resolve_target
from relayquant.ledger import InterfaceValue, Ledger, find_ledger, read_ledger
from relayquant.plan import Plan
from relayquant.preparation import prepare_module
from relayquant.preparation.bias import add_biases
from relayquant.prepared import PreparedModel
from relayquant.qtypes import INTEGER_LIMITS, QParams
from relayquant.rewrite import Graph
from relayquant.rewrite.entry import MAIN, find_entry, name_main, rename_function
from relayquant.rewrite.graph import call_name, iterate_results, result_expr, tensor_dtype
from relayquant.runtime import stop_spinning
from relayquant.simulation import build_calibration_graph

T = TypeVar("T")

#: times that calibration is repeated to make sums fit; each round of scales changes the rounding
ACCUMULATOR_ROUNDS = 4


def quantize_once(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    dataset: Any,
    *,
    backend: BackendConfig | str | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    calibration: Any = None,
    effort: Effort | str = Effort.BALANCED,
    input_dtypes: Mapping[str | int, str] | None = None,
    output_dtypes: Mapping[str | int, str] | None = None,
    parameters: Mapping[str, QParams] | None = None,
    callbacks: Iterable[Callback] | Callback = (),
    strict: bool = False,
    checkpoint: str | Path | None = None,
    executor: futures.Executor | None = None,
    watch: Callable[[PreparedModel, Any], Any] | None = None,
) -> tuple[PreparedModel, tvm.IRModule]:
    """All stages, once: the calibrated model and its integer module.

    Arguments and errors as for `relayquant.quantize`, which looks at the result as well. `watch`
    gives what calibration reads in place of the data set.
    """
    events = CallbackList.of(callbacks)
    prepared = prepare(
        mod,
        params,
        qconfig_mapping,
        backend,
        dataset=dataset,
        effort=effort,
        input_dtypes=input_dtypes,
        output_dtypes=output_dtypes,
        parameters=parameters,
        callbacks=events,
        strict=strict,
    )
    calibrated = calibrate(
        prepared,
        dataset if watch is None else watch(prepared, dataset),
        calibration=calibration,
        callbacks=events,
        checkpoint=checkpoint,
        executor=executor,
    )
    reference = run_stage(events, "convert", lambda: convert_to_reference(calibrated))
    return calibrated, run_stage(events, "lower", lambda: lower(reference, prepared.backend))


@check_arguments
def prepare(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    backend_config: BackendConfig | str | None = None,
    *,
    dataset: Any = None,
    effort: Effort | str = Effort.BALANCED,
    input_dtypes: Mapping[str | int, str] | None = None,
    output_dtypes: Mapping[str | int, str] | None = None,
    parameters: Mapping[str, QParams] | None = None,
    callbacks: Iterable[Callback] | Callback = (),
    strict: bool = False,
) -> PreparedModel:
    """Canonical float module, plan and calibration graph of a model.

    With a `dataset` (see `quantize`), inputs whose channels differ much in range are scaled, and
    the weights they meet inversely: the same function, but one that loses less to 8 bits. So are,
    except with effort "fast", channels between two layers; and quantized operators without a bias
    get one of zeros, which calibration corrects.

    Raises:
        ModelError: the model is not one this package can work with.
        ConfigError: a line of the mapping selects nothing; or with `strict`: the mapping asks for
            what the backend cannot do, has a line that decides nothing, or quantizes nothing. These
            are warnings else.
    """
    prepared = prepare_quietly(
        mod,
        params,
        qconfig_mapping,
        backend_config,
        dataset=dataset,
        effort=effort,
        input_dtypes=input_dtypes,
        output_dtypes=output_dtypes,
        parameters=parameters,
        callbacks=callbacks,
    )
    review_plan(
        prepared.mod,
        prepared.plan,
        prepared.mapping or QConfigMapping(),
        prepared.backend,
        strict=strict,
        is_partial=has_quantized_values(prepared.mod),
    )
    return prepared


def prepare_quietly(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    backend_config: BackendConfig | str | None = None,
    *,
    dataset: Any = None,
    effort: Effort | str = Effort.BALANCED,
    input_dtypes: Mapping[str | int, str] | None = None,
    output_dtypes: Mapping[str | int, str] | None = None,
    parameters: Mapping[str, QParams] | None = None,
    callbacks: Iterable[Callback] | Callback = (),
) -> PreparedModel:
    """`prepare` without a word on what the mapping asks for in vain: for mappings that are not the
    user's own.
    """
    events = CallbackList.of(callbacks)
    backend = resolve_backend(backend_config)
    level = resolve_effort(effort)
    mapping = default_mapping(backend, level) if qconfig_mapping is None else qconfig_mapping
    canonical = run_stage(events, "prepare", lambda: prepare_module(mod, params))
    is_quantized = has_quantized_values(canonical)
    if is_quantized:
        if find_ledger(canonical) is not None:
            raise ModelError(
                "The module was quantized by relayquant and cannot be quantized again. Start from "
                "the float model, or from what load gave for a model quantized elsewhere."
            )
        canonical = realize_quantized(canonical, backend)
    inputs, outputs = describe_interface(canonical, input_dtypes or {}, output_dtypes or {})
    if dataset is not None:
        kept = {value.name for value in inputs if value.is_integer}
        canonical = run_stage(events, "equalize", lambda: equalize(canonical, dataset, kept))
    wanted = {value.name for value in outputs if value.is_integer}
    plan = run_stage(events, "annotate", lambda: annotate(canonical, backend, mapping, wanted))
    known = find_known(canonical) if is_quantized else {}
    plan = fix_parameters(canonical, plan, known, parameters, Fixed)
    if EFFORTS[level].equalizes_layers and dataset is not None:
        canonical = run_stage(
            events, "equalize layers", lambda: equalize_planned(canonical, plan, dataset)
        )
    if EFFORTS[level].fit.bias is not BiasCorrection.NONE:
        canonical, plan = add_planned_biases(
            canonical, plan, mapping, lambda mod: annotate(mod, backend, mapping, wanted), backend
        )
    graph = run_stage(events, "simulate", lambda: build_calibration_graph(canonical, plan, backend))
    check_stage(graph.mod, Stage.SIMULATED, with_integers=is_quantized)
    return PreparedModel(
        canonical,
        plan,
        graph,
        backend,
        effort=level.value,
        inputs=inputs,
        outputs=outputs,
        mapping=mapping,
    )


def add_planned_biases(
    canonical: tvm.IRModule,
    plan: Plan,
    mapping: QConfigMapping,
    make_plan: Callable[[tvm.IRModule], Plan],
    backend: BackendConfig,
) -> tuple[tvm.IRModule, Plan]:
    """(module, plan) with a bias at every operator whose weights are fitted, for its correction;
    without it where a line of the mapping is for the pattern without a bias, and where the backend
    has no row for an operator with one.
    """
    selected = {key for rule in mapping.rules for key in (rule.key, rule.object_type)}
    skip = {row.name for row in plan.operators if row.pattern and row.pattern in selected}
    fixed = {group.key: group for group in plan.groups if group.is_fixed}

    def list_quantized(plan: Plan) -> dict[str, str]:
        return {row.name: row.rule for row in plan.operators if row.quantized}

    before = list_quantized(plan)
    while True:
        changed = add_biases(canonical, plan, backend, skip)
        if changed is canonical:
            return canonical, plan
        new = make_plan(changed)
        after = list_quantized(new)
        lost = {name for name, rule in before.items() if after.get(name) != rule}
        if lost <= skip:
            groups = tuple(fixed.get(group.key, group) for group in new.groups)
            return changed, dataclasses.replace(new, groups=groups)
        skip |= lost


def describe_interface(
    canonical: tvm.IRModule,
    input_dtypes: Mapping[str | int, str],
    output_dtypes: Mapping[str | int, str],
) -> tuple[tuple[InterfaceValue, ...], tuple[InterfaceValue, ...]]:
    """(inputs, outputs) of main, with the integer dtypes asked for, by name or index from 0.

    Raises:
        ConfigError: there is no such input or output, or no such integer dtype.
    """
    graph = Graph(canonical)
    inputs = [(param.name, tensor_dtype(param)) for param in graph.func.params]
    outputs = [
        (expr.name if isinstance(expr, tvm.relax.Var) else f"output {i}", tensor_dtype(expr))
        for i, expr in enumerate(iterate_results(result_expr(graph)))
    ]
    return (
        name_dtypes("input_dtypes", input_dtypes, inputs),
        name_dtypes("output_dtypes", output_dtypes, outputs),
    )


def name_dtypes(
    what: str, dtypes: Mapping[str | int, str], values: Sequence[tuple[str, str]]
) -> tuple[InterfaceValue, ...]:
    """All (name, dtype) of an interface, with the integer dtypes asked for by name or index.

    Raises:
        ConfigError: there is no such value, or no such integer dtype, or one is named twice.
    """
    names = [name for name, _ in values]
    asked: dict[str, str] = {}
    for key, dtype in dtypes.items():
        name = key
        if isinstance(key, int):
            if not 0 <= key < len(names):
                raise ConfigError(f"{what} has index {key}; allowed: 0 to {len(names) - 1}.")
            name = names[key]
        if name not in names:
            raise ConfigError(f"{what} has no {name!r}. {suggest_name(name, names)}")
        if dtype not in INTEGER_LIMITS:
            raise ConfigError(f"{what}[{key!r}]: {suggest_name(dtype, INTEGER_LIMITS)}")
        if name in asked:
            raise ConfigError(f"{what} names {name!r} twice: by name and by index {key!r}.")
        asked[name] = dtype
    return tuple(InterfaceValue(name, dtype, asked.get(name, "")) for name, dtype in values)


def equalize(canonical: tvm.IRModule, dataset: Any, kept: Collection[str] = ()) -> tvm.IRModule:
    """A prepared module with the channels of its inputs brought to one range, where that is worth
    it; `kept` stay.
    """
    data = open_dataset(dataset, describe_inputs(canonical))  # what is no data set is told here
    names = {name: users for name, users in find_products(canonical).items() if name not in kept}
    if not names:
        return canonical
    return equalize_inputs(canonical, measure_channels(data, names))


def default_mapping(backend: BackendConfig, effort: Effort) -> QConfigMapping:
    """Every operator as the backend says, observed as the level of effort says; without lines if
    the backend says nothing.
    """
    qconfig = backend.default_qconfig
    mapping = QConfigMapping()
    return mapping if qconfig is None else mapping.set_global(apply_effort(qconfig, effort))


@check_arguments
def calibrate(
    prepared: PreparedModel,
    dataset: Any,
    *,
    calibration: Any = None,
    order: Order | None = None,
    fit: FitSettings | None = None,
    callbacks: Iterable[Callback] | Callback = (),
    checkpoint: str | Path | None = None,
    executor: futures.Executor | None = None,
    worker_timeout: float | None = WORKER_TIMEOUT,
) -> PreparedModel:
    """The prepared model with the parameters of every quantized value, picked from data.

    Where the backend's accumulators are narrow, the scales of weights (of the second factor of a
    product of two activations) are raised until the sums fit, as `Accumulator.bound` says, and
    calibration starts again with them; a warning names what still does not fit.
    Memory does not grow with the data: statistics stream, and values that later steps need wait on
    disk. The result depends on neither `checkpoint` nor `executor`, nor on the number of workers,
    bit for bit, as long as all processors are of one kind.

    Args:
        prepared: The prepared model; not changed. Parameters that it has already do not count.
        dataset: See `quantize`; read once (and again when scales are raised).
        calibration: Observer or callable for all activations.
        order: See `Order`; as the level of effort says when None, but topological where a callable
            picks parameters.
        fit: How weights are rounded and biases corrected; as the level of effort says when None.
        callbacks: See `relayquant.events.Callback`.
        checkpoint: A folder. A calibration that was interrupted or killed goes on from there when
            it is started again with the same arguments; the data set is then read again to see that
            it is the same, and nothing that was computed is computed twice. Deleted in the end. It
            holds the values that wait, about (largest activations alive at once) x samples x 4
            bytes; without it they are in the system's temporary directory.
        executor: Any `concurrent.futures.Executor`: a ProcessPoolExecutor whose processes are
            spawned, `dask.distributed.Client(...).get_executor()`. Its workers run the model on
            shards of the data; they must see the folder, so across machines name a `checkpoint` on
            a file system that they share. Callables pick parameters in this process.
        worker_timeout: Seconds, a day unless given. When no worker has returned anything for so
            long, they hang, and that is an error; the processes of a ProcessPoolExecutor, which
            nobody could leave any more, are killed. None waits for ever. Batches go out in shards,
            at most 32 in each step: it is to be longer than one shard takes, and than a cluster
            needs to start.

    Raises:
        DataError: the data set is empty or does not fit the model, or is not that of the
            checkpoint.
        ConfigError: `calibration` is no observer or callable, or picked something wrong; or the
            folder belongs to another calibration (the message says what differs).
        WorkerError: workers died, hang, or failed again and again; names the batches.
    """
    events = CallbackList.of(callbacks)
    effort = Effort(prepared.effort)
    fit = fit or EFFORTS[effort].fit
    order = order or choose_order(prepared.plan, calibration, effort)
    choices = describe_choices(prepared.plan, calibration, fit)
    constants = prepared.graph.constants
    bare = [fit.operator for fit in prepared.graph.fits if f"{fit.operator}:bias" not in constants]
    if bare and fit.bias is not BiasCorrection.NONE:
        choices["weights"] += f" (not of {format_count(len(bare), 'operator')} without a bias)"
    if equalized := read_exponents(prepared.mod):
        choices["equalized"] = f"channels between {format_count(len(equalized), 'pair')} of layers"

    def pick(min_scales: Mapping[str, np.ndarray]) -> PreparedModel:
        result = pick_parameters(
            prepared,
            dataset,
            load_module=EagerModule,
            calibration=calibration,
            order=order,
            callbacks=events,
            fit=fit,
            min_scales=min_scales,
            # Rounds after the first begin with what it found: they are no part of the checkpoint.
            checkpoint=None if min_scales else checkpoint,
            executor=executor,
            worker_timeout=worker_timeout,
        )
        return dataclasses.replace(
            prepared,
            parameters=result.parameters,
            constants=result.constants,
            statistics=result.statistics,
            observers=result.observers,
        )

    calibrated = run_stage(events, "calibrate", lambda: pick({}))
    bounds = {op.accumulator.bound for op in prepared.plan.operators if op.accumulator}
    if bounds - {OverflowBound.NONE}:
        calibrated = run_stage(
            events, "fit accumulators", lambda: fit_accumulators(calibrated, dataset, pick)
        )
    choices |= describe_observers(prepared.plan, calibration, calibrated.observers)
    return dataclasses.replace(calibrated, choices=choices)


def fit_accumulators(
    calibrated: PreparedModel,
    dataset: Any,
    pick: Callable[[Mapping[str, np.ndarray]], PreparedModel],
) -> PreparedModel:
    """Raise scales and calibrate again (`pick`) until the sums fit; warn of those that do not."""
    min_scales: dict[str, np.ndarray] = {}
    for _ in range(ACCUMULATOR_ROUNDS):
        wanted = find_min_scales(calibrated, accumulator_report(calibrated, dataset))
        if not wanted:
            return calibrated
        min_scales |= wanted
        calibrated = pick(min_scales)
    left = find_min_scales(calibrated, accumulator_report(calibrated, dataset))
    if left:
        names = ", ".join(repr(key) for key in left)
        warn_user(
            f"Sums of products still overflow after calibration, where these are a factor: "
            f"{names}. accumulator_report(prepared, dataset) tells by how much; allow larger "
            "scales or use activations of fewer bits.",
        )
    return calibrated


@check_arguments
def accumulator_report(model: PreparedModel | tvm.IRModule, dataset: Any) -> AccumulatorReport:
    """Which sums of products do not fit the accumulators that the backend has, by channel.

    Args:
        model: A calibrated model, or what `quantize` or `lower` returned.
        dataset: As for `quantize`.

    Raises:
        ConfigError: the model is not calibrated.
        DataError: the data does not fit the model.
    """
    integer = model
    if isinstance(model, PreparedModel):
        inner = dataclasses.replace(model, inputs=(), outputs=())
        integer = lower(convert_to_reference(inner), model.backend)
    data = open_dataset(dataset, describe_inputs(integer))
    return measure_accumulators(integer, data, bind_loader(data, compile_draft))


@check_arguments
def convert_to_reference(prepared: PreparedModel) -> tvm.IRModule:
    """The reference form: dequantize - float operator - quantize. Runs on any target.

    Raises:
        ConfigError: the model is not calibrated.
    """
    reference = build_reference(prepared)
    is_finished = find_ledger(prepared.mod) is not None
    check_stage(reference, Stage.REFERENCE, with_integers=is_finished)
    return reference


@check_arguments
def lower(
    reference: tvm.IRModule, backend_config: BackendConfig | str | None = None
) -> tvm.IRModule:
    """The integer module of a reference form: realize, expand, fold.

    The reference form is what `convert_to_reference` gives, or a model that was quantized elsewhere
    as `load` reads it, with its own quantize and dequantize operators.

    Raises:
        ModelError: the module holds no quantized value.
    """
    backend = resolve_backend(backend_config)
    if find_ledger(reference) is None:
        return lower_adopted(reference, backend)
    integer = realize_qnn(reference, backend)
    expanded = expand_affine(integer, backend)
    folded = set_interface(fold_qnn(expanded))
    check_stage(folded, Stage.QNN)
    return folded


def lower_adopted(reference: tvm.IRModule, backend: BackendConfig) -> tvm.IRModule:
    """As `lower`, for a model without a ledger: one that another tool quantized."""
    canonical = prepare_module(reference)
    if not has_quantized_values(canonical):
        raise ModelError(
            "The module holds no quantized value, so there is nothing to lower. Quantize it: "
            "relayquant.quantize(mod, params, dataset)."
        )
    lowered = realize_quantized(canonical, backend)
    check_stage(lowered, Stage.QNN)
    return lowered


@check_arguments
def pipeline(target: Any = None) -> tvm.transform.Pass:
    """The relax pipeline for a target, for `tvm.compile(mod, target, relax_pipeline=...)`.

    A float model is brought into canonical form first (batch norms folded); a quantized one is
    already. The model keeps its name: what was `forward` is called so in the executable.
    """
    lowering = make_pipeline(resolve_target(target))

    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        entry = find_entry(mod)
        if entry is None:
            return lowering(mod)
        named = name_main(mod)
        lowered = lowering(prepare_unbound(named) if is_float_model(named) else named)
        return lowered if entry == MAIN else rename_function(lowered, MAIN, entry)

    return tvm.transform.module_pass(run, opt_level=0, name="relayquant.compile")  # pyright: ignore[reportReturnType]


@check_arguments
def compile(mod: tvm.IRModule, target: Any = None) -> Any:
    """A TVM executable of a quantized or float module.

    Args:
        mod: The module; it is not changed.
        target: None for this machine, a `tvm.target.Target`, a dict, or a string such as
            "llvm -mcpu=cascadelake".

    Raises:
        ConfigError: TVM does not know the target.
    """
    stop_spinning()
    resolved = resolve_target(target)
    return tvm.compile(mod, resolved, relax_pipeline=pipeline(resolved))


def compile_draft(mod: tvm.IRModule) -> Any:
    """An executable for this machine that is run a few hundred times and thrown away.

    LLVM at level 1: on the calibration graph of MobileNet a third less time to compile, and the
    kernels, whose registers and vectors are laid out before LLVM sees them, as fast.
    """
    return compile(mod, {**host_config(), "opt-level": 1})


def prepare_unbound(mod: tvm.IRModule) -> tvm.IRModule:
    """`prepare_module`, in which weights that a frontend left parameters, without values, are
    inputs.
    """
    main = mod[MAIN]
    if "num_input" in (main.attrs or {}) and "params" not in main.attrs:
        bare = main.without_attr("num_input")
        mod = tvm.IRModule({**mod.functions, mod.get_global_var(MAIN): bare}, attrs=mod.attrs)
    return prepare_module(mod)


def is_float_model(mod: tvm.IRModule) -> bool:
    """Whether a module is one that `prepare_module` takes: main in dataflow form, no integer
    operators.
    """
    relax_functions = {
        gv.name_hint: func
        for gv, func in mod.functions_items()
        if isinstance(func, tvm.relax.Function)
    }
    if list(relax_functions) != ["main"]:
        return False
    blocks = relax_functions["main"].body.blocks
    if not all(isinstance(block, tvm.relax.DataflowBlock) for block in blocks):
        return False
    calls = [b.value for block in blocks for b in block.bindings if isinstance(b.value, Call)]
    return not any(call_name(call).startswith("relax.qnn.") for call in calls)


@check_arguments
def verify(mod: tvm.IRModule, inputs: Any, target: Any = None) -> VerifyReport:
    """Compare the module compiled for `target` (one this machine can run) with the numpy reference.

    Integer values must be equal bit for bit, floats within 1e-4 relative.

    Raises:
        DataError: the inputs do not fit the module.
    """
    return verify_module(mod, inputs, lambda module: compile(module, target))


@check_arguments
def compare(
    mod: tvm.IRModule,
    quantized: tvm.IRModule,
    dataset: Any,
    params: Mapping[str, Any] | None = None,
) -> CompareReport:
    """How far every value of a quantized module is from the float model, and where it starts.

    Args:
        mod: The float module, as it was given to `quantize`.
        quantized: What `quantize` made of it.
        dataset: As for `quantize`; a few dozen samples tell enough.
        params: Parameters of the float module, if they are not bound.

    Raises:
        ModelError: the quantized module was not made from this float module.
        DataError: the data does not fit the model.
    """
    read_ledger(quantized)
    canonical, quantized = prepare_module(mod, params), name_main(quantized)
    # Values are compared in the units that they have in the quantized module.
    missing = add_exponents(read_exponents(quantized), read_exponents(canonical), sign=-1)
    canonical = scale_layers(canonical, missing)
    data = open_dataset(dataset, describe_inputs(canonical))
    # The first batch is read: what is wrong with the data shows before anything is compiled.
    return compare_modules(canonical, quantized, data, bind_loader(data, compile_draft))


@check_arguments
def ledger(mod: tvm.IRModule) -> Ledger:
    """What became of every operator of the float model.

    Raises:
        ModelError: the module was not quantized by this package.
    """
    return read_ledger(mod)


def run_stage(events: CallbackList, name: str, run: Callable[[], T]) -> T:
    """Run one stage between its two events."""
    events.on_stage_start(StageEvent(name))
    start = time.perf_counter()
    result = run()
    events.on_stage_end(StageEvent(name, time.perf_counter() - start))
    return result
