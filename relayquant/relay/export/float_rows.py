"""Relay writer, rows: operators of float modules, and operators that float and integer modules
share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax

from relayquant.errors import ModelError
from relayquant.ir.reference.unary import RELAX_UNARY, Unary, evaluate_formula
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.graph import constant_value
from relayquant.ir.rewrite.moves import list_permutation
from relayquant.relay import syntax
from relayquant.relay.export.base import Export, ExportRow, ExportSite, ints
from relayquant.relay.export.releases import IOW_SINCE


def same(name: str, count: int = 1, **attrs: Callable[[Any], Any]) -> ExportRow:
    """Write an operator with the first operands of Relax's, and these attributes of it, each
    converted by a function.
    """

    def export(site: ExportSite) -> syntax.Expr:
        given = {key: convert(getattr(site.attrs, key)) for key, convert in attrs.items()}
        return site.op(name, *site.args[:count], **given)

    return ExportRow(export, " ".join(attrs))


def conv_attrs(site: ExportSite, layout: str, kernel_shape: tuple[int, ...]) -> dict[str, Any]:
    """Return attributes that float and integer convolutions share. `layout` is the kernel
    layout.
    """
    view = ConvView.of(site.call)
    kernel = dict(zip(layout, kernel_shape, strict=True))
    transposed = layout.startswith("IO") and "transpose" in site.call.op.name
    channels = kernel["O"] * (view.groups if transposed else 1)
    found = {
        "strides": view.strides,
        "padding": view.padding,
        "dilation": view.dilation,
        "groups": view.groups,
        "channels": channels,
        "kernel_size": tuple(kernel[axis] for axis in layout if axis not in "OI"),
        "data_layout": view.layout,
        "kernel_layout": layout,
        "out_dtype": dtype_text(site.attrs.out_dtype),
    }
    if "transpose" in site.call.op.name:
        found["output_padding"] = view.output_padding
    return found


def dtype_text(value: Any) -> str:
    return "" if value is None or str(value) in ("", "void") else str(value)


#: Data layout -> the kernel layout that Relay can compile. Others pass Relay's type checker, but
#: the build fails.
KERNEL_LAYOUTS = {
    "NCW": "OIW",
    "NWC": "WIO",
    "NCHW": "OIHW",
    "NHWC": "HWIO",
    "NCDHW": "OIDHW",
    "NDHWC": "DHWIO",
}


def conv_kernel(site: ExportSite) -> tuple[syntax.Expr, dict[str, Any]]:
    """Return (kernel, attributes) of a convolution.

    Depthwise kernels of NHWC data are HWOI in Relay, with C data channels and M results each:
        HWIO (kh, kw, 1, C * M)  ->  HWOI (kh, kw, C, M)
    """
    layout = str(site.attrs.kernel_layout)
    wanted = KERNEL_LAYOUTS.get(str(site.attrs.data_layout), layout)
    order = tuple(layout.index(axis) for axis in wanted)
    shape = tuple(site.in_shape(1)[axis] for axis in order)
    attrs = conv_attrs(site, wanted, shape)
    kernel = permute_weight(site, order)
    groups = int(site.attrs.groups)
    if wanted == "HWIO" and groups > 1 and shape[2] == 1:
        attrs["kernel_layout"] = "HWOI"
        moved = (*shape[:2], groups, shape[3] // groups)
        array = constant_value(site.call.args[1])
        if array is not None:
            kernel = site.constant(array.transpose(order).reshape(moved), "weight")
        else:
            kernel = site.reshape(kernel, moved)
    return kernel, attrs


def permute_weight(site: ExportSite, order: tuple[int, ...]) -> syntax.Expr:
    """Return operand 2 with its axes in another order. A constant stays a constant."""
    if order == tuple(range(len(order))):
        return site.args[1]
    array = constant_value(site.call.args[1])
    if array is not None:
        return site.constant(array.transpose(order), "weight")
    return site.op("transpose", site.args[1], axes=order)


def transposed_kernel(site: ExportSite) -> tuple[syntax.Expr, dict[str, Any]]:
    """Return (kernel, attributes) of a transposed convolution: IOHW, also for NHWC data, or IOW."""
    layout = str(site.attrs.kernel_layout)
    wanted = "IO" + "".join(axis for axis in layout if axis not in "IO")
    order = tuple(layout.index(axis) for axis in wanted)
    attrs = conv_attrs(site, wanted, tuple(site.in_shape(1)[axis] for axis in order))
    return permute_weight(site, order), attrs


def conv(
    name: str, find: Callable[[ExportSite], tuple[syntax.Expr, dict[str, Any]]] = conv_kernel
) -> Export:
    """Write a convolution of floats with the kernel and the attributes that `find` returns."""

    def export(site: ExportSite) -> syntax.Expr:
        kernel, attrs = find(site)
        attrs["out_dtype"] = attrs["out_dtype"] if attrs["out_dtype"] != "float32" else ""
        if attrs["kernel_layout"] == "IOW" and site.release < IOW_SINCE:
            attrs["kernel_layout"] = "OIW"
        return site.op(name, site.args[0], kernel, **attrs)

    return export


#: operators whose sums get a bias
PRODUCTS = frozenset(
    f"{dialect}.{name}"
    for dialect in ("nn", "qnn")
    for name in ("conv1d", "conv2d", "conv3d", "conv1d_transpose", "conv2d_transpose", "dense")
)


def export_add(site: ExportSite) -> syntax.Expr:
    """Write a bias after a convolution or nn.dense as nn.bias_add, which the patterns of back ends
    look for.

    add(nn.conv2d(x, w), b (1, C, 1, 1))  ->  nn.bias_add(nn.conv2d(x, w), b (C,), axis=1)
    """
    for at in (0, 1):
        product = site.out.call_of(site.args[at])
        bias = constant_value(site.call.args[1 - at])
        if product is None or product.op not in PRODUCTS or bias is None:
            continue
        layout = str(product.attrs.get("data_layout", "NCHW"))
        axis = 1 if product.op.endswith("dense") else layout.index("C")
        channels = site.in_shape(at)[axis]
        shape = (1,) * axis + (channels,) + (1,) * (len(site.in_dims(at)) - axis - 1)
        if bias.size == channels and shape[len(shape) - bias.ndim :] == bias.shape:
            vector = site.constant(bias.reshape(-1), "bias")
            return site.op("nn.bias_add", site.args[at], vector, axis=axis)
    return site.op("add", *site.args)


def export_matmul(site: ExportSite) -> syntax.Expr:
    """Write x (..., K) times a constant (K, N) as nn.dense of rows, and other products as a matmul
    with 2 or 3 axes.
    """
    left, right = site.in_dims(0), site.in_dims(1)
    weight = constant_value(site.call.args[1])
    kind = dtype_text(site.attrs.out_dtype)
    kind = "" if kind in ("", site.dtype(0)) else kind
    if weight is not None and weight.ndim == 2:
        rows = site.args[0]
        if len(left) != 2:
            rows = site.reshape(rows, (-1, left[-1]))
        kernel = site.constant(weight.T, "weight")
        found = site.op("nn.dense", rows, kernel, units=weight.shape[1], out_dtype=kind)
        return found if len(left) == 2 else site.reshape(found, site.out_dims())
    if len(left) == len(right) == 2:
        return site.op("nn.matmul", *site.args, units=known_size(right[1]), out_dtype=kind)
    return multiply_batches(site, "nn.batch_matmul", site.args, out_dtype=kind)


def multiply_batches(
    site: ExportSite, name: str, operands: Sequence[syntax.Expr], **attrs: Any
) -> syntax.Expr:
    """Emit a product of matrices that are stacked alike, as one with 3 axes."""
    left, right = site.in_dims(0), site.in_dims(1)
    if len(left) < 3 or left[:-2] != right[:-2]:
        raise ModelError(
            f"a product of shapes {left} and {right} has no form in Relay", code="RQ203"
        )
    stacks = [
        arg if len(shape) == 3 else site.reshape(arg, (-1, *shape[-2:]))
        for arg, shape in zip(operands[:2], (left, right), strict=True)
    ]
    found = site.op(name, *stacks, *operands[2:], **attrs)
    return found if len(left) == 3 else site.reshape(found, site.out_dims())


def pool_attrs(site: ExportSite) -> dict[str, Any]:
    view, is_ceiled = ConvView.of(site.call), bool(site.attrs.ceil_mode)
    return {
        "pool_size": view.window,
        "strides": view.strides,
        "dilation": view.dilation,
        "padding": crop_padding(site) if is_ceiled else view.padding,
        "layout": view.layout,
        "ceil_mode": is_ceiled,
    }


def crop_padding(site: ExportSite) -> list[int]:
    """Return the padding of a pool in ceil_mode, cropped.

    Relay counts a last window that begins after the data, Relax does not. Without the cropped
    padding, both count the same windows.

    Raises:
        ModelError: an average counts the padding that would be cropped.
    """
    view = ConvView.of(site.call)
    padding, rank = list(view.padding), view.rank
    for axis, letter in enumerate(view.letters):
        at = view.layout.index(letter)
        size, count = site.dims(site.call.args[0])[at], site.out_dims()[at]
        if not isinstance(size, int) or not isinstance(count, int):
            continue
        span = (view.window[axis] - 1) * view.dilation[axis] + 1
        most = (count - 1) * view.strides[axis] + span - size - padding[axis]
        if padding[rank + axis] > most:
            if bool(getattr(site.attrs, "count_include_pad", False)):
                raise ModelError(
                    "a pool with ceil_mode and count_include_pad whose last window would begin "
                    "after the data has no form in Relay",
                    code="RQ203",
                )
            padding[rank + axis] = most
    return padding


def max_pool(name: str) -> Export:
    return lambda site: site.op(name, site.args[0], **pool_attrs(site))


def avg_pool(name: str) -> Export:
    def export(site: ExportSite) -> syntax.Expr:
        included = bool(site.attrs.count_include_pad)
        return site.op(name, site.args[0], **pool_attrs(site), count_include_pad=included)

    return export


def adaptive_pool(name: str) -> Export:
    def export(site: ExportSite) -> syntax.Expr:
        layout = str(site.attrs.layout)
        shape = dict(zip(layout, site.out_dims(), strict=True))
        size = tuple(known_size(shape[axis]) for axis in layout if axis not in "NC")
        return site.op(name, site.args[0], output_size=size, layout=layout)

    return export


def export_batch_norm(site: ExportSite) -> syntax.Expr:
    if site.attrs.training:
        raise ModelError("it is a batch norm in training mode", code="RQ203")
    return write_norm(site, "nn.batch_norm", int(site.attrs.axis))


def export_layer_norm(site: ExportSite) -> syntax.Expr:
    axes = ints(site.attrs.axes)
    if len(axes) != 1:
        raise ModelError(f"it normalizes over axes {axes}, Relay over one", code="RQ203")
    return write_norm(site, "nn.layer_norm", axes[0])


def write_norm(site: ExportSite, name: str, axis: int) -> syntax.Expr:
    attrs = site.attrs
    switches = {each: bool(getattr(attrs, each)) for each in ("center", "scale")}
    return site.op(name, *site.args, axis=axis, epsilon=float(attrs.epsilon), **switches)


def number_of(value: Any) -> float:
    """Return the number of a bound that Relax keeps as an expression."""
    array = constant_value(value) if isinstance(value, relax.Expr) else None
    return float(array.item()) if array is not None else float(getattr(value, "value", value))


def export_clip(site: ExportSite) -> syntax.Expr:
    low, high = (number_of(site.call.args[i]) for i in (1, 2))
    largest = float(np.finfo("float32").max)
    low, high = max(low, -largest), min(high, largest)
    return site.op("clip", site.args[0], a_min=low, a_max=high)


def unary(row: Unary) -> ExportRow:
    """Write Relay's operator with the same meaning, or a formula."""

    def export(site: ExportSite) -> syntax.Expr:
        return evaluate_formula(
            row.formula,
            site.args[0],
            lambda word, operands, _: site.op(word, *operands),
            lambda value: site.number(value, site.dtype(0)),
        )

    return same(row.relay) if row.relay else ExportRow(export)


