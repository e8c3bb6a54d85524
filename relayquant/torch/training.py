"""Quantization-aware training: `prepare_qat` and `from_relax` give a torch module that trains,
`convert` makes the integer module of it.

Around the data flow: export, load, prepare and calibrate come before the training; convert, expand,
fold and lower behind it. PyTorch is an extra and is imported when a function here is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tvm

from relayquant.base.arguments import check_arguments
from relayquant.config import BackendConfig, BatchNorm, Effort, QConfigMapping, Ranges
from relayquant.errors import (
    ConfigError,
    DataWarning,
    MissingDependencyError,
    ModelError,
    format_count,
    warn_user,
)
from relayquant.flow.pipeline import calibrate_model, prepare_model, review_prepared
from relayquant.flow.settings import CalibrateSettings, PrepareSettings
from relayquant.ir.rewrite import Skip
from relayquant.ir.rewrite.bind import Model, split_model
from relayquant.stages.backends import resolve_backend
from relayquant.stages.effort import default_mapping, resolve_effort
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.batch_norm import FoldedNorm, Normalization, find_folded, find_norms
from relayquant.torch.custom_config import PrepareCustomConfig
from relayquant.torch.exporting import check_module, check_state, export, free_batch
from relayquant.torch.exporting import load as load_program

if TYPE_CHECKING:
    from relayquant.torch.standalone import Unit
    from relayquant.torch.trainable import CallForm, TrainableModule


@check_arguments
def prepare_qat(
    module: Any,
    example_inputs: tuple[Any, ...],
    qconfig_mapping: QConfigMapping | None = None,
    backend: BackendConfig | str | None = None,
    *,
    calibration: Any = None,
    ranges: Ranges | str = Ranges.LEARNED,
    weight_ranges: Ranges | str | None = None,
    batch_norm: BatchNorm | str = BatchNorm.FROZEN,
    effort: Effort | str = Effort.BALANCED,
    example_kwargs: Mapping[str, Any] | None = None,
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
        example_inputs, example_kwargs: As for `torch.export.export`. The module is called in the
            form that they have. Where they hold more than one sample, and the module allows it, it
            trains with any number of samples.
        qconfig_mapping, backend, effort: As for `relayquant.quantize`.
        calibration: Data set that gives the first ranges; as for `relayquant.quantize`. Without it
            the first batches in training mode do, as with FX: the very first with a moving average,
            which then goes on, else as many as `rounding.WATCHED`. Nothing is fitted to data
            before: `effort` is "fast".
        ranges: What ranges of activations do while the module trains; see `Ranges`.
        weight_ranges: The same of weights; None: as `ranges`.
        batch_norm: What batch norms do; see `BatchNorm`. With live statistics nothing is scaled
            between channels before calibration, and those that are no part of a quantized
            operator with a constant weight stay frozen, with a warning that says why.
        dynamic_shapes: As for `torch.export.export`, of the module that trains and of the integer
            module. None: the latter has the shapes of the example inputs, as `quantize` gives it.
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
        ModelError: torch.export cannot export the module, it keeps state between calls, or
            operators have no torch form.
        ConfigError: the configuration is wrong; or an operator has a narrow accumulator or
            parameters of the run time, which do not train.
        DataError: the data does not fit the module.
    """
    check_module(module)
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    config, backend = prepare_custom_config, resolve_backend(backend)
    is_live, is_waiting = batch_norm is BatchNorm.LIVE, calibration is None
    effort = Effort.FAST if is_waiting else resolve_effort(effort)
    dtypes: dict[str, Any] = {}
    if config is not None:
        if config.standalone or config.custom:
            if dynamic_shapes is not None or example_kwargs is not None:
                raise ConfigError(
                    "prepare_qat: a model with standalone and custom modules takes any number of "
                    "samples if its example inputs hold more than one, and inputs by position; "
                    "leave out dynamic_shapes and example_kwargs.",
                    code="RQ102",
                )
            from relayquant.torch.standalone import UnitSettings, prepare_unit, read_batches

            def finish(unit: Unit) -> TrainableModule:
                folded = find_live(unit.mod, unit.params, unit.prepared) if is_live else {}
                return build_trainable(
                    unit.prepared, ranges, weight_ranges, folded, unit, is_waiting=is_waiting
                )

            settings = UnitSettings(
                backend=backend, effort=effort, normalization=batch_norm, frees_batch=True
            )
            data = [inputs] if is_waiting else calibration
            batches = read_batches(module, inputs, data, frees_batch=True)
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
        form = read_form(program, inputs, example_kwargs, is_free=dynamic_shapes is not None)
        with warnings.catch_warnings():
            if is_waiting:  # what the examples hold says nothing
                warnings.simplefilter("ignore", DataWarning)
            prepared = calibrate_graph(
                mod,
                params,
                qconfig_mapping,
                backend,
                list_examples(inputs, example_kwargs) if is_waiting else calibration,
                settings,
                is_plain=is_live or is_waiting,
            )
        folded = find_live(mod, params, prepared) if is_live else {}
        return check_interface(
            build_trainable(
                prepared, ranges, weight_ranges, folded, form=form, is_waiting=is_waiting
            )
        )

    if dynamic_shapes is None and (freed := free_batch(inputs)) and not example_kwargs:
        try:
            return prepare(freed)
        except ModelError:
            pass  # it depends on the number of samples, or its operators do
    return prepare(dynamic_shapes)


