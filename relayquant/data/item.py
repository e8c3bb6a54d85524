"""One item of a data set: the model's inputs, and the conversion of a user's item to a checked
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax

from relayquant.base.runtime import check_unmasked
from relayquant.errors import (
    ConfigError,
    DataError,
    ModelError,
    format_count,
    suggest_name,
    suggest_sizes,
)
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import tensor_dtype, tensor_shape
from relayquant.ir.rewrite.index_limits import describe_places, find_index_limits

Batch = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class InputInfo:
    """One input of the model. Symbolic dimensions are given by name.

    Attributes:
        places: For an input of indices, the number of elements that it selects from, else None.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    places: int | None = None

    def __post_init__(self) -> None:
        _find_dtype(self.dtype)

    @property
    def shape_text(self) -> str:
        """The shape as shown in messages."""
        return "(" + ", ".join(map(str, self.shape)) + ("," if len(self.shape) == 1 else "") + ")"


def count_samples(batch: Mapping[str, NDArray[Any]]) -> int:
    """Return the length of the first input's first axis, or 1 if it has none."""
    first = next(iter(batch.values()), np.empty(()))
    return len(first) if first.ndim else 1


def convert_item(item: object, inputs: tuple[InputInfo, ...], where: str) -> Batch:
    """Convert one item of a data set to `{input: array}`. `where` names it in messages: "Sample 3".

    Raises:
        DataError: names, rank, shape, dtype or values do not fit.
    """
    if isinstance(item, Mapping):
        check_names(set(item), inputs, where)
        values = [item[info.name] for info in inputs]
    elif isinstance(item, (tuple, list)) and not (len(inputs) == 1 and _is_number_list(item)):
        if len(item) != len(inputs):
            hint = (
                " If it carries labels, leave them out, for instance [x for x, label in data]."
                if len(item) > len(inputs)
                else ""
            )
            raise DataError(
                f"{where} is a {type(item).__name__} of {len(item)}, but the model has "
                f"{len(inputs)} input{'s' if len(inputs) != 1 else ''} "
                f"({list_names(inputs)}).{hint}",
                code="RQ302",
            )
        values = list(item)
    elif len(inputs) == 1:
        values = [item]
    else:
        raise DataError(
            f"{where} is of type {type(item).__name__}, but the model has {len(inputs)} inputs "
            f"({list_names(inputs)}); yield a dict by name or a tuple in this order.",
            code="RQ302",
        )
    dims: dict[str, tuple[int, str]] = {}
    batch: Batch = {}
    for info, value in zip(inputs, values, strict=True):
        array = _fit_shape(to_array(value, info.name, where), info, where)
        for dim, size in zip(info.shape, array.shape, strict=True):
            if isinstance(dim, str) and dim.isidentifier():
                known, first = dims.setdefault(dim, (size, info.name))
                if known != size:
                    raise DataError(
                        f"{where}: dimension {dim} is {known} in input {first!r} but {size} in "
                        f"input {info.name!r} of shape {array.shape}; the model needs them equal.",
                        code="RQ302",
                    )
        batch[info.name] = _fit_dtype(array, info, where)
    return batch


def _fit_shape(array: NDArray[Any], info: InputInfo, where: str) -> NDArray[Any]:
    """Give `array` the rank of the input and check its dimensions."""
    problem = (
        f"{where}: input {info.name!r} has shape {array.shape}, the model takes {info.shape_text}"
    )
    if array.ndim == len(info.shape) - 1:
        if _dims_match(array.shape, info.shape[1:]):
            if info.shape[0] == 1 or isinstance(info.shape[0], str):
                array = array[None]
            else:
                raise DataError(
                    f"{problem}. Axis 0, the batch, is missing: stack "
                    f"{format_count(info.shape[0], 'sample')} along a new axis 0, for instance "
                    "with np.stack.",
                    code="RQ302",
                )
        else:
            raise DataError(
                f"{problem}. It has one axis fewer; if axis 0 (the batch) is missing, add it with "
                "x[None], and check the other dimensions (layout NCHW or NHWC?).",
                code="RQ302",
            )
    if array.ndim != len(info.shape):
        raise DataError(
            f"{problem}: rank {array.ndim} instead of {len(info.shape)}. Add missing axes, the "
            "batch as axis 0, or remove axes of length 1.",
            code="RQ302",
        )
    check_dims(array.shape, info.shape, info, where)
    if array.size == 0:
        raise DataError(f"{problem}. It holds no element.", code="RQ302")
    return array


