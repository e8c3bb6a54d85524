"""Dialect: avg_pool2d and mean, with exact sums that are rounded once."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import relax, te, tirx
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder
from tvm.sym import Analyzer
from tvm_ffi import Array

from relayquant.base.qtypes import Arithmetic, Rounding, has_exact_sums
from relayquant.errors import QnnError
from relayquant.ir.dialect import fixed_point
from relayquant.ir.dialect.accumulator_range import choose_total_dtype
from relayquant.ir.dialect.construct import (
    Operand,
    Parameter,
    arithmetic_value,
    make_call,
    make_integers,
    make_padding,
    rounding_value,
)
from relayquant.ir.dialect.layout import (
    current_letters,
    decide,
    decide_untouched,
    is_plain,
    keep_untouched,
    make_output,
    reorder_names,
)
from relayquant.ir.dialect.loops import (
    divide,
    make_loops,
    name_hint,
    pad_zeros,
    read_modes,
    to_integers,
    zero,
)
from relayquant.ir.dialect.operands import (
    QUANTIZED,
    UNARY_OPERANDS,
    CheckedOperand,
    check_attribute,
    check_integers,
    check_layout,
    check_modes,
    check_scalar_pairs,
    count_windows,
    get_operands,
)
from relayquant.ir.dialect.operator import Operator, define_attrs, replace_attrs
from relayquant.ir.dialect.parameters import PrimExpr, Reader, compute_tensor
from relayquant.ir.rewrite.graph import static_size, tensor_dtype

__all__ = ["avg_pool2d", "mean"]


@define_attrs("relayquant.attrs.QAvgPool2DAttrs")
class QAvgPool2DAttrs(Attrs):
    """Attributes of qnn.avg_pool2d, with the names of relax.nn.avg_pool2d."""

    pool_size: Array
    strides: Array
    dilation: Array
    padding: Array
    ceil_mode: bool
    count_include_pad: bool
    layout: str
    rounding: str
    compute_dtype: str


@define_attrs("relayquant.attrs.QMeanAttrs")
class QMeanAttrs(Attrs):
    """Attributes of qnn.mean. No axes means all axes. out_dtype "" is the dtype of data."""

    axes: Array
    keepdims: bool
    out_dtype: str
    rounding: str
    compute_dtype: str


# ---------------------------------------------------------------- constructors


def avg_pool2d(
    data: Operand,
    input_scale: Parameter,
    input_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    pool_size: int | Sequence[int] = 1,
    strides: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = False,
    layout: str = "NCHW",
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """Average windows of integer data in `layout`. The dtype stays. Parameters: ().

    The default sums x - z_in over the window, with padding as real 0. It requantizes the exact sum
    with m' = m / float32(count). Windows and counts are the same as in relax.nn.avg_pool2d, also in
    ceil mode.

    Use UPWARD and TONEAREST only to reproduce TVM 0.19: the padding is integer 0 in the affine
    space of the output, the division truncates, and ceil mode keeps a last window that starts
    beyond the padding.
    """
    name = "avg_pool2d"
    return make_call(
        name,
        UNARY_OPERANDS,
        (data, input_scale, input_zero_point, output_scale, output_zero_point),
        QAvgPool2DAttrs(
            make_integers(pool_size, 2, name, "pool_size"),
            make_integers(strides, 2, name, "strides"),
            make_integers(dilation, 2, name, "dilation"),
            make_padding(padding, 2, name),
            bool(ceil_mode),
            bool(count_include_pad),
            layout,
            rounding_value(rounding, name),
            arithmetic_value(compute_dtype, name),
        ),
    )


def mean(
    data: Operand,
    input_scale: Parameter,
    input_zero_point: Parameter,
    output_scale: Parameter,
    output_zero_point: Parameter,
    axes: int | Sequence[int] | None = None,
    keepdims: bool = False,
    out_dtype: str = "",
    *,
    rounding: Rounding | str = Rounding.TONEAREST_EVEN,
    compute_dtype: Arithmetic | str = Arithmetic.FLOAT32,
) -> Call:
    """Average over `axes`. None or empty means all axes. out_dtype "" is the dtype of data.

    Parameters: (). The sum of x - z_in is requantized with m' = m / float32(count). With INT64
    arithmetic, the real multiplier is divided by the count before it is encoded. Sums that may
    overflow int32 are int64. With UPWARD, TONEAREST and INT64 they wrap.
    """
    name = "mean"
    listed = [axes] if isinstance(axes, int) else list(axes or ())
    return make_call(
        name,
        UNARY_OPERANDS,
        (data, input_scale, input_zero_point, output_scale, output_zero_point),
        QMeanAttrs(
            tvm_ffi.Array([int(axis) for axis in listed]),
            bool(keepdims),
            out_dtype,
            rounding_value(rounding, name),
            arithmetic_value(compute_dtype, name),
        ),
    )


# ---------------------------------------------------------------- types


def infer_avg_pool2d(call: Call, _builder: Any) -> Any:
    """Infer integer data -> the same dtype, pooled."""
    data, *parameters = get_operands(call, UNARY_OPERANDS)
    operator, attrs = data.operator, call.attrs
    data.check_dtype(QUANTIZED, "Quantize it first.")
    check_modes(operator, attrs)
    check_layout(operator, "layout", attrs.layout, "NCHW")
    pool = check_integers(operator, "pool_size", attrs.pool_size, 2, 1)
    strides = check_integers(operator, "strides", attrs.strides, 2, 1)
    dilation = check_integers(operator, "dilation", attrs.dilation, 2, 1)
    padding = check_integers(operator, "padding", attrs.padding, 4, 0)
    data.check_rank(4, attrs.layout)
    check_scalar_pairs(parameters, data.dtype)
    if data.shape is None:
        return relax.TensorType(None, data.dtype or "int8", data.ty.vdevice, 4)
    result = list(data.shape)
    for i, letter in enumerate("HW"):
        axis = attrs.layout.index(letter)
        size, stride = result[axis], strides[i]
        span = size + (padding[i] + padding[i + 2] - dilation[i] * (pool[i] - 1) - 1)
        if not attrs.ceil_mode:
            result[axis] = count_windows(data, letter, span, stride)
            continue
        result[axis] = count_windows(data, letter, span + (stride - 1), stride)
        if drops_outer_windows(attrs):
            last = result[axis] - 1
            result[axis] = _choose(last * stride >= size + padding[i], last, last + 1)
    return relax.TensorType(result, data.dtype or "int8", data.ty.vdevice)


def drops_outer_windows(attrs: Any) -> bool:
    """Whether ceil mode drops a last window that starts beyond data and left padding.

    relax.nn.avg_pool2d and the default rounding drop it. TVM 0.19 keeps it, and so do the rounding
    modes that reproduce TVM 0.19.
    """
    return attrs.rounding == Rounding.TONEAREST_EVEN.value


def _choose(condition: Any, true_value: Any, false_value: Any) -> Any:
    """Choose between two dimensions. If the condition cannot be decided, return an expression."""
    analyzer = Analyzer()
    if analyzer.can_prove(condition):
        return analyzer.simplify(true_value)
    if analyzer.can_prove(tirx.Not(condition)):
        return analyzer.simplify(false_value)
    return tirx.if_then_else(condition, true_value, false_value)


def infer_mean(call: Call, _builder: Any) -> Any:
    """Infer integer data -> out_dtype, reduced over the axes."""
    data, *parameters = get_operands(call, UNARY_OPERANDS)
    attrs = call.attrs
    data.check_dtype(QUANTIZED, "Quantize it first.")
    check_attribute(data.operator, "out_dtype", attrs.out_dtype, ("", *QUANTIZED))
    check_modes(data.operator, attrs)
    dtype = attrs.out_dtype or data.dtype or "int8"
    check_scalar_pairs(parameters, data.dtype, dtype)
    if data.ndim < 0:
        return relax.TensorType(None, dtype, data.ty.vdevice, -1)
    axes = resolve_axes(data, attrs.axes)
    if data.shape is None:
        ndim = data.ndim if attrs.keepdims else data.ndim - len(axes)
        return relax.TensorType(None, dtype, data.ty.vdevice, ndim)
    one = tirx.IntImm("int64", 1)
    kept = [one if i in axes else v for i, v in enumerate(data.shape)]
    if not attrs.keepdims:
        kept = [v for i, v in enumerate(data.shape) if i not in axes]
    return relax.TensorType(kept, dtype, data.ty.vdevice)


def resolve_axes(data: CheckedOperand, axes: Sequence[Any]) -> tuple[int, ...]:
    """Return sorted non-negative axes. No axes means all axes. Raise on a repeated axis."""
    if not len(axes):
        return tuple(range(data.ndim))
    resolved = [data.resolve_axis(int(axis), "axes") for axis in axes]
    known = sorted(axis for axis in resolved if axis is not None)
    if len(set(known)) != len(known):
        raise QnnError(
            f"{data.operator}: axes={[int(a) for a in axes]} repeats an axis; allowed: each axis "
            "once.",
            code="RQ601",
        )
    return tuple(known)


# ---------------------------------------------------------------- loop nests


def _add_mean_multiplier(
    reader: Reader, scales: tuple[Any, Any], arithmetic: Arithmetic, count: int | None
) -> Callable[[PrimExpr], tuple[PrimExpr, ...]]:
    """Read (s_in / s_out) / count. If the count is unknown, pass it to the returned reader."""
    if count is None:
        return reader.add_divided_multiplier(scales, divide, arithmetic)
    read = reader.add_multiplier(scales, divide, arithmetic, divisor=count)
    return lambda _divisor: read((0, 0))


def legalize_mean(builder: BlockBuilder, call: Call) -> Any:
    """Sum x - z_in and requantize with (s_in / s_out) / count."""
    data, in_scale, in_zero, out_scale, out_zero = call.args
    attrs, reader = call.attrs, Reader()
    axes = resolve_axes(get_operands(call, UNARY_OPERANDS)[0], attrs.axes)
    rounding, arithmetic = modes = read_modes(call)
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

    def te_mean(source: te.Tensor) -> te.Tensor:
        reduced = [te.reduce_axis((0, source.shape[a]), name=f"r{a}") for a in axes]

        def add_up(*index: PrimExpr) -> PrimExpr:
            kept = iter(index)
            full: list[PrimExpr] = []
            for axis in range(rank):
                is_reduced = axis in axes
                own = next(kept) if attrs.keepdims or not is_reduced else None
                full.append(reduced[axes.index(axis)] if is_reduced else own)
            centred = source(*full).astype("int32") - read_zero(0)
            return te.sum(centred.astype(kind), axis=reduced)

        total = compute_tensor(shape, add_up, name="total")

        def element(*index: PrimExpr) -> PrimExpr:
            size: Any = tirx.const(1, "int64")
            for axis in axes:
                size = size * source.shape[axis]
            multiplier = read_multiplier(size)
            return fixed_point.requantize_tir(
                total(*index), zero(), multiplier, read_out(0), dtype, *modes
            )

        return compute_tensor(shape, element, name=name_hint(call))

    return make_loops(builder, call, te_mean, [data], reader)


@dataclass(frozen=True)
class PooledAxis:
    """How the windows of a pool go along one axis of the data."""

    axis: int
    taps: int
    stride: int
    dilation: int
    before: int  #: padding
    after: int

    @staticmethod
    def read(attrs: Any) -> list[PooledAxis]:
        """Read height and width."""
        numbers = (attrs.pool_size, attrs.strides, attrs.dilation)
        padding = to_integers(attrs.padding)
        columns = (*map(to_integers, numbers), padding[:2], padding[2:])
        axes = [str(attrs.layout).index(letter) for letter in "HW"]
        return [PooledAxis(*each) for each in zip(axes, *columns, strict=True)]

    def locate(self, window: PrimExpr, tap: PrimExpr) -> PrimExpr:
        """Return the place of a tap in the padded data."""
        return window * self.stride + tap * self.dilation

    def count(self, window: PrimExpr, size: PrimExpr, with_pads: bool) -> PrimExpr:
        """Count the elements of a window in data of this size, or in data and padding."""
        before, after = (self.before, self.after) if with_pads else (0, 0)
        start, step = window * self.stride - self.before, self.dilation
        first: Any = tirx.max(tirx.floordiv(step - 1 - before - start, step), 0)
        last: Any = tirx.min(tirx.floordiv(size + after - 1 - start, step), self.taps - 1)
        return tirx.max(last - first + 1, 0).astype("int32")


def legalize_avg_pool2d(builder: BlockBuilder, call: Call) -> Any:
    """Sum x - z_in over each window and requantize with (s_in / s_out) / count.

    UPWARD and TONEAREST follow Relay. Each element is first requantized to int32. The padding is
    integer 0 in the affine space of the output, not its zero point. The division by the count
    truncates.
    """
    data, in_scale, in_zero, out_scale, out_zero = call.args
    attrs, reader = call.attrs, Reader()
    rounding, arithmetic = modes = read_modes(call)
    dtype, shape, axes = str(call.ty.dtype), list(call.ty.shape), PooledAxis.read(attrs)
    is_default = rounding is Rounding.TONEAREST_EVEN
    count = math.prod(each.taps for each in axes)
    scales = (in_scale, out_scale)
    # In ceil mode, a window may reach beyond the padding. Elements beyond it do not count.
    is_fixed = attrs.count_include_pad and not attrs.ceil_mode
    fixed_count = (count if is_fixed else None) if is_default else 1
    read_multiplier = _add_mean_multiplier(reader, scales, arithmetic, fixed_count)
    read_zero, read_out = reader.add(in_zero), reader.add(out_zero)
    kind = "int32"
    if has_exact_sums(rounding, arithmetic):
        kind = choose_total_dtype(tensor_dtype(data), in_zero, count)

    def te_avg_pool2d(source: te.Tensor) -> te.Tensor:
        def enter(*index: PrimExpr) -> PrimExpr:
            value, zero = source(*index).astype("int32"), read_zero(0)
            if is_default:
                return value - zero
            multiplier, out = read_multiplier(1), read_out(0)
            return fixed_point.requantize_tir(value, zero, multiplier, out, "int32", *modes)

        entered = compute_tensor(source.shape, enter, name="entered")
        # In ceil mode, the last window may reach beyond the padding by less than a stride.
        ends = [each.after + (each.stride - 1) * attrs.ceil_mode for each in axes]
        widths = [*(each.before for each in axes), *ends]
        padded = pad_zeros(entered, [each.axis for each in axes], widths)
        taps: list[Any] = [
            te.reduce_axis((0, each.taps), name=f"k{letter}")
            for each, letter in zip(axes, "HW", strict=True)
        ]

        def add_up(*index: PrimExpr) -> PrimExpr:
            at = list(index)
            for each, tap in zip(axes, taps, strict=True):
                at[each.axis] = each.locate(index[each.axis], tap)
            return te.sum(padded(*at).astype(kind), axis=taps)

        total = compute_tensor(shape, add_up, name="total")

        def count_elements(index: Sequence[PrimExpr], with_pads: bool) -> PrimExpr:
            counted: Any = tirx.const(1, "int32")
            for each in axes:
                size = source.shape[each.axis]
                counted = counted * each.count(index[each.axis], size, with_pads)
            return tirx.max(counted, tirx.const(1, "int32"))

        def element(*index: PrimExpr) -> PrimExpr:
            out = read_out(0)
            if not is_default:
                divisor = tirx.const(count, "int32")
                if not attrs.count_include_pad:
                    divisor = count_elements(index, with_pads=False)
                mean = tirx.truncdiv(total(*index), divisor)
                return fixed_point.clip_integer_tir(mean, dtype)
            divisor = count_elements(index, bool(attrs.count_include_pad))
            multiplier = read_multiplier(divisor)
            return fixed_point.requantize_tir(total(*index), zero(), multiplier, out, dtype, *modes)

        return compute_tensor(shape, element, name=name_hint(call))

    return make_loops(builder, call, te_avg_pool2d, [data], reader)


# ---------------------------------------------------------------- layout


def infer_layout_avg_pool2d(
    call: Call, _desired: Mapping[str, Any], layouts: Mapping[Any, Any]
) -> Any:
    """Follow the layout of the data. `layout` then names the dimensions in the new order."""
    letters = current_letters(call.args[0], layouts)
    if letters is None or not is_plain(letters):
        return keep_untouched(call)
    attrs = replace_attrs(call.attrs, layout=reorder_names(str(call.attrs.layout), letters))
    inputs = [decide(letters), *map(decide_untouched, call.args[1:])]
    return make_output(inputs, letters, attrs)


def infer_layout_mean(call: Call, _desired: Mapping[str, Any], layouts: Mapping[Any, Any]) -> Any:
    """Follow the layout of the data. Without keepdims, the remaining dimensions are renumbered."""
    letters = current_letters(call.args[0], layouts)
    if letters is None or not is_plain(letters):
        return keep_untouched(call)
    attrs = call.attrs
    rank = len(letters)
    axes = [int(axis) % rank for axis in attrs.axes] or list(range(rank))
    reduced = {string.ascii_uppercase[axis] for axis in axes}
    moved = sorted(letters.index(letter) for letter in reduced)
    output = letters
    if not attrs.keepdims:
        kept = [letter for letter in letters if letter not in reduced]
        output = "".join(string.ascii_uppercase[sorted(kept).index(letter)] for letter in kept)
    inputs = [decide(letters), *map(decide_untouched, call.args[1:])]
    return make_output(inputs, output, replace_attrs(attrs, axes=tvm_ffi.Array(moved)))


def make_float_avg_pool2d(call: Call, data: relax.Expr) -> relax.Expr:
    """Make the float pool on real data. Its attributes have the same names."""
    names = ("pool_size", "strides", "padding", "dilation")
    sizes = {name: to_integers(getattr(call.attrs, name)) for name in names}
    flags = {name: bool(getattr(call.attrs, name)) for name in ("ceil_mode", "count_include_pad")}
    return relax.op.nn.avg_pool2d(data, **sizes, **flags, layout=str(call.attrs.layout))


OPERATORS: tuple[Operator, ...] = (
    Operator(
        "avg_pool2d",
        QAvgPool2DAttrs,
        UNARY_OPERANDS,
        infer_avg_pool2d,
        legalize_avg_pool2d,
        infer_layout_avg_pool2d,
        make_float_avg_pool2d,
    ),
    Operator(
        "mean",
        QMeanAttrs,
        UNARY_OPERANDS,
        infer_mean,
        legalize_mean,
        infer_layout_mean,
        lambda call, data: relax.op.mean(data, list(call.attrs.axes) or None, call.attrs.keepdims),
    ),
)
