"""Relax operators that read or write at indices -> loop nests within bounds; part of `table`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.ir import Call

from relayquant.codegen.legalization.logical_and_bitwise import legalize_as_tvm
from relayquant.errors import ModelError
from relayquant.ir.rewrite.expressions import same_extents, shape_of, static_sizes
from relayquant.ir.rewrite.graph import call_name, tensor_shape


def legalize_pad(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize pad(x, mode="reflect") that is wider than x, or whose x has an unknown size.

    The pad reflects repeatedly, as in numpy. TVM would read beyond x.
    """
    shape = tensor_shape(call.args[0])
    widths = np.reshape([int(width) for width in call.attrs.pad_width], (-1, 2)).tolist()
    if str(call.attrs.pad_mode) != "reflect" or (
        shape is not None
        and all(isinstance(n, int) and max(pair) < n for n, pair in zip(shape, widths, strict=True))
    ):
        return legalize_as_tvm(builder, call)

    def mirror(x: Any) -> Any:
        def find_place(at: Any, size: Any, before: int) -> Any:
            period = tirx.max(2 * (size - 1), tirx.const(1, "int64"))
            place = tirx.floormod(at - before, period)
            return tirx.min(place, 2 * (size - 1) - place)

        def read(*ats: Any) -> Any:
            pairs = zip(ats, x.shape, widths, strict=True)
            return x(*(find_place(at, size, pair[0]) for at, size, pair in pairs))

        sizes = [size + sum(pair) for size, pair in zip(x.shape, widths, strict=True)]
        return te.compute(sizes, read, name="mirror")

    return builder.call_te(mirror, call.args[0], primfunc_name_hint="pad")