# -- shapes ----------------------------------------------------------------------------------------


def export_reshape(site: ExportSite) -> syntax.Expr:
    """Write reshape, also for flatten, expand_dims and squeeze. Only the result's shape matters."""
    return site.reshape(site.args[0], site.out_dims())


def export_permute(site: ExportSite) -> syntax.Expr:
    return site.op("transpose", site.args[0], axes=tuple(list_permutation(site.call)))


def export_concat(site: ExportSite) -> syntax.Expr:
    axis = int(site.attrs.axis or 0)
    return site.op("concatenate", site.tuple_of(site.args[0]), axis=axis)


def export_stack(site: ExportSite) -> syntax.Expr:
    return site.op("stack", site.tuple_of(site.args[0]), axis=int(site.attrs.axis or 0))


def export_split(site: ExportSite) -> syntax.Expr:
    """Write split with indices. A number of sections would be a boxed integer in the metadata."""
    axis = int(site.attrs.axis)
    sizes = [site.type_shape(field)[axis] for field in site.call.ty.fields]
    indices = tuple(int(at) for at in np.cumsum(sizes)[:-1])
    return site.op("split", site.args[0], indices_or_sections=indices, axis=axis)


def export_strided_slice(site: ExportSite) -> syntax.Expr:
    axes, begin, end, *strides = (slice_numbers(each) for each in site.call.args[1:])
    shape = site.in_dims(0)
    steps = strides[0] if strides else (1,) * len(axes)
    axes = tuple(axis % len(shape) for axis in axes)
    if any(step < 1 for step in steps):
        raise ModelError("it counts backwards", code="RQ203")
    ranges = [
        range(known_size(shape[axis]))[at:to:step]
        for axis, at, to, step in zip(axes, begin, end, steps, strict=True)
    ]
    return site.op(
        "strided_slice",
        site.args[0],
        begin=tuple(each.start for each in ranges),
        end=tuple(each.stop for each in ranges),
        strides=tuple(steps),
        axes=axes,
    )


