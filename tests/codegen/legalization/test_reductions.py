"""Reductions over nothing: numpy's results, and the ones of ONNX; no process ends."""

from __future__ import annotations

import math
import warnings

import numpy as np
import onnx
import pytest
from compiled_call import build_call, build_reduction
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from tvm import relax

import relayquant as rq


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
    node = onnx.helper.make_node(f"Reduce{name.title()}", ["x", "axes"], ["y"], keepdims=keepdims)
    model = make_onnx([node], {"x": data}, {"y": (dtype, None)}, {"axes": [-1]}, 20)
    if (name, dtype) == ("min", "bool"):
        want = np.ones((2, 1) if keepdims else 2, bool)  # the evaluator of onnx has no such case
    else:
        (want,) = ReferenceEvaluator(model).run(None, {"x": data})
    for found in run_all(build_reduction(name, (2, size), dtype, keepdims=keepdims), data):
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
        found = run_all(build_reduction(name, (2, size), dtype), data)
    for each in found:
        np.testing.assert_array_equal(each, want, strict=True)


@pytest.mark.parametrize("size", [0, "n"])
@pytest.mark.parametrize("name", ["mean", "variance", "std"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_average_of_nothing__of_integers_does_not_end_the_process(name, dtype, size):
    """numpy's division of integers by 0 gives 0; the instruction of x86 ends the process."""
    machine = rq.Executor(rq.compile(build_reduction(name, (2, size), dtype)))
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
        got, want = run_all(build_reduction("mean", (3, size), dtype), data)
        exact = np.trunc(data.astype("int64").sum(-1) / 300).astype(dtype)
        np.testing.assert_array_equal(got, exact, strict=True)
        np.testing.assert_array_equal(want, exact, strict=True)


def average_exactly(name, row):
    """A mean, variance or standard deviation of Python integers, each division rounded to 0."""

    def divide(total):
        return abs(total) // len(row) * (1 if total > 0 else -1)

    mean = divide(sum(row))
    variance = divide(sum((each - mean) ** 2 for each in row))
    return {"mean": mean, "variance": variance, "std": math.isqrt(variance)}[name] % 2**64


#: dtype -> rows whose sums have a form in it, and whose squares have a sum of up to 2^64
LARGE = {
    "uint64": [[2**32 + 2**28, 0, 7, 0], [2**32 - 1, 2**31, 1, 0], [3, 0, 1, 9]],
    "uint32": [[2**32 - 1, 0, 0, 0], [0, 2**32 - 9, 3, 2], [3, 0, 1, 9]],
    "int64": [[-(2**31), 2**31, -(2**31), 2**31 - 5], [-(2**32), 0, 1, 0], [-9, 0, 1, 3]],
    "int32": [[-(2**31), 2**31 - 1, -(2**31), 2**31 - 1], [-9, 0, 1, 3]],
}
#: Sums of 2^63 and more. Their squares have no form in any type.
LARGEST = [[2**63, 0, 0, 0], [2**63 + 8, 6, 0, 9], [2**64 - 1, 0, 0, 0], [2**62] * 3 + [5]]


@pytest.mark.parametrize("size", [4, "n"])
@pytest.mark.parametrize("dtype", LARGE)
@pytest.mark.parametrize("name", ["mean", "variance", "std"])
def test_average__of_large_integers_is_exact(name, dtype, size):
    """Also from 2^63 on, where int64 has no form for a sum of uint64, or of any squares."""
    rows = LARGE[dtype] + (LARGEST if (name, dtype) == ("mean", "uint64") else [])
    want = np.array([average_exactly(name, row) for row in rows], "uint64").astype(dtype)
    for found in run_all(build_reduction(name, (len(rows), size), dtype), np.array(rows, dtype)):
        np.testing.assert_array_equal(found, want, strict=True)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_place_of_extreme_of_nothing__is_an_error(name):
    with pytest.raises(rq.ModelError, match=r"an axis of size 0, which has no extreme value"):
        rq.compile(build_reduction(name, (2, 0), "float32"))


LIMITS = {
    "uint8": [0, 255],
    "int8": [-128, 127],
    "int64": [-(2**63), 2**63 - 1],
    "bool": [False, True],
    "float16": [-np.inf, -65504, 65504, np.inf, np.nan],
    "float32": [-np.inf, -3.4028235e38, 3.4028235e38, np.inf, np.nan],
    "float64": [-np.inf, -1.7976931348623157e308, np.inf, np.nan],
}


@pytest.mark.optimized
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_place_of_extreme__among_the_limits_of_a_type(name, dtype, axis, keepdims):
    """TVM's search begins with such a number at place -1."""
    equal = [np.full((4, 5), limit, dtype) for limit in LIMITS[dtype]]
    data = np.random.default_rng(0).choice(np.array(LIMITS[dtype], dtype), (2, 4, 5))
    data = np.concatenate([data, equal])
    for each in [data, *(block[None] for block in equal)]:
        mod = build_call(lambda x: getattr(relax.op, name)(x, axis, keepdims), each)
        want = getattr(np, name)(each, axis, keepdims=keepdims)
        for found in run_all(mod, each):
            np.testing.assert_array_equal(found, want, strict=True)


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
