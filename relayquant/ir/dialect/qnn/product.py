"""Dialect: dense and batch_matmul on integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder

from relayquant.ir.dialect.construct import Operand, Parameter, make_call
from relayquant.ir.dialect.linear import (
    LINEAR_OPERANDS,
    check_linear_parameters,
    get_linear,
    make_multiply,
    subtract_zero_point,
)
from relayquant.ir.dialect.loops import make_loops, name_hint
from relayquant.ir.dialect.operands import (
    Argument,
    broadcast_dims,
    is_known_different,
    scale_argument,
    show_dimension,
    show_shape,
    zero_point_argument,
)
from relayquant.ir.dialect.operator import Operator, define_attrs
from relayquant.ir.dialect.parameters import PrimExpr, Reader, compute_tensor

__all__ = ["batch_matmul", "dense"]

BATCH_MATMUL_OPERANDS = (
    Argument("x"),
    Argument("y"),
    zero_point_argument("x_zero_point"),
    zero_point_argument("y_zero_point"),
    scale_argument("x_scale"),
    scale_argument("y_scale"),
)


@define_attrs("relayquant.attrs.QMatmulAttrs")
class QMatmulAttrs(Attrs):
    """Attributes of qnn.dense and qnn.batch_matmul."""

    out_dtype: str


# ---------------------------------------------------------------- constructors


def dense(
    data: Operand,
    weight: Operand,
    input_zero_point: Parameter,
    kernel_zero_point: Parameter,
    input_scale: Parameter,
    kernel_scale: Parameter,
    out_dtype: str = "int32",
) -> Call:
    """Multiply data (..., K) by weight (N, K) -> int32 or int64 (..., N).

    Both are int8, uint8 or int16.

    Kernel parameters: () or (N,).
    """
    values = (data, weight, input_zero_point, kernel_zero_point, input_scale, kernel_scale)
    return make_call("dense", LINEAR_OPERANDS, values, QMatmulAttrs(out_dtype))


def batch_matmul(
    x: Operand,
    y: Operand,
    x_zero_point: Parameter,
    y_zero_point: Parameter,
    x_scale: Parameter,
    y_scale: Parameter,
    out_dtype: str = "int32",
) -> Call:
    """Multiply x (..., M, K) by y (..., N, K) -> int32 or int64 (..., M, N).

    Both are int8, uint8 or int16.

    The leading dimensions broadcast. Parameters: ().
    """
    values = (x, y, x_zero_point, y_zero_point, x_scale, y_scale)
    return make_call("batch_matmul", BATCH_MATMUL_OPERANDS, values, QMatmulAttrs(out_dtype))


# ---------------------------------------------------------------- types


def infer_dense(call: Call, _builder: Any) -> Any:
    """Infer data (..., K), weight (N, K) -> int32 or int64 (..., N)."""
    data, weight, parameters = get_linear(call)
    data.check_min_rank(1)
    weight.check_rank(2)
    units = weight.dimension(0)
    check_linear_parameters(data, weight, parameters, units, True)
    if data.shape is None or units is None:
        return relax.TensorType(None, call.attrs.out_dtype, data.ty.vdevice, data.ndim)
    if is_known_different(data.shape[-1], weight.dimension(1)):
        raise weight.fail(
            f"has shape {show_shape(weight.shape or [])}",
            f"allowed: (units, {show_dimension(data.shape[-1])}), as 'data' is "
            + show_shape(data.shape),
            "The weight is (units, inputs), as in torch.nn.Linear.",
        )
    return relax.TensorType([*data.shape[:-1], units], call.attrs.out_dtype, data.ty.vdevice)


def infer_batch_matmul(call: Call, _builder: Any) -> Any:
    """Infer x (..., M, K), y (..., N, K) -> int32 or int64 (..., M, N)."""
    x, y, parameters = get_linear(call, BATCH_MATMUL_OPERANDS)
    x.check_min_rank(2)
    y.check_min_rank(2)
    check_linear_parameters(x, y, parameters, None, False)
    if x.shape is None or y.shape is None:
        ndim = -1 if -1 in (x.ndim, y.ndim) else max(x.ndim, y.ndim)
        return relax.TensorType(None, call.attrs.out_dtype, x.ty.vdevice, ndim)
    if is_known_different(x.shape[-1], y.shape[-1]):
        raise y.fail(
            f"has shape {show_shape(y.shape)}",
            f"allowed: (..., N, {show_dimension(x.shape[-1])}), because 'x' is "
            + show_shape(x.shape),
            "The last two axes of y are transposed: (..., N, K).",
        )
    batch = broadcast_dims(x.operator, (x, x.shape[:-2]), (y, y.shape[:-2]))
    return relax.TensorType([*batch, x.shape[-2], y.shape[-2]], call.attrs.out_dtype, x.ty.vdevice)


# ---------------------------------------------------------------- loop nests


def legalize_dense(builder: BlockBuilder, call: Call) -> Any:
    """Compute out[..., n] = sum over k of (data[..., k] - z_d) * (weight[n, k] - z_w[n])."""
    data, weight, input_zero, kernel_zero = call.args[:4]
    reader = Reader()
    read_input_zero, read_kernel_zero = reader.add(input_zero), reader.add(kernel_zero)
    shape, multiply = list(call.ty.shape), make_multiply(call)

    def te_dense(source: te.Tensor, kernel: te.Tensor) -> te.Tensor:
        centred = subtract_zero_point(source, lambda *i: read_input_zero(0), "centred")
        weights = subtract_zero_point(kernel, lambda *i: read_kernel_zero(i[0]), "centred_weight")
        k = te.reduce_axis((0, kernel.shape[1]), name="k")
        return compute_tensor(
            shape,
            lambda *i: te.sum(multiply(centred(*i[:-1], k), weights(i[-1], k)), axis=k),
            name=name_hint(call),
        )

    return make_loops(builder, call, te_dense, [data, weight], reader)


def legalize_batch_matmul(builder: BlockBuilder, call: Call) -> Any:
    """Compute out[..., m, n] = sum over k of (x[..., m, k] - z_x) * (y[..., n, k] - z_y)."""
    x, y, x_zero, y_zero = call.args[:4]
    reader = Reader()
    read_x_zero, read_y_zero = reader.add(x_zero), reader.add(y_zero)
    shape, multiply = list(call.ty.shape), make_multiply(call)

    def te_batch_matmul(left: te.Tensor, right: te.Tensor) -> te.Tensor:
        left_centred = subtract_zero_point(left, lambda *i: read_x_zero(0), "centred_x")
        right_centred = subtract_zero_point(right, lambda *i: read_y_zero(0), "centred_y")
        k = te.reduce_axis((0, left.shape[-1]), name="k")

        def batch_of(tensor: te.Tensor, batch: Sequence[PrimExpr]) -> list[PrimExpr]:
            sizes = list(tensor.shape)[:-2]
            used = batch[len(batch) - len(sizes) :]
            return [
                tirx.const(0, "int64") if isinstance(s, tirx.IntImm) and int(s) == 1 else b
                for s, b in zip(sizes, used, strict=True)
            ]

        def element(*index: PrimExpr) -> PrimExpr:
            batch, m, n = index[:-2], index[-2], index[-1]
            product = multiply(
                left_centred(*batch_of(left, batch), m, k),
                right_centred(*batch_of(right, batch), n, k),
            )
            return te.sum(product, axis=k)

        return compute_tensor(shape, element, name=name_hint(call))

    return make_loops(builder, call, te_batch_matmul, [x, y], reader)


OPERATORS: tuple[Operator, ...] = (
    Operator("dense", QMatmulAttrs, LINEAR_OPERANDS, infer_dense, legalize_dense),
    Operator(
        "batch_matmul",
        QMatmulAttrs,
        BATCH_MATMUL_OPERANDS,
        infer_batch_matmul,
        legalize_batch_matmul,
    ),
)
