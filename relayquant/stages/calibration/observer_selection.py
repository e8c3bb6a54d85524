"""Calibrate, activations: the ranges that several observers pick for every value, and some samples
-> those with which the outputs of the model lose least.

What a range costs a layer says little about what reaches the outputs: a clipped value may be all
that a rare answer rests on, or nothing. So the model runs with the ranges of each observer, weights
in float, and the outputs are compared with those of the float model. Values that reach the same
outputs share an observer: of values one by one, a few samples tell no more than chance.

Clipping costs on rare samples. To depart from the full range, what is gained must be beyond its
standard error: of a face landmark model, 16 random samples of 64 choose a range that loses more
than 0.5 dB on other samples in 42 % of all draws without that rule, in 4 % with it; MobileNet gains
what it gains either way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import relax

from relayquant.base.qtypes import QParams, ValueInfo, choose_qparams
from relayquant.base.runtime import LoadModule, as_shape, map_on_threads
from relayquant.data import count_samples
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import free_vars
from relayquant.stages.calibration.subgraphs import split_graph
from relayquant.stages.calibration.weights.ranges import RelativeMSE, RowState
from relayquant.stages.prepared import CalibrationGraph

Float64Array = NDArray[np.float64]

#: The candidates, in the order they are tried. The last clips nothing that calibration saw; no
#: output may be much worse than with it.
RELATIVE, MINMAX = CANDIDATES = ("RelativeMSE", "MinMax")

#: samples that the model runs on with the ranges of each candidate, at least
JUDGED_SAMPLES = 16

#: dB that an output may be worse on the judged samples than with MinMax, with one standard error
TOLERANCE = 0.2
#: dB that the outputs of a section gain, on average, by another candidate than that of all
LEAST_GAIN = 0.1
#: Of the float model's energy: differences below are no error (120 dB).
NO_NOISE = 1e-12
#: Rounds that refine the choice, after that of one observer for all.
MOST_ROUNDS = 3


@dataclass(frozen=True)
class OutputSQNR(RelativeMSE):
    """The range of `RelativeMSE` where no output of the model has a smaller ratio of signal to
    noise with it than with that of `MinMax`, else the latter; where there are several outputs, for
    the values that reach the same ones.

    Calibration runs the model with the ranges of each, on some of its samples, once the float pass
    (`Order.PARALLEL`) is through. In topological order, and where statistics are merged, there are
    no outputs to look at: it is `RelativeMSE` then. The settings are those of `RelativeMSE`.
    """

    @property
    def name(self) -> str:
        """Whose range `qparams` gives."""
        return RELATIVE

    def find_range(self, name: str, state: RowState, info: ValueInfo) -> QParams:
        """Parameters by one of the `CANDIDATES`."""
        if name == RELATIVE:
            return self.qparams(state, info)
        return choose_qparams(float(state.low), float(state.high), info.spec)


@dataclass(frozen=True, eq=False)
class Section:
    """Values (keys of groups) that reach the same outputs (their numbers)."""

    keys: tuple[str, ...]
    outputs: frozenset[int]


def find_sections(
    graph: CalibrationGraph, keys: Collection[str], results: Sequence[str]
) -> list[Section]:
    """The values `keys` by those of the `results` that they reach; first those that reach the
    most, and none that reach nothing.
    """
    view = Graph(graph.mod)
    reached: dict[relax.Var, frozenset[int]] = {}
    for i, name in enumerate(results):
        reached[view.vars[name]] = frozenset((i,))
    for binding in reversed(view.bindings):
        outputs = reached.get(binding.var)
        for var in free_vars(binding.value) if outputs else ():
            reached[var] = reached.get(var, frozenset()) | (outputs or frozenset())
    found: dict[frozenset[int], list[str]] = {}
    for key in graph.variables:
        if key in keys:
            outputs = reached.get(graph.variables[key].scale, frozenset())
            found.setdefault(outputs, []).append(key)
    sections = [Section(tuple(members), outputs) for outputs, members in found.items() if outputs]
    return sorted(sections, key=lambda section: -len(section.outputs))


def plan_rounds(sections: Sequence[Section]) -> Iterator[list[Section]]:
    """Sections in order, as many at a time as have no output in common: one run tells of all."""
    waiting = list(sections)
    while waiting:
        chosen: list[Section] = []
        seen: set[int] = set()
        for section in waiting:
            if seen.isdisjoint(section.outputs):
                chosen.append(section)
            seen |= section.outputs
        yield chosen
        waiting = [section for section in waiting if section not in chosen]


def choose_candidates(
    sections: Sequence[Section], measure: Callable[[Mapping[str, str]], Float64Array]
) -> dict[str, str]:
    """The candidate of every value: the first that is allowed, one for all values; where that is
    not the first of all, another one for those of a section, if it is better there.

    Allowed is what is at no output worse than MinMax for all, but by `TOLERANCE`, and on average
    not worse.

    Args:
        sections: The values.
        measure: Noise at each output on each sample, (outputs, samples), with the candidates named
            for each value.
    """

    def name_all(name: str, some: Sequence[Section] = sections) -> dict[str, str]:
        return {key: name for section in some for key in section.keys}

    chosen = name_all(MINMAX)
    base = noise = measure(chosen)

    def worsen(noise: Float64Array, outputs: Collection[int]) -> tuple[float, float]:
        """dB that noise is above that of MinMax at some outputs: the mean, and the most that it may
        be in truth.
        """
        found = [compare_noise(noise[i], base[i]) for i in sorted(outputs)]
        ratios, errors = np.array(found).T
        return float(ratios.mean()), float((ratios + errors).max())

    others = [name for name in CANDIDATES if name != MINMAX]
    for name in others:
        trial = measure(name_all(name))
        mean, most = worsen(trial, range(len(base)))
        if mean <= 0 and most <= TOLERANCE:
            chosen, noise = name_all(name), trial
            break
    start = next(iter(chosen.values()))
    if start == CANDIDATES[0] or len(sections) < 2:
        return chosen
    for some in itertools.islice(plan_rounds(sections), MOST_ROUNDS):
        before = dict(chosen)
        for name in (name for name in others if name != start):
            trial = measure(before | name_all(name, some))
            for section in some:
                mean, most = worsen(trial, section.outputs)
                if most <= TOLERANCE and mean < worsen(noise, section.outputs)[0] - LEAST_GAIN:
                    chosen |= name_all(name, [section])
                    index = sorted(section.outputs)
                    # Nothing else of this round reaches them.
                    noise = noise.copy()
                    noise[index] = trial[index]
    return chosen


def compare_noise(noise: Float64Array, base: Float64Array) -> tuple[float, float]:
    """(dB that the sum of noise is above that of base; standard error) of n samples, both (n,).

    The error is what leaving out each sample in turn tells (the jackknife): a gain that one sample
    makes is none to rely on. It is 0 for a single sample.
    """
    total, least, n = noise.sum(), base.sum(), len(noise)
    if not math.isfinite(least):  # what breaks with MinMax may as well break
        return 0.0, 0.0
    if not math.isfinite(total):
        return math.inf, 0.0
    ratio = 10 * math.log10(total / least)
    if n == 1:
        return ratio, 0.0
    # Both are sums of positive numbers; nothing is left of them but rounding if one sample is all.
    tiny = np.finfo("float64").tiny
    others = np.maximum(total - noise, tiny) / np.maximum(least - base, tiny)
    spread = 10 * np.log10(others)
    return ratio, float(np.sqrt((n - 1) * np.var(spread)))


@dataclass(frozen=True, eq=False)
class JudgedBatch:
    """Inputs by name, and the symbolic dimensions of the batch that they are from."""

    inputs: Mapping[str, np.ndarray]
    symbols: Mapping[str, int]


class OutputJudge:
    """The calibration graph as one function, from the inputs to the outputs, to be run with other
    parameters of activations and with weights in float.
    """

    def __init__(self, graph: CalibrationGraph, load_module: LoadModule) -> None:
        self.graph, self.load_module = graph, load_module
        self.split = split_graph(graph, (), results=True, prefix="whole")
        (self.segment,) = self.split.segments

    @property
    def inputs(self) -> tuple[str, ...]:
        """What it reads, inputs of the model among others."""
        return self.segment.inputs

    def choose(
        self,
        parameters: Mapping[str, QParams],
        keys: Collection[str],
        find: Callable[[str, str], QParams],
        batches: Sequence[JudgedBatch],
    ) -> dict[str, tuple[str, QParams]]:
        """(name of a candidate, its parameters) of those values `keys` that reach an output.

        Args:
            parameters: Of every group of activations; those of all but `keys` stay in use.
            keys: Groups that have candidates.
            find: Parameters of a group by a candidate.
            batches: The samples to judge by.
        """
        sections = find_sections(self.graph, keys, self.segment.observed)
        if not sections or not batches:
            return {}
        functions = self.load_module(self.split.mod)
        fixed = self.split.compute_constants(self.graph.arguments())
        segment = self.segment
        found: dict[tuple[str, str], QParams] = {}

        def find_all(names: Mapping[str, str]) -> dict[str, QParams]:
            missing = [item for item in names.items() if item not in found]
            found.update(zip(missing, map_on_threads(lambda i: find(*i), missing), strict=True))
            return {key: found[key, name] for key, name in names.items()}

        def run(known: Mapping[str, Any]) -> list[list[np.ndarray]]:
            def run_batch(batch: JudgedBatch) -> list[np.ndarray]:
                values = {**known, **fixed, **batch.inputs}
                args = [values[name] for name in segment.inputs]
                if segment.symbols:
                    args.append(as_shape(batch.symbols[name] for name in segment.symbols))
                results = functions.run(segment.function, args)
                named = dict(zip(segment.outputs, results, strict=True))
                return [named[name] for name in segment.observed]

            return list(map_on_threads(run_batch, batches))

        expected = run(self.graph.arguments())

        def measure(names: Mapping[str, str]) -> Float64Array:
            results = run(self.graph.arguments({**parameters, **find_all(names)}))
            parts = [
                measure_noise(x, y, count_samples(batch.inputs))
                for batch, x, y in zip(batches, expected, results, strict=True)
            ]
            return np.concatenate(parts, axis=1)

        chosen = choose_candidates(sections, measure)
        return {key: (name, found[key, name]) for key, name in chosen.items()}


def measure_noise(
    expected: Sequence[NDArray], got: Sequence[NDArray], samples: int
) -> Float64Array:
    """Energy of the difference at each output for each sample of a batch, (outputs, samples); of
    integers, how many are others, and a half. (outputs, 1) where an output has another first axis.

    Noise is at least `NO_NOISE`. Where the float model has no finite value there is nothing to
    compare; where only it has, the noise is infinite.
    """
    rows = samples if all(x.ndim and len(x) == samples for x in expected) else 1
    noise = np.zeros((len(expected), rows))
    for i, (x, y) in enumerate(zip(expected, got, strict=True)):
        x, y = x.reshape(rows, -1), y.reshape(rows, -1)
        if x.dtype.kind != "f":
            noise[i] = np.count_nonzero(x != y, axis=1) + 0.5
            continue
        real = np.where(np.isfinite(x), x, 0).astype("float64")
        difference = np.where(np.isfinite(x), y, 0) - real
        energy = np.where(np.isfinite(difference), np.square(difference), np.inf).sum(axis=1)
        noise[i] = energy + NO_NOISE * np.square(real).sum(axis=1) + np.finfo("float64").tiny
    return noise
