"""Operators that move or select values without computing new ones: their output keeps the input's
parameters.

They have no realize callback: the allow-list (`conversion/expand.py`) pushes dequantize through
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
from relayquant.ir.ops.build import check_activation, check_float, first_skip, unary_pattern
from relayquant.ir.ops.pool import POOL_ATTRIBUTES
from relayquant.ir.rewrite import Match, Pattern, Skip
from relayquant.ir.rewrite.graph import tensor_dtype

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

#: operator -> the attributes that mean the same in affine space; read by the rows and by the
#: allow-list. A pool's out_layout is not among them, nor a resize's roi, extrapolation_value and
#: out_dtype; count_include_pad and the cubic ones are without effect on what is served.
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

#: clamp, so that the range of the output is that of the input or less
CLAMPING = {"relu": "relax.nn.relu", "clip": "relax.clip"}


def check_sharing(match: Match) -> Skip | None:
    """A computed float32 value; a constant that is moved or selected from stays what it is."""
    return first_skip(check_float(match, "data"), check_activation(match, "data"))


def check_resize(match: Match) -> Skip | None:
    """Only the nearest neighbour, which is a value of the input; others compute new ones."""
    skip = check_sharing(match)
    if skip is not None:
        return skip
    return check_nearest(match.call("relax.image.resize2d"))


def check_nearest(call: Call) -> Skip | None:
    """Declines a resize2d whose values are not all values of its input."""
    method, mode = str(call.attrs.method), str(call.attrs.coordinate_transformation_mode)
    if method != "nearest_neighbor":
        return Skip(f"resizing by {method!r} computes new values, which has no integer form")
    if mode == "tf_crop_and_resize":
        return Skip("a crop fills what lies outside of it with a real value")
    return None


def check_take(match: Match) -> Skip | None:
    """As check_sharing; and the indices."""
    return first_skip(check_sharing(match), check_indices(match.call("relax.take")))


def check_indices(call: Call) -> Skip | None:
    """Declines a take that gives NaN for indices out of bounds."""
    if str(call.attrs.mode) == "nan":
        return Skip("take gives NaN for indices out of bounds, which no integer stands for")
    return None


def check_max_pool(match: Match) -> Skip | None:
    """As check_sharing; and the windows."""
    root = match.graph.call_of(match.root)
    return first_skip(check_sharing(match), None if root is None else check_windows(root))


def check_windows(call: Call) -> Skip | None:
    """Declines a maximum pool of which a window may lie in the padding as a whole: of nothing but
    padding the maximum is -inf.
    """
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
    """A literal tuple of float32 tensors."""
    if not isinstance(match.parts["data"], relax.Tuple):
        return Skip("the operands are not a literal tuple")
    for expr in match.parts["data"].fields:
        if tensor_dtype(expr) != "float32":
            return Skip(f"an operand is {tensor_dtype(expr)}, only float32 is quantized")
    return None


def realize_concat(context: RealizeContext) -> relax.Expr | Skip:
    """dequantize(qnn.concatenate(...)): operands are requantized where their parameters differ."""
    if context.output is None:
        return Skip("the result has no parameters, since no quantized operator consumes it")
    call = context.match.call("relax.concat")
    parts = [context.operands[f"data.{i}"] for i in range(len(call.args[0].fields))]

    def compute(operands: Sequence[Quantized], result: Quantized) -> relax.Expr:
        return qnn.concatenate(
            relax.Tuple([part.value for part in operands]),
            relax.Tuple([part.scale for part in operands]),
            relax.Tuple([part.zero_point for part in operands]),
            result.scale,
            result.zero_point,
            axis=int(call.attrs.axis),
        )

    return compute_in_one_dtype(context, parts, compute)


def _concat_pattern() -> Pattern:
    data = wildcard()
    return Pattern(is_op("relax.concat")(data), {"data": data})


#: of rows that take more than a moved value as it is
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
