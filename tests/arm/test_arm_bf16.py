"""Products of bfloat16, cross-compiled and run on an emulated CPU that has bfmmla and bfdot.

Products of matrices equal numpy's emulation of the instructions bit for bit. Convolutions and
products of computed matrices are near float64 sums.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import tvm
from emulator import MATRIX_CPU, TRIPLE
from test_arm_models import mobile_network
from test_bf16 import TOLERANCE, compute, draw_operands, hold, read, widen
from tvm.target import Target
from tvm.tirx import PrimFunc

import relayquant as rq
from relayquant.codegen.kernels.floating.bf16 import (
    Bf16Plan,
    make_bf16_conv2d,
    pack_bf16,
    plan_bf16,
    read_bf16_conv2d,
    read_bf16_dense,
)
from relayquant.codegen.kernels.floating.bf16_matmul import Bf16Matmul, make_bf16_matmul
from relayquant.codegen.kernels.floating.convolution.direct import make_conv2d
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d, pack_conv2d
from relayquant.codegen.kernels.floating.gemm import FloatDense
from relayquant.codegen.kernels.floating.stored import Stored
from relayquant.codegen.kernels.floating.tile import FloatEpilogue, choose_float_isa
from relayquant.codegen.kernels.isa.arm_bf16 import BFMMLA
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS
from relayquant.codegen.library.host_functions import name_kernel_pipeline

#: Of all that the emulated CPU "max" has, bf16 only.
TARGET = {"kind": "llvm", "mtriple": TRIPLE, "mcpu": "cortex-a76", "mattr": ["+bf16"]}
ADDED = FloatEpilogue(bias=True, residual=True, low=0.0)
CONVOLUTIONS = {
    "3x3": FloatConv2d(1, 8, 8, 16, 32, (3, 3), padding=(1, 1, 1, 1), epilogue=ADDED),
    "3x3 of odd channels, strides, dilation": FloatConv2d(
        2, 7, 9, 17, 33, (3, 3), (2, 1), (0, 1, 2, 1), (2, 1), epilogue=FloatEpilogue(bias=True)
    ),
    "first": FloatConv2d(1, 23, 20, 3, 64, (7, 7), (2, 2), (3, 3, 3, 3)),
    "groups": FloatConv2d(1, 5, 7, 24, 36, (3, 3), padding=(1, 1, 1, 1), groups=6),
    "held as bfloat16": FloatConv2d(
        1, 6, 7, 12, 20, (3, 3), epilogue=ADDED, stored=Stored(*[BF16_BITS] * 3)
    ),
    "columns of a wider result": FloatConv2d(
        1, 6, 5, 8, 6, (1, 1), epilogue=FloatEpilogue(columns=(3, 11), high=0.5)
    ),
    "one pixel": FloatConv2d(1, 3, 3, 8, 20, (3, 3)),
}


MATMULS = {
    "scores": Bf16Matmul((2, 3), 19, 32, 21),
    "odd sizes": Bf16Matmul((2,), 9, 33, 17),
    "a batch of the run time": Bf16Matmul((1, 2), 8, 6, 12, is_batched=True),
}
#: rows, outputs and the instruction that multiplies them; 64 products are summed up
ROWS = {"bfmmla": (12, 20), "bfdot": (1, 128)}


@dataclass(frozen=True)
class Call:
    """A kernel, its arguments, and what it should compute, within a tolerance."""

    kernel: PrimFunc
    arguments: list[np.ndarray]
    expected: np.ndarray
    tolerance: np.ndarray | float


def round_to_odd(values: np.ndarray) -> np.ndarray:
    """float64 -> float32: towards zero, and the last bit is set if this changes the value."""
    near = values.astype("float32")
    is_away = np.abs(near.astype("float64")) > np.abs(values)
    toward = np.where(is_away, np.nextafter(near, np.float32(0)), near).astype("float32")
    bits = toward.view("uint32") | (toward.astype("float64") != values)
    return bits.astype("uint32").view("float32")


def multiply(x: np.ndarray, w: np.ndarray, bias: np.ndarray, plan: Bf16Plan) -> np.ndarray:
    """x (M, K) times w (N, K), two products at a time. Words take turns among chains of sums."""
    a, b = (widen(each) for each in (x, w))
    shape = (len(x), len(w))
    totals = [np.zeros(shape, "float32") for _ in range(plan.tile.chains)]
    totals[0] = totals[0] + bias
    for k in range(0, x.shape[1], 2):
        chain = k // plan.isa.products % plan.tile.chains
        pair = sum(a[:, None, i] * b[None, :, i] for i in (k, k + 1))
        totals[chain] = round_to_odd(totals[chain].astype("float64") + round_to_odd(pair))
    return sum(totals[1:], totals[0])


def make_rows(instruction: str) -> Call:
    rows, outputs = ROWS[instruction]
    spec = read_bf16_dense(FloatDense((rows, 64), outputs, FloatEpilogue(bias=True)))
    assert spec is not None
    plan, rng = plan_bf16(spec, BFMMLA), np.random.default_rng(0)
    assert plan.isa.name == instruction
    x, w = (rng.standard_normal((n, 64), "float32") for n in (rows, outputs))
    bias = rng.standard_normal(outputs, "float32")
    arguments = [x, *pack_bf16(w, bias, spec, BFMMLA), np.zeros((rows, outputs), "float32")]
    return Call(make_bf16_conv2d(spec, BFMMLA), arguments, multiply(x, w, bias, plan), 0)


def make_convolution(conv: FloatConv2d) -> Call:
    spec, epilogue = read_bf16_conv2d(conv), conv.epilogue
    x, w, bias = draw_operands(conv, 0)
    residual = np.random.default_rng(1).normal(size=spec.out_shape).astype("float32")
    added = [hold(residual, conv.stored.residual)] if epilogue.residual else []
    constants = pack_bf16(w, bias if epilogue.bias else None, spec, BFMMLA)
    shape = (*conv.out_shape[:3], epilogue.pitch(conv.out_channels))
    y = hold(np.full(shape, np.nan, "float32"), conv.stored.result)
    sums = compute(conv, x, w, bias if epilogue.bias else 0) + (read(added[0]) if added else 0)
    values, tolerance = sums, TOLERANCE * compute(conv, abs(x), abs(w), 1)
    if epilogue.low is not None or epilogue.high is not None:
        values = np.clip(sums, epilogue.low, epilogue.high)
    if conv.stored.result == BF16_BITS:
        tolerance = tolerance + 2.0**-8 * abs(values)
    expected = np.full(shape, np.nan)
    expected[..., epilogue.first : epilogue.first + conv.out_channels] = values
    margin = np.zeros(shape)
    margin[..., epilogue.first : epilogue.first + conv.out_channels] = tolerance
    arguments = [hold(x, conv.stored.data), *constants, *added, y]
    return Call(make_bf16_conv2d(spec, BFMMLA), arguments, expected, margin)


def make_matmul(spec: Bf16Matmul) -> Call:
    rng = np.random.default_rng(0)
    batch = (3, *spec.batch[1:]) if spec.is_batched else spec.batch
    shapes = (spec.rows, spec.inner), (spec.inner, spec.outputs)
    x, w = (rng.standard_normal((*batch, *shape), "float32") for shape in shapes)
    y = np.full((*batch, spec.rows, spec.outputs), np.nan, "float32")
    magnitude = np.abs(widen(x)) @ np.abs(widen(w))
    product = widen(x) @ widen(w)
    return Call(make_bf16_matmul(spec, BFMMLA), [x, w, y], product, TOLERANCE * magnitude)


def make_depthwise(dtype: str) -> Call:
    """Whole numbers, which a float32 sum has exactly; as bfloat16 they are rounded by bfcvtn."""
    isa = replace(choose_float_isa(Target(TARGET)), bf16=BFMMLA)
    conv = FloatConv2d(1, 7, 9, 21, 21, (3, 3), (2, 1), (1, 1, 1, 1), groups=21)
    rng = np.random.default_rng(2)
    x, w = (rng.integers(-99, 99, s).astype("float32") for s in (conv.in_shape, conv.weight_shape))
    y = hold(np.zeros(conv.out_shape, "float32"), dtype)
    expected = read(hold(compute(conv, x, w, 0).astype("float32"), dtype))
    kernel = make_conv2d(replace(conv, stored=Stored(result=dtype)), isa)
    return Call(kernel, [x, pack_conv2d(w, conv, isa), y], expected, 0)


CALLS: dict[str, Callable[[], Call]] = {
    **{f"rows by {name}": partial(make_rows, name) for name in ROWS},
    **{name: partial(make_convolution, conv) for name, conv in CONVOLUTIONS.items()},
    **{name: partial(make_matmul, spec) for name, spec in MATMULS.items()},
    **{f"depthwise to {dtype}": partial(make_depthwise, dtype) for dtype in ("float32", BF16_BITS)},
}


@pytest.fixture(scope="module")
def results(emulator, tmp_path_factory) -> Mapping[str, tuple[Call, np.ndarray]]:
    """Name -> (call, result). All kernels are one library, called in one process."""
    calls = {f"kernel{i}": make() for i, make in enumerate(CALLS.values())}
    functions = {name: call.kernel.with_attr("global_symbol", name) for name, call in calls.items()}
    pipeline = name_kernel_pipeline()
    compiled = tvm.compile(tvm.IRModule(functions), target=Target(TARGET), tir_pipeline=pipeline)
    text = compiled.mod.inspect_source("asm")
    assert not re.search(r"\tbl\trelayquant_", text)  # what kernels import is inlined
    assert {"bfmmla", "bfdot", "bfcvtn"} <= set(re.findall(r"\t(\w+)\t", text))
    library = emulator.export(compiled, tmp_path_factory.mktemp("bf16") / "kernels.so")
    arguments = {name: call.arguments for name, call in calls.items()}
    found = emulator.run_kernels(MATRIX_CPU, library, arguments)
    return {
        case: (call, read(found[name][-1]))
        for case, (name, call) in zip(CALLS, calls.items(), strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_bf16_kernel__on_arm_equals_numpy(results, name):
    call, found = results[name]
    assert (np.isnan(found) == np.isnan(call.expected)).all()
    error = np.nan_to_num(np.abs(found - call.expected))
    assert (error <= call.tolerance).all()


@pytest.mark.slow
def test_compile__a_network_in_bf16():
    executable = rq.compile(mobile_network(), TARGET, precision="bf16")
    text = executable.mod.imports[0].inspect_source("asm")
    assert "\tbfmmla\t" in text
    assert not re.search(r"\tbl\trelayquant_(bf|round)", text)
