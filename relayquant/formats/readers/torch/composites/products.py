"""PyTorch reader, composites: matrix products, convolutions and distances."""

from __future__ import annotations

import itertools
import math
from typing import Any


def write_addmv(data: Any, matrix: Any, vector: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Write addmv as beta * data + alpha * (matrix @ vector)."""
    return add_scaled(data, matrix.matmul(vector), beta, alpha)


def write_addbmm(data: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Write addbmm as beta * data + alpha * sum of the products."""
    return add_scaled(data, first.matmul(second).sum(0, dtype=data.dtype), beta, alpha)


def add_scaled(data: Any, product: Any, beta: Any, alpha: Any) -> Any:
    """Return beta * data + alpha * product. For integers, PyTorch cuts off the fractions of the
    factors. A factor 0 leaves its term out, also where the term is NaN.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if not data.is_floating_point():
        beta, alpha = int(beta), int(alpha)
    terms = [value * factor for value, factor in ((data, beta), (product, alpha)) if factor != 0]
    return sum(terms[1:], terms[0]).expand_as(product) if terms else torch.zeros_like(product)


def write_cdist(first: Any, second: Any, p: float, _compute_mode: int | None = None) -> Any:
    """Write cdist(x1 (..., P, M), x2 (..., R, M)) as the norm of x1[..., :, None, :] - x2[...,
    None, :, :].
    """
    import torch  # pyright: ignore[reportMissingImports]

    distance = first.unsqueeze(-2) - second.unsqueeze(-3)
    if p == 0:
        return distance.ne(0).sum(-1).to(distance.dtype)
    return torch.linalg.vector_norm(distance, p, -1)


def write_convolution(
    data: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
) -> Any:
    """Write a convolution with a run-time number of groups, weights (groups * m, k, ...) and data
    (n, groups * k, ...), as a batched product: (groups, m, k * taps) @ (n, groups, k * taps,
    places).

    The weights of each sample of a batch are often computed so (CondConv, StyleGAN, trackers). A
    transposed one is a convolution of the data with zeros between its elements.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if not isinstance(groups, torch.SymInt):
        return NotImplemented
    taps, rank = weight.shape[2:], data.dim() - 2
    if transposed:
        # (groups * k, m, ...) -> (groups * m, k, ...), mirrored
        count, outputs = data.shape[1] // groups, weight.shape[1]
        weight = weight.reshape(groups, count, outputs, *taps).transpose(1, 2)
        weight = weight.flip([*range(3, 3 + rank)]).reshape(groups * outputs, count, *taps)
        for axis, step in enumerate(stride, 2):
            apart = torch.constant_pad_nd(
                data.unsqueeze(axis + 1), [0, 0] * (rank + 1 - axis) + [0, step - 1]
            )
            data = apart.flatten(axis, axis + 1).narrow(axis, 0, (data.shape[axis] - 1) * step + 1)
        around = [d * (k - 1) - p for d, k, p in zip(dilation, taps, padding, strict=True)]
        ends = [(low, low + more) for low, more in zip(around, output_padding, strict=True)]
        stride = [1] * rank
    else:
        ends = [(p, p) for p in padding]
    data = torch.constant_pad_nd(data, [size for pair in reversed(ends) for size in pair])
    outputs, count = weight.shape[0] // groups, weight.shape[1]
    sizes = [
        (size - d * (k - 1) - 1) // s + 1
        for size, d, k, s in zip(data.shape[2:], dilation, taps, stride, strict=True)
    ]
    columns = [
        data[
            (
                ...,
                *(
                    slice(at * d, at * d + (size - 1) * s + 1, s)
                    for at, d, s, size in zip(place, dilation, stride, sizes, strict=True)
                ),
            )
        ]
        for place in itertools.product(*map(range, taps))
    ]
    column = torch.stack(columns, 2).reshape(
        len(data), groups, count * len(columns), math.prod(sizes)
    )
    rows = weight.reshape(groups, outputs, count * len(columns))
    result = torch.matmul(rows, column).reshape(len(data), groups * outputs, *sizes)
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


def write_grouped_product(
    rows: Any, stack: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Write a grouped product of rows (M, K) and a stack (E, K, N) as a choice among the products
    with each matrix. Group e ends before row offs[e]. Rows behind the last group become 0.

    A mixture of experts sorts its rows by expert. The program cannot have fewer products, because
    the sizes of the groups are known at run time.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if rows.dim() != 2 or stack.dim() != 3 or offs is None or bias is not None or out_dtype:
        return NotImplemented
    places = torch.arange(rows.shape[0], dtype=offs.dtype, device=offs.device)
    group = (offs <= places.unsqueeze(-1)).sum(-1, keepdim=True)
    chosen = rows.new_zeros(rows.shape[0], stack.shape[2])
    for number, matrix in enumerate(stack.unbind(0)):
        chosen = torch.where(group == number, rows.mm(matrix), chosen)
    return chosen
