"""Relax operators -> loop nests of our own; part of `passes`.

They replace loop nests of TVM that cost far more, do not compile, or read memory out of bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx, topi
from tvm.ir import Call

from relayquant.codegen.kernels.floating.softmax import Softmax, make_softmax
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import is_cpu_target
from relayquant.codegen.kernels.permutation import Permutation, make_permutation
from relayquant.codegen.legalization.bounds import ASKED, BOUNDS
from relayquant.codegen.legalization.divisions import DIVISION_LEGALIZATIONS
from relayquant.codegen.legalization.indexing import INDEXING_LEGALIZATIONS
from relayquant.codegen.legalization.logical_and_bitwise import BITS, legalize_as_tvm
from relayquant.codegen.legalization.pools import POOL_LEGALIZATIONS
from relayquant.codegen.legalization.powers import legalize_power
from relayquant.codegen.legalization.reductions import REDUCTION_LEGALIZATIONS
from relayquant.codegen.legalization.resizing import RESIZING_LEGALIZATIONS
from relayquant.codegen.lowering.engine import mark_kernel
from relayquant.codegen.lowering.kernel_call import build_for_batch, split_batch
from relayquant.ir.dialect.operator import replace_attrs
from relayquant.ir.reference.relax.row import list_axes
from relayquant.ir.reference.unary import SELU_ALPHA, SELU_SCALE
from relayquant.ir.rewrite.expressions import shape_of
from relayquant.ir.rewrite.graph import call_name, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import list_permutation


def legalize_as_declared(builder: relax.BlockBuilder, call: Call) -> Any:
    """Cast an integer result to its declared type. TVM leaves the sums in a wider type."""
    result = legalize_as_tvm(builder, call)
    dtype = tensor_dtype(call)
    if dtype.startswith("float"):
        return result
    return relax.op.astype(builder.emit(result), dtype)


def legalize_sign(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize sign(x) or -x. TVM compares unsigned integers with -1, or multiplies by it: their
    sign is 0 or 1, and -x wraps around. The sign of NaN is NaN.
    """
    (data,) = call.args
    if call_name(call) == "relax.sign" and tensor_dtype(data) in ASKED:
        return builder.call_te(
            lambda x: topi.where(topi.isnan(x), x, topi.sign(x)), data, primfunc_name_hint="sign"
        )
    if not tensor_dtype(data).startswith("uint"):
        return legalize_as_tvm(builder, call)

    def compute(x: Any) -> Any:
        if call_name(call) == "relax.negative":
            return topi.subtract(topi.full_like(x, 0), x)
        return topi.cast(topi.greater(x, tirx.const(0, x.dtype)), x.dtype)

    return builder.call_te(compute, data, primfunc_name_hint=call_name(call)[6:])


