"""GELU behind an integer product, with quantized results: in the kernel of the product, against
double precision and the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import erf

import numpy as np
import pytest
import tvm
from machines import ISAS, runnable_target
from tvm import relax
from tvm.relax import op
from tvm.target import Target

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.codegen.kernels.curve import Curve, CurveStep, Operation
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.lowering.integer.lower import call_kernels
from relayquant.ir.dialect.legality import list_calls

qnn = rq.extend.qnn
ROOT = 2**0.5


def number(value: float) -> relax.Expr:
    return relax.const(np.float32(value))


def emit_gelu(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """As PyTorch exports it: x (erf(x / sqrt(2)) + 1) / 2."""
    part = builder.emit(op.erf(builder.emit(op.divide(x, number(ROOT)))))
    product = builder.emit(op.multiply(x, builder.emit(op.add(part, number(1)))))
    return builder.emit(op.multiply(product, number(0.5)))


def emit_gelu_of_number(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """The same with its operands the other way round, and numbers elsewhere."""
    part = builder.emit(op.erf(builder.emit(op.multiply(number(1 / ROOT), x))))
    half = builder.emit(op.multiply(number(0.5), builder.emit(op.add(number(1), part))))
    return builder.emit(op.multiply(half, x))


def exact_gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(erf)(x / ROOT)) / 2


@dataclass(frozen=True)
class Layer:
    """quantize(gelu(product(x)) * factors) of uint8 x."""

    shape: tuple[int | str, ...]
    units: int
    dtype: str = "uint8"
    has_factors: bool = True
    kernel: int | None = None  #: of a convolution in NHWC; None: a dense layer
    emit: object = emit_gelu
    scale: float = 0.02
    largest: float = 4.0  #: magnitude of most results of the product

    @property
    def zero(self) -> int:
        return 9 if self.dtype == "uint8" else -3

    def build(self, behind=None) -> tvm.IRModule:
        """`behind`: (builder, product) -> what is done with its real values. None: GELU."""
        rng = np.random.default_rng(5)
        inner = int(self.shape[-1])
        taps = () if self.kernel is None else (self.kernel, self.kernel)
        weight = rng.integers(-127, 128, (self.units, *taps, inner)).astype("int8")
        length = np.sqrt(np.prod(weight.shape[1:]))
        scales = rng.uniform(0.5, 1.5, self.units) * self.largest / (74 * 73 * length)
        scales = relax.const(scales.astype("float32"))
        bias = relax.const(rng.integers(-9000, 9000, self.units).astype("int32"))
        factors = np.linspace(0.2, 3, self.units, dtype="float32")
        zeros = [relax.const(np.int32(value)) for value in (100, 0)]
        x = relax.Var("x", relax.TensorType(list_extents(self.shape), "uint8"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                operands = x, relax.const(weight), *zeros, number(1), scales
                if self.kernel is None:
                    sums = builder.emit(qnn.dense(*operands))
                else:
                    layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI", "padding": 1}
                    sums = builder.emit(qnn.conv2d(*operands, **layouts))
                sums = builder.emit(op.add(sums, bias))
                y = builder.emit(qnn.dequantize(sums, scales, zeros[1], axis=-1))
                if behind is not None:
                    y = behind(builder, y)
                else:
                    y = self.emit(builder, y)
                    if self.has_factors:
                        y = builder.emit(op.multiply(y, relax.const(factors)))
                    zero = relax.const(np.int32(self.zero))
                    y = builder.emit(qnn.quantize(y, self.scale, zero, out_dtype=self.dtype))
                y = builder.emit_output(y)
            builder.emit_func_output(y)
        return builder.finalize()

    def draw(self, rows: int = 33) -> np.ndarray:
        sizes = [rows if isinstance(size, str) else size for size in self.shape]
        return np.random.default_rng(6).integers(0, 256, sizes).astype("uint8")

    def compute(self, x: np.ndarray) -> np.ndarray:
        """The results in double precision, from what the reference gives behind the product."""
        (real,) = rq.reference.run(self.build(lambda _, y: y), x)
        y = exact_gelu(np.asarray(real, "float64"))
        if self.has_factors:
            y = y * np.linspace(0.2, 3, self.units, dtype="float32")
        limits = np.iinfo(self.dtype)
        return np.clip(np.rint(y / np.float32(self.scale)) + self.zero, limits.min, limits.max)


def list_extents(shape: tuple[int | str, ...]) -> list:
    return [tvm.tirx.Var(each, "int64") if isinstance(each, str) else each for each in shape]


def list_kernels(mod: tvm.IRModule, target: Target | None = None) -> list[str]:
    """Names of the kernels of a lowered module, and of the operators that none computes."""
    lowered = call_kernels(mod, select_isa(resolve_target(target)))
    calls = list_calls(lowered)
    kernels = [c.args[0].name_hint for c in calls if c.op.name == "relax.call_tir"]
    return kernels + [c.op.name for c in calls if c.op.name != "relax.call_tir"]


def check_results(layer: Layer, target: Target | None = None) -> None:
    """What float arithmetic decides differently is halfway between two integers: almost nothing."""
    mod, x = layer.build(), layer.draw()
    (found,) = Executor(rq.compile(mod, target)).run("main", [x])
    expected = layer.compute(x)
    assert found.dtype == layer.dtype
    assert len(np.unique(expected)) > 40
    difference = np.abs(found.astype("int64") - expected)
    assert difference.max() <= 1
    assert (difference > 0).mean() <= 1e-3


LAYERS = {
    "rows": Layer((64, 48), 192),
    "bytes": Layer((2, 7, 9, 40), 37, "int8", has_factors=False),
    "words": Layer((64, 48), 100, "int16"),
    "one_row": Layer((1, 96), 256),
    "few_channels": Layer((50, 16), 8),
    "free_rows": Layer(("n", 64), 100),
    "free_rows_of_words": Layer(("n", "m", 33), 40, "int16", has_factors=False),
    "operands_turned": Layer((30, 64), 64, emit=emit_gelu_of_number),
    "pixels": Layer((1, 9, 11, 24), 48, kernel=1),
    "windows": Layer((1, 9, 11, 24), 48, "int8", kernel=3),
    "free_batch": Layer(("n", 5, 6, 24), 40, kernel=3),
    "large": Layer((64, 48), 192, scale=0.5, largest=90.0),
    "tiny": Layer((64, 48), 192, scale=1e-4, largest=0.02),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * ("free_rows" in n)) for n in LAYERS]
)
def test_quantized_curve__agrees_with_double_precision(name: str) -> None:
    layer = LAYERS[name]
    (kernel,) = list_kernels(layer.build())
    assert kernel.startswith(("qnn_dense", "qnn_conv2d"))
    check_results(layer)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize(
    "name", ["rows", "words", pytest.param("free_rows", marks=pytest.mark.slow)]
)
def test_quantized_curve__on_each_instruction_set(name: str, isa: Isa) -> None:
    check_results(LAYERS[name], runnable_target(isa))


def test_quantized_curve__takes_no_division() -> None:
    """Neither in GELU nor by the scale: a division takes as long as all the rest of a vector."""
    target = Target({"kind": "llvm", "mcpu": "cascadelake"})
    assembly = rq.compile(LAYERS["rows"].build(), target).mod.imports[0].inspect_source("asm")
    assert "vpdpbusd" in assembly
    assert "vfmadd" in assembly
    assert "vdiv" not in assembly


def read_twice(builder, y):
    gelu = emit_gelu(builder, y)
    q = builder.emit(qnn.quantize(gelu, 0.02, relax.const(np.int32(0))))
    return builder.emit(relax.Tuple([q, gelu]))


def read_before(builder, y):
    q = builder.emit(qnn.quantize(emit_gelu(builder, y), 0.02, relax.const(np.int32(0))))
    return builder.emit(relax.Tuple([q, y]))


def several_scales(builder, y):
    scales = relax.const(np.linspace(0.01, 0.03, 192, dtype="float32"))
    gelu = emit_gelu(builder, y)
    return builder.emit(qnn.quantize(gelu, scales, relax.const(np.int32(0)), axis=-1))


def divided_by_value(builder, y):
    ratio = builder.emit(op.divide(y, builder.emit(op.add(y, number(3)))))
    return builder.emit(qnn.quantize(ratio, 0.02, relax.const(np.int32(0))))


def may_be_infinite(builder, y):
    for _ in range(5):
        y = builder.emit(op.multiply(y, y))
    return builder.emit(qnn.quantize(y, 0.02, relax.const(np.int32(0))))


@pytest.mark.parametrize(
    "behind", [read_twice, read_before, several_scales, divided_by_value, may_be_infinite]
)
def test_quantized_curve__leaves_others(behind) -> None:
    """The kernel of the product ends with its real values, and the results are the same."""
    mod, x = LAYERS["rows"].build(behind), LAYERS["rows"].draw()
    assert len(list_kernels(mod)) > 1
    found = Executor(rq.compile(mod)).run("main", [x])
    for got, want in zip(found, rq.reference.run(mod, x), strict=True):
        np.testing.assert_allclose(got.astype("float64"), want, rtol=1e-5, atol=1)


def test_quantized_curve__a_factor_per_row_stays_outside() -> None:
    def behind(builder, y):
        factors = relax.const(np.linspace(0.5, 2, 64, dtype="float32")[:, None])
        scaled = builder.emit(op.multiply(emit_gelu(builder, y), factors))
        return builder.emit(qnn.quantize(scaled, 0.02, relax.const(np.int32(0))))

    mod, x = LAYERS["rows"].build(behind), LAYERS["rows"].draw()
    assert "relax.qnn.quantize" not in list_kernels(mod)
    assert len(list_kernels(mod)) > 1
    (found,), (expected,) = Executor(rq.compile(mod)).run("main", [x]), rq.reference.run(mod, x)
    assert np.abs(found.astype("int64") - np.asarray(expected, "int64")).max() <= 1


# ---- curves --------------------------------------------------------------------------------------

GELU = Curve(
    (
        CurveStep(Operation.DIVIDE, (0, ROOT)),
        CurveStep(Operation.ERF, (1,)),
        CurveStep(Operation.ADD, (2, 1.0)),
        CurveStep(Operation.MULTIPLY, (0, 3)),
        CurveStep(Operation.MULTIPLY, (4, 0.5)),
    )
)


def test_curve__erf_takes_its_neighbours() -> None:
    *_, joined, product, half = GELU.emitted
    assert joined == CurveStep(Operation.ERF, (0, 1.0, 1 / ROOT))
    assert (product, half) == GELU.steps[-2:]


@pytest.mark.parametrize("factor", [0.0, 1e-9, 1e9])
def test_curve__erf_leaves_extreme_factors(factor: float) -> None:
    steps = CurveStep(Operation.MULTIPLY, (0, factor)), CurveStep(Operation.ERF, (1,))
    assert Curve(steps).emitted == steps


def test_curve__erf_has_one_offset() -> None:
    more = Curve((*GELU.steps[:3], CurveStep(Operation.ADD, (3, 2.0))))
    assert more.emitted[-1] == more.steps[-1]


def test_split_factor__takes_the_last_steps() -> None:
    twice = Curve((*GELU.steps, CurveStep(Operation.MULTIPLY, (3.0, 5))))
    assert twice.split_factor() == (Curve(GELU.steps[:-1]), 1.5)
    assert replace(GELU, steps=GELU.steps[:-1]).split_factor()[1] == 1.0
    alone = Curve((CurveStep(Operation.MULTIPLY, (0, 2.0)),))
    assert alone.split_factor() == (alone, 1.0)


def test_split_factor__keeps_a_value_that_is_not_the_last() -> None:
    earlier = Curve((*GELU.steps[:3], CurveStep(Operation.MULTIPLY, (1, 2.0))))
    assert earlier.split_factor() == (earlier, 1.0)


def test_find_bounds__are_reached() -> None:
    bounds = GELU.find_bounds(10.0)
    assert bounds[-1] == 10.0
    assert bounds[3] == 2.0
    ratio = Curve((CurveStep(Operation.DIVIDE, (1.0, 0)),))
    assert ratio.find_bounds(10.0)[-1] == np.inf
