"""ONNX reader: parts of a sequence that is unrolled: elements, steps, and stacked results."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from relayquant.formats.readers.onnx.graph.fold import settle_sizes
from relayquant.formats.readers.refusal import Refusal, find_inputs
from relayquant.ir.reference.folding import emit_folded
from relayquant.ir.rewrite.graph import tensor_shape

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
    return emit_folded(bb, relax.op.squeeze(slice_element(bb, data, at, axis), [axis]))


def slice_element(
    bb: relax.BlockBuilder, data: relax.Expr, at: int, axis: int, count: int = 1
) -> relax.Expr:
    """Return data[..., at : at + count, ...]. A constant stays a constant."""
    return emit_folded(bb, relax.op.strided_slice(data, [axis], [at], [at + count], [1]))


def stack_values(bb: relax.BlockBuilder, values: Sequence[relax.Expr], axis: int) -> relax.Expr:
    """Stack the values along a new axis. The result for constants is a constant."""
    expanded = [
        emit_folded(bb, relax.op.expand_dims(settle_sizes(value), axis)) for value in values
    ]
    return join_values(bb, expanded, axis)


def join_values(bb: relax.BlockBuilder, values: Sequence[relax.Expr], axis: int) -> relax.Expr:
    """Concatenate values along an axis. The result for constants is a constant."""
    joined = relax.op.concat(list(values), axis)
    return values[0] if len(values) == 1 else emit_folded(bb, joined)
