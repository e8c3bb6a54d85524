"""Dialect: legalization of convolutions, products and reductions to TIR.

Exact loop nests without a schedule: what a target runs when no kernel of its own serves the call.
Data and weights are centred (zero point subtracted) in int32 before anything is summed, so that
padding is zero after centring. Sums are int32 or int64, as the operator says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx
from tvm.ir import Call
from tvm.relax import BlockBuilder

from relayquant.dialect import fixed_point
from relayquant.dialect.inference import (
    UNARY_OPERANDS,
    get_operands,
    operator_name,
    resolve_axes,
)
from relayquant.dialect.parameters import PrimExpr, Reader, compute_tensor
from relayquant.dialect.sums import choose_total_dtype
from relayquant.qtypes import Arithmetic, Rounding, has_exact_sums
from relayquant.rewrite.graph import static_size, tensor_dtype


def _hint(call: Call) -> str:
    return operator_name(call).replace(".", "_")


def _zero() -> PrimExpr:
    return tirx.const(0, "int32")


def _make_multiply(call: Call) -> Callable[[PrimExpr, PrimExpr], PrimExpr]:
    """The product of two centred values, int32, in the dtype of the sums of `call`.

    A product with a value of 8 bits fits int32; that of two of 16 bits may not.
    """
    dtype = str(call.attrs.out_dtype)
    is_narrow = any(tensor_dtype(factor) in ("int8", "uint8") for factor in call.args[:2])

    def multiply(left: PrimExpr, right: PrimExpr) -> PrimExpr:
        if is_narrow:
            return (left * right).astype(dtype)
        return left.astype(dtype) * right.astype(dtype)

    return multiply


def _subtract(tensor: te.Tensor, zero_point: Callable[..., PrimExpr], name: str) -> te.Tensor:
    """int32(tensor) - zero point, as a stage; zero_point(*index) -> value."""
    return compute_tensor(
        tensor.shape, lambda *i: tensor(*i).astype("int32") - zero_point(*i), name=name
    )


def _pad(data: te.Tensor, axes: Sequence[int], padding: Sequence[int]) -> te.Tensor:
    """Zeros around `axes` of int32 data; `padding` holds all widths before, then all after."""
    if not any(padding):
        return data
    rank = len(axes)
    shape = list(data.shape)
    for i, axis in enumerate(axes):
        shape[axis] = shape[axis] + padding[i] + padding[i + rank]

    def element(*index: PrimExpr) -> PrimExpr:
        moved, inside = list(index), []
        for i, axis in enumerate(axes):
            moved[axis] = index[axis] - padding[i]
            inside += [moved[axis] >= 0, moved[axis] < data.shape[axis]]
        return tirx.if_then_else(tirx.all(*inside), data(*moved), _zero())

    return compute_tensor(shape, element, name="padded")


def _integers(values: Sequence[Any]) -> list[int]:
    return [int(v) for v in values]


# ---------------------------------------------------------------- convolution


def legalize_conv(builder: BlockBuilder, call: Call) -> Any:
    """conv1d and conv2d in any order of the layout's letters, grouped, dilated, padded."""
    data, weight, input_zero, kernel_zero = call.args[:4]
    attrs, reader = call.attrs, Reader()
    read_input_zero, read_kernel_zero = reader.add(input_zero), reader.add(kernel_zero)
    data_layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    # Attributes list H before W, whatever order the layout names them in.
    names = sorted(set(kernel_layout) - {"O", "I"})
    strides = dict(zip(names, _integers(attrs.strides), strict=True))
    dilation = dict(zip(names, _integers(attrs.dilation), strict=True))
    padding = _integers(attrs.padding)
    groups = int(attrs.groups)
    shape, multiply = list(call.ty.shape), _make_multiply(call)
    position = {letter: data_layout.index(letter) for letter in data_layout}
    axes = [position[letter] for letter in names]

    def te_conv(source: te.Tensor, kernel: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        out_axis = kernel_layout.index("O")
        centred = _subtract(source, lambda *i: read_input_zero(tensors, 0), "centred")
        padded = _pad(centred, axes, padding)
        weights = _subtract(
            kernel, lambda *i: read_kernel_zero(tensors, i[out_axis]), "centred_weight"
        )
        size = dict(zip(kernel_layout, kernel.shape, strict=True))
        channel = te.reduce_axis((0, size["I"]), name="channel")
        taps: dict[str, Any] = {
            letter: te.reduce_axis((0, size[letter]), name=f"k{letter}") for letter in names
        }
        per_group = tirx.floordiv(size["O"], groups)

        def element(*index: PrimExpr) -> PrimExpr:
            out = index[position["C"]]
            at = dict(zip(data_layout, index, strict=True))
            at["C"] = channel
            if groups > 1:
                at["C"] = tirx.floordiv(out, per_group) * size["I"] + channel
            for letter in names:
                at[letter] = (
                    index[position[letter]] * strides[letter] + taps[letter] * dilation[letter]
                )
            weight_at = {"O": out, "I": channel, **taps}
            return te.sum(
                multiply(
                    padded(*(at[letter] for letter in data_layout)),
                    weights(*(weight_at[letter] for letter in kernel_layout)),
                ),
                axis=[channel, *taps.values()],
            )

        return compute_tensor(shape, element, name=_hint(call))

    return builder.call_te(te_conv, data, weight, *reader.operands, primfunc_name_hint=_hint(call))


def legalize_conv2d_transpose(builder: BlockBuilder, call: Call) -> Any:
    """Each output gathers the inputs whose stride hits it; any order of the layout's letters."""
    data, weight, input_zero, kernel_zero = call.args[:4]
    attrs, reader = call.attrs, Reader()
    read_input_zero, read_kernel_zero = reader.add(input_zero), reader.add(kernel_zero)
    data_layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    strides = dict(zip("HW", _integers(attrs.strides), strict=True))
    dilation = dict(zip("HW", _integers(attrs.dilation), strict=True))
    before = dict(zip("HW", _integers(attrs.padding)[:2], strict=True))
    groups = int(attrs.groups)
    shape, multiply = list(call.ty.shape), _make_multiply(call)

    def te_conv_transpose(source: te.Tensor, kernel: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        size = dict(zip(kernel_layout, kernel.shape, strict=True))
        extent = dict(zip(data_layout, source.shape, strict=True))
        per_group = tirx.floordiv(size["I"], groups)
        centred = _subtract(source, lambda *i: read_input_zero(tensors, 0), "centred")
        channel = te.reduce_axis((0, per_group), name="channel")
        taps: dict[str, Any] = {
            letter: te.reduce_axis((0, size[letter]), name=f"k{letter}") for letter in "HW"
        }

        def element(*index: PrimExpr) -> PrimExpr:
            at = dict(zip(data_layout, index, strict=True))
            out = at["C"]
            group = tirx.floordiv(out, size["O"])
            at["C"] = group * per_group + channel
            hits = []
            for letter in "HW":
                reach = at[letter] + before[letter] - taps[letter] * dilation[letter]
                zero = tirx.const(0, fixed_point.expr_dtype(reach))
                hits += [reach >= 0, tirx.EQ(tirx.floormod(reach, strides[letter]), zero)]
                at[letter] = tirx.floordiv(reach, strides[letter])
                hits.append(at[letter] < extent[letter])
            weight_at = {"O": tirx.floormod(out, size["O"]), "I": at["C"], **taps}
            value = kernel(*(weight_at[letter] for letter in kernel_layout)).astype("int32")
            value = value - read_kernel_zero(tensors, out)
            product = multiply(centred(*(at[letter] for letter in data_layout)), value)
            return te.sum(
                tirx.if_then_else(tirx.all(*hits), product, tirx.const(0, attrs.out_dtype)),
                axis=[channel, *taps.values()],
            )

        return compute_tensor(shape, element, name=_hint(call))

    return builder.call_te(
        te_conv_transpose, data, weight, *reader.operands, primfunc_name_hint=_hint(call)
    )


# ---------------------------------------------------------------- products


def legalize_dense(builder: BlockBuilder, call: Call) -> Any:
    """out[..., n] = sum over k of (data[..., k] - z_d) * (weight[n, k] - z_w[n])."""
    data, weight, input_zero, kernel_zero = call.args[:4]
    reader = Reader()
    read_input_zero, read_kernel_zero = reader.add(input_zero), reader.add(kernel_zero)
    shape, multiply = list(call.ty.shape), _make_multiply(call)

    def te_dense(source: te.Tensor, kernel: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        centred = _subtract(source, lambda *i: read_input_zero(tensors, 0), "centred")
        weights = _subtract(kernel, lambda *i: read_kernel_zero(tensors, i[0]), "centred_weight")
        k = te.reduce_axis((0, kernel.shape[1]), name="k")
        return compute_tensor(
            shape,
            lambda *i: te.sum(multiply(centred(*i[:-1], k), weights(i[-1], k)), axis=k),
            name=_hint(call),
        )

    return builder.call_te(te_dense, data, weight, *reader.operands, primfunc_name_hint=_hint(call))


def legalize_batch_matmul(builder: BlockBuilder, call: Call) -> Any:
    """out[..., m, n] = sum over k of (x[..., m, k] - z_x) * (y[..., n, k] - z_y)."""
    x, y, x_zero, y_zero = call.args[:4]
    reader = Reader()
    read_x_zero, read_y_zero = reader.add(x_zero), reader.add(y_zero)
    shape, multiply = list(call.ty.shape), _make_multiply(call)

    def te_batch_matmul(left: te.Tensor, right: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        left_centred = _subtract(left, lambda *i: read_x_zero(tensors, 0), "centred_x")
        right_centred = _subtract(right, lambda *i: read_y_zero(tensors, 0), "centred_y")
        k = te.reduce_axis((0, left.shape[-1]), name="k")

        def batch_of(tensor: te.Tensor, batch: Sequence[PrimExpr]) -> list[PrimExpr]:
            sizes = list(tensor.shape)[:-2]
            used = batch[len(batch) - len(sizes) :]
            return [
                tirx.const(0, "int64") if isinstance(s, tirx.IntImm) and int(s) == 1 else b
                for s, b in zip(sizes, used, strict=True)
            ]

        def element(*index: PrimExpr) -> PrimExpr:
            batch, m, n = index[:-2], index[-2], index[-1]
            product = multiply(
                left_centred(*batch_of(left, batch), m, k),
                right_centred(*batch_of(right, batch), n, k),
            )
            return te.sum(product, axis=k)

        return compute_tensor(shape, element, name=_hint(call))

    return builder.call_te(te_batch_matmul, x, y, *reader.operands, primfunc_name_hint=_hint(call))


# ---------------------------------------------------------------- reductions


def _divide(numerator: Any, denominator: Any) -> Any:
    return numerator / denominator


def _add_mean_multiplier(
    reader: Reader,
    scales: tuple[Any, Any],
    arithmetic: Arithmetic,
    count: int | None,
) -> Callable[[Sequence[te.Tensor], PrimExpr], tuple[PrimExpr, ...]]:
    """Read (s_in / s_out) / count; a count that is not known yet is given to the result."""
    if count is None:
        return reader.add_divided_multiplier(scales, _divide, arithmetic)
    read = reader.add_multiplier(scales, _divide, arithmetic, divisor=count)
    return lambda tensors, _divisor: read(tensors, (0, 0))


def legalize_mean(builder: BlockBuilder, call: Call) -> Any:
    """S = sum of (x - z_in); requantized with (s_in / s_out) / count."""
    data, in_scale, in_zero, out_scale, out_zero = call.args
    attrs, reader = call.attrs, Reader()
    axes = resolve_axes(get_operands(call, UNARY_OPERANDS)[0], attrs.axes)
    rounding, arithmetic = Rounding(attrs.rounding), Arithmetic(attrs.compute_dtype)
    dtype, shape, rank = str(call.ty.dtype), list(call.ty.shape), int(data.ty.ndim)
    sizes = [data.ty.shape[axis] for axis in axes]
    is_fixed = None not in map(static_size, sizes)
    scales = (in_scale, out_scale)
    count = math.prod(int(size) for size in sizes) if is_fixed else None
    read_multiplier = _add_mean_multiplier(reader, scales, arithmetic, count)
    read_zero, read_out = reader.add(in_zero), reader.add(out_zero)
    kind = "int32"
    if has_exact_sums(rounding, arithmetic):
        kind = choose_total_dtype(tensor_dtype(data), in_zero, count)

    def te_mean(source: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        reduced = [te.reduce_axis((0, source.shape[a]), name=f"r{a}") for a in axes]

        def add_up(*index: PrimExpr) -> PrimExpr:
            kept = iter(index)
            full: list[PrimExpr] = []
            for axis in range(rank):
                is_reduced = axis in axes
                own = next(kept) if attrs.keepdims or not is_reduced else None
                full.append(reduced[axes.index(axis)] if is_reduced else own)
            centred = source(*full).astype("int32") - read_zero(tensors, 0)
            return te.sum(centred.astype(kind), axis=reduced)

        total = compute_tensor(shape, add_up, name="total")

        def element(*index: PrimExpr) -> PrimExpr:
            size: Any = tirx.const(1, "int64")
            for axis in axes:
                size = size * source.shape[axis]
            multiplier = read_multiplier(tensors, size)
            return fixed_point.requantize_tir(
                total(*index),
                _zero(),
                multiplier,
                read_out(tensors, 0),
                dtype,
                rounding,
                arithmetic,
            )

        return compute_tensor(shape, element, name=_hint(call))

    return builder.call_te(te_mean, data, *reader.operands, primfunc_name_hint=_hint(call))


def legalize_avg_pool2d(builder: BlockBuilder, call: Call) -> Any:
    """S = sum of (x - z_in) over the window; requantized with (s_in / s_out) / count.

    UPWARD and TONEAREST follow Relay: each element is requantized to int32 first, the pads are 0 in
    the output's space (not its zero point), and the division by the count truncates.
    """
    data, in_scale, in_zero, out_scale, out_zero = call.args
    attrs, reader = call.attrs, Reader()
    rounding, arithmetic = Rounding(attrs.rounding), Arithmetic(attrs.compute_dtype)
    dtype, shape, layout = str(call.ty.dtype), list(call.ty.shape), str(attrs.layout)
    pool, strides, dilation = (
        dict(zip("HW", _integers(v), strict=True))
        for v in (attrs.pool_size, attrs.strides, attrs.dilation)
    )
    padding = _integers(attrs.padding)
    is_default = rounding is Rounding.TONEAREST_EVEN
    count = pool["H"] * pool["W"]
    scales = (in_scale, out_scale)
    # In ceil mode a window may reach beyond the padding; what lies there does not count.
    is_fixed = attrs.count_include_pad and not attrs.ceil_mode
    fixed_count = (count if is_fixed else None) if is_default else 1
    read_multiplier = _add_mean_multiplier(reader, scales, arithmetic, fixed_count)
    read_zero, read_out = reader.add(in_zero), reader.add(out_zero)
    axes = [layout.index(letter) for letter in "HW"]
    kind = "int32"
    if has_exact_sums(rounding, arithmetic):
        kind = choose_total_dtype(tensor_dtype(data), in_zero, count)

    def te_avg_pool2d(source: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        def enter(*index: PrimExpr) -> PrimExpr:
            value, zero = source(*index).astype("int32"), read_zero(tensors, 0)
            if is_default:
                return value - zero
            multiplier, out = read_multiplier(tensors, 1), read_out(tensors, 0)
            return fixed_point.requantize_tir(
                value, zero, multiplier, out, "int32", rounding, arithmetic
            )

        entered = compute_tensor(source.shape, enter, name="entered")
        # In ceil mode the last window may reach beyond the padding, by less than a stride.
        widths = list(padding)
        if attrs.ceil_mode:
            widths[2] += strides["H"] - 1
            widths[3] += strides["W"] - 1
        padded = _pad(entered, axes, widths)
        taps: dict[str, Any] = {
            letter: te.reduce_axis((0, pool[letter]), name=f"k{letter}") for letter in "HW"
        }

        def add_up(*index: PrimExpr) -> PrimExpr:
            at = list(index)
            for axis, letter in zip(axes, "HW", strict=True):
                at[axis] = index[axis] * strides[letter] + taps[letter] * dilation[letter]
            return te.sum(padded(*at).astype(kind), axis=list(taps.values()))

        total = compute_tensor(shape, add_up, name="total")

        def count_elements(index: Sequence[PrimExpr], with_pads: bool) -> PrimExpr:
            """Elements of the window that are data, or also its padding; at least 1."""
            counted: Any = tirx.const(1, "int32")
            for i, letter in enumerate("HW"):
                before, after = (padding[i], padding[i + 2]) if with_pads else (0, 0)
                start = index[axes[i]] * strides[letter] - padding[i]
                step = dilation[letter]
                first: Any = tirx.max(tirx.floordiv(step - 1 - before - start, step), 0)
                end = source.shape[axes[i]] + after
                last: Any = tirx.min(tirx.floordiv(end - 1 - start, step), pool[letter] - 1)
                counted = counted * tirx.max(last - first + 1, 0).astype("int32")
            return tirx.max(counted, tirx.const(1, "int32"))

        def element(*index: PrimExpr) -> PrimExpr:
            out = read_out(tensors, 0)
            if not is_default:
                divisor = tirx.const(count, "int32")
                if not attrs.count_include_pad:
                    divisor = count_elements(index, with_pads=False)
                mean = tirx.truncdiv(total(*index), divisor)
                return fixed_point.clip_integer_tir(mean, dtype)
            divisor = count_elements(index, bool(attrs.count_include_pad))
            multiplier = read_multiplier(tensors, divisor)
            return fixed_point.requantize_tir(
                total(*index), _zero(), multiplier, out, dtype, rounding, arithmetic
            )

        return compute_tensor(shape, element, name=_hint(call))

    return builder.call_te(te_avg_pool2d, data, *reader.operands, primfunc_name_hint=_hint(call))
