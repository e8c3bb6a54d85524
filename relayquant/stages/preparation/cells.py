"""Joins the steps of a recurrent layer that a frontend unrolled: cells -> one operator of the
dialect for all steps.

    h1 = cell(x[0], h0), h2 = cell(x[1], h1), ...    ->    y = qnn.lstm(x @ W + b, R, h0)

`FORMS` lists how frontends write a cell. The steps must have the same weights and biases, each
takes the states of the step before, and no input depends on them. Other steps stay as they are,
with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value
from relayquant.ir.rewrite.moves import RESHAPES
from relayquant.ir.rewrite.rule import OnSkip, Skip
from relayquant.stages.preparation.linear import (
    LinearReader,
    LinearSum,
    LinearTerm,
    PeeledRows,
    known_shape,
    whole,
)
from relayquant.stages.preparation.tensors import make_const

#: (operator, forms of its operands), the name of a part, or a number. ("=", name, form) also names
#: the value itself.
Form = Any
#: Name of a part -> its rows.
Bound = Mapping[str, PeeledRows]


def call(op: str, *operands: Form) -> Form:
    return (f"relax.{op}", *operands)


def gate(name: str) -> Form:
    return call("sigmoid", name)


NEW = call("tanh", "new")
REST = call("subtract", 1.0, gate("update"))
CELL = call("add", call("multiply", gate("forget"), "cell"), call("multiply", gate("input"), NEW))


@dataclass(frozen=True)
class CellKind:
    """A recurrent cell.

    Attributes:
        layer: Constructor of the dialect.
        gates: Names of its gates, in the dialect's order.
        forms: How a step is written.
        first: How the first step is written if it begins with zeros.
        settings: Arguments of the constructor.
    """

    layer: Callable[..., Call]
    gates: tuple[str, ...]
    forms: tuple[Form, ...]
    first: tuple[Form, ...]
    settings: Mapping[str, Any]

    @property
    def roots(self) -> set[str]:
        """Operators that compute the hidden state."""
        return {form[0] for form in (*self.forms, *self.first)}


KINDS = (
    CellKind(
        qnn.lstm,
        ("input", "output", "forget", "new"),
        (call("multiply", gate("output"), call("tanh", ("=", "cell'", CELL))),),
        (
            call(
                "multiply",
                gate("output"),
                call("tanh", ("=", "cell'", call("multiply", gate("input"), NEW))),
            ),
        ),
        {},
    ),
    CellKind(
        qnn.gru,
        ("update", "reset", "new"),
        (
            call("add", call("multiply", gate("update"), "hidden"), call("multiply", REST, NEW)),
            call("add", call("multiply", call("subtract", "hidden", NEW), gate("update")), NEW),
        ),
        (call("multiply", REST, NEW),),
        {},
    ),
    CellKind(qnn.rnn, ("new",), (NEW,), (), {}),
    CellKind(qnn.rnn, ("new",), (call("nn.relu", "new"),), (), {"activations": ("relu",)}),
)
#: How the operand of a GRU's new gate has the reset gate.
RESET = call("multiply", gate("reset"), "inner")
COMMUTATIVE = ("relax.add", "relax.multiply")


@dataclass(frozen=True, eq=False)
class CellStep:
    """One step of a layer.

    Attributes:
        hidden: Its hidden state, a variable.
        cell: Its cell, a variable. None without one.
        before: Hidden state and cell that it takes. None: zeros.
        gates: Each gate without the product of the hidden state. A gate may be missing if a state
            is zero.
        state: Each gate's matrix (H, H) for the hidden state.
        inner: Of a GRU that resets the product of the hidden state: its bias (H,), else None.
    """

    hidden: relax.Var
    cell: relax.Var | None
    before: tuple[PeeledRows | None, PeeledRows | None]
    gates: Mapping[str, LinearSum]
    state: Mapping[str, np.ndarray]
    inner: np.ndarray | None = None


class CellReader:
    """Finds steps. Reads an editor that does not change meanwhile."""

    def __init__(self, editor: Editor) -> None:
        self.editor, self.linear = editor, LinearReader(editor)
        self.steps: dict[tuple[relax.Var, int], CellStep | None] = {}

    # -- forms -------------------------------------------------------------------------------------

    def match(self, form: Form, rows: PeeledRows | None, bound: Bound) -> Iterator[Bound]:
        """Iterate over the ways in which rows have a form."""
        rows = self.linear.peel(rows)
        if rows is None:
            return
        if isinstance(form, float):
            array = constant_value(rows.value)
            if array is not None and array.size and (array == form).all():
                yield bound
        elif isinstance(form, str):
            if known_shape(rows.value) is not None and bound.get(form, rows) == rows:
                yield {**bound, form: rows}
        elif form[0] == "=":
            for found in self.match(form[2], rows, bound):
                yield {**found, form[1]: rows}
        elif rows.axis is None and self.editor.op_name(rows.value) == form[0]:
            shape = known_shape(rows.value)
            operands = list(self.editor.call_of(rows.value).args)
            parts: list[PeeledRows | None] = []
            for operand in operands:
                size = constant_value(operand)
                part = whole(operand)
                if size is not None and size.size == 1:
                    parts.append(PeeledRows(operand, 0, 1))
                elif part is None or shape is None or part.width != shape[-1]:
                    return
                else:
                    parts.append(part.cut(rows.start, rows.width))
            yield from self.match_all(form[1:], parts, bound)
            if form[0] in COMMUTATIVE:
                yield from self.match_all(form[1:], parts[::-1], bound)

    def match_all(
        self, forms: Sequence[Form], parts: Sequence[PeeledRows | None], bound: Bound
    ) -> Iterator[Bound]:
        if not forms:
            yield bound
            return
        for found in self.match(forms[0], parts[0], bound):
            yield from self.match_all(forms[1:], parts[1:], found)

    # -- steps -------------------------------------------------------------------------------------

    def find(self, number: int, var: relax.Expr) -> CellStep | None:
        """Return the step of kind `number` whose hidden state is a variable."""
        if not isinstance(var, relax.Var) or self.editor.op_name(var) not in KINDS[number].roots:
            return None
        key = (var, number)
        if key not in self.steps:
            self.steps[key] = None  # a step does not read itself
            self.steps[key] = self.read(KINDS[number], number, var)
        return self.steps[key]

    def find_whole(self, number: int, rows: PeeledRows | None) -> CellStep | None:
        """Return the step of kind `number` whose hidden state these rows are, all of it."""
        step = None if rows is None else self.find(number, rows.value)
        return step if step is not None and is_whole(rows, step.hidden) else None

    def read(self, kind: CellKind, number: int, var: relax.Var) -> CellStep | None:
        for form in (*kind.forms, *kind.first):
            for bound in self.match(form, whole(var), {}):
                step = self.read_gates(kind, number, var, bound)
                if step is not None:
                    return step
        return None

    def read_gates(
        self, kind: CellKind, number: int, var: relax.Var, bound: Bound
    ) -> CellStep | None:
        units = known_shape(var)[-1]  # pyright: ignore[reportOptionalSubscript]
        given = [bound[name] for name in kind.gates if name in bound]
        if any(rows.width != units for rows in given):
            return None
        gates = {name: self.linear.read(bound[name]) for name in kind.gates if name in bound}
        hidden, inner, state = bound.get("hidden"), None, {}
        if kind.layer is qnn.gru:
            found = self.read_reset(gates["new"], hidden)
            if found is not None:
                gates["new"], reset, inner, matrix = found
                gates["reset"] = self.linear.read(reset)
                if matrix is not None:
                    state["new"] = matrix
        made = bound.get("cell'")
        if kind.layer is not qnn.gru:
            hidden = self.find_hidden(number, gates, bound.get("cell"))
        if hidden is not None and constant_value(hidden.value) is not None:
            hidden = hidden if constant_value(hidden.value).any() else None
        for name, linear in gates.items():
            own = [term for term in linear.terms if hidden is not None and term.rows == hidden]
            if len(own) > 1 or any(term.matrix is None for term in own):
                return None
            if own:
                state[name] = own[0].matrix
                rest = tuple(term for term in linear.terms if term is not own[0])
                gates[name] = replace(linear, terms=rest)
        cell = None if made is None else made.value
        if cell is not None and not isinstance(cell, relax.Var):
            return None
        return CellStep(var, cell, (hidden, bound.get("cell")), gates, state, inner)

    def find_hidden(
        self, number: int, gates: Mapping[str, LinearSum], cell: PeeledRows | None
    ) -> PeeledRows | None:
        """Find the hidden state among the operands of the gates: the step before made it, with the
        cell, or with the same weights. None in a step that begins with zeros.
        """
        has_cell = "forget" in KINDS[number].gates
        if has_cell and cell is None:
            return None
        for linear in gates.values():
            for term in linear.terms:
                step = self.find_whole(number, term.rows)
                if step is None or term.matrix is None:
                    continue
                if is_whole(cell, step.cell) if has_cell else has_weights(step, linear):
                    return term.rows
        return None

    def read_reset(
        self, new: LinearSum, hidden: PeeledRows | None
    ) -> tuple[LinearSum, PeeledRows, np.ndarray | None, np.ndarray | None] | None:
        """Find the reset gate in the new gate of a GRU.

        Returns (the new gate without it, the reset gate, bias, matrix of the hidden state). The
        bias is None if the hidden state is reset before its product.
        """
        for term in new.terms:
            for bound in self.match(RESET, term.rows, {}):
                rest = replace(new, terms=tuple(each for each in new.terms if each is not term))
                if term.matrix is not None:
                    if bound["inner"] == hidden:
                        return rest, bound["reset"], None, term.matrix
                    continue
                product = self.linear.read(bound["inner"])
                own = [each for each in product.terms if each.rows == hidden]
                if len(own) != len(product.terms) or len(own) > 1:
                    continue
                return rest, bound["reset"], product.bias, own[0].matrix if own else None
        return None


def is_whole(rows: PeeledRows | None, var: relax.Var | None) -> bool:
    """Whether rows are all of a value."""
    return rows is not None and var is not None and rows == whole(var)


def has_weights(step: CellStep, linear: LinearSum) -> bool:
    """Whether a step has some of these weights, for each of its operands."""
    matrices = [*step.state.values(), *(term.matrix for term in step.gates["new"].terms)]
    return all(
        any(
            term.matrix is not None and np.array_equal(matrix, term.matrix) for term in linear.terms
        )
        for matrix in matrices
        if matrix is not None
    )


# -- chains ----------------------------------------------------------------------------------------


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


def find_chain(
    editor: Editor, reader: CellReader, kind: CellKind, steps: list[CellStep]
) -> CellChain | Skip:
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
    """Return `CellChain.slots`. Each of `pairs` has the operands of a step, by those of the last
    step.
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


