"""Fused kernels do not come before the sizes that they need."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import relax as R

import relayquant as rq
from relayquant.ir.rewrite.function import make_main


def test_chain_of_run_time_size__runs():
    # FuseOps puts exp(start) and the chain that reads it into one kernel, at the place of exp.
    builder = relax.BlockBuilder()
    start = relax.Var("start", R.Tensor((), "float32"))
    count = relax.Var("count", R.Tensor((1,), "int64"))
    size = tirx.Var("size", "int64")
    with builder.function("main", [start, count]):
        with builder.dataflow():
            first = builder.emit(R.exp(start))
            shape = builder.emit(R.tensor_to_shape(count))
            builder.match_cast(shape, relax.ShapeType([size]))
            ramp = builder.emit(R.astype(builder.emit(R.arange(0, size, 1, "int64")), "float32"))
            result = builder.emit_output(R.cos(builder.emit(R.multiply(ramp, first))))
        builder.emit_func_output(result)
    machine = relax.VirtualMachine(rq.compile(builder.get(), "llvm"), tvm.cpu())
    arrays = [np.array(0.5, "float32"), np.array([7], "int64")]
    found = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    expected = np.cos(np.arange(7, dtype="float32") * np.exp(np.float32(0.5)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_fused_size__comes_before_the_call_that_has_it():
    # FuseOps puts equal and where, from which the size follows, behind exp and add.
    builder, size, rows = relax.BlockBuilder(), tirx.Var("size", "int64"), tirx.Var("n", "int64")
    data, other = (
        relax.Var(name, relax.TensorType([extent], "float32"))
        for name, extent in (("data", 4), ("other", rows))
    )
    with builder.function("main", [data, other]):
        with builder.dataflow():
            first = builder.emit(R.exp(data))
            have = builder.emit(R.shape_to_tensor(relax.ShapeExpr([rows])))
            is_one = builder.emit(R.equal(have, R.const(1, "int64")))
            count = builder.emit(R.where(is_one, R.const([4], "int64"), have))
            builder.match_cast(builder.emit(R.tensor_to_shape(count)), relax.ShapeType([size]))
            ramp = builder.match_cast(
                builder.emit(R.arange(0, size, 1, "int64")), R.Tensor((4,), "int64")
            )
            last = builder.emit(R.subtract(have, R.const(1, "int64")))
            spread = builder.emit(R.take(other, builder.emit(R.minimum(ramp, last)), 0))
            result = builder.emit_output(R.add(first, spread))
        builder.emit_func_output(result)
    machine = relax.VirtualMachine(rq.compile(builder.get(), "llvm"), tvm.cpu())
    values = np.arange(4, dtype="float32")
    for other in (values[:1] + 3, values + 3):
        found = machine["main"](*map(tvm.runtime.tensor, [values, other])).numpy()
        np.testing.assert_allclose(found, np.exp(values) + other, rtol=1e-5)


def test_slice_of_run_time_bounds__compiles():
    # FoldConstant leaves calls of a kernel behind that the module does not have.
    data = relax.Var("data", R.Tensor((8, 4), "float32"))
    bounds = [relax.Var(name, R.Tensor((2,), "int64")) for name in ("begin", "end", "strides")]
    mod = make_main(
        [data, *bounds],
        lambda builder: R.tanh(builder.emit(R.dynamic_strided_slice(data, *bounds))),
    )
    machine = relax.VirtualMachine(rq.compile(mod, "llvm"), tvm.cpu())
    values = np.arange(32, dtype="float32").reshape(8, 4) / 32
    arrays = [values, np.array([1, 0]), np.array([5, 3]), np.array([2, 1])]
    found = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    np.testing.assert_allclose(found, np.tanh(values[1:5:2, 0:3]), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begins", "ends", "steps"),
    [([1], [None], [1]), ([-2, 1], [None, 4], [1, 1]), ([0, -3], [5, -1], [2, 1])],
    ids=str,
)
def test_slice_of_symbolic_rows__is_fused(begins, ends, steps):
    # Extents that TVM's loop nest counts anew have a choice, whose type FuseOps cannot infer.
    size, builder = tirx.Var("size", "int64"), relax.BlockBuilder()
    data = relax.Var("data", R.Tensor((size, 4), "float32"))
    last = [size + 1 if end is None else end for end in ends]
    with builder.function("main", [data]):
        with builder.dataflow():
            more = builder.emit(R.nn.pad(builder.emit(R.exp(data)), [1, 0, 0, 0]))
            part = builder.emit(R.strided_slice(more, [*range(len(begins))], begins, last, steps))
            both = builder.emit(R.concat([part, builder.emit(R.negative(part))], 1))
            result = builder.emit_output(builder.emit(R.sqrt(builder.emit(R.abs(both)))))
        builder.emit_func_output(result)
    machine = relax.VirtualMachine(rq.compile(builder.get(), "llvm"), tvm.cpu())
    for count in (1, 2, 7):
        values = np.random.default_rng(count).standard_normal((count, 4)).astype("float32")
        cut = tuple(map(slice, begins, ends, steps))
        rows = np.sqrt(np.pad(np.exp(values), ((1, 0), (0, 0)))[cut])
        found = machine["main"](tvm.runtime.tensor(values)).numpy()
        np.testing.assert_allclose(found, np.concatenate([rows, rows], 1), rtol=1e-5)


def test_size__as_a_number_beside_one_in_a_shape():
    """FuseTIR fails on a function that has both."""
    x, y = (
        relax.Var(f"x_{name}", R.Tensor((tirx.Var(name, "int64"),), "float32")) for name in "nm"
    )

    def emit(builder):
        ramp = builder.emit(R.arange(0, y.ty.shape.values[0], 1, "int64"))
        count = builder.emit(R.shape_to_tensor(x.ty.shape))
        return builder.emit(R.multiply(ramp, count))

    machine = rq.Executor(rq.compile(make_main([x, y], emit)))
    (found,) = machine.run("main", [np.zeros(3, "float32"), np.zeros(4, "float32")])
    np.testing.assert_array_equal(found, [0, 3, 6, 9])
