"""Checks of one convolution on random operands, shared by the tests of its kernels."""

from __future__ import annotations

import numpy as np
from exact import (
    GARBAGE,
    call_kernel,
    finish,
    random_multipliers,
    random_values,
    random_weights,
)
from tvm.target import Target

from relayquant.codegen.kernels.conv_shape import Conv2dShape
from relayquant.codegen.kernels.integer.convolution.direct import build_conv2d, pack_conv2d
from relayquant.codegen.kernels.integer.convolution.transposed import Conv2dTranspose
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d
from relayquant.codegen.kernels.isa.base import Isa


def conv2d_accumulators(x, w, bias, spec: Conv2d):
    """int64 (N, OH, OW, O); x NHWC, w OHWI."""
    top, left, bottom, right = spec.padding
    centred = x.astype("float64") - spec.in_zero_point  # exact, and fast
    centred = np.pad(centred, ((0, 0), (top, bottom), (left, right), (0, 0)))
    oh, ow = spec.out_size
    (sh, sw), (dh, dw), g = spec.strides, spec.dilation, spec.groups
    out = np.zeros((*spec.out_shape[:3], g, spec.out_channels // g))
    split = w.reshape(g, -1, *w.shape[1:]).astype("float64")
    for kh, kw in np.ndindex(*spec.kernel):
        window = centred[:, kh * dh :, kw * dw :][:, : (oh - 1) * sh + 1 : sh]
        window = window[:, :, : (ow - 1) * sw + 1 : sw]
        window = window.reshape(*window.shape[:3], g, -1)
        out += np.einsum("nhwgi,goi->nhwgo", window, split[:, :, kh, kw], optimize=True)
    return out.reshape(spec.out_shape).astype("int64") + bias


def conv2d_transpose_accumulators(x, w, bias, spec: Conv2dTranspose):
    """int64 (N, OH, OW, O) by its definition: every pixel adds the kernel to the output."""
    (sh, sw), (kh, kw), (dh, dw), g = spec.strides, spec.kernel, spec.dilation, spec.groups
    full = np.zeros(
        (
            spec.batch,
            spec.height * sh + kh * dh + 9,
            spec.width * sw + kw * dw + 9,
            g,
            spec.out_channels // g,
        ),
        "int64",
    )
    centred = (x.astype("int64") - spec.in_zero_point).reshape(*x.shape[:3], g, -1)
    split = w.reshape(g, -1, kh, kw, w.shape[-1]).astype("int64")
    for i, j in np.ndindex(kh, kw):
        term = np.einsum("nhwgi,goi->nhwgo", centred, split[:, :, i, j])
        rows = slice(i * dh, i * dh + spec.height * sh, sh)
        full[:, rows, j * dw : j * dw + spec.width * sw : sw] += term
    top, left = spec.padding[:2]
    full = full.reshape(*full.shape[:3], -1)[:, top:, left:]
    return full[:, : spec.out_size[0], : spec.out_size[1]] + bias


def join_slices(x: np.ndarray, spec: Conv2dShape) -> np.ndarray:
    """The images of a convolution of volumes x (N, D, H, W, C), with a copy of every row."""
    joined = spec.joined
    if joined is None:
        return x
    starts = range(0, joined.images * joined.stride, joined.stride)
    taps = range(0, joined.taps * joined.dilation, joined.dilation)
    images = [[x[:, start + tap] for tap in taps] for start in starts]  # each (N, H, W, C)
    return np.array(images).transpose(2, 0, 3, 1, 4, 5).reshape(spec.in_shape)


def check_conv2d(
    spec: Conv2d, isa: Isa, target: Target, seed: int = 0, build=build_conv2d, pack=pack_conv2d
) -> None:
    """Random operands over the whole range of their dtypes; asserts equal bits.

    Channels of y that are not written keep their values.
    """
    rng = np.random.default_rng(seed)
    x = random_values(rng, spec.stored_shape, spec.in_dtype)
    w = random_weights(rng, spec.weight_shape)
    bias = rng.integers(-5000, 5000, spec.out_channels).astype("int32")
    multiplier = random_multipliers(rng, w, spec.epilogue)
    inputs = [x, *pack(spec, isa, Constants(w, bias, multiplier)).arguments()]
    residual = None
    if spec.epilogue.residual is not None:
        residual = random_values(rng, spec.out_shape, spec.epilogue.residual.dtype)
        inputs.append(residual)
    acc = conv2d_accumulators(join_slices(x, spec), w, bias, spec)
    expected = finish(acc, spec.epilogue, multiplier, residual)
    shape = (*spec.out_shape[:-1], spec.result_channels)
    got = call_kernel(build(spec, isa, "conv2d"), target, inputs, shape, spec.epilogue.dtype)
    written = slice(spec.first_result, spec.first_result + spec.out_channels)
    np.testing.assert_array_equal(got[..., written], expected)
    got[..., written] = GARBAGE
    assert (got == GARBAGE).all()
