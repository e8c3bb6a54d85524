"""Reference: numpy semantics of every operator, an interpreter; compiled code must equal them."""

from relayquant.reference.interpreter import run, run_values
from relayquant.reference.lookup_table import UNARY_FUNCTIONS, build_table

__all__ = ["UNARY_FUNCTIONS", "build_table", "run", "run_values"]
