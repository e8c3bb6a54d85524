"""Forms of an observer argument: an observer, or a callable that gets the samples of a value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from relayquant.base.arguments import takes_arguments
from relayquant.base.events import CallbackList, ParametersEvent
from relayquant.base.qtypes import QParams, ValueInfo, check_qparams, conform_scale
from relayquant.config.observers import Observer
from relayquant.config.observers.base import (
    AnyObserver,
    call_for_value,
    call_observer,
    lock_arrays,
)
from relayquant.errors import ConfigError, format_count, suggest_name
from relayquant.ir import reference
from relayquant.ir.plan import Plan, SharedQParams
from relayquant.stages.calibration.result import CalibrationResult
from relayquant.stages.prepared import CalibrationGraph


@runtime_checkable
class ValueSamples(Protocol):
    """The arrays of one value on the calibration data. They can be iterated over again and
    again.
    """

    @property
    def info(self) -> ValueInfo:
        """The value."""
        ...

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Yield one float32 array per batch, in data set order. If several values share the
        parameters, their arrays are flattened and joined.
        """
        ...


@dataclass(frozen=True, eq=False)
class StoredSamples:
    """The arrays of a group's observed values, read from disk on each iteration."""

    info: ValueInfo
    read: Callable[[], Iterator[np.ndarray]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return self.read()


@dataclass(frozen=True, eq=False)
class CalibrationContext:
    """The state of a calibration when a callback is asked for parameters.

    Attributes:
        plan: Which values have which parameters.
        graph: The calibration graph; `graph.mod` is a module that runs, whose scales and zero
            points are inputs.
        parameters: The parameters chosen so far, by group. Weights have all of them, before
            fitting.
        constants: Weights and biases fitted so far; see `PreparedModel.constants`.
    """

    plan: Plan
    graph: CalibrationGraph
    parameters: Mapping[str, QParams]
    constants: Mapping[str, np.ndarray]

    def run(
        self, inputs: Mapping[str, np.ndarray], more: Mapping[str, QParams] | None = None
    ) -> dict[str, np.ndarray]:
        """Return all values of the graph and its inputs, by name, for one batch of the inputs,
        computed in numpy.

        Values are quantized by the parameters chosen so far. Values without parameters stay in
        float. Inputs and weights in the result are read-only.

        Args:
            inputs: {input: array}.
            more: Parameters to try, by group, e.g. `{info.name: qparams}`.

        Raises:
            ConfigError: `more` names no group, or has parameters that do not fit its group.
            DataError: an input is missing, unknown, or of another shape.
        """
        groups = {group.key: group.info for group in (*self.plan.activations, *self.plan.weights)}
        for key, tried in (more or {}).items():
            if key not in groups:
                raise ConfigError(
                    f"context.run was given parameters to try for {key!r}, which is no value with "
                    f"parameters. {suggest_name(key, groups)}",
                    code="RQ103",
                )
            check_qparams(tried, groups[key], "context.run: the caller")
        parameters = {**self.parameters, **(more or {})}
        arguments = self.graph.arguments(parameters, self.constants)
        # The result has inputs and weights in it, which belong to the caller and to the model.
        given = {name: lock_arrays(array) for name, array in {**inputs, **arguments}.items()}
        values = reference.run_values(self.graph.mod, given)
        return {name: given[name] for name in inputs} | values


#: A calibration callback that chooses the parameters of one value. If it takes a third argument, or
#: an argument called "context", it gets a CalibrationContext.
CalibrationFunction: TypeAlias = Callable[..., QParams]


@dataclass(frozen=True)
class CallableCalibration:
    """A user's callable, with checks of its results."""

    function: CalibrationFunction

    @property
    def name(self) -> str:
        """Name for reports and messages: the function's name."""
        return getattr(self.function, "__qualname__", None) or type(self.function).__name__

    def qparams(self, samples: ValueSamples, context: CalibrationContext | None = None) -> QParams:
        """Return the callable's parameters for `samples.info`. It gets `context` if it takes one.

        Raises:
            ConfigError: it raised an exception, or the result is not a QParams with the dtype,
                number, axis and zero points that the plan requires; names the value and the
                callable.
        """
        info, source = samples.info, f"Calibration {self.name}"
        args, named = [info, samples], {}
        if takes_context(self.function):
            named["context"] = context
        elif not takes_arguments(self.function, 2):
            args.append(context)
        picked = call_for_value(source, info, lambda: self.function(*args, **named))
        return check_qparams(picked, info, source)


def takes_context(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter called "context".

    A third parameter with another name and a default does not count.
    """
    try:
        return "context" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False  # a built-in without a signature


def resolve_observer(observer: object) -> AnyObserver | CallableCalibration:
    """Return `observer` as an observer, or as a checked callable `(ValueInfo, samples) ->
    QParams` or `(ValueInfo, samples, CalibrationContext) -> QParams`.

    Raises:
        ConfigError: it is neither, or it is an observer class, or a callable that takes neither two
            nor three positional arguments.
    """
    if isinstance(observer, (Observer, CallableCalibration)):
        return observer
    allowed = (
        "an observer, for instance MinMax(), Percentile(99.99), KLDivergence() or MSE(), or a "
        "callable (info, samples) or (info, samples, context) -> QParams"
    )
    if isinstance(observer, type):
        if issubclass(observer, Observer):
            raise ConfigError(
                f"observer is the class {observer.__name__}, not an instance: write "
                f"{observer.__name__}().",
                code="RQ101",
            )
        raise ConfigError(
            f"observer is the class {observer.__name__}; allowed: {allowed}.", code="RQ101"
        )
    if isinstance(observer, QParams):
        raise ConfigError(
            "observer is a QParams; to give every value the same parameters write "
            "Fixed(scale, zero_point).",
            code="RQ101",
        )
    if not callable(observer):
        raise ConfigError(f"observer is {observer!r}; allowed: {allowed}.", code="RQ101")
    result = CallableCalibration(observer)
    if not takes_context(observer) and not (
        takes_arguments(observer, 2) or takes_arguments(observer, 3)
    ):
        raise ConfigError(
            f"observer {result.name} cannot be called with two or three positional arguments; "
            f"allowed: {allowed}.",
            code="RQ106",
        )
    return result


def raise_scale(
    qparams: QParams, group: SharedQParams, min_scales: Mapping[str, np.ndarray]
) -> QParams:
    """Raise scales to at least the scales in `min_scales`. Zero points stay."""
    scale = np.maximum(qparams.scale, min_scales.get(group.key, 0.0))
    scale = conform_scale(scale, group.info.spec).astype("float32")
    return QParams(scale, qparams.zero_point, qparams.dtype, qparams.axis)


def is_data_free(observer: object) -> bool:
    """Whether it chooses parameters without data."""
    return isinstance(observer, Observer) and not observer.needs_data


def pick_given(
    plan: Plan,
    observers: Sequence[Any],
    weights: Mapping[str, QParams],
    callbacks: CallbackList,
    min_scales: Mapping[str, np.ndarray],
) -> CalibrationResult:
    """Return the parameters of observers that need no data, together with the parameters of the
    weights.
    """
    parameters, names = dict(weights), dict[str, str]()
    for group, observer in zip(plan.activations, observers, strict=True):
        state = call_observer(observer.start, group.info, group.info)
        picked = call_observer(observer.qparams, group.info, state, group.info)
        if group.key in min_scales:
            picked = raise_scale(picked, group, min_scales)
        parameters[group.key], names[group.key] = picked, observer.name
        callbacks.on_parameters(ParametersEvent(group.info, picked))
    return CalibrationResult(parameters, {}, observers=names)


def describe_needs(plan: Plan, observers: Sequence[object]) -> str:
    """Return a message for a plan without data: the operators whose parameters depend on data."""
    names = {
        group.key
        for group, observer in zip(plan.activations, observers, strict=True)
        if not is_data_free(observer)
    }
    rows = [
        f"{op.name} ({op.op.removeprefix('relax.')})"
        for op in plan.operators
        if op.quantized and names.intersection((*dict(op.operands).values(), op.output))
    ]
    return (
        f"dataset is None, but data decides parameters of {format_count(len(rows), 'operator')}: "
        f"{', '.join(rows)}. Pass a dataset, or set for these "
        "QSpec(is_dynamic=True), which matrix products with constant weights take, the observer "
        "Fixed, or None to keep them in float."
    )
