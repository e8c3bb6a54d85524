"""matmul with a constant weight, and reshapes around it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import as_main
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relayquant as rq
from relayquant.ir.rewrite.expressions import list_bindings, op_name
from relayquant.ir.rewrite.function import make_main
from relayquant.stages.preparation import prepare_module

RNG = np.random.default_rng(3)
W = relax.const(RNG.standard_normal((3, 4)).astype("float32"))
B = relax.const(RNG.standard_normal(4).astype("float32"))


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


def list_operators(mod: tvm.IRModule) -> list[str]:
    return [op_name(binding.value).removeprefix("relax.") for binding in list_bindings(mod["main"])]


@pytest.mark.slow
def test_torch_linear__without_reshapes(check_prepared, check_same_numbers):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 5, 3), "float32")):
            n = T.int64()
            with R.dataflow():
                flat = R.reshape(x, R.shape([n * 5, 3]))
                m = R.matmul(flat, W)
                a = R.add(B, m)
                y = R.reshape(a, R.shape([n, 5, 4]))
                p = R.matmul(flat, W)
                z = R.reshape(p, R.shape([n, 5, 4]))
                R.output(y, z)
            return (y, z)

    @as_main
    def expected(x: R.Tensor(("n", 5, 3), "float32")):
        m = R.matmul(x, W)
        y = R.add(m, B)
        z = R.matmul(x, W)
        return y, z

    check_prepared(Before, expected)
    check_same_numbers(Before, draw(2, 5, 3))


def test_reshape_that_mixes_rows__stays(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3, 5), "float32"), v: R.Tensor((2, 5, 3), "float32")):
        mixed = R.reshape(x, R.shape([10, 3]))
        m = R.matmul(mixed, W)
        y = R.reshape(m, R.shape([2, 5, 4]))
        flat = R.reshape(v, R.shape([10, 3]))
        p = R.matmul(flat, W)
        z = R.reshape(p, R.shape([5, 2, 4]))
        return y, z

    check_prepared(before, before)


def test_flat_result_used_as_well__stays(check_prepared):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 5, 3), "float32")):
            with R.dataflow():
                flat = R.reshape(x, R.shape([10, 3]))
                m = R.matmul(flat, W)
                y = R.reshape(m, R.shape([2, 5, 4]))
                R.output(m, y)
            return (m, y)

    check_prepared(Before, Before)


def test_reshape_of_reshape__merged(check_prepared):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 6), "float32")):
            with R.dataflow():
                a = R.reshape(x, R.shape([12]))
                b = R.reshape(a, R.shape([3, 4]))
                c = R.reshape(x, R.shape([4, 3]))
                d = R.reshape(c, R.shape([6, 2]))
                R.output(b, c, d)
            return (b, c, d)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 6), "float32")):
            with R.dataflow():
                b = R.reshape(x, R.shape([3, 4]))
                c = R.reshape(x, R.shape([4, 3]))
                d = R.reshape(c, R.shape([6, 2]))
                R.output(b, c, d)
            return (b, c, d)

    check_prepared(Before, Expected)


def test_weight_with_unit_batch__squeezed(check_prepared, check_same_numbers):
    array = RNG.standard_normal((1, 3, 4)).astype("float32")
    weight, squeezed = relax.const(array), relax.const(array[0])

    @as_main
    def before(x: R.Tensor((2, 5, 3), "float32"), z: R.Tensor((5, 3), "float32")):
        a = R.matmul(x, weight)
        b = R.matmul(z, weight)
        return a, b

    @as_main
    def expected(x: R.Tensor((2, 5, 3), "float32"), z: R.Tensor((5, 3), "float32")):
        a = R.matmul(x, squeezed)
        b = R.matmul(z, weight)
        return a, b

    check_prepared(before, expected)
    check_same_numbers(before, draw(2, 5, 3), draw(5, 3))


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 3, 5, 4), (2, 1, 5, 4), (5, 4)], ids=str)
def test_stack_of_weights__is_split(shape, check_same_numbers):
    """A product by each matrix; each runs on integers, near the float product."""
    stack, x = draw(3, 4, 6), draw(*shape)
    data = relax.Var("x", relax.TensorType(shape, "float32"))
    before = make_main([data], lambda _: relax.op.matmul(data, relax.const(stack)))
    prepared = check_same_numbers(before, x)
    assert prepared.script().count("R.matmul") == 3
    qmod = rq.quantize(before, None, [x], strict=True)
    rows = [row for row in rq.ledger(qmod).rows if row.op == "matmul"]
    assert [row.pattern.split("_")[0] for row in rows] == ["dense"] * 3
    found, expected = rq.reference.run(qmod, [x])[0], x.astype("float64") @ stack
    assert found.shape == expected.shape
    assert np.square(found - expected).mean() < 1e-3 * np.square(expected).mean()


def test_stack_of_weights__stays_where_the_data_has_any_number(check_prepared):
    """Of matrices: how many products there are is known when it runs."""
    stack = relax.const(draw(3, 4, 6))

    @as_main
    def before(x: R.Tensor(("n", 5, 4), "float32")):
        return R.matmul(x, stack)

    check_prepared(before, before)


@pytest.mark.slow
def test_bias_behind_squeeze__moves_to_the_convolution(check_prepared, check_same_numbers):
    kernel, bias = relax.const(draw(6, 3, 5, 1)), draw(1, 6, 1)
    inside = relax.const(bias[..., None])
    outside = relax.const(bias)

    @as_main
    def before(x: R.Tensor(("n", 3, 9, 1), "float32")):
        c = R.nn.conv2d(x, kernel)
        s = R.squeeze(c, axis=[-1])
        return R.add(outside, s)

    @as_main
    def expected(x: R.Tensor(("n", 3, 9, 1), "float32")):
        c = R.nn.conv2d(x, kernel)
        b = R.add(c, inside)
        return R.squeeze(b, axis=[3])

    check_prepared(before, expected)
    check_same_numbers(before, draw(2, 3, 9, 1))


def test_bias_behind_squeeze__stays_when_the_convolution_is_read_twice(check_prepared):
    kernel, bias = relax.const(draw(6, 3, 5, 1)), relax.const(draw(6, 1))

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3, 9, 1), "float32")):
            with R.dataflow():
                c = R.nn.conv2d(x, kernel)
                s = R.squeeze(c, axis=[3])
                y = R.add(s, bias)
                R.output(y, s)
            return (y, s)

    check_prepared(Before, Before)


REPEATED = relax.const(np.repeat(W.value.numpy()[None], 5, axis=0))


def test_repeated_weight__once(check_prepared, check_same_numbers):
    """PyTorch repeats a weight for each sample."""

    @as_main
    def before(x: R.Tensor((5, 2, 3), "float32")):
        return R.matmul(x, REPEATED)

    @as_main
    def expected(x: R.Tensor((5, 2, 3), "float32")):
        return R.matmul(x, W)

    check_prepared(before, expected)
    check_same_numbers(before, draw(5, 2, 3))


def build_free(*shapes: tuple[int, ...], emit) -> tvm.IRModule:
    """main(x ("n", *shape), ...) of what `emit(n, builder, *inputs)` returns."""
    n = tvm.tirx.Var("n", "int64")
    inputs = [
        relax.Var(f"x{i}", relax.TensorType([n, *shape], "float32"))
        for i, shape in enumerate(shapes)
    ]
    return make_main(inputs, lambda builder: emit(n, builder, *inputs))


def test_weight_repeated_at_run_time__once(check_prepared, check_same_numbers):
    """PyTorch repeats a weight for each sample, of any number."""

    def emit(n, builder, x):
        one = builder.emit(relax.op.expand_dims(W, [0]))
        copies = builder.emit(relax.op.broadcast_to(one, relax.ShapeExpr([n, 3, 4])))
        views = builder.emit(relax.op.reshape(copies, relax.ShapeExpr([n, 3, 4])))
        return relax.op.matmul(x, views)

    before = build_free((2, 3), emit=emit)
    check_prepared(before, build_free((2, 3), emit=lambda n, builder, x: relax.op.matmul(x, W)))
    check_same_numbers(before, draw(5, 2, 3))


def test_weight_repeated_at_run_time_on_the_left__comes_second(check_same_numbers):
    def emit(n, builder, x):
        copies = builder.emit(relax.op.broadcast_to(W, relax.ShapeExpr([n, 3, 4])))
        return relax.op.matmul(copies, x)

    before = build_free((4, 3), emit=emit)
    assert "broadcast_to" not in list_operators(prepare_module(before))
    check_same_numbers(before, draw(5, 4, 3))


def test_weight_repeated_at_run_time__stays_where_it_makes_products():
    """The weights say how many products there are, and the data does not."""

    def emit(n, builder, like):
        data = relax.const(draw(1, 2, 3))
        copies = relax.op.broadcast_to(W, relax.ShapeExpr([n, 3, 4]))
        return relax.op.matmul(builder.emit(relax.op.abs(data)), builder.emit(copies))

    assert "broadcast_to" in list_operators(prepare_module(build_free((1,), emit=emit)))


def test_matrix_of_a_repeated_stack__stays(check_same_numbers):
    """Two matrices that are repeated are not one."""
    stack = relax.const(draw(2, 1, 3, 4))

    @as_main
    def before(x: R.Tensor((2, 5, 2, 3), "float32")):
        return R.matmul(x, R.broadcast_to(stack, R.shape([2, 5, 3, 4])))

    check_same_numbers(before, draw(2, 5, 2, 3))


def test_repeated_weight__stays_where_it_makes_products():
    """One matrix of data and five equal weights are five products."""

    @as_main
    def before(x: R.Tensor((1, 2, 3), "float32")):
        return R.matmul(x, REPEATED)

    assert tuple(prepare_module(before)["main"].ret_ty.shape.values) == (5, 2, 4)


@pytest.mark.slow
def test_weight_on_the_left__comes_second(check_prepared, check_same_numbers):
    column = relax.const(RNG.standard_normal((3, 1)).astype("float32"))
    turned = relax.const(np.ascontiguousarray(W.value.numpy().T))
    row = relax.const(column.value.numpy().ravel())

    @as_main
    def before(x: R.Tensor(("n", 4, 5), "float32")):
        m = R.matmul(W, x)
        return R.add(m, column)

    @as_main
    def expected(x: R.Tensor(("n", 4, 5), "float32")):
        data = R.permute_dims(x, axes=[0, 2, 1])
        m = R.matmul(data, turned)
        biased = R.add(m, row)
        return R.permute_dims(biased, axes=[0, 2, 1])

    check_prepared(before, expected)
    check_same_numbers(before, draw(2, 4, 5))


def test_bias_behind_a_transpose__stays_where_it_is_none_per_unit(check_prepared):
    along = relax.const(RNG.standard_normal(5).astype("float32"))

    @as_main
    def before(x: R.Tensor((2, 5, 3), "float32")):
        m = R.matmul(x, W)
        turned = R.permute_dims(m, axes=[0, 2, 1])
        return R.add(turned, along)

    check_prepared(before, before)


@pytest.mark.slow
def test_vectors__are_matrices_of_one_column_or_row(check_prepared, check_same_numbers):
    column = relax.const(B.value.numpy().reshape(4, 1))

    @as_main
    def before(
        x: R.Tensor((2, 3, 4), "float32"),
        v: R.Tensor((4,), "float32"),
        u: R.Tensor((3,), "float32"),
    ):
        a = R.matmul(x, B)
        b = R.matmul(x, v)
        c = R.matmul(u, x)
        d = R.matmul(v, v)
        e = R.matmul(u, W)
        return a, b, c, d, e

    @as_main
    def expected(
        x: R.Tensor((2, 3, 4), "float32"),
        v: R.Tensor((4,), "float32"),
        u: R.Tensor((3,), "float32"),
    ):
        ap = R.matmul(x, column)
        a = R.squeeze(ap, axis=[2])
        bm = R.expand_dims(v, axis=[1])
        bp = R.matmul(x, bm)
        b = R.squeeze(bp, axis=[2])
        cm = R.expand_dims(u, axis=[0])
        cp = R.matmul(cm, x)
        c = R.squeeze(cp, axis=[1])
        dm = R.expand_dims(v, axis=[0])
        dn = R.expand_dims(v, axis=[1])
        dp = R.matmul(dm, dn)
        d = R.squeeze(dp, axis=[0, 1])
        e = R.matmul(u, W)
        return a, b, c, d, e

    check_prepared(before, expected)
    check_same_numbers(before, draw(2, 3, 4), draw(4), draw(3))
