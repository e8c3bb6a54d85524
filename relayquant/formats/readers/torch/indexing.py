"""PyTorch reader: reads and writes of elements by index."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import relax

from relayquant.formats.readers.indices import count_from_start, gather_elements, scatter_elements
from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.torch.arguments import read_arguments
from relayquant.ir.rewrite.graph import static_size, tensor_dtype, tensor_shape


def convert_index(node: Any, importer: Any) -> relax.Expr:
    """Convert x[i], x[:, i, j], x[i, :, j] to R.take or R.index_tensor.

    The indexed axes are moved to the front, and back if they are neighbours. Negative indices count
    from the end.

    Raises:
        Refusal: an index is a mask.
    """
    operand, indices = read_arguments(node, "self", "indices")
    data, emit = importer.env[operand], importer.block_builder.emit
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [importer.env[indices[axis]] for axis in axes]
    if any(str(index.ty.dtype) == "bool" for index in given):
        raise Refusal(f"{node.name} selects by a mask, so that its size depends on the data")
    if len(given) == 1:
        return emit(relax.op.take(data, given[0], axis=axes[0]))
    given = [
        count_from_start(importer.block_builder, index, data.ty.shape.values[axis])
        for axis, index in zip(axes, given, strict=True)
    ]
    rank, first = data.ty.ndim, axes[0]
    rest = [axis for axis in range(rank) if axis not in axes]
    moved = (
        data
        if rest == [*range(len(axes), rank)]
        else emit(relax.op.permute_dims(data, [*axes, *rest]))
    )
    value = emit(relax.op.index_tensor(moved, given))
    if first == 0 or axes != [*range(first, first + len(axes))]:
        return value
    points = value.ty.ndim - len(rest)  # axes of the broadcast indices
    order = [*range(points, points + first), *range(points), *range(points + first, value.ty.ndim)]
    return emit(relax.op.permute_dims(value, order))


def convert_slice(node: Any, importer: Any) -> relax.Expr:
    """Convert x[:, a:b:step] to R.strided_slice.

    Bounds that the program knows to lie within the axis are not clipped to it: the size
    min(b, size) - min(a, size) equals no other tensor's size.
    """
    operand, dim, start, end, step = read_arguments(node, "self", "dim", "start", "end", "step")
    data = importer.env[operand]
    size, axis = find_size(data, dim), dim % data.ty.ndim
    bounds = (start or 0, sys.maxsize if end is None else end)
    if size is not None and all(isinstance(bound, int) for bound in bounds):
        low, high, _ = slice(*bounds).indices(size)
        return cut(importer, data, axis, low, max(low, high), step)
    found = find_bounds(importer, node, node, axis, *bounds, step)
    if found is not None:
        return cut(importer, data, axis, *found, step)
    low, high = (importer.env[each] if hasattr(each, "meta") else each for each in bounds)
    return importer.block_builder.emit(relax.op.strided_slice(data, [axis], [low], [high], [step]))


def cut(
    importer: Any, data: relax.Expr, axis: int, low: Any, high: Any, step: int = 1
) -> relax.Expr:
    """Emit x[low:high:step] along an axis, within its size."""
    if step == 1 and is_same(low, 0) and is_same(high, data.ty.shape.values[axis]):
        return data
    part = relax.op.strided_slice(data, [axis], [low], [high], [step], assume_inbound=True)
    return importer.block_builder.emit(part)


def is_same(place: Any, other: Any) -> bool:
    """Whether two places, ints or expressions of sizes, are one."""
    known = static_size(place)
    if known is not None:
        return known == static_size(other)
    return tvm_ffi.structural_equal(place, other)


def find_bounds(
    importer: Any, node: Any, taken: Any, axis: int, start: Any, end: Any, step: int
) -> tuple[Any, Any] | None:
    """Return where x[start:end:step] begins and ends, counted from the start, or None unless the
    program knows that both lie within the axis: `taken` has as many elements as between them then.
    """
    operand = node.args[0]
    bounds = (start or 0, sys.maxsize if end is None else end)

    def count_all(size: Any, given: Callable[[Any], Any]) -> list[Any]:
        places = [each if isinstance(each, int) else given(each) for each in bounds]
        is_number = [isinstance(each, int) for each in bounds]
        return [
            place if not known or 0 <= place < sys.maxsize else size if place > 0 else size + place
            for place, known in zip(places, is_number, strict=True)
        ]

    low, high = count_all(operand.meta["val"].shape[axis], lambda each: each.meta["val"])
    between, found = (high - low + step - 1) // step, taken.meta["val"].shape[axis]
    counts = [getattr(getattr(count, "node", count), "expr", count) for count in (between, found)]
    if counts[0] != counts[1]:
        return None
    low, high = count_all(importer.env[operand].ty.shape.values[axis], importer.env.get)
    return low, high


def convert_slice_scatter(node: Any, importer: Any) -> relax.Expr:
    """Convert x[:, a:b] = values to R.concat of what is before, the values, and what is behind:
    integers pass through it. With a step it is R.scatter_nd.

    Bounds that the program does not know to lie within the axis are left to TVM.
    """
    operand, source, dim, start, end, step = read_arguments(
        node, "self", "src", "dim", "start", "end", "step"
    )
    data, values, emit = importer.env[operand], importer.env[source], importer.block_builder.emit
    axis, size = dim % data.ty.ndim, find_size(data, dim)
    bounds = (start or 0, sys.maxsize if end is None else end, step)
    is_known = all(isinstance(bound, int) for bound in bounds)
    if is_known and bounds == (0, sys.maxsize, 1):
        return values
    if is_known and size is not None:
        low, high, step = slice(*bounds).indices(size)
        if low >= high:
            return data
    else:
        found = find_bounds(importer, node, source, axis, start, end, step)
        if found is None:
            return importer._slice_scatter(node)
        low, high = found
    if step > 1:
        places = emit(relax.op.expand_dims(emit(relax.op.arange(low, high, step, "int64")), 1))
        order = [axis, *(other for other in range(data.ty.ndim) if other != axis)]
        moved, updates = (emit(relax.op.permute_dims(each, order)) for each in (data, values))
        value = emit(relax.op.scatter_nd(moved, places, updates, "update"))
        return emit(relax.op.permute_dims(value, np.argsort(order).tolist()))
    last = data.ty.shape.values[axis]
    before, behind = (
        [] if is_same(*ends) else [cut(importer, data, axis, *ends)]
        for ends in ((0, low), (high, last))
    )
    return emit(relax.op.concat([*before, values, *behind], axis))


def convert_index_put(node: Any, importer: Any) -> relax.Expr:
    """Convert x[i, :, j] = values to R.scatter_nd, and x[mask] = number to R.where.

    The indexed axes are moved to the front and back. With accumulate, values are added.

    Raises:
        Refusal: a mask with several values or with other indices.
    """
    operand, indices, values, adds = read_arguments(node, "self", "indices", "values", "accumulate")
    data, updates, emit = importer.env[operand], importer.env[values], importer.block_builder.emit
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [importer.env[indices[axis]] for axis in axes]
    if any(tensor_dtype(index) == "bool" for index in given):
        if len(given) > 1 or updates.ty.ndim or adds:
            raise Refusal("it writes by a mask several values; supported: one number for all")
        mask, first = given[0], axes[0]
        after = data.ty.ndim - first - mask.ty.ndim
        mask = emit(relax.op.expand_dims(mask, [*range(-after, 0)])) if after else mask
        return emit(relax.op.where(mask, updates, data))
    sizes = list(data.ty.shape.values)
    points = broadcast_sizes([index.ty.shape.values for index in given])
    if 0 in map(static_size, points):  # TVM compiles no R.scatter_nd of no values
        return data
    given = [
        emit(relax.op.broadcast_to(count_from_start(importer.block_builder, index, size), points))
        for index, size in zip(given, (sizes[axis] for axis in axes), strict=True)
    ]
    rest = [axis for axis in range(len(sizes)) if axis not in axes]
    first = axes[0] if axes == [*range(axes[0], axes[0] + len(axes))] else 0
    lead, tail = [axis for axis in rest if axis < first], [axis for axis in rest if axis >= first]
    shape = (*(sizes[axis] for axis in lead), *points, *(sizes[axis] for axis in tail))
    updates = emit(relax.op.broadcast_to(updates, shape))
    # The axes of the points move to the front, as the indexed axes do in the data.
    count, before = len(points), len(lead)
    order = [*range(before, before + count), *range(before), *range(before + count, len(shape))]
    updates = emit(relax.op.permute_dims(updates, order))
    moved = emit(relax.op.permute_dims(data, [*axes, *rest]))
    places = emit(relax.op.stack(given, -1))
    value = emit(relax.op.scatter_nd(moved, places, updates, "add" if adds else "update"))
    return emit(relax.op.permute_dims(value, [*np.argsort([*axes, *rest]).tolist()]))


def convert_gather(node: Any, importer: Any) -> relax.Expr:
    """Convert gather(x, dim, index). The index may be smaller than x along the other dimensions."""
    operand, dim, places = read_arguments(node, "self", "dim", "index")
    data, index = importer.env[operand], importer.env[places]
    if not data.ty.ndim:
        return importer._gather(node)
    bb = importer.block_builder
    return bb.emit(gather_elements(bb, data, index, int(dim)))


#: reduction in scatter_reduce -> reduction in R.scatter_nd
REDUCTIONS = {
    "last": "update",
    "sum": "add",
    "mean": "add",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
}


def convert_scatter(node: Any, importer: Any) -> relax.Expr:
    """Convert scatter, scatter_add, scatter_reduce(x, dim, index, src) to R.scatter_nd.

    A mean is the sum divided by the number of summands. Elements of src without an index are
    ignored. Without include_self, x has the neutral number of the reduction wherever an index
    points.

    Raises:
        Refusal: it is a mean of integers.
    """
    operand, dim, index, source = read_arguments(node, "self", "dim", "index", "src")
    kind, is_included = ("sum" if "add" in str(node.target) else "last"), True
    if "reduce" in str(node.target):
        kind, is_included = read_arguments(node, "reduce", "include_self")
    data, places, updates = (importer.env[each] for each in (operand, index, source))
    dtype, emit = tensor_dtype(data), importer.block_builder.emit
    if kind == "mean" and "float" not in dtype:
        raise Refusal(f"it takes the mean of {dtype}; supported: floats")
    sizes = places.ty.shape.values
    if not tvm_ffi.structural_equal(updates.ty.shape.values, sizes):
        axes, zeros, ones = ([*range(len(sizes))], [0] * len(sizes), [1] * len(sizes))
        updates = emit(
            relax.op.strided_slice(updates, axes, zeros, list(sizes), ones, assume_inbound=True)
        )

    def scatter(into: relax.Expr, what: relax.Expr) -> relax.Expr:
        bb = importer.block_builder
        if not is_included:
            number = relax.const(find_neutral(kind, dtype), dtype)
            neutral = emit(relax.op.broadcast_to(number, places.ty.shape))
            into = scatter_elements(bb, into, places, sizes, neutral, int(dim), REDUCTIONS["last"])
        return scatter_elements(bb, into, places, sizes, what, int(dim), REDUCTIONS[kind])

    value = scatter(data, updates)
    if kind != "mean":
        return value
    ones = [emit(relax.op.ones_like(each)) for each in (data, updates)]
    return emit(relax.op.divide(value, scatter(*ones)))


def find_neutral(kind: str, dtype: str) -> float:
    """Return the number that does not change the result of a reduction."""
    if kind not in ("amax", "amin"):
        return float(kind == "prod")
    sign = -1 if kind == "amax" else 1
    if dtype.startswith("float"):
        return sign * math.inf
    return np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min


def broadcast_sizes(shapes: list[Sequence[Any]]) -> list[Any]:
    """Return the shape that the shapes of indices broadcast to. Sizes that are not 1 are equal, as
    PyTorch checked at the export.
    """
    rank = max(map(len, shapes))
    columns = zip(*([1] * (rank - len(shape)) + [*shape] for shape in shapes), strict=True)
    return [next((size for size in column if static_size(size) != 1), 1) for column in columns]


def find_size(value: relax.Expr, axis: int) -> int | None:
    """Return the size of an axis, or None if it is symbolic or unknown."""
    shape = tensor_shape(value)
    return None if shape is None or isinstance(shape[axis], str) else int(shape[axis])


def find_sizes(value: relax.Expr, what: str) -> tuple[int, ...]:
    """Return the shape of a tensor.

    Raises:
        Refusal: a size is symbolic.
    """
    shape = tensor_shape(value)
    if shape is None or not all(isinstance(size, int) for size in shape):
        raise Refusal(f"its {what} has a symbolic size; supported: fixed sizes")
    return tuple(map(int, shape))
