"""Targets: what users write, and what they are told when it is wrong."""

from __future__ import annotations

import pytest
from tvm.target import Target

from relayquant.errors import ConfigError
from relayquant.lower.target import parse_target, resolve_target


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
