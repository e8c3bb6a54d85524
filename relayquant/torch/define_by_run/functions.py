"""Define-by-run: properties of PyTorch functions, by their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

#: Functions that read no value of a tensor.
METADATA = frozenset(
    [
        "size",
        "dim",
        "stride",
        "numel",
        "nelement",
        "ndimension",
        "element_size",
        "storage_offset",
        "get_device",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "is_shared",
        "is_conj",
        "is_neg",
        "is_pinned",
        "__len__",
        "__hash__",
        "has_names",
        "is_set_to",
        "is_same_size",
        "dense_dim",
        "sparse_dim",
        "requires_grad_",
        "_is_view",
        "_set_grad_enabled",
        "set_grad_enabled",
        "is_grad_enabled",
    ]
)
#: Properties that compute a tensor.
COMPUTED = frozenset(["T", "mT", "H", "mH", "real", "imag", "data"])
#: Functions with a different result each time.
RANDOM = frozenset(
    [
        "rand_like",
        "randn_like",
        "randint_like",
        "bernoulli",
        "multinomial",
        "normal",
        "poisson",
        "rrelu",
        "feature_dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "gumbel_softmax",
    ]
)
#: Functions that draw random numbers in training only.
DROPOUT = frozenset(["dropout", "dropout1d", "dropout2d", "dropout3d"])
#: Functions whose result size depends on values.
SIZED_BY_VALUES = frozenset(
    ["nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "_unique2"]
)
#: Functions that may change running statistics, which PyTorch does not count as a write -> the name
#: of the argument that selects it, the sixth one, and its default
STATISTICS = {"batch_norm": ("training", False), "instance_norm": ("use_input_stats", True)}
#: Functions that return a Python number: not part of a region.
NUMBERS = frozenset(["item", "tolist", "__bool__", "__int__", "__float__", "__index__"])
#: Python operators that write into their first argument -> the same without writing.
IN_PLACE = {
    "__iadd__": "__add__",
    "__isub__": "__sub__",
    "__imul__": "__mul__",
    "__itruediv__": "__truediv__",
}

#: Other functions that write into their first argument.
WRITERS = frozenset(
    [
        "__setitem__",
        "__set__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
    ]
)


@dataclass(frozen=True, eq=False)
class SubmoduleFunction:
    """A standalone or custom module as a function, called instead of the module.

    Attributes:
        name: Name of its class.
        form: The called object.
        reason: Reason in the ledger.
    """

    name: str
    form: Callable[..., Any]
    reason: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.form(*args, **kwargs)


def name_function(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the property that it reads."""
    if isinstance(function, SubmoduleFunction):
        return function.name
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        return function.__self__.__name__
    return name


def is_metadata(function: Callable[..., Any], name: str) -> bool:
    """Whether it reads metadata such as a shape or dtype: not an operator."""
    if name in METADATA:
        return True
    return getattr(function, "__name__", "") == "__get__" and name not in COMPUTED


class FunctionNames(dict[Any, tuple[str, bool]]):
    """Function -> (its name, whether it reads metadata), each looked up once."""

    def __missing__(self, function: Callable[..., Any]) -> tuple[str, bool]:
        name = name_function(function)
        self[function] = found = name, is_metadata(function, name)
        return found


def replaces_memory(function: Callable[..., Any], name: str) -> bool:
    """Whether it gives its first tensor other memory, which PyTorch does not count as a write."""
    is_property = name == "__set__" and getattr(function.__self__, "__name__", "") == "data"
    return is_property or name == "set_"


def changes_statistics(function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> bool:
    """Whether it normalizes by the batch and updates running statistics."""
    if name not in STATISTICS:
        return False

    def take(key: str, place: int, default: Any) -> Any:
        return kwargs.get(key, args[place] if len(args) > place else default)

    is_functional = function is getattr(torch.nn.functional, name)
    mean = take("running_mean", 1 if is_functional else 3, None)
    return bool(take(STATISTICS[name][0], 5, STATISTICS[name][1])) and mean is not None


def find_pure(
    function: Callable[..., Any], name: str, kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """Find a function, with arguments by name, that computes the result of an in-place function
    without writing.

    None if there is none.
    """
    if kwargs.get("inplace") is True:
        return function, {**kwargs, "inplace": False}
    if "out" in kwargs:
        return None
    pure = IN_PLACE.get(name)
    if pure is None and name.endswith("_") and not name.endswith("__"):
        pure = name[:-1]
    if pure is None:
        return None
    for owner in (torch.Tensor, torch, torch.nn.functional):
        if getattr(owner, name, None) is function and hasattr(owner, pure):
            return getattr(owner, pure), kwargs
    return None


def may_write(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function may write into its first tensor."""
    is_marked = name.endswith("_") and not name.endswith("__")
    return is_marked or "out" in kwargs or name in IN_PLACE or name in WRITERS
