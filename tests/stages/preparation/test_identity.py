"""Values that change nothing."""

from __future__ import annotations

import numpy as np
from float_models import as_main, build_model
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relayquant.stages.preparation import prepare_module


def test_aliases_tuples_dead_code__removed(check_prepared):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                unused = R.exp(x)  # noqa: F841
                a = R.nn.relu(x)
                b = a
                pair = (b, x)
                c = pair[0]
                one = R.concat((c,), axis=0)
                y = R.tanh(one)
                gv = y
                R.output(gv)
            return gv

    @as_main
    def expected(x: R.Tensor((2, 3), "float32")):
        a = R.nn.relu(x)
        return R.tanh(a)

    check_prepared(Before, expected)


def test_no_ops__removed(check_prepared):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 3, 4), "float32")):
            n = T.int64()
            with R.dataflow():
                a = R.reshape(x, R.shape([n, 3, 4]))
                b = R.nn.pad(a, pad_width=[0, 0, 0, 0, 0, 0], pad_value=0.0)
                c = R.strided_slice(b, axes=[1], begin=[0], end=[3], strides=[1])
                d = R.permute_dims(c, axes=[0, 1, 2])
                whole = R.split(d, indices_or_sections=1, axis=1)
                e = R.astype(whole, "float32")
                f = R.nn.dropout(e, rate=0.3)
                g = f[0]
                h = R.add(g, R.const(0.0, "float32"))
                i = R.multiply(h, R.const(1.0, "float32"))
                y = R.tanh(i)
                R.output(y)
            return y

    @as_main
    def expected(x: R.Tensor(("n", 3, 4), "float32")):
        return R.tanh(x)

    check_prepared(Before, expected)


def test_what_reorders_or_changes__stays(check_prepared):
    @as_main
    def before(x: R.Tensor((3, 3), "float32")):
        a = R.permute_dims(x, axes=[1, 0])
        b = R.strided_slice(a, axes=[0], begin=[2], end=[-4], strides=[-1])
        c = R.add(b, R.const([[0.0, 0.0, 1e-3]], "float32"))
        d = R.reshape(c, R.shape([9]))
        return R.astype(d, "float16")

    check_prepared(before, before)


def test_broadcasting_zero__stays(check_prepared):
    zeros = R.const(np.zeros((2, 3), "float32"))

    @as_main
    def before(x: R.Tensor((1, 3), "float32")):
        return R.add(x, zeros)

    check_prepared(before, before)


def test_dropout_mask_used__stays(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        f = R.nn.dropout(x, rate=0.3)
        return f[1]

    check_prepared(before, before)


def test_identity_of_a_parameter__keeps_its_name():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                y = R.reshape(x, R.shape([2, 3]))
                z = R.add(x, R.const(0.0, "float32"))
                R.output(y, z)
            return (y, z)

    prepared = prepare_module(Before)
    names = [binding.var.name for binding in prepared["main"].body.blocks[0].bindings]
    assert names == ["y", "z"]


def test_identity_output__keeps_the_output_name(check_prepared):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                logits = R.reshape(a, R.shape([2, 3]))
                R.output(logits)
            return logits

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                logits = R.nn.relu(x)
                R.output(logits)
            return logits

    prepared = check_prepared(Before, Expected)
    assert prepared["main"].body.body.name == "logits"


def test_split__slices_where_the_axis_is_known(check_prepared, check_same_numbers):
    @as_main
    def before(x: R.Tensor((2, 7), "float32")):
        parts = R.split(x, [2, 5], axis=-1)
        a = parts[0]
        b = parts[2]
        return R.add(a, b)

    @as_main
    def expected(x: R.Tensor((2, 7), "float32")):
        a = R.strided_slice(x, axes=[1], begin=[0], end=[2])
        b = R.strided_slice(x, axes=[1], begin=[5], end=[7])
        return R.add(a, b)

    check_prepared(before, expected)
    check_same_numbers(before, np.arange(14, dtype="float32").reshape(2, 7))


def test_split__symbolic_axis_stays():
    @as_main
    def before(x: R.Tensor(("n", 4), "float32")):
        parts = R.split(x, 2, axis=0)
        return parts[0]

    prepared = prepare_module(before)
    assert "R.split" in prepared.script()


def test_squeeze__axes_from_the_front(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 1, 3), "float32")):
        return R.squeeze(x, axis=[-2])

    @as_main
    def expected(x: R.Tensor((2, 1, 3), "float32")):
        return R.squeeze(x, axis=[1])

    check_prepared(before, expected)


