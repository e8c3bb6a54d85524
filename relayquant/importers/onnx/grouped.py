"""First stage, ONNX: weights of few bits in groups, com.microsoft.MatMulNBits and DequantizeLinear
with blocks.

DequantizeLinear with blocks becomes all rows of a grouped weight, in which a product and a gather
then find the codes:

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

from relayquant.dialect import qnn
from relayquant.errors import format_count
from relayquant.importers.refusal import NotConstant, Refusal
from relayquant.packing import count_bytes, count_groups, middle_code, pack_codes, unpack_codes
from relayquant.qtypes import INTEGER_LIMITS, SCALE_DTYPES
from relayquant.rewrite.graph import call_name, constant_value, tensor_dtype

TAKE, TRANSPOSE = "relax.qnn.grouped_take", "relax.permute_dims"
#: Bits of a MatMulNBits that lie in bytes as ours do.
NBITS = (2, 4, 8)


@dataclass(frozen=True, eq=False)
class GroupedOperands:
    """Codes, scales and zero points of a weight (N, K), and bits, group size and K."""

    parts: tuple[relax.Expr, ...]
    form: tuple[int, int, int]


def convert_matmul_nbits(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """com.microsoft.MatMulNBits(x, codes, scales, zero points, g_idx, bias) -> R.qnn.grouped_dense.

    Rows of codes (N, groups, bytes of a group) lie as ours, but for what fills the last group;
    without zero points they are the middle. accuracy_level, a hint, is not looked at: data is
    float32.

    Raises:
        Refusal: other bits; a weight that is computed; columns in another order (g_idx); data or
            scales of another type; zero points that are no codes.
    """
    data, codes, scale, zero, order, bias = (*inputs, *(None,) * 6)[:6]
    bits, size = int(attrs.get("bits", 4)), int(attrs["block_size"])
    rows, features = int(attrs["N"]), int(attrs["K"])
    if bits not in NBITS:
        raise Refusal(
            f"its weight has {format_count(bits, 'bit')}; supported: {', '.join(map(str, NBITS))}"
        )
    if order is not None:
        raise Refusal("it has g_idx, an order of columns; supported: groups of neighbours")
    if tensor_dtype(data) != "float32":
        raise Refusal(f"its data is {tensor_dtype(data)}; supported: float32")
    arrays = [constant_value(each) if each is not None else None for each in (codes, scale, zero)]
    if arrays[0] is None or arrays[1] is None or (zero is not None and arrays[2] is None):
        raise NotConstant("weight, scales and zero points")
    groups = count_groups(features, size)
    if min(size, rows, features) < 1 or arrays[0].size != rows * groups * (size * bits // 8):
        raise Refusal(
            f"its weight has {format_count(arrays[0].size, 'byte')}; allowed with N={rows}, "
            f"K={features}, block_size={size}: {rows * groups * (size * bits // 8)}"
        )
    scales = read_scales(arrays[1], (rows, groups))
    packed = arrays[0].reshape(rows, -1)[:, : count_bytes(features, bits)]
    weight = make_operands(
        np.ascontiguousarray(packed),
        scales,
        read_nbits_zeros(arrays[2], bits, (rows, groups)),
        (bits, size, features),
    )
    value = qnn.grouped_dense(data, 1.0, *weight.parts, *weight.form)
    return value if bias is None else relax.op.add(bb.emit(value), bias)


def read_scales(array: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Scales (N, groups).

    Raises:
        Refusal: another type or number, or one that is not finite.
    """
    if str(array.dtype) not in SCALE_DTYPES:
        raise Refusal(f"its scales are {array.dtype}; supported: {', '.join(SCALE_DTYPES)}")
    if array.size != shape[0] * shape[1]:
        raise Refusal(f"it has {format_count(array.size, 'scale')}; allowed: {shape[0] * shape[1]}")
    if not np.isfinite(array).all():
        raise Refusal("its scales are not all finite; allowed: finite numbers")
    return array.reshape(shape)


def read_nbits_zeros(array: np.ndarray | None, bits: int, shape: tuple[int, int]) -> np.ndarray:
    """Zero points (N, groups) as codes; the middle where there are none.

    Packed, each row begins with a byte of its own; of the type of the scales, they are not.

    Raises:
        Refusal: another number of them, or one that is no code.
    """
    if array is None:
        return np.full(shape, middle_code(bits), "uint8")
    if array.dtype != np.uint8:
        codes = np.rint(array).astype("int64")
        if array.size != shape[0] * shape[1] or (codes != array).any():
            raise Refusal("its zero points are no whole numbers, one for each scale")
        if codes.min() < 0 or codes.max() >= 1 << bits:
            raise Refusal(f"its zero points are {codes.min()}..{codes.max()}; allowed: codes")
        return codes.reshape(shape).astype("uint8")
    if array.size != shape[0] * count_bytes(shape[1], bits):
        raise Refusal(
            f"its zero points have {format_count(array.size, 'byte')}; allowed: "
            f"{shape[0] * count_bytes(shape[1], bits)}"
        )
    return unpack_codes(array.reshape(shape[0], -1), bits, shape[1])


