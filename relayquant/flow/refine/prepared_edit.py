"""Between the stages: a prepared model is edited, saved to one file, loaded in another process, and
merged.

What `prepare` and `calibrate` give may wait, travel and be put together before
`convert_to_reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.sensitivity import add_lines
from relayquant.base.arguments import check_arguments
from relayquant.base.plain_data import NamedSettings
from relayquant.base.qtypes import QParams, Role
from relayquant.base.storage.archive import Archive, read_archive, write_archive
from relayquant.base.storage.files import reading
from relayquant.base.storage.module_file import parse_module
from relayquant.config import BackendConfig, DTypeConfig, QConfig, QConfigMapping
from relayquant.config.observers import Observer
from relayquant.config.observers.base import call_observer
from relayquant.errors import ConfigError, DataError, format_count
from relayquant.flow.refine.wider_weights import has_wider_weight
from relayquant.ir.ledger import InterfaceValue
from relayquant.ir.plan import OperatorPlan, Plan, SharedQParams
from relayquant.stages.annotation import annotate, review_plan
from relayquant.stages.backends import resolve_backend
from relayquant.stages.calibration.weights.curves import Slopes, ValueCurve, find_curves
from relayquant.stages.calibration.weights.pick import pick_weight_parameters
from relayquant.stages.calibration.weights.ranges import RelativeMSE
from relayquant.stages.conversion.partial import has_quantized_values
from relayquant.stages.prepared import GroupStatistics, PreparedModel
from relayquant.stages.simulation import build_calibration_graph

#: another QConfig for some operators, by name; None is float
Changes = Mapping[str, QConfig | None]

FORMAT = "relayquant.prepared.1"
MODULE = "module.json"


# --- Reviewing ----------------------------------------------------------------------------------


def review_prepared(prepared: PreparedModel, strict: bool) -> None:
    """Warn of what the user's mapping asks for in vain; with `strict` that is an error."""
    mapping, is_partial = prepared.mapping or QConfigMapping(), has_quantized_values(prepared.mod)
    review_plan(
        prepared.mod, prepared.plan, mapping, prepared.backend, strict=strict, is_partial=is_partial
    )


# --- Editing ------------------------------------------------------------------------------------


def replace_plan(prepared: PreparedModel, plan: Plan) -> PreparedModel:
    """The prepared model with an edited plan: `replace_plan(prepared, prepared.plan.replace(key,
    spec=...))`.

    Parameters of groups that are as before are kept. Those of changed weights are picked anew, and
    those of other changed groups too where statistics of an Order.PARALLEL calibration are there;
    else calibrate again.

    Raises:
        ConfigError: the backend cannot run an operator with the new spec.
    """
    changed = {group.key for group in plan.groups if group not in prepared.plan.groups}
    for operator in plan.operators:
        check_operator(plan, operator, prepared.backend, changed)
    graph = build_calibration_graph(prepared.mod, plan, prepared.backend)
    keys = {group.key for group in plan.groups} - changed
    parameters = {key: value for key, value in prepared.parameters.items() if key in keys}
    stale = {f"{op.name}:" for op in plan.operators if changed & set(dict(op.operands).values())}
    constants = {
        key: value
        for key, value in prepared.constants.items()
        if f"{key.rpartition(':')[0]}:" not in stale and plan.has_operator(key.rpartition(":")[0])
    }
    edited = replace(
        prepared, plan=plan, graph=graph, parameters=parameters, constants=constants, statistics={}
    )
    return repick(edited, prepared) if prepared.parameters else edited


def repick(edited: PreparedModel, prepared: PreparedModel) -> PreparedModel:
    """With the parameters that need no data."""
    # The observer of a group need not be the plan's: the caller of `calibrate` may have named one.
    # What it saw stands as long as the plan's is the same.
    planned = {group.key: group.observer for group in prepared.plan.groups}
    weights, curves = pick_weight_parameters(edited), cache(partial(find_curves, edited))
    parameters, observers = dict(edited.parameters), dict(edited.observers)
    statistics: dict[str, GroupStatistics] = {}
    for group in edited.plan.groups:
        if group.constant is not None:
            parameters.setdefault(group.key, weights[group.key])
            continue
        seen = prepared.statistics.get(group.key)
        if seen is None or planned[group.key] != group.observer:
            continue
        if group.key not in parameters:
            parameters[group.key] = pick_range(seen, group, curves)
            observers[group.key] = seen.observer.name
        statistics[group.key] = seen
    return replace(edited, parameters=parameters, observers=observers, statistics=statistics)


def pick_range(
    seen: GroupStatistics,
    group: SharedQParams,
    find: Callable[[], Mapping[str, ValueCurve | Slopes]],
) -> QParams:
    """Choose the parameters of a group from its statistics. `find` returns the model's curves."""
    observer = seen.observer
    if isinstance(observer, RelativeMSE):  # files hold no curves
        observer = replace(observer, curve=find().get(group.key))
    return call_observer(observer.qparams, group.info, seen.state, group.info)


