"""ONNX writer: run-time sizes, computed in ONNX from the shapes of tensors.

n               ->  Shape(x), the one axis of it that is n
n + 1, n // 2   ->  Add, Sub(n, Mod(n, 2)) / 2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx

from relayquant.errors import ModelError
from relayquant.formats.writers.onnx_builder import OnnxBuilder
from relayquant.ir.rewrite.graph import dim_name, static_size

#: size operators of ONNX
ARITHMETIC: dict[type, str] = {
    tirx.Add: "Add",
    tirx.Sub: "Sub",
    tirx.Mul: "Mul",
    tirx.FloorMod: "Mod",
    tirx.Min: "Min",
    tirx.Max: "Max",
}


def write_sizes(builder: OnnxBuilder, sizes: Sequence[Any], base: str) -> str:
    """Write sizes as a tensor, int64 (number of sizes,). A constant if all are known.

    Raises:
        ModelError: a size is not the size of a written tensor, or is computed by an unsupported
            operator.
    """
    known = [static_size(size) for size in sizes]
    if None not in known:
        return builder.constant(np.array(known, "int64"), base)
    parts = [write_size(builder, size, base) for size in sizes]
    return parts[0] if len(parts) == 1 else builder.step("Concat", parts, base, axis=0)


def write_size(builder: OnnxBuilder, size: Any, base: str) -> str:
    """Write a size as a tensor, int64 (1,).

    Raises:
        ModelError: see `write_sizes`.
    """
    known = static_size(size)
    if known is not None:
        return builder.constant(np.array([known], "int64"), base)
    if isinstance(size, tirx.Var):
        return write_extent(builder, size, base)
    if isinstance(size, tirx.FloorDiv):
        # Div rounds towards zero, so the dividend is first made a multiple of the divisor.
        left, right = (write_size(builder, part, base) for part in (size.a, size.b))
        rest = builder.step("Mod", [left, right], base)
        return builder.step("Div", [builder.step("Sub", [left, rest], base), right], base)
    op = ARITHMETIC.get(type(size))
    if op is None:
        raise ModelError(
            f"export_onnx: {base!r} needs the size {size}, which is computed by "
            f"{type(size).__name__}; allowed: sums, differences, products, quotients, remainders, "
            "minima and maxima. Load the model with shapes of numbers.",
            code="RQ203",
        )
    return builder.step(op, [write_size(builder, part, base) for part in (size.a, size.b)], base)


def write_scalar(builder: OnnxBuilder, size: Any, base: str) -> str:
    """Write a size as a tensor, int64 ()."""
    known = static_size(size)
    if known is not None:
        return builder.constant(np.array(known, "int64"), base)
    axes = builder.constant(np.array([0], "int64"), base)
    return builder.step("Squeeze", [write_size(builder, size, base), axes], base)


def write_extent(builder: OnnxBuilder, symbol: tirx.Var, base: str) -> str:
    """Write a symbolic dimension as a tensor, int64 (1,): the size of a tensor that was already
    written.
    """
    for var in builder.graph.order:
        name = builder.real.get(var) or builder.integers.get(var)
        sizes = var.ty.shape.values if name and isinstance(var.ty.shape, relax.ShapeExpr) else ()
        for axis, size in enumerate(sizes):
            if symbol.same_as(size):
                return builder.step("Shape", [name], base, start=axis, end=axis + 1)
    raise ModelError(
        f"export_onnx: {base!r} needs the size {dim_name(symbol)}, which no tensor before it has. "
        "Load the model with shapes of numbers.",
        code="RQ203",
    )
