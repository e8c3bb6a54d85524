"""ONNX writer: operators of the dialect -> dequantize, float operator, quantize.

An accumulator (int32, with scale data scale x weight scale) has no integer tensor in the file, only
a tensor of its real values: qnn.conv2d(x, w) -> Conv(DequantizeLinear(x), DequantizeLinear(w)).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.errors import ModelError
from relayquant.formats.writers.onnx.builder import Affine, OnnxBuilder, read_affine
from relayquant.formats.writers.onnx.grouped import (
    write_expert_dense,
    write_grouped_dense,
    write_grouped_expert_dense,
    write_grouped_take,
    write_quantize_rows,
)
from relayquant.formats.writers.onnx.operators import (
    ELEMENT,
    FLOAT_ROWS,
    Writer,
    conv_attributes,
    in_channels_first,
)
from relayquant.ir.dialect import OPERATORS
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype


def write_quantize(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write QuantizeLinear."""
    if constant_value(call.args[1]) is None:
        return write_at_run_time("QuantizeLinear", builder, var, call, var)
    affine = read_affine(call.args[1], call.args[2], int(call.attrs.axis), var.ty.ndim)
    data = builder.tensor(call.args[0], var.name)
    return builder.quantize(data, affine, tensor_dtype(var), var.name)


def write_at_run_time(
    op: str, builder: OnnxBuilder, var: relax.Var, call: Call, integers: relax.Expr
) -> str:
    """Write `op` with a scale and a zero point that are computed at run time."""
    data, scale, zero_point = call.args[:3]
    zero = builder.tensor(zero_point, f"{var.name}.zero_point")
    to = ELEMENT[tensor_dtype(integers)]
    inputs = [
        builder.tensor(data, var.name),
        builder.tensor(scale, f"{var.name}.scale"),
        builder.step("Cast", [zero], f"{var.name}.zero_point", to=to),
    ]
    axis = {"axis": int(call.attrs.axis)} if scale.ty.ndim else {}
    return builder.emit(op, inputs, var.name, **axis)


