"""Indices that stay inside of their tensor, and stacks."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import as_main
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.stages.preparation import prepare_module


def test_take_of_constants__counts_from_the_front(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 5, 3), "float32")):
        y = R.take(x, R.const(-1, "int64"), axis=1, mode="fast")
        z = R.take(x, R.const([1, -2], "int64"), axis=-1, mode="fast")
        return (y, z)

    @as_main
    def expected(x: R.Tensor((2, 5, 3), "float32")):
        y = R.take(x, R.const(4, "int64"), axis=1, mode="clip")
        z = R.take(x, R.const([1, 1], "int64"), axis=-1, mode="clip")
        return y, z

    check_prepared(before, expected)


def test_take_of_what_is_computed__wraps(check_prepared):
    @as_main
    def before(x: R.Tensor((5, 3), "float32"), i: R.Tensor(("n",), "int64")):
        y = R.take(x, i, axis=0, mode="fast")
        z = R.take(x, i, axis=0, mode="clip")
        return (y, z)

    @as_main
    def expected(x: R.Tensor((5, 3), "float32"), i: R.Tensor(("n",), "int64")):
        y = R.take(x, i, axis=0, mode="wrap")
        z = R.take(x, i, axis=0, mode="clip")
        return y, z

    expected["main"] = expected["main"].with_attr("relayquant.indices", '{"i": 5}')
    check_prepared(before, expected)


@pytest.mark.parametrize("index", [5, -6])
def test_take_of_constants__outside_is_refused(index):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((5, 3), "float32")):
            with R.dataflow():
                row = R.take(x, R.const(7, "int64"), axis=0, mode="fast")
                R.output(row)
            return row

    changed = Before.script().replace("R.const(7,", f"R.const({index},")
    with pytest.raises(ModelError, match=rf"take at 'row'.*{index}.*5 elements; allowed: -5\.\.4"):
        prepare_module(tvm.script.from_source(changed))


def test_take__the_last_row_and_no_memory_beyond():
    """Compiled from TVM's default mode, which reads what lies before and behind the tensor."""
    x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    i = relax.Var("i", relax.TensorType((3,), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, i]):
        with builder.dataflow():
            last = builder.emit(relax.op.take(x, relax.const(-1, "int64"), 0))
            rows = builder.emit(relax.op.take(x, i, 0))
            result = builder.emit_output(relax.Tuple([last, rows]))
        builder.emit_func_output(result)
    data, indices = np.arange(12, dtype="float32").reshape(4, 3), np.array([-1, 0, 2_000_000_003])
    machine = relax.VirtualMachine(rq.compile(builder.get()), tvm.cpu())
    got = machine["main"](tvm.runtime.tensor(data), tvm.runtime.tensor(indices))
    np.testing.assert_array_equal(got[0].numpy(), data[-1])
    np.testing.assert_array_equal(got[1].numpy(), data[[3, 0, 3]])


def test_stack__is_a_concat(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
        return R.stack((x, y), axis=-1)

    @as_main
    def expected(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
        z_0 = R.expand_dims(x, axis=2)
        z_1 = R.expand_dims(y, axis=2)
        return R.concat((z_0, z_1), axis=2)

    check_prepared(before, expected)
