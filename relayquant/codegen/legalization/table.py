"""Relax operators -> loop nests of our own; part of `passes`.

They replace loop nests of TVM that cost far more, do not compile, or read memory out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx, topi
from tvm.ir import Call

from relayquant.codegen.kernels.floating.softmax import Softmax, make_softmax
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.permutation import Permutation, make_permutation
from relayquant.codegen.legalization.divisions import DIVISION_LEGALIZATIONS
from relayquant.codegen.legalization.logical_and_bitwise import BITS, legalize_as_tvm
from relayquant.codegen.legalization.reductions import REDUCTION_LEGALIZATIONS
from relayquant.codegen.lowering.engine import mark_kernel
from relayquant.codegen.lowering.kernel_call import build_for_batch, split_batch
from relayquant.ir.reference.unary import SELU_ALPHA, SELU_SCALE
from relayquant.ir.rewrite.expressions import same_type, shape_of, static_sizes
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_dtype, tensor_shape


def legalize_power(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize power(x, 3) as x * x * x, and power(x, 4) alike.

    Other constant exponents become visible to LLVM.

    Calling the C library for each element takes as long as the products of a layer. GELU has a cube
    in its tanh form. TVM has no power of integers. Integer powers wrap around, see
    `raise_to_integers`.
    """
    base, exponent = call.args
    value, dtype = constant_value(exponent), tensor_dtype(base)
    is_number = value is not None and value.size == 1 and same_type(call, base)
    is_float, is_integer = dtype.startswith("float"), dtype.startswith(("int", "uint"))
    if value is None or not is_number or not (is_float or value.item() >= 0):
        if not is_integer:
            return builder.call_te(topi.power, base, exponent, primfunc_name_hint="power")
        bits = count_bits(dtype, value)
        return builder.call_te(raise_to_integers, base, exponent, bits, primfunc_name_hint="power")
    number = float(value.item())

    def raise_to_number(x: Any) -> Any:
        if not is_float:
            return raise_integers(x, int(value.item()))
        if number == 3:
            return topi.multiply(topi.multiply(x, x), x)
        if number == 4:
            square = topi.multiply(x, x)
            return topi.multiply(square, square)
        return topi.power(x, tirx.FloatImm(dtype, number))

    return builder.call_te(raise_to_number, base, primfunc_name_hint="power")


