"""User's target -> tvm.target.Target, from None, a Target, a dict, or a command-line string."""

from __future__ import annotations

import enum
import functools
import itertools
import re
import shlex
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target
from tvm.target.codegen import (
    llvm_get_cpu_archlist,
    llvm_get_cpu_features,
    llvm_get_system_cpu,
    llvm_get_system_triple,
    llvm_get_targets,
    llvm_get_vector_width,
    llvm_is_valid_cpu,
)

from relayquant.base._tvm import read_host_features
from relayquant.base.cores import count_cores
from relayquant.errors import ConfigError, suggest_name

#: options of the old command-line strings that hold lists
_LISTS = ("mattr", "cl-opt", "keys", "libs")
_NUMBERS = ("num-cores", "opt-level", "vector-width")

#: CPU whose LLVM timing makes slow code -> CPU with neutral timing, which gets the features of the
#: first. With the first timing LLVM unrolls the loop over a reduction, or starts all products of a
#: tile at once, and then has no registers for the sums. With neutral timing layers with large tiles
#: take half the time on a Zen 4. Arm's generic CPU is in order, like the two CPUs it replaces.
NEUTRAL_TIMING = {
    "znver3": "x86-64-v3",
    "znver4": "x86-64-v4",
    "znver5": "x86-64-v4",
    "cortex-a35": "generic",
    "cortex-a53": "generic",
}

#: LLVM features that only describe speed: what a core does fast, or in which order. Code for them
#: runs everywhere. Source: LLVM's X86.td and AArch64Features.td. Features that are missing here
#: count as instructions.
TUNING = re.compile(
    r"(slow|fast|faster|tuning|prefer|avoid|fuse|use|zcm|zcz|no-zcz|false-deps|no-bypass-delay|lea"
    r"|branch|pad|idiv[lq]-to)-.*|.*-?fusion|no-bypass-delay|allow-light-256-bit|sbb-dep-breaking"
    r"|vzeroupper|ermsb|fsrm|alu-lsl-fast|addr-lsl-slow-14|enable-select-opt|predictable-select-expensive"
    r"|a\d+\w*|cortex-.*|neoverse.*|apple-.*"
)

#: x86 features whose instructions LLVM emits only where a program names one of them: for operating
#: systems, devices, random numbers and waiting. Kernels name none of them, so code for a CPU with
#: these features runs on a CPU without. Virtual machines hide many of them. Source: LLVM's X86.td.
ON_REQUEST = re.compile(
    r"cldemote|clflushopt|clwb|clzero|enqcmd|fsgsbase|hreset|invpcid|(wide)?kl|lwp|movdir(i|64b)"
    r"|mwaitx|pconfig|pku|prefetchi|ptwrite|rdpid|rdpru|rdrnd|rdseed|rtm|serialize|sgx|shstk|tsxldtrk|uintr"
    r"|usermsr|waitpkg|wbnoinvd|xsave(c|opt|s)?"
)

#: First words of the triples of 64-bit x86 and Arm.
ARCHITECTURES_64 = frozenset(["x86_64", "amd64", "aarch64", "arm64"])

#: Triples with kernels; suggested for a CPU that the target's own triple does not have.
TRIPLES = ("aarch64-linux-gnu", "x86_64-linux-gnu", "armv7a-linux-gnueabihf")


class Architecture(enum.Enum):
    """Families of CPUs with kernels."""

    X86 = "x86"  #: 32 and 64 bit
    AARCH64 = "aarch64"  #: 64-bit Arm
    ARM32 = "arm32"  #: 32-bit Arm, such as Armv7
    OTHER = "other"  #: all other targets of TVM


