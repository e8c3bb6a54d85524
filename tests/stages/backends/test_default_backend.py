"""The backend that suits a target."""

from __future__ import annotations

import importlib
import inspect

import pytest
from float_models import MAP, build_model
from tvm.target import Target

import relayquant as rq
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.errors import ConfigError
from relayquant.stages.backends import ARM, GENERIC, X86, get_backend_config, resolve_backend


@pytest.mark.parametrize(
    ("target", "backend"),
    [
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a76", ARM),
        ({"kind": "llvm", "mtriple": "arm64-apple-macos", "mcpu": "apple-m1"}, ARM),
        ({"kind": "llvm", "mtriple": "armv7l-linux-gnueabihf"}, ARM),
        ("llvm -mtriple=x86_64-linux-gnu -mcpu=haswell", X86),
        (Target({"kind": "llvm", "mtriple": "x86_64-pc-windows-msvc"}), X86),
        ("llvm -mtriple=riscv64-unknown-linux-gnu", GENERIC),
        ({"kind": "c"}, GENERIC),
    ],
)
def test_default_backend__by_architecture(target, backend):
    assert get_backend_config(target=target) is backend


@pytest.mark.parametrize("mcpu", ["cortex-a53", "cortex-a76"])
def test_default_backend__takes_activations_as_the_kernels_do(mcpu):
    target = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu})
    activation = get_backend_config(target=target).default_qconfig.activation
    assert activation is not None
    assert activation.spec.dtype == select_isa(target).activation


def test_default_backend__target_that_tvm_does_not_know():
    with pytest.raises(ConfigError, match="nonsense"):
        get_backend_config(target="nonsense -mcpu=x")


TARGET = "relayquant.codegen.kernels.isa.target"


@pytest.mark.parametrize(("machine", "backend"), [("x86_64", X86), ("aarch64", ARM)])
def test_resolve_backend__none_is_that_of_this_machine(monkeypatch, machine, backend):
    """`prepare`, `quantize` and the command line leave the backend to the machine they run on."""
    target = {"kind": "llvm", "mtriple": f"{machine}-linux-gnu"}
    monkeypatch.setattr(importlib.import_module(TARGET), "host_config", lambda: target)
    assert resolve_backend(None) is backend
    assert rq.get_backend_config() is backend
    mod = build_model(lambda emit, x: emit.conv("a", x), MAP)
    assert rq.prepare(mod).backend is backend


@pytest.mark.parametrize("function", [rq.quantize, rq.prepare, rq.lower])
def test_backend__is_left_to_the_machine(function):
    assert inspect.signature(function).parameters["backend"].default is None
