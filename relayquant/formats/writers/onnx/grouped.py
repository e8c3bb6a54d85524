"""ONNX writer: grouped weights of few bits, as DequantizeLinear with blocks or as MatMulNBits.

    grouped_dense(x, w)  ->  MatMul(x, DequantizeLinear(codes (K, N), block_size))
                             MatMulNBits(x, codes)
    grouped_take(i, w)   ->  Gather(DequantizeLinear(codes (N, K), block_size), i)
    expert_dense(x, i, w)
                         ->  MatMul(Gather(w (E, N, K), i), x), also with a grouped weight

There is no operator for data quantized row by row. MatMulNBits gets accuracy_level=4, with which
ONNX Runtime quantizes the data in blocks. Before a MatMul, each step is written out.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper
from tvm import relax
from tvm.ir import Call

from relayquant.base.packing import (
    count_groups,
    middle_code,
    pack_codes,
    read_levels,
    unpack_codes,
    value_bits,
)
from relayquant.config import GroupedForm
from relayquant.errors import ModelError
from relayquant.formats.writers.onnx.builder import OnnxBuilder
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype, tensor_shape

MICROSOFT = "com.microsoft"
#: Smallest group size of MatMulNBits. All sizes are powers of two.
LEAST_BLOCK = 16
#: Value of accuracy_level: data may be quantized to int8.
INT8_DATA = 4
#: Largest magnitude of an integer of a row.
ROW_LIMIT = 127.0


def write_quantize_rows(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write nothing: the readers of the rows write what they need."""
    name = builder.tensor(call.args[0], var.name)
    builder.rows[var] = name
    return name


