"""Rows for conv1d, conv2d and conv2d_transpose, also grouped and depthwise, with bias, residual add
and activation.

relu(conv(x, w) + b) -> dequantize(qnn.conv(x, w) + b_int32), relu. The fold stage turns it into one
requantize.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import relax

from relayquant.base.qtypes import Role
from relayquant.ir.dialect import qnn
from relayquant.ir.ops.base import (
    DynamicContext,
    Kind,
    Operand,
    Output,
    Quantized,
    QuantOp,
    RealizeContext,
    accumulator_qparams,
    make_product,
    repeat_activation,
)
from relayquant.ir.ops.build import (
    check_activation,
    check_constant,
    check_float,
    first_skip,
    residual_patterns,
    source_constant,
    weighted_patterns,
)
from relayquant.ir.ops.dynamic import convolve_at_run_time
from relayquant.ir.rewrite import Match, Skip
from relayquant.ir.rewrite.graph import constant_value


@dataclass(frozen=True)
class ConvFamily:
    """One convolution operator: its names, and the kernel layout letter of the output channels."""

    op: str
    name: str
    #: attributes that are copied to the integer operator
    attributes: tuple[str, ...] = ("strides", "padding", "dilation", "groups")

    @property
    def modelled(self) -> tuple[str, ...]:
        """All attributes that the rows honour. out_layout and out_dtype are not among them."""
        return (*self.attributes, "data_layout", "kernel_layout")


CONV_FAMILIES = (
    ConvFamily("relax.nn.conv2d", "conv2d"),
    ConvFamily("relax.nn.conv1d", "conv1d"),
    ConvFamily(
        "relax.nn.conv2d_transpose",
        "conv2d_transpose",
        ("strides", "padding", "output_padding", "dilation", "groups"),
    ),
)


def weight_axis(match: Match) -> int | None:
    """Return the weight's axis of all output channels.

    It is None if the axis holds only the output channels of one group (transposed).
    """
    attrs = conv_call(match).attrs
    if int(attrs.groups) > 1 and match.find_call("relax.nn.conv2d_transpose") is not None:
        return None
    return attrs.kernel_layout.index("O")


def output_axis(match: Match) -> int:
    """Return the channel axis of the output."""
    attrs = conv_call(match).attrs
    return (attrs.out_layout or attrs.data_layout).index("C")


def conv_call(match: Match):
    """Return the convolution of a match, of any family."""
    for family in CONV_FAMILIES:
        call = match.find_call(family.op)
        if call is not None:
            return call
    raise KeyError(f"no convolution in the match at {match.name!r}")


def read_form(match: Match) -> tuple[ConvFamily, dict[str, Any]]:
    """Return the convolution family of a match, and the attributes of its integer operator."""
    call = conv_call(match)
    family = next(f for f in CONV_FAMILIES if f.op == call.op.name)
    attrs = {name: getattr(call.attrs, name) for name in family.modelled}
    return family, {
        k: v if isinstance(v, int | str) else [int(i) for i in v] for k, v in attrs.items()
    }


def realize_accumulator(context: RealizeContext) -> Quantized:
    """Emit the accumulator of conv(x, w) [+ b], with scale = data scale x weight scale."""
    data, weight = context.operands["data"], context.operands["weight"]
    family, attrs = read_form(context.match)
    convolve = make_product(getattr(qnn, family.name), data, weight, **attrs)
    qparams = accumulator_qparams(data.qparams, weight.qparams, output_axis(context.match))
    return Quantized(context.accumulate(convolve), qparams)


def realize_conv(context: RealizeContext) -> relax.Expr:
    """Emit dequantize(qnn.conv(x, w) + b), then the activation."""
    return repeat_activation(context, realize_accumulator(context).dequantize())


def realize_dynamic_conv(context: DynamicContext) -> relax.Expr | Skip:
    """Emit dequantize(qnn.conv(x, w) - zero point of x * sums of w) + b, then the activation.

    The scale is the scale of x times the scales of w, computed at run time. The bias is added in
    float32, because as an integer it would depend on the scale of x.
    """
    data, weight = context.data, context.weight
    array = constant_value(weight.value)
    if array is None:
        return Skip("the weight is not a constant")
    family, attrs = read_form(context.match)
    accumulator = convolve_at_run_time(
        context.emit, data.value, data.zero_point, array, weight.qparams.zero_point,
        name=family.name, is_exact=True, **attrs,
    )  # fmt: skip
    if isinstance(accumulator, Skip):
        return accumulator
    value = context.dequantize(accumulator, output_axis(context.match))
    return repeat_activation(context, value)


def realize_conv_residual(context: RealizeContext) -> relax.Expr | Skip:
    """Emit dequantize(qnn.add(qnn.conv(x, w) + b, residual)).

    The sum is rounded once, without int8 in between.
    """
    if context.output is None:
        return Skip("the sum has no parameters, since no quantized operator consumes it")
    total = add_residual(context, realize_accumulator(context))
    return repeat_activation(context, total.dequantize())


def add_residual(context: RealizeContext, accumulator: Quantized) -> Quantized:
    """Make qnn.add of an accumulator and the operand `residual`, with the output's parameters."""
    if context.output is None:
        raise ValueError(f"no output parameters for the sum at {context.match.name!r}")
    residual, out = context.operands["residual"], context.output
    result = Quantized(residual.value, out)
    total = qnn.add(
        accumulator.value,
        residual.value,
        *accumulator.parameters,
        *residual.parameters,
        *result.parameters,
        lhs_axis=-1 if accumulator.qparams.axis is None else accumulator.qparams.axis,
        out_dtype=out.dtype,
    )
    return Quantized(context.emit(total, "sum"), out)


