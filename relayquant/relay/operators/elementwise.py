"""Relay reader, rows: elementwise arithmetic, comparisons, activations, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter

import numpy as np
from tvm import relax

from relayquant.base.axes import shape_along
from relayquant.errors import ModelError, format_count
from relayquant.ir.reference.unary import RELAX_UNARY
from relayquant.ir.rewrite.graph import tensor_dtype
from relayquant.relay.operators.base import (
    IGNORED,
    RelayOp,
    Site,
    dtype,
    flag,
    integer,
    integers,
    is_integer,
    make_const,
    make_scalar,
    real,
    text,
)

op = relax.op


#: Each neighbour becomes an operator. Real models have 5 neighbours.
MAX_LRN_SIZE = 64


def unary(function: Callable[[relax.Expr], relax.Expr]) -> Callable[[Site], relax.Expr]:
    """Convert an operator with the same meaning in Relax."""
    return lambda site: function(site.tensor(0))


def binary(function: Callable[..., relax.Expr]) -> Callable[[Site], relax.Expr]:
    """Convert a binary operator with the same meaning in Relax. Both broadcast."""
    return lambda site: function(site.tensor(0), site.tensor(1))


def scalar_like(site: Site, value: float) -> relax.Expr:
    """Make a constant with the dtype of the first operand."""
    return make_scalar(value, tensor_dtype(site.tensor(0)))


def convert_round(site: Site) -> relax.Expr:
    """Convert round, half away from zero: trunc(x + sign(x) * 0.5). Relax rounds half to even.

    0.49999997 + 0.5 is 1 in float32, so the sum is not used below one half:
    t = trunc(x); where(|x - t| >= 0.5, t + sign(x), t).
    """
    x = site.tensor(0)
    if is_integer(x):
        return x
    whole = site.emit(op.trunc(x))
    rest = site.emit(op.abs(site.emit(op.subtract(x, whole))))
    is_half = site.emit(op.greater_equal(rest, scalar_like(site, 0.5)))
    away = site.emit(op.add(whole, site.emit(op.sign(x))))
    return op.where(is_half, away, whole)


def convert_log(base: float) -> Callable[[Site], relax.Expr]:
    def convert(site: Site) -> relax.Expr:
        return op.multiply(site.emit(op.log(site.tensor(0))), scalar_like(site, 1 / math.log(base)))

    return convert


def convert_clip(site: Site) -> relax.Expr:
    """Convert clip. Bounds of integers are truncated, and limited to the dtype."""
    x, low, high = site.tensor(0), site.attrs["a_min"], site.attrs["a_max"]
    if not is_integer(x):
        return op.clip(x, float(low), float(high))
    info = np.iinfo(tensor_dtype(x))
    if not low <= high:
        raise ModelError(
            f"a_min is {low} and a_max {high}; allowed: a_min up to a_max.", code="RQ202"
        )
    low, high = (math.trunc(min(max(bound, info.min), info.max)) for bound in (low, high))
    return op.clip(x, low, high)


def convert_leaky_relu(site: Site) -> relax.Expr:
    """Convert leaky_relu to where(x > 0, x, x * alpha). For integers, Relay truncates alpha,
    usually to 0.
    """
    x, alpha = site.tensor(0), site.attrs["alpha"]
    if not is_integer(x):
        return op.nn.leakyrelu(x, alpha)
    if not math.trunc(alpha):
        return op.maximum(x, scalar_like(site, 0))
    low = site.emit(op.multiply(x, scalar_like(site, math.trunc(alpha))))
    return op.where(site.emit(op.greater(x, scalar_like(site, 0))), x, low)


def convert_negative(site: Site) -> relax.Expr:
    """Convert negative of integers to 0 - x. TVM cannot compile the negative of an unsigned
    integer.
    """
    x = site.tensor(0)
    return op.subtract(scalar_like(site, 0), x) if is_integer(x) else op.negative(x)


def convert_prelu(site: Site) -> relax.Expr:
    x = site.tensor(0)
    return op.nn.prelu(x, site.tensor(1), site.axis(site.attrs["axis"], site.ndim(x)))


def convert_cast(site: Site) -> relax.Expr:
    x, wanted = site.tensor(0), site.attrs["dtype"]
    return x if tensor_dtype(x) == wanted else op.astype(x, wanted)


def convert_cast_like(site: Site) -> relax.Expr:
    return op.astype(site.tensor(0), tensor_dtype(site.tensor(1)))


def convert_identity(site: Site) -> relax.Expr:
    return site.tensor(0)


def convert_bias_add(site: Site) -> relax.Expr:
    """Convert bias_add to add(x, reshape(bias, [1, C, 1, 1])), the form of a bias in all
    readers.
    """
    x, bias = site.tensor(0), site.tensor(1)
    ndim = site.ndim(x)
    axis = site.axis(site.attrs["axis"], ndim)
    (channels,) = site.shape(bias)
    if site.dims(x)[axis] != channels:
        raise ModelError(
            f"the bias has {format_count(channels, 'value')}; allowed: {site.dims(x)[axis]}, the "
            f"size of axis {axis}.",
            code="RQ202",
        )
    return op.add(
        x, bias if axis == ndim - 1 else site.reshape(bias, shape_along(axis, ndim, channels))
    )


def convert_where(site: Site) -> relax.Expr:
    """Convert where. A numeric condition is true where it is not 0."""
    condition, x, y = (site.tensor(i) for i in range(3))
    if tensor_dtype(condition) != "bool":
        zero = make_scalar(0, tensor_dtype(condition))
        condition = site.emit(op.not_equal(condition, zero))
    return op.where(condition, x, y)


def convert_hyperbolic(combine: Callable[..., relax.Expr]) -> Callable[[Site], relax.Expr]:
    """Convert cosh to (e^x + e^-x) / 2 and sinh to (e^x - e^-x) / 2, as Relay's compiler does.
    Relax's compiler lacks both functions.
    """

    def convert(site: Site) -> relax.Expr:
        x = site.tensor(0)
        rising, falling = site.emit(op.exp(x)), site.emit(op.exp(site.emit(op.negative(x))))
        return op.multiply(site.emit(combine(rising, falling)), scalar_like(site, 0.5))

    return convert


def convert_hardswish(site: Site) -> relax.Expr:
    """Convert hardswish to x * clip(x + 3, 0, 6) / 6."""
    x = site.tensor(0)
    gate = site.emit(op.clip(site.emit(op.add(x, scalar_like(site, 3.0))), 0.0, 6.0))
    return op.divide(site.emit(op.multiply(x, gate)), scalar_like(site, 6.0))


def convert_fixed_point_multiply(site: Site) -> relax.Expr:
    """Convert fixed_point_multiply to x * multiplier / 2^31 * 2^shift in 64 bits, rounded half up.

    With shift > 0: (x << shift) * multiplier + 2^30 >> 31. Otherwise: x * multiplier + 2^(30 -
    shift) >> (31 - shift). The result is int32 for every operand dtype: `relay.quantize` with
    weight_scale="max" multiplies int64.
    """
    x, multiplier, shift = site.tensor(0), site.attrs["multiplier"], site.attrs["shift"]
    kind = tensor_dtype(x)
    is_signed = kind in ("int8", "int16", "int32", "int64")
    if not is_signed or not -31 <= shift <= 31 or not 0 <= multiplier < 2**31:
        raise ModelError(
            f"it multiplies {kind} by {multiplier} and shifts by {shift}; allowed: signed "
            "integers, a multiplier from 0 to 2^31 - 1, a shift from -31 to 31.",
            code="RQ202",
        )
    wide = x if kind == "int64" else site.emit(op.astype(x, "int64"))
    if shift > 0:
        wide = site.emit(op.left_shift(wide, make_scalar(shift, "int64")))
    total = 31 + max(-shift, 0)
    product = site.emit(op.multiply(wide, make_scalar(multiplier, "int64")))
    moved = site.emit(op.add(product, make_const(np.array(1 << (total - 1), "int64"))))
    shifted = site.emit(op.right_shift(moved, make_scalar(total, "int64")))
    narrow = op.astype(shifted, "int32")
    return narrow if kind == "int32" else op.astype(site.emit(narrow), kind)


def convert_l2_normalize(site: Site) -> relax.Expr:
    """Convert l2_normalize to x / sqrt(max(sum(x * x), eps))."""
    x = site.tensor(0)
    square = site.emit(op.multiply(x, x))
    total = site.emit(op.sum(square, list(site.attrs["axis"] or ()), keepdims=True))
    bound = site.emit(op.maximum(total, scalar_like(site, site.attrs["eps"])))
    return op.divide(x, site.emit(op.sqrt(bound)))


def convert_lrn(site: Site) -> relax.Expr:
    """Convert lrn to x / (bias + alpha / size * sum of squares of `size` neighbours along axis) ^
    beta.
    """
    x, size = site.tensor(0), site.attrs["size"]
    if not 1 <= size <= MAX_LRN_SIZE:
        raise ModelError(f"attribute size is {size}; allowed: 1 to {MAX_LRN_SIZE}.", code="RQ202")
    shape = site.shape(x)
    axis = site.axis(site.attrs["axis"], len(shape))
    square = site.emit(op.multiply(x, x))
    widths = [0] * (2 * len(shape))
    widths[2 * axis], widths[2 * axis + 1] = size // 2, (size - 1) // 2
    padded = site.emit(op.nn.pad(square, widths))
    parts = [
        site.emit(op.strided_slice(padded, [axis], [start], [start + shape[axis]]))
        for start in range(size)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = site.emit(op.add(total, part))
    scaled = site.emit(op.multiply(total, scalar_like(site, site.attrs["alpha"] / size)))
    base = site.emit(op.add(scaled, scalar_like(site, site.attrs["bias"])))
    return op.divide(x, site.emit(op.power(base, scalar_like(site, site.attrs["beta"]))))


_SAME_UNARY: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    **{row.relay: attrgetter(row.relax)(op) for row in RELAX_UNARY.values() if row.relay},
    "fast_erf": op.erf,
    "fast_exp": op.exp,
    "fast_tanh": op.tanh,
}

_SAME_BINARY: dict[str, Callable[..., relax.Expr]] = {
    **{
        name: getattr(op, name)
        for name in [
            "add",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "divide",
            "equal",
            "floor_divide",
            "floor_mod",
            "greater",
            "greater_equal",
            "left_shift",
            "less",
            "less_equal",
            "logical_and",
            "logical_or",
            "logical_xor",
            "maximum",
            "minimum",
            "mod",
            "multiply",
            "not_equal",
            "power",
            "right_shift",
            "subtract",
        ]
    },
}

#: Operators that only say where or how something runs. Their attributes do not matter.
_IDENTITIES = (
    "copy",
    "annotation.stop_fusion",
    "annotation.cast_hint",
    "annotation.checkpoint",
    "annotation.bitpack_start",
    "annotation.bitpack_end",
)

_ENDS = ("begin", "end")
COMPILER = {"compiler": text("")}
DEVICE_COPY = {"src_virtual_device": IGNORED, "dst_virtual_device": IGNORED}
ON_DEVICE = {"virtual_device": IGNORED, "constrain_result": flag(), "constrain_body": flag(True)}

ELEMENTWISE_OPS: tuple[RelayOp, ...] = (
    *(RelayOp(name, 1, unary(function)) for name, function in _SAME_UNARY.items()),
    *(RelayOp(name, 2, binary(function)) for name, function in _SAME_BINARY.items()),
    *(RelayOp(name, 1, convert_identity) for name in _IDENTITIES),
    *(RelayOp(f"annotation.compiler_{end}", 1, convert_identity, COMPILER) for end in _ENDS),
    RelayOp("device_copy", 1, convert_identity, DEVICE_COPY),
    RelayOp("on_device", 1, convert_identity, ON_DEVICE),
    RelayOp("round", 1, convert_round),
    RelayOp("log2", 1, convert_log(2.0)),
    RelayOp("log10", 1, convert_log(10.0)),
    RelayOp("clip", 1, convert_clip, {"a_min": real(), "a_max": real()}),
    RelayOp("nn.leaky_relu", 1, convert_leaky_relu, {"alpha": real(0.25)}),
    RelayOp("nn.prelu", 2, convert_prelu, {"axis": integer(1)}),
    RelayOp("nn.bias_add", 2, convert_bias_add, {"axis": integer(1)}),
    RelayOp("cast", 1, convert_cast, {"dtype": dtype(required=True)}),
    RelayOp("cast_like", 2, convert_cast_like),
    RelayOp("where", 3, convert_where),
    RelayOp("negative", 1, convert_negative),
    RelayOp("cosh", 1, convert_hyperbolic(op.add)),
    RelayOp("sinh", 1, convert_hyperbolic(op.subtract)),
    RelayOp("hardswish", 1, convert_hardswish),
    RelayOp(
        "fixed_point_multiply",
        1,
        convert_fixed_point_multiply,
        {"multiplier": integer(), "shift": integer()},
    ),
    RelayOp("nn.l2_normalize", 1, convert_l2_normalize, {"eps": real(), "axis": integers()}),
    RelayOp(
        "nn.lrn",
        1,
        convert_lrn,
        {
            "size": integer(5),
            "axis": integer(1),
            "bias": real(2.0),
            "alpha": real(0.0001),
            "beta": real(0.75),
        },
    ),
)
