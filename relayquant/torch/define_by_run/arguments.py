"""Define-by-run: the arguments of a call, its tensors apart from the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor in the arguments of a call, by its number."""

    index: int


#: Those of most calls, made once: equal ones are the same object.
_SLOTS = tuple(map(Slot, range(64)))


def split_arguments(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a `Slot` in place of each tensor, which are appended to `tensors`; tuples,
    lists, dicts and slices are looked into.
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


#: types of most arguments that are no tensors
_PLAIN = frozenset({int, float, bool, str, type(None)})


class FlatArguments:
    """The arguments of a call that holds its tensors and plain values side by side, compared
    without a template being made of those of another call.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, tuple(kwargs.items())
        self._has_plain = bool(kwargs) or any(type(each) is not Slot for each in args)

    @staticmethod
    def of(template: Any) -> FlatArguments | None:
        """Those of a template (args, kwargs); None where tensors are within lists and the like."""
        args, kwargs = template
        is_flat = all(
            type(each) is Slot or type(each) in _PLAIN for each in (*args, *kwargs.values())
        )
        return FlatArguments(args, kwargs) if is_flat else None

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any] | None:
        """The tensors of another call that has equal arguments but for these, in the order of their
        slots; None for one that may have others.
        """
        if len(args) != len(self._args) or len(kwargs) != len(self._kwargs):
            return None
        if not self._has_plain:
            return args if all(isinstance(value, torch.Tensor) for value in args) else None
        tensors: list[torch.Tensor] = []
        for value, wanted in zip(args, self._args, strict=True):
            if not _take(value, wanted, tensors):
                return None
        for name, wanted in self._kwargs:
            if name not in kwargs or not _take(kwargs[name], wanted, tensors):
                return None
        return tensors


def _take(value: Any, wanted: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether a value is the tensor or the plain value that is wanted there."""
    if type(wanted) is Slot:
        tensors.append(value)
        return isinstance(value, torch.Tensor)
    return type(value) is type(wanted) and value == wanted


@dataclass(frozen=True)
class SliceTemplate:
    """A slice with a tensor among its ends."""

    ends: tuple[Any, Any, Any]


def join_arguments(template: Any, tensors: Sequence[Any]) -> Any:
    """What `split_arguments` was given, with other tensors."""
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
    """Whether two templates say the same; what cannot be compared does not."""
    try:
        return bool(a == b)
    except Exception:
        return False


@dataclass(frozen=True)
class ResultForm:
    """What a call returns: one tensor (`kind` None), or a sequence of tensors (and None, where
    `present` says so).
    """

    kind: type | None
    present: tuple[bool, ...] = (True,)

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result of these tensors."""
        if self.kind is None:
            return tensors[0]
        rest = iter(tensors)
        values = [next(rest) if is_present else None for is_present in self.present]
        if self.kind in (tuple, list) or self.kind.__module__ == "torch.return_types":
            return self.kind(values)
        return self.kind(*values)  # a named tuple


def read_result(result: Any) -> tuple[ResultForm, list[torch.Tensor]] | None:
    """Form and tensors of a result; None for one that is no tensor or sequence of tensors."""
    if isinstance(result, torch.Tensor):
        return ResultForm(None), [result]
    if isinstance(result, tuple | list) and result:
        tensors = [each for each in result if isinstance(each, torch.Tensor)]
        present = tuple(isinstance(each, torch.Tensor) for each in result)
        if tensors and all(each is None for each in result if not isinstance(each, torch.Tensor)):
            return ResultForm(type(result), present), tensors
    return None
