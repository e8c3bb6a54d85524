"""Rows of Relax operators that read or write at the places that indices name, in numpy alone.

Indices below 0 count from the end. numpy raises IndexError for one outside of its axis, where TVM's
own code would read or write another value's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from relayquant.ir.reference.relax.row import Row

#: reduction -> writes values at places of an array, one after the other
REDUCTIONS: Mapping[str, Callable[[Any, Any, Any], None]] = {
    "update": lambda data, places, values: data.__setitem__(places, values),
    "add": np.add.at,
    "mul": np.multiply.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}


def write(data: Any, places: tuple[Any, ...], values: Any, reduction: str) -> Any:
    """Return the array with values written at places. NotImplemented for another reduction."""
    if reduction not in REDUCTIONS:
        return NotImplemented
    result = np.array(data)
    REDUCTIONS[reduction](result, places, values)
    return result


def scatter_nd(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Write rows. The last axis of the indices goes over the first axes of the data."""
    data, indices, values = args
    return write(data, tuple(np.moveaxis(indices, -1, 0)), values, str(attrs.reduction))


def scatter_elements(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Write elements. The indices go over one axis; along the others a value stays where it is."""
    data, indices, values = args
    places = [*np.indices(indices.shape, sparse=True)]
    places[int(attrs.axis)] = indices
    return write(data, tuple(places), values, str(attrs.reduction))


def index_put(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Write at one index array for each of the first axes."""
    data, indices, values = args
    return write(data, tuple(indices), values, "add" if attrs.accumulate else "update")


def index_tensor(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Read at one index array for each of the first axes."""
    data, indices = args
    return np.asarray(data)[tuple(indices)]


def gather_nd(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Read rows. The last axis of the indices goes over the axes behind the batch dimensions."""
    data, indices, batch = np.asarray(args[0]), np.asarray(args[1]), int(attrs.batch_dims)
    if data.shape[:batch] != indices.shape[:batch]:
        raise IndexError(f"batches of {indices.shape[:batch]} for {data.shape[:batch]}")
    middle = indices.ndim - 1 - batch
    first: Any = np.indices(indices.shape[:batch], sparse=True)
    at = [each.reshape(*each.shape, *[1] * middle) for each in first]
    return data[(*at, *np.moveaxis(indices, -1, 0))]


ROWS: tuple[Row, ...] = (
    Row("gather_nd", gather_nd, ("batch_dims",), is_reference_only=True),
    Row("index_put", index_put, ("accumulate",), is_reference_only=True),
    Row("index_tensor", index_tensor, is_reference_only=True),
    Row("scatter_elements", scatter_elements, ("axis", "reduction"), is_reference_only=True),
    Row("scatter_nd", scatter_nd, ("reduction",), is_reference_only=True),
)
