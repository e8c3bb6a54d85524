"""Dialect: importing this package makes TVM know the `relax.qnn.*` operators.

The one place where something is registered at import: TVM has no other way to learn of an operator.
A module that holds these operators compiles, prints, parses and loads from JSON wherever this
package was imported.
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

# What TVM knows outlives this module, which may be imported again.
register_operators(OPERATORS)

# An exception that crosses a C++ frame of TVM keeps its Python type only when it is registered.
tvm_ffi.register_error("QnnError", QnnError)

# `R.qnn.*`: the first module serves the decorators, the second tvm.script.from_source.
for _module in (_script, tvm.relax.script.parser):
    _module.qnn = qnn

__all__ = ["OPERATORS", "Operator", "qnn", "register_operators"]
