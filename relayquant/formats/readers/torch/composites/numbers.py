"""PyTorch reader, composites: functions of single numbers."""

from __future__ import annotations

import functools
import math
from typing import Any

from numpy.polynomial import chebyshev
from scipy import special

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


def write_clamp(data: Any, low: Any = None, high: Any = None) -> Any:
    """Write clamp(x, low, high) by tensors as minimum(maximum(x, low), high)."""
    import torch  # pyright: ignore[reportMissingImports]

    for bound, limit in ((low, torch.maximum), (high, torch.minimum)):
        data = data if bound is None else limit(data, bound)
    return data


def write_copysign(data: Any, sign: Any) -> Any:
    """Write copysign(x, s) as where(s < 0 or s is -0, -|x|, |x|), with the common type of both."""
    import torch  # pyright: ignore[reportMissingImports]

    dtype = torch.result_type(data, sign)
    magnitude = data.abs().to(dtype if dtype.is_floating_point else torch.get_default_dtype())
    if not isinstance(sign, torch.Tensor):
        return magnitude * math.copysign(1, sign)
    is_negative = (sign < 0) | ((sign == 0) & (sign.float().reciprocal() < 0))
    return torch.where(is_negative, -magnitude, magnitude)


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


def write_remainder(number: Any, divisor: Any) -> Any:
    """Write remainder(number, x) as remainder(tensor of the number, x)."""
    import torch  # pyright: ignore[reportMissingImports]

    dtype = torch.result_type(divisor, number)
    return torch.remainder(torch.full((), number, dtype=dtype, device=divisor.device), divisor)


def write_rrelu(
    data: Any, noise: Any, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False, *_: Any
) -> Any:
    """Write rrelu(x) in evaluation mode as leaky_relu(x) with the mean slope."""
    import torch  # pyright: ignore[reportMissingImports]

    if training:
        return NotImplemented
    return torch.nn.functional.leaky_relu(data, (lower + upper) / 2), noise
