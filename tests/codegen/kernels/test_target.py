"""Targets: what users write, and what they are told when it is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from float_models import build_model, draw_batches
from hosts import HOSTS, SAPPHIRE, HostCpu, on_x86
from tvm import relax
from tvm.target import Target
from tvm.target.codegen import (
    llvm_cpu_has_features,
    llvm_get_cpu_features,
    llvm_get_vector_width,
)

import relayquant as rq
from relayquant.codegen.kernels.isa import target as target_module
from relayquant.codegen.kernels.isa.arm import AARCH64_ISAS, ARM32_ISAS
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import (
    NEUTRAL_TIMING,
    ON_REQUEST,
    ask_host,
    has_feature,
    host_config,
    list_differences,
    name_cpu,
    name_host,
    parse_target,
    read_features,
    read_vector_bits,
    resolve_target,
)
from relayquant.codegen.kernels.isa.timing import COMMON, ZEN4, ZEN5
from relayquant.codegen.kernels.isa.x86 import X86_ISAS
from relayquant.errors import ConfigError


def pretend(monkeypatch: pytest.MonkeyPatch, host: HostCpu) -> None:
    """This machine is `host` for the rest of the test."""
    monkeypatch.setattr(target_module, "ask_host", host.ask)


def test_resolve_target__none_is_this_machine():
    target = resolve_target(None)
    assert target.kind.name == "llvm"
    assert target.attrs["mcpu"]
    assert target.attrs["num-cores"] >= 1


#: Feature as LLVM names it -> as Linux does.
LINUX_FLAGS = {
    **{name: name for name in ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "f16c", "gfni")},
    "avx512vnni": "avx512_vnni",
    "avxvnni": "avx_vnni",
    "avx512fp16": "avx512_fp16",
    "avx512bf16": "avx512_bf16",
    "avx512vbmi": "avx512vbmi",
    "sse4a": "sse4a",
    **{name: name.replace("-", "_") for name in ("amx-tile", "amx-int8", "amx-bf16")},
}


@on_x86
def test_ask_host__agrees_with_linux():
    """The kernel lists what it has switched on, which may be less than what the CPU has."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        pytest.skip("needs Linux")
    flags = set(re.findall(r"^flags\s*:(.*)$", text, re.MULTILINE)[0].split())
    _, features = ask_host()
    found = read_features(resolve_target(None))
    for feature, flag in LINUX_FLAGS.items():
        assert (flag in flags, flag in flags) == (features[feature], feature in found), feature


@on_x86
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS.keys())
def test_resolve_target__none_has_the_features_of_the_machine(monkeypatch, host):
    pretend(monkeypatch, host)
    _, features = host.ask()
    found = read_features(resolve_target(None))
    assert {name: name in found for name in features} == features
    assert str(resolve_target(None)) == str(resolve_target(resolve_target(None)))


@on_x86
@pytest.mark.parametrize(
    ("host", "mattr"),
    [
        (
            "Sapphire Rapids",
            "+amx-bf16 +amx-int8 +amx-tile +avx512bf16 +avx512fp16 +avxvnni +cldemote +clwb "
            "+movdir64b +movdiri +serialize +shstk +tsxldtrk +wbnoinvd",
        ),
        ("Emerald Rapids", "-enqcmd -pconfig -ptwrite -uintr -waitpkg"),
        ("Zen 4", "-mwaitx -rdpru -shstk"),
        (
            "with APX",
            "+egpr +ndd +nf +ppx +push2pop2 "
            "-amx-fp16 -enqcmd -pconfig -prefetchi -ptwrite -uintr -waitpkg",
        ),
    ],
)
def test_host_config__lists_the_differences_from_the_name(monkeypatch, host, mattr):
    pretend(monkeypatch, HOSTS[host])
    config = host_config()
    assert (config["mcpu"], config["mattr"]) == (HOSTS[host].cpu, mattr.split())


@on_x86
def test_host_config__a_cpu_as_llvm_knows_it_needs_its_name_alone(monkeypatch):
    whole = frozenset(read_features(Target({"kind": "llvm", "mcpu": "znver5"})))
    pretend(monkeypatch, HostCpu("znver5", whole))
    assert set(host_config()) == {"kind", "mcpu", "num-cores"}


