"""Torch forms of lstm, gru and rnn with float32 weights, one step after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
#: (gates of one step, states) -> new states
StepFunction = Callable[[Tensor, list[Tensor]], list[Tensor]]

FUNCTIONS = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}


def apply_activation(attrs: Any, at: int, value: Tensor) -> Tensor:
    """Compute activation number `at`, after the clip."""
    bound = float(attrs.clip)
    if bound and at < 2:
        value = torch.clamp(value, -bound, bound)
    return FUNCTIONS[str(attrs.activations[at])](value)


def run_steps(
    data: Tensor, lengths: Tensor, attrs: Any, states: list[Tensor], step: StepFunction
) -> Tensor:
    """Run all steps -> the last states, then the hidden state of each step."""
    order = list(range(len(data)))
    outputs: dict[int, Tensor] = {}
    for at in reversed(order) if attrs.is_reversed else order:
        new = step(data[at], states)
        is_inside = (at < lengths).expand(data.shape[1])[:, None]
        outputs[at] = torch.where(is_inside, new[0], torch.zeros_like(new[0]))
        states = [torch.where(is_inside, *pair) for pair in zip(new, states, strict=True)]
    return torch.stack([*states, *(outputs[at] for at in order)])


def spread(state: Tensor, data: Tensor, weight: Tensor) -> Tensor:
    """Broadcast an initial state to (batch, units)."""
    return state.to(data.dtype).expand(data.shape[1], weight.shape[0])


def run_lstm(args: list[Any], attrs: Any) -> Tensor:
    data, weight, _, hidden, cell, peepholes, lengths = args
    look = peepholes.to(data.dtype).expand(3, weight.shape[0])

    def step(gates: Tensor, states: list[Tensor]) -> list[Tensor]:
        old, state = states
        entry, exit_, forget, new = (gates + old @ weight).chunk(4, -1)
        entry = apply_activation(attrs, 0, entry + look[0] * state)
        if attrs.input_forget:
            forget = 1 - entry
        else:
            forget = apply_activation(attrs, 0, forget + look[2] * state)
        state = forget * state + entry * apply_activation(attrs, 1, new)
        bound = float(attrs.cell_clip)
        if bound:
            state = torch.clamp(state, -bound, bound)
        gate = apply_activation(attrs, 0, exit_ + look[1] * state)
        return [gate * apply_activation(attrs, 2, state), state]

    states = [spread(state, data, weight) for state in (hidden, cell)]
    return run_steps(data, lengths, attrs, states, step)


def run_gru(args: list[Any], attrs: Any) -> Tensor:
    data, weight, _, hidden, hidden_bias, lengths = args
    width = 2 * weight.shape[0]

    def step(gates: Tensor, states: list[Tensor]) -> list[Tensor]:
        (old,) = states
        pair = apply_activation(attrs, 0, gates[:, :width] + old @ weight[:, :width])
        update, reset = pair.chunk(2, -1)
        if attrs.linear_before_reset:
            product = reset * (old @ weight[:, width:] + hidden_bias)
        else:
            product = (reset * old) @ weight[:, width:]
        new = apply_activation(attrs, 1, gates[:, width:] + product)
        return [(1 - update) * new + update * old]

    return run_steps(data, lengths, attrs, [spread(hidden, data, weight)], step)


def run_rnn(args: list[Any], attrs: Any) -> Tensor:
    data, weight, _, hidden, lengths = args

    def step(gates: Tensor, states: list[Tensor]) -> list[Tensor]:
        return [apply_activation(attrs, 0, gates + states[0] @ weight)]

    return run_steps(data, lengths, attrs, [spread(hidden, data, weight)], step)
