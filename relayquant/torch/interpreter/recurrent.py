"""Torch forms of lstm, gru and rnn with float32 weights: the steps of the numpy reference."""

from __future__ import annotations

from typing import Any

import torch

from relayquant.ir.reference.qnn.recurrent import ArrayLayer

Tensor = torch.Tensor


class TorchLayer(ArrayLayer):
    """A layer through which gradients flow."""

    library = torch

    def spread(self, value: Any, shape: tuple[int, ...]) -> Tensor:
        return torch.as_tensor(value).to(self.data.dtype).expand(shape)

    def activate(self, name: str, value: Tensor) -> Tensor:
        return getattr(torch, name)(value)

    def multiply(self, rows: Tensor, columns: slice) -> Tensor:
        return rows @ self.weight[:, columns]


def run_lstm(args: list[Any], attrs: Any) -> Tensor:
    data, weight, _, hidden, cell, peepholes, lengths = args
    return TorchLayer(data, weight, attrs, peepholes).run_lstm(hidden, cell, lengths)


def run_gru(args: list[Any], attrs: Any) -> Tensor:
    data, weight, _, hidden, hidden_bias, lengths = args
    return TorchLayer(data, weight, attrs, hidden_bias=hidden_bias).run_gru(hidden, lengths)


def run_rnn(args: list[Any], attrs: Any) -> Tensor:
    data, weight, _, hidden, lengths = args
    return TorchLayer(data, weight, attrs).run_rnn(hidden, lengths)
