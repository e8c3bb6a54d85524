"""ONNX writer: run-time sizes, computed in ONNX from the shapes of tensors or read from integers,
and a table of writers for operators on them (see `operators`).

n               ->  Shape(x), the one axis of it that is n
n + 1, n // 2   ->  Add, Sub(n, Mod(n, 2)) / 2
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call

from relayquant.errors import ModelError
from relayquant.formats.writers.onnx.builder import OnnxBuilder
from relayquant.formats.writers.onnx.operators import ELEMENT, OnnxRow
from relayquant.ir.rewrite.graph import dim_name, static_size, tensor_dtype

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
    if symbol in builder.sizes:
        return builder.sizes[symbol]
    for var in builder.graph.order:
        name, shape = (
            builder.real.get(var) or builder.integers.get(var),
            getattr(var.ty, "shape", None),
        )
        sizes = shape.values if name and isinstance(shape, relax.ShapeExpr) else ()
        for axis, size in enumerate(sizes):
            if symbol.same_as(size):
                return builder.step("Shape", [name], base, start=axis, end=axis + 1)
    raise ModelError(
        f"export_onnx: {base!r} needs the size {dim_name(symbol)}, which no tensor before it has. "
        "Load the model with shapes of numbers.",
        code="RQ203",
    )


def read_shape(builder: OnnxBuilder, expr: relax.Expr) -> Sequence[Any]:
    """Return the sizes that an operand of an operator lists.

    Raises:
        ModelError: it does not list them.
    """
    value = builder.graph.values.get(expr, expr) if isinstance(expr, relax.Var) else expr
    found = value if isinstance(value, relax.ShapeExpr) else value.ty
    if getattr(found, "values", None) is None:
        raise ModelError(f"export_onnx: the sizes {expr} are not known.", code="RQ203")
    return found.values


def write_shape_to_tensor(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write sizes as a tensor, int64 (number of sizes,)."""
    sizes = write_sizes(builder, read_shape(builder, call.args[0]), f"{var.name}.sizes")
    return builder.emit("Identity", [sizes], var.name)


def write_tensor_to_shape(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write integers, int64 (number of sizes,), that `define_sizes` reads."""
    integers = builder.tensor(call.args[0], var.name)
    return builder.emit("Cast", [integers], var.name, to=ELEMENT["int64"])


def define_sizes(builder: OnnxBuilder, var: relax.Var, source: relax.Expr) -> None:
    """Write the symbolic sizes that a match_cast defines: a shape from integers. Those of a tensor
    are read from its own shape.
    """
    if not isinstance(var.ty, relax.ShapeType):
        return
    integers = builder.tensor(source, var.name)
    for at, size in enumerate(var.ty.values or ()):
        if isinstance(size, tirx.Var) and size not in builder.sizes:
            index = builder.constant(np.array([at], "int64"), f"{var.name}.index")
            builder.sizes[size] = builder.step("Gather", [integers, index], dim_name(size))


def write_filled(value: float | None, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Expand of one value: `value`, or the last operand."""
    shape = write_sizes(builder, var.ty.shape.values, f"{var.name}.shape")
    dtype = tensor_dtype(var)
    if value is not None:
        item = builder.constant(np.array(value).astype(dtype), f"{var.name}.value")
    else:
        item = builder.tensor(call.args[1], var.name)
        if tensor_dtype(call.args[1]) != dtype:
            item = builder.step("Cast", [item], f"{var.name}.value", to=ELEMENT[dtype])
    return builder.emit("Expand", [item, shape], var.name)


def write_range(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Range of integers, in the dtype of the result.

    Raises:
        ModelError: a bound is no integer.
    """
    if any(str(arg.ty.dtype).startswith("float") for arg in call.args):
        raise ModelError(
            f"export_onnx: the range {var.name!r} has bounds that are no integers.", code="RQ203"
        )
    bounds = [write_scalar(builder, arg, f"{var.name}.bound") for arg in call.args]
    dtype = tensor_dtype(var)
    if dtype == "int64":
        return builder.emit("Range", bounds, var.name)
    found = builder.step("Range", bounds, f"{var.name}.long")
    return builder.emit("Cast", [found], var.name, to=ELEMENT[dtype])


#: operators on sizes
SIZE_ROWS: dict[str, OnnxRow] = {
    "relax.shape_to_tensor": OnnxRow(write_shape_to_tensor),
    "relax.tensor_to_shape": OnnxRow(write_tensor_to_shape),
    "relax.arange": OnnxRow(write_range, "dtype"),
    "relax.full": OnnxRow(functools.partial(write_filled, None), "dtype"),
    "relax.full_like": OnnxRow(functools.partial(write_filled, None), "dtype"),
    "relax.zeros": OnnxRow(functools.partial(write_filled, 0), "dtype"),
    "relax.zeros_like": OnnxRow(functools.partial(write_filled, 0), "dtype"),
    "relax.ones": OnnxRow(functools.partial(write_filled, 1), "dtype"),
    "relax.ones_like": OnnxRow(functools.partial(write_filled, 1), "dtype"),
}
