"""PyTorch reader, composites: sums, norms, histograms and order of elements."""

from __future__ import annotations

import math
from typing import Any


def write_histc(data: Any, bins: int = 100, low: Any = 0, high: Any = 0) -> Any:
    """Write histc as the counts of elements with each number of a bin. Without a range, it is from
    the least to the largest element, widened by 1 on both sides if they are equal.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if low == high:
        low, high = data.amin(), data.amax()
        margin = (low == high).to(data.dtype)
        low, high = low - margin, high + margin
    place = ((data - low) * bins / (high - low)).floor().clamp(max=bins - 1)
    place = torch.where((data >= low) & (data <= high), place, -1).flatten()
    numbers = torch.arange(bins, dtype=data.dtype, device=data.device)
    return (place.unsqueeze(-1) == numbers).sum(0).to(data.dtype)


def write_vector_norm(
    data: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Write vector_norm(x) of order 2 as sqrt(sum(x * x)), in float32 for narrow floats."""
    import torch  # pyright: ignore[reportMissingImports]

    result = dtype or data.dtype
    if ord != 2 or not result.is_floating_point or not data.is_floating_point():
        return NotImplemented
    wide = data.to(torch.float64 if result == torch.float64 else torch.float32)
    axes = list(range(data.dim())) if dim is None else dim
    return (wide * wide).sum(axes, keepdim).sqrt().to(result)


def write_norm_of_batch(
    data: Any, weight: Any, bias: Any, _training: bool, _momentum: float, eps: float
) -> Any:
    """Write a batch norm by the statistics of the batch, with a run-time number of channels, as
    (x - mean) * rsqrt(variance + eps): an instance norm has the channels of all samples.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if not isinstance(data.shape[1], torch.SymInt):
        return NotImplemented
    axes, across = [0, *range(2, data.dim())], [-1, *[1] * (data.dim() - 2)]
    variance, mean = torch.var_mean(data, axes, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    result = (data - mean) * scale
    if weight is not None:
        result = result * weight.reshape(across)
    if bias is not None:
        result = result + bias.reshape(across)
    return result, mean.flatten(), scale.flatten()


def write_searchsorted(
    ordered: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Write searchsorted(s, v) as the count of values in s less than v, or at most v with
    `right`.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if sorter is not None:
        ordered = ordered.gather(-1, sorter)
    if not isinstance(values, torch.Tensor):
        dtype = torch.result_type(ordered, values)
        values = torch.full((), values, dtype=dtype, device=ordered.device)
    rows, value = ordered.unsqueeze(-2) if ordered.dim() > 1 else ordered, values.unsqueeze(-1)
    is_before = rows <= value if right or side == "right" else rows < value
    if value.is_floating_point():  # NaN sorts last
        is_before = is_before | value.isnan()
    return is_before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def write_sort(data: Any, *, dim: int = -1, descending: bool = False, **_: Any) -> Any:
    """Write a sort with the keyword `stable` as one without: TVM's keeps the order of equal
    elements.
    """
    return data.sort(dim, descending)


def write_any(data: Any) -> Any:
    """Write any as: the count of non-zero elements is more than 0. Bytes give bytes, as in
    PyTorch.
    """
    import torch  # pyright: ignore[reportMissingImports]

    result = data.ne(0).sum().ne(0)
    return result.to(data.dtype) if data.dtype == torch.uint8 else result


def write_bucketize(
    values: Any, ordered: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    """Write bucketize(v, s) as searchsorted(s, v)."""
    return write_searchsorted(ordered, values, out_int32=out_int32, right=right)


def write_var(data: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """Write var along run-time sizes as sum((x - mean(x))**2) / (size - correction)."""
    import torch  # pyright: ignore[reportMissingImports]

    dim = dim or list(range(data.dim()))
    size = math.prod(data.shape[axis] for axis in dim)
    if not isinstance(size, torch.SymInt):
        return NotImplemented
    distance = data - data.mean(dim, keepdim=True)
    total = (distance * distance).sum(dim, keepdim)
    return total / (
        torch.full((), size, dtype=data.dtype) - (1 if correction is None else correction)
    )


def write_var_mean(
    data: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    """Write var_mean as (var, mean)."""
    import torch  # pyright: ignore[reportMissingImports]

    dim = list(range(data.dim())) if dim is None else dim
    variance = torch.var(data, dim, correction=correction, keepdim=keepdim)
    return variance, data.mean(dim, keepdim)
