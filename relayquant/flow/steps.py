"""The stages of `pipeline`, for those who want to stand between them: prepare, calibrate,
convert_to_reference and lower, named as in PyTorch FX.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import tvm

from relayquant.base.arguments import check_arguments
from relayquant.base.events import Callback
from relayquant.base.qtypes import QParams
from relayquant.config import BackendConfig, Effort, FitSettings, ModelType, Order, QConfigMapping
from relayquant.errors import ConfigError
from relayquant.flow.pipeline import (
    calibrate_model,
    convert_model,
    lower_module,
    lower_prepared,
    prepare_model,
    review_prepared,
)
from relayquant.flow.settings import CalibrateSettings, PrepareSettings
from relayquant.ir.rewrite.bind import Model, bind_model, split_model
from relayquant.stages.backends import find_backend, resolve_backend
from relayquant.stages.calibration.dispatch import WORKER_TIMEOUT
from relayquant.stages.prepared import PreparedModel


@check_arguments
def prepare(
    mod: Model,
    params: Mapping[str, Any] | None = None,
    dataset: Any = None,
    *,
    qconfig_mapping: QConfigMapping | None = None,
    backend: BackendConfig | str | None = None,
    effort: Effort | str = Effort.BALANCED,
    model_type: ModelType | str | None = None,
    input_dtypes: Mapping[str | int, str] | None = None,
    output_dtypes: Mapping[str | int, str] | None = None,
    qparams: Mapping[str, QParams] | None = None,
    strict: bool = False,
    callbacks: Iterable[Callback] | Callback = (),
) -> PreparedModel:
    """Canonical float module, plan and calibration graph of a model.

    With a `dataset` (see `quantize`), inputs whose channels differ much in range are scaled, and
    the weights they meet inversely: the same function, but one that loses less to 8 bits. So are,
    except with effort "fast", channels between two layers; and quantized operators without a bias
    get one of zeros, which calibration corrects.

    Raises:
        ModelError: the model is not one this package can work with.
        ConfigError: a line of the mapping selects nothing; or with `strict`: the mapping asks for
            what the backend cannot do, has a line that decides nothing, or quantizes nothing. These
            are warnings else.
    """
    settings = PrepareSettings(
        effort=effort,
        model_type=model_type,
        input_dtypes=input_dtypes,
        output_dtypes=output_dtypes,
        qparams=qparams,
        strict=strict,
        callbacks=callbacks,
    )
    mod, params = split_model(mod, params)
    prepared = prepare_model(
        mod, params, dataset, qconfig_mapping, resolve_backend(backend), settings
    )
    review_prepared(prepared, settings.strict)
    return prepared


@check_arguments
def calibrate(
    prepared: PreparedModel,
    dataset: Any,
    *,
    calibration: Any = None,
    order: Order | str | None = None,
    fit: FitSettings | None = None,
    workers: futures.Executor | None = None,
    worker_timeout: float | None = WORKER_TIMEOUT,
    checkpoint: str | Path | None = None,
    callbacks: Iterable[Callback] | Callback = (),
) -> PreparedModel:
    """The prepared model with the parameters of every quantized value, picked from data.

    Where the backend's accumulators are narrow, the scales of weights (of the second factor of a
    product of two activations) are raised until the sums fit, as `Accumulator.bound` says, and
    calibration starts again with them; a warning names what still does not fit.
    Memory does not grow with the data: statistics stream, and values that later steps need wait on
    disk. The result depends on neither `checkpoint` nor `workers`, nor on the number of workers,
    bit for bit, as long as all processors are of one kind.

    Args:
        prepared: The prepared model; not changed. Parameters that it has already do not count.
        dataset: See `quantize`; read once (and again when scales are raised).
        calibration: Observer or callable for all activations.
        order: See `Order`; as the level of effort says when None, but topological where a callable
            picks parameters.
        fit: How weights are rounded and biases corrected; as the level of effort says when None.
        callbacks: See `relayquant.base.events.Callback`.
        checkpoint: A folder. A calibration that was interrupted or killed goes on from there when
            it is started again with the same arguments; the data set is then read again to see that
            it is the same, and nothing that was computed is computed twice. Deleted in the end. It
            holds the values that wait, about (largest activations alive at once) x samples x 4
            bytes; without it they are in the system's temporary directory.
        workers: Any `concurrent.futures.Executor`: a ProcessPoolExecutor whose processes are
            spawned, `dask.distributed.Client(...).get_executor()`. Its workers run the model on
            shards of the data; they must see the folder, so across machines name a `checkpoint` on
            a file system that they share. Callables pick parameters in this process.
        worker_timeout: Seconds, a day unless given. When no worker has returned anything for so
            long, they hang, and that is an error; the processes of a ProcessPoolExecutor, which
            nobody could leave any more, are killed. None waits for ever. Batches go out in shards,
            at most 32 in each step: it is to be longer than one shard takes, and than a cluster
            needs to start.

    Raises:
        DataError: the data set is empty or does not fit the model, or is not that of the
            checkpoint.
        ConfigError: `calibration` is no observer or callable, or picked something wrong; or the
            folder belongs to another calibration (the message says what differs).
        WorkerError: workers died, hang, or failed again and again; names the batches.
    """
    settings = CalibrateSettings(
        calibration=calibration,
        order=order,
        fit=fit,
        workers=workers,
        worker_timeout=worker_timeout,
        checkpoint=checkpoint,
        callbacks=callbacks,
    )
    return calibrate_model(prepared, dataset, settings)


@check_arguments
def convert_to_reference(prepared: PreparedModel) -> tvm.IRModule:
    """The reference form: dequantize - float operator - quantize. Runs on any target.

    Raises:
        ConfigError: the model is not calibrated.
    """
    return convert_model(prepared)


@check_arguments
def lower(
    reference: Model | PreparedModel, backend: BackendConfig | str | None = None
) -> tvm.IRModule:
    """The integer module of a calibrated model or of its reference form.

    Args:
        reference: A calibrated model; what `convert_to_reference` gave; or a model that was
            quantized elsewhere as `load` reads it, with its own quantize and dequantize operators.
        backend: For a module of the last kind, the backend to run it on; None for that of
            this machine. What was prepared knows its backend: a calibrated model all of it, a
            reference form the name. Its BackendConfig is to be given only where that is none of
            the built-in names.

    Raises:
        ConfigError: the model is not calibrated, or its backend is not known here.
        ModelError: the module holds no quantized value.
    """
    if not isinstance(reference, PreparedModel):
        mod = bind_model(reference)
        return lower_module(mod, find_backend(mod, backend))
    if backend is not None and resolve_backend(backend) != reference.backend:
        raise ConfigError(
            f"lower: the model was prepared for backend {reference.backend.name!r} and runs on no "
            "other. Leave backend out, or prepare it for the other.",
            code="RQ105",
        )
    return lower_prepared(reference)
