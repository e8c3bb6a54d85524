"""PyTorch reader: operators that TVM's frontend lacks, written in other operators. A part of
`decompositions`.

Each function takes the operator's arguments and is traced by PyTorch. It returns NotImplemented for
a case it cannot write, and the operator is then refused by name.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

from numpy.polynomial import chebyshev
from scipy import special

from relayquant.formats.readers.torch.complex_numbers import write_full, write_polar

#: The x at which t = 1 / 2, and the degree of p, in `write_erfc`. With degree 20 the error is
#: 10^-14.
ERFC_PLACE = 4.0
ERFC_DEGREE = 20

#: Up to which x, and with which factors c of x, x^2, ..., `write_near_zero` writes a function as
#: its Taylor series. The first term left out is less than 2^-53 of the sum.
LARGEST_SMALL = 1 / 16
NEAR_ZERO = {
    "expm1": tuple(1 / math.factorial(k) for k in range(1, 15)),
    "log1p": tuple((-1) ** (k + 1) / k for k in range(1, 15)),
    "atanh": tuple(k % 2 / k for k in range(1, 15)),
}

Composite = Callable[..., Any]


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


def write_cdist(first: Any, second: Any, p: float, _compute_mode: int | None = None) -> Any:
    """Write cdist(x1 (..., P, M), x2 (..., R, M)) as the norm of x1[..., :, None, :] - x2[...,
    None, :, :].
    """
    import torch  # pyright: ignore[reportMissingImports]

    distance = first.unsqueeze(-2) - second.unsqueeze(-3)
    if p == 0:
        return distance.ne(0).sum(-1).to(distance.dtype)
    return torch.linalg.vector_norm(distance, p, -1)


def write_clamp(data: Any, low: Any = None, high: Any = None) -> Any:
    """Write clamp(x, low, high) by tensors as minimum(maximum(x, low), high)."""
    import torch  # pyright: ignore[reportMissingImports]

    for bound, limit in ((low, torch.maximum), (high, torch.minimum)):
        data = data if bound is None else limit(data, bound)
    return data


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


def write_copysign(data: Any, sign: Any) -> Any:
    """Write copysign(x, s) as where(s < 0 or s is -0, -|x|, |x|), with the common type of both."""
    import torch  # pyright: ignore[reportMissingImports]

    dtype = torch.result_type(data, sign)
    magnitude = data.abs().to(dtype if dtype.is_floating_point else torch.get_default_dtype())
    if not isinstance(sign, torch.Tensor):
        return magnitude * math.copysign(1, sign)
    is_negative = (sign < 0) | ((sign == 0) & (sign.float().reciprocal() < 0))
    return torch.where(is_negative, -magnitude, magnitude)


def write_empty(size: Any, **kwargs: Any) -> Any:
    """Write empty of a run-time size as zeros."""
    import torch  # pyright: ignore[reportMissingImports]

    if not any(isinstance(each, torch.SymInt) for each in size):
        return NotImplemented
    kwargs.pop("memory_format", None)
    return torch.zeros(size, **kwargs)


def write_erfc(data: Any) -> Any:
    """Write erfc(x) as exp(-x^2) t p(2 t - 1) in float64 with t = 4 / (4 + |x|), and as 2 -
    erfc(-x) for x < 0.

    It is accurate for small results, unlike 1 - erf(x).
    """
    import torch  # pyright: ignore[reportMissingImports]

    wide = data.to(torch.float64)
    size = wide.abs()
    share = ERFC_PLACE / (size + ERFC_PLACE)
    at, series = share * 2 - 1, torch.zeros_like(size)
    for coefficient in reversed(find_erfc_series()):
        series = series * at + coefficient
    upper = torch.exp(-size * size) * share * series
    result = torch.where(wide < 0, 2 - upper, upper)
    return result.to(data.dtype if data.is_floating_point() else torch.get_default_dtype())


@functools.cache
def find_erfc_series() -> tuple[float, ...]:
    """Return the coefficients of p, the constant term first.

    p interpolates exp(x^2) erfc(x) / t at Chebyshev nodes, computed with scipy.
    """

    def find_values(at: Any) -> Any:
        share = (at + 1) / 2
        return special.erfcx(ERFC_PLACE / share - ERFC_PLACE) / share

    series = chebyshev.chebinterpolate(find_values, ERFC_DEGREE)
    return tuple(chebyshev.cheb2poly(series).tolist())


def write_exp2(data: Any) -> Any:
    """Write exp2(x) as 2 ** x."""
    return 2.0**data


def write_near_zero(name: str, data: Any) -> Any:
    """Write expm1, log1p or atanh of small x as the sum of c[k] x^(k + 1) (see `NEAR_ZERO`), and as
    exp(x) - 1, log(1 + x) or log((1 + x) / (1 - x)) / 2 elsewhere, where the difference from 1 has
    digits enough.
    """
    import torch  # pyright: ignore[reportMissingImports]

    dtype = data.dtype if data.is_floating_point() else torch.get_default_dtype()
    x = data.to(torch.float64 if dtype == torch.float64 else torch.float32)
    is_small = x.abs() < LARGEST_SMALL
    small, series = torch.where(is_small, x, 0.0), torch.zeros_like(x)  # its gradient is finite
    for coefficient in reversed(NEAR_ZERO[name]):
        series = (series + coefficient) * small
    if name == "expm1":
        direct = x.exp() - 1
    elif name == "log1p":
        direct = (x + 1).log()
    else:
        direct = ((1 + x) / (1 - x)).log() / 2
    return torch.where(is_small, series, direct).to(dtype)


def write_fmax(first: Any, second: Any) -> Any:
    """Write fmax(a, b) as maximum(a, b). If one operand is NaN, the result is the other one."""
    import torch  # pyright: ignore[reportMissingImports]

    return take_numbers(first, second, torch.maximum(first, second))


def write_fmin(first: Any, second: Any) -> Any:
    """Write fmin(a, b) as minimum(a, b). If one operand is NaN, the result is the other one."""
    import torch  # pyright: ignore[reportMissingImports]

    return take_numbers(first, second, torch.minimum(first, second))


def take_numbers(first: Any, second: Any, result: Any) -> Any:
    """Return the result where both are numbers, else the operand that is not NaN."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch.where(first.isnan(), second, torch.where(second.isnan(), first, result))


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


