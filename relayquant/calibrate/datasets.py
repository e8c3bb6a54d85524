"""From whatever the user calls a data set to checked batches: dicts of arrays, in input order.

Everything that comes in is untrusted: archives are read without pickle and piece by piece, and each
batch is checked against the model's inputs before any of it reaches compiled code.
"""

from __future__ import annotations

import inspect
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from relayquant.errors import ConfigError, DataError, suggest_name

Batch = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class InputInfo:
    """One input of the model. Symbolic dimensions are given by name."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str

    def __post_init__(self) -> None:
        _find_dtype(self.dtype)

    @property
    def shape_text(self) -> str:
        """The shape as messages print it."""
        return "(" + ", ".join(map(str, self.shape)) + ("," if len(self.shape) == 1 else "") + ")"


@dataclass(frozen=True)
class Dataset:
    """Checked batches; iterating starts from the beginning each time.

    Yields `{input name: array}` in input order; arrays are C-contiguous and have the input's dtype
    and rank. They may share memory with the user's arrays: do not write into them.

    Attributes:
        inputs: what the batches were checked against.
        length: number of batches, or None when it cannot be known beforehand.
        limit: at most so many batches are yielded.
    """

    inputs: tuple[InputInfo, ...]
    length: int | None
    open_items: Callable[[], Iterator[Any]]  #: raw items, from the beginning
    limit: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Checked batches.

        Raises:
            DataError: there is none, or one does not fit the inputs; names sample and input.
        """
        found = False
        if self.limit is not None and self.limit < 1:
            return
        for index, item in enumerate(self.open_items()):
            found = True
            yield convert_item(item, self.inputs, index)
            if self.limit is not None and index + 1 >= self.limit:
                break
        if not found:
            raise DataError(
                "The data set yields no sample; calibration needs at least one, and a few hundred "
                "representative ones to be good. If it is a function, it must return a fresh "
                "iterator at every call."
            )

    def head(self, count: int) -> Dataset:
        """The first `count` batches (fewer if there are fewer).

        Raises:
            ConfigError: count is not an integer >= 1.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"Dataset.head takes an integer >= 1, got {count!r}.")
        limit = count if self.limit is None else min(count, self.limit)
        length = None if self.length is None else min(self.length, limit)
        return replace(self, limit=limit, length=length)


def open_dataset(
    dataset: object, inputs: Iterable[InputInfo], *, batch_size: int | None = None
) -> Dataset:
    """`dataset` as checked batches for a model with `inputs`.

    `dataset` is one of
    - anything iterable again and again that yields dicts `{input: array}`, tuples or lists in input
      order, or (one input) single arrays: each item is one batch;
    - a path to an .npz with an array per input, samples along axis 0 (other arrays in it, such as
      labels, are ignored; with one input and one array the name does not matter). It is read batch
      by batch and never loaded as a whole;
    - a dict of such arrays, or (one input) one such array. An array therefore never is a single
      batch by itself: it is cut along axis 0. Put it in a list to have it as one batch;
    - a function without arguments that returns a new iterator of items at every call;
    - an object with `__len__` and `__getitem__`.

    Arrays with samples along axis 0 are cut into batches of `batch_size`: by default the model's
    own fixed batch, else 1. Remaining samples that do not fill a fixed batch are left out. Arrays
    with one axis more than the input hold one whole batch per entry of axis 0.

    An item that lacks exactly axis 0 gets it when the model's first dimension is 1 or symbolic.
    Floats are cast to the input's float dtype, integers to floats, and integers to integers that
    hold them; floats are never cast to integers. NaN and infinity are errors.

    Raises:
        DataError: the data set cannot be read, can be read only once, or does not fit the inputs.
            Items are checked while iterating, arrays and archives also at once.
        ConfigError: batch_size is not an integer >= 1, or not the model's fixed batch.
    """
    inputs = tuple(inputs)
    if isinstance(dataset, Dataset):
        return replace(dataset, inputs=inputs)
    if isinstance(dataset, (str, os.PathLike)):
        return _open_archive(Path(dataset), inputs, batch_size)
    if isinstance(dataset, Mapping):
        return _open_arrays(_convert_mapping(dataset), inputs, batch_size)
    if _is_array(dataset):
        if len(inputs) != 1:
            raise DataError(
                f"The data set is one array, but the model has {len(inputs)} inputs "
                f"({_list_names(inputs)}); pass a dict of arrays."
            )
        return _open_arrays(
            {inputs[0].name: _to_array(dataset, inputs[0].name, "the data set")}, inputs, batch_size
        )
    if batch_size is not None:
        raise ConfigError(
            "batch_size applies to arrays and .npz files; an iterable yields batches as they are."
        )
    return Dataset(inputs, _find_length(dataset), _open_iterable(dataset))


# --- Iterables --------------------------------------------------------------------------------


def _find_length(dataset: object) -> int | None:
    if not hasattr(dataset, "__len__"):
        return None
    try:
        return len(dataset)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None  # a loader around an iterable without a length


def _open_iterable(dataset: Any) -> Callable[[], Iterator[Any]]:
    is_class = isinstance(dataset, type)  # has the methods of its instances, but is a function
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
        "that returns an iterator."
    )


def _refuse_one_shot(dataset: Any) -> None:
    # Not by calling iter(): a loader may start its workers there.
    if hasattr(dataset, "__next__"):
        raise DataError(
            f"The data set is a {type(dataset).__name__}, which can be read only once, but "
            "calibration reads it several times. Pass list(...) of it, or a function that returns "
            "a new iterator at every call (for a generator function: the function itself, not its "
            "result)."
        )


def _check_callable(source: Callable[..., Any]) -> None:
    try:
        inspect.signature(source).bind()
    except ValueError:
        return  # a built-in that does not tell: the call itself will
    except TypeError as error:
        raise DataError(
            f"The data set is the function {getattr(source, '__qualname__', source)!r}, which "
            f"cannot be called without arguments ({error}); pass lambda: f(...)."
        ) from None


def _call_source(source: Callable[[], Any]) -> Iterator[Any]:
    items = source()
    if isinstance(items, (str, bytes, Mapping)) or _is_array(items):
        raise DataError(
            f"The data set's function returned a {type(items).__name__}; it must return an "
            "iterator of samples."
        )
    try:
        return iter(items)
    except TypeError:
        raise DataError(
            f"The data set's function returned {type(items).__name__}, which is not iterable; it "
            "must return an iterator of samples."
        ) from None


# --- Arrays with samples along axis 0 ---------------------------------------------------------


def _convert_mapping(arrays: Mapping[Any, Any]) -> dict[str, NDArray[Any]]:
    return {str(k): _to_array(v, str(k), "the data set") for k, v in arrays.items()}


@dataclass(frozen=True)
class _Cut:
    """How arrays with samples along axis 0 become batches."""

    count: int  #: entries of axis 0 of every array
    size: int  #: entries per batch
    stacked: bool  #: every entry is a whole batch
    partial: bool  #: a smaller last batch is allowed

    @property
    def batches(self) -> int:
        if self.stacked:
            return self.count
        return -(-self.count // self.size) if self.partial else self.count // self.size

    def sizes(self) -> Iterator[int]:
        """Entries of each batch, in order."""
        for i in range(self.batches):
            yield min(self.size, self.count - i * self.size)


def _plan_cut(
    shapes: Mapping[str, tuple[int, ...]], inputs: tuple[InputInfo, ...], batch_size: int | None
) -> _Cut:
    """Raises DataError if arrays of these shapes do not fit the inputs."""
    counts = {name: shape[0] for name, shape in shapes.items() if shape}
    if len(counts) < len(shapes) or len(set(counts.values())) > 1:
        listed = ", ".join(f"{name!r}: {shape}" for name, shape in shapes.items())
        raise DataError(
            f"The arrays of the data set need the same number of samples along axis 0; shapes are "
            f"{listed}."
        )
    count = next(iter(counts.values()))
    if count == 0:
        raise DataError("The arrays of the data set hold no sample: axis 0 has length 0.")
    extra = {len(shapes[info.name]) - len(info.shape) for info in inputs}
    if extra not in ({0}, {1}):
        listed = "; ".join(
            f"{i.name!r} has shape {shapes[i.name]}, the model takes {i.shape_text}" for i in inputs
        )
        raise DataError(
            f"The arrays of the data set do not have the rank of the inputs: {listed}. Give arrays "
            "with samples along axis 0 and otherwise the shape of the input."
        )
    stacked = extra == {1}
    for info in inputs:
        _check_dims(shapes[info.name][1:], info.shape[0 if stacked else 1 :], info, "The data set")
    if stacked:
        if batch_size is not None:
            raise ConfigError(
                "batch_size does not apply: the arrays have one axis more than the inputs, so each "
                "entry of axis 0 is a whole batch."
            )
        return _Cut(count, 1, True, False)
    fixed = {info.shape[0] for info in inputs if isinstance(info.shape[0], int)}
    if len(fixed) > 1:
        raise DataError(
            f"The inputs {_list_names(inputs)} have different fixed batches {sorted(fixed)}, so "
            "arrays cannot be cut along axis 0; pass a list of dicts, one per sample."
        )
    if batch_size is not None and (
        isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1
    ):
        raise ConfigError(f"batch_size is {batch_size!r}; allowed: an integer >= 1.")
    size = next(iter(fixed), batch_size or 1)
    if batch_size not in (None, size):
        raise ConfigError(
            f"batch_size is {batch_size}, but the model's batch is fixed at {size}; leave it out."
        )
    if fixed and count < size:
        raise DataError(
            f"The data set has {count} samples, fewer than one batch of the model ({size})."
        )
    return _Cut(count, size, False, not fixed)


def _open_arrays(
    arrays: Mapping[str, NDArray[Any]], inputs: tuple[InputInfo, ...], batch_size: int | None
) -> Dataset:
    _check_names(set(arrays), inputs, "The data set")
    cut = _plan_cut({info.name: arrays[info.name].shape for info in inputs}, inputs, batch_size)

    def open_items() -> Iterator[Batch]:
        start = 0
        for size in cut.sizes():
            part = start if cut.stacked else slice(start, start + size)
            yield {info.name: arrays[info.name][part] for info in inputs}
            start += size

    return Dataset(inputs, cut.batches, open_items)


# --- Archives ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    """An array inside an .npz, by its header."""

    file: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool


def _open_archive(path: Path, inputs: tuple[InputInfo, ...], batch_size: int | None) -> Dataset:
    advice = "Write one with np.savez(path, **{input name: array with samples along axis 0})."
    if path.suffix.lower() == ".npy":
        raise DataError(
            f"{path} is an .npy file, which names no input; pass np.load(path), or an .npz. "
            f"{advice}"
        )
    if not path.is_file():
        raise DataError(f"The data set {str(path)!r} is not a file; expected an .npz. {advice}")
    with _read_archive(path) as archive:
        files = {f[: -len(".npy")]: f for f in archive.namelist() if f.endswith(".npy")}
        if len(inputs) == 1 and len(files) == 1:
            files = {inputs[0].name: next(iter(files.values()))}
        wanted = {info.name for info in inputs}
        _check_names(set(files) & wanted, inputs, f"The data set {path}", present=set(files))
        members = {name: _read_header(path, archive, files[name]) for name in sorted(wanted)}
    shapes = {info.name: members[info.name].shape for info in inputs}
    cut = _plan_cut(shapes, inputs, batch_size)

    def open_items() -> Iterator[Batch]:
        with _read_archive(path) as archive:
            readers = {i.name: _read_entries(path, archive, members[i.name], cut) for i in inputs}
            for _ in range(cut.batches):
                yield {name: next(reader) for name, reader in readers.items()}

    return Dataset(inputs, cut.batches, open_items)


def _read_archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"The data set {path} cannot be read as an .npz: {error}.") from None


def _parse_header(path: Path, file: str, stream: IO[bytes]) -> _Member:
    """Reads the header of an .npy; the stream then stands at the data."""
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran_order, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise DataError(f"The data set {path}: {file} has the unknown .npy version {version}.")
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"The data set {path}: {file} has no valid header: {error}.") from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"The data set {path}: {file} is damaged: {error}.") from None
    if dtype.hasobject:
        raise DataError(
            f"The data set {path}: {file} holds Python objects, which are not loaded (they could "
            "run code). Store plain numeric arrays."
        )
    return _Member(file, shape, dtype, fortran_order)


def _read_header(path: Path, archive: zipfile.ZipFile, file: str) -> _Member:
    with _open_member(path, archive, file) as stream:
        member = _parse_header(path, file, stream)
        header = stream.tell()
    needed, there = header + math.prod(member.shape) * member.dtype.itemsize, archive.getinfo(file)
    if min(member.shape, default=0) < 0 or needed != there.file_size:
        raise DataError(
            f"The data set {path}: {file} says shape {member.shape} and {member.dtype}, which is "
            f"{needed} bytes, but it has {there.file_size}; the file is damaged."
        )
    return member


def _open_member(path: Path, archive: zipfile.ZipFile, file: str) -> IO[bytes]:
    try:
        return archive.open(file)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError) as error:
        # RuntimeError: encrypted; NotImplementedError: unknown compression.
        raise DataError(f"The data set {path}: {file} cannot be read: {error}.") from None


def _read_entries(
    path: Path, archive: zipfile.ZipFile, member: _Member, cut: _Cut
) -> Iterator[NDArray[Any]]:
    """One array per batch. Holds one batch, or for Fortran order (rare) the whole array."""
    with _open_member(path, archive, member.file) as stream:
        _parse_header(path, member.file, stream)
        if member.fortran_order:
            data = _read_exactly(path, member, stream, math.prod(member.shape))
            whole, start = data.reshape(member.shape, order="F"), 0
            for size in cut.sizes():
                yield whole[start] if cut.stacked else whole[start : start + size]
                start += size
            return
        for size in cut.sizes():
            count = size * math.prod(member.shape[1:])
            data = _read_exactly(path, member, stream, count)
            shape = member.shape[1:] if cut.stacked else (size, *member.shape[1:])
            yield data.reshape(shape)


def _read_exactly(path: Path, member: _Member, stream: IO[bytes], count: int) -> NDArray[Any]:
    wanted = count * member.dtype.itemsize
    try:
        data = stream.read(wanted)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
        raise DataError(f"The data set {path}: {member.file} is damaged: {error}.") from None
    if len(data) != wanted:
        raise DataError(f"The data set {path}: {member.file} ends early; the file is damaged.")
    return np.frombuffer(data, member.dtype, count)


# --- One item ---------------------------------------------------------------------------------


def convert_item(item: object, inputs: tuple[InputInfo, ...], index: int) -> Batch:
    """One item of a data set as `{input: array}`; `index` is its number, for messages.

    Raises:
        DataError: names, rank, shape, dtype or values do not fit.
    """
    where = f"Sample {index}"
    if isinstance(item, Mapping):
        _check_names(set(item), inputs, where)
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
                f"({_list_names(inputs)}).{hint}"
            )
        values = list(item)
    elif len(inputs) == 1:
        values = [item]
    else:
        raise DataError(
            f"{where} is of type {type(item).__name__}, but the model has {len(inputs)} inputs "
            f"({_list_names(inputs)}); yield a dict by name or a tuple in this order."
        )
    dims: dict[str, tuple[int, str]] = {}
    batch: Batch = {}
    for info, value in zip(inputs, values, strict=True):
        array = _fit_shape(_to_array(value, info.name, where), info, where)
        for dim, size in zip(info.shape, array.shape, strict=True):
            if isinstance(dim, str) and dim.isidentifier():
                known, first = dims.setdefault(dim, (size, info.name))
                if known != size:
                    raise DataError(
                        f"{where}: dimension {dim} is {known} in input {first!r} but {size} in "
                        f"input {info.name!r} of shape {array.shape}; the model needs them equal."
                    )
        batch[info.name] = _fit_dtype(array, info, where)
    return batch


def _fit_shape(array: NDArray[Any], info: InputInfo, where: str) -> NDArray[Any]:
    """`array` with the rank of the input, its dimensions checked."""
    problem = (
        f"{where}: input {info.name!r} has shape {array.shape}, the model takes {info.shape_text}"
    )
    if array.ndim == len(info.shape) - 1:
        if _dims_match(array.shape, info.shape[1:]):
            if info.shape[0] == 1 or isinstance(info.shape[0], str):
                array = array[None]
            else:
                raise DataError(
                    f"{problem}. Axis 0, the batch, is missing: stack {info.shape[0]} samples "
                    "along a new axis 0, for instance with np.stack."
                )
        else:
            raise DataError(
                f"{problem}. It has one axis fewer; if axis 0 (the batch) is missing, add it with "
                "x[None], and check the other dimensions (layout NCHW or NHWC?)."
            )
    if array.ndim != len(info.shape):
        raise DataError(
            f"{problem}: rank {array.ndim} instead of {len(info.shape)}. Add missing axes, the "
            "batch as axis 0, or remove axes of length 1."
        )
    _check_dims(array.shape, info.shape, info, where)
    if array.size == 0:
        raise DataError(f"{problem}. It holds no element.")
    return array


def _dims_match(shape: tuple[int, ...], dims: tuple[int | str, ...]) -> bool:
    return len(shape) == len(dims) and all(
        isinstance(dim, str) or dim == size for size, dim in zip(shape, dims, strict=True)
    )


def _fits_transposed(shape: tuple[int, ...], dims: tuple[int | str, ...]) -> bool:
    """Whether `shape` holds the fixed dimensions, in any order; symbolic ones take what is left."""
    left = list(shape)
    for dim in dims:
        if isinstance(dim, int):
            if dim not in left:
                return False
            left.remove(dim)
    return len(left) == sum(isinstance(dim, str) for dim in dims)


def _check_dims(
    shape: tuple[int, ...], dims: tuple[int | str, ...], info: InputInfo, where: str
) -> None:
    """`shape` against the last `len(dims)` dimensions of the input."""
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
        hint = (
            " The batch is fixed: yield batches of that size, or export the model with a free one."
        )
    raise DataError(
        f"{where}: input {info.name!r} does not fit the model's {info.shape_text}: "
        f"{', '.join(wrong)}.{hint}"
    )


def _fit_dtype(array: NDArray[Any], info: InputInfo, where: str) -> NDArray[Any]:
    """`array` in the input's dtype, C-contiguous, finite."""
    target = _find_dtype(info.dtype)
    source, wanted = _find_kind(array.dtype), _find_kind(target)
    if source == "float":
        # Before and after the cast: float64 1e300 becomes infinite in float32.
        _check_finite(array, info, where, array.dtype)
    if array.dtype != target:
        if source is None or (source, wanted) in (("float", "int"), ("float", "bool")):
            advice = (
                f"cast it yourself if that is meant: x.astype({info.dtype!r})"
                if source == "float"
                else "give a numeric array"
            )
            raise DataError(
                f"{where}: input {info.name!r} has dtype {array.dtype}, the model takes "
                f"{info.dtype}; {advice}."
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
                    f"{high}, which {info.dtype} of the model cannot hold ({least}..{most})."
                )
            array = array.astype(target)
    return np.asarray(array, order="C")


