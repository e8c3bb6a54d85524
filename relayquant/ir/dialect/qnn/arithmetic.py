"""Dialect: add, subtract, mul of two affine tensors, broadcast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder

from relayquant.base.qtypes import Arithmetic, Rounding, has_exact_sums
from relayquant.ir.dialect import fixed_point
from relayquant.ir.dialect.accumulator_range import choose_product_dtype
from relayquant.ir.dialect.construct import (
    Operand,
    Parameter,
    arithmetic_value,
    describe_constructor,
    make_call,
    rounding_value,
)
from relayquant.ir.dialect.layout import (
    current_letters,
    decide,
    decide_untouched,
    initial_letters,
    is_plain,
    keep_untouched,
    make_output,
    move_axis,
)
from relayquant.ir.dialect.loops import channel_of, divide, make_loops, name_hint, read_modes
from relayquant.ir.dialect.operands import (
    QUANTIZED,
    SUMS,
    Argument,
    CheckedOperand,
    affine_arguments,
    broadcast_dims,
    check_attribute,
    check_channel_pair,
    check_modes,
    check_scale,
    check_zero_point,
    get_operands,
)
from relayquant.ir.dialect.operator import LegalizeFunc, Operator, define_attrs, replace_attrs
from relayquant.ir.dialect.parameters import PrimExpr, Reader, compute_tensor
from relayquant.ir.rewrite.graph import static_size

__all__ = ["add", "mul", "subtract"]

BINARY_OPERANDS = (
    Argument("lhs"),
    Argument("rhs"),
    *affine_arguments("lhs"),
    *affine_arguments("rhs"),
    *affine_arguments("output"),
)


@define_attrs("relayquant.attrs.QBinaryAttrs")
class QBinaryAttrs(Attrs):
    """Attributes of qnn.add, qnn.subtract and qnn.mul; out_dtype "" is the dtype of lhs."""

    lhs_axis: int
    rhs_axis: int
    out_dtype: str
    rounding: str
    compute_dtype: str


# ---------------------------------------------------------------- constructors


def _define_binary(name: str, meaning: str):  # returns the type of `construct`
    """Define the constructor of an operator on two affine tensors."""

    def construct(
        lhs: Operand,
        rhs: Operand,
        lhs_scale: Parameter,
        lhs_zero_point: Parameter,
        rhs_scale: Parameter,
        rhs_zero_point: Parameter,
        output_scale: Parameter,
        output_zero_point: Parameter,
        lhs_axis: int = -1,
        rhs_axis: int = -1,
        out_dtype: str = "",
        *,
        rounding: Rounding | str = Rounding.TONEAREST_EVEN,
        compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
    ) -> Call:
        parameters = (lhs_scale, lhs_zero_point, rhs_scale, rhs_zero_point)
        return make_call(
            name,
            BINARY_OPERANDS,
            (lhs, rhs, *parameters, output_scale, output_zero_point),
            QBinaryAttrs(
                int(lhs_axis),
                int(rhs_axis),
                out_dtype,
                rounding_value(rounding, name),
                arithmetic_value(compute_dtype, name),
            ),
        )

    return describe_constructor(construct, name, meaning)


add = _define_binary(
    "add",
    """Add two broadcast tensors. out_dtype "" is the dtype of lhs.

    Operands: int8, uint8, int16, uint16, int32 or int64. Operand parameters: () or (C,) along
    lhs_axis and rhs_axis. Output parameters: (). The default rounds the sum once: t = fma(float32(r
    - z_r), m_r, float32(l - z_l) * m_l), then as for requantize. All other modes requantize each
    side to int32 first, as Relay does.
    """,
)

subtract = _define_binary("subtract", """Subtract rhs from lhs, as `add` with -m_r.""")

mul = _define_binary(
    "mul",
    """Multiply (l - z_l) by (r - z_r) and requantize with m = s_l * s_r / s_o (in float64).

    Operands are the same as in `add`. The product is int32 if the dtypes and zero points prove that
    it fits, else int64. With UPWARD, TONEAREST and INT64 it is int32 and wraps.
    """,
)


# ---------------------------------------------------------------- types


def broadcast_shapes(
    operator: str, left: CheckedOperand, right: CheckedOperand
) -> list[Any] | None:
    """Return the shape of two tensors after numpy broadcasting, or None if a shape is unknown."""
    if left.shape is None or right.shape is None:
        return None
    return broadcast_dims(operator, (left, left.shape), (right, right.shape))


def infer_binary(call: Call, _builder: Any) -> Any:
    """Infer integer lhs and rhs, broadcast -> out_dtype."""
    operands = get_operands(call, BINARY_OPERANDS)
    lhs, rhs, lhs_scale, lhs_zero, rhs_scale, rhs_zero, out_scale, out_zero = operands
    operator, attrs = lhs.operator, call.attrs
    for operand in (lhs, rhs):
        operand.check_dtype(SUMS, "Quantize a float operand first.")
    check_attribute(operator, "out_dtype", attrs.out_dtype, ("", *QUANTIZED))
    check_modes(operator, attrs)
    check_channel_pair(lhs, lhs_scale, lhs_zero, attrs.lhs_axis, lhs.dtype, "lhs_axis")
    check_channel_pair(rhs, rhs_scale, rhs_zero, attrs.rhs_axis, rhs.dtype, "rhs_axis")
    out_dtype = attrs.out_dtype or lhs.dtype or "int8"
    check_scale(out_scale)
    check_attribute(operator, "out_dtype", out_dtype, QUANTIZED)
    check_zero_point(out_zero, out_dtype)
    shape = broadcast_shapes(operator, lhs, rhs)
    if shape is not None:
        return relax.TensorType(shape, out_dtype, lhs.ty.vdevice)
    ndim = -1 if -1 in (lhs.ndim, rhs.ndim) else max(lhs.ndim, rhs.ndim)
    return relax.TensorType(None, out_dtype, lhs.ty.vdevice, ndim)


# ---------------------------------------------------------------- loop nests


def _legalize_binary(
    builder: BlockBuilder,
    call: Call,
    reader: Reader,
    element: Callable[[PrimExpr, PrimExpr, PrimExpr, PrimExpr], PrimExpr],
) -> Any:
    """Make a loop over the broadcast shape: element(l, r, channel of l, channel of r)."""
    lhs, rhs = call.args[:2]
    attrs, shape = call.attrs, call.ty.shape

    def te_binary(left: te.Tensor, right: te.Tensor) -> te.Tensor:
        def compute(*index: PrimExpr) -> PrimExpr:
            left_index = _broadcast_index(index, left.shape, shape)
            right_index = _broadcast_index(index, right.shape, shape)
            return element(
                left(*left_index),
                right(*right_index),
                channel_of(left_index, attrs.lhs_axis),
                channel_of(right_index, attrs.rhs_axis),
            )

        return compute_tensor(list(shape), compute, name=name_hint(call))

    return make_loops(builder, call, te_binary, [lhs, rhs], reader)


def _broadcast_index(
    index: Sequence[PrimExpr], shape: Sequence[Any], full_shape: Sequence[Any]
) -> list[PrimExpr]:
    """Return the index into a broadcast tensor of `shape`: 0 along dimensions of size 1."""
    first = len(index) - len(shape)
    return [
        tirx.const(0, "int64") if _is_one(size) and not _is_one(full_shape[first + i]) else v
        for i, (size, v) in enumerate(zip(shape, index[first:], strict=True))
    ]


def _is_one(size: Any) -> bool:
    return static_size(size) == 1


def _make_legalize_sum(sign: int) -> LegalizeFunc:
    def legalize_sum(builder: BlockBuilder, call: Call) -> Any:
        """Compute saturate(round(l' * m_l +- r' * m_r)) + z with one rounding, by a fused
        multiply-add.

        This is TONEAREST_EVEN with FLOAT32. The other modes follow Relay: each side is requantized
        to int32 in the affine space of the output. The result is L + R - z_out or L - R + z_out,
        clipped.
        """
        l_scale, l_zero, r_scale, r_zero, out_scale, out_zero = call.args[2:]
        reader = Reader()
        rounding, arithmetic = modes = read_modes(call)
        dtype = str(call.ty.dtype)
        fused = rounding is Rounding.TONEAREST_EVEN and arithmetic is Arithmetic.FLOAT32
        flip = sign if fused else 1
        read_left = reader.add_multiplier((l_scale, out_scale), divide, arithmetic)
        read_right = reader.add_multiplier(
            (r_scale, out_scale), lambda s, out: (s / out) * float(flip), arithmetic
        )
        read_l_zero, read_r_zero = reader.add(l_zero), reader.add(r_zero)
        read_out_zero = reader.add(out_zero)

        def element(
            left: PrimExpr, right: PrimExpr, left_channel: PrimExpr, right_channel: PrimExpr
        ) -> PrimExpr:
            left_multiplier = read_left((left_channel, 0))
            right_multiplier = read_right((right_channel, 0))
            left_zero = read_l_zero(left_channel)
            right_zero = read_r_zero(right_channel)
            out = read_out_zero(0)
            if fused:
                centred = fixed_point.subtract_zero_point_tir(left, left_zero).astype("float32")
                other = fixed_point.subtract_zero_point_tir(right, right_zero).astype("float32")
                total = fixed_point.fused_multiply_add_tir(
                    other, right_multiplier[0], centred * left_multiplier[0]
                )
                return fixed_point.saturate_tir(tirx.nearbyint(total), out, dtype)
            left = fixed_point.requantize_tir(
                left, left_zero, left_multiplier, out, "int32", *modes
            )
            right = fixed_point.requantize_tir(
                right, right_zero, right_multiplier, out, "int32", *modes
            )
            total = left + right - out if sign > 0 else left - right + out
            return fixed_point.clip_integer_tir(total, dtype)

        return _legalize_binary(builder, call, reader, element)

    return legalize_sum


legalize_add = _make_legalize_sum(1)

legalize_subtract = _make_legalize_sum(-1)


def _fused_product_ratio(left: Any, right: Any, out: Any) -> Any:
    return left * right / out


def _relay_product_ratio(left: Any, right: Any, out: Any) -> Any:
    """Divide the product of the input scales by the output scale.

    Relay rounds the product to float32 before the division.
    """
    return (left * right).astype("float32").astype("float64") / out


def legalize_mul(builder: BlockBuilder, call: Call) -> Any:
    """Multiply (l - z_l) by (r - z_r), then requantize from scale s_l * s_r.

    The product is int32. It is int64 if it may overflow int32 and the mode does not reproduce TVM
    0.19.
    """
    l_scale, l_zero, r_scale, r_zero, out_scale, out_zero = call.args[2:]
    reader = Reader()
    rounding, arithmetic = modes = read_modes(call)
    dtype = str(call.ty.dtype)
    is_default = rounding is Rounding.TONEAREST_EVEN
    read_multiplier = reader.add_multiplier(
        (l_scale, r_scale, out_scale),
        _fused_product_ratio if is_default else _relay_product_ratio,
        arithmetic,
    )
    read_l_zero, read_r_zero = reader.add(l_zero), reader.add(r_zero)
    read_out_zero = reader.add(out_zero)
    kind = choose_product_dtype(call) if has_exact_sums(rounding, arithmetic) else "int32"

    def element(
        left: PrimExpr, right: PrimExpr, left_channel: PrimExpr, right_channel: PrimExpr
    ) -> PrimExpr:
        centred = fixed_point.subtract_zero_point_tir(left, read_l_zero(left_channel))
        other = fixed_point.subtract_zero_point_tir(right, read_r_zero(right_channel))
        product = centred.astype(kind) * other.astype(kind)
        return fixed_point.requantize_tir(
            product,
            tirx.const(0, "int32"),
            read_multiplier((left_channel, right_channel, 0)),
            read_out_zero(0),
            dtype,
            *modes,
        )

    return _legalize_binary(builder, call, reader, element)


# ---------------------------------------------------------------- layout


def infer_layout_binary(call: Call, _desired: Mapping[str, Any], layouts: Mapping[Any, Any]) -> Any:
    """Give both operands the layout of the operand that was changed. Scalars fit any layout."""
    sides = call.args[:2]
    letters = [current_letters(side, layouts) for side in sides]
    if any(text is None or not is_plain(text) for text in letters):
        return keep_untouched(call)
    known = [text or "" for text in letters]
    chosen = next(
        (
            text
            for text, side in zip(known, sides, strict=True)
            if text != initial_letters(side) and len(text) == max(map(len, known))
        ),
        max(known, key=len),
    )
    if any(len(text) not in (0, len(chosen)) for text in known):
        # A lower rank broadcasts from the right. Reordered dimensions would break this.
        return keep_untouched(call)
    own = [chosen if text else "" for text in known]
    attrs = replace_attrs(
        call.attrs,
        lhs_axis=move_axis(int(call.attrs.lhs_axis), own[0]),
        rhs_axis=move_axis(int(call.attrs.rhs_axis), own[1]),
    )
    inputs = [*map(decide, own), *map(decide_untouched, call.args[2:])]
    return make_output(inputs, chosen, attrs)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        "add",
        QBinaryAttrs,
        BINARY_OPERANDS,
        infer_binary,
        legalize_add,
        infer_layout_binary,
        is_elementwise=True,
    ),
    Operator(
        "subtract",
        QBinaryAttrs,
        BINARY_OPERANDS,
        infer_binary,
        legalize_subtract,
        infer_layout_binary,
        is_elementwise=True,
    ),
    Operator(
        "mul",
        QBinaryAttrs,
        BINARY_OPERANDS,
        infer_binary,
        legalize_mul,
        infer_layout_binary,
        is_elementwise=True,
    ),
)
