"""The interpreter against modules compiled by TVM, and its errors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tvm
from drawing import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter_cases import CASES, build, c, find_unread, floats, integers
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relayquant as rq
from relayquant.base.qtypes import Arithmetic, Rounding
from relayquant.errors import DataError, ModelError
from relayquant.ir.dialect import qnn
from relayquant.ir.reference import interpreter, run, run_values, single_call

op = relax.op
TARGET = tvm.target.Target({"kind": "llvm"})


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


@pytest.mark.sample(18)
@pytest.mark.parametrize("name", CASES)
def test_operator__equals_compiled(name):
    check(CASES[name][0], *CASES[name][1:])


@pytest.mark.slow
def test_operators__read_every_attribute(monkeypatch):
    """An attribute that no row reads is one that is computed without."""

    def compute(table, mod, arrays):
        monkeypatch.setattr(interpreter, "OPERATORS", table)
        run(mod, arrays)

    assert find_unread(interpreter.OPERATORS, CASES, compute) == []


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
@settings(max_examples=count_examples(15), deadline=None)
def test_pool2d__equals_compiled(pool, strides, padding, dilation, ceil_mode, maximum, include):
    x = floats(1, 2, 7, 8)
    # A padding of more than the data a window meets leaves nothing to average.
    padding = tuple(min(p, (k - 1) // 2) for p, k in zip(padding, pool * 2, strict=True))
    common = (pool, strides, padding, dilation, ceil_mode)
    if maximum:
        check(lambda v: op.nn.max_pool2d(v, *common), x)
    else:
        check(lambda v: op.nn.avg_pool2d(v, *common, count_include_pad=include), x)


@pytest.mark.slow
@given(**WINDOWS, rounding=st.sampled_from(Rounding), include=st.booleans())
@settings(max_examples=count_examples(15), deadline=None)
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
@settings(max_examples=count_examples(10), deadline=None)
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
@settings(max_examples=count_examples(15), deadline=None)
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
        ({"x": floats(2, 3), "y": floats(2, 1), "z": floats(1)}, "'z' is not a parameter"),
        ((floats(2, 3),), "got 1 input for 2 parameters"),
        ((floats(2, 3).astype("float64"), floats(2, 1)), "'x' has dtype float64.*float32"),
        ((floats(2, 4), floats(2, 1)), r"'x' has shape \(2, 4\); allowed: \(n, 3\)"),
        ((floats(2, 3), floats(5, 1)), r"'y' has shape \(5, 1\).*n = 2"),
        ((floats(2, 3), np.ma.masked_array(floats(2, 1), True)), "'y' .*values are masked"),
        ((floats(2, 3), floats(2)), r"'y' has shape \(2,\)"),
    ],
)
def test_run__wrong_inputs_are_named(inputs, words):
    with pytest.raises(DataError, match=words):
        run(Symbolic, inputs)


@I.ir_module
class Mixed:
    """Parameters of every kind."""

    @R.function
    def main(
        x: R.Tensor((2, 3), "float32"),
        pair: R.Tuple(R.Tensor((2, 3), "float32"), R.Tensor((3,), "float32")),
        sizes: R.Shape(["n", "m"]),
        number: R.Prim("int32"),
    ) -> R.Tensor((2, 3), "float32"):
        with R.dataflow():
            sums = R.add(R.add(x, pair[0]), pair[1])
            R.output(sums)
        return sums


class Unreadable:
    def numpy(self):
        raise RuntimeError("it has a gradient")


MIXED = {
    "x": floats(2, 3),
    "pair": (floats(2, 3), floats(3)),
    "sizes": (4, np.int64(5)),
    "number": np.array([7], "int8"),
}


@pytest.mark.slow
def test_inputs__of_every_kind():
    """And in the order of bytes of another machine; `verify` passes them on."""
    (first, second), x = MIXED["pair"], MIXED["x"]
    for inputs in (MIXED, list(MIXED.values()), {**MIXED, "x": x.astype(">f4")}):
        np.testing.assert_array_equal(run(Mixed, inputs)[0], x + first + second)
        assert rq.verify(Mixed, inputs).is_equal


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([MIXED], r"a list with a dict in it; allowed: .*\['x', 'pair', .*Pass the dict itself"),
        ({**MIXED, 1: 2}, "input 1 is not a parameter"),
        ({**MIXED, "x": None}, "'x' is a NoneType, not an array of numbers. Pass a numpy array"),
        ({**MIXED, "x": [[1.0], [2.0, 3.0]]}, "'x' cannot be made a numpy array: .*inhomogeneous"),
        ({**MIXED, "x": Unreadable()}, "'x' cannot be made a numpy array: it has a gradient"),
        ({**MIXED, "x": iter([1])}, "'x' is a .*iterator, not an array"),
        ({**MIXED, "x": "abc"}, "'x' has dtype str"),
        ({**MIXED, "pair": floats(2, 2, 3)}, "'pair' must be a tuple of 2 values"),
        ({**MIXED, "pair": (floats(2, 3), None)}, "'pair.1' is a NoneType"),
        ({**MIXED, "sizes": 3}, r"'sizes' is 3; the model takes a shape: a tuple of integers"),
        ({**MIXED, "sizes": (1.5, 2)}, r"'sizes' is \(1.5, 2\); the model takes a shape"),
        ({**MIXED, "sizes": (-1, 2)}, r"'sizes' is \(-1, 2\); the model takes a shape"),
        ({**MIXED, "sizes": (2**63, 2)}, "'sizes' is .* the model takes a shape"),
        ({**MIXED, "sizes": (1,)}, r"'sizes' has shape \(1,\); allowed: \(n, m\)"),
        ({**MIXED, "number": 1.5}, "'number' is 1.5; the model takes a number of dtype int32"),
        ({**MIXED, "number": True}, "'number' is True; the model takes a number of dtype int32"),
        ({**MIXED, "number": 2**31}, "'number' is 2147483648; the model takes a number"),
        ({**MIXED, "number": [1, 2]}, r"'number' is \[1, 2\]; the model takes a number"),
        ({**MIXED, "number": "a"}, "'number' is 'a'; the model takes a number"),
    ],
)
@pytest.mark.parametrize("use", [run, rq.verify])
def test_inputs__what_does_not_fit_is_named(use, inputs, words):
    with pytest.raises(DataError, match=words):
        use(Mixed, inputs)


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


def test_run__a_function_keeps_the_values_that_it_reads():
    """Nothing else reads `y` after the function is made; its calls do."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            y: R.Tensor((2,), "float32") = R.add(x, R.const(1.0))

            @R.function
            def inner(z: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
                w: R.Tensor((2,), "float32") = R.multiply(z, y)
                return w

            once: R.Tensor((2,), "float32") = inner(x)
            twice: R.Tensor((2,), "float32") = inner(once)
            return twice

    x = np.float32([2, -3])
    (result,) = run(Module, x)
    np.testing.assert_array_equal(result, x * (x + 1) ** 2)
    np.testing.assert_array_equal(result, execute(relax.transform.LambdaLift()(Module), x)[0])