def write_hypot(first: Any, second: Any) -> Any:
    """Write hypot(a, b) as h * sqrt(1 + (l / h)**2) with the larger h and the smaller l of |a| and
    |b|.

    It does not overflow or underflow where a**2 does.
    """
    import torch  # pyright: ignore[reportMissingImports]

    large = torch.maximum(first.abs(), second.abs())
    small = torch.minimum(first.abs(), second.abs())
    ratio = small / torch.where((large > 0) & ~large.isinf(), large, 1)
    return torch.where(large.isinf(), large, large * torch.sqrt(1 + ratio * ratio))


def write_ldexp(data: Any, exponent: Any) -> Any:
    """Write ldexp(x, e) as x * 2 ** e."""
    import torch  # pyright: ignore[reportMissingImports]

    dtype, result = torch.result_type(data, exponent), data * 2.0**exponent
    return result.to(dtype) if dtype.is_floating_point else result


def write_celu(data: Any, alpha: Any = 1.0) -> Any:
    """Write celu(x, a) as elu, which has finite gradients."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch.ops.aten.elu(data, alpha, 1.0, 1.0 / alpha)


def write_log_sigmoid(data: Any) -> Any:
    """Write log_sigmoid(x) as -softplus(-x)."""
    import torch  # pyright: ignore[reportMissingImports]

    threshold = 40.0 if data.dtype == torch.float64 else 20.0
    return -torch.nn.functional.softplus(-data, 1.0, threshold)


def write_sinc(data: Any) -> Any:
    """Write sinc(x) as sin(pi x) / (pi x), and 1 at 0, whose gradient is 0."""
    import torch  # pyright: ignore[reportMissingImports]

    if not data.is_floating_point():
        return NotImplemented
    angle = torch.where(data == 0, 1.0, data * math.pi)
    return torch.where(data == 0, 1.0, angle.sin() / angle)


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


def write_xlogy(data: Any, other: Any) -> Any:
    """Write xlogy(x, y) as x * log(y), and 0 where x is 0, also if the logarithm is infinite or NaN
    there. Its gradient by x is log(y), or 0 there.
    """
    import torch  # pyright: ignore[reportMissingImports]

    dtype = torch.result_type(data, other)
    if not dtype.is_floating_point:
        return NotImplemented
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, y = (torch.as_tensor(each, dtype=wide) for each in (data, other))
    is_nothing = (x == 0) & ((y <= 0) | y.isinf())
    return (x * torch.where(is_nothing, 1.0, y).log()).to(dtype)


def write_pow(data: Any, exponent: Any) -> Any:
    """Write pow(x, 0.5) as the root, and pow(x, 3) and pow(x, -2) of bfloat16 as products: PyTorch
    computes them so, and rounds each product.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if exponent == 0.5 and data.is_floating_point():
        return data.sqrt()
    if data.dtype != torch.bfloat16 or exponent not in (3, -2):
        return NotImplemented
    square = data * data
    return square * data if exponent == 3 else square.reciprocal()


