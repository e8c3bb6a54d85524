"""Numpy forms of `relax.qnn.lstm`, `gru` and `rnn`.

The hidden state is quantized in each step by `quantize_rows`. The sums are exact. Then every
float32 operation is rounded separately:

    sigmoid(x) = (1 if x >= 0 else e^-|x|) / (1 + e^-|x|)
    tanh(x) = sign(x) * (1 - e^-2|x|) / (1 + e^-2|x|)

with the exponential of `row_arithmetic`. With a float32 weight, the order of its sums is not
specified.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from relayquant.ir.reference.qnn.grouped import quantize_rows
from relayquant.ir.reference.row_arithmetic import exponentiate

__all__ = ["gru", "lstm", "rnn"]

Array = np.ndarray[Any, Any]
#: (gates of one step without the hidden state, states) -> new states
Step = Callable[[Any, list[Any]], list[Any]]
F32 = np.float32


class ArrayLayer(ABC):
    """All steps of a layer, on the arrays of one library.

    Attributes:
        library: numpy, or PyTorch.
    """

    library: Any

    def __init__(
        self, data: Any, weight: Any, attrs: Any, peepholes: Any = 0.0, hidden_bias: Any = 0.0
    ) -> None:
        self.data, self.weight, self.attrs = data, weight, attrs
        self.units = weight.shape[0]
        self.peepholes = self.spread(peepholes, (3, self.units))
        self.hidden_bias = self.spread(hidden_bias, (self.units,))

    @abstractmethod
    def spread(self, value: Any, shape: tuple[int, ...]) -> Any:
        """Broadcast a value, with the dtype of the data."""

    @abstractmethod
    def activate(self, name: str, value: Any) -> Any:
        """Compute "sigmoid", "tanh" or "relu"."""

    @abstractmethod
    def multiply(self, rows: Any, columns: slice) -> Any:
        """Multiply rows (B, H) by columns of the weight."""

    def list_columns(self, begin: int, end: int) -> slice:
        """Return the columns of gates from `begin` to before `end`."""
        return slice(begin * self.units, end * self.units)

    def split(self, gates: Any) -> list[Any]:
        """Split rows (B, G * H) into gates (B, H)."""
        count = gates.shape[1] // self.units
        return [gates[:, self.list_columns(at, at + 1)] for at in range(count)]

    def bound(self, value: Any, limit: float) -> Any:
        """Clip a value to -limit .. limit, unless `limit` is 0."""
        return self.library.clip(value, -limit, limit) if limit else value

    def apply(self, at: int, value: Any) -> Any:
        """Compute activation number `at`, after the clip."""
        value = self.bound(value, float(self.attrs.clip)) if at < 2 else value
        return self.activate(str(self.attrs.activations[at]), value)

    def run_lstm(self, hidden: Any, cell: Any, lengths: Any) -> Any:
        look = self.peepholes

        def step(gates: Any, states: list[Any]) -> list[Any]:
            old, state = states
            total = gates + self.multiply(old, slice(None))
            entry, exit_, forget, new = self.split(total)
            entry = self.apply(0, entry + look[0] * state)
            if self.attrs.input_forget:
                forget = 1 - entry
            else:
                forget = self.apply(0, forget + look[2] * state)
            state = forget * state + entry * self.apply(1, new)
            state = self.bound(state, float(self.attrs.cell_clip))
            return [self.apply(0, exit_ + look[1] * state) * self.apply(2, state), state]

        return self.run(step, lengths, hidden, cell)

    def run_gru(self, hidden: Any, lengths: Any) -> Any:
        pair, last = self.list_columns(0, 2), self.list_columns(2, 3)

        def step(gates: Any, states: list[Any]) -> list[Any]:
            (old,) = states
            parts = self.split(gates[:, pair] + self.multiply(old, pair))
            update, reset = (self.apply(0, part) for part in parts)
            if self.attrs.linear_before_reset:
                product = reset * (self.multiply(old, last) + self.hidden_bias)
            else:
                product = self.multiply(reset * old, last)
            new = self.apply(1, gates[:, last] + product)
            return [(1 - update) * new + update * old]

        return self.run(step, lengths, hidden)

    def run_rnn(self, hidden: Any, lengths: Any) -> Any:
        def step(gates: Any, states: list[Any]) -> list[Any]:
            return [self.apply(0, gates + self.multiply(states[0], slice(None)))]

        return self.run(step, lengths, hidden)

    def run(self, step: Step, lengths: Any, *initial: Any) -> Any:
        """Run all steps -> the last states, then the hidden state of each step: (S + T, B, H)."""
        library, (steps, batch, _) = self.library, self.data.shape
        lengths = library.asarray(lengths)
        states = [self.spread(value, (batch, self.units)) for value in initial]
        outputs = [None] * steps
        for t in reversed(range(steps)) if self.attrs.is_reversed else range(steps):
            is_inside = library.broadcast_to(t < lengths, (batch,))[:, None]
            new = step(self.data[t], states)
            outputs[t] = library.where(is_inside, new[0], library.zeros_like(new[0]))
            states = [library.where(is_inside, *pair) for pair in zip(new, states, strict=True)]
        return library.stack([*states, *outputs])


class NumpyLayer(ArrayLayer):
    """A layer as compiled code computes it."""

    library = np

    def __init__(
        self, data: Array, weight: Array, weight_scale: Any, attrs: Any, **more: Any
    ) -> None:
        weight = np.asarray(weight)
        super().__init__(np.asarray(data, "float32"), weight, attrs, **more)
        self.scale = self.spread(weight_scale, weight.shape[1:])

    def spread(self, value: Any, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(np.asarray(value, "float32"), shape)

    def activate(self, name: str, value: Array) -> Array:
        if name == "relu":
            return np.where(value > 0, value, F32(0))
        power = exponentiate(np.abs(value) * F32(-1 if name == "sigmoid" else -2))
        if name == "sigmoid":
            return np.where(value >= 0, F32(1), power) / (F32(1) + power)
        size = (F32(1) - power) / (F32(1) + power)
        return np.where(value < 0, -size, size)

    def multiply(self, rows: Array, columns: slice) -> Array:
        """Multiply float32 rows by columns of the weight, as integers if it is int8."""
        weight = self.weight[:, columns]
        if weight.dtype == np.float32:
            return rows @ weight
        levels, step = quantize_rows(rows)
        # Products of bytes: float64 holds their sums exactly.
        sums = (levels.astype("float64") @ weight.astype("float64")).astype("float32")
        return sums * (step * self.scale[columns])


def lstm(
    data: Array,
    weight: Array,
    weight_scale: Any,
    hidden: Any,
    cell: Any,
    peepholes: Any,
    lengths: Any,
    *,
    activations: Sequence[str],
    clip: float,
    is_reversed: bool,
    input_forget: bool,
    cell_clip: float,
) -> Array:
    """Run an LSTM -> last hidden state, last cell, and the hidden state of each step."""
    own = {"input_forget": input_forget, "cell_clip": cell_clip}
    attrs = SimpleNamespace(activations=activations, clip=clip, is_reversed=is_reversed, **own)
    layer = NumpyLayer(data, weight, weight_scale, attrs, peepholes=peepholes)
    return layer.run_lstm(hidden, cell, lengths)


def gru(
    data: Array,
    weight: Array,
    weight_scale: Any,
    hidden: Any,
    hidden_bias: Any,
    lengths: Any,
    *,
    activations: Sequence[str],
    clip: float,
    is_reversed: bool,
    linear_before_reset: bool,
) -> Array:
    """Run a GRU -> last hidden state, and the hidden state of each step."""
    own = {"linear_before_reset": linear_before_reset}
    attrs = SimpleNamespace(activations=activations, clip=clip, is_reversed=is_reversed, **own)
    layer = NumpyLayer(data, weight, weight_scale, attrs, hidden_bias=hidden_bias)
    return layer.run_gru(hidden, lengths)


def rnn(
    data: Array,
    weight: Array,
    weight_scale: Any,
    hidden: Any,
    lengths: Any,
    *,
    activations: Sequence[str],
    clip: float,
    is_reversed: bool,
) -> Array:
    """Run a simple recurrent layer -> last hidden state, and the hidden state of each step."""
    attrs = SimpleNamespace(activations=activations, clip=clip, is_reversed=is_reversed)
    return NumpyLayer(data, weight, weight_scale, attrs).run_rnn(hidden, lengths)