def known_size(dim: int | str) -> int:
    if isinstance(dim, str):
        raise ModelError("it cuts an axis whose size is known at run time only", code="RQ203")
    return dim


def slice_numbers(value: Any) -> tuple[int, ...]:
    """Return a tuple of integers that Relax keeps as an expression."""
    fields = getattr(value, "fields", None)
    if fields is None:
        fields = getattr(value, "values", None)
    if fields is None:
        raise ModelError("it cuts at a place known at run time only", code="RQ203")
    return tuple(int(number_of(field)) for field in fields)


def export_pad(site: ExportSite) -> syntax.Expr:
    attrs = site.attrs
    flat = ints(attrs.pad_width)
    pairs = tuple(zip(flat[::2], flat[1::2], strict=True))
    mode = str(attrs.pad_mode)
    if mode not in ("constant", "reflect", "edge"):
        raise ModelError(f"it pads in mode {mode}", code="RQ203")
    kind = site.dtype(0)
    value = site.constant(np.array(float(attrs.pad_value)).astype(kind), "pad_value")
    return site.op("nn.pad", site.args[0], value, pad_width=pairs, pad_mode=mode)


def export_take(site: ExportSite) -> syntax.Expr:
    axis = site.attrs.axis
    if axis is None:
        raise ModelError("it takes from a flattened tensor", code="RQ203")
    return site.op("take", *site.args, axis=int(axis), mode=str(site.attrs.mode))


