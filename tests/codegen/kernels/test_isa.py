"""Instruction sets: asked of the target, and visible in the assembly that comes out."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import tvm
from machines import REPRESENTATIVE, every_isa, target_of
from tvm.target import Target

from relayquant.codegen.kernels.integer.convolution.direct import build_conv2d, build_dense
from relayquant.codegen.kernels.integer.convolution.transposed import (
    Conv2dTranspose,
    build_conv2d_transpose,
)
from relayquant.codegen.kernels.integer.elementwise import (
    Add,
    Quantize,
    Space,
    build_add,
    build_quantize,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual
from relayquant.codegen.kernels.integer.matmul import BatchMatmul, build_batch_matmul
from relayquant.codegen.kernels.integer.pool import AvgPool2d, PoolWindow, build_avg_pool2d
from relayquant.codegen.kernels.integer.specs import Conv2d, Dense
from relayquant.codegen.kernels.isa import select
from relayquant.codegen.kernels.isa.base import PORTABLE
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.kernels.isa.timing import ZEN4, ZEN5, Timing
from relayquant.codegen.kernels.isa.x86 import AMX, AVX2, AVX512BW, SSE2, VNNI256, VNNI512, VnniIsa

EXPECTED = {
    "haswell": AVX2,
    "skylake-avx512": AVX512BW,
    "cascadelake": VNNI512,
    "sapphirerapids": AMX,
    "znver4": VNNI512.with_timing(ZEN4),
    "znver5": VNNI512.with_timing(ZEN5),
    "alderlake": VNNI256,
    "x86-64": SSE2,
}
DOT, MADD = re.compile(r"\bv?pdpbusd\b"), re.compile(r"\bv?pmaddwd\b|\bvpdpwssd\b")


@pytest.mark.parametrize("mcpu", EXPECTED)
def test_select_isa__asks_the_target(mcpu):
    assert select_isa(target_of(mcpu)) == EXPECTED[mcpu]


def test_select_isa__asks_only_linux_for_a_matrix_unit():
    """The system call that asks for the unit is one of 64-bit Linux."""
    for triple in ("x86_64-apple-darwin", "x86_64-pc-windows-msvc", "i686-unknown-linux-gnu"):
        target = Target({"kind": "llvm", "mcpu": "sapphirerapids", "mtriple": triple})
        assert select_isa(target) == VNNI512


@pytest.mark.parametrize(
    ("mcpu", "is_allowed", "wanted"),
    [
        ("sapphirerapids", True, "int8 products: amx, on tiles"),
        ("sapphirerapids", False, "int8 products: vnni512, on vectors, since this process may not"),
        ("cascadelake", False, "int8 products: vnni512"),
    ],
)
def test_describe_products__says_whether_the_process_may_use_tiles(
    mcpu, is_allowed, wanted, monkeypatch
):
    monkeypatch.setattr(select, "may_use_tiles", lambda: is_allowed)
    line = select.describe_products(target_of(mcpu))
    assert line.startswith(wanted)
    assert ("tiles" in line) == (mcpu == "sapphirerapids")


def test_select_isa__neutral_timing_of_llvm_keeps_ours():
    """The CPU has another name then; its features still tell the core."""
    for mcpu, timing in (("znver4", ZEN4), ("znver5", ZEN5)):
        target = resolve_target({"kind": "llvm", "mcpu": mcpu})
        assert str(target.attrs["mcpu"]) == "x86-64-v4"
        isa = select_isa(target)
        assert isa.timing == isa.for_activations("int16").timing == timing
    assert select_isa(target_of("x86-64-v4")).timing == Timing()


def test_with_timing__changes_what_the_tile_is_chosen_by_and_nothing_else():
    timed = AVX2.with_timing(ZEN4)
    assert timed.wide == AVX2.wide.with_timing(ZEN4)
    assert timed.small == AVX2.small.with_timing(ZEN4)
    assert timed.products == AVX2.products
    assert timed.accumulators == AVX2.accumulators
    assert timed.features == AVX2.features


def test_select_isa__unknown_targets_get_portable_code():
    assert select_isa(Target({"kind": "llvm", "mtriple": "riscv64-unknown-linux-gnu"})) is PORTABLE


def test_select_isa__features_can_be_added():
    target = Target({"kind": "llvm", "mcpu": "haswell", "mattr": ["+avxvnni"]})
    assert select_isa(target) is VNNI256


@every_isa
def test_arrange_weights__keeps_every_weight(isa):
    words = np.arange(3 * isa.weight_vector).astype("int8").reshape(3, isa.lanes, isa.products)
    packed = isa.arrange_weights(words)
    assert packed.shape == (3, isa.weight_vector)
    assert packed.dtype == isa.weight_dtype
    np.testing.assert_array_equal(np.sort(packed.reshape(-1)), np.sort(words.reshape(-1)))


@functools.cache
def assembly(mcpu: str) -> str:
    """One kernel of every kind, compiled for a CPU that need not be this one."""
    target = target_of(mcpu)
    isa = select_isa(target)
    epilogue = Epilogue(residual=Residual("uint8", 3, 0.5))
    same, operand = (1, 1, 1, 1), Space("int8", 1, 0.5)
    kernels = [
        build_conv2d(Conv2d(1, 8, 8, 16, 32, (3, 3), padding=same, epilogue=epilogue), isa, "conv"),
        build_conv2d(Conv2d(1, 9, 9, 3, 17, (3, 3), (2, 2), same), isa, "first"),
        build_conv2d(Conv2d(1, 8, 8, 32, 32, (3, 3), (1, 1), same, groups=32), isa, "depthwise"),
        build_conv2d_transpose(Conv2dTranspose(1, 4, 4, 8, 16, (2, 2), (2, 2)), isa, "transpose"),
        build_batch_matmul(BatchMatmul(2, 4, 20, 16, "uint8", 3, "uint8", 3), isa, "matmul"),
        build_dense(Dense(1, 2048, 100), isa, "dense"),
        build_quantize(Quantize((99,), 0.1, Epilogue(), isa.has_fma)),
        build_add(Add((99,), operand, operand, Epilogue(dtype="int8"))),
        build_avg_pool2d(AvgPool2d(PoolWindow(1, 4, 4, 20, (2, 2)), operand, Epilogue())),
    ]
    return compile_assembly(kernels, target)


def compile_assembly(kernels: list[tvm.tirx.PrimFunc], target: Target) -> str:
    module = tvm.IRModule({str(f.attrs["global_symbol"]): f for f in kernels})
    return tvm.compile(module, target=target).mod.inspect_source("asm")


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.sample(3)
@pytest.mark.parametrize("mcpu", EXPECTED)
def test_assembly__has_only_what_the_target_has(mcpu):
    text, isa = assembly(mcpu), EXPECTED[mcpu]
    has_vnni = isinstance(isa, VnniIsa)
    assert bool(DOT.search(text)) == has_vnni
    assert bool(MADD.search(text)) == (not has_vnni)
    assert ("%zmm" in text) == (isa.registers == 32)
    assert ("%ymm" in text) == (isa is not SSE2)
    assert ("vfmadd" in text) == isa.has_fma


@pytest.mark.optimized
@pytest.mark.parametrize("mcpu", EXPECTED)
def test_assembly__int16_by_pairs(mcpu):
    isa = EXPECTED[mcpu]
    spec = Dense(1, 64, 100, "int16", 0, Epilogue(dtype="int16"))
    text = compile_assembly([build_dense(spec, isa, "wide")], target_of(mcpu))
    assert MADD.search(text)  # LLVM knows which CPUs are faster with vpmaddwd than with vpdpwssd
    assert isinstance(isa, VnniIsa) or "vpdpwssd" not in text
    assert not re.search(r"\bv?pmulld\b", text)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.sample(4)
@pytest.mark.parametrize("mcpu", EXPECTED)
def test_assembly__never_saturates_16_bit_sums(mcpu):
    assert "pmaddubsw" not in assembly(mcpu)


def test_representative__has_no_better_instruction_set():
    for name, mcpu in REPRESENTATIVE.items():
        assert select_isa(target_of(mcpu)).name == name or name == "portable"
