"""Submodules that are quantized by themselves, or have a quantized form of the user's: each takes
its place in a copy of the module, as its reference form or as it is.

In front of the data flow: what the whole model's preparation then finds quantized it leaves as it
is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from relayquant.backends import resolve_backend
from relayquant.config import BackendConfig, QConfigMapping, Selector
from relayquant.datasets import InputInfo, open_dataset
from relayquant.dialect.qnn.quantization import QUANTIZE
from relayquant.effort import Effort, default_mapping
from relayquant.errors import ConfigError, ModelError
from relayquant.importers import import_torch
from relayquant.pipeline import calibrate_model, convert_model, prepare_model, review_prepared
from relayquant.rewrite import Graph
from relayquant.settings import CalibrateSettings, PrepareSettings
from relayquant.torch.custom_config import PrepareCustomConfig, StandaloneRule, make_optional
from relayquant.torch.exported import evaluation_mode, export
from relayquant.torch.reference_module import ReferenceModule

#: What a submodule was called with, one tuple of tensors for each call.
Calls = list[tuple[torch.Tensor, ...]]


def replace_parts(
    module: nn.Module,
    config: PrepareCustomConfig,
    example_inputs: tuple[Any, ...],
    dataset: Any,
    mapping: QConfigMapping | None,
    backend: BackendConfig,
    effort: Effort,
) -> nn.Module:
    """A copy of a module whose standalone submodules are in reference form, and whose custom ones
    are in their quantized form.

    They are calibrated on what they get when the module runs on the data, all of which is held at
    once.

    Raises:
        ModelError: a submodule is not called, or not with tensors alone; or cannot be exported.
        ConfigError: an input or output that is to be of integers is not quantized.
    """
    custom, alone = config.find_custom(module), list(config.find_standalone(module))
    if not custom and not alone:
        return module
    data = open_dataset(dataset, describe_examples(module, example_inputs))
    batches = [tuple(map(torch.from_numpy, map(np.array, batch.values()))) for batch in data]
    result = copy.deepcopy(module)
    if custom:
        place(result, {p: call_builder(o.from_float, module, p) for p, (o, _) in custom.items()})
        seen = record_inputs(result, list(custom), batches)
        forms = {
            path: call_builder(quantized.from_observed, result, path)
            for path, (_, quantized) in custom.items()
        }
        for path, form in forms.items():
            check_form(path, form, take_calls(seen, path)[0])
        place(result, forms)
    seen = record_inputs(result, [path for path, _ in alone], batches)
    references = {
        path: quantize_part(
            result, path, rule, take_calls(seen, path), mapping, backend, effort
        )
        for path, rule in alone
    }  # fmt: skip
    place(result, references)
    return result


def describe_examples(module: nn.Module, example_inputs: tuple[Any, ...]) -> tuple[InputInfo, ...]:
    """What the module takes, by the names that its export gives the arguments of `forward`."""
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    names: list[str] = []
    for name, parameter in inspect.signature(module.forward).parameters.items():
        is_many = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}_{i}" for i in range(len(inputs))] if is_many else [name]
    if not all(isinstance(value, torch.Tensor) for value in inputs) or len(inputs) > len(names):
        raise ModelError(
            "A model with standalone or custom modules takes tensors by position; wrap it in a "
            "module that does."
        )
    return tuple(
        InputInfo(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in zip(names, inputs, strict=False)
    )


def place(module: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    """Put modules in the places of these paths."""
    for path, part in parts.items():
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, part)


def call_builder(build: Any, module: nn.Module, path: str) -> nn.Module:
    """The form of the submodule at a path that a class method of the user's makes.

    Raises:
        ModelError: it makes no module.
    """
    form = build(copy.deepcopy(module.get_submodule(path)))
    if isinstance(form, nn.Module):
        return form
    raise ModelError(
        f"Custom module {path!r}: {build.__qualname__} returned {type(form).__name__}; it has to "
        "return a torch.nn.Module."
    )


def check_form(path: str, form: nn.Module, examples: tuple[torch.Tensor, ...]) -> None:
    """That a graph can hold the quantized form of a custom module.

    Raises:
        ModelError: it cannot; with the reason.
    """
    try:
        import_torch(export(form, examples))
    except ModelError as error:
        raise ModelError(
            f"Custom module {path!r}: its quantized form {type(form).__name__} cannot be a part of "
            f"the integer module. {error} Write it with operators that torch.export and the "
            "importer know; or leave the module in float (set_non_traceable_module_classes)."
        ) from error


def quantize_part(
    module: nn.Module,
    path: str,
    rule: StandaloneRule,
    calls: Calls,
    mapping: QConfigMapping | None,
    backend: BackendConfig,
    effort: Effort,
) -> ReferenceModule:
    """The reference form of the submodule at a path, quantized on its calls."""
    config = rule.prepare_custom_config or PrepareCustomConfig()
    backend = backend if rule.backend is None else resolve_backend(rule.backend)
    part = module.get_submodule(path)
    arrays = [tuple(value.numpy() for value in call) for call in calls]
    chosen, shell = rule.qconfig_mapping, part
    if chosen is None and mapping is not None:  # names in it are paths of the whole model
        chosen, shell = make_optional(mapping, Selector), Shell(path, part)
    chosen = config.extend_mapping(chosen or default_mapping(backend, effort), shell)
    mod, params = import_torch(export(shell, calls[0]))
    settings = PrepareSettings(effort=effort, **config.name_dtypes(backend))
    prepared = prepare_model(mod, params, arrays, chosen, backend, settings)
    review_prepared(prepared, strict=False)
    prepared = calibrate_model(prepared, arrays, CalibrateSettings())
    reference = convert_model(prepared)
    for value in prepared.inputs:
        if value.is_integer:
            check_input(reference, value.name, path)
    return ReferenceModule(reference, prepared.graph.inputs)


def check_input(reference: Any, name: str, path: str) -> None:
    """That all readers of an input of a standalone module take integers.

    Raises:
        ConfigError: one takes floats.
    """
    graph = Graph(reference)
    users = graph.users[graph.vars[name]]
    floats = [user.name for user in users if graph.op_name(user) != QUANTIZE]
    if floats or not users:
        who = f"{floats[0]!r} reads it in float" if floats else "nothing reads it"
        raise ConfigError(
            f"set_input_quantized_indexes: input {name!r} of standalone module {path!r} is no "
            f"integer: {who}. Leave it out, or quantize what reads it."
        )


class Shell(nn.Module):
    """A module that holds another one at its path, so that values get the names that they have in
    the whole model.
    """

    def __init__(self, path: str, part: nn.Module) -> None:
        super().__init__()
        self._path = path
        *parents, name = path.split(".")
        holder: nn.Module = self
        for parent in parents:
            holder.add_module(parent, nn.Module())
            holder = holder.get_submodule(parent)
        holder.add_module(name, part)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.get_submodule(self._path)(*inputs)


def take_calls(seen: Mapping[str, Calls], path: str) -> Calls:
    """The calls of a submodule.

    Raises:
        ModelError: there are none.
    """
    if not seen[path]:
        raise ModelError(
            f"Module {path!r} is to be quantized by itself, but the model does not call it."
        )
    return seen[path]


def record_inputs(
    module: nn.Module, paths: Sequence[str], batches: Sequence[tuple[torch.Tensor, ...]]
) -> dict[str, Calls]:
    """What submodules are called with when the module runs on data.

    Raises:
        ModelError: one is called with something else than tensors.
    """
    seen: dict[str, Calls] = {path: [] for path in paths}
    if not paths:
        return seen

    def listen(path: str) -> Any:
        def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs or not all(isinstance(value, torch.Tensor) for value in args):
                raise ModelError(
                    f"Module {path!r} is to be quantized by itself, but is called with more than "
                    "tensors by position. Choose a module within it, or around it."
                )
            seen[path].append(tuple(value.detach().clone() for value in args))

        return module.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True)

    handles = [listen(path) for path in paths]
    try:
        with evaluation_mode(module), torch.no_grad():
            for batch in batches:
                module(*batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen
