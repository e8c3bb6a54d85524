"""Types that TVM has no code for: the same results as numpy's, in the type that is declared."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from compiled_call import check_exactly, run_compiled
from tvm import relax

from relayquant.codegen.wide_types import widen_types

SORTED = ["bool", "int8", "uint8", "int16", "uint32", "int32", "int64", "float32"]


def make_ties(dtype):
    """Numbers of which many are equal, 3 x 5 x 4."""
    return (
        np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 9, (3, 5, 4)).astype(dtype)
    )


@pytest.mark.parametrize("dtype", SORTED)
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_sort__up_and_down(axis, dtype):
    data = make_ties(dtype)
    up = np.sort(data, axis)
    check_exactly(lambda x: relax.op.sort(x, axis), up, data)
    check_exactly(lambda x: relax.op.sort(x, axis, True), np.flip(up, axis), data)
    order = np.argsort(data, axis, kind="stable")
    check_exactly(lambda x: relax.op.argsort(x, axis, False, "int64"), order, data)
    down = np.lexsort([-data.astype("int64")], axis)  # stable as well
    check_exactly(lambda x: relax.op.argsort(x, axis, True, "int64"), down, data)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", SORTED)
def test_topk__values_and_where_they_were(dtype, largest):
    data = make_ties(dtype)
    signed = -data.astype("int64") if largest else data.astype("int64")
    order = np.argsort(signed, -1, kind="stable")[..., :2]

    def take(result, **more):
        return lambda x: relax.op.topk(x, 2, -1, result, largest, "int64", **more)

    values = np.take_along_axis(data, order, -1)
    check_exactly(take("values"), values, data)
    check_exactly(take("indices"), order, data)
    check_exactly(lambda x: relax.TupleGetItem(take("both")(x), 0), values, data)


FUNCTIONS = {
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh",
    "atan": "arctan", "atan2": "arctan2",
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions__of_float16(name):
    data = np.linspace(1 if name == "acosh" else -1, 3 if name == "acosh" else 1, 40)
    arrays = [data.astype("float16")] * (2 if name == "atan2" else 1)
    for found in run_compiled(getattr(relax.op, name), *arrays):
        assert found.dtype == "float16"
        np.testing.assert_allclose(
            found, getattr(np, FUNCTIONS[name])(*arrays), rtol=2e-3, atol=1e-3
        )


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_reductions__of_truths(name):
    data = np.array([[1, 0, 1], [1, 1, 1], [0, 0, 0]], bool)
    dtype = "int64" if name.startswith("arg") else "bool"
    expected = getattr(np, name)(data, 1).astype(dtype)
    check_exactly(lambda x: getattr(relax.op, name)(x, 1), expected, data)


def test_widen_types__leaves_what_TVM_has_code_for():
    x, builder = relax.Var("x", relax.TensorType((4,), "float32")), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.asin(relax.op.sort(x)))
        builder.emit_func_output(result)
    mod = builder.finalize()
    tvm.ir.assert_structural_equal(widen_types(mod), mod)
