"""Measurements of a report -> a verdict in words, the numbers that it rests on, and the commands
to run next.

The bounds are those of the guard (`GuardSettings`) and of accuracy control (`max_drop`), so that a
page says nothing else than `quantize` did.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from relayquant.analysis.linting.finding import Finding
from relayquant.config import GuardSettings
from relayquant.errors import format_count
from relayquant.flow.refine.look import deviates, deviates_slightly
from relayquant.flow.settings import MAX_DROP
from relayquant.plots.report_data import ReportData

#: a metric that drops by more than this is no longer a loss of some digits
LARGE_DROP = 0.05
#: multiply-adds on integers below this share gain little
SMALL_SHARE = 0.5
#: with fewer samples the verdict may differ on other data
FEW_SAMPLES = 16


class Grade(enum.Enum):
    """What to do with an integer model. The later, the worse."""

    GOOD = "good"
    LOOK = "look here"
    STOP = "do not ship"


@dataclass(frozen=True)
class Observation:
    """One thing that a verdict rests on.

    Attributes:
        grade: What it means by itself.
        text: One sentence with its numbers.
        commands: What to run about it, in this order. Each can be pasted.
    """

    grade: Grade
    text: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The verdict on an integer model.

    Attributes:
        grade: The worst grade of an observation.
        observations: What it rests on, the worst first.
        commands: The commands to run next.
    """

    grade: Grade
    observations: tuple[Observation, ...]
    commands: tuple[str, ...]

    @staticmethod
    def of(data: ReportData) -> Verdict:
        """Judge what a report measured."""
        order = [*Grade]
        found = sorted(observe(data), key=lambda seen: -order.index(seen.grade))
        commands = dict.fromkeys(command for seen in found for command in seen.commands)
        return Verdict(found[0].grade, tuple(found), tuple(commands) or name_delivery(data))


def observe(data: ReportData) -> Iterator[Observation]:
    """Yield what a verdict rests on."""
    yield observe_outputs(data)
    if data.score is not None:
        yield observe_score(data)
    for finding in data.findings:
        yield observe_finding(data, finding)
    share = data.shares.get("multiply-adds")
    if share is not None:
        grade = Grade.LOOK if share < SMALL_SHARE else Grade.GOOD
        yield Observation(grade, f"{share:.1%} of the multiply-adds run on integers.")
    if data.latencies:
        yield observe_latency(data)
    if data.compare.samples < FEW_SAMPLES:
        samples = format_count(data.compare.samples, "sample")
        yield Observation(
            Grade.GOOD, f"Measured on {samples} only. More samples make the verdict surer."
        )


def observe_outputs(data: ReportData) -> Observation:
    """Judge the outputs as the guard does. Beside a metric, they are at most doubtful."""
    settings, gaps = GuardSettings(), data.compare.outputs
    agreement = "; ".join(filter(None, [str(data.compare.agreement), data.compare.weak_part]))
    if deviates(settings, gaps):
        grade = Grade.STOP if data.score is None else Grade.LOOK
        text = f"The integer model does not follow the float model: {agreement}."
        return Observation(grade, text, name_repairs(data))
    if deviates_slightly(settings, gaps, data.compare.parts):
        text = f"The integer model follows the float model only loosely: {agreement}."
        return Observation(Grade.LOOK, text, name_repairs(data))
    return Observation(Grade.GOOD, f"The integer model follows the float model: {agreement}.")


def observe_score(data: ReportData) -> Observation:
    """Judge the user's metric."""
    score = data.score
    assert score is not None
    drop = round(score.floating - score.integer, 9)  # 0.8 - 0.79 is above 0.01 in floats
    samples = format_count(score.samples, "sample")
    text = f"{score.name} is {score.integer:.4g}, in float {score.floating:.4g}, on {samples}"
    if drop <= MAX_DROP:
        return Observation(Grade.GOOD, f"{text}.")
    grade = Grade.STOP if drop > LARGE_DROP else Grade.LOOK
    return Observation(grade, f"{text}: a drop of {drop:.4g}.", name_repairs(data))


def observe_finding(data: ReportData, finding: Finding) -> Observation:
    """Judge a finding of lint on the data."""
    place = f" of input {finding.where!r}" if finding.where else ""
    text = f"The data looks wrong ({finding.check}{place}): {finding.what} {finding.advice}"
    words = data.words
    return Observation(Grade.LOOK, text, (f"relayquant lint {words.model} --data {words.data}",))


def observe_latency(data: ReportData) -> Observation:
    """Judge the times of a run."""
    times = {name: row.best * 1e3 for name, row in data.latencies.items()}
    ratio = times["float"] / times["int8"]
    text = f"A run takes {times['int8']:.3g} ms, in float {times['float']:.3g} ms ({ratio:.2f}x)."
    if ratio >= 1:
        return Observation(Grade.GOOD, text)
    words = data.words
    return Observation(
        Grade.LOOK,
        text,
        (f"relayquant quantize {words.model} --data {words.data} --only-if-faster",),
    )


def name_repairs(data: ReportData) -> tuple[str, ...]:
    """Name the commands that make a model more accurate."""
    words = data.words
    if data.suggestion is not None:
        count = len(data.suggestion.names)
        return (
            f"relayquant sensitivity {words.model} --data {words.data} --effort fast "
            f"--keep {count} -o kept.json",
            f"relayquant quantize {words.model} --data {words.data} --config kept.json",
        )
    how = "--metric agreement" if data.compare.agreement.answers else "--effort best"
    return (f"relayquant quantize {words.model} --data {words.data} {how}",)


def name_delivery(data: ReportData) -> tuple[str, ...]:
    """Name the commands that follow if nothing is wrong."""
    words, commands = data.words, []
    if not words.is_written:
        commands.append(f"relayquant quantize {words.model} --data {words.data} -o {words.qmodel}")
    if not data.latencies:
        commands.append(f"relayquant bench {words.model} {words.qmodel}")
    return (*commands, f"relayquant export {words.qmodel} -o {words.library}")