def write_masked_scatter(data: Any, mask: Any, source: Any) -> Any:
    """Write masked_scatter(x, m, s) as where(m, s[number of earlier true values], x)."""
    import torch  # pyright: ignore[reportMissingImports]

    mask, data = torch.broadcast_tensors(mask, data)
    at = (mask.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.reshape(-1)[at].reshape(data.shape), data)


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


def write_one_hot(data: Any, num_classes: int = -1) -> Any:
    """Write one_hot(x, n) as x[..., None] == arange(n). A class out of range gives a row of zeros,
    in PyTorch an error.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if num_classes < 0:  # as many classes as in the data
        return NotImplemented
    classes = torch.arange(num_classes, device=data.device)
    return (data.unsqueeze(-1) == classes).to(torch.int64)


def write_remainder(number: Any, divisor: Any) -> Any:
    """Write remainder(number, x) as remainder(tensor of the number, x)."""
    import torch  # pyright: ignore[reportMissingImports]

    dtype = torch.result_type(divisor, number)
    return torch.remainder(torch.full((), number, dtype=dtype, device=divisor.device), divisor)


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


def write_rrelu(
    data: Any, noise: Any, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False, *_: Any
) -> Any:
    """Write rrelu(x) in evaluation mode as leaky_relu(x) with the mean slope."""
    import torch  # pyright: ignore[reportMissingImports]

    if training:
        return NotImplemented
    return torch.nn.functional.leaky_relu(data, (lower + upper) / 2), noise


def write_scalar_tensor(number: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Write scalar_tensor(s) of a run-time size as full((), s)."""
    import torch  # pyright: ignore[reportMissingImports]

    if not isinstance(number, torch.SymInt):
        return NotImplemented
    return torch.full((), number, dtype=dtype or torch.get_default_dtype())


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


#: Name of an operator in torch.ops.aten -> function that writes it in other operators.
COMPOSITES: dict[str, Composite] = {
    "addbmm.default": write_addbmm,
    "addmv.default": write_addmv,
    "any.default": write_any,
    "arange.start_step": write_arange,
    "bucketize.Tensor": write_bucketize,
    "bucketize.Scalar": write_bucketize,
    "_cdist_forward.default": write_cdist,
    "celu.default": write_celu,
    "clamp.Tensor": write_clamp,
    "constant_pad_nd.default": write_pad,
    "convolution.default": write_convolution,
    "copysign.Tensor": write_copysign,
    "copysign.Scalar": write_copysign,
    "empty.memory_format": write_empty,
    "erfc.default": write_erfc,
    "exp2.default": write_exp2,
    **{f"{name}.default": functools.partial(write_near_zero, name) for name in NEAR_ZERO},
    "fmax.default": write_fmax,
    "full.default": write_full,
    "fmin.default": write_fmin,
    "_grouped_mm.default": write_grouped_product,
    "histc.default": write_histc,
    "hypot.default": write_hypot,
    "index_reduce.default": write_index_reduce,
    "ldexp.Tensor": write_ldexp,
    "log_sigmoid.default": write_log_sigmoid,
    "linalg_vector_norm.default": write_vector_norm,
    "masked_scatter.default": write_masked_scatter,
    "_native_batch_norm_legit.no_stats": write_norm_of_batch,
    "one_hot.default": write_one_hot,
    "polar.default": write_polar,
    "pow.Tensor_Scalar": write_pow,
    "remainder.Scalar_Tensor": write_remainder,
    "repeat.default": write_repeat,
    "rrelu_with_noise_functional.default": write_rrelu,
    "scalar_tensor.default": write_scalar_tensor,
    "searchsorted.Tensor": write_searchsorted,
    "searchsorted.Scalar": write_searchsorted,
    "sort.stable": write_sort,
    "sinc.default": write_sinc,
    "_trilinear.default": write_trilinear,
    "unfold.default": write_unfold,
    "unfold_backward.default": write_unfold_backward,
    "var.correction": write_var,
    "var_mean.correction": write_var_mean,
    **{f"xlogy.{form}": write_xlogy for form in ("Tensor", "Scalar_Self", "Scalar_Other")},
}
