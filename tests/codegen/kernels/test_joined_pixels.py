"""Convolutions whose neighbouring pixels are computed as one, against numpy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from convolutions import check_conv2d, conv2d_transpose_accumulators
from exact import call_kernel, finish, random_multipliers, random_values, random_weights
from machines import ISAS, runnable_target
from tvm import relax, tirx

import relayquant as rq
from relayquant.codegen.kernels.integer.convolution.direct import build_conv2d, pack_conv2d
from relayquant.codegen.kernels.integer.convolution.joined_pixels import (
    count_joined_blocks,
    count_joined_pixels,
    join_block_constants,
    join_blocks,
    join_constants,
    join_pixels,
)
from relayquant.codegen.kernels.integer.convolution.transposed import (
    Conv2dTranspose,
    build_conv2d_transpose,
    pack_conv2d_transpose,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Slope, Store
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d
from relayquant.codegen.kernels.isa.arm import SDOT
from relayquant.codegen.kernels.isa.x86 import AVX2, VNNI512
from relayquant.codegen.lowering.integer.lower import call_kernels
from relayquant.ir.dialect.legality import list_calls

qnn = rq.extend.qnn
SAME = (1, 1, 1, 1)
CASES = {
    "one channel": Conv2d(1, 6, 12, 8, 1, (3, 3), padding=SAME, in_zero_point=9),
    "wide window, 8 channels": Conv2d(
        1, 5, 16, 8, 8, (3, 7), padding=(1, 3, 1, 3), in_zero_point=200
    ),
    "strides, columns that no window reads, batch 2, int8": Conv2d(
        2, 9, 13, 3, 3, (3, 2), (2, 3), (1, 1, 1, 0), in_dtype="int8", in_zero_point=-5,
        epilogue=Epilogue(dtype="int8", zero_point=4, low=4),
    ),
    "less padding behind, residual": Conv2d(
        1, 6, 11, 5, 2, (3, 3), (1, 2), (0, 1, 2, 1), (2, 1), in_zero_point=7,
        epilogue=Epilogue(zero_point=3, residual=Residual("int8", 5, 0.6)),
    ),
    "matrix, slope": Conv2d(
        2, 4, 6, 8, 4, (1, 1), in_zero_point=7,
        epilogue=Epilogue(zero_point=50, slope=Slope(-50, None, 1.1)),
    ),
    "one tap, strides": Conv2d(1, 7, 11, 8, 4, (1, 1), (2, 2), in_zero_point=7),
    "sequence": Conv2d(
        1, 1, 300, 1, 1, (1, 64), (1, 2), epilogue=Epilogue(Store.DEQUANTIZE, "float32")
    ),
    "int16": Conv2d(
        1, 4, 8, 6, 3, (3, 3), padding=SAME, in_dtype="int16", in_zero_point=-300,
        epilogue=Epilogue(dtype="int16", zero_point=99),
    ),
}  # fmt: skip


def list_counts(spec: Conv2d) -> list[int]:
    width = spec.out_size[1]
    return [count for count in range(2, width + 1) if width % count == 0]


@pytest.mark.sample(8)
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("case", CASES)
def test_join_pixels__equals_numpy(isa, case):
    spec, target = CASES[case], runnable_target(isa)
    assert list_counts(spec)
    for count in list_counts(spec):

        def build(own, isa, name, count=count):
            return build_conv2d(join_pixels(own, count), isa, name, own.in_shape, own.out_shape)

        def pack(own, isa, constants, count=count):
            joined = join_constants(own, count, constants)
            return pack_conv2d(join_pixels(own, count), isa, joined)

        check_conv2d(spec, isa, target, count, build, pack)


ONE = Conv2d(1, 64, 96, 8, 1, (3, 3), padding=SAME)
WIDE = Conv2d(1, 64, 96, 8, 8, (3, 39), padding=(1, 19, 1, 19))


@pytest.mark.parametrize(
    ("isa", "spec", "count"),
    [
        (VNNI512, ONE, 16),
        (AVX2, ONE, 8),
        (SDOT, ONE, 4),
        (VNNI512, WIDE, 2),
        (AVX2, WIDE, 1),  # a vector has 8 lanes
        (VNNI512, replace(ONE, out_channels=16), 1),
        (VNNI512, replace(ONE, width=97), 1),  # no divisor
        (VNNI512, replace(ONE, dilation=(1, 2)), 1),
        (VNNI512, replace(ONE, columns=(0, 3)), 1),
        (VNNI512, replace(ONE, groups=8, out_channels=8), 1),
        (VNNI512, Conv2d(1, 64, 96, 8, 8, (1, 1)), 2),
        (VNNI512, Conv2d(1, 64, 96, 64, 8, (1, 1)), 1),  # as many products, with zeros
    ],
)
def test_count_joined_pixels__fills_vectors(isa, spec, count):
    assert count_joined_pixels(spec, isa) == count


def test_join_constants__one_number_for_all_channels_stays():
    weight, factor = np.ones((1, 3, 3, 8), "int8"), np.float32(0.5)
    joined = join_constants(ONE, 4, Constants(weight, np.zeros(1, "int32"), factor))
    assert joined.weight.shape == join_pixels(ONE, 4).weight_shape
    assert joined.weight.sum() == 4 * weight.sum()
    assert joined.multiplier == factor


UP = Conv2dTranspose(1, 8, 12, 16, 1, (2, 2), (2, 2), in_zero_point=5)
UPS = {
    "one channel": UP,
    "other rows, int8": Conv2dTranspose(
        2, 3, 6, 5, 3, (4, 3), (2, 3), (1, 0, 1, 0), output_padding=(1, 0), in_dtype="int8",
        in_zero_point=-9, epilogue=Epilogue(dtype="int8", zero_point=3),
    ),
    "slope, residual": Conv2dTranspose(
        1, 4, 4, 8, 6, (2, 2), (2, 2),
        epilogue=Epilogue(
            zero_point=60, residual=Residual("uint8", 9, 0.5), slope=Slope(-60, None, 1.1)
        ),
    ),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("case", UPS)
def test_join_blocks__equals_numpy(isa, case):
    spec, rng = UPS[case], np.random.default_rng(0)
    x = random_values(rng, spec.in_shape, spec.in_dtype)
    w = random_weights(rng, spec.weight_shape)
    bias = rng.integers(-500, 500, spec.out_channels).astype("int32")
    multiplier = random_multipliers(rng, w, spec.epilogue)
    residual = random_values(rng, spec.out_shape, "uint8") if spec.epilogue.residual else None
    acc = conv2d_transpose_accumulators(x, w, bias, spec)
    expected = finish(acc, spec.epilogue, multiplier, residual)
    for count in [count for count in range(1, spec.width + 1) if spec.width % count == 0]:
        whole = join_blocks(spec, count)
        constants = join_block_constants(spec, count, Constants(w, bias, multiplier))
        func = build_conv2d_transpose(whole, isa, "up", spec.in_shape, spec.out_shape)
        inputs = [x, *pack_conv2d_transpose(whole, isa, constants).arguments()]
        inputs += [] if residual is None else [residual]
        got = call_kernel(func, runnable_target(isa), inputs, spec.out_shape, spec.epilogue.dtype)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (UP, 6),
        (replace(UP, out_channels=24), 1),
        (replace(UP, out_channels=64), 0),  # its vectors are full
        (replace(UP, kernel=(2, 3)), 0),
        (replace(UP, kernel=(3, 2), padding=(1, 0, 0, 0)), 6),
        (replace(UP, padding=(0, 1, 0, 0)), 0),
        (replace(UP, output_padding=(0, 1)), 0),
        (replace(UP, groups=2, out_channels=2), 0),
    ],
)
def test_count_joined_blocks__fills_vectors(spec, count):
    assert count_joined_blocks(spec, VNNI512) == count


@pytest.mark.parametrize("batch", [2, "n"])
def test_lower_conv2d__joins_pixels_of_few_channels(batch):
    """Also of any number of images, and not where the results are columns of others."""
    rng, sizes = np.random.default_rng(0), [2, 9, 12, 8]
    first = tirx.Var(batch, "int64") if isinstance(batch, str) else batch
    dims = [first, *sizes[1:]]
    x = relax.Var("x", relax.TensorType(dims, "uint8"))
    builder = relax.BlockBuilder()
    zero, one = (partial(relax.const, dtype=dtype) for dtype in ("int32", "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            parts = []
            for outputs in (1, 3):
                weight = rng.integers(-127, 128, (outputs, 3, 3, 8)).astype("int8")
                sums = qnn.conv2d(
                    x, relax.const(weight), zero(7), zero(0), one(1), one(0.01), padding=1,
                    data_layout="NHWC", kernel_layout="OHWI",
                )  # fmt: skip
                sums = builder.emit(sums)
                parts.append(
                    builder.emit(qnn.requantize(sums, one(0.01), zero(0), one(3), zero(9), -1))
                )
            weight = rng.integers(-127, 128, (1, 2, 2, 8)).astype("int8")
            up = builder.emit(
                qnn.conv2d_transpose(
                    x,
                    relax.const(weight),
                    zero(7),
                    zero(0),
                    one(1),
                    one(0.01),
                    strides=2,
                    data_layout="NHWC",
                    kernel_layout="OHWI",
                )
            )
            up = builder.emit_output(qnn.requantize(up, one(0.01), zero(0), one(3), zero(9), -1))
            pairs = [one(3), one(3)], [zero(9), zero(9)], one(3), zero(9)
            y = builder.emit_output(qnn.concatenate([parts[1], parts[1]], *pairs, axis=3))
            z = builder.emit_output(parts[0])
        builder.emit_func_output(relax.Tuple([y, z, up]))
    mod = builder.finalize()
    kernels = [call for call in list_calls(call_kernels(mod, VNNI512)) if len(call.args) > 1]
    operands = [each.ty.shape.values for call in kernels for each in call.args[1]]
    lengths = {int(shape[0]) for shape in operands if len(shape) == 1}
    assert 3 * 14 * 2 * 64 in lengths  # 14 columns of 8 channels, for 12 pixels of one channel
    data = rng.integers(0, 256, sizes).astype("uint8")
    found = rq.Executor(rq.compile(mod)).run("main", [data])
    for got, want in zip(found, rq.reference.run(mod, data), strict=True):
        assert len(np.unique(want)) > 40
        np.testing.assert_array_equal(got, want)
