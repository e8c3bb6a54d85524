"""Loop nests that contradict what their operator declares."""

from __future__ import annotations

import pytest
from tvm import relax, tirx

import relayquant as rq
from relayquant.codegen import passes
from relayquant.codegen.legalization.declared import check_declared, contradicts
from relayquant.ir.rewrite.function import make_main


def emit_wrong(builder, call):
    """The operand itself, which is longer."""
    return relax.op.exp(call.args[0])


def test_compile__refuses_a_loop_nest_of_another_shape(monkeypatch):
    x = relax.Var("x", relax.TensorType((1, 2, 8), "float32"))
    mod = make_main([x], lambda b: b.emit(relax.op.nn.max_pool1d(x, 2, 2)))
    found = {"relax.nn.max_pool1d": check_declared(emit_wrong)}
    monkeypatch.setattr(passes, "list_legalizations", lambda: found)
    match = r"max_pool1d declares .*4\).*gives .*8\).*defect of relayquant or TVM.*\[RQ206\]"
    with pytest.raises(rq.ModelError, match=match):
        rq.compile(mod)


def make_type(shape, dtype="float32"):
    return relax.TensorType(shape, dtype)


SIZE = tirx.Var("n", "int64")


@pytest.mark.parametrize(
    ("made", "declared", "is_wrong"),
    [
        (make_type((1, 3)), make_type((1, 2)), True),
        (make_type((1, 2)), make_type((1, 2)), False),
        (make_type((1, 2)), make_type((1, 2), "float16"), True),
        (make_type((1, 2)), make_type((1, 2, 1)), True),
        (make_type((SIZE, 2)), make_type((4, 2)), False),
        (make_type((SIZE, 3)), make_type((SIZE, 2)), True),
        (relax.TensorType(dtype="float32"), make_type((1, 2)), False),
        (relax.TensorType(None, None), make_type((1, 2)), False),
        (relax.TupleType([make_type((1,))] * 2), relax.TupleType([make_type((1,))]), True),
        (relax.TupleType([make_type((1,))]), relax.TupleType([make_type((2,))]), True),
        (relax.TupleType([make_type((1,))]), make_type((1,)), True),
    ],
)
def test_contradicts(made, declared, is_wrong):
    assert contradicts(made, declared) == is_wrong