# -- operators -------------------------------------------------------------------------------------


class ChainWriter:
    """Emits the operator of a chain."""

    def __init__(self, editor: Editor, chain: CellChain) -> None:
        self.editor, self.chain, self.kind = editor, chain, chain.kind
        self.last = chain.steps[-1]
        self.name = editor.names[self.last.hidden]
        shape = known_shape(self.last.hidden)
        assert shape is not None
        self.units, self.batch = shape[-1], math.prod(shape[:-1])
        first = chain.slots[0][0]
        self.is_reversed = first[0].axis is not None and first[-1].at < first[0].at

    def define(self, expr: relax.Expr, what: str) -> relax.Var:
        return self.editor.define(self.last.hidden, expr, f"{self.name}.{what}")

    def in_order(self, values: Sequence[Any]) -> list[Any]:
        """Return values of the steps in the order of the sequence."""
        return list(reversed(values)) if self.is_reversed else list(values)

    def make_sequence(self, rows: Sequence[PeeledRows]) -> relax.Expr:
        """Return the inputs of all steps, (T, B, columns): only the columns of `rows` if they are
        in other places in other steps, else all columns of the values.
        """
        rows, count = self.in_order(rows), len(rows)
        first = rows[0]
        same = all(
            replace(first, at=first.at + at) == each and each.axis is not None
            for at, each in enumerate(rows)
        )
        shape = known_shape(first.value)
        assert shape is not None
        if first.axis is None or not same:
            places = {(each.start, known_shape(each.value)[-1:]) for each in rows}  # pyright: ignore[reportOptionalSubscript]
            parts = [self.take_row(each, is_cut=len(places) > 1) for each in rows]
            return self.define(relax.op.concat(parts, 0), "inputs") if count > 1 else parts[0]
        data, axis = first.value, first.axis
        if count != shape[axis]:
            cut = relax.op.strided_slice(data, [axis], [first.at], [first.at + count])
            data = self.define(cut, "inputs")
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 : -1])
        if before > 1:
            data = self.reshape(data, (before, count, after, shape[-1]), "inputs")
            data = self.define(relax.op.permute_dims(data, [1, 0, 2, 3]), "inputs")
        return self.reshape(data, (count, self.batch, shape[-1]), "inputs")

    def take_row(self, rows: PeeledRows, *, is_cut: bool) -> relax.Expr:
        """Return the rows of one step, (1, B, columns). `is_cut`: not all columns of the value."""
        data, shape = rows.value, known_shape(rows.value)
        assert shape is not None
        if rows.axis is not None:
            cut = relax.op.strided_slice(data, [rows.axis], [rows.at], [rows.at + 1])
            data = self.define(cut, "input")
        data = self.reshape(data, (1, self.batch, shape[-1]), "input")
        if is_cut and rows.width != shape[-1]:
            cut = relax.op.strided_slice(data, [2], [rows.start], [rows.start + rows.width])
            data = self.define(cut, "input")
        return data

    def reshape(self, data: relax.Expr, shape: tuple[int, ...], what: str) -> relax.Expr:
        if known_shape(data) == shape:
            return data
        return self.define(relax.op.reshape(data, shape), what)

    def make_gates(self) -> relax.Expr:
        """Return the gates of all steps without the hidden state, (T, B, gates * H)."""
        total = None
        for rows, terms in self.chain.slots:
            sequence = self.make_sequence(rows)
            is_product = all(term.matrix is not None for term in terms.values())
            part = (
                self.multiply(sequence, rows[-1], terms)
                if is_product
                else self.select(sequence, terms)
            )
            total = part if total is None else self.define(relax.op.add(total, part), "gates")
        bias = np.concatenate([self.last.gates[name].bias for name in self.kind.gates])
        if bias.any():
            total = self.define(relax.op.add(total, make_const(bias, "float32")), "gates")
        assert total is not None
        return total

    def multiply(
        self, sequence: relax.Expr, rows: PeeledRows, terms: Mapping[str, LinearTerm]
    ) -> relax.Expr:
        width = known_shape(sequence)[-1]  # pyright: ignore[reportOptionalSubscript]
        start = 0 if width == rows.width else rows.start
        matrix = np.zeros((width, len(self.kind.gates), self.units), "float32")
        for at, name in enumerate(self.kind.gates):
            if name in terms:
                matrix[start : start + rows.width, at] = terms[name].matrix
        weight = make_const(matrix.reshape(width, -1), "float32")
        return self.define(relax.op.matmul(sequence, weight), "gates")

    def select(self, sequence: relax.Expr, terms: Mapping[str, LinearTerm]) -> relax.Expr:
        parts = []
        for name in self.kind.gates:
            start = terms[name].rows.start
            cut = relax.op.strided_slice(sequence, [2], [start], [start + self.units])
            parts.append(self.define(cut, "gate"))
        return self.define(relax.op.concat(parts, 2), "gates") if len(parts) > 1 else parts[0]

    def find_state(self, rows: PeeledRows | None) -> relax.Expr | None:
        """Return an initial state, (B, H). None for zeros."""
        if rows is None:
            return None
        array = constant_value(rows.value)
        if array is not None and not array.any():
            return None
        if array is not None and is_row(rows):
            row = array.reshape(-1)[rows.start : rows.start + rows.width]
            return make_const(np.broadcast_to(row, (self.batch, self.units)), "float32")
        return self.reshape(self.take_row(rows, is_cut=True), (self.batch, self.units), "state")

    def write(self) -> None:
        """Replace the states of all steps by slices of one operator's result."""
        steps, kind = self.chain.steps, self.kind
        settings: dict[str, Any] = {**kind.settings, "is_reversed": self.is_reversed}
        for name, rows in zip(("hidden", "cell"), steps[0].before, strict=True):
            state = self.find_state(rows)
            if state is not None:
                settings[name] = state
        if self.last.inner is not None:
            settings["linear_before_reset"] = True
            if self.last.inner.any():
                settings["hidden_bias"] = make_const(self.last.inner, "float32")
        recurrence = np.concatenate([self.last.state[name] for name in kind.gates], 1)
        gates = self.make_gates()
        layer = kind.layer(gates, make_const(recurrence, "float32"), **settings)
        values = self.define(layer, kind.layer.__name__)
        states = 1 if self.last.cell is None else 2
        hiddens = self.in_order([step.hidden for step in steps])
        self.replace_stack(values, states, hiddens)
        for at, step in reversed(list(enumerate(steps))):
            if step.hidden not in self.editor.values:
                continue
            place = len(steps) - 1 - at if self.is_reversed else at
            first = 0 if step is self.last else states + place
            self.put(step.hidden, relax.op.strided_slice(values, [0], [first], [first + 1]))
        if self.last.cell is not None and self.last.cell in self.editor.values:
            self.put(self.last.cell, relax.op.strided_slice(values, [0], [1], [2]))

    def put(self, var: relax.Var, value: relax.Expr) -> None:
        """Replace a state (..., H) by a slice (1, B, H)."""
        shape = known_shape(var)
        assert shape is not None
        self.editor.redefine(var, relax.op.reshape(self.define(value, "state"), shape))

    def replace_stack(self, values: relax.Expr, states: int, hiddens: list[relax.Var]) -> None:
        """Replace a concatenation of all hidden states, in either order, by one slice."""
        reader, editor, count = LinearReader(self.editor), self.editor, len(hiddens)
        for var in sorted(
            find_readers_through_reshapes(editor, hiddens[0]), key=lambda each: editor.names[each]
        ):
            operands = editor.call_of(var).args[0].fields
            found = [reader.peel(whole(operand)) for operand in operands]
            given = [
                None if rows is None or rows.axis is not None else rows.value for rows in found
            ]
            if given not in (hiddens, hiddens[::-1]) or count < 2:
                continue
            shape, axis = known_shape(operands[0]), int(editor.call_of(var).attrs.axis)
            assert shape is not None
            axis %= len(shape)
            data = self.define(
                relax.op.strided_slice(values, [0], [states], [states + count]), "states"
            )
            if given != hiddens:
                data = self.define(relax.op.flip(data, 0), "states")
            before = math.prod(shape[:axis])
            if before > 1:
                size = (count, before, math.prod(shape[axis:]))
                data = self.reshape(data, size, "states")
                data = self.define(relax.op.permute_dims(data, [1, 0, 2]), "states")
            whole_shape = (*shape[:axis], count * shape[axis], *shape[axis + 1 :])
            editor.redefine(var, relax.op.reshape(data, whole_shape))


