"""Submodules that are quantized separately, or that have the user's own quantized form.

Each replaces its original in a copy of the module, in reference form or as it is. The preparation
of the whole model leaves parts unchanged that are already quantized.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import tvm
from torch import nn

from relayquant.config import BackendConfig, BatchNorm, Effort, QConfigMapping
from relayquant.config.mapping import Selector
from relayquant.data import InputInfo, open_dataset
from relayquant.errors import ConfigError, ModelError
from relayquant.flow.pipeline import calibrate_model, convert_model, prepare_model
from relayquant.flow.refine.kept_samples import warn_few
from relayquant.flow.refine.prepared_edit import review_prepared
from relayquant.flow.settings import CalibrateSettings, PrepareSettings
from relayquant.ir.dialect.qnn.quantization import QUANTIZE
from relayquant.ir.rewrite import Graph
from relayquant.stages.backends import resolve_backend
from relayquant.stages.effort import default_mapping
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.custom_config import PrepareCustomConfig, StandaloneRule, make_optional
from relayquant.torch.exporting import export, free_batch, load, load_module
from relayquant.torch.interpreter.reference_module import ReferenceModule
from relayquant.torch.submodule_cut import (
    CutModule,
    SubmoduleCall,
    Tensors,
    cut_module,
    place,
    record_calls,
)
from relayquant.torch.user_mapping import read_mapping


@dataclass(frozen=True, kw_only=True)
class UnitSettings:
    """Settings for a separately prepared module.

    Attributes:
        backend, effort: As for `relayquant.quantize`.
        normalization: Treatment of batch norms.
        frees_batch: Whether the module accepts any number of samples.
    """

    backend: BackendConfig
    effort: Effort
    normalization: BatchNorm = BatchNorm.FROZEN
    frees_batch: bool = False


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that is calibrated separately, without its standalone and custom submodules.

    Attributes:
        mod, params: The float graph, with a placeholder for each call of such a submodule.
        prepared: The calibrated graph.
        opened: The placeholders.
        parts: Modules called there, by path; custom submodules in observed form.
        forms: Quantized forms of the custom submodules.
        path: Path in the whole model, "" for the whole model.
        examples: Its example arguments.
    """

    mod: tvm.IRModule
    params: Mapping[str, Any]
    prepared: PreparedModel
    opened: CutModule
    parts: Mapping[str, nn.Module]
    forms: Mapping[str, QuantizedForm]
    path: str
    examples: Tensors


@dataclass(frozen=True)
class QuantizedForm:
    """Quantized form of a custom submodule.

    Attributes:
        path: Path of the submodule.
        kind: A class with `from_observed`.
        examples: Its example arguments.
    """

    path: str
    kind: Any
    examples: Tensors

    def build(self, observed: nn.Module) -> nn.Module:
        """Build the quantized form of a module that has observed.

        Raises:
            ModelError: it is not a module, or no graph can hold it.
        """
        form = call_builder(self.kind.from_observed, observed, self.path)
        check_form(self.path, form, self.examples)
        return form


#: Converts a calibrated unit.
Finish = Callable[[Unit], nn.Module]


def replace_parts(
    module: nn.Module,
    config: PrepareCustomConfig,
    example_inputs: tuple[Any, ...],
    dataset: Any,
    mapping: QConfigMapping | None,
    backend: BackendConfig,
    effort: Effort,
) -> nn.Module:
    """Copy a module with standalone submodules in reference form, and custom submodules in
    quantized form.

    They are calibrated on their inputs when the module runs on the data. All of these inputs are
    held in memory.

    Raises:
        ModelError: a submodule is not called, or an argument is not a tensor; or it cannot be
            exported.
        ConfigError: a requested integer input or output is not quantized.
    """
    if not config.custom and not config.standalone:
        return module
    result = copy.deepcopy(module)
    batches = read_batches(module, example_inputs, dataset)
    quantize_custom(result, config.find_custom(module), batches)
    alone = dict(config.find_standalone(module))
    settings = UnitSettings(backend=backend, effort=effort)
    calls = record_calls(result, list(alone), batches)
    place(result, prepare_standalone(result, alone, calls, mapping, settings, finish_reference))
    return result


