"""outputs: float module, quantized module and a few samples -> the difference of their results.

Both modules run step by step. Integers have the bits of numpy (`relayquant.reference`) and of
compiled code. Products run on the kernels that calibration has already compiled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import tvm

from relayquant.analysis.confidence import find_margins
from relayquant.analysis.error_statistics import ErrorSums
from relayquant.analysis.quiet_outputs import (
    find_least_energies,
    find_least_energy,
    find_missing,
    measure_energies,
)
from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.eager import EagerModule
from relayquant.data import count_samples
from relayquant.ir.agreement import Agreement
from relayquant.ir.ledger import InterfaceValue, find_ledger
from relayquant.ir.rewrite import Graph
from relayquant.stages.calibration.output_parts import find_parts

#: share of a sample's mean energy; samples with less are rated by it
SILENCE = 0.01


@dataclass(frozen=True)
class OutputGap:
    """One output of both modules, over all samples.

    Attributes:
        sqnr: Signal to quantization noise ratio in dB. inf if nothing differs, and for integer
            outputs, which are answers and not amounts. -inf if the quantized module gives NaN or
            infinity where the float module does not. For the signal of outputs with bounds see
            `quiet_outputs`.
        differing: Number of samples with a clearly different answer. See `count_differing`.
        samples: Number of all samples. 0 if the output is no answer in this sense.
        each: SQNR of each sample in dB, in order. Of each batch if axis 0 of the output does not
            count samples. For integer outputs, differing elements are the noise.
        equal: Number of samples with an equal answer (the same arg max).
        largest: Largest absolute error. 0 for integer outputs.
        margins: How many dB `sqnr` may be too high and too low for all data of this kind
            (`relayquant.analysis.confidence.find_margins`). 0 if the samples do not tell.
    """

    sqnr: float
    differing: int = 0
    samples: int = 0
    each: tuple[float, ...] = ()
    margins: tuple[float, float] = (0.0, 0.0)
    equal: int = 0
    largest: float = 0.0

    @property
    def disagreement(self) -> float:
        """Share of samples with a different answer."""
        return self.differing / max(self.samples, 1)

    @property
    def worst(self) -> float:
        """SQNR of the worst sample, dB."""
        return min(self.each, default=self.sqnr)

    @property
    def least(self) -> float:
        """Lower bound of the SQNR in dB for data of this kind."""
        return self.sqnr - self.margins[0]

    @property
    def most(self) -> float:
        """Upper bound of the SQNR in dB for data of this kind."""
        return self.sqnr + self.margins[1]


def measure_gaps(
    float_mod: tvm.IRModule,
    quantized: tvm.IRModule,
    batches: Iterable[Mapping[str, np.ndarray]],
    expected: Iterable[Sequence[np.ndarray]] | None = None,
) -> list[OutputGap]:
    """Measure the gap of every output, in order.

    Args:
        float_mod: The float module with its parameters bound.
        quantized: Its quantized module. Integer inputs and outputs are converted with the
            parameters in its ledger.
        batches: Inputs of the float module by name.
        expected: The float module's results on each batch; None: they are computed.
    """
    meter = GapMeter(float_mod, quantized)
    known = itertools.repeat(None) if expected is None else expected
    for batch, results in zip(batches, known, strict=False):
        meter.measure(batch, results)
    return meter.gaps


def compute_results(
    mod: tvm.IRModule, batches: Iterable[Mapping[str, np.ndarray]]
) -> list[list[np.ndarray]]:
    """Return the results of a module on each batch."""
    module = EagerModule(mod)
    return [module.run("main", order_inputs(mod, batch)) for batch in batches]


class GapMeter:
    """Runs a float module and its quantized module on each batch. See `measure_gaps`."""

    def __init__(self, float_mod: tvm.IRModule, quantized: tvm.IRModule) -> None:
        self.float_mod, self.quantized = float_mod, quantized
        self.interface = Interface.of(quantized)
        self.second = EagerModule(quantized)
        self.sums = GapSums(find_least_energies(float_mod))

    @cached_property
    def first(self) -> EagerModule:
        """The float module; made when it first has to run."""
        return EagerModule(self.float_mod)

    def measure(
        self, batch: Mapping[str, np.ndarray], expected: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Measure one more batch, whose float results may be known. Return the quantized module's
        results in real units.
        """
        if expected is None:
            expected = self.first.run("main", order_inputs(self.float_mod, batch))
        inputs = order_inputs(self.quantized, self.interface.to_inputs(batch))
        got = self.interface.to_real(self.second.run("main", inputs))
        self.sums.update(expected, got, count_samples(batch))
        return got

    @property
    def gaps(self) -> list[OutputGap]:
        """The gap of every output so far, in order."""
        return self.sums.gaps


