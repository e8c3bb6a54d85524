"""Training loop of `finetune`: Adam, average of late steps, evaluation, best state, checkpoints."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm

from relayquant.analysis.sensitivity import apply_metric
from relayquant.base.arguments import takes_arguments
from relayquant.base.events import ProgressEvent, TrainingEvent
from relayquant.base.storage.archive import Archive, read_archive, write_archive
from relayquant.base.user_calls import is_mistake, note_error
from relayquant.data import open_dataset
from relayquant.data.item import describe_inputs
from relayquant.errors import ConfigError, DataError, format_count
from relayquant.stages.calibration.checkpoint import check_binding, digest_batch, digest_text
from relayquant.torch.finetuning.jackknife import Batches, estimate_error
from relayquant.torch.finetuning.losses import match_outputs, measure_distance
from relayquant.torch.finetuning.reconstruction import reconstruct
from relayquant.torch.finetuning.settings import FinetuneSettings, Loss, TrainingData
from relayquant.torch.finetuning.state import (
    State,
    is_same,
    read_state,
    write_parameters,
    write_state,
)
from relayquant.torch.finetuning.units import find_scaled, measure_units
from relayquant.torch.training.trainable import TrainableModule

FORMAT = "relayquant.training.3"

#: sharpness of the staircase that rounds weights, in the first step and in the last
SHARPNESS = (8.0, 400.0)
#: lateness of the average: after n steps it covers about the last n / (LATENESS + 1)
LATENESS = 9
#: standard errors that a score must gain, because the best of several states is better by chance
#: too
SURENESS = 2.0


def train(
    student: TrainableModule,
    teacher: TrainableModule,
    data: TrainingData,
    loss: Loss | None,
    settings: FinetuneSettings,
) -> str:
    """Train `student`, in place, to return what `teacher` returns. Describe what was done."""
    run = _Training(student, teacher, loss, settings)
    run.resume()
    run.run(data)
    return run.finish()


@dataclass(frozen=True, eq=False)
class Progress:
    """Current state of a training.

    Attributes:
        step: Finished steps.
        best_score, best_step, best: The best evaluation and its state. None before the first.
        worse: Evaluations since then, only after a step.
        digest: Digest of all items used for training.
    """

    step: int = 0
    best_score: float | None = None
    best_step: int = 0
    best: State | None = None
    worse: int = 0
    digest: str = ""


class _Training:
    """State of one training."""

    def __init__(
        self,
        student: TrainableModule,
        teacher: TrainableModule,
        loss: Loss | None,
        settings: FinetuneSettings,
    ) -> None:
        self.student, self.teacher, self.settings = student, teacher.eval(), settings
        self.names = [var.name for var in student.source.program.inputs]
        self.loss = loss or match_outputs
        self.takes_item = loss is not None and takes_arguments(loss, 3)
        self.progress, self.start = Progress(), read_state(student)
        #: of the steps since the last evaluation
        self.losses: list[float] = []
        self.parameters = [p for p in student.parameters() if p.requires_grad]
        #: what is evaluated and returned: see `follow_average`
        self.begin_average()
        self.optimizer = torch.optim.Adam(self.parameters, lr=settings.lr)
        units = measure_units(student)
        scales = {id(quantizer.log_factor) for quantizer in student.list_quantizers()}
        self.units = [
            units[name] * (settings.scale_lr if id(p) in scales else 1.0)
            for name, p in student.named_parameters()
            if p.requires_grad
        ]
        self.scaled = list(find_scaled(student))
        self.hidden = find_hidden(student, teacher) if settings.hidden_weight else []
        self.path = None if settings.checkpoint is None else Path(settings.checkpoint)
        self.validation = None
        if settings.validation_dataset is not None:
            inputs = describe_inputs(student.source.prepared.mod)
            self.validation = list(open_dataset(settings.validation_dataset, inputs))
            self.expected = [run_module(self.teacher, self.pick(b)) for b in self.validation]

    def pick(self, batch: Mapping[str, np.ndarray]) -> list[torch.Tensor]:
        """Return the inputs of a batch as separate tensors, in order."""
        return [torch.from_numpy(np.array(batch[name])) for name in self.names]

    # ---- the loop ----

    def run(self, data: TrainingData) -> None:
        """Run the remaining steps."""
        settings = self.settings
        if self.progress.step == 0:
            self.evaluate()
            if settings.reconstruction:
                self.reconstruct(data)
                if not self.evaluate():
                    write_state(self.student, self.start)
                    self.begin_average()
        begun, seen, digest = self.progress.step, 0, ""
        for batch, item in data:
            if self.progress.step >= settings.steps or self.is_done:
                return
            digest = digest_text(digest + digest_batch(batch))
            seen += 1
            if seen <= begun:  # these steps were done before the training was interrupted
                if seen == begun and digest != self.progress.digest:
                    raise DataError(
                        f"checkpoint={str(self.path)!r} was started with other data. Use a fixed "
                        "seed for data that is drawn or augmented at random. Delete the file to "
                        "start again.",
                        code="RQ303",
                    )
                continue
            self.take_step(batch, item)
            step = seen
            self.progress = replace(self.progress, step=step, digest=digest)
            settings.events.on_progress(ProgressEvent("training", step, settings.steps, "step"))
            if step % settings.interval == 0 or step == settings.steps:
                self.evaluate()
                self.save()

    def reconstruct(self, data: TrainingData) -> None:
        """Fit the weights to the first items, and start the average with them.

        If the data ends it is not read again: repeated samples carry no new information, but would
        count twice.
        """
        count = self.settings.reconstruction
        batches = [self.pick(batch) for batch in itertools.islice(data.dataset, count)]

        def report(done: int, total: int) -> None:
            event = ProgressEvent("reconstruction", done, total, "operator")
            self.settings.events.on_progress(event)

        reconstruct(self.student, self.teacher, batches, report)
        self.begin_average()

    def begin_average(self) -> None:
        """Start the average before the first step with the parameters."""
        self.average = [p.detach().clone() for p in self.parameters]

    @property
    def is_done(self) -> bool:
        """Whether `patience` has run out."""
        patience = self.settings.patience
        return patience is not None and self.progress.worse >= patience

    def take_step(self, batch: Mapping[str, np.ndarray], item: Mapping[str, Any]) -> None:
        """Run one step of the optimizer."""
        settings, step = self.settings, self.progress.step
        rate = 0.5 * settings.lr * (1 + math.cos(math.pi * step / settings.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        inputs = self.pick(batch)
        with torch.no_grad():
            expected, inside = self.teacher.compute(inputs, self.hidden)
        self.student.train()
        begin, end = SHARPNESS
        for quantizer in self.student.list_quantizers():
            if quantizer.group.constant is not None:
                quantizer.sharpness = begin * (end / begin) ** (step / settings.steps)
        outputs, found = self.student.compute(inputs, self.hidden)
        loss = self.measure(as_list(outputs), as_list(expected), item)
        if not loss.requires_grad:
            raise ConfigError(
                "finetune: loss returned a tensor without a gradient; allowed: a tensor that torch "
                "computes from the outputs, without detach(), no_grad() or argmax().",
                code="RQ106",
            )
        if self.hidden:
            distances = [measure_distance(found[name], inside[name]) for name in self.hidden]
            loss = loss + settings.hidden_weight * torch.stack(distances).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.step_relative()
        self.follow_average(step + 1)
        value = loss.item()
        if not math.isfinite(value):
            cause = (
                f"training diverged. Lower lr ({settings.lr:g})."
                if step
                else "nothing is trained yet. Check the loss and the data."
            )
            raise ConfigError(f"The loss is {value} in step {step}: {cause}", code="RQ101")
        self.losses.append(value)

    @torch.no_grad()
    def step_relative(self) -> None:
        """Run a step of Adam whose size is the rate for every number, in the unit of each.

        Weights move with their scale, so that it changes none of their integers. Rounding was
        fitted so that its errors compensate each other. If all integers changed at once, this would
        be lost.
        """
        for scaled in self.scaled:
            scaled.carry_gradient()
        before = [parameter.clone() for parameter in self.parameters]
        scales = [scaled.factor.clone() for scaled in self.scaled]
        self.optimizer.step()
        for parameter, old, unit in zip(self.parameters, before, self.units, strict=True):
            torch.addcmul(old, parameter - old, unit, out=parameter.data)
        for scaled, old in zip(self.scaled, scales, strict=True):
            scaled.carry_weight(old)

    @torch.no_grad()
    def follow_average(self, step: int) -> None:
        """Count the parameters after `steps` steps, 1 and more, into the average of late
        parameters.

        A weight between two levels is rounded to one or the other from step to step. Each time this
        is an error that the other weights were not trained for. Its average moves little.

        Weights fall polynomially into the past, so the average covers about the last tenth of the
        steps taken, however many they are: (1 - w) average + w now, w = (e + 1) / (t + e) (Shamir
        and Zhang 2013, https://arxiv.org/abs/1212.1824). Ranges that follow the data are averages
        already, and keep their values of the last step.
        """
        weight = (LATENESS + 1) / (step + LATENESS)
        for average, parameter in zip(self.average, self.parameters, strict=True):
            average.lerp_(parameter, weight)

    @contextlib.contextmanager
    def put_average(self) -> Iterator[None]:
        """Use the average as the student's parameters inside the context."""
        now = [p.detach().clone() for p in self.parameters]
        write_parameters(self.parameters, self.average)
        try:
            yield
        finally:
            write_parameters(self.parameters, now)

    def measure(
        self,
        outputs: list[torch.Tensor],
        expected: list[torch.Tensor],
        item: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Compute the loss of one batch. A loss that takes the item needs `item`.

        Raises:
            ConfigError: It makes a mistake, or returns no number. What it raises else is passed on.
        """
        args = [outputs, expected, *([item] if self.takes_item else [])]
        try:
            value = self.loss(*args)
        except Exception as error:
            at = self.describe(outputs)
            if is_mistake(error):
                text = f"finetune: loss raised {type(error).__name__}{at}: {error}"
                raise ConfigError(text, code="RQ106") from error
            note_error(error, f"relayquant: raised by the loss of finetune{at}")
            raise
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise ConfigError(
                f"finetune: loss returned a {type(value).__name__}; allowed: a tensor of one "
                "number that torch can differentiate.",
                code="RQ106",
            )
        return value

    def describe(self, outputs: list[torch.Tensor]) -> str:
        """Describe a call of the loss for messages."""
        shapes = ", ".join(str(tuple(value.shape)) for value in outputs)
        return f" after {format_count(self.progress.step, 'step')}, for outputs of shape {shapes}"

    def evaluate(self) -> bool:
        """Evaluate the average, and keep it if it is the best.

        Returns whether it is the best. True without validation.
        """
        progress, settings = self.progress, self.settings
        score, is_best = None, True
        if self.validation is not None:
            with self.put_average():
                score, state = self.score(self.validate()), read_state(self.student)
            is_best = progress.best_score is None or score > progress.best_score
            # Patience counts steps: a worse reconstruction does not end them.
            self.progress = replace(progress, worse=progress.worse + (progress.step > 0))
            if is_best:
                self.progress = replace(
                    progress, worse=0, best_score=score, best_step=progress.step, best=state
                )
        mean = float(np.mean(self.losses)) if self.losses else math.nan
        self.losses.clear()
        event = TrainingEvent(progress.step, settings.steps, mean, score, is_best)
        settings.events.on_training(event)
        return is_best

    def validate(self) -> list[list[torch.Tensor]]:
        """Return the outputs of the current state for each batch of the validation data."""
        self.student.eval()
        return [run_module(self.student, self.pick(batch)) for batch in self.validation or ()]

    @torch.no_grad()
    def average_loss(self, outputs: Batches, expected: Batches) -> float:
        """Return the mean loss over batches. The default loss if `loss` takes the item."""
        loss = match_outputs if self.takes_item else self.measure
        pairs = zip(outputs, expected, strict=True)
        return float(np.mean([float(loss(*pair)) for pair in pairs]))

    def score(self, outputs: Batches) -> float:
        """Score the outputs on validation data, higher is better. Never NaN, because nothing is
        better than NaN.

        Raises:
            ConfigError: it is not a number.
        """
        metric, expected = self.settings.metric, self.expected
        if metric is not None:
            return apply_metric(metric, read_outputs(expected), read_outputs(outputs))
        score = -self.average_loss(outputs, expected)
        if math.isnan(score):
            step = self.progress.step
            if is_finite(expected) and is_finite(outputs):
                raise ConfigError(
                    f"The loss is {score} on validation data after step {step}, although outputs "
                    "are finite. Check the loss, or pass a metric.",
                    code="RQ106",
                )
            whose = "trained" if is_finite(expected) else "float"
            raise ConfigError(
                f"validation: outputs of the {whose} model are not finite after step {step}, so "
                "states cannot be compared. Check the validation data and the float model. If "
                "both are right, training diverged: lower lr.",
                code="RQ302",
            )
        return score

    def finish(self) -> str:
        """Return to the best state, and describe what was done.

        If validation cannot tell it from the first state, the first state is used: a gain by chance
        on a few samples is a loss on others.
        """
        progress = self.progress
        done = format_count(progress.step, "step")
        write_parameters(self.parameters, self.average)
        if progress.best is not None:
            write_state(self.student, progress.best)
            if is_same(progress.best, self.start):
                done += ", the best as calibrated"
            else:
                step = progress.best_step
                done += f", the best after {step if step else 'the reconstruction'}"
                if not self.is_gain():
                    write_state(self.student, self.start)
                    done += ", within the noise of validation: left as calibrated"
        self.student.eval()
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        return done

    def is_gain(self) -> bool:
        """Whether the state's loss is lower than the first state's by more than chance.

        A user's metric is not tested: it may have no value on parts of the data.
        """
        if self.settings.metric is not None:
            return True
        now, state = self.validate(), read_state(self.student)
        write_state(self.student, self.start)
        first = self.validate()
        write_state(self.student, state)

        def measure_gain(parts: Sequence[Batches]) -> float:
            new, old, expected = parts
            return self.average_loss(old, expected) - self.average_loss(new, expected)

        parts = now, first, self.expected
        # Not ">": if a part has no loss, chance is unknown.
        return not measure_gain(parts) <= SURENESS * estimate_error(measure_gain, parts)

    # ---- checkpoints ----

    @functools.cached_property
    def binding(self) -> dict[str, str]:
        """Describe what a checkpoint belongs to. Digests of the items detect other data."""
        settings, prepared = self.settings, self.student.source.prepared
        metric, validation = settings.metric, self.validation
        weights = settings.weight_ranges or settings.ranges
        return {
            "model": digest_text(tvm.ir.save_json(prepared.graph.mod)),
            "state": digest_text("".join(f"{k}{v.tobytes()}" for k, v in self.start.items())),
            "settings": f"{format_count(settings.steps, 'step')}, lr {settings.lr}, scales "
            f"{settings.scale_lr}, inside {settings.hidden_weight}, "
            f"reconstruction {settings.reconstruction}, "
            f"{settings.ranges.value}, weights {weights.value}, "
            f"evaluated every {settings.interval}, "
            f"patience {settings.patience}, loss {name_function(self.loss)}",
            # the best score so far is one of this metric on this data
            "metric": "the loss" if metric is None else name_function(metric),
            "validation data": "none"
            if validation is None
            else digest_text("".join(map(digest_batch, validation))),
            "torch": f"{torch.__version__}, {format_count(torch.get_num_threads(), 'thread')}",
        }

    def resume(self) -> None:
        """Resume from the checkpoint, if there is one.

        Raises:
            ConfigError: it belongs to another training.
            DataError: it is damaged.
        """
        if self.path is None or not self.path.exists():
            return
        found = read_archive(self.path, FORMAT, "checkpoint of a training")
        header, arrays = found.header, found.arrays
        check_binding(self.path, header["binding"], self.binding, "training")
        write_state(self.student, take_part(arrays, "now:"))
        self.progress = Progress(
            int(header["step"]),
            header["best_score"],
            int(header["best_step"]),
            take_part(arrays, "best:") or None,
            int(header["worse"]),
            str(header["digest"]),
        )
        for i, parameter in enumerate(self.parameters):
            self.average[i] = torch.from_numpy(arrays[f"average:{i}"].copy())
            state = take_part(arrays, f"adam:{i}:")
            if state:
                self.optimizer.state[parameter] = {
                    name: torch.from_numpy(value.copy()) for name, value in state.items()
                }

    def save(self) -> None:
        """Write the checkpoint."""
        if self.path is None:
            return
        progress = self.progress
        arrays = {f"now:{name}": value for name, value in read_state(self.student).items()}
        arrays |= {f"best:{name}": value for name, value in (progress.best or {}).items()}
        for i, parameter in enumerate(self.parameters):
            arrays[f"average:{i}"] = self.average[i].numpy()
            for name, value in self.optimizer.state.get(parameter, {}).items():
                arrays[f"adam:{i}:{name}"] = value.detach().numpy()
        header = {
            "binding": self.binding,
            "step": progress.step,
            "digest": progress.digest,
            "best_step": progress.best_step,
            "best_score": progress.best_score,
            "worse": progress.worse,
        }
        write_archive(self.path, FORMAT, Archive(header, arrays))


def find_hidden(student: TrainableModule, teacher: TrainableModule) -> list[str]:
    """Find names of float values that quantized operators return in one model, and that the
    other model has too.
    """
    steps = (teacher.source.program.steps, student.source.program.steps)
    known, own = (
        {step.var.name for step in each if "float" in str(getattr(step.var.ty, "dtype", ""))}
        for each in steps
    )
    names = dict.fromkeys(
        operator.output for operator in student.source.prepared.plan.operators if operator.output
    )
    return [name for name in names if name in known & own]


@torch.no_grad()
def run_module(module: TrainableModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return outputs without gradients."""
    return as_list(module(*inputs))


def is_finite(outputs: Batches) -> bool:
    """Whether no value is NaN or infinite."""
    return all(bool(value.isfinite().all()) for batch in outputs for value in batch)


def name_function(function: Any) -> str:
    """Return the name of a function of the user."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def as_list(outputs: Any) -> list[torch.Tensor]:
    """Return a module's result as a list."""
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def read_outputs(outputs: Batches) -> list[list[np.ndarray]]:
    """Return outputs of batches as arrays that share their memory. Scalars get an axis."""
    return [[torch.atleast_1d(value).numpy() for value in batch] for batch in outputs]


def take_part(arrays: Mapping[str, np.ndarray], prefix: str) -> State:
    """Return the arrays whose name starts with the prefix."""
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
