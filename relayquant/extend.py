"""Everything that authors of operator rows, backends and observers need, from one import.

A row needs a name, the operator, a pattern with its operands, and a `realize`.
`BackendConfig.with_pattern` adds it to a backend. A `Rule` rewrites the float model before it is
planned, and `BackendConfig.with_fuser` adds it. An observer is a subclass of `Observer`, with a
subclass of `State`. Nothing is registered. `check_pattern` checks that a row means the same at
every stage.
"""

from relayquant.base.qtypes import Role
from relayquant.config.observers import Observer
from relayquant.config.observers.base import State
from relayquant.flow.testing.check import PatternMismatch, PatternReport, check_pattern
from relayquant.flow.testing.draw import ModelBuilder
from relayquant.ir.dialect import qnn
from relayquant.ir.ops import (
    BUILTIN_OPS,
    DynamicContext,
    GroupedContext,
    IntegerRows,
    Kind,
    Operand,
    Output,
    Quantized,
    QuantOp,
    RealizeContext,
    SimulateContext,
)
from relayquant.ir.reference.lookup_table import build_table
from relayquant.ir.rewrite import Emitter, Match, Pattern, Rule, Skip
from relayquant.stages.conversion import AffineRule

__all__ = [
    "BUILTIN_OPS",
    "AffineRule",
    "DynamicContext",
    "Emitter",
    "GroupedContext",
    "IntegerRows",
    "Kind",
    "Match",
    "ModelBuilder",
    "Observer",
    "Operand",
    "Output",
    "Pattern",
    "PatternMismatch",
    "PatternReport",
    "QuantOp",
    "Quantized",
    "RealizeContext",
    "Role",
    "Rule",
    "SimulateContext",
    "Skip",
    "State",
    "build_table",
    "check_pattern",
    "qnn",
]
