"""sensitivity: calibrated model + data -> the accuracy that quantizing each operator alone costs.

The calibration graph runs step by step. Its parameters are variables, and dtype code 0 passes
values through. One operator is quantized by setting only the parameters of its operands and result.
Only values that depend on them are computed again.
"""

from __future__ import annotations

import inspect
import itertools
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from relayquant.analysis.error_statistics import NoiseSums
from relayquant.analysis.quiet_outputs import find_least_energies, sum_missing
from relayquant.base.events import CallbackList, ProgressEvent
from relayquant.base.qtypes import QParams
from relayquant.base.runtime import limit_blas, map_on_threads
from relayquant.base.tables import format_csv, format_html
from relayquant.base.user_calls import is_mistake, note_error
from relayquant.codegen.eager import (
    EagerModule,
    IncrementalFunction,
    ParameterUpdate,
    Recording,
)
from relayquant.config import Effort, QConfig, QConfigMapping
from relayquant.config.mapping import MappingRule, Selector, count_parts
from relayquant.data import Dataset, count_samples, take_samples
from relayquant.errors import ConfigError, DataError, format_count
from relayquant.ir.agreement import Agreement
from relayquant.ir.plan import OperatorPlan
from relayquant.stages.annotation.match import find_sites
from relayquant.stages.calibration.checkpoint import digest_batch, digest_text
from relayquant.stages.effort import default_mapping
from relayquant.stages.prepared import PreparedModel

T = TypeVar("T")

#: bytes of float values that are kept from one measurement to the next
KEPT_BYTES = 256e6

#: name of the measure without a metric
SQNR = "SQNR [dB]"

#: (outputs of the float model, outputs of the quantized model) -> a number, higher is better. One
#: array for each output of the model, all samples along axis 0.
Metric = Callable[[list[np.ndarray], list[np.ndarray]], float]


@dataclass(frozen=True)
class SensitivityRow:
    """One quantized operator.

    Attributes:
        name, op: As in the ledger.
        score: Measured at the outputs when only this operator is quantized: SQNR in dB, or the
            metric.
    """

    name: str
    op: str
    score: float


@dataclass(frozen=True)
class SensitivityReport:
    """Quantized operators, the most sensitive first. Equal scores are in graph order.

    Data movement operators (max_pool, reshape, relu with the input's parameters) round nothing and
    have no row.

    Attributes:
        rows: The operators.
        score: The same measure with all of them quantized.
        metric: `SQNR`, or the name of the user's metric.
        samples: Number of measured samples.
        prepared: The measured model.
    """

    rows: tuple[SensitivityRow, ...]
    score: float
    metric: str
    samples: int
    prepared: PreparedModel = field(repr=False, compare=False)

    def to_mapping(self, keep: int, base: QConfigMapping | None = None) -> QConfigMapping:
        """Return a mapping that keeps the `keep` most sensitive operators in float.

        Args:
            keep: Number of operators.
            base: Mapping for the other operators. None: the backend's default. Pass the mapping
                that the model was prepared with, if there was one.

        Raises:
            ConfigError: keep is not an integer from 0 to the number of rows.
        """
        if isinstance(keep, bool) or not isinstance(keep, int) or not 0 <= keep <= len(self.rows):
            raise ConfigError(
                f"to_mapping(keep={keep!r}): allowed is an integer from 0 to {len(self.rows)}, "
                "the number of quantized operators that were ranked.",
                code="RQ101",
            )
        if base is None:
            base = default_mapping(self.prepared.backend, Effort(self.prepared.effort))
        names = [row.name for row in self.rows[:keep]]
        return add_lines(self.prepared, dict.fromkeys(names), base)

    def to_csv(self) -> str:
        """Comma-separated text with a header line."""
        return format_csv(SensitivityRow, self.rows)

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        columns = {
            "operator": [row.name for row in self.rows],
            "op": [row.op for row in self.rows],
            self.metric: [row.score for row in self.rows],
        }
        return format_html(columns, "each quantized alone", [self.describe_all()])

    def __str__(self) -> str:
        ops = [row.op.removeprefix("nn.") for row in self.rows]
        width = max([len(row.name) for row in self.rows] + [8])
        op_width = max([len(op) for op in ops] + [2])
        lines = [f"{'operator':{width}}  {'op':{op_width}}  {self.metric}"]
        for row, op in zip(self.rows, ops, strict=True):
            lines.append(f"{row.name:{width}}  {op:{op_width}}  {row.score:.4g}")
        lines.append(self.describe_all())
        return "\n".join(lines)

    def describe_all(self) -> str:
        """Return one line on the model with all of these operators quantized."""
        agreement = Agreement(self.score, self.samples, is_simulated=True)
        seen = str(agreement)
        if self.metric != SQNR:
            samples = agreement.describe_samples()
            seen = f"{self.metric} {self.score:.4g}, simulated, on {samples}"
        return f"all {len(self.rows)} quantized: {seen}"


