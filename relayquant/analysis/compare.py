"""compare: float module, its quantized module and data -> the error of each value, and where it
starts.

Values are matched by their stable names. There are two views. *Accumulated*: everything before the
value is quantized too. *Isolated*: one operator alone, on the float model's inputs, quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tvm

from relayquant.analysis.error_statistics import ErrorSums
from relayquant.analysis.outputs import GapSums, Interface, OutputGap, PartMeter, find_agreement
from relayquant.analysis.quiet_outputs import find_least_energies
from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.base.runtime import LoadModule
from relayquant.base.tables import format_csv, format_html
from relayquant.codegen.eager import EagerModule
from relayquant.data import count_samples
from relayquant.errors import ModelError, format_count
from relayquant.ir.agreement import Agreement, describe_part
from relayquant.ir.ledger import Ledger, LedgerRow, read_ledger
from relayquant.ir.rewrite import Graph, expose_values
from relayquant.ir.rewrite.graph import free_vars, tensor_dtype
from relayquant.stages.calibration.subgraphs import build_function, collect_ancestors
from relayquant.stages.preparation import prepare_module

#: (row, array of the float model, array of the integer model in the same units), for each batch
Watch = Callable[[LedgerRow, np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class CompareRow:
    """One value of the float model.

    Attributes:
        name, op, quantized: As in the ledger.
        sqnr: Accumulated signal to quantization noise ratio, dB.
        isolated: SQNR of this operator alone, dB. None for operators in float.
        cosine: Accumulated cosine similarity.
        max_error, mean_error: Accumulated absolute error, in the units of the value.
        saturated: Share of elements outside the range of their parameters. None for float values.
    """

    name: str
    op: str
    quantized: bool
    sqnr: float
    isolated: float | None
    cosine: float
    max_error: float
    mean_error: float
    saturated: float | None


@dataclass(frozen=True)
class CompareReport:
    """All values that both modules have, in topological order.

    Attributes:
        rows: The values.
        samples: Number of samples that both modules ran on.
        outputs: The gap of each output of main.
        stream_sqnr: SQNR of the worst output in the last halves of sequences, with both models
            going on from their own state, dB. None without state or sequences.
        parts: The gap of each value that an output concatenates, by name: places of a detector
            hide the noise of its scores.
    """

    rows: tuple[CompareRow, ...]
    samples: int = field(default=0)
    outputs: tuple[OutputGap, ...] = ()
    stream_sqnr: float | None = None
    parts: Mapping[str, OutputGap] = field(default_factory=dict)

    @property
    def weak_part(self) -> str:
        """The weakest of the parts, in words. "" if none is weaker than an output."""
        name = min(self.parts, key=lambda each: self.parts[each].sqnr, default="")
        return describe_part(name, self.parts[name].sqnr, self.agreement.sqnr) if name else ""

    @property
    def agreement(self) -> Agreement:
        """The agreement of the outputs."""
        return find_agreement(self.outputs, self.samples)

    def first_below(self, decibels: float = 15.0) -> CompareRow | None:
        """Return the first value whose accumulated SQNR is below `threshold`."""
        return next((row for row in self.rows if row.sqnr < decibels), None)

    @property
    def worst(self) -> CompareRow | None:
        """The operator that adds the largest error itself."""
        alone = [row for row in self.rows if row.isolated is not None]
        return min(alone, key=lambda row: row.isolated or 0.0, default=None)

    def __str__(self) -> str:
        """One line for each value, and the first one with a large error."""
        width = max([len(row.name) for row in self.rows] + [5])
        lines = [f"{'value':{width}}  SQNR [dB]  alone [dB]  saturated"]
        for row in self.rows:
            alone = "" if row.isolated is None else f"{row.isolated:.1f}"
            saturated = "" if row.saturated is None else f"{row.saturated:.2%}"
            lines.append(
                f"{row.name:{width}}  {row.sqnr:9.1f}  {alone:>10}  {saturated:>9}".rstrip()
            )
        first = self.first_below()
        where = "" if first is None else f"; the first below 15 dB is {first.name}"
        counts = f"{format_count(len(self.rows), 'value')}, {format_count(self.samples, 'sample')}"
        if self.stream_sqnr is not None:
            where += f"; at the end of sequences {self.stream_sqnr:.1f} dB"
        where += f"; {self.weak_part}" if self.weak_part else ""
        return "\n".join([*lines, f"{counts}{where}"])

    def to_csv(self) -> str:
        """Comma-separated text with a header line."""
        return format_csv(CompareRow, self.rows)

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        columns = {
            "value": [row.name for row in self.rows],
            "op": [row.op for row in self.rows],
            "SQNR [dB]": [row.sqnr for row in self.rows],
            "alone [dB]": [row.isolated for row in self.rows],
            "max error": [row.max_error for row in self.rows],
            "saturated": [row.saturated for row in self.rows],
        }
        first = self.first_below()
        lines = [] if first is None else [f"The first below 15 dB is {first.name}."]
        return format_html(columns, format_count(self.samples, "sample"), lines)


def compare_modules(
    float_mod: tvm.IRModule,
    quantized: tvm.IRModule,
    batches: Iterable[Mapping[str, np.ndarray]],
    load_module: LoadModule,
    watch: Watch | None = None,
) -> CompareReport:
    """Compare every value of the ledger. Memory does not grow with the data.

    Args:
        float_mod: The float module with its parameters bound.
        quantized: The result of `quantize` for that module. Carries the ledger.
        batches: Inputs by name.
        load_module: Makes integer modules runnable. The float module runs step by step.
        watch: Called with every value of every batch.

    Raises:
        ModelError: the quantized module has no ledger, or no value in common with the float module.
    """
    prepared, ledger = prepare_module(float_mod), read_ledger(quantized)
    float_graph, graph = Graph(prepared), Graph(quantized)
    rows = [
        row
        for row in ledger.rows
        if row.name in float_graph.vars and row.name in graph.vars and has_array(graph, row.name)
    ]
    if not rows and ledger.rows:  # none: the model gives back its inputs
        raise ModelError(
            "The quantized module has no value in common with the float module: it was made from "
            "another model, or the values were renamed. Pass the module that was quantized.",
            code="RQ205",
        )
    names = [row.name for row in rows]
    float_run = EagerModule(expose_values(prepared, names))
    quantized_run = load_module(expose_values(quantized, names))
    isolated = IsolatedOperators(graph, ledger, rows, load_module)
    errors = {row.name: ValueErrors(row, tensor_dtype(graph.vars[row.name])) for row in rows}
    samples, parts = 0, PartMeter(prepared)
    gaps = GapSums(find_least_energies(prepared))
    params = [param.name for param in graph.func.params]
    interface = Interface.of(quantized)
    for batch in batches:
        args = [batch[name] for name in params]
        integers = [interface.to_input(name, batch[name]) for name in params]
        floats, results = float_run.run("main", args), quantized_run.run("main", integers)
        ends = floats[len(names) :], interface.to_real(results[len(names) :])
        gaps.update(*ends, count_samples(batch))
        parts.measure(batch, *ends)
        expected = dict(zip(names, floats, strict=False))
        got = dict(zip(names, results, strict=False))
        for row in rows:
            real = to_real(got[row.name], row)
            errors[row.name].update(expected[row.name], real)
            if watch is not None:
                watch(row, expected[row.name], real)
        for name, value in isolated.run({**batch, **expected}):
            errors[name].update_alone(expected[name], value)
        samples += count_samples(batch)
    return CompareReport(
        tuple(each.make_row() for each in errors.values()),
        samples,
        tuple(gaps.gaps),
        parts=parts.gaps,
    )


class ValueErrors:
    """Sums over all batches of the errors of one value."""

    def __init__(self, row: LedgerRow, dtype: str) -> None:
        self.row, self.is_integer = row, dtype in INTEGER_LIMITS
        self.total, self.alone, self.saturated = ErrorSums(), None, 0

    def update(self, expected: np.ndarray, real: np.ndarray) -> None:
        """Add a batch of the float model and of the integer model, in real units."""
        self.saturated += count_saturated(expected, self.row)
        self.total = self.total.update(expected, real)

    def update_alone(self, expected: np.ndarray, value: np.ndarray) -> None:
        """Add what the operator gives of the float model's operands."""
        self.alone = (self.alone or ErrorSums()).update(expected, value)

    def make_row(self) -> CompareRow:
        row, total = self.row, self.total
        return CompareRow(
            row.name,
            row.op,
            row.quantized,
            total.sqnr,
            None if self.alone is None else self.alone.sqnr,
            total.cosine,
            total.largest,
            total.mean,
            self.saturated / max(total.count, 1) if self.is_integer else None,
        )


