"""Convolutions of images whose size is known only at run time: kernels for every instruction set,
and whole modules, against exact integers, for sizes below, at and above the window.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import tvm
from convolutions import conv2d_accumulators, conv2d_transpose_accumulators
from emulated_unit import EMULATED, REFUSED, find_target
from exact import finish, random_multipliers, random_values, random_weights
from machines import best_isa, compile_kernel, every_isa
from operator_names import list_operators
from tvm import relax, tirx

import relayquant as rq
from relayquant.codegen.kernels.integer.convolution.free import FreeConv2d, build_free_conv2d
from relayquant.codegen.kernels.integer.convolution.transposed import Conv2dTranspose
from relayquant.codegen.kernels.integer.depthwise.free import FreeDepthwise, build_free_depthwise
from relayquant.codegen.kernels.integer.dynamic_rows import pack_dense_rows
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Slope, Store
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, Dense
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.x86 import AMX
from relayquant.codegen.kernels.windows import ConvWindows
from relayquant.codegen.lowering.integer.lower import lower_integer
from relayquant.codegen.rewrites.layout import convert_layout
from relayquant.codegen.rewrites.transposed_blocks import make_pixel_blocks
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite.function import make_main

SUMS = Epilogue(Store.ACCUMULATOR, "int32")
#: (images, height, width)
SIZES = ((1, 3, 3), (2, 7, 5), (0, 4, 4), (1, 40, 37))


@dataclass(frozen=True, eq=False)
class FreeLayer:
    """One convolution, compiled once for any size."""

    spec: Conv2d
    isa: Isa
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def check(self, *sizes: tuple[int, int, int]) -> None:
        """Compare the results for every size, bit for bit."""
        spec, rng, isa = self.spec, self.rng, self.isa
        w = random_weights(rng, spec.weight_shape)
        bias = rng.integers(-5000, 5000, spec.out_channels).astype("int32")
        multiplier = random_multipliers(rng, w, spec.epilogue)
        windows = ConvWindows(
            spec.in_channels,
            spec.kernel,
            spec.strides,
            spec.padding,
            spec.dilation,
            spec.in_dtype,
            spec.in_zero_point,
        )
        if spec.groups > 1:
            free = FreeDepthwise(windows, spec.epilogue)
            packed = free.pack(Constants(w, bias, multiplier))
            func = build_free_depthwise(free, isa.lanes, "free")
        else:
            dense = Dense(1, windows.row, len(w), spec.in_dtype, spec.in_zero_point, spec.epilogue)
            constants = Constants(w.reshape(len(w), -1), bias, multiplier)
            packed = pack_dense_rows(dense, isa, constants).arguments()
            func = build_free_conv2d(FreeConv2d(windows, dense), isa, "free")
        kernel = compile_kernel(func, find_target(isa))
        for images, height, width in sizes:
            own = replace(spec, batch=images, height=height, width=width)
            x = random_values(rng, (images, height, width, spec.in_channels), spec.in_dtype)
            empty = np.zeros(own.out_shape, "int64")
            acc = conv2d_accumulators(x, w, bias, own) if images else empty
            added = spec.epilogue.residual
            residual = random_values(rng, acc.shape, added.dtype) if added else None
            inputs = [x, *packed, *([] if residual is None else [residual])]
            y = tvm.runtime.tensor(np.full(acc.shape, 77, spec.epilogue.dtype))
            kernel(*map(tvm.runtime.tensor, inputs), y)
            expected = finish(acc, spec.epilogue, multiplier, residual)
            np.testing.assert_array_equal(y.numpy(), expected, err_msg=str((height, width)))


def make_spec(channels: int, outputs: int, kernel: tuple[int, int], **options) -> Conv2d:
    return Conv2d(1, 8, 8, channels, outputs, kernel, **options)


KINDS = {
    "residual": make_spec(
        16,
        24,
        (3, 3),
        padding=(1, 1, 1, 1),
        in_zero_point=9,
        epilogue=Epilogue(zero_point=7, residual=Residual("int8", 4, 0.37)),
    ),
    "three channels": make_spec(
        3, 10, (3, 3), strides=(2, 2), padding=(1, 0, 1, 1), in_dtype="int8", epilogue=SUMS
    ),
    "dilated": make_spec(
        5, 7, (2, 3), dilation=(1, 2), padding=(0, 2, 1, 2), in_zero_point=200, epilogue=SUMS
    ),
    "one tap": make_spec(70, 33, (1, 1), strides=(2, 1), epilogue=SUMS),
    "int16": make_spec(6, 9, (3, 2), in_dtype="int16", epilogue=Epilogue(dtype="int16")),
    "many weights": make_spec(64, 130, (3, 3), epilogue=Epilogue(Store.DEQUANTIZE, "float32")),
    "depthwise": make_spec(
        20, 20, (3, 3), groups=20, padding=(1, 1, 1, 1), in_zero_point=3, epilogue=Epilogue()
    ),
    "depthwise, slope": make_spec(
        21, 21, (3, 3), groups=21, epilogue=Epilogue(zero_point=60, slope=Slope(-60, 195, 1.1))
    ),
    "depthwise, strides": make_spec(
        7,
        7,
        (5, 2),
        groups=7,
        strides=(2, 1),
        dilation=(1, 3),
        padding=(2, 1, 2, 2),
        in_dtype="int8",
        in_zero_point=-5,
        epilogue=SUMS,
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", KINDS)
def test_build_free_conv2d__every_kind(name):
    sizes = [(n, max(h, 6), max(w, 6)) for n, h, w in SIZES]
    FreeLayer(KINDS[name], best_isa()).check(*sizes, *(SIZES if "pad" in name else ()))


@pytest.mark.slow
@pytest.mark.sample(4)
@every_isa
@pytest.mark.parametrize("name", ["residual", "depthwise"])
def test_build_free_conv2d__every_instruction_set(name, isa):
    FreeLayer(KINDS[name], isa).check(*SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
def test_build_free_conv2d__on_tiles(isa):
    FreeLayer(KINDS["residual"], isa).check(*SIZES)


# ---------------------------------------------------------------- modules


def build_free(operator, x_channels: int, weight: np.ndarray, **attrs) -> tvm.IRModule:
    """main(x) = sums of images of free number and size, NHWC, with zero point 4 and per-channel
    scales.
    """
    sizes = [tirx.Var(name, "int64") for name in ("n", "h", "w")]
    x = relax.Var("x", relax.TensorType([*sizes, x_channels], "uint8"))
    outputs = attrs.pop("outputs")
    scales = relax.const(np.linspace(0.1, 0.2, outputs).astype("float32"))
    zeros = (relax.const(4, "int32"), relax.const(0, "int32"))

    def emit(_):
        return operator(
            x,
            relax.const(weight, "int8"),
            *zeros,
            relax.const(0.5, "float32"),
            scales,
            data_layout="NHWC",
            **attrs,
        )

    return make_main([x], emit)


TRANSPOSES = {
    "blocks": {"kernel": (2, 2), "strides": (2, 2)},
    "overlapping": {"kernel": (4, 4), "strides": (2, 2), "padding": (1, 1, 1, 1)},
    "output padding": {
        "kernel": (3, 3),
        "strides": (2, 2),
        "padding": (1, 1, 1, 1),
        "output_padding": (1, 1),
    },
    "every pixel": {"kernel": (3, 2), "strides": (1, 1), "padding": (1, 0, 0, 1)},
    "gaps": {"kernel": (2, 1), "strides": (3, 2)},
    "cut": {"kernel": (3, 3), "strides": (3, 1), "padding": (1, 1, 1, 0)},
}


@pytest.mark.parametrize("name", TRANSPOSES)
def test_make_pixel_blocks__exact(name):
    options = dict(TRANSPOSES[name])
    kernel, rng = options.pop("kernel"), np.random.default_rng(1)
    weight = random_weights(rng, (6, *kernel, 5))
    mod = build_free(qnn.conv2d_transpose, 5, weight, outputs=6, kernel_layout="OHWI", **options)
    rewritten = make_pixel_blocks(mod)
    assert list_operators(rewritten) == ["qnn.conv2d", "call_tir"]
    executor = rq.Executor(rq.compile(mod))
    for images, height, width in ((1, 1, 1), (2, 3, 4), (1, 9, 5)):
        x = random_values(rng, (images, height, width, 5), "uint8")
        spec = Conv2dTranspose(
            images, height, width, 5, 6, kernel, in_zero_point=4, epilogue=SUMS, **options
        )
        expected = conv2d_transpose_accumulators(x, weight, np.zeros(6, "int32"), spec)
        (found,) = executor.run("main", [x])
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kernel", [1, 3])
def test_lower_free_conv2d__one_kernel_for_all_sizes(kernel):
    rng = np.random.default_rng(2)
    weight = random_weights(rng, (6, kernel, kernel, 5))
    pad = kernel // 2
    mod = build_free(qnn.conv2d, 5, weight, outputs=6, kernel_layout="OHWI", padding=(pad, pad))
    lowered = lower_integer(convert_layout(mod), tvm.target.Target("llvm"))
    assert list_operators(lowered) == ["call_tir"]
    executor = rq.Executor(rq.compile(mod))
    for images, height, width in ((1, 1, 1), (2, 3, 4), (1, 9, 5)):
        x = random_values(rng, (images, height, width, 5), "uint8")
        spec = Conv2d(
            images, height, width, 5, 6, (kernel, kernel), padding=(pad,) * 4, in_zero_point=4
        )
        expected = conv2d_accumulators(x, weight, np.zeros(6, "int32"), spec)
        (found,) = executor.run("main", [x])
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("kernel", [1, 3])
def test_lower_free_conv2d__sequences(kernel, groups):
    rng, outputs = np.random.default_rng(6), 5 if groups > 1 else 6
    weight = random_weights(rng, (outputs, kernel, 5 // groups))
    length = tirx.Var("w", "int64")
    x = relax.Var("x", relax.TensorType([tirx.Var("n", "int64"), length, 5], "uint8"))
    scales = [relax.const(0.5, "float32"), relax.const(np.full(outputs, 0.1, "float32"))]
    zeros = relax.const(4, "int32"), relax.const(0, "int32")
    options = {"padding": (kernel // 2,) * 2, "groups": groups}

    def emit(_):
        layouts = {"data_layout": "NWC", "kernel_layout": "OWI"}
        operands = (x, relax.const(weight, "int8"), *zeros, *scales)
        return qnn.conv1d(*operands, **layouts, **options)

    mod = make_main([x], emit)
    lowered = lower_integer(convert_layout(mod), tvm.target.Target("llvm"))
    assert list_operators(lowered) == ["call_tir"]
    executor = rq.Executor(rq.compile(mod))
    for images, width in ((1, 1), (2, 4), (1, 90)):
        values = random_values(rng, (images, width, 5), "uint8")
        pad = kernel // 2
        spec = Conv2d(
            images,
            1,
            width,
            5,
            outputs,
            (1, kernel),
            padding=(0, pad, 0, pad),
            groups=groups,
            in_zero_point=4,
        )
        zero = np.zeros(outputs, "int32")
        expected = conv2d_accumulators(values[:, None], weight[:, None], zero, spec)
        (found,) = executor.run("main", [values])
        np.testing.assert_array_equal(found, expected[:, 0])


def test_make_pixel_blocks__leaves_known_sizes_and_groups():
    mod = build_free(
        qnn.conv2d_transpose,
        6,
        random_weights(np.random.default_rng(3), (3, 2, 2, 6)),
        outputs=6,
        kernel_layout="OHWI",
        groups=2,
    )
    assert make_pixel_blocks(mod) is mod


def test_make_pixel_blocks__leaves_halves_that_are_summed_as_floats():
    sizes = [tirx.Var(name, "int64") for name in ("n", "h", "w")]
    x = relax.Var("x", relax.TensorType([*sizes, 3], "float16"))
    weight = np.random.default_rng(4).normal(size=(3, 5, 2, 2)).astype("float16")

    def emit(_):
        options = {"strides": (2, 2), "data_layout": "NHWC", "kernel_layout": "IOHW"}
        return relax.op.nn.conv2d_transpose(x, relax.const(weight), out_dtype="float32", **options)

    mod = make_main([x], emit)
    assert make_pixel_blocks(mod) is mod
