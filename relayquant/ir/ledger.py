"""The ledger: what became of every operator of the float model. Travels with the module as a
function attribute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm

from relayquant.base.plain_data import PlainFields
from relayquant.base.qtypes import QParams
from relayquant.base.storage.files import reading
from relayquant.base.tables import format_html
from relayquant.config.accumulator import NATIVE
from relayquant.errors import ConfigError, ModelError, format_count
from relayquant.ir.plan import PassedOver, Plan
from relayquant.ir.rewrite.entry import find_entry

LEDGER_ATTR = "relayquant.ledger"


@dataclass(frozen=True)
class LedgerRow(PlainFields):
    """One operator: what was done to it, or why not and what to do about it.

    Attributes:
        name: Stable name of the value it computes.
        op: Its main operator, without "relax.".
        quantized: Whether it runs on integers.
        pattern: Pattern that took it, "" if none.
        dtype: Integer dtype of its result (int32 or int64 for a sum that is dequantized at once);
            where it is not quantized that of the float model, which is no float for indices and the
            like, and "" for what is no tensor.
        reason, advice: Why it stayed in float, and what to do; "" when quantized.
        values: All values of the float model inside it, the last is `name`.
        sources: Nodes of the source model it came from.
        scale, zero_point: Parameters of its result, empty when it has none.
        scheme: "symmetric" or "affine" of its result, "" when it has no parameters.
        rule: The line of the QConfigMapping that decided, "" if none did.
        support: What became of its QConfig (`relayquant.ir.plan.Support`).
        accumulator: What its sums of products are held in, e.g. "int14 saturate"; "" for int32
            that holds them all, "int64" where it would not.
        is_dynamic: Whether its data gets parameters of the run time; its result is float32 then.
        observer: What picked the parameters of its result, "" when it has none or they were given.
        passed_over: Rows of the user's own that match it and did not take it.
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

    @property
    def is_narrow(self) -> bool:
        """Whether its sums are brought into the range of a register that need not hold them."""
        return self.accumulator not in ("", NATIVE.description)


@dataclass(frozen=True)
class InterfaceValue(PlainFields):
    """An input or output of main.

    Attributes:
        name: Of the parameter, or of the float model's value.
        dtype: What main takes or returns.
        requested: What the user asked for; the reference form, which is all float, does not have it
            yet.
        scale, zero_point: real = scale * (integer - zero_point); empty where `dtype` is no integer.
    """

    name: str
    dtype: str = "float32"
    requested: str = ""
    scale: tuple[float, ...] = ()
    zero_point: tuple[int, ...] = ()

    @property
    def is_integer(self) -> bool:
        """Whether integers were asked for."""
        return bool(self.requested)

    @property
    def qparams(self) -> QParams | None:
        """Its parameters; None where it is float."""
        if not self.scale:
            return None
        return QParams(np.float32(self.scale[0]), np.int32(self.zero_point[0]), self.dtype)  # pyright: ignore[reportArgumentType]

    def with_qparams(self, qparams: QParams | None) -> InterfaceValue:
        """With dtype and parameters; unchanged for None."""
        if qparams is None:
            return self
        scale, zero_point = (float(qparams.scale),), (int(qparams.zero_point),)
        return replace(self, dtype=qparams.dtype, scale=scale, zero_point=zero_point)


