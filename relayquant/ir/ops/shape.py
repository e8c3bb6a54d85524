"""Rows for data movement: the output keeps the parameters of the input.

These rows have no realize callback. The allow-list (`conversion/expand.py`) moves dequantize behind
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Call
from tvm.relax.dpl import is_op, wildcard

from relayquant.ir.dialect import qnn
from relayquant.ir.ops.base import (
    Kind,
    Operand,
    Output,
    Quantized,
    QuantOp,
    RealizeContext,
    compute_in_one_dtype,
)
from relayquant.ir.ops.build import (
    check_activation,
    check_float,
    decline_dtype,
    first_skip,
    unary_pattern,
)
from relayquant.ir.ops.pool import POOL_ATTRIBUTES
from relayquant.ir.rewrite import Match, Pattern, Skip
from relayquant.ir.rewrite.graph import tensor_dtype
from relayquant.ir.rewrite.moves import MOVES

#: exact in affine space with unchanged parameters
SHARING = {
    "max_pool2d": "relax.nn.max_pool2d",
    "max_pool1d": "relax.nn.max_pool1d",
    "reshape": "relax.reshape",
    "permute_dims": "relax.permute_dims",
    "squeeze": "relax.squeeze",
    "expand_dims": "relax.expand_dims",
    "strided_slice": "relax.strided_slice",
    "broadcast_to": "relax.broadcast_to",
    "take": "relax.take",
    "gather_elements": "relax.gather_elements",
    "gather_nd": "relax.gather_nd",
    "tile": "relax.tile",
    "max": "relax.max",
    "min": "relax.min",
}

#: give the elements of what they read, each at most once
SELECTIONS = (*MOVES, "relax.strided_slice", "relax.concat")

#: operator -> attributes with the same meaning in affine space, for the rows and the allow-list.
#: out_layout of a pool is not listed, nor roi, extrapolation_value and out_dtype of a resize.
#: count_include_pad and the cubic attributes have no effect on the supported cases.
ATTRIBUTES = {
    "relax.nn.max_pool2d": POOL_ATTRIBUTES,
    "relax.nn.max_pool1d": POOL_ATTRIBUTES,
    "relax.permute_dims": ("axes",),
    "relax.squeeze": ("axis",),
    "relax.expand_dims": ("axis",),
    "relax.strided_slice": ("assume_inbound",),
    "relax.take": ("axis", "mode"),
    "relax.gather_elements": ("axis",),
    "relax.gather_nd": ("batch_dims",),
    "relax.tile": ("repeats",),
    "relax.max": ("axis", "keepdims"),
    "relax.min": ("axis", "keepdims"),
    "relax.nn.pad": ("pad_width", "pad_mode", "pad_value"),
    "relax.image.resize2d": (
        "layout", "method", "coordinate_transformation_mode", "rounding_method", "cubic_alpha",
        "cubic_exclude",
    ),
}  # fmt: skip

#: clamp, so that the range of the output is within the range of the input
CLAMPING = {"relu": "relax.nn.relu", "clip": "relax.clip"}


def check_sharing(match: Match) -> Skip | None:
    """Check for a computed float32 value. Data movement of constants is left alone."""
    return first_skip(check_float(match, "data"), check_activation(match, "data"))


def check_resize(match: Match) -> Skip | None:
    """Check for nearest neighbour, the only resize method that computes no new values."""
    skip = check_sharing(match)
    if skip is not None:
        return skip
    return check_nearest(match.call("relax.image.resize2d"))


def check_nearest(call: Call) -> Skip | None:
    """Decline a resize2d that computes values that are not in the input."""
    method, mode = str(call.attrs.method), str(call.attrs.coordinate_transformation_mode)
    if method != "nearest_neighbor":
        return Skip(f"resizing by {method!r} computes new values, which has no integer form")
    if mode == "tf_crop_and_resize":
        return Skip("a crop fills what lies outside of it with a real value")
    return None


def check_take(match: Match) -> Skip | None:
    """Check as check_sharing does, and the indices."""
    return first_skip(check_sharing(match), check_indices(match.call("relax.take")))


def check_indices(call: Call) -> Skip | None:
    """Decline a take that returns NaN for indices out of bounds."""
    if str(call.attrs.mode) == "nan":
        return Skip("take gives NaN for indices out of bounds, which no integer stands for")
    return None


def check_max_pool(match: Match) -> Skip | None:
    """Check as check_sharing does, and the windows."""
    root = match.graph.call_of(match.root)
    return first_skip(check_sharing(match), None if root is None else check_windows(root))


def check_windows(call: Call) -> Skip | None:
    """Decline a maximum pool if a window may hold only padding, where the maximum is -inf."""
    attrs = call.attrs
    padding = [int(pad) for pad in attrs.padding]
    rank = len(attrs.pool_size)
    for at in range(rank):
        window = (int(attrs.pool_size[at]) - 1) * int(attrs.dilation[at]) + 1
        beyond = int(attrs.strides[at]) - 1 if attrs.ceil_mode else 0
        if max(padding[at], padding[at + rank] + beyond) >= window:
            return Skip("a window may hold padding alone, whose maximum, -inf, no integer is")
    return None


def check_concat(match: Match) -> Skip | None:
    """Check for a literal tuple of float32 tensors."""
    if not isinstance(match.parts["data"], relax.Tuple):
        return Skip("the operands are not a literal tuple")
    for expr in match.parts["data"].fields:
        skip = decline_dtype("an operand", tensor_dtype(expr))
        if skip is not None:
            return skip
    return None


def realize_concat(context: RealizeContext) -> relax.Expr | Skip:
    """Emit dequantize(qnn.concatenate(...)). Operands with other parameters are requantized."""
    call = context.match.call("relax.concat")
    parts = [context.operands[f"data.{i}"] for i in range(len(call.args[0].fields))]

    def compute(operands: Sequence[Quantized], result: Quantized) -> relax.Expr:
        return qnn.concatenate(
            relax.Tuple([part.value for part in operands]),
            relax.Tuple([part.scale for part in operands]),
            relax.Tuple([part.zero_point for part in operands]),
            *result.parameters,
            axis=int(call.attrs.axis),
        )

    return compute_in_one_dtype(context, parts, compute)


def _concat_pattern() -> Pattern:
    data = wildcard()
    return Pattern(is_op("relax.concat")(data), {"data": data})


#: for rows with further conditions than check_sharing
CHECKS = {
    "relax.take": check_take,
    "relax.nn.max_pool1d": check_max_pool,
    "relax.nn.max_pool2d": check_max_pool,
}

SHAPE_OPS: tuple[QuantOp, ...] = (
    *(
        QuantOp(
            name, op, unary_pattern(op), (Operand("data"),), Kind.SHARING, Output.SHARED, None,
            check=CHECKS.get(op, check_sharing), attributes=ATTRIBUTES.get(op, ()),
        )
        for name, op in {**SHARING, **CLAMPING}.items()
    ),
    QuantOp(
        "pad", "relax.nn.pad", unary_pattern("relax.nn.pad"), (Operand("data"),), Kind.SHARING,
        Output.SHARED, None, check=check_sharing, attributes=ATTRIBUTES["relax.nn.pad"],
    ),
    QuantOp(
        "resize_nearest", "relax.image.resize2d", unary_pattern("relax.image.resize2d"),
        (Operand("data"),), Kind.SHARING, Output.SHARED, None, check=check_resize,
        attributes=ATTRIBUTES["relax.image.resize2d"],
    ),
    QuantOp(
        "concat", "relax.concat", _concat_pattern(), (Operand("data"),), Kind.FOLLOWER, Output.OWN,
        realize_concat, check=check_concat, attributes=("axis",),
    ),
)  # fmt: skip
