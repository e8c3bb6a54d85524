"""What other tools quantized: where quantizes are hoisted, and biases brought to int32."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import MAP, build_model
from operator_names import list_operators
from tvm import relax
from tvm.relax import op

from relayquant.ir.dialect import qnn
from relayquant.stages.backends import X86
from relayquant.stages.conversion import adopt_reference


@pytest.mark.parametrize("case", ["computed", "input", "read twice"])
def test_quantize_behind_a_reshape__is_lifted_to_the_operator_that_computes(case):
    """Not to an input, and not where the value itself is wanted too: nothing computes less then."""

    def body(emit, x):
        value = x if case == "input" else emit("value", op.nn.softmax(x))
        flat = emit("flat", op.reshape(value, (1, 144)))
        q = emit("q", qnn.quantize(flat, 0.5, 10, out_dtype="uint8"))
        return relax.Tuple([q, value]) if case == "read twice" else q

    mod = build_model(body, MAP)
    adopted = list_operators(adopt_reference(mod, X86))
    if case == "computed":
        assert adopted == ["nn.softmax", "qnn.quantize", "reshape"]
    else:
        assert adopted == list_operators(mod)


@pytest.mark.parametrize(
    "bias", [2.0**28, 2.0**28 + 32, -(2.0**28), -(2.0**28) - 32, 1e30, np.inf, -np.inf, np.nan]
)
def test_bias__too_large_for_its_accumulator_stays_in_float(bias):
    """In units of 0.5 * 0.5, half of int32 is 2^28."""

    def body(emit, x):
        data = emit("d", qnn.dequantize(x, 0.5, 0))
        weight = np.ones((3, 4, 1, 1), "int8")
        weight = emit("w", qnn.dequantize(relax.const(weight), 0.5, 0))
        conv = emit("c", op.nn.conv2d(data, weight))
        array = np.array([1.0, bias, 2.0], "float32").reshape(1, 3, 1, 1)
        return emit("out", op.add(conv, relax.const(array)))

    mod = build_model(body, MAP, dtype="int8")
    dequantizes = list_operators(adopt_reference(mod, X86)).count("qnn.dequantize")
    assert dequantizes == (3 if abs(bias) <= 2.0**28 else 2)
