"""Effort levels as data: what each level chooses for calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from relayquant.config import (
    BackendConfig,
    BiasCorrection,
    Effort,
    FitSettings,
    ModelType,
    Order,
    QConfig,
    QConfigMapping,
    WeightRounding,
)
from relayquant.config.fitting import DEFAULT_FIT
from relayquant.config.mapping import MappingRule, Selector
from relayquant.config.model_type import MODEL_TYPES, RECOGNIZED
from relayquant.config.observers import MinMax, Observer
from relayquant.errors import ConfigError, format_count, suggest_name
from relayquant.ir.plan import Plan
from relayquant.stages.backends.defaults import DEFAULT_OBSERVER
from relayquant.stages.calibration.observer_selection import OutputSQNR
from relayquant.stages.calibration.parameters import CallableCalibration, resolve_observer
from relayquant.stages.calibration.weights.ranges import RelativeMSE
from relayquant.stages.equalization import read_exponents
from relayquant.stages.prepared import PreparedModel


@dataclass(frozen=True)
class EffortSettings:
    """The choices of one level of effort.

    Attributes:
        activation: Observer of computed values if neither the user nor the backend names one.
        fit: How weights are rounded and biases corrected.
        order: When parameters are chosen.
        equalizes_layers: Whether layers are scaled against one another first where this pays off
            (see `stages.equalization`).
        below: Level that `quantize` compares with on a few samples. Its result is kept unless this
            level's is clearly nearer to the float model. None: no comparison.
    """

    activation: Observer
    fit: FitSettings
    order: Order
    equalizes_layers: bool = False
    below: Effort | None = None


EFFORTS: Mapping[Effort, EffortSettings] = {
    Effort.FAST: EffortSettings(
        MinMax(), FitSettings(WeightRounding.NEAREST, BiasCorrection.NONE), Order.PARALLEL
    ),
    Effort.BALANCED: EffortSettings(
        OutputSQNR(), FitSettings(), Order.PARALLEL, equalizes_layers=True
    ),
    Effort.BEST: EffortSettings(
        RelativeMSE(values=1 << 20),
        FitSettings(
            optimal_columns=None,
            scale_factors=(1.0, 1.03, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7),
            sweeps=2,
            samples=32768,
        ),
        Order.TOPOLOGICAL,
        equalizes_layers=True,
        below=Effort.BALANCED,
    ),
}


def resolve_effort(effort: Effort | str) -> Effort:
    """Return a level of effort from its value ("balanced") or the member itself.

    Raises:
        ConfigError: there is no such level.
    """
    if isinstance(effort, Effort):
        return effort
    for level in Effort:
        if effort == level.value:
            return level
    names = [level.value for level in Effort]
    raise ConfigError(
        f"There is no effort {effort!r}. {suggest_name(str(effort), names)}", code="RQ101"
    )


def choose_order(plan: Plan, observer: Any, effort: Effort) -> Order:
    """Return the level's order of calibration. It is topological if a callable chooses parameters:
    the callable's samples then include the effect of earlier choices.

    Args:
        plan: The plan. Its groups name the observers.
        observer: The user's observer for all activations; None: as the plan says.
        effort: The level.
    """
    chosen = [
        group.observer if observer is None or group.is_fixed else observer
        for group in plan.activations
    ]
    if any(isinstance(resolve_observer(each), CallableCalibration) for each in chosen):
        return Order.TOPOLOGICAL
    return EFFORTS[effort].order


def describe_work(calibrated: PreparedModel, observer: Any, fit: FitSettings) -> dict[str, str]:
    """Describe what calibration worked with, as `describe_choices` and `describe_observers` do, and
    the layers that were scaled.
    """
    choices = describe_choices(calibrated, observer, fit)
    if equalized := read_exponents(calibrated.mod):
        choices["equalized"] = f"channels between {format_count(len(equalized), 'pair')} of layers"
    return choices | describe_observers(calibrated.plan, observer, calibrated.observers)


def describe_choices(prepared: PreparedModel, observer: Any, fit: FitSettings) -> dict[str, str]:
    """Describe the choices of calibration in words for the ledger: {"activations": observers,
    "weights": observers, rounding and bias correction}, and "few bits" if there are such weights.

    Args:
        prepared: The model. The groups of its plan name the observers.
        observer: The user's observer for all activations; None: as the plan says.
        fit: How weights are fitted.
    """
    names = {
        is_weight: {
            describe_observer(
                group.observer if observer is None or group.constant or group.is_fixed else observer
            )
            for group in prepared.plan.groups
            if (group.constant is not None) is is_weight
        }
        for is_weight in (False, True)
    }
    changed = [f.name for f in fields(fit) if getattr(fit, f.name) != getattr(DEFAULT_FIT, f.name)]
    settings = [
        f"{name} {getattr(fit, name)}" for name in changed if name not in ("rounding", "bias")
    ]
    weights = [
        *sorted(names[True]),
        f"rounding {fit.rounding.value}",
        f"bias correction {fit.bias.value}",
        *settings,
    ]
    graph = prepared.graph
    described = ", ".join(weights)
    bare = [point for point in graph.fits if f"{point.operator}:bias" not in graph.constants]
    if bare and fit.bias is not BiasCorrection.NONE:
        described += f" (not of {format_count(len(bare), 'operator')} without a bias)"
    found = {"activations": ", ".join(sorted(names[False])), "weights": described}
    operators = (prepared.plan.operator(point.operator) for point in graph.fits)
    specs = [prepared.plan.group(dict(op.operands)["weight"]).info.spec for op in operators]
    if few := sum(map(fit.reconstructs, specs)):
        found["few bits"] = f"{format_count(few, 'weight')} fitted to the float model's sums"
    return found


def describe_observers(plan: Plan, observer: Any, observers: Mapping[str, str]) -> dict[str, str]:
    """Return {"ranges": number of values per observer} for the ledger; {} if there was no choice.

    Args:
        plan: The plan. Its groups name the observers.
        observer: The user's observer for all activations; None: as the plan says.
        observers: Group key -> observer that chose its parameters.
    """
    chosen = [group.observer if observer is None else observer for group in plan.groups]
    if not any(isinstance(each, OutputSQNR) for each in chosen):
        return {}
    counts = Counter(observers.values())
    return {
        "ranges": ", ".join(
            f"{name} of {format_count(count, 'value')}" for name, count in counts.most_common()
        )
    }


def describe_observer(observer: Any) -> str:
    """Describe an observer by its settings that differ from the defaults, or a function by its
    name.
    """
    if not isinstance(observer, Observer):
        return getattr(observer, "__qualname__", type(observer).__name__)
    changed = [
        f"{f.name}={getattr(observer, f.name)!r}"
        for f in fields(observer)  # pyright: ignore[reportArgumentType]
        if getattr(observer, f.name) != f.default
    ]
    return f"{type(observer).__name__}({', '.join(changed)})"


def apply_effort(qconfig: QConfig, effort: Effort) -> QConfig:
    """Return `qconfig` with the level's observer for activations whose observer the backend
    leaves open.
    """
    observer = EFFORTS[effort].activation
    changed = {
        name: replace(config, observer=observer)
        for name in ("activation", "output")
        if (config := getattr(qconfig, name)) is not None and config.observer is DEFAULT_OBSERVER
    }
    return replace(qconfig, **changed)


def default_mapping(
    backend: BackendConfig,
    effort: Effort,
    model_type: ModelType | None = None,
    *,
    is_recognized: bool = False,
) -> QConfigMapping:
    """Return the backend's default mapping for a model of this type, with the level's observers.
    It selects every operator or the operators that this type of model has quantized. It has no
    lines if the backend has no default. If the type `is_recognized`, a line says so.
    """
    default = backend.default_mapping.change_qconfigs(lambda each: apply_effort(each, effort))
    if model_type not in MODEL_TYPES or not default.rules:
        return default
    first = [MappingRule(Selector.GLOBAL, "", None, origin=RECOGNIZED)] if is_recognized else []
    types = [
        replace(line, kind=Selector.OBJECT_TYPE, key=operator, optional=True)
        for operator in MODEL_TYPES[model_type].operators
        for line in default.rules
    ]
    return QConfigMapping((*first, *types))


def read_recognized(mapping: QConfigMapping) -> ModelType | None:
    """Return the type that was recognized when `default_mapping` made this mapping."""
    is_recognized = any(rule.origin == RECOGNIZED for rule in mapping.rules)
    return ModelType.TRANSFORMER if is_recognized else None
