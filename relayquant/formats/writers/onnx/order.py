"""ONNX writer: a table of writers for operators that put values in order, or go along an axis in
order (see `operators`).

argsort(x, descending)  ->  TopK of as many values as the axis has
cumprod(x)              ->  Scan(p, x): p' = p * x
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from onnx import helper
from tvm import relax, tirx
from tvm.ir import Call
from tvm.sym import Analyzer

from relayquant.errors import ModelError
from relayquant.formats.writers.onnx.builder import OnnxBuilder
from relayquant.formats.writers.onnx.operators import ELEMENT, OnnxRow, integers, write_flat
from relayquant.formats.writers.onnx.sizes import write_sizes
from relayquant.ir.rewrite.graph import call_name, tensor_dtype

#: Type -> a wider one for which ONNX Runtime has a kernel of TopK. Casts keep the values.
WIDE_ORDER = {
    "bool": "int32", "int8": "int32", "uint8": "int32", "int16": "int32", "uint16": "int32",
    "uint32": "int64", "float16": "float32",
}  # fmt: skip


def write_top(
    builder: OnnxBuilder,
    source: str,
    own: str,
    count: Any,
    outputs: tuple[str, str],
    dtype: str = "int64",
    **attrs: int,
) -> None:
    """Write TopK, where equal values keep their order.

    Args:
        builder: As of every writer.
        source, own: The values and their type.
        count: How many are written, a size.
        outputs: The tensors of values and indices. "" leaves one out.
        dtype: The type of the indices.
        attrs: Axis, and whether the largest is the first.
    """
    base = outputs[0] or outputs[1]
    wide = WIDE_ORDER.get(own)
    if wide:
        source = builder.step("Cast", [source], f"{base}.{wide}", to=ELEMENT[wide])
    found = [
        builder.unique_name(f"{base}.top") if is_cast or not name else name
        for name, is_cast in zip(outputs, (wide is not None, dtype != "int64"), strict=True)
    ]
    size = write_sizes(builder, [count], f"{base}.count")
    builder.add_node("TopK", [source, size], found, f"{base}/TopK", **attrs)
    for name, before, to in zip(outputs, found, (own, dtype), strict=True):
        if name not in ("", before):
            builder.emit("Cast", [before], name, to=ELEMENT[to])


def find_type(builder: OnnxBuilder, expr: relax.Expr) -> str:
    """Return the type of an operand's tensor, which is float for an accumulator."""
    return "float32" if builder.is_accumulator(expr) else tensor_dtype(expr)


def write_sort(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write all values of an axis in order (sort), or their indices (argsort)."""
    axis, data = int(call.attrs.axis), call.args[0]
    is_index = call_name(call) == "relax.argsort"
    write_top(
        builder,
        builder.tensor(data, var.name),
        find_type(builder, data),
        data.ty.shape.values[axis],
        ("", var.name) if is_index else (var.name, ""),
        tensor_dtype(var) if is_index else "int64",
        axis=axis,
        largest=int(bool(call.attrs.descending)),
    )
    return var.name


def write_topk(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write the first values of an axis in order, their indices, or both."""
    attrs, data, axis = call.attrs, call.args[0], int(call.attrs.axis)
    kind = str(attrs.ret_type)
    types = list(var.ty.fields) if kind == "both" else [var.ty]
    names = [var.name]
    if kind == "both":
        names = [builder.unique_name(f"{var.name}.{each}") for each in ("values", "indices")]
    write_top(
        builder,
        builder.tensor(data, var.name),
        find_type(builder, data),
        types[0].shape.values[axis],
        (names[0] if kind != "indices" else "", names[-1] if kind != "values" else ""),
        str(types[-1].dtype) if kind != "values" else "int64",
        axis=axis,
        largest=int(bool(attrs.largest)),
    )
    builder.parts[var] = names
    return var.name


def write_median(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write the last of the smaller half, and its index along an axis. Without an axis the result
    is the value alone.

    Raises:
        ModelError: it is over several axes.
    """
    data, axes, keeps = call.args[0], integers(call.attrs.axis or ()), bool(call.attrs.keepdims)
    if len(axes) > 1 or (not axes and keeps):
        raise ModelError(
            f"export_onnx: the median {var.name!r} is over "
            f"{f'the axes {axes}' if axes else 'all axes with keepdims'}; allowed: one axis, or "
            "all of them without keepdims.",
            code="RQ203",
        )
    axis, source = axes[0] if axes else 0, builder.tensor(data, var.name)
    count = data.ty.shape.values[axis]
    if not axes:
        source = write_flat(builder, source, var.name)
        count = prod(data.ty.shape.values, start=tirx.const(1, "int64"))
    count = Analyzer().simplify((count - 1) // 2 + 1)
    tops = [builder.unique_name(f"{var.name}.{each}") for each in ("lower", "places")]
    write_top(
        builder, source, find_type(builder, data), count, (tops[0], tops[1]), axis=axis, largest=0
    )
    names = [var.name]
    if axes:
        names = [builder.unique_name(f"{var.name}.{each}") for each in ("value", "index")]
    last = builder.constant(np.array([-1] if keeps else -1, "int64"), f"{var.name}.last")
    for top, name in zip(tops, names, strict=False):
        builder.emit("Gather", [top, last], name, axis=axis)
    builder.parts[var] = names
    return var.name


def write_cumprod(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Scan, whose state is the product so far. ONNX has sums of this kind only."""
    attrs, name, dtype = call.attrs, var.name, tensor_dtype(var)
    data = builder.tensor(call.args[0], name)
    axis = 0 if attrs.axis is None else int(attrs.axis) % var.ty.ndim
    if attrs.axis is None:
        data = write_flat(builder, data, name)
    if tensor_dtype(call.args[0]) != dtype:
        data = builder.step("Cast", [data], f"{name}.cast", to=ELEMENT[dtype])
    rest = [size for at, size in enumerate(var.ty.shape.values) if at != axis]
    one = builder.constant(np.ones((), dtype), f"{name}.one")
    if rest:
        one = builder.step(
            "Expand", [one, write_sizes(builder, rest, f"{name}.rest")], f"{name}.start"
        )
    before, item = (builder.unique_name(f"{name}.{each}") for each in ("before", "item"))
    with builder.collect() as nodes:
        after = builder.step("Mul", [before, item], f"{name}.after")
        result = builder.step("Identity", [before if attrs.exclusive else after], f"{name}.result")
    infos = [
        [helper.make_tensor_value_info(each, ELEMENT[dtype], None) for each in pair]
        for pair in ((before, item), (after, result))
    ]
    builder.add_node(
        "Scan",
        [one, data],
        [builder.unique_name(f"{name}.last"), name],
        f"{name}/Scan",
        body=helper.make_graph(nodes, f"{name}.step", *infos),
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_output_axes=[axis],
    )
    return name


#: operators that put values in order, or go along an axis in order
ORDER_ROWS: dict[str, OnnxRow] = {
    "relax.sort": OnnxRow(write_sort, "axis descending"),
    "relax.argsort": OnnxRow(write_sort, "axis descending dtype"),
    "relax.topk": OnnxRow(write_topk, "k axis ret_type largest dtype"),
    "relax.median": OnnxRow(write_median, "axis keepdims"),
    "relax.cumprod": OnnxRow(write_cumprod, "axis dtype exclusive"),
}
