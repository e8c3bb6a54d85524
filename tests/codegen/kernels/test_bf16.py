"""Products with operands of bfloat16 against float64 sums of the rounded operands.

On tiles, on vectors, refused, and emulated on any CPU. The tolerance is that of float32 sums.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from convolutions import conv2d_accumulators
from drawing import count_examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import compile_kernel
from memory_tiles import MemoryUnit, Refusal
from scipy.special import erf
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from relayquant.codegen.kernels.curve import Curve, CurveStep, Operation
from relayquant.codegen.kernels.emit import build_kernel, load_vector, store_vector
from relayquant.codegen.kernels.floating.bf16 import (
    Bf16Conv2d,
    Bf16Plan,
    Bf16TiledPlan,
    list_bf16_plans,
    make_bf16_conv2d,
    pack_bf16,
    plan_bf16,
    read_bf16_conv2d,
    read_bf16_dense,
)
from relayquant.codegen.kernels.floating.convolution.direct import make_conv2d
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d, pack_conv2d
from relayquant.codegen.kernels.floating.gemm import FloatDense
from relayquant.codegen.kernels.floating.stored import Stored, widen_bits
from relayquant.codegen.kernels.floating.tile import FloatEpilogue, FloatIsa, choose_float_isa
from relayquant.codegen.kernels.integer.pool import MaxPool2d, PoolWindow, build_max_pool2d
from relayquant.codegen.kernels.integer.specs import Conv2d
from relayquant.codegen.kernels.integer.tiled.plan import TileRows
from relayquant.codegen.kernels.isa.arm_bf16 import BFDOT, BFMMLA, ArmBf16Isa, BfmmlaIsa
from relayquant.codegen.kernels.isa.bf16 import (
    TILES_BF16,
    VECTORS_BF16,
    Bf16Isa,
    X86Bf16Isa,
    round_integers,
    round_to_bf16,
)
from relayquant.codegen.kernels.isa.matrix_unit import BF16_BITS, MatrixUnit
from relayquant.codegen.kernels.isa.select import has_isa, select_bf16
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.kernels.isa.timing import ZEN_BF16
from relayquant.errors import ConfigError

#: Error of float32 sums relative to the sum of magnitudes.
TOLERANCE = 2e-6


@dataclass(frozen=True)
class PlainBf16(X86Bf16Isa):
    """The same in ordinary vector arithmetic."""

    @property
    def code(self) -> str:
        return "; nothing"

    def round(self, value, lanes):
        return round_integers(value, lanes)

    def dot(self, acc, activation, weights):
        a, b = (T.reinterpret("uint32x16", each) for each in (activation, weights))
        mask, shift = (T.broadcast(T.uint32(value), 16) for value in (0xFFFF0000, 16))
        for one, other in (
            (T.shift_left(a, shift), T.shift_left(b, shift)),
            (T.bitwise_and(a, mask), T.bitwise_and(b, mask)),
        ):
            acc = acc + T.reinterpret("float32x16", one) * T.reinterpret("float32x16", other)
        return acc


@dataclass(frozen=True)
class PlainBfdot(ArmBf16Isa):
    """bfdot in ordinary vector arithmetic."""

    @property
    def code(self) -> str:
        return "; nothing"

    def round(self, value, lanes):
        return round_integers(value, lanes)

    def multiply(self, acc, a, b):
        for i in range(2):
            acc = acc + pick(a, range(i, 8, 2)) * pick(b, range(i, 8, 2))
        return acc


@dataclass(frozen=True)
class PlainBfmmla(PlainBfdot, BfmmlaIsa):
    """bfmmla in ordinary vector arithmetic."""

    def multiply(self, acc, a, b):
        for i in range(4):
            pixels, channels = (i, i, i + 4, i + 4), (i, i + 4, i, i + 4)
            acc = acc + pick(a, pixels) * pick(b, channels)
        return acc


def pick(bits, order):
    """Lanes of a vector of bfloat16, as float32."""
    return widen_bits(T.Shuffle([bits], [T.int32(i) for i in order]), 4)


def copy_fields(isa: Bf16Isa) -> dict:
    return {name: getattr(isa, name) for name in type(isa).__dataclass_fields__}


def as_plain(unit: MatrixUnit | None) -> Bf16Isa:
    return PlainBf16(**{**copy_fields(VECTORS_BF16), "unit": unit})


ISAS = {
    "tiles": TILES_BF16,
    "vectors": VECTORS_BF16,
    "emulated tiles": as_plain(MemoryUnit(None)),
    "emulated vectors": as_plain(None),
    "emulated refusal": as_plain(MemoryUnit(Refusal("refuse", ""))),
    "refused": as_plain(MatrixUnit(Refusal("refuse", ""))),
    # Matrix products wherever they can be, and single pixels.
    "emulated bfmmla": PlainBfmmla(
        **{
            **copy_fields(BFMMLA),
            "single": PlainBfdot(**copy_fields(BFDOT)),
            "word_cost": -1e9,
        }
    ),
    "emulated bfdot": PlainBfdot(**copy_fields(BFDOT)),
}
every_isa = pytest.mark.parametrize("isa", ISAS.values(), ids=ISAS)
#: A CPU with AVX512 and the instructions of tiles, which are not executed after a refusal.
WITH_TILES = Target({"kind": "llvm", "mcpu": "cascadelake", "mattr": ["+amx-tile", "+amx-bf16"]})


def find_target(isa: Bf16Isa) -> Target:
    """A target for the kernels of `isa`; skips if this machine cannot run them."""
    host = resolve_target(None)
    if isinstance(isa, PlainBfdot):
        return host
    if isinstance(isa, PlainBf16):
        if isa.unit is ISAS["refused"].unit:
            if not has_isa(replace(VECTORS_BF16, features=("avx512vnni",)), host):
                pytest.skip("this machine has no AVX512")
            return WITH_TILES
        return host
    if not has_isa(isa, host):
        pytest.skip(f"this machine cannot run {isa.name}")
    return Target({"kind": "llvm", "mcpu": "sapphirerapids" if isa is TILES_BF16 else "cooperlake"})


def widen(values: np.ndarray) -> np.ndarray:
    """The values that float32 numbers have as bfloat16."""
    return values.astype(ml_dtypes.bfloat16).astype("float64")


def hold(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 numbers as a kernel holds them in memory."""
    return values if dtype == "float32" else values.astype(ml_dtypes.bfloat16).view(dtype)