def has_array(graph: Graph, name: str) -> bool:
    """Whether the value is a tensor with real units: float, or 8- and 16-bit integers."""
    dtype = tensor_dtype(graph.vars[name])
    return dtype.startswith("float") or dtype in ("int8", "uint8", "int16", "uint16")


def to_real(value: np.ndarray, row: LedgerRow) -> np.ndarray:
    """Convert an integer value to the units of the float model."""
    if value.dtype.kind == "f" or not row.scale:
        return value
    return (value.astype("float64") - row.zero_point[0]) * row.scale[0]


def count_saturated(expected: np.ndarray, row: LedgerRow) -> int:
    """Count the elements of the float value that its parameters cannot represent."""
    if not row.scale or row.dtype not in INTEGER_LIMITS:
        return 0
    low, high = ((q - row.zero_point[0]) * row.scale[0] for q in INTEGER_LIMITS[row.dtype])
    half = row.scale[0] / 2
    return int(np.count_nonzero((expected < low - half) | (expected > high + half)))


class IsolatedOperators:
    """One function for each quantized operator: its named inputs -> its result."""

    def __init__(
        self,
        graph: Graph,
        ledger: Ledger,
        rows: Sequence[LedgerRow],
        load_module: LoadModule,
    ) -> None:
        self.rows = {row.name: row for row in ledger.rows}
        self.interface = Interface.of(graph.mod)
        known = {graph.vars[row.name] for row in rows}
        self.calls: list[tuple[str, str, list[str]]] = []  # (value, function, inputs)
        self.dtypes: dict[str, str] = {}
        functions = {}
        for i, row in enumerate(row for row in rows if row.quantized):
            var = graph.vars[row.name]
            needed = collect_ancestors(graph, [var], known - {var})
            inside = set(needed)
            inputs = list(
                dict.fromkeys(
                    arg
                    for needed_var in needed
                    for arg in free_vars(graph.values[needed_var])
                    if arg not in inside
                )
            )
            function, symbols = build_function(graph, needed, inputs, [var])
            if symbols:  # A size that no input determines: the operator cannot run by itself.
                continue
            functions[f"operator_{i}"] = function
            self.calls.append((row.name, f"operator_{i}", [arg.name for arg in inputs]))
            self.dtypes.update((arg.name, tensor_dtype(arg)) for arg in inputs)
        mod = tvm.IRModule(
            {
                tvm.ir.GlobalVar(name): func.with_attr("global_symbol", name)
                for name, func in functions.items()
            }
        )
        self.functions = load_module(mod) if functions else None

    def run(self, values: Mapping[str, np.ndarray]) -> Iterable[tuple[str, np.ndarray]]:
        """Yield (name, real result) of every operator on the float model's values."""
        for name, function, inputs in self.calls if self.functions is not None else ():
            args = [self.quantize(arg, values[arg]) for arg in inputs]
            (result,) = self.functions.run(function, args)  # pyright: ignore[reportOptionalMemberAccess]
            yield name, to_real(result, self.rows[name])

    def quantize(self, name: str, value: np.ndarray) -> np.ndarray:
        """Quantize a float value as the integer module does."""
        dtype, row = self.dtypes[name], self.rows.get(name)
        if name in self.interface.inputs:
            return self.interface.to_input(name, value)
        if dtype not in INTEGER_LIMITS or row is None or not row.scale:
            return value
        low, high = INTEGER_LIMITS[dtype]
        steps = np.rint(value.astype("float32") / np.float32(row.scale[0]))
        return np.clip(steps + row.zero_point[0], low, high).astype(dtype)
