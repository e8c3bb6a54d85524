"""ONNX writer: a table of writers for operators that read or write at places that are computed from
indices or sizes (see `operators`).

index_tensor(x, (i, j))      ->  GatherND(x, [i, j])
adaptive_avg_pool(x, (3,))   ->  MatMul(x, m), where m[:, i] is 1 / count in window i, else 0
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.errors import ModelError, format_count
from relayquant.formats.writers.onnx.builder import OnnxBuilder
from relayquant.formats.writers.onnx.data_movement import long_indices
from relayquant.formats.writers.onnx.operators import (
    ELEMENT,
    OnnxRow,
    in_channels_first,
    list_operands,
    write_flat,
)
from relayquant.formats.writers.onnx.sizes import write_scalar, write_sizes
from relayquant.ir.rewrite.graph import static_size, tensor_dtype


def list_indices(builder: OnnxBuilder, var: relax.Var, expr: relax.Expr) -> list[relax.Expr]:
    """List the index arrays of an operator, one for each of the first axes.

    Raises:
        ModelError: they are no literal tuple, or are bool.
    """
    fields = list_operands(builder, var, expr)
    if any(tensor_dtype(each) == "bool" for each in fields):
        raise ModelError(
            f"export_onnx: the indices of {var.name!r} have no form in ONNX; allowed: integers.",
            code="RQ203",
        )
    return fields


def write_index_vectors(
    builder: OnnxBuilder, var: relax.Var, indices: list[relax.Expr], shape: str
) -> str:
    """Write index arrays as one tensor whose last axis goes over the axes of the data, expanded to
    a shape.
    """
    last, parts = builder.constant(np.array([-1], "int64"), f"{var.name}.last"), []
    for index in indices:
        wide = builder.step("Expand", [long_indices(builder, index, var.name), shape], var.name)
        parts.append(builder.step("Unsqueeze", [wide, last], f"{var.name}.index"))
    return builder.step("Concat", parts, f"{var.name}.indices", axis=-1)


def write_index_tensor(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write GatherND at index arrays that broadcast.

    Raises:
        ModelError: see `list_indices`.
    """
    data, fields = call.args[0], list_indices(builder, var, call.args[1])
    rank = var.ty.ndim - (data.ty.ndim - len(fields))
    shape = write_sizes(builder, list(var.ty.shape.values)[:rank], f"{var.name}.shape")
    vectors = write_index_vectors(builder, var, fields, shape)
    return builder.emit("GatherND", [builder.tensor(data, var.name), vectors], var.name)


