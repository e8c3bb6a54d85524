"""The ledger: a row for each operator of the float model that says what was done to it.

The module carries the ledger as a function attribute.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import tvm

from relayquant.base.plain_data import PlainFields
from relayquant.base.qtypes import QParams
from relayquant.base.storage.files import reading
from relayquant.base.tables import format_html
from relayquant.config.accumulator import NATIVE
from relayquant.config.model_type import RECOGNIZED
from relayquant.errors import ConfigError, ModelError, format_count
from relayquant.ir.agreement import Agreement, describe_part, describe_sqnr
from relayquant.ir.dialect.legality import is_integer_operator
from relayquant.ir.plan import PassedOver, Plan
from relayquant.ir.rewrite.entry import attach_attrs, find_attrs
from relayquant.ir.rewrite.function import add_functions

LEDGER_ATTR = "relayquant.ledger"

#: operators whose results are shapes, and how the dtypes of sizes and indices begin
SHAPES, NUMBERS = ("shape_of", "tensor_to_shape"), ("int", "uint", "bool")

#: origin of the mapping lines of operators whose values 8 bits cannot hold, and how their reason
#: begins
WIDE_ORIGIN = "the range of its values"
WIDE_REASON = f"kept in float by {WIDE_ORIGIN}"
RECOGNIZED_REASON = f"kept in float by {RECOGNIZED}"
#: what `GuardResult.widened` and `SearchResult.widened` are said to be
MORE_BITS = "with weights of more bits"


@dataclass(frozen=True)
class LedgerRow(PlainFields):
    """One operator: how it was quantized, or why not and what to do.

    Attributes:
        name: Name of the value that it computes.
        op: Its main operator, without "relax.".
        quantized: Whether it runs on integers.
        pattern: Name of the pattern that took it, "" if none.
        dtype: Dtype of its result. For a quantized operator it is an integer dtype (int32 or int64
            for a sum that is dequantized at once). For others it is the dtype in the float model,
            also an integer dtype for results such as indices. "" if the result is not a tensor.
        reason, advice: Why it stayed in float, and what to do. "" if it is quantized.
        values: All values of the float model inside it. The last is `name`.
        sources: Names of its nodes in the source model.
        scale, zero_point: Parameters of its result. Empty if it has none.
        scheme: "symmetric" or "affine" for its result. "" without parameters.
        rule: The deciding line of the QConfigMapping, "" if there is none.
        support: How the backend answered its QConfig, a value of
            `relayquant.config.Support`.
        accumulator: Accumulator of its sums of products, e.g. "int14 saturate". "" is int32 without
            overflow. "int64" is used if int32 could overflow.
        is_dynamic: Whether its data gets run-time parameters. The result is then float32.
        observer: Observer that chose the parameters of its result. "" if there are none or they
            were given.
        passed_over: User rows that match it but did not take it.
        macs: Multiply-adds of its products for one batch. Symbolic dimensions count as 1.
    """

    name: str
    op: str
    quantized: bool
    pattern: str
    dtype: str
    reason: str = ""
    advice: str = ""
    values: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    scale: tuple[float, ...] = ()
    zero_point: tuple[int, ...] = ()
    scheme: str = ""
    rule: str = ""
    support: str = ""
    accumulator: str = ""
    is_dynamic: bool = False
    observer: str = ""
    passed_over: tuple[PassedOver, ...] = ()
    macs: int = 0

    @property
    def is_narrow(self) -> bool:
        """Whether its accumulator is narrower than its sums may need."""
        return self.accumulator not in ("", NATIVE.description)


@dataclass(frozen=True)
class InterfaceValue(PlainFields):
    """An input or output of main.

    Attributes:
        name: Name of the parameter, or of the value in the float model.
        dtype: Dtype that main takes or returns.
        requested: Dtype that the user asked for. The reference form is all float and does not have
            it yet.
        scale, zero_point: real = scale * (integer - zero_point). Empty for a float `dtype`.
    """

    name: str
    dtype: str = "float32"
    requested: str = ""
    scale: tuple[float, ...] = ()
    zero_point: tuple[int, ...] = ()

    @property
    def is_integer(self) -> bool:
        """Whether the user asked for integers."""
        return bool(self.requested)

    @property
    def qparams(self) -> QParams | None:
        """The parameters, or None for a float value."""
        if not self.scale:
            return None
        return QParams(np.float32(self.scale[0]), np.int32(self.zero_point[0]), self.dtype)  # pyright: ignore[reportArgumentType]

    def with_qparams(self, qparams: QParams | None) -> InterfaceValue:
        """Return a copy with dtype and parameters. None returns the value unchanged."""
        if qparams is None:
            return self
        scale, zero_point = (float(qparams.scale),), (int(qparams.zero_point),)
        return replace(self, dtype=qparams.dtype, scale=scale, zero_point=zero_point)


@dataclass(frozen=True)
class GuardResult(PlainFields):
    """Measurements of the guard (accuracy control), which runs the integer and the float model.

    Attributes:
        samples: Number of samples that both models ran on.
        sqnr: SQNR of the worst output in dB, within -999 and 999.
        disagreement: Share of samples with a clearly different answer, at the worst output.
        deviates: Whether the outputs deviated with all of the plan quantized.
        operator: First operator with a wrong result. "" if the outputs did not deviate.
        reverted: Operators that were reverted to float.
        ranged: Operators on integers that read their data's range at run time instead.
        widened: Operators on integers whose weights of few bits have all bits instead.
        sqnr_before, disagreement_before: The same numbers before operators were reverted.
        worst: SQNR of the worst sample alone in dB, within -999 and 999. None in ledgers of older
            versions.
        deviates_slightly: Whether the outputs deviated only slightly, but enough for a warning.
        least: Probable lower bound of `sqnr` on similar data. None in ledgers of older versions.
        by_output: SQNR of each output in dB, within -999 and 999.
        total: Number of available samples. None in ledgers of older versions.
        numbers: Positions of the samples in the data.
        worst_number: Position of the worst sample. None if the outputs have no entry per sample.
        tuned: Number of samples that also chose ranges or fitted weights. On these, the models
            agree better than on others.
        is_held_out: Whether the samples are from `validation_dataset=`.
        held_back: Number of samples of the calibration data that calibration did not read.
        held_sqnr: SQNR of the worst output on these alone. None if there are none.
        stream_sqnr: SQNR of the worst output in the last halves of sequences, with both models
            going on from their own state. None without state or sequences.
        answers, equal: See `Agreement`. `equal` is None in ledgers of older versions.
        part, part_sqnr: The weakest of the values that outputs concatenate, such as the scores of a
            detector beside its places, and its SQNR. "" and None if no output concatenates any.
    """

    samples: int
    sqnr: float
    disagreement: float = 0.0
    deviates: bool = False
    operator: str = ""
    reverted: tuple[str, ...] = ()
    sqnr_before: float | None = None
    disagreement_before: float | None = None
    worst: float | None = None
    deviates_slightly: bool = False
    least: float | None = None
    by_output: tuple[float, ...] = ()
    total: int | None = None
    numbers: tuple[int, ...] = ()
    worst_number: int | None = None
    tuned: int = 0
    is_held_out: bool = False
    held_back: int = 0
    held_sqnr: float | None = None
    stream_sqnr: float | None = None
    answers: int = 0
    equal: int | None = None
    ranged: tuple[str, ...] = ()
    widened: tuple[str, ...] = ()
    part: str = ""
    part_sqnr: float | None = None

    @property
    def agreement(self) -> Agreement:
        """What was measured, without the statistics."""
        return Agreement(
            self.sqnr,
            self.samples,
            self.answers,
            self.equal,
            self.total,
            self.held_back,
            self.is_held_out,
        )

    def __str__(self) -> str:
        """One line."""
        seen = f"guard: {self.describe()}"
        if changes := self.describe_changes():
            return f"{seen}; for that, {'; '.join(changes)}"
        return f"{seen}; it starts at {self.operator}" if self.operator else seen

    def describe_changes(self) -> list[str]:
        """Describe what was done about outputs that deviated, as parts of a sentence."""
        changes = list_changes(self.reverted, self.ranged, self.widened)
        return [f"{what}: {', '.join(names)}" for what, names in changes]

    def describe_part(self) -> str:
        """Describe the weakest part of the outputs. Return "" if none is weaker than an output."""
        if self.part_sqnr is None:
            return ""
        return describe_part(self.part, self.part_sqnr, self.sqnr)

    def describe(self) -> str:
        """Describe the measurements, and what they say of other data."""
        notes = []
        if self.disagreement:
            notes.append(f"{self.disagreement:.1%} of the answers clearly different")
        if self.least is not None and self.least < self.sqnr:
            notes.append(f"on other data of this kind at least {describe_sqnr(self.least)}")
        if self.worst is not None:
            number = "" if self.worst_number is None else f" number {self.worst_number}"
            notes.append(f"worst sample{number}: {describe_sqnr(self.worst)}")
        if self.tuned:
            notes.append(f"weights or ranges were tuned on {self.tuned} of them")
        if self.held_sqnr is not None and self.held_back < self.samples:
            notes.append(f"on those held back {describe_sqnr(self.held_sqnr)}")
        if self.stream_sqnr is not None:
            notes.append(f"at the end of sequences {describe_sqnr(self.stream_sqnr)}")
        if weak := self.describe_part():
            notes.append(weak)
        return "; ".join([str(self.agreement), *notes])


def list_changes(
    reverted: Sequence[str], ranged: Sequence[str], widened: Sequence[str]
) -> list[tuple[str, Sequence[str]]]:
    """List what the guard changed, in words, with the operators; see `GuardResult`."""
    changes = (
        ("back in float", reverted),
        ("with ranges computed at run time", ranged),
        (MORE_BITS, widened),
    )
    return [(what, names) for what, names in changes if names]


@dataclass(frozen=True)
class SearchResult(PlainFields):
    """Result of the search for the fewest operators to keep in float.

    Attributes:
        score: The user's metric for the module.
        float_score: The metric for the float model, compared with itself.
        is_met: Whether the score is within the bound.
        trials: Number of measured modules.
        reverted, dtype: Operators that were reverted, and their dtype: "float32" or "int16".
        mapping: The QConfigMapping that makes the module, for `QConfigMapping.from_dict`. None if
            it holds a callable.
        widened: Operators on integers whose weights of few bits have all bits instead.
    """

    score: float
    float_score: float
    is_met: bool
    trials: int
    reverted: tuple[str, ...] = ()
    dtype: str = "float32"
    mapping: Mapping[str, Any] | None = None
    widened: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line."""
        met = "within" if self.is_met else "not within"
        seen = (
            f"search: score {self.score:.6g}, float {self.float_score:.6g}, {met} the bound after "
            f"{format_count(self.trials, 'trial')}"
        )
        changes = ((f"back in {self.dtype}", self.reverted), (MORE_BITS, self.widened))
        done = "; ".join(f"{what}: {', '.join(names)}" for what, names in changes if names)
        return f"{seen}; for that, {done}" if done else seen


