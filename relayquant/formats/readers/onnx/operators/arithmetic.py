"""ONNX reader: elementwise operators that TVM's frontend converts wrongly or to code that does not
compile.

Each function is a `Convert`, as `conversion` says.
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax

from relayquant.formats.readers.elu import emit_elu, scalar
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.reference.unary import SELU_ALPHA, SELU_SCALE
from relayquant.ir.rewrite.graph import constant_value

#: Unsigned integers have no sign bit, so a shift by their width or more leaves 0.
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")

#: From here on Mish(x) is x, in float64 too.
MISH_IS_X = 20.0


def dtype_of(value: relax.Expr) -> str:
    """Return the dtype of a tensor."""
    return str(value.ty.dtype)


def convert_mod(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Convert Mod of floats to R.mod, whose result has the sign of the dividend.

    With fmod=0, the result has the sign of the divisor. So the divisor is added if the signs
    differ. R.floor_mod is NaN for infinite divisors. Integers are left to TVM.
    """
    left, right = inputs
    dtype = dtype_of(left)
    if "float" not in dtype:
        return None
    rest = bb.emit(relax.op.mod(left, right))
    if attrs.get("fmod", 0):
        return rest
    zero = relax.const(0.0, dtype)
    negative = [bb.emit(relax.op.less(value, zero)) for value in (rest, right)]
    differs = bb.emit(relax.op.logical_xor(*negative))
    is_rest = bb.emit(relax.op.not_equal(rest, zero))
    moved = bb.emit(relax.op.add(rest, right))
    return relax.op.where(bb.emit(relax.op.logical_and(differs, is_rest)), moved, rest)