def legalize_cosh(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize cosh(x) as (e^x + 1 / e^x) / 2. TVM has no LLVM function for it."""
    return builder.call_te(compute_cosh, *call.args, primfunc_name_hint="cosh")


#: Integers -> the wider type that a float is cast to first. The wider integer wraps around, as in
#: numpy and PyTorch. LLVM leaves a direct cast open for numbers that the narrow type does not hold,
#: and computes on with the float itself where the integer becomes a float again.
NARROW_INTEGERS = {
    **dict.fromkeys(("int8", "uint8", "int16", "uint16"), "int32"),
    "uint32": "int64",
}


FLOATS = ("float16", "float32", "float64", "bfloat16")


def legalize_astype(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a cast to bfloat16 that keeps NaN: TVM rounds the bits of a NaN as if they were a
    number, so that some become 0 or infinity. And a cast of floats to narrow integers, and of bool
    to floats: TVM does not compile the cast of a comparison in a function that reads it twice.
    """
    given, wanted = tensor_dtype(call.args[0]), tensor_dtype(call)
    if given == "bool" and wanted in FLOATS:
        one, zero = (tirx.const(number, wanted) for number in (1, 0))
        return builder.call_te(
            lambda data: te.compute(data.shape, lambda *at: tirx.Select(data(*at), one, zero)),
            *call.args,
            primfunc_name_hint="astype",
        )
    if given not in FLOATS:
        return legalize_as_tvm(builder, call)
    if (between := NARROW_INTEGERS.get(wanted)) is not None:
        return builder.call_te(
            lambda data: topi.cast(topi.cast(data, between), wanted),
            *call.args,
            primfunc_name_hint="astype",
        )
    if wanted != "bfloat16" or given == "bfloat16":
        return legalize_as_tvm(builder, call)

    def compute_narrow(data: Any) -> Any:
        x = topi.cast(data, "float32")
        nan = topi.full_like(x, tirx.FloatImm("float32", float("nan")))
        return topi.cast(topi.where(topi.isnan(x), nan, x), "bfloat16")

    return builder.call_te(compute_narrow, *call.args, primfunc_name_hint="astype")


def legalize_filling(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a tensor of equal numbers, as large as another. In bfloat16 the number is spread:
    TVM does not compile vectors of a bfloat16 constant.
    """
    dtype, name = tensor_dtype(call), call_name(call)
    if dtype != "bfloat16":
        return legalize_as_tvm(builder, call)
    if name == "relax.full_like":
        number = call.args[1]
    else:
        number = relax.const(float(name == "relax.ones_like"), "float32")
    wide = builder.emit(relax.op.astype(number, "float32"))
    spread = builder.emit(relax.op.broadcast_to(wide, call.ty.shape))
    return relax.op.astype(spread, dtype)


def legalize_prelu(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize prelu(x, slopes) also along an axis of symbolic size, which TVM has to know."""
    axis, is_single = int(call.attrs.axis), tensor_shape(call.args[1]) == (1,)

    def compute(x: Any, slopes: Any) -> Any:
        def scale(*at: Any) -> Any:
            value, slope = x(*at), slopes(0 if is_single else at[axis])
            return tirx.Select(value > 0, value, value * slope)

        return te.compute(x.shape, scale, name="prelu")

    return builder.call_te(compute, *call.args, primfunc_name_hint="prelu")


def legalize_batch_norm(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize batch_norm(x) with its axis counted from 0. TVM knows no axis -1."""
    (axis,) = list_axes([call.attrs.axis], call.args[0].ty.ndim)
    counted = Call(call.op, call.args, replace_attrs(call.attrs, axis=axis), call.ty_args)
    return legalize_as_tvm(builder, builder.normalize(counted))


def legalize_layer_norm(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize layer_norm(x) of float64, which TVM's kernel does not take, by its definition."""
    if tensor_dtype(call) != "float64":
        return legalize_as_tvm(builder, call)
    data, scale, shift = call.args
    emit, attrs, rank = builder.emit, call.attrs, data.ty.ndim
    axes = sorted(int(axis) % rank for axis in attrs.axes)
    extents = [size if axis in axes else 1 for axis, size in enumerate(shape_of(data))]
    mean = emit(relax.op.mean(data, axes, True))
    centered = emit(relax.op.subtract(data, mean))
    power = emit(relax.op.mean(emit(relax.op.multiply(centered, centered)), axes, True))
    lifted = emit(relax.op.add(power, relax.const(float(attrs.epsilon), "float64")))
    value = relax.op.divide(centered, emit(relax.op.sqrt(lifted)))
    if attrs.scale:
        value = relax.op.multiply(emit(value), emit(relax.op.reshape(scale, extents)))
    if attrs.center:
        value = relax.op.add(emit(value), emit(relax.op.reshape(shift, extents)))
    return value


def legalize_sinh(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize sinh(x) as tanh(x) * cosh(x), which is as exact near 0."""

    def compute_sinh(x: Any) -> Any:
        return topi.multiply(topi.tanh(x), compute_cosh(x))

    return builder.call_te(compute_sinh, *call.args, primfunc_name_hint="sinh")


def compute_cosh(x: Any) -> Any:
    """Compute (e^x + e^-x) / 2 of squares of e^(x / 2). e^x overflows before its half does."""
    half, one = (tirx.FloatImm(str(x.dtype), value) for value in (0.5, 1))
    root = topi.exp(topi.multiply(x, half))
    terms = (
        topi.multiply(topi.multiply(each, half), each) for each in (root, topi.divide(one, root))
    )
    return topi.add(*terms)


def legalize_selu(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize selu(x) with e^x - 1 as tanh(x / 2) * (e^x + 1), which keeps its digits near 0.

    Narrow floats are computed in float32 and rounded once.
    """
    dtype = tensor_dtype(call)
    wide = "float64" if dtype == "float64" else "float32"

    def compute_selu(data: Any) -> Any:
        x, (half, one, alpha, scale) = (
            topi.cast(data, wide),
            (tirx.FloatImm(wide, value) for value in (0.5, 1, SELU_ALPHA, SELU_SCALE)),
        )
        below = topi.multiply(topi.tanh(topi.multiply(x, half)), topi.add(topi.exp(x), one))
        is_above = topi.greater(x, tirx.FloatImm(wide, 0))
        chosen = topi.where(is_above, x, topi.multiply(below, alpha))
        return topi.cast(topi.multiply(chosen, scale), dtype)

    return builder.call_te(compute_selu, *call.args, primfunc_name_hint="selu")


def legalize_softplus(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize softplus(x) as max(z, 0) + log1p(e^-|z|), over beta, with z = beta * x, and as x
    where z is above the threshold. TVM's log(1 + e^z) is 0 from -17 on.
    """
    dtype = tensor_dtype(call)

    def compute_softplus(x: Any) -> Any:
        zero, beta, threshold = (
            tirx.FloatImm(dtype, value) for value in (0, call.attrs.beta, call.attrs.threshold)
        )
        z = topi.multiply(x, beta)
        power = topi.exp(topi.negative(topi.abs(z)))
        tail = te.compute(power.shape, lambda *at: tirx.log1p(power[at]), tag=topi.tag.ELEMWISE)
        curve = topi.divide(topi.add(topi.maximum(z, zero), tail), beta)
        return topi.where(topi.greater(z, threshold), x, curve)

    return builder.call_te(compute_softplus, *call.args, primfunc_name_hint="softplus")


def legalize_softmax(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize softmax(x) of float32 as its kernel, whose arithmetic is specified to the bit."""
    (data,) = call.args
    shape = tensor_shape(data)
    if not is_cpu_target() or not shape or 0 in shape or tensor_dtype(data) != "float32":
        return legalize_as_tvm(builder, call)
    extents = tuple(None if isinstance(extent, str) else int(extent) for extent in shape)
    spec = Softmax(extents, int(call.attrs.axis) % len(extents))
    func = make_softmax(spec, isa_lanes=select_isa(tvm.target.Target.current()).lanes)
    return relax.call_tir(builder.add_func(mark_kernel(func, macs=0), "softmax"), data, call.ty)


def legalize_permute_dims(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize permute_dims(x) as its kernel if it moves the last axis, in an array of tiles."""
    (data,) = call.args
    dtype, found = tensor_dtype(data), split_batch(data)
    if found is None or not is_cpu_target() or not dtype.startswith(("float", "int", "uint")):
        return legalize_as_tvm(builder, call)
    symbolic, shape = found
    axes = tuple(list_permutation(call))
    spec = Permutation(shape, axes, dtype, np.dtype(dtype).itemsize)
    if 0 in shape or (symbolic and axes[0] != 0) or not spec.has_kernel:
        return legalize_as_tvm(builder, call)
    func = build_for_batch(lambda: make_permutation(spec), symbolic, (0, 1))
    return relax.call_tir(builder.add_func(mark_kernel(func, macs=0), "transpose"), data, call.ty)


AVERAGES = [f"relax.nn.{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)]

#: Legalizations for `relax.transform.LegalizeOps`.
LEGALIZATIONS = {
    "relax.astype": legalize_astype,
    "relax.power": legalize_power,
    **BITS,
    **BOUNDS,
    **DIVISION_LEGALIZATIONS,
    **POOL_LEGALIZATIONS,
    **REDUCTION_LEGALIZATIONS,
    **dict.fromkeys(AVERAGES, legalize_as_declared),
    **dict.fromkeys(("relax.sign", "relax.negative"), legalize_sign),
    "relax.sinh": legalize_sinh,
    "relax.cosh": legalize_cosh,
    **dict.fromkeys(("relax.full_like", "relax.ones_like", "relax.zeros_like"), legalize_filling),
    "relax.nn.batch_norm": legalize_batch_norm,
    "relax.nn.prelu": legalize_prelu,
    "relax.nn.layer_norm": legalize_layer_norm,
    "relax.nn.selu": legalize_selu,
    "relax.nn.softmax": legalize_softmax,
    "relax.nn.softplus": legalize_softplus,
    "relax.permute_dims": legalize_permute_dims,
    **INDEXING_LEGALIZATIONS,
    **RESIZING_LEGALIZATIONS,
}