def legalize_slice(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a slice of symbolic extents with the extents that its type declares.

    TVM would count them again, as a choice whose operator FuseOps does not know.
    """
    data, axes, begins, _, *rest = call.args
    extents = shape_of(call)
    rows = [
        static_sizes(list(row.fields)) if isinstance(row, relax.Tuple) else None
        for row in (axes, begins, *rest)
    ]
    if not shape_of(data) or static_sizes(extents) is not None or None in rows:
        return legalize_as_tvm(builder, call)
    axes, begins, *rest = rows
    steps = rest[0] if rest else [1] * len(axes)
    if min(steps, default=1) < 1:
        return legalize_as_tvm(builder, call)
    places = {
        axis % len(extents): (begin, step)
        for axis, begin, step in zip(axes, begins, steps, strict=True)
    }

    def cut(x: Any) -> Any:
        def find(axis: int, at: Any) -> Any:
            begin, step = places.get(axis, (0, 1))
            first = tirx.max(x.shape[axis] + begin, 0) if begin < 0 else begin
            return first + at * step

        return te.compute(
            extents, lambda *ats: x(*(find(*pair) for pair in enumerate(ats))), name="slice"
        )

    return builder.call_te(cut, data, primfunc_name_hint="strided_slice")


def legalize_take(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize take(x, i, mode="fast") as take(x, i, mode="wrap"), which reads nothing beyond x."""
    if str(call.attrs.mode) != "fast":
        return legalize_as_tvm(builder, call)
    wrapped = relax.op.take(*call.args, call.attrs.axis, "wrap")
    return legalize_as_tvm(builder, builder.normalize(wrapped))


def bound_first(find_extents: Callable[[Call], Sequence[Any]]) -> Callable[..., Any]:
    """Make a legalization of op(x, i) that moves the indices i into bounds and then does as TVM.

    Args:
        find_extents: Returns the extents for `bound_indices`. For a tuple of indices: one extent
            for each index array.
    """

    def legalize(builder: relax.BlockBuilder, call: Call) -> Any:
        data, indices, *rest = call.args
        if not (shape_of(data) and (shape_of(indices) or has_fields(indices))):
            return legalize_as_tvm(builder, call)  # shapes known at run time
        extents = find_extents(call)

        def bound(part: relax.Expr, own: Sequence[Any]) -> relax.Var:
            return builder.emit(
                builder.call_te(bound_indices, part, list(own), primfunc_name_hint="indices")
            )

        if has_fields(indices):
            fields = [builder.emit(relax.TupleGetItem(indices, i)) for i in range(len(extents))]
            pairs = zip(fields, extents, strict=True)
            inside: relax.Expr = relax.Tuple([bound(part, [extent]) for part, extent in pairs])
        else:
            inside = bound(indices, extents)
        bounded = Call(call.op, [data, builder.normalize(inside), *rest], call.attrs, call.ty_args)
        return legalize_as_tvm(builder, builder.normalize(bounded))

    return legalize


def legalize_scatter_elements(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize scatter_elements(x, i, updates) also for indices that are fewer than x along another
    axis. TVM would count their places by the sizes of x.

    Raises:
        ModelError: such indices with the reduction "mean", which TVM has for the others alone.
    """
    data, indices, updates = call.args
    sizes, counts = tensor_shape(data), tensor_shape(indices)
    axis = int(call.attrs.axis) % data.ty.ndim
    others = [at for at in range(data.ty.ndim) if at != axis]
    if sizes is None or counts is None or all(sizes[at] == counts[at] for at in others):
        return bound_first(find_axis)(builder, call)
    if str(call.attrs.reduction) == "mean":
        raise ModelError(
            f"Operator {call_name(call)} with the reduction 'mean' has indices of shape {counts} "
            f"for data of shape {sizes}; allowed: the same sizes along all axes but {axis}. "
            "Scatter the sums and the counts with 'add', and divide them.",
            code="RQ206",
        )

    def list_places(index: te.Tensor) -> Any:
        def read(*at: Any) -> Any:
            place = index(*at[:-1])
            for other in others:
                place = tirx.Select(at[-1] == other, tirx.Cast(index.dtype, at[other]), place)
            return place

        return te.compute([*index.shape, len(sizes)], read, name="places")

    places = builder.emit(builder.call_te(list_places, indices, primfunc_name_hint="places"))
    if not same_extents(shape_of(updates), shape_of(indices)):
        # Sizes of other names, which are compared when the module runs.
        updates = builder.emit(relax.op.reshape(updates, indices.ty.shape))
    return relax.op.scatter_nd(data, places, updates, str(call.attrs.reduction))


def has_fields(indices: relax.Expr) -> bool:
    """Whether the indices are a tuple with one array for each axis."""
    return isinstance(indices.ty, tvm.ir.TupleType)


def list_extents(call: Call, first: int, count: int) -> list[Any]:
    """Return `count` extents of a call's data, from axis `first` on."""
    return shape_of(call.args[0])[first : first + count]


def find_axis(call: Call) -> list[Any]:
    """Return the extent of the axis of an operator along one axis."""
    return list_extents(call, int(call.attrs.axis) % call.args[0].ty.ndim, 1)


def find_axes_of_rows(call: Call, first: int = 0) -> list[Any]:
    """Return the extents for indices that hold one number for each of the axes from `first` on."""
    return list_extents(call, first, int(call.args[1].ty.shape.values[-1]))


def find_axes_of_fields(call: Call) -> list[Any]:
    """Return the extents for indices with one array for each of the first axes."""
    return list_extents(call, 0, len(call.args[1].ty.fields))


def bound_indices(indices: te.Tensor, extents: Sequence[Any]) -> Any:
    """Move indices to the nearest valid index. Negative indices count from the end.

    Args:
        extents: Extent of the axis. With several extents, the last axis of `indices` goes over
            these axes.
    """

    def bound(*at: Any) -> Any:
        index = indices(*at)
        extent = tirx.Cast(indices.dtype, extents[-1])
        for i, other in enumerate(extents[:-1]):
            extent = tirx.Select(at[-1] == i, tirx.Cast(indices.dtype, other), extent)
        counted = tirx.Select(index < 0, index + extent, index)
        return tirx.max(tirx.min(counted, extent - 1), tirx.const(0, indices.dtype))

    return te.compute(indices.shape, bound, name="indices")


INDEXING_LEGALIZATIONS = {
    "relax.nn.pad": legalize_pad,
    "relax.strided_slice": legalize_slice,
    "relax.take": legalize_take,
    "relax.index_tensor": bound_first(find_axes_of_fields),
    "relax.index_put": bound_first(find_axes_of_fields),
    "relax.gather_elements": bound_first(find_axis),
    "relax.scatter_elements": legalize_scatter_elements,
    "relax.gather_nd": bound_first(
        lambda call: find_axes_of_rows(call, int(call.attrs.batch_dims))
    ),
    "relax.scatter_nd": bound_first(find_axes_of_rows),
}
