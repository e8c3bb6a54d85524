"""Integer module of a model with state -> the same, or one with operators in float that follows the
float model at the end of sequences too.

The guard gives both models the float model's state. Here each goes on from its own, as in use, so
that errors add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tvm

from relayquant.analysis.outputs import GapSums, Interface, order_inputs
from relayquant.analysis.quiet_outputs import find_least_energies
from relayquant.analysis.sensitivity import find_rounding_operators
from relayquant.codegen.eager import EagerModule
from relayquant.config import Guard, QConfig
from relayquant.data import Batch, StreamedDataset
from relayquant.flow.refine.guard import Guarded, find_promise
from relayquant.flow.refine.look import clip_decibels
from relayquant.flow.refine.prepared_edit import Changes, split_changes
from relayquant.flow.refine.reverting import describe_changes
from relayquant.flow.refine.run_time_ranges import find_run_time_qconfigs
from relayquant.flow.refine.wider_weights import find_wider_weights
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.ledger import GuardResult, read_ledger, write_ledger
from relayquant.ir.state import get_state
from relayquant.stages.preparation import prepare_module
from relayquant.stages.prepared import PreparedModel

#: Steps of one sequence, and of all, that modules are compared on.
LONGEST, MOST = 256, 512
#: Operators that are tried alone, each.
TRIED = 16

#: changes -> the integer module with them
Build = Callable[[Changes], tvm.IRModule]


@dataclass(frozen=True, eq=False)
class StreamMeter:
    """The float model's results on some sequences.

    Attributes:
        float_mod: The model.
        sequences: Inputs of each step, without state.
        expected: Results of the last half of each sequence, without state; with it if the model has
            no others.
        least: Energy that a step of each result counts as at least.
    """

    float_mod: tvm.IRModule
    sequences: tuple[list[Batch], ...]
    expected: tuple[list[list[np.ndarray]], ...]
    least: list[float]

    @staticmethod
    def of(float_mod: tvm.IRModule, data: StreamedDataset) -> StreamMeter | None:
        """Run the float model. None if no sequence has two steps."""
        found, left = [], MOST
        for steps in data.sequences():
            found.append(steps[: min(LONGEST, left)])
            left -= len(found[-1])
            if left < 2:
                break
        sequences = tuple(steps for steps in found if len(steps) > 1)
        if not sequences:
            return None
        runs = tuple([*run_sequence(float_mod, steps)] for steps in sequences)
        least = find_least_energies(prepare_module(float_mod))
        return StreamMeter(float_mod, sequences, runs, least)

    def measure(self, quantized: tvm.IRModule) -> float:
        """SQNR of the worst result in dB, over the last halves of the sequences."""
        sums = GapSums(self.least)
        for steps, expected in zip(self.sequences, self.expected, strict=True):
            for want, got in zip(expected, run_sequence(quantized, steps), strict=True):
                sums.update(want, got, 1)
        return clip_decibels(min(gap.sqnr for gap in sums.gaps))


def run_sequence(mod: tvm.IRModule, steps: Sequence[Batch]) -> Iterator[list[np.ndarray]]:
    """Run a module that goes on from its own state. Yields the real results of the last half."""
    runner, interface = EagerModule(mod), Interface.of(mod)
    state = {value.name: value.value for value in get_state(mod)}
    for number, batch in enumerate(steps):
        inputs = order_inputs(mod, interface.to_inputs({**batch, **state}))
        results = interface.to_real(runner.run("main", inputs))
        split = len(results) - len(state)
        state = dict(zip(state, results[split:], strict=True))
        if number >= len(steps) // 2:
            yield results[:split] or results


def follow_streams(
    guarded: Guarded,
    dataset: StreamedDataset,
    settings: QuantizeSettings,
    rebuild: Callable[..., tuple[PreparedModel, tvm.IRModule]],
    look: Callable[[tvm.IRModule], GuardResult],
) -> Guarded:
    """Return the module with what was seen in its ledger. If it does not follow the float model to
    the end of the sequences, products read their ranges at run time; if that is not enough, the
    operators that cost most go back to float. The user is warned then.

    Args:
        dataset: Its sequences.
        rebuild: Makes of (calibrated model, other QConfigs of operators, data set, settings) the
            model and its integer module.
        look: What the guard sees of a module, on single steps.
    """

    calibrated, qmod = guarded.prepared, guarded.module

    def build(changes: Changes) -> tvm.IRModule:
        return rebuild(calibrated, changes, dataset, settings)[1]

    guard, guarding = read_ledger(qmod).guard, settings.guarding
    is_off = guarding.find_action(calibrated.effort) is Guard.OFF or guard is None
    if is_off:
        return guarded
    meter = StreamMeter.of(calibrated.mod, dataset)
    if meter is None:
        return guarded
    seen, wanted = meter.measure(qmod), guarding.target_sqnr
    ranged = find_run_time_qconfigs(calibrated)
    wider = find_wider_weights(calibrated) if guard.widened else {}
    before: Changes = {
        **{name: ranged[name] for name in guard.ranged},
        **{name: wider[name] for name in guard.widened},
        **dict.fromkeys(guard.reverted),
    }
    promise, found, chosen, best = find_promise(calibrated, settings), qmod, before, seen
    if seen < wanted and not promise:
        for changes in propose_changes(meter, build, calibrated, before, ranged):
            module = build(changes)
            sqnr = meter.measure(module)
            if sqnr > best:
                found, chosen, best = module, changes, sqnr
            if best >= wanted:
                break
    warning = ""
    if seen < wanted:
        done = f"Nothing is done about it{f': {promise}' if promise else ''}."
        if found is not qmod:
            new = {k: v for k, v in chosen.items() if k not in before or before[k] != v}
            done = f"{describe_changes(calibrated, new)} Now: {best:.1f} dB."
        warning = (
            "The integer model goes on from its own state and does not follow the float model to "
            f"the end of the sequences: {seen:.1f} dB SQNR in their last halves. {done} Longer "
            "sequences to calibrate with may help. guard=Guard.OFF silences this."
        )
    ledger = replace(read_ledger(found), speed=read_ledger(qmod).speed)
    reverted, kept, widened = split_changes(calibrated, chosen)
    if found is not qmod:
        now, was = look(found), guard
        guard = replace(now, sqnr_before=was.sqnr, disagreement_before=was.disagreement)
    guard = replace(guard, reverted=reverted, ranged=kept, widened=widened, stream_sqnr=best)
    ledger = replace(ledger, guard=guard)
    for name in reverted if found is not qmod else ():
        ledger = ledger.with_refusal(
            name,
            f"reverted to float by the guard: quantized, {seen:.1f} dB SQNR at the end of "
            "sequences",
            "longer sequences to calibrate with may help; guard=Guard.OFF keeps it quantized",
        )
    return guarded.change(write_ledger(found, ledger), warning)


def propose_changes(
    meter: StreamMeter,
    build: Build,
    calibrated: PreparedModel,
    before: Changes,
    ranged: Mapping[str, QConfig],
) -> Iterator[Changes]:
    """Yield ranges of the run time for all products, then ever more operators in float with that,
    those first that give most alone.
    """
    floating, _, widened = split_changes(calibrated, before)
    start = {**ranged, **{name: before[name] for name in widened}, **dict.fromkeys(floating)}
    if start != before:
        yield start
    operators = [operator.name for operator in find_rounding_operators(calibrated)]
    names = [name for name in operators if name not in floating][:TRIED]
    alone = {name: meter.measure(build({**start, name: None})) for name in names}
    order = sorted(names, key=lambda name: -alone[name])
    count = 1
    while count <= len(order):
        yield start | dict.fromkeys(order[:count])
        count += max(count // 2, 1)
    yield start | dict.fromkeys(order)
