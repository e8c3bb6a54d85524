"""Check for authors of patterns: operator row -> a report whether it means the same at every stage.

check_pattern(row) builds small models around the pattern, with drawn shapes, axes, shared operands
and inputs that saturate. It quantizes them and compares the simulated, the reference, the numpy
integer and the compiled results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import tvm

from relayquant.base.qtypes import QSpec
from relayquant.config import BackendConfig, Effort, QConfig, QConfigMapping, TensorConfig
from relayquant.config.observers import MinMax, Observer
from relayquant.config.observers.base import call_observer
from relayquant.errors import ConfigError, RelayQuantError, format_count
from relayquant.flow.evaluation import compile_to_verify, ledger
from relayquant.flow.steps import convert_to_reference, lower, prepare
from relayquant.flow.testing.draw import BuildFunction, ModelBuilder, draw_inputs, find_build
from relayquant.ir.ops import QuantOp
from relayquant.ir.reference import run_values
from relayquant.stages.backends import GENERIC
from relayquant.stages.calibration.weights.pick import pick_weight_parameters
from relayquant.stages.prepared import PreparedModel


class PatternMismatch(RelayQuantError, AssertionError):
    """Two stages give different results for a pattern, or no stage used it."""


@dataclass(frozen=True)
class PatternReport:
    """The result of `check_pattern`.

    Attributes:
        pattern: Name of the row.
        examples: Number of models drawn.
        compared: Number of integers of the pattern's result that were compared between the stages.
        differing: Share of them that differ between simulation and integer module, by at most
            `steps`.
        steps: Largest difference, in units of the result's scale.
    """

    pattern: str
    examples: int
    compared: int
    differing: float
    steps: int


def check_pattern(
    row: QuantOp,
    build: BuildFunction | None = None,
    *,
    backend: BackendConfig = GENERIC,
    dtypes: tuple[str, ...] = ("uint8", "int8"),
    examples: int = 3,
    steps: int = 2,
    share: float = 0.02,
    compiled: bool = True,
    seed: int = 0,
) -> PatternReport:
    """Compare the stages on models drawn around one operator row.

    Args:
        row: The row; the backend tries it before its other rows.
        build: Emits the pattern. None for the patterns of the built-in operators, which are drawn
            from the row.
        backend: The backend whose other patterns quantize the operators around it.
        dtypes: Activation dtypes; each is drawn in turn.
        examples: Number of models to draw.
        steps, share: Allowed difference between integers of the pattern's result and the
            simulation: by `steps`, in at most this share of the elements. The simulation rounds
            real values, which may be close to a tie.
        compiled: Whether to compile for this machine too and compare bit for bit with numpy, on
            calibration inputs and on inputs four times larger, which saturate.
        seed: Seed of everything drawn.

    Raises:
        PatternMismatch: stages differ, the simulate callback computes something else than the float
            operators, or no drawn model was quantized by the row; says where and how.
        ConfigError: `build` is needed.
    """
    make = build or find_build(row)
    compared = differing = worst = used = 0
    reasons: list[str] = []
    for example in range(examples):
        builder = ModelBuilder(seed * 1000 + example)
        mod = builder.finish(make(builder))
        prepared = prepare_example(mod, row, backend, dtypes[example % len(dtypes)])
        name = builder.bindings[-2].var.name
        operator = next((op for op in prepared.plan.operators if name in op.values), None)
        if operator is None or operator.pattern != row.name or not operator.quantized:
            reasons.append(operator.reason or operator.pattern if operator else "it was rewritten")
            continue
        inputs = draw_inputs(builder, 3)
        prepared = observe_parameters(prepared, inputs)
        reference = convert_to_reference(prepared)
        integer = lower(reference, prepared.backend)
        entry = ledger(integer).row(name)
        if entry is None or not entry.quantized:
            reasons.append(entry.reason if entry else "it is not in the ledger")
            continue
        used += 1
        for have, want in compare_stages(prepared, reference, integer, name, inputs[0], steps):
            gap = np.abs(have.astype("int64") - want.astype("int64"))
            compared, differing = compared + gap.size, differing + int((gap > 0).sum())
            worst = max(worst, int(gap.max(initial=0)))
        if not compiled:
            continue
        verifier = compile_to_verify(integer)
        for factor in (1.0, 4.0):
            fed = {key: value * np.float32(factor) for key, value in inputs[0].items()}
            report = verifier.compare(fed)
            if not report.is_equal:
                raise PatternMismatch(
                    f"Pattern {row.name!r}, example {example}, inputs times {factor:g}: compiled "
                    f"code and numpy differ first in {report.first}.",
                    code="RQ106",
                )
    if not used:
        raise PatternMismatch(
            f"Pattern {row.name!r} quantized none of {format_count(examples, 'drawn model')}: "
            f"{'; '.join(dict.fromkeys(reasons))}.",
            code="RQ106",
        )
    fraction = differing / max(compared, 1)
    if worst > steps or fraction > share:
        raise PatternMismatch(
            f"Pattern {row.name!r}: {fraction:.1%} of its integers differ between the stages, by "
            f"up to {format_count(worst, 'step')}; "
            f"allowed: {share:.1%} by {steps}. Do the simulate and realize callbacks compute the "
            "same function?",
            code="RQ106",
        )
    return PatternReport(row.name, used, compared, fraction, worst)


def prepare_example(
    mod: tvm.IRModule, row: QuantOp, backend: BackendConfig, dtype: str
) -> PreparedModel:
    """Prepare the drawn model with the row before all others, and with activations of one dtype."""
    default = backend.find_default(row.name)
    if default is None:
        raise ConfigError(
            f"check_pattern needs a backend with a default_qconfig; {backend.name!r} has none for "
            f"pattern {row.name!r}.",
            code="RQ106",
        )
    activation = TensorConfig(QSpec(dtype), MinMax())
    mapping = QConfigMapping().set_global(QConfig(activation, default.weight))
    known = [r for r in backend.patterns if r.pattern.name == row.name]
    extended = backend.with_pattern(row, known[0].dtypes if known else None)
    # A built-in row comes first here too. Otherwise a longer row may match its operators.
    first, *others = extended.patterns
    extended = replace(extended, patterns=(replace(first, match_first=True), *others))
    # "fast" adds nothing that the row does not have, such as a bias for bias correction.
    return prepare(mod, None, qconfig_mapping=mapping, backend=extended, effort=Effort.FAST)


def observe_parameters(
    prepared: PreparedModel, inputs: list[dict[str, np.ndarray]]
) -> PreparedModel:
    """Choose parameters from the ranges of the float values, in numpy. Nothing is compiled."""
    parameters = dict(pick_weight_parameters(prepared))
    arguments = prepared.graph.arguments()
    batches = [
        {**batch, **run_values(prepared.graph.mod, {**batch, **arguments})} for batch in inputs
    ]
    for group in prepared.plan.activations:
        seen = [batch[name] for batch in batches for name in group.points]
        observer = group.observer if isinstance(group.observer, Observer) else MinMax()
        parameters[group.key] = call_observer(observer.observe, group.info, group.info, seen)
    return replace(prepared, parameters=parameters)


def compare_stages(
    prepared: PreparedModel,
    reference: tvm.IRModule,
    integer: tvm.IRModule,
    name: str,
    inputs: Mapping[str, np.ndarray],
    steps: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return (integers of a stage, integers of the last stage) of the value `name`."""
    arguments = prepared.graph.arguments(prepared.parameters, prepared.constants)
    simulated = run_values(prepared.graph.mod, {**inputs, **arguments})
    real, last = run_values(reference, inputs), run_values(integer, inputs)
    compare_reals(simulated[name], real[name], find_step(prepared, name, real[name]), name, steps)
    have = last.get(f"{name}.q", last.get(name))
    if have is None or have.dtype.kind not in "iu":
        # It was merged with its operand (a relu whose zero point is the smallest integer), so its
        # reader is compared.
        compare_results(run_values(prepared.mod, inputs), last, name)
        return
    for stage in (simulated, real):
        # A value on the grid of its operand is not rounded again, so it has no separate integers.
        if f"{name}.q" in stage:
            yield stage[f"{name}.q"], have


