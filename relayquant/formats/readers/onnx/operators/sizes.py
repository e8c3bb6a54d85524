"""ONNX reader: operators with an operand that gives a size of the result.

Constant sizes become sizes of the module. Other sizes become symbolic sizes that a match_cast reads
at run time. Each function is a `Convert`, as `conversion` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import onnx
from tvm import relax, tirx
from tvm.ir import GenericConst
from tvm.sym import Analyzer

from relayquant.errors import format_count
from relayquant.formats.readers.indices import count_from_start
from relayquant.formats.readers.onnx.graph.symbolic import (
    emit_tensor,
    find_bounds,
    is_sizes,
    larger,
    simplify,
    smaller,
)
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.refusal import NotConstant, Refusal
from relayquant.ir.rewrite.expressions import LARGEST
from relayquant.ir.rewrite.graph import constant_value, static_size, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.inline import list_dimensions

#: Largest constant that is computed during the import, in elements.
MAX_CONSTANT = 2**28

#: A bound of Slice from here on means the end of the axis (ONNX, operator Slice).
INT_MAX = np.iinfo("int32").max


def read_sizes(value: Any) -> list[Any] | None:
    """Return the sizes that an operand lists: integers, or symbolic sizes of the model. None if
    they are known at run time only.
    """
    if isinstance(value, relax.ShapeExpr):
        return [int(size) if isinstance(size, tirx.IntImm) else size for size in value.values]
    if is_sizes(value):
        return [value]
    array = constant_value(value) if isinstance(value, GenericConst) else None
    return None if array is None else [int(size) for size in array.ravel()]


def known_shape(value: relax.Expr, what: str = "input") -> tuple[int | str, ...]:
    """Return the shape of an operand, with symbolic sizes as text.

    Raises:
        Refusal: the shape is unknown.
    """
    shape = tensor_shape(value)
    if shape is None:
        raise Refusal(f"the shape of its {what} is not known; supported: known ranks")
    return shape


def count_sizes(value: relax.Expr) -> int:
    """Return the length of a one-dimensional operand of sizes.

    Raises:
        Refusal: the length is unknown.
    """
    shape = known_shape(value, "sizes")
    if len(shape) != 1 or isinstance(shape[0], str):
        raise Refusal("the number of its sizes is not known, so that the rank of its result is not")
    return int(shape[0])


def emit_item(bb: Builder, values: relax.Expr, at: int) -> relax.Expr:
    """Emit values[at] of a vector."""
    return bb.emit(relax.op.take(values, relax.const(at, "int64"), axis=0))


def emit_shape(bb: Builder, sizes: relax.Expr, count: int) -> relax.ShapeExpr:
    """Emit symbolic sizes for an int64 tensor of shape (count,) that is computed at run time.

    shape = R.tensor_to_shape(sizes); R.match_cast(shape, R.Shape([size_0, size_1]))
    """
    shape = bb.emit(relax.op.tensor_to_shape(sizes))
    symbols = [tirx.Var(f"size_{at}", "int64") for at in range(count)]
    bb.match_cast(shape, relax.ShapeType(symbols))
    return relax.ShapeExpr(symbols)


def emit_sizes(bb: Builder, value: relax.Expr) -> relax.Expr:
    """Emit the sizes of a tensor as an int64 tensor."""
    return bb.emit(relax.op.shape_to_tensor(bb.emit(relax.op.shape_of(value))))


def convert_constant_of_shape(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr | None:
    """Convert ConstantOfShape with run-time sizes to R.full. Constant sizes are left to TVM.

    Raises:
        Refusal: the result would fill the memory.
    """
    sizes = read_sizes(inputs[0])
    if sizes:
        if all(isinstance(size, int) for size in sizes):
            check_constant(math.prod(sizes))
        return None
    value = attrs.get("value")
    array = np.zeros((), "float32") if value is None else onnx.numpy_helper.to_array(value)
    if sizes is not None:  # a scalar, which TVM does not convert
        return relax.const(array.reshape(()), str(array.dtype))
    shape = emit_shape(bb, inputs[0], count_sizes(inputs[0]))
    return relax.op.full(shape, relax.const(array.reshape(()), str(array.dtype)))


def convert_reshape(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Convert Reshape to run-time sizes. 0 keeps a size (unless allowzero), -1 is the remaining
    size.

    Constant sizes are left to TVM, except with allowzero: TVM takes a 0 as the size that is there.

    Raises:
        Refusal: allowzero gives a size of 0 to data that is not empty, or may not be.
    """
    data, wanted = inputs
    if isinstance(data, relax.ShapeExpr):
        return None
    have = known_shape(data)
    sizes = read_sizes(wanted)
    allow_zero = bool(attrs.get("allowzero", 0))
    if sizes is not None:
        if not allow_zero or 0 not in sizes:
            return None
        is_free = any(isinstance(size, str) for size in have)
        if (0 not in have and not is_free) or -1 in sizes:
            raise Refusal(
                f"allowzero=1 makes data of the shape {have} into {sizes}; supported: data with a "
                "size of 0, and no -1"
            )
        if 0 in have:
            return relax.op.zeros(sizes, tensor_dtype(data))
        wanted = relax.const(np.array(sizes, "int64"), "int64")
    count = count_sizes(wanted)
    zero, one = relax.const(0, "int64"), relax.const(1, "int64")
    mine = emit_sizes(bb, data)
    sized = wanted
    if not allow_zero:
        kept = mine
        if count < len(have):
            kept = bb.emit(relax.op.strided_slice(mine, [0], [0], [count]))
        elif count > len(have):
            rest = relax.const(np.zeros(count - len(have), "int64"), "int64")
            kept = bb.emit(relax.op.concat([mine, rest]))
        is_kept = bb.emit(relax.op.equal(wanted, zero))
        sized = bb.emit(relax.op.where(is_kept, kept, wanted))
    is_left = bb.emit(relax.op.less(sized, zero))
    given = bb.emit(relax.op.prod(bb.emit(relax.op.where(is_left, one, sized))))
    left = bb.emit(
        relax.op.floor_divide(bb.emit(relax.op.prod(mine)), bb.emit(relax.op.maximum(given, one)))
    )
    return relax.op.reshape(
        data, emit_shape(bb, bb.emit(relax.op.where(is_left, left, sized)), count)
    )


