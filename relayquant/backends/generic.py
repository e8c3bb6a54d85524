"""Any CPU that LLVM knows: activations of 8 bits of either sign, or of 16; unsigned by default.

What no kernel takes (16 bits) runs by the exact default legalization: same integers, less speed.
"""

from __future__ import annotations

from relayquant.backends.defaults import WEIGHT_INT8, activation_config
from relayquant.config import BackendConfig, DTypeConfig, PatternConfig, QConfig
from relayquant.ops import BUILTIN_OPS, QuantOp
from relayquant.ops.lut import CHAIN_OPS, LUT_OPS

BYTES = ("uint8", "int8")

#: input and output may differ, so that precision can be mixed within one model
GENERIC_DTYPES = tuple(
    DTypeConfig(input=data, output=result, weight="int8")
    for data in (*BYTES, "int16")
    for result in (data, *(other for other in (*BYTES, "int16") if other != data))
)

#: a table has one entry for each of 256 inputs
TABLE_DTYPES = tuple(row for row in GENERIC_DTYPES if row.constraints("input").dtype in BYTES)
#: operators whose integer form has the dtype of its operands
SAME_DTYPES = tuple(
    row for row in GENERIC_DTYPES if row.constraints("input") == row.constraints("output")
)
SAME_OPS = ("relax.nn.avg_pool2d", "relax.concat", "relax.nn.leakyrelu")


def find_dtypes(op: QuantOp) -> tuple[DTypeConfig, ...]:
    """What the integer form of a built-in operator runs."""
    if op.op in SAME_OPS:
        return SAME_DTYPES
    return TABLE_DTYPES if op in (*CHAIN_OPS, *LUT_OPS) else GENERIC_DTYPES


GENERIC = BackendConfig(
    name="generic",
    patterns=tuple(PatternConfig(op, find_dtypes(op)) for op in BUILTIN_OPS),
    default_qconfig=QConfig(activation=activation_config("uint8"), weight=WEIGHT_INT8),
)
