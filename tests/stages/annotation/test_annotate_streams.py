"""Float streams: what layer norms read, or compute, is not rounded on its way."""

from __future__ import annotations

import numpy as np
from float_models import MAP, build_model
from tvm import relax
from tvm.relax import op

from relayquant.config import QConfigMapping
from relayquant.ir.plan import Plan
from relayquant.stages.annotation import annotate
from relayquant.stages.backends import X86
from relayquant.stages.preparation import prepare_module


def plan_of(body) -> Plan:
    mapping = QConfigMapping().set_global(X86.default_qconfig)
    return annotate(prepare_module(build_model(body, MAP)), X86, mapping)


def normalize(emit, name: str, value: relax.Expr) -> relax.Expr:
    """Layer norm over the last axis."""
    size = int(value.ty.shape[-1])
    one, zero = (relax.const(np.full(size, v, "float32")) for v in (1, 0))
    return emit(name, op.nn.layer_norm(value, one, zero, axes=[-1]))


def test_sum__that_a_layer_norm_reads_is_float():
    def body(emit, x):
        a, b = emit.conv("a", x), emit.conv("b", x)
        total = emit("total", op.multiply(a, b))
        return relax.Tuple([emit.conv("out", total), normalize(emit, "norm", total)])

    plan = plan_of(body)
    assert not plan.operator("total").quantized
    assert plan.operator("a").output is None
    assert plan.value_groups["total"] == ("total",)  # rounded for the convolution alone


def test_product__with_a_float_value_is_float():
    def body(emit, x):
        a = emit.conv("a", x)
        scaled = emit("scaled", op.multiply(a, normalize(emit, "norm", a)))
        return emit.conv("out", scaled)

    plan = plan_of(body)
    assert not plan.operator("scaled").quantized
    assert plan.operator("out").quantized


def test_product__between_integers_is_integer():
    def body(emit, x):
        a, b = emit.conv("a", x), emit.conv("b", x)
        return emit.conv("out", emit("total", op.multiply(a, b)))

    assert plan_of(body).operator("total").quantized