def scale_units(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write the product of an accumulator's integers and a scale of the run time."""
    data, scale = call.args[:2]
    tensor, rank = builder.tensor(scale, f"{var.name}.scale"), var.ty.ndim
    if scale.ty.ndim:
        others = [axis for axis in range(rank) if axis != int(call.attrs.axis) % rank]
        axes = builder.constant(np.array(others, "int64"), f"{var.name}.axes")
        tensor = builder.step("Unsqueeze", [tensor, axes], f"{var.name}.scales")
    return builder.emit("Mul", [builder.real[data], tensor], var.name)


def write_dequantize(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write DequantizeLinear. An accumulator needs none, because its tensor holds real values."""
    data = call.args[0]
    if data in builder.units:
        return scale_units(builder, var, call)
    if constant_value(call.args[1]) is None:
        return write_at_run_time("DequantizeLinear", builder, var, call, data)
    affine = read_affine(call.args[1], call.args[2], int(call.attrs.axis), var.ty.ndim)
    if builder.is_accumulator(data):
        return builder.emit("Identity", [builder.real[data]], var.name)
    return builder.dequantize(builder.tensor(data, var.name), affine, tensor_dtype(data), var.name)


def write_requantize(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write QuantizeLinear of the real values."""
    data, scale, zero_point, out_scale, out_zero = call.args
    affine = read_affine(scale, zero_point, int(call.attrs.axis), var.ty.ndim)
    real = builder.real_tensor(data, affine, var.name)
    out = read_affine(out_scale, out_zero, -1, var.ty.ndim)
    return builder.quantize(real, out, tensor_dtype(var), var.name)


def note_units(builder: OnnxBuilder, var: relax.Var, scales: tuple[relax.Expr, relax.Expr]) -> None:
    """Note an accumulator that is written without a scale."""
    arrays = [constant_value(scale) for scale in scales]
    if all(array is not None and np.all(array == 1) for array in arrays):
        builder.units.add(var)


def accumulate(builder: OnnxBuilder, var: relax.Var, scales: tuple[relax.Expr, relax.Expr]):
    """Return (output variable of the product, [bias]). An add of an int32 constant after `var` is
    merged into the product.
    """
    if not builder.graph.has_one_user(var):
        return var, []
    (user,) = builder.graph.users[var]
    if builder.graph.op_name(user) != "relax.add":
        return var, []
    bias = constant_value(builder.graph.values[user].args[1])
    if bias is None or bias.dtype.kind != "i":
        return var, []
    data, weight = (constant_value(scale) for scale in scales)
    if data is None or weight is None:
        return var, []
    units = (data * weight).astype("float32").reshape(-1)
    if bias.size not in (1, units.size) and units.size != 1:
        return var, []
    name = builder.unique_name(f"{user.name}.bias.dq")
    affine = Affine(units if units.size > 1 else units.reshape(()), np.zeros(units.shape), 0)
    if units.size == 1:
        affine = Affine(units.reshape(()), np.zeros(()))
    tensor = builder.constant(bias.reshape(-1).astype("int32"), f"{user.name}.bias")
    builder.merged.add(user)
    return user, [builder.dequantize(tensor, affine, "int32", name)]


def start_product(
    builder: OnnxBuilder, var: relax.Var, call: Call, channel: int, order: Sequence[int]
) -> tuple[str, str, relax.Var, list[str]]:
    """Write the operands of a product with a constant weight, whose axes get the order of ONNX.

    `channel`: axis of the output channels. Returns data, weight, and what `accumulate` returns.
    """
    data, weight, data_zero, weight_zero, data_scale, weight_scale = call.args
    array = constant_value(weight)
    if array is None:
        raise ModelError(
            f"export_onnx: the weight of {var.name!r} is not a constant.", code="RQ203"
        )
    affine = read_affine(weight_scale, weight_zero, channel, array.ndim)
    if affine.axis is not None:
        affine = Affine(affine.scale, affine.zero_point, order.index(affine.axis))
    tensor = builder.constant(np.transpose(array, order), f"{var.name}.weight")
    name = builder.unique_name(f"{var.name}.weight.dq")
    filters = builder.dequantize(tensor, affine, str(array.dtype), name)
    real = builder.real_tensor(data, read_affine(data_scale, data_zero, -1, 1), var.name)
    out, bias = accumulate(builder, var, (data_scale, weight_scale))
    note_units(builder, out, (data_scale, weight_scale))
    return real, filters, out, bias


def write_qnn_conv(op: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write qnn.conv1d, conv2d, conv2d_transpose with constant weights."""
    view = ConvView.of(call)
    kernel = view.kernel_layout
    order = [kernel.index(c) for c in ("OI" if op == "Conv" else "IO") + view.letters]
    real, filters, out, bias = start_product(builder, var, call, kernel.index("O"), order)
    attrs = conv_attributes(op, view)
    builder.real[out] = in_channels_first(
        builder,
        out,
        real,
        view.layout,
        lambda source, name: builder.emit(op, [source, filters, *bias], name, **attrs),
    )
    return builder.real[out]


def write_qnn_dense(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write qnn.dense(x, w (units, K)): MatMul with w transposed, or Gemm with a bias."""
    real, matrix, out, bias = start_product(builder, var, call, 0, (1, 0))
    if bias and var.ty.ndim == 2:
        builder.real[out] = builder.emit("Gemm", [real, matrix, *bias], out.name)
    elif bias:
        product = builder.step("MatMul", [real, matrix], f"{var.name}.product")
        builder.real[out] = builder.emit("Add", [product, *bias], out.name)
    else:
        builder.real[out] = builder.emit("MatMul", [real, matrix], out.name)
    return builder.real[out]


def write_qnn_batch_matmul(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write qnn.batch_matmul(x, y (..., N, K)): MatMul with y transposed."""
    left, right, left_zero, right_zero, left_scale, right_scale = call.args
    rank = right.ty.ndim
    inputs = [
        builder.real_tensor(left, read_affine(left_scale, left_zero, -1, 1), var.name),
        builder.real_tensor(right, read_affine(right_scale, right_zero, -1, 1), var.name),
    ]
    order = [*range(rank - 2), rank - 1, rank - 2]
    inputs[1] = builder.step("Transpose", [inputs[1]], f"{var.name}.rhs", perm=order)
    builder.real[var] = builder.emit("MatMul", inputs, var.name)
    return builder.real[var]


def write_qnn_binary(op: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write qnn.add, subtract, mul."""
    lhs, rhs, lhs_scale, lhs_zero, rhs_scale, rhs_zero, out_scale, out_zero = call.args
    inputs = []
    for expr, scale, zero, axis in (
        (lhs, lhs_scale, lhs_zero, call.attrs.lhs_axis),
        (rhs, rhs_scale, rhs_zero, call.attrs.rhs_axis),
    ):
        affine = read_affine(scale, zero, int(axis), max(expr.ty.ndim, 1))
        inputs.append(builder.real_tensor(expr, affine, var.name))
    real = builder.step(op, inputs, f"{var.name}.real")
    out = read_affine(out_scale, out_zero, -1, var.ty.ndim)
    return builder.quantize(real, out, tensor_dtype(var), var.name)


def write_float_form(
    form: Callable[[Call, relax.Expr], relax.Expr],
    builder: OnnxBuilder,
    var: relax.Var,
    call: Call,
) -> str:
    """Write an operator on one tensor as its float operator, between DequantizeLinear and
    QuantizeLinear.
    """
    data, scale, zero, out_scale, out_zero = call.args[:5]
    source = relax.Var(f"{var.name}.data", relax.TensorType(data.ty.shape, "float32"))
    builder.real[source] = builder.real_tensor(
        data, read_affine(scale, zero, -1, data.ty.ndim), var.name
    )
    result = relax.Var(
        builder.unique_name(f"{var.name}.real"), relax.TensorType(var.ty.shape, "float32")
    )
    value = form(call, source)
    real = FLOAT_ROWS[value.op.name].write(builder, result, value)
    out = read_affine(out_scale, out_zero, -1, var.ty.ndim)
    return builder.quantize(real, out, tensor_dtype(var), var.name)


def write_qnn_concatenate(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write qnn.concatenate."""
    data, scales, zeros, out_scale, out_zero = call.args
    fields = (getattr(data, "fields", ()), scales.fields, zeros.fields)
    inputs = [
        builder.real_tensor(part, read_affine(scale, zero, -1, part.ty.ndim), var.name)
        for part, scale, zero in zip(*fields, strict=True)
    ]
    real = builder.step("Concat", inputs, f"{var.name}.real", axis=int(call.attrs.axis))
    out = read_affine(out_scale, out_zero, -1, var.ty.ndim)
    return builder.quantize(real, out, tensor_dtype(var), var.name)


def write_lookup(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write qnn.lookup(x, table): Gather from the table, which is indexed by the bits of x."""
    data, table = call.args[0], constant_value(call.args[1])
    if table is None:
        raise ModelError(f"export_onnx: the table of {var.name!r} is not a constant.", code="RQ203")
    index = builder.step("Cast", [builder.tensor(data, var.name)], f"{var.name}.wide", to=6)
    if tensor_dtype(data) == "int8":
        # Entry i is for bit pattern i: negative integers come after the others.
        shift = builder.constant(np.array(128, "int32"), f"{var.name}.shift")
        index = builder.step("Add", [index, shift], f"{var.name}.index")
        table = np.roll(table, 128)
    return builder.emit("Gather", [builder.constant(table, f"{var.name}.table"), index], var.name)


QNN_WRITERS: dict[str, Writer] = {
    **{
        operator.full_name: functools.partial(write_float_form, operator.float_form)
        for operator in OPERATORS
        if operator.float_form is not None
    },
    "relax.qnn.quantize": write_quantize,
    "relax.qnn.dequantize": write_dequantize,
    "relax.qnn.requantize": write_requantize,
    "relax.qnn.conv1d": functools.partial(write_qnn_conv, "Conv"),
    "relax.qnn.conv2d": functools.partial(write_qnn_conv, "Conv"),
    "relax.qnn.conv2d_transpose": functools.partial(write_qnn_conv, "ConvTranspose"),
    "relax.qnn.dense": write_qnn_dense,
    "relax.qnn.batch_matmul": write_qnn_batch_matmul,
    "relax.qnn.add": functools.partial(write_qnn_binary, "Add"),
    "relax.qnn.subtract": functools.partial(write_qnn_binary, "Sub"),
    "relax.qnn.mul": functools.partial(write_qnn_binary, "Mul"),
    "relax.qnn.concatenate": write_qnn_concatenate,
    "relax.qnn.lookup": write_lookup,
    "relax.qnn.quantize_rows": write_quantize_rows,
    "relax.qnn.grouped_dense": write_grouped_dense,
    "relax.qnn.grouped_take": write_grouped_take,
    "relax.qnn.expert_dense": write_expert_dense,
    "relax.qnn.grouped_expert_dense": write_grouped_expert_dense,
}
