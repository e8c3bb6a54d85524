"""Every attribute of every operator that a row takes, away from its default: honoured or declined.

Right is what TVM's own float operator computes, compiled by its default pipeline.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from attribute_calls import BASES, VALUES, VARIED, build_models, run_tvm
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.config import Support
from relayquant.flow.testing.check import observe_parameters
from relayquant.flow.testing.draw import ModelBuilder, draw_inputs
from relayquant.ir.dialect import qnn
from relayquant.ir.ops import Quantized, QuantOp
from relayquant.ir.ops.build import unary_pattern
from relayquant.ir.ops.lut import TABLE_OPS
from relayquant.ir.reference import UNARY_FUNCTIONS, build_table
from relayquant.ir.rewrite.attributes import find_unmodelled
from relayquant.stages.backends import GENERIC

#: noise / signal of one operator in 8 bits, behind a product in 8 bits; those here have 0.0003
MOST_NOISE = 0.001


def find_wrong(name: str, backend: rq.BackendConfig = GENERIC) -> dict[str, str]:
    """What is varied -> how the quantized model differs from TVM's float operator."""
    b, values, mod, usual = build_models(name)
    inputs = draw_inputs(b, 2)
    prepared = rq.prepare(mod, None, backend=backend)
    prepared = observe_parameters(prepared, inputs)
    integer = rq.lower(rq.convert_to_reference(prepared), backend)
    wrong = {}
    results = zip(
        run_tvm(usual, inputs[0]),
        rq.reference.run(mod, inputs[0]),
        rq.reference.run(integer, inputs[0]),
        strict=True,
    )
    for (what, value), (want, real, have) in zip(values.items(), results, strict=True):
        # TVM rounds every sum to float16, the reference the last one.
        if not np.allclose(real, want, 1e-3, 0.03 if "float16" in what else 1e-5):
            wrong[what] = f"the numpy reference is off by {np.abs(real - want).max():.2g}"
        noise = np.square(want - have).mean() / np.square(want).mean()
        row = rq.ledger(integer).row(value)
        if row is not None and not row.quantized and not row.reason:
            wrong[what] = "it is in float without a reason"
        if not noise < MOST_NOISE:
            wrong[what] = f"noise / signal is {noise:.2g}, {row}"
    return wrong


@pytest.mark.slow
@pytest.mark.sample(16)
@pytest.mark.parametrize("name", VARIED)
def test_attributes__are_honoured_or_declined(name):
    assert find_wrong(name) == {}


def softplus_row(*attributes: str) -> QuantOp:
    """A row that computes softplus as if beta were 1."""

    def realize(context):
        data, out = context.operands["data"], context.output
        table = build_table(UNARY_FUNCTIONS["softplus"], data.qparams, out)
        value = context.emit(qnn.lookup(data.value, relax.const(table, str(table.dtype))), "int")
        return Quantized(value, out).dequantize()

    gelu = next(row for row in TABLE_OPS if row.name == "gelu")
    name = "relax.nn.softplus"
    return replace(
        gelu, name="softplus", op=name, pattern=unary_pattern(name), realize=realize,
        attributes=attributes,
    )  # fmt: skip


def test_row_of_the_user__attribute_without_a_name_is_declined():
    b = ModelBuilder(0)
    plain = b.emit(op.nn.softplus(b.activation(2, 6)), "plain")
    steep = b.emit(op.nn.softplus(b.activation(2, 6), beta=3.0), "steep")
    mod = b.finish(op.concat([plain, steep]))
    backend = GENERIC.with_pattern(softplus_row())
    plan = rq.prepare(mod, None, backend=backend).plan
    assert plan.operator(plain.name).quantized
    row = plan.operator(steep.name)
    assert not row.quantized
    assert row.reason == "nn.softplus has beta=3.0, which pattern 'softplus' does not model"
    assert "attributes=" in row.advice
    assert (row.support, row.op) == (Support.FORM_UNSUPPORTED, "relax.nn.softplus")


@pytest.mark.slow
def test_row_that_names_what_it_ignores__is_noticed(monkeypatch):
    """The comparison above would fail for such a row."""
    name = "relax.nn.softplus"
    monkeypatch.setitem(BASES, name, lambda b: op.nn.softplus(b.activation(2, 6)))
    monkeypatch.setitem(VALUES, "beta", [3.0])
    monkeypatch.setitem(VALUES, "threshold", [0.1])
    assert find_wrong(name, GENERIC.with_pattern(softplus_row())) == {}
    wrong = find_wrong(name, GENERIC.with_pattern(softplus_row("beta", "threshold")))
    assert set(wrong) == {"beta=3.0", "threshold=0.1"}


def test_attributes__what_says_nothing_is_no_attribute():
    x = relax.Var("x", relax.TensorType((1, 4, 6, 6), "float32"))
    w = relax.Var("w", relax.TensorType((4, 4, 3, 3), "float32"))
    silent = [
        op.nn.conv2d(x, w, out_dtype="float32", out_layout="NCHW"),
        op.nn.softmax(x, axis=3),
        op.matmul(x, x, out_dtype="float32"),
        op.mean(x),
    ]
    assert find_unmodelled(silent, ()) is None
    for call, named, message in [
        (op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI"), (), "data_layout='NHWC'"),
        (op.nn.conv2d(x, w, out_layout="NHWC"), ("data_layout",), "out_layout='NHWC'"),
        (op.nn.conv2d(x, w, out_dtype="float16"), (), "out_dtype='float16'"),
        (op.nn.softmax(x, axis=1), (), "axis=1"),
        (op.mean(x, [-1]), ("keepdims",), "axis=(-1,)"),
        (op.flip(x, 0), (), "axis=0"),  # it has no default
        (op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], pad_value=0.5), ("pad_width",), "pad_value=0.5"),
    ]:
        assert str(find_unmodelled([call], named)).endswith(f" has {message}")
