"""The interpreter against modules compiled by TVM, and its errors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relayquant.dialect import qnn
from relayquant.errors import DataError, ModelError
from relayquant.qtypes import Arithmetic, Rounding
from relayquant.reference import interpreter, run, run_values, single_call

op = relax.op
TARGET = tvm.target.Target({"kind": "llvm"})


def build(make: Any, *arrays: np.ndarray) -> tvm.IRModule:
    """A module whose main computes make(*parameters)."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(a.shape, a.dtype.name)) for i, a in enumerate(arrays)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(make(*params)))
        builder.emit_func_output(out)
    return builder.get()


def execute(mod: tvm.IRModule, *arrays: np.ndarray) -> list[np.ndarray]:
    """Outputs of the compiled module."""
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(np.array(a, order="C")) for a in arrays))
    return interpreter.flatten_value(single_call.to_numpy(result))


def check(make: Any, *arrays: np.ndarray, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Interpreter and compiled module agree in number, shape, dtype and value."""
    mod = build(make, *arrays)
    ours, theirs = run(mod, arrays), execute(mod, *arrays)
    assert [a.shape for a in ours] == [a.shape for a in theirs]
    assert [a.dtype for a in ours] == [a.dtype for a in theirs]
    for mine, compiled in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, compiled, rtol=rtol, atol=atol)


def floats(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype("float32")


def integers(*shape: int, dtype: str = "int32", low: int = -100, high: int = 100) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high, shape).astype(dtype)


X = floats(2, 3, 4, 5)
POSITIVE = floats(2, 3, low=0.1, high=5)
C3 = [floats(3, low=0.5, high=1.5, seed=i) for i in range(4)]


def c(array: Any) -> relax.Expr:
    array = np.asarray(array)
    return relax.const(array, array.dtype.name)


#: name -> (function of the parameters, arrays)
CASES: dict[str, tuple[Any, ...]] = {
    **{
        name: (getattr(op, name), POSITIVE)
        for name in (
            "log",
            "sqrt",
            "rsqrt",
            "exp",
            "sin",
            "cos",
            "tanh",
            "erf",
            "sigmoid",
            "square",
        )
    },
    **{
        f"{name}_signed": (getattr(op, name), X)
        for name in ("abs", "negative", "floor", "ceil", "round", "trunc", "sign", "isnan", "isinf")
    },
    **{
        f"{name}_activation": (getattr(op.nn, name), X)
        for name in ("relu", "gelu", "gelu_tanh", "silu", "softmax", "log_softmax", "selu")
    },
    **{
        f"{name}_broadcast": (getattr(op, name), X, floats(3, 1, 5, low=0.5, seed=2))
        for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "less", "equal")
    },
    "power": (op.power, POSITIVE, floats(3, seed=3)),
    "round_half_even": (op.round, np.float32([0.5, 1.5, 2.5, -0.5, -1.5])),
    "divide_integers": (op.divide, integers(9), integers(9, low=1)),
    "floor_divide_integers": (op.floor_divide, integers(9), integers(9, low=1)),
    "mod_integers": (op.mod, integers(9), integers(9, low=1)),
    "floor_mod_integers": (op.floor_mod, integers(9), integers(9, low=1)),
    "clip": (lambda x: op.clip(x, -0.5, 1.0), X),
    "clip_integers": (lambda x: op.clip(x, -7, 60), integers(9, dtype="int8")),
    "relu_integers": (op.nn.relu, integers(9, dtype="int8")),
    "maximum_integers": (lambda x: op.maximum(x, c(np.int8(3))), integers(9, dtype="int8")),
    "add_wraps": (op.add, integers(9, dtype="int8"), integers(9, dtype="int8")),
    "where": (op.where, X > 0, X, floats(5, seed=4)),
    "leakyrelu": (lambda x: op.nn.leakyrelu(x, 0.2), X),
    "prelu": (lambda x: op.nn.prelu(x, c(C3[0]), 1), X),
    "softplus": (lambda x: op.nn.softplus(x, 2.0, 1.5), X),
    "softmax_axis": (lambda x: op.nn.softmax(x, 1), X),
    "astype": (lambda x: op.astype(x, "int32"), X * 9),
    "quantize": (lambda x: op.quantize(x, c(C3[0]), c(np.int8([1, 2, 3])), 1, "int8"), X * 50),
    "dequantize": (
        lambda x: op.dequantize(x, c(C3[0]), c(np.int8([1, 2, 3])), 1),
        integers(2, 3, dtype="int8"),
    ),
    "conv1d": (lambda x: op.nn.conv1d(x, c(floats(4, 3, 3)), 2, 1), floats(2, 3, 9)),
    "conv2d_layouts": (
        lambda x: op.nn.conv2d(
            x, c(floats(3, 2, 4, 6)), (1, 2), (1, 0, 2, 1), data_layout="NHWC", kernel_layout="HWIO"
        ),
        floats(2, 5, 6, 4),
    ),
    "conv2d_integers": (
        lambda x: op.nn.conv2d(x, c(integers(4, 3, 2, 2, dtype="int8")), out_dtype="int32"),
        integers(1, 3, 4, 4, dtype="int8"),
    ),
    "conv2d_depthwise": (lambda x: op.nn.conv2d(x, c(floats(6, 1, 3, 3)), groups=3), X),
    "conv2d_grouped": (
        lambda x: op.nn.conv2d(x, c(floats(4, 2, 3, 3)), groups=2),
        floats(1, 4, 5, 5),
    ),
    "conv2d_transpose": (
        lambda x: op.nn.conv2d_transpose(x, c(floats(3, 2, 3, 3)), 2, 1, 1),
        X,
    ),
    "conv1d_transpose": (
        lambda x: op.nn.conv1d_transpose(x, c(floats(3, 2, 3)), 2, 1),
        floats(1, 3, 5),
    ),
    "max_pool1d": (lambda x: op.nn.max_pool1d(x, 3, 2, 1), floats(2, 3, 9)),
    "max_pool2d_integers": (
        lambda x: op.nn.max_pool2d(x, 3, 2, 1),
        integers(1, 2, 6, 6, dtype="int8"),
    ),
    "avg_pool1d": (lambda x: op.nn.avg_pool1d(x, 3, 2, 1), floats(2, 3, 9)),
    "adaptive_avg_pool2d": (lambda x: op.nn.adaptive_avg_pool2d(x, (2, 3)), X),
    "adaptive_avg_pool2d_global": (
        lambda x: op.nn.adaptive_avg_pool2d(x, 1, layout="NHWC"),
        X,
    ),
    "adaptive_avg_pool1d": (lambda x: op.nn.adaptive_avg_pool1d(x, 2), floats(2, 3, 5)),
    "pad": (lambda x: op.nn.pad(x, (0, 0, 1, 2, 0, 1, 3, 0), pad_value=1.5), X),
    "pad_reflect": (lambda x: op.nn.pad(x, (0, 0, 0, 0, 1, 2, 1, 1), "reflect"), X),
    "layer_norm": (lambda x: op.nn.layer_norm(x, c(floats(4, 5)), c(floats(4, 5)), [-2, -1]), X),
    "layer_norm_one_axis": (lambda x: op.nn.layer_norm(x, c(C3[0]), c(C3[1]), [1]), X),
    "group_norm": (
        lambda x: op.nn.group_norm(x, c(floats(4)), c(floats(4, seed=9)), 2, 1, [2, 3]),
        floats(2, 4, 3, 3),
    ),
    "instance_norm": (
        lambda x: op.nn.instance_norm(x, c(C3[0]), c(C3[1]), 1, [2, 3]),
        X,
    ),
    "rms_norm": (lambda x: op.nn.rms_norm(x, c(floats(5)), [-1]), X),
    "batch_norm": (lambda x: op.nn.batch_norm(x, *map(c, C3), axis=1, training=False), X),
    "batch_norm_training": (lambda x: op.nn.batch_norm(x, *map(c, C3), axis=1, training=True), X),
    "attention": (op.nn.attention, floats(1, 4, 2, 8), floats(1, 6, 2, 8), floats(1, 6, 2, 8)),
    "matmul": (op.matmul, floats(2, 1, 3, 4), floats(5, 4, 2)),
    "matmul_vector": (op.matmul, floats(2, 3, 4), floats(4)),
    "matmul_integers": (
        lambda x, y: op.matmul(x, y, "int32"),
        integers(3, 9, dtype="int8"),
        integers(9, 2, dtype="int8"),
    ),
    "einsum": (lambda x, y: op.einsum([x, y], "bij,bjk->bik"), floats(2, 3, 4), floats(2, 4, 5)),
    "mean": (lambda x: op.mean(x, [1, -1], True), X),
    "sum_all": (op.sum, X),
    "max": (lambda x: op.max(x, -1), X),
    "min_integers": (lambda x: op.min(x, 0), integers(3, 4, dtype="int8")),
    "prod": (lambda x: op.prod(x, 1), X),
    "variance": (lambda x: op.variance(x, [2, 3], True), X),
    "std": (lambda x: op.std(x, [2, 3]), X),
    "argmax": (lambda x: op.argmax(x, 1), X),
    "argmin_all": (lambda x: op.argmin(x, None, False), X),
    "cumsum": (lambda x: op.cumsum(x, 1), X),
    "reshape": (lambda x: op.reshape(x, (6, 20)), X),
    "flatten": (op.flatten, X),
    "permute_dims": (lambda x: op.permute_dims(x, [0, 3, 1, 2]), X),
    "permute_dims_reversed": (op.permute_dims, X),
    "squeeze": (op.squeeze, floats(1, 3, 1)),
    "squeeze_axis": (lambda x: op.squeeze(x, [-1]), floats(1, 3, 1)),
    "expand_dims": (lambda x: op.expand_dims(x, [0, -1]), floats(2, 3)),
    "concat": (lambda x, y: op.concat([x, y], 1), X, floats(2, 2, 4, 5)),
    "stack": (lambda x: op.stack([x, x], 1), X),
    "split_sections": (lambda x: op.split(x, 2, 3), floats(2, 3, 4, 6)),
    "split_uneven": (lambda x: op.split(x, 2, 3), X),
    "split_indices": (lambda x: op.split(x, [1, 3], 2), X),
    "split_into_one": (lambda x: op.split(x, 1, 3), X),
    "take": (lambda x, i: op.take(x, i, 1), X, np.int64([2, 0, 0])),
    "take_rank_two": (lambda x, i: op.take(x, i, 2), X, np.int32([[2, 0], [1, 3]])),
    "broadcast_to": (lambda x: op.broadcast_to(x, (2, 3, 5)), floats(3, 1)),
    "tile": (lambda x: op.tile(x, (2, 1, 3)), floats(3, 2)),
    "repeat": (lambda x: op.repeat(x, 2, 1), X),
    "flip": (lambda x: op.flip(x, 1), X),
    "gather_elements": (
        lambda x, i: op.gather_elements(x, i, 1),
        floats(2, 3),
        np.int64([[2, 0], [1, 1]]),
    ),
    "gather_nd": (op.gather_nd, floats(4, 3, 2), np.int64([[2, 0], [1, 1]])),
    "one_hot": (
        lambda i: op.one_hot(
            i, tvm.tirx.FloatImm("float32", 2), tvm.tirx.FloatImm("float32", -1), 4, 0
        ),
        np.int64([1, 3]),
    ),
    "tril": (lambda x: op.tril(x, 1), floats(4, 4)),
    "full_like": (lambda x: op.full_like(x, relax.const(3.0)), X),
    "shape_of": (lambda x: op.shape_to_tensor(op.shape_of(x)), X),
    "collapse_sum_to": (lambda x: op.collapse_sum_to(x, (3, 1, 5)), X),
    # no numpy form: compiled alone
    "resize2d": (lambda x: op.image.resize2d(x, (7, 9)), X),
    "topk": (lambda x: op.topk(x, 2, -1), X),
    "sort": (lambda x: op.sort(x, -1), X),
}


@pytest.mark.parametrize("name", CASES)
def test_operator__equals_compiled(name):
    check(CASES[name][0], *CASES[name][1:])


@pytest.mark.parametrize("operator", ["sum", "prod"])
def test_integer_reduction__wraps_like_compiled(operator):
    check(lambda x: getattr(op, operator)(x, [1]), integers(3, 50, low=-100))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda x: op.mean(x, [1]), (3, 7)),
        (lambda x: op.nn.avg_pool2d(x, (2, 2), (1, 1), (1, 1, 1, 1)), (1, 2, 4, 4)),
    ],
)
def test_integer_average__truncates_like_compiled(make, shape):
    """TVM infers the dtype of the data but computes int64; the interpreter keeps to inference."""
    x = integers(*shape)
    mod = build(make, x)
    (ours,), (theirs,) = run(mod, x), execute(mod, x)
    assert ours.dtype == np.int32
    assert (ours < 0).any()
    np.testing.assert_array_equal(ours, theirs)


def test_pixel_shuffle__moves_channels_into_space():
    x = floats(1, 8, 2, 3)
    (result,) = run(build(lambda v: op.nn.pixel_shuffle(v, 2), x), x)
    assert result.shape == (1, 2, 4, 6)
    assert result[0, 1, 3, 4] == x[0, 4 + 2, 1, 2]


WINDOWS = {
    "pool": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "strides": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "padding": st.tuples(*[st.integers(0, 1)] * 4),
    "dilation": st.tuples(st.integers(1, 2), st.integers(1, 2)),
    "ceil_mode": st.booleans(),
}


@given(**WINDOWS, maximum=st.booleans(), include=st.booleans())
@settings(max_examples=15, deadline=None)
def test_pool2d__equals_compiled(pool, strides, padding, dilation, ceil_mode, maximum, include):
    x = floats(1, 2, 7, 8)
    # A padding of more than the data a window meets leaves nothing to average.
    padding = tuple(min(p, (k - 1) // 2) for p, k in zip(padding, pool * 2, strict=True))
    common = (pool, strides, padding, dilation, ceil_mode)
    if maximum:
        check(lambda v: op.nn.max_pool2d(v, *common), x)
    else:
        check(lambda v: op.nn.avg_pool2d(v, *common, count_include_pad=include), x)


@given(**WINDOWS, rounding=st.sampled_from(Rounding), include=st.booleans())
@settings(max_examples=15, deadline=None)
def test_qnn_avg_pool2d__equals_compiled(
    pool, strides, padding, dilation, ceil_mode, rounding, include
):
    x = integers(1, 2, 7, 8, dtype="uint8", low=0, high=255)
    attrs = {"pool_size": pool, "strides": strides, "padding": padding, "dilation": dilation}
    attrs |= {"ceil_mode": ceil_mode, "count_include_pad": include, "rounding": rounding}
    check(lambda v: qnn.avg_pool2d(v, 0.3, 7, 0.4, 90, **attrs), x, rtol=0, atol=0)


@given(
    groups=st.sampled_from([1, 2]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
@settings(max_examples=10, deadline=None)
def test_conv2d__equals_compiled(groups, kernel, strides, padding, dilation):
    weight = floats(4, 4 // groups, *kernel)
    check(
        lambda v: op.nn.conv2d(v, c(weight), strides, padding, dilation, groups), floats(2, 4, 6, 5)
    )


@given(
    begin=st.integers(-6, 6),
    end=st.integers(-6, 6),
    step=st.sampled_from([1, 2, -1, -2]),
)
@settings(max_examples=15, deadline=None)
def test_strided_slice__equals_compiled(begin, end, step):
    x = floats(2, 5)
    make = lambda v: op.strided_slice(v, [1], [begin], [end], [step])  # noqa: E731
    mod = build(make, x)
    if min(int(size) for size in mod["main"].ret_ty.shape) <= 0:
        return  # TVM infers negative sizes
    check(make, x)


def test_qnn_operators__equal_compiled():
    x = integers(1, 4, 6, 6, dtype="uint8", low=0, high=255)
    weight = integers(8, 2, 3, 3, dtype="int8")
    scales = floats(8, low=0.001, high=0.01)
    table = integers(256, dtype="int8")

    def make(v: Any) -> Any:
        accumulator = qnn.conv2d(v, c(weight), 7, 0, 0.1, c(scales), padding=1, groups=2)
        narrow = qnn.requantize(accumulator, scales, 0, 0.7, 3, axis=1)
        real = qnn.dequantize(qnn.lookup(narrow, c(table)), 0.1, 4)
        pooled = qnn.avg_pool2d(narrow, 0.7, 3, 0.5, 2, pool_size=(2, 2), strides=(2, 2))
        total = qnn.add(
            accumulator, narrow, scales, 0, 0.7, 3, 0.9, 5, lhs_axis=1, out_dtype="int8"
        )
        joined = qnn.concatenate([narrow, total], [0.7, 0.9], [3, 5], 0.8, 0, axis=1)
        leaky = qnn.leaky_relu(joined, 0.8, 0, 0.6, 1, 0.3)
        leaky = qnn.prelu(leaky, 0.6, 1, 0.6, 1, np.linspace(-1, 2, 16), axis=1)
        mean = qnn.mean(leaky, 0.6, 1, 0.3, 0, axes=(2, 3))
        flat = qnn.dense(mean, c(integers(3, 16, dtype="int8")), 0, 1, 0.3, 0.1)
        product = qnn.mul(
            narrow, total, 0.7, 3, 0.9, 5, 2.0, 1,
            rounding=Rounding.UPWARD, compute_dtype=Arithmetic.INT64,
        )  # fmt: skip
        simulated = qnn.simulated_quantize(real, 2, 0.2, 3)
        return relax.Tuple([narrow, real, pooled, leaky, flat, product, simulated])

    check(make, x, rtol=0, atol=0)


# Modules -------------------------------------------------------------------------------------


@I.ir_module
class Symbolic:
    @R.function
    def main(x: R.Tensor(("n", 3), "float32"), y: R.Tensor(("n", "m"), "float32")) -> R.Tuple(
        R.Tensor(("n", "m + 3"), "float32"), R.Tensor(("n * 3",), "float32")
    ):
        n, m = T.int64(), T.int64()  # noqa: F841
        with R.dataflow():
            both = R.concat((x, y), axis=1)
            flat = R.reshape(x, R.shape([n * 3]))
            out = (both, flat)
            R.output(out)
        return out


@I.ir_module
class Calls:
    @T.prim_func(s_tir=True)
    def double(a: T.handle, b: T.handle):
        T.func_attr({"tirx.noalias": True})
        n = T.int64()
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        for i in range(n):
            with T.sblock("double"):
                vi = T.axis.spatial(n, i)
                B[vi] = A[vi] * T.float32(2)

    @R.function
    def helper(x: R.Tensor(("n",), "float32")) -> R.Tensor(("n",), "float32"):
        return R.add(x, R.const(1.0))

    @R.function
    def main(x: R.Tensor(("n",), "float32"), flag: R.Tensor((), "bool")) -> R.Tensor("float32"):
        n = T.int64()
        cls = Calls
        twice = R.call_tir(cls.double, (x,), out_ty=R.Tensor((n,), "float32"))
        more = cls.helper(twice)
        cast = R.match_cast(more, R.Tensor((n,), "float32"))
        if flag:
            a = R.negative(cast)
            r = a
        else:
            b = R.multiply(cast, R.const(3.0))
            r = b
        return r


def test_run__symbolic_dimensions():
    for n, m in ((2, 4), (5, 1)):
        x, y = floats(n, 3), floats(n, m)
        both, flat = run(Symbolic, {"y": y, "x": x})
        np.testing.assert_array_equal(both, np.concatenate([x, y], 1))
        np.testing.assert_array_equal(flat, x.reshape(-1))


def test_run__call_tir_functions_branches_and_match_cast():
    x = floats(4)
    (negative,) = run(Calls, (x, np.array(True)))
    (scaled,) = run(Calls, (x, np.array(False)))
    np.testing.assert_allclose(negative, -(2 * x + 1))
    np.testing.assert_allclose(scaled, 3 * (2 * x + 1), rtol=1e-6)


def test_run_values__names_every_binding():
    values = run_values(Symbolic, (floats(2, 3), floats(2, 1)))
    assert list(values) == ["both", "flat", "out.0", "out.1"]
    np.testing.assert_array_equal(values["out.0"], values["both"])


def test_run__accepts_a_single_array():
    x = floats(3)
    (result,) = run(build(op.negative, x), x)
    np.testing.assert_array_equal(result, -x)


def test_run__frees_values_after_their_last_use(monkeypatch):
    alive: list[Any] = []
    most = 0

    def count(args: list[Any], attrs: Any) -> Any:
        nonlocal most
        gc.collect()
        most = max(most, sum(ref() is not None for ref in alive))
        result = args[0] + 1
        alive.append(weakref.ref(result))
        return result

    monkeypatch.setitem(interpreter.OPERATORS, "negative", count)
    x = floats(3)
    params = [relax.Var("x", relax.TensorType((3,), "float32"))]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        value: Any = params[0]
        for _ in range(10):
            value = builder.emit(op.negative(value))
        builder.emit_func_output(value)
    run(builder.get(), x)
    assert len(alive) == 10
    assert most == 1


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"x": floats(2, 3)}, "'y'.*missing"),
        ({"x": floats(2, 3), "y": floats(2, 1), "z": floats(1)}, "'z' is no parameter"),
        ((floats(2, 3),), "got 1 input for 2 parameters"),
        ((floats(2, 3).astype("float64"), floats(2, 1)), "'x' has dtype float64.*float32"),
        ((floats(2, 4), floats(2, 1)), r"'x' has shape \(2, 4\); allowed: \(n, 3\)"),
        ((floats(2, 3), floats(5, 1)), r"'y' has shape \(5, 1\).*n = 2"),
        ((floats(2, 3), floats(2)), r"'y' has shape \(2,\)"),
    ],
)
def test_run__wrong_inputs_are_named(inputs, words):
    with pytest.raises(DataError, match=words):
        run(Symbolic, inputs)


def test_run__needs_one_function():
    main = build(op.negative, floats(3))["main"]
    mod = tvm.IRModule({"other": main, "another": main})
    with pytest.raises(ModelError, match=r"no Relax function 'main'.*another, other"):
        run(mod, floats(3))


def test_run__names_what_it_cannot_execute():
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        call = op.call_dps_packed("no_such_function", (x,), relax.TensorType((3,), "float32"))
        builder.emit_func_output(builder.emit(call, "strange"))
    with pytest.raises(ModelError, match=r"'strange'.*no_such_function"):
        run(builder.get(), floats(3))


def test_take__out_of_range():
    data, indices = np.zeros((4, 2), "float32"), np.array([1, 9], "int32")
    mod = build(lambda x, i: op.take(x, i, axis=0), data, indices)
    with pytest.raises(ModelError, match=r"take: indices 1\.\.9 do not fit an axis of length 4"):
        run(mod, [data, indices])
