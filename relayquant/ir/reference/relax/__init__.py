"""Numpy forms of Relax operators, as rows of one table for the interpreter and for training.

`row` describes the rows.
"""

from __future__ import annotations

from relayquant.ir.reference.relax import neural, places, tensors
from relayquant.ir.reference.relax.numpy_library import Numpy
from relayquant.ir.reference.relax.row import OperatorFunction, Row, bind_rows

ROWS: tuple[Row, ...] = (*tensors.ROWS, *places.ROWS, *neural.ROWS)

#: Name of the operator without "relax." -> its numpy form.
OPERATORS: dict[str, OperatorFunction] = bind_rows(ROWS, Numpy())

__all__ = ["OPERATORS", "ROWS"]
