"""Tables of unary functions."""

from __future__ import annotations

import numpy as np
import pytest

from relayquant.base.qtypes import QParams, Rounding
from relayquant.errors import QnnError
from relayquant.ir.reference import UNARY_FUNCTIONS, build_table
from relayquant.ir.reference.qnn import dequantize, lookup, quantize


def make_params(scale: float, zero_point: int, dtype: str) -> QParams:
    return QParams(np.float32(scale), np.int32(zero_point), dtype)


@pytest.mark.parametrize("name", UNARY_FUNCTIONS)
@pytest.mark.parametrize(
    ("source", "target"), [("int8", "uint8"), ("uint8", "int8"), ("int8", "int16")]
)
def test_build_table__lookup_equals_the_float_path(name, source, target):
    inputs = make_params(0.05, 10, source)
    outputs = make_params(0.02, 5, target)
    x = np.arange(256).astype("uint8").view(source).reshape(16, 16)
    table = build_table(UNARY_FUNCTIONS[name], inputs, outputs)
    expected = quantize(UNARY_FUNCTIONS[name](dequantize(x, 0.05, 10)), 0.02, 5, out_dtype=target)
    assert table.shape == (256,)
    assert table.dtype == target
    np.testing.assert_array_equal(lookup(x, table), expected)


@pytest.mark.parametrize("name", UNARY_FUNCTIONS)
def test_unary_functions__are_float32_and_never_nan(name):
    x = np.linspace(-20, 20, 1001, dtype="float32")
    y = UNARY_FUNCTIONS[name](x)
    assert y.dtype == np.float32
    assert not np.isnan(y).any()


def test_unary_functions__outside_the_domain_continue_at_its_border():
    x = np.float32([-1.0])
    assert UNARY_FUNCTIONS["log"](x) == -np.inf
    assert UNARY_FUNCTIONS["sqrt"](x) == 0
    assert UNARY_FUNCTIONS["rsqrt"](x) == np.inf


def test_build_table__float_output_and_nan():
    inputs = make_params(1.0, 0, "int8")
    table = build_table(np.log, inputs, "float32")
    assert table.dtype == np.float32
    assert table[1] == 0
    assert table[255] == 0  # log(-1) is NaN
    integers = build_table(np.log, inputs, make_params(0.1, 7, "int8"))
    assert integers[255] == 7
    assert integers[0] == -128  # log(0) is -inf


def test_build_table__rounding():
    inputs, outputs = make_params(0.5, 0, "int8"), make_params(1.0, 0, "int8")
    even = build_table(lambda x: x, inputs, outputs)
    away = build_table(lambda x: x, inputs, outputs, Rounding.TONEAREST)
    assert (even[1], even[3], even[255]) == (0, 2, 0)
    assert (away[1], away[3], away[255]) == (1, 2, -1)


def test_build_table__wrong_parameters():
    wide = make_params(0.5, 0, "int16")
    narrow = make_params(0.5, 0, "int8")
    channels = QParams(np.ones(3, "float32"), np.zeros(3, "int32"), "int8", 0)
    for inputs, outputs in ((wide, narrow), (channels, narrow), (narrow, channels)):
        with pytest.raises(QnnError):
            build_table(np.tanh, inputs, outputs)
    with pytest.raises(QnnError, match="shape"):
        build_table(lambda x: x[:5], narrow, narrow)
