"""`finetune`: a float module -> an integer module whose weights and ranges were trained to give
what the float model gives; no labels needed.

Prepare and calibrate, as `quantize` does; train (`training_loop`); convert. PyTorch is imported
when the function here is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm

from relayquant.analysis.sensitivity import Metric
from relayquant.base.arguments import check_arguments, takes_arguments
from relayquant.base.events import Callback
from relayquant.base.storage.files import check_writable
from relayquant.config import BackendConfig, Effort, QConfigMapping, Ranges
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError
from relayquant.flow.pipeline import lower_prepared
from relayquant.ir.rewrite.bind import Model, split_model
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.finetune_settings import FinetuneSettings, Loss, TrainingData
from relayquant.torch.training import from_relax, import_trainable


@check_arguments
def finetune(
    mod: Model | PreparedModel,
    params: Mapping[str, Any] | None,
    batches: Any,
    loss: Loss | None = None,
    *,
    steps: int = 400,
    lr: float = 3e-3,
    scale_lr: float = 1.0,
    hidden_weight: float = 0.0,
    reconstruction: int = 0,
    backend: BackendConfig | str | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    effort: Effort | str = Effort.BEST,
    ranges: Ranges | str = Ranges.LEARNED,
    weight_ranges: Ranges | str | None = None,
    calibration: Any = None,
    validation: Any = None,
    metric: Metric | None = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    checkpoint: str | Path | None = None,
    callbacks: Iterable[Callback] | Callback = (),
) -> tvm.IRModule:
    """Quantize a model, and train it to give again what the float model gives.

    Calibration gives the integer model that `quantize` would; weights, biases and, by default,
    scales are trained from there with Adam, the rate falling to 0 along half a cosine. What is
    given is their average over the last tenth or so of the steps taken. With `validation` the best
    average that was met counts, of which the calibrated state is the first and that of a
    `reconstruction` the second, both of step 0. Where the loss of the best is not lower by two of
    its standard errors the calibrated one counts: the result is never worse on that data, nor
    another by chance. Where the reconstruction is worse than the calibrated state, steps begin
    with that; without `validation` nothing tells, and what was reconstructed and trained is given.

    Args:
        mod, params: The float module; or a calibrated model, as `calibrate` returns it, and None.
        batches: Data set, as for `quantize`, read again and again; each item is one step. Items
            that are dicts may hold more than the inputs, labels for instance, for the loss.
            For the same result every time, and to resume, it must give the same items each time.
        loss: `(outputs, expected) -> scalar tensor`, lists of torch tensors: what the trained and
            the float model give; a third parameter gets the item of `batches`, a dict of arrays.
            None: the distance to `expected`, relative to its size, or for probabilities the
            divergence.
        steps: How many steps; 0 with `reconstruction`: that alone.
        lr: Of a step, relative to the root mean square of the weights of each output channel. A
            weight becomes another when it has moved about half a step of its grid: few bits, or few
            steps, want more.
        scale_lr: How many times as fast as weights learned scales move; weights move along with
            theirs, so that no level of them changes by it.
        hidden_weight: How much it counts, beside `loss`, that operators inside give what they gave
            in float: the squared distance relative to the size, the mean over operators. It is for
            networks so deep that outputs alone say little.
        reconstruction: How many items of `batches`, all if they are fewer, weights are fitted to
            before they train, operator by operator, so that each gives the float model's sums on
            what the quantized ones before it leave of its input. It is for weights of few bits,
            takes as long as some hundred steps in deep networks, and holds what is alive of these
            items in memory.
        backend, qconfig_mapping, effort: As for `quantize`.
        ranges, weight_ranges: What ranges do, see `relayquant.config.Ranges`.
        calibration: Data set that gives the first ranges; `batches` if None.
        validation: Data set that is not trained on, to choose the best state by. The more samples
            it has, the smaller a gain it can tell from chance.
        metric: `(float outputs, quantized outputs) -> float` on it, higher is better, as for
            `quantize`; None: the loss, the default one where `loss` takes the item. A metric is
            taken at its word: any higher value is a gain.
        evaluate_every: Steps between two evaluations, and between two checkpoints; a tenth of all
            unless given.
        patience: End after so many evaluations without a better one, those before the first step
            not counted.
        checkpoint: A file that is written, whole, at every evaluation. A training that was
            interrupted goes on from there when it is started again with the same arguments, and
            gives the same bits. Deleted in the end.
        callbacks: Told of stages, progress and evaluations (`on_training`).

    Returns:
        The integer module, with its ledger; see `quantize`. There is no guard.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ModelError: operators have no torch form; all of them are listed.
        ConfigError: a setting is wrong, or the checkpoint belongs to another training.
        DataError: the data does not fit the model, or is not that of the checkpoint.
    """
    if not isinstance(mod, PreparedModel):
        mod, params = split_model(mod, params)
    settings = FinetuneSettings(
        steps=steps,
        lr=lr,
        scale_lr=scale_lr,
        hidden_weight=hidden_weight,
        reconstruction=reconstruction,
        backend=backend,
        qconfig_mapping=qconfig_mapping,
        effort=effort,
        ranges=ranges,
        weight_ranges=weight_ranges,
        calibration=calibration,
        validation=validation,
        metric=metric,
        evaluate_every=evaluate_every,
        patience=patience,
        checkpoint=checkpoint,
        callbacks=callbacks,
    )
    import_trainable()
    from relayquant.torch.training_loop import train

    if loss is not None and not (takes_arguments(loss, 2) or takes_arguments(loss, 3)):
        raise ConfigError(
            "finetune: loss cannot be called with (outputs, expected) or (outputs, expected, "
            "item).",
            code="RQ106",
        )
    if settings.checkpoint is not None:
        check_writable(Path(settings.checkpoint))
    run = settings.events.run_stage
    is_calibrated = isinstance(mod, PreparedModel)
    # Of a module this is done first, so that what cannot be trained is said before the work.
    known = mod if isinstance(mod, PreparedModel) else from_relax(mod, params).source.prepared
    data = TrainingData(batches, describe_inputs(known.mod))
    calibration = data.dataset if settings.calibration is None else settings.calibration
    student = run(
        "calibrate",
        from_relax,
        mod,
        params,
        settings.qconfig_mapping,
        settings.backend,
        calibration=settings.calibration if is_calibrated else calibration,
        ranges=settings.ranges,
        weight_ranges=settings.weight_ranges,
        effort=settings.effort,
    )
    # The float model as it was prepared: values inside have the same names, and the same scales
    # where layers were scaled against one another.
    teacher = from_relax(student.source.prepared.mod)
    summary = run("train", train, student, teacher, data, loss, settings)
    trained = student.to_prepared()
    choices = {**trained.choices, "training": f"{trained.choices['training']}, {summary}"}
    return run("lower", lower_prepared, replace(trained, choices=choices))
