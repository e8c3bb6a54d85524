"""First stage, ONNX: the pieces of a sequence that is unrolled: elements, steps, and what the steps
gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from tvm import relax

from relayquant.importers.onnx_fold import find_array
from relayquant.rewrite.graph import constant_value, free_vars, tensor_shape

#: Most steps that one operator is unrolled to.
MAX_STEPS = 4096


def check_steps(count: int) -> None:
    """Raise ValueError for more steps than are unrolled."""
    if count > MAX_STEPS:
        raise ValueError(f"it takes more than {MAX_STEPS} steps; supported: {MAX_STEPS}")


def find_inputs(bb: relax.BlockBuilder, value: relax.Expr) -> Iterator[str]:
    """Names of the parameters of main that a value is computed from, each once."""
    waiting, seen = list(free_vars(value)), set()
    while waiting:
        var = waiting.pop()
        if var in seen:
            continue
        seen.add(var)
        source = bb.lookup_binding(var)
        if source is None:
            yield var.name
        else:
            waiting.extend(free_vars(source))


def find_length(bb: relax.BlockBuilder, data: relax.Expr, axis: int) -> int:
    """Number of elements along an axis; ValueError where it is not known."""
    shape = tensor_shape(data)
    size = None if shape is None or not -len(shape) <= axis < len(shape) else shape[axis]
    if not isinstance(size, int):
        raise ValueError(
            f"the length of its sequence is {size or 'not known'}; fix it while loading: "
            f"shapes={{{next(find_inputs(bb, data), 'name of the input')!r}: (...)}}"
        )
    if size < 1:
        raise ValueError("its sequence is empty")
    return size


def take_element(bb: relax.BlockBuilder, data: relax.Expr, at: int, axis: int) -> relax.Expr:
    """data[..., at, ...]; of a constant, a constant."""
    array = constant_value(data)
    if array is not None:
        return relax.const(np.take(array, at, axis), str(array.dtype))
    return bb.emit(relax.op.squeeze(slice_element(bb, data, at, axis), [axis]))


def slice_element(
    bb: relax.BlockBuilder, data: relax.Expr, at: int, axis: int, count: int = 1
) -> relax.Expr:
    """data[..., at : at + count, ...]"""
    return bb.emit(relax.op.strided_slice(data, [axis], [at], [at + count], [1]))


def stack_values(bb: relax.BlockBuilder, values: Sequence[relax.Expr], axis: int) -> relax.Expr:
    """The values along a new axis; of constants, a constant."""
    arrays = [array for value in values if (array := find_array(value)) is not None]
    if len(arrays) == len(values):
        array = np.stack(arrays, axis)
        return relax.const(array, str(array.dtype))
    expanded = [bb.emit(relax.op.expand_dims(value, axis)) for value in values]
    return bb.emit(relax.op.concat(expanded, axis)) if len(expanded) > 1 else expanded[0]
