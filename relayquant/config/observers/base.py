"""Observers: the interface, and the checks that all observers share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from relayquant.base.arguments import describe_not_finite
from relayquant.base.plain_data import NamedSettings
from relayquant.base.qtypes import QParams, Role, ValueInfo, check_qparams
from relayquant.base.user_calls import call_user
from relayquant.errors import ConfigError, DataError, RelayQuantError

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class State:
    """The observed data of one value. By convention, its arrays are never written to."""

    info: ValueInfo

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return everything except `info` as arrays for an .npz file."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "info"}

    @classmethod
    def from_arrays(cls: type[StateT], info: ValueInfo, arrays: Mapping[str, Any]) -> StateT:
        """Read the state of the value `info` from the arrays of `to_arrays`.

        Raises:
            DataError: an array is missing.
        """
        names = [f.name for f in fields(cls) if f.name != "info"]
        return cls(info, *require_arrays(cls, info, arrays, names))


def require_arrays(
    kind: type, info: ValueInfo, arrays: Mapping[str, Any], names: Sequence[str]
) -> list[NDArray[Any]]:
    """Return the named arrays of a saved state of class `kind`.

    Raises:
        DataError: one is missing.
    """
    missing = [name for name in names if name not in arrays]
    if missing:
        raise DataError(
            f"The saved {kind.__name__} of value {info.name!r} lacks {', '.join(missing)}; "
            "was it written by another observer?",
            code="RQ502",
        )
    return [np.asarray(arrays[name]) for name in names]


StateT = TypeVar("StateT", bound=State)


@dataclass(frozen=True)
class Observer(NamedSettings, ABC, Generic[StateT]):
    """Interface that streams the arrays of one value and chooses its quantization parameters.

    Subclasses are frozen dataclasses. The fields are the settings. Calibration calls them from
    several threads, each with separate states. `merge` is associative, and commutative unless the
    class says otherwise. Merging the states of two parts of the data gives the state of all data.
    """

    needs_data: ClassVar[bool] = True  #: False: `qparams` also works on an empty state

    @property
    def name(self) -> str:
        """The name in reports and messages."""
        return type(self).__name__

    @abstractmethod
    def start(self, info: ValueInfo) -> StateT:
        """Return the state before any data.

        Raises:
            ConfigError: This observer does not support `info`, for example per-channel.
        """

    @abstractmethod
    def update(self, state: StateT, array: NDArray[Any]) -> StateT:
        """Return the state after one more batch, a float array of any shape. The array is
        read-only: the model goes on with it.

        Raises:
            DataError: the array holds NaN or infinity, or is not numeric; names the value.
        """

    def update_all(self, state: StateT, arrays: Sequence[NDArray[Any]]) -> StateT:
        """Return the state after several batches in order.

        Calibration calls this method, with the same batches for any number of workers.
        """
        for array in arrays:
            state = call_observer(self.update, state.info, state, array)
        return state

    @abstractmethod
    def merge(self, a: StateT, b: StateT) -> StateT:
        """Return the state of the data of both states."""

    @abstractmethod
    def qparams(self, state: StateT, info: ValueInfo) -> QParams:
        """Choose parameters for the observed data. A value that was always 0 gets scale 1.

        Raises:
            DataError: the state has seen no data.
        """

    def for_part(self, share: float, arrays: int) -> Observer[StateT]:
        """Return the observer for a part of the data, with 0 < share <= 1.

        Its state is merged with the states of the other parts. It is this observer, or an observer
        with smaller states.
        """
        return self

    def restore(self, info: ValueInfo, arrays: Mapping[str, Any]) -> StateT:
        """Read a state from the arrays of `state.to_arrays()`. DataError for another kind of
        state.
        """
        return type(self.start(info)).from_arrays(info, arrays)

    def observe(self, info: ValueInfo, arrays: Iterable[NDArray[Any]]) -> QParams:
        """Start, update with every array, and choose parameters."""
        state = call_observer(self.start, info, info)
        state = self.update_all(state, [*arrays])
        return call_observer(self.qparams, info, state, info)


def call_observer(method: Callable[..., Any], info: ValueInfo, *args: Any) -> Any:
    """Return what a method of an observer gives for a value. Users write observers too.

    Arrays among `args` are passed read-only: the model goes on with the same arrays.

    Raises:
        ConfigError: it raised an exception, or the result is neither a State nor a QParams that
            fits `info`; names the observer and the value.
    """
    source = f"Observer {method.__self__.name}"
    given = [lock_arrays(arg) for arg in args]
    result = call_for_value(f"{source}: {method.__name__}", info, lambda: method(*given))
    if isinstance(result, State):
        return result
    if isinstance(result, QParams):
        return check_qparams(result, info, source)
    raise ConfigError(
        f"{source}: {method.__name__} returned {type(result).__name__} for value {info.name!r}; "
        "allowed: a QParams from `qparams`, a State from the other methods.",
        code="RQ106",
    )


def lock_arrays(value: Any) -> Any:
    """Return a read-only view of an array, or a list of such views for a list of arrays. Any other
    value is unchanged.
    """
    if isinstance(value, list):
        return [lock_arrays(each) for each in value]
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def call_for_value(source: str, info: ValueInfo, function: Callable[[], Any]) -> Any:
    """Return the result of a user's function. `source` names it for the message.

    Raises:
        ConfigError: it raised an exception that is not from this package; names the value.
    """
    at = f" for value {info.name!r}"
    return call_user(source, function, (RelayQuantError,), at=at)


#: Any observer, with any state.
AnyObserver = Observer[Any]


class NotFiniteError(DataError):
    """A value of the model is not finite, or too large to calibrate with.

    Attributes:
        value: Its name.
    """

    def __init__(self, message: str, value: str = "", *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.value = value


def check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ConfigError(f"{name} is {value!r}; allowed: a number.", code="RQ101")


def check_array(info: ValueInfo, array: NDArray[Any]) -> NDArray[Any]:
    """Return `array` as a float array. Its values are checked later, with their range."""
    array = np.asarray(array)
    if array.dtype.kind == "f":
        return array
    # bfloat16 and the float8 types are extension dtypes of kind V, which numpy cannot reduce.
    if array.dtype.kind in "biu" or array.dtype.name.startswith(("bfloat", "float")):
        return array.astype("float64" if array.dtype.itemsize >= 4 else "float32")
    raise DataError(
        f"Value {info.name!r} was given an array of dtype {array.dtype}; observers take real "
        "numbers.",
        code="RQ302",
    )


def find_axis(info: ValueInfo, array: NDArray[Any]) -> int | None:
    """Return the channel axis as a non-negative number, or None for a per-tensor spec."""
    if not info.spec.is_per_channel:
        return None
    if info.axis is None or not -array.ndim <= info.axis < array.ndim:
        raise DataError(
            f"Value {info.name!r} is quantized per channel along axis {info.axis}, but was given "
            f"an array of shape {array.shape}.",
            code="RQ302",
        )
    return info.axis % array.ndim


def find_range(info: ValueInfo, array: NDArray[Any]) -> tuple[Float64Array, Float64Array]:
    """Return the smallest and largest value, shape () or (C,). DataError for NaN or infinity."""
    axis = find_axis(info, array)
    return reduce_range(info, array, tuple(i for i in range(array.ndim) if i != axis))


def reduce_range(
    info: ValueInfo, array: NDArray[Any], axes: tuple[int, ...]
) -> tuple[Float64Array, Float64Array]:
    # Adding 0.0 turns -0.0 into 0.0. Otherwise min would return either, depending on the order.
    low = np.asarray(array.min(axis=axes), "float64") + 0.0
    high = np.asarray(array.max(axis=axes), "float64") + 0.0
    # NaN propagates through min and max, and infinities are extremes. No extra pass is needed.
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        found = describe_not_finite(array)
        if info.role is Role.WEIGHT:
            raise DataError(
                f"The constant {info.name!r} of the model holds {found}: no data will help. Check "
                "the file of the model, and how it was trained or converted (float16 overflow).",
                code="RQ302",
            )
        raise NotFiniteError(
            f"Value {info.name!r} holds {found} during calibration. Check that the float model "
            "gives finite results on these samples, and the preprocessing of the data set "
            "(scaling, division by zero, float16 overflow).",
            info.name,
            code="RQ302",
        )
    return low, high


def merge_info(a: State, b: State) -> ValueInfo:
    if a.info.name != b.info.name:
        raise DataError(
            f"States of different values cannot be merged: {a.info.name!r} and {b.info.name!r}.",
            code="RQ105",
        )
    return a.info


def need_data(count: int, info: ValueInfo) -> None:
    if count == 0:
        raise DataError(
            f"Value {info.name!r} has seen no data: the calibration data set is empty, or no "
            "sample reaches this value.",
            code="RQ303",
        )


def refuse_per_channel(observer: str, info: ValueInfo) -> None:
    if info.spec.is_per_channel:
        raise ConfigError(
            f"{observer} chooses one range per tensor, but value {info.name!r} ({info.role.value}) "
            "is to be quantized per channel; use MinMax(), AverageMax(), or for weights MSE(), or "
            "a QSpec with Granularity.PER_TENSOR.",
            code="RQ102",
        )