def read_batches(
    module: nn.Module, example_inputs: tuple[Any, ...], dataset: Any, *, frees_batch: bool = False
) -> list[Tensors]:
    """Read all of a data set, as tensors."""
    data = open_dataset(dataset, describe_examples(module, example_inputs, frees_batch))
    return [tuple(map(torch.from_numpy, map(np.array, batch.values()))) for batch in data]


def observe_custom(module: nn.Module, custom: Mapping[str, tuple[Any, Any]]) -> None:
    """Replace custom modules by their observed forms."""
    observed = {
        path: call_builder(kind.from_float, module.get_submodule(path), path)
        for path, (kind, _) in custom.items()
    }
    place(module, observed)


def find_forms(
    custom: Mapping[str, tuple[Any, Any]], calls: Sequence[SubmoduleCall]
) -> dict[str, QuantizedForm]:
    """Return the quantized forms of custom submodules, by path."""
    taken = {call.path: call.taken for call in reversed(calls)}
    return {path: QuantizedForm(path, kind, taken[path]) for path, (_, kind) in custom.items()}


def quantize_custom(
    module: nn.Module, custom: Mapping[str, tuple[Any, Any]], batches: Sequence[Tensors]
) -> None:
    """Replace custom modules by their quantized forms, after observation."""
    if not custom:
        return
    observe_custom(module, custom)
    (first, *_) = record_calls(module, list(custom), batches)
    forms = find_forms(custom, first)
    place(module, {path: form.build(module.get_submodule(path)) for path, form in forms.items()})


def prepare_standalone(
    module: nn.Module,
    alone: Mapping[str, StandaloneRule],
    calls: Sequence[Sequence[SubmoduleCall]],
    mapping: QConfigMapping | None,
    settings: UnitSettings,
    finish: Finish,
) -> dict[str, nn.Module]:
    """Convert standalone submodules, by path. Each is calibrated on its calls."""
    found: dict[str, nn.Module] = {}
    for path, rule in alone.items():
        own = [call.taken for row in calls for call in row if call.path == path]
        wrapper, config, given = place_in_wrapper(module, path, rule, mapping)
        backend = settings.backend if rule.backend is None else resolve_backend(rule.backend)
        each = replace(settings, backend=backend)
        found[path] = finish(prepare_unit(wrapper, config, own, given, each, finish, path))
    return found


def prepare_unit(
    module: nn.Module,
    config: PrepareCustomConfig,
    batches: Sequence[Tensors],
    mapping: QConfigMapping | None,
    settings: UnitSettings,
    finish: Finish,
    path: str = "",
) -> Unit:
    """Prepare a module with its configuration and example arguments as a unit.

    Custom submodules are called in their observed form. Standalone submodules are called as
    `finish` converts them.
    """
    twin, custom = copy.deepcopy(module), config.find_custom(module)
    alone = dict(config.find_standalone(module))
    observe_custom(twin, custom)
    calls = record_calls(twin, [*custom, *alone], batches)
    parts = {name: twin.get_submodule(name) for name in custom}
    parts |= prepare_standalone(twin, alone, calls, mapping, settings, finish)
    names = [info.name for info in describe_examples(module, batches[0])]
    opened = cut_module(twin, names, batches[0], calls[0])
    rows = [
        (*batch, *(tensor for call in row for tensor in call.given))
        for batch, row in zip(batches, calls, strict=True)
    ]
    shapes = free_batch(rows[0]) if settings.frees_batch else None
    mod, params = load_module(opened.module, rows[0], dynamic_shapes=shapes)
    backend, is_live = settings.backend, settings.normalization is BatchNorm.LIVE
    arrays = [tuple(tensor.numpy() for tensor in row) for row in rows]
    chosen = config.extend_mapping(mapping or default_mapping(backend, settings.effort), module)
    asked = PrepareSettings(effort=settings.effort, **config.name_dtypes(backend))
    data = None if is_live else arrays
    prepared = prepare_model(mod, params, data, chosen, backend, asked)
    review_prepared(prepared, strict=False)
    prepared = warn_few(calibrate_model(prepared, arrays, CalibrateSettings()))
    forms = find_forms(custom, calls[0])
    return Unit(mod, params, prepared, opened, parts, forms, path, batches[0])


