"""Tables of 256 values: by loads, and by every way to look bytes up in registers."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import tvm
from exact import call_kernel, random_values
from machines import compile_kernel, target_of
from tvm.target import Target

from relayquant.codegen.kernels.integer.lookup import (
    PSHUFB_256,
    PSHUFB_512,
    TBL,
    VPERMI2B,
    X86_SHUFFLES,
    Lookup,
    build_lookup,
)
from relayquant.codegen.kernels.isa.select import has_isa, select_shuffle
from relayquant.codegen.kernels.isa.target import resolve_target

EXPECTED = {
    "x86-64": None,
    "haswell": PSHUFB_256,
    "alderlake": PSHUFB_256,
    "cascadelake": PSHUFB_512,
    "sapphirerapids": VPERMI2B,
    "znver5": VPERMI2B,
}
#: a CPU that has the instruction and no better one
REPRESENTATIVE = {VPERMI2B: "icelake-server", PSHUFB_512: "skylake-avx512", PSHUFB_256: "haswell"}
SIZES = (1, 31, 32, 63, 64, 65, 700)


def runnable_target(shuffle) -> Target:
    if shuffle is None:
        return resolve_target(None)
    if not has_isa(shuffle, resolve_target(None)):
        pytest.skip(f"this machine cannot run {shuffle.name}")
    return target_of(REPRESENTATIVE[shuffle])


@pytest.mark.sample(4)
@pytest.mark.parametrize("shuffle", [None, *X86_SHUFFLES], ids=lambda s: s.name if s else "loads")
@pytest.mark.parametrize("size", SIZES)
def test_build_lookup__indexes_by_bit_pattern(shuffle, size):
    rng = np.random.default_rng(size)
    dtype, out_dtype = ("int8", "uint8") if size % 2 else ("uint8", "int8")
    x, table = random_values(rng, (size,), dtype), random_values(rng, (256,), out_dtype)
    if size > 256:
        x[:256] = np.arange(256).astype("uint8").view(dtype)
    func = build_lookup(Lookup(x.shape, dtype, out_dtype), shuffle)
    got = call_kernel(func, runnable_target(shuffle), [x, table], x.shape, out_dtype)
    np.testing.assert_array_equal(got, table[x.view("uint8")])


@pytest.mark.parametrize("out_dtype", ["int8", "float32"])
def test_build_lookup__of_a_size_of_the_run_time(out_dtype):
    shuffle = select_shuffle(resolve_target(None))
    table = np.random.default_rng(0).integers(-100, 100, 256).astype(out_dtype)
    kernel = compile_kernel(
        build_lookup(Lookup((None, 3), "uint8", out_dtype), shuffle), resolve_target(None)
    )
    for rows in (0, 1, 22, 100_000):
        x = np.random.default_rng(rows).integers(0, 256, (rows, 3)).astype("uint8")
        y = tvm.runtime.tensor(np.full(x.shape, 77, out_dtype))
        kernel(*(tvm.runtime.tensor(each) for each in (x, table)), y)
        np.testing.assert_array_equal(y.numpy(), table[x])


@pytest.mark.parametrize("out_dtype", ["int16", "float32"])
def test_build_lookup__of_wider_values_takes_loads(out_dtype):
    x = np.arange(256).astype("uint8").view("int8")
    table = np.random.default_rng(0).integers(-200, 200, 256).astype(out_dtype)
    func = build_lookup(Lookup(x.shape, "int8", out_dtype), PSHUFB_256)
    got = call_kernel(func, runnable_target(None), [x, table], x.shape, out_dtype)
    np.testing.assert_array_equal(got, table)


def test_build_lookup__refuses_wide_data():
    with pytest.raises(ValueError, match="allowed: uint8, int8"):
        build_lookup(Lookup((4,), "int16", "int8"))


@pytest.mark.parametrize("mcpu", EXPECTED)
def test_select_shuffle__asks_the_target(mcpu):
    assert select_shuffle(target_of(mcpu)) is EXPECTED[mcpu]


def test_select_shuffle__arm_has_tbl_and_others_have_none():
    arm = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]}
    assert select_shuffle(Target(arm)) is TBL
    assert select_shuffle(Target({"kind": "llvm", "mtriple": "riscv64-linux-gnu"})) is None


@functools.cache
def assembly(mcpu: str) -> str:
    func = build_lookup(Lookup((300,), "int8", "int8"), select_shuffle(target_of(mcpu)))
    compiled = tvm.compile(tvm.IRModule({"lookup": func}), target=target_of(mcpu))
    return compiled.mod.inspect_source("asm")


@pytest.mark.optimized
@pytest.mark.parametrize("mcpu", EXPECTED)
def test_build_lookup__emits_what_the_target_has(mcpu):
    text, shuffle = assembly(mcpu), EXPECTED[mcpu]
    assert bool(re.search(r"\bvpermi2b\b|\bvpermt2b\b", text)) == (shuffle is VPERMI2B)
    if shuffle in (PSHUFB_256, PSHUFB_512):
        assert "vpshufb" in text
    assert shuffle is not None or "pshufb" not in text
