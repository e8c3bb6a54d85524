"""Arm kernels as assembly: only what the target has, by lane index, without spills."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import tvm
from tvm.target import Target

from relayquant.codegen.kernels.integer.convolution.direct import build_conv2d, pack_conv2d
from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.elementwise import Add, Space, build_add
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual
from relayquant.codegen.kernels.integer.matmul import (
    BatchMatmul,
    build_batch_matmul,
    plan_batch_matmul,
)
from relayquant.codegen.kernels.integer.pool import AvgPool2d, PoolWindow, build_avg_pool2d
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d
from relayquant.codegen.kernels.isa.arm import (
    LARGEST_PAIRED,
    NEON,
    NEON32,
    NEON_BYTES,
    NEON_PAIRS,
    SDOT,
    SMMLA,
    SMMLA_NEON,
    SmmlaIsa,
)
from relayquant.codegen.kernels.isa.base import PORTABLE, Isa
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import Architecture, find_architecture, resolve_target

pytestmark = pytest.mark.optimized

ARM32_TRIPLE = "armv7l-linux-gnueabihf"
EXPECTED = {
    "cortex-a53": NEON,
    "cortex-a72": NEON,
    "cortex-a76": SDOT,
    "neoverse-n1": SDOT,
    "cortex-a710": SMMLA,
    "neoverse-v1": SMMLA,
    "neoverse-n2": SMMLA,
}
SVE = ("cortex-a710", "neoverse-v1", "neoverse-n2")
ARM32 = {"cortex-a7": NEON32, "cortex-a9": NEON32}
INT8 = {"in_dtype": "int8", "epilogue": Epilogue(dtype="int8", zero_point=3)}
MATRIX = Conv2d(1, 8, 8, 64, 64, (1, 1), **INT8)
DEEP = replace(MATRIX, in_channels=128)
SAME = (1, 1, 1, 1)


def target_of(cpu: str) -> Target:
    triple = ARM32_TRIPLE if cpu in ARM32 else "aarch64-linux-gnu"
    return resolve_target({"kind": "llvm", "mtriple": triple, "mcpu": cpu})


def compile_kernels(cpu: str, *kernels) -> str:
    module = tvm.IRModule({str(func.attrs["global_symbol"]): func for func in kernels})
    return tvm.compile(module, target=target_of(cpu)).mod.inspect_source("asm")


@functools.cache
def assembly(cpu: str) -> str:
    """One kernel of every kind."""
    isa, operand = select_isa(target_of(cpu)), Space("int8", 1, 0.5)
    added = Epilogue(dtype="int8", residual=Residual("int8", 3, 0.5))
    return compile_kernels(
        cpu,
        build_conv2d(Conv2d(1, 8, 8, 16, 32, (3, 3), (1, 1), SAME, epilogue=added), isa, "conv"),
        build_conv2d(Conv2d(1, 9, 9, 3, 17, (3, 3), (2, 2), SAME, **INT8), isa, "first"),
        build_conv2d(Conv2d(1, 8, 8, 32, 32, (3, 3), groups=32, **INT8), isa, "depthwise"),
        build_batch_matmul(BatchMatmul(2, 4, 20, 16, "int8", 3, "int8", 3), isa, "matmul"),
        build_add(Add((99,), operand, operand, Epilogue(dtype="int8"))),
        build_avg_pool2d(AvgPool2d(PoolWindow(1, 4, 4, 20, (2, 2)), operand, Epilogue())),
    )


def inner_loops(text: str) -> list[list[str]]:
    """Instructions of every basic block that jumps to its own start."""
    label, loops, block = "", [], []
    for line in text.splitlines():
        match = re.match(r"(\.?LBB\w+):", line)
        if match:
            label, block = match.group(1), []
        elif re.match(r"\s+[a-z]", line):
            block.append(line.split("//")[0].split("@")[0].strip())
            if label and block[-1].split()[-1] == label:
                loops.append(list(block))
    return loops


@functools.cache
def main_loop(cpu: str, spec: Conv2d = MATRIX, isa: Isa | None = None) -> list[str]:
    """The inner loop of a convolution: the longest there is."""
    isa = isa or select_isa(target_of(cpu))
    loops = inner_loops(compile_kernels(cpu, build_conv2d(spec, isa)))
    return max(loops, key=len)


def count_opcodes(loop: list[str]) -> Counter[str]:
    return Counter(line.split()[0] for line in loop)


@pytest.mark.parametrize(("cpu", "isa"), {**EXPECTED, **ARM32}.items())
def test_select_isa__asks_the_target(cpu, isa):
    assert select_isa(target_of(cpu)) is isa


def test_select_isa__features_can_be_added():
    base = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
    assert select_isa(Target(base)) is NEON
    assert select_isa(Target({**base, "mattr": ["+v8.2a", "+dotprod"]})) is SDOT
    assert select_isa(Target({**base, "mcpu": "cortex-a76", "mattr": ["-dotprod"]})) is NEON
    assert select_isa(Target({**base, "mcpu": "cortex-a76", "mattr": ["+i8mm"]})) is SMMLA
    assert select_isa(Target({**base, "mcpu": "neoverse-v1", "mattr": ["-i8mm"]})) is SDOT
    assert select_isa(Target({**base, "mattr": ["+i8mm"]})) is SMMLA_NEON


def test_select_isa__32_bits_have_other_instructions():
    # This CPU exists in both widths, and the names of its features too.
    target = {"kind": "llvm", "mtriple": "armv8l-linux-gnueabihf", "mattr": ["+v8.2a", "+dotprod"]}
    assert select_isa(Target(target)) is NEON32
    assert select_isa(Target({**target, "mattr": ["-neon"]})) is PORTABLE


@pytest.mark.parametrize(
    ("triple", "architecture"),
    {
        "aarch64-linux-gnu": Architecture.AARCH64,
        "arm64-apple-macos": Architecture.AARCH64,
        "armv7l-linux-gnueabihf": Architecture.ARM32,
        "thumbv7em-none-eabi": Architecture.ARM32,
        "x86_64-linux-gnu": Architecture.X86,
        "i686-linux-gnu": Architecture.X86,
        "riscv64-unknown-linux-gnu": Architecture.OTHER,
        "aarch64_be-linux-gnu": Architecture.OTHER,
    }.items(),
)
def test_find_architecture__of_a_triple(triple, architecture):
    target = Target({"kind": "llvm", "mtriple": triple})
    assert find_architecture(target) is architecture


def test_find_architecture__no_cpu():
    assert find_architecture(Target({"kind": "c"})) is Architecture.OTHER


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("cpu", EXPECTED)
def test_assembly__has_only_what_the_target_has(cpu):
    text, has_dot = assembly(cpu), EXPECTED[cpu] is not NEON
    assert bool(re.search(r"\ssdot\s", text)) == has_dot
    assert bool(re.search(r"\ssmlal2?\s", text)) == (not has_dot)
    assert bool(re.search(r"\ssmmla\s", text)) == (EXPECTED[cpu] is SMMLA)
    assert not re.search(r"\s(usdot|usmmla|ummla)\s", text)
    assert cpu in SVE or not re.search(r"\sz\d+\.", text)  # registers of SVE


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ARM32)
def test_assembly__of_32_bits(cpu):
    text = assembly(cpu)
    assert re.search(r"\svmlal\.s16\s", text)
    assert not re.search(r"\bv[su]dot", text)


@pytest.mark.parametrize("cpu", EXPECTED)
def test_assembly__sums_are_never_16_bit(cpu):
    # A pair of products of -128 and -128 does not fit.
    assert not re.search(r"\s(smlal2?|smull2?|sadalp|saddlp)\s+v\d+\.[84]h", assembly(cpu))


@pytest.mark.parametrize("cpu", [cpu for cpu, isa in EXPECTED.items() if isa is not SMMLA])
def test_inner_loop__multiplies_by_lane_index_and_does_not_spill(cpu):
    loop = main_loop(cpu, DEEP)
    multiply, index = (
        ("sdot", r"\.4b\[[0-3]\]$") if EXPECTED[cpu] is SDOT else ("smlal", r"\.h\[\d\]$")
    )
    products = [line for line in loop if line.split()[0] == multiply]
    tile = choose_plan(DEEP, EXPECTED[cpu]).tile
    # 4 words of one load, and two loads; or 4 products
    assert len(products) == tile.pixels * tile.blocks * (8 if EXPECTED[cpu] is SDOT else 4)
    assert all(re.search(index, line) for line in products)
    assert not any("[sp" in line or line.startswith("dup") for line in loop)


@pytest.mark.parametrize("cpu", ["cortex-a76", "neoverse-n1"])
def test_inner_loop__of_sdot_is_little_else(cpu):
    counts = count_opcodes(main_loop(cpu, DEEP))
    assert counts["sdot"] / counts.total() >= 0.84


@pytest.mark.parametrize("cpu", SVE)
def test_inner_loop__of_smmla_is_as_counted(cpu):
    """What the docstring of `arm` says: two times 58 instructions, and those of the loop."""
    loop = main_loop(cpu, replace(DEEP, out_channels=100))
    counts = count_opcodes(loop)
    assert counts["smmla"] == 2 * 4 // 2 * (20 // 2) * 2  # pairs of pixels and of channels, words
    assert counts["zip1"] + counts["zip2"] == 2 * 4
    assert sum(counts[name] for name in ("ldr", "ldur")) + 2 * counts["ldp"] == 2 * (4 + 20)
    assert counts.total() - 2 * 58 <= 6
    assert not any("[sp" in line or line.startswith(("dup", "mov", "ext")) for line in loop)


def test_inner_loop__of_smlal_is_little_else():
    counts = count_opcodes(main_loop("cortex-a53"))
    assert counts["smlal"] / counts.total() >= 0.7


@pytest.mark.parametrize("cpu", ["cortex-a53", "cortex-a72"])
@pytest.mark.parametrize(
    ("isa", "sums", "least"), [(NEON_BYTES, 4, 3.3), (NEON_PAIRS, 3, 4.2)], ids=["bytes", "pairs"]
)
def test_inner_loop__of_bytes_makes_several_products_an_instruction(cpu, isa, sums, least):
    """16 products take so many instructions as `sums`, which are all but a few of the loop's."""
    counts = count_opcodes(main_loop(cpu, isa=isa))
    multiplies = sum(counts[name] for name in ("smull", "smull2", "smlal2"))
    assert counts["sadalp"] == (sums - 2) * 16
    assert multiplies == 2 * 16
    assert 8 * multiplies / counts.total() >= least
    assert not any("[sp" in line for line in main_loop(cpu, isa=isa))


