"""Relay reader, rows: the QNN dialect -> the operators of `relayquant.ir.dialect`, with TVM 0.19's
rounding.

Relay rounds `quantize` half away from zero and requantizes UPWARD, unless the operator has another
mode. If Relay leaves the arithmetic open, TVM chose it by target. Here it is 64-bit fixed point,
which was TVM's choice for a plain "llvm" target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax

from relayquant.base.qtypes import Arithmetic, QParams, Rounding
from relayquant.errors import ModelError
from relayquant.ir.dialect import qnn
from relayquant.ir.reference import UNARY, Unary, build_table
from relayquant.ir.reference import qnn as reference
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype
from relayquant.relay.operators.base import (
    RelayOp,
    Site,
    boxed,
    dtype,
    flag,
    integer,
    integers,
    make_const,
    make_scalar,
    real,
    text,
)
from relayquant.relay.operators.linear import (
    check_units,
    conv_attrs,
    conv_operands,
    swap_last,
    transposed_operands,
)
from relayquant.relay.operators.pool import pool_attrs, pool_keywords

op = relax.op

#: Relay's mode for operators without a mode attribute.
QUANTIZE_ROUNDING = Rounding.TONEAREST
REQUANTIZE_ROUNDING = Rounding.UPWARD
REQUANTIZE_ARITHMETIC = Arithmetic.INT64
RELAY_MODES: dict[str, Any] = {
    "rounding": REQUANTIZE_ROUNDING,
    "compute_dtype": REQUANTIZE_ARITHMETIC,
}


def parameter(site: Site, index: int) -> relax.Expr:
    """Return a scale or zero point. A vector of one element becomes a scalar."""
    return to_parameter(site.tensor(index))


def to_parameter(expr: relax.Expr) -> relax.Expr:
    array = constant_value(expr)
    if array is not None and array.size == 1 and array.ndim:
        return make_const(array.reshape(()))
    return expr


def parameters(site: Site, start: int, count: int) -> list[relax.Expr]:
    return [parameter(site, index) for index in range(start, start + count)]


def convert_quantize(site: Site) -> relax.Expr:
    """Convert quantize. Constants are quantized at once, because biases and pad values are written
    this way.
    """
    data, scale, zero_point = site.tensor(0), parameter(site, 1), parameter(site, 2)
    attrs = site.attrs
    arrays = [constant_value(each) for each in (data, scale, zero_point)]
    if arrays[0] is not None and arrays[1] is not None and arrays[2] is not None:
        return make_const(
            reference.quantize(
                arrays[0],
                arrays[1],
                arrays[2],
                axis=attrs["axis"],
                out_dtype=attrs["out_dtype"],
                rounding=QUANTIZE_ROUNDING,
            )
        )
    return qnn.quantize(
        data, scale, zero_point, attrs["axis"], attrs["out_dtype"], rounding=QUANTIZE_ROUNDING
    )


def convert_dequantize(site: Site) -> relax.Expr:
    attrs = site.attrs
    return qnn.dequantize(
        site.tensor(0),
        *parameters(site, 1, 2),
        attrs["axis"],
        attrs["out_dtype"] or "float32",
    )


def convert_requantize(site: Site) -> relax.Expr:
    attrs = site.attrs
    rounding, arithmetic = attrs["rounding"], attrs["compute_dtype"]
    return qnn.requantize(
        site.tensor(0),
        *parameters(site, 1, 4),
        attrs["axis"],
        attrs["out_dtype"] or "int8",
        rounding=REQUANTIZE_ROUNDING if rounding == "None" else rounding,
        compute_dtype=REQUANTIZE_ARITHMETIC if arithmetic == "None" else arithmetic,
    )


def convert_conv2d(site: Site) -> relax.Expr:
    data, weight, keywords = conv_operands(site, 2)
    keywords["out_dtype"] = keywords["out_dtype"] or "int32"
    return qnn.conv2d(data, weight, *parameters(site, 2, 4), **keywords)


def convert_conv2d_transpose(site: Site) -> relax.Expr:
    data, weight, keywords = transposed_operands(site, 2)
    keywords["out_dtype"] = keywords["out_dtype"] or "int32"
    return qnn.conv2d_transpose(data, weight, *parameters(site, 2, 4), **keywords)


def convert_dense(site: Site) -> relax.Expr:
    check_units(site, site.tensor(1))
    return qnn.dense(
        site.tensor(0), site.tensor(1), *parameters(site, 2, 4), site.attrs["out_dtype"] or "int32"
    )


def convert_batch_matmul(site: Site) -> relax.Expr:
    """Convert batch_matmul. Ours takes y as (B, N, K), like Relay with transpose_b."""
    attrs = site.attrs
    left, right = site.tensor(0), site.tensor(1)
    left = swap_last(site, left) if attrs["transpose_a"] else left
    right = swap_last(site, right) if not attrs["transpose_b"] else right
    return qnn.batch_matmul(left, right, *parameters(site, 2, 4), attrs["out_dtype"] or "int32")


def binary(function: Callable[..., relax.Expr]) -> Callable[[Site], relax.Expr]:
    def convert(site: Site) -> relax.Expr:
        return function(
            site.tensor(0),
            site.tensor(1),
            *parameters(site, 2, 6),
            site.attrs["lhs_axis"],
            site.attrs["rhs_axis"],
            **RELAY_MODES,
        )

    return convert


def convert_concatenate(site: Site) -> relax.Expr:
    return qnn.concatenate(
        site.tensors(0),
        [to_parameter(each) for each in site.tensors(1)],
        [to_parameter(each) for each in site.tensors(2)],
        *parameters(site, 3, 2),
        site.attrs["axis"],
        **RELAY_MODES,
    )


def convert_leaky_relu(site: Site) -> relax.Expr:
    return qnn.leaky_relu(
        site.tensor(0), *parameters(site, 1, 4), site.attrs["alpha"], **RELAY_MODES
    )


def convert_avg_pool2d(site: Site) -> relax.Expr:
    keywords = pool_keywords(site, 2)
    return qnn.avg_pool2d(
        site.tensor(0),
        *parameters(site, 1, 4),
        count_include_pad=site.attrs["count_include_pad"],
        **keywords,
        **RELAY_MODES,
    )


def table(row: Unary) -> Callable[[Site], relax.Expr]:
    """Convert a function of one 8-bit value to a table of 256 entries, as Relay computes it.

    NaN becomes infinity: Relay quantizes the root or logarithm of a negative number to the largest
    integer. Our tables treat a negative number as 0.
    """

    def function(x: np.ndarray) -> np.ndarray:
        y = replace(row, low=None).tabulate(x)
        return np.where(np.isnan(y), np.float32(np.inf), y)

    def convert(site: Site) -> relax.Expr:
        data = site.tensor(0)
        scale, zero_point, out_scale, out_zero_point = (
            site.constant(i).item() for i in range(1, 5)
        )
        kind = tensor_dtype(data)
        source = QParams(np.float32(scale), np.int32(zero_point), kind)
        target = QParams(np.float32(out_scale), np.int32(out_zero_point), kind)
        entries = build_table(function, source, target, QUANTIZE_ROUNDING)
        return qnn.lookup(data, make_const(entries))

    return convert


def convert_softmax(site: Site) -> relax.Expr:
    """The integer softmax of TVM 0.19 (I-BERT's exponential), in int32:

        x0 = round(1 / s); v = (q - z) - max; v = v + (v >> 1) - (v >> 4)
        n = clip(v / -x0, 0, 20); r = v + n * x0; b = (r >> 1) + x0
        e = b << (max(n) - n); o = ((2^30 / sum(e)) * e) >> 23; requantize from 1 / 128

    Divisions truncate.
    """
    data = site.tensor(0)
    scale, zero_point = float(site.constant(1).item()), int(site.constant(2).item())
    if not 0 < scale <= 1:
        raise ModelError(f"the input scale is {scale}; allowed: above 0, up to 1.", code="RQ202")
    axis = site.axis(site.attrs["axis"], site.ndim(data))
    inverse = round(1 / np.float32(scale))

    def number(value: int) -> relax.Expr:
        return make_scalar(value, "int32")

    def extreme(values: relax.Expr) -> relax.Expr:
        return site.emit(op.max(values, [axis], keepdims=True))

    def shift(values: relax.Expr, bits: int) -> relax.Expr:
        return site.emit(op.right_shift(values, number(bits)))

    centred = site.emit(op.subtract(site.emit(op.astype(data, "int32")), number(zero_point)))
    v = site.emit(op.subtract(centred, extreme(centred)))
    v = site.emit(op.subtract(site.emit(op.add(v, shift(v, 1))), shift(v, 4)))
    quotient = site.emit(op.divide(v, number(-inverse)))
    n = site.emit(op.clip(quotient, 0, 20))
    r = site.emit(op.add(v, site.emit(op.multiply(n, number(inverse)))))
    b = site.emit(op.add(shift(r, 1), number(inverse)))
    power = site.emit(op.subtract(extreme(n), n))
    e = site.emit(op.left_shift(b, power))
    total = site.emit(op.sum(e, [axis], keepdims=True))
    factor = site.emit(op.divide(number(2**30), total))
    o = shift(site.emit(op.multiply(factor, e)), 23)
    return qnn.requantize(
        o,
        make_scalar(1 / 128, "float32"),
        number(0),
        *parameters(site, 3, 2),
        out_dtype=tensor_dtype(data),
        **RELAY_MODES,
    )


_AXES = {"lhs_axis": integer(-1), "rhs_axis": integer(-1)}
_QUANTIZE = {"out_dtype": dtype(required=True), "axis": integer(-1)}

QUANTIZED_OPS: tuple[RelayOp, ...] = (
    RelayOp("qnn.quantize", 3, convert_quantize, _QUANTIZE),
    RelayOp("qnn.dequantize", 3, convert_dequantize, {"out_dtype": dtype(), "axis": integer(-1)}),
    RelayOp(
        "qnn.requantize",
        5,
        convert_requantize,
        {
            "axis": integer(-1),
            "rounding": text("None"),
            "compute_dtype": text("None"),
            "out_dtype": dtype(),
        },
    ),
    RelayOp("qnn.conv2d", 6, convert_conv2d, conv_attrs(2, "OIHW")),
    RelayOp(
        "qnn.conv2d_transpose",
        6,
        convert_conv2d_transpose,
        conv_attrs(2, "IOHW", output_padding=integers(0, 0)),
    ),
    RelayOp("qnn.dense", 6, convert_dense, {"units": boxed(), "out_dtype": dtype()}),
    RelayOp(
        "qnn.batch_matmul",
        6,
        convert_batch_matmul,
        {"transpose_a": flag(), "transpose_b": flag(), "out_dtype": dtype()},
    ),
    RelayOp("qnn.add", 8, binary(qnn.add), _AXES),
    RelayOp("qnn.subtract", 8, binary(qnn.subtract), _AXES),
    RelayOp("qnn.mul", 8, binary(qnn.mul), _AXES),
    RelayOp("qnn.concatenate", 5, convert_concatenate, {"axis": integer(0)}),
    RelayOp("qnn.leaky_relu", 5, convert_leaky_relu, {"alpha": real(0.25)}),
    RelayOp("qnn.avg_pool2d", 5, convert_avg_pool2d, pool_attrs(2, count_include_pad=flag())),
    RelayOp("qnn.softmax", 5, convert_softmax, {"axis": integer(-1)}),
    *(RelayOp(f"qnn.{row.name}", 5, table(row)) for row in UNARY if row.is_in_relay_qnn),
)