def convert_flatten(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Convert Flatten of data without elements: the remaining size is a product of sizes, where
    TVM divides by 0. Other data is left to TVM.
    """
    have, axis = known_shape(inputs[0]), int(attrs.get("axis", 1))
    if 0 not in have or not -len(have) <= axis <= len(have):
        return None
    if any(isinstance(size, str) for size in have):
        raise Refusal(
            f"its data has the shape {have}, with a size of 0; supported: numbers beside it"
        )
    axis += len(have) if axis < 0 else 0
    # To R.reshape, a 0 stands for the size that is there.
    sizes = [math.prod(have[:axis]), math.prod(have[axis:])]
    return relax.op.zeros(sizes, tensor_dtype(inputs[0]))


def convert_trilu(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Convert Trilu of data without elements, which stays as it is: TVM gives no type to its mask.
    Other data is left to TVM.
    """
    return inputs[0] if 0 in known_shape(inputs[0]) else None


def slice_value(bb: Builder, inputs: Sequence[Any]) -> Any:
    """Convert Slice. Run-time bounds or steps become one R.take per axis, with the indices begin +
    step * (0 ... count - 1). `slice_by_sizes` handles constants and symbolic sizes.

    Args:
        bb: The builder.
        inputs: Data, starts and ends, maybe axes and steps.

    Raises:
        Refusal: the axes are not constant, or the number of slices is unknown.
    """
    data, starts, ends, axes, steps = (*inputs, None, None)[:5]
    operands = [value for value in (starts, ends, steps) if value is not None]
    lists = [read_sizes(value) for value in operands]
    if all(found is not None for found in lists):
        sliced = slice_by_sizes(bb, data, *map(read_sizes, (starts, ends)), axes, steps)
        if sliced is not None:
            return sliced
        starts, ends, steps = (
            emit_tensor(bb, value) if is_sizes(value) else value for value in (starts, ends, steps)
        )
    shape = known_shape(data)
    count = count_sizes(starts)
    taken = list(range(count)) if axes is None else read_sizes(axes)
    if taken is None:
        raise NotConstant("axes")
    zero, one = relax.const(0, "int64"), relax.const(1, "int64")
    sizes = emit_sizes(bb, data)

    def pick(values: relax.Expr | None, at: int) -> relax.Expr:
        if values is None:
            return one
        return bb.emit(relax.op.astype(emit_item(bb, values, at), "int64"))

    for at, axis in enumerate(axis % len(shape) for axis in taken):
        size = pick(sizes, axis)
        step = pick(steps, at)
        back = bb.emit(relax.op.less(step, zero))
        # A negative position counts from the end. Positions are clamped to 0 ... size going
        # forward; going backward, starts to 0 ... size - 1 and ends to -1 ... size - 1.
        shift = bb.emit(relax.op.where(back, one, zero))
        bounds = []
        for values, low in ((starts, zero), (ends, bb.emit(relax.op.negative(shift)))):
            position = count_from_start(bb, pick(values, at), size)
            high = bb.emit(relax.op.subtract(size, shift))
            position = bb.emit(relax.op.maximum(position, low))
            bounds.append(bb.emit(relax.op.minimum(position, high)))
        begin, end = bounds
        # ceil((end - begin) / step) = -floor((begin - end) / step), with a positive divisor
        sign = bb.emit(relax.op.where(back, relax.const(-1, "int64"), one))
        span = bb.emit(relax.op.multiply(bb.emit(relax.op.subtract(begin, end)), sign))
        width = bb.emit(relax.op.multiply(step, sign))
        steps_back = bb.emit(relax.op.floor_divide(span, width))
        length = bb.emit(relax.op.maximum(bb.emit(relax.op.negative(steps_back)), zero))
        (symbol,) = emit_shape(bb, bb.emit(relax.op.reshape(length, [1])), 1).values
        ramp = bb.emit(relax.op.arange(0, symbol, 1, "int64"))
        indices = bb.emit(relax.op.add(begin, bb.emit(relax.op.multiply(ramp, step))))
        data = bb.emit(relax.op.take(data, indices, axis))
    return data


def slice_by_sizes(
    bb: Builder,
    data: relax.Expr,
    starts: list[Any],
    ends: list[Any],
    axes: Any,
    steps: Any,
) -> relax.Expr | None:
    """Convert Slice by constants and expressions of symbolic sizes to R.strided_slice with bounds
    inside the data. None if a step is not constant, or the sign of a bound is unknown.

    Steps along symbolic sizes go forward: x[s:e:-k] -> flip(x)[-1 - s : -1 - e : k].
    """
    sizes = data.ty.shape.values
    taken = [*range(len(starts))] if axes is None else read_sizes(axes)
    strides = [1] * len(starts) if steps is None else read_sizes(steps)
    if taken is None or strides is None or not all(isinstance(n, int) and n for n in strides):
        return None
    if not taken:
        return data
    taken = [axis % len(sizes) for axis in taken]
    known = [simplify(sizes[axis] + 0) for axis in taken]
    begins, stops = [], []
    for size, start, end, stride in zip(known, starts, ends, strides, strict=True):
        last = size if stride > 0 else simplify(size - 1)
        bounds = []
        for position, most in ((start, last), (end, size)):
            if isinstance(position, int) and abs(position) >= INT_MAX:
                position = LARGEST if position > 0 else -LARGEST
            place = position if stride > 0 else simplify(-1 - position)
            low, high = find_bounds(place)
            if low < 0 <= high:
                return None
            place = place if low >= 0 else simplify(size + place)
            bounds.append(larger(smaller(place, most), 0))
        begins.append(bounds[0])
        stops.append(larger(*bounds))
    is_known = all(isinstance(size, int) for size in known)
    for at, stride in enumerate(strides):
        if stride > 0:
            continue
        if is_known:
            # One operator, which moves integers as they are. An end before the axis is -size - 1.
            turned = known[at] - 1 - stops[at]
            begins[at] = known[at] - 1 - begins[at]
            stops[at] = turned if turned >= 0 else -known[at] - 1
        else:
            data = bb.emit(relax.op.flip(data, taken[at]))
            strides[at] = -stride
    cut = (taken, begins, stops, strides)
    return relax.op.strided_slice(data, *cut, assume_inbound=not is_known)


def check_sections(size: int | None, count: int) -> None:
    """Refuse sections of equal size, but for a smaller last one, that do not fit in an axis."""
    if size is not None and (count - 1) * -(-size // count) > size:
        raise Refusal(
            f"it cuts {format_count(size, 'element')} into {format_count(count, 'part')} of "
            f"{-(-size // count)}; allowed: a last part of at least 0"
        )


def convert_split(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Convert Split of an axis or into parts whose sizes TVM does not compare, or does not take.

    Parts of 2, n and 1 of (k, 4)   ->   reshape to (n + 3, 4), then strided_slice [0 : 2],
                                         [2 : n + 2], [n + 2 : n + 3]

    A reshape is checked at run time if its sizes are not known to fit. Known sizes are left to TVM,
    except parts without elements. So are the unequal parts that opset 18 allows.
    """
    data, parts = (*inputs, None)[:2]
    shape, axis = list_dimensions(data.ty), int(attrs.get("axis", 0)) % data.ty.ndim
    size = static_size(shape[axis]) if shape else None
    is_known = size is not None or not shape
    given = attrs.get("split") if parts is None else read_sizes(parts)
    if given is None and parts is None:
        count = attrs["tvm_custom"]["num_outputs"]
        check_sections(size, count)
        if is_known or opset >= 18:
            return None
        given = [shape[axis] // count] * count
    elif given is None:
        given = emit_shape(bb, parts, count_sizes(parts)).values
    elif any(isinstance(size, int) and size < 0 for size in given):
        raise Refusal(f"its parts have the sizes {[*given]}; allowed: sizes of at least 0")
    elif is_known and 0 not in given and all(isinstance(size, int) for size in given):
        return None
    ends = list(accumulate(given))
    if shape and not Analyzer().can_prove_equal(shape[axis], ends[-1]):
        shape[axis] = ends[-1]
        data = bb.emit(relax.op.reshape(data, shape))
    cut = [
        bb.emit(relax.op.strided_slice(data, [axis], [begin], [end], assume_inbound=True))
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    return relax.Tuple(cut) if len(cut) > 1 else cut[0]


def pad_at_run_time(bb: Builder, inputs: Sequence[Any], mode: bytes) -> relax.Expr:
    """Convert Pad with run-time counts to one R.take per axis, with the indices -before ... size +
    after - 1.

    The mode maps these indices into the data. A constant pad has the fill outside the data.
    Negative counts crop.

    Raises:
        Refusal: the axes are not constant, or their number is unknown.
    """
    operands: list[Any] = [*inputs, None, None]
    data, pads, fill, axes = operands[:4]
    rank = data.ty.ndim
    padded = [*range(rank)] if axes is None else read_sizes(axes)
    if padded is None:
        raise NotConstant("axes")
    zero, one = relax.const(0, "int64"), relax.const(1, "int64")
    sizes = emit_sizes(bb, data)
    if mode == b"constant" and fill is None:
        fill = relax.const(np.zeros((), data.ty.dtype.dtype), data.ty.dtype.dtype)
    elif fill is not None:
        fill = bb.emit(relax.op.reshape(fill, relax.ShapeExpr([])))

    for at, axis in enumerate(axis % rank for axis in padded):
        size, before = emit_item(bb, sizes, axis), emit_item(bb, pads, at)
        after = emit_item(bb, pads, at + len(padded))
        length = bb.emit(relax.op.add(size, bb.emit(relax.op.add(before, after))))
        (symbol,) = emit_shape(bb, bb.emit(relax.op.reshape(length, [1])), 1).values
        ramp = bb.emit(relax.op.arange(0, symbol, 1, "int64"))
        place = bb.emit(relax.op.subtract(ramp, before))
        last = bb.emit(relax.op.subtract(size, one))
        if mode == b"wrap":
            inside = bb.emit(relax.op.floor_mod(place, size))
        elif mode == b"reflect":
            # forward and backward: 0 1 2 1 0 1 2 ..., of period 2 (size - 1)
            period = bb.emit(relax.op.maximum(bb.emit(relax.op.add(last, last)), one))
            rest = bb.emit(relax.op.floor_mod(place, period))
            inside = bb.emit(relax.op.minimum(rest, bb.emit(relax.op.subtract(period, rest))))
            inside = bb.emit(relax.op.minimum(inside, last))
        else:
            inside = bb.emit(relax.op.minimum(bb.emit(relax.op.maximum(place, zero)), last))
        data = bb.emit(relax.op.take(data, inside, axis))
        if mode == b"constant":
            is_data = bb.emit(relax.op.equal(place, inside))
            others = [other for other in range(rank) if other != axis]
            is_data = bb.emit(relax.op.expand_dims(is_data, others)) if others else is_data
            data = bb.emit(relax.op.where(is_data, data, fill))
    return data


def fill_outside(
    bb: Builder,
    padded: relax.Expr,
    data: relax.Expr,
    widths: Mapping[int, tuple[int, int]],
    fill: relax.Expr,
) -> relax.Expr:
    """Write the fill into padded data at the positions outside the data.

    Args:
        bb: The builder.
        padded: The data after padding by the widths.
        data: The data before padding.
        widths: Axis -> number of positions before and after the data. Negative numbers crop.
        fill: One number.
    """
    rank = data.ty.ndim
    fill = bb.emit(relax.op.reshape(fill, relax.ShapeExpr([])))
    for axis, (before, after) in widths.items():
        size = data.ty.shape.values[axis]
        places = bb.emit(relax.op.arange(-before, size + after, 1, "int64"))
        bounds = (relax.const(0, "int64"), emit_tensor(bb, size))
        inside = bb.emit(
            relax.op.logical_and(
                bb.emit(relax.op.greater_equal(places, bounds[0])),
                bb.emit(relax.op.less(places, bounds[1])),
            )
        )
        others = [other for other in range(rank) if other != axis % rank]
        inside = bb.emit(relax.op.expand_dims(inside, others)) if others else inside
        padded = bb.emit(relax.op.where(inside, padded, fill))
    return padded


def limit_range(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> None:
    """Refuse a Range whose result would fill the memory, because TVM computes it at once."""
    values = [constant_value(given) for given in inputs]
    if all(value is not None for value in values):
        start, limit, step = (float(value.item()) for value in values)
        check_constant(math.inf if step == 0 else (limit - start) / step)


def check_constant(size: float) -> None:
    """Raise ValueError if a constant of `size` elements would fill the memory."""
    if size > MAX_CONSTANT:
        raise Refusal(f"its result has {size:.3g} elements; supported: {MAX_CONSTANT}")
