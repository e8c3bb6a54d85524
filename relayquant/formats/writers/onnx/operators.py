"""ONNX writer: a table of small functions, one for each Relax operator.

A writer takes the builder, the variable and its call, emits nodes and returns the name of the
tensor. Its last node uses the variable's own name, so that values keep their names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from tvm import relax
from tvm.ir import Call

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.base.windows import reach_end
from relayquant.errors import ModelError
from relayquant.formats.writers.onnx.builder import Affine, OnnxBuilder, read_affine
from relayquant.ir.dialect.qnn.quantization import DEQUANTIZE
from relayquant.ir.reference.convolution import count_window_values
from relayquant.ir.reference.relax.windows import get_window
from relayquant.ir.reference.unary import RELAX_UNARY, evaluate_formula
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.expressions import with_operands
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape

Writer = Callable[[OnnxBuilder, relax.Var, Call], str]


@dataclass(frozen=True)
class OnnxRow:
    """A Relax operator that ONNX can express.

    Attributes:
        write: Its writer.
        attributes: Those that the writer writes. All others must have their defaults.
    """

    write: Writer
    attributes: str = ""


ELEMENT = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "float64": onnx.TensorProto.DOUBLE,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "int16": onnx.TensorProto.INT16,
    "uint16": onnx.TensorProto.UINT16,
    "int32": onnx.TensorProto.INT32,
    "uint32": onnx.TensorProto.UINT32,
    "int64": onnx.TensorProto.INT64,
    "uint64": onnx.TensorProto.UINT64,
    "bool": onnx.TensorProto.BOOL,
}


def write_plain(op: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write the ONNX operator with the same operands. Integers beside an accumulator become float,
    as its tensor is.
    """
    if builder.units.isdisjoint(call.args):
        return builder.emit(op, [builder.tensor(arg, var.name) for arg in call.args], var.name)
    builder.units.add(var)
    return builder.emit(op, cast_operands(builder, var, call.args, "float32"), var.name)


def cast_operands(
    builder: OnnxBuilder, var: relax.Var, operands: Sequence[relax.Expr], dtype: str
) -> list[str]:
    """Write casts of the operands, but not of accumulators, whose tensors are float."""
    return [
        builder.tensor(operand, var.name)
        if operand in builder.units
        else builder.step(
            "Cast", [builder.tensor(operand, var.name)], f"{var.name}.{dtype}", to=ELEMENT[dtype]
        )
        for operand in operands
    ]


