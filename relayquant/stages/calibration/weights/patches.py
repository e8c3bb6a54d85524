"""A convolution or dense operator as matrix products: data and weight -> matrices, one per group of
channels.

y[g, n, o] = sum over k of x[g, n, k] * w[g, o, k]: k runs over the kernel window and the input
channels of a group, n over batch and output positions, o over the output channels of the group. A
depthwise convolution has as many groups as channels, a dense operator has one. A transposed
convolution has the same form: each output reads the input that a tap leads back to, and zero if the
tap falls between two inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tvm.ir import Call

from relayquant.ir.dialect.qnn.recurrent import CELLS
from relayquant.ir.rewrite import Match
from relayquant.ir.rewrite.conv_view import ConvView

FloatArray = NDArray[np.float32]

#: operators whose weights can be fitted
TRANSPOSED = "relax.nn.conv2d_transpose"
CONVOLUTIONS = ("relax.nn.conv2d", "relax.nn.conv1d", TRANSPOSED)
MATMUL = "relax.matmul"


@dataclass(frozen=True)
class LinearView:
    """How data and weight of one operator become matrices.

    Attributes:
        data_axes: Axes of the data in the order batch..., spatial..., channel; None for dense,
            whose data is (..., K) already.
        weight_axes: Axes of the weight in the order output, spatial..., input.
        kernel, strides, padding, dilation: Per spatial axis; padding as (before, after). Empty for
            dense.
        groups: Groups of channels.
        skipped: Entries of the data's first axis that come before the first row. Of dense only.
        output_padding: For a transposed convolution, per spatial axis: rows of the output beyond
            the rows that the input leads to. None for any other operator.
    """

    data_axes: tuple[int, ...] | None
    weight_axes: tuple[int, ...]
    kernel: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    output_padding: tuple[int, ...] | None = None
    skipped: int = 0

    def weight_to_rows(self, weight: NDArray) -> NDArray:
        """Return a weight in the operator's layout as (groups, outputs per group, K)."""
        moved = np.transpose(weight, self.weight_axes)
        if self.output_padding is not None:
            # The axis of outputs holds one group, the axis of inputs holds all.
            return self._split_groups(moved.reshape(moved.shape[0], -1, moved.shape[-1]))
        return np.ascontiguousarray(moved.reshape(self.groups, moved.shape[0] // self.groups, -1))

    def rows_to_weight(self, rows: NDArray, shape: tuple[int, ...]) -> NDArray:
        """Undo `weight_to_rows` for a weight of `shape`."""
        sizes = [shape[axis] for axis in self.weight_axes]
        if self.output_padding is not None:
            split = rows.reshape(self.groups, sizes[0], math.prod(self.kernel), -1)
            rows = split.transpose(1, 2, 0, 3)
        moved = rows.reshape(sizes)
        return np.ascontiguousarray(np.transpose(moved, np.argsort(self.weight_axes)))

    def channels_to_rows(self, values: NDArray) -> NDArray:
        """Return one number per output channel, (C,) or (), as (groups, outputs per group)."""
        return values.reshape(self.groups, -1) if values.ndim else values.reshape(1, 1)

    @property
    def channel_axis(self) -> int:
        """Axis of the channels in the data."""
        return -1 if self.data_axes is None else self.data_axes[-1]

    def channel_importance(self, weight: NDArray) -> NDArray[np.float64]:
        """Return the summed squares of the weights that read each channel of the data, (C,)."""
        rows = self.weight_to_rows(weight)
        squares = np.einsum("gok,gok->gk", rows, rows, dtype="float64")
        taps = math.prod(self.kernel)
        return squares.reshape(self.groups, taps, -1).sum(axis=1).reshape(-1)

    def sample_rows(
        self,
        arrays: Sequence[FloatArray],
        count: int,
        rng: np.random.Generator,
        rounding: Callable[[FloatArray], FloatArray] | None = None,
    ) -> FloatArray:
        """Return at most `count` rows of x, drawn without replacement: (groups, n, K) float32.

        The batches may differ only in their first axis. `rounding` is applied to the drawn values.
        The padding's zeros stay zeros.
        """
        if self.data_axes is None:
            flat = [array[self.skipped :].reshape(-1, array.shape[-1]) for array in arrays]
            index = self._draw(sum(map(len, flat)), count, rng)
            rows = gather_rows(flat, index, ())
            return (rounding(rows) if rounding else rows)[None]
        moved = [np.transpose(array, self.data_axes) for array in arrays]
        sizes, images = moved[0].shape[1:-1], sum(map(len, moved))
        outputs = self._output_sizes(sizes)
        index = self._draw(images * math.prod(outputs), count, rng)
        position = np.unravel_index(index, (images, *outputs))
        inside = np.ones((len(index), math.prod(self.kernel)), "bool")
        at = []
        for axis, step in enumerate(np.unravel_index(range(inside.shape[1]), self.kernel)):
            place, found = self._source(axis, position[1 + axis][:, None], step)
            found = found & (place >= 0) & (place < sizes[axis])
            inside &= found
            at.append(np.where(found, place, 0))
        if self.groups == moved[0].shape[-1] and inside.size >= images * math.prod(sizes):
            shape = images, *sizes
            place = np.ravel_multi_index((position[0][:, None], *at), shape)
            return gather_channels(moved, np.where(inside, place, math.prod(shape)), rounding)
        windows = gather_rows(moved, position[0], at)
        if rounding:
            windows = rounding(windows)
        windows[~inside] = 0
        return self._split_groups(windows)

    def _source(
        self, axis: int, position: NDArray[np.int64], step: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the data index that a tap of the outputs at `position` reads, along one spatial
        axis, and whether it reads any data.
        """
        before, stride = self.padding[axis][0], self.strides[axis]
        if self.output_padding is None:
            place = position * stride + step * self.dilation[axis] - before
            return place, np.ones(place.shape, "bool")
        place, rest = np.divmod(position + before - step * self.dilation[axis], stride)
        return place, rest == 0

    def _output_sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the spatial sizes of the output for the spatial sizes of the data."""
        reaches = [(taps - 1) * d for taps, d in zip(self.kernel, self.dilation, strict=True)]
        paddings = [sum(padding) for padding in self.padding]
        if self.output_padding is not None:
            return tuple(
                (size - 1) * stride - padding + reach + extra + 1
                for size, stride, padding, reach, extra in zip(
                    sizes, self.strides, paddings, reaches, self.output_padding, strict=True
                )
            )
        return tuple(
            (size + padding - reach - 1) // stride + 1
            for size, stride, padding, reach in zip(
                sizes, self.strides, paddings, reaches, strict=True
            )
        )

    def _draw(self, total: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw sorted indices of rows."""
        if total <= count:
            return np.arange(total)
        return np.sort(rng.choice(total, count, replace=False, shuffle=False))

    def _split_groups(self, windows: NDArray) -> NDArray:
        """Reshape (n, taps, C) to (groups, n, taps * C / groups)."""
        n, taps, channels = windows.shape
        if self.groups == 1:
            return windows.reshape(1, n, taps * channels)
        split = windows.reshape(n, taps, self.groups, channels // self.groups)
        return np.ascontiguousarray(split.transpose(2, 0, 1, 3)).reshape(self.groups, n, -1)


def gather_rows(
    arrays: Sequence[NDArray], first: NDArray[np.int64], others: Sequence[NDArray[np.int64]]
) -> FloatArray:
    """Return array[first[:, None], *others], or array[first] without others, as float32.

    The arrays are joined along their first axis. `first` (n,) is sorted, `others` are (n, m).
    """
    starts = np.cumsum([0, *map(len, arrays)])
    cuts = np.searchsorted(first, starts)
    found = []
    for array, start, a, b in zip(arrays, starts, cuts, cuts[1:], strict=False):
        index = first[a:b] - start
        at = (index[:, None], *(other[a:b] for other in others)) if others else index
        found.append(array[at])
    rows = found[0] if len(found) == 1 else np.concatenate(found)
    return rows.astype("float32", copy=False)


def gather_channels(
    arrays: Sequence[NDArray],
    places: NDArray[np.int64],
    rounding: Callable[[FloatArray], FloatArray] | None = None,
) -> FloatArray:
    """Return the values of each channel at `places` (n, m), rounded: (channels, n, m) float32.

    The arrays are joined along their first axis, and their last is the channel. A place counts all
    other axes; the one behind the last gives zero. Each value is rounded once, wherever it goes.
    """
    parts = [np.moveaxis(array, -1, 0).reshape(array.shape[-1], -1) for array in arrays]
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    values = joined.astype("float32", copy=False)
    known = rounding(values) if rounding else values
    filled = np.zeros((len(known), known.shape[1] + 1), "float32")
    filled[:, :-1] = known
    return np.take(filled, places, axis=1, mode="clip")  # without a look at each place beforehand


def make_linear_view(match: Match) -> LinearView | None:
    """Return the view of a matched operator; None if it is neither convolution, dense nor a
    recurrent layer.
    """
    recurrent = find_recurrent_view(match)
    if recurrent is not None:
        return recurrent
    for call in _find_calls(match):
        if call.op.name == MATMUL:
            return LinearView(None, (1, 0)) if match.parts["weight"].ty.ndim == 2 else None
        view = ConvView.of(call)
        data, kernel, spatial = view.layout, view.kernel_layout, view.letters
        if sorted(kernel) != sorted("OI" + spatial) or sorted(data) != sorted(view.order):
            return None
        shape = [int(size) for size in match.parts["weight"].ty.shape.values]
        is_transposed = call.op.name == TRANSPOSED
        if shape[kernel.index("I" if is_transposed else "O")] % view.groups:
            return None
        return LinearView(
            tuple(data.index(letter) for letter in view.order),
            tuple(kernel.index(letter) for letter in "O" + spatial + "I"),
            tuple(shape[kernel.index(letter)] for letter in spatial),
            view.strides,
            view.pads,
            view.dilation,
            view.groups,
            view.output_padding if is_transposed else None,
        )
    return None


def find_recurrent_view(match: Match) -> LinearView | None:
    """Return the view of a recurrent layer, whose weight multiplies its hidden state; None if the
    match is none, or if gates multiply different values.

    The hidden states of all steps follow the last states in the layer's result. The initial state
    is not part of it.
    """
    for name, cell in CELLS.items():
        call = match.find_call(f"relax.qnn.{name}")
        if call is not None and getattr(call.attrs, "linear_before_reset", True):
            return LinearView(None, (1, 0), skipped=cell.states)
    return None


def _find_calls(match: Match) -> Iterator[Call]:
    if "data" not in match.parts or "weight" not in match.parts:
        return
    for name in (*CONVOLUTIONS, MATMUL):
        call = match.find_call(name)
        if call is not None:
            yield call
