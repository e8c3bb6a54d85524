"""Relay reader: the operator table, one row per operator, in files by family.

To add an operator, write one row with its converter, and one case in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping

from relayquant.relay.operators.base import RelayOp
from relayquant.relay.operators.elementwise import ELEMENTWISE_OPS
from relayquant.relay.operators.index import INDEX_OPS
from relayquant.relay.operators.linear import LINEAR_OPS
from relayquant.relay.operators.pool import POOL_OPS
from relayquant.relay.operators.quantized import QUANTIZED_OPS
from relayquant.relay.operators.reduce import REDUCE_OPS
from relayquant.relay.operators.shape import SHAPE_OPS

#: Operator name -> its row.
OPERATORS: Mapping[str, RelayOp] = {
    row.name: row
    for family in (
        LINEAR_OPS,
        POOL_OPS,
        ELEMENTWISE_OPS,
        SHAPE_OPS,
        REDUCE_OPS,
        INDEX_OPS,
        QUANTIZED_OPS,
    )
    for row in family
}

__all__ = ["OPERATORS", "RelayOp"]
