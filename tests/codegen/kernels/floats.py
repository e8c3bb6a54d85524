"""What float kernels are tested with: operands, compiling and running, results in float64."""

from __future__ import annotations

import numpy as np
import tvm
from machines import compile_kernel
from tvm import tirx

from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d
from relayquant.codegen.kernels.floating.tile import FloatEpilogue, FloatIsa, choose_float_isa
from relayquant.codegen.kernels.isa.target import resolve_target

TARGET = resolve_target()
HOST = choose_float_isa(TARGET)
#: Register files of AVX-512, AVX2 and 128-bit machines; LLVM emits any of them here.
ISAS = [FloatIsa(16, 28), FloatIsa(8, 12), FloatIsa(4, 12)]
FULL = FloatEpilogue(bias=True, residual=True, low=0.0, high=6.0)


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype("float32")


def run_kernel(func: tirx.PrimFunc, *arrays: np.ndarray) -> np.ndarray:
    """Call a kernel; the last array is the output."""
    kernel = compile_kernel(func, TARGET)
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays]
    kernel(*tensors)
    return tensors[-1].numpy()


def check(got: np.ndarray, expected: np.ndarray) -> None:
    scale = np.abs(expected).max() or 1.0
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * scale)


def finish(
    total: np.ndarray, epilogue: FloatEpilogue, rng: np.random.Generator
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Expected output and the operands of the epilogue."""
    operands = []
    if epilogue.bias:
        operands.append(draw(rng, total.shape[-1]))
        total = total + operands[-1]
    if epilogue.residual:
        operands.append(draw(rng, *total.shape))
        total = total + operands[-1]
    low = -np.inf if epilogue.low is None else epilogue.low
    high = np.inf if epilogue.high is None else epilogue.high
    return np.clip(total, low, high), operands


def convolve(x: np.ndarray, w: np.ndarray, spec: FloatConv2d) -> np.ndarray:
    """float64 NHWC convolution, tap by tap."""
    top, left, bottom, right = spec.padding
    x = np.pad(x.astype("float64"), ((0, 0), (top, bottom), (left, right), (0, 0)))
    (oh, ow), (sh, sw), (dh, dw) = spec.out_size, spec.strides, spec.dilation
    out = np.zeros((len(x), oh, ow, spec.groups, spec.group_out))
    w = w.reshape(spec.groups, spec.group_out, *w.shape[1:]).astype("float64")
    for ky, kx in np.ndindex(*spec.kernel):
        y0, x0 = ky * dh, kx * dw
        rows = slice(y0, y0 + (oh - 1) * sh + 1, sh)
        window = x[:, rows, x0 : x0 + (ow - 1) * sw + 1 : sw]
        window = window.reshape(*window.shape[:3], spec.groups, spec.group_in)
        out += np.einsum("nhwgi,goi->nhwgo", window, w[:, :, ky, kx])
    return out.reshape(len(x), oh, ow, spec.out_channels)