def compare_reals(
    simulated: np.ndarray, real: np.ndarray, step: float, name: str, steps: int
) -> None:
    """Raise PatternMismatch if a simulated value differs from the value of the float operators.

    Both are compared before rounding. Parameters are chosen from simulated values and would clip
    values that only the float operators have.
    """
    same = simulated == real
    gap = np.abs(np.where(same, 0, simulated) - np.where(same, 0, real)) / step
    if not np.all(gap <= steps):
        raise PatternMismatch(
            f"The simulate callback gives another value {name!r} than the float operators, on the "
            f"same operands: {np.nanmax(gap):.3g} steps of its scale apart before it is rounded; "
            f"allowed: {steps}. Does the callback compute the function of the pattern?",
            code="RQ106",
        )


def find_step(prepared: PreparedModel, name: str, value: np.ndarray) -> float:
    """Return the unit to compare a real value in: the scale of its integers, or an 8-bit scale
    if it has none.
    """
    for key in prepared.plan.value_groups.get(name, ()):
        return float(prepared.parameters[key].scale)
    return max(float(np.abs(value).max(initial=0)), float(np.finfo("float32").tiny)) / 127


def compare_results(
    real: Mapping[str, np.ndarray], last: Mapping[str, np.ndarray], name: str
) -> None:
    """Raise PatternMismatch if the last result is further from the float model than 8 bits
    explain.
    """
    (want, have) = (list(values.values())[-1] for values in (real, last))
    gap, size = np.abs(want - have).max(), np.abs(want).max()
    if gap > 0.1 * size:
        raise PatternMismatch(
            f"What is computed from value {name!r} differs from the float model by {gap:.3g}, of "
            f"{size:.3g}.",
            code="RQ106",
        )
