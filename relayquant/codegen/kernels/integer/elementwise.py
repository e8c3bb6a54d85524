"""Specifications of elementwise integer operators -> their kernels.

The operators are quantize, requantize, add, multiply and join.

The kernels are vector loops over flat memory. Shapes matter only if an operand is broadcast or
channels are joined. The arithmetic is defined in `epilogue`; an `Epilogue` also says how results
are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.codegen.kernels.emit import (
    CACHE_LINE,
    COPY_BYTES,
    broadcast,
    build_kernel,
    constant,
    declare_arguments,
    emit_prefetch,
    emit_vector_loop,
    load_vector,
    loop_over,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Store, emit_fma, emit_round
from relayquant.codegen.kernels.integer.saturating_pack import (
    PACKED,
    PART,
    can_narrow,
    emit_packed,
    emit_word_shuffle,
)
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa
from relayquant.errors import format_count

#: Elements per vector. LLVM splits it into registers.
LANES = 16
#: Distance of prefetches of float operands. These are the model's inputs, which are in no near
#: cache, and hardware prefetching stops at every page.
PREFETCH_BYTES = 8192
#: From this many elements on, threads share the work.
PARALLEL_ELEMENTS = 1 << 15


def check_integer_output(operator: str, out: Epilogue) -> None:
    if out.output is not Store.REQUANTIZE or out.residual is not None:
        raise ValueError(
            f"{operator}: `out` must store requantized integers without a residual, got {out}.",
        )


@dataclass(frozen=True)
class Space:
    """An integer operand, and its factor in the result.

    `multiplier` is float32(double(scale) / double(output scale)).
    """

    dtype: str
    zero_point: int
    multiplier: float


@dataclass(frozen=True)
class Quantize:
    """float32 -> integer: int(min(max(rne(x / scale), low - z), high - z)) + z; NaN gives z."""

    shape: tuple[int, ...]
    scale: float
    out: Epilogue
    has_fma: bool = False  #: whether the target has a fused multiply-add, which is much faster


@dataclass(frozen=True)
class QuantizeImage:
    """float32 (N, C, H, W) -> integer (N, H, W, C); each value as in `Quantize`."""

    values: Quantize  #: of shape (N, C, H, W)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        batch, channels, height, width = self.values.shape
        return batch, height, width, channels


@dataclass(frozen=True)
class Dequantize:
    """integer -> float32: float32(int32(q) - zero_point) * scale."""

    shape: tuple[int, ...]
    dtype: str
    zero_point: int
    scale: float


@dataclass(frozen=True)
class ScaleChannels:
    """integer -> value stored by `out`, with a separate multiplier for each index along `axis`."""

    shape: tuple[int, ...]
    axis: int
    dtype: str
    zero_point: int
    out: Epilogue


@dataclass(frozen=True)
class Requantize:
    """integer -> integer of another affine space."""

    shape: tuple[int, ...]
    data: Space
    out: Epilogue


@dataclass(frozen=True)
class Add:
    """round(fma(float32(r - z_r), m_r, RN(float32(l - z_l) * m_l))); rhs may be broadcast.

    A subtraction is an addition with a negative multiplier of rhs.
    """

    shape: tuple[int, ...]  #: of lhs and the output
    lhs: Space
    rhs: Space
    out: Epilogue
    rhs_shape: tuple[int, ...] | None = None  #: None: like lhs; else see `broadcast_view`


@dataclass(frozen=True)
class Multiply:
    """Requantized int32 product (l - z_l) * (r - z_r). rhs may be broadcast.

    `multiplier` is float32(double(s_l) * double(s_r) / double(s_out)).
    """

    shape: tuple[int, ...]
    lhs_dtype: str
    lhs_zero_point: int
    rhs_dtype: str
    rhs_zero_point: int
    multiplier: float
    out: Epilogue
    rhs_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Concatenate:
    """Concatenation along `axis`, where each operand is requantized.

    An operand in the affine space of the output is copied.
    """

    shapes: tuple[tuple[int, ...], ...]  #: of every operand
    axis: int
    data: tuple[Space, ...]
    out: Epilogue

    def __post_init__(self) -> None:
        check_integer_output("Concatenate", self.out)
        rest = {shape[: self.axis] + shape[self.axis + 1 :] for shape in self.shapes}
        if len(self.shapes) != len(self.data) or len(rest) != 1 or self.axis < 0:
            raise ValueError(
                f"Concatenate: {format_count(len(self.data), 'operand')} of shapes {self.shapes} "
                f"do not join along axis {self.axis}; they must agree in all other dimensions, "
                "and axis must be >= 0.",
            )

    @property
    def out_shape(self) -> tuple[int, ...]:
        first = self.shapes[0]
        joined = sum(shape[self.axis] for shape in self.shapes)
        return (*first[: self.axis], joined, *first[self.axis + 1 :])


@dataclass(frozen=True)
class CopyColumns:
    """Copies of operands into some columns of a result: y[..., first : first + size] = x."""

    leading: tuple[int, ...]  #: shape of all operands and of y, without the columns
    dtype: str
    columns: tuple[tuple[int, int], ...]  #: (first, size) of every operand
    total: int  #: columns of y


def broadcast_view(shape: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Fold `shape` to (outer, middle, inner) so that `other` is (outer, 1, inner).

    None if impossible.

    Covers equal shapes, scalars, one value per channel, and (N, 1, 1, C) over (N, H, W, C).
    """
    other = (1,) * (len(shape) - len(other)) + other
    if len(other) > len(shape):
        return None
    same = [a == b for a, b in zip(shape, other, strict=True)]
    if all(same):
        return prod(shape), 1, 1
    first = same.index(False)
    last = len(same) - 1 - same[::-1].index(False)
    if any(n != 1 for n in other[first : last + 1]):
        return None
    return prod(shape[:first]), prod(shape[first : last + 1]), prod(shape[last + 1 :])