def check_conv(match: Match) -> Skip | None:
    """Check for float32, a constant weight and a constant bias per output channel."""
    call = conv_call(match)
    names = tuple(match.parts)
    skip = first_skip(
        check_float(match, *names),
        check_activation(match, *(n for n in names if n in ("data", "residual"))),
        check_constant(match, *(n for n in names if n in ("weight", "bias"))),
    )
    if skip is not None:
        return skip
    if len(call.attrs.data_layout) != len(call.attrs.kernel_layout):
        return Skip(
            f"layout {call.attrs.data_layout} is packed", "quantize before packing the layout"
        )
    if "bias" in match.parts:
        return check_channel_bias(match, match.parts["bias"], output_axis(match))
    return None


def check_channel_bias(match: Match, bias: relax.Expr, axis: int) -> Skip | None:
    """Decline a bias that varies along another axis than the output channels."""
    constant = source_constant(match.graph, bias)
    shape = constant_value(constant).shape if constant is not None else ()
    rank = match.root.ty.ndim
    padded = (1,) * (rank - len(shape)) + tuple(shape)
    if any(size != 1 for i, size in enumerate(padded) if i != axis % rank):
        return Skip(f"the added constant of shape {tuple(shape)} is no bias per output channel")
    return None


def check_residual(match: Match) -> Skip | None:
    """Check as check_conv does, and that the residual has the shape of the sum."""
    skip = check_conv(match)
    if skip is not None:
        return skip
    if str(match.parts["residual"].ty.shape) != str(match.root.ty.shape):
        return Skip("the second operand of the add is broadcast")
    return None


def build_conv_ops(family: ConvFamily) -> tuple[QuantOp, ...]:
    """Build the rows of one family, the longest pattern first."""
    rows = []
    weighted = (Operand("data"), Operand("weight", Role.WEIGHT, weight_axis))
    for suffix, pattern in residual_patterns(family.op):
        operands = (*weighted, *_bias_operand(pattern), Operand("residual"))
        rows.append(
            QuantOp(
                family.name + suffix, family.op, pattern, operands, Kind.ANCHOR, Output.OWN,
                realize_conv_residual, check=check_residual, accumulator_axis=output_axis,
                attributes=family.modelled,
            )
        )  # fmt: skip
    for suffix, pattern in weighted_patterns(family.op):
        operands = (*weighted, *_bias_operand(pattern))
        rows.append(
            QuantOp(
                family.name + suffix, family.op, pattern, operands, Kind.ANCHOR,
                Output.WHEN_WANTED, realize_conv, check=check_conv, accumulator_axis=output_axis,
                attributes=family.modelled, realize_dynamic=realize_dynamic_conv,
            )
        )  # fmt: skip
    return tuple(rows)


def _bias_operand(pattern) -> tuple[Operand, ...]:
    return (Operand("bias", Role.BIAS),) if "bias" in pattern.parts else ()


CONV_OPS: tuple[QuantOp, ...] = tuple(row for f in CONV_FAMILIES for row in build_conv_ops(f))
