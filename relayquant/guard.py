"""Behind the data flow: integer module and a few calibration samples -> the same module, or one
whose outputs follow the float model again.

Quantization fails in silence: every stage succeeds, and the answers are wrong. So what was built is
run, in numpy and on a handful of samples, and compared with the float model. Where it parts, the
operators that cause it are found on the calibration graph and put back to float; all other
parameters stay as they were calibrated.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm

from relayquant import reference
from relayquant.analysis.lint import lint_samples
from relayquant.analysis.outputs import Interface, OutputGap, measure_gaps
from relayquant.analysis.sensitivity import Simulation
from relayquant.analysis.sums import ErrorSums
from relayquant.calibrate.datasets import count_samples, open_dataset
from relayquant.calibrate.inputs import describe_inputs
from relayquant.dialect.cost import count_macs
from relayquant.effort import Effort
from relayquant.errors import AccuracyWarning, ConfigError, DataWarning
from relayquant.events import CallbackList
from relayquant.ledger import GuardResult, Ledger, read_ledger, write_ledger
from relayquant.pipeline import convert_to_reference, lower
from relayquant.prepared import PreparedModel
from relayquant.revert import keep_parameters
from relayquant.rewrite import Graph
from relayquant.search import rank_operators, search_simulated

#: of a warning: from `guard_module` up to who called `quantize`
CALLER = 5

Batches = Sequence[Mapping[str, np.ndarray]]


class Guard(enum.Enum):
    """What happens when the outputs of float and integer model part."""

    REVERT = "revert"  #: operators that cause it go back to float, with a warning
    WARN = "warn"  #: a warning names the first operator that is off
    OFF = "off"  #: nothing is run


@dataclass(frozen=True)
class GuardSettings:
    """When the guard says that outputs part, and what it does.

    Outputs part when the SQNR of one of them is below `min_sqnr`, or when more than `disagreement`
    of the samples get clearly another answer (`relayquant.analysis.outputs.count_differing`). What
    8 bits can give is 25 to 45 dB at the outputs of networks that quantize well; the worst one that
    still keeps most answers (MobileNet, ranges from the extremes, 97 % equal) has 15 dB. At 10 dB
    the error holds a tenth of the output's energy, and answers differ. Both bounds are far from
    what is normal: the guard is for models that broke, not for the last points of accuracy; for
    those there is `quantize(..., metric=)`.

    Attributes:
        action: See `Guard`; None: WARN with effort "fast", else REVERT.
        samples: Samples that are compared, at most.
        work: Multiply-adds of the float model for all samples together; fewer samples are compared
            when they cost more, at least 2.
        min_sqnr: dB at an output, below which it parts.
        disagreement: Share of samples with another answer, above which an output parts.
        target_sqnr: dB that operators are put back to float for, once outputs parted.
    """

    action: Guard | None = None
    samples: int = 8
    work: float = 1.5e9
    min_sqnr: float = 10.0
    disagreement: float = 0.5
    target_sqnr: float = 20.0

    def __post_init__(self) -> None:
        if self.action is not None and not isinstance(self.action, Guard):
            raise ConfigError(
                f"GuardSettings.action is {self.action!r}; allowed: a member of Guard, or None."
            )
        if self.samples < 1 or not self.work > 0 or not 0 < self.disagreement <= 1:
            raise ConfigError(
                f"GuardSettings: samples is {self.samples}, work {self.work} and disagreement "
                f"{self.disagreement}; allowed: samples >= 1, work > 0, 0 < disagreement <= 1."
            )
        if not self.min_sqnr <= self.target_sqnr:
            raise ConfigError(
                f"GuardSettings: min_sqnr is {self.min_sqnr} and target_sqnr {self.target_sqnr}; "
                "allowed: min_sqnr <= target_sqnr."
            )

    @staticmethod
    def of(guard: Guard | GuardSettings | None) -> GuardSettings:
        """Settings from what `quantize` takes.

        Raises:
            ConfigError: it is something else.
        """
        if isinstance(guard, GuardSettings):
            return guard
        if guard is None or isinstance(guard, Guard):
            return GuardSettings(guard)
        raise ConfigError(
            f"guard is {guard!r}; allowed: a member of Guard ({', '.join(g.name for g in Guard)}), "
            "a GuardSettings, or None."
        )

    def find_action(self, effort: str) -> Guard:
        """What to do at a level of effort."""
        if self.action is not None:
            return self.action
        return Guard.WARN if effort == Effort.FAST.value else Guard.REVERT

    def is_parted(self, gaps: Sequence[OutputGap]) -> bool:
        """Whether one of the outputs is too far from the float model's."""
        return any(gap.sqnr < self.min_sqnr or gap.disagreement > self.disagreement for gap in gaps)