@dataclass(frozen=True)
class SpeedResult(PlainFields):
    """Speed-up on one machine from keeping operators in float that are faster in float.

    Attributes:
        before: Latency in seconds with all of the plan quantized.
        after: Latency with `reverted` in float. None if nothing faster was found.
        reverted: Operators that stay in float for speed.
        mapping: The QConfigMapping that makes the module, for `QConfigMapping.from_dict`. None if
            nothing was reverted, or if it holds a callable.
    """

    before: float
    after: float | None = None
    reverted: tuple[str, ...] = ()
    mapping: Mapping[str, Any] | None = None

    @property
    def ratio(self) -> float:
        """Latency after divided by latency before."""
        return 1.0 if self.after is None else self.after / self.before

    def __str__(self) -> str:
        """One line."""
        if self.after is None:
            return f"speed: {self.before * 1e3:.3g} ms, no operator in float makes it faster"
        return (
            f"speed: {self.after * 1e3:.3g} ms, {self.ratio:.2f} of the time with all on integers; "
            f"for that, in float: {', '.join(self.reverted)}"
        )


@dataclass(frozen=True)
class Ledger(PlainFields):
    """Rows of all operators in topological order, and the results of the whole quantization.

    `choices` describes in words how "activations" and "weights" were calibrated. `guard`, `search`
    and `speed` are None if these steps did not run.
    """

    rows: tuple[LedgerRow, ...] = field(metadata={"key": "operators"})
    backend: str = ""
    effort: str = ""
    inputs: tuple[InterfaceValue, ...] = ()
    outputs: tuple[InterfaceValue, ...] = ()
    guard: GuardResult | None = None
    search: SearchResult | None = None
    speed: SpeedResult | None = None
    choices: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as dicts and lists.

        The keys are "backend", "effort", "choices", "operators", "inputs", "outputs", "guard",
        "search" and "speed". A step that did not run is None.
        """
        data = super().to_dict()
        first = {key: data[key] for key in ("backend", "effort", "choices")}
        return first | {"operators": data["operators"]} | data

    def __str__(self) -> str:
        """Return one line per operator. `relayquant.plots.ledger_table` makes a table."""
        lines = []
        for row in self.rows:
            how = f"{row.pattern} {row.dtype}" if row.quantized else f"float: {row.reason}"
            how += f", accumulator {row.accumulator}" if row.accumulator else ""
            how += ", dynamic" if row.is_dynamic else ""
            lines.append(
                "; ".join(
                    [f"{row.name}: {row.op} -> {how}"]
                    + ([row.advice] if row.advice else [])
                    + [str(passed) for passed in row.passed_over]
                )
            )
        return "\n".join(lines)

    def summarize(self) -> str:
        """Return one line: what runs on integers, what the outputs lost on which samples, and what
        stays in float.
        """
        count, macs = len(self.counted), sum(row.macs for row in self.rows)
        text = f"{len(self.quantized)} of {format_count(count, 'operator')} on integers"
        if macs:
            share = sum(row.macs for row in self.quantized) / macs
            text += f" ({share:.0%} of the multiply-adds)"
        parts = [text]
        if self.guard is not None:
            measured = str(self.guard.agreement)
            if self.guard.disagreement:
                measured += f", {self.guard.disagreement:.1%} of the answers clearly different"
            if self.guard.held_sqnr is not None and self.guard.held_back < self.guard.samples:
                measured += f", on those held back {describe_sqnr(self.guard.held_sqnr)}"
            if weak := self.guard.describe_part():
                measured += f", {weak}"
            parts.append(f"outputs: {measured}")
            parts += [f"for that, {change}" for change in self.guard.describe_changes()]
        parts += self.describe_floating()
        return "; ".join([*parts, "reasons and advice: relayquant.ledger(qmod)"])

    def describe_floating(self) -> list[str]:
        """Describe operators in float for one line: for their values, and the most frequent."""
        floating = [row for row in self.counted if not row.quantized]
        wide = [row.name for row in floating if row.reason.startswith(WIDE_REASON)]
        kinds = Counter(row.op for row in floating).most_common(3)
        found = [f"in float for the range of their values: {', '.join(wide)}"] if wide else []
        if any(row.reason.startswith(RECOGNIZED_REASON) for row in floating):
            found.append(
                "recognized as a transformer, so that only products are quantized "
                '(model_type="general" quantizes all operators)'
            )
        if kinds:
            counts = ", ".join(f"{count} {op}" for op, count in kinds)
            more = len(floating) - sum(count for _, count in kinds)
            found.append(f"in float: {counts}" + (f" and {more} others" if more else ""))
        return found

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        columns = {
            "operator": [row.name for row in self.rows],
            "op": [row.op for row in self.rows],
            "quantized": [row.quantized for row in self.rows],
            "dtype": [row.dtype for row in self.rows],
            "reason": [row.reason for row in self.rows],
            "what to do": [row.advice for row in self.rows],
        }
        if any(row.passed_over for row in self.rows):
            columns["passed over"] = ["; ".join(map(str, row.passed_over)) for row in self.rows]
        count = format_count(len(self.counted), "operator")
        results = (self.guard, self.search, self.speed)
        lines = [str(seen) for seen in results if seen is not None]
        return format_html(columns, f"{len(self.quantized)} of {count} quantized", lines)

    def row(self, name: str) -> LedgerRow | None:
        """Return the row of the operator that computes value `name`, also inside a pattern."""
        return next((row for row in self.rows if name == row.name or name in row.values), None)

    @property
    def quantized(self) -> tuple[LedgerRow, ...]:
        """Rows of operators that run on integers."""
        return tuple(row for row in self.rows if row.quantized)

    @property
    def counted(self) -> tuple[LedgerRow, ...]:
        """Rows that a summary counts: all but operators that give shapes, or integers in the float
        model, too, such as indices.
        """
        return tuple(
            row
            for row in self.rows
            if row.quantized or not (row.op in SHAPES or row.dtype.startswith(NUMBERS))
        )

    @property
    def floating(self) -> tuple[LedgerRow, ...]:
        """Rows of operators that stay in float."""
        return tuple(row for row in self.rows if not row.quantized)

    def with_finished(self, before: Ledger) -> Ledger:
        """Take over the quantized rows of `before`.

        The integer operators that these rows became get no rows.
        """
        finished = before.quantized
        taken = {value for row in finished for value in row.values}
        known = {value for row in before.rows for value in row.values}
        planned = (
            row
            for row in self.rows
            if row.name not in taken
            and (row.quantized or row.name in known or row.dtype.startswith("float"))
            and not is_integer_operator(f"relax.{row.op}")
        )
        return replace(self, rows=(*finished, *planned))

    def with_accumulator(self, name: str, accumulator: str) -> Ledger:
        """Return a ledger with the accumulator of an operator."""

        def change(row: LedgerRow) -> LedgerRow:
            if row.name != name:
                return row
            # If no integer operator takes the sum, the sum is the result.
            dtype = accumulator if row.dtype == "int32" else row.dtype
            return replace(row, accumulator=accumulator, dtype=dtype)

        return replace(self, rows=tuple(map(change, self.rows)))

    def with_refusal(self, name: str, reason: str, advice: str = "") -> Ledger:
        """Return a ledger in which the operator stays in float."""
        rows = (
            replace(
                row,
                quantized=False,
                dtype="float32",
                reason=reason,
                advice=advice,
                scale=(),
                zero_point=(),
                scheme="",
                accumulator="",
                is_dynamic=False,
                observer="",
            )
            if row.name == name
            else row
            for row in self.rows
        )
        return replace(self, rows=tuple(rows))


def build_ledger(
    plan: Plan,
    parameters: Mapping[str, QParams],
    backend: str,
    dtypes: Mapping[str, str],
    observers: Mapping[str, str],
    macs: Mapping[str, int],
) -> Ledger:
    """Build the ledger of a plan with its parameters.

    `dtypes` maps values of the float model to dtypes, and `macs` to their multiply-adds.
    `observers` maps groups to the observers that chose their parameters.
    """
    rows = []
    for operator in plan.operators:
        qparams = parameters.get(operator.output) if operator.output else None
        dtype = operator.compute or dtypes.get(operator.name, "float32")
        if operator.quantized:
            dtype = qparams.dtype if qparams is not None else "int32"
        grouped = operator.grouped
        if grouped is not None:
            dtype = f"int{grouped.code_bits}"
        scheme = grouped or (plan.group(operator.output).info.spec if operator.output else None)
        rows.append(
            LedgerRow(
                operator.name,
                operator.op.removeprefix("relax."),
                operator.quantized,
                operator.pattern,
                dtype,
                operator.reason,
                operator.advice,
                operator.values,
                operator.sources,
                tuple(qparams.scale.reshape(-1).tolist()) if qparams is not None else (),
                tuple(qparams.zero_point.reshape(-1).tolist()) if qparams is not None else (),
                scheme.scheme.value if scheme else "",
                operator.rule,
                operator.support.value,
                operator.accumulator.description if operator.accumulator else "",
                operator.dynamic is not None,
                observers.get(operator.output, "") if operator.output else "",
                operator.passed_over,
                sum(macs.get(value, 0) for value in operator.values),
            )
        )
    return Ledger(tuple(rows), backend)


def find_ledger(mod: tvm.IRModule) -> Ledger | None:
    """Return the ledger that a module carries, or None.

    Raises:
        ModelError: The ledger is damaged.
    """
    attrs = find_attrs(mod)
    if LEDGER_ATTR not in attrs:
        return None
    return parse_ledger(str(attrs[LEDGER_ATTR]))


@lru_cache(maxsize=4)
def parse_ledger(text: str) -> Ledger:
    """Parse the attribute's text. Several stages ask for the ledger of one module."""
    with reading("The module's ledger", "ledger", ModelError):
        try:
            return Ledger.from_dict(json.loads(text))
        except ConfigError as error:
            raise ModelError(str(error), code="RQ205") from error