def resolve_target(target: Any = None) -> Target:
    """Return the target to compile for.

    Args:
        target: None for this machine (see `host_config`), a Target, a dict as for Target, or a
            string such as "llvm -mcpu=cascadelake" or "llvm -mtriple=aarch64-linux-gnu
            -mattr=+dotprod". A CPU in `NEUTRAL_TIMING` is replaced by another CPU with the same
            features.

    Raises:
        ConfigError: TVM does not accept the string or dict, the target is not a CPU, or LLVM does
            not know the triple, CPU or feature. The message names it.
    """
    if isinstance(target, Target):
        resolved, text = target, str(target)
    elif target is None:
        resolved, text = _build(host_config(), "this machine"), "this machine"
    elif isinstance(target, str):
        resolved, text = _build(parse_target(target), target), target
    elif isinstance(target, Mapping):
        if not {"kind", "tag"} & set(target):
            names = ", ".join(map(str, itertools.islice(target, 3))) or "no names"
            raise ConfigError(
                f"target is a dict of {names}; allowed: one with 'kind', such as {{'kind': 'llvm', "
                "'mcpu': 'cascadelake'}. Parameters go with their module, as a pair: "
                "compile((mod, params)).",
                code="RQ107",
            )
        resolved, text = _build(dict(target), str(dict(target))), str(dict(target))
    else:
        raise ConfigError(
            f"target is a {type(target).__name__}; allowed: None (this machine), a "
            "tvm.target.Target, a dict, or a string such as 'llvm -mcpu=cascadelake'.",
            code="RQ107",
        )
    check_target(resolved, text)
    return neutralize_timing(resolved)


def check_target(target: Target, text: str) -> None:
    """Raise ConfigError for a target that there is no code for. `text` is what the user wrote.

    LLVM ends the process for an unknown triple. It replaces an unknown CPU by a generic one, and
    ignores an unknown feature.
    """
    if "cpu" not in target.keys:
        raise ConfigError(
            f"target {text}: {target.kind.name} is no CPU, and there are kernels for CPUs only. "
            "Allowed: None (this machine) or kind 'llvm', such as 'llvm -mcpu=cascadelake'.",
            code="RQ107",
        )
    if target.kind.name != "llvm":
        return
    attrs = target.attrs
    triple = read_triple(target)
    name = triple.split("-")[0].lower()
    is_other = find_architecture(target) is Architecture.OTHER
    known = [str(known) for known in llvm_get_targets()] if is_other else []
    if is_other and name not in known:
        raise ConfigError(
            f"target {text}: LLVM knows no architecture {name!r} (mtriple {triple!r}). "
            f"{suggest_name(name, known)}",
            code="RQ107",
        )
    cpu = read_cpu(target)
    if not llvm_is_valid_cpu(cpu, triple):
        plain = Target({"kind": "llvm", "mtriple": triple})
        cpus = [str(known) for known in llvm_get_cpu_archlist(plain)]
        others = [other for other in TRIPLES if llvm_is_valid_cpu(cpu, other)]
        if cpu == "native":
            remedy = "None as target is this machine."
        elif others:
            remedy = f"{cpu} is a CPU of {others[0].split('-')[0]}: say -mtriple={others[0]}."
        else:
            remedy = suggest_name(cpu, cpus)
        raise ConfigError(
            f"target {text}: LLVM knows no CPU {cpu!r} for {triple!r}. {remedy}", code="RQ107"
        )
    features = [str(feature) for feature in attrs.get("mattr") or ()]
    wanted = [f"+{feature[1:]}" for feature in features]
    accepted = read_features(Target({"kind": "llvm", "mtriple": triple, "mattr": wanted}))
    for feature in features:
        if feature[:1] not in ("+", "-") or feature[1:] not in accepted:
            raise ConfigError(
                f"target {text}: LLVM knows no feature {feature!r} for {triple!r}. Features are "
                "written '+name' or '-name', as in '-mattr=+avx2,-fma'.",
                code="RQ107",
            )


