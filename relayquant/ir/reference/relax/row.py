"""The row type of the table of Relax operators: the function of an operator for any array library.

A function that numpy and PyTorch share is written once, over the library `xp`:
`numpy_library.Numpy` or `relayquant.torch.interpreter.operators.Torch`. Functions that differ, such
as sums in a fixed order or functions with a custom gradient, are methods of both libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: (library, arguments, attributes) -> value
Meaning = Callable[[Any, list[Any], Any], Any]
#: (arguments, attributes) -> value, in one library. Arguments are arrays, tuples of arrays, tuples
#: of ints (shapes) or numbers, as in the call. Returns NotImplemented for attributes that are not
#: supported.
OperatorFunction = Callable[[list[Any], Any], Any]


def accept(attrs: Any) -> str:
    """Accept all attributes."""
    return ""


@dataclass(frozen=True)
class Row:
    """One Relax operator.

    Attributes:
        name: Name of the operator without "relax.".
        meaning: The function of the operator.
        attributes: Attributes that it honours, or that do not change its result. A call is not
            supported if another attribute differs from its default.
        refuse: Attributes -> why these values are not supported, or "" if they are.
        is_reference_only: Whether only the interpreter has it. Training does not need operators on
            integers and indices, or operators that create tensors.
    """

    name: str
    meaning: Meaning
    attributes: tuple[str, ...] = ()
    refuse: Callable[[Any], str] = accept
    is_reference_only: bool = False


def bind_row(row: Row, library: Any) -> OperatorFunction:
    """Bind a row to one library."""

    def compute(args: list[Any], attrs: Any) -> Any:
        return NotImplemented if row.refuse(attrs) else row.meaning(library, args, attrs)

    return compute


def bind_rows(rows: Iterable[Row], library: Any) -> dict[str, OperatorFunction]:
    """Bind rows to one library: name without "relax." -> function."""
    return {row.name: bind_row(row, library) for row in rows}


def call(function: str) -> Meaning:
    """Make a meaning that calls a function of the library with the arguments only."""
    return lambda xp, args, attrs: getattr(xp, function)(*xp.convert_numbers(args))


def own(function: str) -> Meaning:
    """Make a meaning that calls a function of the library with arguments and attributes."""
    return lambda xp, args, attrs: getattr(xp, function)(args, attrs)


def to_ints(values: Any) -> tuple[int, ...]:
    """Convert an array of integer attributes to Python ints."""
    return tuple(int(value) for value in values)


def to_axes(values: Any) -> tuple[int, ...] | None:
    """Convert an axis attribute: None (all axes), one integer or an array of integers."""
    if values is None:
        return None
    return to_ints(values) if hasattr(values, "__len__") else (int(values),)


def list_axes(values: Any, rank: int) -> list[int]:
    """Return the axes that an attribute names, counted from 0. None names all."""
    axes = to_axes(values)
    return [*range(rank)] if axes is None else [axis % rank for axis in axes]


def to_axis(value: Any) -> int | None:
    """Convert an axis attribute that is one integer or None."""
    return None if value is None else int(value)


def align(xp: Any, values: Any, axes: Sequence[int], ndim: int) -> Any:
    """Reshape parameters along `axes`, in this order, to broadcast against `ndim` axes."""
    positions = [axis % ndim for axis in axes]
    if values.ndim > 1:
        values = xp.permute(values, sorted(range(len(positions)), key=positions.__getitem__))
    shape = [1] * ndim
    for position, size in zip(sorted(positions), values.shape, strict=True):
        shape[position] = size
    return values.reshape(shape)
