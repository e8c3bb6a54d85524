"""Dialect: lookup, which computes any function of 8-bit data from a table of 256 results."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx
from tvm.ir import Call
from tvm.relax import BlockBuilder

from relayquant.ir.dialect.construct import Operand, make_call
from relayquant.ir.dialect.layout import infer_layout_elementwise
from relayquant.ir.dialect.loops import BROADCAST, make_loops, name_hint
from relayquant.ir.dialect.operands import (
    BYTES,
    Argument,
    get_operands,
    is_known_different,
    make_tensor_type,
    show_dimension,
)
from relayquant.ir.dialect.operator import Operator
from relayquant.ir.dialect.parameters import compute_tensor

__all__ = ["lookup"]

LOOKUP_OPERANDS = (Argument("data"), Argument("table"))


# ---------------------------------------------------------------- constructor


def lookup(data: Operand, table: Operand) -> Call:
    """Read table[data] for int8 or uint8 data. The table is (256,) of any dtype.

    The result has the shape of data. Entry i of the table is for bit pattern i: int8 -1 reads entry
    255.
    """
    name = "lookup"
    return make_call(name, LOOKUP_OPERANDS, (data, table), None)


# ---------------------------------------------------------------- type


def infer_lookup(call: Call, _builder: Any) -> Any:
    """Infer 8-bit data and a table of 256 -> dtype of the table, shape of data."""
    data, table = get_operands(call, LOOKUP_OPERANDS)
    data.check_dtype(BYTES, "A table is indexed by 8 bits.")
    table.check_rank(1)
    if is_known_different(table.dimension(0), tirx.IntImm("int64", 256)):
        raise table.fail(
            f"has length {show_dimension(table.dimension(0))}",
            "allowed: 256 entries, entry i for the bit pattern i of data as uint8",
        )
    return make_tensor_type(data, table.dtype or "int8")


# ---------------------------------------------------------------- loop nest


def legalize_lookup(builder: BlockBuilder, call: Call) -> Any:
    """Read table[bit pattern of data as uint8].

    TVM treats a read at a computed position as opaque. With a constant table, FuseOps can treat
    this one as elementwise.
    """

    def te_lookup(data: te.Tensor, table: te.Tensor) -> te.Tensor:
        return compute_tensor(
            data.shape,
            lambda *i: table(data(*i).astype("uint8").astype("int32")),
            name=name_hint(call),
        )

    return make_loops(builder, call, te_lookup, call.args, pattern=BROADCAST)


OPERATORS: tuple[Operator, ...] = (
    Operator(
        "lookup",
        None,
        LOOKUP_OPERANDS,
        infer_lookup,
        legalize_lookup,
        infer_layout_elementwise,
        is_elementwise=True,
    ),
)
