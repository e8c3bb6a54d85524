"""Rows of tensor operators of Relax: arithmetic, reductions, shapes, indices, creation.

Integer operators keep the dtype, as in TVM. The caller of a row casts the result to the dtype that
TVM infers.
"""

from __future__ import annotations

import math
from typing import Any

from relayquant.errors import DataError
from relayquant.ir.reference.relax.row import (
    Meaning,
    Row,
    call,
    list_axes,
    own,
    to_axes,
    to_axis,
    to_ints,
)
from relayquant.ir.reference.unary import RELAX_UNARY, Unary


def make_unary(unary: Unary) -> Row:
    """Make the row of a function of one value."""

    def compute(xp: Any, args: list[Any], attrs: Any) -> Any:
        given = {name: getattr(attrs, name) for name in unary.attributes}
        return xp.compute_unary(unary, args[0], **given)

    return Row(unary.relax, compute, unary.attributes)


# Reductions and orders -------------------------------------------------------------------------


def reduce(function: str) -> Meaning:
    """Make a reduction over the attribute `axis`, or over all axes."""

    def compute(xp: Any, args: list[Any], attrs: Any) -> Any:
        return getattr(xp, function)(args[0], to_axes(attrs.axis), bool(attrs.keepdims))

    return compute


def find_extreme(function: str) -> Meaning:
    """Make argmax or argmin. The first index of the extreme value is returned."""

    def compute(xp: Any, args: list[Any], attrs: Any) -> Any:
        axis, keepdims = to_axis(attrs.axis), bool(attrs.keepdims)
        return getattr(xp, function)(args[0], axis=axis, keepdims=keepdims)

    return compute


def sort(xp: Any, args: list[Any], attrs: Any) -> Any:
    (data,), axis = args, int(attrs.axis)
    return xp.take_along(data, xp.find_order(data, axis, bool(attrs.descending)), axis)


def argsort(xp: Any, args: list[Any], attrs: Any) -> Any:
    order = xp.find_order(args[0], int(attrs.axis), bool(attrs.descending))
    return xp.cast(order, xp.find_dtype(attrs.dtype, "int32"))


