"""Measuring on the command line: inputs, agreement of outputs, sizes, turns."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relayquant.base.runtime import Executor
from relayquant.cli.measure import compare_outputs, time_interleaved
from relayquant.errors import ModelError
from relayquant.ir.rewrite.constants import count_constant_bytes


@I.ir_module
class SumOfTwo:
    @R.function
    def main(left: R.Tensor((2, 3), "float32"), right: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            total = R.add(left, right)
            double = R.add(total, total)
            R.output(total, double)
        return (total, double)


def test_time_interleaved__one_number_for_each() -> None:
    model = Executor(tvm.compile(SumOfTwo, tvm.target.Target({"kind": "llvm"})))
    inputs = [np.ones((2, 3), "float32")] * 2
    seconds = time_interleaved([model, model], inputs, runs=3)
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_compare_outputs__known_numbers() -> None:
    expected = np.array([[3.0, 4.0], [0.0, 5.0]], "float32")
    actual = np.array([[3.5, 3.0], [0.0, 5.0]], "float32")
    (row,) = compare_outputs([expected], [actual])
    assert row.max_error == 1.0
    assert row.sqnr == pytest.approx(10 * np.log10(50 / 1.25))
    assert row.top1 == 0.5


def test_compare_outputs__equal_and_without_classes() -> None:
    array = np.ones((3, 1), "float32")
    (row,) = compare_outputs([array], [array])
    assert (row.max_error, row.sqnr, row.top1) == (0.0, np.inf, None)


def test_compare_outputs__different_shapes() -> None:
    with pytest.raises(ModelError, match="different models"):
        compare_outputs([np.zeros((2, 3))], [np.zeros((2, 4))])


def test_count_constant_bytes__each_constant_once() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 4), "float32"))
    weight = relax.const(np.zeros((1, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.multiply(relax.op.add(x, weight), weight))
            y = builder.emit(relax.op.add(relax.op.astype(y, "int8"), relax.const(1, "int8")))
            result = builder.emit_output(y)
        builder.emit_func_output(result)
    assert count_constant_bytes(builder.finalize()) == 16 + 1
