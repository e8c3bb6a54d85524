"""Reductions over nothing: numpy's results, and the ones of ONNX; no process ends."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from tvm import relax, tirx

import relayquant as rq


def build(name, shape, dtype, **options):
    """A module of one operator on its last axis. Sizes that are texts are symbolic."""
    extents = [tirx.Var(each, "int64") if isinstance(each, str) else each for each in shape]
    x, builder = relax.Var("x", relax.TensorType(extents, dtype)), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(getattr(relax.op, name)(x, -1, **options))
        builder.emit_func_output(y)
    return builder.finalize()


def run_all(mod, data):
    """(compiled, reference)"""
    (got,) = rq.Executor(rq.compile(mod)).run("main", [data])
    (want,) = rq.reference.run(mod, [data])
    return np.asarray(got), np.asarray(want)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("size", [0, "n"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "int64", "bool"])
@pytest.mark.parametrize("name", ["max", "min"])
def test_extreme_of_nothing__is_its_start(name, dtype, size, keepdims):
    """onnx: "Reduction over an empty set of values yields minus infinity (if supported by the
    datatype) or the minimum value of the data type otherwise."
    """
    data = np.ones((2, 0), dtype)
    element = onnx.helper.np_dtype_to_tensor_dtype(data.dtype)
    node = onnx.helper.make_node(f"Reduce{name.title()}", ["x", "axes"], ["y"], keepdims=keepdims)
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info("x", element, data.shape)],
        [onnx.helper.make_tensor_value_info("y", element, None)],
        [onnx.numpy_helper.from_array(np.array([-1]), "axes")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])
    if (name, dtype) == ("min", "bool"):
        want = np.ones((2, 1) if keepdims else 2, bool)  # the evaluator of onnx has no such case
    else:
        (want,) = ReferenceEvaluator(model).run(None, {"x": data})
    for found in run_all(build(name, (2, size), dtype, keepdims=keepdims), data):
        np.testing.assert_array_equal(found, want, strict=True)


@pytest.mark.parametrize("size", [0, "n"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bool"])
@pytest.mark.parametrize("name", ["mean", "variance", "std"])
def test_average_of_nothing__is_nan(name, dtype, size):
    data = np.ones((2, 0), dtype)
    compute = {"mean": np.mean, "variance": np.var, "std": np.std}[name]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of the mean of nothing
        want = compute(data, -1).astype(dtype)
        found = run_all(build(name, (2, size), dtype), data)
    for each in found:
        np.testing.assert_array_equal(each, want, strict=True)


@pytest.mark.parametrize("size", [0, "n"])
@pytest.mark.parametrize("name", ["mean", "variance", "std"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_average_of_nothing__of_integers_does_not_end_the_process(name, dtype, size):
    """numpy's division of integers by 0 gives 0; the instruction of x86 ends the process."""
    machine = rq.Executor(rq.compile(build(name, (2, size), dtype)))
    (got,) = machine.run("main", [np.ones((2, 0), dtype)])
    np.testing.assert_array_equal(got, np.zeros(2, dtype), strict=True)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_average__of_integers_is_truncated(dtype):
    """The exact sum of a few small numbers, divided toward zero, also where the count has no form
    in the dtype.
    """
    data = np.random.default_rng(0).integers(0, 2, (3, 300)).astype(dtype)
    data[:, :200] = 0
    if not dtype.startswith("u"):
        data[1] = -data[1]
        data[2, 0] = -100
    for size in (300, "n"):
        got, want = run_all(build("mean", (3, size), dtype), data)
        exact = np.trunc(data.astype("int64").sum(-1) / 300).astype(dtype)
        np.testing.assert_array_equal(got, exact, strict=True)
        np.testing.assert_array_equal(want, exact, strict=True)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_place_of_extreme_of_nothing__is_an_error(name):
    with pytest.raises(rq.ModelError, match=r"an axis of size 0, which has no extreme value"):
        rq.compile(build(name, (2, 0), "float32"))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "float32"])
@pytest.mark.parametrize("name", ["sign", "negative"])
def test_sign__of_unsigned_integers(name, dtype):
    x, builder = relax.Var("x", relax.TensorType((5,), dtype)), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(getattr(relax.op, name)(x))
        builder.emit_func_output(y)
    data = np.array([0, 1, 2, 127, 0], dtype)
    if dtype.startswith("u"):
        data[-1] = np.iinfo(dtype).max
    for each in run_all(builder.finalize(), data):
        np.testing.assert_array_equal(each, getattr(np, name)(data), strict=True)
