"""ONNX reader: TVM's frontend, as the conversions here call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

from relayquant.base import _tvm
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.grouped import GROUPED_PRODUCTS
from relayquant.ir.rewrite.graph import constant_value

FRONTEND = _tvm.load_onnx_frontend()


def run_frontend(name: str, bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    converter = FRONTEND._get_convert_map()[name].get_converter(opset)
    return converter(bb, FRONTEND.onnx_input(inputs), attrs, [{}, {}])


def round_once(convert: Callable[..., relax.Expr]) -> Callable[..., relax.Expr]:
    """Return a conversion that computes float16 and bfloat16 in float32, for an operator of several
    steps, each of which would round.
    """

    def convert_widened(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
        dtype = str(inputs[0].ty.dtype)
        if dtype not in ("float16", "bfloat16"):
            return convert(bb, inputs, attrs, opset)
        wide = [widen_operand(bb, each, dtype) for each in inputs]
        return relax.op.astype(bb.emit(convert(bb, wide, attrs, opset)), dtype)

    return convert_widened


def widen_operand(bb: Builder, operand: Any, dtype: str) -> Any:
    """Return an operand of this type in float32, a constant as one, and any other as it is."""
    if operand is None or str(getattr(operand.ty, "dtype", "")) != dtype:
        return operand
    if (array := constant_value(operand)) is not None:
        return relax.const(array.astype("float32"))
    return bb.emit(relax.op.astype(operand, "float32"))


def sum_in_float32(op: str, bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert with TVM's frontend, and compute float16 in float32.

    The sum is rounded once. TVM's float16 kernels round each partial sum. A product with rows of a
    grouped weight reads the codes.
    """
    multiply = GROUPED_PRODUCTS.get(op)
    grouped = multiply(bb, inputs, attrs) if multiply is not None else None
    if grouped is not None:
        return grouped
    if str(inputs[0].ty.dtype) != "float16":
        return keep_fractions(op, bb, inputs, attrs, opset)
    return run_widened("float32", op, bb, inputs, attrs, opset)


def keep_fractions(op: str, bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert with TVM's frontend, and compute integers in float64 if an attribute is a fraction.

    The result is rounded towards zero. TVM's frontend makes integers of the attributes.
    """
    is_integer = str(inputs[0].ty.dtype).startswith(("int", "uint"))
    fractions = [each for each in attrs.values() if isinstance(each, float) and each % 1]
    if is_integer and fractions:
        return run_widened("float64", op, bb, inputs, attrs, opset)
    return run_frontend(op, bb, list(inputs), attrs, opset)


def run_widened(
    dtype: str, op: str, bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert with TVM's frontend in a wider dtype. The result has the dtype of the data."""
    wide = [each if each is None else bb.emit(relax.op.astype(each, dtype)) for each in inputs]
    value = bb.emit(run_frontend(op, bb, wide, attrs, opset))
    return bb.emit(relax.op.astype(value, str(inputs[0].ty.dtype)))
