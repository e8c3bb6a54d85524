"""A module quantized for one kind of CPU and compiled for another."""

from __future__ import annotations

import warnings

import pytest
from float_models import build_model, draw_batches

import relayquant as rq
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.stages.compilation import warn_other_backend

MOD = build_model(lambda emit, x: emit.dense("d", x, 4), (2, 4))
X86, ARM = "x86_64-linux-gnu", "aarch64-linux-gnu"


@pytest.mark.parametrize(
    ("backend", "triple", "served"),
    [
        ("x86", ARM, "arm"),
        ("x86-7bit", ARM, "arm"),
        ("arm", X86, "x86"),
        ("x86", X86, ""),
        ("x86-7bit", X86, ""),
        ("arm", ARM, ""),
        ("arm", "armv7l-linux-gnueabihf", ""),
        ("generic", ARM, ""),
        ("x86", "riscv64-linux-gnu", ""),
    ],
)
def test_warn_other_backend__names_the_right_one(backend, triple, served):
    options = {"effort": "fast", "guard": "off", "callbacks": ()}
    qmod = rq.quantize(MOD, None, draw_batches(MOD, 1), backend=backend, **options)
    target = resolve_target({"kind": "llvm", "mtriple": triple})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_other_backend(qmod, target)
    told = [str(each.message) for each in caught]
    assert len(told) == bool(served)
    assert all(f"backend={served!r}. [RQ102]" in text for text in told)


def test_warn_other_backend__not_for_float_modules():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_other_backend(MOD, resolve_target({"kind": "llvm", "mtriple": ARM}))
