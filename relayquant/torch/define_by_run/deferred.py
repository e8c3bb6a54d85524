"""Define-by-run, converted: values of a region that its operators return before they are computed.

They are created often, so values that nobody holds any more are reused.
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
    """Computes values in PyTorch that no module returns: a pass of a region."""

    def compute_in_float(self) -> Mapping[int, torch.Tensor]:
        """Compute the values that the code has reached, by number."""
        ...


class DeferredTensor(torch.Tensor):
    """A value of a region. Shape and dtype are known, its numbers when the region has finished.

    Attributes:
        region_pass: The pass of the region that computes it. None after it is computed.
        form: Shape and dtype.
        number: Number of the value in the region.
        floats: Its numbers in float, once needed.
        integers: Its integers with the parameters of a boundary.
    """

    region_pass: Computation | None
    number: int
    form: tuple[tuple[int, ...], Any]
    floats: torch.Tensor | None
    integers: tuple[torch.Tensor, QParams] | None

    @staticmethod
    def make(
        shape: Sequence[int], dtype: Any, region_pass: Computation | None, number: int
    ) -> DeferredTensor:
        """Make a value that is not computed yet."""
        with torch._C.DisableTorchFunction():
            value = torch.Tensor._make_wrapper_subclass(DeferredTensor, shape, dtype=dtype)
        value.form = tuple(shape), dtype
        value.begin(region_pass, number)
        return value

    def begin(self, region_pass: Computation | None, number: int) -> None:
        """Bind the value to this pass, not computed yet."""
        self.region_pass, self.number = region_pass, number
        self.floats = self.integers = None

    # Frequent queries of code. Answering them here avoids PyTorch's dispatch.

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
    """Replace deferred tensors by float tensors, at any depth."""
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
    """Replace deferred tensors by float tensors in the model's result."""
    return replace_tensors(result, take_float)


def take_float(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, in float if it is deferred."""
    return compute(tensor) if isinstance(tensor, DeferredTensor) else tensor


def replace_tensors(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors in a model's result. Data classes are changed in place."""

    def take_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for name, value in list(vars(leaf).items()) if hasattr(leaf, "__dict__") else ():
                object.__setattr__(leaf, name, replace_tensors(value, change))
        return leaf

    return pytree.tree_map(take_leaf, result)


def compute(value: DeferredTensor) -> torch.Tensor:
    """Compute the numbers of a value in float. PyTorch computes what no module returns."""
    if value.floats is None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if value.integers is not None:
                value.floats = dequantize_tensor(*value.integers)
            else:
                assert value.region_pass is not None
                value.floats = value.region_pass.compute_in_float()[value.number]
    return value.floats


def quantize_tensor(tensor: torch.Tensor, qparams: QParams) -> torch.Tensor:
    """Same as `qnn.quantize`: round half to even, one division."""
    low, high = INTEGER_LIMITS[qparams.dtype]
    steps = torch.nan_to_num(tensor / float(qparams.scale))  # NaN becomes the zero point
    rounded = torch.round(steps) + int(qparams.zero_point)
    return rounded.clamp(low, high).to(getattr(torch, qparams.dtype))


def dequantize_tensor(tensor: torch.Tensor, qparams: QParams) -> torch.Tensor:
    """Same as `qnn.dequantize`."""
    integers = tensor.to(torch.int32) - int(qparams.zero_point)
    return integers * float(qparams.scale)


class ValuePool:
    """Deferred values that can be reused for values of the same kind, in one thread.

    No other code may run between the check that nobody holds a value and its reuse.
    """

    def __init__(self) -> None:
        self._values: defaultdict[object, list[DeferredTensor]] = defaultdict(list)
        #: References to a value that nobody else holds, counted in the same way. The number depends
        #: on the interpreter (3.14 counts fewer than 3.11).
        self._unheld = count_references([DeferredTensor.make((), torch.float32, None, 0)], 0)

    def make(
        self, kind: object, form: tuple[tuple[int, ...], Any], region_pass: Computation, number: int
    ) -> DeferredTensor:
        """Make a value that is not computed yet.

        It reuses a value of this kind that nobody holds any more, without attributes set by the
        user's code. Otherwise it makes a new one.
        """
        values = self._values[kind]
        for i in range(len(values)):
            if count_references(values, i) == self._unheld and values[i].form == form:
                value = values[i]
                if weakref.getweakrefcount(value):
                    continue  # a weak reference waits for its end
                value.__dict__.clear()
                value.form = form
                value.begin(region_pass, number)
                return value
        value = DeferredTensor.make(*form, region_pass, number)
        if len(values) == POOL_SIZE:
            values.pop(0)
        values.append(value)
        return value


#: reusable values of one kind; a loop holds two values of its state
POOL_SIZE = 3


def count_references(values: Sequence[object], i: int) -> int:
    """Count references to a value in a list, including the list's."""
    return sys.getrefcount(values[i])
