"""Behind the data flow: integer module and a few calibration samples -> the same module, or one
whose outputs follow the float model again.

Quantization fails in silence: every stage succeeds, and the answers are wrong. So what was built is
run, in numpy and on a handful of samples from all over the data, and compared with the float model.
Where it parts, the operators that cause it are found on the calibration graph and put back to
float; all other parameters stay as they were calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tvm

from relayquant import reference
from relayquant.analysis.lint import lint_samples
from relayquant.analysis.outputs import Interface, OutputGap, measure_gaps
from relayquant.analysis.sensitivity import Simulation, find_rounding_operators
from relayquant.analysis.sums import ErrorSums
from relayquant.datasets import (
    Batch,
    SpreadSample,
    count_samples,
    has_free_batch,
    open_dataset,
)
from relayquant.datasets.inputs import describe_inputs
from relayquant.dialect.cost import count_macs
from relayquant.errors import AccuracyWarning, ConfigError, DataWarning, format_count, warn_user
from relayquant.ledger import GuardResult, Ledger, read_ledger, write_ledger
from relayquant.pipeline import lower_prepared
from relayquant.prepared import PreparedModel
from relayquant.refine.revert import keep_parameters
from relayquant.refine.search import rank_operators, search_simulated
from relayquant.rewrite import Graph
from relayquant.settings import Guard, GuardSettings, QuantizeSettings

#: operators, of those that went back on suspicion, that are tried on integers again
TAKEN_BACK = 8

Batches = Sequence[Mapping[str, np.ndarray]]


def guard_module(
    prepared: PreparedModel,
    qmod: tvm.IRModule,
    dataset: Any,
    settings: QuantizeSettings,
    sample: SpreadSample | None = None,
) -> tvm.IRModule:
    """The integer module, or one with some operators in float; its ledger says what was seen.

    With `strict`, and where main takes or returns integers, nothing is put back: both promise
    integers. Warns when outputs part, and when the samples look wrong (`lint_samples`).

    Args:
        prepared: The calibrated model that `qmod` was made from.
        qmod: Its integer module.
        dataset: What it was calibrated with; read for samples unless there is a `sample`.
        settings: Those that it was quantized with; `calibration` is used when a new plan has
            values that were never observed.
        sample: Samples that were kept while the data was read; see `start_sample`.
    """
    guarding, strict = settings.guarding, settings.strict
    action = guarding.find_action(prepared.effort)
    if action is Guard.OFF:
        return qmod
    batches = take_batches(prepared, dataset, guarding) if sample is None else sample.batches()
    for finding in lint_samples(prepared.mod, batches):
        warn_user(f"Calibration data: {finding}", DataWarning)
    gaps = measure_gaps(prepared.mod, qmod, batches)
    samples = sum(map(count_samples, batches))
    seen = summarize(gaps, samples)
    what = (
        "The integer model does not follow the float model on "
        f"{format_count(samples, 'calibration sample')}: {describe(seen)}."
    )
    advice = (
        "relayquant.compare shows every value and relayquant.lint whether the data is right; "
        "guard=Guard.OFF silences this."
    )
    if not guarding.is_parted(gaps):
        if guarding.is_doubtful(gaps):
            culprit = find_first_off(prepared, qmod, pick_worst(prepared, batches, gaps, 1))
            seen = replace(seen, is_doubtful=True, operator=culprit)
            warn_user(
                f"{what} The first operator that is off is {culprit!r}. That is more than 8 bits "
                f"usually cost; effort='best' or quantize(metric=) may help. {advice}",
                AccuracyWarning,
            )
        return write_ledger(qmod, replace(read_ledger(qmod), guard=seen))
    culprit = find_first_off(prepared, qmod, pick_worst(prepared, batches, gaps, 2))
    integers = [value for value in (*prepared.inputs, *prepared.outputs) if value.is_integer]
    if action is Guard.WARN or strict or integers:
        why = "with effort='fast' or guard=Guard.WARN nothing is done about it"
        if action is Guard.REVERT:
            cause = "strict=True" if strict else "input_dtypes or output_dtypes"
            why = f"with {cause} no operator goes back to float"
        warn_user(
            f"{what} The first operator that is off is {culprit!r}; {why}. {advice}",
            AccuracyWarning,
        )
        guard = replace(seen, is_parted=True, operator=culprit)
        return write_ledger(qmod, replace(read_ledger(qmod), guard=guard))
    changed, names, gaps, is_arithmetic = revert_operators(
        prepared, qmod, dataset, batches, gaps, settings
    )
    if is_arithmetic:
        advice = (
            "In simulation the quantized model follows the float model, so neither ranges nor data "
            "are the cause but integers, such as sums that do not fit int32: see "
            "relayquant.accumulator_report. guard=Guard.OFF silences this."
        )
    guard = replace(
        summarize(gaps, samples),
        is_parted=True,
        operator=culprit,
        reverted=names,
        sqnr_before=seen.sqnr,
        disagreement_before=seen.disagreement,
    )
    warn_user(
        f"{what} Back in float, {format_count(len(names), 'operator')}: {', '.join(names)}. Now: "
        f"{describe(guard)}. {advice}",
        AccuracyWarning,
    )
    speed = read_ledger(qmod).speed
    ledger = replace(read_ledger(changed), guard=guard, speed=speed)
    ledger = explain_reverted(ledger, names, seen)
    return write_ledger(changed, ledger)


# --- What is compared -------------------------------------------------------------------------


def start_sample(prepared: PreparedModel, settings: GuardSettings) -> SpreadSample:
    """What keeps the samples that are compared, from data that is read for something else."""
    count = min(settings.samples, max(int(settings.work / max(count_all_macs(prepared), 1)), 2))
    return SpreadSample(tuple(describe_inputs(prepared.mod)), count)


def count_all_macs(prepared: PreparedModel) -> int:
    """Multiply-adds of the float model for one batch; for one sample, if that is symbolic."""
    return sum(count_macs(binding.value) for binding in Graph(prepared.mod).bindings)


def take_batches(prepared: PreparedModel, dataset: Any, settings: GuardSettings) -> list[Batch]:
    """Samples spread over the data, which is read for that; as one batch where the model's batch
    is symbolic.
    """
    sample = start_sample(prepared, settings)
    for batch in open_dataset(dataset, describe_inputs(prepared.mod)):
        sample.note(batch)
    return sample.batches()


def pick_worst(
    prepared: PreparedModel, batches: Sequence[Batch], gaps: Sequence[OutputGap], count: int
) -> list[Batch]:
    """The samples on which an output is worst, in order, each as a batch; whole batches where their
    size is fixed.
    """
    places = [(i, row) for i, batch in enumerate(batches) for row in range(count_samples(batch))]
    rated = [gap.each for gap in gaps if len(gap.each) == len(places)]
    scores = np.min(rated, axis=0) if rated else np.zeros(len(places))
    worst = [places[number] for number in sorted(np.argsort(scores, kind="stable")[:count])]
    if has_free_batch(describe_inputs(prepared.mod)):
        return [{k: v[row : row + 1] for k, v in batches[i].items()} for i, row in worst]
    return [batches[i] for i in dict.fromkeys(i for i, _ in worst)]


def summarize(gaps: Sequence[OutputGap], samples: int) -> GuardResult:
    """The worst of all outputs, for the ledger."""
    sqnr = min((gap.sqnr for gap in gaps), default=math.inf)
    worst = max(gaps, key=lambda gap: gap.disagreement, default=OutputGap(math.inf))
    lowest = min((gap.worst for gap in gaps), default=math.inf)
    sqnr, lowest = (float(np.clip(value, -999.0, 999.0)) for value in (sqnr, lowest))
    return GuardResult(samples, sqnr, worst.disagreement, worst=lowest)


def describe(result: GuardResult) -> str:
    """What was measured, as a part of a sentence."""
    worst = "" if result.worst is None else f" (the worst sample {result.worst:.1f} dB)"
    return (
        f"{result.sqnr:.1f} dB SQNR{worst}, {result.disagreement:.0%} of the answers clearly others"
    )


def find_first_off(
    prepared: PreparedModel, qmod: tvm.IRModule, batches: Batches, decibels: float = 15.0
) -> str:
    """The first operator whose result is off by more than `decibels`; else the one that is most."""
    interface = Interface.of(qmod)
    rows = {row.name: row for row in read_ledger(qmod).quantized}
    sums: dict[str, ErrorSums] = {}
    for batch in batches:
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
    qmod: tvm.IRModule,
    dataset: Any,
    batches: Sequence[Batch],
    gaps: Sequence[OutputGap],
    settings: QuantizeSettings,
) -> tuple[tvm.IRModule, tuple[str, ...], list[OutputGap], bool]:
    """(module, operators put back to float, its gaps, whether only integers part): as few as bring
    the outputs back.

    Few are found on the calibration graph, where an operator is switched by a parameter, on the
    worst samples. The integer module decides on all of them; while it falls short, twice as many
    more go, or, where the calibration graph sees nothing wrong, the next one that is off. Of those
    that went so, as many as can are taken back.
    """
    mapping, guarding = prepared.mapping, settings.guarding
    if mapping is None:
        raise ConfigError("The guard needs the QConfigMapping that the model was prepared with.")
    operators = find_rounding_operators(prepared)
    # Each operator is switched alone, and what is behind it computed anew: half of the model.
    each = max(count_all_macs(prepared) * len(operators) / 2, 1)
    worst = pick_worst(prepared, batches, gaps, max(int(guarding.search_work / each), 1))
    simulation = Simulation(prepared, open_dataset(worst, describe_inputs(prepared.mod)))

    def build(names: Sequence[str]) -> tuple[tvm.IRModule, list[OutputGap]]:
        changed = keep_parameters(prepared, names, dataset, settings.calibration)
        module = lower_prepared(changed)
        return module, measure_gaps(prepared.mod, module, batches)

    order = rank_operators(simulation, settings.events, math.inf)
    is_arithmetic = simulation.sqnr(operators) >= guarding.target_sqnr
    if is_arithmetic:
        names = [find_first_off(prepared, qmod, worst)]
    else:
        names = search_simulated(simulation, mapping, order, guarding.target_sqnr, math.inf)
    enough = len(names)
    module, found = build(names)
    while guarding.is_parted(found) and len(names) < len(order):
        off = find_first_off(prepared, module, worst) if is_arithmetic else ""
        if off and off not in names:
            names = [*names, off]
        else:
            count = min(2 * len(names) + 1, len(order))
            names = [name for i, name in enumerate(order) if i < count or name in names]
        module, found = build(names)
    if len(names) > enough and not guarding.is_parted(found):
        for name in names[::-1][:TAKEN_BACK]:
            fewer = [other for other in names if other != name]
            smaller, gaps = build(fewer)
            if fewer and not guarding.is_parted(gaps) and is_enough(gaps, found, guarding):
                names, module, found = fewer, smaller, gaps
    return module, tuple(names), found, is_arithmetic


def is_enough(
    gaps: Sequence[OutputGap], reference: Sequence[OutputGap], settings: GuardSettings
) -> bool:
    """Whether outputs have the SQNR that operators are put back for, or what more of them give."""
    least = min(settings.target_sqnr, *(gap.sqnr for gap in reference))
    return all(gap.sqnr >= least for gap in gaps)


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