def guard_module(
    prepared: PreparedModel,
    qmod: tvm.IRModule,
    dataset: Any,
    settings: GuardSettings,
    *,
    calibration: Any = None,
    strict: bool = False,
    callbacks: CallbackList | None = None,
) -> tvm.IRModule:
    """The integer module, or one with some operators in float; its ledger says what was seen.

    With `strict`, and where main takes or returns integers, nothing is put back: both promise
    integers. Warns when outputs part, and when the samples look wrong (`lint_samples`).

    Args:
        prepared: The calibrated model that `qmod` was made from.
        qmod: Its integer module.
        dataset: What it was calibrated with; the first few samples are read.
        settings: See `GuardSettings`.
        calibration: As for `quantize`; used when a new plan has values that were never observed.
    """
    action = settings.find_action(prepared.effort)
    if action is Guard.OFF:
        return qmod
    batches = take_batches(prepared, dataset, settings)
    for finding in lint_samples(prepared.mod, batches):
        warnings.warn(f"Calibration data: {finding}", DataWarning, stacklevel=CALLER)
    gaps = measure_gaps(prepared.mod, qmod, batches)
    samples = sum(map(count_samples, batches))
    seen = summarize(gaps, samples)
    if not settings.is_parted(gaps):
        return write_ledger(qmod, replace(read_ledger(qmod), guard=seen))
    culprit = find_first_off(prepared, qmod, batches)
    integers = [value for value in (*prepared.inputs, *prepared.outputs) if value.is_integer]
    what = (
        f"The integer model does not follow the float model on the first {samples} calibration "
        f"samples: {describe(seen)}."
    )
    advice = (
        "relayquant.compare shows every value and relayquant.lint whether the data is right; "
        "guard=Guard.OFF silences this."
    )
    if action is Guard.WARN or strict or integers:
        why = "with effort='fast' or guard=Guard.WARN nothing is done about it"
        if action is Guard.REVERT:
            cause = "strict=True" if strict else "input_dtypes or output_dtypes"
            why = f"with {cause} no operator goes back to float"
        warnings.warn(
            f"{what} The first operator that is off is {culprit!r}; {why}. {advice}",
            AccuracyWarning,
            stacklevel=CALLER,
        )
        guard = replace(seen, is_parted=True, operator=culprit)
        return write_ledger(qmod, replace(read_ledger(qmod), guard=guard))
    changed, names, gaps = revert_operators(
        prepared, dataset, batches, settings, calibration, callbacks or CallbackList()
    )
    guard = replace(
        summarize(gaps, samples),
        is_parted=True,
        operator=culprit,
        reverted=names,
        sqnr_before=seen.sqnr,
        disagreement_before=seen.disagreement,
    )
    warnings.warn(
        f"{what} {len(names)} operators are back in float: {', '.join(names)}. Now: "
        f"{describe(guard)}. {advice}",
        AccuracyWarning,
        stacklevel=CALLER,
    )
    speed = read_ledger(qmod).speed
    ledger = replace(read_ledger(changed), guard=guard, speed=speed)
    ledger = explain_reverted(ledger, names, seen)
    return write_ledger(changed, ledger)


# --- What is compared -------------------------------------------------------------------------


