"""Types that TVM has no code for: the same results as numpy's, in the type that is declared."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from compiled_call import check_exactly, run_compiled
from tvm import relax

from relayquant.codegen.rewrites.type_promotion import widen_types
from relayquant.ir.rewrite.function import make_main

SORTED = ["bool", "int8", "uint8", "int16", "uint32", "int32", "int64", "float32"]


def make_ties(dtype):
    """Numbers of which many are equal, 3 x 5 x 4."""
    return (
        np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 9, (3, 5, 4)).astype(dtype)
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [*SORTED, "uint64"])
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


@pytest.mark.sample(4)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [*SORTED, "uint64"])
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


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("descending", [False, True])
def test_sort__of_numbers_among_what_is_none(descending, dtype):
    """NaN is more than all else, -0 equal to 0, as PyTorch has them in a stable order."""
    torch = pytest.importorskip("torch")
    hard = [np.nan, 0, -0.0, np.inf, -np.inf, -np.nan, 1, -1, np.nan, 6e-5, -6e-5, 0]
    data = np.random.default_rng(0).choice(hard, (4, 40)).astype(dtype)
    sort_up = torch.sort(torch.tensor(data), stable=True, descending=descending)
    values, order = (each.numpy() for each in sort_up)
    check_exactly(lambda x: relax.op.sort(x, -1, descending), values, data)
    check_exactly(lambda x: relax.op.argsort(x, -1, descending, "int64"), order, data)

    def take(result):
        return lambda x: relax.op.topk(x, 7, -1, result, descending, "int64")

    for k, (kind, expected) in enumerate({"values": values, "indices": order}.items()):
        check_exactly(take(kind), expected[:, :7], data)
        check_exactly(lambda x, k=k: relax.TupleGetItem(take("both")(x), k), expected[:, :7], data)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "uint64"])
def test_sort__of_the_largest_and_smallest(dtype):
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    data = np.array([most, 1, least, most // 2, most // 2 + 1, least, most - 1], dtype)
    check_exactly(lambda x: relax.op.sort(x), np.sort(data), data)
    order = np.argsort(data, kind="stable")
    check_exactly(lambda x: relax.op.argsort(x, -1, False, "int64"), order, data)
    check_exactly(lambda x: relax.op.topk(x, 3, -1, "values"), np.sort(data)[:-4:-1], data)


@pytest.mark.parametrize("count", [3, 255, 256, 300])
def test_sums__of_truths(count):
    """As many as a small type has no number for: their sum is true, and the mean of all is."""
    data = np.stack([np.ones(count, bool), np.zeros(count, bool), np.arange(count) == 1])
    check_exactly(lambda x: relax.op.cumsum(x, 1), np.cumsum(data, 1) > 0, data)
    check_exactly(lambda x: relax.op.cumsum(x, 1, "int64"), np.cumsum(data, 1), data)
    for name, function in (("mean", np.mean), ("std", np.std), ("variance", np.var)):
        check_exactly(
            lambda x, name=name: getattr(relax.op, name)(x, 1), function(data, 1) != 0, data
        )


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
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    mod = make_main([x], lambda _: relax.op.asin(relax.op.max(x)))
    tvm.ir.assert_structural_equal(widen_types(mod), mod)
