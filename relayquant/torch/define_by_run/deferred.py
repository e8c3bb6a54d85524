"""Define-by-run, converted: values of a region that its operators return before it is computed.

They are made often: those that nobody holds any more serve again.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch  # pyright: ignore[reportMissingImports]
from torch.utils import _pytree as pytree  # pyright: ignore[reportMissingImports]

from relayquant.base.qtypes import INTEGER_LIMITS, QParams
from relayquant.torch.define_by_run.functions import is_metadata, name_function


class Computation(Protocol):
    """What computes values that no module gives: a pass of a region."""

    def compute_in_float(self) -> Mapping[int, torch.Tensor]:
        """The values that the code has come to, by number."""
        ...


class DeferredTensor(torch.Tensor):
    """A value of a region: shape and dtype now, its numbers when the region is through.

    Attributes:
        passing: The pass of the region that computes it; None once it has its numbers.
        form: Shape and dtype.
        number: Which value of the region.
        floats: Its numbers, once they are needed in float.
        integers: Its numbers on the grid of a boundary.
    """

    passing: Computation | None
    number: int
    form: tuple[tuple[int, ...], Any]
    floats: torch.Tensor | None
    integers: tuple[torch.Tensor, QParams] | None

    @staticmethod
    def make(
        shape: Sequence[int], dtype: Any, passing: Computation | None, number: int
    ) -> DeferredTensor:
        """A value that is not computed yet."""
        with torch._C.DisableTorchFunction():
            value = torch.Tensor._make_wrapper_subclass(DeferredTensor, shape, dtype=dtype)
        value.form = tuple(shape), dtype
        value.begin(passing, number)
        return value

    def begin(self, passing: Computation | None, number: int) -> None:
        """It is a value of this pass, not computed yet."""
        self.passing, self.number = passing, number
        self.floats = self.integers = None

    # Questions that code asks often: answered here, they do not pass PyTorch's dispatch.

    def dim(self) -> int:
        return len(self.form[0])

    def size(self, dim: int | None = None) -> Any:
        shape = torch.Size(self.form[0])
        return shape if dim is None else shape[dim]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_metadata(func, name_function(func)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*take_real(args), **take_real(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*take_real(args), **take_real(kwargs or {}))


def take_real(value: Any) -> Any:
    """`value` with float tensors in place of deferred ones, at any depth."""
    if isinstance(value, DeferredTensor):
        return compute(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([take_real(each) for each in value])
    if kind is dict:
        return {key: take_real(each) for key, each in value.items()}
    if kind is slice:
        return slice(*map(take_real, (value.start, value.stop, value.step)))
    return value


def compute_result(result: Any) -> Any:
    """What a model returns, with float tensors in place of deferred ones."""
    return replace_tensors(result, take_float)


def take_float(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, in float where it is deferred."""
    return compute(tensor) if isinstance(tensor, DeferredTensor) else tensor


def replace_tensors(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What a model returns, with others in place of its tensors; data classes are filled with them
    in place.
    """

    def take_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for name, value in list(vars(leaf).items()) if hasattr(leaf, "__dict__") else ():
                object.__setattr__(leaf, name, replace_tensors(value, change))
        return leaf

    return pytree.tree_map(take_leaf, result)


def compute(value: DeferredTensor) -> torch.Tensor:
    """The numbers of a value, in float; what no module gives is computed in PyTorch."""
    if value.floats is None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if value.integers is not None:
                value.floats = dequantize_tensor(*value.integers)
            else:
                assert value.passing is not None
                value.floats = value.passing.compute_in_float()[value.number]
    return value.floats


def quantize_tensor(tensor: torch.Tensor, qparams: QParams) -> torch.Tensor:
    """What `qnn.quantize` computes: half to even, one division."""
    low, high = INTEGER_LIMITS[qparams.dtype]
    steps = torch.nan_to_num(tensor / float(qparams.scale))  # NaN gives the zero point
    rounded = torch.round(steps) + int(qparams.zero_point)
    return rounded.clamp(low, high).to(getattr(torch, qparams.dtype))


def dequantize_tensor(tensor: torch.Tensor, qparams: QParams) -> torch.Tensor:
    """What `qnn.dequantize` computes."""
    integers = tensor.to(torch.int32) - int(qparams.zero_point)
    return integers * float(qparams.scale)


class ValuePool:
    """Values that were made, for those that need some of the same kind; for one thread: between
    the look at who holds a value and its use no other code may come to it.
    """

    def __init__(self) -> None:
        self._values: defaultdict[object, list[DeferredTensor]] = defaultdict(list)
        #: references to a value that nobody else holds, counted the way they will be: which of them
        #: the interpreter counts is its own affair (3.14 counts fewer than 3.11)
        self._unheld = count_references([DeferredTensor.make((), torch.float32, None, 0)], 0)

    def make(
        self, kind: object, form: tuple[tuple[int, ...], Any], passing: Computation, number: int
    ) -> DeferredTensor:
        """A value that is not computed yet: one of that kind which nobody holds any more, without
        what the user's code has set on it, or a new one.
        """
        values = self._values[kind]
        for i in range(len(values)):
            if count_references(values, i) == self._unheld and values[i].form == form:
                value = values[i]
                if weakref.getweakrefcount(value):
                    continue  # somebody waits for its end
                value.__dict__.clear()
                value.form = form
                value.begin(passing, number)
                return value
        value = DeferredTensor.make(*form, passing, number)
        if len(values) == POOL_SIZE:
            values.pop(0)
        values.append(value)
        return value


#: values of one kind that are kept; a loop holds two of its state
POOL_SIZE = 3


def count_references(values: Sequence[object], i: int) -> int:
    """References to a value of a list, that of the list among them."""
    return sys.getrefcount(values[i])
