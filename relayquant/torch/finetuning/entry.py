"""`finetune`: float module -> integer module, with weights and ranges trained to reproduce the
float model.

No labels are needed. It prepares and calibrates as `quantize` does, trains (`loop`) and
converts. PyTorch is imported when the function here is called.
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
from relayquant.base.storage.lock import reserve_file
from relayquant.config import BackendConfig, Effort, QConfigMapping, Ranges
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError
from relayquant.flow.pipeline import lower_prepared
from relayquant.ir.rewrite.bind import Model, split_model
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.finetuning.settings import FinetuneSettings, Loss, TrainingData
from relayquant.torch.training.entry import from_relax, import_trainable


@check_arguments
def finetune(
    mod: Model | PreparedModel,
    params: Mapping[str, Any] | None,
    dataset: Any,
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
    calibration_dataset: Any = None,
    validation_dataset: Any = None,
    hold_back: bool = True,
    metric: Metric | None = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    checkpoint: str | Path | None = None,
    callbacks: Iterable[Callback] | Callback = (),
) -> tvm.IRModule:
    """Quantize a model and train it to reproduce the outputs of the float model.

    Training starts from the integer model that `quantize` would give after calibration. It trains
    weights, biases and, by default, scales with Adam. The rate falls to 0 along half a cosine. The
    result is the average of the parameters over about the last tenth of the steps taken.

    The best average of all evaluations on validation data is returned. This is
    `validation_dataset` or, by default, a tenth of `dataset` that is neither calibrated nor trained
    on. The calibrated state is the first candidate. The state after `reconstruction` is the second.
    Both count as step 0. The calibrated state is returned if the best loss is not lower by two of
    its standard errors. So the result is never worse on that data, nor different by chance. If the
    reconstruction is worse than the calibrated state, training starts from the calibrated state.
    Without validation data, the reconstructed and trained state is returned.

    Args:
        mod, params: The float module; or a calibrated model from `calibrate`, and None.
        dataset: Data set, as for `quantize`, read repeatedly. Each item is one step. Items that are
            dicts may hold more than the inputs, for instance labels for the loss. For reproducible
            results, and to resume, it must yield the same items each time.
        loss: `(outputs, expected) -> scalar tensor`, lists of torch tensors: the outputs of the
            trained model and of the float model. A third parameter gets the item of `dataset`, a
            dict of arrays. None: the distance to `expected` relative to its size, or the divergence
            for probabilities.
        steps: Number of steps. 0 with `reconstruction`: only the reconstruction.
        lr: Learning rate of a step, relative to the root mean square of the weights of each output
            channel. An integer weight changes after moving about half a quantization step, so few
            bits or few steps need a larger rate.
        scale_lr: Learning rate of learned scales, as a multiple of the rate of weights. Weights
            move with their scale, so that a scale change does not change their integers.
        hidden_weight: Weight of a second loss, added to `loss`: the squared distance between values
            of inner operators and their float values, relative to their size, averaged over
            operators. For networks so deep that the outputs alone give too little information.
        reconstruction: Number of items of `dataset`, at most all, for reconstruction before
            training. It fits weights operator by operator, so that each reproduces the float
            model's sums on the quantized outputs of the operators before it. For weights of few
            bits. In deep networks it takes as long as some hundred steps. It holds the live values
            of these items in memory.
        backend, qconfig_mapping, effort: As for `quantize`.
        ranges, weight_ranges: How ranges change. See `relayquant.config.Ranges`.
        calibration_dataset: Data set for the first ranges. `dataset` if None.
        validation_dataset: Data set that is not used for training, to choose the best state. With
            more samples it can tell smaller gains from chance. None: see `hold_back`.
        hold_back: Whether to hold back every tenth item of `dataset` as validation data, if there
            is no `validation_dataset`. Of 4 to 9 items it is the last one, of fewer none. Items
            behind the first `steps` do not count. Pass a `validation_dataset` if items are
            shuffled or augmented views of the same samples: the training would see what is held
            back.
        metric: `(float outputs, quantized outputs) -> float` on the validation data, higher is
            better, as for `quantize`. None: the loss, or the default loss if `loss` takes the item.
            Any higher value of a metric counts as a gain, without a test for chance.
        evaluate_every: Steps between two evaluations, and between two checkpoints. By default a
            tenth of all steps.
        patience: Stop after this number of evaluations without improvement. Evaluations before the
            first step do not count.
        checkpoint: A file that is rewritten at every evaluation. An interrupted training resumes
            from it when started again with the same arguments, and gives the same bits. Deleted at
            the end.
        callbacks: Called with stages, progress and evaluations (`on_training`).

    Returns:
        The integer module, with its ledger. See `quantize`. There is no guard.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ModelError: operators have no torch form; all of them are listed.
        ConfigError: a setting is wrong, or the checkpoint belongs to another training, or another
            training writes it now.
        DataError: the data does not fit the model, or differs from the checkpoint's data.
    """
    settings = FinetuneSettings.read_call(locals())
    if not isinstance(mod, PreparedModel):
        mod, params = split_model(mod, params)
    import_trainable()
    if loss is not None and not (takes_arguments(loss, 2) or takes_arguments(loss, 3)):
        raise ConfigError(
            "finetune: loss cannot be called with (outputs, expected) or (outputs, expected, "
            "item).",
            code="RQ106",
        )
    with reserve_file(settings.checkpoint, "checkpoint", "training"):
        return run_training(mod, params, dataset, loss, settings)


def run_training(
    mod: Model | PreparedModel,
    params: Mapping[str, Any] | None,
    dataset: Any,
    loss: Loss | None,
    settings: FinetuneSettings,
) -> tvm.IRModule:
    """Calibrate, train and lower: `finetune` with its arguments checked."""
    from relayquant.torch.finetuning.loop import train

    run = settings.events.run_stage
    is_calibrated = isinstance(mod, PreparedModel)
    # For a module this comes first, so that an operator that cannot be trained is reported before
    # the work.
    known = mod if isinstance(mod, PreparedModel) else from_relax(mod, params).source.prepared
    is_holding = settings.hold_back and settings.validation_dataset is None
    most = settings.most_items if is_holding else None
    data = TrainingData(dataset, describe_inputs(known.mod), most)
    settings.check_validation(data.held)
    if data.held:
        settings = replace(settings, validation_dataset=data.held)
    given = settings.calibration_dataset
    student = run(
        "calibrate",
        from_relax,
        mod,
        params,
        settings.qconfig_mapping,
        settings.backend,
        calibration_dataset=data.dataset if given is None and not is_calibrated else given,
        ranges=settings.ranges,
        weight_ranges=settings.weight_ranges,
        effort=settings.effort,
    )
    # The float model as prepared: inner values have the same names, and the same scales after
    # equalization of layers.
    teacher = from_relax(student.source.prepared.mod)
    summary = run("train", train, student, teacher, data, loss, settings)
    trained = student.to_prepared()
    choices = {**trained.choices, "training": f"{trained.choices['training']}, {summary}"}
    return run("lower", lower_prepared, replace(trained, choices=choices))