def test_for_weights__bytes_in_pairs_where_no_weight_is_too_much():
    weight = np.full(MATRIX.weight_shape, -127, "int8")
    assert NEON.for_weights(weight) is NEON_PAIRS
    assert NEON.for_weights(-weight) is NEON_PAIRS
    weight[3, 0, 0, 1] = -128
    assert NEON.for_weights(weight) is NEON_BYTES
    assert 2 * 128 * LARGEST_PAIRED < 2**15 == 2 * 128 * (LARGEST_PAIRED + 1)
    for isa in (NEON32, SDOT, SMMLA):
        assert isa.for_weights(weight) is isa
    with pytest.raises(ValueError, match="Allowed: weights of -127 to 127"):
        pack_conv2d(MATRIX, NEON_PAIRS, Constants(weight, np.zeros(64, "int32"), np.float32(1)))


def test_inner_loop__of_32_bits_multiplies_by_lane_index():
    loop = main_loop("cortex-a7")
    products = [line for line in loop if line.startswith("vmlal.s16")]
    assert len(products) == 4 * 2 * 4
    assert all(re.search(r"d\d+\[[0-3]\]$", line) for line in products)
    assert not any("[sp" in line for line in loop)


@pytest.mark.slow
def test_inner_loop__narrow_outputs_do_not_spill():
    for cpu, multiply in (("cortex-a76", "sdot"), ("neoverse-v1", "smmla")):
        for channels in (4, 8, 12, 20):
            loop = main_loop(cpu, Conv2d(1, 16, 16, 128, channels, (1, 1), **INT8))
            assert any(line.startswith(multiply) for line in loop)
            assert not any("[sp" in line for line in loop), (cpu, channels)


