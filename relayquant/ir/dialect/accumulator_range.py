"""Dialect: the exact range of the sums in a convolution or matrix product, and the accumulator
dtype.

The accumulator is int32 if no input can overflow it, else int64. int64 cannot overflow: a product
of two 16-bit integers is below 2^32, so that 2^31 products would be needed. The range is computed
when an integer operator is made and when a kernel is chosen.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.ir import Call

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.ir.rewrite.graph import constant_value, static_size, tensor_dtype

BATCH_MATMUL = "relax.qnn.batch_matmul"
#: convolutions and matrix products
PRODUCTS = (
    "relax.qnn.conv1d",
    "relax.qnn.conv2d",
    "relax.qnn.conv2d_transpose",
    "relax.qnn.dense",
    BATCH_MATMUL,
)

Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]

#: accumulator dtypes, the preferred one first
SUM_DTYPES = ("int32", "int64")
#: number of weights that are cast to int64 at a time, to save memory
BLOCK = 1 << 20


def choose_sum_dtype(lowest: Any, highest: Any) -> str:
    """Return "int32" if it holds all integers from `lowest` to `highest`, else "int64".

    Both may be numbers or arrays.
    """
    low, high = INTEGER_LIMITS[SUM_DTYPES[0]]
    is_inside = np.min(lowest, initial=0) >= low and np.max(highest, initial=0) <= high
    return SUM_DTYPES[0] if is_inside else SUM_DTYPES[1]


def find_span(dtype: str, zero_point: NDArray[np.int32] | None) -> tuple[int, int]:
    """Return the smallest and largest q - zero_point of a dtype, with 0 included.

    `zero_point` is None if it is unknown.
    """
    low, high = INTEGER_LIMITS[dtype]
    if zero_point is None:
        return low - high, high - low
    return min(low - int(zero_point.max()), 0), max(high - int(zero_point.min()), 0)


def multiply_spans(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest and largest product of one integer from each span."""
    ends = [a * b for a in left for b in right]
    return min(ends), max(ends)


def choose_total_dtype(dtype: str, zero_point: Any, count: int | None) -> str:
    """Choose the accumulator dtype for a sum of `count` values q - zero_point.

    `count` is None if it is unknown. `zero_point` is a Relax expression.
    """
    if count is None:
        return SUM_DTYPES[1]
    low, high = find_span(dtype, constant_value(zero_point))
    return choose_sum_dtype(low * count, high * count)


def choose_product_dtype(call: Call) -> str:
    """Choose the accumulator dtype for the product in a call of qnn.mul."""
    spans = (
        find_span(tensor_dtype(value), constant_value(zero))
        for value, zero in ((call.args[0], call.args[3]), (call.args[1], call.args[5]))
    )
    return choose_sum_dtype(*multiply_spans(*spans))


def choose_accumulator_dtype(
    call: Call,
    weight: NDArray[Any] | None = None,
    bias: NDArray[Any] | None = None,
    *,
    is_dynamic: bool = False,
) -> str:
    """Choose the accumulator dtype of a convolution or matrix product.

    `bias` holds integers at the scale of the accumulator. The other arguments are described at
    `bound_sums`.
    """
    added = np.zeros(1, "int64") if bias is None else bias.reshape(-1).astype("int64")

    def choose(bounds: Bounds | None) -> str:
        if bounds is None:
            return SUM_DTYPES[1]
        return choose_sum_dtype(bounds[0] + np.minimum(added, 0), bounds[1] + np.maximum(added, 0))

    # The dtypes alone decide most operators. Only the others need a pass over the weight.
    rough = choose(bound_by_dtypes(call, is_dynamic=is_dynamic))
    if rough == SUM_DTYPES[0]:
        return rough
    return choose(bound_sums(call, weight, is_dynamic=is_dynamic))


def bound_sums(
    call: Call, weight: NDArray[Any] | None = None, *, is_dynamic: bool = False
) -> Bounds | None:
    """Return (lowest, highest) per output channel over all sums and partial sums that an input can
    cause.

    The result is None if the number of products is unknown. With data - zero point within a..b,
    where a <= 0 <= b: high = sum over k of max(w_k a, w_k b), and low is the sum of the minima. If
    the weight is not constant, one entry stands for all channels.

    Args:
        call: qnn.conv1d, conv2d, conv2d_transpose, dense or batch_matmul.
        weight: The constant that will replace the second operand, if the call has a variable there.
        is_dynamic: Whether the data zero point is chosen at run time.
    """
    weight = constant_value(call.args[1]) if weight is None else weight
    data_zero, weight_zero = (constant_value(arg) for arg in call.args[2:4])
    span = find_span(tensor_dtype(call.args[0]), None if is_dynamic else data_zero)
    if weight is None or weight_zero is None:
        return bound_by_dtypes(call, is_dynamic=is_dynamic)
    rows = split_channels(call, weight)
    zeros = np.broadcast_to(weight_zero.reshape(-1), len(rows)).astype("int64")
    lowest, highest = (np.zeros(len(rows), "int64") for _ in range(2))
    step = max(BLOCK // max(rows.shape[1], 1), 1)
    for start in range(0, len(rows), step):
        block = slice(start, start + step)
        centred = rows[block].astype("int64") - zeros[block, None]
        ends = centred * span[0], centred * span[1]
        lowest[block], highest[block] = np.minimum(*ends).sum(1), np.maximum(*ends).sum(1)
    return lowest, highest


def bound_by_dtypes(call: Call, *, is_dynamic: bool) -> Bounds | None:
    """Bound the sums like `bound_sums`, from the dtypes alone. The result has one entry."""
    length = count_products(call)
    if length is None:
        return None
    data_zero, weight_zero = (constant_value(arg) for arg in call.args[2:4])
    low, high = multiply_spans(
        find_span(tensor_dtype(call.args[0]), None if is_dynamic else data_zero),
        find_span(tensor_dtype(call.args[1]), weight_zero),
    )
    return np.array([length * low]), np.array([length * high])


def count_products(call: Call) -> int | None:
    """Return the number of products in one sum, or None if it is symbolic or unknown."""
    shape = getattr(call.args[1].ty.shape, "values", None)
    if shape is None:
        return None
    sizes = [static_size(size) for size in shape]
    if call.op.name in ("relax.qnn.dense", BATCH_MATMUL):
        return sizes[-1]
    letters = str(call.attrs.kernel_layout)
    of_output = letters.index("O")
    if None in sizes:
        return None
    count = math.prod(size for i, size in enumerate(sizes) if i != of_output and size is not None)
    is_transposed = call.op.name == "relax.qnn.conv2d_transpose"
    return count // int(call.attrs.groups) if is_transposed else count


def split_channels(call: Call, weight: NDArray[Any]) -> NDArray[Any]:
    """Reshape a weight to (output channels, products in one sum).

    For a transposed convolution, the second axis holds the products of all kernel positions.
    """
    if call.op.name in ("relax.qnn.dense", BATCH_MATMUL):
        return weight.reshape(-1, weight.shape[-1])
    axis = str(call.attrs.kernel_layout).index("O")
    if call.op.name == "relax.qnn.conv2d_transpose":
        inputs = str(call.attrs.kernel_layout).index("I")
        weight, groups = np.moveaxis(weight, (inputs, axis), (0, 1)), int(call.attrs.groups)
        grouped = weight.reshape(groups, -1, *weight.shape[1:])
        return np.moveaxis(grouped, 2, 1).reshape(groups * weight.shape[1], -1)
    return np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
