"""Dialect: discrete Fourier transforms. They work on real numbers, and are never quantized: the
largest results are often thousands of times the others, which 8 bits would lose.
"""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder

from relayquant.errors import QnnError, format_count
from relayquant.ir.dialect.construct import Operand, make_call
from relayquant.ir.dialect.fourier import MOST_ELEMENTS, emit_products, read_transform
from relayquant.ir.dialect.operands import Argument, get_operands, show_dimension
from relayquant.ir.dialect.operator import Operator, define_attrs
from relayquant.ir.rewrite.graph import static_size

__all__ = ["dft"]

DFT_OPERANDS = (Argument("x"),)


@define_attrs("relayquant.attrs.QDftAttrs")
class QDftAttrs(Attrs):
    """Attributes of qnn.dft."""

    length: int
    inverse: bool
    onesided: bool


def dft(x: Operand, length: int, inverse: bool = False, onesided: bool = False) -> Call:
    """Transform the n numbers along the second last axis: (..., n, p) -> (..., results, q).

    X[k] is the sum over t of x[t] * exp(-2 pi i k t / length). The inverse has exp(2 pi i k t /
    length) / length. These are `fft`, `ifft`, `rfft` and `irfft` of numpy.

    Args:
        x: float32 or float64 (..., n, p), n at most the length. Missing numbers are 0. Real numbers
            have p = 1 part. Complex numbers have p = 2, the real part first.
        length: Length of the transform, from 1 on.
        inverse: Compute the inverse.
        onesided: The results of a transform are the first length // 2 + 1, without the conjugates
            behind them. The data of an inverse is so, n at most length // 2 + 1. Its results are
            real: q = 1. Otherwise q = 2.
    """
    attrs = QDftAttrs(int(length), bool(inverse), bool(onesided))
    return make_call("dft", DFT_OPERANDS, (x,), attrs)


def infer_dft(call: Call, _builder: Any) -> Any:
    """Infer (..., n, p) -> (..., results, q)."""
    (x,) = get_operands(call, DFT_OPERANDS)
    length = int(call.attrs.length)
    x.check_dtype(("float32", "float64"), "Cast it first.")
    x.check_min_rank(2)
    if length < 1:
        raise QnnError(f"{x.operator}: length={length}; allowed: numbers from 1 on.", code="RQ601")
    if x.shape is None:
        return relax.TensorType(None, x.ty.dtype, x.ty.vdevice, x.ndim)
    *outer, numbers, parts = x.shape
    if static_size(parts) not in (1, 2):
        raise x.fail(
            f"has size {show_dimension(parts)} in dimension {x.ndim - 1}",
            "allowed: 1, real numbers, or 2, complex ones",
        )
    transform = read_transform(call)
    if not 0 < transform.numbers <= transform.most:
        raise x.fail(
            f"has size {show_dimension(numbers)} in dimension {x.ndim - 2}",
            f"allowed: a number from 1 to {transform.most}, for length={length}",
        )
    if transform.elements > MOST_ELEMENTS:
        raise x.fail(
            f"is transformed from {format_count(transform.numbers, 'number')} to "
            f"{transform.results}",
            f"allowed: products of both up to {MOST_ELEMENTS // 2}, or lengths with small factors",
        )
    return relax.TensorType([*outer, transform.results, transform.made], x.ty.dtype, x.ty.vdevice)


def legalize_dft(builder: BlockBuilder, call: Call) -> Any:
    """Compute it by products with constant matrices, which TVM legalizes."""
    return emit_products(builder.emit, call)


OPERATORS: tuple[Operator, ...] = (
    Operator("dft", QDftAttrs, DFT_OPERANDS, infer_dft, legalize_dft),
)

#: Operators on real data. They are no sign that a model is quantized.
FOURIER_OPERATORS = frozenset(operator.full_name for operator in OPERATORS)