def find_readers_through_reshapes(editor: Editor, var: relax.Var) -> set[relax.Var]:
    """Return the concatenations that read a value, directly or through reshapes."""
    found, waiting = set(), [var]
    while waiting:
        for user in editor.users(waiting.pop()):
            name = editor.op_name(user)
            if name == "relax.concat":
                found.add(user)
            elif name in RESHAPES:
                waiting.append(user)
    return found


def join_cells(editor: Editor, on_skip: OnSkip) -> bool:
    """Join all unrolled layers. Returns whether there was one."""
    reader, chains, taken = CellReader(editor), [], set()
    for var in editor.order():  # sums of hundreds of terms are read without recursion
        rows = whole(var)
        if rows is not None and editor.op_name(var) == "relax.add":
            reader.linear.read(rows)
    for number, kind in enumerate(KINDS):
        order = editor.order()
        for var in order:  # forwards: each step finds the one before it without recursion
            reader.find(number, var)
        for var in reversed(order):
            step = None if var in taken else reader.find(number, var)
            if step is None:
                continue
            steps = gather_steps(reader, number, step)
            if len(steps) < 2:
                continue
            chain = find_chain(editor, reader, kind, steps)
            if isinstance(chain, Skip):
                on_skip("join_cells", editor.names[var], chain)
            else:
                steps = chain.steps
                chains.append(chain)
            taken.update(each.hidden for each in steps)
    for chain in chains:
        if reads_itself(editor, chain):  # now that other layers are joined
            reason = Skip("an input depends on the state of a step before, by another layer")
            on_skip("join_cells", editor.names[chain.steps[-1].hidden], reason)
        else:
            ChainWriter(editor, chain).write()
    return bool(chains)