class GapSums:
    """Running sums of the gaps of all outputs over batches.

    Args:
        least: Energy that a sample of each output counts as at least.
    """

    def __init__(self, least: Sequence[float]) -> None:
        self.least = least
        self.sums: list[ErrorSums] = []
        self.counts: list[tuple[int, int]] = []
        self.equal: list[int] = []
        self.energies: list[list[np.ndarray]] = []

    def update(
        self, expected: Sequence[np.ndarray], got: Sequence[np.ndarray], samples: int
    ) -> None:
        """Add one batch of `samples` samples: outputs of both modules in real units."""
        self.sums = self.sums or [ErrorSums()] * len(expected)
        self.counts = self.counts or [(0, 0)] * len(expected)
        self.equal = self.equal or [0] * len(expected)
        self.energies = self.energies or [[] for _ in expected]
        for i, pair in enumerate(zip(expected, got, strict=True)):
            x, y = map(widen_floats, pair)
            differing, answers = count_differing(x, y)
            self.counts[i] = self.counts[i][0] + differing, self.counts[i][1] + answers
            self.equal[i] += count_equal(x, y) if answers else 0
            if x.dtype.kind == "f":
                usable = np.isfinite(x)
                self.sums[i] = self.sums[i].update(x[usable], y[usable])
            else:  # Integers are answers, not amounts: no index is farther off than another.
                x, y = np.ones(x.shape, "float32"), np.equal(x, y).astype("float32")
            energies = measure_energies(x, y, samples)
            missing = find_missing(energies[0], self.least[i])
            self.sums[i] = replace(self.sums[i], signal=self.sums[i].signal + missing.sum())
            energies[0] += missing
            self.energies[i].append(energies)

    @property
    def gaps(self) -> list[OutputGap]:
        """The gap of every output, in order."""
        return [
            OutputGap(
                s.sqnr if np.isfinite(s.noise) else float("-inf"),
                *count,
                rate_samples(energy),
                find_margins(*np.concatenate(energy, axis=1)) if s.count else (0.0, 0.0),
                equal,
                s.largest,
            )
            for s, count, energy, equal in zip(
                self.sums, self.counts, self.energies, self.equal, strict=True
            )
        ]


class PartMeter:
    """Measures the gap of every value that an output concatenates: places hide scores there."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.view, self.sums = Graph(mod), dict[str, GapSums]()

    def measure(
        self,
        batch: Mapping[str, np.ndarray],
        expected: Sequence[np.ndarray],
        got: Sequence[np.ndarray],
    ) -> None:
        """Add the results of both modules on one more batch, in real units."""
        for part in find_parts(self.view, batch):
            if part.elements is not None:
                least = find_least_energy(self.view, part.value)
                sums = self.sums.setdefault(part.value.name, GapSums([least]))
                sums.update([part.take(expected)], [part.take(got)], count_samples(batch))

    @property
    def gaps(self) -> dict[str, OutputGap]:
        """The gaps so far, by name."""
        return {name: sums.gaps[0] for name, sums in self.sums.items()}


def rate_samples(energies: Sequence[np.ndarray]) -> tuple[float, ...]:
    """Return the SQNR of each sample in dB.

    A sample that is nearly silent is rated with `SILENCE` of the mean signal, because its noise
    does not matter.
    """
    signal, noise = np.concatenate(energies, axis=1)
    floor = max(SILENCE * signal.mean(), 1e-300)
    with np.errstate(divide="ignore"):
        rated = 10 * np.log10(np.maximum(signal, floor) / noise)
    return tuple(np.where(np.isnan(rated), -np.inf, rated).tolist())


def order_inputs(mod: tvm.IRModule, batch: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return inputs by name in the order of the parameters of main."""
    return [batch[param.name] for param in mod["main"].params]


