"""Numpy forms of `relax.qnn.lstm`, `gru` and `rnn`.

The hidden state is quantized in each step by `quantize_rows`. The sums are exact. Then every
float32 operation is rounded separately:

    sigmoid(x) = (1 if x >= 0 else e^-|x|) / (1 + e^-|x|)
    tanh(x) = sign(x) * (1 - e^-2|x|) / (1 + e^-2|x|)

with the exponential of `row_arithmetic`. With a float32 weight, the order of its sums is not
specified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relayquant.ir.reference.qnn.grouped import quantize_rows
from relayquant.ir.reference.row_arithmetic import exponentiate

__all__ = ["gru", "lstm", "rnn"]

Array = np.ndarray[Any, Any]
#: (gates of one step without the hidden state, index of the row, states) -> new states
Step = Callable[[Array, list[Array]], list[Array]]
F32 = np.float32


def apply_activation(name: str, value: Array) -> Array:
    """Compute an activation of float32 values."""
    if name == "relu":
        return np.where(value > 0, value, F32(0))
    power = exponentiate(np.abs(value) * F32(-1 if name == "sigmoid" else -2))
    if name == "sigmoid":
        return np.where(value >= 0, F32(1), power) / (F32(1) + power)
    size = (F32(1) - power) / (F32(1) + power)
    return np.where(value < 0, -size, size)


def multiply(rows: Array, weight: Array, scale: Array) -> Array:
    """Multiply float32 rows (B, H) by columns of the weight (H, N), as integers if it is int8."""
    if weight.dtype == np.float32:
        return rows @ weight
    levels, step = quantize_rows(rows)
    # Products of bytes: float64 holds their sums exactly.
    sums = (levels.astype("float64") @ weight.astype("float64")).astype("float32")
    return sums * (step * scale)


class ReferenceRecurrence:
    """Operands and attributes that the three operators share."""

    def __init__(
        self,
        data: Array,
        weight: Array,
        weight_scale: Any,
        lengths: Any,
        activations: Sequence[str],
        clip: float,
        is_reversed: bool,
    ) -> None:
        self.data, self.weight = np.asarray(data, "float32"), np.asarray(weight)
        self.units, width = self.weight.shape
        self.scale = np.broadcast_to(np.asarray(weight_scale, "float32"), (width,))
        self.lengths, self.is_reversed = np.asarray(lengths), bool(is_reversed)
        self.activations, self.clip = [str(name) for name in activations], F32(clip)

    def apply(self, at: int, value: Array) -> Array:
        """Compute activation number `at`, after the clip."""
        if self.clip and at < 2:
            value = np.clip(value, -self.clip, self.clip)
        return apply_activation(self.activations[at], value)

    def multiply(self, rows: Array, begin: int, end: int) -> Array:
        """Multiply rows (B, H) by the weights of some gates."""
        columns = slice(begin * self.units, end * self.units)
        return multiply(rows, self.weight[:, columns], self.scale[columns])

    def run(self, step: Step, *initial: Any) -> Array:
        """Run all steps -> float32 (states + T, B, H)."""
        steps, batch, _ = self.data.shape
        shape = (batch, self.units)
        states = [np.broadcast_to(np.asarray(value, "float32"), shape) for value in initial]
        out = np.zeros((len(states) + steps, *shape), "float32")
        for t in reversed(range(steps)) if self.is_reversed else range(steps):
            is_inside = np.broadcast_to(t < self.lengths, (batch,))[:, None]
            new = step(self.data[t], states)
            out[len(states) + t] = np.where(is_inside, new[0], F32(0))
            states = [np.where(is_inside, *pair) for pair in zip(new, states, strict=True)]
        out[: len(states)] = states
        return out


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
    run = ReferenceRecurrence(data, weight, weight_scale, lengths, activations, clip, is_reversed)
    look = np.broadcast_to(np.asarray(peepholes, "float32"), (3, run.units))

    def step(gates: Array, states: list[Array]) -> list[Array]:
        old, state = states
        entry, exit_, forget, new = np.split(gates + run.multiply(old, 0, 4), 4, axis=-1)
        entry = run.apply(0, entry + look[0] * state)
        forget = F32(1) - entry if input_forget else run.apply(0, forget + look[2] * state)
        state = forget * state + entry * run.apply(1, new)
        if cell_clip:
            state = np.clip(state, -F32(cell_clip), F32(cell_clip))
        return [run.apply(0, exit_ + look[1] * state) * run.apply(2, state), state]

    return run.run(step, hidden, cell)


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
    run = ReferenceRecurrence(data, weight, weight_scale, lengths, activations, clip, is_reversed)

    def step(gates: Array, states: list[Array]) -> list[Array]:
        (old,) = states
        width = 2 * run.units
        update, reset = np.split(gates[:, :width] + run.multiply(old, 0, 2), 2, axis=-1)
        update, reset = run.apply(0, update), run.apply(0, reset)
        if linear_before_reset:
            product = run.multiply(old, 2, 3) + np.asarray(hidden_bias, "float32")
            product = reset * product
        else:
            product = run.multiply(reset * old, 2, 3)
        new = run.apply(1, gates[:, width:] + product)
        return [(F32(1) - update) * new + update * old]

    return run.run(step, hidden)


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
    run = ReferenceRecurrence(data, weight, weight_scale, lengths, activations, clip, is_reversed)

    def step(gates: Array, states: list[Array]) -> list[Array]:
        return [run.apply(0, gates + run.multiply(states[0], 0, 1))]

    return run.run(step, hidden)