def write_grouped_dense(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write MatMulNBits, or MatMul with dequantized blocks."""
    codes, scale, zero = read_weight(call, var.name, call.args[2:])
    bits, size = read_form(call)
    is_power = size >= LEAST_BLOCK and size & (size - 1) == 0
    if builder.grouped is GroupedForm.NBITS and is_power:
        source = write_data(builder, call, var.name, keeps_rows=True)
        is_row = call.args[0] in builder.rows
        return write_nbits(builder, var, (source, is_row), (codes, scale, zero), bits, size)
    source = write_data(builder, call, var.name)
    weight = dequantize(builder, (codes, scale, zero), bits, size, 0, var.name)
    return builder.emit("MatMul", [source, weight], var.name)


def write_data(builder: OnnxBuilder, call: Call, name: str, *, keeps_rows: bool = False) -> str:
    """Write the real data of a product, (..., K). `keeps_rows`: what `quantize_rows` read, and not
    what it rounds it to.
    """
    data, data_scale = call.args[:2]
    if data not in builder.rows:
        source = builder.tensor(data, name)
        if tensor_dtype(data) != "int8":
            return source
        units = builder.step("Cast", [source], f"{name}.units", to=TensorProto.FLOAT)
        return builder.step("Mul", [units, builder.tensor(data_scale, name)], f"{name}.rows")
    source = builder.rows[data]
    if not keeps_rows:
        source = write_rows(builder, source, name)
    is_split = (tensor_shape(data_scale) or ())[-1:] != (1,)
    return merge_groups(builder, source, data, name) if is_split else source


def merge_groups(builder: OnnxBuilder, source: str, data: relax.Expr, name: str) -> str:
    """Write rows (..., groups, size) as rows of the shape of `data`, (..., K)."""
    shape = tensor_shape(data) or ()
    sizes = np.array([*[0] * len(shape[:-1]), *shape[-1:]], "int64")  # 0: as in the operand
    return builder.step(
        "Reshape", [source, builder.constant(sizes, f"{name}.shape")], f"{name}.merged"
    )


def write_grouped_take(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write Gather of dequantized rows."""
    weight = read_weight(call, var.name, call.args[1:])
    table = dequantize(builder, weight, *read_form(call), 1, var.name)
    indices = builder.tensor(call.args[0], var.name)
    return builder.emit("Gather", [table, indices], var.name, axis=0)


def write_expert_dense(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write MatMul with the gathered float weights of the experts."""
    source, weight = (builder.tensor(call.args[i], var.name) for i in (0, 2))
    return write_chosen(builder, var, call, source, weight, call.args[1])


def write_grouped_expert_dense(builder: OnnxBuilder, var: relax.Var, call: Call) -> str:
    """Write MatMul with the gathered and dequantized weights of the experts."""
    weight = read_weight(call, var.name, call.args[3:])
    table = dequantize(builder, weight, *read_form(call), 1, var.name)
    source = write_data(builder, call, var.name)
    return write_chosen(builder, var, call, source, table, call.args[2])


def write_chosen(
    builder: OnnxBuilder, var: relax.Var, call: Call, source: str, weight: str, chosen: relax.Expr
) -> str:
    """Write the product of rows (..., S or 1, K) with matrices of a weight (E * N, K):

    Squeeze(MatMul(Gather(Reshape(weight, (E, N, K)), Mod(chosen, E)), Unsqueeze(source)))
    """
    name, experts = var.name, int(call.attrs.experts)
    last = builder.constant(np.array([-1], "int64"), f"{name}.last")
    count = builder.constant(np.array(experts, tensor_dtype(chosen)), f"{name}.experts")
    sizes = np.array([experts, int(var.ty.shape[-1]), int(call.args[0].ty.shape[-1])], "int64")
    shape = builder.constant(sizes, f"{name}.shape")
    number = builder.step("Mod", [builder.tensor(chosen, name), count], f"{name}.number")
    stack = builder.step("Reshape", [weight, shape], f"{name}.stack")
    own = builder.step("Gather", [stack, number], f"{name}.own", axis=0)
    column = builder.step("Unsqueeze", [source, last], f"{name}.column")
    product = builder.step("MatMul", [own, column], f"{name}.product")
    return builder.emit("Squeeze", [product, last], name)


def read_form(call: Call) -> tuple[int, int]:
    """Return the bits of the codes of `read_weight`, and the group size. ONNX has no levels: they
    are codes of 8 bits.
    """
    attrs = call.attrs
    return value_bits(int(attrs.bits), attrs.levels), int(attrs.group_size)


def read_weight(call: Call, name: str, args) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (codes uint8 (N, K), scales float32 and zero points uint8 (N, groups)).

    Raises:
        ModelError: they are computed at run time, or there are offsets.
    """
    packed, scale, zero = (constant_value(arg) for arg in args)
    if packed is None or scale is None or zero is None:
        raise ModelError(f"export_onnx: the weight of {name!r} is not a constant.", code="RQ203")
    if zero.dtype != np.uint8:
        raise ModelError(
            f"export_onnx: the weight of {name!r} has offsets, as blocks of GGUF with a minimum "
            "have (Q4_1, Q4_K). ONNX has zero points only. Use blocks without a minimum (Q4_0, "
            "Q8_0, Q6_K).",
            code="RQ203",
        )
    codes = unpack_codes(packed, int(call.attrs.bits), int(call.attrs.features))
    codes = read_levels(codes, [int(level) for level in call.attrs.levels])
    return codes, scale.astype("float32"), np.broadcast_to(zero, scale.shape)


def write_nbits(
    builder: OnnxBuilder,
    var: relax.Var,
    data: tuple[str, bool],
    weight: tuple[np.ndarray, np.ndarray, np.ndarray],
    bits: int,
    size: int,
) -> str:
    """Write com.microsoft.MatMulNBits. 2 and 3 bits are written as 4."""
    codes, scale, zero = weight
    rows, features = codes.shape
    groups, wide = count_groups(features, size), max(bits, 4)
    filled = np.pad(codes, [(0, 0), (0, groups * size - features)])
    packed = pack_codes(filled.reshape(rows, groups, size), wide)
    inputs = [
        data[0],
        builder.constant(packed, f"{var.name}.weight"),
        builder.constant(scale.reshape(-1), f"{var.name}.scale"),
    ]
    if (zero != middle_code(wide)).any():
        inputs.append(builder.constant(pack_codes(zero, wide).reshape(-1), f"{var.name}.zero"))
    level = {"accuracy_level": INT8_DATA} if data[1] else {}
    return builder.emit(
        "MatMulNBits", inputs, var.name, domain=MICROSOFT,
        K=features, N=rows, bits=wide, block_size=size, **level,
    )  # fmt: skip


def dequantize(
    builder: OnnxBuilder,
    weight: tuple[np.ndarray, np.ndarray, np.ndarray],
    bits: int,
    size: int,
    axis: int,
    name: str,
) -> str:
    """Add DequantizeLinear of a weight whose groups are along `axis`: 0 of (K, N) or 1 of (N, K).

    One group per row is written without blocks, unless scales are negative: scales along an axis
    must be positive.
    """
    codes, scale, zero = (part if axis else part.T for part in weight)
    kind = TensorProto.UINT8 if bits == 8 else TensorProto.UINT4
    attrs = {"axis": axis, "block_size": size}
    if scale.shape[axis] == 1 and (scale > 0).all():
        scale, zero = scale.reshape(-1), zero.reshape(-1)
        attrs = {"axis": 1 - axis}
    inputs = [
        add_codes(builder, codes, kind, f"{name}.weight"),
        builder.constant(scale, f"{name}.scale"),
        add_codes(builder, zero, kind, f"{name}.zero"),
    ]
    return builder.step("DequantizeLinear", inputs, f"{name}.dq", **attrs)


def add_codes(builder: OnnxBuilder, codes: np.ndarray, kind: int, base: str) -> str:
    """Add a constant of uint8, or of uint4 with two codes per byte, the first in the low bits."""
    if kind == TensorProto.UINT8:
        return builder.constant(codes, base)
    name = builder.unique_name(base)
    packed = pack_codes(np.ascontiguousarray(codes).reshape(-1), 4).tobytes()
    tensor: onnx.TensorProto = helper.make_tensor(name, kind, codes.shape, packed, raw=True)
    builder.constants.append(tensor)
    return name


def write_rows(builder: OnnxBuilder, data: str, name: str) -> str:
    """Write the real values of data quantized row by row: round(x / scale) * scale."""
    return builder.step("Mul", write_levels(builder, data, name), f"{name}.rows")


def write_levels(builder: OnnxBuilder, data: str, name: str) -> tuple[str, str]:
    """Write round(x / scale), as float32, and the scale of each row, with the steps of
    `qnn.quantize_rows`.
    """
    limit = builder.constant(np.array(ROW_LIMIT, "float32"), f"{name}.limit")
    zero, one = (builder.constant(np.array(v, "float32"), f"{name}.number") for v in (0.0, 1.0))
    size = builder.step("Abs", [data], f"{name}.size")
    largest = builder.reduce("ReduceMax", size, [-1], builder.unique_name(f"{name}.largest"))
    step = builder.step("Div", [largest, limit], f"{name}.step")
    is_some = builder.step("Greater", [step, zero], f"{name}.is_some")
    scale = builder.step("Where", [is_some, step, one], f"{name}.row_scale")
    real = builder.step("Div", [data, scale], f"{name}.scaled")
    return builder.step("Round", [real], f"{name}.rounded"), scale
