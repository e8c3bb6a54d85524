"""`quantize(module, example_inputs, dataset)`: PyTorch module -> integer module.

It exports the module and calls `load` and `relayquant.quantize`. PyTorch is an extra and is
imported when a function here is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm

from relayquant.base.arguments import check_arguments
from relayquant.config import Effort
from relayquant.errors import ConfigError
from relayquant.flow.quantizer import quantize as quantize_module
from relayquant.stages.backends import resolve_backend
from relayquant.stages.effort import default_mapping, resolve_effort
from relayquant.torch.custom_config import PrepareCustomConfig
from relayquant.torch.exporting import check_module, load_module
from relayquant.torch.user_mapping import read_mapping


@check_arguments
def quantize(
    module: Any,
    example_inputs: tuple[Any, ...],
    dataset: Any,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
    **options: Any,
) -> tvm.IRModule:
    """Quantize a PyTorch module after training.

    Values are named after the modules that compute them, so that
    `QConfigMapping().set_module_name("layer1.0.conv1", ...)` finds them.

    Args:
        module: `torch.nn.Module`, float32. It is exported in evaluation mode and not changed.
        example_inputs, example_kwargs, dynamic_shapes: As for `torch.export.export`. Shapes are
        fixed to those of the example inputs, unless `dynamic_shapes` frees them. For
            any batch size: `({0: torch.export.Dim("batch")},)`.
        prepare_custom_config: Submodules that stay in float, are quantized separately, or have
            their own quantized form. With the last two, shapes are fixed to those of the example
            inputs. Also integer inputs and outputs; `input_dtypes` and `output_dtypes` of
            `relayquant.quantize` select their dtypes.
        dataset: As for `relayquant.quantize`. Items may be torch tensors, so a DataLoader without
            labels works.
        options: Further arguments of `relayquant.quantize`. A `qconfig_mapping` may also select
            the modules of a class (`QConfigMapping().set_object_type(torch.nn.Linear, ...)`), and
            may be a `torch.ao.quantization` QConfigMapping or QConfig.

    Returns:
        The result of `relayquant.quantize`. Inputs are in the order of the module's arguments.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ModelError: torch.export cannot export the module, or an operator is not supported; or the
            module keeps state between calls.
        DataError, ConfigError: as for `relayquant.quantize`.
    """
    shaping = {"example_kwargs": example_kwargs, "dynamic_shapes": dynamic_shapes}
    check_module(module)
    if "qconfig_mapping" in options:
        given, backend = options["qconfig_mapping"], options.get("backend")
        options["qconfig_mapping"] = read_mapping(given, module, backend)
    if prepare_custom_config is not None:
        has_parts = prepare_custom_config.standalone or prepare_custom_config.custom
        if has_parts and any(value is not None for value in shaping.values()):
            raise ConfigError(
                "quantize: a model with standalone or custom modules needs example inputs by "
                "position and fixed shapes. Leave out example_kwargs and dynamic_shapes.",
                code="RQ102",
            )
        module, options = apply_config(
            module, prepare_custom_config, example_inputs, dataset, options
        )
    mod, params = load_module(module, example_inputs, may_have_state=True, **shaping)
    return quantize_module(mod, params, dataset, **options)


def apply_config(
    module: Any,
    config: PrepareCustomConfig,
    example_inputs: tuple[Any, ...],
    dataset: Any,
    options: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Apply a configuration to the (module, options) of `quantize`."""
    from relayquant.torch.standalone import replace_parts

    backend = resolve_backend(options.get("backend"))
    effort = resolve_effort(options.get("effort", Effort.BALANCED))
    given = options.get("qconfig_mapping")
    mapping = config.extend_mapping(given or default_mapping(backend, effort), module)
    module = replace_parts(module, config, example_inputs, dataset, given, backend, effort)
    dtypes = {
        name: {**asked, **(options.get(name) or {})}
        for name, asked in config.name_dtypes(backend).items()
    }
    return module, {**options, **dtypes, "qconfig_mapping": mapping, "backend": backend}
