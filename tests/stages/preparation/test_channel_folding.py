"""Batch norm, bias and per-channel scales behind conv and matmul."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from drawing import count_examples
from float_models import as_main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.ir.rewrite.graph import call_name
from relayquant.stages.preparation import prepare_module

RNG = np.random.default_rng(7)


def const(array: np.ndarray, dtype: str = "float32") -> relax.Expr:
    return relax.const(np.asarray(array, dtype), dtype)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


WEIGHT = draw(4, 3, 3, 3)
GAMMA, BETA, MEAN = draw(4), draw(4), draw(4)
VARIANCE = np.abs(draw(4)) + 0.1
BIAS = draw(4)
#: Scale and shift of the batch norm above in float64, written out here on their own.
SCALE = GAMMA.astype("float64") / np.sqrt(VARIANCE.astype("float64") + 1e-5)
SHIFT = BETA - MEAN * SCALE
W, G, B, M, V = (const(a) for a in (WEIGHT, GAMMA, BETA, MEAN, VARIANCE))
NCHW = (1, 4, 1, 1)
FOLDED = const(WEIGHT * SCALE[:, None, None, None])


@I.ir_module
class ConvAdd:
    """What conv + batch norm becomes."""

    @R.function
    def main(x: R.Tensor(("n", 3, 8, 8), "float32")):
        with R.dataflow():
            c = R.nn.conv2d(x, FOLDED)
            y = R.add(c, const(SHIFT.reshape(NCHW)))
            R.output(y)
        return y


def test_batch_norm__folded_into_conv(check_prepared):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 3, 8, 8), "float32")):
            with R.dataflow():
                c = R.nn.conv2d(x, W)
                n = R.nn.batch_norm(c, G, B, M, V, axis=1, epsilon=1e-5, training=False)
                y = n[0]
                R.output(y)
            return y

    prepared = check_prepared(Before, ConvAdd)
    names = [binding.var.name for binding in prepared["main"].body.blocks[0].bindings]
    assert names == ["c.folded", "y"]


def test_batch_norm_behind_bias__folded(check_prepared):
    bias = const(BIAS.reshape(NCHW))
    total = const((BIAS.astype("float64") * SCALE + SHIFT).reshape(NCHW))

    @as_main
    def before(x: R.Tensor(("n", 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, W)
        b = R.add(c, bias)
        n = R.nn.batch_norm(b, G, B, M, V, axis=1, epsilon=1e-5, training=False)
        return n[0]

    @as_main
    def expected(x: R.Tensor(("n", 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, FOLDED)
        return R.add(c, total)

    check_prepared(before, expected)


def test_batch_norm_behind_concat__folded_into_every_conv(check_prepared, check_same_numbers):
    """Each part takes its own channels of scale and shift, also behind a bias of its own."""
    first, second = draw(1, 3, 3, 3), draw(3, 3, 1, 1)
    bias = draw(3)

    @as_main
    def before(x: R.Tensor((2, 3, 8, 8), "float32")):
        a = R.nn.conv2d(x, const(first), padding=1)
        b = R.nn.conv2d(x, const(second))
        c = R.add(b, const(bias.reshape(1, 3, 1, 1)))
        j = R.concat((a, c), axis=-3)
        n = R.nn.batch_norm(j, G, B, M, V, axis=1, epsilon=1e-5, training=False)
        return n[0]

    @as_main
    def expected(x: R.Tensor((2, 3, 8, 8), "float32")):
        a = R.nn.conv2d(x, const(first * SCALE[0]), padding=1)
        d = R.add(a, const(SHIFT[:1].reshape(1, 1, 1, 1)))
        b = R.nn.conv2d(x, const(second * SCALE[1:, None, None, None]))
        c = R.add(b, const((bias * SCALE[1:] + SHIFT[1:]).reshape(1, 3, 1, 1)))
        return R.concat((d, c), axis=1)

    check_prepared(before, expected)
    check_same_numbers(before, draw(2, 3, 8, 8))


@pytest.mark.parametrize("kind", ["input", "read twice", "along the rows"])
def test_scale_behind_concat__stays_where_a_part_cannot_take_it(check_prepared, kind):
    weight, axis = const(draw(4, 4, 1, 1)), 2 if kind == "along the rows" else 1
    scale = const(draw(1, 4 if axis == 2 else 8, 1, 1))

    @as_main
    def before(x: R.Tensor((2, 4, 8, 8), "float32")):
        a = R.nn.conv2d(x, weight)
        b = x if kind == "input" else R.nn.conv2d(a if kind == "read twice" else x, weight)
        j = R.concat((a, b), axis=axis)
        return R.multiply(j, scale)

    check_prepared(before, before)


@pytest.mark.slow
def test_batch_norm_behind_pad__shift_stays_behind(check_prepared, check_same_numbers):
    bias = const(BIAS.reshape(NCHW))
    scaled_bias = const((BIAS * SCALE).reshape(NCHW))
    shift = const(SHIFT.reshape(NCHW))

    @as_main
    def before(x: R.Tensor((2, 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, W)
        b = R.add(c, bias)
        p = R.nn.pad(b, pad_width=[0, 0, 0, 0, 1, 1, 1, 1], pad_value=0.0)
        n = R.nn.batch_norm(p, G, B, M, V, axis=1, epsilon=1e-5, training=False)
        return n[0]

    @as_main
    def expected(x: R.Tensor((2, 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, FOLDED)
        b = R.add(c, scaled_bias)
        p = R.nn.pad(b, pad_width=[0, 0, 0, 0, 1, 1, 1, 1], pad_value=0.0)
        return R.add(p, shift)

    check_prepared(before, expected)
    check_same_numbers(before, draw(2, 3, 8, 8))


@pytest.mark.slow
def test_unfused_batch_norm__folded(check_same_numbers):
    """As torch decomposes it: (x - mean) / sqrt(variance + eps) * gamma + beta."""
    mean, gamma, beta = (const(a.reshape(NCHW)) for a in (MEAN, GAMMA, BETA))
    deviation = const(np.sqrt(VARIANCE.astype("float64") + 1e-5).reshape(NCHW))

    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, W)
        a = R.subtract(c, mean)
        b = R.divide(a, deviation)
        d = R.multiply(gamma, b)
        return R.add(d, beta)

    prepared = check_same_numbers(before, draw(1, 3, 8, 8))
    ops = [call_name(b.value) for b in prepared["main"].body.blocks[0].bindings]
    assert ops == ["relax.nn.conv2d", "relax.add"]
    weight = prepared["main"].body.blocks[0].bindings[0].value.args[1].value.numpy()
    np.testing.assert_allclose(weight, FOLDED.value.numpy(), rtol=1e-6)


def test_subtract_from_constant__negates(check_same_numbers):
    one = const(np.ones(NCHW))

    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, W)
        return R.subtract(one, c)

    prepared = check_same_numbers(before, draw(1, 3, 8, 8))
    ops = [call_name(b.value) for b in prepared["main"].body.blocks[0].bindings]
    assert ops == ["relax.nn.conv2d", "relax.add"]


@pytest.mark.slow
def test_batch_norm_alone__multiply_add(check_prepared, check_same_numbers):
    scale, shift = const(SCALE.reshape(NCHW)), const(SHIFT.reshape(NCHW))

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 4, 8, 8), "float32")):
            with R.dataflow():
                r = R.nn.relu(x)
                n = R.nn.batch_norm(r, G, B, M, V, axis=1, epsilon=1e-5, training=False)
                y = n[0]
                R.output(y)
            return y

    @as_main
    def expected(x: R.Tensor((1, 4, 8, 8), "float32")):
        r = R.nn.relu(x)
        s = R.multiply(r, scale)
        return R.add(s, shift)

    prepared = check_prepared(Before, expected)
    check_same_numbers(Before, draw(1, 4, 8, 8))
    names = [binding.var.name for binding in prepared["main"].body.blocks[0].bindings]
    assert names == ["r", "y.scaled", "y"]


def test_conv_used_twice__batch_norm_beside_it(check_prepared):
    scale, shift = const(SCALE.reshape(NCHW)), const(SHIFT.reshape(NCHW))

    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, W)
        n = R.nn.batch_norm(c, G, B, M, V, axis=1, epsilon=1e-5, training=False)
        m = n[0]
        return R.add(m, c)

    @as_main
    def expected(x: R.Tensor((1, 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, W)
        s = R.multiply(c, scale)
        m = R.add(s, shift)
        return R.add(m, c)

    check_prepared(before, expected)


@pytest.mark.slow
def test_conv_returned__batch_norm_beside_it(check_same_numbers):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32")):
            with R.dataflow():
                c = R.nn.conv2d(x, W)
                n = R.nn.batch_norm(c, G, B, M, V, axis=1, epsilon=1e-5, training=False)
                y = n[0]
                R.output(c, y)
            return (c, y)

    prepared = check_same_numbers(Before, draw(1, 3, 8, 8))
    names = [binding.var.name for binding in prepared["main"].body.blocks[0].bindings]
    assert names == ["c", "y.scaled", "y"]


def test_training_batch_norm__stays(check_prepared):
    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, W)
        n = R.nn.batch_norm(c, G, B, M, V, axis=1, epsilon=1e-5, training=True)
        return n[0]

    check_prepared(before, before)


def test_weight_from_a_parameter__stays(check_prepared):
    scale, shift = const(SCALE.reshape(NCHW)), const(SHIFT.reshape(NCHW))

    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32"), w: R.Tensor((4, 3, 3, 3), "float32")):
        c = R.nn.conv2d(x, w)
        s = R.multiply(c, scale)
        return R.add(s, shift)

    check_prepared(before, before)


def test_shared_weight__only_one_copy_scaled(check_prepared):
    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        plain = R.nn.conv2d(x, W)
        c = R.nn.conv2d(x, W)
        n = R.nn.batch_norm(c, G, B, M, V, axis=1, epsilon=1e-5, training=False)
        m = n[0]
        return R.subtract(plain, m)

    @as_main
    def expected(x: R.Tensor((1, 3, 8, 8), "float32")):
        plain = R.nn.conv2d(x, W)
        c = R.nn.conv2d(x, FOLDED)
        m = R.add(c, const(SHIFT.reshape(NCHW)))
        return R.subtract(plain, m)

    check_prepared(before, expected)


def test_bias__second_one_shape_merged(check_prepared):
    first, second = const(BIAS.reshape(4, 1, 1)), const(2.0)
    total = const((BIAS.astype("float64") + 2.0).reshape(NCHW))

    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, W)
        b = R.add(first, c)
        return R.add(b, second)

    @as_main
    def expected(x: R.Tensor((1, 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, W)
        return R.add(c, total)

    check_prepared(before, expected)


@pytest.mark.parametrize(
    ("weight", "bias"),
    [(W, const(draw(1, 4, 6, 6))), (const(draw(1, 3, 3, 3)), const(draw(1, 4, 1, 1)))],
    ids=["over space", "that broadcasts the convolution"],
)
def test_bias__stays(weight, bias, check_prepared):
    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, weight)
        return R.add(c, bias)

    check_prepared(before, before)


def test_matmul__bias_scale_and_alpha(check_prepared):
    weight, bias = draw(3, 4), draw(1, 4)
    w, b = const(weight), const(bias)
    folded = const(weight.astype("float64") * 0.5)
    total = const(bias.astype("float64").ravel() * 0.5)

    @as_main
    def before(x: R.Tensor(("n", 5, 3), "float32")):
        m = R.matmul(x, w)
        a = R.add(b, m)
        return R.multiply(a, R.const(0.5, "float32"))

    @as_main
    def expected(x: R.Tensor(("n", 5, 3), "float32")):
        m = R.matmul(x, folded)
        return R.add(m, total)

    check_prepared(before, expected)


def test_matmul_of_activations__stays(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 5, 3), "float32"), z: R.Tensor((2, 3, 4), "float32")):
        m = R.matmul(x, z)
        return R.multiply(m, R.const(0.5, "float32"))

    check_prepared(before, before)


def test_constant_adds__merged(check_prepared):
    @as_main
    def before(x: R.Tensor((2, 3), "float32"), i: R.Tensor((2,), "int32")):
        a = R.add(x, R.const(1.0, "float32"))
        y = R.add(a, R.const(2.0, "float32"))
        j = R.add(i, R.const(1, "int32"))
        z = R.add(j, R.const(2, "int32"))
        return y, z

    @as_main
    def expected(x: R.Tensor((2, 3), "float32"), i: R.Tensor((2,), "int32")):
        y = R.add(x, R.const(3.0, "float32"))
        z = R.add(i, R.const(3, "int32"))
        return y, z

    check_prepared(before, expected)


def test_constant_adds_with_larger_sum__stay(check_prepared):
    row, column = const(draw(1, 3)), const(draw(2, 1))

    @as_main
    def before(x: R.Tensor((2, 3), "float32")):
        a = R.add(x, row)
        return R.add(a, column)

    check_prepared(before, before)


# -- any convolution -------------------------------------------------------------------------------

LAYOUTS_2D = [("NCHW", "OIHW"), ("NHWC", "HWIO"), ("NHWC", "OHWI")]


def arrange(sizes: dict[str, int], layout: str) -> tuple[int, ...]:
    return tuple(sizes[letter] for letter in layout)


@st.composite
def conv_modules(drawer):
    """(module conv -> bias? -> batch norm, input shape) for a drawn convolution."""
    kind = drawer(st.sampled_from(["conv1d", "conv2d", "conv2d_transpose", "matmul"]))
    groups = drawer(st.sampled_from([1, 2, 4]))
    per_in, per_out = drawer(st.integers(1, 2)), drawer(st.integers(1, 2))
    channels, features = groups * per_in, groups * per_out
    stride, padding = drawer(st.integers(1, 2)), drawer(st.integers(0, 1))
    sizes = {"N": 2, "C": channels, "H": 5, "W": 6}
    if kind == "conv1d":
        data, kernel = "NCW", "OIW"
        op = relax.op.nn.conv1d
        weight = {"O": features, "I": per_in, "W": 3}
    elif kind == "conv2d":
        data, kernel = drawer(st.sampled_from(LAYOUTS_2D))
        op = relax.op.nn.conv2d
        weight = {"O": features, "I": per_in, "H": 2, "W": 3}
    else:
        data, kernel = "NCHW", "IOHW"
        op = relax.op.nn.conv2d_transpose
        weight = {"I": channels, "O": per_out, "H": 2, "W": 3}
    rng = np.random.default_rng(drawer(st.integers(0, 2**31)))
    builder = relax.BlockBuilder()
    shape = (2, 3, channels) if kind == "matmul" else arrange(sizes, data)
    axis = 2 if kind == "matmul" else data.index("C")
    x = relax.Var("x", relax.TensorType(shape, "float32"))

    def constant(*dims: int) -> relax.Expr:
        return const(rng.standard_normal(dims))

    with builder.function("main", [x]):
        with builder.dataflow():
            if kind == "matmul":
                value = relax.op.matmul(x, constant(channels, features))
            else:
                value = op(
                    x,
                    constant(*arrange(weight, kernel)),
                    strides=stride,
                    padding=padding,
                    groups=groups,
                    data_layout=data,
                    kernel_layout=kernel,
                )
            value = builder.emit(value)
            if drawer(st.booleans()):
                dims = [1] * len(shape)
                dims[axis] = features
                value = builder.emit(relax.op.add(value, constant(*dims)))
            variance = const(rng.uniform(0.1, 2, features))
            norm = builder.emit(
                relax.op.nn.batch_norm(
                    value,
                    constant(features),
                    constant(features),
                    constant(features),
                    variance,
                    axis=axis,
                    training=False,
                    center=drawer(st.booleans()),
                    scale=drawer(st.booleans()),
                )
            )
            out = builder.emit_output(relax.TupleGetItem(norm, 0))
        builder.emit_func_output(out)
    return builder.finalize(), shape


@pytest.mark.slow
@settings(
    max_examples=count_examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(conv_modules())
def test_batch_norm__any_conv_same_numbers(check_same_numbers, drawn):
    mod, shape = drawn
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    prepared = check_same_numbers(mod, x)
    ops = [call_name(b.value) for b in prepared["main"].body.blocks[0].bindings]
    assert ops[1:] == ["relax.add"]
    assert ops[0].startswith(("relax.nn.conv", "relax.matmul"))


def test_overflowing_fold__declined():
    huge = const(np.full(4, 3e38))

    @as_main
    def before(x: R.Tensor((1, 3, 8, 8), "float32")):
        c = R.nn.conv2d(x, const(WEIGHT * 100))
        return R.multiply(c, const(huge.value.numpy().reshape(NCHW)))

    prepared = prepare_module(before)
    tvm.ir.assert_structural_equal(prepared["main"], before["main"])


@pytest.mark.parametrize("broken", ["zero variance", "axis"])
def test_unfit_batch_norm__declined(broken):
    variance = const(np.full(6 if broken == "axis" else 4, -1.0 if broken != "axis" else 1.0))
    ones = const(np.ones(6 if broken == "axis" else 4))
    axis = 2 if broken == "axis" else 1

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 3, 8, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            conv = builder.emit(relax.op.nn.conv2d(x, W))
            norm = builder.emit(
                relax.op.nn.batch_norm(conv, ones, ones, ones, variance, axis, training=False)
            )
            out = builder.emit_output(relax.TupleGetItem(norm, 0))
        builder.emit_func_output(out)
    ops = [
        call_name(b.value) if hasattr(b.value, "op") else "item"
        for b in prepare_module(builder.finalize())["main"].body.blocks[0].bindings
    ]
    if broken == "axis":
        assert ops == ["relax.nn.conv2d", "relax.multiply", "relax.add"]
    else:
        assert ops == ["relax.nn.conv2d", "relax.nn.batch_norm", "item"]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["before", "after"])
def test_batch_norm_behind_pad__channels_that_are_added_are_no_channels_of_the_conv(
    side, check_same_numbers
):
    widths = [0, 0, 1, 0] if side == "before" else [0, 0, 0, 1]
    gamma, beta, mean = (const(draw(5)) for _ in range(3))
    variance = const(np.abs(draw(5)) + 0.1)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3, 8, 8), "float32")):
            with R.dataflow():
                c = R.nn.conv2d(x, W)
                p = R.nn.pad(c, pad_width=[*widths, 0, 0, 0, 0], pad_value=0.0)
                n = R.nn.batch_norm(p, gamma, beta, mean, variance, axis=1, training=False)
                y = n[0]
                R.output(y)
            return y

    check_same_numbers(Before, draw(2, 3, 8, 8))


@pytest.mark.parametrize("left_out", ["scale", "center"])
def test_norm_without_a_factor__compiled_as_torch_has_it(left_out):
    """TVM's code of these operators applies both factors; here they are not 1 and 0."""
    functional = pytest.importorskip("torch.nn.functional")
    torch = pytest.importorskip("torch")
    x, given = draw(2, 4, 3, 3), {left_out: False}
    data = relax.Var("x", relax.TensorType(x.shape, "float32"))
    factors = const(GAMMA), const(BETA)
    builder = relax.BlockBuilder()
    with builder.function("main", [data]):
        with builder.dataflow():
            norms = [
                relax.op.nn.layer_norm(data, const(draw(3)), const(draw(3)), [-1], **given),
                relax.op.nn.instance_norm(data, *factors, 1, [2, 3], **given),
                relax.op.nn.group_norm(data, *factors, 2, 1, [2, 3], **given),
            ]
            out = builder.emit_output(relax.Tuple([builder.emit(norm) for norm in norms]))
        builder.emit_func_output(out)
    mod = builder.finalize()

    def keep(weight: relax.Expr, bias: relax.Expr) -> dict:
        wanted = {"weight": weight, "bias": bias}
        del wanted["weight" if left_out == "scale" else "bias"]
        return {name: torch.tensor(value.value.numpy()) for name, value in wanted.items()}

    tensor = torch.tensor(x)
    expected = [
        functional.layer_norm(tensor, [3], **keep(*norms[0].args[1:])),
        functional.instance_norm(tensor, **keep(*factors)),
        functional.group_norm(tensor, 2, **keep(*factors)),
    ]
    machine = relax.VirtualMachine(tvm.compile(prepare_module(mod), "llvm"), tvm.cpu())
    compiled = [value.numpy() for value in machine["main"](tvm.runtime.tensor(x))]
    for have, real, want in zip(compiled, rq.reference.run(mod, [x]), expected, strict=True):
        np.testing.assert_allclose(have, want.numpy(), 1e-4, 1e-5)
        np.testing.assert_allclose(real, want.numpy(), 1e-4, 1e-5)