def neutralize_timing(target: Target) -> Target:
    """Return the target with the same features and the CPU of `NEUTRAL_TIMING`."""
    cpu = read_cpu(target)
    if target.kind.name != "llvm" or cpu not in NEUTRAL_TIMING:
        return target
    config = {key: value for key, value in target.export().items() if key not in ("keys", "tag")}
    without = [str(asked) for asked in config.get("mattr", ()) if str(asked).startswith("-")]
    # An Arm feature has the name of the core. With it LLVM would unroll loops for this core again.
    names = read_features(target) - {cpu.removeprefix("cortex-")}
    features = [f"+{name}" for name in sorted(names)]
    return Target({**config, "mcpu": NEUTRAL_TIMING[cpu], "mattr": [*features, *without]})


def list_instructions(target: Target) -> set[str]:
    """List LLVM's names of the instructions that code for a target may contain.

    These are its features without `TUNING` and `ON_REQUEST`.
    """
    return {name for name in read_features(target) if is_instruction(name)}


def is_instruction(feature: str) -> bool:
    """Whether code for a target with this feature may need a CPU that has it."""
    return not (TUNING.fullmatch(feature) or ON_REQUEST.fullmatch(feature))


#: Targets whose answers are kept. LLVM describes a CPU anew for each question, which takes 0.2 ms,
#: and a compilation asks hundreds of times for the same target.
MOST_TARGETS = 16


@functools.lru_cache(MOST_TARGETS)
def read_features(target: Target) -> Set[str]:
    """Return LLVM's names of all features that a target's CPU, `mattr` and triple imply: none for
    a target of another kind than "llvm".
    """
    is_llvm = target.kind.name == "llvm"
    return frozenset(map(str, llvm_get_cpu_features(target))) if is_llvm else frozenset()


def has_feature(feature: str, target: Target) -> bool:
    """Whether a target's CPU, `mattr` and triple imply the feature with LLVM's name `feature`."""
    return feature in read_features(target)


@functools.lru_cache(MOST_TARGETS)
def read_vector_bits(target: Target) -> int:
    """Return the width in bits of the widest vectors that LLVM uses on a target of kind "llvm"."""
    return int(llvm_get_vector_width(target))


def ask_host() -> tuple[str, dict[str, bool]]:
    """Ask LLVM for the name of this machine's CPU, and whether the machine has each feature.

    The name follows from the CPU's model number. A virtual machine may have another CPU's number:
    a Sapphire Rapids can be "rocketlake". It may also hide features. The features come from the
    CPU itself and from the operating system, so they are right where the two disagree.
    """
    return llvm_get_system_cpu(), read_host_features()


def host_config() -> dict[str, Any]:
    """Return this machine's CPU as LLVM names it, and the cores this process may use.

    `mattr` has the features in which this machine differs from that CPU. It is absent if there are
    none.
    """
    cpu, features = ask_host()
    config: dict[str, Any] = {"kind": "llvm", "mcpu": cpu}
    differences = list_differences(config, features)
    changed = {"mattr": differences} if differences else {}
    return {**config, **changed, "num-cores": count_cores()}


def list_differences(config: Mapping[str, Any], features: Mapping[str, bool]) -> list[str]:
    """List the `mattr` that turn a CPU, as LLVM knows it, into a machine with these features.

    First the added features ("+name"), then the removed ones ("-name"), each sorted. LLVM adds and
    removes in this order, and adds what a feature needs. So a removed feature stays removed.

    Args:
        config: The CPU, as a dict for Target.
        features: Feature -> whether the machine has it. Features that are not in the map stay as
            the CPU has them. Features that LLVM does not know as `mattr` are left out.
    """
    implied = read_features(Target(dict(config)))
    added = sorted(name for name, has in features.items() if has and name not in implied)
    asked = [f"+{name}" for name in added]
    together = read_features(Target({**config, "mattr": asked})) if added else implied
    removed = sorted(name for name in together if not features.get(name, True))
    return [f"+{name}" for name in added if name in together] + [f"-{name}" for name in removed]


def name_host() -> str:
    """Return LLVM's name of this machine's CPU, and the instructions in which they differ.

    Machines with equal names run the same code. Example: "rocketlake +amx-int8 +amx-tile".
    """
    config = host_config()
    differences = [each for each in config.get("mattr", ()) if is_instruction(each[1:])]
    return " ".join([config["mcpu"], *differences])


