"""Measuring on the command line: sizes, turns."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relayquant.base.runtime import Executor
from relayquant.cli.measure import time_interleaved
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
