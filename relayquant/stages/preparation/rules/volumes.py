"""Rules for volumes (three spatial axes): operators on volumes become operators on the images along
their depth.

    conv3d(x, w)  ->  volume(conv2d(images of as many neighbouring slices as w has, w))
    f(volume(x))  ->  volume(f(x))

A volume is a value of images (N * D, H, W, C) behind a reshape to (N, D, H, W, C). If its channels
come first, a permute_dims follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.ir.ops.chain import ELEMENTWISE
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import list_permutation
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.tensors import channel_values, make_const

CONV3D, TRANSPOSED = "relax.nn.conv3d", "relax.nn.conv3d_transpose"
AVG_POOL3D, MAX_POOL3D = "relax.nn.avg_pool3d", "relax.nn.max_pool3d"
#: the layout in which a volume is a stack of images
LAST = "NDHWC"


@dataclass(frozen=True, eq=False)
class Volume:
    """Images and the volume that they form."""

    images: relax.Expr  #: (N * D, H, W, C)
    batch: Any  #: N, which may be symbolic
    depth: int  #: D
    layout: str  #: "NDHWC", or another order

    @property
    def shape(self) -> tuple[Any, ...]:
        """(N, D, H, W, C)."""
        return self.batch, self.depth, *list(self.images.ty.shape)[1:]

    def with_images(self, images: relax.Expr) -> Volume:
        """Return the same volume with other images."""
        return replace(self, images=images)


def find_volume(editor: Editor, expr: relax.Expr) -> Volume | None:
    """Return the volume that a value consists of, if there is one."""
    layout, call = LAST, editor.call_of(expr)
    if call is not None and editor.op_name(expr) == "relax.permute_dims":
        axes = list_permutation(call)
        layout = "".join(LAST[axis] for axis in axes) if len(axes) == 5 else ""
        expr = call.args[0]
        call = editor.call_of(expr)
    if call is None or editor.op_name(expr) != "relax.reshape" or len(layout) != 5:
        return None
    images, whole, part = call.args[0], tensor_shape(expr), tensor_shape(call.args[0])
    if whole is None or part is None or len(whole) != 5 or len(part) != 4 or whole[2:] != part[1:]:
        return None
    if any(isinstance(size, str) for size in whole[1:]):
        return None
    return Volume(images, expr.ty.shape[0], int(whole[1]), layout)


def take_slices(editor: Editor, var: relax.Var, data: relax.Expr, layout: str) -> relax.Expr:
    """Return a value of this layout as (N, D, H, W, C)."""
    volume = find_volume(editor, data)
    if volume is not None and volume.layout == layout:
        shape = relax.ShapeExpr([*volume.shape])
        return editor.define(var, relax.op.reshape(volume.images, shape), named(editor, var, "x"))
    if layout == LAST:
        return data
    axes = [layout.index(letter) for letter in LAST]
    return editor.define(var, relax.op.permute_dims(data, axes), named(editor, var, "x"))


def take_images(editor: Editor, var: relax.Var, data: relax.Expr, layout: str) -> Volume:
    """Return a value of this layout as images."""
    volume = find_volume(editor, data)
    if volume is not None and volume.layout == layout:
        return volume
    return make_images(editor, var, take_slices(editor, var, data, layout), layout)


def make_images(editor: Editor, var: relax.Var, slices: relax.Expr, layout: str) -> Volume:
    """Reshape (N, D, H, W, C) to images."""
    batch, depth, *image = slices.ty.shape
    shape = relax.ShapeExpr([batch * depth, *image])
    images = editor.define(var, relax.op.reshape(slices, shape), named(editor, var, "images"))
    return Volume(images, batch, int(depth), layout)


def put_volume(editor: Editor, var: relax.Var, volume: Volume) -> relax.Expr:
    """Emit the value of a volume."""
    whole = relax.op.reshape(volume.images, relax.ShapeExpr([*volume.shape]))
    if volume.layout == LAST:
        return whole
    slices = editor.define(var, whole, named(editor, var, "slices"))
    return relax.op.permute_dims(slices, [LAST.index(letter) for letter in volume.layout])


def named(editor: Editor, var: relax.Var, part: str) -> str:
    return f"{editor.names[var]}.{part}"


def check_layout(
    data: relax.Expr, layout: str, out_layout: str | None, kernel_layout: str = "OIDHW"
) -> Skip | None:
    """Decline packed layouts, results in another layout, and unknown sizes other than the batch."""
    if sorted(layout) != sorted(LAST) or sorted(kernel_layout) != sorted("OIDHW"):
        return decline("a packed layout")
    shape = tensor_shape(data)
    if (out_layout or layout) != layout or shape is None:
        return decline("results of another layout, or an unknown shape")
    sizes = zip(shape, layout, strict=True)
    if any(letter != "N" and isinstance(size, str) for size, letter in sizes):
        return decline("sizes that are not known")
    return None


def conv3d_to_conv2d(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """conv3d(x, w) -> volume(conv2d(images, w)).

    Each image holds all input slices that one output slice is computed from, joined along the
    channels and with the channels of a group together. A depthwise convolution stays depthwise: its
    slices are joined along the rows instead, with equal rows below each other.
    """
    call = editor.call_of(var)
    (data, weight), attrs = call.args, call.attrs
    layout = str(attrs.data_layout)
    skip = check_layout(data, layout, attrs.out_layout, str(attrs.kernel_layout))
    if skip is not None:
        return skip
    if attrs.out_dtype not in ("", None, "void") and str(attrs.out_dtype) != tensor_dtype(data):
        return decline("results of another dtype")
    if 0 in (tensor_shape(weight) or ()):
        return decline("no channels")
    view = ConvView.of(call)
    (stride, *strides), (step, *dilation) = view.strides, view.dilation
    before, *begins, after = view.padding[:4]
    ends, groups = view.padding[4:], view.groups
    sizes = dict(zip(layout, data.ty.shape, strict=True))
    has_rows = groups == int(sizes["C"]) > 1 and dilation[0] == 1
    letters = "OHDWI" if has_rows else "OHWDI"
    order = [str(attrs.kernel_layout).index(letter) for letter in letters]
    turned = editor.define(var, relax.op.permute_dims(weight, order), named(editor, var, "taps"))
    outputs, height, *rest, inputs = [int(n) for n in tensor_shape(turned) or ()]
    taps, width = rest if has_rows else reversed(rest)
    rows, channels = (taps, 1) if has_rows else (1, taps)
    flat = relax.op.reshape(turned, (outputs, height * rows, width, channels * inputs))
    weight = editor.define(var, flat, named(editor, var, "weight"))
    if taps == stride == 1 and not before + after:
        volume = take_images(editor, var, data, layout)
    else:
        slices = take_slices(editor, var, data, layout)
        parts = cut_slices(editor, var, slices, taps, before, after, stride, step)
        joined = (
            join_rows(editor, var, parts) if has_rows
            else join_channels(editor, var, parts, groups)
        )  # fmt: skip
        volume = make_images(editor, var, joined, layout)
    images = relax.op.nn.conv2d(
        volume.images, weight, [strides[0] * rows, strides[1]],
        [begins[0] * rows, begins[1], ends[0] * rows, ends[1]], dilation, groups, "NHWC", "OHWI",
        out_dtype=attrs.out_dtype,
    )  # fmt: skip
    images = editor.define(var, images, named(editor, var, "conv2d"))
    return put_volume(editor, var, volume.with_images(images))


def cut_slices(
    editor: Editor,
    var: relax.Var,
    slices: relax.Expr,
    taps: int,
    before: int,
    after: int,
    stride: int,
    dilation: int,
) -> list[relax.Expr]:
    """Cut a volume into the slices of each tap: (N, D, H, W, C) -> one (N, D', H, W, C) per tap.

    Each tap gets slices d * stride + tap * dilation of the volume padded with zero slices.
    """

    def define(expr: relax.Expr, part: str) -> relax.Var:
        return editor.define(var, expr, named(editor, var, part))

    if before > 0 or after > 0:
        widths = [0, 0, before, max(after, 0), 0, 0, 0, 0, 0, 0]
        slices = define(relax.op.nn.pad(slices, widths, "constant", 0.0), "pad")
    if after < 0:  # slices that no output reads
        end = int(slices.ty.shape[1]) + after
        slices = define(relax.op.strided_slice(slices, [1], [0], [end], [1]), "cut")
    count = (int(slices.ty.shape[1]) - (taps - 1) * dilation - 1) // stride + 1
    parts: list[relax.Expr] = []
    for tap in range(taps):
        first = tap * dilation
        end = first + (count - 1) * stride + 1
        part = relax.op.strided_slice(slices, [1], [first], [end], [stride])
        parts.append(define(part, f"tap{tap}"))
    return parts


def join_channels(
    editor: Editor, var: relax.Var, parts: Sequence[relax.Expr], groups: int
) -> relax.Expr:
    """Join several (N, D, H, W, C) to (N, D, H, W, parts * C), with the channels of a group
    together.
    """
    *image, channels = list(parts[0].ty.shape)
    split = [*image, groups, int(channels) // groups] if groups > 1 else [*image, channels]
    return join_parts(editor, var, parts, split, [*image, len(parts) * int(channels)])


def join_rows(editor: Editor, var: relax.Var, parts: Sequence[relax.Expr]) -> relax.Expr:
    """Join several (N, D, H, W, C) to (N, D, H * parts, W, C). Row i of every part is next to
    row i of the others.
    """
    batch, depth, height, *row = list(parts[0].ty.shape)
    split, joined = [batch, depth, height, 1, *row], [batch, depth, int(height) * len(parts), *row]
    return join_parts(editor, var, parts, split, joined, 3)


def join_parts(
    editor: Editor,
    var: relax.Var,
    parts: Sequence[relax.Expr],
    split: Sequence[Any],
    joined: Sequence[Any],
    axis: int = -1,
) -> relax.Expr:
    """Return reshape(concat((reshape(part, split), ...), axis), joined)."""

    def define(expr: relax.Expr, part: str) -> relax.Var:
        return editor.define(var, expr, named(editor, var, part))

    if len(parts) == 1:
        return parts[0]
    if len(split) > parts[0].ty.ndim:
        parts = [
            define(relax.op.reshape(part, relax.ShapeExpr(split)), f"split{tap}")
            for tap, part in enumerate(parts)
        ]
    whole = define(relax.op.concat(list(parts), axis), "joined")
    if len(split) == len(joined):
        return whole
    return define(relax.op.reshape(whole, relax.ShapeExpr(joined)), "channels")


def conv3d_transpose_to_conv2d_transpose(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """conv3d_transpose(x, w) -> volume(conv2d_transpose(images, w)), see `transpose_slices`.

    Not applied if its only reader adds a bias: `transpose_with_bias` takes this case.
    """
    if editor.has_one_use(var):
        (user,) = editor.users(var)
        if editor.op_name(user) == "relax.add" and find_bias(editor, user) is not None:
            return decline("its bias is taken with it")
    return transpose_slices(editor, var, editor.call_of(var), None)


def transpose_with_bias(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """conv3d_transpose(x, w) + b -> volume(conv2d_transpose(images, w) + b)."""
    bias = find_bias(editor, var)
    if bias is None:
        return decline("no bias of a conv3d_transpose that nothing else reads")
    return transpose_slices(editor, var, editor.call_of(editor.call_of(var).args[0]), bias)


def find_bias(editor: Editor, var: relax.Var) -> np.ndarray | None:
    """Return the bias (C,) of conv3d_transpose(x, w) + b if nothing else reads the product."""
    product, added = editor.call_of(var).args
    if editor.op_name(product) != TRANSPOSED or not editor.has_one_use(product):
        return None
    axis = str(editor.call_of(product).attrs.data_layout).find("C")
    shape = tensor_shape(product)
    if shape is None or len(shape) != 5 or isinstance(shape[axis], str):
        return None
    bias = channel_values(added, 5, axis, int(shape[axis]))
    return None if bias is None else bias.astype(tensor_dtype(added))


def transpose_slices(
    editor: Editor, var: relax.Var, call: Call, bias: np.ndarray | None
) -> relax.Expr | Skip:
    """Rewrite a transposed convolution of a volume as one of images.

    With stride s along the depth, output slice q * s + r - padding is a sum over some taps k. These
    are the taps for which k * dilation = r + m * s for an integer m. Tap k reads input slice q - m.
    So an image holds the channels of all slices q - m. Its results have s times the channels, one
    set per r. The weights are 0 where a slice has no tap.
    """
    (data, kernel), attrs = call.args, call.attrs
    layout, weight = str(attrs.data_layout), constant_value(kernel)
    skip = check_layout(data, layout, attrs.out_layout, str(attrs.kernel_layout))
    if skip is not None:
        return skip
    if weight is None:
        return decline("the weight is not a constant")
    view = ConvView.of(call)
    (stride, *strides), (dilation, *dilations) = view.strides, view.dilation
    padding, groups, (beyond, *others) = view.padding, view.groups, view.output_padding
    weight = weight.transpose([str(attrs.kernel_layout).index(letter) for letter in "DIOHW"])
    taps, inputs, outputs, *window = weight.shape
    last = (taps - 1) * dilation // stride  # of the slices before q
    depth = int(tensor_shape(data)[layout.index("D")])  # pyright: ignore[reportOptionalSubscript]
    size = (depth - 1) * stride + (taps - 1) * dilation + 1 + beyond - padding[0] - padding[3]
    count = (size - 1 + padding[0]) // stride + 1
    blocks = np.zeros((groups, last + 1, inputs // groups, stride, outputs, *window), weight.dtype)
    for tap in range(taps):
        before, rest = divmod(tap * dilation, stride)
        # The first of the joined slices is the earliest one.
        blocks[:, last - before, :, rest] = weight[tap].reshape(groups, -1, outputs, *window)
    spread = blocks.reshape((last + 1) * inputs, stride * outputs, *window)

    def define(expr: relax.Expr, part: str) -> relax.Var:
        return editor.define(var, expr, named(editor, var, part))

    slices = take_slices(editor, var, data, layout)
    parts = cut_slices(editor, var, slices, last + 1, last, count - depth, 1, 1)
    joined = join_channels(editor, var, parts, groups)
    volume = make_images(editor, var, joined, layout)
    first = define(relax.op.permute_dims(volume.images, [0, 3, 1, 2]), "channels_first")
    images = relax.op.nn.conv2d_transpose(
        first, make_const(spread, tensor_dtype(kernel)), strides, [*padding[1:3], *padding[4:]],
        others, dilations, groups, out_dtype=attrs.out_dtype,
    )  # fmt: skip
    images = define(images, "conv2d_transpose")
    if bias is not None:
        # for each group, one set of its channels after the other
        every = np.repeat(bias.reshape(groups, 1, outputs), stride, axis=1).reshape(1, -1, 1, 1)
        images = define(relax.op.add(images, make_const(every, str(bias.dtype))), "biased")
    images = define(relax.op.permute_dims(images, [0, 2, 3, 1]), "channels_last")
    if stride > 1:
        rows, columns = [int(n) for n in list(images.ty.shape)[1:3]]
        lots = relax.ShapeExpr([volume.batch, count, rows, columns, groups, stride, outputs])
        parts = define(relax.op.reshape(images, lots), "lots")
        turned = define(relax.op.permute_dims(parts, [0, 1, 5, 2, 3, 4, 6]), "turned")
        whole = [volume.batch, count * stride, rows, columns, groups * outputs]
        images = define(relax.op.reshape(turned, relax.ShapeExpr(whole)), "whole")
    else:
        whole = [volume.batch, count, *list(images.ty.shape)[1:]]
        images = define(relax.op.reshape(images, relax.ShapeExpr(whole)), "whole")
    if padding[0] or size < count * stride:
        end = padding[0] + size
        images = define(relax.op.strided_slice(images, [1], [padding[0]], [end], [1]), "inside")
    return put_volume(editor, var, make_images(editor, var, images, layout))


def max_pool3d_to_max_pool2d(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """max_pool3d(x) -> volume(max_pool2d(max_pool2d(images))), see `pool_images`."""
    return pool_images(editor, var, relax.op.nn.max_pool2d)


def avg_pool3d_to_avg_pool2d(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """avg_pool3d(x) -> volume(avg_pool2d(avg_pool2d(images))), see `pool_images`. The average of
    averages is the overall average, because each covers equally many values.
    """
    return pool_images(editor, var, relax.op.nn.avg_pool2d)


def pool_images(
    editor: Editor, var: relax.Var, pool: Callable[..., relax.Expr]
) -> relax.Expr | Skip:
    """Pool over each image, then over the depth of (N, D, H * W, C)."""
    call = editor.call_of(var)
    (data,), attrs = call.args, call.attrs
    layout = str(attrs.layout)
    skip = check_layout(data, layout, attrs.out_layout)
    if skip is not None:
        return skip
    view = ConvView.of(call)
    windows, strides, dilation, padding = view.window, view.strides, view.dilation, view.padding
    flags = bool(attrs.ceil_mode), bool(attrs.count_include_pad), "NHWC"
    volume = take_images(editor, var, data, layout)
    images = pool(
        volume.images, windows[1:], strides[1:], [*padding[1:3], *padding[4:]], dilation[1:], *flags
    )
    images = editor.define(var, images, named(editor, var, "images"))
    volume = volume.with_images(images)
    if windows[0] > 1 or strides[0] > 1 or padding[0] or padding[3]:
        batch, depth, *size, channels = volume.shape
        rows = relax.ShapeExpr([batch, depth, prod(int(n) for n in size), channels])
        columns = editor.define(var, relax.op.reshape(images, rows), named(editor, var, "rows"))
        pads = [padding[0], 0, padding[3], 0]
        pooled = pool(columns, [windows[0], 1], [strides[0], 1], pads, [dilation[0], 1], *flags)
        pooled = editor.define(var, pooled, named(editor, var, "depth"))
        depth = int(pooled.ty.shape[1])
        shape = relax.ShapeExpr([batch * depth, *size, channels])
        images = editor.define(var, relax.op.reshape(pooled, shape), named(editor, var, "pooled"))
        volume = replace(volume, images=images, depth=depth)
    return put_volume(editor, var, volume)


def move_before_volume(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """f(volume(x)) -> volume(f(x)), f(volume(x), volume(y)) -> volume(f(x, y)) for an
    elementwise f. Other operands may be constants with one value or with one value per channel.
    """
    call = editor.call_of(var)
    volumes = {i: v for i, arg in enumerate(call.args) if (v := find_volume(editor, arg))}
    if not volumes:
        return decline("no operand is a volume of images")
    first = next(iter(volumes.values()))
    arguments: list[relax.Expr] = []
    for i, arg in enumerate(call.args):
        if i in volumes:
            if not is_alike(volumes[i], first):
                return decline("the volumes are of several sizes or layouts")
            arguments.append(volumes[i].images)
        elif isinstance(arg.ty, relax.TensorType):
            moved = move_constant(arg, first)
            if moved is None:
                return decline("an operand is neither a volume nor one value per channel")
            arguments.append(moved)
        else:
            arguments.append(arg)
    images = Call(call.op, arguments, call.attrs, call.ty_args)
    images = editor.define(var, images, named(editor, var, "images"))
    return put_volume(editor, var, first.with_images(images))


def is_alike(one: Volume, other: Volume) -> bool:
    """Whether an operator can be computed on the images of both volumes together."""
    same = str(one.shape) == str(other.shape)
    return same and one.layout == other.layout


def move_constant(expr: relax.Expr, volume: Volume) -> relax.Expr | None:
    """Reshape a constant that varies only along the channels of a volume to broadcast with its
    images.
    """
    array = constant_value(expr)
    if array is None or array.ndim > 5:
        return None
    sizes = (1,) * (5 - array.ndim) + array.shape
    axis = volume.layout.index("C")
    if any(size != 1 for at, size in enumerate(sizes) if at != axis):
        return None
    if array.size == 1:
        return make_const(array.reshape(()), str(array.dtype))
    return make_const(array.reshape(1, 1, 1, -1), str(array.dtype))


def join_volumes(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """concat((volume(x), volume(y)), channels) -> volume(concat((x, y)))."""
    call = editor.call_of(var)
    fields: Sequence[relax.Expr] = getattr(call.args[0], "fields", ())
    volumes = [find_volume(editor, field) for field in fields]
    found = [volume for volume in volumes if volume is not None]
    if not found or len(found) < len(volumes):
        return decline("an operand is not a volume of images")
    first, axis = found[0], int(call.attrs.axis) % 5
    sizes = {str((*volume.shape[:-1], volume.layout)) for volume in found}
    if len(sizes) > 1 or first.layout[axis] != "C":
        return decline("the volumes are of several sizes, or not joined along the channels")
    images = relax.op.concat([volume.images for volume in found], 3)
    images = editor.define(var, images, named(editor, var, "images"))
    return put_volume(editor, var, first.with_images(images))


#: operators that are moved in front of the reshape from images to a volume
MOVED = tuple(sorted(ELEMENTWISE))
