"""PyTorch reader, composites: tensors that are made, cut, filled or spread."""

from __future__ import annotations

from typing import Any


def write_arange(start: Any, end: Any, step: Any = 1, **kwargs: Any) -> Any:
    """Write an arange of a run-time length that counts down as start + step * arange(length), and
    one of floats that are integers as an arange of integers.
    """
    import torch  # pyright: ignore[reportMissingImports]

    given = (start, end, step)
    if not any(isinstance(each, torch.SymInt) for each in given):
        return NotImplemented
    dtype = kwargs.pop("dtype", None)
    if any(isinstance(each, float) for each in given):
        if any(isinstance(each, float) and not each.is_integer() for each in given):
            return NotImplemented
        start, end, step = (int(each) if isinstance(each, float) else each for each in given)
        dtype = dtype or torch.get_default_dtype()
    if step < 0:
        places = start + step * torch.arange((start - end - step - 1) // -step, **kwargs)
    elif dtype is None or not dtype.is_floating_point:
        return NotImplemented
    else:
        places = torch.arange(start, end, step, **kwargs)
    return places if dtype is None else places.to(dtype)


def write_empty(size: Any, **kwargs: Any) -> Any:
    """Write empty of a run-time size as zeros."""
    import torch  # pyright: ignore[reportMissingImports]

    if not any(isinstance(each, torch.SymInt) for each in size):
        return NotImplemented
    kwargs.pop("memory_format", None)
    return torch.zeros(size, **kwargs)


def write_masked_scatter(data: Any, mask: Any, source: Any) -> Any:
    """Write masked_scatter(x, m, s) as where(m, s[number of earlier true values], x)."""
    import torch  # pyright: ignore[reportMissingImports]

    mask, data = torch.broadcast_tensors(mask, data)
    at = (mask.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.reshape(-1)[at].reshape(data.shape), data)


def write_one_hot(data: Any, num_classes: int = -1) -> Any:
    """Write one_hot(x, n) as x[..., None] == arange(n). A class out of range gives a row of zeros,
    in PyTorch an error.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if num_classes < 0:  # as many classes as in the data
        return NotImplemented
    classes = torch.arange(num_classes, device=data.device)
    return (data.unsqueeze(-1) == classes).to(torch.int64)


def write_repeat(data: Any, repeats: Any) -> Any:
    """Write repeat by run-time sizes as expand along new axes, one before each axis."""
    import torch  # pyright: ignore[reportMissingImports]

    if not any(isinstance(count, torch.SymInt) for count in repeats):
        return NotImplemented
    sizes = [1] * (len(repeats) - data.dim()) + list(data.shape)
    split = [part for size in sizes for part in (1, size)]
    wide = [part for pair in zip(repeats, sizes, strict=True) for part in pair]
    joined = [count * size for count, size in zip(repeats, sizes, strict=True)]
    return data.reshape(split).expand(wide).reshape(joined)


def write_scalar_tensor(number: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Write scalar_tensor(s) of a run-time size as full((), s)."""
    import torch  # pyright: ignore[reportMissingImports]

    if not isinstance(number, torch.SymInt):
        return NotImplemented
    return torch.full((), number, dtype=dtype or torch.get_default_dtype())


def write_trilinear(
    first: Any,
    second: Any,
    third: Any,
    expand1: Any,
    expand2: Any,
    expand3: Any,
    sumdim: Any,
    _unroll_dim: int = 1,
) -> Any:
    """Write _trilinear, the operator of a bilinear layer, as an einsum."""
    import torch  # pyright: ignore[reportMissingImports]

    rank = first.dim() + len(expand1)
    axes = [
        "".join(chr(ord("a") + axis) for axis in range(rank) if axis not in lacking)
        for lacking in (expand1, expand2, expand3, sumdim)
    ]
    return torch.einsum(f"{','.join(axes[:3])}->{axes[3]}", first, second, third)


def write_unfold(data: Any, dimension: int, size: int, step: int) -> Any:
    """Write unfold(x, d, size, step) as x at step * window + position along d, with positions
    last.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if data.dim() == 0:
        return NotImplemented
    axis = dimension % data.dim()
    count = (data.shape[axis] - size) // step + 1
    starts = torch.arange(count, device=data.device) * step
    at = (starts.unsqueeze(1) + torch.arange(size, device=data.device)).reshape(-1)
    shape = (*data.shape[:axis], count, size, *data.shape[axis + 1 :])
    return data.index_select(axis, at).reshape(shape).movedim(axis + 1, -1)


def write_unfold_backward(data: Any, sizes: Any, dim: int, size: int, step: int) -> Any:
    """Write unfold_backward, which adds windows up where they overlap, as a sum of rows: a window
    is cut into rows of `step`, of which row r of window f is added to row f + r.
    """
    import torch  # pyright: ignore[reportMissingImports]

    rows, axis = -(-size // step), dim % len(sizes)
    data = data.movedim(axis, -2)
    count, outer = data.shape[-2], data.shape[:-2]
    data = torch.constant_pad_nd(data, [0, rows * step - size])
    data = data.reshape(*outer, count, rows, step)
    total = sum(
        torch.constant_pad_nd(data[..., row, :], [0, 0, row, rows - 1 - row]) for row in range(rows)
    ).reshape(*outer, (count + rows - 1) * step)
    missing = sizes[axis] - (count + rows - 1) * step
    return torch.constant_pad_nd(total, [0, missing]).movedim(-1, axis)


def write_pad(data: Any, pad: Any, value: Any = 0) -> Any:
    """Write pad by a negative number: crop, then pad the rest. By a run-time size: cat with
    tensors of the value.
    """
    import torch  # pyright: ignore[reportMissingImports]

    is_late = any(isinstance(size, torch.SymInt) for size in pad)
    if all(size >= 0 for size in pad) and not is_late:
        return NotImplemented
    for place in range(0, len(pad), 2):
        axis, around = data.dim() - 1 - place // 2, pad[place : place + 2]
        # max() would settle the sign of a run-time size by the example of the export.
        (begin, cut), counts = (
            [torch.sym_max(0, sign * size) for size in around] for sign in (-1, 1)
        )
        data = data.narrow(axis, begin, data.shape[axis] - cut - begin)
        if is_late:
            before, after = (
                data.new_full((*data.shape[:axis], count, *data.shape[axis + 1 :]), value)
                for count in counts
            )
            data = torch.cat([before, data, after], axis)
    return data if is_late else torch.constant_pad_nd(data, [max(0, size) for size in pad], value)


def write_index_reduce(
    data: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """Write index_reduce as scatter_reduce, with each index repeated for its slice of the
    source.
    """
    sizes = [1] * source.dim()
    if sizes:
        sizes[dim] = -1
    places = index.reshape(sizes).expand(source.shape)
    return data.scatter_reduce(dim, places, source, reduce, include_self=include_self)