def read(held: np.ndarray) -> np.ndarray:
    """The float32 numbers that a kernel holds in memory."""
    return held if held.dtype == "float32" else held.view(ml_dtypes.bfloat16).astype("float32")


def compute(conv: FloatConv2d, x, w, bias) -> np.ndarray:
    shape = [getattr(conv, name) for name in ("batch", "height", "width", "in_channels")]
    spec = Conv2d(
        *shape,
        conv.out_channels,
        conv.kernel,
        conv.strides,
        conv.padding,
        conv.dilation,
        conv.groups,
    )
    return conv2d_sums(widen(x), widen(w), spec) + bias


def conv2d_sums(x, w, spec) -> np.ndarray:
    """Exact sums of operands that are multiples of 2**-12: as integers."""
    scale = 2.0**12
    return conv2d_accumulators(np.rint(x * scale), np.rint(w * scale), 0, spec) / scale**2


def draw_operands(conv: FloatConv2d, seed: int):
    rng = np.random.default_rng(seed)
    x, w = (
        np.round(rng.uniform(-1, 1, shape) * 2**12).astype("float32") / 2**12
        for shape in (conv.in_shape, conv.weight_shape)
    )
    # As bfloat16, values of at least 2**-4 are multiples of 2**-11.
    x, w = (np.where(abs(a) < 2**-4, 0, a).astype("float32") for a in (x, w))
    return x, w, rng.uniform(-1, 1, conv.out_channels).astype("float32")