@pytest.mark.parametrize("isa", [SMMLA, SMMLA_NEON])
def test_choose_plan__matrix_products_where_they_need_fewer_instructions(isa):
    def chosen(spec: Conv2d) -> bool:
        plan = choose_plan(spec, isa)
        assert plan.isa in (isa, isa.single)
        return plan.isa is isa

    assert chosen(MATRIX)
    assert chosen(Conv2d(1, 1, 2, 64, 64, (1, 1), **INT8))
    assert chosen(Conv2d(1, 2, 1, 64, 64, (2, 3), padding=(0, 1, 1, 1), **INT8))
    assert chosen(Conv2d(1, 23, 20, 3, 64, (7, 7), (2, 2), (3, 3, 3, 3), **INT8))
    assert not chosen(Conv2d(1, 1, 1, 64, 64, (1, 1), **INT8))
    assert not chosen(Conv2d(4, 3, 3, 16, 64, (3, 3), **INT8))  # four images of one pixel each


def test_choose_plan__words_of_eight_must_be_worth_it():
    assert not isinstance(choose_plan(Conv2d(1, 9, 9, 1, 16, (3, 3)), SMMLA).isa, SmmlaIsa)
    assert choose_plan(Conv2d(1, 9, 9, 4, 16, (1, 1), **INT8), SMMLA).isa is SDOT
    assert choose_plan(Conv2d(1, 9, 9, 16, 16, (1, 1), **INT8), SMMLA).isa is SMMLA