@dataclass(frozen=True)
class GuardResult(PlainFields):
    """What the guard saw when it ran the integer model beside the float model.

    Attributes:
        samples: Samples that both ran on.
        sqnr: Of the worst output, dB, within -999 and 999.
        disagreement: Share of samples with clearly another answer, at the worst output.
        is_parted: Whether the outputs parted when all of the plan was quantized.
        operator: Where it starts: the first operator whose result is off; "" if they did not part.
        reverted: Operators that were put back to float.
        sqnr_before, disagreement_before: The same numbers before that.
        worst: SQNR of the worst sample alone, dB, within -999 and 999; None in ledgers of older
            versions.
        is_doubtful: Whether the outputs, that did not part, are far enough apart for a warning.
        least: What `sqnr` is not likely to fall below in data of this kind; None in ledgers of
            older versions.
        by_output: SQNR of each output, dB, within -999 and 999.
        total: Samples that there were to choose from; None in ledgers of older versions.
        numbers: Those that both ran on, by their place in the data.
        worst_number: The worst sample among them; None where outputs do not count samples.
        tuned: How many of them ranges were chosen by or weights fitted to: a model follows better
            on these than on others.
        is_held_out: Whether they are samples that calibration did not read: `validation=`.
    """

    samples: int
    sqnr: float
    disagreement: float = 0.0
    is_parted: bool = False
    operator: str = ""
    reverted: tuple[str, ...] = ()
    sqnr_before: float | None = None
    disagreement_before: float | None = None
    worst: float | None = None
    is_doubtful: bool = False
    least: float | None = None
    by_output: tuple[float, ...] = ()
    total: int | None = None
    numbers: tuple[int, ...] = ()
    worst_number: int | None = None
    tuned: int = 0
    is_held_out: bool = False

    def __str__(self) -> str:
        """One line."""
        seen = f"guard: outputs on {self.describe_samples()}: {self.describe()}"
        if self.reverted:
            return f"{seen}; for that, back in float: {', '.join(self.reverted)}"
        return f"{seen}; it starts at {self.operator}" if self.operator else seen

    def describe_samples(self) -> str:
        """What was looked at: "32 of 64 calibration samples"."""
        kind = "validation" if self.is_held_out else "calibration"
        text = format_count(self.samples, f"{kind} sample")
        if self.total is not None and self.total > self.samples:
            text = f"{self.samples} of {format_count(self.total, f'{kind} sample')}"
        return f"{text} ({self.tuned} of them tuned weights or ranges)" if self.tuned else text

    def describe(self) -> str:
        """What was measured, as a part of a sentence."""
        notes = []
        if self.least is not None and self.least < self.sqnr:
            notes.append(f"in data of this kind at least {self.least:.1f} dB")
        if self.worst is not None:
            number = "" if self.worst_number is None else f", number {self.worst_number},"
            notes.append(f"the worst sample{number} {self.worst:.1f} dB")
        measured = f"{self.sqnr:.1f} dB SQNR" + (f" ({'; '.join(notes)})" if notes else "")
        return f"{measured}, {self.disagreement:.0%} of the answers clearly others"


@dataclass(frozen=True)
class SearchResult(PlainFields):
    """What the search for the fewest operators to put back found.

    Attributes:
        score: The user's metric of the module.
        float_score: That of the float model against itself.
        is_met: Whether the score is within the bound.
        trials: Modules that were measured.
        reverted, dtype: Operators that were put back, and to what.
        mapping: The QConfigMapping that makes the module, for `QConfigMapping.from_dict`; None
            where it holds a callable.
    """

    score: float
    float_score: float
    is_met: bool
    trials: int
    reverted: tuple[str, ...] = ()
    dtype: str = "float32"
    mapping: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        """One line."""
        met = "within" if self.is_met else "not within"
        seen = (
            f"search: score {self.score:.6g}, float {self.float_score:.6g}, {met} the bound after "
            f"{format_count(self.trials, 'trial')}"
        )
        names = ", ".join(self.reverted)
        return f"{seen}; for that, back in {self.dtype}: {names}" if names else seen


