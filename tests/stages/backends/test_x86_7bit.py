"""The backend with weights of 7 bits: what it takes, and what is compiled of it for which CPU."""

from __future__ import annotations

import platform

import numpy as np
import pytest
from float_models import draw_batches, residual_model
from tvm.ir import Call
from tvm.target.codegen import llvm_cpu_has_features

import relayquant as rq
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.backends.x86 import X86_7BIT

#: CPU -> whether a product of bytes is made of two that are added in int16
CPUS = {"haswell": True, "skylake-avx512": True, "cascadelake": False, "alderlake": False}


@pytest.fixture(scope="module")
def quantized():
    mod = residual_model()
    data = draw_batches(mod, 3)
    return rq.quantize(mod, None, data, backend="x86-7bit", effort="fast"), data[0]


def read_assembly(qmod, cpu: str) -> str:
    (library,) = rq.compile(qmod, f"llvm -mtriple=x86_64-linux-gnu -mcpu={cpu}").mod.imports
    return library.inspect_source("asm")


def test_quantize__weights_are_small_and_the_ledger_says_so(quantized):
    qmod, _ = quantized
    weights = [
        constant_value(binding.value.args[1])
        for binding in Graph(qmod).bindings
        if isinstance(binding.value, Call)
        and getattr(binding.value.op, "name", "") in ("relax.qnn.conv2d", "relax.qnn.dense")
    ]
    assert len(weights) >= 2
    # The largest of each channel is at the limit: all of the range is used.
    assert max(np.abs(w.astype("int16")).max() for w in weights) == 64
    ledger = rq.ledger(qmod)
    assert ledger.backend == X86_7BIT.name
    assert all(row.quantized for row in ledger.rows)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("cpu", CPUS)
def test_compile__adds_in_int16_where_that_is_fastest(quantized, cpu):
    assert ("pmaddubsw" in read_assembly(quantized[0], cpu)) == CPUS[cpu]


@pytest.mark.slow
@pytest.mark.optimized
def test_compile__weights_of_8_bits_never_are_added_in_int16():
    mod = residual_model()
    qmod = rq.quantize(mod, None, draw_batches(mod, 1), backend="x86", effort="fast")
    assert "pmaddubsw" not in read_assembly(qmod, "haswell")


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["haswell", "skylake-avx512"])
def test_verify__bits_are_those_of_numpy(quantized, cpu):
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("the instructions are of x86")
    feature = "avx2" if cpu == "haswell" else "avx512bw"
    if not llvm_cpu_has_features(feature, resolve_target(None)):
        pytest.skip(f"this machine has no {feature}")
    assert rq.verify(*quantized, f"llvm -mcpu={cpu}").is_equal