def measure_sensitivity(
    prepared: PreparedModel,
    data: Dataset,
    metric: Metric | None = None,
    *,
    samples: int = 64,
    callbacks: CallbackList | None = None,
) -> SensitivityReport:
    """Quantize each operator alone, and all together.

    Args:
        prepared: A calibrated model.
        data: Inputs.
        metric: See `Metric`. None: SQNR of the worst output, 10 log10(signal / noise).
        samples: Measure on the first batches with at least this number of samples.
        callbacks: Called after each operator.

    Raises:
        ConfigError: the model is not calibrated, `samples` < 1, or the metric returns no number.
        DataError: the data does not fit the model.
    """
    callbacks = callbacks or CallbackList()
    simulation = Simulation(prepared, take_samples(data, samples), metric)
    operators = find_rounding_operators(prepared)
    rows = []
    for done, operator in enumerate(operators, 1):
        score = simulation.score([operator])
        rows.append(SensitivityRow(operator.name, operator.op.removeprefix("relax."), score))
        callbacks.on_progress(ProgressEvent("sensitivity", done, len(operators), unit="operator"))
    name = SQNR if metric is None else name_metric(metric)
    return SensitivityReport(
        tuple(sorted(rows, key=lambda row: row.score)),  # stable: equal scores stay in order
        simulation.score(operators),
        name,
        simulation.samples,
        prepared,
    )


def find_rounding_operators(prepared: PreparedModel) -> tuple[OperatorPlan, ...]:
    """Find quantized operators that round something. Data movement operators do not."""
    return tuple(
        operator
        for operator in prepared.plan.operators
        if operator.quantized and set(find_groups(operator)) != {operator.output}
    )


def find_groups(operator: OperatorPlan) -> tuple[str, ...]:
    """Return the keys of the parameters of an operator's operands and result."""
    keys = [key for _, key in operator.operands]
    return (*keys, operator.output) if operator.output is not None else tuple(keys)