def convert_shrink(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Shrink: x + bias below -lambd, else x - bias above lambd, else 0.

    Both may hold, as lambd may be negative. Sums of integers with a fraction are truncated.
    """
    (data,) = inputs
    bound, bias = float(attrs.get("lambd", 0.5)), float(attrs.get("bias", 0.0))
    if "float" in dtype_of(data):
        below = bb.emit(relax.op.less(data, scalar(-bound, data)))
        above = bb.emit(relax.op.greater(data, scalar(bound, data)))
        raised = bb.emit(relax.op.add(data, scalar(bias, data)))
        lowered = bb.emit(relax.op.subtract(data, scalar(bias, data)))
    else:
        below = _is_at_most(bb, data, math.ceil(-bound) - 1)
        above = bb.emit(relax.op.logical_not(_is_at_most(bb, data, math.floor(bound))))
        raised, lowered = _truncate_sum(bb, data, bias), _truncate_sum(bb, data, -bias)
    rest = bb.emit(relax.op.where(above, lowered, relax.const(0, dtype_of(data))))
    return relax.op.where(below, raised, rest)


def _is_at_most(bb: Builder, data: relax.Expr, bound: int) -> relax.Expr:
    """Emit x <= bound for integers x and a bound that their dtype may not hold."""
    dtype = dtype_of(data)
    limits = np.iinfo(dtype)
    if bound < limits.min:
        return bb.emit(relax.op.less(data, relax.const(limits.min, dtype)))  # none
    return bb.emit(relax.op.less_equal(data, relax.const(min(bound, limits.max), dtype)))


def _truncate_sum(bb: Builder, data: relax.Expr, number: float) -> relax.Expr:
    """Emit x + number for integers x, rounded to 0. What the dtype does not hold wraps around."""
    dtype = dtype_of(data)
    down, up = (
        bb.emit(
            relax.op.add(data, relax.const(np.array(part % 2**64, "uint64").astype(dtype), dtype))
        )
        for part in (math.floor(number), math.ceil(number))
    )
    is_negative = _is_at_most(bb, data, math.ceil(-number) - 1)
    return bb.emit(relax.op.where(is_negative, up, down))


def convert_bit_shift(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert BitShift with counts of the width or more.

    Such a shift, or one by a negative count read as unsigned, leaves only copies of the sign. In
    LLVM it is undefined.
    """
    data, count = inputs
    dtype = dtype_of(data)
    width = np.iinfo(dtype).bits
    is_left = attrs["direction"] == b"LEFT"
    last = relax.const(width - 1, dtype)
    too_far = bb.emit(relax.op.greater(count, last))
    if dtype not in UNSIGNED:
        is_negative = bb.emit(relax.op.less(count, relax.const(0, dtype)))
        too_far = bb.emit(relax.op.logical_or(too_far, is_negative))
    near = bb.emit(relax.op.where(too_far, last, count))
    shift = relax.op.left_shift if is_left else relax.op.right_shift
    shifted = bb.emit(shift(data, near))
    if not is_left and dtype not in UNSIGNED:
        return shifted
    return relax.op.where(too_far, relax.const(0, dtype), shifted)


def convert_is_inf(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert IsInf with its flags to comparisons with the infinities that it tests for."""
    (data,) = inputs
    wanted = [
        value
        for name, value in (("detect_positive", math.inf), ("detect_negative", -math.inf))
        if attrs.get(name, 1)
    ]
    if len(wanted) == 2:
        return relax.op.isinf(data)
    if not wanted:
        return relax.op.less(data, relax.const(-math.inf, dtype_of(data)))  # without elements
    return relax.op.equal(data, relax.const(wanted[0], dtype_of(data)))


def convert_selu(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Selu to R.nn.selu, and with other numbers than its own to gamma * Elu."""
    (data,) = inputs
    alpha, gamma = float(attrs.get("alpha", SELU_ALPHA)), float(attrs.get("gamma", SELU_SCALE))
    if np.allclose((alpha, gamma), (SELU_ALPHA, SELU_SCALE), rtol=1e-7):
        return relax.op.nn.selu(data)
    curve = emit_elu(bb, data, alpha)
    return relax.op.multiply(curve, scalar(gamma, curve))


def convert_thresholded_relu(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert ThresholdedRelu. TVM multiplies by 0, which makes NaN of infinities, in float32
    only.
    """
    (data,) = inputs
    above = bb.emit(relax.op.greater(data, scalar(float(attrs.get("alpha", 1.0)), data)))
    return relax.op.where(above, data, scalar(0.0, data))


def convert_mish(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Mish, x * tanh(log(1 + e^x)), to x * (w / (w + 2)) with w = e^x * (e^x + 2).

    Nothing cancels, unlike in 1 + e^x. The factor is 1 for large x, so e^x need not overflow.
    """
    (data,) = inputs
    power = bb.emit(relax.op.exp(bb.emit(relax.op.minimum(data, scalar(MISH_IS_X, data)))))
    square = bb.emit(relax.op.multiply(power, bb.emit(relax.op.add(power, scalar(2.0, data)))))
    share = bb.emit(relax.op.divide(square, bb.emit(relax.op.add(square, scalar(2.0, data)))))
    return relax.op.multiply(data, share)


def convert_pow(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr | None:
    """Convert Pow of mixed dtypes. The result has the dtype of the base.

    Powers of integers are computed by squaring. This is exact and wraps as in numpy, and it
    compiles in TVM's own pipelines, unlike R.power of integers. Negative powers of integers are
    truncated, as in ONNX Runtime.
    """
    base, exponent = inputs
    kinds = dtype_of(base), dtype_of(exponent)
    if all("float" in kind for kind in kinds):
        if kinds[0] == kinds[1]:
            return None
        return relax.op.power(base, bb.emit(relax.op.astype(exponent, kinds[0])))
    if "float" in kinds[0]:
        return relax.op.power(base, bb.emit(relax.op.astype(exponent, kinds[0])))
    if "float" in kinds[1]:
        wide = [bb.emit(relax.op.astype(value, "float64")) for value in (base, exponent)]
        return relax.op.astype(bb.emit(relax.op.power(*wide)), kinds[0])
    array = constant_value(exponent)
    width = np.iinfo(kinds[1]).bits - (kinds[1] not in UNSIGNED)
    known = array is not None and (array >= 0).all()
    bits = int(np.max(array, initial=0)).bit_length() if known else width
    one = relax.const(1, kinds[0])
    result: relax.Expr = bb.emit(
        relax.op.add(relax.op.multiply(base, relax.const(0, kinds[0])), one)
    )
    power = base
    for at in range(bits):
        factor = _select_bit(bb, exponent, at, power, one)
        result = bb.emit(relax.op.multiply(result, factor))
        power = bb.emit(relax.op.multiply(power, power)) if at + 1 < bits else power
    if known or kinds[1] in UNSIGNED:
        return result
    # 1 / x^n is truncated to 0, except for 1 and -1, whose powers do not depend on the higher bits.
    zero = relax.const(0, kinds[0])
    is_fraction = bb.emit(relax.op.less(exponent, relax.const(0, kinds[1])))
    for unit in (1,) if kinds[0] in UNSIGNED else (1, -1):
        is_other = bb.emit(relax.op.not_equal(base, relax.const(unit, kinds[0])))
        is_fraction = bb.emit(relax.op.logical_and(is_fraction, is_other))
    return relax.op.where(is_fraction, zero, result)


def _select_bit(
    bb: Builder, value: relax.Expr, at: int, yes: relax.Expr, no: relax.Expr
) -> relax.Expr:
    """Emit `yes` where bit `at` of `value` is set, else `no`."""
    dtype = dtype_of(value)
    bit = bb.emit(relax.op.bitwise_and(value, relax.const(1 << at, dtype)))
    return bb.emit(relax.op.where(bb.emit(relax.op.not_equal(bit, relax.const(0, dtype))), yes, no))


def convert_dropout(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Dropout in inference to its input, and a mask that keeps everything.

    Raises:
        Refusal: it is in training mode, or the mode is computed at run time.
    """
    data = inputs[0]
    ratio, mode = (*inputs[1:], None, None)[:2]
    if mode is not None:
        is_training = constant_value(mode)
        share = None if ratio is None else constant_value(ratio)
        drops_none = share is not None and share.item() == 0.0
        if not drops_none and (is_training is None or is_training.item()):
            raise Refusal("training_mode is not false; supported: inference")
    if attrs["tvm_custom"]["num_outputs"] == 1:
        return data
    dtype = "bool" if opset >= 10 else dtype_of(data)
    ones = relax.op.full(data.ty.shape, relax.const(True if dtype == "bool" else 1.0, dtype))
    return relax.Tuple([data, bb.emit(ones)])
