"""Observer selection for activations: several ranges for every value + some samples -> the ranges
that cost the outputs of the model least.

Candidates are the range of `RelativeMSE`, the full range, and two ranges between them. A range in
between clips rare values less, and often costs the outputs least (SQNR in dB on 64 other samples):

    network (MediaPipe)            RelativeMSE   a quarter    half         MinMax
    face detector, full range      20.7, 25.6    21.9, 27.1   22.4, 27.9
    the same, sparse               18.8, 11.5    20.3, 14.6   20.3, 18.2   15.4, 15.5
    the same, other samples        19.2, 12.5    20.6, 16.5   20.0, 20.5   15.7, 16.4
    face landmarks                 32.9, 23.8    33.5, 24.5   32.1, 26.0   29.1, 22.1

On 19 draws of samples of 10 networks, the outputs gain 1.8 dB over MinMax on average with these
candidates and 24 judged samples. With only the first and the last and 16 samples, it is 1.1 dB. The
best of several is often best by chance. So a wider range must gain three standard errors over a
narrower one that is allowed.

The cost of a range within a layer says little about the outputs: a rare output may depend on a
clipped value, or no output may. So the model runs with the ranges of each observer, with weights in
float, and its outputs are compared with the float model. All values that reach the same outputs
share an observer. Choosing value by value would fit the noise of a few samples.

Clipping costs accuracy on rare samples. So a candidate replaces the full range only if its gain is
larger than the standard error of the gain. On a face landmark model, 16 random samples of 64 choose
a range that loses more than 0.5 dB on other samples in 42 % of all draws without this rule, and in
4 % with it. MobileNet's gain is the same with and without the rule. A gain that one sample hides
counts: the scores of YOLOv8n gain 2.5 dB in sum with a standard error of 5 dB, as one sample of 16
is most of the noise. The mean over the samples is 7.4 dB with an error of 1.5 dB, and on other
samples the outputs gain 7 dB.

A softmax is judged by the logarithm of its result. Of the result itself, a few samples near a
decision are nearly all of the noise: on the third network of MTCNN, 16 samples put a range that
gains 4 dB at +4 dB with a standard error of 10 dB.

Most choices are clear after 8 samples. On 38 draws of 19 networks the outputs gain 3.7 dB over
MinMax with 24 samples always (80 runs of one sample), 3.7 dB with 8 where they are clear (58 runs),
and 3.6 dB with 12 always (40 runs).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import relax

from relayquant.base.qtypes import QParams, QSpec, ValueInfo, choose_qparams
from relayquant.base.runtime import LoadModule, as_shape, map_on_threads
from relayquant.data import count_samples
from relayquant.ir.dialect.cost import count_macs
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import call_name, free_vars, static_size, tensor_shape
from relayquant.ir.rewrite.moves import find_moved
from relayquant.stages.calibration.passes import choose_batches
from relayquant.stages.calibration.subgraphs import split_graph
from relayquant.stages.calibration.weights.ranges import RelativeMSE, RowState
from relayquant.stages.prepared import CalibrationGraph

Float64Array = NDArray[np.float64]

#: Where candidates' ranges lie between the range of `RelativeMSE` (0) and the full range (1), as
#: a share of the logarithm of their quotient. The last one clips no value that calibration saw. No
#: output may be much worse than with it.
SHARES: Mapping[str, float] = {
    "RelativeMSE": 0.0,
    "RelativeMSE, a quarter to MinMax": 0.25,
    "RelativeMSE, half to MinMax": 0.5,
    "MinMax": 1.0,
}
CANDIDATES = tuple(SHARES)
RELATIVE, MINMAX = CANDIDATES[0], CANDIDATES[-1]

#: Samples that ranges are judged on, at most and at least, and the multiply-adds of one run over
#: them: a model that takes more is judged on fewer.
MOST_JUDGED, LEAST_JUDGED, JUDGED_WORK = 24, 4, 2.5e10

#: Batches that a candidate runs on first. The others decide if a difference of this many standard
#: errors for it, or against it, would turn the verdict.
FIRST_JUDGED, FOR, AGAINST = 8, 3.0, 2.0

#: dB that an output may be worse than with MinMax on the judged samples, including one standard
#: error
TOLERANCE = 0.2
#: standard errors that a wider candidate must gain over one that is allowed
CLEAR = 3.0
#: dB that the outputs of a section must gain on average before it gets a candidate of its own
LEAST_GAIN = 0.1
#: smallest probability that counts; in a type without it, that type's smallest number
LEAST_PROBABILITY = 1e-20
#: share of the float model's energy below which differences are no error (120 dB)
NO_NOISE = 1e-12
#: rounds that refine the choice, after the round that chooses one observer for all
MOST_ROUNDS = 3


@dataclass(frozen=True)
class OutputSQNR(RelativeMSE):
    """The range of `RelativeMSE`, of `MinMax`, or a range between them: the one that gives the
    outputs of the model the best signal-to-noise ratio. No output may be worse than with `MinMax`.
    With several outputs, the choice is made for the values that reach the same outputs.

    Calibration runs the model with all these ranges on some of its samples, after the float pass
    (`Order.PARALLEL`). In topological order, and where statistics are merged, there are no outputs
    to compare. Then the range is always `RelativeMSE`. The settings are the settings of
    `RelativeMSE`.
    """

    @property
    def name(self) -> str:
        """Name of the observer whose range `qparams` returns."""
        return RELATIVE

    def find_range(self, name: str, relative: QParams, state: RowState, info: ValueInfo) -> QParams:
        """Return the parameters by one of the `CANDIDATES`; `relative`: by the first."""
        if name == RELATIVE:
            return relative
        full = choose_qparams(float(state.low), float(state.high), info.spec)
        if name == MINMAX:
            return full
        pairs = zip(find_ends(relative, info.spec), find_ends(full, info.spec), strict=True)
        low, high = (mix_ends(*pair, SHARES[name]) for pair in pairs)
        return choose_qparams(low, high, info.spec)


def find_ends(qparams: QParams, spec: QSpec) -> tuple[float, float]:
    """Return the smallest and the largest number that parameters of one value represent."""
    low, high = (
        (limit - float(qparams.zero_point)) * float(qparams.scale) for limit in spec.limits
    )
    return low, high


def mix_ends(first: float, last: float, share: float) -> float:
    """Return the number between two ends of a range with the same sign: their weighted geometric
    mean. 0 if the first is 0.
    """
    return math.copysign(abs(first) ** (1 - share) * abs(last) ** share, last)


@dataclass(frozen=True, eq=False)
class Section:
    """Values (group keys) that reach the same outputs (indices)."""

    keys: tuple[str, ...]
    outputs: frozenset[int]


def find_sections(
    graph: CalibrationGraph, keys: Collection[str], results: Sequence[str]
) -> list[Section]:
    """Split the values `keys` by the `results` that they reach. Sections with the most outputs
    come first, and values that reach no output are left out.
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


