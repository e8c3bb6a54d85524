"""Relay reader, rows: convolutions and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax

from relayquant.errors import ModelError, format_count
from relayquant.ir.rewrite.graph import tensor_shape
from relayquant.relay.operators.base import (
    OPTIONAL_INTEGERS,
    RelayOp,
    Site,
    boxed,
    check_positive,
    dtype,
    flag,
    integer,
    integers,
    text,
)
from relayquant.relay.release import BATCH_MATMUL_ATTRIBUTES, KERNEL_DEFAULT, KERNEL_LETTERS

op = relax.op

#: Spatial letters of a layout, by the number of spatial axes.
SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


def conv_attrs(rank: int, kernel_layout: str, **more: Any) -> dict[str, Any]:
    """Declare the attributes of a convolution over `rank` axes."""
    return {
        "strides": integers(*[1] * rank),
        "padding": integers(*[0] * rank),
        "dilation": integers(*[1] * rank),
        "groups": integer(1),
        "channels": boxed(),
        "kernel_size": OPTIONAL_INTEGERS,
        "data_layout": text("NC" + SPATIAL[rank]),
        "kernel_layout": text(kernel_layout),
        "out_layout": text(""),
        "out_dtype": dtype(),
        **more,
    }


def check_window(site: Site, rank: int) -> None:
    """Raise unless strides, dilation, padding and groups are valid for a convolution.

    Raises:
        ModelError: names the attribute.
    """
    attrs = site.attrs
    for name in ("strides", "dilation"):
        check_positive(name, attrs[name])
        if len(attrs[name]) not in (1, rank):
            raise ModelError(
                f"attribute {name} has {format_count(len(attrs[name]), 'value')}; allowed: {rank}.",
                code="RQ202",
            )
    check_padding(attrs["padding"], rank)
    if "groups" in attrs:
        check_positive("groups", (attrs["groups"],))


def check_padding(padding: Sequence[int], rank: int) -> None:
    """Raise unless there is one width, one per axis, or one per side.

    Raises:
        ModelError: the number of widths is wrong, or one is negative.
    """
    if len(padding) not in (1, rank, 2 * rank) or min(padding) < 0:
        raise ModelError(
            f"attribute padding is {list(padding)}; allowed: 1, {rank} or {2 * rank} widths "
            "from 0.",
            code="RQ202",
        )


def check_layout(name: str, layout: str, letters: str) -> None:
    """Raise unless a layout has exactly these letters.

    Raises:
        ModelError: it is blocked ("NCHW4c") or lacks an axis.
    """
    if sorted(layout) != sorted(letters):
        raise ModelError(
            f"{name} {layout!r} is not supported; allowed: the axes {', '.join(letters)} in any "
            "order, not blocked.",
            code="RQ202",
        )


def check_out_layout(site: Site, layout: str) -> None:
    if site.attrs["out_layout"] not in ("", layout):
        raise ModelError(
            f"out_layout {site.attrs['out_layout']!r} is not supported; allowed: {layout!r}, the "
            "layout of the data.",
            code="RQ202",
        )


def ungroup_weight(
    site: Site, weight: relax.Expr, layout: str, groups: int, data: relax.Expr, data_layout: str
) -> tuple[relax.Expr, str]:
    """Return (weight, layout) of a convolution in Relax's form: O counts all output channels.

    Relay keeps depthwise weights as (C, M, kh, kw), with M outputs per channel:
        OIHW (C, M, kh, kw)  ->  OIHW (C * M, 1, kh, kw)
        HWOI (kh, kw, C, M)  ->  HWIO (kh, kw, 1, C * M)
    """
    shape = tensor_shape(weight)
    channels = site.dims(data)[data_layout.index("C")]
    if shape is None or len(shape) != len(layout):
        raise ModelError(
            f"the weight has shape {shape}; allowed: {format_count(len(layout), 'axis')}, "
            f"{layout}.",
            code="RQ202",
        )
    out_axis, in_axis = layout.index("O"), layout.index("I")
    depthwise = groups > 1 and groups == channels == shape[out_axis]
    if not depthwise or in_axis != out_axis + 1:
        return weight, layout
    if layout.startswith("OI") and shape[in_axis] == 1:
        return weight, layout
    sizes = list(site.shape(weight))
    total = sizes[out_axis] * sizes[in_axis]
    if layout.startswith("OI"):
        return site.reshape(weight, [total, 1, *sizes[2:]]), layout
    return site.reshape(weight, [*sizes[:out_axis], 1, total]), layout[:out_axis] + "IO"


def check_channels(site: Site, weight: relax.Expr, layout: str, groups: int = 1) -> None:
    """Raise if the attributes contradict the weight. Only the weight is used.

    `groups`: how often it has the output channels of the kernel.
    """
    shape = site.dims(weight)
    channels, kernel = site.attrs["channels"], site.attrs["kernel_size"]
    found = shape[layout.index("O")]
    found = found * groups if isinstance(found, int) else None  # a symbolic size may be right
    if channels is not None and found is not None and found != channels:
        raise ModelError(
            f"attribute channels is {channels}, but the weight has "
            f"{format_count(found, 'output channel')}.",
            code="RQ202",
        )
    window = tuple(size for size, axis in zip(shape, layout, strict=True) if axis not in "OI")
    if kernel is not None and window != tuple(kernel):
        raise ModelError(
            f"attribute kernel_size is {kernel}, but the weight's window is {window}.", code="RQ202"
        )


def check_conv_layouts(site: Site, rank: int) -> tuple[relax.Expr, relax.Expr, str]:
    """Return (data, weight, data layout) after a check of the window and the layouts."""
    attrs, data, weight = site.attrs, site.tensor(0), site.tensor(1)
    check_window(site, rank)
    check_layout("data_layout", attrs["data_layout"], "NC" + SPATIAL[rank])
    check_layout("kernel_layout", attrs["kernel_layout"], "OI" + SPATIAL[rank])
    check_out_layout(site, attrs["data_layout"])
    return data, weight, attrs["data_layout"]


def conv_keywords(site: Site, kernel_layout: str) -> dict[str, Any]:
    """Return the keywords of a Relax convolution for a weight in this layout."""
    attrs = site.attrs
    extents = ("strides", "padding", "output_padding", "dilation")
    return {
        **{name: list(attrs[name]) for name in extents if name in attrs},
        "groups": attrs["groups"],
        "data_layout": attrs["data_layout"],
        "kernel_layout": kernel_layout,
        "out_dtype": attrs["out_dtype"] or None,
    }


def conv_operands(site: Site, rank: int) -> tuple[relax.Expr, relax.Expr, dict[str, Any]]:
    """Return (data, weight, keywords of a Relax convolution), all checked."""
    attrs = site.attrs
    data, weight, layout = check_conv_layouts(site, rank)
    if site.ndim(data) != rank + 2:
        raise ModelError(
            f"the data has {format_count(site.ndim(data), 'axis')}; allowed: {rank + 2}, {layout}.",
            code="RQ202",
        )
    weight, kernel_layout = ungroup_weight(
        site, weight, attrs["kernel_layout"], attrs["groups"], data, layout
    )
    check_channels(site, weight, kernel_layout)
    return data, weight, conv_keywords(site, kernel_layout)


def conv(function: Callable[..., relax.Expr], rank: int) -> Callable[[Site], relax.Expr]:
    def convert(site: Site) -> relax.Expr:
        data, weight, keywords = conv_operands(site, rank)
        return function(data, weight, **keywords)

    return convert


def transposed_operands(site: Site, rank: int) -> tuple[relax.Expr, relax.Expr, dict[str, Any]]:
    """Return (data, weight, keywords) of a transposed convolution, all checked."""
    attrs = site.attrs
    data, weight, layout = check_conv_layouts(site, rank)
    if site.ndim(data) != rank + 2 or site.ndim(weight) != rank + 2:
        raise ModelError(
            f"data and weight need {format_count(rank + 2, 'axis')} each, {layout} and O, I.",
            code="RQ202",
        )
    kernel_layout = find_transposed_layout(site, data, weight, rank)
    check_channels(site, weight, kernel_layout, attrs["groups"])
    if min(attrs["output_padding"]) < 0:
        raise ModelError(
            f"attribute output_padding is {attrs['output_padding']}; allowed: from 0.", code="RQ202"
        )
    return data, weight, conv_keywords(site, kernel_layout)


def find_transposed_layout(site: Site, data: relax.Expr, weight: relax.Expr, rank: int) -> str:
    """Return the layout of the weight, with I for the channels of the data.

    The meaning of the attribute and its default changed between releases (`release.py`), so the
    shapes decide. Only one order of O and I fits them, unless there are as many input as output
    channels.
    """
    written = site.attrs["kernel_layout"]
    swapped = written.translate(str.maketrans("OI", "IO"))
    channels = site.dims(data)[site.attrs["data_layout"].index("C")]
    out, groups = site.attrs["channels"], site.attrs["groups"]

    def fits(layout: str) -> bool:
        shape = site.dims(weight)
        outputs = shape[layout.index("O")]
        is_all = out is None or not isinstance(outputs, int) or outputs * groups == out
        return shape[layout.index("I")] == channels and is_all

    if not fits(swapped):
        return written
    if not fits(written):
        return swapped
    what = "the meaning of its kernel"
    if "kernel_layout" in site.written:
        if site.release is None and rank == 2:
            return written  # as in all releases but 0.7
        return written if site.is_since(KERNEL_LETTERS[rank], what) else swapped
    if rank == 1:
        return "IOW"  # in every release, under different names
    is_oihw = not site.is_since(KERNEL_DEFAULT, what) and site.is_since(KERNEL_LETTERS[rank], what)
    return "OIHW" if is_oihw else "IOHW"


def transposed(function: Callable[..., relax.Expr], rank: int) -> Callable[[Site], relax.Expr]:
    """Permute NHWC data and weights of other layouts than IOHW, because Relax compiles no others.

    conv2d_transpose(x, w, NHWC, HWIO)
        ->  permute(conv2d_transpose(permute(x), permute(w), NCHW, IOHW))
    """
    data_layout, kernel_layout = "NC" + SPATIAL[rank], "IO" + SPATIAL[rank]

    def convert(site: Site) -> relax.Expr:
        data, weight, keywords = transposed_operands(site, rank)
        layout = keywords["data_layout"]
        turned = [
            site.permute(data, [layout.index(axis) for axis in data_layout]),
            site.permute(weight, [keywords["kernel_layout"].index(axis) for axis in kernel_layout]),
        ]
        keywords |= {"data_layout": data_layout, "kernel_layout": kernel_layout}
        result = function(*turned, **keywords)
        if layout == data_layout:
            return result
        return site.permute(site.emit(result), [data_layout.index(axis) for axis in layout])

    return convert


def swap_last(site: Site, expr: relax.Expr) -> relax.Expr:
    """Swap the last two axes of `expr`."""
    ndim = site.ndim(expr)
    if ndim < 2:
        raise ModelError(
            f"an operand has {format_count(ndim, 'axis')}; allowed: at least 2.", code="RQ202"
        )
    return site.permute(expr, [*range(ndim - 2), ndim - 1, ndim - 2])


def convert_dense(site: Site) -> relax.Expr:
    """Convert dense to x W^T."""
    data, weight = site.tensor(0), site.tensor(1)
    check_units(site, weight)
    return op.matmul(data, swap_last(site, weight), site.attrs["out_dtype"] or None)


def check_units(site: Site, weight: relax.Expr) -> None:
    shape, units = site.dims(weight), site.attrs["units"]
    if len(shape) != 2:
        raise ModelError(
            f"the weight has {format_count(len(shape), 'axis')}; allowed: 2.", code="RQ202"
        )
    if units is not None and shape[0] != units:
        raise ModelError(
            f"attribute units is {units}, but the weight has {format_count(shape[0], 'output')}.",
            code="RQ202",
        )


def convert_matmul(site: Site, *, is_old: bool = False) -> relax.Expr:
    left, right, attrs = site.tensor(0), site.tensor(1), site.attrs
    left = swap_last(site, left) if attrs["transpose_a"] else left
    right = swap_last(site, right) if attrs["transpose_b"] or is_old else right
    return op.matmul(left, right, attrs["out_dtype"] or None)


def convert_batch_matmul(site: Site) -> relax.Expr:
    """Convert batch_matmul.

    Before TVM 0.9 it had no attributes and y was transposed. If the source has no attribute, the
    shapes decide, or else the release. An unknown release counts as a later one.
    """
    return convert_matmul(site, is_old=site.attrs["transpose_b"] or is_old_batch_matmul(site))


def is_old_batch_matmul(site: Site) -> bool:
    left, right = site.dims(site.tensor(0)), site.dims(site.tensor(1))
    if {"transpose_a", "transpose_b"} & site.written or min(len(left), len(right)) < 2:
        return False
    if left[-1] != right[-2] or left[-1] != right[-1]:
        return left[-1] == right[-1]
    return site.release is not None and site.release < BATCH_MATMUL_ATTRIBUTES


_PRODUCT = {"transpose_a": flag(), "transpose_b": flag(), "out_dtype": dtype()}
#: Written by auto-scheduling passes. Empty in a model.
_LAYOUTS = {
    "auto_scheduler_rewritten_layout": text(""),
    "meta_schedule_original_shape": OPTIONAL_INTEGERS,
}

LINEAR_OPS: tuple[RelayOp, ...] = (
    RelayOp("nn.conv1d", 2, conv(op.nn.conv1d, 1), conv_attrs(1, "OIW")),
    RelayOp("nn.conv2d", 2, conv(op.nn.conv2d, 2), conv_attrs(2, "OIHW", **_LAYOUTS)),
    RelayOp("nn.conv3d", 2, conv(op.nn.conv3d, 3), conv_attrs(3, "OIDHW", **_LAYOUTS)),
    RelayOp(
        "nn.conv1d_transpose",
        2,
        transposed(op.nn.conv1d_transpose, 1),
        conv_attrs(1, "IOW", output_padding=integers(0)),
    ),
    RelayOp(
        "nn.conv2d_transpose",
        2,
        transposed(op.nn.conv2d_transpose, 2),
        conv_attrs(2, "IOHW", output_padding=integers(0, 0)),
    ),
    RelayOp("nn.dense", 2, convert_dense, {"units": boxed(), "out_dtype": dtype(), **_LAYOUTS}),
    RelayOp("nn.matmul", 2, convert_matmul, {"units": boxed(), **_PRODUCT, **_LAYOUTS}),
    RelayOp("nn.batch_matmul", 2, convert_batch_matmul, {**_PRODUCT, **_LAYOUTS}),
)
