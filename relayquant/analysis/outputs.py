"""outputs: float module, quantized module and a few samples -> how far apart their results are.

Both run step by step: integers in numpy (`relayquant.reference`), so that they are those of
compiled code bit for bit, float products on the kernels that calibration has compiled already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm

from relayquant.analysis.confidence import find_margins
from relayquant.analysis.error_statistics import ErrorSums
from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.eager import EagerModule
from relayquant.data import count_samples
from relayquant.ir.ledger import InterfaceValue, find_ledger

#: of the mean energy of a sample, which those with less are rated by
SILENCE = 0.01


@dataclass(frozen=True)
class OutputGap:
    """One output of both modules, over all samples.

    Attributes:
        sqnr: Signal to quantization noise ratio in dB; inf when nothing differs, and of integers,
            which are answers and no amounts; -inf when the quantized module gives NaN or infinity
            where the float one does not.
        differing: Samples whose answer is clearly another one; see `count_differing`.
        samples: Samples in all; 0 where an output is no answer in this sense.
        each: Signal to noise ratio of every sample alone, dB, in order; of a batch where axis 0 of
            the output does not count samples. Of integers, those that differ are noise.
        margins: dB that `sqnr` may be too high and too low by, of all data of this kind; 0 where
            the samples do not tell (`relayquant.analysis.confidence.find_margins`).
    """

    sqnr: float
    differing: int = 0
    samples: int = 0
    each: tuple[float, ...] = ()
    margins: tuple[float, float] = (0.0, 0.0)

    @property
    def disagreement(self) -> float:
        """Share of samples with another answer."""
        return self.differing / max(self.samples, 1)

    @property
    def worst(self) -> float:
        """dB of the worst sample."""
        return min(self.each, default=self.sqnr)

    @property
    def least(self) -> float:
        """dB that the output is not likely to fall below in data of this kind."""
        return self.sqnr - self.margins[0]

    @property
    def most(self) -> float:
        """dB that the output is not likely to exceed in data of this kind."""
        return self.sqnr + self.margins[1]


def measure_gaps(
    float_mod: tvm.IRModule,
    quantized: tvm.IRModule,
    batches: Iterable[Mapping[str, np.ndarray]],
) -> list[OutputGap]:
    """The gap of every output, in order.

    Args:
        float_mod: The float module with its parameters bound.
        quantized: Its quantized module; integers that it takes or returns are converted by the
            parameters in its ledger.
        batches: Inputs of the float module by name.
    """
    meter = GapMeter(float_mod, quantized)
    for batch in batches:
        meter.measure(batch)
    return meter.gaps


class GapMeter:
    """Runs a float module and its quantized one on batch after batch; see `measure_gaps`."""

    def __init__(self, float_mod: tvm.IRModule, quantized: tvm.IRModule) -> None:
        self.float_mod, self.quantized = float_mod, quantized
        self.interface = Interface.of(quantized)
        self.first, self.second = EagerModule(float_mod), EagerModule(quantized)
        self.sums = GapSums()

    def measure(self, batch: Mapping[str, np.ndarray]) -> None:
        """With one more batch."""
        expected = self.first.run("main", order_inputs(self.float_mod, batch))
        inputs = order_inputs(self.quantized, self.interface.to_inputs(batch))
        got = self.interface.to_real(self.second.run("main", inputs))
        self.sums.update(expected, got, count_samples(batch))

    @property
    def gaps(self) -> list[OutputGap]:
        """The gap of every output so far, in order."""
        return self.sums.gaps


class GapSums:
    """The gaps of all outputs, summed up over batches."""

    def __init__(self) -> None:
        self.sums: list[ErrorSums] = []
        self.counts: list[tuple[int, int]] = []
        self.energies: list[list[np.ndarray]] = []

    def update(
        self, expected: Sequence[np.ndarray], got: Sequence[np.ndarray], samples: int
    ) -> None:
        """With one more batch of so many samples: outputs of both modules in real units."""
        self.sums = self.sums or [ErrorSums()] * len(expected)
        self.counts = self.counts or [(0, 0)] * len(expected)
        self.energies = self.energies or [[] for _ in expected]
        for i, (x, y) in enumerate(zip(expected, got, strict=True)):
            differing, answers = count_differing(x, y)
            self.counts[i] = self.counts[i][0] + differing, self.counts[i][1] + answers
            if x.dtype.kind == "f":
                usable = np.isfinite(x)
                self.sums[i] = self.sums[i].update(x[usable], y[usable])
            else:  # answers, not amounts: no index is farther off than another
                x, y = np.ones(x.shape, "float32"), np.equal(x, y).astype("float32")
            self.energies[i].append(measure_energies(x, y, samples))

    @property
    def gaps(self) -> list[OutputGap]:
        """The gap of every output, in order."""
        return [
            OutputGap(
                s.sqnr if np.isfinite(s.noise) else float("-inf"),
                *count,
                rate_samples(energy),
                find_margins(*np.concatenate(energy, axis=1)) if s.count else (0.0, 0.0),
            )
            for s, count, energy in zip(self.sums, self.counts, self.energies, strict=True)
        ]


def measure_energies(expected: np.ndarray, got: np.ndarray, samples: int) -> np.ndarray:
    """Signal and noise of each sample, (2, samples) float64; of all of them, (2, 1), where axis 0
    of the output does not count samples.
    """
    rows = samples if expected.ndim and len(expected) == samples else 1
    x, y = (array.reshape(rows, -1).astype("float64") for array in (expected, got))
    usable = np.isfinite(x)
    x, noise = np.where(usable, x, 0), np.where(usable, y - x, 0)
    return np.stack([np.square(x).sum(axis=1), np.square(noise).sum(axis=1)])


def rate_samples(energies: Sequence[np.ndarray]) -> tuple[float, ...]:
    """dB of each sample. A sample that is nearly silent counts with `SILENCE` of the mean signal:
    its noise is nobody's loss.
    """
    signal, noise = np.concatenate(energies, axis=1)
    floor = max(SILENCE * signal.mean(), 1e-300)
    with np.errstate(divide="ignore"):
        rated = 10 * np.log10(np.maximum(signal, floor) / noise)
    return tuple(np.where(np.isnan(rated), -np.inf, rated).tolist())


def order_inputs(mod: tvm.IRModule, batch: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Inputs by name in the order of the parameters of main."""
    return [batch[param.name] for param in mod["main"].params]