def check_conv2d(spec: Bf16Conv2d, isa: Bf16Isa, seed: int = 0, plan=None) -> None:
    conv = spec.conv
    x, w, bias = draw_operands(conv, seed)
    epilogue = conv.epilogue
    bias = bias if epilogue.bias else None
    kernel = make_bf16_conv2d(spec, isa, "bf16", plan)
    run = compile_kernel(kernel, find_target(isa))
    residual = np.random.default_rng(seed + 1).normal(size=spec.out_shape).astype("float32")
    stored = conv.stored
    y = hold(np.full(spec.out_shape, np.nan, "float32"), stored.result)
    added = [hold(residual, stored.residual)] if epilogue.residual else []
    data = hold(x.reshape(spec.in_shape), stored.data)
    arguments = [data, *pack_bf16(w, bias, spec, isa, plan), *added, y]
    tensors = [tvm.runtime.tensor(each) for each in arguments]
    run(*tensors)
    wanted = compute(conv, x, w, 0 if bias is None else bias)
    magnitude = compute(conv, abs(x), abs(w), 1)
    if epilogue.residual:
        wanted = wanted + read(added[0]).reshape(wanted.shape)
    low, high = epilogue.low, epilogue.high
    if low is not None or high is not None:
        wanted = np.clip(wanted, low, high)
    got = read(tensors[-1].numpy()).reshape(*wanted.shape[:3], -1)
    first = epilogue.first
    own = got[..., first : first + conv.out_channels]
    tolerance = TOLERANCE * magnitude
    if stored.result == BF16_BITS:
        tolerance = tolerance + 2.0**-8 * abs(wanted)
    assert np.all(abs(own - wanted) <= tolerance)
    assert np.isnan(got[..., :first]).all()
    assert np.isnan(got[..., first + conv.out_channels :]).all()


STORED = st.builds(Stored, *[st.sampled_from(["float32", BF16_BITS])] * 3)


