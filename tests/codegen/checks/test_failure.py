"""What TVM cannot compile is named: value, operator and types."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

import relayquant as rq
from relayquant.ir.rewrite.function import make_main


def make_module(compute, dtype="int32"):
    """A module of a few values around `compute`."""
    x, builder = relax.Var("x", relax.TensorType((8,), dtype)), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            twice = builder.emit(relax.op.add(x, x), name_hint="twice")
            raised = builder.emit(compute(twice), name_hint="raised")
            result = builder.emit_output(relax.op.nn.relu(raised))
        builder.emit_func_output(result)
    return builder.finalize()


@pytest.mark.parametrize(
    ("compute", "dtype", "said"),
    [
        (lambda x: relax.op.power(x, x), "bool", "relax.power of bool, bool: TVM cannot"),
        (lambda x: relax.op.negative(x), "bool", "relax.negative of bool: TVM cannot"),
        (lambda x: relax.op.atan2(x, x), "int8", "relax.atan2 of int8, int8"),
    ],
)
def test_compile__names_what_has_no_code(compute, dtype, said):
    with pytest.raises(rq.ModelError, match="value 'raised', operator ") as caught:
        rq.compile(make_module(compute, dtype))
    assert said in str(caught.value)
    assert "cast the operands" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_compile__a_convolution_that_leaves_nothing():
    x, builder = relax.Var("x", relax.TensorType((1, 8, 2, 5), "float32")), relax.BlockBuilder()
    weight = relax.const(np.ones((8, 8, 3, 3), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.nn.conv2d(x, weight))
        builder.emit_func_output(y)
    with pytest.raises(rq.ModelError, match=r"conv2d, which .*: its sizes do not fit") as caught:
        rq.compile(builder.finalize())
    assert caught.value.code == "RQ206"


def test_compile__sizes_that_only_other_values_have():
    """A call that alone does not say what n is compiles, and is not what is named."""
    size = tvm.tirx.Var("n", "int64")
    x, builder = relax.Var("x", relax.TensorType((size, 4), "bool")), relax.BlockBuilder()
    row = relax.Var("row", relax.TensorType((4,), "bool"))
    with builder.function("main", [x, row]):
        with builder.dataflow():
            rows = builder.emit(relax.op.broadcast_to(row, (size, 4)), name_hint="rows")
            result = builder.emit_output(relax.op.subtract(rows, x), name_hint="less")
        builder.emit_func_output(result)
    with pytest.raises(
        rq.ModelError, match=r"value 'less', operator relax\.subtract of bool, bool"
    ):
        rq.compile(builder.finalize())


def test_compile__shapes_that_are_not_known():
    """No other type would help: the size that is missing is named."""
    size = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((size, 4), "float32"))
    y = relax.Var("y", relax.TensorType((3, 4), "float32"))
    mod = make_main(
        [x, y], lambda builder: relax.op.nn.relu(builder.emit(relax.op.add(x, y), name_hint="both"))
    )
    with pytest.raises(
        rq.ModelError, match=r"its result is known at run time only.*shapes="
    ) as one:
        rq.compile(mod)
    assert "value 'both', operator relax.add of float32, float32" in str(one.value)
    assert "cast" not in str(one.value)


def test_compile__what_no_call_alone_explains_is_raised_as_it_is(monkeypatch):
    def fail(*args, **more):
        raise ValueError("only as a whole")

    monkeypatch.setattr("relayquant.stages.compilation.explain_failure", lambda *args: None)
    monkeypatch.setattr(tvm, "compile", fail)
    with pytest.raises(ValueError, match="only as a whole"):
        rq.compile(make_module(relax.op.exp, "float32"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_compile__an_interrupt_stays_one(error):
    """Ctrl-C in a pass written in Python crosses frames of C++, which knew no such exception."""

    @tvm.instrument.pass_instrument
    class Interrupt:
        def run_before_pass(self, _mod, info):
            if info.name.startswith("relayquant."):
                raise error

    with tvm.transform.PassContext(instruments=[Interrupt()]), pytest.raises(error):
        rq.compile(make_module(relax.op.negative))
