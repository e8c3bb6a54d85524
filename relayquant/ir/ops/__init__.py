"""The operator tables: one file per family, one row per pattern. The order is the priority: the
longest patterns come first.
"""

from relayquant.ir.ops.base import (
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
from relayquant.ir.ops.conv import CONV_OPS
from relayquant.ir.ops.dense import DENSE_OPS
from relayquant.ir.ops.elementwise import BINARY_OPS
from relayquant.ir.ops.lut import CHAIN_OPS, SLOPE_OPS, TABLE_OPS
from relayquant.ir.ops.pool import POOL_OPS
from relayquant.ir.ops.recurrent import RECURRENT_OPS
from relayquant.ir.ops.shape import SHAPE_OPS

#: every built-in pattern
BUILTIN_OPS: tuple[QuantOp, ...] = (
    *CONV_OPS, *DENSE_OPS, *CHAIN_OPS, *BINARY_OPS, *POOL_OPS, *TABLE_OPS, *SLOPE_OPS, *SHAPE_OPS,
    *RECURRENT_OPS,
)  # fmt: skip

__all__ = [
    "BUILTIN_OPS",
    "DynamicContext",
    "GroupedContext",
    "IntegerRows",
    "Kind",
    "Operand",
    "Output",
    "QuantOp",
    "Quantized",
    "RealizeContext",
    "SimulateContext",
]
