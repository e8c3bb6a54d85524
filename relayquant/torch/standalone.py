"""Submodules that are quantized by themselves: each becomes its reference form, in a copy of the
module.

In front of the data flow: what the whole model's preparation then finds quantized it leaves as it
is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from relayquant.config import BackendConfig, QConfigMapping
from relayquant.datasets import open_dataset
from relayquant.datasets.inputs import describe_inputs
from relayquant.effort import Effort
from relayquant.errors import ModelError
from relayquant.importers import import_torch
from relayquant.pipeline import calibrate_model, convert_model, prepare_model, review_prepared
from relayquant.settings import CalibrateSettings, PrepareSettings
from relayquant.torch.exported import evaluation_mode, export
from relayquant.torch.reference_module import ReferenceModule


def replace_standalone(
    module: nn.Module,
    chosen: Sequence[tuple[str, QConfigMapping | None]],
    example_inputs: tuple[Any, ...],
    dataset: Any,
    backend: BackendConfig,
    effort: Effort | str,
) -> nn.Module:
    """A copy of a module whose chosen submodules are in reference form.

    They are calibrated on what they get when the float module runs on the data, all of which is
    held at once.

    Raises:
        ModelError: a submodule is not called, or not with tensors alone; or cannot be exported.
    """
    mod, _ = import_torch(export(module, example_inputs))
    data = open_dataset(dataset, describe_inputs(mod))
    paths = [path for path, _ in chosen]
    seen = record_inputs(module, paths, data, [p.name for p in mod["main"].params])
    result = copy.deepcopy(module)
    for path, mapping in chosen:
        calls = seen[path]
        if not calls:
            raise ModelError(f"Module {path!r} is to stand alone, but the model does not call it.")
        examples = tuple(map(torch.from_numpy, calls[0]))
        part, params = import_torch(export(module.get_submodule(path), examples))
        settings = PrepareSettings(effort=effort)
        prepared = prepare_model(part, params, calls, mapping, backend, settings)
        review_prepared(prepared, strict=False)
        prepared = calibrate_model(prepared, calls, CalibrateSettings())
        reference = ReferenceModule(convert_model(prepared), prepared.graph.inputs)
        parent, _, name = path.rpartition(".")
        setattr(result.get_submodule(parent), name, reference)
    return result


def record_inputs(
    module: nn.Module, paths: Sequence[str], data: Any, names: Sequence[str]
) -> dict[str, list[tuple[np.ndarray, ...]]]:
    """What submodules are called with, one tuple for each call, when the module runs on data.

    Raises:
        ModelError: one is called with something else than tensors.
    """
    seen: dict[str, list[tuple[np.ndarray, ...]]] = {path: [] for path in paths}

    def listen(path: str) -> Any:
        def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs or not all(isinstance(value, torch.Tensor) for value in args):
                raise ModelError(
                    f"Module {path!r} is to stand alone, but is called with more than tensors by "
                    "position. Choose a module within it, or around it."
                )
            seen[path].append(tuple(value.detach().numpy().copy() for value in args))

        return module.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True)

    handles = [listen(path) for path in paths]
    try:
        with evaluation_mode(module), torch.no_grad():
            for batch in data:
                module(*(torch.from_numpy(np.array(batch[name])) for name in names))
    finally:
        for handle in handles:
            handle.remove()
    return seen
