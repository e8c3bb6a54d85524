"""TensorFlow Lite reader: STRIDED_SLICE with all its masks, as TFLite's kernel reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.refusal import FIX_SIZES, Refusal
from relayquant.formats.readers.tflite.options import read_options
from relayquant.ir.rewrite.graph import static_size


@dataclass(frozen=True)
class Entry:
    """One index of a slice: begin, end and stride, and the masks that concern them.

    Attributes:
        is_open_begin: `begin` is ignored: the slice starts at the first element it can reach.
        is_open_end: `end` is ignored.
        is_offset: `end` counts from the start of the slice.
        is_single: The slice is one element, and its axis is dropped.
    """

    begin: int
    end: int
    stride: int
    is_open_begin: bool
    is_open_end: bool
    is_offset: bool
    is_single: bool


def convert_strided_slice(converter: Any, op: Any) -> relax.Expr:
    """Convert STRIDED_SLICE(x, begin, end, strides).

    TVM ignores the first element that a mask asks for where an axis is dropped, takes offsets for
    ends, and infers negative sizes of empty slices.
    """
    tensors, bb = converter.get_input_tensors(op), converter.bb
    data = converter.get_tensor_expr(tensors[0])
    bounds = [converter.get_tensor_value(tensor).ravel().tolist() for tensor in tensors[1:4]]
    options = read_options(op, "StridedSliceOptions")
    if data.ty.shape is None:
        raise Refusal("the shape of its operand depends on values; supported: fixed shapes")
    masks = (options.BeginMask(), options.EndMask(), options.ShrinkAxisMask())
    entries = [
        Entry(*each, masks[0] >> at & 1, masks[1] >> at & 1, options.Offset(), masks[2] >> at & 1)
        for at, each in enumerate(zip(*bounds, strict=True))
    ]
    order = order_entries(data.ty.ndim, len(entries), options.EllipsisMask(), options.NewAxisMask())
    sizes = iter(data.ty.shape.values)
    axes: list[int] = []
    ranges: list[tuple[Any, Any, int]] = []
    dropped: list[int] = []
    added: list[int] = []
    axis = place = 0
    for at in order:
        if at == NEW:
            added.append(place)
            place += 1
            continue
        size = next(sizes)
        if at != WHOLE:
            axes.append(axis)
            ranges.append(find_range(entries[at], size))
            if entries[at].is_single:
                dropped.append(axis)
        place += at == WHOLE or not entries[at].is_single
        axis += 1
    if axes:
        data = bb.emit(relax.op.strided_slice(data, axes, *map(list, zip(*ranges, strict=True))))
    if dropped:
        data = bb.emit(relax.op.squeeze(data, dropped))
    return relax.op.expand_dims(data, added) if added else data


#: In place of an index: an axis that is kept whole, and an axis that the result has in addition.
WHOLE, NEW = -1, -2


def order_entries(rank: int, count: int, ellipsis: int, new_axis: int) -> list[int]:
    """Return which index is for each axis: its number, `WHOLE` or `NEW`.

    Args:
        rank: Axes of the operand.
        count: Number of indices.
        ellipsis: Mask of the index that stands for all axes without one.
        new_axis: Mask of indices that are for no axis of the operand.
    """
    dots = [at for at in range(count) if ellipsis >> at & 1]
    news = [at for at in range(count) if new_axis >> at & 1 and at not in dots]
    whole = rank - (count - len(dots) - len(news))
    # TFLite's kernel forgets the last index behind an ellipsis that stands for no axis.
    is_void = bool(dots) and not whole and dots[0] < count - 1
    if len(dots) > 1 or whole < 0 or is_void:
        raise Refusal(
            f"it has {format_count(count - len(dots) - len(news), 'index')} and "
            f"{format_count(len(dots), 'ellipsis')} for an operand of rank {rank}; "
            "supported: an index per axis at most, and one ellipsis that stands for an axis"
        )
    order: list[int] = []
    for at in range(count):
        order += [WHOLE] * whole if at in dots else [NEW if at in news else at]
    return order if dots else order + [WHOLE] * whole


def find_range(entry: Entry, size: Any) -> tuple[Any, Any, int]:
    """Return begin, end and stride of R.strided_slice along an axis of a size."""
    count = static_size(size)
    if count is None:
        return find_open_range(entry, size)
    stride = entry.stride
    if not stride or (entry.is_single and stride < 0):
        raise Refusal(
            f"its stride is {stride}; supported: positive ones, and negative ones of axes that stay"
        )
    low, high = (0, count) if stride > 0 else (-1, count - 1)
    first = entry.begin + count if entry.begin < 0 else entry.begin
    first = min(max(first, low), high)
    if entry.is_open_begin:
        first = 0 if stride > 0 else count - 1
    if entry.is_single:
        if first >= count:
            raise Refusal(f"its index is {entry.begin}; supported: less than {count}, the axis")
        return first, first + 1, 1
    last = entry.end + first if entry.is_offset else entry.end
    last = min(max(last + count if last < 0 else last, low), high)
    if entry.is_open_end:
        last = count if stride > 0 else -1
    if (last - first) * stride <= 0:
        return 0, 0, 1
    return first, last if last >= 0 else -count - 1, stride


def find_open_range(entry: Entry, size: Any) -> tuple[Any, Any, int]:
    """Return the range along an axis of a symbolic size, without a comparison with the size."""
    begin = 0 if entry.is_open_begin else entry.begin
    if entry.stride <= 0 or entry.is_offset:
        raise Refusal(
            f"its stride is {entry.stride} along an axis of size {size}; supported there: positive "
            "strides, and ends that do not count from the start",
            FIX_SIZES,
        )
    if entry.is_single:
        return (begin, begin + 1, 1) if begin >= 0 else (size + begin, size + begin + 1, 1)
    return begin, size if entry.is_open_end else entry.end, entry.stride
