"""Relay operators, rows: look-ups and scattering by index."""

from __future__ import annotations

from tvm import relax

from relayquant.errors import ModelError
from relayquant.relay.operators.base import RelayOp, Site, boxed, text

op = relax.op


def convert_take(site: Site) -> relax.Expr:
    data, attrs = site.tensor(0), site.attrs
    if attrs["batch_dims"]:
        raise ModelError(f"batch_dims is {attrs['batch_dims']}; allowed: 0.")
    if attrs["mode"] not in ("clip", "fast", "wrap"):
        raise ModelError(f"mode is {attrs['mode']!r}; allowed: clip, fast, wrap.")
    axis = attrs["axis"]
    if axis is None:
        count = 1
        for size in site.shape(data):
            count *= size
        return op.take(site.reshape(data, [count]), site.tensor(1), 0, mode=attrs["mode"])
    return op.take(data, site.tensor(1), site.axis(axis, site.ndim(data)), mode=attrs["mode"])


def convert_gather(site: Site) -> relax.Expr:
    data = site.tensor(0)
    axis = site.axis(site.attrs["axis"] or 0, site.ndim(data))
    return op.gather_elements(data, site.tensor(1), axis)


def index_last(site: Site, indices: relax.Expr) -> relax.Expr:
    """Relay keeps the parts of an index along the first axis, Relax along the last."""
    ndim = site.ndim(indices)
    return site.permute(indices, [*range(1, ndim), 0])


def convert_gather_nd(site: Site) -> relax.Expr:
    batch = site.attrs["batch_dims"] or 0
    if batch < 0:
        raise ModelError(f"batch_dims is {batch}; allowed: from 0.")
    return op.gather_nd(site.tensor(0), index_last(site, site.tensor(1)), batch)


def convert_scatter_nd(site: Site) -> relax.Expr:
    indices = index_last(site, site.tensor(1))
    return op.scatter_nd(site.tensor(0), indices, site.tensor(2), site.attrs["mode"])


def convert_scatter_elements(site: Site) -> relax.Expr:
    data = site.tensor(0)
    axis = site.axis(site.attrs["axis"] or 0, site.ndim(data))
    return op.scatter_elements(data, site.tensor(1), site.tensor(2), axis, site.attrs["reduction"])


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
