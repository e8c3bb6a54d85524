"""The constants of a function."""

from __future__ import annotations

import math

from tvm import relax
from tvm.ir import GenericConst


def list_constants(func: relax.Function, least: int = 1) -> list[GenericConst]:
    """Constants of at least so many elements, each object once."""
    found: dict[GenericConst, None] = {}

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, GenericConst) and math.prod(expr.value.shape) >= least:
            found.setdefault(expr)

    relax.analysis.post_order_visit(func, visit)
    return list(found)
