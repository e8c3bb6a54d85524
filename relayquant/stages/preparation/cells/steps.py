"""Reads the steps of recurrent layers in an unrolled graph: values -> `CellStep`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.preparation.cells.linear import (
    LinearReader,
    LinearSum,
    PeeledRows,
    known_shape,
    whole,
)

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
