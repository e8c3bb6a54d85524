"""Relay reader: pad and mirror_pad."""

from __future__ import annotations

import numpy as np
from tvm import relax

from relayquant.errors import ModelError, format_count
from relayquant.relay.operators.base import Site, check_made_up, make_const

op = relax.op
PAD_MODES = ("constant", "reflect", "edge")


def convert_pad(site: Site) -> relax.Expr:
    data, widths = site.tensor(0), site.attrs["pad_width"]
    ndim = site.ndim(data)
    if len(widths) != ndim or any(len(pair) != 2 or min(pair) < 0 for pair in widths):
        raise ModelError(
            f"pad_width is {widths}; allowed: a pair from 0 for each of "
            f"{format_count(ndim, 'axis')}.",
            code="RQ202",
        )
    mode = site.attrs["pad_mode"]
    if mode not in PAD_MODES:
        raise ModelError(f"pad_mode is {mode!r}; allowed: {', '.join(PAD_MODES)}.", code="RQ202")
    value = site.attrs["pad_value"]  # attribute of TVM 0.7, later an argument
    if mode == "constant" and len(site.args) > 1:
        array = site.constant(1)
        if array.size != 1:
            raise ModelError(f"the pad value has shape {array.shape}; allowed: ().", code="RQ202")
        value = float(array.item())
    flat = [width for pair in widths for width in pair]
    if mode == "edge":
        return pad_edge(site, data, widths)
    return op.nn.pad(data, flat, mode, value)


def pad_edge(site: Site, data: relax.Expr, widths: tuple[tuple[int, int], ...]) -> relax.Expr:
    """Repeat the first and last entry of each axis: take(x, [0, 0, 0, 1, ..., n - 1, n - 1])."""
    for axis, (before, after) in enumerate(widths):
        if before or after:
            size = site.shape(data)[axis]
            check_made_up(size + before + after)
            index = np.clip(np.arange(-before, size + after), 0, size - 1).astype("int64")
            data = site.emit(op.take(data, make_const(index), axis, mode="fast"))
    return data


def convert_mirror_pad(site: Site) -> relax.Expr:
    """Convert mirror_pad to a take of mirrored indices on each axis. SYMMETRIC repeats the border,
    REFLECT does not.
    """
    data, mode = site.tensor(0), site.attrs["mode"].upper()
    widths = site.attrs["pad_width"]
    shape = site.shape(data)
    if mode not in ("SYMMETRIC", "REFLECT") or len(widths) != len(shape):
        raise ModelError(
            f"mode is {mode!r} and pad_width {widths}; allowed: SYMMETRIC or REFLECT, and a pair "
            f"of widths for each of {format_count(len(shape), 'axis')}.",
            code="RQ202",
        )
    for axis, pair in enumerate(widths):
        most = shape[axis] - (mode == "REFLECT")
        if len(pair) != 2 or not 0 <= min(pair) <= max(pair) <= most:
            raise ModelError(
                f"pad_width {pair} does not fit an axis of {format_count(shape[axis], 'entry')}.",
                code="RQ202",
            )
        if any(pair):
            check_made_up(3 * shape[axis])
            name = "reflect" if mode == "REFLECT" else "symmetric"
            index = np.pad(np.arange(shape[axis], dtype="int64"), pair, name)
            data = site.emit(op.take(data, make_const(index), axis, mode="fast"))
    return data
