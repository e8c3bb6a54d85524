"""Reconstruction before training: fit weights so that each operator reproduces the float model's
sums.

The input of each operator is what the quantized operators before it return. Weights are fitted in
closed form, one operator after the other, to the target of `calibration.weights.target`. So does
calibration for few bits, on its own data; here it is any data and any number of bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from relayquant.config import BiasCorrection, FitSettings
from relayquant.errors import DataError
from relayquant.stages.calibration.weights.fit import correct_bias, fit_operator
from relayquant.stages.calibration.weights.pick import OperatorFit, find_fits
from relayquant.stages.calibration.weights.statistics import InputStatistics
from relayquant.stages.calibration.weights.target import solve_target
from relayquant.torch.interpreter.program import TorchProgram, Values
from relayquant.torch.training.rounding import FakeQuantize
from relayquant.torch.training.start import MARGIN, reshape_scale
from relayquant.torch.training.trainable import TrainableModule, name_parameter

#: maximum number of values in the sampled rows of an operator's input, and of rows; seed of the
#: choice
VALUES, ROWS, SEED = 1 << 26, 1 << 16, 0
#: weights per output above which an operator stays as calibrated: H has this number of rows and
#: columns
MOST_COLUMNS = 4608
#: how much the float weight holds, see `solve_target`
RIDGE = 0.3
#: how scales are searched and weights rounded
SEARCH = FitSettings(
    bias=BiasCorrection.NONE,
    scale_factors=(1.0, 1.08, 1.16, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6),
    sweeps=4,
)

#: inputs of the model in one batch
Inputs = Sequence[torch.Tensor]
Array = np.ndarray


@dataclass(frozen=True, eq=False)
class FittedSum:
    """Where an operator's sum of products is computed.

    Attributes:
        fit: The operator.
        quantizer: Rounds its weight.
        rounding: Number of the student's step that rounds it.
        student, teacher: Number of the step that computes the sum, in each program.
    """

    fit: OperatorFit
    quantizer: FakeQuantize
    rounding: int
    student: int
    teacher: int


@dataclass(frozen=True, eq=False)
class Runs:
    """A model that runs on several batches."""

    program: TorchProgram
    values: Sequence[Values]

    @staticmethod
    def begin(module: TrainableModule, batches: Sequence[Inputs]) -> Runs:
        """Start before the first step."""
        return Runs(module.source.program, [module.eval().begin(inputs) for inputs in batches])

    def advance(self, first: int, stop: int, weight: str) -> list[Array]:
        """Run steps first..stop - 1. Return the operands of step `stop` other than `weight`."""
        for each in self.values:
            self.program.advance(each, self.program.steps[first:stop])
        (data,) = (var for var in self.program.steps[stop].reads if var.name != weight)
        return [each.slots[data].numpy() for each in self.values]


@torch.no_grad()
def reconstruct(
    student: TrainableModule,
    teacher: TrainableModule,
    batches: Sequence[Inputs],
    report: Callable[[int, int], None],
) -> None:
    """Fit weights, biases and learned scales of `student`, in place, to the sums of `teacher`.

    All batches run together. Both models run up to an operator, which is fitted before they
    continue. The live values of all batches are held in memory.

    Args:
        student, teacher: The calibrated quantized model, and the float model.
        batches: Inputs of both models.
        report: Called with the number of finished operators and of all operators.

    Raises:
        DataError: an operator reads values that are not finite.
    """
    own, known = (Runs.begin(module, batches) for module in (student, teacher))
    places, first = find_places(student, teacher), (0, 0)
    for number, place in enumerate(places):
        weight = place.fit.point.weight
        real = own.advance(first[0], place.student, weight)
        expected = known.advance(first[1], place.teacher, weight)
        fit_place(student, place, real, expected)
        refresh(student, place, own.values)
        first = place.student, place.teacher
        report(number + 1, len(places))


def refresh(student: TrainableModule, place: FittedSum, runs: Sequence[Values]) -> None:
    """Recompute values of a weight and its bias that runs already hold."""
    program, bias = student.source.program, f"{place.fit.point.operator}:bias"
    step = program.steps[place.rounding]
    for values in runs:
        values.slots[step.var] = step.compute(values)
        if place.fit.bias is not None:
            variable = program.by_name[student.find_variable(bias)]
            value = student.weights[name_parameter(bias)]
            values.slots[variable] = student.round_bias(bias, value)


def find_places(student: TrainableModule, teacher: TrainableModule) -> list[FittedSum]:
    """Find operators that can be fitted, in the order of the student's steps.

    They are convolutions and products with a weight that no other operator uses, whose sum is in
    both programs.
    """
    own, known = (module.source.program.steps for module in (student, teacher))
    rounded = {step.var.name: i for i, step in enumerate(own)}
    sums = {step.var.name: i for i, step in enumerate(known)}
    readers = {var.name: i for i, step in enumerate(own) for var in step.reads}
    found = []
    for name, fit in find_fits(student.source.prepared).items():
        key, weight = f"{name}:weight", fit.point.weight
        quantizer, reader = student.find_quantizer(key), readers.get(weight)
        if quantizer is None or reader is None or fit.columns > MOST_COLUMNS:
            continue
        other = sums.get(own[reader].var.name)
        if other is None or len(own[reader].reads) != 2 or len(known[other].reads) != 1:
            continue
        found.append(FittedSum(fit, quantizer, rounded[weight], reader, other))
    return sorted(found, key=lambda place: place.student)


def fit_place(
    student: TrainableModule, place: FittedSum, real: Sequence[Array], expected: Sequence[Array]
) -> None:
    """Fit one operator to its inputs in the student and in the teacher.

    Raises:
        DataError: the inputs are not finite.
    """
    fit, quantizer = place.fit, place.quantizer
    view, name = fit.view, fit.point.operator
    rows = min(ROWS, max(VALUES // (view.groups * fit.columns), 1))
    # the same positions of both
    x, y = (
        view.sample_rows(arrays, rows, np.random.default_rng(SEED)) for arrays in (real, expected)
    )
    if not (np.isfinite(x.sum()) and np.isfinite(y.sum())):
        raise DataError(
            f"Operator {name!r} reads values that are not finite, or too large for their sum, so "
            "its weight cannot be fitted. Check the training data and its preprocessing.",
            code="RQ302",
        )
    original = view.weight_to_rows(fit.weight)
    target = fit_sums(x, y, original, with_bias=fit.bias is not None)
    learns = quantizer.log_factor is not None
    settings = SEARCH if learns else replace(SEARCH, scale_factors=(1.0,))
    result = fit_operator(
        view,
        InputStatistics(target.gram, np.zeros((view.groups, fit.columns)), x.shape[1]),
        view.rows_to_weight(target.weight.astype("float32"), fit.weight.shape),
        None,
        quantizer.qparams,
        fit.group.info.spec,
        settings,
    )
    half = (0.5 - MARGIN) * reshape_scale(result.qparams, fit.weight.ndim)
    ideal = view.rows_to_weight(target.weight, fit.weight.shape)
    write(
        student.weights[name_parameter(f"{name}:weight")],
        np.clip(ideal, result.weight - half, result.weight + half),
    )
    if quantizer.log_factor is not None:
        write(quantizer.log_factor, np.log(result.qparams.scale / quantizer.scale.numpy()))
    if fit.bias is not None:
        got, wanted = (
            np.einsum("gok,gk->go", rows, data.mean(axis=1, dtype="float64"))
            for rows, data in ((view.weight_to_rows(result.weight), x), (original, y))
        )
        bias = correct_bias(fit.bias, (wanted - got).reshape(-1))
        write(student.weights[name_parameter(f"{name}:bias")], bias)


@dataclass(frozen=True, eq=False)
class Target:
    """A weight to round, (G, O, K), and H of its input, (G, K, K), float64."""

    weight: Array
    gram: Array


def fit_sums(x: Array, y: Array, weight: Array, *, with_bias: bool) -> Target:
    """Return the weight whose sums on `x` equal the sums of `weight` on `y`: the formula above.

    Args:
        x, y: Rows of the input, (G, n, K) float32: of the student, and of the teacher.
        weight: (G, O, K).
        with_bias: Whether a bias corrects the mean error of the sums.
    """
    count, grams = x.shape[1], []
    for other in (x, y):
        gram = np.matmul(x.transpose(0, 2, 1), other).astype("float64")
        if with_bias:
            mine, theirs = (rows.mean(axis=1, dtype="float64") for rows in (x, other))
            gram -= count * mine[:, :, None] * theirs[:, None, :]
        grams.append(gram)
    return Target(solve_target(*grams, weight, count, RIDGE), grams[0])


def write(parameter: torch.Tensor, value: Array) -> None:
    """Set a parameter to another value in its shape."""
    parameter.copy_(torch.from_numpy(np.asarray(value, "float32").reshape(parameter.shape)))
