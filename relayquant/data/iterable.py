"""Data sets that are lists, loaders or functions. Each pass opens them again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from relayquant.data.item import (
    is_array,
)
from relayquant.errors import DataError


def find_length(dataset: object) -> int | None:
    if not hasattr(dataset, "__len__"):
        return None
    try:
        return len(dataset)  # pyright: ignore[reportArgumentType]
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
        return lambda: iter(dataset)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_class:
        return lambda: (dataset[i] for i in range(len(dataset)))
    if callable(dataset):
        _check_callable(dataset)
        return lambda: _call_source(dataset)
    raise DataError(
        f"The data set is of type {type(dataset).__name__}; allowed: a list or other re-iterable "
        "of dicts, tuples or arrays, a dict of arrays, an array, a path to an .npz, or a function "
        "that returns an iterator.",
        code="RQ302",
    )


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
    items = source()
    if isinstance(items, (str, bytes, Mapping)) or is_array(items):
        raise DataError(
            f"The data set's function returned a {type(items).__name__}; it must return an "
            "iterator of samples.",
            code="RQ302",
        )
    try:
        return iter(items)
    except TypeError:
        raise DataError(
            f"The data set's function returned {type(items).__name__}, which is not iterable; it "
            "must return an iterator of samples.",
            code="RQ302",
        ) from None
