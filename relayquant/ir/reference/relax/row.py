"""Rows of the table of Relax operators: what an operator computes, for any library of arrays.

A meaning that numpy and PyTorch share is written once, over the library `xp`: `numpy_library.Numpy`
or `relayquant.torch.operators.Torch`. What they compute differently is a function of both: sums in
a stated order, what has a gradient of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: (library, arguments, attributes) -> value
Meaning = Callable[[Any, list[Any], Any], Any]
#: The same of one library. Arguments are arrays, tuples of arrays, tuples of ints (shapes) or
#: numbers, as the operator takes them. NotImplemented is given for what is not covered.
OperatorFunction = Callable[[list[Any], Any], Any]


def accept(attrs: Any) -> str:
    """No attribute is refused."""
    return ""


@dataclass(frozen=True)
class Row:
    """One Relax operator.

    Attributes:
        name: Without "relax.".
        meaning: What it computes.
        attributes: Those that it honours, or that its result does not depend on. A call with
            another one away from its default has no meaning here.
        refuse: Attributes -> why there is no meaning with these values; "" if there is one.
        is_reference_only: Whether the interpreter has it alone: integers, indices and creation,
            which models that train are not made of.
    """

    name: str
    meaning: Meaning
    attributes: tuple[str, ...] = ()
    refuse: Callable[[Any], str] = accept
    is_reference_only: bool = False


def bind_row(row: Row, library: Any) -> OperatorFunction:
    """The meaning of a row in one library."""

    def compute(args: list[Any], attrs: Any) -> Any:
        return NotImplemented if row.refuse(attrs) else row.meaning(library, args, attrs)

    return compute


def bind_rows(rows: Iterable[Row], library: Any) -> dict[str, OperatorFunction]:
    """Name of the operator without "relax." -> what it computes in one library."""
    return {row.name: bind_row(row, library) for row in rows}


def call(function: str) -> Meaning:
    """A function of the library, of the arguments alone."""
    return lambda xp, args, attrs: getattr(xp, function)(*xp.convert_numbers(args))


def own(function: str) -> Meaning:
    """A function of (arguments, attributes) that each library has for itself."""
    return lambda xp, args, attrs: getattr(xp, function)(args, attrs)


def to_ints(values: Any) -> tuple[int, ...]:
    """An array of integer attributes as Python ints."""
    return tuple(int(value) for value in values)


def to_axes(values: Any) -> tuple[int, ...] | None:
    """An axis attribute: None (all axes), one integer or an array of them."""
    if values is None:
        return None
    return to_ints(values) if hasattr(values, "__len__") else (int(values),)


def to_axis(value: Any) -> int | None:
    """An axis attribute that is one integer, or None."""
    return None if value is None else int(value)


def align(xp: Any, values: Any, axes: Sequence[int], ndim: int) -> Any:
    """Parameters of the given axes, in their order, shaped to broadcast against `ndim` axes."""
    positions = [axis % ndim for axis in axes]
    if values.ndim > 1:
        values = xp.permute(values, sorted(range(len(positions)), key=positions.__getitem__))
    shape = [1] * ndim
    for position, size in zip(sorted(positions), values.shape, strict=True):
        shape[position] = size
    return values.reshape(shape)
