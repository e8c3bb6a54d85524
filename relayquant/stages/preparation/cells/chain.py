"""Checks that the steps of a layer are alike: `CellStep`s -> `CellChain`, or why not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax

from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value
from relayquant.ir.rewrite.rule import Skip
from relayquant.stages.preparation.cells.linear import LinearTerm, PeeledRows, known_shape, whole
from relayquant.stages.preparation.cells.steps import CellKind, CellReader, CellStep, is_whole


@dataclass(frozen=True, eq=False)
class CellChain:
    """Steps of one layer, the first one first.

    Attributes:
        kind: Its kind.
        steps: All steps.
        slots: For each operand of the gates: (its rows in each step, matrix of each gate).
    """

    kind: CellKind
    steps: tuple[CellStep, ...]
    slots: tuple[tuple[tuple[PeeledRows, ...], Mapping[str, LinearTerm]], ...]


def gather_steps(reader: CellReader, number: int, last: CellStep) -> list[CellStep]:
    """Return the steps up to the last one, each of which takes the states of the one before."""
    steps = [last]
    while True:
        hidden, cell = steps[0].before
        step = reader.find_whole(number, hidden)
        if step is None or (cell is not None and not is_whole(cell, step.cell)):
            return steps
        steps.insert(0, step)


def find_start(step: CellStep, last: CellStep) -> CellStep:
    """Find the initial hidden state of the first step: it has the weights of the state."""
    if step.before[0] is not None or any(
        len(linear.terms) != len(last.gates[name].terms) + 1 for name, linear in step.gates.items()
    ):
        return step
    found = {
        name: [
            term
            for term in linear.terms
            if term.matrix is not None and np.array_equal(term.matrix, last.state[name])
        ]
        for name, linear in step.gates.items()
    }
    rows = {term.rows for terms in found.values() for term in terms}
    if len(rows) != 1 or any(len(terms) != 1 for terms in found.values()):
        return step
    gates = {
        name: replace(
            linear, terms=tuple(term for term in linear.terms if term is not found[name][0])
        )
        for name, linear in step.gates.items()
    }
    state = {name: terms[0].matrix for name, terms in found.items() if terms[0].matrix is not None}
    return replace(step, before=(rows.pop(), step.before[1]), gates=gates, state=state)


def pair_terms(step: CellStep, last: CellStep) -> dict[PeeledRows, PeeledRows] | Skip:
    """Return for each operand of the last step which one it is in this step."""
    found: dict[PeeledRows, PeeledRows] = {}
    for name, linear in step.gates.items():
        wanted = last.gates[name]
        scale = max(1e-3, np.abs(wanted.bias).max(initial=0))
        if np.abs(linear.bias - wanted.bias).max(initial=0) > 1e-6 * scale:
            return Skip(f"the {name} gates have different biases")
        terms = list(linear.terms)
        if len(terms) != len(wanted.terms):
            return Skip(f"the {name} gates have different operands")
        for term in wanted.terms:
            same = [each for each in terms if is_same(each, term)]
            same = [each for each in same if found.get(term.rows, each.rows) == each.rows]
            if not same:
                return Skip(f"the {name} gates have different weights")
            found[term.rows] = same[0].rows
            terms.remove(same[0])
    for name, matrix in step.state.items():
        if name not in last.state or not np.array_equal(matrix, last.state[name]):
            return Skip(f"the {name} gates have different weights for the hidden state")
    if step.before[0] is not None and len(step.state) != len(last.state):
        return Skip("a gate does not take the hidden state")
    if (step.inner is None) != (last.inner is None) and "reset" in step.gates:
        return Skip("the reset gates are applied in different places")
    if step.inner is None and last.inner is not None and last.inner.any():
        return Skip("the biases of the hidden state differ")
    if step.inner is not None and not np.allclose(step.inner, last.inner, rtol=1e-6, atol=1e-9):
        return Skip("the biases of the hidden state differ")
    return found


def is_same(left: LinearTerm, right: LinearTerm) -> bool:
    """Whether two terms have the same matrix, or the same columns of rows."""
    if left.matrix is None or right.matrix is None:
        same = left.matrix is None and right.matrix is None
        return same and (left.rows.start, left.rows.width) == (right.rows.start, right.rows.width)
    return left.rows.width == right.rows.width and np.array_equal(left.matrix, right.matrix)


def find_chain(editor: Editor, kind: CellKind, steps: list[CellStep]) -> CellChain | Skip:
    """Check that steps are alike."""
    last = steps[-1]
    if set(last.gates) != set(kind.gates) or set(last.state) != set(kind.gates):
        return Skip("a gate does not take the hidden state")
    steps, pairs = [find_start(steps[0], last), *steps[1:]], []
    for at, step in enumerate(steps):
        pair = pair_terms(step, last)
        if isinstance(pair, Skip):
            if len(steps) - at < 3:
                return pair
            pairs = []  # a step of another layer, or unlike the others: this layer begins later
        else:
            pairs.append(pair)
    steps = steps[len(steps) - len(pairs) :]
    slots = find_slots(last, pairs)
    if isinstance(slots, Skip):
        return slots
    chain = CellChain(kind, tuple(steps), tuple(slots))
    if reads_itself(editor, chain):
        return Skip("an input depends on the state of a step before")
    count = count_rows(PeeledRows(last.hidden, 0, 0))
    for given, _ in slots:
        if any(count_rows(rows) != count for rows in given):
            return Skip("an input has another number of rows")
    for rows in steps[0].before:
        if rows is not None and count_rows(rows) != count and not is_row(rows):
            return Skip("an initial state has another number of rows")
    for step in steps[:-1]:
        if step.cell is not None and len(editor.users(step.cell)) > 2:
            return Skip("the cell of a step is read outside of the layer")
    return chain


def find_slots(
    last: CellStep, pairs: Sequence[Mapping[PeeledRows, PeeledRows]]
) -> list[tuple[tuple[PeeledRows, ...], Mapping[str, LinearTerm]]] | Skip:
    """Return `CellChain.slots`. `pairs`: for each step, operand of the last step -> its operand in
    the same place.
    """
    groups: dict[PeeledRows, dict[str, LinearTerm]] = {}
    for name, linear in last.gates.items():
        for term in linear.terms:
            terms = groups.setdefault(find_source(term, term.rows), {})
            if name in terms:
                return Skip(f"the {name} gate reads an input twice")
            terms[name] = term
    slots = []
    for terms in groups.values():
        if len({term.matrix is None for term in terms.values()}) > 1:
            return Skip("an input is both multiplied and added")
        given = []
        for pair in pairs:
            found = [(term, pair.get(term.rows)) for term in terms.values()]
            sources = {find_source(term, rows) for term, rows in found if rows is not None}
            if len(sources) != 1:
                return Skip("the gates of a step read different inputs, or lack one")
            given.append(sources.pop())
        if any(term.matrix is None for term in terms.values()):
            if terms.keys() != last.gates.keys():
                return Skip("an input is added to some of the gates only")
            if len({rows.width for rows in given}) > 1:
                return Skip("an input has another number of columns")
        slots.append((tuple(given), terms))
    return slots or Skip("no step has an input")


def find_source(term: LinearTerm, rows: PeeledRows) -> PeeledRows:
    """Return what a term reads: the rows, or all columns where each gate adds some of them."""
    everything = whole(rows.value)
    if term.matrix is not None or everything is None:
        return rows
    return replace(rows, start=0, width=everything.width)


def reads_itself(editor: Editor, chain: CellChain) -> bool:
    """Whether an input or an initial state depends on a state of the chain."""
    states = [var for step in chain.steps for var in (step.hidden, step.cell) if var is not None]
    inside = find_readers(editor, [var for var in states if var in editor.values])
    given = [*chain.steps[0].before, *(rows for each, _ in chain.slots for rows in each)]
    return any(rows is not None and rows.value in inside for rows in given)


def is_row(rows: PeeledRows) -> bool:
    """Whether this is a constant row, which is the same for all samples."""
    is_constant = constant_value(rows.value) is not None
    return is_constant and rows.axis is None and count_rows(rows) == 1


def count_rows(rows: PeeledRows) -> int:
    shape = known_shape(rows.value) or (0,)
    count = math.prod(shape[:-1])
    return count if rows.axis is None else count // max(1, shape[rows.axis])


def find_readers(editor: Editor, first: Sequence[relax.Var]) -> set[relax.Var]:
    """Return all values that depend on these, and these."""
    found, waiting = set(first), list(first)
    while waiting:
        for user in editor.users(waiting.pop()):
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found
