"""Rows of PyTorch operators, with which `program` interprets modules.

The rows are those of `reference.relax` and have the same arguments: tensors, tuples of tensors,
tuples of ints (shapes) or numbers, and the attributes by name. Gradients flow through every row
that has any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from relayquant.errors import ModelError
from relayquant.ir.reference.convolution import Window, count_window_values
from relayquant.ir.reference.relax import ROWS
from relayquant.ir.reference.relax.row import Row, bind_rows, to_ints
from relayquant.ir.reference.relax.windows import get_window
from relayquant.ir.reference.unary import Unary
from relayquant.ir.rewrite.conv_view import ConvView, expand_per_axis, get_spatial_letters
from relayquant.torch.interpreter.recurrent import run_gru, run_lstm, run_rnn

Tensor = torch.Tensor

# Convolution, pooling, products ----------------------------------------------------------------


def permute(data: Tensor, source: str, target: str) -> Tensor:
    """Reorder the axes of `data` from layout `source` to `target`."""
    return data if source == target else data.permute([source.index(letter) for letter in target])


def permute_weight(weight: Tensor, source: str, target: str) -> Tensor:
    """Same as `permute`, and copy to that order in memory.

    Some of torch's convolutions support the weight's gradient in no other order.
    """
    return permute(weight, source, target).contiguous()


def pad_edges(data: Tensor, edges: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """Pad each of the last axes with (before, after) values."""
    widths = [width for edge in reversed(edges) for width in edge]
    return F.pad(data, widths, value=value) if any(widths) else data


def pad_data(
    data: Tensor, edges: Sequence[tuple[int, int]]
) -> tuple[Tensor, list[int] | tuple[int, ...]]:
    """Return (data, padding) for a torch convolution, which pads equally before and after."""
    if all(before == after for before, after in edges):
        return data, tuple(before for before, _ in edges)
    return pad_edges(data, edges), (0,) * len(edges)


CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONVOLVE_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def convolve(args: list[Any], attrs: Any) -> Tensor:
    view = ConvView.read(attrs)
    order = f"NC{view.letters}"
    data = permute(args[0], view.layout, order)
    weight = permute_weight(args[1], view.kernel_layout, f"OI{view.letters}")
    data, padding = pad_data(data, view.pads)
    result = CONVOLVE[view.rank](
        data, weight, None, view.strides, padding, view.dilation, groups=view.groups
    )
    return permute(result, order, view.out_layout)


def convolve_transposed(args: list[Any], attrs: Any) -> Tensor:
    """Compute a transposed convolution. I = input channels, O = output channels / groups of the
    kernel.

    Padding is cut off the full result.
    """
    view = ConvView.read(attrs)
    order = f"NC{view.letters}"
    data = permute(args[0], view.layout, order)
    weight = permute_weight(args[1], view.kernel_layout, f"IO{view.letters}")
    result = CONVOLVE_TRANSPOSED[view.rank](
        data, weight, None, view.strides, 0, 0, view.groups, view.dilation
    )
    result = pad_edges(result, [(0, n) for n in view.output_padding])
    for axis, (before, after) in enumerate(view.pads, start=2):
        result = result.narrow(axis, before, result.shape[axis] - before - after)
    return permute(result, order, view.out_layout)


def open_window(data: Tensor, attrs: Any, value: float) -> tuple[Tensor, Window, list[int], str]:
    """Return (padded data in layout N C spatial, the window, number of windows by axis, layout)."""
    window = get_window(attrs)
    order = f"NC{get_spatial_letters(attrs.layout)}"
    data = permute(data, attrs.layout, order)
    pads, outputs = window.fit(tuple(data.shape[2:]))
    return pad_edges(data, pads, value), window, outputs, order


def take_windows(result: Tensor, outputs: Sequence[int]) -> Tensor:
    """Keep the first windows of each axis. torch counts every window that fits, which may be
    more.
    """
    for axis, count in enumerate(outputs, start=2):
        result = result.narrow(axis, 0, count)
    return result


def max_pool(args: list[Any], attrs: Any) -> Tensor:
    (data,) = args
    lowest = -math.inf if data.is_floating_point() else torch.iinfo(data.dtype).min
    padded, window, outputs, order = open_window(data, attrs, lowest)
    size, strides, dilation = window.expand()
    pools = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
    result = pools[window.rank](padded, size, strides, 0, dilation)
    return permute(take_windows(result, outputs), order, attrs.out_layout or attrs.layout)


def avg_pool(args: list[Any], attrs: Any) -> Tensor:
    """Compute the sums of the windows by a convolution with ones, divided by the number of
    values in each.
    """
    (data,) = args
    shape = tuple(data.shape)
    padded, window, outputs, order = open_window(data, attrs, 0.0)
    size, strides, dilation = window.expand()
    ones = torch.ones((1, 1, *size), dtype=data.dtype)
    single = padded.reshape(-1, 1, *padded.shape[2:])
    total = CONVOLVE[window.rank](single, ones, None, strides, 0, dilation)
    total = take_windows(total, outputs).reshape(*padded.shape[:2], *outputs)
    counts = count_window_values(shape, window, bool(attrs.count_include_pad))
    count = torch.from_numpy(counts.reshape(1, 1, *outputs)).to(data.dtype)
    return permute(total / count, order, attrs.out_layout or attrs.layout)


def adaptive_avg_pool(args: list[Any], attrs: Any) -> Tensor:
    (data,) = args
    letters = get_spatial_letters(attrs.layout)
    rank, order = len(letters), f"NC{letters}"
    data = permute(data, attrs.layout, order)
    sizes = attrs.output_size
    sizes = expand_per_axis(to_ints(sizes), rank) if sizes else tuple(data.shape[2:])
    pools = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d}
    result = pools[rank](data, tuple(sizes) if rank > 1 else sizes[0])
    return permute(result, order, attrs.out_layout or attrs.layout)


def pad(args: list[Any], attrs: Any) -> Tensor:
    """Pad. Modes other than constant use indices, which torch pads at any rank."""
    (data,) = args
    widths = to_ints(attrs.pad_width)
    edges = [*zip(widths[::2], widths[1::2], strict=True)]
    mode = str(attrs.pad_mode)
    if mode == "constant":
        return pad_edges(data, edges, float(attrs.pad_value))
    for axis, (before, after) in enumerate(edges):
        if before or after:
            at = torch.arange(-before, data.shape[axis] + after)
            data = data.index_select(axis, fold_index(at, data.shape[axis], mode))
    return data


def fold_index(at: Tensor, size: int, mode: str) -> Tensor:
    """Map indices beyond an axis of length `size` to the indices inside that replace them."""
    if mode == "replicate":
        return at.clamp(0, size - 1)
    if mode == "circular":
        return at.remainder(size)
    if mode == "reflect":
        turn = at.remainder(max(2 * size - 2, 1))
        return torch.where(turn < size, turn, 2 * size - 2 - turn)
    raise ModelError(
        f"nn.pad has no torch form for mode {mode!r}; allowed: constant, reflect, replicate, "
        "circular.",
        code="RQ206",
    )


# The library -----------------------------------------------------------------------------------


def skip_zero(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Compute a quotient or remainder. For integers it is 0 if the divisor is 0, as in numpy."""

    def compute(left: Tensor, right: Tensor) -> Tensor:
        if left.is_floating_point() or right.is_floating_point() or right.all():
            return function(left, right)
        return torch.where(right == 0, 0, function(left, torch.where(right == 0, 1, right)))

    return compute


def reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Reduce some axes, or all of them for None."""

    def compute(data: Tensor, axes: tuple[int, ...] | None, keepdims: bool) -> Tensor:
        axes = tuple(range(data.ndim)) if axes is None else axes
        return function(data, axes, keepdim=keepdims) if axes else data

    return compute


def mean(data: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    """Compute the mean. For integers: the sum, divided toward zero."""
    if data.is_floating_point():
        return data.mean(axes, keepdim=keepdim)
    total = data.sum(axes, keepdim=keepdim)
    count = data.numel() // max(total.numel(), 1)
    return torch.div(total, count, rounding_mode="trunc")


def product(data: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    for axis in sorted((axis % data.ndim for axis in axes), reverse=True):
        data = data.prod(axis, keepdim=keepdim)
    return data


def population(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute the variance or deviation of a population, not of a sample."""
    return lambda data, axes, keepdim: function(data, axes, correction=0, keepdim=keepdim)


def divide(left: Tensor, right: Tensor) -> Tensor:
    """Divide. Integers truncate toward zero, as in C."""
    is_float = left.is_floating_point() or right.is_floating_point()
    return torch.div(left, right) if is_float else torch.div(left, right, rounding_mode="trunc")


def sqrt(data: Tensor) -> Tensor:
    """Compute the root, with the gradient 0 at 0: the norm of a row of zeros has it in PyTorch,
    and infinity times 0 would be NaN.
    """
    is_zero = data == 0
    return torch.where(is_zero, data.detach(), torch.sqrt(torch.where(is_zero, 1, data)))