class Simulation:
    """The calibration graph on some data, with the outputs of the float model.

    Values of the float model are kept, so that a run with other operators quantized starts from
    them. They take at most `memory` bytes for any data. Beyond that, more is computed again.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        data: Dataset,
        metric: Metric | None = None,
        *,
        memory: float = KEPT_BYTES,
    ) -> None:
        if metric is not None:
            check_metric(metric)
        self.prepared, self.data, self.metric = prepared, data, metric
        self.parameters = prepared.require_parameters()
        #: arguments of the calibration graph, by group: always the same arrays
        self.arguments: dict[str, dict[str, np.ndarray]] = {}
        self.samples = sum(count_samples(batch) for batch in data)
        first = next(iter(data))
        share = memory * count_samples(first) / self.samples
        with limit_blas():
            self.incremental = IncrementalFunction(
                EagerModule(prepared.graph.mod).programs["main"],
                prepared.graph.arguments(),
                (self.find_changes([op]) for op in find_rounding_operators(prepared)),
                [*first.values()],
                share,
            )
            #: of the inputs of each batch
            self.digests: list[str] = []
            #: samples of each batch
            self.counts: list[int] = []
            self.recordings = list(map_on_threads(self.incremental.record, self.note_batches()))
        self.expected = [recording.results for recording in self.recordings]
        least = find_least_energies(prepared.mod)
        #: energy that each output lacks
        self.missing = sum_missing(zip(self.expected, self.counts, strict=True), least)
        #: arguments that the recordings are of
        self.recorded: Mapping[str, np.ndarray] = {}

    def read_batches(self) -> Iterator[list[np.ndarray]]:
        """Read the inputs of each batch, in order. They are copied, because the data set may reuse
        its arrays.
        """
        for batch in self.data:
            yield [batch[name].copy() for name in self.prepared.graph.inputs]

    def digest(self, arrays: Sequence[np.ndarray]) -> str:
        """Return a digest of the inputs of one batch."""
        return digest_batch(dict(zip(self.prepared.graph.inputs, arrays, strict=True)))

    @property
    def data_digest(self) -> str:
        """A digest of all inputs."""
        return digest_text("".join(self.digests))

    def note_batches(self) -> Iterator[list[np.ndarray]]:
        """Read the batches and record digests, to compare them with a second reading."""
        for batch in self.read_batches():
            self.digests.append(self.digest(batch))
            self.counts.append(len(batch[0]) if batch and batch[0].ndim else 1)
            yield batch

    def pair_batches(self) -> Iterator[tuple[Recording, list[np.ndarray]]]:
        """Pair each recording with the inputs that it was made from.

        Raises:
            DataError: the data set yields other batches than before, or a different number.
        """
        known = zip(self.recordings, self.digests, strict=True)
        for i, (pair, batch) in enumerate(itertools.zip_longest(known, self.read_batches())):
            if pair is None or batch is None:
                raise DataError(
                    f"The data set yielded {format_count(len(self.recordings), 'batch')} at "
                    "first, and now a different number. It must yield the same batches each time "
                    "it is read.",
                    code="RQ303",
                )
            recording, digest = pair
            if self.digest(batch) != digest:
                raise DataError(
                    f"Batch {i} of the data set  differs from the first time the data set was "
                    "read. It must yield the same batches in the same order each time: do not "
                    "shuffle (shuffle=False), and do not use random augmentation.",
                    code="RQ303",
                )
            yield recording, batch

    def find_changes(self, quantized: Collection[OperatorPlan]) -> dict[str, np.ndarray]:
        """Return the arguments of the calibration graph that quantize these operators, by name."""
        keys = {key for operator in quantized for key in find_groups(operator)} & set(
            self.parameters
        )
        names = {operator.name for operator in quantized}
        graph = self.prepared.graph
        changed: dict[str, np.ndarray] = {}
        for key in keys:
            if key not in self.arguments:
                self.arguments[key] = graph.group_arguments(key, self.parameters[key])
            changed.update(self.arguments[key])
        for key, value in self.prepared.constants.items():
            if key.rpartition(":")[0] in names:
                changed[graph.constants[key].var.name] = value
        return changed

    def run(self, quantized: Collection[OperatorPlan]) -> Iterator[list[np.ndarray]]:
        """Run each batch with these operators quantized and the others in float.

        The operators may come from another plan of the same model. Parameters that only that plan
        has pass through.
        """
        update = self.incremental.plan_update(self.find_changes(quantized), self.recorded)
        return self.run_batches(self.incremental.run, update)

    def start_from(self, quantized: Collection[OperatorPlan]) -> None:
        """Let later runs begin with the values of the model with these operators quantized. They
        have the same results, and take less time where they differ from it by few operators.
        """
        changes = self.find_changes(quantized)
        update = self.incremental.plan_update(changes, self.recorded, keeps=True)
        with limit_blas():
            renewed = self.run_batches(self.incremental.renew, update)
            for i, recording in enumerate(renewed):  # one by one: all twice take more memory
                self.recordings[i] = recording
        self.recorded = changes

    def run_batches(self, run: Callable[..., T], update: ParameterUpdate) -> Iterator[T]:
        """Call `run` of the incremental function for each batch."""
        if update.inputs:
            return map_on_threads(lambda pair: run(update, *pair), self.pair_batches())
        return map_on_threads(lambda recording: run(update, recording), self.recordings)

    def score(self, quantized: Collection[OperatorPlan]) -> float:
        """Return the metric, or the SQNR in dB of the worst output.

        Raises:
            ConfigError: the metric returns no number.
        """
        if self.metric is None:
            return self.sqnr(quantized)
        with limit_blas():
            got = list(self.run(quantized))
        return apply_metric(self.metric, self.expected, got)

    def run_each(
        self, quantized: Collection[OperatorPlan], own: Sequence[Mapping[str, QParams]]
    ) -> Iterator[list[np.ndarray]]:
        """As `run`, with parameters of its `own` for each batch, by group key, where `run` has
        none.
        """
        graph, changes = self.prepared.graph, self.find_changes(quantized)
        for known, pair in zip(own, self.pair_batches(), strict=True):
            arguments = [graph.group_arguments(key, qparams) for key, qparams in known.items()]
            merged = {**dict(item for part in arguments for item in part.items()), **changes}
            yield self.incremental.run(self.incremental.plan_update(merged, self.recorded), *pair)

    def sqnr(self, quantized: Collection[OperatorPlan]) -> float:
        """Return the SQNR in dB of the worst output, whatever the metric is."""
        return self.compare(self.run(quantized))

    def compare(self, results: Iterable[Sequence[np.ndarray]]) -> float:
        """Return the SQNR in dB of the worst output of these results, one list per batch."""
        sums = [NoiseSums(signal) for signal in self.missing]
        with limit_blas():
            for expected, got in zip(self.expected, results, strict=True):
                sums = [s.update(x, y) for s, x, y in zip(sums, expected, got, strict=True)]
        return min((s.sqnr for s in sums), default=math.inf)


def check_metric(metric: Any) -> None:
    """Raise ConfigError if the metric cannot be called with two arguments."""
    allowed = (
        "allowed: a function (float outputs, quantized outputs) -> number, higher is better. For "
        "labels, let it read them: lambda expected, got: (got[0].argmax(1) == labels).mean()."
    )
    if not callable(metric):
        raise ConfigError(f"The metric is {metric!r}; {allowed}", code="RQ101")
    try:
        signature = inspect.signature(metric)
    except (TypeError, ValueError):
        return  # a built-in function without a signature: the call itself will show
    try:
        signature.bind([], [])
    except TypeError as error:
        raise ConfigError(
            f"The metric {name_metric(metric)}{signature} cannot be called with two arguments "
            f"({error}); {allowed}",
            code="RQ106",
        ) from None


def name_metric(metric: Metric) -> str:
    """Name a metric for tables and messages."""
    return getattr(metric, "__name__", type(metric).__name__)


def apply_metric(
    metric: Metric, expected: Sequence[list[np.ndarray]], got: Sequence[list[np.ndarray]]
) -> float:
    """Apply the metric to all batches.

    Raises:
        ConfigError: it returns no number, or makes a mistake.
    """
    first, second = join_batches(expected), join_batches(got)
    contract = (
        "It gets two lists with one array for each output of the model, all samples along axis 0, "
        f"here of shape {', '.join(str(array.shape) for array in first)}."
    )
    name = name_metric(metric)
    try:
        value = metric(first, second)
    except Exception as error:
        if is_mistake(error):
            raise ConfigError(
                f"The metric {name} failed ({type(error).__name__}: {error}). {contract}",
                code="RQ106",
            ) from error
        note_error(error, f"relayquant: raised by the metric {name}. {contract}")
        raise
    try:
        score = float(value) + 0.0  # -0.0 becomes 0.0
    except (TypeError, ValueError):
        score = math.nan
    if math.isnan(score):
        shown = f"an array of shape {value.shape}" if np.ndim(value) else reprlib.repr(value)
        raise ConfigError(
            f"The metric {name} returned {shown}; allowed: a number, higher is better. {contract}",
            code="RQ106",
        )
    return score


def join_batches(batches: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """One array for each output, all batches along axis 0.

    Raises:
        DataError: batches differ in more than the first axis.
    """
    joined = []
    for index, parts in enumerate(zip(*batches, strict=True)):
        shapes = {part.shape[1:] for part in parts}
        if len(shapes) > 1:
            raise DataError(
                f"Output {index} has samples of different shapes "
                f"({', '.join(map(str, sorted(shapes)))}), so they do not fit into one array for "
                "the metric. Pad the inputs to one size, or leave out metric=: SQNR is measured "
                "then.",
                code="RQ303",
            )
        joined.append(np.concatenate(parts) if parts[0].ndim else np.stack(parts))
    return joined


def add_lines(
    prepared: PreparedModel,
    choices: Mapping[str, QConfig | None],
    mapping: QConfigMapping,
    origins: Mapping[str, str] = {},
) -> QConfigMapping:
    """Add lines to `mapping` that give exactly these operators, by name, a QConfig; None is float.

    `origins` says of some operators where their line comes from (`MappingRule.origin`).

    A line by name also applies to names below it ("block" to "block.conv"), and a longer name wins.
    If that would match too much, the line counts operators of the type below the operator's longest
    name instead. Lines without effect are left out.
    """
    sites = find_sites(prepared.source, prepared.plan)
    for name, qconfig in choices.items():
        site = sites[name]
        line = MappingRule(Selector.MODULE_NAME, name, qconfig)
        added = mapping.set_module_name(name, qconfig)
        is_alone = not any(line.selects(other) for other in sites.values() if other is not site)
        if not is_alone or added.find_rule(site) != line:
            # Of the names of equal length, take the name of the result: names inside may be
            # generated by us.
            longest = max(reversed(site.names), key=count_parts)
            index = site.find_order(longest) or 0
            added = mapping.set_module_name_object_type_order(longest, site.op, index, qconfig)
        line = added.find_rule(site)
        rules = (
            replace(rule, origin=origins.get(name, "")) if rule is line else rule
            for rule in added.rules
        )
        mapping = replace(added, rules=tuple(rules))
    return mapping.without(mapping.find_idle(sites.values()))
