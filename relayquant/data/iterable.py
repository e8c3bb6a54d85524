"""Data sets that are lists, loaders or functions. Each pass opens them again."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from relayquant.base.user_calls import call_user
from relayquant.data.item import is_array
from relayquant.errors import DataError, RelayQuantError

T = TypeVar("T")


def find_length(dataset: object) -> int | None:
    if not hasattr(dataset, "__len__"):
        return None
    try:
        return ask(dataset, lambda: len(dataset), (TypeError, NotImplementedError))  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):
        return None  # a loader of an iterable without a length, a reader of ONNX Runtime


def is_sequence(dataset: Any) -> bool:
    """Return whether items can be read by index: lists, tuples, and objects with no other way."""
    if isinstance(dataset, (list, tuple)):
        return True
    is_iterable = hasattr(dataset, "__iter__") or isinstance(dataset, type)
    return not is_iterable and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def open_iterable(dataset: Any) -> Callable[[], Iterator[Any]]:
    # A class has the methods of its instances, but is a function.
    is_class = isinstance(dataset, type)
    if hasattr(dataset, "__iter__") and not is_class:
        _refuse_one_shot(dataset)
        return lambda: read_items(dataset, ask(dataset, lambda: iter(dataset)))
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_class:
        read = read_by_index(dataset)
        return lambda: (read(i) for i in range(ask(dataset, lambda: len(dataset))))
    if callable(dataset):
        _check_callable(dataset)
        return lambda: read_items(dataset, _call_source(dataset))
    raise DataError(
        f"The data set is of type {type(dataset).__name__}; allowed: a list or other re-iterable "
        "of dicts, tuples or arrays, a dict of arrays, an array, a path to an .npz, or a function "
        "that returns an iterator.",
        code="RQ302",
    )


def ask(dataset: Any, function: Callable[[], T], passed: tuple[type[Exception], ...] = ()) -> T:
    """Return what a method of a data set gives.

    Raises:
        DataError: it raised an exception that is not passed on; names the data set.
    """
    where, passed = f"The data set {name_source(dataset)}", (*passed, RelayQuantError)
    return call_user(where, function, passed, kind=DataError, code="RQ302")


def name_source(dataset: Any) -> str:
    """Name a function by its name, anything else by its type."""
    return getattr(dataset, "__qualname__", type(dataset).__name__)


def read_items(dataset: Any, items: Iterator[Any], counted: str = "Sample") -> Iterator[Any]:
    """Yield the items of a data set. `counted` is what is numbered, for messages.

    Raises:
        DataError: the data set raised an exception; names the sample.
    """
    end = object()
    for index in itertools.count():
        item = read_one(dataset, f"{counted} {index}", lambda: next(items, end))
        if item is end:
            return
        yield item


def read_by_index(dataset: Any) -> Callable[[int], Any]:
    """Return a function that gives an item by its index, with the errors of `read_items`."""
    return lambda index: read_one(dataset, f"Sample {index}", lambda: dataset[index])


def read_one(dataset: Any, place: str, function: Callable[[], T]) -> T:
    """Return what a data set gives at a place.

    Raises:
        DataError: it raised an exception; names the place and the data set.
    """
    where = f"{place}: the data set {name_source(dataset)}"
    return call_user(where, function, (RelayQuantError,), kind=DataError, code="RQ302")


def _refuse_one_shot(dataset: Any) -> None:
    # Not with iter(): a loader may start its workers there.
    if hasattr(dataset, "__next__"):
        name = type(dataset).__name__
        advice = (
            f"Pass a function that makes a new one at every call: lambda: {name}(...)."
            if hasattr(dataset, "get_next")  # a CalibrationDataReader of ONNX Runtime
            else "Pass list(...) of it, or a function that returns a new iterator at every call "
            "(for a generator function: the function itself, not its result)."
        )
        raise DataError(
            f"The data set is a {name}, which can be read only once, but calibration reads it "
            f"several times. {advice}",
            code="RQ303",
        )


def _check_callable(source: Callable[..., Any]) -> None:
    try:
        inspect.signature(source).bind()
    except ValueError:
        return  # a built-in without a signature: the call itself will show it
    except TypeError as error:
        raise DataError(
            f"The data set is the function {getattr(source, '__qualname__', source)!r}, which "
            f"cannot be called without arguments ({error}); pass lambda: f(...).",
            code="RQ302",
        ) from None


def _call_source(source: Callable[[], Any]) -> Iterator[Any]:
    items = ask(source, source)
    if isinstance(items, (str, bytes, Mapping)) or is_array(items):
        raise DataError(
            f"The data set's function returned a {type(items).__name__}; it must return an "
            "iterator of samples.",
            code="RQ302",
        )
    try:
        return ask(source, lambda: iter(items), (TypeError,))
    except TypeError:
        raise DataError(
            f"The data set's function returned {type(items).__name__}, which is not iterable; it "
            "must return an iterator of samples.",
            code="RQ302",
        ) from None
