"""Operators whose numpy form writes large results to where kernels read them in place.

numpy aligns arrays to 16 bytes, so that a kernel which reads one copies it first. Beyond 32 MB the
system also clears each new page: concat of 50 MB then takes twice the time. `empty_aligned` spares
both. The numbers equal the reference's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relayquant.base.runtime import empty_aligned, find_memory_axes, invert_axes
from relayquant.ir.reference.relax import OPERATORS, OperatorFunction
from relayquant.ir.reference.relax.row import to_ints

#: Bytes of a result from which on its place counts. A copy of fewer takes no longer than to find
#: the place.
FEWEST_BYTES = 1 << 16


def allocate(shape: Sequence[int], dtype: Any, axes: tuple[int, ...]) -> np.ndarray:
    """Return an array whose axes lie in memory in the order `axes`, outermost first."""
    return empty_aligned([shape[axis] for axis in axes], dtype).transpose(invert_axes(axes))


def join_arrays(args: list[Any], attrs: Any) -> np.ndarray:
    """Compute `concat`. The result has the memory order of the first array.

    Raises:
        ValueError: As numpy's `concatenate`.
    """
    parts, axis = args[0], 0 if attrs.axis is None else int(attrs.axis)
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    joined = allocate(shape, np.result_type(*parts), find_memory_axes(parts[0]))
    return np.concatenate(parts, axis, out=joined)


def pad_array(args: list[Any], attrs: Any) -> Any:
    """Compute `nn.pad`. With constant values, the result has the memory order of the data."""
    (data,), widths = args, np.reshape(to_ints(attrs.pad_width), (-1, 2))
    if str(attrs.pad_mode) != "constant" or data.nbytes < FEWEST_BYTES or widths.min() < 0:
        return OPERATORS["nn.pad"](args, attrs)
    before, after = widths.T
    padded = allocate(data.shape + before + after, data.dtype, find_memory_axes(data))
    value, rest = data.dtype.type(attrs.pad_value), padded
    for axis, (first, size) in enumerate(zip(before.tolist(), data.shape, strict=True)):
        turned = rest.swapaxes(0, axis)
        turned[:first], turned[first + size :] = value, value
        rest = turned[first : first + size].swapaxes(0, axis)
    rest[...] = data
    return padded


def make_aligned(function: np.ufunc, *first: np.float32) -> OperatorFunction:
    """Make function(*first, *operands) of float32 values. The result has the memory order of the
    operand that has its shape.
    """

    def compute(args: list[Any], attrs: Any) -> Any:
        args = [*first, *args]
        arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
        largest = max(arrays, key=lambda array: array.nbytes)
        if largest.nbytes < FEWEST_BYTES or not all(map(is_plain, args)):
            return function(*args)
        if np.broadcast_shapes(*(array.shape for array in arrays)) != largest.shape:
            return function(*args)
        out = allocate(largest.shape, "float32", find_memory_axes(largest))
        return function(*args, out=out)

    return compute


def is_plain(arg: Any) -> bool:
    """Whether an operand is float32, or a number that takes the dtype of others."""
    return arg.dtype == np.float32 if isinstance(arg, np.ndarray | np.generic) else True


#: operator without "relax." -> its function
ALIGNED: Mapping[str, OperatorFunction] = {
    "concat": join_arrays,
    "nn.pad": pad_array,
    "nn.relu": make_aligned(np.maximum, np.float32(0)),
    "add": make_aligned(np.add),
    "divide": make_aligned(np.divide),
    "maximum": make_aligned(np.maximum),
    "minimum": make_aligned(np.minimum),
    "multiply": make_aligned(np.multiply),
    "subtract": make_aligned(np.subtract),
}