def subtract_zero_point(value: Expr, zero_point: int, lanes: int) -> Expr:
    """Compute int32(value) - zero_point."""
    value = T.Cast(vector("int32", lanes), value)
    return value - constant("int32", zero_point, lanes) if zero_point else value


def emit_scaled(value: Expr, operand: Space, lanes: int) -> Expr:
    """Compute RN(float32(value - zero_point) * multiplier)."""
    real = T.Cast(vector("float32", lanes), subtract_zero_point(value, operand.zero_point, lanes))
    return real * constant("float32", operand.multiplier, lanes)


def build_unary(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    out_dtype: str,
    compute: Callable[[Expr, int], Expr],
) -> PrimFunc:
    """Make PrimFunc(x, y) of one shape that applies `compute(vector, lanes)` everywhere."""

    def body() -> None:
        data, out = declare_arguments(("x", shape, dtype), ("y", shape, out_dtype))

        itemsize = np.dtype(dtype).itemsize

        def step(at: Expr, lanes: int) -> None:
            if lanes * itemsize == CACHE_LINE:
                emit_prefetch(data, at + PREFETCH_BYTES // itemsize, level=1)
            store_vector(out, compute(load_vector(data, at, lanes), lanes), at, lanes)

        size = prod(shape)
        emit_vector_loop(size, LANES, step, size >= PARALLEL_ELEMENTS)

    return build_kernel(name, body)


def can_use_reciprocal(spec: Quantize) -> bool:
    """Whether `emit_quotient` gives the same integer as a division."""
    small = 2.0**-64 <= spec.scale <= 2.0**64
    return spec.has_fma and small and spec.out.dtype != "int32"


def count_corrections(spec: Quantize) -> int:
    """Count the corrections after which products with the reciprocal give the right integer.

    Without one, the number before rounding to float32 differs from the exact quotient x by less
    than 2**-46 * x: the rest of the reciprocal and the product with it are off by 2**-24 each, and
    are below 2**-24 of the whole. The integer can be wrong only if x is that close to where
    results change: halfway between k + 1/2 and a neighbouring float32. So the float32 nearest to
    each of these points, times the scale, decides. In float64 all of this is exact.
    """
    scale, (low, high) = np.float32(spec.scale), spec.out.bounds
    ties = np.arange(low - spec.out.zero_point - 1, high - spec.out.zero_point + 1) + 0.5
    steps = np.spacing(np.abs(ties).astype("float32")).astype("float64")
    # A quarter of a step: below 1/2 the neighbours are closer.
    changes = np.concatenate([ties + steps * part for part in (-0.5, -0.25, 0.25, 0.5)])
    exact = changes * np.float64(scale)
    distance = np.abs(exact.astype("float32").astype("float64") - exact)
    return 0 if (distance > 2.0**-44 * np.abs(exact)).all() else 1


def emit_quotient(value: Expr, spec: Quantize, lanes: int, *, saturates: bool = False) -> Expr:
    """Compute RN(value / scale), or a number that rounds to the same integer. NaN gives 0.

    A division costs as much as 16 multiplications. The reciprocal is the sum of two numbers, and
    the products with them are added with one rounding. This gives a neighbour of the exact
    quotient. A correction adds the remainder, which FMA computes without rounding, times the
    reciprocal, which rounds correctly (Markstein 1990). It is left out where it changes no integer.
    Quotients below 2**-2, whose small products may underflow, round to the integer 0 anyway.

    The value is bounded instead of the quotient. This keeps both finite and gives the same
    integers: RN(bound * scale) / scale differs from the bound by far less than 1/2. With
    `saturates` the lower bound is left to the packs: numbers that no int32 holds, and NaN, become
    the least one (`emit_packed`), also where the products of an infinite value cancel.
    """
    scale = np.float32(spec.scale)
    low, high = (np.float32(bound - spec.out.zero_point) * scale for bound in spec.out.bounds)
    factor = np.float32(1) / scale
    rest = np.float32(1 / np.float64(scale) - np.float64(factor))
    divisor, factor, rest = (constant("float32", float(x), lanes) for x in (-scale, factor, rest))
    bounded = value
    if not saturates or spec.out.bounds[0] != INTEGER_LIMITS[spec.out.dtype][0]:
        bounded = T.max(bounded, constant("float32", float(low), lanes))
    bounded = T.min(bounded, constant("float32", float(high), lanes))
    zero = constant("float32", float(np.clip(np.float32(0), low, high)), lanes)
    value = T.Select(T.isnan(value), zero, bounded)
    quotient = emit_fma(value, factor, value * rest, lanes)
    for _ in range(count_corrections(spec)):
        remainder = emit_fma(divisor, quotient, value, lanes)
        quotient = emit_fma(remainder, factor, quotient, lanes)
    return quotient


def build_quantize(spec: Quantize) -> PrimFunc:
    """Make PrimFunc(x float32, y)."""
    check_integer_output("Quantize", spec.out)
    dtypes = "float32", spec.out.dtype
    return build_unary("qnn_quantize", spec.shape, *dtypes, lambda x, n: emit_quantized(x, spec, n))


def emit_quantized(value: Expr, spec: Quantize, lanes: int) -> Expr:
    """Compute the stored integers of a float32 vector."""
    if can_use_reciprocal(spec):
        quotient = emit_quotient(value, spec, lanes)
        return emit_round(quotient, spec.out.dtype, spec.out.zero_point, lanes)
    number = T.Select(T.isnan(value), constant("float32", 0.0, lanes), value)
    return spec.out.emit_rounded(number / constant("float32", spec.scale, lanes), lanes)


def build_quantize_image(spec: QuantizeImage, isa: Isa) -> PrimFunc:
    """Make PrimFunc(x float32 NCHW, y NHWC), for images of a few channels."""
    check_integer_output("QuantizeImage", spec.values.out)
    batch, channels, height, width = spec.values.shape
    size = height * width
    packs = channels in (PACKED - 1, PACKED) and can_narrow(isa, spec.values.out)
    packs = packs and can_use_reciprocal(spec.values)

    def interleave(data: Buffer, starts: list[Expr], lanes: int) -> Expr:
        """Return the integers of `lanes` pixels, channel by channel of each."""
        rows = [load_vector(data, start, lanes) for start in starts]
        if packs and lanes == isa.lanes:
            return emit_packed_pixels(rows, spec.values, isa)
        rows = [emit_quantized(row, spec.values, lanes) for row in rows]
        order = [T.int32(row * lanes + i) for i in range(lanes) for row in range(channels)]
        return T.Shuffle(rows, order) if channels > 1 else rows[0]

    def body() -> None:
        data, out = declare_arguments(
            ("x", spec.values.shape, "float32"), ("y", spec.out_shape, spec.values.out.dtype)
        )

        def step(n: Expr, at: Expr, lanes: int) -> None:
            starts = [(n * channels + channel) * size + at for channel in range(channels)]
            pixels = interleave(data, starts, lanes)
            store_vector(out, pixels, (n * size + at) * channels, lanes * channels)

        with loop_over((batch,), False) as (n,):
            emit_vector_loop(
                size,
                isa.lanes if packs else LANES,
                lambda at, k: step(n, at, k),
                size * channels >= PARALLEL_ELEMENTS,
            )

    return build_kernel("qnn_quantize_image", body)


def emit_packed_pixels(rows: list[Expr], spec: Quantize, isa: Isa) -> Expr:
    """Quantize vectors of 3 or 4 channels, and return the bytes of their pixels.

    Packing gives the pixels of each 128-bit block channel by channel. One shuffle orders the bytes
    within the blocks, and one joins the blocks.
    """
    lanes, channels = isa.lanes, len(rows)
    reals = [emit_quotient(row, spec, lanes, saturates=True) for row in rows]
    reals += reals[-1:] * (PACKED - channels)
    packed = emit_packed(isa, replace(spec.out, low=None, high=None, is_small=True), reals)
    pixel, channel = np.divmod(np.arange(channels * PART), channels)
    within = np.append(channel * PART + pixel, np.arange(channels * PART, PACKED * PART))
    blocks = np.arange(lanes // PART)[:, None] * (PACKED * PART)
    ordered = T.Shuffle([packed], [T.int32(int(i)) for i in (blocks + within).reshape(-1)])
    words = T.reinterpret(vector("float32", lanes), ordered)
    words = emit_word_shuffle([words], np.arange(lanes))
    kept = (np.arange(lanes // PART)[:, None] * PART + np.arange(channels)).reshape(-1)
    joined = T.Shuffle([words], [T.int32(int(i)) for i in kept])
    return T.reinterpret(vector(spec.out.dtype, lanes * channels), joined)


def build_dequantize(spec: Dequantize) -> PrimFunc:
    """Make PrimFunc(x, y float32)."""
    operand = Space(spec.dtype, spec.zero_point, spec.scale)
    dtypes = spec.dtype, "float32"
    return build_unary(
        "qnn_dequantize", spec.shape, *dtypes, lambda x, n: emit_scaled(x, operand, n)
    )


def build_requantize(spec: Requantize, name: str = "qnn_requantize") -> PrimFunc:
    """Make PrimFunc(x, y)."""
    check_integer_output("Requantize", spec.out)

    def compute(value: Expr, lanes: int) -> Expr:
        return spec.out.emit_rounded(emit_scaled(value, spec.data, lanes), lanes)

    return build_unary(name, spec.shape, spec.data.dtype, spec.out.dtype, compute)


def build_scale_channels(spec: ScaleChannels) -> PrimFunc:
    """Make PrimFunc(x, multiplier (C,) float32, y). `Epilogue` defines the multipliers."""
    outer, channels = prod(spec.shape[: spec.axis]), spec.shape[spec.axis]
    inner = prod(spec.shape[spec.axis + 1 :])

    def body() -> None:
        data, factors, out = declare_arguments(
            ("x", spec.shape, spec.dtype),
            ("multiplier", (channels,), "float32"),
            ("y", spec.shape, spec.out.dtype),
        )
        threads = prod(spec.shape) >= PARALLEL_ELEMENTS

        def step(at: Expr, factor: Expr, lanes: int) -> None:
            value = subtract_zero_point(load_vector(data, at, lanes), spec.zero_point, lanes)
            store_vector(out, spec.out.emit(value, [factor], None, lanes), at, lanes)

        if inner == 1:
            with loop_over((outer,), threads and outer > 1) as (i,):
                emit_vector_loop(
                    channels,
                    LANES,
                    lambda at, n: step(i * channels + at, load_vector(factors, at, n), n),
                )
        else:
            with loop_over((outer, channels), threads) as (i, channel):
                factor, start = factors.vload([channel]), (i * channels + channel) * inner
                emit_vector_loop(
                    inner, LANES, lambda at, n: step(start + at, broadcast(factor, n), n)
                )

    return build_kernel("qnn_channels", body)


def build_binary(
    name: str,
    shape: tuple[int, ...],
    rhs_shape: tuple[int, ...] | None,
    dtypes: tuple[str, str, str],
    compute: Callable[[Expr, Expr, int], Expr],
) -> PrimFunc:
    """Make PrimFunc(lhs, rhs, y). `dtypes` are the dtypes of lhs, rhs and y."""
    rhs_shape = shape if rhs_shape is None else rhs_shape
    view = broadcast_view(shape, rhs_shape)
    if view is None:
        raise ValueError(
            f"{name}: rhs of shape {rhs_shape} is not broadcast to {shape} along neighbouring "
            "axes.",
        )
    outer, middle, inner = view

    def body() -> None:
        lhs, rhs, out = declare_arguments(
            ("lhs", shape, dtypes[0]), ("rhs", rhs_shape, dtypes[1]), ("y", shape, dtypes[2])
        )
        size = prod(shape)
        threads = size >= PARALLEL_ELEMENTS

        def step(at: Expr, other: Expr, lanes: int) -> None:
            store_vector(out, compute(load_vector(lhs, at, lanes), other, lanes), at, lanes)

        if middle == 1:
            emit_vector_loop(
                size, LANES, lambda at, n: step(at, load_vector(rhs, at, n), n), threads
            )
        elif inner == 1:
            with loop_over((outer,), threads and outer > 1) as (i,):
                value = rhs.vload([i])
                emit_vector_loop(
                    middle, LANES, lambda at, n: step(i * middle + at, broadcast(value, n), n)
                )
        else:
            with loop_over((outer, middle), threads) as (i, j):
                start = (i * middle + j) * inner
                emit_vector_loop(
                    inner,
                    LANES,
                    lambda at, n: step(start + at, load_vector(rhs, i * inner + at, n), n),
                )

    return build_kernel(name, body)


def build_add(spec: Add) -> PrimFunc:
    """Make PrimFunc(lhs, rhs, y) of an addition."""
    check_integer_output("Add", spec.out)

    def compute(lhs: Expr, rhs: Expr, lanes: int) -> Expr:
        real = T.Cast(
            vector("float32", lanes), subtract_zero_point(rhs, spec.rhs.zero_point, lanes)
        )
        factor = constant("float32", spec.rhs.multiplier, lanes)
        value = emit_fma(real, factor, emit_scaled(lhs, spec.lhs, lanes), lanes)
        return spec.out.emit_rounded(value, lanes)

    dtypes = (spec.lhs.dtype, spec.rhs.dtype, spec.out.dtype)
    return build_binary("qnn_add", spec.shape, spec.rhs_shape, dtypes, compute)


def build_multiply(spec: Multiply) -> PrimFunc:
    """Make PrimFunc(lhs, rhs, y) of a product."""
    check_integer_output("Multiply", spec.out)
    scaling = Space("int32", 0, spec.multiplier)

    def compute(lhs: Expr, rhs: Expr, lanes: int) -> Expr:
        product = subtract_zero_point(lhs, spec.lhs_zero_point, lanes) * subtract_zero_point(
            rhs, spec.rhs_zero_point, lanes
        )
        return spec.out.emit_rounded(emit_scaled(product, scaling, lanes), lanes)

    dtypes = (spec.lhs_dtype, spec.rhs_dtype, spec.out.dtype)
    return build_binary("qnn_mul", spec.shape, spec.rhs_shape, dtypes, compute)


def build_concatenate(spec: Concatenate) -> PrimFunc:
    """Make PrimFunc(x0, x1, ..., y)."""
    rows = prod(spec.shapes[0][: spec.axis])
    sizes = [prod(shape[spec.axis :]) for shape in spec.shapes]
    total = sum(sizes)

    def body() -> None:
        operands = [
            (f"x{i}", shape, data.dtype)
            for i, (shape, data) in enumerate(zip(spec.shapes, spec.data, strict=True))
        ]
        *inputs, out = declare_arguments(*operands, ("y", spec.out_shape, spec.out.dtype))
        # Mostly copies of many elements at once.
        threads = rows > 1 and rows * total >= 8 * PARALLEL_ELEMENTS
        with loop_over((rows,), threads) as (row,):
            to = row * total
            for buffer, size, data in zip(inputs, sizes, spec.data, strict=True):
                emit_requantized_run(buffer, data, row * size, out, spec.out, to, size)
                to = to + size

    return build_kernel("qnn_concatenate", body)


def build_copy_columns(spec: CopyColumns) -> PrimFunc:
    """Make PrimFunc(x0, x1, ..., y)."""
    rows = prod(spec.leading)
    copied = rows * sum(size for _, size in spec.columns)

    def body() -> None:
        sizes = [*(size for _, size in spec.columns), spec.total]
        *inputs, out = declare_arguments(
            *((f"x{i}", (*spec.leading, size), spec.dtype) for i, size in enumerate(sizes))
        )
        with loop_over((rows,), rows > 1 and copied >= 8 * PARALLEL_ELEMENTS) as (row,):
            for buffer, (first, size) in zip(inputs, spec.columns, strict=True):
                emit_copy(buffer, row * size, out, row * spec.total + first, size)

    return build_kernel("qnn_copy_columns", body)


def emit_copy(buffer: Buffer, start: Expr, out: Buffer, to: Expr, size: int) -> None:
    """Copy `size` elements of `buffer` from `start` into `out` at `to`."""

    def step(at: Expr, lanes: int) -> None:
        store_vector(out, load_vector(buffer, start + at, lanes), to + at, lanes)

    emit_vector_loop(size, COPY_BYTES, step)


def emit_requantized_run(
    buffer: Buffer,
    data: Space,
    start: Expr,
    out: Buffer,
    epilogue: Epilogue,
    to: Expr,
    size: int,
) -> None:
    """Requantize `size` elements of `buffer` from `start` into `out` at `to`, or copy them."""
    source = (data.dtype, data.zero_point, data.multiplier)
    if source == (epilogue.dtype, epilogue.zero_point, 1) and epilogue.is_unbounded:
        emit_copy(buffer, start, out, to, size)
        return

    def step(at: Expr, lanes: int) -> None:
        value = emit_scaled(load_vector(buffer, start + at, lanes), data, lanes)
        store_vector(out, epilogue.emit_rounded(value, lanes), to + at, lanes)

    emit_vector_loop(size, LANES, step)
