"""Relay reader, rows: pooling and normalization."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from tvm import relax

from relayquant.errors import ModelError, format_count
from relayquant.ir.rewrite.graph import tensor_dtype
from relayquant.relay.operators.base import (
    RelayOp,
    Site,
    check_made_up,
    check_positive,
    flag,
    integer,
    integers,
    is_integer,
    make_const,
    make_scalar,
    real,
    text,
)
from relayquant.relay.operators.linear import SPATIAL, check_layout, check_out_layout, check_padding

op = relax.op

#: Largest number of windows along an axis. Each window becomes a value.
MAX_ADAPTIVE = 4096


def pool_attrs(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "pool_size": integers(required=True),
        "strides": integers(*[1] * rank),
        "dilation": integers(*[1] * rank),
        "padding": integers(*[0] * rank),
        "layout": text("NC" + SPATIAL[rank]),
        "out_layout": text(""),
        "ceil_mode": flag(),
        **more,
    }


def pool_keywords(site: Site, rank: int) -> dict[str, Any]:
    """Return the keywords of a Relax pool, all checked."""
    attrs = site.attrs
    for name in ("pool_size", "strides", "dilation"):
        check_positive(name, attrs[name] or ())
        if len(attrs[name]) not in (1, rank):
            raise ModelError(
                f"attribute {name} has {format_count(len(attrs[name]), 'value')}; allowed: {rank}.",
                code="RQ202",
            )
    check_padding(attrs["padding"], rank)
    check_layout("layout", attrs["layout"], "NC" + SPATIAL[rank])
    check_out_layout(site, attrs["layout"])
    one = {name: list(attrs[name]) for name in ("pool_size", "strides", "dilation", "padding")}
    single = rank > 1
    return {
        **{k: v * rank if single and len(v) == 1 and k != "padding" else v for k, v in one.items()},
        "ceil_mode": attrs["ceil_mode"],
        "layout": attrs["layout"],
    }


def max_pool(function: Callable[..., relax.Expr], rank: int) -> Callable[[Site], relax.Expr]:
    def convert(site: Site) -> relax.Expr:
        keywords = pool_keywords(site, rank)
        return check_windows(site, site.emit(function(site.tensor(0), **keywords)), keywords, rank)

    return convert


def check_windows(
    site: Site, result: relax.Expr, keywords: dict[str, Any], rank: int
) -> relax.Expr:
    """Return `result` if it has as many windows as Relay counts.

    With ceil_mode, Relay also counts a window that begins after the data. Relax does not.

    Raises:
        ModelError: it has fewer windows.
    """
    if not keywords["ceil_mode"]:
        return result
    shape, made = site.shape(site.tensor(0)), site.shape(result)
    padding = list(keywords["padding"])
    padding = padding * (2 * rank // len(padding)) if len(padding) < 2 * rank else padding
    windows, strides, dilation = (
        list(keywords[name]) * (rank if len(keywords[name]) == 1 else 1)
        for name in ("pool_size", "strides", "dilation")
    )
    for axis, letter in enumerate(SPATIAL[rank]):
        at = keywords["layout"].index(letter)
        free = shape[at] + padding[axis] + padding[rank + axis]
        free -= (windows[axis] - 1) * dilation[axis] + 1
        count = -(-free // strides[axis]) + 1
        if count != made[at]:
            raise ModelError(
                f"ceil_mode has {format_count(count, 'window')} along {letter}, of which the last "
                f"begins after the data; allowed: {made[at]}. Crop the padding at the end, or use "
                "ceil_mode=False.",
                code="RQ202",
            )
    return result


def avg_pool(function: Callable[..., relax.Expr], rank: int) -> Callable[[Site], relax.Expr]:
    def convert(site: Site) -> relax.Expr:
        data = site.tensor(0)
        keywords = pool_keywords(site, rank)
        keywords["count_include_pad"] = site.attrs["count_include_pad"]
        if is_integer(data):
            return integer_average(site, data, keywords, rank)
        return check_windows(site, site.emit(function(data, **keywords)), keywords, rank)

    return convert


def integer_average(
    site: Site, data: relax.Expr, keywords: dict[str, Any], rank: int
) -> relax.Expr:
    """Convert an average pool of integers as Relay computes it: the sum of the window, divided and
    truncated.

    A convolution with ones computes the sum, because Relax's pool changes the dtype. Each window is
    divided by the number of values that it covers. With count_include_pad, the padding counts too,
    but not the elements that ceil_mode adds.
    """
    layout, kind = keywords["layout"], tensor_dtype(data)
    shape = site.shape(data)
    sizes = [shape[layout.index(axis)] for axis in SPATIAL[rank]]
    windows, strides, dilation = (
        list(keywords[name]) * (rank if len(keywords[name]) == 1 else 1)
        for name in ("pool_size", "strides", "dilation")
    )
    padding = list(keywords["padding"])
    padding = padding * (2 * rank // len(padding)) if len(padding) < 2 * rank else padding
    is_counted = keywords["count_include_pad"]
    counted = [
        (-padding[axis] * is_counted, sizes[axis] + padding[rank + axis] * is_counted)
        for axis in range(rank)
    ]
    if keywords["ceil_mode"]:
        for axis in range(rank):
            padding[rank + axis] += strides[axis] - 1
    channels = shape[layout.index("C")]
    check_made_up(channels * prod(windows))
    ones = make_const(np.ones([channels, 1, *windows], kind))
    total = site.emit(
        (op.nn.conv1d, op.nn.conv2d, op.nn.conv3d)[rank - 1](
            data,
            ones,
            strides=strides,
            padding=padding,
            dilation=dilation,
            groups=channels,
            data_layout=layout,
            kernel_layout="OI" + SPATIAL[rank],
            out_dtype=kind,
        )
    )
    counts = np.ones([1] * len(layout), "int64")
    for axis, letter in enumerate(SPATIAL[rank]):
        starts = np.arange(site.shape(total)[layout.index(letter)]) * strides[axis] - padding[axis]
        places = starts[:, None] + np.arange(windows[axis]) * dilation[axis]
        covered = ((places >= counted[axis][0]) & (places < counted[axis][1])).sum(1)
        along = [1] * len(layout)
        along[layout.index(letter)] = -1
        counts = counts * covered.reshape(along)
    if counts.min() == counts.max():
        return op.divide(total, make_scalar(int(counts.max()), kind))
    return op.divide(total, make_const(np.maximum(counts, 1).astype(kind)))


def adaptive_pool(function: Callable[..., relax.Expr], rank: int) -> Callable[[Site], relax.Expr]:
    """Convert adaptive averages. For integers, sums are divided and truncated."""

    def convert(site: Site) -> relax.Expr:
        data, size = site.tensor(0), adaptive_size(site, rank)
        layout = site.attrs["layout"]
        if not is_integer(data):
            return function(data, list(size) if size else None, layout)
        total, counts = reduce_adaptively(site, op.sum, rank)
        return op.divide(total, make_const(counts.astype(tensor_dtype(data))))

    return convert


def adaptive_size(site: Site, rank: int) -> tuple[int, ...]:
    """Return the output size along each spatial axis. () means the size of the input.

    Raises:
        ModelError: the layout or a size is not allowed.
    """
    layout, size = site.attrs["layout"], site.attrs["output_size"] or ()
    check_layout("layout", layout, "NC" + SPATIAL[rank])
    check_out_layout(site, layout)
    if size:
        check_positive("output_size", size)
        if len(size) not in (1, rank) or max(size) > MAX_ADAPTIVE:
            raise ModelError(
                f"output_size is {list(size)}; allowed: {format_count(rank, 'size')} up to "
                f"{MAX_ADAPTIVE}.",
                code="RQ202",
            )
    return size * rank if len(size) == 1 else size


def reduce_adaptively(
    site: Site, function: Callable[..., relax.Expr], rank: int
) -> tuple[relax.Expr, np.ndarray]:
    """Return (`function` of each window, number of values of each), one axis after the other.

    concat(f(x[floor(0 * n / m) : ceil(1 * n / m)]), f(x[floor(1 * n / m) : ...]), ...)
    """
    data, layout = site.tensor(0), site.attrs["layout"]
    counts = np.ones([1] * len(layout), "int64")
    for letter, wanted in zip(SPATIAL[rank], adaptive_size(site, rank), strict=False):
        axis = layout.index(letter)
        size = site.shape(data)[axis]
        spans = [(i * size // wanted, -(-(i + 1) * size // wanted)) for i in range(wanted)]
        parts = [
            site.emit(
                function(
                    site.emit(op.strided_slice(data, [axis], [start], [stop])),
                    [axis],
                    keepdims=True,
                )
            )
            for start, stop in spans
        ]
        data = site.emit(op.concat(parts, axis)) if len(parts) > 1 else parts[0]
        along = [1] * len(layout)
        along[axis] = -1
        counts = counts * np.array([stop - start for start, stop in spans]).reshape(along)
    return data, counts


def adaptive_max_pool(site: Site) -> relax.Expr:
    """Convert the maximum over all positions, or of each window."""
    size = adaptive_size(site, 2)
    return global_max_pool(site) if set(size) == {1} else reduce_adaptively(site, op.max, 2)[0]


def spatial_axes(site: Site) -> list[int]:
    layout = site.attrs["layout"]
    check_layout("layout", layout, "NCHW")
    check_out_layout(site, layout)
    return [layout.index("H"), layout.index("W")]


def global_max_pool(site: Site) -> relax.Expr:
    return op.max(site.tensor(0), spatial_axes(site), keepdims=True)


def global_avg_pool(site: Site) -> relax.Expr:
    """Convert the global average. For integers, the sum is divided and truncated."""
    data, axes = site.tensor(0), spatial_axes(site)
    if not is_integer(data):
        return op.mean(data, axes, keepdims=True)
    shape = site.shape(data)
    count = prod(shape[axis] for axis in axes)
    total = site.emit(op.sum(data, axes, keepdims=True))
    return op.divide(total, make_scalar(count, tensor_dtype(data)))


# -- normalization ---------------------------------------------------------------------------------


def norm_attrs(axis: int) -> dict[str, Any]:
    return {
        "axis": integer(axis),
        "epsilon": real(1e-5),
        "center": flag(True),
        "scale": flag(True),
    }


def norm_keywords(site: Site) -> dict[str, Any]:
    """Return the keywords that all norms have."""
    return {name: site.attrs[name] for name in ("epsilon", "center", "scale")}


def batch_norm(site: Site) -> relax.Expr:
    """Convert batch_norm in inference to a tuple (result, mean, variance), as in Relay."""
    operands = [site.tensor(i) for i in range(5)]
    axis = site.axis(site.attrs["axis"], site.ndim(operands[0]))
    return op.nn.batch_norm(*operands, axis=axis, **norm_keywords(site), training=False)


def layer_norm(site: Site) -> relax.Expr:
    operands = [site.tensor(i) for i in range(3)]
    axis = site.axis(site.attrs["axis"], site.ndim(operands[0]))
    return op.nn.layer_norm(*operands, axes=[axis], **norm_keywords(site))


def channel_norm(function: Callable[..., relax.Expr], *more: str) -> Callable[[Site], relax.Expr]:
    """Convert a norm of all axes but batch and channels, with these attributes too."""

    def convert(site: Site) -> relax.Expr:
        keywords = {name: site.attrs[name] for name in more} | norm_keywords(site)
        operands = [site.tensor(i) for i in range(3)]
        ndim = site.ndim(operands[0])
        axis = site.axis(site.attrs["axis"], ndim)
        axes = [i for i in range(1, ndim) if i != axis]
        return function(*operands, channel_axis=axis, axes=axes, **keywords)

    return convert


def group_norm(site: Site) -> relax.Expr:
    check_positive("num_groups", (site.attrs["num_groups"],))
    return channel_norm(op.nn.group_norm, "num_groups")(site)


def softmax(function: Callable[..., relax.Expr]) -> Callable[[Site], relax.Expr]:
    def convert(site: Site) -> relax.Expr:
        data = site.tensor(0)
        return function(data, site.axis(site.attrs["axis"], site.ndim(data)))

    return convert


def dropout(site: Site) -> tuple[relax.Expr, relax.Expr]:
    """Convert dropout in inference to (x, mask). The mask is unused."""
    data = site.tensor(0)
    return data, op.ones_like(data)


_AVERAGE = {"count_include_pad": flag()}
_GLOBAL = {"layout": text("NCHW"), "out_layout": text("")}


def _adaptive(rank: int) -> dict[str, Any]:
    layout = "NC" + SPATIAL[rank]
    return {"output_size": integers(), "layout": text(layout), "out_layout": text("")}


POOL_OPS: tuple[RelayOp, ...] = (
    RelayOp("nn.max_pool1d", 1, max_pool(op.nn.max_pool1d, 1), pool_attrs(1)),
    RelayOp("nn.max_pool2d", 1, max_pool(op.nn.max_pool2d, 2), pool_attrs(2)),
    RelayOp("nn.max_pool3d", 1, max_pool(op.nn.max_pool3d, 3), pool_attrs(3)),
    RelayOp("nn.avg_pool1d", 1, avg_pool(op.nn.avg_pool1d, 1), pool_attrs(1, **_AVERAGE)),
    RelayOp("nn.avg_pool2d", 1, avg_pool(op.nn.avg_pool2d, 2), pool_attrs(2, **_AVERAGE)),
    RelayOp("nn.avg_pool3d", 1, avg_pool(op.nn.avg_pool3d, 3), pool_attrs(3, **_AVERAGE)),
    RelayOp("nn.adaptive_avg_pool1d", 1, adaptive_pool(op.nn.adaptive_avg_pool1d, 1), _adaptive(1)),
    RelayOp("nn.adaptive_avg_pool2d", 1, adaptive_pool(op.nn.adaptive_avg_pool2d, 2), _adaptive(2)),
    RelayOp("nn.adaptive_avg_pool3d", 1, adaptive_pool(op.nn.adaptive_avg_pool3d, 3), _adaptive(3)),
    RelayOp("nn.adaptive_max_pool2d", 1, adaptive_max_pool, _adaptive(2)),
    RelayOp("nn.global_avg_pool2d", 1, global_avg_pool, _GLOBAL),
    RelayOp("nn.global_max_pool2d", 1, global_max_pool, _GLOBAL),
    RelayOp("nn.batch_norm", 5, batch_norm, norm_attrs(1)),
    RelayOp("nn.layer_norm", 3, layer_norm, norm_attrs(-1)),
    RelayOp("nn.group_norm", 3, group_norm, {"num_groups": integer(0), **norm_attrs(1)}),
    RelayOp("nn.instance_norm", 3, channel_norm(op.nn.instance_norm), norm_attrs(1)),
    RelayOp("nn.softmax", 1, softmax(op.nn.softmax), {"axis": integer(-1)}),
    RelayOp("nn.fast_softmax", 1, softmax(op.nn.softmax), {"axis": integer(-1)}),
    RelayOp("nn.log_softmax", 1, softmax(op.nn.log_softmax), {"axis": integer(-1)}),
    RelayOp("nn.dropout", 1, dropout, {"rate": real(0.5)}),
)