@st.composite
def draw_specs(draw):
    def small(low, high):
        return draw(st.integers(low, high))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    c_in = groups * draw(st.sampled_from([1, 3, 16, 17, 64, 70]))
    c_out = groups * draw(st.sampled_from([2, 5, 16, 17, 48, 100]))
    residual = draw(st.booleans())
    columns = None if residual or draw(st.booleans()) else (3, c_out + 5)
    epilogue = FloatEpilogue(
        draw(st.booleans()), residual, draw(st.sampled_from([None, 0.0])),
        draw(st.sampled_from([None, 0.5])), columns,
    )  # fmt: skip
    kernel, dilation = (small(1, 3), small(1, 3)), (small(1, 2), small(1, 2))
    padding = tuple(small(0, 2) for _ in range(4))
    height, width = small(1, 6), small(1, 37)
    assume(height + padding[0] + padding[2] > (kernel[0] - 1) * dilation[0])
    assume(width + padding[1] + padding[3] > (kernel[1] - 1) * dilation[1])
    assume(groups == 1 or c_in > groups)
    strides = (small(1, 2), small(1, 2))
    return FloatConv2d(
        small(1, 2), height, width, c_in, c_out, kernel, strides, padding, dilation, groups,
        epilogue=epilogue, stored=draw(STORED),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.sample(3)
@every_isa
@settings(max_examples=count_examples(60, 6), deadline=None, derandomize=True)
@given(conv=draw_specs(), choice=st.integers(0, 1000))
def test_make_bf16_conv2d__drawn_specs(isa, conv, choice):
    spec = read_bf16_conv2d(conv)
    plans = list_bf16_plans(spec, isa)
    check_conv2d(spec, isa, choice, plans[choice % len(plans)])


@every_isa
def test_make_bf16_conv2d__dense_layers(isa):
    for shape, outputs in (((1, 96), 40), ((2, 3, 65), 64), ((40, 128), 2)):
        spec = read_bf16_dense(FloatDense(shape, outputs, FloatEpilogue(bias=True)))
        assert spec is not None
        check_conv2d(spec, isa)


@pytest.mark.parametrize("dtype", ["float32", BF16_BITS])
@every_isa
def test_make_bf16_conv2d__packed_pixels(isa, dtype):
    """40 rows are three tiles of 14, of which the last is moved back."""
    spec = read_bf16_dense(FloatDense((40, 128), 48, FloatEpilogue(bias=True)))
    assert spec is not None
    spec = replace(spec, conv=replace(spec.conv, stored=Stored(data=dtype)))
    packed = [plan for plan in list_bf16_plans(spec, isa) if is_packed(plan)]
    assert len(packed) == (isa.unit is not None)
    for plan in packed:
        check_conv2d(spec, isa, 0, plan)


@pytest.mark.sample(9)
@pytest.mark.parametrize("dtype", ["float32", BF16_BITS])
@pytest.mark.parametrize(
    ("batch", "kernel", "strides", "padding", "dilation"),
    [
        (1, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        (2, (3, 2), (2, 2), (1, 0, 2, 1), (1, 1)),
        (1, (2, 3), (3, 1), (0, 2, 0, 0), (2, 2)),
    ],
)
@every_isa
def test_make_bf16_conv2d__copies_of_columns(isa, batch, kernel, strides, padding, dilation, dtype):
    conv = FloatConv2d(
        batch, 9, 7, 128, 40, kernel, strides, padding, dilation, stored=Stored(data=dtype)
    )  # fmt: skip
    spec = read_bf16_conv2d(conv)
    shifted = [plan for plan in list_bf16_plans(spec, isa) if is_shifted(plan)]
    assert len(shifted) == (isa.unit is not None)
    for plan in shifted:
        check_conv2d(spec, isa, 0, plan)


def is_shifted(plan: Bf16Plan) -> bool:
    return isinstance(plan, Bf16TiledPlan) and plan.rows is TileRows.SHIFTED


SMALL = FloatConv2d(1, 7, 7, 512, 512, (3, 3), padding=(1, 1, 1, 1))


@pytest.mark.parametrize(
    ("conv", "wanted"),
    [
        (SMALL, True),
        (replace(SMALL, height=14, width=14, strides=(2, 2)), True),
        (replace(SMALL, height=14, width=14), False),  # several blocks of pixels
        (replace(SMALL, in_channels=500), False),  # the last chunk is not full
    ],
)
def test_plan_bf16__copies_columns_of_few_pixels(conv, wanted):
    plan = plan_bf16(read_bf16_conv2d(conv), TILES_BF16)
    assert is_shifted(plan) == wanted
    assert plan.with_stored(Stored(data=BF16_BITS)).needs_copy != wanted


def test_needs_copy__not_where_a_few_more_steps_fit():
    for inner, steps, copied in ((128, 4, False), (144, 6, False), (148, 5, True), (40, 2, False)):
        conv = FloatConv2d(1, 8, 8, inner, 16, (1, 1), stored=Stored(data=BF16_BITS))
        plan = plan_bf16(read_bf16_conv2d(conv), TILES_BF16)
        assert isinstance(plan, Bf16TiledPlan)
        assert (plan.steps, plan.needs_copy) == (steps, copied)


def is_packed(plan: Bf16Plan) -> bool:
    return isinstance(plan, Bf16TiledPlan) and plan.rows is TileRows.PACKED


def test_plan_bf16__packs_float32_rows_that_many_panels_read():
    """Rows in bfloat16 stay where they are; the weights of both plans are the same."""
    for rows, inner, outputs, wanted in (
        (128, 768, 768, True),
        (49, 768, 768, False),
        (128, 512, 768, False),
        (128, 768, 256, False),
        (128, 770, 768, False),
    ):
        spec = read_bf16_dense(FloatDense((rows, inner), outputs, FloatEpilogue()))
        assert spec is not None
        plan = plan_bf16(spec, TILES_BF16)
        assert is_packed(plan) == wanted
        stored = plan.with_stored(Stored(data=BF16_BITS))
        assert not is_packed(stored)
        assert not stored.needs_copy or inner == 770
        assert (stored.tile, stored.weight_size) == (plan.tile, plan.weight_size)


GELU = Curve(
    (
        CurveStep(Operation.DIVIDE, (0, 2**0.5)),
        CurveStep(Operation.ERF, (1,)),
        CurveStep(Operation.ADD, (2, 1.0)),
        CurveStep(Operation.MULTIPLY, (0, 3)),
        CurveStep(Operation.MULTIPLY, (4, 0.5)),
    )
)


@every_isa
def test_make_bf16_conv2d__gelu_behind_the_sum(isa):
    """The function by scipy, also of sums beyond the ends of the polynomial, and of NaN."""
    conv = FloatConv2d(1, 1, 33, 40, 48, (1, 1), epilogue=FloatEpilogue(bias=True))
    x, w, bias = draw_operands(conv, 0)
    bias = bias * 8
    bias[5] = np.nan
    results = []
    for curve in (None, GELU):
        spec = read_bf16_conv2d(replace(conv, epilogue=replace(conv.epilogue, curve=curve)))
        run = compile_kernel(make_bf16_conv2d(spec, isa), find_target(isa))
        y = tvm.runtime.tensor(np.zeros(spec.out_shape, "float32"))
        run(*map(tvm.runtime.tensor, (x, *pack_bf16(w, bias, spec, isa))), y)
        results.append(y.numpy())
    assert abs(results[0][..., :5]).max() > 4 * 2**0.5
    sums = results[0].astype("float64")
    wanted = sums * (1 + erf(sums / 2**0.5)) / 2
    np.testing.assert_allclose(results[1], wanted, rtol=1e-6, atol=5e-6)


def check_stored(make, operands: list[np.ndarray], out_shape, target: Target) -> None:
    """A kernel gives the same numbers whether it holds rounded operands as float32 or not."""
    held = []
    for dtype in ("float32", BF16_BITS):
        y = hold(np.zeros(out_shape, "float32"), dtype)
        arguments = [hold(each, dtype) if each.ndim == 4 else each for each in operands]
        tensors = [tvm.runtime.tensor(each) for each in [*arguments, y]]
        compile_kernel(make(Stored(dtype, dtype, dtype)), target)(*tensors)
        held.append(read(tensors[-1].numpy()))
    np.testing.assert_array_equal(held[0].astype(ml_dtypes.bfloat16), held[1])


@pytest.mark.parametrize("bf16", [None, VECTORS_BF16], ids=["rounded by integers", "rounded"])
def test_make_conv2d__depthwise_reads_and_writes_bfloat16(bf16):
    target = resolve_target(None) if bf16 is None else find_target(bf16)
    isa: FloatIsa = replace(choose_float_isa(target), bf16=bf16)
    epilogue = FloatEpilogue(residual=True, low=0.0)
    spec = FloatConv2d(2, 7, 9, 21, 21, (3, 3), (2, 1), (1, 1, 1, 1), groups=21, epilogue=epilogue)
    rng = np.random.default_rng(2)
    x, residual = (
        rng.normal(size=shape).astype(ml_dtypes.bfloat16).astype("float32")
        for shape in (spec.in_shape, spec.out_shape)
    )
    packed = pack_conv2d(rng.normal(size=spec.weight_shape).astype("float32"), spec, isa)
    check_stored(
        lambda stored: make_conv2d(replace(spec, stored=stored), isa),
        [x, packed, residual],
        spec.out_shape,
        target,
    )


@pytest.mark.parametrize(
    "window",
    [
        PoolWindow(2, 8, 7, 21, (3, 3), (2, 2), (1, 1, 1, 1)),
        PoolWindow(1, 3, 4, 35, (1, 2), padding=(1, 0, 2, 3)),  # some have no pixel of the image
    ],
)
def test_build_max_pool2d__reads_and_writes_bfloat16(window):
    x = np.random.default_rng(3).normal(size=window.in_shape)
    x = x.astype(ml_dtypes.bfloat16).astype("float32")
    x[0, 1:, :, 0], x[0, :, 1, 1], x[0, :2, :, 2] = -np.inf, np.inf, -0.0
    check_stored(
        lambda stored: build_max_pool2d(MaxPool2d(window, "float32", stored)),
        [x],
        window.out_shape,
        resolve_target(None),
    )


def test_round_to_bf16__has_the_bits_of_another_implementation():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 100_000, dtype="uint32").view("float32")
    ties = (rng.integers(0, 2**16, 1000, dtype="uint32") << 16 | 0x8000).view("float32")
    for each in (values, ties):
        with np.errstate(invalid="ignore"):
            wanted = each.astype(ml_dtypes.bfloat16)
        got = round_to_bf16(each)
        is_nan = np.isnan(each)
        np.testing.assert_array_equal(got[~is_nan], wanted.view("uint16")[~is_nan])
        assert np.isnan(got.view(ml_dtypes.bfloat16)[is_nan].astype("float32")).all()


@pytest.mark.parametrize("lanes", [1, 4, 16])
@pytest.mark.parametrize("isa", [VECTORS_BF16, as_plain(None)], ids=["vectors", "emulated"])
def test_round__in_a_kernel_is_that_of_packed_weights(isa, lanes):
    rng = np.random.default_rng(1)
    x = (rng.integers(0, 2**17, 64, dtype="uint32") << 15).view("float32")
    x = np.where(np.isfinite(x) & (abs(x) > 2.0**-126), x, 1).astype("float32")
    x[:3] = np.inf, -np.inf, np.nan

    def body() -> None:
        values, bits = T.arg("x", T.Buffer((64,))), T.arg("y", T.Buffer((64,), "uint16"))
        with T.serial(64 // lanes) as i:
            rounded = isa.round(load_vector(values, i * lanes, lanes), lanes)
            store_vector(bits, rounded, i * lanes, lanes)

    y = tvm.runtime.tensor(np.zeros(64, "uint16"))
    compile_kernel(build_kernel("round", body), find_target(isa))(tvm.runtime.tensor(x), y)
    got = y.numpy()
    np.testing.assert_array_equal(got[:2], round_to_bf16(x)[:2])
    assert np.isnan(got.view(ml_dtypes.bfloat16)[2].astype("float32"))
    np.testing.assert_array_equal(got[3:], round_to_bf16(x)[3:])


WIDE = FloatConv2d(1, 9, 20, 64, 96, (3, 3), padding=(1, 1, 1, 1))


def compile_assembly(isa: Bf16Isa, mcpu: str, conv: FloatConv2d = WIDE) -> str:
    module = tvm.IRModule({"conv2d": make_bf16_conv2d(read_bf16_conv2d(conv), isa)})
    target = Target({"kind": "llvm", "mcpu": mcpu, "mtriple": "x86_64-linux-gnu"})
    return tvm.compile(module, target=target).mod.inspect_source("asm")


@pytest.mark.slow
@pytest.mark.optimized
def test_make_bf16_conv2d__instructions_of_tiles():
    text = compile_assembly(TILES_BF16, "sapphirerapids")
    found = {name: len(re.findall(rf"\t{name}\b", text)) for name in ("tdpbf16ps", "tilestored")}
    assert found["tdpbf16ps"] % 4 == 0
    assert found["tilestored"] == 4
    assert "vdpbf16ps" in text  # without permission
    assert "vcvtneps2bf16" in text


@pytest.mark.slow
@pytest.mark.optimized
def test_make_bf16_conv2d__instructions_of_copies_of_columns():
    """Five loads for four products, and one store for each sum: nothing spills.

    A tile of weights is fetched near, and a fourth of its lines far ahead. Some steps store a tile
    that nothing reads.
    """
    text = compile_assembly(TILES_BF16, "sapphirerapids", replace(SMALL, in_channels=1024))
    sums, spare = (rf"tilestored\s+%tmm{tiles}" for tiles in ("[0-3]", "[4-7]"))
    names = ("tdpbf16ps", "tileloadd", "tileloaddt1", sums, "prefetcht0", "prefetcht1")
    found = {name: len(re.findall(rf"\t{name}\b", text)) for name in names}
    steps = found["tdpbf16ps"] // 4
    assert steps >= len(re.findall(spare, text)) > 0
    assert [*found.values()] == [4 * steps, 4 + 4 * steps, steps, 4, 16 * steps, 4 * steps]


@pytest.mark.slow
@pytest.mark.optimized
def test_make_bf16_conv2d__instructions_of_vectors():
    text = compile_assembly(VECTORS_BF16, "znver4")
    assert "vdpbf16ps" in text
    assert "tdpbf16ps" not in text
    assert "arch_prctl" not in text
    assert "syscall" not in text
    assert "call\trelayquant_dot_bf16" not in text  # it is inlined


@pytest.mark.parametrize(
    ("mcpu", "isa"),
    [
        ("sapphirerapids", TILES_BF16),
        ("cooperlake", VECTORS_BF16),
        ("znver4", VECTORS_BF16.with_timing(ZEN_BF16)),
        ("znver5", VECTORS_BF16.with_timing(ZEN_BF16)),
    ],
)
def test_select_bf16__by_the_target(mcpu, isa):
    target = resolve_target({"kind": "llvm", "mcpu": mcpu, "mtriple": "x86_64-linux-gnu"})
    assert select_bf16(target) == isa


@pytest.mark.parametrize("mcpu", ["neoverse-v1", "neoverse-n2", "cortex-a710", "apple-m2"])
def test_select_bf16__of_arm(mcpu):
    target = {"kind": "llvm", "mcpu": mcpu, "mtriple": "aarch64-linux-gnu"}
    assert select_bf16(resolve_target(target)) is BFMMLA


@pytest.mark.parametrize("triple", ["x86_64-linux-gnu", "aarch64-linux-gnu"])
def test_select_bf16__a_target_without_names_those_that_have_it(triple):
    with pytest.raises(ConfigError, match=r"Sapphire Rapids.*Neoverse V1") as raised:
        select_bf16(resolve_target({"kind": "llvm", "mtriple": triple}))
    assert raised.value.code == "RQ102"


def test_plan_bf16__a_row_of_a_tile_holds_32_products():
    plan = plan_bf16(read_bf16_conv2d(WIDE), TILES_BF16)
    assert plan.chunk == 32
    assert all(0 < r <= 16 and 0 < size <= 64 for r, size in plan.shape_registers(plan.tile_rows))
