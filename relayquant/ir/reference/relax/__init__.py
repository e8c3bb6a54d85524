"""Numpy forms of the usual Relax operators, as rows of one table for the interpreter."""

from __future__ import annotations

from relayquant.ir.reference.relax import neural, tensors, vision
from relayquant.ir.reference.relax.attributes import OperatorFunction
from relayquant.ir.reference.unary import RELAX_UNARY

#: Name of the operator without "relax." -> its numpy form.
OPERATORS: dict[str, OperatorFunction] = {
    **{row.relax: row.evaluate for row in RELAX_UNARY.values()},
    **tensors.OPERATORS,
    **neural.OPERATORS,
    **vision.OPERATORS,
}

__all__ = ["OPERATORS"]
