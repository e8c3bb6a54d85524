"""The ledger: what it says, how it travels with the module, and what is no ledger."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import tvm
from float_models import MAP, build_model, draw_batches, residual_model
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.ir.dialect import qnn
from relayquant.ir.ledger import Ledger, find_ledger
from relayquant.plots.text import ledger_table, make_console


@pytest.fixture(scope="module")
def qmod():
    def body(emit, x):
        r = emit("r", op.nn.relu(emit.conv_bias("a", x)))
        s = emit("s", op.nn.softmax(r))
        return relax.Tuple([emit.conv("out", s), emit.conv("side", r)])

    mod = build_model(body, MAP)
    return rq.quantize(mod, None, draw_batches(mod, 2))


def test_ledger__one_row_for_each_operator(qmod):
    ledger = rq.ledger(qmod)
    assert ledger.backend == "x86"
    assert [row.name for row in ledger.rows] == ["r", "s", "out", "side"]
    relu, softmax, out, side = ledger.rows
    assert (relu.op, relu.pattern, relu.dtype) == ("nn.conv2d", "conv2d_bias_relu", "uint8")
    assert relu.values == ("a.conv", "a", "r")
    assert len(relu.scale) == len(relu.zero_point) == 1
    assert relu.scale[0] > 0
    assert not softmax.quantized
    assert softmax.dtype == "float32"
    assert "no pattern for relax.nn.softmax" in softmax.reason
    assert softmax.advice
    assert (out.quantized, out.dtype, out.scale) == (True, "int32", ())
    assert ledger.quantized == (relu, out, side)
    assert ledger.floating == (softmax,)


def test_ledger__integer_operators_keep_their_dtype():
    def body(emit, x):
        score = emit("score", op.mean(emit.conv_bias("a", x), [2, 3]))
        return emit("index", op.argmax(score, 1))

    mod = build_model(body, MAP)
    row = rq.ledger(rq.quantize(mod, None, draw_batches(mod, 2))).row("index")
    assert row is not None
    assert (row.quantized, row.dtype) == (False, "int64")


def test_ledger__finds_rows_by_inner_values_too(qmod):
    ledger = rq.ledger(qmod)
    assert ledger.row("a.conv") is ledger.row("r") is ledger.rows[0]
    assert ledger.row("nothing") is None


def test_ledger__dict_is_plain_and_read_back_exactly(qmod):
    ledger = rq.ledger(qmod)
    data = ledger.to_dict()
    assert {"name", "op", "quantized", "pattern", "dtype", "reason", "advice"} <= set(
        data["operators"][0]
    )
    assert Ledger.from_dict(json.loads(json.dumps(data))) == ledger


def test_ledger__survives_saving_the_module(qmod):
    assert rq.ledger(tvm.ir.load_json(tvm.ir.save_json(qmod))) == rq.ledger(qmod)


def test_ledger__refusal_changes_one_row(qmod):
    ledger = rq.ledger(qmod)
    other = ledger.with_refusal("r", "because", "do this")
    row = other.row("r")
    assert row is not None
    assert (row.quantized, row.dtype, row.reason) == (False, "float32", "because")
    assert row.advice == "do this"
    assert other.rows[1:] == ledger.rows[1:]
    assert ledger.rows[0].quantized


def test_ledger__summary_leaves_out_sizes_and_indices(qmod):
    """No operator on them could be an integer one: they have rows, and are not counted."""
    ledger = rq.ledger(qmod)
    row, count = ledger.floating[0], len(ledger.rows)
    sizes = [replace(row, name=f"size_{dtype}", op="shape_to_tensor", dtype=dtype)
             for dtype in ("int64", "bool", "uint8")]  # fmt: skip
    sizes.append(replace(row, name="shape", op="tensor_to_shape", dtype=""))
    longer = replace(ledger, rows=(*ledger.rows, *sizes))
    assert longer.summarize() == ledger.summarize()
    assert f" of {count} operators on integers" in ledger.summarize()
    assert f"of {count} operators quantized" in longer._repr_html_()


def test_ledger__float_module_has_none():
    mod = build_model(lambda emit, x: emit.conv("out", x), MAP)
    assert find_ledger(mod) is None
    with pytest.raises(rq.ModelError, match=r"no ledger.*relayquant\.quantize"):
        rq.ledger(mod)


def test_ledger__names_rows_of_the_user_that_were_passed_over():
    def decline(match):
        return rq.extend.Skip("only every second Tuesday", "come again")

    mod = residual_model()
    builtin = next(op for op in rq.extend.BUILTIN_OPS if op.name == "conv2d")
    row = replace(builtin, name="mine", check=decline)
    backend = rq.get_backend_config("x86").with_pattern(row)
    qmod = rq.quantize(mod, None, draw_batches(mod, 2), backend=backend, effort="fast")
    ledger = rq.ledger(qmod)
    convs = [row for row in ledger.rows if row.op == "nn.conv2d"]
    assert convs
    assert all(row.quantized for row in convs)
    for row in convs:
        assert [each.pattern for each in row.passed_over] == ["mine"]
        assert row.passed_over[0].reason == "only every second Tuesday"
    line = "your row 'mine' passed over: only every second Tuesday (come again)"
    assert str(ledger).count(line) == len(convs)
    assert ledger._repr_html_().count("second Tuesday") == len(convs)
    shown = make_console(io.StringIO())
    shown.print(ledger_table(ledger.to_dict()["operators"]))
    assert "mine: only every second" in shown.file.getvalue()


def test_ledger__names_rows_of_the_user_that_lower_passed_over():
    def body(emit, x):
        data = emit("d", qnn.dequantize(emit("q", qnn.quantize(x, 0.05, 0)), 0.05, 0))
        weight = emit("w", qnn.dequantize(relax.const(np.ones((4, 4, 1, 1), "int8")), 0.5, 0))
        return emit("c", op.nn.conv2d(data, weight))

    builtin = next(op for op in rq.extend.BUILTIN_OPS if op.name == "conv2d")
    row = replace(
        builtin, name="mine", check=lambda match: rq.extend.Skip("only every second Tuesday")
    )
    lowered = rq.lower(build_model(body, MAP), rq.get_backend_config("x86").with_pattern(row))
    found = rq.ledger(lowered).row("c")
    assert found.quantized
    assert [(each.pattern, each.reason) for each in found.passed_over] == [
        ("mine", "only every second Tuesday")
    ]
