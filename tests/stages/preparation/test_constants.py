"""Constant subgraphs and shape computations."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import as_main, build_model
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.stages.preparation import prepare_module

RNG = np.random.default_rng(0)


def test_weight_transpose__folded(check_prepared):
    array = RNG.standard_normal((4, 3)).astype("float32")
    weight, turned = relax.const(array), relax.const(np.ascontiguousarray(array.T))

    @as_main
    def before(x: R.Tensor(("n", 3), "float32")):
        w = R.permute_dims(weight)
        return R.matmul(x, w)

    @as_main
    def expected(x: R.Tensor(("n", 3), "float32")):
        return R.matmul(x, turned)

    check_prepared(before, expected)


def test_constant_chain__folded(check_prepared):
    four = relax.const(np.array([4.0, 9.0], "float32"))
    folded = relax.const(np.array([5.0, 7.0], "float32"))

    @as_main
    def before(x: R.Tensor((2,), "float32")):
        root = R.sqrt(four)
        double = R.add(root, root)
        shifted = R.add(double, R.const(1.0, "float32"))
        return R.multiply(x, shifted)

    @as_main
    def expected(x: R.Tensor((2,), "float32")):
        return R.multiply(x, folded)

    check_prepared(before, expected)


def test_split__of_a_constant_is_folded(check_prepared):
    whole = relax.const(np.float32([[1, 2], [3, 4]]))
    second = relax.const(np.float32([[2], [4]]))

    @as_main
    def before(x: R.Tensor((2, 1), "float32")):
        parts = R.split(whole, 2, 1)
        return R.multiply(x, parts[1])

    @as_main
    def expected(x: R.Tensor((2, 1), "float32")):
        return R.multiply(x, second)

    check_prepared(before, expected)


def test_constant_tuple__is_an_output(check_same_numbers):
    """Nothing may be lost where the tuple itself is returned."""

    def body(emit, x):
        parts = emit("parts", R.split(relax.const(np.float32([[1, 2], [3, 4]])), 2, 1))
        return emit("y", relax.Tuple([emit("part", relax.TupleGetItem(parts, 1)), x]))

    check_same_numbers(build_model(body, (2, 1)), np.ones((2, 1), "float32"))


def test_standardized_weight__is_quantized():
    """NFNets export a weight as a batch norm in training, over a constant: PyTorch's numbers."""
    torch = pytest.importorskip("torch")
    weight = RNG.standard_normal((8, 3, 3, 3)).astype("float32")
    gain = RNG.uniform(0.5, 2, 8).astype("float32")

    def body(emit, x):
        flat = relax.const(weight.reshape(1, 8, 27))
        zeros, ones = (relax.const(value(8, "float32")) for value in (np.zeros, np.ones))
        norm = R.nn.batch_norm(
            flat, relax.const(gain), zeros, zeros, ones, axis=1, epsilon=1e-6, training=True
        )
        standard = emit("standard", relax.TupleGetItem(emit("norm", norm), 0))
        return emit("y", R.nn.conv2d(x, emit("w", R.reshape(standard, (8, 3, 3, 3)))))

    mod = build_model(body, (1, 3, 16, 16))
    x = RNG.standard_normal((1, 3, 16, 16)).astype("float32")
    norm = torch.nn.functional.batch_norm(
        torch.tensor(weight.reshape(1, 8, 27)), None, None, torch.tensor(gain), None, True, 0, 1e-6
    )
    expected = torch.nn.functional.conv2d(torch.tensor(x), norm.reshape(8, 3, 3, 3)).numpy()
    (result,) = rq.reference.run(prepare_module(mod), [x])
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    qmod = rq.quantize(mod, None, [{"x": x}] * 4, effort="fast")
    rows = rq.ledger(qmod).to_dict()["operators"]
    assert [row["op"] for row in rows if row["quantized"]] == ["nn.conv2d"]
    assert all(row["quantized"] for row in rows)


def test_arange__folded(check_prepared):
    """Without operands, and with what is computed from it."""
    folded = relax.const(np.array([0.0, 1.0, 4.0], "float32"))

    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        places = R.arange(0, 3, 1, dtype="float32")
        squares = R.multiply(places, places)
        return R.multiply(x, squares)

    @as_main
    def expected(x: R.Tensor((2, 3), "float32")):
        return R.multiply(x, folded)

    check_prepared(before, expected)


def test_calls_of_libraries__folded(check_prepared):
    """What TVM's own folding leaves: running sums, sorted values."""
    counts = relax.const(np.array([3.0, 1.0, 2.0], "float32"))
    folded = relax.const(np.array([1.0, 3.0, 6.0], "float32"))

    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        ordered = R.sort(counts, axis=0)
        sums = R.cumsum(ordered, axis=0)
        return R.multiply(x, sums)

    @as_main
    def expected(x: R.Tensor((2, 3), "float32")):
        return R.multiply(x, folded)

    check_prepared(before, expected)


def test_dequantize_of_constant__stays(check_prepared):
    weight = relax.const(RNG.integers(-5, 5, (3, 3)).astype("int8"))

    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        w = R.dequantize(weight, R.const(0.5, "float32"), R.const(0, "int8"), axis=-1)
        return R.matmul(x, w)

    @as_main
    def expected(x: R.Tensor((2, 3), "float32")):
        w = R.qnn.dequantize(weight, R.const(0.5, "float32"), R.const(0, "int32"))
        return R.matmul(x, w)

    check_prepared(before, expected)


def divide_by_size(axis):
    """main(x) of x over its size along an axis."""
    index = relax.const(np.array(axis), "int64")

    @as_main
    def divided(x: R.Tensor(("n", 3), "float32")):
        d = R.take(R.shape_to_tensor(R.shape_of(x)), index, axis=0)
        return R.divide(x, R.astype(d, "float32"))

    return divided


def test_shape_arithmetic__folded(check_prepared):
    @as_main
    def expected(x: R.Tensor(("n", 3), "float32")):
        return R.divide(x, R.const(3.0, "float32"))

    check_prepared(divide_by_size(1), expected)


def test_symbolic_size__stays_computed(check_same_numbers):
    check_same_numbers(divide_by_size(0), np.ones((5, 3), "float32"))


def test_large_fill__stays(check_prepared):
    @as_main
    def before(x: R.Tensor((1,), "float32")):
        zeros = R.zeros(R.shape([2048, 1024]), "float32")
        return R.add(x, zeros)

    check_prepared(before, before)


def test_constant_output__keeps_its_name(check_same_numbers):
    two = relax.const(np.array([2.0], "float32"))

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1,), "float32")):
            with R.dataflow():
                y = R.exp(two)
                z = R.exp(x)
                R.output(y, z)
            return (y, z)

    prepared = check_same_numbers(Before, np.ones(1, "float32"))
    names = {binding.var.name for binding in prepared["main"].body.blocks[0].bindings}
    assert names == {"y", "z"}


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_cast__of_a_constant_to_less_than_a_byte(dtype):
    """numpy has no such arrays: the operator stays, and is compiled."""
    numbers = relax.const(np.float32([1.5, 2.2, 3, 7]))

    @as_main
    def mod(x: R.Tensor((4,), "float32")):
        return R.add(x, R.astype(R.astype(numbers, dtype), "float32"))

    (found,) = rq.Executor(rq.compile(prepare_module(mod))).run("main", [np.zeros(4, "float32")])
    np.testing.assert_array_equal(found, [1, 2, 3, 7])