def write_where(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Where, of a wider type where ONNX Runtime has no kernel for the type."""
    condition, *values = call.args
    dtype, chosen = tensor_dtype(var), builder.tensor(condition, var.name)
    if not builder.units.isdisjoint(values):
        builder.units.add(var)
        reals = cast_operands(builder, var, values, "float32")
        return builder.emit("Where", [chosen, *reals], var.name)
    if dtype not in WIDE_WHERE:
        names = [builder.tensor(value, var.name) for value in values]
        return builder.emit("Where", [chosen, *names], var.name)
    wide = cast_operands(builder, var, values, WIDE_WHERE[dtype])
    result = builder.step("Where", [chosen, *wide], f"{var.name}.chosen")
    return builder.emit("Cast", [result], var.name, to=ELEMENT[dtype])


def integers(values: object) -> list[int]:
    """Return attribute values as a list of ints."""
    return [int(value) for value in values]  # pyright: ignore[reportGeneralTypeIssues]


def write_flat(builder: OnnxBuilder, source: str, base: str) -> str:
    """Write a Reshape of a tensor to one axis with all elements in order."""
    one = builder.constant(np.array([-1], "int64"), f"{base}.flat")
    return builder.step("Reshape", [source, one], f"{base}.elements")


def list_operands(builder: OnnxBuilder, var: relax.Var, expr: relax.Expr) -> list[relax.Expr]:
    """List the operands that an operator takes as one tuple.

    Raises:
        ModelError: it is no literal tuple.
    """
    value = builder.graph.values.get(expr, expr) if isinstance(expr, relax.Var) else expr
    if not isinstance(value, relax.Tuple):
        raise ModelError(
            f"export_onnx: the operands of {var.name!r} are not a literal tuple.", code="RQ203"
        )
    return list(value.fields)


def in_channels_first(
    builder: OnnxBuilder, var: relax.Var, data: str, layout: str, write: Callable[[str, str], str]
) -> str:
    """Call `write(data, output)` with transposes around it if needed, because ONNX has the operator
    with channels first only.
    """
    if layout.index("C") == 1:
        return write(data, var.name)
    rank = len(layout)
    first = builder.step(
        "Transpose", [data], f"{var.name}.nchw", perm=[0, rank - 1, *range(1, rank - 1)]
    )
    inner = write(first, builder.unique_name(f"{var.name}.inner"))
    return builder.emit("Transpose", [inner], var.name, perm=[0, *range(2, rank), 1])


def conv_attributes(op: str, view: ConvView) -> dict[str, object]:
    """Attributes of `op`: Conv or ConvTranspose."""
    extra = {"output_padding": view.output_padding} if op == "ConvTranspose" else {}
    numbers = {"strides": view.strides, "pads": view.padding, "dilations": view.dilation, **extra}
    return {**{name: list(each) for name, each in numbers.items()}, "group": view.groups}


def constant_of(builder: OnnxBuilder, expr: relax.Expr) -> tuple[np.ndarray, Call | None] | None:
    """Return (array, dequantize call if there is one) of a constant operand."""
    array = constant_value(expr)
    if array is not None:
        return array, None
    call = builder.graph.call_of(expr)
    if call is not None and builder.graph.op_name(expr) == DEQUANTIZE:
        array = constant_value(call.args[0])
        return None if array is None else (array, call)
    return None


def channel_bias(builder: OnnxBuilder, var: relax.Var, axis: int) -> relax.Var | None:
    """Return the add of a per-channel constant, if it is the only reader of `var`."""
    if not builder.graph.has_one_user(var):
        return None
    (user,) = builder.graph.users[var]
    call = builder.graph.call_of(user)
    if call is None or builder.graph.op_name(user) != "relax.add" or not call.args[0].same_as(var):
        return None
    found = constant_of(builder, call.args[1])
    rank = var.ty.ndim
    if found is None or str(var.ty.shape) != str(user.ty.shape):
        return None
    shape = (1,) * (rank - found[0].ndim) + found[0].shape
    channels = tensor_shape(var)[axis]  # pyright: ignore[reportOptionalSubscript]
    is_channel = all(size == 1 for at, size in enumerate(shape) if at != axis % rank)
    return user if is_channel and shape[axis] == channels else None


def oriented_constant(
    builder: OnnxBuilder, expr: relax.Expr, order: Sequence[int], base: str
) -> str:
    """Write a weight with its axes in another order. Constants are transposed here, together with
    their channel axis.
    """
    if list(order) == list(range(len(order))):
        return builder.tensor(expr, base)
    found = constant_of(builder, expr)
    if found is None:
        return builder.step("Transpose", [builder.tensor(expr, base)], base, perm=list(order))
    array, call = found
    tensor = builder.constant(np.transpose(array, order), f"{base}.weight")
    if call is None:
        return tensor
    affine = read_affine(call.args[1], call.args[2], int(call.attrs.axis), array.ndim)
    if affine.axis is not None:
        affine = Affine(affine.scale, affine.zero_point, list(order).index(affine.axis))
    name = builder.unique_name(f"{base}.weight.dq")
    return builder.dequantize(tensor, affine, str(array.dtype), name)


def bias_vector(builder: OnnxBuilder, expr: relax.Expr, base: str) -> str:
    """Return a per-channel bias as the vector that Conv and Gemm take."""
    found = constant_of(builder, expr)
    if found is None:
        raise ModelError(f"export_onnx: the bias of {base!r} is not a constant.", code="RQ203")
    array, call = found
    tensor = builder.constant(array.reshape(-1), f"{base}.bias")
    if call is None:
        return tensor
    affine = read_affine(call.args[1], call.args[2], 0, 1)
    name = builder.unique_name(f"{base}.bias.dq")
    return builder.dequantize(tensor, affine, str(array.dtype), name)


def write_linear(
    builder: OnnxBuilder,
    var: relax.Var,
    layout_axis: int,
    write: Callable[[relax.Var, list[str]], str],
) -> str:
    """Call `write(output variable, [bias])`. An add of a bias after `var` is merged into it."""
    add = channel_bias(builder, var, layout_axis)
    if add is None:
        return write(var, [])
    bias = bias_vector(builder, builder.graph.values[add].args[1], add.name)
    builder.real[add] = write(add, [bias])
    builder.merged.add(add)
    return builder.real[add]


def write_conv(op: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Conv or ConvTranspose, with the bias that is added to it."""
    view = ConvView.of(call)
    layout, kernel = view.layout, view.kernel_layout
    wanted = ("OI" if op == "Conv" else "IO") + view.letters
    weight = oriented_constant(
        builder, call.args[1], [kernel.index(c) for c in wanted], f"{var.name}.weight"
    )
    data = builder.tensor(call.args[0], var.name)
    attrs = conv_attributes(op, view)

    def write(out: relax.Var, bias: list[str]) -> str:
        def emit(source: str, output: str) -> str:
            return builder.emit(op, [source, weight, *bias], output, **attrs)

        return in_channels_first(builder, out, data, layout, emit)

    return write_linear(builder, var, layout.index("C"), write)


def write_matmul(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write MatMul, or Gemm if a bias is added to a product of matrices."""
    inputs = [builder.tensor(arg, var.name) for arg in call.args]
    if var.ty.ndim != 2 or any(arg.ty.ndim != 2 for arg in call.args):
        return builder.emit("MatMul", inputs, var.name)

    def write(out: relax.Var, bias: list[str]) -> str:
        return builder.emit("Gemm" if bias else "MatMul", [*inputs, *bias], out.name)

    return write_linear(builder, var, 1, write)


def write_pool(op: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write MaxPool or AveragePool.

    If sizes are known, ceil_mode is not used: before opset 22, ONNX's own inference counts windows
    that start in the padding.
    """
    attrs, view, dtype = call.attrs, ConvView.of(call), tensor_dtype(call.args[0])
    layout, kernel, steps, counts = view.layout, list(view.window), list(view.dilation), None
    half, ends = view.rank, end_windows(var, call)
    pads = ends or list(view.padding)
    data = builder.tensor(call.args[0], var.name)
    given: dict[str, object] = {"strides": list(view.strides)}
    if any(size != 1 for size in steps):
        given["dilations"] = steps
    if op == "AveragePool":
        is_plain = len(given) == 1 and not is_wide(pads, kernel)
        is_plain = is_plain and (not attrs.count_include_pad or not attrs.ceil_mode)
        counts = None if is_plain or ends is None else count_values(call)

    def emit_pool(source: str, output: str) -> str:
        if op == "AveragePool":
            given["count_include_pad"] = int(attrs.count_include_pad)
        given.update(kernel_shape=kernel, ceil_mode=int(attrs.ceil_mode and ends is None))
        if not is_wide(pads, kernel):
            return builder.emit(op, [source], output, pads=pads, **given)
        lowest = INTEGER_LIMITS[dtype][0] if dtype in INTEGER_LIMITS else -np.inf
        widths = np.array([0, 0, *pads[:half], 0, 0, *pads[half:]], "int64")
        inputs = [source, builder.constant(widths, f"{var.name}.widths")]
        inputs.append(builder.constant(np.array(lowest).astype(dtype), f"{var.name}.lowest"))
        return builder.emit(
            op, [builder.step("Pad", inputs, f"{var.name}.padded")], output, **given
        )

    def emit_sum(source: str, output: str) -> str:
        """Write a convolution with ones, divided by the counts. ONNX Runtime lacks dilations for
        integers, and pads as wide as the kernel.
        """
        channels = int(tensor_shape(var)[layout.index("C")])  # pyright: ignore[reportOptionalSubscript]
        ones = builder.constant(np.ones([channels, 1, *kernel], dtype), f"{var.name}.ones")
        total = builder.step(
            "Conv", [source, ones], f"{var.name}.sum", pads=pads, group=channels, **given
        )
        return builder.emit("Div", [total, builder.constant(counts, f"{var.name}.counts")], output)

    write = emit_pool if counts is None else emit_sum
    return in_channels_first(builder, var, data, layout, write)


def count_values(call: Call) -> np.ndarray | None:
    """Count the values of each window of an average pool, shape (1, 1, *windows). None if a size is
    unknown.
    """
    shape, layout = tensor_shape(call.args[0]) or (), str(call.attrs.layout)
    sizes = [1 if letter == "N" else size for letter, size in zip(layout, shape, strict=True)]
    if any(isinstance(size, str) for size in sizes):
        return None
    window, counts_pads = get_window(call.attrs), bool(call.attrs.count_include_pad)
    counts = count_window_values([int(size) for size in sizes], window, counts_pads)
    return np.moveaxis(counts, -1, 1).astype(tensor_dtype(call.args[0]))


def is_wide(pads: Sequence[int], kernel: Sequence[int]) -> bool:
    """Return whether pads are as wide as the kernel."""
    return any(pad >= size for pad, size in zip(pads, [*kernel, *kernel], strict=True))


def end_windows(var: relax.Var, call: Call) -> list[int] | None:
    """Return pads with which a pool's windows end in the padding, or the pool's own pads without
    ceil_mode. None if a size is unknown.
    """
    view = ConvView.of(call)
    begins = view.padding[: view.rank]
    if not call.attrs.ceil_mode:
        return list(view.padding)
    axes = [view.layout.index(letter) for letter in view.letters]
    sizes, counts = (tensor_shape(each) or () for each in (call.args[0], var))
    found = [(counts[at], sizes[at]) for at in axes] if sizes and counts else []
    if not found or any(isinstance(size, str) for pair in found for size in pair):
        return None
    rows = zip(found, view.window, view.strides, view.dilation, begins, strict=True)
    return [
        *begins,
        *(reach_end(*map(int, (*pair, *window))) for pair, *window in rows),
    ]


def write_reduce(op: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write ReduceMean and similar operators."""
    data = builder.tensor(call.args[0], var.name)
    axes = call.attrs.axis
    listed = list(range(call.args[0].ty.ndim)) if axes is None else integers(axes)
    return builder.reduce(op, data, listed, var.name, bool(call.attrs.keepdims))


def write_clip(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Clip with bounds in the data's dtype. Infinite bounds are left out. An accumulator is
    clipped at the real values of its bounds.
    """
    inputs = [builder.tensor(call.args[0], var.name)]
    dtype, limits = tensor_dtype(var), (-np.inf, np.inf)
    is_accumulator = builder.is_accumulator(call.args[0])
    if is_accumulator:
        dtype, limits = "float32", tuple(map(float, INTEGER_LIMITS[dtype]))
    for arg in call.args[1:3]:
        value = float(arg.value)
        if value in limits or not np.isfinite(value):
            inputs.append("")
            continue
        if is_accumulator and value:
            value = np.float32(value) * find_step(builder, var)
        inputs.append(builder.constant(np.array(value).astype(dtype), f"{var.name}.bound"))
    return builder.emit("Clip", inputs, var.name)


#: operators that give the real values of an accumulator
READERS = (DEQUANTIZE, "relax.qnn.requantize")


def find_step(builder: OnnxBuilder, var: relax.Var) -> np.float32:
    """Return the real value of 1 of a clipped accumulator, from the operator that dequantizes it.

    Raises:
        ModelError: it is not the same for all channels, or nothing dequantizes the accumulator.
    """
    readers = list(builder.graph.users[var])
    for user in readers:
        call = builder.graph.call_of(user)
        if call is None or builder.graph.op_name(user) not in READERS:
            readers += builder.graph.users[user] if tensor_dtype(user) == tensor_dtype(var) else []
            continue
        scale = constant_value(call.args[1])
        if scale is not None and scale.size == 1:
            return np.float32(scale.reshape(()))
    raise ModelError(
        f"export_onnx: accumulator {var.name!r} is clipped, and no scale of all its channels is "
        "known. Clip the quantized value, or keep the operator in float.",
        code="RQ203",
    )


def write_arg(op: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write ArgMax, ArgMin along one axis.

    Raises:
        ModelError: the operator is over all axes, which ONNX lacks.
    """
    if call.attrs.axis is None:
        raise ModelError(
            f"export_onnx: {var.name!r} is over all axes; ONNX needs one.", code="RQ203"
        )
    axis, keep = int(call.attrs.axis), int(call.attrs.keepdims)
    found = builder.tensor(call.args[0], var.name)
    if tensor_dtype(var) == "int64":
        return builder.emit(op, [found], var.name, axis=axis, keepdims=keep)
    index = builder.step(op, [found], f"{var.name}.long", axis=axis, keepdims=keep)
    return builder.emit("Cast", [index], var.name, to=ELEMENT[tensor_dtype(var)])


def write_prelu(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write PRelu. The slopes broadcast from the right."""
    rank, axis = var.ty.ndim, int(call.attrs.axis) % var.ty.ndim
    slopes = constant_value(call.args[1])
    if slopes is None:
        raise ModelError(f"export_onnx: the slopes of {var.name!r} are not constant.", code="RQ203")
    shaped = slopes.reshape(-1, *[1] * (rank - axis - 1))
    inputs = [builder.tensor(call.args[0], var.name), builder.constant(shaped, f"{var.name}.slope")]
    return builder.emit("PRelu", inputs, var.name)


def write_cast(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Cast."""
    to = ELEMENT.get(tensor_dtype(var))
    if to is None:
        raise ModelError(
            f"export_onnx: a cast to {tensor_dtype(var)} is not supported.", code="RQ203"
        )
    return builder.emit("Cast", [builder.tensor(call.args[0], var.name)], var.name, to=to)


def with_attributes(op: str, **attrs: Callable[[Any], Any]) -> OnnxRow:
    """Write the ONNX operator with the same operand. `attrs` has the function that converts each
    attribute; attributes have the same name in both.
    """

    def write(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
        given = {name: convert(getattr(call.attrs, name)) for name, convert in attrs.items()}
        return builder.emit(op, [builder.tensor(call.args[0], var.name)], var.name, **given)

    return OnnxRow(write, " ".join(attrs))


def write_layer_norm(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write LayerNormalization over the last axes."""
    inputs = [builder.tensor(arg, var.name) for arg in call.args]
    rank = var.ty.ndim
    axes = sorted(axis % rank for axis in integers(call.attrs.axes))
    if axes != list(range(axes[0], rank)) or not (call.attrs.center and call.attrs.scale):
        raise ModelError(
            f"export_onnx: the layer norm {var.name!r} is not over the last axes, or has no scale "
            "or bias; ONNX has no operator for it.",
            code="RQ203",
        )
    epsilon = float(call.attrs.epsilon)
    return builder.emit("LayerNormalization", inputs, var.name, axis=axes[0], epsilon=epsilon)


def write_formula(formula: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write the operators of a formula. Its numbers are float32 constants."""

    def apply(word: str, operands: list[str], is_last: bool) -> str:
        name = var.name if is_last else builder.unique_name(f"{var.name}.step")
        return builder.emit(PLAIN[f"relax.{word}"], operands, name)

    def number(value: float) -> str:
        return builder.constant(np.float32(value), f"{var.name}.number")

    return evaluate_formula(formula, builder.tensor(call.args[0], var.name), apply, number)


#: Relax operator -> ONNX operator with the same operands
PLAIN = {
    "relax.add": "Add", "relax.subtract": "Sub", "relax.multiply": "Mul", "relax.divide": "Div",
    "relax.power": "Pow", "relax.maximum": "Max", "relax.minimum": "Min",
    "relax.equal": "Equal", "relax.less": "Less", "relax.greater": "Greater",
    "relax.less_equal": "LessOrEqual", "relax.greater_equal": "GreaterOrEqual",
    "relax.logical_and": "And", "relax.logical_or": "Or", "relax.logical_xor": "Xor",
    **{op: row.onnx for op, row in RELAX_UNARY.items() if row.onnx},
}  # fmt: skip

#: Type -> a wider one for which ONNX Runtime has a kernel of Where. Casts keep the values.
WIDE_WHERE = {
    "bool": "uint8", "int8": "int32", "int16": "int32", "uint16": "int32", "uint32": "int64",
    "uint64": "int64", "float16": "float32", "bfloat16": "float32",
}  # fmt: skip

_SHORT = {"int16": "int32", "uint16": "int32"}
#: Operator that moves or compares values -> type without a kernel in ONNX Runtime -> a wider one
#: with a kernel. Casts keep the values.
WIDER: dict[str, dict[str, str]] = {
    **dict.fromkeys(("relax.clip", "relax.nn.pad", "relax.maximum", "relax.minimum"), _SHORT),
    **dict.fromkeys(("relax.nn.relu", "relax.image.resize2d"), _SHORT),
    **dict.fromkeys(("relax.max", "relax.min"), _SHORT | {"uint32": "int64"}),
    **dict.fromkeys(("relax.argmax", "relax.argmin"), _SHORT | {"uint32": "int64"}),
    **{
        f"relax.nn.max_pool{rank}d": {
            "int16": "float32", "uint16": "float32", "int32": "float64"}
        for rank in (1, 2, 3)
    },
}  # fmt: skip


def write_wider(writer: Writer, wide: str, builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write an operator on casts of its operands, and its result cast back."""
    dtype, operands = tensor_dtype(call.args[0]), []
    for arg in call.args:
        if tensor_dtype(arg) == dtype:
            cast = relax.Var(f"{var.name}.{wide}", relax.TensorType(arg.ty.shape, wide))
            (builder.integers[cast],) = cast_operands(builder, var, [arg], wide)
            arg = cast
        operands.append(arg)
    wider = with_operands(call, operands)
    if tensor_dtype(var) != dtype:
        return writer(builder, var, wider)
    result = relax.Var(
        builder.unique_name(f"{var.name}.wide"), relax.TensorType(var.ty.shape, wide)
    )
    source = writer(builder, result, wider)
    if wide.startswith("float"):  # a window of padding alone gives -inf
        lowest = builder.constant(np.array(INTEGER_LIMITS[dtype][0], wide), f"{var.name}.lowest")
        source = builder.step("Max", [source, lowest], f"{var.name}.held")
    return builder.emit("Cast", [source], var.name, to=ELEMENT[dtype])


#: kind of pool in Relax -> operator in ONNX
POOLS = {"max": "MaxPool", "avg": "AveragePool"}

_CONV = "strides padding dilation groups data_layout kernel_layout"
_POOL = "pool_size strides padding dilation ceil_mode count_include_pad layout"
_REDUCE = "axis keepdims"

#: operators that compute
FLOAT_ROWS: dict[str, OnnxRow] = {
    **{name: OnnxRow(functools.partial(write_plain, op)) for name, op in PLAIN.items()},
    **{
        op: OnnxRow(functools.partial(write_formula, row.formula))
        for op, row in RELAX_UNARY.items()
        if row.formula
    },
    "relax.where": OnnxRow(write_where),
    **{
        f"relax.nn.conv{rank}d": OnnxRow(functools.partial(write_conv, "Conv"), _CONV)
        for rank in (1, 2, 3)
    },
    **{
        f"relax.nn.conv{rank}d_transpose": OnnxRow(
            functools.partial(write_conv, "ConvTranspose"), f"{_CONV} output_padding"
        )
        for rank in (1, 2, 3)
    },
    "relax.matmul": OnnxRow(write_matmul),
    **{
        f"relax.nn.{kind}_pool{rank}d": OnnxRow(functools.partial(write_pool, op), _POOL)
        for kind, op in POOLS.items()
        for rank in (1, 2, 3)
    },
    **{
        f"relax.{kind}": OnnxRow(functools.partial(write_reduce, f"Reduce{kind.title()}"), _REDUCE)
        for kind in ("mean", "max", "min", "sum")
    },
    "relax.clip": OnnxRow(write_clip),
    "relax.argmax": OnnxRow(functools.partial(write_arg, "ArgMax"), _REDUCE),
    "relax.argmin": OnnxRow(functools.partial(write_arg, "ArgMin"), _REDUCE),
    "relax.astype": OnnxRow(write_cast, "dtype"),
    "relax.nn.softmax": with_attributes("Softmax", axis=int),
    "relax.nn.log_softmax": with_attributes("LogSoftmax", axis=int),
    "relax.nn.leakyrelu": with_attributes("LeakyRelu", alpha=float),
    "relax.nn.prelu": OnnxRow(write_prelu, "axis"),
    "relax.nn.layer_norm": OnnxRow(write_layer_norm, "axes epsilon center scale"),
}