def test_permute_dims__axes_from_the_front(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 4, 3), "float32")):
        return R.permute_dims(x, axes=[0, -1, 1])

    @as_main
    def expected(x: R.Tensor((2, 4, 3), "float32")):
        return R.permute_dims(x, axes=[0, 2, 1])

    check_prepared(before, expected)


def test_dequantized_constant_comes_second(check_prepared):
    integers = relax.const(np.array([3, -5], "int8"))

    @as_main
    def before(x: R.Tensor((4, 2), "float32")):
        c = R.qnn.dequantize(integers, R.const(0.5, "float32"), R.const(0, "int32"))
        y = R.multiply(c, x)
        z = R.subtract(c, x)
        return y, z

    @as_main
    def expected(x: R.Tensor((4, 2), "float32")):
        c = R.qnn.dequantize(integers, R.const(0.5, "float32"), R.const(0, "int32"))
        y = R.multiply(x, c)
        z = R.subtract(c, x)
        return y, z

    check_prepared(before, expected)


def test_concat__leaves_out_what_has_no_elements(check_prepared):
    """The state of a streaming model before its first step."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 3), "float32"), e: R.Tensor((0, 3), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                one = R.concat((e, a, e), axis=0)
                two = R.concat((a, e, one), axis=0)
                nothing = R.concat((e, e), axis=0)
                gv = (two, nothing)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((4, 3), "float32"), e: R.Tensor((0, 3), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                two = R.concat((a, a), axis=0)
                nothing = e
                R.output(two, nothing)
            return (two, nothing)

    check_prepared(Before, Expected)


def test_concat__of_empty_values_along_another_axis_has_its_shape():
    def body(emit, x):
        return emit("y", op.concat([x, x], 1))

    mod = prepare_module(build_model(body, (0, 3)))
    assert [int(size) for size in mod["main"].ret_ty.shape] == [0, 6]


def test_where__of_one_side_or_one_condition(check_same_numbers):
    """A condition that is constant chooses; the mask that two layers prepare is prepared once."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), mask: R.Tensor((2, 3), "bool")):
            with R.dataflow():
                yes = R.where(R.const([True, True, True]), x, R.const(0.0))
                wide = R.where(R.const([[True], [True]]), R.const(1.0), yes)
                no = R.where(R.const(False), x, yes)
                first = R.where(mask, R.const(0.0), R.const(-9.0))
                second = R.where(mask, R.const(0.0), R.const(-9.0))
                other = R.where(mask, R.const(0.0), R.const(-8.0))
                a = R.multiply(R.add(no, first), wide)
                b = R.subtract(R.subtract(a, second), other)
                R.output(b)
            return b

    x = np.arange(6, dtype="float32").reshape(2, 3)
    prepared = check_same_numbers(Before, x, x > 2)
    assert prepared.script().count("R.where(") == 3  # wide, first, other


def test_where__equal_numbers_of_other_types_or_signs_stay_apart(check_same_numbers):
    @I.ir_module
    class Before:
        @R.function
        def main(mask: R.Tensor((2, 3), "bool"), x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                real = R.where(mask, R.const(1.0), R.const(0.0))
                whole = R.where(mask, R.const(1, "int32"), R.const(0, "int32"))
                signed = R.where(mask, R.const(1.0), R.const(-0.0))
                a = R.divide(x, real)
                b = R.divide(x, signed)
                c = R.add(whole, whole)
                R.output(a, b, c)
            return a, b, c

    x = np.arange(6, dtype="float32").reshape(2, 3) + 1
    prepared = check_same_numbers(Before, x > 3, x)
    assert prepared.script().count("R.where(") == 3
