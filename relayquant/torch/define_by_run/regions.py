"""Define-by-run, after calibration: tapes of calls -> regions of the user's code.

Regions are found like a compiler's basic blocks. An operator starts a region if calls reach it from
different operators, or if the operator before it continues to different ones. A region ends before
an operator that stays in PyTorch reads one of its values (`bool(x.max() > 1)`). So each operator
belongs to one region, and any path through the code is a sequence of whole regions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from relayquant.torch.define_by_run.arguments import is_equal
from relayquant.torch.define_by_run.call_sites import CallSite
from relayquant.torch.define_by_run.tape import Call, ModelConstant, Tape, TapeStep, ValueForm

VARIES = "one of its arguments that is not a tensor differs between calls"
RANK_VARIES = "the rank or dtype of its tensors differs between calls"
SOMETIMES_SAME = "it returns its argument itself in some calls only"
OTHER_CONSTANT = "the parameter that it reads differs between calls"
OTHER_CONSTANT_ADVICE = "Use a separate module or operator for each parameter."
VARIES_ADVICE = "Compute it with tensors, or make it a constant in the code."


@dataclass(frozen=True)
class Inside:
    """A value of the same region, by its number."""

    number: int


@dataclass(frozen=True)
class Input:
    """An input of the region, by its number."""

    number: int


#: Operand of a step of a region.
Source = Inside | Input | ModelConstant


@dataclass(frozen=True, eq=False)
class RegionStep:
    """A step of a region: its operands, and the numbers of the values it computes.

    `step` is one of the recorded steps, for its call and its structure.
    """

    step: TapeStep
    sources: tuple[Source, ...]
    results: tuple[int, ...]

    @property
    def call(self) -> Call:
        """The call of the step, without writing into an argument."""
        assert self.step.pure is not None
        return self.step.pure


@dataclass(frozen=True)
class Pass:
    """One execution of a region in a call: number of the tape, and of the steps."""

    tape: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """Shape and dtype of a value in all passes. None for a size that differs."""

    shape: tuple[int | None, ...]
    dtype: object


@dataclass(frozen=True, eq=False)
class Region:
    """Operators that follow one another in every call, whatever branch the code takes.

    Attributes:
        steps: In order.
        forms: Forms of the values that it computes. A size of None differs between passes.
        inputs: Forms of the tensors that it reads and that are not constants, in the same way.
        outputs: Numbers of the values that are read elsewhere.
        passes: All executions.
    """

    steps: tuple[RegionStep, ...]
    forms: tuple[Form, ...]
    inputs: tuple[Form, ...]
    outputs: tuple[int, ...]
    passes: tuple[Pass, ...]

    @property
    def sites(self) -> tuple[CallSite, ...]:
        return tuple(each.step.site for each in self.steps)


class Cuts:
    """Current result of the search for regions. It only grows.

    Attributes:
        eager: Operators that stay in PyTorch.
        leaders: First operators of regions.
        ends: Last operators of regions.
    """

    def __init__(self, eager: set[CallSite]) -> None:
        self.eager = eager
        self.leaders: set[CallSite] = set()
        self.ends: set[CallSite] = set()


class _Changed(Exception):
    """The cuts have changed: results found with them are no longer valid."""


def find_regions(tapes: Sequence[Tape], eager: set[CallSite]) -> list[Region]:
    """Find the regions of all tapes, in the order in which calls first reached them.

    `eager` are operators that stay in PyTorch. Operators that cannot be part of a region are added,
    with the reason at the site.
    """
    cuts = Cuts(eager)
    for tape in tapes:
        cuts.eager.update(step.site for step in tape.steps if step.pure is None)
        cuts.eager.update(tape.eager)
    while True:
        try:
            return list(_form_regions(tapes, cuts))
        except _Changed:
            continue


def _form_regions(tapes: Sequence[Tape], cuts: Cuts) -> Iterator[Region]:
    find_leaders(tapes, cuts)
    passes: dict[CallSite, list[Pass]] = {}
    owners: dict[tuple[int, int], tuple[CallSite, int]] = {}  # (tape, step) -> region, pass
    for t, tape in enumerate(tapes):
        for steps in cut_tape(tape, cuts):
            leader = tape.steps[steps[0]].site
            of_run = passes.setdefault(leader, [])
            owners.update(((t, i), (leader, len(of_run))) for i in steps)
            of_run.append(Pass(t, tuple(steps)))
    read = find_read_values(tapes, owners)
    for of_run in passes.values():
        yield form_region(tapes, of_run, read, cuts)


def find_leaders(tapes: Sequence[Tape], cuts: Cuts) -> None:
    """Find operators that have several predecessors, or whose predecessor has several
    successors.
    """
    before: dict[CallSite, set[CallSite | None]] = defaultdict(set)
    after: dict[CallSite, set[CallSite | None]] = defaultdict(set)
    for tape in tapes:
        last: CallSite | None = None
        for step in tape.steps:
            if step.site in cuts.eager:
                continue
            before[step.site].add(last)
            if last is not None:
                after[last].add(step.site)
            last = step.site
        if last is not None:
            after[last].add(None)
    for site, places in before.items():
        if len(places) > 1 or None in places:
            cuts.leaders.add(site)
    for site, places in after.items():
        if len(places) > 1:
            cuts.ends.add(site)


def cut_tape(tape: Tape, cuts: Cuts) -> Iterator[list[int]]:
    """Return the numbers of the steps of each pass. Finds new ends."""
    current: list[int] = []
    touched: set[object] = set()  # values that the pass computes
    inputs: set[object] = set()  # values that it reads
    for i, step in enumerate(tape.steps):
        if step.site in cuts.eager:
            is_reader = not touched.isdisjoint(step.operands)
            is_writer = step.writes and not inputs.isdisjoint(step.operands)
            if current and (is_reader or is_writer):
                last = tape.steps[current[-1]].site
                if last not in cuts.ends:
                    cuts.ends.add(last)
                    raise _Changed
            continue
        is_end = bool(current) and tape.steps[current[-1]].site in cuts.ends
        if current and (is_end or step.site in cuts.leaders):
            yield current
            current, touched, inputs = [], set(), set()
        current.append(i)
        inputs.update(step.operands)
        touched.update(step.results)
        is_end = step.site in cuts.ends
        if is_end:
            yield current
            current, touched, inputs = [], set(), set()
    if current:
        yield current


def find_read_values(
    tapes: Sequence[Tape], owners: Mapping[tuple[int, int], tuple[CallSite, int]]
) -> list[set[int]]:
    """Find the values of each tape that are read outside the pass that computes them, or still
    exist after the call.
    """
    found: list[set[int]] = []
    for t, tape in enumerate(tapes):
        makers: dict[int, tuple[CallSite, int] | None] = {}
        read = set(tape.alive)
        for i, step in enumerate(tape.steps):
            owner = owners.get((t, i))
            for value in step.operands:
                if isinstance(value, int) and (owner is None or makers.get(value) != owner):
                    read.add(value)
            makers.update(dict.fromkeys(step.results, owner))
        found.append(read)
    return found


def form_region(
    tapes: Sequence[Tape], passes: Sequence[Pass], read: Sequence[set[int]], cuts: Cuts
) -> Region:
    """Build the region with these passes.

    Raises:
        _Changed: the passes do not agree. The cuts were changed accordingly.
    """
    rows = [[tapes[each.tape].steps[i] for i in each.steps] for each in passes]
    inputs: dict[tuple[int, ...], int] = {}  # its value in each pass -> number of the input
    steps: list[RegionStep] = []
    # for each pass: value of the tape -> value of the region
    inside = [dict[int, int]() for _ in passes]
    count = 0
    for k, first in enumerate(rows[0]):
        column = [row[k] for row in rows]
        check_calls(column, cuts)
        sources: list[Source] = []
        for place in range(len(first.operands)):
            operands = [step.operands[place] for step in column]
            source = find_source(operands, inside)
            if source is None and any(isinstance(operand, ModelConstant) for operand in operands):
                refuse(first.site, cuts, OTHER_CONSTANT, OTHER_CONSTANT_ADVICE)
            if source is None:
                cuts.leaders.add(first.site)
                raise _Changed
            if isinstance(source, tuple):
                source = Input(inputs.setdefault(source, len(inputs)))
            sources.append(source)
        if first.target and not isinstance(sources[0], Inside):
            refuse(first.site, cuts, "it writes into a tensor from another part of the code", "")
        is_lent = first.is_same and not isinstance(sources[0], Inside)
        if is_lent and any(first.site in tapes[each.tape].rewritten for each in passes):
            refuse(first.site, cuts, "it returns a tensor that is written into", "")
        results = tuple(range(count, count + len(first.results)))
        count += len(results)
        for values, step in zip(inside, column, strict=True):
            values.update(zip(step.results, results, strict=True))
        steps.append(RegionStep(first, tuple(sources), results))
    forms: list[list[ValueForm]] = [[] for _ in range(count)]
    outputs: set[int] = set()
    for each, values in zip(passes, inside, strict=True):
        for value, number in values.items():
            forms[number].append(tapes[each.tape].forms[value])
            if value in read[each.tape]:
                outputs.add(number)
    of_inputs = [
        [tapes[each.tape].forms[value] for each, value in zip(passes, values, strict=True)]
        for values in inputs
    ]
    for of_one in (*forms, *of_inputs):
        if len({(len(form.shape), form.dtype) for form in of_one}) > 1:
            refuse(rows[0][0].site, cuts, RANK_VARIES)
    return Region(
        tuple(steps),
        tuple(map(join_forms, forms)),
        tuple(map(join_forms, of_inputs)),
        tuple(sorted(outputs)),
        tuple(passes),
    )


def check_calls(column: Sequence[TapeStep], cuts: Cuts) -> None:
    """Check that an operator has the same arguments in all passes, except tensors."""
    first = column[0]
    assert first.pure is not None
    for step in column[1:]:
        assert step.pure is not None
        if step.is_same != first.is_same:
            refuse(first.site, cuts, SOMETIMES_SAME)
        if step.form != first.form or not is_equal(step.pure.arguments, first.pure.arguments):
            refuse(first.site, cuts, VARIES, VARIES_ADVICE)


def refuse(site: CallSite, cuts: Cuts, reason: str, advice: str = "") -> None:
    """Leave an operator in PyTorch. Results found with the present cuts are no longer valid."""
    site.reason, site.advice = reason, advice
    cuts.eager.add(site)
    raise _Changed


def find_source(
    operands: Sequence[int | ModelConstant], inside: Sequence[Mapping[int, int]]
) -> Source | tuple[int, ...] | None:
    """Find an operand in all passes: a value of the region, a constant, or values from outside.

    None if its kind differs between passes.
    """
    kinds = {
        operand if isinstance(operand, ModelConstant) else values.get(operand)
        for operand, values in zip(operands, inside, strict=True)
    }
    if len(kinds) == 1:
        (kind,) = kinds
        if isinstance(kind, ModelConstant):
            return kind
        if kind is not None:
            return Inside(kind)
    if kinds != {None}:
        return None
    return tuple(operand for operand in operands if isinstance(operand, int))


def join_forms(forms: Sequence[ValueForm]) -> Form:
    """Join the forms of a value in all passes."""
    shapes = zip(*(form.shape for form in forms), strict=True)
    return Form(
        tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in shapes), forms[0].dtype
    )
