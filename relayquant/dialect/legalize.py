"""Dialect: legalization of the elementwise `relax.qnn` operators to TIR.

Every function has TVM's signature `FLegalize(builder, call) -> Expr`. The loop nests hold one float
operation per rounding and nothing LLVM could contract, so that all targets give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax, te, tirx, topi
from tvm.ir import Call
from tvm.relax import BlockBuilder

from relayquant.dialect import fixed_point
from relayquant.dialect.inference import SIMULATED_DTYPES, get_constant, operator_name
from relayquant.dialect.parameters import PrimExpr, Reader, compute_tensor
from relayquant.dialect.sums import choose_product_dtype
from relayquant.qtypes import INTEGER_LIMITS, Arithmetic, Rounding, has_exact_sums
from relayquant.rewrite.graph import static_size

#: TVM's signature of FLegalize.
LegalizeFunc = Callable[[BlockBuilder, Call], Any]

#: relax::OpPatternKind::kBroadcast
_BROADCAST = 1


def has_known_shape(call: Call) -> bool:
    """Whether all tensor operands have a (possibly symbolic) shape; no loop nest exists without."""

    def is_known(ty: Any) -> bool:
        if isinstance(ty, relax.TupleType):
            return all(is_known(inner) for inner in ty.fields)
        return isinstance(ty.shape, relax.ShapeExpr)

    return all(is_known(argument.ty) for argument in call.args)


def _modes(call: Call) -> tuple[Rounding, Arithmetic]:
    return Rounding(call.attrs.rounding), Arithmetic(call.attrs.compute_dtype)


def _hint(call: Call) -> str:
    return operator_name(call).replace(".", "_")


def _channel_of(index: Sequence[PrimExpr], axis: int) -> PrimExpr:
    return index[axis % len(index)] if index else 0


def _compute_elementwise(
    builder: BlockBuilder,
    call: Call,
    data: relax.Expr,
    reader: Reader,
    element: Callable[[PrimExpr, Sequence[te.Tensor], Sequence[PrimExpr]], PrimExpr],
) -> Any:
    """One loop nest over `data`: element(value, parameter tensors, index)."""

    def te_elementwise(source: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        return compute_tensor(
            source.shape, lambda *i: element(source(*i), tensors, i), name=_hint(call)
        )

    return builder.call_te(te_elementwise, data, *reader.operands, primfunc_name_hint=_hint(call))


# ---------------------------------------------------------------- quantize and dequantize


def legalize_quantize(builder: BlockBuilder, call: Call) -> Any:
    """q = saturate(round(x / s)) + z, a true float32 division; NaN becomes z."""
    data, scale, zero_point = call.args
    attrs, reader = call.attrs, Reader()
    # The scale is read from memory even when constant: a division by an immediate may be simplified
    # to a multiplication by its reciprocal, which rounds differently.
    read_scale, read_zero = reader.add_tensor(scale), reader.add(zero_point)
    rounding = Rounding(attrs.rounding)

    def element(
        value: PrimExpr, tensors: Sequence[te.Tensor], index: Sequence[PrimExpr]
    ) -> PrimExpr:
        channel = _channel_of(index, attrs.axis)
        zero = read_zero(tensors, channel)
        real = value.astype("float32") / read_scale(tensors, channel)
        rounded = fixed_point.round_tir(real, rounding)
        if rounding is Rounding.TONEAREST_EVEN:
            return fixed_point.saturate_tir(rounded, zero, attrs.out_dtype, may_be_nan=True)
        # Relay adds the zero point as a float32, which differs beyond 2^24 only.
        rounded = tirx.Select(tirx.isnan(rounded), tirx.const(0.0, "float32"), rounded)
        moved = rounded + zero.astype("float32")
        return fixed_point.saturate_tir(moved, tirx.const(0, "int32"), attrs.out_dtype)

    return _compute_elementwise(builder, call, data, reader, element)


def legalize_dequantize(builder: BlockBuilder, call: Call) -> Any:
    """float32(q - z) * s, q in int32 or int64; float16 is clipped to its finite range first."""
    data, scale, zero_point = call.args
    attrs, reader = call.attrs, Reader()
    read_scale, read_zero = reader.add(scale), reader.add(zero_point)

    def element(
        value: PrimExpr, tensors: Sequence[te.Tensor], index: Sequence[PrimExpr]
    ) -> PrimExpr:
        channel = _channel_of(index, attrs.axis)
        centred = fixed_point.centre_tir(value, read_zero(tensors, channel))
        real = centred.astype("float32") * read_scale(tensors, channel)
        if attrs.out_dtype == "float32":
            return real
        limit = tirx.const(65504.0, "float32")
        return tirx.max(tirx.min(real, limit), -limit).astype(attrs.out_dtype)

    return _compute_elementwise(builder, call, data, reader, element)


def _divide(numerator: Any, denominator: Any) -> Any:
    return numerator / denominator


def legalize_requantize(builder: BlockBuilder, call: Call) -> Any:
    """See fixed_point.requantize_numpy."""
    data, in_scale, in_zero, out_scale, out_zero = call.args
    attrs, reader = call.attrs, Reader()
    rounding, arithmetic = _modes(call)
    read_multiplier = reader.add_multiplier((in_scale, out_scale), _divide, arithmetic)
    read_in_zero, read_out_zero = reader.add(in_zero), reader.add(out_zero)

    def element(
        value: PrimExpr, tensors: Sequence[te.Tensor], index: Sequence[PrimExpr]
    ) -> PrimExpr:
        channel = _channel_of(index, attrs.axis)
        return fixed_point.requantize_tir(
            value,
            read_in_zero(tensors, channel),
            read_multiplier(tensors, (channel, channel)),
            read_out_zero(tensors, channel),
            attrs.out_dtype,
            rounding,
            arithmetic,
        )

    return _compute_elementwise(builder, call, data, reader, element)


# ---------------------------------------------------------------- simulated


def _read_wrapped(tensor: te.Tensor, channel: PrimExpr) -> PrimExpr:
    """Element `channel` modulo the length: variables of any length serve."""
    if len(tensor.shape) == 0:
        return tensor()
    return tensor(tirx.floormod(channel, tensor.shape[0]))


def _simulated_limits(code: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
    """Limits as float32 of the dtype with this code (inference.SIMULATED_DTYPES)."""
    ranges = {code: INTEGER_LIMITS[name] for code, name in _SIMULATED_RANGES.items()}
    ranges[6] = (-127, 127)
    low: PrimExpr = tirx.const(float(-(2**31)), "float32")
    high: PrimExpr = tirx.const(float(2**31), "float32")
    for number, (smallest, largest) in ranges.items():
        is_this = tirx.EQ(code, tirx.const(number, "int32"))
        low = tirx.Select(is_this, tirx.const(float(smallest), "float32"), low)
        high = tirx.Select(is_this, tirx.const(float(largest), "float32"), high)
    return low, high


_SIMULATED_RANGES = {1: "int8", 2: "uint8", 4: "int4", 5: "int16", 7: "uint16"}


def _legalize_simulated(
    builder: BlockBuilder,
    call: Call,
    compute: Callable[[PrimExpr, PrimExpr, PrimExpr, PrimExpr], PrimExpr],
) -> Any:
    """compute(float32 value, code, scale, zero point as float32) where the code is not 0."""
    data, dtype, scale, zero_point = call.args
    axis = call.attrs.axis

    def te_simulated(
        source: te.Tensor, codes: te.Tensor, scales: te.Tensor, zero_points: te.Tensor
    ) -> te.Tensor:
        def element(*index: PrimExpr) -> PrimExpr:
            channel = _channel_of(index, axis)
            code, value = _read_wrapped(codes, channel), source(*index)
            zero = _read_wrapped(zero_points, channel).astype("float32")
            done = compute(value.astype("float32"), code, _read_wrapped(scales, channel), zero)
            known = max(SIMULATED_DTYPES)
            is_passed = tirx.any(code <= 0, code > known)
            return tirx.Select(is_passed, value, done.astype(source.dtype))

        return compute_tensor(source.shape, element, name=_hint(call))

    return builder.call_te(
        te_simulated, data, dtype, scale, zero_point, primfunc_name_hint=_hint(call)
    )


def legalize_simulated_quantize(builder: BlockBuilder, call: Call) -> Any:
    """max(min(round(x / s) + z, high), low), kept in float; NaN becomes z.

    Code 0, and a code that is none of SIMULATED_DTYPES, passes x through.
    """
    rounding = Rounding(call.attrs.rounding)

    def compute(value: PrimExpr, code: PrimExpr, scale: PrimExpr, zero: PrimExpr) -> PrimExpr:
        low, high = _simulated_limits(code)
        rounded = fixed_point.round_tir(value / scale, rounding)
        rounded = tirx.Select(tirx.isnan(rounded), tirx.const(0.0, "float32"), rounded)
        return tirx.max(tirx.min(rounded + zero, high), low)

    return _legalize_simulated(builder, call, compute)


def legalize_simulated_dequantize(builder: BlockBuilder, call: Call) -> Any:
    """(x - z) * s; code 0 passes x through."""
    return _legalize_simulated(
        builder, call, lambda value, _code, scale, zero: (value - zero) * scale
    )


# ---------------------------------------------------------------- lookup, leaky_relu


def legalize_lookup(builder: BlockBuilder, call: Call) -> Any:
    """table[bit pattern of data as uint8].

    TVM takes any read at a computed position for opaque; this one is as good as elementwise for
    FuseOps, the table being a constant.
    """

    def te_lookup(data: te.Tensor, table: te.Tensor) -> te.Tensor:
        return compute_tensor(
            data.shape,
            lambda *i: table(data(*i).astype("uint8").astype("int32")),
            name=_hint(call),
        )

    return builder.call_te(
        te_lookup,
        *call.args,
        primfunc_name_hint=_hint(call),
        primfunc_attrs={"op_pattern": _BROADCAST},
    )


def legalize_leaky_relu(builder: BlockBuilder, call: Call) -> Any:
    """Requantize with s_in / s_out, or alpha times that below the input's zero point.

    UPWARD and TONEAREST follow Relay: the requantized value R, and below the zero point
    alpha * R + (1 - alpha) * z_out, each product an UPWARD fixed-point multiply.
    """
    data, in_scale, in_zero, out_scale, out_zero = call.args
    attrs, reader = call.attrs, Reader()
    rounding, arithmetic = _modes(call)
    dtype = str(call.ty.dtype)
    alpha = float(attrs.alpha)
    read_multiplier = reader.add_multiplier((in_scale, out_scale), _divide, arithmetic)
    read_negative = reader.add_multiplier(
        (in_scale, out_scale), lambda s_in, s_out: s_in * alpha / s_out, arithmetic
    )
    read_in_zero, read_out_zero = reader.add(in_zero), reader.add(out_zero)
    slopes = [
        [tirx.const(int(v), "int32") for v in fixed_point.split_multiplier_numpy(slope)]
        for slope in (alpha, 1.0 - alpha)
    ]

    def element(
        value: PrimExpr, tensors: Sequence[te.Tensor], _index: Sequence[PrimExpr]
    ) -> PrimExpr:
        zero, out = read_in_zero(tensors, 0), read_out_zero(tensors, 0)
        value = value.astype("int32")
        multiplier = read_multiplier(tensors, (0, 0))
        if rounding is Rounding.TONEAREST_EVEN:
            negative = read_negative(tensors, (0, 0))
            chosen = tuple(
                tirx.Select(value < zero, n, p) for n, p in zip(negative, multiplier, strict=True)
            )
            return fixed_point.requantize_tir(value, zero, chosen, out, dtype, rounding, arithmetic)
        moved = fixed_point.requantize_tir(
            value, zero, multiplier, out, "int32", rounding, arithmetic
        )
        scaled = fixed_point.multiply_fixed_point_tir(moved, *slopes[0], Rounding.UPWARD)
        offset = fixed_point.multiply_fixed_point_tir(out, *slopes[1], Rounding.UPWARD)
        chosen = tirx.Select(value < zero, scaled + offset, moved)
        return fixed_point.clip_integer_tir(chosen, dtype)

    return _compute_elementwise(builder, call, data, reader, element)


def legalize_prelu(builder: BlockBuilder, call: Call) -> Any:
    """Requantize with s_in / s_out, or the channel's slope times that below the input's zero point.

    In float32, half to even: see reference.qnn.prelu.
    """
    data, in_scale, in_zero, out_scale, out_zero, slopes = call.args
    reader, modes = Reader(), (Rounding.TONEAREST_EVEN, Arithmetic.FLOAT32)
    dtype = str(call.ty.dtype)
    read_positive = reader.add_multiplier((in_scale, out_scale), _divide, Arithmetic.FLOAT32)
    read_negative = reader.add_multiplier(
        (in_scale, slopes, out_scale),
        lambda s_in, slope, s_out: s_in * slope / s_out,
        Arithmetic.FLOAT32,
    )
    read_in_zero, read_out_zero = reader.add(in_zero), reader.add(out_zero)

    def element(
        value: PrimExpr, tensors: Sequence[te.Tensor], index: Sequence[PrimExpr]
    ) -> PrimExpr:
        zero, out = read_in_zero(tensors, 0), read_out_zero(tensors, 0)
        value = value.astype("int32")
        channel = _channel_of(index, call.attrs.axis)
        pairs = zip(
            read_negative(tensors, (0, channel, 0)), read_positive(tensors, (0, 0)), strict=True
        )
        chosen = tuple(tirx.Select(value < zero, n, p) for n, p in pairs)
        return fixed_point.requantize_tir(value, zero, chosen, out, dtype, *modes)

    return _compute_elementwise(builder, call, data, reader, element)


# ---------------------------------------------------------------- binary


def _legalize_binary(
    builder: BlockBuilder,
    call: Call,
    reader: Reader,
    element: Callable[[PrimExpr, PrimExpr, Sequence[te.Tensor], PrimExpr, PrimExpr], PrimExpr],
) -> Any:
    """Loop over the broadcast shape: element(l, r, tensors, channel of l, channel of r)."""
    lhs, rhs = call.args[:2]
    attrs, shape = call.attrs, call.ty.shape

    def te_binary(left: te.Tensor, right: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        def compute(*index: PrimExpr) -> PrimExpr:
            left_index = _broadcast_index(index, left.shape, shape)
            right_index = _broadcast_index(index, right.shape, shape)
            return element(
                left(*left_index),
                right(*right_index),
                tensors,
                _channel_of(left_index, attrs.lhs_axis),
                _channel_of(right_index, attrs.rhs_axis),
            )

        return compute_tensor(list(shape), compute, name=_hint(call))

    return builder.call_te(te_binary, lhs, rhs, *reader.operands, primfunc_name_hint=_hint(call))


def _broadcast_index(
    index: Sequence[PrimExpr], shape: Sequence[Any], full_shape: Sequence[Any]
) -> list[PrimExpr]:
    """Index into a tensor of `shape` that was broadcast: 0 along its dimensions of size 1."""
    first = len(index) - len(shape)
    return [
        tirx.const(0, "int64") if _is_one(size) and not _is_one(full_shape[first + i]) else v
        for i, (size, v) in enumerate(zip(shape, index[first:], strict=True))
    ]


def _is_one(size: Any) -> bool:
    return static_size(size) == 1


def _make_legalize_sum(sign: int) -> LegalizeFunc:
    def legalize_sum(builder: BlockBuilder, call: Call) -> Any:
        """round(l' * m_l +- r' * m_r), rounded once by a fused multiply-add; q = saturate(..) + z.

        That holds for TONEAREST_EVEN with FLOAT32. The other modes follow Relay: each side is
        requantized to int32 in the output's space, L + R - z_out or L - R + z_out, clipped.
        """
        l_scale, l_zero, r_scale, r_zero, out_scale, out_zero = call.args[2:]
        reader = Reader()
        rounding, arithmetic = _modes(call)
        dtype = str(call.ty.dtype)
        fused = rounding is Rounding.TONEAREST_EVEN and arithmetic is Arithmetic.FLOAT32
        flip = sign if fused else 1
        read_left = reader.add_multiplier((l_scale, out_scale), _divide, arithmetic)
        read_right = reader.add_multiplier(
            (r_scale, out_scale), lambda s, out: (s / out) * float(flip), arithmetic
        )
        read_l_zero, read_r_zero = reader.add(l_zero), reader.add(r_zero)
        read_out_zero = reader.add(out_zero)

        def element(
            left: PrimExpr,
            right: PrimExpr,
            tensors: Sequence[te.Tensor],
            left_channel: PrimExpr,
            right_channel: PrimExpr,
        ) -> PrimExpr:
            left_multiplier = read_left(tensors, (left_channel, 0))
            right_multiplier = read_right(tensors, (right_channel, 0))
            left_zero = read_l_zero(tensors, left_channel)
            right_zero = read_r_zero(tensors, right_channel)
            out = read_out_zero(tensors, 0)
            if fused:
                centred = fixed_point.centre_tir(left, left_zero).astype("float32")
                other = fixed_point.centre_tir(right, right_zero).astype("float32")
                total = fixed_point.fused_multiply_add_tir(
                    other, right_multiplier[0], centred * left_multiplier[0]
                )
                return fixed_point.saturate_tir(tirx.nearbyint(total), out, dtype)
            left = fixed_point.requantize_tir(
                left, left_zero, left_multiplier, out, "int32", rounding, arithmetic
            )
            right = fixed_point.requantize_tir(
                right, right_zero, right_multiplier, out, "int32", rounding, arithmetic
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
    """Relay rounds the product of the scales to float32 before it divides."""
    return (left * right).astype("float32").astype("float64") / out


def legalize_mul(builder: BlockBuilder, call: Call) -> Any:
    """(l - z_l) * (r - z_r), then requantized from scale s_l * s_r.

    The product is int32, or int64 where int32 may not hold it and the arithmetic is not TVM
    v0.19's.
    """
    l_scale, l_zero, r_scale, r_zero, out_scale, out_zero = call.args[2:]
    reader = Reader()
    rounding, arithmetic = _modes(call)
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
        left: PrimExpr,
        right: PrimExpr,
        tensors: Sequence[te.Tensor],
        left_channel: PrimExpr,
        right_channel: PrimExpr,
    ) -> PrimExpr:
        centred = fixed_point.centre_tir(left, read_l_zero(tensors, left_channel))
        other = fixed_point.centre_tir(right, read_r_zero(tensors, right_channel))
        product = centred.astype(kind) * other.astype(kind)
        return fixed_point.requantize_tir(
            product,
            tirx.const(0, "int32"),
            read_multiplier(tensors, (left_channel, right_channel, 0)),
            read_out_zero(tensors, 0),
            dtype,
            rounding,
            arithmetic,
        )

    return _legalize_binary(builder, call, reader, element)


# ---------------------------------------------------------------- concatenate


def legalize_concatenate(builder: BlockBuilder, call: Call) -> Any:
    """Requantize each tensor whose parameters differ from the output's, then join."""
    tensors, scales, zero_points = (_get_fields(builder, argument) for argument in call.args[:3])
    out_scale, out_zero = call.args[3:]
    rounding, arithmetic = _modes(call)
    axis = int(call.attrs.axis) % call.ty.ndim
    dtype = str(call.ty.dtype)
    reader = Reader()
    plans = []
    for scale, zero_point in zip(scales, zero_points, strict=True):
        if _is_same_constant(scale, out_scale) and _is_same_constant(zero_point, out_zero):
            plans.append(None)
            continue
        multiplier = reader.add_multiplier((scale, out_scale), _divide, arithmetic)
        plans.append((multiplier, reader.add(zero_point), reader.add(out_zero)))
    count = len(tensors)

    def te_concatenate(*operands: te.Tensor) -> te.Tensor:
        sources, extra = operands[:count], operands[count:]

        def convert(source: te.Tensor, plan: Any) -> te.Tensor:
            if plan is None:
                return source
            read_multiplier, read_zero, read_out = plan
            return compute_tensor(
                source.shape,
                lambda *i: fixed_point.requantize_tir(
                    source(*i),
                    read_zero(extra, 0),
                    read_multiplier(extra, (0, 0)),
                    read_out(extra, 0),
                    dtype,
                    rounding,
                    arithmetic,
                ),
                name="requantize",
            )

        converted = [convert(s, plan) for s, plan in zip(sources, plans, strict=True)]
        return topi.concatenate(converted, axis)

    return builder.call_te(
        te_concatenate, *tensors, *reader.operands, primfunc_name_hint=_hint(call)
    )


def _get_fields(builder: BlockBuilder, argument: Any) -> list[Any]:
    """Elements of a tuple operand, which may be a variable."""
    if isinstance(argument, relax.Tuple):
        return list(argument.fields)
    return [builder.emit(relax.TupleGetItem(argument, i)) for i in range(len(argument.ty.fields))]


def _is_same_constant(left: Any, right: Any) -> bool:
    a, b = get_constant(left), get_constant(right)
    return a is not None and b is not None and np.array_equal(a, b)