def _dims_match(shape: tuple[int, ...], dims: tuple[int | str, ...]) -> bool:
    return len(shape) == len(dims) and all(
        isinstance(dim, str) or dim == size for size, dim in zip(shape, dims, strict=True)
    )


def _fits_transposed(shape: tuple[int, ...], dims: tuple[int | str, ...]) -> bool:
    """Return whether `shape` has the fixed dimensions in another order. Symbolic dimensions match
    any size.
    """
    left = list(shape)
    for dim in dims:
        if isinstance(dim, int):
            if dim not in left:
                return False
            left.remove(dim)
    return len(left) == sum(isinstance(dim, str) for dim in dims)


def check_dims(
    shape: tuple[int, ...], dims: tuple[int | str, ...], info: InputInfo, where: str
) -> None:
    """Check `shape` against the last `len(dims)` dimensions of the input."""
    if _dims_match(shape, dims):
        return
    first = len(info.shape) - len(dims)
    wrong = [
        f"axis {first + i} is {size} instead of {dim}"
        for i, (size, dim) in enumerate(zip(shape, dims, strict=True))
        if not isinstance(dim, str) and dim != size
    ]
    hint = ""
    if _fits_transposed(shape, dims):
        hint = " The dimensions are the right ones in another order; transpose the data."
    elif wrong[0].startswith("axis 0 ") and len(wrong) == 1:
        hint = " The batch is fixed: yield batches of that size."
    if not _fits_transposed(shape, dims):
        hint += suggest_sizes(info.name, info.shape, (*info.shape[:first], *shape))
    raise DataError(
        f"{where}: input {info.name!r} does not fit the model's {info.shape_text}: "
        f"{', '.join(wrong)}.{hint}",
        code="RQ302",
    )


def _fit_dtype(array: NDArray[Any], info: InputInfo, where: str) -> NDArray[Any]:
    """Convert `array` to the input's dtype, C-contiguous. Check that it is finite."""
    target = _find_dtype(info.dtype)
    source, wanted = _find_kind(array.dtype), _find_kind(target)
    if source == "float":
        # Before and after the cast: float64 1e300 becomes infinite in float32.
        _check_finite(array, info, where, array.dtype)
    if array.dtype != target:
        if source is None or (source, wanted) in (("float", "int"), ("float", "bool")):
            advice = (
                f"cast it yourself if this is intended: x.astype({info.dtype!r})"
                if source == "float"
                else "give a numeric array"
            )
            raise DataError(
                f"{where}: input {info.name!r} has dtype {array.dtype}, the model takes "
                f"{info.dtype}; {advice}.",
                code="RQ302",
            )
        if wanted == "float":
            with np.errstate(over="ignore"):
                array = array.astype(target)
            _check_finite(array, info, where, target)
        else:
            low, high = int(array.min()), int(array.max())
            least, most = (0, 1) if wanted == "bool" else _find_limits(target)
            if low < least or high > most:
                raise DataError(
                    f"{where}: input {info.name!r} is {array.dtype} with values from {low} to "
                    f"{high}, which {info.dtype} of the model cannot hold ({least}..{most}).",
                    code="RQ302",
                )
            array = array.astype(target)
    if info.places is not None:
        _check_indices(array, info.places, info, where)
    return np.asarray(array, order="C")


def _check_indices(array: NDArray[Any], places: int, info: InputInfo, where: str) -> None:
    low, high = int(array.min()), int(array.max())
    if low < -places or high >= places:
        raise DataError(
            f"{where}: input {info.name!r} holds the index {high if high >= places else low}; "
            f"{describe_places(places)} Check that the data, or the tokenizer, belongs to the "
            "model.",
            code="RQ302",
        )