def finish_reference(unit: Unit) -> ReferenceModule:
    """Return the reference form of a unit, with custom submodules in their quantized form.

    Raises:
        ConfigError: a requested integer input of a standalone module is not quantized.
    """
    reference, opened = convert_model(unit.prepared), unit.opened
    for value in unit.prepared.inputs:
        if value.is_integer and unit.path:
            check_input(reference, value.name, unit.path)
    parts = {**unit.parts, **{path: f.build(unit.parts[path]) for path, f in unit.forms.items()}}
    names = unit.prepared.graph.inputs
    return ReferenceModule(reference, names, opened.placeholders, parts, opened.form)


def describe_examples(
    module: nn.Module, inputs: tuple[Any, ...], frees_batch: bool = False
) -> tuple[InputInfo, ...]:
    """Describe the module's inputs by the names that its export gives the arguments of `forward`.

    Args:
        frees_batch: Whether first axes of more than one sample may have any size.
    """
    names: list[str] = []
    for name, parameter in inspect.signature(module.forward).parameters.items():
        is_many = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}_{i}" for i in range(len(inputs))] if is_many else [name]
    if not all(isinstance(value, torch.Tensor) for value in inputs) or len(inputs) > len(names):
        raise ModelError(
            "A model with standalone or custom modules takes tensors by position; wrap it in a "
            "module that does.",
            code="RQ206",
        )

    def describe_shape(value: torch.Tensor) -> tuple[int | str, ...]:
        sizes = tuple(value.shape)
        return ("batch", *sizes[1:]) if frees_batch and sizes and sizes[0] > 1 else sizes

    return tuple(
        InputInfo(name, describe_shape(value), str(value.dtype).removeprefix("torch."))
        for name, value in zip(names, inputs, strict=False)
    )


def call_builder(build: Any, part: nn.Module, path: str) -> nn.Module:
    """Call the user's class method with a copy of the submodule at a path, and return its form.

    Raises:
        ModelError: it returns no module.
    """
    form = build(copy.deepcopy(part))
    if isinstance(form, nn.Module):
        return form
    raise ModelError(
        f"Custom module {path!r}: {build.__qualname__} returned {type(form).__name__}; it has to "
        "return a torch.nn.Module.",
        code="RQ206",
    )


def check_form(path: str, form: nn.Module, examples: tuple[torch.Tensor, ...]) -> None:
    """Check that a graph can hold the quantized form of a custom module.

    Raises:
        ModelError: it cannot, with the reason.
    """
    try:
        load(export(form, examples))
    except ModelError as error:
        raise ModelError(
            f"Custom module {path!r}: its quantized form {type(form).__name__} cannot be a part of "
            f"the integer module. {error} Write it with operators that torch.export and the "
            "importer know; or leave the module in float (set_non_traceable_module_classes).",
            code="RQ206",
        ) from error


def place_in_wrapper(
    module: nn.Module, path: str, rule: StandaloneRule, mapping: QConfigMapping | None
) -> tuple[nn.Module, PrepareCustomConfig, QConfigMapping | None]:
    """Return the standalone module at a path inside a wrapper, with its configuration and mapping.

    Paths are relative to the wrapper.
    """
    config = rule.prepare_custom_config or PrepareCustomConfig()
    part = module.get_submodule(path)
    if rule.qconfig_mapping is not None or mapping is None:
        return part, config, read_mapping(rule.qconfig_mapping, part, rule.backend)
    # Names in the caller's mapping are paths of the whole model.
    return Wrapper(path, part), config.within(path, part), make_optional(mapping, Selector)


def check_input(reference: Any, name: str, path: str) -> None:
    """Check that all readers of a standalone module's input accept integers.

    Raises:
        ConfigError: one needs floats.
    """
    graph = Graph(reference)
    users = graph.users[graph.vars[name]]
    floats = [user.name for user in users if graph.op_name(user) != QUANTIZE]
    if floats or not users:
        who = f"{floats[0]!r} reads it in float" if floats else "nothing reads it"
        raise ConfigError(
            f"set_input_quantized_indexes: input {name!r} of standalone module {path!r} cannot be "
            f"integer: {who}. Leave it out, or quantize the operators that read it.",
            code="RQ103",
        )


class Wrapper(nn.Module):
    """Holds another module at its path, so that values have the same names as in the whole
    model.
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