def test_plan_batch_matmul__matrix_products_where_they_need_fewer_instructions():
    def chosen(rows: int, cols: int, inner: int) -> bool:
        spec = BatchMatmul(2, rows, cols, inner, "int8", 3, "int8", 3)
        return plan_batch_matmul(spec, SMMLA).isa is SMMLA

    assert chosen(197, 197, 64)
    assert chosen(2, 64, 64)
    assert not chosen(1, 64, 64)
    assert not chosen(8, 64, 4)
    text = compile_kernels(
        "neoverse-v1", build_batch_matmul(BatchMatmul(2, 8, 16, 64, "int8", 3, "int8", 3), SMMLA)
    )
    assert re.search(r"\ssmmla\s", text)
    assert not re.search(r"\ssdot\s", text)


@pytest.mark.parametrize("isa", [SDOT, NEON, NEON32], ids=lambda isa: isa.name)
def test_arrange_weights__keeps_every_weight(isa):
    for lanes in (isa, isa.for_depthwise(32)):
        words = np.arange(3 * lanes.weight_vector).astype("int8")
        words = words.reshape(3, lanes.lanes, lanes.products)
        packed = lanes.arrange_weights(words)
        assert packed.shape == (3, lanes.weight_vector)
        assert packed.dtype == lanes.weight_dtype
        np.testing.assert_array_equal(np.sort(packed.reshape(-1)), np.sort(words.reshape(-1)))


def test_for_depthwise__few_channels_keep_narrow_vectors():
    assert SDOT.for_depthwise(7) is SDOT
    assert SDOT.for_depthwise(8).lanes == 8
