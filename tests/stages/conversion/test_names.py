"""Names of the integer module: what stands for a value of the float model carries its name."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import MAP, build_model, draw_batches, residual_model
from tvm import relax
from tvm.relax import op
from tvm.relax.dpl import is_op, wildcard

import relayquant as rq
from relayquant.extend import Operand, Pattern, Quantized, QuantOp, check_pattern, qnn
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import tensor_dtype
from relayquant.stages.conversion.names import find_owner, name_integers


def integer_names(body, *shapes, **options) -> dict[str, str]:
    """Name -> dtype of every value of the integer module."""
    mod = build_model(body, *(shapes or (MAP,)))
    qmod = rq.quantize(mod, None, draw_batches(mod, 2), **options)
    return {b.var.name: tensor_dtype(b.var) for b in Graph(qmod).bindings}


def test_names__accumulators_keep_their_own():
    names = integer_names(lambda e, x: e.conv("out", e("r", op.nn.relu(e.conv_bias("a", x)))))
    assert names == {
        "x.q": "uint8",
        "r.acc": "int32",
        "r.biased": "int32",
        "r": "uint8",
        "out.acc": "int32",
        "out.biased": "int32",
        "out": "float32",
    }


def test_names__residual_and_clamp():
    def body(emit, x):
        a = emit("a", op.clip(emit.conv("a.c", x), -0.2, 0.3))
        r = emit("r", op.nn.relu(emit("s", op.add(emit.conv("b", a), a))))
        return emit.conv("out", r)

    names = integer_names(body)
    assert names["a"] == names["r"] == "uint8"
    assert not {name for name in names if name.endswith((".q", ".sum", ".int"))} - {"x.q"}


@pytest.mark.slow
def test_names__every_quantized_value_of_the_ledger_is_found():
    mod = residual_model()
    qmod = rq.quantize(mod, None, draw_batches(mod, 2))
    graph = Graph(qmod)
    for row in rq.ledger(qmod).quantized:
        if row.dtype == "uint8":
            assert tensor_dtype(graph.vars[row.name]) == "uint8", row.name
    assert tensor_dtype(graph.vars["out"]) == "float32"


def test_names__value_that_is_still_there_in_float():
    """a is an output: the integers keep their working name only if the float value has its own."""

    def body(emit, x):
        s = emit("s", op.nn.softmax(emit.conv("a", x)))
        return relax.Tuple([emit.conv("out", s), s])

    names = integer_names(body)
    assert names["s"] == "float32"
    assert names["s.q"] == "uint8"


def test_names__transposed_operand_is_no_stand_in():
    def body(emit, x):
        m = emit("m", op.matmul(x, emit("t", op.tanh(x))))
        return emit("r", op.reshape(m, (1, 4 * 36)))

    names = integer_names(body)
    assert names["m.acc"] == "int32"
    assert names["m.rhs"] == "uint8"
    assert names["m"] == "float32"  # its sums, which only the output reads


def normalized_row() -> QuantOp:
    """x / sqrt(sum(x * x)) with integer sums: its callback makes int32 values on the way, and
    leaves calls inside calls.
    """
    data = wildcard()
    sums = is_op("relax.sum")(is_op("relax.multiply")(data, data))

    def realize(context):
        operand, output = context.operands["data"], context.output
        centred = op.subtract(op.astype(operand.value, "int32"), operand.zero_point)
        centred = context.emit(centred, "centred")
        squares = op.sum(op.multiply(centred, centred), axis=-1, keepdims=True)
        total = context.emit(op.astype(squares, "float32"), "total")
        value = op.divide(op.astype(centred, "float32"), op.sqrt(total))
        integers = qnn.quantize(value, output.scale, output.zero_point, out_dtype=output.dtype)
        return Quantized(integers, output).dequantize()

    return QuantOp(
        name="normalized",
        op="relax.divide",
        pattern=Pattern(is_op("relax.divide")(data, is_op("relax.sqrt")(sums)), {"data": data}),
        operands=(Operand("data"),),
        realize=realize,
        attributes=("axis", "keepdims"),
    )


def build_normalized(b):
    x = b.activation(2, b.draw(4, 8))
    squares = b.emit(op.sum(b.emit(op.multiply(x, x)), axis=-1, keepdims=True))
    return op.divide(x, b.emit(op.sqrt(squares)))


def test_names__values_that_a_callback_makes_on_the_way_do_not_stand_for_its_result():
    report = check_pattern(normalized_row(), build_normalized, examples=2, compiled=False)
    assert report.differing == 0


def test_names__are_unique_and_second_run_changes_nothing():
    mod = residual_model()
    qmod = rq.quantize(mod, None, draw_batches(mod, 2))
    names = [b.var.name for b in Graph(qmod).bindings]
    assert len(set(names)) == len(names)
    assert name_integers(qmod).same_as(qmod)


def test_names__module_without_a_ledger_is_left_alone():
    mod = build_model(lambda e, x: e("v.q", op.nn.relu(x)), MAP)
    assert name_integers(mod).same_as(mod)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("a.q", "a"),
        ("a.q.unclipped", "a"),
        ("a.b.sum", "a.b"),
        ("a.bc.q", "a"),
        ("a", ""),
        ("b.q", ""),
    ],
)
def test_find_owner__longest_value_that_the_name_continues(name, owner):
    assert find_owner(name, {"a", "a.b"}) == owner


def test_names__integers_equal_those_before():
    """Renaming changes no number."""
    mod = residual_model()
    data = draw_batches(mod, 2)
    prepared = rq.calibrate(rq.prepare(mod), data)
    reference = rq.convert_to_reference(prepared)
    values = rq.reference.run_values(rq.lower(reference), data[0])
    expected = rq.reference.run_values(reference, data[0])
    for name in ("stem", "one", "two", "both"):
        assert np.abs(values[name].astype(int) - expected[f"{name}.q"].astype(int)).max() <= 1