def _find_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _check_finite(array: NDArray[Any], info: InputInfo, where: str, dtype: np.dtype[Any]) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        nan = int(np.isnan(array).sum())
        infinite = int(array.size - finite.sum() - nan)
        raise DataError(
            f"{where}: input {info.name!r} holds {nan} NaN and {infinite} infinite of "
            f"{format_count(array.size, 'element')} in {dtype}; check the preprocessing.",
            code="RQ302",
        )


def _find_kind(dtype: np.dtype[Any]) -> str | None:
    """Return "float", "int" or "bool", or None if the dtype is not a number."""
    if dtype.kind == "f" or dtype.name.startswith(("bfloat", "float")):
        return "float"
    if dtype.kind in "iu":
        return "int"
    return "bool" if dtype.kind == "b" else None


def _find_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        raise ConfigError(
            f"An input has dtype {name!r}, which numpy does not know; give the model an input of a "
            "dtype numpy has, such as float32.",
            code="RQ302",
        ) from None


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or (
        hasattr(value, "__array__") and hasattr(value, "shape") and hasattr(value, "dtype")
    )


def _is_number_list(item: tuple[Any, ...] | list[Any]) -> bool:
    """Return whether `value` is a nested list of numbers: one array, not one entry per input."""
    first: Any = item
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    return isinstance(first, (int, float)) and not is_array(first)


def to_array(value: object, name: str, where: str) -> NDArray[Any]:
    """Convert `value` to an array: numpy, or an object with `__array__` or `numpy()` (torch, TVM
    tensors).
    """
    try:
        if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # numpy has no such dtype
            value = cast(Any, value).float()
        check_unmasked(value)
        array = np.asarray(value)
        convert = getattr(value, "numpy", None)
        if array.dtype.kind == "O" and callable(convert):
            array = np.asarray(convert())
    except Exception as error:
        # A foreign tensor may raise anything. Torch raises RuntimeError or TypeError.
        raise DataError(
            f"{where}: input {name!r} of type {type(value).__name__} cannot be converted to a "
            f"numpy array: {error}",
            code="RQ302",
        ) from None
    if array.dtype.kind not in "biufV" or array.dtype.names:
        raise DataError(
            f"{where}: input {name!r} of type {type(value).__name__} is not a numeric array "
            f"(numpy dtype {array.dtype}); allowed: booleans, integers, floats.",
            code="RQ302",
        )
    return array


def check_names(
    given: set[Any], inputs: tuple[InputInfo, ...], where: str, present: set[str] | None = None
) -> None:
    """Check that `given` names exactly the inputs. `present` are all names there are, for the
    message.
    """
    wanted = [info.name for info in inputs]
    unknown = sorted(str(name) for name in given if name not in wanted)
    if unknown:
        raise DataError(
            f"{where} gives {unknown[0]!r}, which is not an input of the model. "
            f"{suggest_name(unknown[0], wanted)}",
            code="RQ302",
        )
    missing = [name for name in wanted if name not in given]
    if missing:
        there = ", ".join(repr(name) for name in sorted(given if present is None else present))
        raise DataError(
            f"{where} lacks input {missing[0]!r}; it has {there or 'none'} and the model takes "
            f"{list_names(inputs)}.",
            code="RQ302",
        )


def list_names(inputs: tuple[InputInfo, ...]) -> str:
    return ", ".join(repr(info.name) for info in inputs)


def describe_inputs(mod: tvm.IRModule) -> tuple[InputInfo, ...]:
    """Return names, shapes, dtypes and limits of the parameters of main. Dimensions of unknown
    size get a name.

    Raises:
        ModelError: there is no main, or an input is not a tensor of known rank.
    """
    infos, func = [], Graph(mod).func
    places = find_index_limits(func)
    for param in func.params:
        if not isinstance(param.ty, relax.TensorType) or param.ty.ndim < 0:
            raise ModelError(
                f"Input {param.name!r} is {param.ty}; relayquant needs a tensor whose number of "
                "dimensions is known. Declare it so in the model.",
                code="RQ204",
            )
        shape = tensor_shape(param)
        if shape is None:
            shape = tuple(f"{param.name}.{i}" for i in range(param.ty.ndim))
        infos.append(InputInfo(param.name, shape, tensor_dtype(param), places.get(param.name)))
    return tuple(infos)
