"""Quantization-aware training: `prepare_qat` and `from_relax` return a trainable torch module.

Export, load, prepare and calibrate come before the training. `convert`, which propagates, folds and
lowers, comes after it. PyTorch is an extra and is imported when a function here is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import tvm

from relayquant.base.arguments import check_arguments
from relayquant.base.optional import needed
from relayquant.config import BackendConfig, BatchNorm, Effort, QConfigMapping, Ranges
from relayquant.errors import (
    ConfigError,
    DataWarning,
    ModelError,
    format_count,
    warn_user,
)
from relayquant.flow.pipeline import calibrate_model, prepare_model
from relayquant.flow.refine.kept_samples import warn_few
from relayquant.flow.refine.prepared_edit import review_prepared
from relayquant.flow.settings import CalibrateSettings, PrepareSettings
from relayquant.ir.rewrite import Skip
from relayquant.ir.rewrite.bind import Model, split_model
from relayquant.stages.backends import resolve_backend
from relayquant.stages.effort import default_mapping, resolve_effort
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.custom_config import PrepareCustomConfig
from relayquant.torch.exporting import check_module, check_state, export, free_batch
from relayquant.torch.exporting import load as load_program
from relayquant.torch.training.batch_norm import FoldedNorm, Normalization, find_folded, find_norms
from relayquant.torch.user_mapping import read_mapping

if TYPE_CHECKING:
    from relayquant.torch.call_form import CallForm
    from relayquant.torch.standalone import Unit
    from relayquant.torch.training.trainable import TrainableModule


@check_arguments
def prepare_qat(
    module: Any,
    example_inputs: tuple[Any, ...],
    qconfig_mapping: Any = None,
    backend: BackendConfig | str | None = None,
    *,
    calibration_dataset: Any = None,
    ranges: Ranges | str = Ranges.LEARNED,
    weight_ranges: Ranges | str | None = None,
    batch_norm: BatchNorm | str = BatchNorm.FROZEN,
    effort: Effort | str = Effort.BALANCED,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
) -> Any:
    """Prepare a PyTorch module to train with its quantization, in any training loop.

    The module is exported in evaluation mode, prepared and calibrated as in `quantize`. The result
    computes the same graph with torch operators and rounds values at the same places and in the
    same way as the integer module. Gradients pass roundings straight through and are 0 outside of
    the range. Its parameters are weights, biases (for batch norms with live statistics: gamma and
    beta) and, with learned ranges, one `log_factor` for each scale. The example module is not
    changed, and shares nothing with the result. Parameters that are frozen in it
    (`requires_grad=False`) and buffers stay frozen, and tied parameters are one parameter. With
    learned ranges, scales of frozen weights still train. Random numbers of training mode, as of
    dropout, are left out with a warning.

    Args:
        module: `torch.nn.Module`, float32.
        example_inputs, example_kwargs: As for `torch.export.export`. Calls must have the same
            structure. If the examples hold more than one sample, and the module allows it, it
            trains with any number of samples.
        qconfig_mapping, backend, effort: As for `relayquant.torch.quantize`.
        calibration_dataset: Data set for the first ranges, as for `relayquant.quantize`. Without
            it, the first batches in training mode give the ranges, as with FX: the first batch with
            a moving average, which then continues, else `rounding.WATCHED` batches. Then nothing is
            fitted to data before: `effort` is "fast".
        ranges: How ranges of activations change in training. See `Ranges`.
        weight_ranges: The same for weights. None: as `ranges`.
        batch_norm: Treatment of batch norms. See `BatchNorm`. With live statistics, nothing is
            scaled between channels before calibration. A batch norm that is not part of a quantized
            operator with a constant weight stays frozen, with a warning that says why.
        dynamic_shapes: As for `torch.export.export`, for the trainable and the integer module.
            None: the integer module has the shapes of the example inputs, as with `quantize`.
        prepare_custom_config: Modules that stay in float, and train in float; standalone modules,
            which train with their own mapping and backend; and custom modules, whose observed form
            is called and trains, and which `convert` replaces by their quantized form. With the
            last two, calibration data is held in memory, and the integer module has the shapes of
            the example inputs. Integer inputs and outputs apply to the result of `convert`, as its
            ledger shows. The trainable module takes and returns floats, rounded with the same
            parameters.

    Returns:
        A `TrainableModule`. `convert` makes the integer module from it.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ModelError: torch.export cannot export the module, it keeps state between calls, or
            operators have no torch form.
        ConfigError: the configuration is wrong; an operator cannot be trained because it has a
            narrow accumulator or run-time parameters; or tied parameters became different in the
            preparation.
        DataError: the data does not fit the module.
    """
    check_module(module)
    from relayquant.torch.training.random_numbers import warn_random

    warn_random(module, example_inputs, example_kwargs)
    inputs, config, backend = example_inputs, prepare_custom_config, resolve_backend(backend)
    qconfig_mapping = read_mapping(qconfig_mapping, module, backend)
    is_live, is_waiting = batch_norm is BatchNorm.LIVE, calibration_dataset is None
    build = partial(
        build_trainable, ranges=ranges, weight_ranges=weight_ranges, is_waiting=is_waiting
    )
    effort = Effort.FAST if is_waiting else resolve_effort(effort)
    dtypes: dict[str, Any] = {}
    if config is not None:
        if config.standalone or config.custom:
            if dynamic_shapes is not None or example_kwargs is not None:
                raise ConfigError(
                    "prepare_qat: leave out dynamic_shapes and example_kwargs for a model with "
                    "standalone or custom modules. It takes inputs by position, and any number "
                    "of samples if its example inputs hold more than one.",
                    code="RQ102",
                )
            from relayquant.torch.standalone import UnitSettings, prepare_unit, read_batches

            def finish(unit: Unit) -> TrainableModule:
                folded = find_live(unit.mod, unit.params, unit.prepared) if is_live else {}
                return build(unit.prepared, folded=folded, unit=unit, module=unit.opened.module)

            settings = UnitSettings(
                backend=backend, effort=effort, normalization=batch_norm, frees_batch=True
            )
            data = [inputs] if is_waiting else calibration_dataset
            batches = read_batches(module, inputs, data, frees_batch=True)
            with ignoring_examples(is_waiting):
                unit = prepare_unit(module, config, batches, qconfig_mapping, settings, finish)
            return check_interface(finish(unit))
        mapping = qconfig_mapping or default_mapping(backend, effort)
        qconfig_mapping = config.extend_mapping(mapping, module)
        dtypes = config.name_dtypes(backend)
    settings = PrepareSettings(effort=effort, **dtypes)

    def prepare(shapes: Any) -> TrainableModule:
        program = export(module, inputs, example_kwargs=example_kwargs, dynamic_shapes=shapes)
        mod, params = load_program(program)
        check_state(module, inputs, example_kwargs)
        read = import_trainable().CallForm.read
        is_free = dynamic_shapes is not None
        form = read(module, program, inputs, example_kwargs, is_free=is_free)
        with ignoring_examples(is_waiting):
            prepared = calibrate_graph(
                mod,
                params,
                qconfig_mapping,
                backend,
                list_examples(inputs, example_kwargs) if is_waiting else calibration_dataset,
                settings,
                is_plain=is_live or is_waiting,
            )
        folded = find_live(mod, params, prepared) if is_live else {}
        return check_interface(build(prepared, folded=folded, form=form, module=module))

    if dynamic_shapes is None and (freed := free_batch(inputs)) and not example_kwargs:
        try:
            return prepare(freed)
        except ModelError:
            pass  # it depends on the number of samples, or its operators do
    return prepare(dynamic_shapes)


@contextmanager
def ignoring_examples(is_waiting: bool) -> Iterator[None]:
    """Without calibration data, do not warn of the example inputs: their ranges have no meaning."""
    with warnings.catch_warnings():
        if is_waiting:
            warnings.simplefilter("ignore", DataWarning)
        yield


def list_examples(inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> list[Any]:
    """Return example inputs as a data set."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.utils import _pytree as pytree  # pyright: ignore[reportMissingImports]

    leaves = pytree.tree_leaves((inputs, dict(kwargs or {})))
    arrays = [leaf.detach().numpy() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [tuple(arrays)] if len(arrays) > 1 else arrays


@check_arguments
def from_relax(
    mod: Model | PreparedModel,
    params: Mapping[str, Any] | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    backend: BackendConfig | str | None = None,
    *,
    calibration_dataset: Any = None,
    ranges: Ranges | str = Ranges.LEARNED,
    weight_ranges: Ranges | str | None = None,
    batch_norm: BatchNorm | str = BatchNorm.FROZEN,
    effort: Effort | str = Effort.BALANCED,
) -> Any:
    """Convert a Relax module from any source to a trainable torch module.

    Without `calibration_dataset` and `qconfig_mapping` it is the float model, and `convert` returns
    the float module with the trained weights. With them it trains with its quantization. See
    `prepare_qat` for the arguments.

    Args:
        mod: A module from `load`; or a calibrated model from `calibrate`, with no other arguments
            than the ranges.
        params: Its parameters, if they are not bound.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ModelError: operators have no torch form; all of them are listed.
        ConfigError, DataError: as for `prepare_qat`.
    """
    if isinstance(mod, PreparedModel):
        given = params, qconfig_mapping, backend, calibration_dataset
        if any(value is not None for value in given) or batch_norm is BatchNorm.LIVE:
            raise ConfigError(
                "from_relax got a calibrated model, which already has parameters, mapping, "
                "backend, data and folded batch norms. Pass only ranges and weight_ranges, or "
                "start from the module.",
                code="RQ102",
            )
        return build_trainable(mod, ranges, weight_ranges, {})
    mod, params = split_model(mod, params)
    import_trainable()
    is_live = batch_norm is BatchNorm.LIVE
    is_float = calibration_dataset is None and qconfig_mapping is None
    if is_float:
        fast = PrepareSettings(effort=Effort.FAST)
        prepared = prepare_model(
            mod, params, None, QConfigMapping(), resolve_backend(backend), fast
        )
    else:
        settings = PrepareSettings(effort=resolve_effort(effort))
        prepared = calibrate_graph(
            mod, params, qconfig_mapping, backend, calibration_dataset, settings, is_plain=is_live
        )
    folded = find_live(mod, params, prepared) if is_live else {}
    return build_trainable(prepared, ranges, weight_ranges, folded)


def calibrate_graph(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    mapping: QConfigMapping | None,
    backend: BackendConfig | str | None,
    calibration_dataset: Any,
    settings: PrepareSettings,
    *,
    is_plain: bool,
) -> PreparedModel:
    """Calibrate a module for the first ranges of training.

    `is_plain`: nothing is scaled between channels, because batch norms have live statistics or
    there is no real data.
    """
    data = None if is_plain else calibration_dataset
    prepared = prepare_model(mod, params, data, mapping, resolve_backend(backend), settings)
    review_prepared(prepared, strict=False)
    return warn_few(calibrate_model(prepared, calibration_dataset, CalibrateSettings()))


def check_interface(trained: TrainableModule) -> TrainableModule:
    """Check before the training that requested inputs and outputs can be integers. Return the
    module.

    Raises:
        ConfigError: one cannot.
    """
    prepared = trained.source.prepared
    if any(value.is_integer for value in (*prepared.inputs, *prepared.outputs)):
        trained.to_quantized()
    return trained


def import_trainable() -> Any:
    """Import the module that needs torch.

    Raises:
        MissingDependencyError: PyTorch is not installed.
    """
    with needed("Training needs PyTorch", "relayquant[torch]"):
        import torch  # noqa: F401 # pyright: ignore[reportMissingImports]
    from relayquant.torch.training import trainable

    return trainable


def build_trainable(
    prepared: PreparedModel,
    ranges: Ranges,
    weight_ranges: Ranges | None,
    folded: Mapping[str, FoldedNorm],
    unit: Unit | None = None,
    form: CallForm | None = None,
    is_waiting: bool = False,
    module: Any = None,
) -> TrainableModule:
    """Build the torch module of a calibrated model, with the submodules that it calls. See
    `TrainableModule`.

    `module`: the module of PyTorch that it comes from, whose frozen parameters stay frozen, and
    tied ones tied.
    """
    # Training changes the parameters, so the records of the observers no longer apply.
    prepared = replace(prepared, statistics={})
    chosen = ranges if weight_ranges is None else weight_ranges
    return import_trainable().TrainableModule(
        prepared, ranges, chosen, folded, unit, form, is_waiting, module
    )


def find_live(
    mod: tvm.IRModule, params: Mapping[str, Any] | None, prepared: PreparedModel
) -> dict[str, FoldedNorm]:
    """Find batch norms that can have live statistics, by name. Warns about the others."""
    found: dict[str, FoldedNorm] = {}
    frozen: list[str] = []
    for norm in find_norms(mod, params):
        if not isinstance(norm, Normalization):
            frozen.append(f"{norm[0]!r}: {norm[1]}")
            continue
        folded = find_folded(prepared, norm)
        if isinstance(folded, Skip):
            frozen.append(f"{norm.name!r}: {folded.reason}")
        else:
            found[norm.name] = folded
    if frozen:
        warn_user(
            f"{format_count(len(frozen), 'batch norm')} of the model cannot have live statistics "
            f"and stays frozen ({'; '.join(frozen)}).",
            code="RQ206",
        )
    return found
