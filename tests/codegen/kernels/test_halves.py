"""Conversions between float16 and float32, by instructions and without: numpy's bits."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from hosts import on_x86
from machines import compile_kernel, target_of
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from relayquant.codegen.kernels.attention.halves import load_numbers, store_numbers
from relayquant.codegen.kernels.emit import build_kernel, load_vector, store_vector
from relayquant.codegen.kernels.floating.tile import choose_float_isa

LANES = 16
EVERY_HALF = np.arange(1 << 16, dtype="uint16").view("float16")


def make_kernel(size, target, narrows):
    def body():
        isa = choose_float_isa(target)
        x = T.arg("x", T.Buffer((size,), "float32" if narrows else "float16"))
        y = T.arg("y", T.Buffer((size,), "float16" if narrows else "float32"))
        with T.serial(size // LANES) as step:
            if narrows:
                value = load_vector(x, step * LANES, LANES)
                store_numbers(y, value, step * LANES, LANES, isa)
            else:
                store_vector(y, load_numbers(x, step * LANES, LANES, isa), step * LANES, LANES)

    return build_kernel("convert", body)


def convert(values, mcpu):
    narrows = values.dtype == np.float32
    kernel = make_kernel(values.size, target_of(mcpu), narrows)
    result = np.zeros(values.size, "float16" if narrows else "float32")
    tensor = tvm.runtime.tensor(result)
    compile_kernel(kernel, target_of(mcpu))(tvm.runtime.tensor(values), tensor)
    return tensor.numpy()


@on_x86
@pytest.mark.parametrize("mcpu", ["x86-64", "haswell"])
def test_load_numbers__every_half(mcpu):
    np.testing.assert_array_equal(convert(EVERY_HALF, mcpu), EVERY_HALF.astype("float32"))


@on_x86
@pytest.mark.parametrize("mcpu", ["x86-64", "haswell"])
def test_store_numbers__ties_and_their_neighbours(mcpu):
    """Halfway between every two halves, next to it on both sides, and far beyond the largest."""
    sizes = np.append(EVERY_HALF[:0x7C00].astype("float32"), np.float32(65536))
    ties = (sizes[:-1] + sizes[1:]) / 2
    far = np.array([1e-40, 1e10, np.inf, np.nan] * 4, "float32")
    near = [np.nextafter(ties, np.float32(end)) for end in (0, np.inf)]
    values = np.concatenate([sizes[:-1], ties, *near, far])
    for signed in (values, -values):
        with np.errstate(over="ignore"):
            expected = signed.astype("float16")
        np.testing.assert_array_equal(convert(signed, mcpu), expected)


@pytest.mark.parametrize(
    ("target", "instruction"),
    [
        ({"mcpu": "haswell"}, "vcvtph2ps"),
        ({"mcpu": "x86-64"}, None),
        ({"mtriple": "aarch64-linux-gnu"}, "fcvtl"),
    ],
    ids=["haswell", "x86-64", "aarch64"],
)
def test_load_numbers__calls_no_function(target, instruction):
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", **target})
    module = tvm.IRModule({"convert": make_kernel(64, target, False)})
    code = tvm.compile(module, target=target).mod.inspect_source("asm")
    assert not re.search(r"(call|bl)\s.*(hf|h2f)", code)
    assert instruction is None or instruction in code
