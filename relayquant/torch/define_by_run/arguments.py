"""Define-by-run: split the arguments of a call into tensors and a template."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True)
class Slot:
    """Placeholder for a tensor in the arguments of a call, with its number."""

    index: int


#: Slots of most calls, made once: equal slots are the same object.
_SLOTS = tuple(map(Slot, range(64)))


def split_arguments(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return `value` with a `Slot` for each tensor, and append the tensors to `tensors`.

    Looks into tuples, lists, dicts and slices.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return kind([split_arguments(each, tensors) for each in value])
    if kind is dict:
        return {key: split_arguments(each, tensors) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        index = len(tensors)
        tensors.append(value)
        return _SLOTS[index] if index < len(_SLOTS) else Slot(index)
    if kind is slice:
        ends = (value.start, value.stop, value.step)
        if any(isinstance(end, torch.Tensor) for end in ends):
            return SliceTemplate(split_arguments(ends, tensors))
    return value


#: types of most arguments that are not tensors
_PLAIN = frozenset({int, float, bool, str, type(None)})


class FlatArguments:
    """The arguments of a call without nested containers.

    They are compared with another call's arguments without making a template.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        slots = [i for i, each in enumerate(args) if type(each) is Slot]
        plain = [i for i, each in enumerate(args) if type(each) is not Slot]
        self._take_tensors = _make_getter(slots)
        self._take_plain = _make_getter(plain)
        self._plain = self._take_plain(args)
        #: types of all arguments of the last call that was compared one by one; a call with the
        #: same types is compared at once
        self._types: tuple[type, ...] | None = None
        others = (*self._plain, *kwargs.values())
        self._is_bare = not others
        #: whether equal values and types are enough: 0.0 equals -0.0
        self._is_simple = Slot not in map(type, kwargs.values()) and not any(
            type(each) is float and not each for each in others
        )

    @staticmethod
    def of(template: Any) -> FlatArguments | None:
        """Return the flat arguments of a template (args, kwargs). None if tensors are inside
        lists or other containers.
        """
        args, kwargs = template
        is_flat = all(
            type(each) is Slot or type(each) in _PLAIN for each in (*args, *kwargs.values())
        )
        return FlatArguments(args, kwargs) if is_flat else None

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any] | None:
        """Return the tensors of another call in slot order, if its other arguments are equal.
        None if they may differ.
        """
        types = tuple(map(type, (*args, *kwargs.values()) if kwargs else args))
        if types == self._types:
            if self._is_bare:
                return args
            is_same = self._take_plain(args) == self._plain and kwargs == self._kwargs
            return self._take_tensors(args) if is_same else None
        if len(args) != len(self._args) or len(kwargs) != len(self._kwargs):
            return None
        tensors: list[torch.Tensor] = []
        for value, wanted in zip(args, self._args, strict=True):
            if not _take(value, wanted, tensors):
                return None
        for name, wanted in self._kwargs.items():
            if name not in kwargs or not _take(kwargs[name], wanted, tensors):
                return None
        if self._is_simple:
            self._types = types
        return tensors


def _make_getter(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Make a function: args -> the elements at some positions."""
    start, count = (places[0] if places else 0), len(places)
    if list(places) == list(range(start, start + count)):
        return operator.itemgetter(slice(start, start + count))
    return operator.itemgetter(*places)


def _take(value: Any, wanted: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether a value is the expected tensor or plain value."""
    if type(wanted) is Slot:
        tensors.append(value)
        return isinstance(value, torch.Tensor)
    return is_equal(value, wanted)


@dataclass(frozen=True)
class SliceTemplate:
    """A slice with a tensor among its ends."""

    ends: tuple[Any, Any, Any]


def join_arguments(template: Any, tensors: Sequence[Any]) -> Any:
    """Insert tensors into a template. The inverse of `split_arguments`."""
    kind = type(template)
    if kind is Slot:
        return tensors[template.index]
    if kind is tuple or kind is list:
        return kind([join_arguments(each, tensors) for each in template])
    if kind is dict:
        return {key: join_arguments(each, tensors) for key, each in template.items()}
    if kind is SliceTemplate:
        return slice(*join_arguments(template.ends, tensors))
    return template


def is_equal(a: Any, b: Any) -> bool:
    """Whether two templates are equal, including number types and the sign of zero.

    Objects that cannot be compared are not equal.
    """
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is tuple or kind is list:
        return len(a) == len(b) and all(map(is_equal, a, b))
    if kind is dict:
        return a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)
    if kind is SliceTemplate:
        return is_equal(a.ends, b.ends)
    if kind is slice:
        return is_equal((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    try:
        return bool(a == b) and (kind is not float or math.copysign(1, a) == math.copysign(1, b))
    except Exception:
        return False


@dataclass(frozen=True)
class ResultForm:
    """Structure of a call's result: one tensor (`kind` None), or a sequence of tensors and None.

    `present` tells which elements are tensors.
    """

    kind: type | None
    present: tuple[bool, ...] = (True,)

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Build the result from these tensors."""
        if self.kind is None:
            return tensors[0]
        rest = iter(tensors)
        values = [next(rest) if is_present else None for is_present in self.present]
        if self.kind in (tuple, list) or self.kind.__module__ == "torch.return_types":
            return self.kind(values)
        return self.kind(*values)  # a named tuple


#: One tensor.
SINGLE = ResultForm(None)


def read_result(result: Any) -> tuple[ResultForm, list[torch.Tensor]] | None:
    """Return structure and tensors of a result. None if it is not a tensor or a sequence of
    tensors.
    """
    if isinstance(result, torch.Tensor):
        return SINGLE, [result]
    if isinstance(result, tuple | list) and result:
        tensors = [each for each in result if isinstance(each, torch.Tensor)]
        present = tuple(isinstance(each, torch.Tensor) for each in result)
        if tensors and all(each is None for each in result if not isinstance(each, torch.Tensor)):
            return ResultForm(type(result), present), tensors
    return None
