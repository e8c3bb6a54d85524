"""Replaces the steps of a layer by one operator of the dialect: `CellChain` -> bindings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax

from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.graph import constant_value
from relayquant.ir.rewrite.moves import RESHAPES
from relayquant.stages.preparation.cells.chain import CellChain, is_row
from relayquant.stages.preparation.cells.linear import (
    LinearReader,
    LinearTerm,
    PeeledRows,
    known_shape,
    whole,
)
from relayquant.stages.preparation.rules.tensors import make_const


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
            if var not in editor.values:  # only steps read it, and those are replaced
                continue
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
