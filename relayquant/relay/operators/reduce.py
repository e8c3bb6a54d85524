"""Relay reader, rows: reductions, sorting, and tensors made without data."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import tvm
from tvm import relax

from relayquant.errors import ModelError
from relayquant.ir.rewrite.graph import tensor_dtype
from relayquant.relay.operators.base import (
    IGNORED,
    OPTIONAL_INTEGERS,
    RelayOp,
    Site,
    boxed,
    check_made_up,
    dtype,
    flag,
    integer,
    integers,
    is_integer,
    make_const,
    make_scalar,
    text,
)
from relayquant.relay.operators.reshape import check_shape

op = relax.op


def reduced_axes(site: Site) -> list[int]:
    """Return the reduced axes. With `exclude`, the attribute names the axes that stay."""
    ndim = site.ndim(site.tensor(0))
    given = site.attrs["axis"]
    if given is None or (len(given) == 0 and not site.attrs["exclude"]):
        return [] if site.attrs["exclude"] and given is None else list(range(ndim))
    axes = sorted({site.axis(axis, ndim) for axis in given})
    return [axis for axis in range(ndim) if axis not in axes] if site.attrs["exclude"] else axes


def reduction(function: Callable[..., relax.Expr]) -> Callable[[Site], relax.Expr]:
    return lambda site: function(
        site.tensor(0), reduced_axes(site), keepdims=site.attrs["keepdims"]
    )


def count_reduced(site: Site) -> int:
    shape = site.shape(site.tensor(0))
    count = prod(shape[axis] for axis in reduced_axes(site))
    if count == 0:
        raise ModelError(
            f"it averages over no element of a tensor of shape {list(shape)}.", code="RQ202"
        )
    return count


def convert_mean(site: Site) -> relax.Expr:
    """Convert mean. For integers, the sum is divided and truncated."""
    data = site.tensor(0)
    if not is_integer(data):
        return reduction(op.mean)(site)
    total = site.emit(reduction(op.sum)(site))
    return op.divide(total, make_scalar(count_reduced(site), tensor_dtype(data)))


def convert_variance(site: Site) -> relax.Expr:
    """Convert variance to sum((x - mean)^2) / n, or / (n - 1) if unbiased. The mean is the second
    argument.
    """
    data, mean = site.tensor(0), site.tensor(1)
    centred = site.emit(op.subtract(data, mean))
    square = site.emit(op.multiply(centred, centred))
    total = site.emit(op.sum(square, reduced_axes(site), keepdims=site.attrs["keepdims"]))
    count = count_reduced(site) - site.attrs["unbiased"]
    if count < 1:
        raise ModelError("the unbiased variance of one element is not defined.", code="RQ202")
    return op.divide(total, make_scalar(count, tensor_dtype(data)))


def logical_reduction(function: Callable[..., relax.Expr]) -> Callable[[Site], relax.Expr]:
    """Convert all to the minimum, and any to the maximum."""

    def convert(site: Site) -> relax.Expr:
        bits = site.emit(op.astype(site.tensor(0), "int8"))
        found = function(bits, reduced_axes(site), keepdims=site.attrs["keepdims"])
        return op.astype(site.emit(found), "bool")

    return convert


def arg_reduction(function: Callable[..., relax.Expr]) -> Callable[[Site], relax.Expr]:
    """Convert argmax and argmin. The result is int32 in Relay, int64 in Relax.

    Several axes count as one, with the last one running fastest. To find the last of equal values,
    the data is reversed and the first one is taken.
    """

    def convert(site: Site) -> relax.Expr:
        data, axes, is_last = site.tensor(0), reduced_axes(site), site.attrs["select_last_index"]
        kept = [axis for axis in range(site.ndim(data)) if axis not in axes]
        result = None
        if len(axes) > 1:
            shape = site.shape(data)
            is_kept = site.attrs["keepdims"]
            result = [1 if axis in axes else size for axis, size in enumerate(shape)]
            result = result if is_kept else [shape[axis] for axis in kept]
            count = prod(shape[axis] for axis in axes)
            data = site.permute(data, [*kept, *axes])
            data = site.reshape(data, [*(shape[axis] for axis in kept), count])
            axes = [len(kept)]
        if not axes:
            raise ModelError("it reduces no axis; allowed: one axis or more.", code="RQ202")
        if is_last:
            data = site.emit(op.flip(data, axes[0]))
        keepdims = site.attrs["keepdims"] and result is None
        index = site.emit(function(data, axes[0], keepdims=keepdims))
        if is_last:
            last = make_scalar(site.shape(data)[axes[0]] - 1, "int64")
            index = site.emit(op.subtract(last, index))
        index = op.astype(index, "int32")
        return index if result is None else site.reshape(site.emit(index), result)

    return convert


def convert_topk(site: Site) -> relax.Expr:
    data, attrs = site.tensor(0), site.attrs
    axis = site.axis(attrs["axis"], site.ndim(data))
    size = site.shape(data)[axis]
    count = size if attrs["k"] is None or attrs["k"] < 1 else attrs["k"]
    if count > size or attrs["ret_type"] not in ("both", "values", "indices"):
        raise ModelError(
            f"k is {count} and ret_type {attrs['ret_type']!r}; allowed: k up to {size}, the size "
            "of the axis, and 'both', 'values' or 'indices'.",
            code="RQ202",
        )
    kind = attrs["dtype"] or "int32"
    if attrs["ret_type"] == "values":
        kind = "int32"  # dtype of the unused indices
    return op.topk(data, count, axis, attrs["ret_type"], not attrs["is_ascend"], kind)


def convert_sort(site: Site) -> relax.Expr:
    data = site.tensor(0)
    axis = site.axis(site.attrs["axis"], site.ndim(data))
    return op.sort(data, axis, not site.attrs["is_ascend"])


def convert_argsort(site: Site) -> relax.Expr:
    data = site.tensor(0)
    axis = site.axis(site.attrs["axis"], site.ndim(data))
    return op.argsort(data, axis, not site.attrs["is_ascend"], site.attrs["dtype"] or "int32")


def scan(function: Callable[..., relax.Expr]) -> Callable[[Site], relax.Expr]:
    def convert(site: Site) -> relax.Expr:
        attrs = site.attrs
        return function(
            site.tensor(0), attrs["axis"], attrs["dtype"] or None, bool(attrs["exclusive"])
        )

    return convert


# -- new tensors -----------------------------------------------------------------------------------


def convert_filled(value: int) -> Callable[[Site], relax.Expr]:
    def convert(site: Site) -> relax.Expr:
        kind = site.attrs["dtype"] or "float32"
        return op.full(check_shape(site.attrs["shape"]), make_scalar(value, kind), kind)

    return convert


def convert_filled_like(value: int) -> Callable[[Site], relax.Expr]:
    def convert(site: Site) -> relax.Expr:
        data = site.tensor(0)
        return op.full_like(data, make_scalar(value, tensor_dtype(data)), tensor_dtype(data))

    return convert


def convert_full(site: Site) -> relax.Expr:
    value = site.tensor(0)
    kind = site.attrs["dtype"] or tensor_dtype(value)
    return op.full(check_shape(site.attrs["shape"]), value, kind)


def convert_full_like(site: Site) -> relax.Expr:
    data = site.tensor(0)
    return op.full_like(data, site.tensor(1), tensor_dtype(data))


def convert_arange(site: Site) -> relax.Expr:
    """Convert arange to a constant. All three arguments must be constant."""
    start, stop, step = (site.constant(i) for i in range(3))
    kind = site.attrs["dtype"] or str(start.dtype)
    if any(each.size != 1 for each in (start, stop, step)) or not step.item():
        raise ModelError("start, stop and step must be numbers, and step not 0.", code="RQ202")
    count = (float(stop.item()) - float(start.item())) / float(step.item())
    check_made_up(count)
    return make_const(np.arange(start.item(), stop.item(), step.item()).astype(kind))


def convert_one_hot(site: Site) -> relax.Expr:
    attrs = site.attrs
    on, off = (site.constant(i) for i in (1, 2))
    if not 1 <= attrs["depth"] <= 2**24 or on.size != 1 or off.size != 1:
        raise ModelError(
            f"depth is {attrs['depth']}, on_value has shape {on.shape} and off_value {off.shape}; "
            f"allowed: a depth of 1 to {2**24}, and one number for each value.",
            code="RQ202",
        )
    kind = attrs["dtype"] or str(on.dtype)
    axis = attrs["axis"]
    return op.one_hot(
        site.tensor(0),
        tvm.tirx.const(on.item(), kind),
        tvm.tirx.const(off.item(), kind),
        attrs["depth"],
        axis,
    )


_REDUCE = {"axis": OPTIONAL_INTEGERS, "keepdims": flag(), "exclude": flag()}
_ARG = {**_REDUCE, "select_last_index": flag()}
_SORT = {"axis": integer(-1), "is_ascend": flag(True), "dtype": dtype()}
_SCAN = {"axis": boxed(), "dtype": dtype(), "exclusive": boxed(0)}
_INIT = {"shape": integers(required=True), "dtype": dtype()}

REDUCE_OPS: tuple[RelayOp, ...] = (
    RelayOp("sum", 1, reduction(op.sum), _REDUCE),
    RelayOp("max", 1, reduction(op.max), _REDUCE),
    RelayOp("min", 1, reduction(op.min), _REDUCE),
    RelayOp("prod", 1, reduction(op.prod), _REDUCE),
    RelayOp("mean", 1, convert_mean, _REDUCE),
    RelayOp("variance", 2, convert_variance, {**_REDUCE, "unbiased": flag()}),
    RelayOp("all", 1, logical_reduction(op.min), _REDUCE),
    RelayOp("any", 1, logical_reduction(op.max), _REDUCE),
    RelayOp("argmax", 1, arg_reduction(op.argmax), _ARG),
    RelayOp("argmin", 1, arg_reduction(op.argmin), _ARG),
    RelayOp(
        "topk",
        1,
        convert_topk,
        {
            "k": boxed(),
            "axis": integer(-1),
            "ret_type": text("both"),
            "is_ascend": flag(),
            "dtype": dtype(),
        },
    ),
    RelayOp("sort", 1, convert_sort, _SORT),
    RelayOp("argsort", 1, convert_argsort, _SORT),
    RelayOp("cumsum", 1, scan(op.cumsum), _SCAN),
    RelayOp("cumprod", 1, scan(op.cumprod), _SCAN),
    RelayOp("zeros", 0, convert_filled(0), _INIT),
    RelayOp("ones", 0, convert_filled(1), _INIT),
    RelayOp("zeros_like", 1, convert_filled_like(0)),
    RelayOp("ones_like", 1, convert_filled_like(1)),
    RelayOp("full", 1, convert_full, _INIT),
    RelayOp("full_like", 2, convert_full_like),
    RelayOp(
        "arange",
        3,
        convert_arange,
        {"start": IGNORED, "stop": IGNORED, "step": IGNORED, "dtype": dtype()},
    ),
    RelayOp(
        "one_hot",
        3,
        convert_one_hot,
        {"depth": integer(1), "axis": integer(-1), "dtype": dtype()},
    ),
)
