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
    values = get_state(mod)
    if not values or dataset is None or isinstance(dataset, StreamedDataset):
        return dataset
    canonical = prepare_module(mod, params)
    runner, names = EagerModule(canonical), [value.name for value in values]

    def step(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = runner.run("main", [batch[param.name] for param in canonical["main"].params])
        return dict(zip(names, results[len(results) - len(names) :], strict=True))

    initial = {value.name: value.value for value in values}
    return open_sequences(dataset, describe_inputs(canonical), initial, step)