def find_probabilities(view: Graph, results: Iterable[relax.Expr]) -> list[bool]:
    """Return for each of the `results` whether a softmax computes it."""
    calls = [find_moved(view, result) for result in results]
    return [call is not None and call_name(call) == "relax.nn.softmax" for call in calls]


def take_logarithms(
    results: Iterable[np.ndarray], is_probability: Iterable[bool]
) -> list[np.ndarray]:
    """Return the results as they are judged: probabilities by their logarithms."""
    return [
        np.log(np.maximum(result, find_least(result.dtype))) if is_log else result
        for result, is_log in zip(results, is_probability, strict=True)
    ]


def find_least(dtype: np.dtype) -> float:
    """Return the smallest probability of a float type that counts."""
    return max(LEAST_PROBABILITY, float(np.nextafter(np.zeros((), dtype), np.ones((), dtype))))


def plan_rounds(sections: Sequence[Section]) -> Iterator[list[Section]]:
    """Yield sections in order, in rounds: sections without a common output share a round,
    because one run judges all of them.
    """
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


class CandidateNoise:
    """The noise of some candidates at each output on each sample, (outputs, samples). It is
    measured when it is asked for: on the first batches, and on the others.
    """

    def __init__(self, first: Callable[[], Float64Array], *others: Callable[[], Float64Array]):
        self._first, self._others = first, others

    @cached_property
    def first(self) -> Float64Array:
        """On the first batches, or on all if they are few."""
        return self._first()

    @cached_property
    def whole(self) -> Float64Array:
        """On all batches."""
        return np.concatenate([self.first, *(measure() for measure in self._others)], axis=1)

    def passes(self, rule: Callable[..., bool], base: CandidateNoise) -> bool:
        """Whether the `rule` holds for this noise and the noise `base`. The rule's third argument
        is a number of standard errors by which every difference is larger than it looks.
        """
        if self._others and rule(self.first, base.first, FOR):
            return True
        if self._others and not rule(self.first, base.first, -AGAINST):
            return False
        return rule(self.whole, base.whole)