def raise_integers(x: Any, exponent: int) -> Any:
    """Compute x ** n = (x ** (n / 2)) ** 2, times x if n is odd."""
    if exponent < 2:
        return topi.identity(x) if exponent else topi.full_like(x, 1)
    root = raise_integers(x, exponent // 2)
    square = topi.multiply(root, root)
    return topi.multiply(square, x) if exponent % 2 else square


def count_bits(dtype: str, exponent: np.ndarray | None) -> int:
    """Count the bits of the largest constant exponent, else of the type without its sign."""
    if exponent is not None and (exponent >= 0).all():
        return max(int(exponent.max(initial=0)).bit_length(), 1)
    return int(np.iinfo(dtype).max).bit_length()


def raise_to_integers(base: te.Tensor, exponent: te.Tensor, bits: int) -> Any:
    """Compute x ** n of integers, modulo 2^bits.

    For n < 0 the result is 1 / x ** -n truncated: 0 unless x is 1 or -1. For x = 0 it is 0, as in
    PyTorch. Square and multiply from the highest of the `bits` of n to the lowest: r = r * r, times
    x if the bit is set.
    """
    dtype = str(base.dtype)
    one = tirx.const(1, dtype)

    def choose_factor(bit: int) -> Any:
        shifted = topi.right_shift(exponent, tirx.const(bit, dtype))
        is_set = topi.equal(topi.bitwise_and(shifted, one), one)
        return topi.where(is_set, base, topi.full_like(base, 1))

    power = choose_factor(bits - 1)
    for bit in reversed(range(bits - 1)):
        power = topi.multiply(topi.multiply(power, power), choose_factor(bit))
    if dtype.startswith("uint"):
        return power
    is_unit = topi.logical_or(topi.equal(base, one), topi.equal(base, tirx.const(-1, dtype)))
    sign = choose_factor(0)
    fraction = topi.where(is_unit, sign, topi.full_like(sign, 0))
    return topi.where(topi.less(exponent, tirx.const(0, dtype)), fraction, power)


def legalize_as_declared(builder: relax.BlockBuilder, call: Call) -> Any:
    """Cast an integer result to its declared type. TVM leaves the sums in a wider type."""
    result = legalize_as_tvm(builder, call)
    dtype = tensor_dtype(call)
    if dtype.startswith("float"):
        return result
    return relax.op.astype(builder.emit(result), dtype)


def legalize_sign(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize sign(x) or -x. TVM compares unsigned integers with -1, or multiplies by it: their
    sign is 0 or 1, and -x wraps around.
    """
    (data,) = call.args
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


def legalize_astype(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a cast to bfloat16 that keeps NaN. TVM rounds the bits of any NaN as those of a
    number, which gives 0 or infinity for some.
    """
    given = tensor_dtype(call.args[0])
    if tensor_dtype(call) != "bfloat16" or given not in ("float16", "float32", "float64"):
        return legalize_as_tvm(builder, call)

    def compute_narrow(data: Any) -> Any:
        x = topi.cast(data, "float32")
        nan = topi.full_like(x, tirx.FloatImm("float32", float("nan")))
        return topi.cast(topi.where(topi.isnan(x), nan, x), "bfloat16")

    return builder.call_te(compute_narrow, *call.args, primfunc_name_hint="astype")


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
    axes = [int(axis) for axis in call.attrs.axes or reversed(range(len(shape)))]
    spec = Permutation(shape, tuple(axes), dtype, np.dtype(dtype).itemsize)
    if 0 in shape or (symbolic and axes[0] != 0) or not spec.has_kernel:
        return legalize_as_tvm(builder, call)
    func = build_for_batch(lambda: make_permutation(spec), symbolic, (0, 1))
    return relax.call_tir(builder.add_func(mark_kernel(func, macs=0), "transpose"), data, call.ty)


def is_cpu_target() -> bool:
    """Whether code is made for a CPU."""
    target = tvm.target.Target.current(allow_none=True)
    return target is not None and target.kind.name == "llvm"


def legalize_pad(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize pad(x, mode="reflect") that is wider than x, or whose x has an unknown size.

    The pad reflects repeatedly, as in numpy. TVM would read beyond x.
    """
    shape = tensor_shape(call.args[0])
    widths = np.reshape([int(width) for width in call.attrs.pad_width], (-1, 2)).tolist()
    if str(call.attrs.pad_mode) != "reflect" or (
        shape is not None
        and all(isinstance(n, int) and max(pair) < n for n, pair in zip(shape, widths, strict=True))
    ):
        return legalize_as_tvm(builder, call)

    def mirror(x: Any) -> Any:
        def find_place(at: Any, size: Any, before: int) -> Any:
            period = tirx.max(2 * (size - 1), tirx.const(1, "int64"))
            place = tirx.floormod(at - before, period)
            return tirx.min(place, 2 * (size - 1) - place)

        def read(*ats: Any) -> Any:
            pairs = zip(ats, x.shape, widths, strict=True)
            return x(*(find_place(at, size, pair[0]) for at, size, pair in pairs))

        sizes = [size + sum(pair) for size, pair in zip(x.shape, widths, strict=True)]
        return te.compute(sizes, read, name="mirror")

    return builder.call_te(mirror, call.args[0], primfunc_name_hint="pad")


def legalize_slice(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize a slice of symbolic extents with the extents that its type declares.

    TVM would count them again, as a choice whose operator FuseOps does not know.
    """
    data, axes, begins, _, *rest = call.args
    extents = shape_of(call)
    rows = [
        static_sizes(list(row.fields)) if isinstance(row, relax.Tuple) else None
        for row in (axes, begins, *rest)
    ]
    if not shape_of(data) or static_sizes(extents) is not None or None in rows:
        return legalize_as_tvm(builder, call)
    axes, begins, *rest = rows
    steps = rest[0] if rest else [1] * len(axes)
    if min(steps, default=1) < 1:
        return legalize_as_tvm(builder, call)
    places = {
        axis % len(extents): (begin, step)
        for axis, begin, step in zip(axes, begins, steps, strict=True)
    }

    def cut(x: Any) -> Any:
        def find(axis: int, at: Any) -> Any:
            begin, step = places.get(axis, (0, 1))
            first = tirx.max(x.shape[axis] + begin, 0) if begin < 0 else begin
            return first + at * step

        return te.compute(
            extents, lambda *ats: x(*(find(*pair) for pair in enumerate(ats))), name="slice"
        )

    return builder.call_te(cut, data, primfunc_name_hint="strided_slice")


def legalize_take(builder: relax.BlockBuilder, call: Call) -> Any:
    """Legalize take(x, i, mode="fast") as take(x, i, mode="wrap"), which reads nothing beyond x."""
    if str(call.attrs.mode) != "fast":
        return legalize_as_tvm(builder, call)
    wrapped = relax.op.take(*call.args, call.attrs.axis, "wrap")
    return legalize_as_tvm(builder, builder.normalize(wrapped))


def bound_first(find_extents: Callable[[Call], Sequence[Any]]) -> Callable[..., Any]:
    """Make a legalization of op(x, i) that moves the indices i into bounds and then does as TVM.

    Args:
        find_extents: Returns the extents for `bound_indices`. For a tuple of indices: one extent
            for each index array.
    """

    def legalize(builder: relax.BlockBuilder, call: Call) -> Any:
        data, indices, *rest = call.args
        if not (shape_of(data) and (shape_of(indices) or has_fields(indices))):
            return legalize_as_tvm(builder, call)  # shapes known at run time
        extents = find_extents(call)

        def bound(part: relax.Expr, own: Sequence[Any]) -> relax.Var:
            return builder.emit(
                builder.call_te(bound_indices, part, list(own), primfunc_name_hint="indices")
            )

        if has_fields(indices):
            fields = [builder.emit(relax.TupleGetItem(indices, i)) for i in range(len(extents))]
            pairs = zip(fields, extents, strict=True)
            inside: relax.Expr = relax.Tuple([bound(part, [extent]) for part, extent in pairs])
        else:
            inside = bound(indices, extents)
        bounded = Call(call.op, [data, builder.normalize(inside), *rest], call.attrs, call.ty_args)
        return legalize_as_tvm(builder, builder.normalize(bounded))

    return legalize


def has_fields(indices: relax.Expr) -> bool:
    """Whether the indices are a tuple with one array for each axis."""
    return isinstance(indices.ty, tvm.ir.TupleType)


def list_extents(call: Call, first: int, count: int) -> list[Any]:
    """Return `count` extents of a call's data, from axis `first` on."""
    return shape_of(call.args[0])[first : first + count]


def find_axis(call: Call) -> list[Any]:
    """Return the extent of the axis of an operator along one axis."""
    return list_extents(call, int(call.attrs.axis) % call.args[0].ty.ndim, 1)


def find_axes_of_rows(call: Call, first: int = 0) -> list[Any]:
    """Return the extents for indices that hold one number for each of the axes from `first` on."""
    return list_extents(call, first, int(call.args[1].ty.shape.values[-1]))


def find_axes_of_fields(call: Call) -> list[Any]:
    """Return the extents for indices with one array for each of the first axes."""
    return list_extents(call, 0, len(call.args[1].ty.fields))


def bound_indices(indices: te.Tensor, extents: Sequence[Any]) -> Any:
    """Move indices to the nearest valid index. Negative indices count from the end.

    Args:
        extents: Extent of the axis. With several extents, the last axis of `indices` goes over
            these axes.
    """

    def bound(*at: Any) -> Any:
        index = indices(*at)
        extent = tirx.Cast(indices.dtype, extents[-1])
        for i, other in enumerate(extents[:-1]):
            extent = tirx.Select(at[-1] == i, tirx.Cast(indices.dtype, other), extent)
        counted = tirx.Select(index < 0, index + extent, index)
        return tirx.max(tirx.min(counted, extent - 1), tirx.const(0, indices.dtype))

    return te.compute(indices.shape, bound, name="indices")


AVERAGES = [f"relax.nn.{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)]

#: Legalizations for `relax.transform.LegalizeOps`.
LEGALIZATIONS = {
    "relax.astype": legalize_astype,
    "relax.power": legalize_power,
    **BITS,
    **DIVISION_LEGALIZATIONS,
    **REDUCTION_LEGALIZATIONS,
    **dict.fromkeys(AVERAGES, legalize_as_declared),
    **dict.fromkeys(("relax.sign", "relax.negative"), legalize_sign),
    "relax.sinh": legalize_sinh,
    "relax.cosh": legalize_cosh,
    "relax.nn.layer_norm": legalize_layer_norm,
    "relax.nn.selu": legalize_selu,
    "relax.nn.softmax": legalize_softmax,
    "relax.nn.pad": legalize_pad,
    "relax.permute_dims": legalize_permute_dims,
    "relax.strided_slice": legalize_slice,
    "relax.take": legalize_take,
    "relax.index_tensor": bound_first(find_axes_of_fields),
    "relax.index_put": bound_first(find_axes_of_fields),
    "relax.gather_elements": bound_first(find_axis),
    "relax.scatter_elements": bound_first(find_axis),
    "relax.gather_nd": bound_first(
        lambda call: find_axes_of_rows(call, int(call.attrs.batch_dims))
    ),
    "relax.scatter_nd": bound_first(find_axes_of_rows),
}
