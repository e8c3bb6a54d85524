"""Quantization-aware training: `prepare_qat` and `from_module` give a torch module that trains,
`convert` makes the integer module of it.

Around the data flow: export, load, prepare and calibrate come before the training; convert, expand,
fold and lower behind it. PyTorch is an extra and is imported when a function here is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tvm

from relayquant.arguments import check_arguments
from relayquant.backends import resolve_backend
from relayquant.config import BackendConfig, QConfigMapping
from relayquant.effort import Effort, default_mapping, resolve_effort
from relayquant.errors import ConfigError, MissingDependencyError, format_count, warn_user
from relayquant.pipeline import calibrate_model, prepare_model, review_prepared
from relayquant.prepared import PreparedModel
from relayquant.rewrite import Skip
from relayquant.settings import CalibrateSettings, PrepareSettings
from relayquant.torch.batch_norm import FoldedNorm, Normalization, find_folded, find_norms
from relayquant.torch.custom_config import PrepareCustomConfig
from relayquant.torch.exported import check_module, free_batch, load_module
from relayquant.torch.ranges import BatchNorm, Ranges

if TYPE_CHECKING:
    from relayquant.torch.standalone import Unit
    from relayquant.torch.trainable import TrainableModule


@check_arguments
def prepare_qat(
    module: Any,
    example_inputs: tuple[Any, ...],
    qconfig_mapping: QConfigMapping | None = None,
    backend: BackendConfig | str | None = None,
    *,
    calibration: Any,
    ranges: Ranges = Ranges.LEARNED,
    weight_ranges: Ranges | None = None,
    batch_norm: BatchNorm = BatchNorm.FROZEN,
    effort: Effort | str = Effort.BALANCED,
    dynamic_shapes: Any = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
) -> Any:
    """A PyTorch module -> one that trains with its quantization, in anyone's loop.

    The module is exported in evaluation mode, prepared and calibrated as `quantize` does it. What
    comes back computes the same graph with torch operators and rounds values where, and as, the
    integer module will; gradients pass roundings straight through and are 0 outside of the range.
    Its parameters are weights, biases (of batch norms with live statistics gamma and beta) and,
    with learned ranges, one `log_factor` for each scale. The example module is not changed, and
    shares nothing with it.

    Args:
        module: `torch.nn.Module`, float32.
        example_inputs: As for `torch.export.export`. With more than one sample the module takes
            any number of them.
        qconfig_mapping, backend, effort: As for `relayquant.quantize`.
        calibration: Data set that gives the first ranges; as for `relayquant.quantize`.
        ranges: What ranges of activations do while the module trains; see `Ranges`.
        weight_ranges: The same of weights; None: as `ranges`.
        batch_norm: What batch norms do; see `BatchNorm`. With live statistics nothing is scaled
            between channels before calibration, and those that are no part of a quantized
            operator with a constant weight stay frozen, with a warning that says why.
        dynamic_shapes: As for `torch.export.export`.
        prepare_custom_config: Modules that stay in float, and train so; standalone modules, which
            train within a mapping and backend of their own; and custom ones, whose observed form
            is called, and trains, in their place: `convert` makes the quantized form of it. With
            the latter two the data for calibration is held at once, and the integer module has the
            shapes of the example inputs. Inputs and outputs that are integers are those of what
            `convert` gives, as its ledger says; the module that trains takes and gives floats,
            rounded to the same grids.

    Returns:
        A `TrainableModule`; `convert` makes the integer module of it.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ModelError: torch.export cannot export the module, or operators have no torch form.
        ConfigError: the configuration is wrong; or an operator has a narrow accumulator or
            parameters of the run time, which do not train.
        DataError: the data does not fit the module.
    """
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    dtypes: dict[str, Any] = {}
    if prepare_custom_config is not None:
        check_module(module)
        backend, effort = resolve_backend(backend), resolve_effort(effort)
        if prepare_custom_config.standalone or prepare_custom_config.custom:
            if dynamic_shapes is not None:
                raise ConfigError(
                    "prepare_qat: a model with standalone and custom modules takes any number of "
                    "samples if its example inputs hold more than one; leave out dynamic_shapes."
                )
            from relayquant.torch.standalone import UnitSettings, prepare_unit, read_batches

            def finish(unit: Unit) -> TrainableModule:
                folded = find_live(unit.mod, unit.params, unit.prepared) if is_live else {}
                return build_trainable(unit.prepared, ranges, weight_ranges, folded, unit)

            is_live = batch_norm is BatchNorm.LIVE
            settings = UnitSettings(
                backend=backend, effort=effort, normalization=batch_norm, frees_batch=True
            )
            batches = read_batches(module, inputs, calibration, frees_batch=True)
            unit = prepare_unit(
                module, prepare_custom_config, batches, qconfig_mapping, settings, finish
            )
            return check_interface(finish(unit))
        mapping = qconfig_mapping or default_mapping(backend, effort)
        qconfig_mapping = prepare_custom_config.extend_mapping(mapping, module)
        dtypes = prepare_custom_config.name_dtypes(backend)
    if dynamic_shapes is None:
        import_trainable()
        dynamic_shapes = free_batch(inputs)
    mod, params = load_module(module, inputs, dynamic_shapes=dynamic_shapes)
    settings = PrepareSettings(effort=resolve_effort(effort), **dtypes)
    is_live = batch_norm is BatchNorm.LIVE
    prepared = calibrate_graph(
        mod, params, qconfig_mapping, backend, calibration, settings, is_live=is_live
    )
    folded = find_live(mod, params, prepared) if is_live else {}
    return check_interface(build_trainable(prepared, ranges, weight_ranges, folded))


@check_arguments
def from_module(
    mod: tvm.IRModule | PreparedModel,
    params: Mapping[str, Any] | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    backend: BackendConfig | str | None = None,
    *,
    calibration: Any = None,
    ranges: Ranges = Ranges.LEARNED,
    weight_ranges: Ranges | None = None,
    batch_norm: BatchNorm = BatchNorm.FROZEN,
    effort: Effort | str = Effort.BALANCED,
) -> Any:
    """A Relax module, of whatever source, -> a torch module that trains.

    Without `calibration` and `qconfig_mapping` it is the float model, and `convert` gives the float
    module with the trained weights. With them it trains with its quantization, as `prepare_qat`
    says, where the arguments are described.

    Args:
        mod: A module, as `load` gives it; or a calibrated model, as `calibrate` returns it, which
            says all but what ranges do.
        params: Its parameters, if they are not bound.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ModelError: operators have no torch form; all of them are listed.
        ConfigError, DataError: as `prepare_qat`.
    """
    if isinstance(mod, PreparedModel):
        given = params, qconfig_mapping, backend, calibration
        if any(value is not None for value in given) or batch_norm is BatchNorm.LIVE:
            raise ConfigError(
                "from_module got a calibrated model, which has its parameters, mapping, backend "
                "and data, and folded batch norms. Give ranges and weight_ranges only, or start "
                "from the module."
            )
        return build_trainable(mod, ranges, weight_ranges, {})
    import_trainable()
    is_live = batch_norm is BatchNorm.LIVE
    is_float = calibration is None and qconfig_mapping is None
    if is_float:
        fast = PrepareSettings(effort=Effort.FAST)
        prepared = prepare_model(
            mod, params, None, QConfigMapping(), resolve_backend(backend), fast
        )
    else:
        settings = PrepareSettings(effort=resolve_effort(effort))
        prepared = calibrate_graph(
            mod, params, qconfig_mapping, backend, calibration, settings, is_live=is_live
        )
    folded = find_live(mod, params, prepared) if is_live else {}
    return build_trainable(prepared, ranges, weight_ranges, folded)


def calibrate_graph(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    mapping: QConfigMapping | None,
    backend: BackendConfig | str | None,
    calibration: Any,
    settings: PrepareSettings,
    *,
    is_live: bool,
) -> PreparedModel:
    """A module with the ranges that training begins with; `is_live`: nothing is scaled between
    channels, as batch norms have live statistics.
    """
    data = None if is_live else calibration
    prepared = prepare_model(mod, params, data, mapping, resolve_backend(backend), settings)
    review_prepared(prepared, strict=False)
    return calibrate_model(prepared, calibration, CalibrateSettings())


def check_interface(trained: TrainableModule) -> TrainableModule:
    """The module, whose inputs and outputs can be integers where that is asked for: said before
    the training.

    Raises:
        ConfigError: one cannot.
    """
    prepared = trained.source.prepared
    if any(value.is_integer for value in (*prepared.inputs, *prepared.outputs)):
        trained.to_quantized()
    return trained


def import_trainable() -> Any:
    """The module that needs torch.

    Raises:
        MissingDependencyError: PyTorch is not installed.
    """
    try:
        import torch  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingDependencyError(
            "Training needs PyTorch. Run: pip install 'relayquant[torch]'"
        ) from None
    from relayquant.torch import trainable

    return trainable


def build_trainable(
    prepared: PreparedModel,
    ranges: Ranges,
    weight_ranges: Ranges | None,
    folded: Mapping[str, FoldedNorm],
    unit: Unit | None = None,
) -> TrainableModule:
    """The torch module of a calibrated model; of one that calls submodules, with these."""
    # What observers saw belongs to what is trained from here on no more.
    prepared = replace(prepared, statistics={})
    chosen = ranges if weight_ranges is None else weight_ranges
    return import_trainable().TrainableModule(prepared, ranges, chosen, folded, unit)


def find_live(
    mod: tvm.IRModule, params: Mapping[str, Any] | None, prepared: PreparedModel
) -> dict[str, FoldedNorm]:
    """Batch norms that can have live statistics, by name; warns of the others."""
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
            f"and stays as it is ({'; '.join(frozen)})."
        )
    return found