def check_operator(
    plan: Plan, operator: OperatorPlan, backend: BackendConfig, changed: set[str]
) -> None:
    """Raise ConfigError if no row of the backend takes the specs that an operator now has."""
    used = [*operator.operands, *([("result", operator.output)] if operator.output else [])]
    if not operator.quantized or not changed & {key for _, key in used}:
        return
    row = backend.find_pattern(operator.pattern)
    wanted = [(name, plan.group(key)) for name, key in used]
    conflicts = [find_row_conflict(dtypes, wanted) for dtypes in row.dtypes]
    if conflicts and all(conflicts):
        raise ConfigError(
            f"Backend {backend.name!r} cannot run operator {operator.name!r} ({operator.pattern}) "
            f"with the edited plan: {conflicts[0]}. Allowed: "
            f"{'; '.join(d.description for d in row.dtypes)}.",
            code="RQ104",
        )


def find_row_conflict(dtypes: DTypeConfig, wanted: list[tuple[str, SharedQParams]]) -> str | None:
    """Why one combination of dtypes does not fit the groups of an operator; None when it does."""
    names = {Role.ACTIVATION: "input", Role.WEIGHT: "weight", Role.BIAS: "bias"}
    for what, group in wanted:
        name = "output" if what == "result" else names[group.info.role]
        conflict = dtypes.constraints(name).find_conflict(group.info.spec, what)
        if conflict is not None:
            return conflict
    return None


# --- Merging ------------------------------------------------------------------------------------


@check_arguments
def merge_statistics(first: PreparedModel, *others: PreparedModel) -> PreparedModel:
    """A prepared model with the parameters of what all have seen: data may be calibrated with in
    several processes.

    All must be the same prepared model (prepared alike, or loaded from one file), each calibrated
    with its share of the data and order=Order.PARALLEL: each value is then seen as the float model
    computes it, so that the states of observers can be put together. In topological order a value
    is seen as the parameters picked before it let it be; two processes pick different ones, and
    their states describe different models. Weights are rounded to nearest: what fits them is not
    part of the statistics.

    Raises:
        ConfigError: plans differ, a model was not calibrated in parallel order, or a value is
            picked by a callable.
    """
    statistics = dict(first.statistics)
    needed = first.plan.activations
    for i, model in enumerate((first, *others)):
        if model.plan.to_dict() != first.plan.to_dict():
            raise ConfigError(
                f"merge_statistics: model {i} has another plan than model 0. Prepare them alike, "
                "or load both from one file that save_prepared wrote.",
                code="RQ105",
            )
        missing = [group.key for group in needed if group.key not in model.statistics]
        if missing:
            raise ConfigError(
                f"merge_statistics: model {i} has no statistics of "
                f"{format_count(len(missing), 'value')}, the first is {missing[0]!r}. Calibrate it "
                "with order=Order.PARALLEL and observers: statistics of the topological order "
                "depend on each process's own parameters, and callables keep none.",
                code="RQ105",
            )
    for model in others:
        for key, seen in model.statistics.items():
            before = statistics[key]
            if type(before.observer) is not type(seen.observer):
                raise ConfigError(
                    f"merge_statistics: value {key!r} was observed by {before.observer.name} and "
                    "by "
                    f"{seen.observer.name}; use one observer.",
                    code="RQ105",
                )
            info = before.state.info
            state = call_observer(before.observer.merge, info, before.state, seen.state)
            statistics[key] = GroupStatistics(before.observer, state)
    parameters, curves = pick_weight_parameters(first), cache(partial(find_curves, first))
    for group in needed:
        parameters[group.key] = pick_range(statistics[group.key], group, curves)
    return replace(
        first,
        parameters=parameters,
        constants={},
        statistics=statistics,
        observers={group.key: statistics[group.key].observer.name for group in needed},
    )


# --- One file -----------------------------------------------------------------------------------


@check_arguments
def save_prepared(prepared: PreparedModel, path: str | Path) -> None:
    """Write a prepared model, calibrated or not, to one file, whole or not at all.

    A zip archive without compression: JSON, the float module as TVM writes it, and arrays as .npy.
    Nothing in it is executed when it is read. Callables that pick parameters are not in it; what
    they picked is. Equal models give equal bytes.

    Raises:
        FileError: the folder does not exist or cannot be written.
    """
    arrays: dict[str, np.ndarray] = {}
    rows: dict[str, Any] = {}
    for key, seen in prepared.statistics.items():
        state = seen.state.to_arrays()
        arrays.update({f"statistics/{key}/{name}": array for name, array in state.items()})
        rows[key] = {"observer": seen.observer.to_dict(), "arrays": sorted(state)}
    arrays.update({f"constants/{key}": array for key, array in prepared.constants.items()})
    try:
        mapping = prepared.mapping.to_dict() if prepared.mapping is not None else None
    except ConfigError:
        mapping = None  # it holds a callable
    header = {
        "backend": prepared.backend.name,
        "effort": prepared.effort,
        "choices": prepared.choices,
        "observers": prepared.observers,
        "plan": prepared.plan.to_dict(),
        "mapping": mapping,
        "inputs": [value.to_dict() for value in prepared.inputs],
        "outputs": [value.to_dict() for value in prepared.outputs],
        "parameters": {key: value.to_dict() for key, value in prepared.parameters.items()},
        "statistics": rows,
        "constants": list(prepared.constants),
    }
    texts = {MODULE: tvm.ir.save_json(prepared.mod)}
    write_archive(Path(path), FORMAT, Archive(header, arrays, texts))


