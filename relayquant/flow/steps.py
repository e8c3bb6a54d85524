"""The stages of `pipeline` one by one, named as in PyTorch FX: prepare, calibrate,
convert_to_reference and lower.
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
)
from relayquant.flow.refine.kept_samples import warn_few
from relayquant.flow.refine.prepared_edit import review_prepared
from relayquant.flow.settings import CalibrateSettings, PrepareSettings
from relayquant.ir.rewrite.bind import Model, bind_model, split_model
from relayquant.stages.backends import find_backend, resolve_backend
from relayquant.stages.calibration.dispatch import WORKER_TIMEOUT
from relayquant.stages.prepared import PreparedModel
from relayquant.stages.streams import open_streams


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
    """Prepare a model for calibration: canonical float module, plan and calibration graph.

    With a `dataset` (see `quantize`), inputs whose channels differ much in range are scaled, and
    the weights that read them inversely. The function stays the same, but loses less accuracy in 8
    bits. Except with effort "fast", two more steps follow: channels between two layers are scaled
    too, and quantized operators without a bias get a bias of zeros, which calibration corrects.

    Raises:
        ModelError: the model is not one this package can work with.
        ConfigError: a line of the mapping selects nothing. With `strict` also: the mapping asks for
            something the backend cannot do, has a line without effect, or quantizes nothing.
            Without `strict` these are warnings.
    """
    settings = PrepareSettings.read_call(locals())
    mod, params = split_model(mod, params)
    dataset = open_streams(mod, params, dataset)
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
    observer: Any = None,
    order: Order | str | None = None,
    fit: FitSettings | None = None,
    workers: futures.Executor | None = None,
    worker_timeout: float | None = WORKER_TIMEOUT,
    checkpoint: str | Path | None = None,
    callbacks: Iterable[Callback] | Callback = (),
) -> PreparedModel:
    """Return the prepared model with parameters for every quantized value, chosen from data.

    If the backend's accumulators are narrow, weight scales are raised until the sums fit, as
    `Accumulator.bound` says. For a product of two activations, the scales of the second factor are
    raised. Calibration then starts again with these scales. A warning names sums that still do not
    fit.

    Memory does not grow with the data: statistics are updated batch by batch, and values that later
    steps need are stored on disk. The result is the same, bit for bit, for every `checkpoint`,
    `workers` and number of workers, if all processors are of one kind.

    Args:
        prepared: The prepared model; not changed. Parameters that it already has are ignored.
        dataset: See `quantize`; read once, and again if scales are raised.
        observer: Observer or callable for all activations.
        order: See `Order`. None: the order of the level of effort, or topological if a callable
            chooses parameters.
        fit: How weights are rounded and biases corrected. None: as the level of effort says.
        callbacks: See `relayquant.Callback`.
        checkpoint: A folder. A calibration that was interrupted or killed continues from it if it
            is started again with the same arguments. The data set is read again and compared, and
            nothing is computed twice. Deleted at the end. It holds the stored values, about
            (largest activations alive at once) x samples x 4 bytes. Without it they are in the
            system's temporary directory.
        workers: Any `concurrent.futures.Executor`: a ProcessPoolExecutor with spawned processes, or
            `dask.distributed.Client(...).get_executor()`. Workers run the model on shards of the
            data. On several machines, put `checkpoint` on a shared file system. Callables choose
            parameters in this process.
        worker_timeout: Seconds; the default is a day. If no worker has returned anything for this
            time, an error says that they hang, and the processes of a ProcessPoolExecutor are
            killed. None waits without limit. Each step has at most 32 shards of batches. The
            timeout must be longer than one shard takes, and longer than a cluster needs to start.

    Raises:
        DataError: the data set is empty, does not fit the model, or differs from the checkpoint's.
        ConfigError: `observer` is not an observer or callable, or its result is wrong; or the
            folder belongs to another calibration (the message says what differs).
        WorkerError: workers died, hang, or failed repeatedly; names the batches.
    """
    settings = CalibrateSettings.read_call(locals())
    return warn_few(calibrate_model(prepared, open_streams(prepared.mod, None, dataset), settings))


@check_arguments
def convert_to_reference(prepared: PreparedModel) -> tvm.IRModule:
    """Return the reference form: dequantize - float operator - quantize. It runs on any target.

    Raises:
        ConfigError: the model is not calibrated.
    """
    return convert_model(prepared)


@check_arguments
def lower(
    reference: Model | PreparedModel, backend: BackendConfig | str | None = None
) -> tvm.IRModule:
    """Return the integer module of a calibrated model or of its reference form.

    Args:
        reference: A calibrated model; the result of `convert_to_reference`; or a model that was
            quantized elsewhere as `load` reads it, with quantize and dequantize operators.
        backend: For a model that was quantized elsewhere: the backend to run it on, None for the
            backend of this machine. A calibrated model holds its backend, and a reference form
            holds the name. So pass the BackendConfig of a reference form only if its name is not
            built in.

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
            "other. Leave backend= out, or pass the other backend to prepare.",
            code="RQ105",
        )
    return lower_prepared(reference)