def choose_candidates(
    sections: Sequence[Section], measure: Callable[[Mapping[str, str]], CandidateNoise]
) -> dict[str, str]:
    """Choose the candidate of every value.

    Start with the first allowed candidate for all values. Go on to the next ones while each is
    allowed and clearly better. Then each section gets a candidate that comes before in the list if
    this is better there.

    A candidate is allowed if no output is more than `TOLERANCE` worse than with MinMax for all, and
    the average is not worse.

    Args:
        sections: The values.
        measure: Returns the noise with the candidates named for each value.
    """

    def name_all(name: str, some: Sequence[Section] = sections) -> dict[str, str]:
        return {key: name for section in some for key in section.keys}

    base = best = measure(name_all(MINMAX))

    def worsen(noise: Float64Array, outputs: Collection[int]) -> tuple[float, float]:
        index = sorted(outputs)
        return compare_outputs(noise[index], base.whole[index])

    start = MINMAX
    for name in CANDIDATES[:-1]:
        trial = measure(name_all(name))
        is_better = start == MINMAX or trial.passes(is_clearly_nearer, best)
        if is_better and trial.passes(is_as_near, base):
            start, best = name, trial
        elif start != MINMAX:
            break
    chosen = name_all(start)
    tighter = CANDIDATES[: CANDIDATES.index(start)]
    if not tighter or len(sections) < 2:
        return chosen
    noise = best.whole
    for some in itertools.islice(plan_rounds(sections), MOST_ROUNDS):
        before = dict(chosen)
        for name in tighter:
            trial = measure(before | name_all(name, some)).whole
            for section in some:
                mean, most = worsen(trial, section.outputs)
                if most <= TOLERANCE and mean < worsen(noise, section.outputs)[0] - LEAST_GAIN:
                    chosen |= name_all(name, [section])
                    index = sorted(section.outputs)
                    # No other section of this round reaches these outputs.
                    noise = noise.copy()
                    noise[index] = trial[index]
    return chosen


def is_as_near(noise: Float64Array, base: Float64Array, doubt: float = 0.0) -> bool:
    """Whether the outputs are as near to the float model's as with the noise `base`, (outputs,
    samples): no farther on average, and none by more than `TOLERANCE`. Every difference counts as
    `doubt` standard errors larger.
    """
    mean, most = compare_outputs(noise, base, doubt)
    return mean <= 0 and most <= TOLERANCE


def is_clearly_nearer(noise: Float64Array, base: Float64Array, doubt: float = 0.0) -> bool:
    """Whether the outputs are nearer to the float model's than with the noise `base`, (outputs,
    samples), by more than `CLEAR` standard errors of the mean over outputs, and `doubt` more.
    """
    return compare_outputs(noise, base, CLEAR + doubt)[0] < 0


def compare_outputs(
    noise: Float64Array, base: Float64Array, doubt: float = 0.0
) -> tuple[float, float]:
    """Return how many dB the noise is above the base noise, both (outputs, samples), and `doubt`
    standard errors more: the mean over outputs, and the upper bound of the worst output, which
    includes one standard error.
    """
    ratios, errors = np.array([*map(compare_noise, noise, base)]).T
    mean = ratios.mean() + doubt * math.hypot(*errors) / len(errors)
    return float(mean), float((ratios + (1 + doubt) * errors).max())


def compare_noise(noise: Float64Array, base: Float64Array) -> tuple[float, float]:
    """Return (dB that the noise of n samples is above the base noise, standard error), both (n,).

    By the sums over samples, as a signal-to-noise ratio counts them. If these differ by less than
    their standard error, a few samples are most of the noise, and the sums tell little. Then it is
    the mean over the samples' dB, where each counts alike, unless the sum is more than `TOLERANCE`
    above. The error is 0 for a single sample.
    """
    total, least, n = noise.sum(), base.sum(), len(noise)
    if not math.isfinite(least):  # a value that fails with MinMax may also fail with the candidate
        return 0.0, 0.0
    if not math.isfinite(total):
        return math.inf, 0.0
    ratio = 10 * math.log10(total / least)
    if n == 1:
        return ratio, 0.0
    # Both are sums of positive numbers. If one sample is the whole sum, only rounding error is
    # left.
    tiny = np.finfo("float64").tiny
    others = np.maximum(total - noise, tiny) / np.maximum(least - base, tiny)
    # jackknife: the spread of the ratios that leave out each sample in turn
    error = math.sqrt((n - 1) * np.var(10 * np.log10(others)))
    if abs(ratio) >= error or ratio > TOLERANCE:
        return ratio, error
    each = 10 * (np.log10(noise) - np.log10(base))  # a quotient by a base of almost 0 is infinite
    return float(each.mean()), float(each.std(ddof=1) / math.sqrt(n))


@dataclass(frozen=True, eq=False)
class JudgedBatch:
    """Inputs by name, the symbolic dimensions of their batch, and the float model's results by name
    if they are known.
    """

    inputs: Mapping[str, np.ndarray]
    symbols: Mapping[str, int]
    results: Mapping[str, np.ndarray]