@check_arguments
def load_prepared(path: str | Path, backend: BackendConfig | str | None = None) -> PreparedModel:
    """What `save_prepared` wrote.

    Args:
        path: The file.
        backend: The backend, whose patterns are code and not in the file; by default that of
            the same name.

    Raises:
        DataError: there is no such file, or it is damaged or something else.
        ConfigError: the backend is another one than the model was prepared for.
    """
    path = Path(path)
    with reading(path, "prepared model", advice="Write it again with save_prepared."):
        archive = read_archive(path, FORMAT, "prepared model")
        header, arrays = archive.header, archive.arrays
        mod = parse_module(archive.texts[MODULE])
        plan = Plan.from_dict(header["plan"])
        backend = resolve_backend(header["backend"] if backend is None else backend)
        if backend.name != header["backend"]:
            raise ConfigError(
                f"{path} was prepared for backend {header['backend']!r}, not {backend.name!r}.",
                code="RQ105",
            )
        mapping = header["mapping"]
        return PreparedModel(
            mod,
            plan,
            build_calibration_graph(mod, plan, backend),
            backend,
            {key: QParams.from_dict(value) for key, value in header["parameters"].items()},
            {key: arrays[f"constants/{key}"] for key in header["constants"]},
            header["effort"],
            tuple(InterfaceValue.from_dict(value) for value in header["inputs"]),
            tuple(InterfaceValue.from_dict(value) for value in header["outputs"]),
            None if mapping is None else QConfigMapping.from_dict(mapping),
            {
                key: read_statistics(plan.group(key), row, arrays)
                for key, row in header["statistics"].items()
            },
            {str(key): str(text) for key, text in header["choices"].items()},
            {str(key): str(name) for key, name in header.get("observers", {}).items()},
        )


def read_statistics(
    group: SharedQParams, row: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> GroupStatistics:
    """The observer of one group and its state."""
    observer = NamedSettings.from_dict(row["observer"], f"observer of {group.key!r}")
    if not isinstance(observer, Observer):
        raise DataError(f"What observed value {group.key!r} is no observer.", code="RQ502")
    found = {name: arrays[f"statistics/{group.key}/{name}"] for name in row["arrays"]}
    return GroupStatistics(observer, observer.restore(group.info, found))


def change_operators(
    prepared: PreparedModel,
    changes: Changes,
    calibrate: Callable[[PreparedModel], PreparedModel],
    origins: Mapping[str, str] = {},
) -> PreparedModel:
    """The calibrated model with these changes, and all other parameters as they were picked.
    `origins` gives reasons for the ledger (`MappingRule.origin`).

    A value of a new group takes the parameters that its former group had in the same format. Only
    where there were none, which no built-in pattern brings about, `calibrate` picks all anew. So it
    does where weights get more bits: they are fitted, and those behind them made up for the error
    of the few bits.
    """
    if prepared.mapping is None:
        raise ConfigError(
            "The model lacks the QConfigMapping that it was prepared with.", code="RQ105"
        )
    mapping = add_lines(prepared, changes, prepared.mapping, origins)
    plan = annotate(prepared.source, prepared.backend, mapping, prepared.integer_outputs)
    changed = replace(replace_plan(prepared, plan), mapping=mapping)
    if split_changes(prepared, changes)[2]:
        return calibrate(changed)
    parameters, observers = dict(changed.parameters), dict(changed.observers)
    for group in plan.activations:
        if group.key in parameters:
            continue
        former = [
            old
            for old in prepared.plan.activations
            if old.info.spec == group.info.spec and set(old.members) & set(group.members)
            if old.key in prepared.parameters
        ]
        if not former:
            return calibrate(changed)
        parameters[group.key] = prepared.parameters[former[0].key]
        observers[group.key] = prepared.observers.get(former[0].key, "")
    return replace(changed, parameters=parameters, observers=observers)


def split_changes(
    prepared: PreparedModel, changes: Changes
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the names of operators that go back to float, of those that read their data's range at
    run time, and of those with weights of more bits than in the prepared model.
    """
    floating, ranged, widened = [], [], []
    for name, qconfig in changes.items():
        if qconfig is None:
            floating.append(name)
        else:
            # A range of the run time may be the user's own: the weight tells.
            is_wider = has_wider_weight(prepared, name, qconfig)
            (widened if is_wider else ranged).append(name)
    return tuple(floating), tuple(ranged), tuple(widened)


def describe_mapping(mapping: QConfigMapping) -> dict[str, Any] | None:
    """What `QConfigMapping.from_dict` reads; None where the mapping holds a callable."""
    try:
        return mapping.to_dict()
    except ConfigError:
        return None
