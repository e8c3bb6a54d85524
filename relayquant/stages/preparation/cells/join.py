"""Joins the steps of a recurrent layer that a frontend unrolled: cells -> one operator of the
dialect for all steps.

    h1 = cell(x[0], h0), h2 = cell(x[1], h1), ...    ->    y = qnn.lstm(x @ W + b, R, h0)

`KINDS` lists how frontends write a cell. The steps must have the same weights and biases, each
takes the states of the step before, and no input depends on them. Other steps stay as they are,
with a reason.
"""

from __future__ import annotations

from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.rule import Skip, log_skip
from relayquant.stages.preparation.cells.chain import find_chain, gather_steps, reads_itself
from relayquant.stages.preparation.cells.linear import whole
from relayquant.stages.preparation.cells.steps import KINDS, CellReader
from relayquant.stages.preparation.cells.write import ChainWriter


def join_cells(editor: Editor) -> None:
    """Join all unrolled layers."""
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
            chain = find_chain(editor, kind, steps)
            if isinstance(chain, Skip):
                log_skip("join_cells", editor.names[var], chain)
            else:
                steps = chain.steps
                chains.append(chain)
            taken.update(each.hidden for each in steps)
    for chain in chains:
        if reads_itself(editor, chain):  # now that other layers are joined
            reason = Skip("an input depends on the state of a step before, by another layer")
            log_skip("join_cells", editor.names[chain.steps[-1].hidden], reason)
        else:
            ChainWriter(editor, chain).write()