@on_x86
@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"no-such-feature": True, "avx512fp16": True}, ["+avx512fp16"]),
        ({"no-such-feature": False}, []),
        # LLVM's amx-int8 needs amx-tile, and is dropped with it.
        ({"amx-int8": True, "amx-tile": False}, ["+amx-int8", "-amx-tile"]),
    ],
)
def test_list_differences__of_unusual_machines(features, expected):
    config = {"kind": "llvm", "mcpu": "rocketlake"}
    found = list_differences(config, features)
    assert found == expected
    left = read_features(Target({**config, "mattr": found}))
    assert not {name for name, has in features.items() if not has} & left


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({}, []),
        ({"neon": True, "dotprod": True}, []),
        ({"neon": True, "sve": False, "sve2": True, "aes": False}, ["+sve2", "-aes", "-sve"]),
    ],
)
def test_list_differences__arm_knows_some_features_or_none(features, expected):
    config = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v1"}
    assert list_differences(config, features) == expected


@on_x86
@pytest.mark.parametrize(
    ("host", "isa", "timing"),
    [
        ("Sapphire Rapids", "amx", COMMON),
        ("Emerald Rapids", "amx", COMMON),
        ("without AMX", "vnni512", COMMON),
        ("without AVX512", "vnni256", COMMON),
        ("with APX", "amx", COMMON),
        ("unknown", "amx", COMMON),
        ("Zen 4", "vnni512", ZEN4),
        ("Zen 5", "vnni512", ZEN5),
        ("Zen 4 without AVX512", "avx2", COMMON),
    ],
)
def test_select_isa__of_machines(monkeypatch, host, isa, timing):
    pretend(monkeypatch, HOSTS[host])
    found = select_isa(resolve_target(None))
    assert (found.name, found.timing) == (isa, timing)


@on_x86
def test_name_cpu__differs_where_code_does(monkeypatch):
    def name(host):
        pretend(monkeypatch, host)
        return name_cpu()

    assert len({*map(name, HOSTS.values())}) == len(HOSTS)
    pretend(monkeypatch, HOSTS["without AMX"])
    assert name_host() == "emeraldrapids -amx-bf16 -amx-int8 -amx-tile"
    assert name_host() in name_cpu()
    # Nothing runs otherwise with an instruction that only an operating system uses.
    assert name(HostCpu("rocketlake", SAPPHIRE)) == name(HostCpu("rocketlake", SAPPHIRE | {"sgx"}))


@pytest.mark.slow
@pytest.mark.optimized
@on_x86
def test_compile__names_no_instruction_on_request():
    """The code for a CPU is the same without these features, so they need not be there."""
    mod = build_model(convolve, (1, 64, 14, 14))
    qmod = rq.quantize(mod, None, draw_batches(mod, 1), effort="fast", guard=rq.config.Guard.OFF)

    def list_code(target):
        (library,) = rq.compile(qmod, target).mod.imports
        return library.inspect_source("asm")

    cpu = {"kind": "llvm", "mcpu": "sapphirerapids"}
    on_request = [name for name in read_features(Target(cpu)) if ON_REQUEST.fullmatch(name)]
    assert len(on_request) > 20
    without = Target({**cpu, "mattr": [f"-{name}" for name in sorted(on_request)]})
    assert not set(on_request) & read_features(without)
    assert list_code(Target(cpu)) == list_code(without)


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
        (
            "llvm -mtriple=aarch64-linux-gnu -mcpu=haswell",
            r"'haswell' for 'aarch64.*say -mtriple=x86",
        ),
        ("llvm -mtriple=x86_64-linux-gnu -mcpu=cortex-a76", "say -mtriple=aarch64-linux-gnu"),
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a7", "a CPU of armv7a: say -mtriple=arm"),
        ("llvm -mattr=+avx2,+nosuch", r"knows no feature '\+nosuch'"),
        ("llvm -mattr=-nosuch", "knows no feature '-nosuch'"),
        ("llvm -mattr=avx2", "are written '\\+name' or '-name'"),
        ("llvm -mtriple=nosuch-linux-gnu", "knows no architecture 'nosuch'"),
        (Target({"kind": "llvm", "mcpu": "nosuch"}), "knows no CPU 'nosuch'"),
        ({"kind": "llvm", "no-such-option": 1}, "does not accept"),
        ({}, r"a dict of no names; .* as a pair: compile\(\(mod, params\)\)\. \[RQ107\]"),
        ({"w": 1, "b": 2}, r"a dict of w, b; allowed: one with 'kind'"),
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


