"""Limits of a backend's rows: what they keep in float, and where the reason is read."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from float_models import MAP, build_model, draw_batches
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.config import Support
from relayquant.extend import Skip
from relayquant.ir.dialect import qnn
from relayquant.ir.ops import BUILTIN_OPS
from relayquant.stages.backends import X86


def limit_kernel(match):
    sizes = match.find_sizes("weight")
    if max(sizes["H"], sizes["W"]) > 1:
        return Skip(f"its kernel is {sizes['H']} x {sizes['W']}", "keep it at 1 x 1")
    return None


def refuse_clamps(match):
    return Skip("no clamp behind it") if match.find_call("relax.nn.relu") is not None else None


LIMITED = X86.with_settings("nn.conv2d", check=limit_kernel)


def build_kernels():
    """A 3x3 and a 1x1 convolution, each with a bias and a ReLU."""

    def body(emit, x):
        wide = emit("wide", op.nn.relu(emit.conv_bias("wide.b", x)))
        point = emit("point.c", op.nn.conv2d(wide, emit.constant(4, 4, 1, 1)))
        return emit("point", op.nn.relu(emit("point.b", op.add(point, emit.constant(1, 4, 1, 1)))))

    return build_model(body, MAP)


MODEL = build_kernels()
DATA = draw_batches(MODEL, 4)


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_check__keeps_an_operator_in_float_with_its_reason(effort):
    qmod = rq.quantize(MODEL, None, DATA, backend=LIMITED, effort=effort)
    ledger = rq.ledger(qmod)
    assert ledger.row("point.c").quantized
    row = ledger.row("wide.b.conv")
    assert (row.quantized, row.support) == (False, Support.FORM_UNSUPPORTED.value)
    assert (row.reason, row.advice) == ("its kernel is 3 x 3", "keep it at 1 x 1")
    assert not any(each.passed_over for each in ledger.rows)
    assert "its kernel is 3 x 3" in str(ledger)
    assert "its kernel is 3 x 3" in ledger._repr_html_()


def test_check__strict_lists_what_it_keeps_in_float():
    with pytest.raises(rq.ConfigError, match=r"wide\.b\.conv .*its kernel is 3 x 3; keep it at"):
        rq.prepare(MODEL, None, backend=LIMITED, strict=True)


def test_check__of_long_rows_alone_is_passed_over_once():
    backend = X86.with_settings("nn.conv2d", check=refuse_clamps)
    plan = rq.prepare(MODEL, None, backend=backend).plan
    row = plan.operator("point.b")
    assert (row.pattern, row.quantized) == ("conv2d_bias", True)
    assert [(p.pattern, p.reason) for p in row.passed_over] == [
        ("conv2d_bias_relu", "no clamp behind it")
    ]


def test_check__says_of_absorbed_operators_what_it_says_of_the_whole():
    rows = tuple(row for row in LIMITED.patterns if row.pattern.op == "relax.nn.conv2d")
    plan = rq.prepare(MODEL, None, backend=replace(LIMITED, patterns=rows)).plan
    assert plan.operator("wide.b").reason == "part of 'wide': its kernel is 3 x 3"
    assert plan.operator("wide.b").advice == "keep it at 1 x 1"
    assert plan.operator("point").quantized


def test_check__of_an_operator_that_another_one_absorbed_says_nothing():
    backend = X86.with_settings("add", check=lambda match: Skip("no sums"))
    plan = rq.prepare(MODEL, None, backend=backend).plan
    assert not any(row.passed_over for row in plan.operators)


def test_check__limits_models_that_were_quantized_before():
    def body(emit, x):
        data = emit("d", qnn.dequantize(emit("q", qnn.quantize(x, 0.05, 0)), 0.05, 0))
        weight = emit("w", qnn.dequantize(relax.const(np.ones((4, 4, 3, 3), "int8")), 0.5, 0))
        return emit("c", op.nn.conv2d(data, weight))

    mod = build_model(body, MAP)
    assert rq.ledger(rq.lower(mod, X86)).row("c").quantized
    row = rq.ledger(rq.lower(mod, LIMITED)).row("c")
    assert (row.quantized, row.reason) == (False, "its kernel is 3 x 3")
    assert row.passed_over == ()


def test_check__is_stored_by_name():
    data = json.loads(json.dumps(LIMITED.to_dict()))
    assert rq.BackendConfig.from_dict(data, BUILTIN_OPS, checks=[limit_kernel]) == LIMITED
    assert "where limit_kernel does not decline" in LIMITED.explain("conv2d_bias")
    with pytest.raises(
        rq.ConfigError, match=r"names 'limit_kernel', which was not passed as check"
    ):
        rq.BackendConfig.from_dict(data, BUILTIN_OPS)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_find_sizes__by_letters_of_any_layout(layout):
    kernel = {"NCHW": "OIHW", "NHWC": "HWIO"}[layout]
    sizes = {"N": 1, "C": 2, "H": 6, "W": 5, "O": 4, "I": 2}
    taken = {"H": 3, "W": 2}

    def body(emit, x):
        weight = emit.constant(*(taken.get(letter, sizes[letter]) for letter in kernel))
        return emit("c", op.nn.conv2d(x, weight, data_layout=layout, kernel_layout=kernel))

    found = {}

    def look(match):
        found.update(data=match.find_sizes("data"), weight=match.find_sizes("weight"))

    mod = build_model(body, tuple(sizes[letter] for letter in layout))
    rq.prepare(mod, None, backend=X86.with_settings("conv2d", check=look), effort="fast")
    assert found["data"] == {letter: sizes[letter] for letter in "NCHW"}
    assert found["weight"] == {"O": 4, "I": 2, "H": 3, "W": 2}


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda match: "no", "callback check returned a str; allowed: a Skip"),
        (lambda match: match.nothing, "callback check raised AttributeError"),
    ],
)
def test_check__that_is_wrong_is_named(check, message):
    with pytest.raises(rq.ConfigError, match=message) as error:
        rq.prepare(MODEL, None, backend=X86.with_settings("nn.conv2d", check=check))
    assert error.value.code == "RQ106"
