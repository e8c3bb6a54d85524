"""Rules for pads in front of windows, pools over the whole map, and flatten."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax

from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import tensor_dtype, tensor_shape
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.tensors import spatial_axes

_CONVS: dict[str, Any] = {
    "relax.nn.conv1d": relax.op.nn.conv1d,
    "relax.nn.conv2d": relax.op.nn.conv2d,
    "relax.nn.conv3d": relax.op.nn.conv3d,
}
_AVERAGE_POOLS: dict[str, Any] = {
    "relax.nn.avg_pool1d": relax.op.nn.avg_pool1d,
    "relax.nn.avg_pool2d": relax.op.nn.avg_pool2d,
    "relax.nn.avg_pool3d": relax.op.nn.avg_pool3d,
}
_MAX_POOLS: dict[str, Any] = {
    "relax.nn.max_pool1d": relax.op.nn.max_pool1d,
    "relax.nn.max_pool2d": relax.op.nn.max_pool2d,
    "relax.nn.max_pool3d": relax.op.nn.max_pool3d,
}
WINDOWS = (*_CONVS, *_AVERAGE_POOLS, *_MAX_POOLS)
ADAPTIVE = tuple(f"relax.nn.adaptive_avg_pool{rank}d" for rank in (1, 2, 3))
WHOLE_MAP = (*_AVERAGE_POOLS, *ADAPTIVE)
FLATTENS = ("relax.flatten", "relax.nn.batch_flatten")


def fold_pad(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """conv(pad(x, 0), padding=p) -> conv(x, padding=p + pad).

    The same for an average pool that counts pads, and for a max pool if the pad value is -inf, or 0
    on non-negative data. The pad touches only spatial axes and has no other reader.
    """
    call, name = editor.call_of(var), editor.op_name(var)
    padded = call.args[0]
    pad = editor.call_of(padded)
    if pad is None or editor.op_name(padded) != "relax.nn.pad" or not editor.has_one_use(padded):
        return decline("no pad before it, or others read it")
    attrs = call.attrs
    layout = attrs.data_layout if name in _CONVS else attrs.layout
    axes = spatial_axes(layout)
    if axes is None or pad.attrs.pad_mode != "constant":
        return decline("a packed layout, or pads that are not constant")
    widths = np.array([int(width) for width in pad.attrs.pad_width]).reshape(-1, 2)
    outside = [at for at in range(len(widths)) if at not in axes]
    if (widths < 0).any() or widths[outside].any():
        return decline("the pad is negative, or touches axes outside of the windows")
    view = ConvView.of(call)
    own = np.array(view.padding).reshape(2, -1)
    total = (own + widths[axes].T).ravel().tolist()
    value = float(pad.attrs.pad_value)
    data = pad.args[0]
    if name in _CONVS:
        if value != 0:
            return decline("the pads are not 0")
        return _CONVS[name](
            data,
            call.args[1],
            strides=view.strides,
            padding=total,
            dilation=view.dilation,
            groups=view.groups,
            data_layout=attrs.data_layout,
            kernel_layout=attrs.kernel_layout,
            out_layout=attrs.out_layout,
            out_dtype=attrs.out_dtype,
        )
    counts = bool(attrs.count_include_pad)
    if name in _AVERAGE_POOLS:
        # If the pool has padding that it does not count, it could not tell the two apart.
        if value != 0 or attrs.ceil_mode or (own.any() and not counts):
            return decline("the pool counts these pads differently from its own padding")
        counts, pool = True, _AVERAGE_POOLS[name]
    else:
        pool = _MAX_POOLS[name]
        if attrs.ceil_mode or not _is_harmless_for_max(editor, data, value, view, total):
            return decline("the pads may be the largest of a window")
    return pool(
        data,
        view.window,
        view.strides,
        total,
        view.dilation,
        bool(attrs.ceil_mode),
        counts,
        attrs.layout,
        attrs.out_layout,
    )


def _is_harmless_for_max(
    editor: Editor, data: relax.Expr, value: float, view: ConvView, padding: list[int]
) -> bool:
    """Whether the maximum of every window stays the same with -inf instead of the pads."""
    if value == -math.inf:
        return True
    if value != 0 or not _is_non_negative(editor, data):
        return False
    # Every window must hold an element of the data. Otherwise the result is -inf instead of 0.
    windows = [
        (size - 1) * dilation + 1 for size, dilation in zip(view.window, view.dilation, strict=True)
    ]
    return all(pad < window for pad, window in zip(padding, windows * 2, strict=True))


def _is_non_negative(editor: Editor, expr: relax.Expr) -> bool:
    if tensor_dtype(expr).startswith("uint"):
        return True
    name = editor.op_name(expr)
    if name in ("relax.nn.relu", "relax.sigmoid", "relax.nn.softmax", "relax.exp", "relax.abs"):
        return True
    if name == "relax.clip":
        low = getattr(editor.call_of(expr).args[1], "value", None)
        return isinstance(low, int | float) and low >= 0
    return False


def pool_to_mean(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """Replace a pool over the whole map by a mean: adaptive_avg_pool2d(x, 1) and avg_pool2d
    without padding -> mean(x, spatial axes, keepdims).
    """
    call = editor.call_of(var)
    attrs, data = call.attrs, call.args[0]
    axes = spatial_axes(attrs.layout)
    shape = tensor_shape(data)
    if axes is None or shape is None or attrs.out_layout not in ("", attrs.layout):
        return decline("a packed layout, or an unknown shape")
    if editor.op_name(var) in ADAPTIVE:
        size = attrs.output_size
        if size is None or any(int(extent) != 1 for extent in size):
            return decline("the result has several values per channel")
    else:
        view = ConvView.of(call)
        if view.window != tuple(shape[axis] for axis in axes) or any(view.padding):
            return decline("the window is not the whole map")
        if any(dilation != 1 for dilation in view.dilation):
            return decline("the window has holes")
    return relax.op.mean(data, axis=axes, keepdims=True)


def widen_average(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """avg_pool1d(x) -> squeeze(avg_pool2d(expand_dims(x))). Images with one row have an integer
    form.
    """
    attrs, (data,) = editor.call_of(var).attrs, editor.call_of(var).args
    layout = str(attrs.layout)
    if sorted(layout) != sorted("NCW") or attrs.out_layout not in ("", layout):
        return decline("a packed layout, or results of another one")
    row = layout.index("W")
    image = editor.define(var, relax.op.expand_dims(data, [row]), f"{editor.names[var]}.image")
    flat = ConvView.of(editor.call_of(var)).as_2d()
    pooled = relax.op.nn.avg_pool2d(
        image, flat.window, flat.strides, flat.padding, flat.dilation,
        bool(attrs.ceil_mode), bool(attrs.count_include_pad), layout.replace("W", "HW"),
    )  # fmt: skip
    pooled = editor.define(var, pooled, f"{editor.names[var]}.pooled")
    return relax.op.squeeze(pooled, [row])


def flatten_to_reshape(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """flatten(x), batch_flatten(x) -> reshape(x, shape of the result)."""
    shape = var.ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        return decline("the shape is unknown")
    return relax.op.reshape(editor.call_of(var).args[0], shape)