def convolve(emit, x):
    return emit("out", relax.op.nn.conv2d(x, emit.constant(128, 64, 1, 1)))


@pytest.mark.optimized
@pytest.mark.parametrize("cpu", [*X86_NEUTRAL, "cascadelake"])
def test_compile__sums_stay_in_registers(cpu):
    """In the assembly of a 1x1 convolution, for which LLVM has registers for a tile of sums."""

    mod = build_model(convolve, (1, 64, 14, 14))
    data = draw_batches(mod, 1)
    qmod = rq.quantize(mod, None, data, effort="fast", guard=rq.config.Guard.OFF)
    (library,) = rq.compile(qmod, f"llvm -mcpu={cpu}").mod.imports
    functions = re.split(r"^\w[\w.]*:", library.inspect_source("asm"), flags=re.MULTILINE)
    kernels = [body for body in functions if re.search("vpdpbusd|vpmaddwd", body)]
    lines = [line for body in kernels for line in body.splitlines()]
    products = [line for line in lines if re.search("vpdpbusd|vpmaddwd", line)]
    spilled = [line for line in lines if re.search(r"[yz]mm.*\(%rsp|\(%rsp.*[yz]mm", line)]
    assert len(products) >= 12
    assert len(spilled) < len(products) / 2


@pytest.mark.parametrize(
    ("triple", "calls"),
    [
        ("x86_64-linux-gnu", {"sched_getaffinity", "getenv", "fopen"}),
        ("x86_64-pc-windows-msvc", set()),
        ("x86_64-apple-darwin", set()),
        ("i686-linux-gnu", set()),
    ],
)
def test_compile__functions_of_linux_are_called_there_alone(triple, calls):
    """Of a 3x3 convolution that is transformed, and of one with its pool, which count threads."""

    def build(emit, x):
        y = emit("wide", relax.op.nn.conv2d(x, emit.constant(128, 128, 3, 3), padding=1))
        z = emit("few", relax.op.nn.conv2d(x, emit.constant(16, 128, 3, 3), padding=1))
        pooled = emit("pooled", relax.op.nn.max_pool2d(emit("r", relax.op.nn.relu(z)), (2, 2)))
        return relax.Tuple([y, pooled])

    mod = build_model(build, (1, 128, 28, 28))
    data = draw_batches(mod, 1)
    qmod = rq.quantize(mod, None, data, effort="fast", guard=rq.config.Guard.OFF)
    (library,) = rq.compile(qmod, f"llvm -mtriple={triple} -mcpu=icelake-server").mod.imports
    found = set(re.findall(r"^declare .*@(\w+)\(", library.inspect_source("ll"), re.MULTILINE))
    assert found & {"sched_getaffinity", "getenv", "fopen"} == calls


@pytest.mark.parametrize(
    "config",
    [
        {"kind": "llvm"},
        {"kind": "c"},
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "sapphirerapids"},
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver5", "vector-width": 256},
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mattr": ["+avx512f", "-avx2"]},
        {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v1"},
        {"kind": "llvm", "mtriple": "armv7a-linux-gnueabihf", "mattr": ["+neon"]},
    ],
    ids=str,
)
def test_answers__of_llvm_are_kept_as_llvm_gives_them(config):
    target = Target(config)
    asked = {feature for isa in (*X86_ISAS, *AARCH64_ISAS, *ARM32_ISAS) for feature in isa.features}
    for feature in sorted(asked | {"avx", "avx2", "f16c", "neon", "sse4a", "bf16"}):
        assert has_feature(feature, target) == llvm_cpu_has_features(feature, target), feature
    assert read_features(target) == set(map(str, llvm_get_cpu_features(target)))
    if target.kind.name == "llvm":
        assert read_vector_bits(target) == llvm_get_vector_width(target)
    assert read_features(Target(config)) == read_features(target)
    before = read_features.cache_info().misses
    assert has_feature("avx2", target) == llvm_cpu_has_features("avx2", target)
    assert read_features.cache_info().misses == before
