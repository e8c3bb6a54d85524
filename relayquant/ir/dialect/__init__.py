"""Dialect: importing this package makes TVM know the `relax.qnn.*` operators.

Besides the operators, only types of exceptions are registered at import. TVM has no other way to
learn of an operator. A process must import this package before it compiles, prints, parses or loads
a module with these operators.
"""

from __future__ import annotations

import tvm
import tvm.relax.script.parser
import tvm_ffi
from tvm.relax import script as _script

from relayquant.errors import QnnError
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.operator import Operator, register_operators
from relayquant.ir.dialect.qnn import OPERATORS

# TVM keeps its registrations when this module is imported a second time.
register_operators(OPERATORS)

# An exception keeps its Python type across a C++ frame of TVM only if the type is registered.
# Ctrl-C in a pass written in Python would be a RuntimeError without a text.
for _error in (QnnError, KeyboardInterrupt, SystemExit):
    tvm_ffi.register_error(_error.__name__, _error)

# `R.qnn.*`: the decorators use the first module, tvm.script.from_source uses the second.
for _module in (_script, tvm.relax.script.parser):
    _module.qnn = qnn

__all__ = ["OPERATORS", "Operator", "qnn", "register_operators"]
