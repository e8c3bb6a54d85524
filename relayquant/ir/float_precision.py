"""The precision of float products that a module asks for, as an attribute of its model function.

Quantization writes it, compilation reads it. Files of modules keep it.
"""

from __future__ import annotations

import tvm

from relayquant.config import Precision
from relayquant.ir.rewrite.entry import attach_attrs, find_attrs

#: The attribute, with the value of a `Precision`.
FLOAT_PRECISION_ATTR = "relayquant.float_precision"
#: Attribute of a function: the name of an extent that counts many rows. If they are rounded to 8
#: bits for products with grouped weights, they may be rounded to bfloat16 instead, where the target
#: has tiles for it. So may the operands of their attention, where that is faster.
BF16_ROWS_ATTR = "relayquant.bf16_rows"


def ask_float_precision(mod: tvm.IRModule, precision: Precision) -> tvm.IRModule:
    """Return the module with another precision of its float products."""
    if precision is find_float_precision(mod):
        return mod
    return attach_attrs(mod, {FLOAT_PRECISION_ATTR: precision.value})


def find_float_precision(mod: tvm.IRModule) -> Precision:
    """Return the precision that a module asks for, float32 if it asks for none."""
    return Precision(str(find_attrs(mod).get(FLOAT_PRECISION_ATTR, Precision.FLOAT32.value)))
