"""Models with state: the user's sequences -> batches with the state of the float model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm

from relayquant.codegen.eager import EagerModule
from relayquant.data import StreamedDataset, open_sequences
from relayquant.data.item import describe_inputs
from relayquant.ir.state import get_state
from relayquant.stages.preparation import prepare_module


def open_streams(mod: tvm.IRModule, params: Mapping[str, Any] | None, dataset: Any) -> Any:
    """Return the data set with the state that the float model has come to, if the model has state.
    Else the data set as it is.
    """
    if not needs_state(mod, dataset):
        return dataset
    return follow_state(prepare_module(mod, params), dataset)


def follow_state(mod: tvm.IRModule, dataset: Any) -> Any:
    """As `open_streams`, for a module that runs as it is: a prepared or an integer one."""
    if not needs_state(mod, dataset):
        return dataset
    values = get_state(mod)
    runner, names = EagerModule(mod), [value.name for value in values]

    def step(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = runner.run("main", [batch[param.name] for param in mod["main"].params])
        return dict(zip(names, results[len(results) - len(names) :], strict=True))

    initial = {value.name: value.value for value in values}
    return open_sequences(dataset, describe_inputs(mod), initial, step)


def needs_state(mod: tvm.IRModule, dataset: Any) -> bool:
    """Whether the module has state, which the data set may lack."""
    return bool(get_state(mod)) and dataset is not None and not isinstance(dataset, StreamedDataset)
