"""Copies of the parameters and buffers of a trainable module."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from relayquant.torch.training.trainable import TrainableModule

State = dict[str, np.ndarray]


def read_state(module: TrainableModule) -> State:
    """Copy parameters and buffers."""
    return {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}


def is_same(one: State, other: State) -> bool:
    """Whether two states of a module are equal, bit for bit."""
    return all(value.tobytes() == other[name].tobytes() for name, value in one.items())


def write_state(module: TrainableModule, state: State) -> None:
    """Restore a state from `read_state`."""
    module.load_state_dict({name: torch.from_numpy(np.array(v)) for name, v in state.items()})


@torch.no_grad()
def write_parameters(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Set parameters to other values."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
