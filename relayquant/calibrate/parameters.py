"""What `calibration=` may be: an observer, or a callable that sees the samples of a value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from relayquant.calibrate.observers import AnyObserver, Observer
from relayquant.errors import ConfigError
from relayquant.qtypes import QParams, ValueInfo, check_qparams


@runtime_checkable
class ValueSamples(Protocol):
    """The arrays one value takes on the calibration data: iterable again and again."""

    @property
    def info(self) -> ValueInfo:
        """The value."""
        ...

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """One float32 array per batch, in the order of the data set."""
        ...


@dataclass(frozen=True, eq=False)
class StoredSamples:
    """The arrays of a group's observed values, read from disk each time they are iterated over."""

    info: ValueInfo
    read: Callable[[], Iterator[np.ndarray]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return self.read()


#: A calibration callback: picks the parameters of one value.
CalibrationFunction: TypeAlias = Callable[[ValueInfo, ValueSamples], QParams]


@dataclass(frozen=True)
class CallableCalibration:
    """A user's callable whose results are checked."""

    function: CalibrationFunction

    @property
    def name(self) -> str:
        """For reports and messages: the function's own name."""
        return getattr(self.function, "__qualname__", None) or type(self.function).__name__

    def qparams(self, samples: ValueSamples) -> QParams:
        """What the callable picks for `samples.info`.

        Raises:
            ConfigError: the result is not a QParams of the dtype, number, axis and zero points that
                the plan asks for; names the value and the callable.
        """
        info = samples.info
        return check_qparams(self.function(info, samples), info, f"Calibration {self.name}")


def resolve_calibration(calibration: object) -> AnyObserver | CallableCalibration:
    """`calibration` as an observer, or as a checked callable `(ValueInfo, samples) -> QParams`.

    Raises:
        ConfigError: it is neither, or the class of an observer, or a callable that does not take
            two positional arguments.
    """
    if isinstance(calibration, (Observer, CallableCalibration)):
        return calibration
    allowed = (
        "an observer, for instance MinMax(), Percentile(99.99), KLDivergence() or MSE(), or a "
        "callable (info, samples) -> QParams"
    )
    if isinstance(calibration, type):
        if issubclass(calibration, Observer):
            raise ConfigError(
                f"calibration is the class {calibration.__name__}, not an instance: write "
                f"{calibration.__name__}()."
            )
        raise ConfigError(f"calibration is the class {calibration.__name__}; allowed: {allowed}.")
    if isinstance(calibration, QParams):
        raise ConfigError(
            "calibration is a QParams; to give every value the same parameters write "
            "Fixed(scale, zero_point)."
        )
    if not callable(calibration):
        raise ConfigError(f"calibration is {calibration!r}; allowed: {allowed}.")
    result = CallableCalibration(calibration)
    if not _takes_two(calibration):
        raise ConfigError(
            f"calibration {result.name} cannot be called with two positional arguments; allowed: "
            f"{allowed}."
        )
    return result


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True  # a built-in that does not tell: the call itself will
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True
