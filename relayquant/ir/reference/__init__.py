"""The reference: numpy forms of every operator and an interpreter. Compiled code must give the same
results.
"""

from relayquant.ir.reference.interpreter import run, run_values
from relayquant.ir.reference.lookup_table import build_table
from relayquant.ir.reference.unary import UNARY, UNARY_FUNCTIONS, Unary

__all__ = ["UNARY", "UNARY_FUNCTIONS", "Unary", "build_table", "run", "run_values"]