def export_broadcast_to(site: ExportSite) -> syntax.Expr:
    """Write broadcast_to as tile. The shape of broadcast_to cannot be written for TVM before
    0.11.
    """
    shape = site.shape(site.call)
    dims = site.in_shape(0)
    sizes = (1,) * (len(shape) - len(dims)) + dims
    value = site.args[0] if sizes == dims else site.reshape(site.args[0], sizes)
    reps = tuple(1 if have == want else want for want, have in zip(shape, sizes, strict=True))
    return site.op("tile", value, reps=reps)


def check_resize_rounding(site: ExportSite) -> None:
    """Raise if a nearest value is halfway between two and both round differently.

    "round" goes to even in Relax, away from zero in Relay. An asymmetric resize to a multiple is an
    integer division in both.
    """
    attrs, layout = site.attrs, str(site.attrs.layout)
    if (str(attrs.method), str(attrs.rounding_method)) != ("nearest_neighbor", "round"):
        return
    sizes = [
        [known_size(dims[layout.index(axis)]) for dims in (site.in_dims(0), site.out_dims())]
        for axis in "HW"
    ]
    is_asymmetric = str(attrs.coordinate_transformation_mode) == "asymmetric"
    if not is_asymmetric or any(new % old for old, new in sizes):
        raise ModelError(
            "rounding_method 'round' goes half to even in Relax and half away from zero in Relay; "
            "allowed: 'round_prefer_floor', 'round_prefer_ceil', 'floor', 'ceil'",
            code="RQ203",
        )


def export_resize2d(site: ExportSite) -> syntax.Expr:
    attrs = site.attrs
    layout = str(attrs.layout)
    shape = dict(zip(layout, site.out_dims(), strict=True))
    check_resize_rounding(site)
    return site.op(
        "image.resize2d",
        site.args[0],
        size=(known_size(shape["H"]), known_size(shape["W"])),
        roi=(0.0, 0.0, 0.0, 0.0),
        layout=layout,
        method=str(attrs.method),
        coordinate_transformation_mode=str(attrs.coordinate_transformation_mode),
        rounding_method=str(attrs.rounding_method),
        cubic_alpha=float(attrs.cubic_alpha),
        cubic_exclude=int(attrs.cubic_exclude),
        extrapolation_value=float(attrs.extrapolation_value),
    )


