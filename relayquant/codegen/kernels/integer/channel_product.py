"""Specification of a product of an image and one integer per channel -> its kernel on x86.

    y[.., c] = requantize((x[.., c] - z_x) * (r[c] - z_r))

Squeeze-and-excitation has this product. Integers of 9 bits and their products are exact in float32,
so no integer is multiplied. The factors are converted once. Four vectors of results are stored
together (see `saturating_pack`).
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod

from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    alloc_workspace,
    build_kernel,
    ceil_div,
    concat_vectors,
    constant,
    declare_arguments,
    flip_sign_bit,
    load_vector,
    loop_over,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.integer.elementwise import (
    PARALLEL_ELEMENTS,
    Multiply,
    broadcast_view,
    check_integer_output,
)
from relayquant.codegen.kernels.integer.saturating_pack import (
    BYTES,
    PACKED,
    can_narrow,
    emit_packed,
    emit_spread,
)
from relayquant.codegen.kernels.isa.base import Expr, Isa

#: Times the largest product of two bytes minus their zero points, this is below 2**30.
SMALL_MULTIPLIER = 2.0**13


def fold_channels(spec: Multiply, isa: Isa) -> tuple[int, int, int] | None:
    """Return (outer, rows, values of a row) for `build_channel_product`; None if it cannot be used.

    A row has enough pixels to fill whole vectors with their channels. Otherwise it is one pixel of
    at least one vector, and the last vector overlaps its neighbour.
    """
    view = broadcast_view(spec.shape, spec.rhs_shape or spec.shape)
    bytes_only = {spec.lhs_dtype, spec.rhs_dtype} <= {*BYTES}
    if view is None or not bytes_only or not can_narrow(isa, spec.out):
        return None
    (outer, middle, inner), size = view, PACKED * isa.lanes
    if middle == 1 or inner == 1:
        return None
    pixels = size // gcd(size, inner)
    if middle % pixels == 0:
        return outer, middle // pixels, pixels * inner
    return view if inner >= size else None


def build_channel_product(spec: Multiply, isa: Isa) -> PrimFunc:
    """Make PrimFunc(lhs, rhs, y) of a product for which `fold_channels` returns a view."""
    check_integer_output("Multiply", spec.out)
    view = fold_channels(spec, isa)
    assert view is not None
    outer, rows, width = view
    lanes, size, channels = isa.lanes, PACKED * isa.lanes, prod(spec.rhs_shape or ()) // outer
    epilogue = replace(spec.out, is_small=abs(spec.multiplier) <= SMALL_MULTIPLIER)
    count, piece = ceil_div(width, size), size if width == channels else gcd(size, channels)

    def spread(bits: Expr, dtype: str, zero_point: int) -> list[Expr]:
        """Convert bytes minus the zero point to float32, which is exact."""
        bits = flip_sign_bit(bits, dtype, "uint8", size)
        moved = zero_point + (128 if dtype == "int8" else 0)
        words = emit_spread(bits, lanes)
        if moved:
            words = [word - constant("int32", moved, lanes) for word in words]
        return [T.Cast(vector("float32", lanes), word) for word in words]

    def body() -> None:
        lhs, rhs, out = declare_arguments(
            ("lhs", spec.shape, spec.lhs_dtype),
            ("rhs", spec.rhs_shape, spec.rhs_dtype),
            ("y", spec.shape, spec.out.dtype),
        )
        factors = alloc_workspace(outer * count * size, "float32")
        with loop_over((outer, count), False) as (i, k):
            first, start = i * channels, T.min(k * size, width - size)
            moved = [(start + at) % channels for at in range(0, size, piece)]
            pieces = [load_vector(rhs, first + at, piece) for at in moved]
            values = spread(concat_vectors(pieces, piece), spec.rhs_dtype, spec.rhs_zero_point)
            for v, value in enumerate(values):
                store_vector(factors, value, ((i * count + k) * PACKED + v) * lanes, lanes)
        threads = prod(spec.shape) >= PARALLEL_ELEMENTS
        with loop_over((outer, rows), threads) as (i, row), T.serial(count) as k:
            at = (i * rows + row) * width + T.min(k * size, width - size)
            values = spread(load_vector(lhs, at, size), spec.lhs_dtype, spec.lhs_zero_point)
            reals = []
            for v, value in enumerate(values):
                first = ((i * count + k) * PACKED + v) * lanes
                product = value * load_vector(factors, first, lanes)
                reals.append(product * constant("float32", spec.multiplier, lanes))
            store_vector(out, emit_packed(isa, epilogue, reals), at, size)

    return build_kernel("qnn_mul", body)