def count_differing(expected: np.ndarray, got: np.ndarray) -> tuple[int, int]:
    """(samples with clearly another answer, samples) of an output (N, K, 1, ...) with K >= 2
    scores; (0, 0) of any other float output.

    Another answer is clear when the float model rates the class that the integer model puts first
    less than half way from its mean score to its best: near ties, and neighbours in an embedding,
    do not count. Of integers (an arg max inside of the model) every element is an answer.
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


@dataclass(frozen=True)
class Interface:
    """What main of a quantized module takes and returns: floats, or integers with parameters."""

    inputs: Mapping[str, InterfaceValue]
    outputs: tuple[InterfaceValue, ...]

    @staticmethod
    def of(quantized: tvm.IRModule) -> Interface:
        """From the module's ledger; all float when it has none."""
        ledger = find_ledger(quantized)
        if ledger is None:
            return Interface({}, ())
        return Interface({value.name: value for value in ledger.inputs}, ledger.outputs)

    def to_inputs(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Inputs of the float module as the quantized one takes them."""
        return {name: self.to_input(name, array) for name, array in batch.items()}

    def to_input(self, name: str, array: np.ndarray) -> np.ndarray:
        """One input; arrays that have the integer dtype already pass through."""
        value = self.inputs.get(name)
        if value is None or not value.scale or array.dtype == value.dtype:
            return array
        low, high = INTEGER_LIMITS[value.dtype]
        steps = np.rint(array.astype("float32") / np.float32(value.scale[0]))
        return np.clip(steps + value.zero_point[0], low, high).astype(value.dtype)

    def to_real(self, results: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Results of the quantized module in the units of the float one's."""
        real = list(results)
        for i, value in enumerate(self.outputs[: len(real)]):
            if value.scale:
                steps = real[i].astype("float64") - value.zero_point[0]
                real[i] = (steps * value.scale[0]).astype("float32")
        return real
