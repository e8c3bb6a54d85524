"""Behind the data flow: what a look at the integer module saw -> the verdict, and warnings.

Quantization fails in silence: every stage succeeds, and the answers are wrong. So what was built is
run on a handful of samples from all over the data (`kept_samples`), and compared with the float
model (`look`). Where it deviates, the operators that cause it are found on the calibration graph
(`reverting`); `pipeline` builds the module with these in float, and all other parameters as they
were calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from relayquant.analysis.error_statistics import NoiseSums
from relayquant.analysis.linting.lint import lint_samples
from relayquant.analysis.outputs import (
    Interface,
    order_inputs,
    widen_floats,
)
from relayquant.codegen.eager import EagerModule
from relayquant.config import Effort, Guard
from relayquant.errors import AccuracyWarning, DataWarning, warn_user
from relayquant.flow.refine.look import (
    Look,
    deviates,
    deviates_slightly,
    pick_worst,
)
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.ledger import (
    GuardResult,
    read_ledger,
)
from relayquant.ir.rewrite import Graph, expose_values
from relayquant.stages.prepared import PreparedModel

#: what a warning ends with
ADVICE = (
    "relayquant.compare shows every value and relayquant.lint whether the data is right; "
    "guard=Guard.OFF silences this."
)
Batches = Sequence[Mapping[str, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Guarded:
    """What was built of a model, and looked at.

    Attributes:
        prepared: The calibrated model.
        module: Its integer module, with what was seen in its ledger.
        doubts: What looks wrong with the samples.
        warnings: What the user should know of the module.
    """

    prepared: PreparedModel
    module: tvm.IRModule
    doubts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def change(self, module: tvm.IRModule, text: str = "") -> Guarded:
        """The same with another module, and if there is a text, with one more warning."""
        return replace(self, module=module, warnings=(*self.warnings, *([text] if text else [])))

    def tell_user(self) -> tvm.IRModule:
        """Warn, and return the module."""
        for doubt in self.doubts:
            warn_user(f"Calibration data: {doubt}", DataWarning, code="RQ304")
        for warning in self.warnings:
            warn_user(warning, AccuracyWarning, code="RQ401")
        return self.module


def check_samples(prepared: PreparedModel, look: Look) -> tuple[str, ...]:
    """What looks wrong with the samples of a first look."""
    return tuple(map(str, lint_samples(prepared.mod, look.first)))


def judge_look(
    prepared: PreparedModel, qmod: tvm.IRModule, look: Look, settings: QuantizeSettings
) -> GuardResult:
    """What a look says of the integer module."""
    seen, batches, gaps = look.summarize(), look.batches, look.gaps
    if deviates(settings.guarding, gaps):
        culprit = find_first_off(prepared, qmod, pick_worst(prepared, batches, gaps, 2))
        return replace(seen, deviates=True, operator=culprit)
    if deviates_slightly(settings.guarding, gaps, look.parts):
        culprit = find_first_off(prepared, qmod, pick_worst(prepared, batches, gaps, 1))
        return replace(seen, deviates_slightly=True, operator=culprit)
    return seen


def find_promise(prepared: PreparedModel, settings: QuantizeSettings) -> str:
    """Why no operator may be reverted, however far the outputs deviate; "" where they may."""
    if settings.guarding.find_action(prepared.effort) is Guard.WARN:
        return "with effort='fast' or guard=Guard.WARN nothing is done about it"
    if settings.strict:
        return "with strict=True no operator goes back to float"
    if any(value.is_integer for value in (*prepared.inputs, *prepared.outputs)):
        return "with input_dtypes or output_dtypes no operator goes back to float"
    return ""


def explain_deviation(seen: GuardResult, promise: str, effort: str) -> str:
    """Name the first operator that is off where outputs deviate and none is reverted; else ""."""
    if not (seen.deviates or seen.deviates_slightly):
        return ""
    why = f"; {promise}. "
    if seen.deviates_slightly:
        more = "" if effort == Effort.BEST.value else "effort='best' or "
        why = f". That is more than 8 bits usually cost; {more}quantize(metric=) may help. "
    first = "No operator has a result that both models show"
    if seen.operator:
        first = f"The first operator that is off is {seen.operator!r}"
    return f"{describe_deviation(seen)} {first}{why}{ADVICE}"


def describe_deviation(seen: GuardResult) -> str:
    """What was seen, as a sentence."""
    return f"The integer model does not follow the float model: {seen.describe()}."


def find_first_off(
    prepared: PreparedModel, qmod: tvm.IRModule, batches: Batches, decibels: float = 15.0
) -> str:
    """The first operator whose result is off by more than `decibels`; else the one that is most; ""
    where no value of a quantized operator is in both modules.
    """
    interface = Interface.of(qmod)
    rows = {row.name: row for row in read_ledger(qmod).quantized}
    run_float, run_integer = (make_run(mod, rows) for mod in (prepared.mod, qmod))
    sums: dict[str, NoiseSums] = {}
    for batch in batches:
        expected, got = run_float(batch), run_integer(interface.to_inputs(batch))
        for name in expected:
            row = rows[name]
            if name not in got:
                continue
            x, value = widen_floats(expected[name]), widen_floats(got[name])
            # An accumulator has no parameters in the ledger; it is dequantized under its own name.
            if value.dtype.kind != "f" and not row.scale:
                continue
            y = value.astype("float64")
            if value.dtype.kind != "f":
                y = (y - row.zero_point[0]) * row.scale[0]
            if x.shape == y.shape:
                sums[name] = sums.get(name, NoiseSums()).update(x, y)
    off = [name for name, total in sums.items() if total.sqnr < decibels]
    if off:
        return off[0]
    return min(sums, key=lambda name: sums[name].sqnr, default="")


def make_run(
    mod: tvm.IRModule, wanted: Container[str]
) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return a function from inputs to those of the wanted values that main binds, in order."""
    bound = [binding.var for binding in Graph(mod).bindings]
    names = [v.name for v in bound if v.name in wanted and isinstance(v.ty, relax.TensorType)]
    exposed = EagerModule(expose_values(mod, names))

    def run(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = exposed.run("main", order_inputs(mod, batch))
        return dict(zip(names, results, strict=False))

    return run
