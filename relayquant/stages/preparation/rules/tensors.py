"""Questions that canonicalization rules ask about constants and layouts."""

from __future__ import annotations

import numpy as np
from tvm import relax

from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.expressions import read_number
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape

FLOATS = ("float16", "float32", "float64")


def make_const(array: np.ndarray, dtype: str) -> relax.Expr:
    """Return a tensor constant. The dtype is passed on, because `relax.const` silently narrows
    int64.
    """
    return relax.const(np.asarray(array, dtype, order="C"), dtype)


def is_float(expr: relax.Expr) -> bool:
    return tensor_dtype(expr) in FLOATS


def is_constant(editor: Editor, expr: relax.Expr) -> bool:
    """Whether a value is a constant, or a dequantized constant."""
    if editor.op_name(expr) == DEQUANTIZE:
        expr = editor.call_of(expr).args[0]
    return constant_value(expr) is not None


def scalar_value(expr: relax.Expr, like: relax.Expr) -> float | None:
    """Return the number in a constant of one element, if it broadcasts to `like` without
    changing its shape.
    """
    array, shape = constant_value(expr), tensor_shape(like)
    if array is None or shape is None or array.ndim > len(shape):
        return None
    return read_number(expr)


def channel_values(expr: relax.Expr, ndim: int, axis: int, channels: int) -> np.ndarray | None:
    """Return float64 (C,) of a constant that varies only along `axis` of an `ndim`-dimensional
    tensor, else None.
    """
    array = constant_value(expr)
    if array is None or array.ndim > ndim or str(array.dtype) not in FLOATS:
        return None
    shape = (1,) * (ndim - array.ndim) + array.shape
    if any(size != 1 for at, size in enumerate(shape) if at != axis):
        return None
    if shape[axis] not in (1, channels):
        return None
    return np.broadcast_to(array.astype("float64").ravel(), (channels,))


def spatial_axes(layout: str) -> list[int] | None:
    """Return the spatial axes of a plain layout ("NCHW" -> [2, 3]); None for a packed one."""
    if sorted(set(layout)) != sorted(layout) or not layout.isalpha() or not layout.isupper():
        return None
    return [at for at, letter in enumerate(layout) if letter not in "NC"]