def take_batches(
    prepared: PreparedModel, dataset: Any, settings: GuardSettings
) -> list[dict[str, np.ndarray]]:
    """The first samples; as one batch where the model's batch is symbolic."""
    inputs = describe_inputs(prepared.mod)
    graph = Graph(prepared.mod)
    macs = sum(count_macs(binding.value) for binding in graph.bindings)
    count = min(settings.samples, max(int(settings.work / max(macs, 1)), 2))
    firsts = {info.shape[0] if info.shape else 1 for info in inputs}
    # One name for the first dimension of all inputs: it is the batch.
    is_cut = len(firsts) == 1 and all(isinstance(first, str) for first in firsts)
    found: list[dict[str, np.ndarray]] = []
    samples = 0
    for batch in open_dataset(dataset, inputs):
        part = {k: v[: count - samples] if is_cut else v for k, v in batch.items()}
        shapes = [{k: v.shape[1:] for k, v in rows.items()} for rows in (part, *found[-1:])]
        if is_cut and found and shapes[0] == shapes[1]:
            # Numpy takes as long for one sample as for a few.
            found[-1] = {k: np.concatenate([v, part[k]]) for k, v in found[-1].items()}
        else:
            found.append({name: array.copy() for name, array in part.items()})
        samples += count_samples(part)
        if samples >= count:
            break
    return found


def summarize(gaps: Sequence[OutputGap], samples: int) -> GuardResult:
    """The worst of all outputs, for the ledger."""
    sqnr = min((gap.sqnr for gap in gaps), default=math.inf)
    worst = max(gaps, key=lambda gap: gap.disagreement, default=OutputGap(math.inf))
    return GuardResult(samples, float(np.clip(sqnr, -999.0, 999.0)), worst.disagreement)


def describe(result: GuardResult) -> str:
    """What was measured, as a part of a sentence."""
    return f"{result.sqnr:.1f} dB SQNR, {result.disagreement:.0%} of the answers clearly others"


def find_first_off(
    prepared: PreparedModel, qmod: tvm.IRModule, batches: Batches, decibels: float = 15.0
) -> str:
    """The first operator whose result is off by more than `decibels`; else the one that is most."""
    interface = Interface.of(qmod)
    rows = {row.name: row for row in read_ledger(qmod).quantized}
    sums: dict[str, ErrorSums] = {}
    for batch in batches[:2]:
        expected = reference.run_values(prepared.mod, dict(batch))
        got = reference.run_values(qmod, interface.to_inputs(batch))
        for name in expected:
            row = rows.get(name)
            # An accumulator has no parameters in the ledger; it is dequantized under its own name.
            if row is None or name not in got or (got[name].dtype.kind != "f" and not row.scale):
                continue
            x, y = expected[name], got[name].astype("float64")
            if got[name].dtype.kind != "f":
                y = (y - row.zero_point[0]) * row.scale[0]
            if x.shape == y.shape:
                sums[name] = sums.get(name, ErrorSums()).update(x, y)
    off = [name for name, total in sums.items() if total.sqnr < decibels]
    if off:
        return off[0]
    return min(sums, key=lambda name: sums[name].sqnr, default="")


# --- Mending ----------------------------------------------------------------------------------


def revert_operators(
    prepared: PreparedModel,
    dataset: Any,
    batches: Batches,
    settings: GuardSettings,
    calibration: Any,
    callbacks: CallbackList,
) -> tuple[tvm.IRModule, tuple[str, ...], list[OutputGap]]:
    """(module, operators put back to float, its gaps): as few as bring the outputs back.

    Few are found on the calibration graph, where an operator is switched by a parameter. The
    integer module decides; while it falls short, twice as many more go.
    """
    data = open_dataset(list(batches), describe_inputs(prepared.mod))
    simulation = Simulation(prepared, data)
    mapping = prepared.mapping
    if mapping is None:
        raise ConfigError("The guard needs the QConfigMapping that the model was prepared with.")
    order = rank_operators(simulation, callbacks, math.inf)
    names = search_simulated(simulation, mapping, order, settings.target_sqnr, math.inf)
    while True:
        changed = keep_parameters(prepared, names, dataset, calibration)
        module = lower(convert_to_reference(changed), changed.backend)
        gaps = measure_gaps(prepared.mod, module, batches)
        if not settings.is_parted(gaps) or len(names) == len(order):
            return module, tuple(names), gaps
        count = min(2 * len(names) + 1, len(order))
        names = [name for i, name in enumerate(order) if i < count or name in names]


def explain_reverted(ledger: Ledger, names: Collection[str], before: GuardResult) -> Ledger:
    """The ledger with the guard's reason at each operator that it put back."""
    for name in names:
        ledger = ledger.with_refusal(
            name,
            f"put back to float by the guard: quantized, {describe(before)}",
            "relayquant.compare and relayquant.lint tell whether its range or the data is wrong; "
            "guard=Guard.OFF keeps it quantized",
        )
    return ledger
