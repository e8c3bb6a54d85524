"""ONNX writer: a table of writers for operators that take several nodes of ONNX
(see `operators`).
"""

from __future__ import annotations

import functools

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.errors import ModelError
from relayquant.formats.writers.onnx.builder import OnnxBuilder
from relayquant.formats.writers.onnx.operators import OnnxRow, integers, write_reduce
from relayquant.ir.rewrite.graph import call_name, tensor_dtype


def write_not_equal(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write not (a == b)."""
    inputs = [builder.tensor(arg, var.name) for arg in call.args]
    return builder.emit("Not", [builder.step("Equal", inputs, f"{var.name}.equal")], var.name)


def write_bitwise(word: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write BitwiseAnd and its kind, of bool values And and its kind."""
    inputs = [builder.tensor(arg, var.name) for arg in call.args]
    prefix = "" if tensor_dtype(var) == "bool" else "Bitwise"
    return builder.emit(f"{prefix}{word}", inputs, var.name)


def write_shift(direction: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write BitShift.

    Raises:
        ModelError: the integers are signed, which BitShift takes in much newer opsets only.
    """
    dtype = tensor_dtype(var)
    if not dtype.startswith("uint"):
        raise ModelError(
            f"export_onnx: {var.name!r} shifts {dtype}; in the opset that is written, BitShift "
            "takes unsigned integers only. Multiply or divide by a power of two instead.",
            code="RQ203",
        )
    inputs = [builder.tensor(arg, var.name) for arg in call.args]
    return builder.emit("BitShift", inputs, var.name, direction=direction)


def write_is_finite(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write not (x is infinite or x is NaN)."""
    data = builder.tensor(call.args[0], var.name)
    tests = [builder.step(op, [data], f"{var.name}.test") for op in ("IsInf", "IsNaN")]
    return builder.emit("Not", [builder.step("Or", tests, f"{var.name}.any")], var.name)


def write_floor_divide(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write floor(a / b), or (a - a mod b) / b of integers: Div rounds towards zero."""
    left, right = (builder.tensor(arg, var.name) for arg in call.args)
    if tensor_dtype(var).startswith("float"):
        quotient = builder.step("Div", [left, right], f"{var.name}.quotient")
        return builder.emit("Floor", [quotient], var.name)
    rest = builder.step("Mod", [left, right], f"{var.name}.rest")
    whole = builder.step("Sub", [left, rest], f"{var.name}.whole")
    return builder.emit("Div", [whole, right], var.name)


def write_remainder(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Mod, with the sign of the divisor (`floor_mod`) or of the dividend (`mod`). Of floats,
    floor_mod is a - floor(a / b) * b.
    """
    left, right = (builder.tensor(arg, var.name) for arg in call.args)
    if call_name(call) == "relax.mod":
        return builder.emit("Mod", [left, right], var.name, fmod=1)
    if not tensor_dtype(var).startswith("float"):
        return builder.emit("Mod", [left, right], var.name)
    quotient = builder.step("Div", [left, right], f"{var.name}.quotient")
    floor = builder.step("Floor", [quotient], f"{var.name}.floor")
    whole = builder.step("Mul", [floor, right], f"{var.name}.whole")
    return builder.emit("Sub", [left, whole], var.name)


def write_variance(is_root: bool, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write mean((x - mean(x))^2), with `is_root` its square root."""
    data, axes = builder.tensor(call.args[0], var.name), call.attrs.axis
    listed = list(range(call.args[0].ty.ndim)) if axes is None else integers(axes)
    mean = write_mean(builder, data, listed, f"{var.name}.mean")
    rest = builder.step("Sub", [data, mean], f"{var.name}.rest")
    square = builder.step("Mul", [rest, rest], f"{var.name}.square")
    output = builder.unique_name(f"{var.name}.variance") if is_root else var.name
    found = write_mean(builder, square, listed, output, bool(call.attrs.keepdims), is_named=True)
    return builder.emit("Sqrt", [found], var.name) if is_root else found


def write_mean(
    builder: OnnxBuilder,
    data: str,
    axes: list[int],
    output: str,
    keeps: bool = True,
    is_named: bool = False,
) -> str:
    """Write ReduceMean of a tensor, into `output` or a tensor named after it."""
    name = output if is_named else builder.unique_name(output)
    return builder.reduce("ReduceMean", data, axes, name, keeps)


def write_rms_norm(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write x / sqrt(mean(x^2) + epsilon) * weight over the last axes.

    Raises:
        ModelError: it is over other axes.
    """
    rank = var.ty.ndim
    axes = sorted(axis % rank for axis in integers(call.attrs.axes))
    if axes != list(range(axes[0], rank)):
        raise ModelError(
            f"export_onnx: the norm {var.name!r} is over the axes {axes}; allowed: the last ones.",
            code="RQ203",
        )
    data, weight = (builder.tensor(arg, var.name) for arg in call.args)
    epsilon = np.array(float(call.attrs.epsilon)).astype(tensor_dtype(var))
    square = builder.step("Mul", [data, data], f"{var.name}.square")
    mean = write_mean(builder, square, axes, f"{var.name}.mean")
    small = builder.constant(epsilon, f"{var.name}.epsilon")
    size = builder.step(
        "Sqrt", [builder.step("Add", [mean, small], f"{var.name}.sum")], f"{var.name}.root"
    )
    unit = builder.step("Div", [data, size], f"{var.name}.unit")
    return builder.emit("Mul", [unit, weight], var.name)


def write_group_norm(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write InstanceNormalization of the groups as channels, then the scale and bias of each
    channel. An instance norm has a group for each channel.

    Raises:
        ModelError: channels are not axis 1, or it is not over all axes behind them.
    """
    attrs, rank = call.attrs, var.ty.ndim
    axes = sorted(axis % rank for axis in integers(attrs.axes))
    channels = call.args[1].ty.shape.values[0]
    groups = int(getattr(attrs, "num_groups", channels))
    if int(attrs.channel_axis) % rank != 1 or axes != list(range(2, rank)):
        raise ModelError(
            f"export_onnx: the norm {var.name!r} has its channels on axis {attrs.channel_axis} and "
            f"is over the axes {axes}; allowed: channels on axis 1, and all axes behind it.",
            code="RQ203",
        )
    data, *affine = (builder.tensor(arg, var.name) for arg in call.args)
    dtype = tensor_dtype(var)
    rows = builder.constant(np.array([0, groups, -1], "int64"), f"{var.name}.rows")
    one, zero = (
        builder.constant(np.full(groups, value, dtype), f"{var.name}.none") for value in (1, 0)
    )
    whole = builder.step("Shape", [data], f"{var.name}.shape")
    value = builder.step("Reshape", [data, rows], f"{var.name}.groups")
    value = builder.step(
        "InstanceNormalization",
        [value, one, zero],
        f"{var.name}.unit",
        epsilon=float(attrs.epsilon),
    )
    sizes = builder.constant(np.array([-1, *[1] * (rank - 2)], "int64"), f"{var.name}.channels")
    steps = [("Mul", affine[0])] * bool(attrs.scale) + [("Add", affine[1])] * bool(attrs.center)
    name = builder.unique_name(f"{var.name}.norm") if steps else var.name
    value = builder.emit("Reshape", [value, whole], name)
    for at, (op, operand) in enumerate(steps, 1):
        shaped = builder.step("Reshape", [operand, sizes], f"{var.name}.channel")
        name = var.name if at == len(steps) else builder.unique_name(f"{var.name}.scaled")
        value = builder.emit(op, [value, shaped], name)
    return value


def write_batch_norm(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write BatchNormalization. Its statistics stay as they are.

    Raises:
        ModelError: it is in training, has no scale or bias, or channels are not axis 1.
    """
    attrs, rank = call.attrs, call.args[0].ty.ndim
    axis, is_whole = int(attrs.axis) % rank, attrs.scale and attrs.center
    if attrs.training or not is_whole or axis != 1:
        kind = "is in training" if attrs.training else f"has its channels on axis {axis}"
        raise ModelError(
            f"export_onnx: the norm {var.name!r} {kind if is_whole else 'has no scale or bias'}; "
            "allowed: inference, with scale and bias, and channels on axis 1.",
            code="RQ203",
        )
    inputs, name = [builder.tensor(arg, var.name) for arg in call.args], f"{var.name}.norm"
    found = builder.step("BatchNormalization", inputs, name, epsilon=float(attrs.epsilon))
    builder.parts[var] = [found, *inputs[3:]]
    return var.name


#: operators that take several nodes
FORMULA_ROWS: dict[str, OnnxRow] = {
    "relax.not_equal": OnnxRow(write_not_equal),
    **{
        f"relax.bitwise_{word.lower()}": OnnxRow(functools.partial(write_bitwise, word))
        for word in ("And", "Or", "Xor", "Not")
    },
    "relax.left_shift": OnnxRow(functools.partial(write_shift, "LEFT")),
    "relax.right_shift": OnnxRow(functools.partial(write_shift, "RIGHT")),
    "relax.isfinite": OnnxRow(write_is_finite),
    "relax.floor_divide": OnnxRow(write_floor_divide),
    "relax.floor_mod": OnnxRow(write_remainder),
    "relax.mod": OnnxRow(write_remainder),
    "relax.prod": OnnxRow(functools.partial(write_reduce, "ReduceProd"), "axis keepdims"),
    "relax.variance": OnnxRow(functools.partial(write_variance, False), "axis keepdims"),
    "relax.std": OnnxRow(functools.partial(write_variance, True), "axis keepdims"),
    "relax.nn.rms_norm": OnnxRow(write_rms_norm, "axes epsilon"),
    "relax.nn.batch_norm": OnnxRow(write_batch_norm, "axis epsilon center scale training momentum"),
    "relax.nn.group_norm": OnnxRow(
        write_group_norm, "num_groups channel_axis axes epsilon center scale"
    ),
    "relax.nn.instance_norm": OnnxRow(write_group_norm, "channel_axis axes epsilon center scale"),
}
