"""ONNX reader: weights of few bits in groups, from com.microsoft.MatMulNBits and from
DequantizeLinear with blocks.

DequantizeLinear with blocks becomes all rows of a grouped weight. A product or a gather of these
rows then reads the codes:

    matmul(x, permute_dims(grouped_take(0..N-1, w)))  ->  grouped_dense(x, w), also of Gemm
    take(grouped_take(0..N-1, w), i, axis=0)          ->  grouped_take(i, w)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.base.packing import count_bytes, count_groups, middle_code, pack_codes, unpack_codes
from relayquant.base.qtypes import INTEGER_LIMITS, SCALE_DTYPES
from relayquant.errors import format_count
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.refusal import NotConstant, Refusal
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype
from relayquant.ir.rewrite.moves import list_permutation

TAKE, TRANSPOSE = "relax.qnn.grouped_take", "relax.permute_dims"
#: Bits of a MatMulNBits whose codes are packed as ours are.
NBITS = (2, 4, 8)


@dataclass(frozen=True, eq=False)
class GroupedOperands:
    """Codes, scales and zero points of a weight (N, K), and bits, group size and K."""

    parts: tuple[relax.Expr, ...]
    form: tuple[int, int, int]


def convert_matmul_nbits(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert com.microsoft.MatMulNBits(x, codes, scales, zero points, g_idx, bias) to
    R.qnn.grouped_dense.

    Rows of codes (N, groups, bytes of a group) are packed as ours, except for the padding of the
    last group. Without zero points, the zero point is the middle. With g_idx, the columns of the
    weight and of the data are sorted by group. The hint accuracy_level is ignored: data is float32.

    Raises:
        Refusal: the bits are not supported, the weight is computed at run time, g_idx has groups of
            another size, or data or scales have an unsupported type.
    """
    data, codes, scale, zero, order, bias = (*inputs, *(None,) * 6)[:6]
    bits, size = int(attrs.get("bits", 4)), int(attrs["block_size"])
    rows, features = int(attrs["N"]), int(attrs["K"])
    if bits not in NBITS:
        raise Refusal(
            f"its weight has {format_count(bits, 'bit')}; supported: {', '.join(map(str, NBITS))}"
        )
    if tensor_dtype(data) != "float32":
        raise Refusal(f"its data is {tensor_dtype(data)}; supported: float32 and float16")
    given = [each for each in (codes, scale, zero, order) if each is not None]
    arrays = {id(each): constant_value(each) for each in given}
    if any(array is None for array in arrays.values()):
        raise NotConstant("weight, scales, zero points and g_idx")
    packed, scales, zeros, groups_of = (
        arrays.get(id(each)) for each in (codes, scale, zero, order)
    )
    groups = count_groups(features, size)
    if (
        packed is None
        or min(size, rows, features) < 1
        or (packed.size != rows * groups * (size * bits // 8))
    ):
        raise Refusal(
            f"its weight has {format_count(packed.size, 'byte')}; allowed with N={rows}, "
            f"K={features}, block_size={size}: {rows * groups * (size * bits // 8)}"
        )
    scales = read_scales(scales, (rows, groups))
    packed = packed.reshape(rows, -1)[:, : count_bytes(features, bits)]
    zeros, offsets = read_nbits_zeros(zeros, bits, scales)
    if groups_of is not None:
        columns, places = sort_columns(groups_of.ravel()[:features], features, size)
        packed = pack_codes(unpack_codes(packed, bits, features)[:, columns], bits)
        scales, zeros = scales[:, places], zeros[:, places]
        offsets = None if offsets is None else offsets[:, places]
        data = bb.emit(relax.op.take(data, relax.const(columns, "int64"), axis=-1))
    weight = make_operands(
        np.ascontiguousarray(packed), np.ascontiguousarray(scales), zeros, (bits, size, features)
    )
    value = qnn.grouped_dense(data, 1.0, *weight.parts, *weight.form)
    if offsets is not None:
        value = relax.op.add(bb.emit(value), multiply_sums(bb, data, offsets, size))
    return value if bias is None else relax.op.add(bb.emit(value), bias)


def sort_columns(groups: np.ndarray, features: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (columns sorted by group, the groups in this order). A smaller group comes last.

    Args:
        groups: Group of each column (g_idx).
        features: Number of columns.
        size: Group size.

    Raises:
        Refusal: g_idx does not give one group per column, or more than one group has another size.
    """
    count = count_groups(features, size)
    if len(groups) != features or groups.min() < 0 or groups.max() >= count:
        raise Refusal(
            f"g_idx has {format_count(len(groups), 'entry')} up to {groups.max()}; allowed: "
            f"{features} from 0 to {count - 1}"
        )
    sizes = np.bincount(groups, minlength=count)
    places = np.argsort(-sizes, kind="stable")
    if (sizes[places[:-1]] != size).any() or sizes.max() > size:
        raise Refusal(f"g_idx has groups of {sorted({*sizes.tolist()})}; allowed: {size} each")
    ranks = np.argsort(places)
    return np.argsort(ranks[groups], kind="stable"), places


def multiply_sums(bb: Builder, data: relax.Expr, offsets: np.ndarray, size: int) -> relax.Expr:
    """Emit (sums of the groups of data (..., K)) @ offsets^T. It corrects weights with offsets (N,
    groups) in addition to their codes.
    """
    shape = list(data.ty.shape.values)
    rest = offsets.shape[1] * size - int(shape[-1])
    if rest:
        data = bb.emit(relax.op.nn.pad(data, [0] * (2 * len(shape) - 1) + [rest]))
    parts = relax.ShapeExpr([*shape[:-1], offsets.shape[1], size])
    sums = bb.emit(relax.op.sum(bb.emit(relax.op.reshape(data, parts)), -1))
    matrix = relax.const(np.ascontiguousarray(offsets.T), "float32")
    return bb.emit(relax.op.matmul(sums, matrix))


def read_scales(array: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the scales (N, groups).

    Raises:
        Refusal: the type or number is wrong, or a scale is not finite.
    """
    if str(array.dtype) not in SCALE_DTYPES:
        raise Refusal(f"its scales are {array.dtype}; supported: {', '.join(SCALE_DTYPES)}")
    if array.size != shape[0] * shape[1]:
        raise Refusal(f"it has {format_count(array.size, 'scale')}; allowed: {shape[0] * shape[1]}")
    if not np.isfinite(array).all():
        raise Refusal("its scales are not all finite; allowed: finite numbers")
    return array.reshape(shape)


def read_nbits_zeros(
    array: np.ndarray | None, bits: int, scales: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (zero points (N, groups) as codes, offsets of the groups, float32, or None).

    Without zero points, the zero point is the middle. A float zero point that is not a code becomes
    the middle and an offset:

        (q - z) * s = (q - middle) * s + (middle - z) * s

    Packed zero points have rows that begin at a byte boundary. Zero points of a float type are not
    packed.

    Raises:
        Refusal: the number of zero points is wrong, or one is not finite.
    """
    shape, middle = scales.shape, middle_code(bits)
    if array is None:
        return np.full(shape, middle, "uint8"), None
    if array.dtype != np.uint8:
        if array.size != scales.size or not np.isfinite(array).all():
            raise Refusal(
                f"it has {format_count(array.size, 'zero point')}; allowed: {scales.size}, finite "
                "numbers, one for each scale"
            )
        zeros = array.reshape(shape).astype("float32")
        if (zeros == np.rint(zeros)).all() and zeros.min() >= 0 and zeros.max() < 1 << bits:
            return zeros.astype("uint8"), None
        return np.full(shape, middle, "uint8"), (middle - zeros) * scales.astype("float32")
    if array.size != shape[0] * count_bytes(shape[1], bits):
        raise Refusal(
            f"its zero points have {format_count(array.size, 'byte')}; allowed: "
            f"{shape[0] * count_bytes(shape[1], bits)}"
        )
    return unpack_codes(array.reshape(shape[0], -1), bits, shape[1]), None


def make_operands(
    packed: np.ndarray, scale: np.ndarray, zero: np.ndarray, form: tuple[int, int, int]
) -> GroupedOperands:
    """Make the constants. If all zero points are the middle, one is enough."""
    middle = middle_code(form[0])
    zero = np.array(middle, "uint8") if (zero == middle).all() else np.ascontiguousarray(zero)
    return GroupedOperands(tuple(relax.const(part) for part in (packed, scale, zero)), form)


def dequantize_blocks(bb: Builder, inputs: Sequence[Any], axis: int, size: int) -> relax.Expr:
    """Convert DequantizeLinear(w, scales, zero points) in blocks of `size` along `axis` of a matrix
    to all rows of a grouped weight.

    The rows are transposed if the blocks are along axis 0. Integers get the fewest bits that hold
    them and their zero points. A weight that is not a matrix becomes a float constant.

    Raises:
        Refusal: the weight is not a constant of integers with 8 bits or fewer, or scales do not
            fit.
    """
    weight, scale, zero = (*inputs, None)[:3]
    array, scales = constant_value(weight), constant_value(scale)
    zeros = None if zero is None else constant_value(zero)
    if array is None or scales is None or (zero is not None and zeros is None):
        raise NotConstant("blocks (block_size), their scales and zero points")
    if str(array.dtype) not in ("int8", "uint8") or not -array.ndim <= axis < array.ndim:
        raise Refusal(
            f"it has blocks (block_size) of {array.dtype} along axis {axis} of "
            f"{format_count(array.ndim, 'dimension')}; supported: 8 bits or fewer"
        )
    axis %= array.ndim
    if array.ndim != 2:
        return relax.const(widen_blocks(array, scales, zeros, axis, size), "float32")
    if axis == 0:
        array, scales = array.T, scales.T
        zeros = None if zeros is None else zeros.T
    shape = (array.shape[0], count_groups(array.shape[1], size))
    if scales.shape != shape:
        raise Refusal(
            f"its scales have shape {constant_value(scale).shape}, which does not fit "
            f"block_size={size} along axis {axis}"
        )
    zeros = np.zeros(shape, array.dtype) if zeros is None else zeros.reshape(shape)
    bits, shift = choose_bits(array, zeros)
    codes, centre = ((values.astype("int16") + shift).astype("uint8") for values in (array, zeros))
    found = make_operands(
        pack_codes(codes, bits), read_scales(scales, shape), centre, (bits, size, array.shape[1])
    )
    rows = relax.const(np.arange(len(array), dtype="int64"), "int64")
    value = qnn.grouped_take(rows, *found.parts, *found.form)
    return value if axis == 1 else relax.op.permute_dims(bb.emit(value), [1, 0])


def widen_blocks(
    array: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, axis: int, size: int
) -> np.ndarray:
    """Dequantize blocks along an axis: (array - zeros) * scales in float32.

    Raises:
        Refusal: scales or zero points do not fit.
    """
    wanted = tuple(count_groups(n, size) if at == axis else n for at, n in enumerate(array.shape))
    zeros = np.zeros(wanted, array.dtype) if zeros is None else zeros
    if scales.shape != wanted or zeros.shape != wanted:
        raise Refusal(
            f"its scales have shape {scales.shape} and its zero points {zeros.shape}; allowed "
            f"with block_size={size} along axis {axis}: {wanted}"
        )
    spread = [
        np.repeat(each.astype("float32"), size, axis).take(range(array.shape[axis]), axis)
        for each in (zeros, scales)
    ]
    return (array.astype("float32") - spread[0]) * spread[1]


def choose_bits(*arrays: np.ndarray) -> tuple[int, int]:
    """Return (fewest bits whose codes hold all integers of arrays of one dtype, offset from integer
    to code).
    """
    low = min(int(array.min(initial=0)) for array in arrays)
    high = max(int(array.max(initial=0)) for array in arrays)
    is_signed = INTEGER_LIMITS[str(arrays[0].dtype)][0] < 0
    fitting = (
        (bits, shift)
        for bits in NBITS
        for shift in (middle_code(bits) if is_signed else 0,)
        if low + shift >= 0 and high + shift < 1 << bits
    )
    return next(fitting)  # 8 bits hold every 8-bit integer.


def find_rows(bb: Builder, expr: relax.Expr) -> tuple[GroupedOperands, bool] | None:
    """Return (the grouped weight whose rows a value holds, whether it is transposed). None for any
    other value.
    """
    is_swapped = False
    while isinstance(expr, relax.Var | Call):
        value = bb.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        if not isinstance(value, Call):
            if not isinstance(value, relax.Var):
                return None
            expr = value
        elif call_name(value) == TRANSPOSE and value.ty.ndim == 2:
            is_swapped ^= list_permutation(value) == [1, 0]
            expr = value.args[0]
        elif call_name(value) == TAKE:
            rows, codes = constant_value(value.args[0]), constant_value(value.args[1])
            if rows is None or codes is None or not np.array_equal(rows, np.arange(len(codes))):
                return None
            attrs = value.attrs
            form = (int(attrs.bits), int(attrs.group_size), int(attrs.features))
            return GroupedOperands(tuple(value.args[1:]), form), is_swapped
        else:
            return None
    return None


def multiply_rows(
    bb: Builder, data: relax.Expr, weight: relax.Expr, *, is_transposed: bool = False
) -> relax.Expr | None:
    """Multiply data (..., K) by a weight that is rows of a grouped weight: (K, N), or (N, K) with
    `is_transposed`. None for any other weight.
    """
    found = find_rows(bb, weight)
    if found is None or found[1] is is_transposed:
        return None
    if tensor_dtype(data) != "float32" or data.ty.ndim < 1:
        return None
    return qnn.grouped_dense(data, 1.0, *found[0].parts, *found[0].form)


def multiply_matmul(bb: Builder, inputs: Operands, attrs: Attrs) -> relax.Expr | None:
    """Convert MatMul with transposed rows of a grouped weight. None for any other weight."""
    return multiply_rows(bb, inputs[0], inputs[1])


def multiply_gemm(bb: Builder, inputs: Operands, attrs: Attrs) -> relax.Expr | None:
    """Convert Gemm, alpha * x @ w + beta * b, with rows of a grouped weight. None for any other
    weight.
    """
    data, weight, bias = (*inputs, None)[:3]
    if attrs.get("transA", 0):
        data = bb.emit(relax.op.permute_dims(data, [1, 0]))
    value = multiply_rows(bb, data, weight, is_transposed=bool(attrs.get("transB", 0)))
    if value is None:
        return None

    def scale(expr: relax.Expr, factor: float) -> relax.Expr:
        return expr if factor == 1 else relax.op.multiply(expr, relax.const(factor, "float32"))

    value = scale(bb.emit(value), float(attrs.get("alpha", 1.0)))
    if bias is None:
        return value
    addend = bb.normalize(scale(bias, float(attrs.get("beta", 1.0))))
    return relax.op.add(bb.normalize(value), addend)


#: Products of ONNX -> conversions that read the codes if the weight is rows of a grouped weight.
GROUPED_PRODUCTS = {"MatMul": multiply_matmul, "Gemm": multiply_gemm}


def gather_rows(bb: Builder, inputs: Operands, attrs: Attrs) -> relax.Expr | None:
    """Convert Gather of rows of a grouped weight. None for any other data."""
    data, indices = inputs[:2]
    found = find_rows(bb, data)
    if found is None or found[1] or int(attrs.get("axis", 0)) % 2:
        return None
    if tensor_dtype(indices) not in ("int32", "int64"):
        return None
    return qnn.grouped_take(indices, *found[0].parts, *found[0].form)