def make_operands(
    packed: np.ndarray, scale: np.ndarray, zero: np.ndarray, form: tuple[int, int, int]
) -> GroupedOperands:
    """The constants; one zero point where all are the middle."""
    middle = middle_code(form[0])
    zero = np.array(middle, "uint8") if (zero == middle).all() else np.ascontiguousarray(zero)
    return GroupedOperands(tuple(relax.const(part) for part in (packed, scale, zero)), form)


def dequantize_blocks(
    bb: relax.BlockBuilder, inputs: Sequence[Any], axis: int, size: int
) -> relax.Expr:
    """DequantizeLinear(w, scales, zero points) in blocks of `size` along `axis` of a matrix -> all
    rows of a grouped weight; transposed where the blocks lie along axis 0.

    Integers get the fewest bits that hold them all, with their zero points.

    Raises:
        Refusal: not a constant matrix of integers of 8 bits or fewer, or scales that do not fit.
    """
    weight, scale, zero = (*inputs, None)[:3]
    array, scales = constant_value(weight), constant_value(scale)
    zeros = None if zero is None else constant_value(zero)
    if array is None or scales is None or (zero is not None and zeros is None):
        raise NotConstant("blocks (block_size), their scales and zero points")
    if array.ndim != 2 or str(array.dtype) not in ("int8", "uint8"):
        raise Refusal(
            f"it has blocks (block_size) of {array.dtype} in "
            f"{format_count(array.ndim, 'dimension')}; supported: matrices of 8 bits or fewer"
        )
    axis %= 2
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


def choose_bits(*arrays: np.ndarray) -> tuple[int, int]:
    """(fewest bits whose codes hold all integers of some arrays of one dtype, what is added)."""
    low = min(int(array.min(initial=0)) for array in arrays)
    high = max(int(array.max(initial=0)) for array in arrays)
    is_signed = INTEGER_LIMITS[str(arrays[0].dtype)][0] < 0
    fitting = (
        (bits, shift)
        for bits in NBITS
        for shift in (middle_code(bits) if is_signed else 0,)
        if low + shift >= 0 and high + shift < 1 << bits
    )
    return next(fitting)  # 8 bits hold every integer of 8 bits


def find_rows(bb: relax.BlockBuilder, expr: relax.Expr) -> tuple[GroupedOperands, bool] | None:
    """(the grouped weight that a value is all rows of, whether it is transposed); None for any
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
            axes = value.attrs.axes
            is_swapped ^= axes is None or [int(axis) % 2 for axis in axes] == [1, 0]
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
    bb: relax.BlockBuilder, data: relax.Expr, weight: relax.Expr, *, is_transposed: bool = False
) -> relax.Expr | None:
    """data (..., K) by a weight (K, N), (N, K) with `is_transposed`, that is rows of a grouped
    weight; None of anything else.
    """
    found = find_rows(bb, weight)
    if found is None or found[1] is is_transposed:
        return None
    if tensor_dtype(data) != "float32" or data.ty.ndim < 1:
        return None
    return qnn.grouped_dense(data, 1.0, *found[0].parts, *found[0].form)


def multiply_matmul(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any]
) -> relax.Expr | None:
    """MatMul by the transposed rows of a grouped weight; None of anything else."""
    return multiply_rows(bb, inputs[0], inputs[1])


def multiply_gemm(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any]
) -> relax.Expr | None:
    """Gemm, alpha * x @ w + beta * b, of rows of a grouped weight; None of anything else."""
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


#: Products of ONNX, and what reads the codes where their weight is rows of a grouped one.
GROUPED_PRODUCTS = {"MatMul": multiply_matmul, "Gemm": multiply_gemm}


def gather_rows(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any]
) -> relax.Expr | None:
    """Gather of rows of a grouped weight; None of anything else."""
    data, indices = inputs[:2]
    found = find_rows(bb, data)
    if found is None or found[1] or int(attrs.get("axis", 0)) % 2:
        return None
    if tensor_dtype(indices) not in ("int32", "int64"):
        return None
    return qnn.grouped_take(indices, *found[0].parts, *found[0].form)