def _find_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _check_finite(array: NDArray[Any], info: InputInfo, where: str, dtype: np.dtype[Any]) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        nan = int(np.isnan(array).sum())
        infinite = int(array.size - finite.sum() - nan)
        raise DataError(
            f"{where}: input {info.name!r} holds {nan} NaN and {infinite} infinite of {array.size} "
            f"elements in {dtype}; check the preprocessing."
        )


def _find_kind(dtype: np.dtype[Any]) -> str | None:
    """ "float", "int", "bool", or None for anything that is no number."""
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
            "dtype numpy has, such as float32."
        ) from None


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or (
        hasattr(value, "__array__") and hasattr(value, "shape") and hasattr(value, "dtype")
    )


def _is_number_list(item: tuple[Any, ...] | list[Any]) -> bool:
    """A nested list of numbers: an array spelled out, not one entry per input."""
    first: Any = item
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    return isinstance(first, (int, float)) and not _is_array(first)


def _to_array(value: object, name: str, where: str) -> NDArray[Any]:
    """`value` as an array: numpy, or whatever has `__array__` or `numpy()` (torch, TVM tensors)."""
    try:
        array = np.asarray(value)
        convert = getattr(value, "numpy", None)
        if array.dtype.kind == "O" and callable(convert):
            array = np.asarray(convert())
    except Exception as error:
        # A foreign tensor may raise anything; torch: RuntimeError, TypeError.
        raise DataError(
            f"{where}: input {name!r} of type {type(value).__name__} cannot be converted to a "
            f"numpy array: {error}"
        ) from None
    if array.dtype.kind not in "biufV" or array.dtype.names:
        raise DataError(
            f"{where}: input {name!r} of type {type(value).__name__} is not a numeric array "
            f"(numpy dtype {array.dtype})."
        )
    return array


def _check_names(
    given: set[Any], inputs: tuple[InputInfo, ...], where: str, present: set[str] | None = None
) -> None:
    """`given` names exactly the inputs; `present` are all names there are, for the message."""
    wanted = [info.name for info in inputs]
    unknown = sorted(str(name) for name in given if name not in wanted)
    if unknown:
        raise DataError(
            f"{where} gives {unknown[0]!r}, which is no input of the model. "
            f"{suggest_name(unknown[0], wanted)}"
        )
    missing = [name for name in wanted if name not in given]
    if missing:
        there = ", ".join(repr(name) for name in sorted(given if present is None else present))
        raise DataError(
            f"{where} lacks input {missing[0]!r}; it has {there or 'none'} and the model takes "
            f"{_list_names(inputs)}."
        )


def _list_names(inputs: tuple[InputInfo, ...]) -> str:
    return ", ".join(repr(info.name) for info in inputs)
