"""Float module + pictures + labels -> accuracy, also with other preprocessing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tvm

from relayquant.analysis.linting.finding import Finding, Severity
from relayquant.analysis.linting.normalization import RAW, PixelForm, find_form, list_forms
from relayquant.codegen.eager import EagerModule
from relayquant.data import Batch, Dataset, InputInfo, count_first, count_samples, open_dataset
from relayquant.data.images import PRESETS
from relayquant.data.item import describe_inputs
from relayquant.errors import DataError, format_count
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.rewrite import Graph

#: samples for the first trial of every preprocessing; the best few are then tried on `MOST_SAMPLES`
FIRST_SAMPLES, MOST_SAMPLES, FINALISTS = 64, 512, 3
#: A gain counts if its probability by chance is below this. A dozen preprocessings are tried: one
#: of them looks better by chance in 1 of 100 cases.
CHANCE = 0.001
#: samples that a score needs, to be compared with another score
FEWEST_SAMPLES = 30
#: A difference between two shares counts from this number of standard errors on, because the best
#: of a dozen is compared. Both shares use the same samples, so the true error is smaller.
CLEAR_ERRORS = 3.0
#: multiply-adds that `find_better_score` may spend
REVIEW_WORK = 3e11

#: Batch -> the class that the model finds for each sample.
Answer = Callable[[Batch], np.ndarray]


@dataclass(frozen=True, eq=False)
class PictureInput:
    """The only input of a model for pictures, as a data set fills it.

    Attributes:
        name: The input.
        axis: The channel axis.
        given: The preprocessing that the pictures seem to have.
        forms: Other ways to prepare them.
    """

    name: str
    axis: int
    given: PixelForm
    forms: tuple[PixelForm, ...]

    def convert(self, batch: Batch, form: PixelForm) -> Batch:
        """Convert a batch to another preprocessing."""
        return {self.name: self.given.convert(batch[self.name], self.axis, form)}


def find_picture_input(
    inputs: Sequence[InputInfo], batches: Sequence[Batch]
) -> PictureInput | None:
    """Find the picture input. None if the model takes something else, or if its channels do not
    vary.
    """
    if len(inputs) != 1 or len(inputs[0].shape) != 4 or not inputs[0].dtype.startswith("float"):
        return None
    name, shape = inputs[0].name, inputs[0].shape
    axis = next((axis for axis in (1, 3) if shape[axis] in (1, 3)), None)
    if axis is None:
        return None
    rest = tuple(i for i in range(4) if i != axis)
    ends = [(batch[name].min(rest), batch[name].max(rest)) for batch in batches]
    lows, highs = (np.array([end[i] for end in ends]) for i in (0, 1))
    if not ends or ((lows := lows.min(0)) >= (highs := highs.max(0))).any():
        return None
    forms = list_forms(lows.size)
    given = find_form(lows, highs, forms)
    others = [
        form for form in forms if not form.is_same(given) or form.is_reversed != given.is_reversed
    ]
    return PictureInput(name, axis, given, tuple(others))


def check_labels(prepared: tvm.IRModule, dataset: Any, labels: Any) -> list[Finding]:
    """Check data with labels: accuracy of the float model, and whether a change makes it clearly
    better.

    The changes are another preprocessing of pictures, and labels that count from 1. Clearly better:
    McNemar's exact test on the samples with different results.

    Raises:
        DataError: labels are not integers, their number differs from the number of samples, or the
            first output holds no scores.
    """
    labels = np.asarray(labels).reshape(-1)
    if labels.dtype.kind not in "iu":
        raise DataError(
            f"lint got labels of dtype {labels.dtype}; allowed: integers, the class of each "
            "sample.",
            code="RQ302",
        )
    inputs, model = describe_inputs(prepared), EagerModule(prepared)
    answer = partial(find_answers, model, [info.name for info in inputs])
    kept, given, samples = answer_first(answer, open_dataset(dataset, inputs))
    if len(labels) != samples:
        raise DataError(
            f"lint got {format_count(len(labels), 'label')} for "
            f"{format_count(samples, 'sample')}; allowed: one for each sample, in the same order.",
            code="RQ302",
        )
    labels = labels.astype("int64")[: len(given)]
    right = given == labels
    what = (
        f"the float model is right on {int(right.sum())} of {format_count(len(right), 'sample')} "
        f"({right.mean():.1%})."
    )
    for shift in (1, -1):
        if is_clearly_better(given == labels + shift, right):
            what = f"{what[:-1]}, and of {np.mean(given == labels + shift):.1%} with {shift:+d}."
            advice = "Count the classes as the model does: with or without one for background."
            return [Finding(Severity.WARNING, "labels", "", what, advice)]
    advice = "Compare with the accuracy that the model's authors publish."
    score = Finding(Severity.INFO, "labels", "", what, advice)
    picture = find_picture_input(inputs, kept)
    return [score] if picture is None else check_forms(picture, answer, kept, labels, right, score)


def answer_first(answer: Answer, dataset: Dataset) -> tuple[list[Batch], np.ndarray, int]:
    """Return (copies of the first batches with `MOST_SAMPLES` samples, answers to them, samples of
    all batches).
    """
    kept: list[Batch] = []
    answers: list[np.ndarray] = []
    samples = 0
    for batch in dataset:
        if samples < MOST_SAMPLES:
            answers.append(answer(batch))
            kept.append({name: array.copy() for name, array in batch.items()})
        samples += count_samples(batch)
    return kept, np.concatenate(answers), samples


def check_forms(
    picture: PictureInput,
    answer: Answer,
    batches: Sequence[Batch],
    labels: np.ndarray,
    right: np.ndarray,
    score: Finding,
) -> list[Finding]:
    """Return `score` with the accuracy of other preprocessings, and whether one is clearly better.

    Args:
        labels, right: The class of each sample of `batches`, and whether the model finds it.
    """

    def find_right(form: PixelForm, batches: Sequence[Batch]) -> np.ndarray:
        answers = np.concatenate([answer(picture.convert(batch, form)) for batch in batches])
        return answers == labels[: len(answers)]

    few = batches[: count_first(map(count_samples, batches), FIRST_SAMPLES)]
    first = {form.text: find_right(form, few) for form in picture.forms}
    ranked = sorted(picture.forms, key=lambda form: -first[form.text].sum())
    score = replace(score, what=f"{score.what} {describe_scores(first)}")
    tried = [(form, find_right(form, batches)) for form in ranked[:FINALISTS]]
    form, better = max(tried, key=lambda row: row[1].sum())
    if not is_clearly_better(better, right):
        return [score]
    seen = f" (which look prepared as {picture.given.text!r})" if picture.given.text else ""
    what = (
        f"the float model is right on {right.mean():.1%} of {format_count(len(right), 'sample')} "
        f"as given{seen}, and on {better.mean():.1%} prepared as {form.text!r}."
    )
    advice = f"Preprocess as in training: --preprocess {form.text}."
    return [score, Finding(Severity.WARNING, "normalization", picture.name, what, advice)]


def describe_scores(right: Mapping[str, np.ndarray]) -> str:
    """Describe the accuracy with each preset, the best first."""
    scores = {text: found.mean() for text, found in right.items() if text in (*PRESETS, RAW)}
    ranked = sorted(scores, key=lambda text: -scores[text])
    count = format_count(max(map(len, right.values())), "sample")
    listed = ", ".join(f"{text!r} {scores[text]:.1%}" for text in ranked)
    return f"Prepared in other ways, the first {count}: {listed}." if ranked else ""


def find_better_score(
    prepared: tvm.IRModule,
    data: Dataset,
    measure: Callable[[list[list[np.ndarray]]], float],
    score: float,
) -> tuple[PictureInput, PixelForm, float] | None:
    """Find the preprocessing with which the float model has a clearly better score, and that score.

    None if there is none, or if the score is not a share of the samples. Preprocessings that differ
    least from the given one are tried first, as many as `REVIEW_WORK` allows.

    Args:
        prepared: The float module.
        data: The data that `score` was measured on.
        measure: Outputs of every batch -> score.
        score: Score of the pictures as given.
    """
    samples = sum(map(count_samples, data))
    if samples < FEWEST_SAMPLES or not 0 <= score < 1 or not is_whole(score * samples):
        return None
    picture = find_picture_input(data.inputs, data)
    if picture is None:
        return None
    macs = sum(count_macs(binding.value) for binding in Graph(prepared).bindings)
    count = int(REVIEW_WORK / max(macs * samples, 1))
    gain = picture.given.gain.mean()
    nearest = sorted(picture.forms, key=lambda form: abs(math.log(form.gain.mean() / gain)))
    model, best = EagerModule(prepared), None
    for form in nearest[:count]:
        found = measure(
            [model.run("main", [*picture.convert(batch, form).values()]) for batch in data]
        )
        error = math.sqrt((score * (1 - score) + max(found * (1 - found), 0)) / samples)
        if found - score > CLEAR_ERRORS * error and (best is None or found > best[2]):
            best = picture, form, found
    return best


def is_whole(value: float) -> bool:
    """Whether a number is an integer, up to rounding."""
    return abs(value - round(value)) < 1e-3


def find_answers(model: EagerModule, names: Sequence[str], batch: Batch) -> np.ndarray:
    """Return the position of the largest value in the first output, for each sample of a batch.

    Raises:
        DataError: the output holds no scores.
    """
    output = model.run("main", [batch[name] for name in names])[0]
    samples = count_samples(batch)
    if output.dtype.kind in "iu" and output.size == samples:
        return output.reshape(-1)  # the model has its own arg max
    if output.ndim < 2 or len(output) != samples or output.size < 2 * samples:
        raise DataError(
            f"The first output has shape {output.shape} for {format_count(samples, 'sample')}; "
            "labels are for scores of 2 or more classes, samples first. Leave them out.",
            code="RQ302",
        )
    return output.reshape(samples, -1).argmax(1)


def is_clearly_better(right: np.ndarray, before: np.ndarray) -> bool:
    """Whether more samples are right than before, and not by chance (McNemar's exact test)."""
    gained = int(np.count_nonzero(right & ~before))
    lost = int(np.count_nonzero(before & ~right))
    differing = gained + lost
    if gained <= lost:
        return False
    ways = sum(math.comb(differing, k) for k in range(gained, differing + 1))
    return ways < CHANCE * 2**differing
