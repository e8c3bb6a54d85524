"""Values of element types that no code computes are refused before anything is compiled."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.ir.rewrite.element_types import is_too_narrow
from relayquant.ir.rewrite.function import make_main

NARROW = ["int4", "uint4", "int2", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]


def make(dtype, given="float32"):
    x = relax.Var("x", relax.TensorType((4,), given))
    return make_main([x], lambda b: op.astype(b.emit(op.astype(x, dtype)), "float32"))


@pytest.mark.parametrize("dtype", NARROW)
def test_compile__refuses_a_narrow_value(dtype):
    with pytest.raises(rq.ModelError, match=rf"Value '\w+' has elements of {dtype}; allowed: fl"):
        rq.compile(make(dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_compile__refuses_a_narrow_input(dtype):
    with pytest.raises(rq.ModelError, match=rf"Value 'x' has elements of {dtype}"):
        rq.compile(make("float32", dtype))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "float16", "bfloat16", "float64", ""])
def test_is_too_narrow__is_false_of_what_is_computed(dtype):
    assert not is_too_narrow(dtype)