def bound(function: Callable[..., Tensor], side: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Compute the maximum or minimum. At a number, the gradient is 1 as in clamp; two tensors that
    are equal share it.
    """

    def compute(left: Tensor, right: Tensor) -> Tensor:
        is_number = right.ndim == 0 and right.dtype == left.dtype and not right.requires_grad
        return torch.clamp(left, **{side: right}) if is_number else function(left, right)

    return compute


def find_first(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Reduce axes to the maximum or minimum, whose gradient goes to the first of equal elements."""

    def compute(args: list[Any], attrs: Any) -> Tensor:
        (data,) = args
        axes = range(data.ndim) if attrs.axis is None else to_ints(attrs.axis)
        axes = sorted(axis % data.ndim for axis in axes)
        kept = [axis for axis in range(data.ndim) if axis not in axes]
        last = data.permute(*kept, *axes).flatten(len(kept))
        found = function(last, -1).values
        for axis in axes if attrs.keepdims else ():
            found = found.unsqueeze(axis)
        return found

    return compute


class Torch:
    """PyTorch functions that rows call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    convolve = staticmethod(convolve)
    convolve_transposed = staticmethod(convolve_transposed)
    max_pool = staticmethod(max_pool)
    avg_pool = staticmethod(avg_pool)
    adaptive_avg_pool = staticmethod(adaptive_avg_pool)
    pad = staticmethod(pad)

    sum = staticmethod(reduce(torch.sum))
    prod = staticmethod(reduce(product))
    max = staticmethod(reduce(torch.amax))
    min = staticmethod(reduce(torch.amin))
    mean = staticmethod(reduce(mean))
    variance = staticmethod(reduce(population(torch.var)))
    std = staticmethod(reduce(population(torch.std)))

    maximum = staticmethod(bound(torch.maximum, "min"))
    minimum = staticmethod(bound(torch.minimum, "max"))
    sqrt = staticmethod(sqrt)

    divide = staticmethod(skip_zero(divide))
    floor_divide = staticmethod(skip_zero(torch.floor_divide))
    fmod = staticmethod(skip_zero(torch.fmod))
    remainder = staticmethod(skip_zero(torch.remainder))
    equal = staticmethod(torch.eq)
    power = staticmethod(torch.pow)
    permute = staticmethod(torch.permute)
    plain_softmax = staticmethod(torch.softmax)
    repeat = staticmethod(torch.repeat_interleave)

    # ---- tensors, dtypes ----

    @staticmethod
    def convert_numbers(args: list[Any]) -> list[Tensor]:
        """Convert numbers among tensors to tensors."""
        return [arg if isinstance(arg, Tensor) else torch.as_tensor(arg) for arg in args]

    @staticmethod
    def find_dtype(value: Any, default: Any) -> torch.dtype:
        """Return a dtype attribute, or `default` if it is empty."""
        text = "" if value is None else str(value)
        found = default if text in ("", "void") else text
        return found if isinstance(found, torch.dtype) else getattr(torch, found)

    @staticmethod
    def cast(data: Tensor, dtype: torch.dtype) -> Tensor:
        return data.to(dtype)

    @staticmethod
    def widen(data: Tensor) -> Tensor:
        """Return the data unchanged: training computes in the dtype that it has."""
        return data

    @staticmethod
    def full(shape: Sequence[int], value: Any, dtype: torch.dtype) -> Tensor:
        """Expand one value, so that a gradient flows into it."""
        return torch.as_tensor(value).to(dtype).expand(tuple(shape))

    @staticmethod
    def select(data: Tensor, indices: Tensor, axis: int) -> Tensor:
        return data.index_select(axis, indices.to(torch.int64))

    @staticmethod
    def take_along(data: Tensor, indices: Tensor, axis: int) -> Tensor:
        indices = indices.to(torch.int64)
        return torch.gather(
            data, axis, torch.where(indices < 0, indices + data.shape[axis], indices)
        )

    @staticmethod
    def find_order(data: Tensor, axis: int, descending: bool) -> Tensor:
        """Return indices in sorted order. Equal elements keep their order."""
        return torch.argsort(data, stable=True, dim=axis, descending=descending)

    # ---- what has a gradient of its own ----

    @staticmethod
    def compute_unary(unary: Unary, data: Tensor, **attributes: Any) -> Tensor:
        if unary.name == "gelu_tanh":
            return F.gelu(data, approximate="tanh")
        if unary.name == "sqrt":
            return sqrt(data)
        function = getattr(torch, unary.name, None) or getattr(F, unary.name)
        return function(data, **attributes)

    @staticmethod
    def clip(args: list[Any], attrs: Any) -> Tensor:
        """Clip. For floats this is hardtanh, whose gradient is one pass. The gradient of clamp
        would be three comparisons. At the bounds the gradient is 0.
        """
        data, low, high = args
        if data.is_floating_point() and low <= high:
            return F.hardtanh(data, float(low), float(high))
        return torch.clamp(data, low, high)

    @staticmethod
    def leaky_relu(args: list[Any], attrs: Any) -> Tensor:
        return F.leaky_relu(args[0], float(attrs.alpha))

    @staticmethod
    def scale_negatives(x: Tensor, slope: Tensor) -> Tensor:
        """Compute x where it is positive, and x * slope elsewhere."""
        return torch.where(x > 0, x, x * slope)

    @staticmethod
    def softmax(args: list[Any], attrs: Any) -> Tensor:
        return torch.softmax(args[0], int(attrs.axis))

    @staticmethod
    def log_softmax(args: list[Any], attrs: Any) -> Tensor:
        return torch.log_softmax(args[0], int(attrs.axis))

    @staticmethod
    def multiply_matrices(args: list[Any], attrs: Any) -> Tensor:
        return torch.matmul(*args)

    @staticmethod
    def mean_along(data: Tensor, axes: Sequence[int]) -> Tensor:
        return data.mean(tuple(axes), keepdim=True)


def compute_dft(args: list[Any], attrs: Any) -> Tensor:
    """Compute `qnn.dft` on (..., n, p)."""
    (data,), length = args, int(attrs.length)
    numbers = torch.view_as_complex(data.contiguous()) if data.shape[-1] == 2 else data[..., 0]
    if attrs.inverse and attrs.onesided:
        return torch.fft.irfft(numbers, length)[..., None]
    found = (torch.fft.ifft if attrs.inverse else torch.fft.fft)(numbers, length)
    if attrs.onesided:
        found = found[..., : length // 2 + 1]
    return torch.view_as_real(found.resolve_conj())


#: Names of PyTorch's operators with a bound at which the gradient is 1; hardtanh has 0 there.
CLAMPS = tuple(f"aten.{name}" for name in ("clamp", "clamp_min", "clamp_max", "clip"))
#: (operator, PyTorch's operator that it was made of) -> its form. Those operators have different
#: gradients at equal values.
FORMS_AT_TIES: Mapping[tuple[str, str], Callable[[list[Any], Any], Tensor]] = {
    **{("clip", name): lambda args, attrs: torch.clamp(*args) for name in CLAMPS},
    **{("nn.relu", name): lambda args, attrs: torch.clamp(args[0], min=0) for name in CLAMPS},
    **{("maximum", name): lambda args, attrs: torch.clamp(args[0], min=args[1]) for name in CLAMPS},
    **{("minimum", name): lambda args, attrs: torch.clamp(args[0], max=args[1]) for name in CLAMPS},
    ("maximum", "aten.fmax"): lambda args, attrs: torch.fmax(*args),
    ("minimum", "aten.fmin"): lambda args, attrs: torch.fmin(*args),
    ("maximum", "aten.maximum"): lambda args, attrs: torch.maximum(*args),
    ("minimum", "aten.minimum"): lambda args, attrs: torch.minimum(*args),
    **{
        ("max", name): find_first(torch.max)
        for name in ("aten.max.dim", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d")
    },
    ("min", "aten.min.dim"): find_first(torch.min),
}


def find_form(operator: str, source: str) -> Callable[[list[Any], Any], Any] | None:
    """Return the function that computes an operator on PyTorch's tensors. None: there is none.

    Args:
        operator: Its name, without "relax.".
        source: PyTorch's operator that it was made of, as "aten.max.dim", or "".
    """
    packet = source.rpartition(".")[0]
    tied = (FORMS_AT_TIES.get((operator, name)) for name in (source, packet))
    forms = (*tied, TORCH_OPERATORS.get(operator), DIALECT_OPERATORS.get(operator))
    return next(filter(None, forms), None)


def follow_clamps(
    clamps: Sequence[tuple[str, str, float, float]],
) -> Callable[[list[Any], Any], Tensor]:
    """Return the torch form of a clamp that stands for several. It computes them one by one: their
    gradients at the bounds differ.

    Args:
        clamps: (operator, PyTorch's operator that it was made of, low, high), in order.
    """

    def compute(args: list[Any], attrs: Any) -> Tensor:
        value = args[0]
        for name, source, low, high in clamps:
            operator = name.removeprefix("relax.")
            bounds = {"clip": (low, high), "maximum": (low,), "minimum": (high,)}.get(operator, ())
            if operator != "clip":
                bounds = [torch.tensor(bound, dtype=value.dtype) for bound in bounds]
            form = find_form(operator, source) or TORCH_OPERATORS[operator]
            value = form([value, *bounds], attrs)
        return value

    return compute


#: Operator name without "relax." -> its row, for operators in models that train.
TRAINED_ROWS: Mapping[str, Row] = {row.name: row for row in ROWS if not row.is_reference_only}

#: Operator name without "relax." -> its torch form.
TORCH_OPERATORS: Mapping[str, Callable[[list[Any], Any], Any]] = bind_rows(
    TRAINED_ROWS.values(), Torch()
)

#: The same for operators of the dialect on real numbers.
DIALECT_OPERATORS: Mapping[str, Callable[[list[Any], Any], Any]] = {
    "qnn.dft": compute_dft,
    "qnn.lstm": run_lstm,
    "qnn.gru": run_gru,
    "qnn.rnn": run_rnn,
}