def reduction(name: str) -> Export:
    def export(site: ExportSite) -> syntax.Expr:
        axes = site.attrs.axis
        every = tuple(range(len(site.in_dims(0))))
        return site.op(
            name,
            site.args[0],
            axis=every if axes is None else ints(axes),
            keepdims=bool(site.attrs.keepdims),
        )

    return export


def export_mean(site: ExportSite) -> syntax.Expr:
    if not site.dtype(0).startswith("float"):
        raise ModelError(f"the mean of {site.dtype(0)} is int64 in Relax", code="RQ203")
    return reduction("mean")(site)


#: Operators with the same name, operands and meaning in both.
_SAME = {
    1: ("nn.batch_flatten",),
    2: (
        *("subtract", "multiply", "divide", "power", "maximum", "minimum"),
        *("floor_mod", "floor_divide", "left_shift", "right_shift"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor"),
        *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    ),
    3: ("where",),
}

_CONV = "strides padding dilation groups data_layout kernel_layout out_dtype"
_POOL = "pool_size strides padding dilation ceil_mode count_include_pad layout"
_REDUCE = "axis keepdims"

FLOAT_ROWS: dict[str, ExportRow] = {
    **{f"relax.{name}": same(name, count) for count, names in _SAME.items() for name in names},
    **{op: unary(row) for op, row in RELAX_UNARY.items() if row.relay or row.formula},
    "relax.negative": same("negative"),
    **{f"relax.nn.conv{n}d": ExportRow(conv(f"nn.conv{n}d"), _CONV) for n in (1, 2, 3)},
    **{
        f"relax.nn.conv{n}d_transpose": ExportRow(
            conv(f"nn.conv{n}d_transpose", transposed_kernel), f"{_CONV} output_padding"
        )
        for n in (1, 2)
    },
    "relax.add": ExportRow(export_add),
    "relax.matmul": ExportRow(export_matmul, "out_dtype"),
    **{f"relax.nn.max_pool{n}d": ExportRow(max_pool(f"nn.max_pool{n}d"), _POOL) for n in (1, 2)},
    **{f"relax.nn.avg_pool{n}d": ExportRow(avg_pool(f"nn.avg_pool{n}d"), _POOL) for n in (1, 2)},
    **{
        f"relax.nn.{name}": ExportRow(adaptive_pool(f"nn.{name}"), "output_size layout")
        for name in ("adaptive_avg_pool1d", "adaptive_avg_pool2d")
    },
    "relax.nn.softmax": same("nn.softmax", axis=int),
    "relax.nn.log_softmax": same("nn.log_softmax", axis=int),
    "relax.nn.batch_norm": ExportRow(
        export_batch_norm, "axis epsilon center scale momentum training"
    ),
    "relax.nn.layer_norm": ExportRow(export_layer_norm, "axes epsilon center scale"),
    "relax.clip": ExportRow(export_clip),
    "relax.nn.leakyrelu": same("nn.leaky_relu", alpha=float),
    "relax.nn.prelu": same("nn.prelu", 2, axis=int),
    "relax.astype": same("cast", dtype=str),
    "relax.reshape": ExportRow(export_reshape),
    "relax.flatten": ExportRow(export_reshape),
    "relax.expand_dims": ExportRow(export_reshape, "axis"),
    "relax.squeeze": ExportRow(export_reshape, "axis"),
    "relax.permute_dims": ExportRow(export_permute, "axes"),
    "relax.flip": same("reverse", axis=int),
    "relax.concat": ExportRow(export_concat, "axis"),
    "relax.stack": ExportRow(export_stack, "axis"),
    "relax.split": ExportRow(export_split, "indices_or_sections axis"),
    "relax.strided_slice": ExportRow(export_strided_slice, "assume_inbound"),
    "relax.nn.pad": ExportRow(export_pad, "pad_width pad_mode pad_value"),
    "relax.take": ExportRow(export_take, "axis mode"),
    "relax.broadcast_to": ExportRow(export_broadcast_to),
    "relax.image.resize2d": ExportRow(
        export_resize2d,
        "layout method coordinate_transformation_mode rounding_method cubic_alpha cubic_exclude",
    ),
    **{f"relax.{name}": ExportRow(reduction(name), _REDUCE) for name in ("sum", "max", "min")},
    "relax.mean": ExportRow(export_mean, _REDUCE),
}
