"""Small decisions of the conversion at their borders: each was found unwatched when it was turned
around.
"""

from __future__ import annotations

import numpy as np
import pytest
from float_models import MAP, build_model
from operator_names import list_operators
from tvm import relax
from tvm.relax import op

from relayquant.base.qtypes import QParams
from relayquant.errors import ConfigError
from relayquant.ir.dialect import qnn
from relayquant.ir.ops.base import count_values
from relayquant.ir.rewrite.rule import apply_rules
from relayquant.stages.backends import X86
from relayquant.stages.conversion import adopt_reference
from relayquant.stages.conversion.bias import has_units, is_lost, refine_units
from relayquant.stages.conversion.io_dtypes import name_dtypes
from relayquant.stages.conversion.joined_input import quantize_before_joining
from relayquant.stages.conversion.propagate import has_same_grid


def make_qparams(scale, zero_point=0, dtype="int32"):
    axis = 0 if np.ndim(scale) else None
    return QParams(np.float32(scale), np.asarray(zero_point, "int32"), dtype, axis)


@pytest.mark.parametrize(
    ("shape", "is_bias"),
    [
        ((1, 3, 1, 1), True),
        ((3, 1, 1), True),
        ((1, 1, 1, 1), True),
        ((), True),
        ((1, 3, 6, 1), False),
        ((1, 3, 1, 6), False),
        ((3, 6, 6), False),
        ((1, 1, 6, 6), False),
        ((6,), False),
    ],
)
def test_adopted_bias__varies_along_the_channels_alone(shape, is_bias):
    """Only then is it brought to int32; what else is added is added to real numbers."""

    def body(emit, x):
        data = emit("d", qnn.dequantize(x, 0.5, 0))
        weight = relax.const(np.ones((3, 4, 1, 1), "int8"))
        conv = emit("c", op.nn.conv2d(data, emit("w", qnn.dequantize(weight, 0.5, 0))))
        return emit("out", op.add(conv, relax.const(np.full(shape, 3.0, "float32"))))

    names = list_operators(adopt_reference(build_model(body, MAP, dtype="int8"), X86))
    assert names.count("qnn.dequantize") == (3 if is_bias else 2)


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (make_qparams(0.5, 3, "uint8"), True),
        (make_qparams(0.5, 3, "int8"), False),
        (make_qparams(0.5, 4, "uint8"), False),
        (make_qparams(0.25, 3, "uint8"), False),
        (make_qparams(0.25, 4, "int8"), False),
    ],
)
def test_same_grid__scale_zero_point_and_dtype(other, is_same):
    assert has_same_grid(make_qparams(0.5, 3, "uint8"), other) is is_same


@pytest.mark.parametrize(("sign", "bias"), [(1, 2.0**31), (-1, 2.0**31)])
def test_refine_units__what_int32_does_not_hold(sign, bias):
    """The largest float32 below 2^31 is kept, 2^31 is not: the new steps hold half of int32."""
    units = make_qparams(1.0)
    below = np.nextafter(np.float32(bias), np.float32(0))
    assert refine_units(units, np.float32([sign * below]), None, True) == units
    refined = refine_units(units, np.float32([sign * bias]), None, True)
    np.testing.assert_allclose(bias / refined.scale, 2.0**30, rtol=1e-6)


def test_refine_units__of_a_bias_of_zeros_are_those_of_the_accumulator():
    units = make_qparams([1e-3, 1e-3], [0, 0])
    bias = np.float32([0, 1e10])
    refined = refine_units(units, bias, None, True)
    assert refined.scale[0] == np.float32(1e-3)
    assert refined.scale[1] > 1


@pytest.mark.parametrize(
    ("bias", "step", "lost"), [(0.5, 0.9, True), (0.5, 1.0, False), (-0.5, 0.9, True)]
)
def test_is_lost__moved_by_more_than_half_a_step(bias, step, lost):
    """Of units of 1, 0.5 is rounded to 0: half a step of 1 is no more than half a step."""
    value, unit = np.array([bias]), np.array([1.0])
    assert is_lost(value, unit, step) is lost
    assert not is_lost(value, unit, step, np.array([False]))


@pytest.mark.parametrize(
    ("have", "units", "expected"),
    [
        (make_qparams(0.5), [0.5], True),
        (make_qparams(0.5, 1), [0.5], False),
        (make_qparams(0.5), [0.5 * (1 + 2.0**-22)], True),
        (make_qparams(0.5), [0.5 * (1 + 2.0**-18)], False),
        (make_qparams([0.5, 0.5], [0, 0]), [0.5], True),
        (make_qparams([0.5, 0.5], [0, 0]), [0.5, 0.25], False),
        (make_qparams([0.5, 0.5], [0, 0]), [0.5, 0.5, 0.5], False),
    ],
)
def test_has_units__scale_within_rounding_and_no_zero_point(have, units, expected):
    assert bool(has_units(have, np.array(units))) is expected


@pytest.mark.parametrize(("stop", "is_moved"), [(6, True), (5, False)])
def test_joined_cuts__quantized_before_where_nothing_is_left_out(stop, is_moved):
    """Else more would be quantized than is read."""

    def body(emit, x):
        first = emit("first", op.strided_slice(x, [2], [0], [3]))
        second = emit("second", op.strided_slice(x, [2], [3], [stop]))
        joined = emit("joined", op.concat([first, second], 1 if stop == 6 else 2))
        return emit("q", qnn.quantize(joined, 0.5, 10, out_dtype="uint8"))

    mod = apply_rules(build_model(body, MAP), [quantize_before_joining()])
    names = list_operators(mod)
    assert ("qnn.concatenate" in names) is is_moved
    assert names.count("qnn.quantize") == 1
    assert (names[0] == "qnn.quantize") is is_moved


def test_interface__indices_are_those_of_the_values():
    """The first and the last; one beyond either end is an error that says what is allowed."""
    values = [("a", "float32"), ("b", "float32")]
    first, last = name_dtypes("input_dtypes", {0: "uint8", 1: "int8"}, values)
    assert (first.requested, last.requested) == ("uint8", "int8")
    for index in (-1, 2):
        with pytest.raises(ConfigError, match=rf"has index {index}; allowed: 0 to 1\."):
            name_dtypes("input_dtypes", {index: "uint8"}, values)


@pytest.mark.parametrize(
    ("dtype", "count"), [("int8", 2**8), ("uint8", 2**8), ("int16", 2**16), ("int32", 2**32)]
)
def test_count_values__signed_and_unsigned(dtype, count):
    """Operands of two dtypes meet in the one that holds more."""
    assert count_values(dtype) == count
