"""The numpy library for rows: numpy functions, and functions with the reference's order of
operations.

Integers are rounded from these floats, so compiled code must compute the same floats. Sums along
rows and softmax therefore have a fixed order of operations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from relayquant.ir.reference.convolution import pad_constant
from relayquant.ir.reference.relax import windows
from relayquant.ir.reference.relax.row import align, to_axes, to_ints
from relayquant.ir.reference.relax.vision import select_boxes
from relayquant.ir.reference.relax.windows import truncate_divide, widen, widen_factors
from relayquant.ir.reference.row_arithmetic import mean_along, softmax_along
from relayquant.ir.reference.unary import Unary

Array = np.ndarray[Any, Any]


def find_limits(dtype: str) -> tuple[Any, Any]:
    """Return the lowest and the highest value of a dtype; infinities for floats. They are the
    maximum and the minimum of nothing.
    """
    if dtype == "bool":
        return False, True
    if "float" in dtype:
        return -math.inf, math.inf
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


class Numpy:
    """The functions that rows call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    convolve = staticmethod(windows.convolve)
    convolve_transposed = staticmethod(windows.convolve_transposed)
    max_pool = staticmethod(windows.max_pool)
    avg_pool = staticmethod(windows.avg_pool)
    adaptive_avg_pool = staticmethod(windows.adaptive_avg_pool)
    select_boxes = staticmethod(select_boxes)
    mean_along = staticmethod(mean_along)
    permute = staticmethod(np.transpose)
    take_along = staticmethod(np.take_along_axis)
    widen = staticmethod(widen)

    # ---- arrays, dtypes ----

    @staticmethod
    def convert_numbers(args: list[Any]) -> list[Any]:
        """Return the arguments: numpy accepts numbers among arrays."""
        return args

    @staticmethod
    def find_dtype(value: Any, default: Any) -> str:
        """Return a dtype attribute, or `default` if it is empty."""
        text = "" if value is None else str(value)
        return text if text not in ("", "void") else np.dtype(default).name

    @staticmethod
    def cast(data: Array, dtype: str) -> Array:
        return data.astype(dtype)

    @staticmethod
    def select(data: Array, indices: Array, axis: int) -> Array:
        """Return the elements of an axis at non-negative indices (n,)."""
        return np.take(data, indices, axis=axis)

    @staticmethod
    def find_order(data: Array, axis: int, descending: bool) -> Array:
        """Return the indices that sort the data, NaN last. Equal elements keep their order."""
        if data.dtype.name == "bfloat16":
            data = widen(data)  # numpy knows no NaN among its numbers
        if not descending:
            return np.argsort(data, axis=axis, kind="stable")
        backwards = np.argsort(np.flip(data, axis), axis=axis, kind="stable")
        return data.shape[axis] - 1 - np.flip(backwards, axis)

    # ---- elementwise ----

    @staticmethod
    def compute_unary(unary: Unary, data: Array, **attributes: Any) -> Array:
        return unary.function(data, **attributes)

    @staticmethod
    def rsqrt(data: Array) -> Array:
        return 1 / np.sqrt(data)

    @staticmethod
    def divide(left: Any, right: Any) -> Any:
        """Divide floats truly. Integers truncate toward zero, as in C."""
        if np.asarray(left).dtype.kind in "iu":
            return truncate_divide(left, right)
        return np.divide(left, right)

    @staticmethod
    def power(base: Array, exponent: Array) -> Array:
        """Compute x ** n.

        Integers wrap modulo 2^bits. For integers and n < 0, the result is 1 / x ** -n truncated, or
        0 for x = 0, as in PyTorch.
        """
        if base.dtype.kind != "i" or not (exponent < 0).any():
            return np.power(base, exponent)
        sign = np.where(exponent & 1, base, 1)
        fraction = np.where((base == 1) | (base == -1), sign, 0)
        return np.where(exponent < 0, fraction, np.power(base, np.maximum(exponent, 0)))

    @staticmethod
    def clip(args: list[Any], attrs: Any) -> Array:
        """Clip to float limits. For integer data, the limits are truncated and clipped to its
        dtype.
        """
        data, low, high = args
        if data.dtype.kind in "iu":
            info = np.iinfo(data.dtype)
            low, high = (int(min(max(limit, info.min), info.max)) for limit in (low, high))
        # of two zeros numpy takes the second: the data keep their sign, as in compiled code
        return np.minimum(data.dtype.type(high), np.maximum(data.dtype.type(low), data))

    @staticmethod
    def leaky_relu(args: list[Any], attrs: Any) -> Array:
        return Numpy.scale_negatives(args[0], attrs.alpha)

    @staticmethod
    def scale_negatives(x: Array, slope: Any) -> Array:
        """Compute x where it is positive, and x * slope elsewhere.

        For slopes from 0 to 1 that is the larger of both. max(x, 0) + slope * min(x, 0) is the same
        for finite slopes. Both avoid `np.where`, which predicts a branch for each value.
        """
        if np.all((slope > 0) & (slope <= 1)):
            result = np.asarray(x * slope)  # numpy makes a number of an array without axes
            return np.maximum(x, result, out=result)
        if not np.isfinite(slope).all():
            return np.where(x > 0, x, x * slope)
        zero = x.dtype.type(0)
        result = np.asarray(np.minimum(x, zero) * slope)
        return np.add(result, np.maximum(x, zero), out=result)

    # ---- sums ----

    @staticmethod
    def plain_softmax(x: Array, axis: int) -> Array:
        """Compute softmax in unspecified order of additions."""
        exponential = np.exp(x - x.max(axis=axis, keepdims=True))
        return exponential / exponential.sum(axis=axis, keepdims=True)

    @staticmethod
    def softmax(args: list[Any], attrs: Any) -> Array:
        """Compute softmax. For float32, the order of operations is fixed."""
        (x,), axis = args, int(attrs.axis)
        if not x.size:
            return x
        return softmax_along(x, axis) if x.dtype == np.float32 else Numpy.plain_softmax(x, axis)

    @staticmethod
    def log_softmax(args: list[Any], attrs: Any) -> Array:
        (x,), axis = args, int(attrs.axis)
        if not x.size:
            return x
        shifted = x - x.max(axis=axis, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))

    @staticmethod
    def multiply_matrices(args: list[Any], attrs: Any) -> Array:
        return windows.finish_product(np.matmul(*widen_factors(*args)), args[0])

    @staticmethod
    def sum(data: Array, axes: Any, keepdims: bool) -> Any:
        return np.sum(data, axis=axes, keepdims=keepdims, dtype=data.dtype)

    @staticmethod
    def prod(data: Array, axes: Any, keepdims: bool) -> Any:
        return np.prod(data, axis=axes, keepdims=keepdims, dtype=data.dtype)

    @staticmethod
    def max(data: Array, axes: Any, keepdims: bool) -> Any:
        start = {} if data.size else {"initial": find_limits(data.dtype.name)[0]}
        return np.max(data, axis=axes, keepdims=keepdims, **start)

    @staticmethod
    def min(data: Array, axes: Any, keepdims: bool) -> Any:
        start = {} if data.size else {"initial": find_limits(data.dtype.name)[1]}
        return np.min(data, axis=axes, keepdims=keepdims, **start)

    @staticmethod
    def mean(data: Array, axes: Any, keepdims: bool) -> Any:
        """Compute the mean.

        For float32 rows, the order of additions is fixed. For integers, the wrapping sum is divided
        toward zero.
        """
        if data.dtype.kind not in "iu":
            if axes is None:
                return np.mean(data, keepdims=keepdims)
            result = mean_along(data, axes)
            return result if keepdims else np.squeeze(result, axes)
        total = Numpy.sum(data, axes, keepdims)
        count = data.size // max(np.asarray(total).size, 1)
        wide = np.dtype("uint64" if data.dtype == "uint64" else "int64").type
        return truncate_divide(np.asarray(total).astype(wide), wide(count))

    @staticmethod
    def variance(data: Array, axes: Any, keepdims: bool) -> Any:
        """Compute the population variance. For integers, it is the mean of squares, in uint64, of
        the distances from the truncated mean.
        """
        if data.dtype.kind not in "iu":
            return np.var(data, axis=axes, keepdims=keepdims)
        mean = Numpy.mean(data, axes, True)
        centred = (data.astype(mean.dtype) - mean).astype("uint64")
        return Numpy.mean(centred * centred, axes, keepdims)

    @staticmethod
    def std(data: Array, axes: Any, keepdims: bool) -> Any:
        """Compute the square root of the variance; for integers in float64, rounded down."""
        root = np.sqrt(Numpy.variance(data, axes, keepdims))
        return root if data.dtype.kind not in "iu" else root.astype("int64")

    # ---- shape, indices, creation ----

    @staticmethod
    def pad(args: list[Any], attrs: Any) -> Any:
        (data,), mode = args, str(attrs.pad_mode)
        widths = np.reshape(to_ints(attrs.pad_width), (-1, 2)).tolist()
        if mode == "constant":
            return pad_constant(data, widths, data.dtype.type(attrs.pad_value))
        numpy_mode = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}.get(mode)
        return NotImplemented if numpy_mode is None else np.pad(data, widths, mode=numpy_mode)

    @staticmethod
    def one_hot(args: list[Any], attrs: Any) -> Array:
        indices, on, off = args
        ndim = indices.ndim + 1
        axis = int(attrs.axis) % ndim
        every = align(Numpy(), np.arange(int(attrs.depth)), (axis,), ndim)
        return np.where(np.expand_dims(indices, axis) == every, on, off)

    @staticmethod
    def arange(args: list[Any], attrs: Any) -> Array:
        return np.arange(*args, dtype=Numpy.find_dtype(attrs.dtype, "int64"))

    @staticmethod
    def eye(args: list[Any], attrs: Any) -> Array:
        return np.eye(*args, dtype=Numpy.find_dtype(attrs.dtype, "float32"))

    # ---- affine spaces ----

    @staticmethod
    def quantize(args: list[Any], attrs: Any) -> Any:
        """Compute relax.quantize: clip(round_half_even(x / s) + z) in float32."""
        dtype = np.dtype(str(attrs.out_dtype))
        if dtype.kind not in "iu":
            return NotImplemented
        data, scale, zero_point = align_parameters(args, attrs)
        rounded = np.rint(widen(data) / scale.astype("float32")) + zero_point.astype("float32")
        info = np.iinfo(dtype)
        return np.clip(rounded, info.min, info.max).astype(dtype)

    @staticmethod
    def dequantize(args: list[Any], attrs: Any) -> Any:
        """Compute relax.dequantize: float(int32(q) - z) * s."""
        data, scale, zero_point = align_parameters(args, attrs)
        if data.dtype.kind not in "iu":
            return NotImplemented
        centred = data.astype("int32") - zero_point.astype("int32")
        return centred.astype("float32") * scale.astype("float32")


def align_parameters(args: list[Any], attrs: Any) -> list[Any]:
    """Return data, scale and zero point. Parameters that are not numbers lie along the channel
    axis.
    """
    data, *parameters = args
    axes = to_axes(attrs.axis) or ()
    return [data, *(align(Numpy(), p, axes, data.ndim) if p.ndim else p for p in parameters)]
