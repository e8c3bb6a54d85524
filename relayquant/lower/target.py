"""What the user calls a target -> tvm.target.Target: None, a Target, a dict, or the familiar
command-line string.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from tvm.target import Target
from tvm.target.codegen import llvm_get_system_cpu

from relayquant.errors import ConfigError
from relayquant.runtime import count_cores

#: options of the old command-line strings that hold lists
_LISTS = ("mattr", "cl-opt", "keys", "libs")
_NUMBERS = ("num-cores", "opt-level", "vector-width")


def resolve_target(target: Any = None) -> Target:
    """The target to compile for.

    Args:
        target: None for this machine (its CPU and core count), a Target, a dict as Target takes it,
            or a string such as "llvm -mcpu=cascadelake" or "llvm -mtriple=aarch64-linux-gnu
            -mattr=+dotprod".

    Raises:
        ConfigError: a string or dict that TVM does not accept; says which option.
    """
    if isinstance(target, Target):
        return target
    if target is None:
        return _build(host_config(), "this machine")
    if isinstance(target, str):
        return _build(parse_target(target), target)
    if isinstance(target, Mapping):
        return _build(dict(target), str(dict(target)))
    raise ConfigError(
        f"target is a {type(target).__name__}; allowed: None (this machine), a "
        "tvm.target.Target, a dict, or a string such as 'llvm -mcpu=cascadelake'."
    )


def host_config() -> dict[str, Any]:
    """This machine's CPU as LLVM names it, and the cores this process may use."""
    return {"kind": "llvm", "mcpu": llvm_get_system_cpu(), "num-cores": count_cores()}


def parse_target(text: str) -> dict[str, Any]:
    """ "llvm -mcpu=x -mattr=+a,+b" -> {"kind": "llvm", "mcpu": "x", "mattr": ["+a", "+b"]}.

    Raises:
        ConfigError: a word that is no option, or an option without a value.
    """
    words = shlex.split(text)
    if not words or words[0].startswith("-"):
        raise ConfigError(f"target {text!r} must start with a kind, such as 'llvm'.")
    config: dict[str, Any] = {"kind": words[0]}
    position = 1
    while position < len(words):
        word = words[position]
        if not word.startswith("-"):
            raise ConfigError(
                f"target {text!r}: {word!r} is no option; options look like -mcpu=name."
            )
        key, equals, value = word.lstrip("-").partition("=")
        if not equals:
            position += 1
            if position == len(words):
                raise ConfigError(f"target {text!r}: option {word!r} has no value.")
            value = words[position]
        if key in _LISTS:
            config[key] = value.split(",")
        elif key in _NUMBERS:
            if not value.isdigit():
                raise ConfigError(f"target {text!r}: option {key!r} needs a number, got {value!r}.")
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
            "{'kind': 'llvm', 'mcpu': 'cascadelake'}, or the same as 'llvm -mcpu=cascadelake'."
        ) from error