def topk(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Return values, indices or both of the k first elements in order. k < 1 returns all."""
    (data,), axis = args, int(attrs.axis)
    order = xp.find_order(data, axis, bool(attrs.largest))
    if int(attrs.k) > 0:
        order = cut(order, axis, 0, min(int(attrs.k), data.shape[axis]))
    values = xp.take_along(data, order, axis)
    indices = xp.cast(order, xp.find_dtype(attrs.dtype, "int32"))
    return {"both": (values, indices), "values": values, "indices": indices}[str(attrs.ret_type)]


def median(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Return the last value of the smaller half, or the first NaN if there is one.

    Along one axis: with its index.
    """
    (data,) = args
    chosen = list_axes(attrs.axis, data.ndim)
    kept = [axis for axis in range(data.ndim) if axis not in chosen]
    shape = [1 if axis in chosen else size for axis, size in enumerate(data.shape)]
    if not attrs.keepdims:
        shape = [data.shape[axis] for axis in kept]
    sizes = [*(data.shape[axis] for axis in kept), math.prod(data.shape[axis] for axis in chosen)]
    rows = xp.permute(data, [*kept, *chosen]).reshape(sizes)
    is_nan = rows != rows
    first = xp.argmax(is_nan, axis=-1, keepdims=True)  # an error of no values
    middle = (sizes[-1] - 1) // 2
    index = cut(xp.find_order(rows, -1, False), -1, middle, middle + 1)
    index = xp.where(is_nan.any(-1, keepdims=True), first, index)
    value = xp.take_along(rows, index, -1).reshape(shape)
    is_indexed = attrs.axis is not None and len(chosen) == 1
    return (value, index.reshape(shape)) if is_indexed else value


def accumulate(function: str) -> Meaning:
    """Make cumsum or cumprod, in the dtype of the data or of the attribute.

    With `exclusive`, each result covers only the elements before it.
    """

    def compute(xp: Any, args: list[Any], attrs: Any) -> Any:
        data = args[0].reshape(-1) if attrs.axis is None else args[0]
        axis = 0 if attrs.axis is None else int(attrs.axis)
        if attrs.exclusive and data.shape[axis]:
            first = xp.full_like(cut(data, axis, 0, 1), function == "cumprod")
            data = xp.concatenate([first, cut(data, axis, 0, data.shape[axis] - 1)], axis=axis)
        dtype = xp.find_dtype(attrs.dtype, data.dtype)
        return getattr(xp, function)(data, axis=axis, dtype=dtype)

    return compute


# Shape -----------------------------------------------------------------------------------------


def cut(data: Any, axis: int, start: int, stop: int, step: int = 1) -> Any:
    """Return the elements start, start + step, ... before stop along an axis."""
    return data[(*(slice(None),) * (axis % data.ndim), slice(start, stop, step))]


def squeeze(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Remove axes of length 1. Other axes stay, as in TVM."""
    (data,) = args
    chosen = list_axes(attrs.axis, data.ndim)
    return data.reshape([n for i, n in enumerate(data.shape) if n != 1 or i not in chosen])


def expand_dims(xp: Any, args: list[Any], attrs: Any) -> Any:
    (data,), axes = args, to_ints(attrs.axis)
    shape = list(data.shape)
    for axis in sorted(axis % (data.ndim + len(axes)) for axis in axes):
        shape.insert(axis, 1)
    return data.reshape(shape)


def concat(xp: Any, args: list[Any], attrs: Any) -> Any:
    return xp.concatenate(args[0], axis=0 if attrs.axis is None else int(attrs.axis))


def split(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Split into sections of ceil(length / count), with a shorter last one, or at indices.

    A single section is not a tuple, as inferred by TVM.
    """
    (data,) = args
    axis, where = int(attrs.axis), attrs.indices_or_sections
    length = data.shape[axis]
    if hasattr(where, "__len__"):
        stops = to_ints(where)
    else:
        step = -(-length // int(where))
        stops = [i * step for i in range(1, int(where))]
    if not stops:
        return data
    ends = zip([0, *stops], [*stops, length], strict=True)
    return tuple(cut(data, axis, start, stop) for start, stop in ends)


def strided_slice(xp: Any, args: list[Any], attrs: Any) -> Any:
    data, axes, begin, end, *rest = args
    strides = rest[0] if rest else (1,) * len(axes)
    for axis, first, last, step in zip(axes, begin, end, strides, strict=True):
        length = data.shape[axis]
        # With a negative step, an end before index 0 is None in a slice.
        stop = None if step < 0 and last < -length else int(last)
        at = range(length)[int(first) : stop : int(step)]
        if at.step > 0:
            data = cut(data, int(axis), at.start, at.stop, at.step)
        else:
            data = xp.select(
                data, xp.asarray(list(at), dtype=xp.find_dtype("int64", "")), int(axis)
            )
    return data


def take(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Take elements. Indices below 0 count from the end.

    Raises:
        DataError: An index is outside the axis, and the mode is neither wrap nor clip.
    """
    data, indices, mode = args[0], xp.asarray(args[1]), str(attrs.mode)
    if attrs.axis is None:
        data, axis = data.reshape(-1), 0
    else:
        axis = int(attrs.axis) % data.ndim
    length, flat = data.shape[axis], indices.reshape(-1)
    if mode == "wrap":
        flat = flat % length
    elif mode == "clip":
        flat = flat.clip(0, length - 1)
    else:
        if ((flat < -length) | (flat >= length)).any():
            raise DataError(
                f"indices {flat.min()}..{flat.max()} do not fit an axis of length {length}; "
                f"allowed: 0..{length - 1}, or mode 'clip' or 'wrap'.",
                code="RQ302",
            )
        flat = xp.where(flat < 0, flat + length, flat)
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return xp.select(data, flat, axis).reshape(shape)


def permute_dims(xp: Any, args: list[Any], attrs: Any) -> Any:
    axes = reversed(range(args[0].ndim)) if attrs.axes is None else to_ints(attrs.axes)
    return xp.permute(args[0], tuple(axes))


def collapse_sum_to(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Sum `data` to the given shape, which reverses broadcasting."""
    data, shape = args
    extra = data.ndim - len(shape)
    axes = [i for i in range(data.ndim) if i < extra or shape[i - extra] != data.shape[i]]
    return xp.sum(data, tuple(axes), False).reshape(shape)


# Creation --------------------------------------------------------------------------------------


def full(xp: Any, args: list[Any], attrs: Any) -> Any:
    """Make full (of a shape) or full_like (of an array)."""
    like, value = args
    default = like.dtype if hasattr(like, "dtype") else xp.asarray(value).dtype
    return xp.full(getattr(like, "shape", like), value, xp.find_dtype(attrs.dtype, default))


def fill(value: int) -> Meaning:
    """Make zeros or ones, of a shape or like an array."""

    def compute(xp: Any, args: list[Any], attrs: Any) -> Any:
        (like,) = args
        dtype = xp.find_dtype(attrs.dtype, getattr(like, "dtype", "float32"))
        return xp.full(getattr(like, "shape", like), value, dtype)

    return compute


def flatten(xp: Any, args: list[Any], attrs: Any) -> Any:
    return args[0].reshape(-1)


def batch_flatten(xp: Any, args: list[Any], attrs: Any) -> Any:
    return args[0].reshape((args[0].shape[0], -1))


def find_sizes(xp: Any, args: list[Any], attrs: Any) -> Any:
    return tuple(int(size) for size in args[0].shape)


def read_sizes(xp: Any, args: list[Any], attrs: Any) -> Any:
    return tuple(int(size) for size in args[0])


REDUCED = ("axis", "keepdims")

ROWS: tuple[Row, ...] = (
    *map(make_unary, RELAX_UNARY.values()),
    # arithmetic
    Row("add", call("add")),
    Row("atan2", call("arctan2")),
    Row("bitwise_and", call("bitwise_and")),
    Row("bitwise_or", call("bitwise_or")),
    Row("bitwise_xor", call("bitwise_xor")),
    Row("clip", own("clip")),
    Row("divide", call("divide")),
    Row("equal", call("equal")),
    Row("ewise_fma", lambda xp, args, attrs: args[0] * args[1] + args[2]),
    Row("floor_divide", call("floor_divide")),
    Row("floor_mod", call("remainder")),
    Row("greater", call("greater")),
    Row("greater_equal", call("greater_equal")),
    Row("left_shift", call("left_shift"), is_reference_only=True),
    Row("less", call("less")),
    Row("less_equal", call("less_equal")),
    Row("log_add_exp", call("logaddexp")),
    Row("logical_and", call("logical_and")),
    Row("logical_or", call("logical_or")),
    Row("logical_xor", call("logical_xor")),
    Row("maximum", call("maximum")),
    Row("minimum", call("minimum")),
    Row("mod", call("fmod")),
    Row("multiply", call("multiply")),
    Row("not_equal", call("not_equal")),
    Row("power", call("power")),
    Row("right_shift", call("right_shift"), is_reference_only=True),
    Row("subtract", call("subtract")),
    Row("where", call("where")),
    # affine spaces
    Row("dequantize", own("dequantize"), ("axis", "out_dtype"), is_reference_only=True),
    Row("quantize", own("quantize"), ("axis", "out_dtype"), is_reference_only=True),
    # reductions
    Row("argmax", find_extreme("argmax"), REDUCED),
    Row("argmin", find_extreme("argmin"), REDUCED),
    Row("argsort", argsort, ("axis", "descending", "dtype")),
    Row("cumprod", accumulate("cumprod"), ("axis", "dtype", "exclusive")),
    Row("cumsum", accumulate("cumsum"), ("axis", "dtype", "exclusive")),
    Row("max", reduce("max"), REDUCED),
    Row("mean", reduce("mean"), REDUCED),
    Row("median", median, REDUCED, is_reference_only=True),
    Row("min", reduce("min"), REDUCED),
    Row("prod", reduce("prod"), REDUCED),
    Row("sort", sort, ("axis", "descending")),
    Row("std", reduce("std"), REDUCED),
    Row("sum", reduce("sum"), REDUCED),
    Row("topk", topk, ("k", "axis", "ret_type", "largest", "dtype")),
    Row("variance", reduce("variance"), REDUCED),
    # shape and indexing
    Row(
        "astype",
        lambda xp, args, attrs: xp.cast(args[0], xp.find_dtype(attrs.dtype, args[0].dtype)),
        ("dtype",),
    ),
    Row("broadcast_to", lambda xp, args, attrs: xp.broadcast_to(*args)),
    Row("collapse_sum_to", collapse_sum_to),
    Row("concat", concat, ("axis",)),
    Row(
        "einsum",
        lambda xp, args, attrs: xp.einsum(str(attrs.subscripts), *args[0]),
        ("subscripts",),
    ),
    Row("expand_dims", expand_dims, ("axis",)),
    Row("flatten", flatten),
    Row("flip", lambda xp, args, attrs: xp.flip(args[0], (int(attrs.axis),)), ("axis",)),
    Row(
        "gather_elements",
        lambda xp, args, attrs: xp.take_along(args[0], args[1], int(attrs.axis)),
        ("axis",),
    ),
    Row("nn.batch_flatten", batch_flatten),
    Row("nn.pad", own("pad"), ("pad_width", "pad_mode", "pad_value")),
    Row("one_hot", own("one_hot"), ("depth", "axis"), is_reference_only=True),
    Row("permute_dims", permute_dims, ("axes",)),
    Row(
        "repeat",
        lambda xp, args, attrs: xp.repeat(args[0], int(attrs.repeats), to_axis(attrs.axis)),
        ("repeats", "axis"),
    ),
    Row("reshape", lambda xp, args, attrs: args[0].reshape(args[1])),
    Row("shape_of", find_sizes),
    Row(
        "shape_to_tensor",
        lambda xp, args, attrs: xp.asarray(args[0], dtype=xp.find_dtype("int64", "")),
    ),
    Row("split", split, ("indices_or_sections", "axis")),
    Row("squeeze", squeeze, ("axis",)),
    Row("stack", lambda xp, args, attrs: xp.stack(args[0], axis=int(attrs.axis)), ("axis",)),
    Row("strided_slice", strided_slice, ("assume_inbound",)),
    Row("take", take, ("axis", "mode")),
    Row("tensor_to_shape", read_sizes),
    Row("tile", lambda xp, args, attrs: xp.tile(args[0], to_ints(attrs.repeats)), ("repeats",)),
    Row("tril", lambda xp, args, attrs: xp.tril(*args)),
    Row("triu", lambda xp, args, attrs: xp.triu(*args)),
    # creation
    Row("arange", own("arange"), ("dtype",), is_reference_only=True),
    Row("eye", own("eye"), ("dtype",), is_reference_only=True),
    Row("full", full, ("dtype",)),
    Row("full_like", full, ("dtype",)),
    Row("ones", fill(1), ("dtype",)),
    Row("ones_like", fill(1), ("dtype",)),
    Row("zeros", fill(0), ("dtype",)),
    Row("zeros_like", fill(0), ("dtype",)),
)
