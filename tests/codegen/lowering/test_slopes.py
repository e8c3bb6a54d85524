"""Leaky relu and prelu behind integer products: in the kernel of the product, with the bits of the
reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import tvm
from machines import ISAS, runnable_target
from test_quantized_curve import list_extents, list_kernels, number
from tvm import relax
from tvm.relax import op
from tvm.target import Target

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.codegen.kernels.isa.base import Isa

qnn = rq.extend.qnn
#: Scales before and behind the slope.
BEFORE, BEHIND = 0.04, 0.05
NHWC = {"data_layout": "NHWC", "kernel_layout": "OHWI"}

Build = Callable[[relax.BlockBuilder, relax.Expr], relax.Expr]


def integer(value: int) -> relax.Expr:
    return relax.const(np.int32(value))


@dataclass(frozen=True)
class Layer:
    """slope(requantize(product(x) + bias)) of uint8 x in NHWC, or of rows.

    Attributes:
        operator: A convolution; None: a dense layer.
        slopes: Of the first and of the last channel; None: a leaky relu.
        adds: Whether x is added before the slope.
        factor: Of the sums. Of 1, a few are beyond the integers.
    """

    shape: tuple[int | str, ...]
    outputs: int
    operator: Any = None
    kernel: tuple[int, int] = (3, 3)
    options: dict[str, Any] = field(default_factory=dict)
    slopes: tuple[float, float] | None = (-1.5, 2.0)
    dtype: str = "uint8"
    adds: bool = False
    zeros: tuple[int, int] = (90, 70)
    factor: float = 1.0

    def build(self, behind: Build | None = None) -> tvm.IRModule:
        """`behind` takes the requantized sums; None: the slope."""
        rng, taps = np.random.default_rng(3), () if self.operator is None else self.kernel
        inner = int(self.shape[-1]) // self.options.get("groups", 1)
        weight = rng.integers(-127, 128, (self.outputs, *taps, inner)).astype("int8")
        bias = relax.const(rng.integers(-9000, 9000, self.outputs).astype("int32"))
        spread = 74 * 73 * np.sqrt(np.prod(weight.shape[1:]))
        scales = rng.uniform(1, 3, self.outputs) * self.factor * 40 * BEFORE / spread
        scales, zero = relax.const(scales.astype("float32")), integer(0)
        out = number(BEFORE), integer(self.zeros[0])
        x = relax.Var("x", relax.TensorType(list_extents(self.shape), "uint8"))
        operands = x, relax.const(weight), integer(100), zero, number(1), scales
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                if self.operator is None:
                    sums = builder.emit(qnn.dense(*operands))
                else:
                    sums = builder.emit(self.operator(*operands, **NHWC, **self.options))
                sums = builder.emit(op.add(sums, bias))
                if self.adds:
                    pair = number(0.02), integer(120)
                    y = qnn.add(sums, x, scales, zero, *pair, *out, -1, out_dtype=self.dtype)
                else:
                    y = qnn.requantize(sums, scales, zero, *out, -1, self.dtype)
                y = builder.emit_output((behind or self.bend)(builder, builder.emit(y)))
            builder.emit_func_output(y)
        return builder.finalize()

    def bend(self, builder: relax.BlockBuilder, y: relax.Expr, axis: int = -1) -> relax.Expr:
        before, behind = zip(map(number, (BEFORE, BEHIND)), map(integer, self.zeros), strict=True)
        if self.slopes is None:
            return builder.emit(qnn.leaky_relu(y, *before, *behind, alpha=0.3))
        slopes = relax.const(np.linspace(*self.slopes, self.outputs, dtype="float32"))
        return builder.emit(qnn.prelu(y, *before, *behind, slopes, axis=axis))

    def draw(self, sizes: int = 11) -> np.ndarray:
        shape = [sizes if isinstance(size, str) else size for size in self.shape]
        return np.random.default_rng(6).integers(0, 256, shape).astype("uint8")


def check_results(mod: tvm.IRModule, layer: Layer, target: Target | None = None) -> None:
    """Compare with the reference, where the product and the slope are two operators."""
    x = layer.draw()
    (found,) = Executor(rq.compile(mod, target)).run("main", [x])
    (expected,) = rq.reference.run(mod, x)
    assert len(np.unique(expected)) > 40
    np.testing.assert_array_equal(found, expected)


PADDED = {"padding": 1}
DEPTHWISE = {"padding": 1, "groups": 64}
LAYERS = {
    "windows": Layer((1, 9, 11, 24), 40, qnn.conv2d),
    "slopes from 0 on": Layer((1, 9, 11, 24), 40, qnn.conv2d, slopes=(0.0, 1.7)),
    "leaky relu": Layer((1, 9, 11, 24), 40, qnn.conv2d, slopes=None),
    "int8": Layer((1, 9, 11, 24), 40, qnn.conv2d, dtype="int8", zeros=(-20, 30)),
    "int16": Layer((1, 9, 11, 24), 40, qnn.conv2d, dtype="int16", slopes=(0.1, 0.9)),
    "residual": Layer((1, 9, 11, 32), 32, qnn.conv2d, options=PADDED, adds=True),
    "transforms": Layer((1, 28, 28, 64), 64, qnn.conv2d, options=PADDED, slopes=(0.0, 1.0)),
    "10 channels": Layer((1, 9, 11, 3), 10, qnn.conv2d, slopes=(0.2, 0.2)),
    "depthwise": Layer((1, 9, 11, 64), 64, qnn.conv2d, options=DEPTHWISE),
    "groups": Layer((1, 9, 11, 24), 36, qnn.conv2d, options={"groups": 3}),
    "transposed": Layer((1, 5, 6, 24), 40, qnn.conv2d_transpose, options={"strides": (2, 2)}),
    "rows": Layer((30, 64), 100, adds=False),
    "free rows": Layer(("n", 64), 64, adds=True),
    "free batch": Layer(("n", 5, 6, 24), 40, qnn.conv2d),
    "free images": Layer(("n", "h", "w", 24), 40, qnn.conv2d),
    "free images, depthwise": Layer(("n", "h", "w", 64), 64, qnn.conv2d, options=DEPTHWISE),
    "sums far beyond": Layer((30, 64), 100, factor=1e9, slopes=(0.0, 1.0)),
    "sums without end": Layer((30, 64), 100, factor=1e36, slopes=(0.0, 1.0)),
    "zero points at the ends": Layer((30, 64), 100, zeros=(255, 250), slopes=(0.3, 0.3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_take_slope__one_kernel_with_the_bits_of_the_reference(name: str) -> None:
    layer = LAYERS[name]
    mod = layer.build()
    # Weights are transformed by a call of a function.
    kernels = [each for each in list_kernels(mod) if each != "relax.call_pure_packed"]
    assert len(kernels) == 1
    check_results(mod, layer)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", ["residual", "leaky relu", "depthwise", "free rows"])
def test_take_slope__on_each_instruction_set(name: str, isa: Isa) -> None:
    check_results(LAYERS[name].build(), LAYERS[name], runnable_target(isa))


def test_take_slope__calls_no_library() -> None:
    """SSE2 has no instruction that rounds float32."""
    target = Target({"kind": "llvm", "mcpu": "x86-64"})
    assembly = rq.compile(LAYERS["windows"].build(), target).mod.imports[0].inspect_source("asm")
    assert "addps" in assembly
    assert "nearbyint" not in assembly


WINDOWS = LAYERS["windows"]


def bend_twice(builder, y):
    return WINDOWS.bend(builder, WINDOWS.bend(builder, y))


def bend_rows(builder, y):
    return replace(WINDOWS, outputs=7).bend(builder, y, axis=1)


def bend_another(builder, y):
    return replace(WINDOWS, zeros=(91, 70)).bend(builder, y)


def bend_bounded(builder, y):
    return WINDOWS.bend(builder, builder.emit(op.clip(y, 20, 200)))


def round_up(builder, y):
    pairs = number(BEFORE), integer(90), number(BEHIND), integer(70)
    return builder.emit(qnn.leaky_relu(y, *pairs, alpha=0.3, rounding="UPWARD"))


@pytest.mark.parametrize("behind", [bend_twice, bend_rows, bend_another, bend_bounded, round_up])
def test_take_slope__leaves_others(behind: Build) -> None:
    mod = WINDOWS.build(behind)
    assert len(list_kernels(mod)) > 1
    check_results(mod, WINDOWS)


def test_take_slope__a_clip_behind_is_in_the_kernel() -> None:
    mod = WINDOWS.build(lambda b, y: b.emit(op.clip(WINDOWS.bend(b, y), 40, 180)))
    assert len(list_kernels(mod)) == 1
    check_results(mod, WINDOWS)
