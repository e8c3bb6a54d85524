"""One kernel after the other with its operands and what numpy makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from convolutions import conv2d_accumulators, conv2d_transpose_accumulators
from exact import (
    F32,
    centre,
    exact_fma,
    finish,
    random_multiplier,
    random_multipliers,
    random_values,
    state_row_norm,
    store,
)
from tvm.tirx import PrimFunc

from relayquant.base.packing import count_groups, middle_code, pack_codes
from relayquant.codegen.kernels.floating.row_norm import RowNorm, make_row_norm
from relayquant.codegen.kernels.floating.softmax import Softmax, make_softmax
from relayquant.codegen.kernels.grouped.plan import GroupedDense, pack_grouped
from relayquant.codegen.kernels.grouped.product import build_grouped_dense
from relayquant.codegen.kernels.integer.convolution.direct import (
    build_conv2d,
    build_dense,
    pack_conv2d,
    pack_dense,
)
from relayquant.codegen.kernels.integer.convolution.transposed import (
    Conv2dTranspose,
    build_conv2d_transpose,
    pack_conv2d_transpose,
)
from relayquant.codegen.kernels.integer.dynamic_rows import build_dense_rows, pack_dense_rows
from relayquant.codegen.kernels.integer.elementwise import (
    Add,
    Concatenate,
    Dequantize,
    Multiply,
    Quantize,
    Requantize,
    Space,
    build_add,
    build_concatenate,
    build_dequantize,
    build_multiply,
    build_quantize,
    build_requantize,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Slope, Store
from relayquant.codegen.kernels.integer.lookup import TBL, Lookup, build_lookup
from relayquant.codegen.kernels.integer.matmul import BatchMatmul, build_batch_matmul
from relayquant.codegen.kernels.integer.pool import (
    AvgPool2d,
    MaxPool2d,
    PoolWindow,
    build_avg_pool2d,
    build_max_pool2d,
)
from relayquant.codegen.kernels.integer.row_quantize import RowQuantize, build_quantize_rows
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, Dense
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.ir.reference import qnn
from relayquant.ir.reference.row_arithmetic import softmax_along


@dataclass(frozen=True)
class Case:
    """A kernel and one call of it. `build` gives the function and its inputs."""

    build: Callable[[Isa], tuple[PrimFunc, list[np.ndarray]]]
    expected: np.ndarray | tuple[np.ndarray, ...]

    @property
    def outputs(self) -> tuple[np.ndarray, ...]:
        """What is expected of every output."""
        return self.expected if isinstance(self.expected, tuple) else (self.expected,)


SAME = (1, 1, 1, 1)
OUT = Epilogue(dtype="int8", zero_point=-5)
INT8 = {"in_dtype": "int8", "in_zero_point": -7, "epilogue": OUT}
BENT = Epilogue(dtype="int8", zero_point=-5, slope=Slope(-90, None, 1.1, rounds=True))
ADDED = Epilogue(dtype="int8", zero_point=-5, low=-5, residual=Residual("int8", 4, 0.37))

CONVOLUTIONS = {
    "3x3": Conv2d(1, 8, 8, 16, 32, (3, 3), padding=SAME, **INT8),
    "3x3 of 17 to 33 channels, strides, residual": Conv2d(
        2, 5, 7, 17, 33, (3, 3), (2, 1), (0, 1, 2, 1), (2, 1), in_dtype="int8", in_zero_point=9,
        epilogue=ADDED,
    ),
    "3x3, slope": Conv2d(1, 5, 7, 16, 33, (3, 3), in_dtype="int8", epilogue=BENT),
    "3x3, slope, residual": Conv2d(
        1, 5, 7, 16, 20, (3, 3), in_dtype="int8",
        epilogue=Epilogue(residual=Residual("int8", 4, 0.37), slope=Slope(None, 255, 0.8)),
    ),
    "depthwise, slope": Conv2d(
        1, 9, 8, 19, 19, (3, 3), padding=SAME, groups=19, in_dtype="int8", epilogue=BENT
    ),
    "3x3 with threads": Conv2d(1, 20, 20, 32, 48, (3, 3), padding=SAME, **INT8),
    "3x3 with weights beyond a cache": Conv2d(1, 3, 4, 256, 160, (3, 3), padding=SAME, **INT8),
    "1x1": Conv2d(1, 8, 8, 64, 64, (1, 1), **INT8),
    "1x1 of 5 channels to 3": Conv2d(1, 5, 7, 5, 3, (1, 1), **INT8),
    "1x1 of 12 channels to 1": Conv2d(1, 6, 7, 12, 1, (1, 1), **INT8),
    "1x1 of uint8": Conv2d(1, 5, 7, 24, 20, (1, 1), in_zero_point=200, epilogue=OUT),
    "1x1 to uint8, residual": Conv2d(
        1, 5, 7, 17, 5, (1, 1), in_dtype="int8", in_zero_point=-100,
        epilogue=Epilogue(zero_point=7, residual=Residual("uint8", 4, -0.37)),
    ),
    "1x1, stride 2": Conv2d(1, 7, 6, 32, 48, (1, 1), (2, 2), **INT8),
    "first, 7x7/2 of 3 channels": Conv2d(1, 23, 20, 3, 64, (7, 7), (2, 2), (3, 3, 3, 3), **INT8),
    "first, 3x3 of 1 channel": Conv2d(1, 11, 9, 1, 17, (3, 3), (2, 2), SAME, **INT8),
    "groups, dilation, clip": Conv2d(
        1, 5, 7, 24, 36, (3, 3), padding=SAME, dilation=(2, 2), groups=6, in_dtype="int8",
        in_zero_point=-100, epilogue=Epilogue(dtype="int8", zero_point=7, low=-20, high=100),
    ),
    "conv1d": Conv2d(2, 1, 30, 20, 12, (1, 5), (1, 2), (0, 2, 0, 1), **INT8),
    "float output": Conv2d(1, 2, 3, 5, 3, (2, 3), epilogue=Epilogue(Store.DEQUANTIZE, "float32")),
    "accumulators": Conv2d(1, 2, 3, 64, 48, (2, 3), epilogue=Epilogue(Store.ACCUMULATOR, "int32")),
    "int16 output": Conv2d(1, 4, 4, 8, 19, (3, 3), epilogue=Epilogue(dtype="int16", zero_point=99)),
    "int32 output": Conv2d(1, 4, 4, 8, 19, (3, 3), epilogue=Epilogue(dtype="int32")),
    "depthwise": Conv2d(1, 9, 9, 32, 32, (3, 3), padding=SAME, groups=32, **INT8),
    "depthwise, stride 2": Conv2d(1, 9, 8, 32, 32, (3, 3), (2, 2), SAME, groups=32, **INT8),
    "depthwise, 19 channels, 5x5": Conv2d(
        2, 7, 6, 19, 19, (5, 5), padding=(2, 2, 2, 2), groups=19, **INT8
    ),
    "depthwise, 6 channels": Conv2d(1, 7, 6, 6, 6, (3, 3), padding=SAME, groups=6, **INT8),
    "int16, residual": Conv2d(
        2, 5, 7, 17, 33, (3, 3), (2, 1), (0, 1, 2, 1), (2, 1), in_dtype="int16", in_zero_point=-300,
        epilogue=Epilogue(dtype="int16", residual=Residual("int16", -400, 0.37)),
    ),
    "int16, 1x1 to int8": Conv2d(
        1, 8, 8, 64, 64, (1, 1), in_dtype="int16", epilogue=Epilogue(dtype="int8", zero_point=5)
    ),
    "depthwise of int16": Conv2d(
        1, 9, 8, 21, 21, (3, 3), (2, 2), SAME, groups=21, in_dtype="int16", in_zero_point=-300,
        epilogue=Epilogue(dtype="int16", zero_point=99),
    ),
    "depthwise, 3 channels": Conv2d(1, 7, 6, 3, 3, (3, 3), padding=SAME, groups=3, **INT8),
    "depthwise of uint8, dilation, residual": Conv2d(
        1, 9, 9, 20, 20, (3, 3), padding=(2, 2, 2, 2), dilation=(2, 2), groups=20,
        in_zero_point=130, epilogue=ADDED,
    ),
}  # fmt: skip
TRANSPOSED = {
    "transposed 4x4/2": Conv2dTranspose(
        1, 4, 5, 16, 20, (4, 4), (2, 2), SAME, in_dtype="int8", in_zero_point=5, epilogue=OUT
    ),
    "transposed 3x2, dilation, groups, uint8": Conv2dTranspose(
        2, 5, 4, 12, 14, (3, 2), (2, 1), dilation=(1, 2), groups=2, in_zero_point=5, epilogue=OUT
    ),
}
DENSE = {
    f"dense {m}x{k}x{n}": Dense(m, k, n, "int8", 7, OUT)
    for m, k, n in [(1, 64, 100), (1, 37, 10), (1, 512, 3), (5, 33, 17), (30, 128, 64)]
}
#: Each number of rows with several numbers of inputs and of outputs.
SIZES = (1, 3, 5, 17, 33, 100)
MATRICES = {
    f"matrix {m}x{k}x{n}": Dense(m, k, n, "int8", -7, OUT)
    for i, m in enumerate((1, 2, *SIZES[1:]))
    for j in range(3)
    for k, n in [(SIZES[(i + 2 * j) % 6], SIZES[(i + 3 * j + 1) % 6])]
}
#: The number of rows known only at run time; every height of tiles, and half of a pair of rows.
ROWS = {
    f"dense of any rows {m}x{k}x{n}, {dtype}": Dense(m, k, n, dtype, 7, OUT)
    for m, k, n, dtype in [(1, 64, 40, "int8"), (13, 40, 33, "int8"), (3, 37, 10, "uint8")]
}
MATMULS = {
    "batch_matmul of int8": BatchMatmul(3, 7, 20, 32, "int8", 3, "int8", 0, 1e-3, OUT),
    "batch_matmul, odd sizes": BatchMatmul(2, 5, 33, 17, "int8", -9, "uint8", 100, 1e-3, OUT),
    "batch_matmul of int8 pairs": BatchMatmul(2, 9, 21, 40, "int8", -9, "int8", 7, 1e-3, OUT),
    "batch_matmul, inner 3": BatchMatmul(1, 1, 5, 3, "uint8", 9, "int8", -100, 1e-3, OUT),
}
WINDOWS = {
    "3x3/2 padded": PoolWindow(2, 7, 8, 20, (3, 3), (2, 2), SAME),
    "3 channels": PoolWindow(1, 7, 8, 3, (3, 2), (2, 1), ceil_mode=True),
    "global": PoolWindow(1, 7, 7, 64, (7, 7)),
}


def make_convolution(spec: Conv2d, least: int = -128) -> Case:
    """With weights from `least` on."""
    rng = np.random.default_rng(0)
    x = random_values(rng, spec.in_shape, spec.in_dtype)
    w = np.maximum(random_values(rng, spec.weight_shape, "int8"), np.int8(least))
    bias = rng.integers(-5000, 5000, spec.out_channels).astype("int32")
    multiplier = random_multipliers(rng, w, spec.epilogue)
    residual, added = None, []
    if spec.epilogue.residual is not None:
        residual = random_values(rng, spec.out_shape, spec.epilogue.residual.dtype)
        added = [residual]
    acc = conv2d_accumulators(x, w, bias, spec)

    def build(isa: Isa) -> tuple[PrimFunc, list[np.ndarray]]:
        packed = pack_conv2d(spec, isa, Constants(w, bias, multiplier))
        return build_conv2d(spec, isa), [x, *packed.arguments(), *added]

    return Case(build, finish(acc, spec.epilogue, multiplier, residual))


def make_transposed(spec: Conv2dTranspose) -> Case:
    rng = np.random.default_rng(9)
    x = random_values(rng, spec.in_shape, spec.in_dtype)
    w = random_values(rng, spec.weight_shape, "int8")
    bias = rng.integers(-999, 999, spec.out_channels).astype("int32")
    multiplier = random_multiplier(rng, w)
    acc = conv2d_transpose_accumulators(x, w, bias, spec)

    def build(isa: Isa) -> tuple[PrimFunc, list[np.ndarray]]:
        packed = pack_conv2d_transpose(spec, isa, Constants(w, bias, multiplier))
        return build_conv2d_transpose(spec, isa), [x, *packed.arguments()]

    return Case(build, finish(acc, spec.epilogue, multiplier))


def make_dense(
    spec: Dense, pack: Callable = pack_dense, build_kernel: Callable = build_dense
) -> Case:
    rng = np.random.default_rng(1)
    x = random_values(rng, (spec.rows, spec.in_features), spec.in_dtype)
    w = random_values(rng, (spec.out_features, spec.in_features), "int8")
    bias = rng.integers(-999, 999, spec.out_features).astype("int32")
    multiplier = random_multiplier(rng, w)
    acc = (x.astype("int64") - spec.in_zero_point) @ w.T.astype("int64") + bias

    def build(isa: Isa) -> tuple[PrimFunc, list[np.ndarray]]:
        packed = pack(spec, isa, Constants(w, bias, multiplier))
        return build_kernel(spec, isa), [x, *packed.arguments()]

    return Case(build, finish(acc, spec.epilogue, multiplier))


def make_rows(spec: Dense) -> Case:
    """As `make_dense`, on the kernel for any number of rows."""
    return make_dense(spec, pack_dense_rows, build_dense_rows)


def make_matmul(spec: BatchMatmul) -> Case:
    rng = np.random.default_rng(2)
    x = random_values(rng, (spec.batch, spec.rows, spec.inner), spec.x_dtype)
    w = random_values(rng, (spec.batch, spec.cols, spec.inner), spec.w_dtype)
    left, right = x.astype("int64") - spec.x_zero_point, w.astype("int64") - spec.w_zero_point
    expected = finish(left @ right.transpose(0, 2, 1), spec.epilogue, F32(spec.multiplier))
    return Case(lambda isa: (build_batch_matmul(spec, isa), [x, w]), expected)


def make_extreme_sums(weight: int = -128) -> Case:
    """-128 by `weight` in every product: -128 is too much for sums of two in int16, -127 just not;
    and int32 wraps.
    """
    spec = Dense(2, 40, 8, "int8", 0, Epilogue(Store.ACCUMULATOR, "int32"))
    x, w = np.full((2, 40), -128, "int8"), np.full((8, 40), weight, "int8")
    added = 40 * -128 * weight
    bias = np.array([2**31 - 1, -(2**31), 0, 1, 2, 3, 4, 2**31 - abs(added)], "int32")
    total = np.tile(bias.astype("int64") + added, (2, 1))
    expected = total.astype("uint32").view("int32")
    return Case(
        lambda isa: (
            build_dense(spec, isa),
            [x, *pack_dense(spec, isa, Constants(w, bias, None)).arguments()],
        ),
        expected,
    )


def all_pairs() -> tuple[np.ndarray, np.ndarray]:
    """Every pair of int8 values."""
    values = np.arange(-128, 128).astype("int8")
    a, b = np.meshgrid(values, values)
    return a.reshape(-1), b.reshape(-1)


def make_residual_pairs() -> Case:
    """Factors at which rounding the sum of two products once or twice differs."""
    a, b = all_pairs()
    x, residual = a.reshape(-1, 1), np.repeat(b.reshape(-1, 1), 4, axis=1)
    out = Epilogue(dtype="int8", zero_point=-20, residual=Residual("int8", -115, 1 / 6))
    spec = Dense(len(x), 1, 4, "int8", -3, out)
    ones, zeros, factor = np.ones((4, 1), "int8"), np.zeros(4, "int32"), np.array(2 / 3, "float32")
    acc = np.repeat(x.astype("int64") + 3, 4, axis=1)

    def build(isa: Isa) -> tuple[PrimFunc, list[np.ndarray]]:
        packed = pack_dense(spec, isa, Constants(ones, zeros, factor))
        return build_dense(spec, isa), [x, *packed.arguments(), residual]

    return Case(build, finish(acc, out, factor, residual))


def make_addition(lhs: Space, rhs: Space) -> Case:
    a, b = all_pairs()
    first, second = centre(a, lhs.zero_point), centre(b, rhs.zero_point)
    real = exact_fma(second, F32(rhs.multiplier), first * F32(lhs.multiplier))
    return Case(lambda _: (build_add(Add(a.shape, lhs, rhs, OUT)), [a, b]), store(real, OUT))


def make_multiplication() -> Case:
    a, b = all_pairs()
    product = (a.astype("int32") + 3) * (b.astype("int32") - 9)
    spec = Multiply(a.shape, "int8", -3, "int8", 9, 0.0077, OUT)
    return Case(
        lambda _: (build_multiply(spec), [a, b]),
        store(product.astype("float32") * F32(0.0077), OUT),
    )


def make_quantization(dtype: str) -> Case:
    rng = np.random.default_rng(3)
    x = (rng.normal(size=1003) * 9).astype("float32")
    x[::5] = np.round(x[::5] * 4) / 4 + F32(0.125)  # ties
    x[:8] = [np.nan, np.inf, -np.inf, 3e38, -3e38, -0.0, 1e-40, 1e10]
    out = Epilogue(dtype=dtype, zero_point=5)
    with np.errstate(over="ignore"):
        real = x / F32(0.25)
    expected = store(np.where(np.isnan(real), F32(0), real), out)
    return Case(lambda _: (build_quantize(Quantize(x.shape, 0.25, out)), [x]), expected)


def make_dequantization() -> Case:
    x = np.arange(-128, 128).astype("int8")
    spec = Dequantize(x.shape, "int8", -3, 0.37)
    return Case(lambda _: (build_dequantize(spec), [x]), centre(x, -3) * F32(0.37))


def make_requantization(dtype: str, out: Epilogue) -> Case:
    limits = np.iinfo(dtype)
    low, high = max(limits.min, -(2**30)), min(limits.max, 2**30)
    x = np.random.default_rng(4).integers(low, high, 999).astype(dtype)
    x[:2] = limits.min, limits.max
    factor = 140 / high
    spec = Requantize(x.shape, Space(dtype, 11 if dtype != "int32" else 0, factor), out)
    return Case(
        lambda _: (build_requantize(spec), [x]),
        store(centre(x, spec.data.zero_point) * F32(factor), out),
    )


def make_lookup() -> Case:
    x = np.random.default_rng(5).permutation(259).astype("uint8").view("int8")
    table = np.random.default_rng(5).permutation(256).astype("uint8").view("int8")
    spec = Lookup(x.shape, "int8", "int8")
    expected = table[x.view("uint8")]
    return Case(lambda _: (build_lookup(spec, TBL), [x, table]), expected)


def make_concatenation() -> Case:
    rng = np.random.default_rng(6)
    a, b = random_values(rng, (3, 4, 5), "int8"), random_values(rng, (3, 4, 33), "int8")
    spec = Concatenate(
        (a.shape, b.shape), 2, (Space("int8", -3, 0.37), Space("int8", OUT.zero_point, 1)), OUT
    )
    expected = np.concatenate([store(centre(a, -3) * F32(0.37), OUT), b], 2)
    return Case(lambda _: (build_concatenate(spec), [a, b]), expected)


def make_grouped(spec: GroupedDense, rows: int, extreme: bool = False) -> Case:
    """Rows of integers by a grouped weight; `extreme`: the largest products of one sign."""
    rng = np.random.default_rng(9)
    groups = spec.units, count_groups(spec.features, spec.group_size)
    codes = rng.integers(0, 2**spec.bits, (spec.units, spec.features))
    zeros = np.array(middle_code(spec.bits), "uint8")
    if spec.has_zeros:
        zeros = rng.integers(0, 2**spec.bits, groups).astype("uint8")
    elif spec.has_offsets:
        zeros = rng.normal(size=groups).astype(spec.zeros_dtype)
    weight = pack_codes(codes, spec.bits), rng.normal(size=groups).astype(spec.scale_dtype), zeros
    data = rng.integers(-128, 128, (rows, spec.features)).astype("int8")
    if extreme:
        codes[:], data[:] = 2**spec.bits - 1, -128
        codes[0] = 0
        weight = pack_codes(codes, spec.bits), *weight[1:]
    scale = rng.uniform(0.1, 1, (rows, 1)).astype("float32")

    def build(isa: Isa) -> tuple[PrimFunc, list[np.ndarray]]:
        packed = pack_grouped(spec, isa, *weight)
        return build_grouped_dense(spec, isa), [data, scale, *packed.arrays]

    form = {"bits": spec.bits, "group_size": spec.group_size, "features": spec.features}
    return Case(build, qnn.grouped_dense(data, scale, *weight, **form))


def draw_rows(width: int) -> np.ndarray:
    """Rows of very different size, one of them zeros."""
    rng = np.random.default_rng(width)
    x = rng.normal(0.3, 1, (19, width)) * 10.0 ** rng.integers(-6, 6, (19, 1))
    x[3] = 0
    return x.astype("float32")


def make_row_norm_case(spec: RowNorm) -> Case:
    """Floats, and the integers of their rows."""
    x, rng = draw_rows(spec.features), np.random.default_rng(spec.features)
    factors = [rng.normal(1, 0.5, spec.features).astype("float32") for _ in range(2)]
    factors = factors[: spec.weight + spec.bias]
    y = state_row_norm(spec, x, factors)
    return Case(lambda _: (make_row_norm(spec), [x, *factors]), (y, *qnn.quantize_rows(y)))


def make_softmax_case(spec: Softmax) -> Case:
    """Scores of very different size, some of them masked."""
    rng = np.random.default_rng(0)
    shape = tuple(3 if extent is None else extent for extent in spec.shape)
    x = (rng.normal(0, 1, shape) * 10.0 ** rng.integers(-2, 3, shape)).astype("float32")
    np.moveaxis(x, spec.axis, -1)[..., 1::7] = -np.inf
    y = softmax_along(x if spec.factor is None else x * F32(spec.factor), spec.axis)
    if spec.quantized is not None:
        y = qnn.quantize(y, spec.quantized.scale, 0, out_dtype="uint8")
    return Case(lambda _: (make_softmax(spec), [x]), (y,))


def make_quantized_rows(width: int) -> Case:
    x = draw_rows(width)
    spec = RowQuantize((None,), width)
    return Case(lambda _: (build_quantize_rows(spec), [x]), tuple(qnn.quantize_rows(x)))


def pooled_values(x: np.ndarray, window: PoolWindow) -> tuple[np.ndarray, np.ndarray]:
    """Values under each tap as (taps, N, OH, OW, C) int64, and whether they lie in the data."""
    top, left = window.padding[:2]
    (oh, ow), (sh, sw) = window.out_size, window.strides
    shape = (window.batch, window.height + 20, window.width + 20, window.channels)
    padded, inside = np.zeros(shape, "int64"), np.zeros(shape, bool)
    area = (slice(None), slice(top, top + window.height), slice(left, left + window.width))
    padded[area], inside[area] = x, True

    def windows(image: np.ndarray) -> np.ndarray:
        taps = np.ndindex(*window.kernel)
        return np.stack([image[:, i : i + oh * sh : sh, j : j + ow * sw : sw] for i, j in taps])

    return windows(padded), windows(inside)


def make_max_pool(window: PoolWindow) -> Case:
    x = random_values(np.random.default_rng(7), window.in_shape, "int8")
    values, inside = pooled_values(x, window)
    expected = np.where(inside, values, -1000).max(axis=0).astype("int8")
    return Case(lambda _: (build_max_pool2d(MaxPool2d(window, "int8")), [x]), expected)


def make_avg_pool(window: PoolWindow) -> Case:
    x = random_values(np.random.default_rng(8), window.in_shape, "int8")
    values, inside = pooled_values(x, window)
    sums = np.where(inside, values + 3, 0).sum(axis=0).astype("float32")
    factor = F32(1.7) / inside.sum(axis=0).astype("float32")
    spec = AvgPool2d(window, Space("int8", -3, 1.7), OUT)
    return Case(lambda _: (build_avg_pool2d(spec), [x]), store(sums * factor, OUT))


#: A group that is short, outputs that overlap, more rows than a tile has.
GROUPED = {
    "grouped 4 bits": (GroupedDense((9,), 37, 84, 4, 32), 9),
    "grouped 4 bits, float16": (GroupedDense((1,), 32, 64, 4, 32, scale_dtype="float16"), 1),
    "grouped 8 bits, zero points": (GroupedDense((3,), 20, 60, 8, 20, zeros_dtype="uint8"), 3),
    "grouped 4 bits, offsets": (GroupedDense((5,), 37, 84, 4, 32, zeros_dtype="float16"), 5),
    "grouped 8 bits, offsets": (GroupedDense((3,), 20, 60, 8, 20, zeros_dtype="float32"), 3),
    "grouped 2 bits, zero points": (GroupedDense((2,), 20, 192, 2, 96, zeros_dtype="uint8"), 2),
}

#: A row of several sums and a rest; one that is shorter than a vector, and divided.
NORMS = {
    "layer norm": RowNorm((None,), 100, 1e-5, is_centred=True, bias=True, rows=(None,)),
    "norm by the root mean square": RowNorm((None,), 72, 1e-5, rows=(None,)),
    "norm of 7, divided": RowNorm((19,), 7, 1e-5, divides=True, weight=False, rows=(19,)),
}

LARGEST = {
    f"grouped {bits} bits, largest sums": GroupedDense((3,), 19, 160, bits, 80) for bits in (4, 8)
}

CODES = Quantize((1,), 1 / 255, Epilogue(Store.REQUANTIZE, "uint8", 0), has_fma=True)
SOFTMAXES = {
    "softmax, integers": Softmax((2, 3, 98), 2, 0.125, CODES),
    "softmax, any length": Softmax((None, 3, None), 2),
    "softmax, columns": Softmax((2, 70, 21), 1),
}

CASES: dict[str, Callable[[], Case]] = {
    **{name: (lambda s=spec: make_convolution(s)) for name, spec in CONVOLUTIONS.items()},
    **{name: (lambda s=spec: make_transposed(s)) for name, spec in TRANSPOSED.items()},
    **{name: (lambda s=spec: make_dense(s)) for name, spec in DENSE.items()},
    **{name: (lambda s=spec: make_rows(s)) for name, spec in ROWS.items()},
    **{name: (lambda s=spec: make_matmul(s)) for name, spec in MATMULS.items()},
    **{f"max_pool2d {n}": (lambda w=w: make_max_pool(w)) for n, w in WINDOWS.items()},
    **{f"avg_pool2d {n}": (lambda w=w: make_avg_pool(w)) for n, w in WINDOWS.items()},
    **{n: (lambda s=spec, r=rows: make_grouped(s, r)) for n, (spec, rows) in GROUPED.items()},
    **{name: (lambda s=spec: make_grouped(s, 3, extreme=True)) for name, spec in LARGEST.items()},
    **{name: (lambda s=spec: make_row_norm_case(s)) for name, spec in NORMS.items()},
    **{name: (lambda s=spec: make_softmax_case(s)) for name, spec in SOFTMAXES.items()},
    **{f"rows of {width} to int8": (lambda w=width: make_quantized_rows(w)) for width in (5, 100)},
    "extreme sums": make_extreme_sums,
    "residual, every pair": make_residual_pairs,
    "add, every pair": lambda: make_addition(Space("int8", -3, 2 / 3), Space("int8", 13, 1 / 6)),
    "subtract, every pair": lambda: make_addition(
        Space("int8", -3, 0.37), Space("int8", 13, -0.77)
    ),
    "multiply, every pair": make_multiplication,
    "quantize to int8": lambda: make_quantization("int8"),
    "quantize to uint8": lambda: make_quantization("uint8"),
    "quantize to int16": lambda: make_quantization("int16"),
    "dequantize": make_dequantization,
    "requantize int8": lambda: make_requantization("int8", OUT),
    "requantize int32": lambda: make_requantization("int32", OUT),
    "requantize int32 to uint8, clipped": lambda: make_requantization(
        "int32", Epilogue(zero_point=128, low=3, high=250)
    ),
    "requantize int32 to int32": lambda: make_requantization("int32", Epilogue(dtype="int32")),
    "lookup": make_lookup,
    "concatenate": make_concatenation,
}
#: What an instruction set that multiplies rows in pairs does otherwise.
MATRIX_CASES: dict[str, Callable[[], Case]] = {
    **{name: CASES[name] for name, spec in CONVOLUTIONS.items() if not spec.is_depthwise},
    **{name: CASES[name] for name in TRANSPOSED},
    **{name: (lambda s=spec: make_dense(s)) for name, spec in MATRICES.items()},
    **{name: CASES[name] for name in (*ROWS, *MATMULS)},
    "extreme sums": make_extreme_sums,
}
#: Constant weights whose bytes are taken together: every way to read pixels.
BYTES_CONVOLUTIONS = (
    "3x3 of 17 to 33 channels, strides, residual",
    "3x3 with threads",
    "1x1 of 12 channels to 1",
    "1x1 of uint8",
    "first, 7x7/2 of 3 channels",
    "groups, dilation, clip",
    "accumulators",
)
BYTES_CASES: dict[str, Callable[[], Case]] = {
    **{name: CASES[name] for name in (*BYTES_CONVOLUTIONS, *TRANSPOSED, *ROWS)},
    "extreme sums": make_extreme_sums,
}
#: And of those that are without -128.
PAIRS_CASES: dict[str, Callable[[], Case]] = {
    **{
        f"{name}, without -128": (lambda s=CONVOLUTIONS[name]: make_convolution(s, least=-127))
        for name in BYTES_CONVOLUTIONS
    },
    **{f"sums of -128 by {w}": (lambda w=w: make_extreme_sums(w)) for w in (-127, 127)},
}
