"""PyTorch reader: pools whose windows TVM's frontend does not support."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.pooling import Windows, emit_window_sum
from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.torch.arguments import read_arguments
from relayquant.formats.readers.torch.indexing import find_sizes
from relayquant.ir.rewrite.graph import tensor_dtype


def convert_adaptive_max_pool(node: Any, importer: Any) -> relax.Expr:
    """Convert adaptive_max_poolNd(x, sizes) -> maxima.

    One axis after the other, the last one first, R.max is computed over each window from floor(i *
    size / n) to ceil((i + 1) * size / n), and R.concat joins the results.

    Raises:
        Refusal: a size is symbolic, and there are several windows.
    """
    operand, wanted = read_arguments(node, "self", "output_size")
    data, emit = importer.env[operand], importer.block_builder.emit
    pooled = range(data.ty.ndim - len(wanted), data.ty.ndim)
    if all(count == 1 for count in wanted):
        return emit(relax.op.max(data, [*pooled], keepdims=True))
    sizes = find_sizes(data, "data")
    for axis, count in reversed([*zip(pooled, wanted, strict=True)]):
        size = sizes[axis]
        if size == count:
            continue
        windows = [(at * size // count, -(-(at + 1) * size // count)) for at in range(count)]
        parts = [
            emit(relax.op.max(emit(relax.op.strided_slice(data, [axis], [a], [b])), axis, True))
            for a, b in windows
        ]
        data = emit(relax.op.concat(parts, axis)) if count > 1 else parts[0]
    return data


def convert_pool(node: Any, importer: Any) -> relax.Expr:
    """Convert a pool with TVM's frontend, one that PyTorch may have two names for."""
    name = str(node.target).removeprefix("aten.").partition(".")[0].removeprefix("_")
    return getattr(importer, f"_{name}")(node)


def convert_max_pool(node: Any, importer: Any) -> relax.Expr:
    """Convert max_poolNd_with_indices -> maxima. TVM's frontend returns zeros as indices, too."""
    pooled = convert_pool(node, importer)
    return importer.block_builder.emit(relax.TupleGetItem(pooled, 0))


def convert_avg_pool(node: Any, importer: Any) -> relax.Expr:
    """Convert avg_poolNd. With a divisor_override, which TVM's frontend ignores, the sum of each
    window is divided by it.
    """
    (divisor,) = read_arguments(node, "divisor_override")
    if divisor is None:
        return convert_pool(node, importer)
    operand, ceil_mode = read_arguments(node, "self", "ceil_mode")
    kernel, strides, pads = (
        list(each) for each in read_arguments(node, "kernel_size", "stride", "padding")
    )
    rank, emit = (3 if "3d" in str(node.target) else 2), importer.block_builder.emit
    kernel, strides, pads = (
        each * rank if len(each) == 1 else each for each in (kernel, strides or kernel, pads)
    )
    data = importer.env[operand]
    is_alone = data.ty.ndim == rank + 1
    data = emit(relax.op.expand_dims(data, 0)) if is_alone else data
    windows = Windows(kernel, strides, [1] * rank, pads * 2, bool(ceil_mode))
    total = emit_window_sum(importer.block_builder, data, windows, float(divisor))
    return emit(relax.op.squeeze(total, [0])) if is_alone else total


def convert_embedding_bag(node: Any, importer: Any) -> relax.Expr:
    """Convert embedding_bag(weight, indices, offsets) by sum or mean to a product with a matrix
    that has 1 where a position is in a bag, from its offset to the next:

        rows = take(weight, indices); matmul(offsets <= position < next offsets, rows)

    Raises:
        Refusal: the mode is max, there is a padding index, or the number of indices is symbolic.
    """
    names = ("weight", "indices", "offsets", "mode", "per_sample_weights", "include_last_offset")
    weight, indices, offsets, mode, factors, has_last = read_arguments(node, *names)
    (padding,) = read_arguments(node, "padding_idx")
    if mode == 2:
        raise Refusal("its mode is 'max'; supported: sum, mean")
    if padding >= 0:
        raise Refusal(f"its padding_idx is {padding}; supported: None")
    table, places, begins = (importer.env[each] for each in (weight, indices, offsets))
    dtype, index_dtype, emit = (
        tensor_dtype(table),
        tensor_dtype(begins),
        importer.block_builder.emit,
    )
    (count,), (bags,) = find_sizes(places, "indices"), find_sizes(begins, "offsets")
    rows = emit(relax.op.take(table, places, axis=0))
    if factors is not None:
        rows = emit(relax.op.multiply(rows, emit(relax.op.expand_dims(importer.env[factors], 1))))
    last = relax.const(np.array([count]), index_dtype)
    bounds = begins if has_last else emit(relax.op.concat([begins, last], 0))
    bags -= bool(has_last)
    positions = relax.const(np.arange(count)[None], index_dtype)
    low, high = (
        emit(relax.op.expand_dims(emit(relax.op.strided_slice(bounds, [0], [a], [b])), 1))
        for a, b in ((0, bags), (1, bags + 1))
    )
    is_after = emit(relax.op.less_equal(low, positions))
    is_in = emit(relax.op.logical_and(is_after, emit(relax.op.less(positions, high))))
    members = emit(relax.op.astype(is_in, dtype))
    total = emit(relax.op.matmul(members, rows))
    if mode == 1:
        sizes = emit(relax.op.sum(members, [1], keepdims=True))
        total = emit(relax.op.divide(total, emit(relax.op.maximum(sizes, relax.const(1.0, dtype)))))
    return relax.Tuple([total])
