"""Images joined from slices of volumes -> the volumes, for depthwise convolutions.

conv2d(reshape(concat((cut(x), cut(x), ...))))    ->    kernel(x)
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax
from tvm.ir import Call

from relayquant.codegen.kernels.conv_shape import JoinedSlices
from relayquant.codegen.lowering.concat import is_plain_concat
from relayquant.ir.rewrite.expressions import op_name, shape_of, static_sizes
from relayquant.ir.rewrite.graph import tensor_shape

#: value -> the call that computes it, if there is one
CallOf = Callable[[relax.Expr], Call | None]


def read_joined_slices(
    call_of: CallOf, images: relax.Expr
) -> tuple[relax.Expr, JoinedSlices | None]:
    """Read images (N * D', H * taps, W, C) whose rows are rows of slices of x (N, D, H, W, C).

    Returns:
        x and how the images consist of its slices; or the images and None.
    """
    joined = skip_reshapes(call_of, images)
    call = call_of(joined)
    if call is None or not is_plain_concat(call) or joined.ty.ndim != 6:
        return images, None
    cuts = [call_of(skip_reshapes(call_of, part)) for part in call.args[0].fields]
    places = [read_cut(cut, 5, 1) for cut in cuts if cut is not None]
    found = [place for place in places if place is not None]
    if not len(found) == len(cuts) > 1:
        return images, None
    (x, (first, second, *rest)) = found[0][0], [kept for _, kept in found]
    taps, dilation = len(cuts), second.start
    expected = [range(dilation * t, dilation * t + first.stop, first.step) for t in range(taps)]
    if [first, second, *rest] != expected or not all(source.same_as(x) for source, _ in found):
        return images, None
    sizes = static_sizes(shape_of(x))
    if sizes is None:
        return images, None
    batch, slices, height, *row = sizes
    split = (batch, len(first), height, taps, *row)
    whole = (batch * len(first), height * taps, *row)
    if int(call.attrs.axis) % 6 != 3 or tensor_shape(joined) != split:
        return images, None
    if tensor_shape(images) != whole:
        return images, None
    return x, JoinedSlices(slices, len(first), taps, first.step, dilation)


def skip_reshapes(call_of: CallOf, expr: relax.Expr) -> relax.Expr:
    """Return the value that reshapes give another shape."""
    call = call_of(expr)
    while call is not None and op_name(call) == "relax.reshape":
        expr = call.args[0]
        call = call_of(expr)
    return expr


def read_cut(call: Call, rank: int, axis: int) -> tuple[relax.Expr, range] | None:
    """Read strided_slice(x, one axis) as (x, what it keeps of the axis).

    None for any other call, and for an x of another rank.
    """
    if op_name(call) != "relax.strided_slice":
        return None
    x, shape = call.args[0], tensor_shape(call.args[0])
    numbers = [read_numbers(each) for each in call.args[1:]]
    numbers += [[1]] * (len(numbers) == 3)  # strides that are left out
    if shape is None or len(shape) != rank or len(numbers) != 4:
        return None
    size, (axes, *ends) = shape[axis], numbers
    if not isinstance(size, int):
        return None
    if axes != [axis] or not all(end is not None and len(end) == 1 for end in ends):
        return None
    begin, end, step = (int(end[0]) for end in ends if end is not None)
    if begin < 0 or step < 1 or not 0 < end <= size:
        return None
    return x, range(begin, end, step)


def read_numbers(expr: relax.Expr) -> list[int] | None:
    """Read a tuple of constant integers."""
    fields = getattr(expr, "fields", None)
    values = [getattr(field, "value", None) for field in fields or ()]
    return values if values and all(isinstance(value, int) for value in values) else None  # pyright: ignore[reportReturnType]
