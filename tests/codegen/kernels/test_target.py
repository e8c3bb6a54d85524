"""Targets: what users write, and what they are told when it is wrong."""

from __future__ import annotations

import re

import pytest
from float_models import build_model, draw_batches
from tvm import relax
from tvm.target import Target
from tvm.target.codegen import llvm_get_cpu_features

import relayquant as rq
from relayquant.codegen.kernels.isa.target import NEUTRAL_TIMING, parse_target, resolve_target
from relayquant.errors import ConfigError


def test_resolve_target__none_is_this_machine():
    target = resolve_target(None)
    assert target.kind.name == "llvm"
    assert target.attrs["mcpu"]
    assert target.attrs["num-cores"] >= 1


def test_resolve_target__string_dict_and_target_agree():
    text = resolve_target("llvm -mcpu=cascadelake -num-cores=4")
    table = resolve_target({"kind": "llvm", "mcpu": "cascadelake", "num-cores": 4})
    assert str(text) == str(table)
    assert resolve_target(table).same_as(table)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llvm", {"kind": "llvm"}),
        (
            "llvm -mtriple=aarch64-linux-gnu -mattr=+dotprod,+i8mm",
            {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+dotprod", "+i8mm"]},
        ),
        ("llvm --mcpu haswell", {"kind": "llvm", "mcpu": "haswell"}),
    ],
)
def test_parse_target__reads_options(text, expected):
    assert parse_target(text) == expected


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "must start with a kind"),
        ("-mcpu=haswell", "must start with a kind"),
        ("llvm haswell", "is no option"),
        ("llvm -mcpu", "has no value"),
        ("llvm -num-cores=two", "needs a number"),
        ("no_such_kind", "does not accept"),
        ("cuda", "cuda is no CPU"),
        ({"kind": "cuda", "arch": "sm_80"}, "cuda is no CPU"),
        ("llvm -mcpu=nosuch", "knows no CPU 'nosuch'"),
        ("llvm -mcpu=cascadelak", "Did you mean 'cascadelake'"),
        ("llvm -mcpu=native", "None as target is this machine"),
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=haswell", "knows no CPU 'haswell' for 'aarch64"),
        ("llvm -mattr=+avx2,+nosuch", r"knows no feature '\+nosuch'"),
        ("llvm -mattr=-nosuch", "knows no feature '-nosuch'"),
        ("llvm -mattr=avx2", "are written '\\+name' or '-name'"),
        ("llvm -mtriple=nosuch-linux-gnu", "knows no architecture 'nosuch'"),
        (Target({"kind": "llvm", "mcpu": "nosuch"}), "knows no CPU 'nosuch'"),
        ({"kind": "llvm", "no-such-option": 1}, "does not accept"),
        (7, "allowed: None"),
    ],
)
def test_resolve_target__says_what_is_wrong(target, message):
    with pytest.raises(ConfigError, match=message):
        resolve_target(target)


def test_resolve_target__accepts_targets():
    target = Target({"kind": "llvm", "mcpu": "haswell"})
    assert resolve_target(target) is target


@pytest.mark.parametrize(
    "target",
    [
        "llvm -mcpu=generic",
        "llvm -mcpu=x86-64-v4 -mattr=-prefer-256-bit",
        "llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n2 -mattr=+i8mm,-sve2",
        "llvm -mtriple=arm64-apple-macos -mcpu=apple-m1",
        "llvm -mtriple=armv7l-linux-gnueabihf -mattr=+neon",
        "llvm -mtriple=riscv64-unknown-linux-gnu",
        {"kind": "c"},
    ],
)
def test_resolve_target__takes_what_llvm_knows(target):
    assert resolve_target(target).kind.name in ("llvm", "c")


X86_NEUTRAL = [cpu for cpu in NEUTRAL_TIMING if cpu.startswith("znver")]


#: Features of Arm's generic CPU that are for tracing, or for the compiler alone.
NO_INSTRUCTIONS = {
    *("ete", "trbe", "enable-select-opt"),
    *("fuse-aes", "fuse-adrp-add", "use-postra-scheduler"),
}


@pytest.mark.parametrize("cpu", [cpu for cpu in NEUTRAL_TIMING if cpu not in X86_NEUTRAL])
def test_resolve_target__neutral_timing_of_arm_keeps_the_features(cpu):
    named = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": cpu, "mattr": ["-crc"]})
    neutral = resolve_target(named)
    assert neutral.attrs["mcpu"] == NEUTRAL_TIMING[cpu]
    features = set(map(str, llvm_get_cpu_features(neutral)))
    family = cpu.removeprefix("cortex-")
    added = features - {*map(str, llvm_get_cpu_features(named))}
    assert added <= NO_INSTRUCTIONS
    assert {*map(str, llvm_get_cpu_features(named))} - features == {family}
    assert {"neon", "aes"} < features
    assert not features & {"crc", "dotprod"}


@pytest.mark.parametrize("cpu", X86_NEUTRAL)
def test_resolve_target__neutral_timing_keeps_the_features(cpu):
    named = Target({"kind": "llvm", "mcpu": cpu, "num-cores": 3, "mattr": ["-avx512vbmi2"]})
    neutral = resolve_target(named)
    assert (neutral.attrs["mcpu"], neutral.attrs["num-cores"]) == (NEUTRAL_TIMING[cpu], 3)
    features = set(map(str, llvm_get_cpu_features(neutral)))
    assert features >= set(map(str, llvm_get_cpu_features(named)))
    assert "avx512vnni" in features or cpu == "znver3"
    assert "avx512vbmi2" not in features
    assert str(resolve_target(neutral)) == str(neutral)


@pytest.mark.parametrize("cpu", [*X86_NEUTRAL, "cascadelake"])
def test_compile__sums_stay_in_registers(cpu):
    """In the assembly of a 1x1 convolution, for which LLVM has registers for a tile of sums."""

    def body(emit, x):
        return emit("out", relax.op.nn.conv2d(x, emit.constant(128, 64, 1, 1)))

    mod = build_model(body, (1, 64, 14, 14))
    data = draw_batches(mod, 1)
    qmod = rq.quantize(mod, None, data, effort="fast", guard=rq.config.Guard.OFF)
    (library,) = rq.compile(qmod, f"llvm -mcpu={cpu}").mod.imports
    lines = library.inspect_source("asm").splitlines()
    products = [line for line in lines if re.search("vpdpbusd|vpmaddwd", line)]
    spilled = [line for line in lines if re.search(r"[yz]mm.*\(%rsp|\(%rsp.*[yz]mm", line)]
    assert len(products) >= 12
    assert len(spilled) < len(products) / 2