@dataclass(frozen=True)
class SpeedResult(PlainFields):
    """What keeping operators in float that are faster so has brought on one machine.

    Attributes:
        before: Seconds of a run with all of the plan quantized.
        after: The same with `reverted` in float; None when nothing faster was found.
        reverted: Operators that are in float for that.
        mapping: The QConfigMapping that makes the module, for `QConfigMapping.from_dict`; None
            when nothing was reverted, or where it holds a callable.
    """

    before: float
    after: float | None = None
    reverted: tuple[str, ...] = ()
    mapping: Mapping[str, Any] | None = None

    @property
    def ratio(self) -> float:
        """Time afterwards over time before."""
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
    """Rows in topological order, the backend they were made for, the effort of calibration and what
    it worked with ("activations", "weights"; in words), and what the guard, the search for a metric
    and that for speed saw (None when they did not run).
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
        """{"backend": name, "effort": name, "choices": texts, "operators": rows, "inputs": values,
        "outputs": values, "guard": result or None, "search": ..., "speed": ...}, all as
        dicts.
        """
        data = super().to_dict()
        first = {key: data[key] for key in ("backend", "effort", "choices")}
        return first | {"operators": data["operators"]} | data

    def __str__(self) -> str:
        """One line for each operator; `relayquant.plots.ledger_table` makes a table of it."""
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

    def _repr_html_(self) -> str:
        """The table in a notebook."""
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
        count = format_count(len(self.rows), "operator")
        results = (self.guard, self.search, self.speed)
        lines = [str(seen) for seen in results if seen is not None]
        return format_html(columns, f"{len(self.quantized)} of {count} quantized", lines)

    def row(self, name: str) -> LedgerRow | None:
        """The row of the operator that computes value `name`, also inside of a pattern."""
        return next((row for row in self.rows if name == row.name or name in row.values), None)

    @property
    def quantized(self) -> tuple[LedgerRow, ...]:
        """Rows of operators that run on integers."""
        return tuple(row for row in self.rows if row.quantized)

    @property
    def floating(self) -> tuple[LedgerRow, ...]:
        """Rows of operators that stay in float."""
        return tuple(row for row in self.rows if not row.quantized)

    def with_finished(self, before: Ledger) -> Ledger:
        """A ledger whose rows are those of `before` for the operators it calls quantized, and no
        rows of the integer operators that these became.
        """
        finished = before.quantized
        taken = {value for row in finished for value in row.values}
        known = {value for row in before.rows for value in row.values}
        planned = (
            row
            for row in self.rows
            if row.name not in taken
            and (row.quantized or row.name in known or row.dtype.startswith("float"))
            and not row.op.startswith("qnn.")
        )
        return replace(self, rows=(*finished, *planned))

    def with_accumulator(self, name: str, accumulator: str) -> Ledger:
        """A ledger that says what the sums of an operator are held in."""

        def change(row: LedgerRow) -> LedgerRow:
            if row.name != name:
                return row
            # A sum that no integer operator takes is the result.
            dtype = accumulator if row.dtype == "int32" else row.dtype
            return replace(row, accumulator=accumulator, dtype=dtype)

        return replace(self, rows=tuple(map(change, self.rows)))

    def with_refusal(self, name: str, reason: str, advice: str = "") -> Ledger:
        """A ledger in which the operator stays in float."""
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
) -> Ledger:
    """The ledger of a plan with its parameters; `dtypes` are those of the float model's values,
    `observers` what picked the parameters of its groups.
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
            )
        )
    return Ledger(tuple(rows), backend)


def find_ledger(mod: tvm.IRModule) -> Ledger | None:
    """The ledger that a module carries, or None.

    Raises:
        ModelError: it is damaged.
    """
    entry = find_entry(mod)
    attrs = mod.attrs if entry is None else mod[entry].attrs
    if attrs is None or LEDGER_ATTR not in attrs:
        return None
    with reading("The module's ledger", "ledger", ModelError):
        try:
            return Ledger.from_dict(json.loads(str(attrs[LEDGER_ATTR])))
        except ConfigError as error:
            raise ModelError(str(error), code="RQ205") from error


def read_ledger(mod: tvm.IRModule) -> Ledger:
    """The ledger of a quantized module.

    Raises:
        ModelError: the module has none: it was not made by relayquant.
    """
    if not isinstance(mod, tvm.IRModule):
        raise ModelError(
            f"A {type(mod).__name__} is no quantized module. "
            "Pass what relayquant.quantize, lower or convert_to_reference returned.",
            code="RQ205",
        )
    ledger = find_ledger(mod)
    if ledger is None:
        raise ModelError(
            "The module carries no ledger: it was not quantized by relayquant. "
            "Pass what relayquant.quantize, lower or convert_to_reference returned.",
            code="RQ205",
        )
    return ledger


def write_ledger(mod: tvm.IRModule, ledger: Ledger) -> tvm.IRModule:
    """A module that is the same but for its ledger."""
    functions = dict(mod.functions_items())
    changed = tvm.IRModule(functions, attrs=mod.attrs)
    changed["main"] = mod["main"].with_attrs(ledger_attrs(ledger))
    return changed


def attach_ledger(mod: tvm.IRModule, ledger: Ledger) -> tvm.IRModule:
    """The module with a ledger at the function that is its model, or at the module itself where it
    has several functions that could be.
    """
    entry = find_entry(mod)
    if entry is None:
        return mod.with_attrs(ledger_attrs(ledger))
    changed = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    changed[entry] = mod[entry].with_attrs(ledger_attrs(ledger))
    return changed


def ledger_attrs(ledger: Ledger) -> dict[str, str]:
    """Function attributes that hold the ledger."""
    return {LEDGER_ATTR: json.dumps(ledger.to_dict())}
