"""ONNX reader: parts of a sequence that is unrolled: elements, steps, and stacked results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax

from relayquant.formats.readers.onnx.fold import find_array
from relayquant.formats.readers.refusal import Refusal, find_inputs
from relayquant.ir.rewrite.graph import constant_value, tensor_shape

#: Largest number of steps that one operator is unrolled to.
MAX_STEPS = 4096


def check_steps(count: int) -> None:
    """Raise ValueError if there are more steps than can be unrolled."""
    if count > MAX_STEPS:
        raise Refusal(f"it takes more than {MAX_STEPS} steps; supported: {MAX_STEPS}")


def find_length(bb: relax.BlockBuilder, data: relax.Expr, axis: int) -> int:
    """Return the number of elements along an axis. ValueError if it is unknown."""
    shape = tensor_shape(data)
    size = None if shape is None or not -len(shape) <= axis < len(shape) else shape[axis]
    if not isinstance(size, int):
        name = next(find_inputs(data, bb.lookup_binding), "name of the input")
        raise Refusal(
            f"the length of its sequence is {size or 'not known'}; supported: known lengths",
            f"Fix it while loading: shapes={{{name!r}: (...)}}",
        )
    if size < 1:
        raise Refusal("its sequence is empty")
    return size


def take_element(bb: relax.BlockBuilder, data: relax.Expr, at: int, axis: int) -> relax.Expr:
    """Return data[..., at, ...]. A constant stays a constant."""
    array = constant_value(data)
    if array is not None:
        return relax.const(np.take(array, at, axis), str(array.dtype))
    return bb.emit(relax.op.squeeze(slice_element(bb, data, at, axis), [axis]))


def slice_element(
    bb: relax.BlockBuilder, data: relax.Expr, at: int, axis: int, count: int = 1
) -> relax.Expr:
    """Return data[..., at : at + count, ...]."""
    return bb.emit(relax.op.strided_slice(data, [axis], [at], [at + count], [1]))


def stack_values(bb: relax.BlockBuilder, values: Sequence[relax.Expr], axis: int) -> relax.Expr:
    """Stack the values along a new axis. The result for constants is a constant."""
    arrays = [array for value in values if (array := find_array(value)) is not None]
    if len(arrays) == len(values):
        array = np.stack(arrays, axis)
        return relax.const(array, str(array.dtype))
    expanded = [bb.emit(relax.op.expand_dims(value, axis)) for value in values]
    return bb.emit(relax.op.concat(expanded, axis)) if len(expanded) > 1 else expanded[0]