class OutputJudge:
    """The calibration graph as one function from inputs to outputs. It runs with any parameters
    of activations and with weights in float.

    `samples` is the number of samples that it runs on with each candidate's ranges.
    """

    def __init__(self, graph: CalibrationGraph, load_module: LoadModule) -> None:
        self.graph, self.load_module = graph, load_module
        self.split = split_graph(graph, (), results=True, prefix="whole")
        (self.subgraph,) = self.split.subgraphs
        self.samples = count_judged(graph)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that the function reads, including the model's inputs."""
        return self.subgraph.inputs

    def choose(
        self,
        parameters: Mapping[str, QParams],
        keys: Collection[str],
        find: Callable[[str, str], QParams],
        batches: Sequence[JudgedBatch],
    ) -> dict[str, tuple[str, QParams]]:
        """Return (name of a candidate, its parameters) for the values `keys` that reach an output.

        Args:
            parameters: Parameters of every activation group. Groups outside `keys` keep them.
            keys: Groups that have candidates.
            find: Returns a group's parameters by a candidate.
            batches: The samples to judge by.
        """
        sections = find_sections(self.graph, keys, self.subgraph.observed)
        if not sections or not batches:
            return {}
        functions = self.load_module(self.split.mod)
        fixed = self.split.compute_constants(self.graph.arguments())
        subgraph = self.subgraph
        view = Graph(self.graph.mod)
        is_softmax = find_probabilities(view, (view.vars[name] for name in subgraph.observed))
        looks = split_looks(batches)
        found: dict[tuple[str, str], QParams] = {}

        def find_all(names: Mapping[str, str]) -> dict[str, QParams]:
            missing = [item for item in names.items() if item not in found]
            found.update(zip(missing, map_on_threads(lambda i: find(*i), missing), strict=True))
            return {key: found[key, name] for key, name in names.items()}

        def take_results(named: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            return take_logarithms((named[name] for name in subgraph.observed), is_softmax)

        def run(known: Mapping[str, Any], some: Sequence[JudgedBatch]) -> list[list[np.ndarray]]:
            def run_batch(batch: JudgedBatch) -> list[np.ndarray]:
                values = {**known, **fixed, **batch.inputs}
                args = [values[name] for name in subgraph.inputs]
                if subgraph.symbols:
                    args.append(as_shape(batch.symbols[name] for name in subgraph.symbols))
                results = functions.run(subgraph.function, args)
                return take_results(dict(zip(subgraph.outputs, results, strict=True)))

            return list(map_on_threads(run_batch, some))

        @cache
        def expect(look: int) -> list[list[np.ndarray]]:
            some = looks[look]
            if all(batch.results for batch in some):
                return [take_results(batch.results) for batch in some]
            return run(self.graph.arguments(), some)

        def measure_look(names: Mapping[str, str], look: int) -> Float64Array:
            results = run(self.graph.arguments({**parameters, **find_all(names)}), looks[look])
            parts = [
                measure_noise(x, y, count_samples(batch.inputs))
                for batch, x, y in zip(looks[look], expect(look), results, strict=True)
            ]
            return np.concatenate(parts, axis=1)

        def measure(names: Mapping[str, str]) -> CandidateNoise:
            return CandidateNoise(
                *(partial(measure_look, names, look) for look in range(len(looks)))
            )

        chosen = choose_candidates(sections, measure)
        return {key: (name, found[key, name]) for key, name in chosen.items()}


def count_judged(graph: CalibrationGraph) -> int:
    """Return the number of samples that the model's ranges are judged on."""
    view = Graph(graph.mod)
    sizes = [tensor_shape(view.vars[name]) or () for name in graph.inputs[:1]]
    batch = max((static_size(dim) or 1 for dims in sizes for dim in dims[:1]), default=1)
    each = sum(count_macs(binding.value) for binding in view.bindings) / batch
    return int(min(max(JUDGED_WORK / max(each, 1), LEAST_JUDGED), MOST_JUDGED))


def split_looks(batches: Sequence[JudgedBatch]) -> list[list[JudgedBatch]]:
    """Return the batches that a candidate runs on first, evenly spread, and the others. All run
    first if there are less than twice as many.
    """
    if len(batches) < 2 * FIRST_JUDGED:
        return [[*batches]]
    first = {*choose_batches(len(batches), FIRST_JUDGED)}
    parts: list[list[JudgedBatch]] = [[], []]
    for number, batch in enumerate(batches):
        parts[number not in first].append(batch)
    return parts


def measure_noise(
    expected: Sequence[NDArray], got: Sequence[NDArray], samples: int
) -> Float64Array:
    """Return the energy of the difference at each output for each sample of a batch, (outputs,
    samples).

    For integers it is the number of different elements plus a half. The shape is (outputs, 1) if an
    output has another first axis. Noise is at least `NO_NOISE`. Elements that are not finite in the
    float model are ignored. If only the other value is not finite, the noise is infinite.
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