def name_cpu() -> str:
    """Return this machine's CPU for a reader: the maker's name, and `name_host` in parentheses."""
    llvm = name_host()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return llvm
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(models, "")  # Arm's kernel lists numbers only
    return f"{model} ({llvm})" if model else llvm


def parse_target(text: str) -> dict[str, Any]:
    """ "llvm -mcpu=x -mattr=+a,+b" -> {"kind": "llvm", "mcpu": "x", "mattr": ["+a", "+b"]}.

    Raises:
        ConfigError: A word is not an option, or an option has no value.
    """
    words = shlex.split(text)
    if not words or words[0].startswith("-"):
        raise ConfigError(f"target {text!r} must start with a kind, such as 'llvm'.", code="RQ107")
    config: dict[str, Any] = {"kind": words[0]}
    position = 1
    while position < len(words):
        word = words[position]
        if not word.startswith("-"):
            raise ConfigError(
                f"target {text!r}: {word!r} is no option; options look like -mcpu=name.",
                code="RQ107",
            )
        key, equals, value = word.lstrip("-").partition("=")
        if not equals:
            position += 1
            if position == len(words):
                raise ConfigError(f"target {text!r}: option {word!r} has no value.", code="RQ107")
            value = words[position]
        if key in _LISTS:
            config[key] = value.split(",")
        elif key in _NUMBERS:
            if not value.isdigit():
                raise ConfigError(
                    f"target {text!r}: option {key!r} needs a number, got {value!r}.", code="RQ107"
                )
            config[key] = int(value)
        else:
            config[key] = value
        position += 1
    return config


def _build(config: dict[str, Any], text: str) -> Target:
    try:
        return Target(config)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"TVM does not accept target {text}: {reason}. Allowed: None, a Target, a dict such as "
            "{'kind': 'llvm', 'mcpu': 'cascadelake'}, or the same as 'llvm -mcpu=cascadelake'.",
            code="RQ107",
        ) from error


def read_triple(target: Target) -> str:
    """Return the triple: architecture, vendor and system.

    Without one, the triple of this machine.
    """
    return str(target.attrs.get("mtriple") or llvm_get_system_triple())


def may_use_system(target: Target, mod: tvm.IRModule) -> bool:
    """Whether kernels may call functions of Linux: on 64-bit x86 and Arm. A module with a
    system_lib_prefix may become a library for a machine without an operating system.
    """
    if target.kind.name != "llvm" or "system_lib_prefix" in (mod.attrs or {}):
        return False
    return is_linux_64(target)


def is_linux_64(target: Target) -> bool:
    """Whether an LLVM target is 64-bit x86 or Arm with Linux, for which functions in LLVM's
    language are written.
    """
    architecture, *system = read_triple(target).split("-")
    return architecture in ARCHITECTURES_64 and "linux" in system


def read_cpu(target: Target) -> str:
    """Return LLVM's name of the CPU."""
    return str(target.attrs.get("mcpu") or "generic")


def find_architecture(target: Target) -> Architecture:
    """Return the CPU family of a target. Without a triple, the family of this machine."""
    if target.kind.name != "llvm":
        return Architecture.OTHER
    name = read_triple(target).split("-")[0].lower()
    if name in ("x86_64", "amd64", "x86") or (name[:1] == "i" and name[2:] == "86"):
        return Architecture.X86
    if name.startswith(("aarch64", "arm64")):
        return Architecture.OTHER if name == "aarch64_be" else Architecture.AARCH64
    if name.startswith(("arm", "thumb")):
        return Architecture.OTHER if "eb" in name else Architecture.ARM32
    return Architecture.OTHER


def is_cpu_target() -> bool:
    """Whether code is made for a CPU."""
    target = Target.current(allow_none=True)
    return target is not None and target.kind.name == "llvm"