def write_repeat(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write each element several times: Unsqueeze, Tile, Reshape."""
    data, times, axis = builder.tensor(call.args[0], var.name), int(call.attrs.repeats), 0
    if call.attrs.axis is None:
        data = write_flat(builder, data, var.name)
    else:
        axis = int(call.attrs.axis) % var.ty.ndim
    behind = builder.constant(np.array([axis + 1], "int64"), f"{var.name}.axis")
    counts = [1] * (var.ty.ndim + 1)
    counts[axis + 1] = times
    given = builder.constant(np.array(counts, "int64"), f"{var.name}.times")
    single = builder.step("Unsqueeze", [data, behind], f"{var.name}.single")
    tiled = builder.step("Tile", [single, given], f"{var.name}.tiled")
    shape = write_sizes(builder, list(var.ty.shape.values), f"{var.name}.shape")
    return builder.emit("Reshape", [tiled, shape], var.name, allowzero=1)


def write_einsum(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Einsum of a literal tuple."""
    fields = list_operands(builder, var, call.args[0])
    inputs = [builder.tensor(field, var.name) for field in fields]
    return builder.emit("Einsum", inputs, var.name, equation=str(call.attrs.subscripts))


def write_pixel_shuffle(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write DepthToSpace.

    Raises:
        ModelError: the data has more or fewer than four axes.
    """
    if var.ty.ndim != 4:
        raise ModelError(
            f"export_onnx: the pixel shuffle {var.name!r} has {format_count(var.ty.ndim, 'axis')}; "
            "allowed: 4.",
            code="RQ203",
        )
    data, factor = builder.tensor(call.args[0], var.name), int(call.attrs.upscale_factor)
    return builder.emit("DepthToSpace", [data], var.name, blocksize=factor, mode="CRD")


def write_adaptive_pool(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write a product with the windows of each axis, one axis after the other. Of an infinite value
    or NaN, all windows of its axes get NaN.

    Raises:
        ModelError: the layout is packed, or a size of the result is not known.
    """
    layout, name, before = str(call.attrs.layout), var.name, call.args[0].ty.shape.values
    axes = [at for at, letter in enumerate(layout) if letter in "DHW"]
    counts = [static_size(var.ty.shape.values[at]) for at in axes]
    if len(layout) != var.ty.ndim or None in counts:
        raise ModelError(
            f"export_onnx: the adaptive pool {name!r} ({layout}) has no form in ONNX; allowed: a "
            "layout that is not packed, and a result of known size.",
            code="RQ203",
        )
    rank = len(axes)

    def emit(source: str, output: str) -> str:
        for number, (axis, count) in enumerate(zip(axes, counts, strict=True)):
            matrix = write_windows(builder, name, before[axis], int(count or 0), tensor_dtype(var))
            order = [*range(rank + 2)]
            order[2 + number], order[-1] = order[-1], order[2 + number]
            is_last = number == rank - 1
            if not is_last:
                source = builder.step("Transpose", [source], f"{name}.turned", perm=order)
            target = output if is_last else builder.unique_name(f"{name}.means")
            source = builder.emit("MatMul", [source, matrix], target)
            if not is_last:
                source = builder.step("Transpose", [source], f"{name}.back", perm=order)
        return source

    return in_channels_first(builder, var, builder.tensor(call.args[0], name), layout, emit)


def write_windows(builder: OnnxBuilder, name: str, size: Any, count: int, dtype: str) -> str:
    """Write the weights of each value in each window of an axis, (size, count): window i is from
    floor(i * size / count) to ceil((i + 1) * size / count).
    """
    known, starts = static_size(size), np.arange(count)
    if known is not None:
        at = np.arange(known)[:, None]
        inside = (at >= starts * known // count) & (at < -(-(starts + 1) * known // count))
        weights = inside / inside.sum(0)
        return builder.constant(weights.astype(dtype), f"{name}.windows")

    def number(value: Any) -> str:
        return builder.constant(np.array(value, "int64"), f"{name}.number")

    def step(op: str, *inputs: str, **attrs: Any) -> str:
        return builder.step(op, inputs, f"{name}.{op.lower()}", **attrs)

    extent = write_scalar(builder, size, f"{name}.size")
    at = step("Unsqueeze", step("Range", number(0), extent, number(1)), number([1]))
    begin = step("Div", step("Mul", number(starts), extent), number(count))
    end = step("Add", step("Mul", number(starts + 1), extent), number(count - 1))
    inside = step(
        "And", step("GreaterOrEqual", at, begin), step("Less", at, step("Div", end, number(count)))
    )
    weights = step("Cast", inside, to=ELEMENT[dtype])
    return step("Div", weights, step("ReduceSum", weights, number([0]), keepdims=1))


#: operators at places that are computed
PLACE_ROWS: dict[str, OnnxRow] = {
    "relax.index_tensor": OnnxRow(write_index_tensor),
    "relax.repeat": OnnxRow(write_repeat, "repeats axis"),
    "relax.einsum": OnnxRow(write_einsum, "subscripts"),
    "relax.nn.pixel_shuffle": OnnxRow(write_pixel_shuffle, "upscale_factor"),
    **{
        f"relax.nn.adaptive_avg_pool{rank}d": OnnxRow(write_adaptive_pool, "output_size layout")
        for rank in (1, 2, 3)
    },
}
