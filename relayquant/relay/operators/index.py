"""Relay reader, rows: look-ups and scattering by index."""

from __future__ import annotations

from math import prod

import numpy as np
from tvm import relax

from relayquant.errors import ModelError
from relayquant.ir.rewrite.graph import tensor_dtype
from relayquant.relay.operators.base import (
    RelayOp,
    Site,
    boxed,
    check_made_up,
    make_const,
    make_scalar,
    text,
)

op = relax.op


def convert_take(site: Site) -> relax.Expr:
    data, attrs = site.tensor(0), site.attrs
    if attrs["mode"] not in ("clip", "fast", "wrap"):
        raise ModelError(f"mode is {attrs['mode']!r}; allowed: clip, fast, wrap.", code="RQ202")
    axis = attrs["axis"]
    if attrs["batch_dims"]:
        return take_batched(site)
    if axis is None:
        count = 1
        for size in site.shape(data):
            count *= size
        return op.take(site.reshape(data, [count]), site.tensor(1), 0, mode=attrs["mode"])
    return op.take(data, site.tensor(1), site.axis(axis, site.ndim(data)), mode=attrs["mode"])


def take_batched(site: Site) -> relax.Expr:
    """Emit take along an axis after `batch_dims` axes that data and indices share:

    data (B, P, N, Q), indices (B, I)
        -> take(data as (B * P * N, Q), (b * P + p) * N + i)  of shape (B, P, I, Q)
    """
    data, indices, attrs = site.tensor(0), site.tensor(1), site.attrs
    shape, index_shape = site.shape(data), site.shape(indices)
    count = site.axis(attrs["batch_dims"], len(index_shape) + 1)
    axis = site.axis(attrs["axis"] or 0, len(shape))
    if axis < count or shape[:count] != index_shape[:count]:
        raise ModelError(
            f"batch_dims is {count}; allowed: up to the axis, {axis}, where data and indices have "
            f"the same sizes; theirs are {list(shape)} and {list(index_shape)}.",
            code="RQ202",
        )
    batch, before, size = prod(shape[:count]), prod(shape[count:axis]), shape[axis]
    check_made_up(batch * before)
    index = site.emit(op.astype(indices, "int64"))
    last = make_scalar(size if attrs["mode"] == "wrap" else size - 1, "int64")
    if attrs["mode"] == "wrap":
        index = site.emit(op.floor_mod(index, last))
    elif attrs["mode"] == "clip":
        index = site.emit(op.minimum(index, last))
        index = site.emit(op.maximum(index, make_scalar(0, "int64")))
    index = site.reshape(index, [batch, 1, prod(index_shape[count:])])
    starts = np.arange(batch * before, dtype="int64").reshape(batch, before, 1) * size
    flat = site.reshape(data, [batch * before * size, *shape[axis + 1 :]])
    rows = site.emit(op.add(make_const(starts), index))
    taken = site.emit(op.take(flat, rows, 0, mode="fast"))
    return site.reshape(taken, [*shape[:axis], *index_shape[count:], *shape[axis + 1 :]])


def convert_gather(site: Site) -> relax.Expr:
    data = site.tensor(0)
    axis = site.axis(site.attrs["axis"] or 0, site.ndim(data))
    return op.gather_elements(data, site.tensor(1), axis)


def index_last(site: Site, indices: relax.Expr) -> relax.Expr:
    """Move the parts of an index from the first axis (Relay) to the last axis (Relax), in int64."""
    ndim = site.ndim(indices)
    return to_int64(site, site.permute(indices, [*range(1, ndim), 0]))


def to_int64(site: Site, indices: relax.Expr) -> relax.Expr:
    if tensor_dtype(indices) == "int64":
        return indices
    return site.emit(op.astype(indices, "int64"))


def convert_gather_nd(site: Site) -> relax.Expr:
    batch = site.attrs["batch_dims"] or 0
    if batch < 0:
        raise ModelError(f"batch_dims is {batch}; allowed: from 0.", code="RQ202")
    return op.gather_nd(site.tensor(0), index_last(site, site.tensor(1)), batch)


def convert_scatter_nd(site: Site) -> relax.Expr:
    indices = index_last(site, site.tensor(1))
    return op.scatter_nd(site.tensor(0), indices, site.tensor(2), site.attrs["mode"])


def convert_scatter_elements(site: Site) -> relax.Expr:
    data = site.tensor(0)
    axis = site.axis(site.attrs["axis"] or 0, site.ndim(data))
    indices = to_int64(site, site.tensor(1))
    return op.scatter_elements(data, indices, site.tensor(2), axis, site.attrs["reduction"])


INDEX_OPS: tuple[RelayOp, ...] = (
    RelayOp(
        "take", 2, convert_take, {"batch_dims": boxed(0), "axis": boxed(), "mode": text("clip")}
    ),
    RelayOp("gather", 2, convert_gather, {"axis": boxed()}),
    RelayOp("gather_nd", 2, convert_gather_nd, {"batch_dims": boxed(0), "index_rank": boxed()}),
    RelayOp("scatter_nd", 3, convert_scatter_nd, {"mode": text("update")}),
    RelayOp(
        "scatter_elements",
        3,
        convert_scatter_elements,
        {"axis": boxed(0), "reduction": text("update")},
    ),
)