def read_ledger(mod: tvm.IRModule) -> Ledger:
    """Return the ledger of a quantized module.

    Raises:
        ModelError: The module has no ledger: relayquant did not make it.
    """
    if not isinstance(mod, tvm.IRModule):
        raise ModelError(
            f"A {type(mod).__name__} is not a quantized module. Pass the result of "
            "relayquant.quantize, lower or convert_to_reference.",
            code="RQ205",
        )
    ledger = find_ledger(mod)
    if ledger is None:
        raise ModelError(
            "The module carries no ledger: it was not quantized by relayquant. Pass the result of "
            "relayquant.quantize, lower or convert_to_reference.",
            code="RQ205",
        )
    return ledger


def write_ledger(mod: tvm.IRModule, ledger: Ledger) -> tvm.IRModule:
    """Return the module with another ledger."""
    main = mod["main"].with_attrs(ledger_attrs(ledger))
    return add_functions(mod, {mod.get_global_var("main"): main})


def attach_ledger(mod: tvm.IRModule, ledger: Ledger) -> tvm.IRModule:
    """Return the module with a ledger at its model function.

    If several functions could be the model, the module itself carries the ledger.
    """
    return attach_attrs(mod, ledger_attrs(ledger))


def ledger_attrs(ledger: Ledger) -> dict[str, str]:
    """Return the function attributes that hold the ledger."""
    return {LEDGER_ATTR: json.dumps(ledger.to_dict())}