def widen_floats(array: np.ndarray) -> np.ndarray:
    """Convert bfloat16, which is no float for numpy, to float32. Other arrays are unchanged."""
    return array.astype("float32") if array.dtype.kind == "V" else array


def count_differing(expected: np.ndarray, got: np.ndarray) -> tuple[int, int]:
    """Return (samples with a clearly different answer, samples) of an output.

    Float outputs must be scores (N, K, 1, ...) with K >= 2. (0, 0) for any other float output. In
    an integer output (an arg max inside the model) every element is an answer.

    An answer is clearly different if the float model rates the integer model's first class less
    than half way from its mean score to its best score. Near ties, and neighbours in an embedding,
    do not count.
    """
    if expected.dtype.kind != "f":
        return int(np.count_nonzero(expected != got)), expected.size
    if expected.ndim < 2 or expected.shape[1] < 2 or expected.size != np.prod(expected.shape[:2]):
        return 0, 0
    x, y = (array.reshape(expected.shape[:2]).astype("float64") for array in (expected, got))
    rows = np.isfinite(x).all(axis=1)
    x, y = x[rows], y[rows]
    if not len(x):
        return 0, 0
    chosen = x[np.arange(len(x)), y.argmax(axis=1)]
    half = (x.mean(axis=1) + x.max(axis=1)) / 2
    return int(np.count_nonzero(chosen < half)), len(x)


def count_equal(expected: np.ndarray, got: np.ndarray) -> int:
    """Return how many answers of an output with answers (see `count_differing`) are equal."""
    if expected.dtype.kind != "f":
        return int(np.count_nonzero(expected == got))
    x, y = (array.reshape(expected.shape[:2]) for array in (expected, got))
    rows = np.isfinite(x).all(axis=1)
    return int(np.count_nonzero(x[rows].argmax(axis=1) == y[rows].argmax(axis=1)))


def find_agreement(gaps: Sequence[OutputGap], samples: int) -> Agreement:
    """Return the agreement of all outputs: the lowest SQNR, and the fewest equal answers."""
    answering = [gap for gap in gaps if gap.samples]
    worst = min(answering, key=lambda gap: gap.equal / gap.samples, default=OutputGap(math.inf))
    sqnr = min((gap.sqnr for gap in gaps), default=math.inf)
    return Agreement(sqnr, samples, worst.samples, worst.equal)


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of a quantized module's main: floats, or integers with parameters."""

    inputs: Mapping[str, InterfaceValue]
    outputs: tuple[InterfaceValue, ...]

    @staticmethod
    def of(quantized: tvm.IRModule) -> Interface:
        """Read it from the module's ledger. All float without a ledger."""
        ledger = find_ledger(quantized)
        if ledger is None:
            return Interface({}, ())
        return Interface({value.name: value for value in ledger.inputs}, ledger.outputs)

    def to_inputs(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert inputs of the float module to inputs of the quantized module."""
        return {name: self.to_input(name, array) for name, array in batch.items()}

    def to_input(self, name: str, array: np.ndarray) -> np.ndarray:
        """Convert one input. Arrays that already have the integer dtype pass through."""
        value = self.inputs.get(name)
        if value is None or not value.scale or array.dtype == value.dtype:
            return array
        low, high = INTEGER_LIMITS[value.dtype]
        steps = np.rint(array.astype("float32") / np.float32(value.scale[0]))
        return np.clip(steps + value.zero_point[0], low, high).astype(value.dtype)

    def to_real(self, results: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Convert results of the quantized module to the units of the float module."""
        real = list(results)
        for i, value in enumerate(self.outputs[: len(real)]):
            if value.scale:
                steps = real[i].astype("float64") - value.zero_point[0]
                real[i] = (steps * value.scale[0]).astype("float32")
        return real