def list_examples(inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> list[Any]:
    """Example inputs as a data set."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.utils import _pytree as pytree  # pyright: ignore[reportMissingImports]

    leaves = pytree.tree_leaves((inputs, dict(kwargs or {})))
    arrays = [leaf.detach().numpy() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [tuple(arrays)] if len(arrays) > 1 else arrays


def read_form(
    program: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None, *, is_free: bool
) -> CallForm:
    """How an exported module is called; `is_free`: also the integer module has free sizes."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch.utils import _pytree as pytree  # pyright: ignore[reportMissingImports]

    leaves, form = pytree.tree_flatten((inputs, dict(kwargs or {})))
    shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
    results = [spec.arg for spec in program.graph_signature.output_specs]
    constants = {i: result.value for i, result in enumerate(results) if hasattr(result, "value")}
    outputs = program.call_spec.out_spec
    return import_trainable().CallForm(form, outputs, constants, None if is_free else shapes)


@check_arguments
def from_relax(
    mod: Model | PreparedModel,
    params: Mapping[str, Any] | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    backend: BackendConfig | str | None = None,
    *,
    calibration: Any = None,
    ranges: Ranges | str = Ranges.LEARNED,
    weight_ranges: Ranges | str | None = None,
    batch_norm: BatchNorm | str = BatchNorm.FROZEN,
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
                "from_relax got a calibrated model, which has its parameters, mapping, backend "
                "and data, and folded batch norms. Give ranges and weight_ranges only, or start "
                "from the module.",
                code="RQ102",
            )
        return build_trainable(mod, ranges, weight_ranges, {})
    mod, params = split_model(mod, params)
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
            mod, params, qconfig_mapping, backend, calibration, settings, is_plain=is_live
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
    is_plain: bool,
) -> PreparedModel:
    """A module with the ranges that training begins with; `is_plain`: nothing is scaled between
    channels, as batch norms have live statistics or the data is none.
    """
    data = None if is_plain else calibration
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
            "Training needs PyTorch. Run: pip install 'relayquant[torch]'", code="RQ503"
        ) from None
    from relayquant.torch import trainable

    return trainable


def build_trainable(
    prepared: PreparedModel,
    ranges: Ranges,
    weight_ranges: Ranges | None,
    folded: Mapping[str, FoldedNorm],
    unit: Unit | None = None,
    form: CallForm | None = None,
    is_waiting: bool = False,
) -> TrainableModule:
    """The torch module of a calibrated model; of one that calls submodules, with these. See
    `TrainableModule`.
    """
    # What observers saw belongs to what is trained from here on no more.
    prepared = replace(prepared, statistics={})
    chosen = ranges if weight_ranges is None else weight_ranges
    return import_trainable().TrainableModule(
        prepared, ranges, chosen, folded, unit, form, is_waiting
    )


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
            f"and stays as it is ({'; '.join(frozen)}).",
            code="RQ206",
        )
    return found
